"""--memguard-leaks: a test that leaves GPU memory behind fails, and says of which framework; a cache is no leak."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import pytest

import memguard
from memguard._base.types import DeviceSample, FrameworkSample
from memguard._base.units import GIB, MIB
from memguard._devices import suspension
from memguard._ledger.reader import LedgerReader
from memguard._runtime import runtime
from memguard._tools.testing import leaks
from memguard._tools.testing.leaks import Check, Leak, Reading, Watcher

pytest_plugins = ("pytester",)

INSTALLED = any(e.value == "memguard.pytest_plugin" for e in importlib.metadata.entry_points(group="pytest11"))
ON = (*(() if INSTALLED else ("-p", "memguard.pytest_plugin")), "-p", "no:cacheprovider", "--strict-markers")

HEAD = """
    import gc, sys, threading, time, unittest
    import pytest
    import memguard

    MIB = 1 << 20
    BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"limit": "4GiB"}}}

    @pytest.fixture(scope="session", autouse=True)
    def whole():
        with memguard.guard(BUDGET, simulate="h200") as guard:
            yield guard

    @pytest.fixture
    def torch(whole): return whole.frameworks["torch"]

    class Array:
        '''Frees itself, as the real ones do.'''
        def __init__(self, of, size):
            self.of, self.id = of, of.allocate(size)
        def __del__(self):
            self.of.free(self.id)

    kept = []
"""
LAST = """
    def test_last(): pass  # after it the budget ends, and with it what a simulated GPU holds
"""


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """What is first imported within an inner run is forgotten at its end."""
    for name in ("_devices.real", "_devices.contexts", "_ledger.reader", "_tools.testing.leaks"):
        importlib.import_module(f"memguard.{name}")
    with memguard.guard({"version": 1, "frameworks": {"torch": {"limit": "1GiB"}}}, simulate="h200") as guard:
        guard.sample()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leaks, "PAUSES", (0.0, 0.05))
    yield
    gc.enable()
    memguard.shutdown()


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body + LAST)
    return pytester.runpytest_inprocess(*ON, *(options or ("--memguard-leaks",)))


def test_a_test_that_leaves_memory_fails_and_the_next_does_not(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    def test_a(torch): torch.allocate(256 * MIB)
    def test_b(torch): torch.free(torch.allocate(256 * MIB))
    def test_c(torch, whole): kept.append([Array(torch, 32 * MIB), Array(whole.frameworks["cupy"], 64 * MIB)])
    def test_d(torch): torch.allocate(MIB // 2)
    class TestObject:  # pytest keeps it as long as its test: to the end
        def test_e(self, torch): self.array = Array(torch, 64 * MIB)
    """,
    )
    done.assert_outcomes(passed=6, errors=3)
    assert "ERROR at teardown of TestObject.test_e" in done.stdout.str()
    text = done.stdout.str()
    assert "ERROR at teardown of test_a" in text and "ERROR at teardown of test_c" in text
    assert "memguard: this test leaves more GPU memory than it found" in text
    assert (
        "NVIDIA H200 (simulated): torch has 256.0 MiB more in use than before "
        "(0 B before, 256.0 MiB now, without its cache)"
    ) in text
    assert "torch has 32.0 MiB more in use than before (256.0 MiB before, 288.0 MiB now" in text
    assert "cupy has 64.0 MiB more" in text
    assert "@pytest.mark.memguard_leaks(tolerance='256MiB')" in text
    assert "_tools/testing/leaks.py" not in text and "pytest_plugin.py" not in text


def test_nothing_is_looked_at_without_the_option(pytester: pytest.Pytester) -> None:
    run(pytester, "\n    def test_a(torch): torch.allocate(256 * MIB)\n", "-q").assert_outcomes(passed=2)


def test_what_is_no_leak(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    def test_a_cache_that_grows(torch, whole):
        torch.free(torch.allocate(512 * MIB))
        sample = whole.sample().devices[0].frameworks["torch"]
        assert sample.held - sample.in_use >= 512 * MIB
    def test_cycles(torch):
        cycle = [Array(torch, 64 * MIB)]
        cycle.append(cycle)
        gc.disable()
    def test_of_work_that_still_runs(torch):
        array = torch.allocate(64 * MIB)
        threading.Timer(0.02, torch.free, [array]).start()

    @pytest.fixture
    def returned(torch): return Array(torch, 64 * MIB)
    def test_what_a_fixture_returned(returned): pass

    class TestOld(unittest.TestCase):
        @pytest.fixture(autouse=True)
        def _given(self, torch): self.array = Array(torch, 64 * MIB)
        def test_it(self): self.another = Array(self.array.of, 64 * MIB)

    @pytest.mark.parametrize("size", [64])
    def test_parameters(torch, size): array = Array(torch, size * MIB)
    """,
    )
    done.assert_outcomes(passed=7)


def test_fixtures_of_wider_scopes_may_keep_memory(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    @pytest.fixture(scope="class")
    def inner(whole):
        array = Array(whole.frameworks["torch"], 128 * MIB)
        yield array
    @pytest.fixture(scope="class")
    def outer(whole, request):
        array = Array(whole.frameworks["torch"], 128 * MIB)
        request.getfixturevalue("inner")
        yield array
    class TestWide:
        def test_a(self, outer): pass
        def test_b(self, outer, torch): torch.allocate(64 * MIB)  # not hidden by what outer gives back after it
    class TestLazy:
        def test_a(self, request, torch):
            torch.allocate(64 * MIB)
            request.getfixturevalue("inner")
            torch.allocate(64 * MIB)
    class TestForgets:
        @pytest.fixture(scope="class")
        def forgets(self, whole):
            whole.frameworks["torch"].allocate(32 * MIB)
            yield
        def test_a(self, forgets): pass
        def test_b(self, forgets): pass
    """,
    )
    text = done.stdout.str()
    found = re.findall(r"ERROR at teardown of (\S+) ___.*?torch has (\S+) MiB more", text, re.DOTALL)
    assert found == [("TestWide.test_b", "64.0"), ("TestLazy.test_a", "128.0"), ("TestForgets.test_b", "32.0")]
    done.assert_outcomes(passed=6, errors=3)


def test_a_test_that_fails_or_skips_is_not_looked_at(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    def test_a(torch):
        array = Array(torch, 64 * MIB)
        assert 0
    def test_b(torch):
        torch.allocate(64 * MIB)
        pytest.skip("no")
    @pytest.mark.xfail(strict=True)
    def test_c(torch):
        torch.allocate(64 * MIB)
        assert 0
    """,
    )
    done.assert_outcomes(passed=1, failed=1, skipped=1, xfailed=1)


def test_markers_and_tolerances(pytester: pytest.Pytester) -> None:
    body = """
    @pytest.mark.memguard_leaks
    def test_a(torch): torch.allocate(64 * MIB)
    @pytest.mark.memguard_leaks(tolerance="64MiB")
    def test_b(torch): torch.allocate(64 * MIB)
    @pytest.mark.memguard_leaks("32MiB")
    def test_c(torch): torch.allocate(64 * MIB)
    @pytest.mark.memguard_leaks(check=False)
    def test_d(torch): torch.allocate(64 * MIB)
    def test_e(torch): torch.allocate(64 * MIB)
    """
    for options, failed in [
        (("-q",), "ac"),
        (("--memguard-leaks",), "ace"),
        (("--memguard-leaks", "--memguard-leaks-tolerance=100MiB"), "c"),
    ]:
        done = run(pytester, body, *options)
        done.assert_outcomes(passed=6, errors=len(failed))
        assert re.findall(r"ERROR at teardown of test_(.) ", done.stdout.str()) == [*failed]


def test_what_is_wrong_is_said(pytester: pytest.Pytester) -> None:
    done = run(pytester, "\n    def test_a(torch): pass\n", "--memguard-leaks", "--memguard-leaks-tolerance=1GB")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "--memguard-leaks-tolerance: the unit 'GB' is ambiguous" in done.stderr.str()
    for marker, said in [
        ("tolerance='1GB'", "memguard_leaks: the unit 'GB' is ambiguous"),
        ("1, 2", "memguard_leaks: it takes one tolerance, found 2"),
        ("'1MiB', tolerance='2MiB'", "memguard_leaks: the tolerance is given twice: '1MiB' and '2MiB'"),
        ("tol='1MiB'", "memguard_leaks: there is no keyword 'tol'; did you mean 'tolerance'?"),
        ("often=3", "memguard_leaks: there is no keyword 'often'"),
        ("check='no'", "memguard_leaks: check is True or False, found 'no'"),
    ]:
        done = run(
            pytester, f"\n    @pytest.mark.memguard_leaks({marker})\n    def test_a(torch): pass\n", "-k", "test_a"
        )
        done.assert_outcomes(errors=1)
        text = done.stdout.str()
        assert said in text and "fix: memguard_leaks(tolerance='8MiB'), or memguard_leaks(check=False)" in text
        assert "During handling" not in text and "asked" not in text


def test_processes_of_xdist_look_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HEAD + "\n    def test_a(torch): torch.allocate(64 * MIB)\n    def test_b(): pass\n" + LAST)
    done = pytester.runpytest_subprocess(*ON, "--memguard-leaks", "-n", "1", "-p", "xdist")
    done.assert_outcomes(passed=3, errors=1)


def test_the_budget_of_a_marker_is_looked_at_before_it_ends(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        BUDGET = {"frameworks": {"torch": {"limit": "4GiB"}}}
        @pytest.mark.memguard_budget(BUDGET, simulate="h200")
        def test_a(memguard_budget): memguard_budget.frameworks["torch"].allocate(1 << 30)
        @pytest.mark.memguard_budget(BUDGET, simulate="h200")
        def test_b(memguard_budget):
            torch = memguard_budget.frameworks["torch"]
            torch.free(torch.allocate(1 << 30))
        """
    )
    done = pytester.runpytest_inprocess(*ON, "--memguard-leaks")
    done.assert_outcomes(passed=2, errors=1)
    assert "ERROR at teardown of test_a" in done.stdout.str()
    assert runtime.this.session is None


# readings of real GPUs, without one


class Real:
    """A watcher whose readings are given."""

    def __init__(self, *readings: Reading | None) -> None:
        self.readings, self.settled = [*readings], 0
        self.credits: dict[int, Any] = {}

    def take(self) -> Reading | None:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def settle(self) -> None:
        self.settled += 1


def reading(unaccounted: int | None = 0, exact: bool = True, **in_use: int | None) -> Reading:
    found: dict[tuple[str, str, int], int | None] = {("GPU-0", name, 0): size for name, size in in_use.items()}
    return Reading({**found, ("GPU-0", "", 0): unaccounted}, {"GPU-0": "NVIDIA H200"}, {0}, exact)


def left(*readings: Reading | None) -> list[Leak]:
    return Check(Real(*readings), MIB).leaks(None)  # type: ignore[arg-type]


def test_what_is_not_known_is_no_leak() -> None:
    assert left(None, reading(torch=GIB)) == left(reading(torch=0), None) == []
    assert left(reading(torch=None), reading(torch=GIB)) == left(reading(torch=GIB), reading(torch=None)) == []
    assert left(reading(torch=0), reading(torch=GIB)) == [Leak("NVIDIA H200", "torch", 0, GIB)]
    assert left(reading(), reading(torch=GIB)) == [Leak("NVIDIA H200", "torch", 0, GIB)], "it has begun in the test"
    nothing = Reading({}, {}, {0})  # CUDA was not initialised
    assert left(nothing, reading(9 * GIB, torch=GIB)) == [Leak("NVIDIA H200", "torch", 0, GIB)]


def test_bytes_that_no_framework_holds() -> None:
    (found,) = left(reading(MIB, torch=0), reading(101 * MIB, torch=0))
    assert found == Leak("NVIDIA H200", "", MIB, 101 * MIB)
    assert str(found).startswith("NVIDIA H200: this process has 100.0 MiB more than before, by NVML, and no framework")
    assert left(reading(0, torch=0), reading(leaks.UNACCOUNTED, torch=0)) == [], "first uses of libraries"
    assert left(reading(0), reading(GIB, cupy=0)) == [], "cupy has begun, with modules of its own"
    assert left(reading(None, torch=0), reading(GIB, torch=0)) == [], "NVML did not list the process"
    assert left(reading(0, exact=False, tensorflow=0), reading(GIB, tensorflow=0)) == [], "its pool is not known"


def test_it_looks_again_before_it_says_so() -> None:
    watcher = Real(reading(torch=0), reading(torch=GIB), reading(torch=GIB), reading(torch=0))
    assert Check(watcher, MIB).leaks(None) == [] and watcher.settled == 2  # type: ignore[arg-type]
    watcher = Real(reading(torch=0))
    assert Check(watcher, MIB).leaks(None) == [] and watcher.settled == 0, "no collection where nothing grew"  # type: ignore[arg-type]


def test_without_a_budget_it_reads_real_gpus_once_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._devices import contexts
    from memguard._devices.simulated import SimulatedHost

    watcher = Watcher()
    monkeypatch.setattr(contexts, "initialised", lambda: False)
    assert watcher.take() == Reading({}, {}, {0})
    monkeypatch.setattr(contexts, "initialised", lambda: True)
    monkeypatch.setattr("memguard._devices.real.RealHost", lambda: SimulatedHost(["h200"]))
    held = {"torch": FrameworkSample(3, 2, None, None), "tensorflow": FrameworkSample(None, 1, None, None)}

    def sample(self: LedgerReader, part: Any, frameworks: Any) -> DeviceSample:
        return DeviceSample("GPU-0", 9, 8, 1, 7, None, 0, 5, held)

    monkeypatch.setattr(LedgerReader, "sample", sample)
    found = watcher.take()
    assert found is not None
    assert found.bytes == {("GPU-0", "torch", 0): 2, ("GPU-0", "tensorflow", 0): 1, ("GPU-0", "", 0): 5}
    assert not found.exact and found.names == {SimulatedHost(["h200"]).devices()[0].uuid: "NVIDIA H200"}
    monkeypatch.setattr(suspension, "now", suspension.Off({}, 0.0))
    assert watcher.take() is None, "nothing may be asked"


def test_work_areas_of_cupys_cached_fft_plans_are_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from memguard._base.types import DevicePlan
    from memguard._devices import contexts
    from memguard._devices.simulated import SimulatedHost

    device = SimulatedHost(["h200"]).devices()[0]
    part = DevicePlan(device, GIB, GIB, {}, 0)
    watcher, now = Watcher(), {"in use": 0, "plans": 0, "current": device.ordinal}
    watcher._parts = (part,)

    def sample(part: DevicePlan, frameworks: Any) -> DeviceSample:
        held = {"cupy": FrameworkSample(GIB, now["in use"], None, None)}
        return DeviceSample(device.uuid, 9 * GIB, GIB, GIB, GIB, None, 0, 0, held)

    watcher._reader = SimpleNamespace(sample=sample, unnamed=dict)  # type: ignore[assignment]
    cache = SimpleNamespace(get_plan_cache=lambda: SimpleNamespace(get_curr_memsize=lambda: now["plans"]))
    monkeypatch.setitem(__import__("sys").modules, "cupy.fft._cache", cache)
    monkeypatch.setattr(contexts, "current", lambda: now["current"])
    check = Check(watcher, MIB)
    now.update({"in use": 40 * MIB, "plans": 40 * MIB})
    assert check.leaks(None) == []
    now.update({"in use": 72 * MIB})
    assert [(one.framework, one.after - one.before) for one in check.leaks(None)] == [("cupy", 32 * MIB)]
    now.update({"in use": 40 * MIB, "plans": 7 * MIB, "current": None})
    assert check.leaks(None) == [], "those of another GPU's cache, as they were last seen"
    cache.get_plan_cache = lambda: SimpleNamespace()
    now.update({"in use": 0, "current": device.ordinal})
    assert check.leaks(None) == [], "another version of CuPy"


@pytest.mark.parametrize("name", ["pycuda", "numba"])
def test_what_a_framework_takes_that_counts_nothing_without_a_budget_is_seen_as_unaccounted(name: str) -> None:
    from types import SimpleNamespace

    from memguard._base.types import DevicePlan
    from memguard._devices.simulated import SimulatedHost

    device = SimulatedHost(["h200"]).devices()[0]
    watcher, unaccounted, live = Watcher(), [0], dict[str, FrameworkSample]()
    watcher._parts = (DevicePlan(device, GIB, GIB, {}, 0),)

    def sample(part: DevicePlan, frameworks: Any) -> DeviceSample:
        return DeviceSample(device.uuid, 9 * GIB, GIB, GIB, GIB, None, 0, unaccounted[0], live.copy())

    watcher._reader = SimpleNamespace(sample=sample, unnamed=dict)  # type: ignore[assignment]
    for _ in ("it begins within the test", "it was there before"):
        check = Check(watcher, MIB)
        live[name] = FrameworkSample(None, None, None, None)
        unaccounted[0] += 200 * MIB
        assert [(one.framework, one.after - one.before) for one in check.leaks(None)] == [("", 200 * MIB)]


def test_gpus_that_cannot_be_read_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._devices import contexts

    asked: list[None] = []

    def broken() -> None:
        asked.append(None)
        raise memguard.DeviceError("the driver is broken")

    def lost() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(contexts, "initialised", lost)
    assert Watcher().take() is None
    monkeypatch.setattr(contexts, "initialised", lambda: True)
    monkeypatch.setattr("memguard._devices.real.RealHost", broken)
    watcher = Watcher()
    assert watcher.take() is None and watcher.take() is None and len(asked) == 1


def test_pytorchs_workspaces_go_unless_a_graph_may_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    cleared: list[None] = []
    segments = [{"segment_pool_id": (0, 0)}]
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True, memory_snapshot=lambda: segments),
        _C=SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: cleared.append(None)),
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    Watcher().settle()
    assert len(cleared) == 1
    segments.append({"segment_pool_id": (0, 1)})
    Watcher().settle()
    segments[1] = {}  # type: ignore[assignment]
    Watcher().settle()
    assert len(cleared) == 1
