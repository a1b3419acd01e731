"""The exact plan of exact budgets: every byte of a cap is one that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from memguard._base.framework_spec import CONTEXT, OVERHEADS
from memguard._base.types import Device, DevicePlan, MemoryInfo, Usage
from memguard._base.units import GIB, GRANULE, MIB
from memguard._budget import Budget, from_mapping, parse, policy
from memguard._budget.policy import SLACK, auto_reserve, busy, resized
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.specs import SPECS
from memguard.errors import PlanError

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

UUID = "GPU-00000000-0000-4000-8000-000000000000"
OTHER = "GPU-00000000-0000-4000-8000-000000000001"


def budget(frameworks: Mapping[str, Any], device: Mapping[str, Any] | None = None, **more: Any) -> Budget:
    mapping = {"version": 1, "frameworks": frameworks, **more}
    return from_mapping(mapping if device is None else {**mapping, "device": device})


def gpu(total: int = 16 * GIB, reserved: int = 0, **more: Any) -> Device:
    values = {"uuid": UUID, "name": "Made Up", "index": 0, "architecture": "hopper", "ordinal": 0, **more}
    return Device(total=total, reserved=reserved, **values)


def one(asked: Budget, device: Device | None = None) -> DevicePlan:
    (part,) = policy.plan(asked, [device or gpu()]).devices
    return part


def problems(asked: Budget, *devices: Device) -> str:
    with pytest.raises(PlanError) as caught:
        policy.plan(asked, devices or [gpu()])
    assert all(p.fix for p in caught.value.problems)
    return str(caught.value)


def test_shares_are_divided_by_largest_remainder() -> None:
    """100 granules at 33.3 %, 33.3 % and 33.4 %: 33.3, 33.3 and 33.4 granules; the one left goes to the 0.4."""
    shares = {"torch": {"share": "33.3%"}, "tensorflow": {"share": "33.3%"}, "pycuda": {"share": "33.4%"}}
    part = one(budget(shares, {"limit": 101 * GRANULE, "reserve": GRANULE}))
    assert part.caps == {"torch": 33 * GRANULE, "tensorflow": 33 * GRANULE, "pycuda": 34 * GRANULE}
    assert part.unallocated == 0


def test_an_equal_remainder_goes_to_the_first_in_the_file() -> None:
    halves = {"share": "50%"}
    first = one(budget({"torch": halves, "pycuda": halves}, {"limit": 12 * GRANULE, "reserve": GRANULE}))
    second = one(budget({"pycuda": halves, "torch": halves}, {"limit": 12 * GRANULE, "reserve": GRANULE}))
    assert first.caps == {"torch": 6 * GRANULE, "pycuda": 5 * GRANULE}
    assert second.caps == {"pycuda": 6 * GRANULE, "torch": 5 * GRANULE}


def test_a_part_of_a_granule_is_given_to_nobody() -> None:
    """A room of 10.5 granules at 100 %: ten of them."""
    part = one(budget({"torch": {"share": "100%"}}, {"limit": 10 * GRANULE + MIB + GRANULE, "reserve": GRANULE}))
    assert part.caps == {"torch": 10 * GRANULE} and part.unallocated == MIB


def test_byte_limits_are_whole_granules_and_never_above_what_was_declared() -> None:
    part = one(budget({"torch": {"limit": 5 * MIB + 17}}, {"limit": "1GiB", "reserve": "512MiB"}))
    assert part.caps == {"torch": 4 * MIB} and part.unallocated == 508 * MIB


def test_what_nobody_declared_stays_unallocated_and_the_sum_is_the_limit() -> None:
    part = one(budget({"torch": {"share": "50%"}, "pycuda": {"limit": "1GiB"}}, {"limit": "11GiB", "reserve": "1GiB"}))
    assert part.limit == 11 * GIB and part.reserve == GIB
    assert part.caps == {"torch": 5 * GIB, "pycuda": GIB} and part.unallocated == 4 * GIB
    assert part.limit == part.reserve + sum(part.caps.values()) + part.unallocated


def test_caps_stand_in_the_order_of_the_file() -> None:
    part = one(budget({"pycuda": {"limit": "1GiB"}, "torch": {"share": "10%"}, "tensorflow": {"limit": "1GiB"}}))
    assert list(part.caps) == ["pycuda", "torch", "tensorflow"]


def test_a_percentage_is_of_what_cuda_can_give() -> None:
    """Measured: CUDA reports NVML's total less the driver's reserve."""
    part = one(budget({"torch": {"share": "100%"}}, {"limit": "50%"}), gpu(16 * GIB, reserved=512 * MIB))
    assert part.limit == (16 * GIB - 512 * MIB) // 2
    without = one(budget({"torch": {"share": "100%"}}, {"limit": "50%"}), gpu(16 * GIB, reserved=None))
    assert without.limit == 8 * GIB


def test_the_default_limit_is_nine_tenths() -> None:
    assert one(budget({"torch": {"share": "50%"}})).limit == 16 * GIB * 9 // 10


def test_the_sample_budget_on_an_h200() -> None:
    """The figures that the documents give."""
    sample = budget({"torch": {"share": "50%"}, "tensorflow": {"share": "25%"}, "pycuda": {"limit": "1GiB"}})
    part = one(sample, SimulatedHost(["h200"]).devices()[0])
    assert part.limit == (143_771 - 615) * MIB * 9 // 10
    assert part.reserve == (544 + 384 + 256 + 32 + 64) * MIB and part.reserve_source == "auto"
    room = part.limit - part.reserve
    assert 0 <= room // 2 - part.caps["torch"] < GRANULE
    assert 0 <= room // 4 - part.caps["tensorflow"] < GRANULE
    assert part.caps["pycuda"] == GIB


def test_the_reserve_depends_on_what_is_declared_and_not_on_its_order() -> None:
    names = ["torch", "tensorflow", "pycuda"]
    assert auto_reserve("hopper", names) == auto_reserve("hopper", names[::-1]) == 1280 * MIB
    for name in names:
        assert auto_reserve("hopper", [name]) == CONTEXT + SPECS[name].workspace + SLACK
    assert auto_reserve("hopper", ["torch", "pycuda"]) > auto_reserve("hopper", ["torch"])
    assert auto_reserve("hopper", ["another"]) > auto_reserve("hopper", [])


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_communicators_are_in_the_reserve(count: int) -> None:
    """Measured: 838 MiB at the first collective, 486 for each further communicator."""
    asked = budget({"torch": {"limit": "4GiB", "nccl": count}, "cupy": {"limit": "1GiB"}}, {"limit": "60GiB"})
    part = one(asked, gpu(80 * GIB))
    plain = CONTEXT + SPECS["torch"].workspace + SPECS["cupy"].workspace + SLACK
    assert part.reserve - plain == (0 if count == 0 else 896 * MIB + (count - 1) * 512 * MIB)
    assert part.reserve == auto_reserve("hopper", ["torch", "cupy"], count) and part.reserve_source == "auto"
    assert part.unallocated == 60 * GIB - part.reserve - 5 * GIB
    declared = one(budget({"torch": {"limit": "4GiB", "nccl": count}}, {"reserve": "1GiB"}), gpu(80 * GIB))
    assert declared.reserve == GIB, "what is declared holds"


def test_a_second_context_is_in_the_reserve_where_the_budget_says_so() -> None:
    """Measured: 518 MiB."""
    frameworks = {"torch": {"limit": "4GiB"}, "pycuda": {"limit": "1GiB"}}
    shared = one(budget(frameworks), gpu(80 * GIB))
    own = one(budget({**frameworks, "pycuda": {"limit": "1GiB", "context": "own"}}), gpu(80 * GIB))
    assert own.reserve - shared.reserve == CONTEXT and shared.reserve == auto_reserve("hopper", ["torch", "pycuda"])
    declared = budget({"pycuda": {"limit": "1GiB", "context": "own"}}, {"reserve": "1GiB"})
    assert one(declared, gpu(80 * GIB)).reserve == GIB, "what is declared holds"


def test_communicators_that_leave_no_room_are_refused_with_the_sum() -> None:
    text = problems(budget({"torch": {"share": "50%", "nccl": 64}}, {"limit": "16GiB"}))
    assert "nothing is left" in text and "reserve 33.34 GiB" in text


def test_communicators_of_no_torch_need_nothing() -> None:
    assert one(budget({"jax": {"limit": "1GiB"}})).reserve == CONTEXT + SPECS["jax"].workspace + SLACK


def test_what_lies_outside_a_cap_by_its_name() -> None:
    assert (policy.workspace("nccl 1"), policy.workspace("nccl 2"), policy.workspace("nccl 17")) == (
        896 * MIB, 512 * MIB, 512 * MIB,
    )  # fmt: skip
    assert (policy.modules("nccl 1"), policy.modules("nccl 2"), policy.modules("nccl 17")) == (
        838 * MIB, 486 * MIB, 486 * MIB,
    )  # fmt: skip
    contexts = ("second context", "second context 2", "second context 3")
    assert [policy.workspace(name) for name in contexts] == [544 * MIB] * 3
    assert [policy.modules(name) for name in contexts] == [518 * MIB] * 3
    assert policy.workspace("another") == 128 * MIB and policy.modules("another") == 0
    for name in (*SPECS, *OVERHEADS):
        assert policy.modules(name) <= policy.workspace(name), "nobody takes more than is kept for it"
    assert policy.modules("context") <= CONTEXT


@pytest.mark.parametrize(("architecture", "eighths"), [("turing", 6), ("ampere", 7), ("ada", 7), ("blackwell", 8)])
def test_older_architectures_reserve_less(architecture: str, eighths: int) -> None:
    expected = 1280 * MIB * eighths // 8
    assert auto_reserve(architecture, ["torch", "tensorflow", "pycuda"]) == expected // GRANULE * GRANULE


def test_a_declared_reserve_is_taken_as_it_is() -> None:
    part = one(budget({"torch": {"share": "100%"}}, {"limit": "8GiB", "reserve": 3 * GIB + 1}))
    assert part.reserve == 3 * GIB + 1 and part.reserve_source == "declared"
    assert part.caps["torch"] == 5 * GIB - GRANULE and part.unallocated == GRANULE - 1


@pytest.mark.parametrize("keys", [[UUID, "0", "Made*"], ["Made*", "0", UUID], ["0", UUID, "Made*"]])
def test_a_uuid_is_stronger_than_an_ordinal_and_that_than_a_name(keys: list[str]) -> None:
    limits = {UUID: "1GiB", "0": "2GiB", "Made*": "3GiB"}
    for gone in range(3):
        strongest = next(key for key in (UUID, "0", "Made*") if key in keys[: 3 - gone])
        devices = {key: {"limit": limits[key]} for key in keys[: 3 - gone]}
        part = one(budget({"pycuda": {"share": "10%"}}, {"limit": "8GiB", "reserve": "512MiB"}, devices=devices))
        assert part.limit == int(limits[strongest][0]) * GIB


@pytest.mark.parametrize("key", ["cuda:1", " CUDA:1 ", "1"])
def test_an_ordinal_may_be_written_as_torch_writes_it(key: str) -> None:
    first, second = gpu(), gpu(uuid=OTHER, index=1, ordinal=1)
    asked = budget({"torch": {"share": "50%"}}, devices={key: {"limit": "4GiB"}, "Made*": {"limit": "5GiB"}})
    assert policy.needs_ordinals(asked) and list(asked.devices) == ["1", "Made*"]
    plan = policy.plan(asked, [first, second])
    assert [part.limit for part in plan.devices] == [5 * GIB, 4 * GIB] and plan.notes == ()


def test_overrides_merge_field_by_field() -> None:
    devices = {"Made*": {"limit": "4GiB", "reserve": "1GiB"}, UUID: {"reserve": "2GiB"}}
    part = one(budget({"torch": {"share": "100%"}}, {"limit": "8GiB"}, devices=devices))
    assert (part.limit, part.reserve, part.reserve_source) == (4 * GIB, 2 * GIB, "declared")
    back = one(budget({"torch": {"share": "50%"}}, {"reserve": "1GiB"}, devices={"0": {"reserve": "auto"}}))
    assert back.reserve == auto_reserve("hopper", ["torch"]) and back.reserve_source == "auto"


@pytest.mark.parametrize(
    ("key", "matches"), [("made up", True), ("MADE*", True), ("*up", True), ("made upp", False), ("[m]ade up", True)]
)
def test_names_are_patterns_without_case(key: str, matches: bool) -> None:
    part = one(budget({"torch": {"share": "50%"}}, devices={key: {"limit": "4GiB"}}))
    assert (part.limit == 4 * GIB) is matches


def test_an_override_holds_for_its_own_gpu_only() -> None:
    first, second = gpu(), gpu(uuid=OTHER, index=1, ordinal=1)
    asked = budget({"torch": {"share": "50%"}}, devices={OTHER: {"limit": "4GiB"}, "0": {"limit": "5GiB"}})
    plan = policy.plan(asked, [first, second])
    assert [part.limit for part in plan.devices] == [5 * GIB, 4 * GIB]
    assert plan.caps("torch") == {part.device.uuid: part.caps["torch"] for part in plan.devices}
    assert plan.caps("pycuda") == {} and plan.notes == ()


def test_an_override_for_no_gpu_here_is_noted_and_not_an_error() -> None:
    devices = {"A100*": {"limit": "4GiB"}, OTHER: {"limit": "4GiB"}, "7": {"limit": "4GiB"}, UUID: {"limit": "4GiB"}}
    plan = policy.plan(budget({"torch": {"share": "50%"}}, devices=devices), [gpu()])
    assert len(plan.notes) == 3
    for key in ("A100*", OTHER, "7"):
        assert sum(repr(key) in note for note in plan.notes) == 1


def test_ordinals_need_cudas_numbering() -> None:
    asked = budget({"torch": {"share": "50%"}}, devices={"0": {"limit": "4GiB"}})
    assert policy.needs_ordinals(asked)
    assert not policy.needs_ordinals(budget({"torch": {"share": "50%"}}, devices={"A100*": {}, UUID: {}}))
    text = problems(asked, gpu(ordinal=None))
    assert "CUDA ordinal" in text and "memguard doctor" in text and "by UUID" in text


def test_a_limit_above_the_card() -> None:
    text = problems(budget({"torch": {"share": "50%"}}, {"limit": 16 * GIB + 1}), gpu(17 * GIB, reserved=GIB))
    assert "device.limit" in text and "16.00 GiB" in text and "16384MiB" in text and UUID in text
    assert one(budget({"torch": {"share": "50%"}}, {"limit": "16GiB"}), gpu(17 * GIB, GIB)).limit == 16 * GIB


@pytest.mark.parametrize("reserve", [GIB, GIB - GRANULE + 1, 2 * GIB])
def test_a_reserve_that_leaves_no_granule(reserve: int) -> None:
    text = problems(budget({"torch": {"share": "50%"}}, {"limit": "6.25%", "reserve": reserve}))
    assert "nothing is left" in text and "device.reserve" in text


def test_one_granule_is_enough_for_a_plan() -> None:
    part = one(budget({"torch": {"share": "100%"}}, {"limit": "6.25%", "reserve": GIB - GRANULE}))
    assert part.caps == {"torch": GRANULE}


def test_bytes_and_shares_that_fit_no_card_of_this_size() -> None:
    asked = budget({"torch": {"share": "75%"}, "pycuda": {"limit": "4GiB"}}, {"limit": "100%", "reserve": "1GiB"})
    text = problems(asked)  # three quarters of 15 GiB and four are 15.25
    assert "15.25 GiB" in text and "15.00 GiB" in text and "frameworks" in text
    assert one(asked, gpu(17 * GIB)).unallocated == 0


def test_a_share_too_small_for_a_granule_names_every_framework_that_has_one() -> None:
    shares = {"torch": {"share": "0.001%"}, "tensorflow": {"share": "50%"}, "pycuda": {"share": "0.002%"}}
    text = problems(budget(shares))
    assert "frameworks.torch" in text and "frameworks.pycuda" in text and "frameworks.tensorflow" not in text


def test_problems_of_all_gpus_are_told_at_once() -> None:
    asked = budget({"torch": {"share": "50%"}}, {"limit": "40GiB"})
    text = problems(asked, gpu(), gpu(80 * GIB, uuid=OTHER, index=1), gpu(uuid=OTHER[:-1] + "2", index=2))
    assert UUID in text and OTHER not in text and OTHER[:-1] + "2" in text


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("device:\n  limit: 40GiB\nframeworks: {torch: {share: 50%}}", "3:10: device.limit: "),
        ("devices: {Cuda:0: {limit: 40GiB}}\nframeworks: {torch: {share: 50%}}", "2:27: devices['0'].limit: "),
        (f"devices: {{{UUID.upper()}: {{limit: 5%, reserve: 2GiB}}}}\nframeworks: {{torch: {{share: 5%}}}}",
         f"2:11: devices[{UUID!r}]: nothing is left"),
        ("device: {reserve: 20GiB}\nframeworks: {torch: {share: 50%}}", "2:1: device: nothing is left"),
        ("device: {limit: 9%}\ndevices: {0: {reserve: 20GiB}}\nframeworks: {torch: {share: 50%}}",
         "3:11: devices['0']: nothing is left"),
        ("devices: {0: {limit: 1%}}\ndevice: {reserve: 2GiB}\nframeworks: {torch: {share: 50%}}",
         "2:11: devices['0']: nothing is left"),
        ("frameworks: {torch: {limit: 2MiB}}\n\ndevices: {'*up': {limit: 2MiB}}",
         "4:11: devices['*up']: nothing is left"),
        ("frameworks:\n  torch: {share: 0.001%}", "3:3: frameworks.torch: "),
        ("frameworks:\n  torch: {limit: 20GiB}", "2:1: frameworks: "),
    ],
)  # fmt: skip
def test_problems_of_a_file_have_its_name_and_line(text: str, where: str) -> None:
    assert problems(parse(f"version: 1\n{text}", "jobs/budget.yaml")).startswith(f"jobs/budget.yaml:{where}")


def test_problems_of_a_mapping_have_no_line() -> None:
    assert problems(budget({"torch": {"limit": "20GiB"}})).startswith("plan: frameworks: ")


def test_tensorflows_growth_reaches_the_plan() -> None:
    for growth in (True, False):
        asked = budget({"tensorflow": {"share": "50%", "growth": growth}, "torch": {"share": "10%"}})
        assert policy.plan(asked, [gpu()]).options == {"tensorflow": {"growth": growth}, "torch": {}}
    assert policy.plan(budget({"tensorflow": {"share": "50%"}}), [gpu()]).options["tensorflow"]["growth"] is True


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_usual_budget_fits_every_simulated_gpu(name: str) -> None:
    asked = budget({"torch": {"share": "50%"}, "tensorflow": {"share": "25%"}, "pycuda": {"limit": "1GiB"}})
    part = one(asked, SimulatedHost([name]).devices()[0])
    assert min(part.caps.values()) >= GIB and part.reserve < part.limit // 10


def test_pycudas_context_reaches_the_plan() -> None:
    for context in ("primary", "own"):
        asked = budget({"pycuda": {"share": "50%", "context": context}})
        assert policy.plan(asked, [gpu()]).options == {"pycuda": {"context": context}}


# resize


def test_a_cap_is_resized_within_what_is_unallocated() -> None:
    plan = policy.plan(
        budget({"torch": {"limit": "2GiB"}, "pycuda": {"limit": "1GiB"}}, {"limit": "8GiB", "reserve": "1GiB"}), [gpu()]
    )
    bigger = resized(plan, "torch", 6 * GIB)
    assert bigger.devices[0].caps == {"torch": 6 * GIB, "pycuda": GIB} and bigger.devices[0].unallocated == 0
    smaller = resized(bigger, "torch", 3 * MIB)
    assert smaller.devices[0].caps["torch"] == GRANULE and smaller.devices[0].unallocated == 6 * GIB - GRANULE
    assert plan.devices[0].caps["torch"] == 2 * GIB, "a plan is never changed"
    for wrong in (6 * GIB + GRANULE, GRANULE - 1):
        with pytest.raises(PlanError, match=r"between 2\.0 MiB and 6\.00 GiB is possible"):
            resized(plan, "torch", wrong)


def test_a_resize_must_fit_every_gpu() -> None:
    asked = budget({"torch": {"share": "50%"}}, {"reserve": "1GiB"})
    plan = policy.plan(asked, [gpu(), gpu(8 * GIB, uuid=OTHER, index=1)])
    with pytest.raises(PlanError) as caught:
        resized(plan, "torch", 10 * GIB)
    assert len(caught.value.problems) == 1 and OTHER in str(caught.value)


# busy


def test_busy_says_who_holds_the_card() -> None:
    part = one(budget({"torch": {"share": "50%"}}, {"limit": "8GiB"}))
    assert busy(part, MemoryInfo(16 * GIB, 0, 8 * GIB, 8 * GIB), 0) is None
    text = busy(part, MemoryInfo(16 * GIB, 0, 9 * GIB, 7 * GIB), 0)
    assert text is not None and "7.00 GiB left" in text and "limit of 8.00 GiB" in text and "hold 9.00 GiB" in text


def test_what_this_process_holds_already_is_not_busy() -> None:
    part = one(budget({"torch": {"share": "50%"}}, {"limit": "8GiB"}))
    memory = MemoryInfo(16 * GIB, 0, 9 * GIB, 7 * GIB)
    assert busy(part, memory, GIB) is None
    assert busy(part, memory, GIB - 1) is not None
    assert busy(part, memory, None) is not None, "unknown is not taken for ours"
    shared = busy(part, MemoryInfo(16 * GIB, 0, 12 * GIB, 4 * GIB), 2 * GIB)
    assert "6.00 GiB left" in (shared or "") and "other processes hold 10.00 GiB" in (shared or "")


# admit

FREE = MemoryInfo(100 * GIB, 0, 50 * GIB, 50 * GIB)
FULL = MemoryInfo(100 * GIB, 0, 99 * GIB, GIB)


def admit(
    framework: str, needed: int, cap: int, usages: Mapping[str, Usage | None], memory: MemoryInfo, takes: int = 0
) -> policy.Admission:
    return policy.admit(framework, needed, takes or needed, cap, usages, memory)


def _text(refused: policy.Admission) -> str:
    return "" if refused.refusal is None else str(refused.refusal.advice())


def test_admission_within_the_cap_to_the_byte() -> None:
    held = {"torch": Usage(3 * GIB, 2 * GIB, reclaimable=GIB)}
    assert admit("torch", 6 * GIB, 8 * GIB, held, FREE).refusal is None
    refused = admit("torch", 6 * GIB + 1, 8 * GIB, held, FREE)
    assert refused.available == 6 * GIB and refused.trim == ()
    text = _text(refused)
    assert "torch needs 6.00 GiB" in text and "cap is 8.00 GiB" in text and "holds 3.00 GiB" in text
    assert "2.00 GiB in use" in text and "frameworks.torch" in text


def test_cache_that_cannot_go_back_does_not_count() -> None:
    fragmented = {"torch": Usage(3 * GIB, GIB, reclaimable=0)}
    assert admit("torch", 5 * GIB, 8 * GIB, fragmented, FREE).refusal is None
    assert admit("torch", 6 * GIB, 8 * GIB, fragmented, FREE).available == 5 * GIB


def test_cache_that_cannot_go_back_may_serve_from_within() -> None:
    carved = {"torch": Usage(4 * GIB, GIB, reclaimable=0)}  # one segment of 4 GiB with 1 GiB in use
    assert admit("torch", 2 * GIB, 4 * GIB, carved, FREE).refusal is None
    assert admit("torch", 3 * GIB + 1, 4 * GIB, carved, FREE).available == 3 * GIB


def test_what_the_allocator_takes_counts_and_not_what_was_asked() -> None:
    nearly_full = {"torch": Usage(4086 * MIB, 4086 * MIB, reclaimable=0)}
    refused = admit("torch", 5 * MIB, 4096 * MIB, nearly_full, FREE, takes=20 * MIB)
    assert "takes 20.0 MiB for it" in _text(refused)
    assert admit("torch", 10 * MIB, 4096 * MIB, nearly_full, FREE, takes=10 * MIB).refusal is None


def test_a_cache_of_which_nobody_knows_what_can_go_back_is_no_reason_to_refuse() -> None:
    """CuPy gives its idle blocks back before it refuses: how many are split it does not say."""
    silent = {"cupy": Usage(3 * GIB, GIB, None)}
    assert admit("cupy", 7 * GIB, 8 * GIB, silent, FREE).refusal is None
    assert admit("cupy", 7 * GIB + 1, 8 * GIB, silent, FREE).available == 7 * GIB
    assert admit("cupy", 3 * GIB, 8 * GIB, silent, FULL) == policy.Admission(7 * GIB), "two of its own, one is free"
    full = admit("cupy", 3 * GIB + 1, 8 * GIB, silent, FULL)
    assert full.available == 3 * GIB and "the card has only 1.00 GiB free" in _text(full)


@pytest.mark.parametrize("usage", [Usage(GIB, None, None), Usage(None, GIB, None), Usage(GIB, 2 * GIB, None)])
def test_a_cache_that_cannot_be_told_counts_nothing(usage: Usage) -> None:
    """Also where in use was read a moment later than held, and is more."""
    assert admit("torch", GIB + 1, 8 * GIB, {"torch": None, "jax": usage}, FULL).trim == ()
    assert admit("torch", GIB + 1, 8 * GIB, {"torch": None, "jax": usage}, FULL).available == GIB
    assert admit("jax", 8 * GIB, 8 * GIB, {"jax": usage}, FREE).available == 7 * GIB


def test_a_framework_that_is_not_live_has_its_whole_cap() -> None:
    assert admit("torch", 8 * GIB, 8 * GIB, {"torch": None}, FREE).refusal is None
    assert admit("torch", 8 * GIB + 1, 8 * GIB, {}, FREE).available == 8 * GIB


def test_held_above_the_cap_leaves_nothing_and_nothing_negative() -> None:
    refused = admit("torch", 1, 2 * GIB, {"torch": Usage(3 * GIB, 3 * GIB, 0)}, FREE)
    assert refused.available == 0 and "can get 0 B" in _text(refused)


def test_tensorflow_with_growth_counts_by_its_live_arrays() -> None:
    growing = {"tensorflow": Usage(None, GIB, 0, held_at_least=4 * GIB, held_at_most=8 * GIB)}
    assert admit("tensorflow", 7 * GIB, 8 * GIB, growing, FREE).refusal is None
    refused = admit("tensorflow", 7 * GIB + 1, 8 * GIB, growing, FREE)
    assert refused.available == 7 * GIB and "at least 4.00 GiB" in _text(refused)


def test_what_tensorflows_pool_must_have_is_not_asked_of_the_card() -> None:
    """Its pool holds at least 4 GiB with 1 GiB in use: 3 GiB need nothing of the card, more needs a new region."""
    growing = {"tensorflow": Usage(None, GIB, 0, held_at_least=4 * GIB, held_at_most=8 * GIB)}
    assert admit("tensorflow", 3 * GIB, 8 * GIB, growing, FULL).refusal is None
    assert admit("tensorflow", 3 * GIB + 1, 8 * GIB, growing, FULL).available == 3 * GIB


def test_nothing_known_of_it_counts_as_nothing_held() -> None:
    silent = {"tensorflow": Usage(None, None, None)}
    assert admit("tensorflow", 8 * GIB, 8 * GIB, silent, FREE).refusal is None
    assert admit("tensorflow", 2 * GIB, 8 * GIB, silent, FULL).available == GIB


def test_a_full_card_is_refused_with_what_it_has() -> None:
    refused = admit("torch", 2 * GIB, 8 * GIB, {"torch": None}, FULL)
    assert refused.available == GIB and "the card has only 1.00 GiB free" in _text(refused)


def test_its_own_cache_serves_on_a_full_card() -> None:
    usages = {"torch": Usage(3 * GIB, GIB, 2 * GIB), "pycuda": Usage(GIB, 0, GIB)}
    assert admit("torch", 3 * GIB, 8 * GIB, usages, FULL) == policy.Admission(7 * GIB)


def test_siblings_are_trimmed_only_as_far_as_it_takes_the_largest_first() -> None:
    usages = {
        "torch": None,
        "pycuda": Usage(2 * GIB, 0, 2 * GIB),
        "other": Usage(5 * GIB, 0, 5 * GIB),
        "tensorflow": Usage(None, GIB, 0, held_at_least=GIB),
        "silent": Usage(9 * GIB, 0, None),
        "idle": None,
    }
    assert admit("torch", GIB, 20 * GIB, usages, FULL).trim == ()
    assert admit("torch", GIB + 1, 20 * GIB, usages, FULL).trim == ("other",)
    assert admit("torch", 6 * GIB, 20 * GIB, usages, FULL).trim == ("other",)
    assert admit("torch", 8 * GIB, 20 * GIB, usages, FULL).trim == ("other", "pycuda")
    assert admit("torch", 9 * GIB, 20 * GIB, usages, FULL).trim == (
        "other",
        "pycuda",
        "silent",
    )  # last who does not say
    refused = admit("torch", 17 * GIB + 1, 20 * GIB, usages, FULL)
    assert refused.available == 17 * GIB and refused.trim == () and "add 16.00 GiB" in _text(refused)


@pytest.mark.parametrize(("name", "granted"), [("numba", False), ("pycuda", False), ("torch", True), ("cupy", True)])
def test_what_blocks_were_rounded_up_by_serves_no_request(name: str, granted: bool) -> None:
    """1 MiB of what it holds is neither in use nor could be given back: pieces of segments, or mere rounding."""
    usage, memory = Usage(64 * MIB, 63 * MIB, 0), MemoryInfo(GIB, 0, 0, GIB)
    at_cap = policy.admit(name, MIB // 2, 2 * MIB, 64 * MIB, {name: usage}, memory)
    assert (at_cap.refusal is None) == granted and at_cap.available == (MIB if granted else 0)
    full = memory._replace(free=0)
    beside = {name: usage, "jax": Usage(0, 0, 0)}
    on_a_full_card = policy.admit(name, MIB // 2, 2 * MIB, GIB, beside, full)
    assert (on_a_full_card.refusal is None) == granted
