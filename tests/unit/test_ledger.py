"""The ledger: rows that add up to the byte, nothing unknown printed as 0, overhead charged only when it appears."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, FrozenInstanceError, asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.framework_spec import LAZY, LIBRARIES
from memguard._base.types import POOL as SHARED_POOL
from memguard._base.types import Device, DevicePlan, MemoryInfo, Usage
from memguard._base.units import GIB, MIB, TIB
from memguard._budget import from_mapping, policy
from memguard._frameworks.specs import SPECS
from memguard._ledger.overhead import ANY, Overhead, expected_overhead, held_by, own_bytes, same_held
from memguard._ledger.rows import Reading, device_ledger, sample_of_reading
from memguard._ledger.types import EXCHANGE, DeviceLedger, Ledger, Row, html_ledger

H200 = Device("GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53", "NVIDIA H200", 0, 143_771 * MIB, 615 * MIB, "hopper", 0)
CONTEXT = 518 * MIB
FIRST = Overhead().after(612 * MIB, frozenset({"context", "torch"}))
more = settings(max_examples=200, deadline=None)


def part_of(device: Device = H200, **frameworks: Any) -> DevicePlan:
    budget = from_mapping({"version": 1, "frameworks": frameworks or {"torch": {"share": "50%"}}})
    return policy.plan(budget, [device]).devices[0]


def reading(own: int = 0, others: int = 0, v2: bool = True) -> MemoryInfo:
    """An H200 as NVML gives it: v1 has no `reserved` and counts the driver's part as used."""
    used, free = own + others, H200.usable - own - others
    return MemoryInfo(H200.total, 615 * MIB, used, free) if v2 else MemoryInfo(H200.total, None, used + 615 * MIB, free)


def total(ledger: DeviceLedger) -> int:
    return sum(row.bytes for row in ledger.rows if row.bytes is not None)


def test_rows_of_a_quiet_process() -> None:
    usages = {"torch": Usage(4 * GIB, 3 * GIB, GIB // 2), "pycuda": None}
    own = 4 * GIB + 612 * MIB + 7
    plan = part_of(torch={"share": "50%"}, pycuda={"limit": "1GiB"})
    state = Overhead().after(own - 4 * GIB, frozenset({"context", "torch"}))
    ledger = device_ledger(
        Reading(H200, reading(own, GIB), own, usages, state), plan, {"torch": "enforced", "pycuda": "pending"}
    )
    assert [row.name for row in ledger.rows] == [
        "torch", "pycuda", "overhead", "unaccounted", "other processes", "driver reserve", "free",
    ]  # fmt: skip
    torch = ledger.row("torch")
    assert (torch.bytes, torch.in_use, torch.cached, torch.reclaimable) == (4 * GIB, 3 * GIB, GIB, GIB // 2)
    assert torch.cap == plan.caps["torch"] and torch.enforcement == "enforced" and torch.note == ""
    assert ledger.row("pycuda").bytes == 0 and ledger.row("pycuda").enforcement == "pending"
    assert ledger.row("overhead").bytes == 612 * MIB + 7 and ledger.row("unaccounted").bytes == 0
    assert ledger.row("other processes").bytes == GIB and ledger.row("driver reserve").bytes == 615 * MIB
    assert ledger.process == own and ledger.limit == plan.limit
    assert total(ledger) == H200.total
    with pytest.raises(KeyError):
        ledger.row("cupy")


BYTES = st.integers(0, TIB)
USAGE = st.one_of(
    st.none(),
    st.builds(Usage, BYTES, BYTES | st.none(), BYTES | st.none()),
    st.builds(Usage, st.none(), BYTES | st.none(), st.none(), BYTES | st.none(), BYTES | st.none()),
)


@st.composite
def memories(draw: st.DrawFn) -> MemoryInfo:
    reserved = draw(st.none() | st.integers(0, GIB))
    used, free = draw(BYTES), draw(BYTES)
    return MemoryInfo((reserved or 0) + used + free, reserved, used, free)


@more
@given(
    memories(),
    BYTES | st.none(),
    st.dictionaries(st.sampled_from(["torch", "tensorflow", "pycuda"]), USAGE),
    st.integers(0, 4 * GIB),
    st.booleans(),
)
def test_rows_add_up_to_the_byte_whatever_is_read(
    memory: MemoryInfo, own: int | None, usages: Mapping[str, Usage | None], charged: int, planned: bool
) -> None:
    ledger = device_ledger(Reading(H200, memory, own, usages, Overhead(charged)), part_of() if planned else None)
    assert total(ledger) == memory.total
    assert ledger.row("free").bytes == memory.free
    names = [row.name for row in ledger.rows]
    assert len(names) == len(set(names)) and (not planned or names[0] == "torch")
    str(Ledger(0.0, (ledger,)))


LOOKS: dict[str, Callable[[DeviceLedger], Any]] = {
    "rows": lambda one: one.rows,
    "equal": lambda one: one == replace(one),
    "hash": hash,
    "repr": repr,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda one: replace(one, limit=one.limit),
    "asdict": asdict,
    "a row": lambda one: one.row("torch"),
    "sum": lambda one: one.sum,
}


@pytest.mark.parametrize("look", LOOKS)
def test_rows_that_are_made_when_somebody_looks_are_as_if_made_at_once(look: str) -> None:
    """Whatever looks first, and however often; and nobody can set them, before or after."""
    usages = {"torch": Usage(4 * GIB, 3 * GIB, GIB // 2)}
    own = 4 * GIB + 612 * MIB
    later = device_ledger(
        Reading(H200, reading(own, GIB), own, usages), part_of(), {"torch": "enforced"}, {"torch": (2, 9.0)}
    )
    other = device_ledger(
        Reading(H200, reading(own, GIB), own, usages), part_of(), {"torch": "enforced"}, {"torch": (2, 9.0)}
    )
    at_once = DeviceLedger(other.device, other.rows, other.process, other.limit, other.moved)
    assert "rows" not in vars(later)
    with pytest.raises(FrozenInstanceError):
        later.rows = ()  # type: ignore[misc]
    with pytest.raises(AttributeError, match="'column'"):
        _ = later.column  # type: ignore[attr-defined]
    found = LOOKS[look](later)
    assert found == LOOKS[look](at_once) == LOOKS[look](later)
    assert later == at_once and later.rows is later.rows and vars(later) == vars(at_once)
    with pytest.raises(FrozenInstanceError):
        later.rows = ()  # type: ignore[misc]


@more
@given(BYTES, st.dictionaries(st.sampled_from(["torch", "tensorflow"]), USAGE), st.integers(0, 4 * GIB))
def test_unaccounted_is_the_gap_less_what_is_charged(
    own: int, usages: Mapping[str, Usage | None], charged: int
) -> None:
    memory = MemoryInfo(4 * TIB, 0, 3 * TIB, TIB)
    reading = Reading(H200, memory, own, usages, Overhead(charged))
    row, sample = device_ledger(reading).row("unaccounted"), sample_of_reading(reading, part_of())
    assert row.bytes == sample.unaccounted == own - held_by(usages).bytes - charged


def test_unaccounted_is_signed() -> None:
    """A framework that counts more than the driver saw yet: the difference is shown, not hidden."""
    ledger = device_ledger(Reading(H200, reading(GIB), GIB, {"torch": Usage(2 * GIB, GIB)}, Overhead()))
    assert ledger.row("unaccounted").bytes == -GIB and total(ledger) == H200.total
    assert "-1,024.0" in str(Ledger(0.0, (ledger,)))


# What NVML will not say


def test_a_process_without_bytes_is_unknown_and_not_zero() -> None:
    usages = {"torch": Usage(GIB, GIB, 0)}
    ledger = device_ledger(Reading(H200, reading(GIB + CONTEXT, 5 * GIB), None, usages, Overhead()))
    assert ledger.process is None and ledger.row("other processes").bytes is None
    assert ledger.row("unaccounted").bytes == CONTEXT + 5 * GIB and total(ledger) == H200.total
    text = str(Ledger(0.0, (ledger,)))
    assert "this process: unknown" in text and _cells(text, "other processes*") == ["unknown"]
    assert "this process and others together" in " ".join(text.split())


def test_own_bytes() -> None:
    assert own_bytes({7: GIB, 8: 1}, 7, True) == GIB
    assert own_bytes({7: None}, 7, True) is None, "listed without bytes (WSL, some MIG and vGPU)"
    assert own_bytes({9: GIB}, 7, True) is None, "a container: NVML lists the host's PIDs"
    assert own_bytes({9: GIB}, 7, False) == 0, "nothing of this process is there"
    assert own_bytes({7: 0}, 7, False) == 0


def test_held() -> None:
    exact, bounded = Usage(GIB, 1), Usage(None, 5, held_at_least=MIB)
    known = {"torch": exact, "cupy": None, "tensorflow": bounded, SHARED_POOL: exact, EXCHANGE: exact}
    assert held_by(known) == (3 * GIB + MIB, frozenset({"torch", "tensorflow"}), False, MIB)
    assert held_by({"torch": exact}) == (GIB, frozenset({"torch"}), True, 0)
    assert held_by({"tensorflow": Usage(None, None)}) == (0, frozenset({"tensorflow"}), False, 0)


def test_a_sample_is_a_reading_with_caps() -> None:
    usages = {"torch": Usage(2 * GIB, GIB, MIB, peak=GIB), "cupy": None, "tensorflow": Usage(None, 5)}
    sample = sample_of_reading(Reading(H200, reading(3 * GIB), 3 * GIB, usages, Overhead(MIB)), part_of())
    assert sample.frameworks == {
        "torch": (2 * GIB, GIB, MIB, part_of().caps["torch"]),
        "tensorflow": (None, 5, None, part_of().caps.get("tensorflow")),
    }
    assert (sample.process, sample.overhead, sample.unaccounted) == (3 * GIB, MIB, GIB - MIB)
    unknown = sample_of_reading(Reading(H200, reading(3 * GIB), None, usages, Overhead(MIB)), part_of())
    assert unknown.process is unknown.unaccounted is None and unknown.overhead == MIB


def test_the_pool_and_its_frameworks_hold_their_memory_together() -> None:
    before = {
        "torch": Usage(3, 3),
        "cupy": Usage(2, 2),
        SHARED_POOL: Usage(5, 0),
        "jax": Usage(None, 9, held_at_least=4),
    }
    after = {**before, "torch": Usage(1, 1), SHARED_POOL: Usage(7, 0)}
    assert same_held(before, after, ["torch", "cupy"]) and not same_held(before, after, ["cupy"])
    assert same_held(before, {**before, "jax": Usage(4, 4), "numba": None}, [])
    assert not same_held(before, {**before, "jax": Usage(5, 4)}, ["torch", "cupy"])
    assert not same_held(before, {**before, EXCHANGE: Usage(1, 1)}, ["torch", "cupy"])


def test_nvml_v1_counts_the_drivers_part_under_other_processes_and_says_so() -> None:
    memory = reading(GIB, v2=False)
    assert memory.used + memory.free == memory.total
    ledger = device_ledger(Reading(H200, memory, GIB, {"torch": Usage(GIB, GIB, 0)}, Overhead()))
    assert ledger.row("driver reserve").bytes is None and total(ledger) == H200.total
    assert ledger.row("other processes").bytes == 615 * MIB
    text = str(Ledger(0.0, (ledger,)))
    assert _cells(text, "driver reserve*") == ["unknown"]
    assert "counted under other processes" in " ".join(text.split())


def test_tensorflow_is_counted_with_the_least_it_must_hold_and_its_bounds() -> None:
    usage = Usage(None, GIB, 0, held_at_least=2 * GIB, held_at_most=8 * GIB)
    own = 3 * GIB + CONTEXT
    ledger = device_ledger(Reading(H200, reading(own), own, {"tensorflow": usage}, Overhead(CONTEXT)))
    row = ledger.row("tensorflow")
    assert (row.bytes, row.at_least, row.at_most, row.cached) == (2 * GIB, 2 * GIB, 8 * GIB, None)
    assert ledger.row("unaccounted").bytes == GIB and "tensorflow may hold" in ledger.row("unaccounted").note
    assert total(ledger) == H200.total
    text = str(Ledger(0.0, (ledger,)))
    assert "≥ 2,048.0" in text and "unknown" in text


def test_known_holdings_have_no_bounds() -> None:
    row = device_ledger(Reading(H200, reading(GIB), GIB, {"torch": Usage(GIB, 1, 0, 5, 6)}, Overhead())).row("torch")
    assert row.at_least is None and row.at_most is None and row.note == ""


# Overhead

TORCH = frozenset({"context", "torch"})


def test_context_and_modules_are_charged_when_they_appear() -> None:
    assert Overhead().after(0, frozenset()).charged == 0
    first = Overhead().after(612 * MIB, TORCH)
    assert first.charged == 612 * MIB
    second = first.after(612 * MIB + 94 * MIB, TORCH | {"pycuda"})
    assert second.charged == 706 * MIB


def test_a_raw_allocation_is_unaccounted_and_stays_so() -> None:
    """512 MiB taken past every framework: never overhead, not at once and not later."""
    state = FIRST
    for _ in range(3):
        state = state.after(612 * MIB + 512 * MIB, TORCH)
        assert state.charged == 612 * MIB


def grown(state: Overhead, *sizes: int, loaded: frozenset[str] = ANY, apart: float = 3.0) -> Overhead:
    """The state after readings, so many seconds apart, in each of which the gap has grown by so many MiB."""
    now = state.grew_at
    for size in sizes:
        now += apart
        state = state.after(state.last_gap + size * MIB, state.appeared, loaded=loaded, now=now)
    return state


def charged(state: Overhead, *sizes: int, loaded: frozenset[str] = ANY, apart: float = 3.0) -> int:
    """What of that is charged, in MiB."""
    return (grown(state, *sizes, loaded=loaded, apart=apart).charged - state.charged) // MIB


SETTLED = grown(FIRST, 0)
"""Nothing has appeared in the last reading."""
USES = [(name, size // MIB, library) for name, row in SPECS.items() for library, size in row.first_uses]


@pytest.mark.parametrize(("name", "size", "library"), USES)
def test_a_librarys_first_use_is_charged_if_the_growth_is_as_large_as_it_was_measured(
    name: str, size: int, library: str
) -> None:
    only, row = frozenset({library}), SPECS[name]
    at_once = CONTEXT + row.modules - sum(taken for _, taken in row.first_uses)
    settled = grown(Overhead().after(at_once, frozenset({"context", name}), loaded=only), 0, loaded=only)
    sizes = [use[1] for use in USES if use[0] == name and use[2] == library]
    least, most = max(min(sizes) * 5 // 8, LAZY // MIB + 1), max(sizes) * 5 // 4
    for growth in (size, most, least + 1):
        assert charged(settled, growth, loaded=only) == growth
    assert charged(settled, most + 1, loaded=only) == 0, "larger than any"
    if least > LAZY // MIB + 1:
        assert charged(settled, least - 1, loaded=only) == 0, "smaller than any"
    assert charged(settled, size, 0, 0, loaded=frozenset()) == 0, "a library that is not loaded is not used"


def test_a_first_use_is_charged_once_for_each_framework() -> None:
    assert charged(SETTLED, 98, 0, 98, 0, 98) == 98, "cuSOLVER by torch"
    both = grown(SETTLED.after(SETTLED.largest_gap + 94 * MIB, TORCH | {"cupy"}), 0)
    assert charged(both, 98, 0, 98, 0, 98) == 98 + 98, "by CuPy too"
    assert charged(SETTLED, 66, 0, 64, 0, 66, loaded=frozenset({"cublas"})) == 66 + 64, (
        "a backward pass has a handle of its own"
    )
    again = SETTLED.after(SETTLED.largest_gap, TORCH - {"torch"}).after(SETTLED.largest_gap, TORCH)
    assert charged(grown(again, 0), 98) == 98, "it came anew"


def test_a_first_use_that_two_readings_see_is_charged_whole() -> None:
    for first in range(4, 66, 4):
        assert charged(SETTLED, first, 66 - first, loaded=frozenset({"cublas"}), apart=0.5) == 66, first
    assert charged(SETTLED, 34, 32, loaded=frozenset({"cublas"})) == 0, "too far apart"
    assert charged(SETTLED, 34, 32, loaded=frozenset({"cufft"}), apart=0.5) == 0
    assert charged(SETTLED, 50, 34, loaded=frozenset({"cublas"}), apart=0.5) == 50, "more than it takes"


def test_two_libraries_first_uses_may_come_at_once_where_something_has_just_appeared() -> None:
    assert charged(FIRST, 66 + 98) == 66 + 98, "torch"
    assert charged(SETTLED, 66 + 98) == 0
    new = SETTLED.after(SETTLED.last_gap, TORCH, loaded=ANY - {"cusolver"})
    assert charged(new, 66 + 98) == 66 + 98, "cuSOLVER has just been loaded"
    assert charged(FIRST, 66 + 98 + 64) == 0, "three never"
    assert charged(FIRST, (66 + 98) * 5 // 4 + 1) == 0


def test_what_a_framework_takes_with_its_first_reading_is_charged_no_second_time() -> None:
    at_once = Overhead().after((518 + 100 + 98 + 66) * MIB, TORCH)
    assert charged(grown(at_once, 0), 98) == 0, "cuSOLVER was in it"
    assert charged(grown(at_once, 0), 64) == 64, "the thread of a backward pass was not"


@pytest.mark.parametrize("names", [["torch"], ["torch", "cupy"], list(SPECS)])
@pytest.mark.parametrize("each", [2, 8, 10, 16, 24, 32, 64, 98, 112])
@pytest.mark.parametrize("apart", [0.1, 0.5, 2.0])
def test_what_grows_by_the_same_again_and_again_is_a_leak_and_no_first_use(
    names: list[str], each: int, apart: float
) -> None:
    state = grown(Overhead().after(1400 * MIB, frozenset({"context", *names})), 0)
    assert charged(state, *[each] * 60, apart=apart) <= 2 * each
    quiet = [size for _ in range(60) for size in (each, 0)]
    assert charged(state, *quiet, apart=apart / 2) <= 2 * each, "read twice as often"
    nearly = [size for _ in range(30) for size in (each, each * 5 // 4, each)]
    assert charged(state, *nearly, apart=apart) <= 3 * each


def test_first_uses_of_different_sizes_follow_at_once() -> None:
    """As they were measured, in readings half a second apart."""
    assert charged(SETTLED, 66, 16, 64, 98, apart=0.5) == 66 + 16 + 64 + 98
    assert charged(SETTLED, 66, 64, 98, 16, apart=0.5) == 66 + 64 + 98 + 16
    after_a_pause = grown(SETTLED.after(SETTLED.largest_gap + 94 * MIB, TORCH | {"cupy"}), 0)
    assert charged(after_a_pause, 66, 64, 60, apart=2.1) == 66 + 64 + 60
    assert charged(after_a_pause, 66, 64, 60, apart=2.0) == 66 + 64


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [2, 8, 16, 64, 112])
def test_a_leak_of_any_shape_is_charged_no_more_than_what_is_open(seed: int, most: int) -> None:
    rng = random.Random(seed)
    six = frozenset({"context", *SPECS})
    state = grown(Overhead().after(1134 * MIB, six), 0)
    readings = [rng.choice([0, rng.randint(1, most)]) for _ in range(400)]
    bound = sum(size for name, size, _ in USES) * 5 // 4 + LAZY // MIB * len(SPECS)
    assert charged(state, *readings) <= bound
    small = [rng.choice([0, rng.randint(1, 4)]) for _ in range(400)]
    assert charged(state, *small) <= LAZY // MIB * len(SPECS) + 24 * 2 + 16 * 2, "kernels, cuFFT and cuDNN"


def test_kernels_that_are_loaded_late_are_charged_little_in_all() -> None:
    assert charged(SETTLED, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 2) == 8
    assert charged(SETTLED, 8) == 8 and charged(SETTLED, 9, loaded=frozenset()) == 0
    both = grown(SETTLED.after(SETTLED.largest_gap, TORCH | {"numba"}), 0)
    assert charged(both, *[2, 0] * 40) == 16
    assert charged(Overhead().after(518 * MIB, frozenset({"context"})), 0, 2) == 0, "no framework, no kernels"


def test_a_training_on_two_gpus_as_it_was_measured() -> None:
    """Process less PyTorch's own, in MiB (support/ddp_program.py, two H200): cuBLAS and the first backward in one."""
    training = frozenset({"context", "torch", "nccl 1"})
    two = training | {"nccl 2"}
    readings = [(518, frozenset({"context"})), (610, TORCH), (610, TORCH), (1454, training), (1584, training)]
    state = Overhead()
    for size, appeared in [*readings, (2070, two), (2070, two), (1102, TORCH)]:
        state = state.after(size * MIB, appeared)
        assert state.charged == size * MIB


def test_gaps_in_slabs_are_overhead_and_part_of_no_gap() -> None:
    state = replace(FIRST, slabs=9 * MIB)
    own = 612 * MIB + 9 * MIB + GIB
    figures = Reading(H200, reading(own), own, {"torch": Usage(GIB, GIB)}, state)
    sample = sample_of_reading(figures, part_of())
    assert (sample.overhead, sample.unaccounted) == (621 * MIB, 0)
    ledger = device_ledger(figures)
    assert ledger.row("overhead").bytes == 621 * MIB
    assert ledger.row("unaccounted").bytes == 0


def test_nothing_is_charged_beyond_what_is_known_of_the_frameworks() -> None:
    most = expected_overhead(TORCH)
    assert Overhead().after(10 * GIB, TORCH).charged == most
    state = FIRST
    for size in (98, 66, 64, 16, 8, 98, 66, 64, 16, 8, 2):
        state = grown(state, size, 0, loaded=ANY - {"cufft"})
    assert state.charged == (612 + 98 + 66 + 64 + 16 + 8) * MIB <= most
    whole = Overhead().after(900 * MIB, TORCH)  # all of it was there at the first reading
    assert charged(whole, *[size for size in (64, 98, 66, 16) for size in (size, 0)]) == 0
    unknown = Overhead().after(5 * GIB, TORCH | {"tensorflow"}, exact=False)
    assert unknown.after(5 * GIB + 8 * MIB, TORCH | {"tensorflow"}, exact=False).charged == (518 + 368 + 92) * MIB


def test_nothing_is_charged_before_anything_is_there() -> None:
    state = Overhead().after(512 * MIB, frozenset())
    assert state.charged == 0
    assert state.after(512 * MIB, frozenset({"context"})).charged == 0, "it was there before the context was"


def test_freed_memory_is_not_charged_again_as_something_new() -> None:
    state = FIRST.after(612 * MIB + 512 * MIB, TORCH).after(612 * MIB, TORCH)
    assert state.charged == 612 * MIB
    assert state.after(400 * MIB, TORCH).charged == 612 * MIB, "a context that is there does not shrink"


def test_overhead_goes_with_the_context() -> None:
    assert FIRST.after(0, frozenset()).charged == 0
    assert FIRST.after(100 * MIB, frozenset()).charged == 100 * MIB
    assert FIRST.after(-5, frozenset()).charged == 0


def test_what_came_and_went_before_makes_nothing_cheaper_that_appears_later() -> None:
    """A raw allocation, or TensorFlow's pool above its least: the largest gap so far was not overhead."""
    state = FIRST.after(612 * MIB + 2 * GIB, TORCH).after(612 * MIB, TORCH)
    assert state.after(612 * MIB + 94 * MIB, TORCH | {"pycuda"}).charged == 612 * MIB + 32 * MIB, (
        "what is expected of it"
    )
    assert state.after(612 * MIB + 94 * MIB, TORCH | {"cupy"}).charged == 706 * MIB
    assert state.after(612 * MIB + 60 * MIB, TORCH).charged == 612 * MIB, "nothing new: it may be what had gone"


ONE, TWO = TORCH | {"nccl 1"}, TORCH | {"nccl 1", "nccl 2"}
COLLECTIVE, FURTHER = 838 * MIB, 486 * MIB


def test_a_communicator_is_charged_whole_when_it_appears() -> None:
    """Also where a reading lay between init_process_group and the first collective: until then it has taken nothing."""
    assert FIRST.after(612 * MIB + COLLECTIVE, ONE).charged == 612 * MIB + COLLECTIVE
    between = FIRST.after(612 * MIB + 5 * MIB, TORCH)
    first = between.after(617 * MIB + COLLECTIVE, ONE)
    assert first.charged == first.largest_gap == 617 * MIB + COLLECTIVE
    assert first.after(first.largest_gap + FURTHER, TWO).charged == first.largest_gap + FURTHER
    both = FIRST.after(612 * MIB + COLLECTIVE + FURTHER, TWO)
    assert both.charged == 612 * MIB + COLLECTIVE + FURTHER


@pytest.mark.parametrize("made", [0, 5 * MIB, 210 * MIB, 700 * MIB])
def test_one_that_is_made_eagerly_is_charged_when_it_takes_its_memory(made: int) -> None:
    """`init_process_group(device_id=...)`: it is there, and takes the rest at its first collective."""
    early = FIRST.after(612 * MIB + made, ONE)
    assert early.charged == 612 * MIB + made
    early = early.after(612 * MIB + made + 60 * MIB, ONE)  # cuBLAS, in between
    late = early.after(672 * MIB + COLLECTIVE, ONE)
    assert late.charged == 672 * MIB + COLLECTIVE
    raw = late.after(672 * MIB + COLLECTIVE + 512 * MIB, ONE)
    assert raw.charged == late.charged, "what is not the communicator's is unaccounted"


def test_two_that_are_made_eagerly_take_their_memory_one_after_the_other() -> None:
    state = FIRST.after(612 * MIB, TWO).after(612 * MIB + COLLECTIVE, TWO)
    state = state.after(612 * MIB + COLLECTIVE + FURTHER, TWO)
    assert state.charged == 612 * MIB + COLLECTIVE + FURTHER
    assert state.after(state.largest_gap + 512 * MIB, TWO).charged == state.charged


def test_a_raw_allocation_beside_a_communicator_is_unaccounted() -> None:
    state = FIRST.after(612 * MIB + COLLECTIVE, ONE)
    for _ in range(2):
        state = state.after(612 * MIB + COLLECTIVE + 512 * MIB, ONE)
        assert state.charged == 612 * MIB + COLLECTIVE


def test_the_charge_goes_with_the_communicators() -> None:
    both = FIRST.after(612 * MIB + COLLECTIVE + FURTHER, TWO)
    one = both.after(612 * MIB + COLLECTIVE, ONE)
    assert one.charged == one.largest_gap == 612 * MIB + COLLECTIVE
    assert one.after(612 * MIB + 3 * MIB, TORCH).charged == 615 * MIB
    assert both.after(612 * MIB, TORCH).charged == 612 * MIB, "both at once"
    again = both.after(612 * MIB, TORCH).after(612 * MIB + COLLECTIVE, ONE)
    assert again.charged == 612 * MIB + COLLECTIVE


def test_a_communicator_that_leaves_its_memory_behind_stays_charged() -> None:
    state = FIRST.after(612 * MIB + COLLECTIVE, ONE).after(612 * MIB + COLLECTIVE, TORCH)
    assert state.charged == 612 * MIB + COLLECTIVE


def test_raw_memory_beside_communicators_that_go_stays_unaccounted() -> None:
    raw = 612 * MIB + COLLECTIVE + 512 * MIB
    state = FIRST.after(612 * MIB + COLLECTIVE, ONE).after(raw, ONE)
    assert state.after(raw - COLLECTIVE, TORCH).charged == 612 * MIB
    assert state.after(612 * MIB + COLLECTIVE, ONE).after(612 * MIB, TORCH).charged == 612 * MIB, "gone before it"
    everything = state.after(0, TORCH)
    assert everything.charged == 612 * MIB + COLLECTIVE - 896 * MIB, "no more than was kept for it goes"


def test_what_a_communicator_never_took_is_forgotten_with_it() -> None:
    state = FIRST.after(612 * MIB, ONE).after(612 * MIB, TORCH)
    assert state.after(612 * MIB + 512 * MIB, TORCH).charged == 612 * MIB
    assert FIRST.after(612 * MIB, TWO).after(612 * MIB, ONE).communicators_owed == 896 * MIB


def test_beside_an_unknown_pool_communicators_are_charged_no_more_than_was_measured() -> None:
    state = Overhead().after(5 * GIB, TWO | {"tensorflow"}, exact=False)
    assert state.charged == (518 + 368 + 92 + 838 + 486) * MIB


POOL = frozenset({"context", "tensorflow"})
GROWN = 1800 * MIB
"""What TensorFlow's pool has taken beyond the least that it must hold."""


def beside_a_pool() -> Overhead:
    """TensorFlow is live with 552 MiB of overhead, then torch appears with 94 MiB while the pool grows."""
    state = Overhead().after(552 * MIB, POOL, exact=False, least=MIB)
    assert state.charged == 552 * MIB
    state = state.after(646 * MIB + GROWN, POOL | {"torch"}, exact=False, least=MIB)
    assert state.charged == (552 + 368) * MIB, "what was measured of torch: the two cannot be told apart yet"
    return state


def test_a_pools_memory_is_charged_no_more_once_the_framework_says_that_it_holds_it() -> None:
    state = beside_a_pool().after(646 * MIB, POOL | {"torch"}, exact=False, least=MIB + GROWN)
    assert state.charged == state.largest_gap == 646 * MIB
    state = state.after(646 * MIB, POOL | {"torch"}, exact=False, least=MIB + GROWN)
    for size in (66, 98, 64):  # as they were measured, though the charge for torch had contained them
        state = state.after(
            state.last_gap + size * MIB, state.appeared, exact=False, now=state.grew_at + 3, least=MIB + GROWN
        )
        assert state.charged == state.last_gap
    assert state.charged == (646 + 66 + 98 + 64) * MIB


def test_only_as_much_is_taken_back_as_is_proved_wrong() -> None:
    part = beside_a_pool().after(646 * MIB + 200 * MIB, POOL | {"torch"}, exact=False, least=MIB + GROWN - 200 * MIB)
    assert part.charged == 846 * MIB
    none = beside_a_pool().after(646 * MIB + 300 * MIB, POOL | {"torch"}, exact=False, least=MIB + GROWN - 300 * MIB)
    assert none.charged == 920 * MIB


def test_a_pool_that_gives_back_below_its_peak_proves_nothing() -> None:
    """TensorFlow returns idle regions before it refuses a request: then its peak is more than it holds."""
    assert beside_a_pool().after(500 * MIB, POOL | {"torch"}, exact=False, least=MIB).charged == 920 * MIB


def test_what_was_charged_while_all_was_known_stays() -> None:
    state = FIRST.after(616 * MIB, TORCH | {"tensorflow"}, exact=False, least=MIB)
    assert state.charged == 616 * MIB
    state = state.after(500 * MIB, TORCH | {"tensorflow"}, exact=False, least=200 * MIB)
    assert state.charged == 612 * MIB, "of the 4 MiB charged beside the pool nothing is left"


def test_kernels_that_were_a_pools_memory_leave_their_room_to_others() -> None:
    settled = Overhead().after(552 * MIB, POOL, exact=False, least=MIB).after(552 * MIB, POOL, exact=False, least=MIB)
    charged_for = settled.after(556 * MIB, POOL, exact=False, now=3.0, least=MIB)
    assert (charged_for.charged, charged_for.kernels) == (556 * MIB, 4 * MIB)
    back = charged_for.after(552 * MIB, POOL, exact=False, now=6.0, least=5 * MIB)
    assert (back.charged, back.kernels) == (552 * MIB, 0)
    assert back.after(560 * MIB, POOL, exact=False, now=9.0, least=5 * MIB).charged == 560 * MIB


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("appears"), st.sampled_from([name for name in SPECS if name != "tensorflow"])),
        st.tuples(st.just("pool"), st.integers(0, 2 * GIB)),
        st.tuples(st.just("in use"), st.integers(0, 2 * GIB)),
        st.tuples(st.just("library"), st.sampled_from([8, 16, 64, 66, 98])),
        st.tuples(st.just("leak"), st.integers(0, 64 * MIB)),
        st.tuples(st.just("read"), st.sampled_from([0.1, 0.5, 3.0])),
    ),
    max_size=40,
)


@more
@given(STEPS, st.integers(0, 8))
def test_once_a_pools_least_has_risen_no_more_is_charged_than_can_be_there(
    steps: list[tuple[str, Any]], live_from: int
) -> None:
    """What memguard charges is at most what the driver counts beyond what the frameworks must hold."""
    state, appeared, now = Overhead(), {"context"}, 0.0
    beside, pool, least = CONTEXT, 0, 0
    for number, (what, value) in enumerate(steps):
        if number == live_from:
            appeared, beside = appeared | {"tensorflow"}, beside + 4 * MIB
        if what == "appears":
            beside += 0 if value in appeared else 34 * MIB
            appeared = appeared | {value}
        elif what == "pool" and "tensorflow" in appeared:
            pool += value
        elif what == "in use":
            least = max(least, min(value, pool))
        elif what == "library":
            beside += value * MIB
        elif what == "leak":
            beside += value
        elif what == "read":
            now += value
            gap, exact = beside + pool - least, "tensorflow" not in appeared
            before, state = state, state.after(gap, frozenset(appeared), exact, now=now, least=least)
            if least > before.pool_lower_bound:
                assert state.charged <= gap
            assert state.charged >= min(before.charged, gap), "no more is taken back than is wrong"
            assert state.charged >= before.charged or least > before.pool_lower_bound
            assert (
                0 <= state.provisional[0] <= state.charged
                and state.kernels >= 0
                and state.second_contexts <= state.charged
            )
            assert state.provisional[1] <= state.first_uses and state.provisional[2] <= state.kernels


def test_what_overhead_may_come_to() -> None:
    assert expected_overhead(frozenset()) == 0
    for names in (["torch"], ["torch", "tensorflow"], ["pycuda"], ["torch", "tensorflow", "pycuda"]):
        assert expected_overhead(frozenset(names)) == policy.auto_reserve("hopper", names)
        assert expected_overhead(frozenset([*names, "context"])) == policy.auto_reserve("hopper", names)
    for count in (1, 2, 5):
        libraries = [f"nccl {number}" for number in range(1, count + 1)]
        reserve = policy.auto_reserve("hopper", ["torch", "jax"], count)
        assert expected_overhead(frozenset(["torch", "jax", *libraries])) == reserve, "what is kept is what is charged"


NAMES = st.sets(st.sampled_from(["context", *SPECS, "nccl 1", "nccl 2", "second context"])).map(frozenset)
READINGS = st.lists(
    st.tuples(
        st.integers(-GIB, 6 * GIB) | st.integers(0, 1000).map(lambda pages: pages * 2 * MIB),
        NAMES,
        st.booleans(),
        st.sets(st.sampled_from(sorted(LIBRARIES))).map(frozenset),
    ),
    max_size=14,
)


def open_causes(state: Overhead, loaded: frozenset[str], most: int) -> int:
    """What a reading in which nothing appears charges at most: so many first uses, or what is owed, or kernels."""
    sizes = [
        size
        for name in state.appeared & set(SPECS)
        for place, (library, size) in enumerate(SPECS[name].first_uses)
        if library in loaded and (name, place) not in state.first_uses
    ]
    return max(sum(sorted(sizes)[-most:]) * 5 // 4, state.communicators_owed, state.first_use_rest, LAZY)


@more
@given(READINGS)
def test_whatever_appears_and_goes_overhead_is_never_more_than_the_causes_that_were_seen_allow(
    readings: list[tuple[int, frozenset[str], bool, frozenset[str]]],
) -> None:
    state = Overhead()
    for gap, appeared, exact, loaded in readings:
        before, state = state, state.after(gap, appeared, exact, loaded)
        added = state.charged - before.charged
        new, gone = appeared - before.appeared, before.appeared - appeared
        assert state.charged >= 0 <= state.communicators_owed and state.second_contexts <= state.charged
        assert added <= max(expected_overhead(appeared, exact) - before.charged, 0)
        raised = max(gap - before.last_gap, 0) + before.unexplained
        assert added <= max(raised, gap - before.charged if "second context" in new else 0)
        returned = exact and -added <= max((size for size, *_ in before.charges), default=0)
        assert added >= 0 or gone or returned or "context" not in appeared, "nothing shrinks where nothing went"
        owed = before.communicators_owed + sum(policy.workspace(name) for name in new if name.startswith("nccl"))
        known = replace(before, appeared=appeared, communicators_owed=owed)
        fresh = bool(new or loaded - before.loaded or before.owner_appeared)
        allowed = expected_overhead(appeared) - expected_overhead(appeared - new)
        assert added <= allowed + open_causes(known, loaded, 2 if fresh else 1)
        assert state.first_uses >= {use for use in before.first_uses if use[0] in appeared}, (
            "a first use is charged once"
        )
        assert state.kernels <= LAZY * max(len(appeared & set(SPECS)), before.kernels // LAZY + 1)


@more
@given(READINGS, st.integers(0, 64 * MIB))
def test_overhead_and_unaccounted_are_the_gap_to_the_byte(
    readings: list[tuple[int, frozenset[str], bool, frozenset[str]]], slabs: int
) -> None:
    state = Overhead()
    for gap, appeared, exact, loaded in readings:
        state = replace(state.after(gap, appeared, exact, loaded), slabs=slabs)
        own = gap + slabs + 3 * GIB
        if own < 0:
            continue
        memory = MemoryInfo(H200.total, 615 * MIB, own, H200.usable - own)
        ledger = device_ledger(Reading(H200, memory, own, {"torch": Usage(3 * GIB, GIB)}, state))
        rows = [ledger.row(name).bytes or 0 for name in ("overhead", "unaccounted")]
        assert sum(rows) == gap + slabs and total(ledger) == H200.total


# As data and as text


def sample(simulated: bool = True, **sizes: int) -> Ledger:
    """Realistic and large: 62 GiB caps on a 140 GiB card."""
    plan = part_of(torch={"share": "50%"}, tensorflow={"share": "25%"}, pycuda={"limit": "1GiB"})
    torch, tensorflow = sizes.get("torch", 62 * GIB), 31 * GIB
    usages = {
        "torch": Usage(torch, torch - GIB, 1023 * MIB),
        "tensorflow": Usage(None, tensorflow, 0, held_at_least=tensorflow, held_at_most=31 * GIB),
        "pycuda": Usage(1023 * MIB, 1000 * MIB, 23 * MIB),
    }
    own = torch + tensorflow + 1023 * MIB + 1200 * MIB
    state = Overhead().after(1200 * MIB, frozenset(usages))
    enforcements = dict.fromkeys(usages, "enforced") | {"tensorflow": "too late"}
    device = device_ledger(Reading(H200, reading(own, 40 * GIB), own, usages, state), plan, enforcements)
    return Ledger(time.time(), (device,), simulated, ("one note",))


def _cells(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name + " "))
    return line.strip().removeprefix(name).replace("≥ ", "≥").split()


def test_data_and_back() -> None:
    ledger = sample()
    data = json.loads(ledger.to_json())
    assert data == ledger.as_dict()
    assert data["memguard_ledger"] == 1 and data["simulated"] is True and data["notes"] == ["one note"]
    (device,) = data["devices"]
    rebuilt = tuple(Row(**row) for row in device["rows"])
    assert rebuilt == ledger.devices[0].rows
    assert sum(row["bytes"] for row in device["rows"]) == device["total"] == H200.total
    assert device["uuid"] == H200.uuid and device["limit"] == ledger.devices[0].limit and device["moved"] is False
    assert data["time"].endswith("+00:00")


def test_unknown_is_null_in_data() -> None:
    ledger = device_ledger(Reading(H200, reading(0, GIB), None, {"torch": Usage(None, None)}, Overhead()))
    data = json.loads(Ledger(0.0, (ledger,)).to_json())["devices"][0]
    assert data["process"] is None and data["limit"] is None
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["torch"]["bytes"] is None and rows["other processes"]["bytes"] is None
    assert _cells(str(Ledger(0.0, (ledger,))), "torch*") == ["unknown"]


@pytest.mark.parametrize("torch", [62 * GIB, 100 * GIB, GIB + 1])
def test_the_text_has_every_figure_whole_in_80_columns(torch: int) -> None:
    ledger = sample(torch=torch)
    text = str(ledger)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text and "..." not in text
    caps = {row.name: row.cap for row in ledger.devices[0].rows if row.cap is not None}
    assert _cells(text, "torch") == [
        f"{torch / MIB:,.1f}", f"{caps['torch'] / MIB:,.1f}", f"{(torch - GIB) / MIB:,.1f}", "1,024.0", "1,023.0",
        "enforced",
    ]  # fmt: skip
    assert _cells(text, "tensorflow*")[0] == "≥31,744.0" and _cells(text, "tensorflow*")[-2:] == ["too", "late"]
    assert _cells(text, "driver reserve") == ["615.0"] and _cells(text, "other processes") == ["40,960.0"]
    assert _cells(text, "total") == ["143,771.0"]
    assert "note: one note" in text


def test_a_simulated_ledger_says_so_and_a_real_one_does_not() -> None:
    assert str(sample()).splitlines()[0].startswith("NVIDIA H200 (simulated)")
    assert "simulated" not in str(sample(simulated=False)) and "NVIDIA H200" in str(sample(simulated=False))


def test_every_gpu_has_its_table() -> None:
    other = Device("GPU-0", "NVIDIA RTX 6000 Ada Generation", 1, 49_140 * MIB, 600 * MIB, "ada", None)
    second = device_ledger(Reading(other, MemoryInfo(other.total, other.reserved, 0, other.usable), 0, {}, Overhead()))
    text = str(Ledger(0.0, (*sample().devices, second), True))
    assert text.count("total ") == 2 and "RTX 6000 Ada Generation (simulated)" in text
    assert "cuda:0, this process" in text and text.count("cuda:") == 1


def test_a_notebook_shows_tables_and_a_terminal_the_text() -> None:
    ledger = sample()
    assert ledger._repr_html_() == html_ledger(ledger)

    class Printer:
        def text(self, text: str) -> None:
            self.shown = text

    printer = Printer()
    ledger._repr_pretty_(printer, False)
    assert printer.shown == str(ledger)


def test_the_text_is_plain_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets FORCE_COLOR in its kernels, and rich would write italics into a file then."""
    plain = str(sample())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(sample()) == plain and "\x1b" not in plain


def test_a_row_is_a_frozen_dataclass_in_everything_though_it_is_made_at_once() -> None:
    """Its `__init__` is written out: it takes every field, in order, with the field's default."""
    parameters = list(inspect.signature(Row).parameters.values())
    assert [one.name for one in parameters] == [one.name for one in fields(Row)]
    for parameter, field in zip(parameters, fields(Row), strict=True):
        assert parameter.default == (inspect.Parameter.empty if field.default is MISSING else field.default)
    values: dict[str, Any] = dict(zip([one.name for one in fields(Row)], range(1, 99), strict=False))
    row = Row(**values)
    assert vars(row) == values == asdict(row) and list(vars(row)) == list(values)
    assert row == Row(*values.values()) == pickle.loads(pickle.dumps(row)) and hash(row) == hash(copy.copy(row))
    changed = replace(row, note="changed")
    assert (changed.note, changed.bytes) == ("changed", row.bytes) and changed != row
    with pytest.raises(FrozenInstanceError):
        row.note = "changed"  # type: ignore[misc]
