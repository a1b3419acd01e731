"""Imported by `site` in a Python that `memguard run --record` started, before the program. Runs the one that it hides.

Whatever fails here, the program goes on: nothing is capped, so nothing is lost but the recording. The file must parse
under Pythons that memguard does not support.
"""

import os
import sys

if __name__ == "sitecustomize" and sys.version_info >= (3, 11) and os.environ.get("MEMGUARD_RECORD"):
    try:
        import importlib.util

        _here = os.path.dirname(os.path.abspath(__file__))
        _package = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
        _spec = importlib.util.spec_from_file_location(
            "_memguard_child", os.path.join(_package, "_tools", "activation", "_memguard_child.py")
        )
        assert _spec is not None and _spec.loader is not None
        _child = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_child)
        # Only off this path: what the program starts, such as the ranks of torchrun, is recorded as well.
        sys.path = [entry for entry in sys.path if entry != _here]
        _child._run_shadowed()
        _child._memguard(_package)
        importlib.import_module("memguard._tools.suggest.record").arm(os.environ["MEMGUARD_RECORD"])
    except Exception as error:
        if sys.stderr is not None:
            sys.stderr.write("memguard: nothing is recorded: %s: %s\n" % (type(error).__name__, error))
