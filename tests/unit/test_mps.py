"""What `memguard run --mps` hands to CUDA's Multi-Process Service, and what a process makes of a limit it finds."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.types import Device, DevicePlan, Plan
from memguard._base.units import GIB, MIB
from memguard._budget import from_mapping, mps, policy
from memguard._devices.simulated import SimulatedHost
from memguard.cli import main
from memguard.cli.support import ignored_environment
from memguard.cli.support import mps as service
from memguard.errors import ConflictingSetting, DeviceError, MemguardError

A, B = "GPU-aaaaaaaa-1111-1111-1111-111111111111", "GPU-bbbbbbbb-2222-2222-2222-222222222222"
SIZES = st.integers(MIB, 1 << 40)


def plan_of(*sizes: int, architecture: str = "hopper") -> Plan:
    devices = [
        Device(uuid, "NVIDIA H100", i, 1 << 41, 0, architecture, ordinal=i)
        for i, uuid in enumerate((A, B)[: len(sizes)])
    ]
    return Plan(tuple(DevicePlan(device, size, 0, {}, size) for device, size in zip(devices, sizes, strict=True)))


# The value


@given(st.lists(SIZES, min_size=1, max_size=2))
def test_the_value_is_never_above_the_plan_and_less_than_a_mebibyte_below(sizes: list[int]) -> None:
    plan = plan_of(*sizes)
    read = {entry.gpu: entry.size for entry in mps.parse(mps.value(mps.limits(plan)))}
    assert list(read) == [part.device.uuid for part in plan.devices]  # by UUID, and no other GPU
    assert all(0 <= part.limit - read[part.device.uuid] < MIB for part in plan.devices)


def test_the_value_has_the_form_that_cuda_documents() -> None:
    assert mps.value(mps.limits(plan_of(34 * GIB + 5, GIB // 2))) == f"{A}=34816M,{B}=512M"
    with pytest.raises(ValueError, match="1 MiB"):
        mps.value({A: MIB - 1})


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("0=1G,1=512MB", [("0", GIB), ("1", 512 * MIB)]),  # the documentation's example
        (f" {A} = 34816m", [(A, 34816 * MIB)]),
        ("GPU-aaaa=2G", [("GPU-aaaa", 2 * GIB)]),
        ("0=1024K", [("0", MIB)]),
    ],
)
def test_what_others_wrote_is_read(text: str, entries: list[tuple[str, int]]) -> None:
    assert [tuple(entry) for entry in mps.parse(text)] == entries


@pytest.mark.parametrize(
    "text", ["", "8G", "0=", "0=8", "0=1.5G", "0=8G,", "cuda:0=8G", "-1=8G", "0=8T", "0=8G;1=8G", "²=8G"]
)
def test_what_cannot_be_read_is_refused_and_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="ordinal or UUID"):
        mps.parse(text)


# Met with a value that is there


@settings(deadline=None)
@given(st.lists(SIZES, min_size=2, max_size=2), st.lists(st.none() | SIZES, min_size=2, max_size=2), st.booleans())
def test_the_stricter_holds_and_a_looser_one_is_refused(
    sizes: list[int], before: list[int | None], ordinals: bool
) -> None:
    plan = plan_of(*sizes)
    keys = ("0", "1") if ordinals else (A, B)
    whole = [None if size is None else size // MIB * MIB for size in before]
    text = ",".join(f"{key}={size // MIB}M" for key, size in zip(keys, whole, strict=True) if size is not None)
    wanted = list(mps.limits(plan).values())
    if any(had is not None and had > want for had, want in zip(whole, wanted, strict=True)):
        with pytest.raises(ConflictingSetting, match="more than its limit"):
            mps.strictest(plan, text)
        return
    found = list(mps.strictest(plan, text).values())
    assert found == [want if had is None else min(had, want) for had, want in zip(whole, wanted, strict=True)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0=40G", "allows 40.00 GiB of NVIDIA H100"),
        ("0=8G,1=8G", "names 1, and MPS drops every memory limit"),  # this process sees one GPU
        (f"{B}=8G", f"names {B}, and MPS drops every memory limit"),
        ("0=lots", "cannot be read"),
    ],
)
def test_a_value_that_cannot_stay_is_refused_with_a_fix(text: str, says: str) -> None:
    with pytest.raises(ConflictingSetting) as error:
        mps.strictest(plan_of(34 * GIB), text)
    assert says in str(error.value)
    assert "\n    fix: unset CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: --mps sets it" in str(error.value)
    assert error.value.setting == f"{mps.LIMIT}={text}"


def test_the_smaller_of_two_entries_for_a_gpu_counts() -> None:
    assert mps.strictest(plan_of(34 * GIB), f"0=20G,{A[:8]}=30G") == {A: 20 * GIB}


# What a process warns of that finds the variable


@pytest.mark.parametrize("text", [None, "", "0=34816M", "0=40G,1=40G", f"{A}=34G"])
def test_nothing_is_said_of_a_value_that_leaves_room_for_the_budget(text: str | None) -> None:
    assert list(mps.shortfalls(plan_of(34 * GIB, 34 * GIB), text)) == []


def test_a_process_is_told_where_mps_gives_it_less_than_its_budget() -> None:
    (said,) = mps.shortfalls(plan_of(34 * GIB, 34 * GIB), "0=8G")
    assert str(said).startswith(
        f"under MPS this process may have 8.00 GiB of NVIDIA H100 ({A}), less than its limit of 34.00 GiB"
    )


def test_a_process_is_told_that_a_gpu_it_does_not_see_takes_all_limits_away() -> None:
    (said,) = mps.shortfalls(plan_of(34 * GIB), "0=8G,1=8G")
    assert "names 1, which this process does not see, and MPS drops every memory limit" in said.reason and said.fix
    (unread,) = mps.shortfalls(plan_of(34 * GIB), "all of it")
    assert "cannot be read" in unread.reason


def test_where_cuda_has_not_told_its_numbers_only_uuids_say_something() -> None:
    plan = plan_of(34 * GIB, 34 * GIB)
    unasked = Plan(tuple(replace(part, device=replace(part.device, ordinal=None)) for part in plan.devices))
    assert list(mps.shortfalls(unasked, "0=8G,5=8G")) == []
    (short,) = mps.shortfalls(unasked, f"{B}=8G")
    assert B in short.reason
    (stray,) = mps.shortfalls(unasked, "0=8G,GPU-cccc=8G")
    assert "names GPU-cccc, which this process does not see" in stray.reason


class RealLooking(SimulatedHost):
    """A host of which the guard believes that its GPUs are there."""

    simulated = False


@pytest.mark.parametrize("value", ["0=8G", None])
def test_init_warns_of_the_limit(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from memguard._guard.guard import Guard

    if value is not None:
        monkeypatch.setenv(mps.LIMIT, value)
    budget = from_mapping({"version": 1, "device": {"limit": "34GiB"}, "frameworks": {"torch": {"share": "50%"}}})
    guard = Guard(budget, RealLooking(["h100"]))
    guard._warn_of_mps()
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "under MPS" in text] == said
    assert len(said) == (1 if value else 0)
    caplog.clear()
    Guard(budget, SimulatedHost(["h100"]))._warn_of_mps()  # no service has a simulated GPU
    assert not caplog.records


# The daemon


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A short path, as a socket's has at most 107 bytes."""
    return tmp_path


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., socket.socket]]:
    opened: list[socket.socket] = []

    def call(folder: Path = tmp_path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, kind)
        opened.append(one)
        one.bind(str(folder / "control"))
        if kind != socket.SOCK_DGRAM:
            one.listen(1)
        return one

    yield call
    for one in opened:
        one.close()


def silence(folder: Path) -> str:
    with pytest.raises(MemguardError) as error:
        service.require_daemon({service.PIPES: str(folder)})
    assert "\n    fix: " in str(error.value) and "leave --mps out" in str(error.value)
    return str(error.value)


def test_a_daemon_that_listens_is_found_and_does_not_notice(folder: Path, listen: Callable[..., socket.socket]) -> None:
    daemon = listen()
    daemon.setblocking(False)
    service.require_daemon({service.PIPES: str(folder)})
    with pytest.raises(BlockingIOError):
        daemon.accept()


def test_a_daemon_that_has_gone_is_no_daemon(folder: Path, listen: Callable[..., socket.socket]) -> None:
    assert f"there is no {folder}/control" in silence(folder)
    listen().close()
    assert "nobody listens" in silence(folder)
    assert f"`CUDA_MPS_PIPE_DIRECTORY={folder} nvidia-cuda-mps-control -d`" in silence(folder)


def test_what_is_no_daemons_socket_is_none(folder: Path, listen: Callable[..., socket.socket]) -> None:
    (folder / "control").write_text("")
    assert "is no socket" in silence(folder)
    (folder / "control").unlink()
    listen(kind=socket.SOCK_DGRAM)
    assert "something else" in silence(folder)


def test_a_daemon_of_another_user_is_not_this_users(
    folder: Path, listen: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen()

    class Refused(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(service.socket, "socket", Refused)
    said = silence(folder)
    assert f"no MPS control daemon: {folder}/control may not be opened by this user\n    fix: run as the user" in said


def test_where_nobody_says_where_the_daemon_is(
    folder: Path, listen: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = folder / "nowhere"
    monkeypatch.setattr(service, "_FOLDER", str(nowhere))
    monkeypatch.setattr(service, "_ROOTS", str(nowhere))
    with pytest.raises(MemguardError, match="fix: start it with `nvidia-cuda-mps-control -d`; or leave --mps out"):
        service.require_daemon({})
    listen()
    monkeypatch.setattr(service, "_ROOTS", str(folder))  # MPS v3, run by root: CUDA does not look there by itself
    with pytest.raises(MemguardError, match=f"fix: export CUDA_MPS_PIPE_DIRECTORY={folder}: a daemon listens there"):
        service.require_daemon({service.PIPES: ""})
    monkeypatch.setattr(service, "_FOLDER", str(folder))
    service.require_daemon({})


# The command


def test_simulated_gpus_are_told_of_and_nothing_is_set(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text("version: 1\ndevice: {limit: 34GiB}\nframeworks: {torch: {share: 50%}}\n")
    budget = from_mapping({"version": 1, "device": {"limit": "34GiB"}, "frameworks": {"torch": {"share": "50%"}}})
    environ, said = service.environment({"A": "b"}, budget, ["h100", "l40s"])
    uuids = [device.uuid for device in SimulatedHost(["h100", "l40s"]).devices()]
    assert environ == {"A": "b"}
    assert f"--mps would set {mps.LIMIT}={uuids[0]}=34816M,{uuids[1]}=34816M; these GPUs are simulated" in said


@pytest.mark.parametrize(
    ("ranks", "environ", "size", "noted"),
    [
        ("auto", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 17, False),
        ({"per_gpu": 4}, {}, 8.5, False),
        ("auto", {}, 34, True),  # torchrun itself: each rank would inherit the whole limit
    ],
)
def test_a_rank_has_its_part_of_the_limit(ranks: object, environ: dict[str, str], size: float, noted: bool) -> None:
    given = {"version": 1, "ranks": ranks, "device": {"limit": "34GiB"}, "frameworks": {"torch": {"share": "50%"}}}
    _, said = service.environment(environ, from_mapping(given), ["h100"])
    assert f"={int(size * 1024)}M; these GPUs" in said
    assert ("\n    note: this process is no rank" in said) == noted


def test_limits_of_single_gpus_are_those_of_the_plan() -> None:
    given = {
        "version": 1,
        "device": {"limit": "50%"},
        "devices": {"1": {"limit": "8GiB"}},
        "frameworks": {"torch": {"share": "50%"}},
    }
    plan = policy.plan(from_mapping(given), SimulatedHost(["h100", "h100"]).devices())
    first, second = mps.limits(plan).values()
    assert second == 8 * GIB and first == (81_559 - 551) * MIB // 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mps", "--when-idle", "10min"], "not possible under MPS"),
        (["--mps", "--record", "run.jsonl"], "without a budget"),
    ],
)
def test_what_does_not_go_with_it(options: list[str], says: str) -> None:
    done = CliRunner().invoke(main, ["run", *options, "--", "python", "train.py"])
    assert done.exit_code == 2 and says in done.output


def test_gpus_older_than_volta_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_plan", lambda *_: plan_of(8 * GIB, architecture="pascal"))
    budget: Any = None
    with pytest.raises(DeviceError, match="older than Volta"):
        service.environment({}, budget, [])


def test_where_there_is_no_linux_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(socket, "AF_UNIX")
    budget: Any = None
    with pytest.raises(DeviceError, match="this is Windows"):
        service.environment({}, budget, [])


def test_a_command_that_shows_other_gpus_or_another_daemon_is_refused() -> None:
    command = ["env", "CUDA_VISIBLE_DEVICES=1", sys.executable, "train.py"]
    ignored_environment.check(command)  # without --mps nothing is wrong with it
    with pytest.raises(MemguardError, match="env replaces CUDA_VISIBLE_DEVICES, which memguard has read"):
        ignored_environment.check(command, service.READ)
    with pytest.raises(MemguardError, match="CUDA_MPS_PIPE_DIRECTORY"):
        ignored_environment.check(["env", "-u", service.PIPES, "python"], service.READ)
    with pytest.raises(MemguardError, match="env replaces PYTHONPATH, which memguard sets"):
        ignored_environment.check(["env", f"PYTHONPATH={os.curdir}", "python"], service.READ)
