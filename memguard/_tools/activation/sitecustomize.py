"""Imported by `site` in a Python that `memguard run` started, before the program.

`site` reports an error in this file and continues. But the program must not run without its cap, so every failure in
here ends the process. The file must parse under Pythons that memguard does not support.
"""

import os
import sys

if sys.version_info < (3, 11):
    try:
        sys.stderr.write("memguard: Python 3.11 or newer is needed, and %s is older\n" % sys.executable)
        sys.stderr.flush()
    finally:
        os._exit(1)

try:
    import importlib

    importlib.import_module("_memguard_child").activate(os.path.dirname(os.path.abspath(__file__)))
except Exception:
    import traceback

    try:
        traceback.print_exc()
        sys.stderr.flush()
    finally:  # whatever stderr is
        os._exit(1)
