"""Why a process is not suspended: one table row for each reason, and that odd facts neither raise nor leave one
without a remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.units import GIB, MIB
from memguard._node.identity import Process
from memguard._node.suspend.checks import refusals
from memguard._node.suspend.checks.cgroups import Limit
from memguard._node.suspend.checks.facts import Child, Facts, Gpu

GPU = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be"
FINE = Facts(
    Process(4242, 99),
    inside=True,
    bytes={GPU: 16 * GIB},
    machine="x86_64",
    driver="580.159.04",
    calls=True,
    wsl=False,
    gpus=(Gpu(GPU, False, False, False),),
    available=64 * GIB,
    limits=(),
    running=True,
    state="S",
    frozen=False,
    tracer=0,
    user=1000,
    asker=1000,
    capable=False,
    dumpable=True,
    namespace=True,
    mps=False,
    uvm=1,
    tools=(),
    children=(),
    natives=(),
    ipc=(),
    nccl=(),
    captures=(),
    profilers=(),
)
NEEDS = refusals.host_needed(FINE.bytes)
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("process-gone", {"running": False}, "4242", "memguard ps"),
    ("wsl", {"wsl": True, "driver": None}, "WSL", "Linux"),
    ("driver-too-old", {"driver": "550.54.15"}, "550.54.15", "570"),
    ("driver-too-old", {"driver": None, "calls": False}, "cuCheckpointProcess", "570"),
    ("architecture", {"machine": "aarch64"}, "ARM", "595"),
    ("mig", {"gpus": (Gpu(GPU, True, False, False),)}, GPU, "whole GPU"),
    ("vgpu", {"gpus": (Gpu(GPU, False, True, False),)}, GPU, "whole GPU"),
    ("unified-memory", {"gpus": (Gpu(GPU, False, False, True),)}, GPU, "end the program"),
    ("no-permission", {"inside": False, "user": 0}, "user 0", "sudo -u '#0' memguard suspend 4242"),
    ("no-permission", {"inside": False, "dumpable": False}, "not dumpable", "start it again without"),
    ("other-namespace", {"inside": False, "namespace": False}, "namespace", "docker exec"),
    ("stopped", {"state": "T"}, "state T", "kill -CONT 4242"),
    ("stopped", {"state": "t", "tracer": 77}, "77", "detach"),
    ("frozen", {"frozen": True}, "frozen", "unpause"),
    ("debugger", {"tracer": 77}, "77", "detach"),
    ("mps", {"mps": True}, "MPS", "without MPS"),
    ("native-thread", {"natives": ("jax: xla_cuda_plugin.so",)}, "does not find where", "try again in 10 s"),
    ("native-thread", {"natives": ("jax: x.so",)}, "jax: x.so", "known to work: JAX 0.11.2"),
    ("native-thread", {"natives": ("jax: x.so",), "inside": False}, "jax: x.so", "by_others: true"),
    ("managed-memory", {"uvm": 2}, "2 times", "free all managed memory"),
    ("cuda-ipc", {"ipc": ("memguard.exchange: 1 array exported",)}, "1 array exported", "handle.close()"),
    ("nccl", {"nccl": ("torch.distributed: 1 process group of NCCL",)}, "torch.distributed", "destroy_process_group"),
    ("capture", {"captures": ("torch: a capture is under way",)}, "torch", "after the capture"),
    ("profiler", {"profilers": ("torch.profiler runs",)}, "torch.profiler", "stop the profiler"),
    ("profiler", {"tools": ("Nsight Systems (nsys)",)}, "nsys", "started again"),
    ("children", {"children": (Child(5, "python", GIB),)}, "python (5, 1.00 GiB)", "`memguard suspend --tree 4242`"),
    ("host-memory", {"available": 17 * GIB - 1}, "17.00 GiB", "host_memory: ignore"),
    ("host-memory", {"grantable": 17 * GIB - 1}, "17.00 GiB more", "overcommit"),
    ("host-memory", {"available": None}, "/proc/meminfo", "mount /proc"),
    ("cgroup-memory", {"limits": (Limit("/m/memory.max", 20 * GIB, 4 * GIB),)}, "16.00 GiB left", "docker update"),
    ("host-memory", {"available": GIB, "inside": False}, "17.05 GiB", "free 16.05 GiB of host memory"),
    ("cgroup-memory", {"limits": (Limit("/m/memory.high", 20 * GIB, 4 * GIB, False),)}, "crawl", "ignore"),
]


OUTSIDE: list[tuple[dict[str, Any], str]] = [
    ({"children": (Child(5, "python", GIB),)}, "`memguard suspend --unsafe --tree 4242`"),
    ({"natives": ("jax: x.so",)}, "let it call memguard.suspend()"),
]


def reasons(needs: int = NEEDS, **changes: Any) -> tuple[refusals.Reason, ...]:
    return refusals.reasons(dataclasses.replace(FINE, **changes), needs_host=needs)


def test_nothing_speaks_against_a_plain_process() -> None:
    assert reasons() == ()
    assert refusals.unknown(FINE) == ()


@pytest.mark.parametrize(("code", "changes", "said", "remedy"), TABLE)
def test_each_reason_alone_with_what_was_found_and_what_to_do(
    code: str, changes: dict[str, Any], said: str, remedy: str
) -> None:
    (found,) = reasons(**changes)
    assert found.code == code
    assert said in found.reason and remedy in found.remedy
    for line in (found.reason, found.remedy):
        assert line == line.strip() and "\n" not in line and len(line) < 420


@pytest.mark.parametrize(("changes", "remedy"), OUTSIDE)
def test_what_helps_from_outside_is_what_works_there(changes: dict[str, Any], remedy: str) -> None:
    (found,) = reasons(inside=False, **changes)
    assert remedy in found.remedy


@pytest.mark.parametrize("short", [{"available": GIB}, {"available": None}, {"grantable": 0}])
def test_the_way_round_for_host_memory_is_only_offered_where_there_is_one(short: dict[str, Any]) -> None:
    """`memguard suspend --unsafe` has no such option, and nothing can trim another process."""
    assert "host_memory: ignore" in reasons(**short)[0].remedy
    outside = reasons(inside=False, **short)[0].remedy
    assert "ignore" not in outside and "trim" not in outside


def test_every_code_has_a_row() -> None:
    assert {code for code, *_ in TABLE} == set(refusals.CODES)


def test_what_is_unknown_refuses_nothing_but_host_memory() -> None:
    (found,) = refusals.reasons(Facts(Process(1, 1), bytes={GPU: GIB}), needs_host=GIB)
    assert found.code == "host-memory"
    assert refusals.reasons(Facts(Process(1, 1)), needs_host=0) == ()


def test_a_process_that_is_gone_has_no_other_reason() -> None:
    assert [one.code for one in reasons(running=False, state="T", uvm=2, available=0)] == ["process-gone"]


def test_the_override_is_for_memory_alone() -> None:
    short = dataclasses.replace(FINE, available=0, limits=(Limit("/m", 1, 1),), uvm=2)
    assert [one.code for one in refusals.reasons(short, needs_host=NEEDS)] == [
        "managed-memory",
        "host-memory",
        "cgroup-memory",
    ]
    assert [one.code for one in refusals.reasons(short, needs_host=NEEDS, override_memory=True)] == ["managed-memory"]


def test_the_memory_needed_is_what_was_measured_and_some_more() -> None:
    assert refusals.host_needed({}) == 0
    assert refusals.host_needed({GPU: 20 * GIB, "GPU-b": 20 * GIB}) == 42 * GIB + 256 * MIB


@pytest.mark.parametrize("spare", [-1, 0])
def test_exactly_enough_memory_is_enough(spare: int) -> None:
    limits = (Limit("/m/memory.max", NEEDS + spare + GIB, GIB),)
    assert bool(reasons(available=NEEDS + spare)) == bool(reasons(limits=limits)) == (spare < 0)


def test_root_may_suspend_another_users_process_and_one_that_is_not_dumpable() -> None:
    assert reasons(inside=False, user=0, capable=True, dumpable=False) == ()


def test_the_driver_of_windows_is_not_called_too_old() -> None:
    assert [one.code for one in reasons(wsl=True, driver="546.01", calls=False)] == ["wsl"]


@pytest.mark.parametrize(("driver", "allowed"), [("570.00", True), ("569.99", False), ("1000.1", True), ("?", True)])
def test_the_first_driver_that_can(driver: str, allowed: bool) -> None:
    assert (reasons(driver=driver) == ()) is allowed


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("managed-memory", {"uvm": 2}),
        ("cuda-ipc", {"ipc": ("an array",)}),
        ("nccl", {"nccl": ("a group",)}),
        ("mig", {"gpus": (Gpu(GPU, True, False, False),)}),
        ("architecture", {"machine": "aarch64"}),
    ],
)
def test_the_table_says_which_drivers_are_refused(
    code: refusals.Code, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = refusals.BY_DRIVER[code]
    monkeypatch.setitem(refusals.BY_DRIVER, code, rule._replace(since=600, until=610))
    refused = [bool(reasons(driver=driver, **changes)) for driver in ("599.1", "600.0", "609.9", "610.1", "?")]
    assert refused == [False, True, True, False, False]


def test_cuda_ipc_is_refused_on_every_driver() -> None:
    """NVIDIA's 610 can do it, only for the processes of one job that are suspended together."""
    for driver in ("580.159", "610.43", "999", None):
        assert [one.code for one in reasons(driver=driver, ipc=("an array",))] == ["cuda-ipc"]


def test_the_table_in_the_docs_is_the_table() -> None:
    rows = []
    for rule in refusals.BY_DRIVER.values():
        drivers = "every driver" if rule.until is None else f"before {rule.until}"
        where = f" on {', '.join(rule.machines)}" if rule.machines else ""
        rows.append(f"| {rule.code} | {drivers}{where} | {rule.source} |\n")
    page = (Path(__file__).parents[2] / "docs" / "suspend.md").read_text(encoding="utf-8")
    assert "".join(rows) in page, f"docs/suspend.md needs these rows:\n{''.join(rows)}"


def test_arm_needs_a_later_driver() -> None:
    assert reasons(machine="aarch64", driver="595.71.05") == ()


def test_from_outside_the_hazards_that_nobody_could_see_are_listed() -> None:
    outside = dataclasses.replace(
        FINE,
        inside=False,
        natives=None,
        ipc=None,
        nccl=None,
        captures=None,
        profilers=None,
        unseen=("torch's groups\x1b",),
    )
    assert refusals.reasons(outside, needs_host=NEEDS) == ()
    lines = refusals.unknown(outside)
    words = ("framework", "IPC", "NCCL", "captured", "CUPTI")
    assert [word for word in words if not any(word in line for line in lines)] == []
    assert len(lines) == 6 and not any("\x1b" in line for line in lines)


text = st.text(max_size=300)
lines = st.none() | st.lists(text, max_size=6).map(tuple)
size = st.integers(-1, 1 << 70)
maybe = st.none() | st.booleans()
anything = st.builds(
    Facts,
    st.builds(Process, st.integers(), st.integers()),
    inside=st.booleans(),
    bytes=st.dictionaries(text, size, max_size=3),
    machine=st.none() | text | st.sampled_from(["aarch64", "x86_64"]),
    driver=st.none() | text | st.sampled_from(["570", "550.1", "9" * 400, "570.x"]),
    calls=maybe,
    wsl=maybe,
    gpus=st.lists(st.builds(Gpu, text, maybe, maybe, maybe), max_size=6).map(tuple),
    available=st.none() | size,
    grantable=st.none() | size,
    limits=st.none() | st.lists(st.builds(Limit, text, size, size, st.booleans()), max_size=4).map(tuple),
    running=maybe,
    state=st.none() | text | st.sampled_from("TtRSDZ"),
    frozen=maybe,
    tracer=st.none() | st.integers(),
    user=st.none() | st.integers(),
    asker=st.none() | st.integers(),
    capable=maybe,
    dumpable=maybe,
    namespace=maybe,
    mps=maybe,
    uvm=st.none() | st.integers(),
    tools=lines,
    children=st.none()
    | st.lists(st.builds(Child, st.integers(), text, st.none() | size), max_size=6).map(tuple),
    ipc=lines,
    nccl=lines,
    captures=lines,
    profilers=lines,
    unseen=st.lists(text, max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(facts=anything, needs=size, override=st.booleans())
def test_no_facts_raise_or_refuse_without_a_remedy(facts: Facts, needs: int, override: bool) -> None:
    found = refusals.reasons(facts, needs_host=needs, override_memory=override)
    for one in found:
        assert one.code in refusals.CODES
        assert one.reason.strip() and one.remedy.strip()
        assert (one.reason + one.remedy).isprintable() and len(one.reason) < 1500
    memory = [one for one in found if one.code in ("host-memory", "cgroup-memory")]
    assert not (override and memory)
    gone = [one.code for one in found] == ["process-gone"]
    if facts.available is not None and facts.available < needs and needs > 0 and not override and not gone:
        assert memory
    assert all(line.isprintable() for line in refusals.unknown(facts))
