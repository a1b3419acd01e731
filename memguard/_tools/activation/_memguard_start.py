"""The entry point of `memguard.start` (PEP 829). Python 3.15 and later call it in place of the line of `memguard.pth`.

Installed at the top of `site-packages`: a module inside the package would import memguard in every Python.
"""

from __future__ import annotations

import os
import sys


def start() -> None:
    """Let MEMGUARD_CONFIG or MEMGUARD_WHEN_IDLE wait for the first framework, once. Never raises."""
    if "MEMGUARD_CONFIG" not in os.environ and "MEMGUARD_WHEN_IDLE" not in os.environ:
        return
    try:
        from importlib import util

        found = "_memguard_environment" not in sys.modules and util.find_spec("memguard")
        if not found:
            return
        here = os.path.join(os.path.dirname(__file__), "memguard")
        for folder in (*(found.submodule_search_locations or []), here):
            file = os.path.join(folder, "_tools", "activation", "_memguard_environment.py")
            spec = os.path.isfile(file) and util.spec_from_file_location("_memguard_environment", file)
            if spec and spec.loader is not None:
                module = sys.modules[spec.name] = util.module_from_spec(spec)
                spec.loader.exec_module(module)
                module.arm()
                return
    except Exception:  # a program that does not use memguard must start all the same
        return
