"""Runs probes in a separate process. Reports each fact to the parent at once, as JSON lines on a pipe.

The parent thus knows all facts read before a crash. stderr belongs to the framework; the parent records it. The command
is `python FILE SPEC`. Probes are loaded by path, so that no file in their folders shadows a framework's module.

Nothing is imported from the current folder, where a json.py may be the user's. The inventory looks for files there that
would shadow a framework, and does not run them (`ProbeReport.beside`).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    import _signal  # type: ignore[import-not-found]

    # Python puts this file's folder first in sys.path (unless -P, PYTHONSAFEPATH): remove it.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    # End this process if the parent is killed. Set first, by a built-in module, before anything can hang.
    _signal.alarm(int(os.environ.get("MEMGUARD_PROBE", "").rpartition(".")[2] or 0))

import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import re
import signal
import time

TYPE_CHECKING = False  # replaces `typing`, which is not needed at run time
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

LIBRARY = re.compile(
    r"(^|/)(lib(cuda|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cutensor|cupti|nccl|nvrtc|nvJitLink|nvvm|nvshmem"
    r"|nvToolsExt|nvtx|nvidia-|c10|torch|tensorflow|rmm)|xla_cuda_plugin|cuda_plugin_extension|_pywrap_tensorflow_internal"
    r"|pycuda/_driver\.|jaxlib/_xla|cupy_backends/cuda/api/runtime\.)[^/]*$"
)
"""Matches the mapped files of CUDA and of the frameworks."""
_MOST = 3000
"""The longest error text, in characters: some quote whole tracebacks."""


class Stopped(Exception):
    """Ends a probe: a step failed and was reported, or the last requested step is done."""


class ProbeReport:
    """Sends the facts of one probe. `of`: the framework, if several share a process; `until`: the last step to run."""

    def __init__(self, fd: int, of: str = "", until: str | None = None) -> None:
        self._fd, self._of, self._until = fd, of, until
        self.modules: Mapping[str, str] = {}
        """The module to import for each framework, by framework name."""
        self.distributions: Mapping[str, str] = {}
        """Regular expressions for the start of a distribution's name, by framework name."""
        self.beside: str | None = None
        """The folder that comes first in a program's sys.path; None if there is none."""
        self._libraries: list[str] = []

    @staticmethod
    def cuda_version(number: int) -> str:
        """Format CUDA's version number: 13020 is 13.2."""
        return f"{number // 1000}.{number % 1000 // 10}"

    @staticmethod
    def cudnn_version(number: int) -> str:
        """Format cuDNN's version number: 91900 is 9.19.0; before version 9, 8902 is 8.9.2."""
        if number >= 90000:
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"

    def put(self, **facts: Any) -> None:
        """Report facts of the framework, by their names in `_tools.doctor.facts.FrameworkFacts`."""
        self._send(facts=facts)

    def framework(self, name: str, **facts: Any) -> None:
        """Report facts of another framework than the probe's."""
        self._send(facts=facts, of=name)

    @contextlib.contextmanager
    def stage(self, name: str, quiet: bool = False) -> Iterator[None]:
        """Run a step of the probe. An exception is reported and ends the probe. `quiet`: report only an exception."""
        started = time.monotonic()
        error: BaseException | None = None
        try:
            yield
        except Stopped:
            raise
        except BaseException as raised:  # some modules call sys.exit on import
            error = raised
        failure = {} if error is None else {"error": text(error), "kind": kind(error)}
        if error is not None or not quiet:
            self._send(stage=name, seconds=round(time.monotonic() - started, 3), **failure)
        self.mapped()
        if error is not None or name == self._until:
            raise Stopped

    def loaded(self) -> None:
        """Report the cuDNN that is loaded."""
        found = cudnn()
        if found is not None:
            self.put(cudnn_loaded=found)

    def done(self, name: str) -> None:
        """Report that the probe has finished, even if the framework raised."""
        self._send(done=name)

    def mapped(self) -> None:
        found = libraries()
        if found != self._libraries:
            self._libraries = found
            self._send(libraries=found)

    def _send(self, **line: Any) -> None:
        data = (json.dumps({"of": self._of, **line}, default=str) + "\n").encode()
        while data:
            data = data[os.write(self._fd, data) :]


def libraries(pid: int | str = "self") -> list[str]:
    """The mapped files of a process that match `LIBRARY`, links resolved; empty if /proc cannot be read."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            fields = [line.rstrip("\n").split(None, 5) for line in maps]
    except OSError:
        return []
    paths = {field[5].replace(" (deleted)", "") for field in fields if len(field) > 5}
    return sorted(path for path in paths if ".so" in path and LIBRARY.search(path))


def text(error: BaseException) -> str:
    """The text of an exception and of its cause, without the middle of a long one."""
    message = str(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and str(cause) not in message:
        message += f" (from {type(cause).__name__}: {cause})"
    return message if len(message) <= _MOST else f"{message[: _MOST // 2]} … {message[-_MOST // 2 :]}"


def kind(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def cudnn() -> str | None:
    """The version of the cuDNN that this process has mapped, as the library reports it."""
    for path in libraries():
        if re.search(r"/libcudnn\.so", path):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 4))
                library.cudnnGetVersion.restype = ctypes.c_size_t
                return ProbeReport.cudnn_version(library.cudnnGetVersion())
    return None


def load(name: str, path: str | None) -> Any:
    """Load the probe in that file, under a module name that no framework uses; None without a file."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"_memguard_probe_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imports(report: ProbeReport, name: str) -> None:
    """The default probe of a framework: import it."""
    with report.stage("import"):
        module = importlib.import_module(report.modules.get(name, name))
        report.put(path=module.__file__, version=getattr(module, "__version__", None))


def _beside(first: str | None) -> str | None:
    """The folder that Python puts first in sys.path: the program's, or else the current folder."""
    if getattr(sys.flags, "safe_path", False):  # -P, PYTHONSAFEPATH
        return None
    try:
        return first or os.getcwd()
    except OSError:  # the current folder was deleted
        return None


def main(spec: Mapping[str, Any]) -> None:
    """Run the probes of `spec`. Required: `fd` of the pipe, `probes` by name, `timeout`. Optional: `files` (the path of
    each probe), `modules` and `distributions` (as in `ProbeReport`), `until` (the last step of each probe), and `path`
    (the whole `sys.path`) or `first` (the folder of the program)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    # The parent requests a traceback by SIGUSR1: faulthandler's timer reads running frames and can crash.
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(spec["timeout"]) + 10)  # ends this process if the parent was killed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGALRM})
    sys.argv = ["-c"]
    if spec.get("path"):
        sys.path[:] = spec["path"]
    beside = None if spec.get("path") else _beside(spec.get("first"))
    probes = spec["probes"]
    for name in probes:
        report = ProbeReport(spec["fd"], name if len(probes) > 1 else "", spec.get("until", {}).get(name))
        report.modules, report.distributions = spec.get("modules", {}), spec.get("distributions", {})
        report.beside = beside
        module = load(name, spec.get("files", {}).get(name))
        with contextlib.suppress(Stopped), report.stage("probe", quiet=True):
            if module is None:
                imports(report, name)
            else:
                module.probe(report)
        report.done(name)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
