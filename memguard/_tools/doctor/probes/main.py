"""Runs probes in a process of their own and reports to the parent: JSON lines on a pipe, one at a time.

So what was read before a crash is known. stderr is left to the framework, and the parent keeps it. Started as
`python FILE SPEC`; probes are loaded by their path, so that no file beside this one or them is found in place of a
framework's.

Nothing of the current folder is imported: a json.py there is somebody's file. What a program in that folder would find
instead of a framework is looked for, and not run (`ProbeReport.beside`).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    import _signal  # type: ignore[import-not-found]

    # Python puts this folder first, unless it was told not to (-P, PYTHONSAFEPATH): its files are no modules to find.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    # Ends a process whose parent was killed. By a built-in module, before anything can hang.
    _signal.alarm(int(os.environ.get("MEMGUARD_PROBE", "").rpartition(".")[2] or 0))

import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import re
import signal
import time

TYPE_CHECKING = False  # as in `typing`, which is not needed at run time
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

LIBRARY = re.compile(
    r"(^|/)(lib(cuda|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cutensor|cupti|nccl|nvrtc|nvJitLink|nvvm|nvshmem"
    r"|nvToolsExt|nvtx|nvidia-|c10|torch|tensorflow|rmm)|xla_cuda_plugin|cuda_plugin_extension|_pywrap_tensorflow_internal"
    r"|pycuda/_driver\.|jaxlib/_xla|cupy_backends/cuda/api/runtime\.)[^/]*$"
)
"""Files of CUDA and the frameworks' own libraries, among everything that a process has mapped."""
_MOST = 3000
"""Characters kept of an error's text: some quote whole tracebacks."""


class Stopped(Exception):
    """A step failed, which is reported already, or was the last one wanted."""


class ProbeReport:
    """Sends what one probe finds. `of`: the framework, if several share a process; `until`: the last step to run."""

    def __init__(self, fd: int, of: str = "", until: str | None = None) -> None:
        self._fd, self._of, self._until = fd, of, until
        self.modules: Mapping[str, str] = {}
        """What is imported to have a framework, by its name."""
        self.distributions: Mapping[str, str] = {}
        """How the names of the distributions begin that bring a framework, by its name: regular expressions."""
        self.beside: str | None = None
        """The folder whose modules a program finds before all others; None if it finds none there."""
        self._libraries: list[str] = []

    @staticmethod
    def cuda_version(number: int) -> str:
        """CUDA's number as it is written: 13020 is 13.2."""
        return f"{number // 1000}.{number % 1000 // 10}"

    @staticmethod
    def cudnn_version(number: int) -> str:
        """cuDNN's number as it is written: 91900 is 9.19.0, and before version 9 8902 was 8.9.2."""
        if number >= 90000:
            return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"

    def put(self, **facts: Any) -> None:
        """Facts of the framework, by their names in `_tools.doctor.facts.FrameworkFacts`."""
        self._send(facts=facts)

    def framework(self, name: str, **facts: Any) -> None:
        """Facts of another framework than the probe's."""
        self._send(facts=facts, of=name)

    @contextlib.contextmanager
    def stage(self, name: str, quiet: bool = False) -> Iterator[None]:
        """A step of the probe. An error is reported and ends the probe. `quiet`: report nothing but an error."""
        started = time.monotonic()
        error: BaseException | None = None
        try:
            yield
        except Stopped:
            raise
        except BaseException as raised:  # some call sys.exit on import
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
        """The probe has finished, also if its framework raised."""
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
    """The files matching `LIBRARY` that a process has mapped, links resolved; empty if they cannot be read."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            fields = [line.rstrip("\n").split(None, 5) for line in maps]
    except OSError:
        return []
    paths = {field[5].replace(" (deleted)", "") for field in fields if len(field) > 5}
    return sorted(path for path in paths if ".so" in path and LIBRARY.search(path))


def text(error: BaseException) -> str:
    """The text of an error and of its cause; the middle of a long one is left out."""
    message = str(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and str(cause) not in message:
        message += f" (from {type(cause).__name__}: {cause})"
    return message if len(message) <= _MOST else f"{message[: _MOST // 2]} … {message[-_MOST // 2 :]}"


def kind(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def cudnn() -> str | None:
    """The version of the cuDNN that this process has mapped, from the library itself."""
    for path in libraries():
        if re.search(r"/libcudnn\.so", path):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 4))
                library.cudnnGetVersion.restype = ctypes.c_size_t
                return ProbeReport.cudnn_version(library.cudnnGetVersion())
    return None


def load(name: str, path: str | None) -> Any:
    """The probe in that file, loaded under a name that no framework has; None without a file."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"_memguard_probe_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imports(report: ProbeReport, name: str) -> None:
    """The probe of a framework that has none of its own: whether it can be imported."""
    with report.stage("import"):
        module = importlib.import_module(report.modules.get(name, name))
        report.put(path=module.__file__, version=getattr(module, "__version__", None))


def _beside(first: str | None) -> str | None:
    """The folder that Python puts first: the program's, else the current one."""
    if getattr(sys.flags, "safe_path", False):  # -P, PYTHONSAFEPATH
        return None
    try:
        return first or os.getcwd()
    except OSError:  # it was deleted
        return None


def main(spec: Mapping[str, Any]) -> None:
    """Run the probes of `spec`: `fd` of the pipe, `probes` by name, `timeout`; optional are `files`, the path of each
    probe, `modules` and `distributions`, what is imported to have a framework and what brings it, `until`, the last
    step of each probe, and `path`, the whole `sys.path`, or `first`, the folder of the program."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    # The parent asks where it hangs. Not by faulthandler's timer, which reads running frames and crashes.
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(spec["timeout"]) + 10)  # in case the parent was killed
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
