"""One script on a laptop, in CI and on a cluster: what `init` does without a GPU, and which variable wins."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from environments import environ, make

import memguard
from memguard._base.logs import is_heard
from memguard._base.types import Device
from memguard._devices import nvml, survey
from memguard._devices.real import RealHost
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import import_hook
from memguard._runtime import runtime, workers
from memguard._runtime.workers import IdleGuard
from memguard.errors import AlreadyActive, DeviceError, NotActive, PlanError

BUDGET = {"version": 1, "device": {"limit": "16GiB", "reserve": "2GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
MISSING = "NVML: no driver\n    fix: load it"


@pytest.fixture(autouse=True)
def nothing_stays_here(monkeypatch: pytest.MonkeyPatch, nothing_stays: None) -> Iterator[None]:
    for name in ("MEMGUARD_DISABLE", "MEMGUARD_SIMULATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(import_hook, "warned", False)
    yield
    memguard.shutdown()
    assert runtime.this.idle is None


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The real host has no GPU, or (`missing=False`) one that does not work."""
    missing = getattr(request, "param", True)

    class Bare(SimulatedHost):
        simulated = False

        def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
            raise DeviceError(MISSING, missing=missing)

    real = runtime.open_host
    monkeypatch.setattr(runtime, "open_host", lambda simulate: Bare() if simulate is None else real(simulate))


def uses_everything() -> None:
    """What a script does with a budget, in each of the two ways."""
    before = memguard.last_oom()
    with memguard.workload("step", framework="torch", needs="1GiB") as report:
        memguard.checkpoint()
    assert (report.before, report.after, report.peak, report.delta) == (None,) * 4
    memguard.require("torch", "1TiB")
    memguard.resize("torch", 1 << 40)
    assert memguard.trim() == memguard.trim("torch") == 0
    ledger = memguard.ledger()
    assert ledger.devices == () and ledger.notes and not ledger.simulated
    assert ledger.as_dict()["devices"] == [] and "nothing caps this program" in str(ledger)
    assert "nothing caps this program" in ledger._repr_html_()
    memguard.on_event(print).remove()
    assert memguard.last_oom() is before


def uses_the_guard(guard: Any) -> None:
    assert isinstance(guard, IdleGuard) and not guard.active and guard.frameworks == {} and guard.plan.devices == ()
    with guard.workload("step", framework="torch", needs="1GiB"):
        guard.require("torch", "1TiB")
    guard.resize("torch", 1)
    guard.start()
    guard.forked()
    assert guard.trim() == 0 and guard.stop() == [] and guard.sample().devices == ()
    assert "nothing caps this program" in str(guard) and guard.ledger().devices == ()
    assert repr(guard) == "<IdleGuard, not active: print it for the reason>"


def test_raise_is_the_default_and_has_one_traceback(no_gpu: None) -> None:
    for more in ({}, {"missing_gpu": "raise"}):
        with pytest.raises(DeviceError) as caught:
            memguard.init(BUDGET, **more)  # type: ignore[arg-type]
        assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
        text = str(caught.value)
        assert text.startswith(MISSING) and 'simulate="h200"' in text and 'missing_gpu="warn"' in text
        assert "MEMGUARD_DISABLE=1" in text and "MEMGUARD_SIMULATE=h200" in text
        with pytest.raises(NotActive):
            memguard.ledger()


@pytest.mark.parametrize("logged", [False, True], ids=["stderr", "log"])
def test_warn_says_it_once_and_the_script_runs_through(
    no_gpu: None, logged: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runtime, "is_heard", lambda: logged)
    guard = memguard.init(BUDGET, missing_gpu="warn")
    assert memguard.init(BUDGET, missing_gpu="warn") is guard
    said = "no budget is active, and nothing caps this program: NVML: no driver\n    fix: load it"
    assert capsys.readouterr().err == ("" if logged else f"memguard: {said}\n")
    assert [record.getMessage() for record in caplog.records] == ([said] if logged else [])
    uses_everything()
    uses_the_guard(guard)
    memguard.shutdown()
    with pytest.raises(NotActive):
        memguard.ledger()


def test_whether_a_log_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("memguard")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert not is_heard()
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, logging.StreamHandler()])
    assert is_heard()


def test_warn_does_not_hide_a_budget_that_is_wrong(no_gpu: None) -> None:
    with pytest.raises(memguard.ConfigError):
        memguard.init({"version": 1, "frameworks": {"torch": {"shre": "5%"}}}, missing_gpu="warn")


def test_simulate_stands_in_and_says_so_once(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    guard = memguard.init(BUDGET, missing_gpu="simulate")
    assert guard.active and memguard.ledger().simulated
    assert memguard.init(BUDGET, missing_gpu="simulate") is guard and memguard.init(BUDGET) is guard
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("memguard: a simulated h200 stands in for the missing GPU: nothing limits a real one")
    assert len(lines) == 2 and lines[1] == "    fix: load it"
    with pytest.raises(AlreadyActive):
        memguard.init({**BUDGET, "device": {"limit": "20GiB"}})


def test_simulate_with_a_budget_that_fits_no_simulated_card_has_one_traceback(no_gpu: None) -> None:
    with pytest.raises(PlanError) as caught:
        memguard.init({**BUDGET, "device": {"limit": "400GiB"}}, missing_gpu="simulate")
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


@pytest.mark.parametrize("no_gpu", [False], indirect=True)
@pytest.mark.parametrize("missing_gpu", ["raise", "warn", "simulate"])
def test_a_gpu_that_does_not_work_raises_always(no_gpu: None, missing_gpu: Any) -> None:
    with pytest.raises(DeviceError, match="no driver") as caught:
        memguard.init(BUDGET, missing_gpu=missing_gpu)
    assert "missing_gpu" not in str(caught.value)


@pytest.mark.parametrize("missing_gpu", ["", "ignore", "WARN", None, True, 3, ["warn"]])
def test_another_value_is_refused(missing_gpu: Any) -> None:
    for call in (memguard.init, lambda *a, **k: memguard.guard(*a, **k).__enter__()):
        with pytest.raises(ValueError, match="'raise', 'warn' or 'simulate'"):
            call(BUDGET, missing_gpu=missing_gpu)


@pytest.mark.parametrize("how", ["warn", "simulate", "disable"])
def test_guard_takes_it_too_and_leaves_nothing(no_gpu: None, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "disable":
        monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    with memguard.guard(BUDGET, missing_gpu="raise" if how == "disable" else how) as guard:
        assert guard.active is (how == "simulate")
        if how != "simulate":
            uses_everything()
            with memguard.guard(BUDGET, missing_gpu="warn"):
                uses_everything()
            uses_everything()
    monkeypatch.delenv("MEMGUARD_DISABLE", raising=False)
    with pytest.raises(NotActive):
        memguard.ledger()


def test_disable_reads_nothing_and_says_so_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    own = runtime.open_host

    def only_simulated(simulate: Any) -> Any:
        return own(simulate) if simulate else pytest.fail("asked for a GPU")

    monkeypatch.setattr(runtime, "open_host", only_simulated)
    caplog.set_level("INFO", "memguard")
    guard = memguard.init("no-such-file.yaml")
    uses_everything()
    uses_the_guard(guard)
    assert [record.levelname for record in caplog.records] == ["INFO"] and "MEMGUARD_DISABLE" in caplog.text
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MEMGUARD_DISABLE", "0")
    assert memguard.init(BUDGET, simulate="h200").active and memguard.ledger().simulated


@pytest.mark.parametrize("names", ["hh200", ["h200", "nothing"], "", 7])
def test_a_simulated_gpu_that_does_not_exist_is_no_missing_gpu(
    names: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing_gpu in ("raise", "warn", "simulate"):
        with pytest.raises(DeviceError) as caught:
            memguard.init(BUDGET, simulate=names, missing_gpu=missing_gpu)  # type: ignore[arg-type]
        assert " or: " not in str(caught.value) and not caught.value.missing
    monkeypatch.setenv("MEMGUARD_SIMULATE", "hh200")
    monkeypatch.setattr(import_hook, "warned", False)
    capsys.readouterr()
    with pytest.raises(DeviceError, match="MEMGUARD_SIMULATE: no simulated GPU 'hh200'"):
        memguard.init(BUDGET, missing_gpu="warn")
    assert capsys.readouterr() == ("", ""), "nothing is simulated"


def test_a_worker_that_imports_the_script_again_runs_through_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "reimporting", lambda modules: True)
    assert not isinstance(memguard.init(BUDGET), IdleGuard)
    with pytest.raises(NotActive):
        memguard.ledger()
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    uses_the_guard(memguard.init(BUDGET))
    uses_everything()


def test_a_forked_child_of_a_program_without_a_budget_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    memguard.init(BUDGET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a test runner has threads
        child = os.fork()
    if not child:
        try:
            uses_everything()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_many_threads_at_once_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")

    def script(_: int) -> None:
        with memguard.guard(BUDGET) as guard:
            uses_the_guard(guard)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(script, range(200)))


def test_the_idle_guard_has_the_budget_that_was_given(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    warned = memguard.init(BUDGET, missing_gpu="warn")
    assert warned.budget == memguard.Budget.from_mapping(BUDGET)
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    guard = memguard.init(BUDGET)
    other = {**BUDGET, "device": {"limit": "20GiB", "reserve": "2GiB"}}
    assert guard is not warned and memguard.init(BUDGET) is guard and guard.budget == warned.budget
    assert memguard.init(other).budget == memguard.Budget.from_mapping(other)
    with pytest.raises(memguard.ConfigError):
        print(memguard.init("absent.yaml").budget)
    with pytest.raises(AttributeError, match="MEMGUARD_DISABLE"):
        print(guard.host)


@pytest.mark.parametrize("missing_gpu", ["warn", "disable"])
def test_a_budget_that_is_active_stays_and_that_is_said(
    missing_gpu: Any, monkeypatch: pytest.MonkeyPatch, no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "memguard")
    guard = memguard.init(BUDGET, simulate="h200")
    if missing_gpu == "disable":
        monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    more = {} if missing_gpu == "disable" else {"missing_gpu": missing_gpu}
    assert memguard.init(BUDGET, replace=True, **more) is guard and guard.active  # type: ignore[arg-type]
    assert "the budget that was active stays, and this one is not applied" in caplog.text


def test_what_memguard_run_simulates_is_not_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    monkeypatch.setattr(runtime.this, "simulated_by_default", ["t4"])
    assert memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}}).plan.devices[0].device.simulated


def test_a_trace_is_not_recorded_while_nothing_is_applied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    memguard.init(BUDGET)
    with memguard.record_trace(tmp_path / "trace.jsonl"):
        pass
    assert not (tmp_path / "trace.jsonl").exists()


# what counts as missing

ERRORS = (
    "LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch", "NoPermission", "GpuIsLost", "ResetRequired",
    "Unknown", "NotSupported", "Uninitialized", "FunctionNotFound", "Timeout", "IrqIssue", "OperatingSystem",
    "InUse", "Memory", "NoData", "CorruptedInforom", "InsufficientResources",
)  # fmt: skip
NAMES = (*(f"NVMLError_{name}" for name in ERRORS), "NVMLLibraryMismatchError")


@pytest.mark.parametrize(("control", "module", "pci"), list(itertools.product([False, True], repeat=3)))
def test_what_counts_as_no_gpu(control: bool, module: bool, pci: bool) -> None:
    found = {name for name in NAMES if nvml.no_gpu(name, control=control, module=module, pci=pci)}
    expected = set()
    if not control:  # a device file is a GPU that this process may use
        expected.add("NVMLError_LibraryNotFound")
        if module or not pci:  # the module is loaded for others, or there is no card: not a driver that failed to load
            expected.add("NVMLError_DriverNotLoaded")
    assert found == expected


def test_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(nvml, "_exists", there.__contains__)
    monkeypatch.setattr(survey, "pci", lambda: ["0000:01:00.0"])
    assert nvml._missing("NVMLError_LibraryNotFound") and not nvml._missing("NVMLError_DriverNotLoaded")
    there.add("/proc/driver/nvidia/version")
    assert nvml._missing("NVMLError_DriverNotLoaded")
    for path in ("/dev/nvidiactl", "/etc/nv_tegra_release", "/dev/nvgpu"):  # a Jetson's GPU works without NVML
        there.add(path)
        assert not nvml._missing("NVMLError_LibraryNotFound") and not nvml._missing("NVMLError_DriverNotLoaded")
        there.remove(path)
    there.add("/dev/nvhost-gpu")
    assert "this is a Jetson without NVML: install the package nvidia-l4t-nvml" in nvml._without_library()


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14", "aix"])
def test_another_system_has_no_gpu(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(DeviceError) as caught:
        RealHost()
    assert caught.value.missing
    with pytest.raises(DeviceError, match="missing_gpu"):
        memguard.init(BUDGET)
    uses_the_guard(memguard.init(BUDGET, missing_gpu="warn"))
    memguard.shutdown()
    assert memguard.init(BUDGET, missing_gpu="simulate").host.simulated


# real frameworks beside simulated GPUs


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with frameworks that have nothing in them."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torch", "cupy", "jax", "tensorflow", "pycuda", "numba"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "cupy", "jax", "tensorflow"):
        (tmp_path / f"{name}.py").write_text("")
    for name, module in (("pycuda", "driver"), ("numba", "cuda")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / f"{module}.py").write_text("")
    others = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]  # its .pth
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torch", "cupy", "jax", "tensorflow", "pycuda", "numba"):
            del sys.modules[name]


@pytest.mark.parametrize("first", [True, False], ids=["imported before", "imported after"])
@pytest.mark.parametrize("module", ["torch", "tensorflow", "cupy", "jax", "pycuda.driver", "numba.cuda"])
def test_a_real_framework_beside_simulated_gpus_is_said_once(
    packages: None, first: bool, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if first:
        __import__(module)
    memguard.init(BUDGET, simulate="l4")
    __import__(module)
    __import__("torch")
    __import__("cupy")
    name = module.partition(".")[0]
    line = f"memguard: the GPUs are simulated (NVIDIA L4): nothing limits {name}, a real one\n"
    assert capsys.readouterr().err == line
    memguard.shutdown()
    memguard.init(BUDGET, simulate="h200")  # once in a process, whatever comes later
    assert capsys.readouterr().err == ""
    assert sys.modules[module].__spec__ is not None
    assert type(sys.modules[module].__spec__.loader).__module__.startswith(("importlib", "_frozen_importlib"))


def test_no_framework_no_line_and_only_looking_is_no_import(packages: None, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    memguard.init(BUDGET, simulate="l4")
    assert importlib.util.find_spec("torch") is not None
    with pytest.raises(ImportError):
        __import__("no_such_module_of_torch")
    memguard.shutdown()
    __import__("torch")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", [None, "closed", "full"])
def test_a_stderr_that_takes_nothing_harms_no_import(
    packages: None, stream: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memguard.init(BUDGET, simulate="l4")
    file = None if stream is None else open("/dev/full" if stream == "full" else tmp_path / "closed", "w")  # noqa: SIM115
    if stream == "closed" and file is not None:
        file.close()
    monkeypatch.setattr(sys, "stderr", file)
    __import__("torch")
    monkeypatch.undo()
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


# which wins

PROGRAM = """
import memguard
from memguard import api
from memguard._base.logs import is_heard
from memguard._runtime import runtime
class Real(Exception): pass
own = runtime.open_host
def host(simulate):
    if simulate is None: raise Real
    return own(simulate)
runtime.open_host = host
try:
    guard = memguard.init("budget.yaml", simulate={simulate!r})
    memguard.ledger(), memguard.trim()
    print("OUTCOME", guard.plan.devices[0].device.name if guard.active else "passive")
except Exception as error:
    print("OUTCOME", type(error).__name__)
"""
CASES = list(itertools.product([None, "l4"], ["", "h200"], ["", "1"], ["", "run", "t4"]))
"""argument, MEMGUARD_SIMULATE, MEMGUARD_DISABLE, `memguard run` (plain, or with --device t4)"""


def expected(argument: str | None, simulate: str, disable: str, run: str) -> str:
    """The table of docs/activation.md. MEMGUARD_CONFIG is in no row: it decides which budget, not which GPU."""
    if run == "t4":  # its budget is active already: the program's own is the same one, or another
        return "Tesla T4" if argument is None else "AlreadyActive"
    if run == "run" and not disable:
        return "exit 3"  # real GPUs, of which there are none, whatever else is set
    if argument is not None:
        return "NVIDIA L4"
    if disable:
        return "passive"
    if simulate and not run:
        return "NVIDIA H200"
    return "Real"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("environment"))


@pytest.mark.long  # who wins is our own code; that processes see the variables is in test_environment and test_run
@pytest.mark.parametrize("config", ["", "budget.yaml"], ids=["plain", "MEMGUARD_CONFIG"])
def test_which_of_them_wins(python: Path, tmp_path: Path, config: str) -> None:
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_text("no library")  # so that no machine has a GPU

    def outcome(case: tuple[str | None, str, str, str]) -> str:
        argument, simulate, disable, run = case
        given = {"MEMGUARD_SIMULATE": simulate, "MEMGUARD_DISABLE": disable, "MEMGUARD_CONFIG": config}
        env = environ(LD_LIBRARY_PATH=str(tmp_path / "lib"), **{name: value for name, value in given.items() if value})
        words = [str(python), "-c", PROGRAM.format(simulate=argument)]
        if run:
            options = ["--device", run] if run == "t4" else []
            words = [str(python), "-m", "memguard", "run", "-c", "budget.yaml", *options, "--", *words]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
        said = [line for line in done.stderr.splitlines() if "limits a real one" in line]
        assert len(said) <= 1, done.stderr
        return lines[0].removeprefix("OUTCOME ") if lines else f"exit {done.returncode}"

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(CASES, pool.map(outcome, CASES), strict=True))
    wrong = {case: (one, expected(*case)) for case, one in found.items() if one != expected(*case)}
    assert wrong == {} and len(found) == 24
