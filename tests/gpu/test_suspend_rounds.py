"""Suspend and resume processes on a real GPU: rounds, calls of other threads, interruptions at each step, refusals.

Each process runs tests/support/suspend_target.py, which takes commands. The test itself does not use CUDA: it reads
NVML. It suspends a restored process again before killing it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.suspend_children import (
    Broke,
    Card,
    Child,
    apart,
    command,
    end,
    host_bytes,
    other,
    resume,
    surroundings,
    target,
)
from support.suspend_provoked import PROVOKED

from bench.programs.six import GIB, MIB
from bench.programs.six import NAMES as SIX

STEPS: dict[str, dict[str, float]] = {
    "off": {"state": 0.0, "lock": 0.0, "settle": 0.02, "checkpoint": 0.1},
    "on": {"state": 0.0, "room": 0.0, "restore": 0.1, "unlock": 0.0},
}
"""The steps of a suspend and of a resume, with the seconds from each step's beginning to the interruption."""
DELAYS = (0.0, 0.0, 0.02, 0.1, 0.25)
"""The same seconds for each step with `--thorough`."""
MUST = ("synchronize", "query", "done", "copy", "item", "elapsed", "numpy", "ready", "read", "replay", "print")
"""A call whose name contains one of these words always reaches the driver. The framework may serve others itself."""


@pytest.fixture(autouse=True)
def turns_apart() -> Iterator[None]:
    with apart():
        yield


@pytest.mark.parametrize("names", [*((name,) for name in SIX), SIX], ids=[*SIX, "all six"])
def test_each_round_keeps_the_values_and_leaks_nothing(names: tuple[str, ...], thorough: bool, tmp_path: Path) -> None:
    """Includes a suspension of 12 seconds: JAX's runtime polls the driver every 5 s from its own thread."""
    rounds, card, line = 20 if thorough else 2, Card(), tmp_path / "timeline.jsonl"
    held: list[tuple[int, int]] = []
    limit = "16GiB" if len(names) > 1 else "8GiB"
    # Else glibc keeps up to 32 MiB of what was read back, in one round and not in the next.
    env = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    with target(*names, env=env, size=64 * MIB, limit=limit, timeline=str(line)) as child:
        for number in range(rounds):
            off = child.must("off", 90)
            assert card.of(child.pid) is None, "NVML lists nothing of it"
            assert off["bytes"] > 100 * MIB and off["host"] > off["bytes"] // 2
            if number == 0:
                ledger = child.must("ledger")["text"]
                assert "suspended, " in ledger and "in host memory" in ledger
                time.sleep(12 if thorough or "jax" in names else 1)
            child.must("on", 120, timeout=90)
            checked = child.must("check", 90)
            assert checked["wrong"] == 0 and checked["arrays"] == 4 * len(names)
            own = card.of(child.pid)
            assert own is not None
            held.append((own, host_bytes(child.pid)))
        assert "in host memory" not in child.must("ledger")["text"]
    assert held[-1][0] - held[0][0] <= 2 * MIB, "of the card no more than after one round"
    assert held[-1][1] - held[0][1] <= 64 * MIB, "what allocators and threads of the host keep"
    told = "".join(path.read_text(errors="replace") for path in tmp_path.glob("*.jsonl"))
    assert min(told.count('"suspended"'), told.count('"resumed"')) >= rounds


@pytest.mark.parametrize("name", SIX)
def test_calls_of_other_threads_wait_or_are_refused_without_a_crash(name: str, thorough: bool) -> None:
    with Child("suspend_target", name) as child:
        child.must("begin", 180, names=[name], size=16 * MIB)
        begun, bad = child.must("calls", 180, skip=[]), {}
        for _ in range(30 if thorough else 2):
            ends = child.must("round", 75)["ends"]
            assert set(ends) == set(begun["kinds"])
            for kind, came in ends.items():
                may = ("waited", "refused", *(() if any(word in kind for word in MUST) else ("went on",)))
                if came not in may:
                    bad[kind] = came
        assert bad == {} and child.must("check")["wrong"] == 0
        assert len(begun["kinds"]) > len(begun["broken"]), f"not possible here at all: {begun['broken']}"


def test_without_gates_a_synchronize_of_another_thread_crashes_the_process() -> None:
    """The control: without this crash the calls above would prove nothing."""
    child = Child("suspend_target", "torch")
    try:
        child.must("begin", 180, names=["torch"], size=16 * MIB)
        child.must("calls", 180, skip=[], gates=False)
        with pytest.raises(Broke):
            child.must("round", 150, only=["device synchronize"])
        assert child.process.poll() in (-11, 139)
    finally:
        end(child)


def moments(way: str, thorough: bool) -> list[tuple[str, float]]:
    return [(step, delay) for step, one in STEPS[way].items() for delay in (DELAYS if thorough else (one,))]


@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize("what", ["helper", "sigint"])
def test_self_suspend_interrupted_at_each_step_recovers(what: str, way: str, thorough: bool) -> None:
    """Interrupted by the death of its helper, or by Ctrl-C."""
    with target("cupy", size=64 * MIB) as child:
        for step, delay in moments(way, thorough):
            one = child.must("broken", 150, way=way, step=step, what=what, delay=delay)
            assert one["struck"], (step, delay, one)
            if one["away"]:
                one["resume"] = resume(child.pid)
                until = time.monotonic() + 5  # its own helper checks twice a second whether another process resumed it
                while child.must("away")["away"] and time.monotonic() < until:
                    time.sleep(0.1)
            if child.must("away")["away"]:
                one["on"] = child.ask("on", 120, timeout=60)
            assert not child.must("away")["away"] and child.must("check")["wrong"] == 0, (step, delay, one)


CONTROLLER = """
import json, os, sys
pid, way = int(sys.argv[1]), sys.argv[2]
from memguard._node.suspend.course import flow
from memguard._node.suspend.driver.client import Client
from memguard._node.identity import process_of
client, process = Client(), process_of(pid)
client.state(process)
def told(step): print(json.dumps([step, client.pid]), flush=True)
do = flow.take_off if way == "off" else flow.bring_back
more = {"needs": json.loads(sys.argv[3])} if way == "on" else {}
print(json.dumps(["over", str(do(process, client=client, on_step=told, **more).end)]), flush=True)
"""


def controlled(pid: int, way: str, needs: str, step: str | None = None, delay: float = 0.0) -> str | None:
    """Another process suspends or resumes it, and is killed with its helper this long after the step began.

    Returns the last step that it reached.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(pid), way, needs], stdout=subprocess.PIPE, text=True, env=surroundings()
    )
    late = threading.Timer(120, process.kill)
    late.start()
    reached = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            reached, helper = json.loads(line)
            if reached == step:
                time.sleep(delay)
                for one in (helper, process.pid):
                    try:
                        os.kill(one, signal.SIGKILL)
                    except (ProcessLookupError, TypeError):  # a helper that has not started has no PID
                        continue
                break
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None
    return reached


@pytest.mark.parametrize("way", STEPS)
def test_resume_restores_a_process_whose_controller_was_killed(way: str, thorough: bool) -> None:
    import pynvml

    card = Card()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    with target("cupy", size=64 * MIB) as child:
        child.touched = True
        needs = json.dumps({uuid: card.of(child.pid) or 0})
        for step, delay in moments(way, thorough):
            if way == "on":
                assert controlled(child.pid, "off", needs) == "over"
            assert controlled(child.pid, way, needs, step, delay) == step
            said = resume(child.pid)
            if said["rc"]:  # resumed, so that it can check its values
                controlled(child.pid, "on", needs)
            assert child.must("check", 60)["wrong"] == 0, (step, delay, said)


@pytest.mark.parametrize("what", PROVOKED)
def test_what_would_be_lost_is_refused_and_nothing_is_touched(what: str) -> None:
    _, code, framework = PROVOKED[what]
    during, card = what == "a capture", Card()  # reading arrays back would end a capture
    with target(framework, size=16 * MIB) as child:
        child.must("provoke", 90, what=what)
        error = child.ask("off", 60).get("error")
        assert error and error["exception"] == "CannotSuspend" and code in error["codes"] and "fix:" in error["text"]
        assert card.of(child.pid) is not None
        assert during or child.must("check")["wrong"] == 0
        child.must("calm", 90)
        assert child.must("check")["wrong"] == 0
        after = child.ask("off", 60).get("error")
        if after is None:
            child.must("on", 60, timeout=30)
        else:  # until exit, the driver may keep a mapping of managed memory, and torch's profiler CUPTI
            stays = code == "managed-memory" or (code == "profiler" and "error 801" in after["text"])
            assert stays, after
        assert child.must("check")["wrong"] == 0


def test_a_stopped_process_is_refused_from_outside_and_not_touched() -> None:
    card = Card()
    with target("torch", size=16 * MIB, by_others=True, limit="8GiB") as child:
        os.kill(child.pid, signal.SIGSTOP)
        try:
            time.sleep(0.2)
            said = command("suspend", str(child.pid))
        finally:
            os.kill(child.pid, signal.SIGCONT)
        text = said["err"] + said["out"]
        assert said["rc"] and "stopped" in text and "fix:" in text
        assert card.of(child.pid) is not None and child.must("check")["wrong"] == 0
        child.must("off", 60)
        child.must("on", 60, timeout=30)
        assert child.must("check")["wrong"] == 0


def test_suspend_without_by_others_is_refused_unless_unsafe() -> None:
    card = Card()
    with target("torch", size=64 * MIB, limit="8GiB") as child:
        assert command("suspend", str(child.pid))["rc"] != 0 and card.of(child.pid) is not None
        child.touched = True
        taken = command("suspend", str(child.pid), "--unsafe", "--yes")
        assert taken["rc"] == 0 and card.of(child.pid) is None, taken
        back = resume(child.pid)
        assert back["rc"] == 0 and child.must("check")["wrong"] == 0, back


@pytest.mark.parametrize("size", [6, pytest.param(60, marks=[pytest.mark.whole_card, pytest.mark.thorough])])
def test_tensorflow_keeps_nothing_of_its_peak_on_the_card(size: int) -> None:
    """Ending it while suspended takes no time."""
    card = Card()
    with target("tensorflow", large=size * GIB) as child:
        child.must("drop")
        assert (card.of(child.pid) or 0) >= size * GIB
        child.must("off", 200)
        time.sleep(0.2)
        assert card.of(child.pid) is None


@pytest.mark.whole_card
def test_random_allocations_of_another_process_corrupt_no_value(thorough: bool) -> None:
    """A process may be lost, and must say why; one that finds no room in time stays intact and resumes later."""
    rounds, late = 20 if thorough else 3, 0
    child = begun()
    try:
        with other("filler") as filler, other("grabber", seed=17) as grabber:
            filler.must("fill", 60, leave=2 * GIB)
            grabber.must("go", keep=8 * MIB)
            for _ in range(rounds):
                child.must("off", 60)
                on = child.ask("on", 60, timeout=20)
                if "error" in on and not on["lost"]:
                    late += 1
                    grabber.must("halt")
                    child.must("on", 60, timeout=20)
                if on.get("lost"):
                    assert "fix:" in on["error"]["text"]
                    child.lost = True
                    grabber.must("halt")
                    end(child)
                    child = begun()
                elif "error" not in on:
                    assert child.must("check", 30)["wrong"] == 0
                    continue
                assert child.must("check", 30)["wrong"] == 0
                grabber.must("go", keep=8 * MIB)
            assert grabber.must("halt")["times"] >= rounds and late <= max(1, rounds // 4)
    finally:
        end(child)


def begun() -> Child:
    child = Child("suspend_target", "cupy")
    child.must("begin", 180, names=["cupy"], size=256 * MIB, large=256 * MIB)
    return child


@pytest.mark.whole_card
@pytest.mark.parametrize(
    "context", [pytest.param(0, id="context goes"), pytest.param(GIB, id="context stays", marks=pytest.mark.thorough)]
)
def test_an_allocation_between_placeholder_and_restore_corrupts_no_value(
    context: int, thorough: bool, tmp_path: Path
) -> None:
    """`context`: free memory for the placeholder's context, besides the process's. The robber retries without a
    pause."""
    tries = 0
    with other("filler") as filler, other("robber") as robber:
        for number in range(5 if thorough else 1):
            path, child = tmp_path / str(number), begun()
            try:
                child.must("at_restore", path=str(path), wait=0.15)
                size = child.must("off", 60)["bytes"]
                filler.must("fill", 60, leave=size + 24 * MIB + context)
                robber.send("rob", path=str(path), size=64 * MIB + context, seconds=1.0)
                on = child.ask("on", 60, timeout=20)
                path.touch()  # unblock the robber
                tries += robber.answer(60)["tries"]
                robber.must("empty")
                filler.must("empty")
                if on.get("lost"):
                    assert "fix:" in on["error"]["text"]
                    child.lost = True
                    continue
                if "error" in on:  # there was no room: it is intact, and resumes when there is
                    child.must("on", 60, timeout=20)
                assert child.must("check", 30)["wrong"] == 0
            finally:
                end(child)
    assert tries > 0


BEGIN = """
import memguard
torch_only = {"torch": {"share": "90%"}}
memguard.init({"version": 1, "device": {"limit": "16GiB"}, "frameworks": torch_only, "monitor": {}})
%load_ext memguard
import os, torch
x = torch.arange(1 << 24, device="cuda", dtype=torch.float64)
expected = float(x.sum())
%memguard suspend --when-idle 3s
"""
RIGHT = "print('RIGHT' if float(x.sum()) == expected and float((x[:5] * 2).sum()) == 20.0 else 'WRONG')"


@pytest.mark.whole_card
def test_an_idle_notebook_is_suspended_and_its_next_cell_resumes_it() -> None:
    """Meanwhile another process fills the GPU. A cell that finds no room does not run; the kernel stays intact."""
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    from support.suspend_kernel import Kernel

    card, kernel = Card(), Kernel()

    def until(done: Callable[[], bool]) -> None:
        end = time.monotonic() + 45
        while not done():
            assert time.monotonic() < end
            time.sleep(0.1)

    try:
        kernel.start()
        begun = kernel.run(BEGIN, 180)
        assert begun["status"] == "ok" and card.of(kernel.pid) is not None, begun
        until(lambda: card.of(kernel.pid) is None)
        with other("filler") as filler:
            assert filler.must("fill", 60, leave=GIB)["held"] >= 0.95 * card.total()
        until(lambda: card.free() > 0.9 * card.total())
        came = kernel.run(RIGHT, 90)
        assert came["status"] == "ok" and "RIGHT" in came["text"], came
        until(lambda: card.of(kernel.pid) is None)
        with other("filler") as filler:
            filler.must("fill", 60, leave=256 * MIB)
            cell = kernel.send("ran = True\nprint('it ran')")
            time.sleep(2)
            assert card.of(kernel.pid) is None
            kernel.manager.interrupt_kernel()
            refused = kernel.reply(cell, 60)
            assert card.of(kernel.pid) is None
            assert refused["status"] == "error" and "it ran" not in refused["text"]
            assert f"(PID {filler.pid}," in refused["text"] or f"(PID {filler.pid})" in refused["text"], refused
        last = kernel.run(RIGHT + "\nprint('ran' in globals())", 90)
        assert last["status"] == "ok" and "RIGHT" in last["text"] and "False" in last["text"], last
    finally:
        kernel.end()
