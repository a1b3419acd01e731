"""What activates a budget while Python starts: for `memguard run` and for `MEMGUARD_CONFIG`.

`memguard run` puts this folder at the front of PYTHONPATH, so that `site` imports its `sitecustomize`. The wheel puts
`memguard.pth` at the top of `site-packages`, where Python reads it. From Python 3.15 on `memguard.start` beside it is
read in its place (PEP 829); it names a function of `_memguard_start`.

`_memguard_child`, `_memguard_environment` and `_memguard_start` keep their underscores although nothing else inside a
room has one. Python loads them as top-level modules, found through the `sys.path` of somebody else's program or put
into its `sys.modules`, where a plain name could hide a module of that program.
"""
