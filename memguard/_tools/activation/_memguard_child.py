"""Activates the budget of `memguard run` in this process, once, and hides it from child processes.

Runs inside `site`, before the program. Only the standard library is sure to be importable; memguard may not be.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

_NEEDED = {"pydantic": "pydantic", "PyYAML": "yaml", "nvidia-ml-py": "pynvml", "rich": "rich"}
"""What memguard needs while the program runs: distributions, and the module of each. Some are imported late."""

_WITHOUT_GPU = (
    "go on without a GPU: `memguard run --device h200` for a simulated one, MEMGUARD_DISABLE=1 without a budget"
)


def activate(folder: str) -> None:
    """Take `folder`, which holds this file, off the path; then apply the budget, or end the process."""
    budget = os.environ.pop("MEMGUARD_RUN", None)
    simulated = os.environ.pop("MEMGUARD_SIMULATE", None)
    _leave_path(folder)
    _run_shadowed()
    if budget is None:
        return
    try:
        memguard = _memguard(_package(folder))
        if "init" not in dir(memguard):  # which imports nothing
            _end(
                f"memguard: {sys.executable} imports another project's memguard: {memguard.__file__}\n"
                "    fix: uninstall that one; `memguard doctor --explain two-distributions` says more",
                1,
            )
        if lacking := [name for name, module in _NEEDED.items() if importlib.util.find_spec(module) is None]:
            _end_without(", ".join(lacking), folder)
        show_warnings()
        _apply(memguard.init, budget, simulated.split(",") if simulated else None)
    except KeyboardInterrupt:
        _end("", 130)
    except ModuleNotFoundError as error:
        _end_without(str(error.name), folder)
    except Exception as error:
        # memguard's errors are recognised by their attributes: their module may not be imported.
        if not hasattr(error, "exit_code"):
            _end(traceback.format_exc().rstrip(), 1)
        if getattr(error, "missing", False):  # the alternatives are for `memguard.init` in a program
            own: Any = error
            error = type(own)(own.advice.with_alternatives(_WITHOUT_GPU))
        _end(f"{error}" if hasattr(error, "problems") else f"memguard: {error}", error.exit_code)


def _package(folder: str) -> str:
    """The package `memguard` that has this `folder`, `_tools/activation`."""
    return os.path.dirname(os.path.dirname(folder))


def _end_without(lacking: str, folder: str) -> NoReturn:
    needed = _load("_memguard_distribution", _package(folder), "_base/distribution.py").requirement()
    _end(
        f"memguard: {sys.executable} has no {lacking}, which memguard needs\n"
        f"    fix: {sys.executable} -m pip install {needed}",
        1,
    )


def _apply(init: Callable[..., Any], budget: str, simulated: list[str] | None) -> None:
    """Call `init` with the budget. `memguard run` has said already that the GPUs are simulated."""
    if simulated is not None:
        from memguard._frameworks import import_hook
        from memguard._runtime.runtime import this

        this.simulated_by_default = simulated  # the program's own `init` means them too
        import_hook.warned = True
    init(budget, simulate=simulated)


def _leave_path(folder: str) -> None:
    sys.path = [entry for entry in sys.path if entry != folder]
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != folder]
    if entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_shadowed() -> None:
    """Run the sitecustomize of the environment, the system or the user, which ours hides."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        spec = importlib.util.find_spec("sitecustomize")
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            ours = sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
    except Exception as error:  # reported as `site` reports it
        sys.stderr.write(f"Error in sitecustomize; set PYTHONVERBOSE for traceback:\n{type(error).__name__}: {error}\n")
    finally:
        if ours is not None:
            sys.modules["sitecustomize"] = ours  # the import system expects it after our file has run


def _memguard(package: str) -> ModuleType:
    """The memguard of this Python, else the copy that was run. Adds nothing to the path."""
    try:
        return importlib.import_module("memguard")
    except ModuleNotFoundError as error:
        if error.name != "memguard":
            raise
    return _load("memguard", package, "__init__.py", submodule_search_locations=[package])


def _load(name: str, package: str, file: str, **more: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, os.path.join(package, file), **more)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Stderr(logging.Handler):
    """Shows memguard's warnings if the program sets up no logging of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        try:
            from memguard._base.text import visible
        except ImportError:  # the program's own memguard, or an older one
            return text
        return visible(text)

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            write(self.format(record))


def show_warnings() -> Callable[[], None]:
    """Show warnings on stderr until the returned function is called."""
    handler = _Stderr()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("memguard: %(message)s"))
    logging.getLogger("memguard").addHandler(handler)
    return lambda: logging.getLogger("memguard").removeHandler(handler)


def _end(text: str, code: int) -> NoReturn:
    if text:
        write(text)
    os._exit(code)


def write(text: str) -> None:
    """A line on stderr, whatever that is: a program must not fail, nor end otherwise, because of what is said here."""
    try:
        own: Any = sys.__stderr__
        stream: Any = sys.stderr  # None under pythonw, or if it was closed
        if stream is None:
            return
        line = f"{text}\n".encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
        if stream is own:
            stream.flush()
            os.write(stream.fileno(), line)  # what a full disk does not take must not stay in Python's buffer
        else:
            stream.write(line.decode(getattr(stream, "encoding", None) or "utf-8", "replace"))
            stream.flush()
    except Exception:  # full, closed, or without these methods
        return
