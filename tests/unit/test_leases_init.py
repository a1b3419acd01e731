"""`device: {lease: true}`: what `init` claims on simulated GPUs beside other processes, and what it gives back."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from guards import replaced
from interruptions import Points
from leasing import heard, told, until

import memguard
from memguard._base.types import Device
from memguard._base.units import GIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._node.leases import locks, registry
from memguard._node.leases.lease import Lease
from memguard._node.leases.store import Store, UnusableDatabaseError
from memguard._node.leases.types import Part
from memguard._runtime import runtime
from memguard.errors import CapNotApplied, LeaseRefused, NotActive

pytestmark = [
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # interrupted: just opened, and is closed
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KEY = "simulated:GPU-00000000-0000-4000-8000-000000000000"
TOTAL = 139


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    where = tmp_path / "leases"
    monkeypatch.setenv("MEMGUARD_LEASES", str(where))
    yield where
    memguard.shutdown()
    assert Store(str(where)).claims() == [] and locks._files == {} and runtime.this.claimed == []


def budget(gib: int, wait: str | None = None, **more: Any) -> dict[str, Any]:
    device = {"limit": f"{gib}GiB", "lease": True, **({} if wait is None else {"wait": wait})}
    return {"version": 1, "device": device, "frameworks": {"torch": {"share": "50%"}}, **more}


def init(gib: int, wait: str | None = None, **more: Any) -> memguard.Guard:
    return memguard.init(budget(gib, wait), simulate="h200", **more)


def held(folder: Path) -> list[int]:
    claims = [claim for claim in Store(str(folder)).claims() if claim.state == "held"]
    return [claim.parts[KEY].bytes // GIB for claim in claims]


CHILD = """
import sys, memguard
budget = {"version": 1, "device": {"limit": sys.argv[1], "lease": True, "wait": sys.argv[2]},
          "frameworks": {"torch": {"share": "50%"}}}
try:
    memguard.init(budget)
except memguard.errors.LeaseRefused as error:
    print(str(error).partition(chr(10))[0], flush=True)
    sys.exit(error.exit_code)
print("held", flush=True)
sys.stdin.readline()
memguard.shutdown()
print("over", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def job(gib: int, wait: str = "0") -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"{gib}GiB", wait], text=True, env={**os.environ, "MEMGUARD_SIMULATE": "h200"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_the_second_waits_and_starts_when_the_first_ends(folder: Path) -> None:
    with job(80) as first, job(60) as small:
        heard(first), heard(small)
        assert held(folder) in ([60], [80]), "80 and 60 are more than there is"
    with job(80) as first:
        assert heard(first) == "held"
        with job(70) as second:
            said = heard(second)
            assert said.startswith("there is no room for 70.00 GiB of simulated GPU 0 (NVIDIA H200): process ")
            assert f"process {first.pid} (" in said and "holds 80.00 GiB since" in said
            assert second.wait() == LeaseRefused.exit_code
        with job(70, "60s") as second:
            assert second.stderr is not None
            lines = iter(second.stderr.readline, "")
            assert next(line for line in lines if "waiting" in line).startswith(
                f"memguard: waiting for 70.00 GiB of simulated GPU 0 (NVIDIA H200): process {first.pid} ("
            )
            told(first)
            assert heard(first) == "over" and heard(second) == "held"
            assert held(folder) == [70]


def test_kill_9_starts_who_waits(folder: Path) -> None:
    with job(80) as first:
        assert heard(first) == "held"
        threading.Timer(0.5, lambda: os.kill(first.pid, signal.SIGKILL)).start()
        init(80, "60s")
        assert held(folder) == [80]


def test_what_is_refused_changes_nothing(folder: Path) -> None:
    with job(80) as first:
        assert heard(first) == "held"
        with pytest.raises(LeaseRefused, match=f"process {first.pid} ") as no:
            init(70)
        assert memguard.errors.MemguardError in type(no.value).__mro__ and len(no.value.holders) == 1
        again = pickle.loads(pickle.dumps(no.value))
        assert (str(again), again.holders) == (str(no.value), no.value.holders)
        with pytest.raises(NotActive):
            memguard.ledger()
        init(50)
        with pytest.raises(LeaseRefused):
            init(70, replace=True)
        assert memguard.ledger() and sorted(held(folder)) == [50, 80], "the budget before stays, with its lease"


def test_the_guard_gives_it_back_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    class Capped(SimulatedFramework):
        def apply(self, caps: Any, options: Any, undo: Any) -> Any:
            seen.append(held(folder))
            undo.add(self.name, lambda: seen.append(held(folder)))
            return super().apply(caps, options, undo)

    replaced(monkeypatch, torch=lambda host, name: Capped(host, name, imported=True))
    with memguard.guard(budget(60), simulate="h200"):
        assert held(folder) == [60]
    assert seen == [[60], [60]] and held(folder) == []


def test_a_start_that_fails_gives_it_back(folder: Path, steps: Any) -> None:
    steps("apply torch")
    with pytest.raises(RuntimeError):
        init(60)
    assert held(folder) == []


def test_a_replacement_takes_the_place_of_the_first(folder: Path) -> None:
    init(60)
    init(130, replace=True)
    assert held(folder) == [130]
    init(10, replace=True)
    assert held(folder) == [10]
    plain = budget(10)
    del plain["device"]["lease"]
    memguard.init(plain, simulate="h200", replace=True)
    assert held(folder) == []
    init(20, replace=True)
    assert held(folder) == [20]


def test_a_replacement_that_fails_leaves_the_first_with_its_lease(folder: Path, steps: Any, monkeypatch: Any) -> None:
    """Nobody else gets it in between, though the new one is smaller, or asks for no lease."""
    init(60)
    for more in ({}, {"lease": False}):
        wrong = budget(20, frameworks={"torch": {"share": "50%"}, "cupy": {"share": "5%"}})
        wrong["device"] |= more

        class Fails(SimulatedFramework):
            def apply(self, caps: Any, options: Any, undo: Any) -> Any:
                assert max(held(folder)) == 60
                raise CapNotApplied("cupy", "no", "none")

        with monkeypatch.context() as patched:
            replaced(patched, cupy=lambda host, name, kind=Fails: kind(host, name, imported=True))
            with pytest.raises(CapNotApplied):
                memguard.init(wrong, simulate="h200", replace=True)
        assert held(folder) == [60] and memguard.ledger()
    memguard.shutdown()
    assert held(folder) == []


def test_the_same_budget_again_claims_nothing_more(folder: Path) -> None:
    assert init(60) is init(60) and held(folder) == [60]


def test_every_gpu_has_its_part(folder: Path) -> None:
    memguard.init(budget(60), simulate=["h200", "h200"])
    (claim,) = Store(str(folder)).claims()
    assert [part.bytes for part in claim.parts.values()] == [60 * GIB] * 2
    memguard.shutdown()


def test_a_forked_child_has_no_lease_and_may_have_its_own(folder: Path) -> None:
    init(60)
    child = os.fork()
    if not child:
        try:
            memguard.shutdown()
            init(70)
            os._exit(0 if sorted(held(folder)) == [60, 70] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert held(folder) == [60]


def test_without_a_lease_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, memguard\n"
        "memguard.init({'version': 1, 'frameworks': {'torch': {'share': '50%'}}}, simulate='h200')\n"
        "assert not [n for n in sys.modules if n.startswith(("
        "'memguard._node.leases', 'memguard._devices.proc', 'sqlite3'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# While it waits.


class Waiting:
    """`init` on another thread, which waits for what this process cannot have."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            init(100, "60s")
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Waiting:
        self.thread.start()
        until(lambda: runtime.this.claiming)
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()


def test_other_threads_meanwhile(folder: Path) -> None:
    with job(80) as first:
        assert heard(first) == "held"
        with Waiting() as waiting:
            with pytest.raises(NotActive):
                memguard.ledger()
            began = time.monotonic()
            assert memguard.shutdown() == []
            assert time.monotonic() - began < 30, "it ended the wait"
        assert isinstance(waiting.error, NotActive) and "while it waited for its lease" in str(waiting.error)
        assert held(folder) == [80] and len(Store(str(folder)).claims()) == 1


def test_a_signal_handler_that_shuts_down_ends_the_wait(folder: Path) -> None:
    with job(80) as first:
        assert heard(first) == "held"
        before = signal.signal(signal.SIGUSR1, lambda *_: memguard.shutdown() and None)
        try:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(NotActive):
                init(100, "60s")
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_ends_the_wait(folder: Path) -> None:
    with job(80) as first:
        assert heard(first) == "held"
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            init(100, "60s")
        assert len(Store(str(folder)).claims()) == 1
        init(50)


def _attempt(call: Any, folder: Path, at: int | None) -> tuple[Points, list[str]]:
    points, wrong = Points(at), []
    try:
        points.run(call)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        wrong.append(f"{type(error).__name__}: {error}")
    if runtime.this.session is None:  # nothing is left that the next call would have to give back, but for what it says
        with contextlib.suppress(LeaseRefused):
            memguard.guard(budget(1), simulate="h200").__enter__()
    memguard.shutdown()
    if Store(str(folder)).claims() or locks._files or runtime.this.claimed:
        wrong.append(f"left: {Store(str(folder)).claims()} {locks._files} {runtime.this.claimed}")
    if locks.in_use is not None:
        wrong.append("the database is open")
    return points, wrong


@pytest.mark.parametrize("name", ["init", "replace", "shutdown"])
def test_an_interruption_at_each_point_leaves_nothing(name: str, folder: Path) -> None:
    stride = int(os.environ.get("MEMGUARD_TEST_STRIDE", "331"))

    def attempt(at: int | None) -> tuple[Points, list[str]]:
        if name != "init":
            init(60)
        call = {"init": lambda: init(60), "replace": lambda: init(80, replace=True), "shutdown": memguard.shutdown}
        return _attempt(call[name], folder, at)

    attempt(None)
    points, wrong = attempt(None)
    assert wrong == []
    failures = {}
    for at in range(1, points.count + 1, stride):
        interrupted, wrong = attempt(at)
        if wrong:
            failures[f"{at} {interrupted.place}"] = wrong
    print(f"{name}: {points.count} points, {len(failures)} wrong")
    assert failures == {}


def test_an_interruption_at_each_point_of_a_claim_and_its_end(folder: Path) -> None:
    """Closer: every few points of `take` and of `close`. What interrupts `close` is done by the next."""
    stride = max(int(os.environ.get("MEMGUARD_TEST_STRIDE", "331")) // 30, 1)
    part = {KEY: Part(KEY, GIB, TOTAL * GIB, 0, "NVIDIA H200")}

    def attempt(at: int | None) -> tuple[Points, list[str]]:
        points, lease = Points(at), Lease(part)

        def both() -> None:
            lease.take(1.0)
            lease.close()

        with contextlib.suppress(KeyboardInterrupt):
            points.run(both)
        lease.close()
        wrong = [] if not locks._files else [f"open: {locks._files}"]
        wrong += [] if not Store(str(folder)).claims() else ["a claim is left"]
        another = Lease({KEY: Part(KEY, TOTAL * GIB, TOTAL * GIB, 0, "NVIDIA H200")})
        another.take()
        another.close()
        return points, wrong

    attempt(None)
    points, _ = attempt(None)
    failures = {}
    for at in range(1, points.count + 1, stride):
        interrupted, wrong = attempt(at)
        if wrong:
            failures[f"{at} {interrupted.place}"] = wrong
    print(f"{points.count} points, {len(failures)} wrong")
    assert failures == {}


class WithoutOrdinals(SimulatedHost):
    """As NVML has its GPUs, which knows CUDA's numbers only if it is asked."""

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        return tuple(one if ordinals else replace(one, ordinal=None) for one in super().devices())


def test_a_rank_claims_the_gpu_that_it_uses_and_leaves_the_others_to_the_other_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(runtime, "open_host", lambda simulate: WithoutOrdinals(["h200", "h200"]))
    _, second = SimulatedHost(["h200", "h200"]).devices()
    guard = memguard.init(budget(100, ranks="auto"))
    assert [list(claim.parts) for claim in Store(str(folder)).claims()] == [[f"simulated:{second.uuid}"]]
    assert len(guard.plan.devices) == 2, "its caps hold on both"
    memguard.shutdown()
    memguard.init(budget(100))  # no budget for ranks: both
    assert [len(claim.parts) for claim in Store(str(folder)).claims()] == [2]


def test_after_a_wait_the_driver_may_still_free_what_the_last_holder_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is free with the lock, and its memory some moments later."""
    from memguard._devices.simulated import SimulatedHost

    memory, full = SimulatedHost.memory, [True] * 4

    def still_full(self: SimulatedHost, device: Device) -> Any:
        found = memory(self, device)
        return found._replace(used=found.used + found.free - GIB, free=GIB) if full and full.pop() else found

    with job(80) as first:
        assert heard(first) == "held"
        ending = threading.Timer(0.2, first.kill)
        ending.start()
        monkeypatch.setattr(SimulatedHost, "memory", still_full)
        try:
            guard = memguard.init(budget(70, "60s", on_busy="raise"), simulate="h200")
        finally:
            ending.join()
        assert guard.active and not full


# A database that is damaged, or somebody else's.


def damaged_schema(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.find(b"CREATE TABLE claims")
    data[at + 3 : at + 5] = b"\xff\xfe"
    path.write_bytes(data)


def not_a_database(path: Path) -> None:
    path.write_bytes(b"this is no database" * 400)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(*statements: str) -> Any:
    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for statement in ("PRAGMA ignore_check_constraints = ON", "PRAGMA foreign_keys = OFF", *statements):
                connection.execute(statement)
            connection.commit()

    return change


FAR = (1 << 63) - 1
DAMAGES = {
    "schema": damaged_schema,
    "no database": not_a_database,
    "cut off": cut_off,
    "bytes as text": changed("UPDATE parts SET bytes = 'x'"),
    "huge bytes": changed("UPDATE parts SET bytes = 9e300"),
    "PID as blob": changed("UPDATE processes SET pid = x'00ff'"),
    "machine as blob": changed("UPDATE processes SET machine = x'00ff'"),
    "no text": changed("UPDATE processes SET command = CAST(x'fffe' AS TEXT)"),
    "time without end": changed("UPDATE claims SET asked = 9e999"),
    "another state": changed("PRAGMA writable_schema = ON", "UPDATE claims SET state = 'lost'"),
    "a row far away": changed(f"UPDATE claims SET id = {FAR}", f"UPDATE parts SET claim = {FAR}"),
    "a process far away": changed(f"UPDATE processes SET id = {FAR}, listed = 1"),
    "a table is gone": changed("DROP TABLE parts"),
    "a column is gone": changed("ALTER TABLE processes DROP COLUMN by_others"),
    "another version": changed("PRAGMA user_version = 99"),
    "another program's": changed("DROP TABLE claims", "PRAGMA user_version = 0"),
}  # fmt: skip


@contextlib.contextmanager
def to_damage(folder: Path) -> Iterator[Path]:
    """The database while another process holds a lease. It is whole again at the end."""
    with job(20) as other:
        assert heard(other) == "held"
        path = folder / "leases.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        whole = path.read_bytes()
        try:
            yield path
        finally:
            memguard.shutdown()
            restored(path, whole)


def restored(path: Path, data: bytes) -> None:
    for log in path.parent.glob("leases.sqlite-*"):
        log.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("leased", [True, False])
def test_a_damaged_database_ends_no_init(
    folder: Path, damage: Any, leased: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with to_damage(folder) as path:
        damage(path)
        given = budget(10, suspend={"by_others": True})
        if not leased:
            del given["device"]["lease"]
        guard = memguard.init(given, simulate="h200")
        assert guard.active
        if leased and damage is not DAMAGES["a column is gone"]:  # that one is not of claims
            assert "runs without its lease, and others may claim the same bytes: " in caplog.text
            assert "    fix: end the processes that have leases, then `rm " in caplog.text


def test_bits_that_were_flipped_end_no_init(folder: Path) -> None:
    """Each time a lease, or the error that `init` makes a warning of."""
    with to_damage(folder) as path:
        whole, chance = path.read_bytes(), random.Random(33)
        used = [at for at, byte in enumerate(whole) if byte]
        errors = 0
        for _ in range(150):
            data = bytearray(whole)
            for at in chance.sample(used, 3):
                data[at] ^= 1 << chance.randrange(8)
            restored(path, bytes(data))
            lease = Lease({KEY: Part(KEY, GIB, 139 * GIB, 0, "NVIDIA H200")})
            for call in (lease.take, lambda: registry.every(str(folder))):
                try:
                    call()
                except UnusableDatabaseError:
                    errors += 1
            lease.close()
        assert errors > 50
