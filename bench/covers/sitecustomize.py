"""Record in the file that BENCH_COVERS names which modules of memguard and bench this process looks for.

Each name is written as it is looked for, so also a process that is killed leaves what it loaded."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def _record(name: str) -> None:
    try:
        file = os.open(os.environ["BENCH_COVERS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, (name + "\n").encode())
        finally:
            os.close(file)
    except (OSError, KeyError):  # the run is over, or the program took the variable away
        pass


class _Recorder:
    """A finder that finds nothing and sees every name first."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("memguard", "bench", "_memguard_child", "_memguard_environment"):
            _record(name)


def _scripts() -> None:
    """Files of the checkout that are run by their path."""
    for word in sys.orig_argv[1:]:
        if word.endswith(".py") and os.path.isfile(word):
            inside = os.path.relpath(os.path.realpath(word), _ROOT)
            if inside.startswith("memguard" + os.sep):
                _record(inside[:-3].replace(os.sep, "."))


def _shadowed() -> None:
    """Run the `sitecustomize` that this one hides."""
    import importlib.machinery
    import importlib.util

    paths = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("BENCH_COVERS"):
    sys.meta_path.insert(0, _Recorder)
    for _name in list(sys.modules):  # by another sitecustomize, before this one
        _Recorder.find_spec(_name)
    _scripts()
_shadowed()
