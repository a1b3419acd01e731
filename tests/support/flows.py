"""What users see: transcripts in `tests/golden`, which `tests/unit/test_golden.py` runs and compares.

    python tests/support/flows.py NAME      prints tests/golden/NAME.txt as it would be written now
    python tests/support/flows.py --trace   counts the calls within memguard for five flows

A transcript has statements (`>>> `, continued by `... `) and command lines (`$ memguard `), each followed by what it
prints, the error that it raises, and its log lines. It runs in a process of its own and an empty folder, on simulated
GPUs or over stubs of NVML and libcuda. Of the stubs' functions gcc instruments the entries, which `calls` shows. What
differs from run to run is replaced: see `VOLATILE`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memguard

TESTS = Path(__file__).resolve().parents[1]
ROOT, GOLDEN = TESTS.parent, TESTS / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.txt"))
GIB, MIB = 1 << 30, 1 << 20
SIX = ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba")
ALL_SIX: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "40GiB"},
    "frameworks": {name: {"share": "15%"} for name in SIX},
}
ELASTIC: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "40GiB"},
    "frameworks": {"torch": {"min": "10GiB", "max": "30GiB"}, "cupy": {"min": "4GiB", "max": "30GiB"}},
}
RECORDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *f, void *site) {(void)f; (void)site;}
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *f, void *site) {
    Dl_info found;
    char line[96];
    const char *path = getenv("DRIVER_CALLS"), *of = getenv("DRIVER_CALLS_OF");
    (void)site;
    if (!path || !dladdr(f, &found) || found.dli_saddr != f || !found.dli_sname) return;
    if (strncmp(found.dli_sname, "cu", 2) && strncmp(found.dli_sname, "nvml", 4)) return;
    strcpy(line, of && atoi(of) != getpid() ? "child: " : "");
    strncat(line, found.dli_sname, 80);
    strcat(line, "\\n");
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file >= 0) { if (write(file, line, strlen(line)) < 0) {} close(file); }
}
"""
"""Writes the name of each exported function of a stub as it is entered."""


VOLATILE: tuple[tuple[str, Any], ...] = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)?", "<time>"),
    (r"\b\d\d:\d\d:\d\d\b|(?<=since )\d\d:\d\d\b", "<clock>"),
    (r"\b0x[0-9a-f]{6,}", "<address>"),
    (r'("run": ?)"[0-9a-f]{8}"', r'\1"<run>"'),
    (r'("(?:t|time|since|recorded|began|ended|created|asked|start|last_refused)": ?)\d+\.?\d*', r"\1<t>"),
    (r'("seconds": ?)\d+(\.\d+)?(e-\d+)?', r"\1<s>"),
    (r'("user": ?)"[^"]*"', r'\1"<user>"'),
    (r"\b\d+(\.\d+)? (ms|s)\b", "<seconds>"),
    (r"^(seconds\n)[\d.e-]+$", r"\1<s>"),
    (r"(host memory grew by) [\d.]+(?: \w+|…)", r"\1 <size>"),
    (r"\bmemguard\._[\w.]+\.(\w+Error|\w+OutOfMemory)\b", r"memguard.….\1"),
    (r"\b(start|host|since|seconds|time)=\d+(?:\.\d+)?(?:e-\d+)?|(parts)=\{[^}]*\}", r"\1\2=<figure>"),
    (r'^  File ".*\n(?:    .*\n)*', ""),  # of a traceback
    (
        r"^((?! *[\"{]).*(?:<holder>|COMMAND|PID <pid>).*)$",
        lambda found: re.sub("  +", "  ", found[1]),
    ),  # columns as wide as a PID
    (r"(<holder>  )\w+", r"\1<user>"),
    # Said only if the machine has some process that CUDA would have to be asked about.
    (r'^(?:note: | *")the driver cannot be asked.*\n', ""),
    (r'("notes": )\[\s*\]', r"\1[]"),
    (r"[ \t]+$", ""),
)
"""What differs from run to run, and what stands in its place."""


def normalised(text: str) -> str:
    """Without paths, PIDs, times and versions."""
    named = {
        str(Path.cwd()): "<folder>", str(ROOT): "<root>", sys.executable: "<python>", memguard.__version__: "<version>"
    }  # fmt: skip
    for found, name in named.items():
        text = text.replace(found, name)
    for number, name in ((str(os.getpid()), "<pid>"), (os.environ.get("HOLDER"), "<holder>")):
        text = re.sub(rf"\b{number}\b", name, text) if number else text
    for pattern, name in VOLATILE:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


# what the statements of transcripts use, beside the constants above


class Clock:
    """`time.time`, which stands until it is moved; and the monitor's clock, which takes a sample when it is told to."""

    def __init__(self) -> None:
        self.now = 1_763_737_200.0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        vars(time)["time"] = self.time

    def time(self) -> float:
        return self.now

    def cpu(self) -> float:
        return 0.0

    def wait(self, stop: Any, seconds: float) -> bool:
        self._done.release()
        while not stop.is_set() and not self._go.acquire(timeout=0.02):
            pass
        return bool(stop.is_set())

    def first(self) -> None:
        """Wait for the sample with which a monitor begins."""
        assert self._done.acquire(timeout=30)

    def tick(self, seconds: float = 0.5) -> None:
        """Later, the monitor takes one sample."""
        self.now = round(self.now + seconds, 3)
        self._go.release()
        self.first()


def monitored() -> Any:
    """Monitors that start from now on are moved by this clock."""
    from memguard._runtime import sampler

    clock = Clock()
    vars(sampler)["SystemClock"] = lambda: clock
    return clock


def init(budget: Any = ALL_SIX, *gpus: str, **more: Any) -> Any:
    """A budget on simulated GPUs, in place of the one before."""
    memguard.shutdown()
    return memguard.init(budget, simulate=list(gpus) or "h200", **more)


def everything(value: Any) -> None:
    """A value as text, in a notebook and as data."""
    print(value)
    print("repr:", repr(value))
    if hasattr(value, "_repr_html_"):
        print("notebook:", value._repr_html_())
    if hasattr(value, "as_dict"):
        print("as_dict:", json.dumps(value.as_dict(), indent=1, default=str))


def tried(call: Callable[[], Any], shown: bool = True) -> None:
    """Print what the call returns, or the error that it raises and its notes."""
    try:
        found = call()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            print(f"[note] {note}")
    else:
        if shown:
            print(found)


def refused(guard: Any, name: Any, size: int) -> None:
    """A request that a simulated framework refuses, in a workload, which reports its error."""
    with memguard.workload("step", framework=name):
        guard.frameworks[name].allocate(size)


def raising(error: BaseException) -> None:
    """An error of another library, in a workload."""
    with memguard.workload("step", framework="torch"):
        raise error


def command(*arguments: str) -> None:
    """`memguard` with these arguments, in this process."""
    from click.testing import CliRunner

    from memguard.cli import main

    found = CliRunner().invoke(main, list(arguments), prog_name="memguard")
    print(f"{found.output.rstrip()}\n[exit code {found.exit_code}]".lstrip("\n"))


def commands(*lines: str) -> None:
    """Several of them, each below its line."""
    for line in lines:
        print(f"--- memguard {line}")
        command(*shlex.split(line))


def program(*arguments: str, **env: str) -> None:
    """A Python in a process of its own."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **env})
    print(f"{done.stdout}{done.stderr}[exit code {done.returncode}]")


def visible(html: str) -> str:
    """The text of a page, a line for each element."""
    body = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", html)
    lines = (line.strip() for line in re.sub(r"(?s)<[^>]+>", "\n", body).splitlines())
    return "\n".join(line for line in lines if line)


def recorded(path: str, later: float = 0.0) -> str:
    """Write a timeline with each kind of line: samples, pressure, refusals, a leak, workloads, a suspension."""
    clock = monitored()
    clock.now += later
    frameworks = {**ELASTIC["frameworks"], "jax": {"limit": "4GiB"}}
    guard = init({**ELASTIC, "frameworks": frameworks, "monitor": {"timeline": path}, "on_pressure": ["trim"]})
    clock.first()
    torch, cupy, jax = (guard.frameworks[name] for name in ("torch", "cupy", "jax"))
    kept = [torch.allocate(512 * MIB) for _ in range(4)]
    for _ in range(22):
        with contextlib.suppress(Exception):  # the last ones are refused
            jax.allocate(180 * MIB)
        clock.tick()
    memguard.checkpoint()
    torch.free(torch.allocate(19 * GIB))
    clock.tick()
    cupy.allocate(19 * GIB)
    clock.tick()
    for name in ("jax", "torch", "torch"):
        with contextlib.suppress(Exception):
            refused(guard, name, 60 * GIB)
        clock.tick()
    torch.free(kept.pop())
    for turn in range(6):
        with memguard.workload("epoch", framework="torch"):
            clock.now += 1
            torch.allocate((turn + 1) * 64 * MIB)
        clock.tick()
    for _ in range(8):
        guard.host.take(guard.host.devices()[0], 512 * MIB)
        clock.tick(10.0)
    guard.host.occupy(guard.host.devices()[0], 4194999, 90 * GIB)
    clock.tick()
    with memguard.suspended():
        clock.now += 5
    memguard.trim()
    clock.tick()
    memguard.shutdown()
    (written,) = Path().glob(f"{Path(path).stem}-*.jsonl")
    return written.rename(path).read_text().rstrip()


def wrong_budgets() -> Iterator[str]:
    """Those of the tests of the budget file."""
    sys.path.insert(0, str(TESTS / "unit"))
    import test_config_errors

    seen = set()
    for test in vars(test_config_errors).values():
        for mark in getattr(test, "pytestmark", ()):
            for case in mark.args[1] if mark.name == "parametrize" else ():
                text = case[0] if isinstance(case, tuple) else case
                if isinstance(text, str) and text.startswith(("version", "frameworks")) and text not in seen:
                    seen.add(text)
                    yield text


def cells(*lines: str) -> None:
    """Cells of a notebook, and what each shows."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    with capture_output():
        shell = InteractiveShell.instance()
        shell.run_line_magic("colors", "NoColor")
        shell.run_line_magic("xmode", "Minimal")
    for line in lines:
        with capture_output() as shown:
            shell.run_cell(line)
        print(f"--- {line}\n{shown.stdout}{shown.stderr}".rstrip("\n"))
        for out in shown.outputs:
            for kind, text in sorted(out.data.items()):
                print(f"[{kind}] {text}")


@contextlib.contextmanager
def holder(code: str) -> Iterator[str]:
    """A process that runs the code, says `ready` and waits. NVML lists it with 1 GiB."""
    program = f"import sys, memguard\n{code}\nprint('ready', flush=True)\nsys.stdin.readline()"
    child = subprocess.Popen(["python", "-c", program], executable=sys.executable, stdin=-1, stdout=-1, text=True)
    with child:
        assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "ready\n"
        os.environ["HOLDER"] = str(child.pid)
        nvml(f"{child.pid}:{GIB}")
        yield str(child.pid)
        child.stdin.close()


def nvml(*processes: str) -> None:
    """The processes that NVML lists from now on."""
    from six_live import scenario

    gpu = {**scenario(os.environ["CUDA_STUB_UUIDS"]), "processes0": ",".join((*processes, f"4194999:{GIB}"))}
    Path(os.environ["NVML_STUB"]).write_text("".join(f"{key}={value}\n" for key, value in gpu.items()))


def calls(title: str, call: Callable[[], Any]) -> Any:
    """The calls of NVML and libcuda that it makes, in order; repetitions as one line."""
    log = Path(os.environ["DRIVER_CALLS"])
    log.write_text("")
    os.environ["DRIVER_CALLS_OF"] = str(os.getpid())
    found = call()

    def repeated(found: re.Match[str]) -> str:
        return f"{' + '.join(found[1].split())} x{len(found[0]) // len(found[1])}\n"

    names = re.sub(r"((?:.+\n){1,8}?)\1+", repeated, log.read_text())
    print(f"--- {title}\n{names or 'none'}".rstrip())
    return found


STAND_INS = """
import os, sys
sys.path.insert(0, {folder!r})
import six_live, memguard
live = six_live.bring(os.environ["CUDA_STUB_UUIDS"])
try:
    exec({then!r})
except memguard.MemguardError as error:
    print(type(error).__name__, error, sep=": ")
"""


def with_stand_ins(then: str = "print(memguard.init(six_live.budget()))", **env: str) -> None:
    """The code in a process with stand-ins of all six frameworks, which are imported."""
    program("-c", STAND_INS.format(folder=str(TESTS / "faults"), then=then), **env)


# running transcripts


class Transcript:
    """Runs the statements and commands of a text, and writes it anew."""

    def __init__(self) -> None:
        self._log: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = self._note  # type: ignore[method-assign]
        logging.getLogger("memguard").addHandler(handler)
        logging.getLogger("memguard").setLevel(logging.INFO)
        self._names: dict[str, Any] = dict(globals())

    def _note(self, record: logging.LogRecord) -> None:
        self._log.append(f"log {record.levelname}: {record.getMessage()}")

    def run(self, text: str) -> str:
        parts = re.findall(r"(?m)^(?:>>> .*(?:\n\.\.\. ?.*)*|\$ memguard .*)", text)
        preamble = text[: text.index(parts[0])]
        return preamble + "\n".join(f"{part}\n{normalised(self._output(part))}" for part in parts)

    def _output(self, part: str) -> str:
        self._log.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            if part.startswith("$ "):
                command(*shlex.split(part)[2:])
            else:
                source = "\n".join(line[4:] for line in part.splitlines()) + "\n"
                sys.displayhook = lambda value: None if value is None else print(value)
                tried(functools.partial(exec, compile(source, "<transcript>", "single"), self._names), shown=False)
        lines = [*out.getvalue().strip("\n").splitlines(), *"\n".join(self._log).splitlines()]
        return "".join(re.sub(r"^(>>> |\$ |\.\.\. )", r"| \1", line) + "\n" for line in lines).lstrip("\n")


def build(folder: Path) -> Path:
    """The stubs of NVML and libcuda, which write down their calls."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recorder.c").write_text(RECORDER)
    for name, source in (("libnvidia-ml.so.1", "nvml_stub.c"), ("libcuda.so.1", "cuda_stub.c")):
        recorder = str(folder / f"{source}.recorder.o")
        subprocess.run(["gcc", "-fPIC", "-c", "-o", recorder, str(folder / "recorder.c")], check=True)
        flags = ["-shared", "-fPIC", "-finstrument-functions", "-Wl,-Bsymbolic", "-o", str(folder / name)]
        subprocess.run(["gcc", *flags, str(TESTS / "faults" / source), recorder, "-ldl"], check=True)
    return folder


def produce(name: str, folder: Path, stubs: Path) -> str:
    """`tests/golden/NAME.txt` as it would be written now, run in a process of its own in `folder`."""
    uuid = "GPU-11111111-1111-1111-1111-111111111111"
    env = {
        "PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(folder), "MEMGUARD_LEASES": str(folder / "leases"), "TZ": "UTC", "COLUMNS": "110",
        "NO_COLOR": "1", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "LD_LIBRARY_PATH": str(stubs),
        "NVML_STUB": str(folder / "scenario"), "CUDA_STUB_UUIDS": uuid, "DRIVER_CALLS": str(folder / "driver-calls"),
        "PYTHONPATH": str(Path(memguard.__file__).parents[1]),
    }  # fmt: skip
    arguments = [sys.executable, __file__, "--here", name]
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


def trace() -> str:
    """Calls within memguard, and the modules that they enter, for five flows on a simulated GPU, in a warm process.

    A call is an entry of any Python code below memguard/, on any thread, as `sys.setprofile` sees it: functions, and
    under Python 3.11 comprehensions too; the simulated frameworks' own count.
    """
    within = str(Path(memguard.__file__).parent) + os.sep
    entered: list[str] = []
    rows: dict[str, tuple[int, int]] = {}

    def seen(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(within):
            entered.append(frame.f_code.co_filename)

    def counted(name: str, call: Callable[[], Any]) -> Any:
        entered.clear()
        sys.setprofile(seen)
        try:
            return call()
        finally:
            sys.setprofile(None)
            rows[name] = len(entered), len(set(entered))

    threading.setprofile(seen)  # the monitor's thread too
    clock = monitored()
    for _ in range(2):  # the first turn imports
        guard = counted("init", lambda: memguard.init(ALL_SIX, simulate="h200"))
        for name in SIX:
            guard.frameworks[name].allocate(256 * MIB)
        for _ in range(3):
            counted("ledger()", memguard.ledger)
        try:
            guard.frameworks["torch"].allocate(7 * GIB)
        except Exception as error:
            with contextlib.redirect_stderr(io.StringIO()):
                counted("an OOM's report", functools.partial(sys.excepthook, type(error), error, None))
        guard = init({**ELASTIC, "monitor": {}})
        clock.first()
        guard.frameworks["torch"].free(guard.frameworks["torch"].allocate(24 * GIB))
        counted("a reclaim", functools.partial(guard.frameworks["cupy"].allocate, 26 * GIB))
        for _ in range(3):
            counted("a tick", clock.tick)
        memguard.shutdown()
    lines = [f"{name:<18}{calls:>8,}{modules:>9}" for name, (calls, modules) in rows.items()]
    return "\n".join([f"{'flow':<18}{'calls':>8}{'modules':>9}", *lines])


def main(arguments: list[str]) -> None:
    sys.path[0] = str(TESTS / "faults")  # not this folder, whose modules have names of the standard library's
    if arguments == ["--trace"]:
        print(trace())
    elif arguments[0] == "--here":
        nvml()
        for path in (ROOT / "configs").glob("*.yaml"):
            shutil.copy(path, ".")
        print(Transcript().run((GOLDEN / f"{arguments[1]}.txt").read_text()), end="")
    else:
        with tempfile.TemporaryDirectory() as folder:
            print(produce(arguments[0], Path(folder), build(Path(folder) / "stubs")), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
