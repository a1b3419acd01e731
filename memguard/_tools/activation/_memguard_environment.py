"""Applies the budget that MEMGUARD_CONFIG names, just before the first framework is imported.

MEMGUARD_WHEN_IDLE (`memguard run --when-idle`) is for notebooks: the process leaves its GPUs when it is idle. That is
watched from the first framework on too, and nothing happens in other programs.

If one of these variables is set, `memguard.pth` or `memguard.start` loads this file while Python starts and calls
`arm`, which puts a finder for each into `sys.meta_path`. Nothing of memguard is imported until one of `MODULES` is
imported or a function of memguard is called. So this file uses only the standard library, and repeats a few names of
`memguard._runtime.workers`.

If a budget cannot be applied, there is one message and the program runs without it: the variable reaches every Python
that is started with it, and most of these do not use a GPU. `memguard run` and `memguard.init` are stricter.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False  # as in `typing`, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

CONFIG, DISABLE, SIMULATE, CHILDREN = "MEMGUARD_CONFIG", "MEMGUARD_DISABLE", "MEMGUARD_SIMULATE", "MEMGUARD_CHILDREN"
WHEN_IDLE = "MEMGUARD_WHEN_IDLE"
MODULES = ("torch", "tensorflow", "cupy", "jax", "pycuda.driver", "numba.cuda")
"""The first import of one of these applies the budget. They are the rows' `hook`s (`spec.py`), written out
because nothing of memguard may be imported yet; a test compares them. Not `numba`, which most programs use for the CPU.
"""
POOLS = ("multiprocessing.process", "multiprocess.process", "billiard.process")
# Programs that may import a framework without computing with it, by the name of the program or its module.
_TOOLS = {
    "__pip-runner__", "_in_process", "compile_worker", "compileall", "conda", "easy_install", "ensurepip", "flit",
    "get-pip", "hatch", "mamba", "memguard", "pdm", "pip", "pipx", "poetry", "pyproject-build", "setup", "twine", "uv",
    "venv", "virtualenv",
}  # fmt: skip
_WORKER = (
    f"no budget is active in this process: it is a worker, and {CONFIG} applies to the program that starts workers",
    f"call memguard.init in the function that the worker runs, or set {CHILDREN}=1 for a whole budget in each",
)

why: tuple[str, ...] | None = None
"""Why no budget is active although this file should apply one, and what to do: for `memguard.NotActive`."""
_waiting: dict[str, _Finder] = {}
_undo: list[Callable[[], None]] = []
_busy = _thread.allocate_lock()  # while a thread applies the budget, which is `_applier`
_applier: int | None = None
_PATIENCE, _IN_AN_IMPORT = 60.0, 5.0
"""Seconds to wait for that thread. It may itself wait for an import that this thread has begun."""


def arm() -> None:
    """Wait for the first framework. Makes the file's name absolute, for children that start in another folder.

    It does so even if nothing is applied here: a child may start without MEMGUARD_DISABLE, and none inherits
    MEMGUARD_RUN.
    """
    if os.environ.get(WHEN_IDLE) and not _is_set(DISABLE):
        _waiting["idle"] = idle = _Finder(watch)
        sys.meta_path = [idle, *sys.meta_path]
    config = os.environ.get(CONFIG, "")
    if not config:
        return
    try:  # noqa: SIM105 (contextlib is one import more)
        os.environ[CONFIG] = os.path.abspath(os.path.expanduser(config))
    except OSError:  # the current folder was deleted
        pass
    # `memguard run` has its own budget, which is applied next.
    if _is_set(DISABLE) or "MEMGUARD_RUN" in os.environ:
        return
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)
    _wait(_Finder())


def _forked() -> None:
    global _busy, _applier
    _busy, _applier = _thread.allocate_lock(), None  # another thread of the parent may have had it


def disarm() -> None:
    """Stop waiting: the program has applied its own budget, or has ended it."""
    global why
    if _applier is not None:
        return
    why = None
    _leave()
    _waiting.pop("finder", None)
    while _undo:
        _undo[-1]()
        del _undo[-1]


def activate() -> None:
    """Apply the budget now, if that is still to be done. Failure is logged on stderr. Then `watch`."""
    _activate_once()
    watch()


def _activate_once() -> None:
    """`activate`, without the watch.

    Of two threads one does, and the other waits for it.
    """
    global _applier
    if _is_fork_server():  # it may preload a framework; its workers decide for themselves
        return
    me = _thread.get_ident()
    if not _busy.acquire(False):
        if _applier != me and _busy.acquire(True, _IN_AN_IMPORT if _importing() else _PATIENCE):
            _busy.release()
        return
    try:
        _applier = me
        finder = _waiting.get("finder")
        if finder is not None:
            _activate(finder)
    finally:
        _applier = None
        _busy.release()


def _activate(finder: _Finder) -> None:
    _leave()
    _waiting.pop("finder", None)
    if _is_set(DISABLE) or _is_tool(getattr(sys, "argv", ())):
        return
    try:
        _apply(os.environ.get(CONFIG, ""), _names())
    except Exception as error:
        _fail(error)
    except BaseException:  # Ctrl-C: this import fails, and the next one must be capped too
        _wait(finder)
        raise


def watch() -> None:
    """In a notebook's kernel, and in IPython: leave the GPUs when nothing is to be done. Quietly not elsewhere."""
    finder = _waiting.pop("idle", None)
    if finder is None:
        return
    _leave(finder)
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if _is_tool(getattr(sys, "argv", ())) or _is_worker() or not callable(get) or get() is None:
        return
    try:
        from memguard._node.suspend.triggers import when_idle

        when_idle.of_environment(os.environ.get(WHEN_IDLE, ""))
    except Exception as error:
        _write(f"memguard: this process is not watched for idleness: {error}")


def _importing() -> bool:
    """Whether this thread is within an import, for which another thread may be waiting."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _apply(config: str, names: list[str] | None) -> None:
    global why
    if not config:
        return
    if _is_worker() and not _is_set(CHILDREN):
        why = _WORKER
        return
    try:
        from memguard import api
    except ModuleNotFoundError as error:
        if error.name == "memguard":  # as in the isolated environment in which pip builds a package
            return
        raise
    from memguard._frameworks import import_hook
    from memguard._runtime.runtime import this
    from memguard._tools.activation import _memguard_child as child
    from memguard.errors import AlreadyActive

    hide = child.show_warnings()
    try:
        this.from_environment = api.init(config, simulate=names)
    except BaseException as error:
        hide()
        if isinstance(error, AlreadyActive):  # another thread was faster
            return
        raise
    _undo.append(hide)
    if names is not None:
        import_hook.warned = True
        child.write(f"memguard: simulated GPUs ({', '.join(names)}): nothing limits a real one")


def _names() -> list[str] | None:
    return [name.strip() for name in os.environ.get(SIMULATE, "").split(",") if name.strip()] or None


def _fail(error: Exception) -> None:
    global why
    try:
        text = str(error) if hasattr(error, "exit_code") else f"{type(error).__name__}: {error}"
    except Exception:  # code of its own
        text = "an error without a text"
    _write(
        f"memguard: NO budget is active: that of {CONFIG} could not be applied, and nothing caps this program\n{text}"
    )
    why = (f"no budget is active in this process: that of {CONFIG} could not be applied\n{text}",)


def _write(text: str) -> None:
    """As `_memguard_child.write`, from the file beside this one: `memguard` may be another project's package."""
    try:
        from importlib import util

        file = os.path.join(os.path.dirname(__file__), "_memguard_child.py")
        spec: Any = util.spec_from_file_location("_memguard_child", file)
        child = util.module_from_spec(spec)
        spec.loader.exec_module(child)
        child.write(text)
    except Exception:  # removed meanwhile
        return


def _wait(finder: _Finder) -> None:
    _waiting["finder"] = finder
    sys.meta_path = [finder, *sys.meta_path]


def _leave(finder: _Finder | None = None) -> None:
    """Take the finder of the budget away, or this one.

    As `memguard._frameworks.import_hook.leave`: another list, as other threads walk through this one.
    """
    idle = _waiting.get("idle")
    while True:
        now = sys.meta_path
        before = [*now]
        kept = [
            one
            for one in before
            if not isinstance(one, _Finder) or (one is idle if finder is None else one is not finder)
        ]
        if len(kept) == len(before):
            return
        if sys.meta_path is now and now == before:
            sys.meta_path = kept
            return


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _is_tool(argv: Sequence[str]) -> bool:
    """Whether the program is pip, venv or the like: `python -m pip`, `bin/pip3.12`, `python setup.py`."""
    folder, name = os.path.split(argv[0] if argv else "")
    if name == "__main__.py":
        name = os.path.basename(folder)
    elif name.endswith(".py") and name not in ("setup.py", "_in_process.py", "__pip-runner__.py", "get-pip.py"):
        return False
    return name.removesuffix(".py").removesuffix(".exe").rstrip("0123456789.") in _TOOLS


def _is_worker() -> bool:
    for name in POOLS:
        module = sys.modules.get(name)
        current, parent = getattr(module, "current_process", None), getattr(module, "parent_process", None)
        if callable(current) and getattr(current(), "_inheriting", False):
            return True
        if callable(parent) and parent() is not None:
            return True
    return False


def _is_fork_server() -> bool:
    return any("multiprocessing.forkserver" in word for word in sys.orig_argv) and not _is_worker()


class _Finder:
    """Finds what the other finders find, and makes the loader call `act` before it creates the module."""

    def __init__(self, act: Callable[[], None] = activate) -> None:
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = _find(fullname, path, target) if fullname in MODULES else None
        if spec is not None and hasattr(spec.loader, "create_module"):
            spec.loader = _Loader(spec.loader, path, self._act)  # type: ignore[assignment]
        return spec


class _Loader:
    """Calls `act` when the module is created: `importlib.util.find_spec("torch")` alone must not."""

    def __init__(self, inner: Any, path: Sequence[str] | None, act: Callable[[], None]) -> None:
        self._inner, self._path, self._act = inner, path, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self._inner
        self._act()
        again = _find(spec.name, self._path)  # the budget has installed import hooks
        if again is not None and again.loader is not None and not isinstance(again.loader, _Loader):
            spec.loader = again.loader
        module: ModuleType | None = spec.loader.create_module(spec)
        return module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _find(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if not isinstance(finder, _Finder) and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None
