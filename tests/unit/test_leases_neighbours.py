"""The leases against what NVML lists, and `memguard leases`, which shows both."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from leasing import GPU, heard, other, until
from test_cli import call

import memguard
from memguard._base.types import Device
from memguard._base.units import GIB, MIB
from memguard._devices.nvml import Nvml
from memguard._devices.simulated import SimulatedHost
from memguard._node.identity import machine
from memguard._node.leases import listing as listings
from memguard._node.leases import neighbours as leases
from memguard._node.leases.lease import Lease
from memguard._node.leases.listing import Listing, listing
from memguard._node.leases.neighbours import Neighbour, Watch, neighbours, sentence
from memguard._node.leases.types import Claim, Part, State
from memguard.cli.leases import table
from memguard.errors import DeviceError

HERE = "boot pid:[4026531836]"
ELSEWHERE, CONTAINER = "boot pid:[4026532999]", "boot pid:[4026532111]"
PART = Part(GPU, 34 * GIB, 140 * GIB, 0, "NVIDIA H200")


def claim(pid: int, gib: int = 34, where: str = HERE, state: State = "held", number: int = 0, **more: Any) -> Claim:
    part = PART._replace(bytes=gib * GIB)
    since = 1000.0 if state == "held" else None
    found = Claim(number or pid, pid, 7, where, f"python {pid}.py", "b.yaml", state, 900.0, since, None, {GPU: part})
    return found._replace(**more)


@pytest.mark.parametrize(
    ("claims", "listed", "found"),
    [
        ([], {}, []),
        ([], {5: 3 * GIB}, [(5, 3 * GIB, None)]),
        ([], {5: None}, [(5, None, None)]),
        ([claim(5)], {5: 34 * GIB}, []),
        ([claim(5)], {5: 34 * GIB + 1}, [(5, 34 * GIB + 1, 34 * GIB)]),
        ([claim(5)], {5: None}, []),  # what is not known is no accusation
        ([claim(5)], {}, []),  # it has no context yet
        ([claim(5, state="waiting")], {5: GIB}, [(5, GIB, None)]),  # who waits has nothing yet
        ([claim(1, gib=2)], {1: 9 * GIB, 6: GIB}, [(6, GIB, None)]),  # not this process itself
        ([claim(5, gib=2), claim(5, gib=40, number=9)], {5: 30 * GIB}, []),  # one takes the other's place
        # another container's lease: which process of NVML's is it?
        ([claim(5, where=ELSEWHERE)], {77: 30 * GIB}, []),
        ([claim(5, where=ELSEWHERE)], {77: 30 * GIB, 78: 5 * GIB}, [(None, 35 * GIB, 34 * GIB)]),
        ([claim(5, where=ELSEWHERE), claim(6)], {77: 30 * GIB, 6: 35 * GIB}, [(6, 35 * GIB, 34 * GIB)]),
        ([claim(5, where=ELSEWHERE)], {77: None, 78: 5 * GIB}, []),
    ],
)
def test_who_has_more_than_its_lease(claims: list[Claim], listed: dict[int, int | None], found: list[Any]) -> None:
    assert neighbours(claims, {GPU: listed}, HERE, 1) == [Neighbour(GPU, *one) for one in found]


def test_in_a_container_only_sums_are_compared() -> None:
    """Its own PIDs are not NVML's: the process that NVML calls 5 is another one."""
    claims = [claim(5, where=CONTAINER), claim(1, where=CONTAINER)]
    assert neighbours(claims, {GPU: {5: 60 * GIB}}, CONTAINER, 1) == []
    assert neighbours(claims, {GPU: {5: 70 * GIB}}, CONTAINER, 1) == [Neighbour(GPU, None, 70 * GIB, 68 * GIB)]


def test_what_is_said_of_them() -> None:
    claims = [claim(5)]
    assert sentence(Neighbour(GPU, 5, 40 * GIB, 34 * GIB), PART, claims, HERE) == (
        "process 5 (python 5.py, b.yaml) uses 40.00 GiB of GPU 0 (NVIDIA H200), 6.00 GiB above its lease"
    )
    text = sentence(Neighbour(GPU, os.getpid(), 3 * GIB, None), PART, claims, HERE)
    assert text.startswith(f"process {os.getpid()} (") and text.endswith(
        "uses 3.00 GiB of GPU 0 (NVIDIA H200) without a lease"
    )
    same_number = claim(os.getpid(), where="elsewhere")  # of another container
    assert sentence(Neighbour(GPU, os.getpid(), 3 * GIB, None), PART, [same_number], HERE) == text
    text = sentence(Neighbour(GPU, os.getpid(), None, None), PART, claims, HERE)
    assert text.endswith("uses GPU 0 (NVIDIA H200), how much is unknown, without a lease")
    text = sentence(Neighbour(GPU, None, 35 * GIB, 34 * GIB), PART, claims, HERE)
    assert "another container" in text and text.endswith("1.00 GiB above their leases")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMGUARD_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


@pytest.fixture
def own(folder: Path) -> Iterator[Lease]:
    one = Lease({GPU: PART})
    one.take()
    yield one
    one.close()


def test_each_is_named_once_and_again_when_it_uses_much_more(own: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "machine", lambda: HERE)
    listed: dict[int, int | None] = {}
    watch = Watch(own, lambda: {GPU: listed})

    def named() -> list[str]:
        return [event.text for event in watch.look() if event.kind == "lease" and event.uuid == GPU]

    own.store.change(lambda connection, _: connection.execute("UPDATE processes SET machine = ?", (HERE,)))
    assert named() == []
    listed[2**22] = GIB
    (text,) = named()
    assert "uses 1.00 GiB of GPU 0 (NVIDIA H200) without a lease" in text
    listed[2**22] = GIB + 100 * MIB
    assert named() == []
    listed[2**22] = GIB + 600 * MIB
    assert len(named()) == 1 and named() == []
    del listed[2**22]
    assert named() == []
    listed[2**22] = GIB
    assert len(named()) == 1, "it has come back"


def test_it_looks_now_and_then_and_what_fails_harms_nobody(own: Lease) -> None:
    asked: list[int] = []

    def fails() -> Any:
        asked.append(1)
        raise DeviceError("the GPU is lost")

    watch = Watch(own, fails)
    assert watch.due() == watch.due() == [] and len(asked) == 1


def test_a_lease_that_somebody_removed_is_said_to_be_gone_once(own: Lease, folder: Path) -> None:
    watch = Watch(own, dict)
    for path in folder.glob("leases.sqlite*"):
        path.unlink()
    (event,) = watch.look()
    assert event.kind == "lease" and "is gone from" in event.text and str(folder) in event.text
    assert watch.look() == []


@pytest.mark.usefixtures("nothing_stays")
def test_init_names_them_and_the_monitor_those_that_come_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    listed: dict[int, int | None] = {2**22: GIB}
    real = SimulatedHost.processes
    monkeypatch.setattr(SimulatedHost, "processes", lambda self, device: {**real(self, device), **listed})
    monkeypatch.setattr(leases, "pids_mean_the_same", lambda here: True)
    monkeypatch.setattr(leases, "AGAIN", 0.1)
    events: list[memguard.types.Event] = []
    memguard.on_event(events.append)
    budget = {
        "version": 1, "device": {"limit": "60GiB", "lease": True}, "frameworks": {"torch": {"share": "50%"}},
        "monitor": {"interval": "50ms", "timeline": str(tmp_path / "run.jsonl")},
    }  # fmt: skip
    with memguard.guard(budget, simulate="h200"):
        (first,) = [record.getMessage() for record in caplog.records if "without a lease" in record.getMessage()]
        assert f"process {2**22} (unknown) uses 1.00 GiB of simulated GPU 0 (NVIDIA H200) without a lease" == first
        listed[2**22 - 1] = 2 * GIB
        until(lambda: sum(event.kind == "lease" for event in events) == 2)
    assert len([record for record in caplog.records if "without a lease" in record.getMessage()]) == 2
    found = [
        event for event in memguard.load_timeline(next(tmp_path.glob("run*.jsonl"))).events() if event.kind == "lease"
    ]
    assert [event.bytes for event in found] == [GIB, 2 * GIB]


# The command.


def test_the_table_shows_who_holds_what_who_waits_and_what_is_free() -> None:
    waiting = claim(8, 90, state="waiting")
    simulated = {f"simulated:{GPU}": PART._replace(gpu=f"simulated:{GPU}", bytes=GIB)}
    claims = [claim(5), claim(6, 20, ELSEWHERE), waiting, claim(9, 1, state="waiting"), claim(10, parts=simulated)]
    gpus, others = listing(claims, {GPU: {5: 40 * GIB, 11: GIB}}, HERE)
    notes = tuple(sentence(one, PART, claims, HERE) for one in others)
    shown = table(Listing("/leases", tuple(gpus), tuple(others), "ok", notes), 1060.0).splitlines()
    at = time.strftime("%H:%M", time.localtime(1000))
    asked = time.strftime("%H:%M", time.localtime(900))
    assert [" ".join(line.split()) for line in shown] == [
        "GPU PID COMMAND BUDGET LEASE USED STATE",
        f"0 5 python 5.py b.yaml 34.00 GiB 40.00 GiB held since {at}",
        f"0 unknown python 6.py b.yaml 20.00 GiB unknown held since {at}",
        f"0 8 python 8.py b.yaml 90.00 GiB 0 B waiting since {asked}",
        f"0 9 python 9.py b.yaml 1.00 GiB 0 B waiting since {asked}, 1 before it",
        f"0 (simulated) 10 python 10.py b.yaml 1.00 GiB unknown held since {at}",
        "GPU 0 (NVIDIA H200): 54.00 GiB of 140.00 GiB leased, 86.00 GiB free of leases",
        "simulated GPU 0 (NVIDIA H200): 1.00 GiB of 140.00 GiB leased, 139.00 GiB free of leases",
        "note: process 5 (python 5.py, b.yaml) uses 40.00 GiB of GPU 0 (NVIDIA H200), 6.00 GiB above its lease",
    ]


def test_control_characters_of_a_command_are_not_printed() -> None:
    gpus, _ = listing([claim(5, command="python \x1b[31m\nevil", budget="b\x07")], {}, HERE)
    shown = table(Listing("/leases", tuple(gpus), (), "row 3 missing", ()), 1060.0)
    assert "\x1b" not in shown and "\x07" not in shown and len(shown.splitlines()) == 4
    assert shown.splitlines()[-1] == "note: the database is damaged: row 3 missing"


def test_without_a_driver_the_leases_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise DeviceError("no NVIDIA driver here", fix="install one")

    monkeypatch.setattr(listings, "Nvml", missing)
    assert call("leases") == 3
    assert capsys.readouterr().out == f"nobody has a lease in {folder}\n"
    with ExitStack() as both:
        child = both.enter_context(other(folder, 60))
        assert heard(child) == "held"
        second = both.enter_context(other(folder, 50, 60))
        assert heard(second).startswith("waiting")
        assert call("leases") == 3
        shown = capsys.readouterr().out
        assert f"{child.pid}" in shown and "60 B" in shown and "held since" in shown and "waiting since" in shown
        assert "GPU 0 (NVIDIA H200): 60 B of 100 B leased, 40 B free of leases" in shown
        assert shown.splitlines()[-1] == "note: what is used is unknown: no NVIDIA driver here"
        assert call("leases", "--json") == 3
        found = json.loads(capsys.readouterr().out)
        assert found["memguard_leases"] == 1 and found["database"] == "ok" and found["neighbours"] == []
        (gpu,) = found["gpus"]
        assert (gpu["uuid"], gpu["leased"], gpu["free"], gpu["simulated"]) == (GPU, 60, 40, False)
        assert [(one["pid"], one["bytes"], one["used"], one["state"], one["ahead"]) for one in gpu["claims"]] == [
            (child.pid, 60, None, "held", None),
            (second.pid, 50, None, "waiting", 0),
        ]


def test_what_nvml_lists_is_beside_the_leases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(Nvml):
        def __init__(self) -> None: ...

        def devices(self) -> tuple[Device, ...]:
            return (Device(GPU, "NVIDIA H200", 0, 140 * GIB, 0, "hopper"),)

        def processes(self, uuid: str) -> dict[int, int | None]:
            return {child.pid: 61, 2**22: GIB}

        def close(self) -> None: ...

    monkeypatch.setattr(listings, "Nvml", Fake)
    monkeypatch.setattr(leases, "pids_mean_the_same", lambda here: True)
    with other(folder, 60) as child:
        assert heard(child) == "held"
        found = listings.read()
        assert [row.used for gpu in found.gpus for row in gpu.rows] == [61]
        assert {(one.pid, one.used, one.leased) for one in found.neighbours} == {
            (child.pid, 61, 60),
            (2**22, GIB, None),
        }
        assert any("1 B above its lease" in note for note in found.notes) and len(found.notes) == 2


def test_a_database_that_cannot_be_read_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(0o700)
    for name in ("leases.sqlite", "leases.lock"):
        (folder / name).write_bytes(b"no database" * 500)
        (folder / name).chmod(0o600)
    assert call("leases") == 4
    assert "is damaged" in capsys.readouterr().err


def test_this_machines_name_says_which_pids_nvml_has() -> None:
    assert leases.pids_mean_the_same(HERE) and not leases.pids_mean_the_same(CONTAINER)
    assert leases.pids_mean_the_same(machine()) == (os.readlink("/proc/self/ns/pid") == "pid:[4026531836]")


def test_who_lists_leases_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_LEASES", str(tmp_path / "leases"))
    assert listings.read().gpus == () and not list(tmp_path.iterdir())
    monkeypatch.delenv("MEMGUARD_LEASES")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert listings.read().folder == str(tmp_path / "memguard") and not list(tmp_path.iterdir())
