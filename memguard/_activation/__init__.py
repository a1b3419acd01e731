"""What activates a budget while Python starts: for `memguard run` and for `MEMGUARD_CONFIG`.

`memguard run` puts this folder at the front of PYTHONPATH, so that `site` imports its `sitecustomize`. The wheel puts
`memguard.pth` at the top of `site-packages`, where Python reads it.

`_memguard_child` and `_memguard_environment` keep their underscores although nothing else inside a room has one. Python
loads them as top-level modules, found through the `sys.path` of somebody else's program or put into its `sys.modules`,
where a plain name could hide a module of that program.
"""
