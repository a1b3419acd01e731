"""The report on an out-of-memory error: who asked, who holds the memory, and remedies that would really help."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memguard._base.types import Device, DeviceSample, FrameworkSample, MemoryInfo, Plan, RefusedRequest, Sample, Usage
from memguard._base.units import GIB, MIB
from memguard._budget import from_mapping, policy
from memguard._ledger.overhead import Overhead
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import Ledger, Row
from memguard._oom.report import ErrorFacts, Report, classify, diagnose
from memguard.errors import PlanError

H200 = Device("GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53", "NVIDIA H200", 0, 143_771 * MIB, 615 * MIB, "hopper", 0)
SECOND = replace(H200, uuid="GPU-00000000-0000-4000-8000-000000000001", index=1, ordinal=1)
SHARES = {"torch": {"share": "40%"}, "tensorflow": {"share": "30%"}, "cupy": {"share": "10%"}}
CUBLAS = ("builtins.RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def plan_of(frameworks: Mapping[str, Any] = SHARES, devices: tuple[Device, ...] = (H200,)) -> Plan:
    return policy.plan(from_mapping({"version": 1, "frameworks": dict(frameworks)}), list(devices))


def ledger_of(plan: Plan, usages: Mapping[str, Usage | None], others: int = 0, known: bool = True) -> Ledger:
    parts = []
    for part in plan.devices:
        own = 612 * MIB + sum((u.held or u.held_at_least or 0) for u in usages.values() if u)
        memory = MemoryInfo(H200.total, 615 * MIB, own + others, H200.usable - own - others)
        state = Overhead().after(612 * MIB, frozenset({"context", "torch"}))
        parts.append(device_ledger(Reading(part.device, memory, own if known else None, usages, state), part))
    return Ledger(0.0, tuple(parts))


def torch_error(text: str = "Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB") -> ErrorFacts:
    mro = ("torch.OutOfMemoryError", "builtins.RuntimeError")
    return ErrorFacts(mro[0], mro, f"CUDA out of memory. {text}", {})


def report(
    usages: Mapping[str, Usage | None],
    others: Mapping[int, int | None] | None = None,
    facts: ErrorFacts | None = None,
    plan: Plan | None = None,
    **more: Any,
) -> Report:
    facts, plan, others = facts or torch_error(), plan or plan_of(), others or {}
    ledger = ledger_of(plan, usages, sum(size or 0 for size in others.values()))
    processes = {part.device.uuid: others for part in plan.devices}
    return diagnose(facts, classify(facts), ledger, plan, processes, more.pop("samples", ()), time=0.0, **more)


def told(name: str, usage: Usage) -> RefusedRequest:
    """What the framework's own allocator told when it refused."""
    return RefusedRequest(name, "observer", 0.0, H200.uuid, None, usage.held, usage.in_use, usage.reclaimable)


SIBLINGS = {
    "torch": Usage(12 * GIB, 11 * GIB, 0),
    "tensorflow": Usage(None, 3 * GIB, None, 30 * GIB, 40 * GIB),
    "cupy": Usage(8 * GIB, int(1.8 * GIB), int(6.2 * GIB)),
}


def test_a_sibling_and_another_process_hold_the_card() -> None:
    found = report(SIBLINGS, {4242: 80 * GIB, 77: 6 * GIB})
    assert (found.requester, found.reason, found.uuid) == ("torch", "card", H200.uuid)
    assert [holder.name for holder in found.holders[:4]] == ["process 4242", "tensorflow", "torch", "cupy"]
    assert found.holders[0].bytes == 80 * GIB and found.holders[3].reclaimable == int(6.2 * GIB)
    first, *rest = found.remedies
    assert first.text == "cupy holds 6.20 GiB reclaimable: memguard.trim('cupy') frees it, which is enough"
    assert first.bytes == int(6.2 * GIB)
    texts = [remedy.text for remedy in rest]
    assert texts[0].startswith("process 4242 holds 80.00 GiB of this GPU") and rest[0].bytes == 80 * GIB
    assert any(
        "tensorflow's pool of 30.00 GiB (3.00 GiB in use) never returns memory to the driver" in text for text in texts
    )
    assert "share" not in " ".join(texts)  # its own cap has room


def test_a_trim_that_is_not_enough_does_not_claim_it() -> None:
    found = report(SIBLINGS, {4242: 87 * GIB}, torch_error("Tried to allocate 30.00 GiB. GPU 0"))
    assert found.remedies[0].text.endswith("frees it")


def test_its_own_cap() -> None:
    found = report({**SIBLINGS, "torch": Usage(48 * GIB, 47 * GIB, 0)}, {4242: 20 * GIB})
    assert found.reason == "cap" and found.holders[0].name == "torch"
    assert "its cap of 49.71 GiB is reached: it holds 48.00 GiB (47.00 GiB in use)" in found.why
    assert found.remedies[0].text.startswith("raise frameworks.torch.share to 46%")
    assert "trim('cupy')" not in str(found)  # that would not help: the card has room


def test_cap_and_card() -> None:
    found = report({**SIBLINGS, "torch": Usage(48 * GIB, 47 * GIB, 0)}, {4242: 52 * GIB})
    assert found.reason == "cap and card"
    assert [remedy.text.split(maxsplit=1)[0] for remedy in found.remedies[:3]] == ["raise", "cupy", "process"]


def test_a_cap_that_cannot_be_raised_names_who_could_give_way() -> None:
    plan = plan_of({"torch": {"share": "60%"}, "cupy": {"share": "40%"}})
    found = report({"torch": Usage(74 * GIB, 74 * GIB, 0), "cupy": Usage(GIB, GIB, 0)}, plan=plan)
    assert found.reason == "cap"
    assert "lower frameworks.cupy, which holds 1.00 GiB of its 49.82 GiB" in found.remedies[0].text


ELASTIC = {"torch": {"min": "20%", "max": "50%"}, "cupy": {"min": "10%", "max": "60%"}, "jax": {"share": "20%"}}


def test_the_cap_of_an_elastic_share_is_said_to_be_that_of_now() -> None:
    plan = plan_of({**ELASTIC, "cupy": {"min": "50%", "max": "60%"}})
    cap = plan.devices[0].caps["torch"]
    found = report({"torch": Usage(cap - GIB, cap - GIB, 0), "cupy": Usage(0, 0, 0)}, plan=plan)
    assert f"its cap of {cap / GIB:.2f} GiB (elastic, at most 62.11 GiB) is reached: it holds " in found.why
    full = plan_of({"torch": {"min": "20%", "max": "50%"}})
    cap = full.devices[0].caps["torch"]
    assert "elastic" not in report({"torch": Usage(cap - GIB, cap - GIB, 0)}, plan=full).why


def first_remedy(usages: Mapping[str, Usage | None], plan: Plan, **more: Any) -> str:
    found = report(usages, plan=plan, facts=torch_error("Tried to allocate 6.00 GiB. GPU 0"), **more)
    assert found.reason == "cap"
    return found.remedies[0].text


def test_an_elastic_share_at_its_max_is_told_to_raise_that() -> None:
    plan = plan_of(ELASTIC)
    cap, room = plan.devices[0].caps["torch"], plan.devices[0].limit - plan.devices[0].reserve
    assert cap // (2 * MIB) == room // (4 * MIB)
    text = first_remedy({"torch": Usage(cap - GIB, cap - GIB, 0), "cupy": Usage(0, 0, 0)}, plan)
    found = re.fullmatch(r"raise frameworks\.torch\.max to (\d+MiB)", text)
    assert found is not None, text
    wider = plan_of({**ELASTIC, "torch": {"min": "20%", "max": found[1]}})
    assert wider.devices[0].caps["torch"] - cap >= 5 * GIB


def test_an_elastic_share_within_its_max_is_told_who_has_what_is_spare() -> None:
    plan = plan_of({**ELASTIC, "torch": {"min": "20%", "max": "60%"}, "cupy": {"min": "10%", "max": "60%"}})
    (part,) = plan.devices
    caps = {**part.caps, "torch": 40 * GIB, "cupy": part.caps["torch"] + part.caps["cupy"] - 40 * GIB}
    moved = replace(plan, devices=(replace(part, caps=caps),))
    text = first_remedy({"torch": Usage(39 * GIB, 39 * GIB, 0), "cupy": Usage(GIB, GIB, 0)}, moved)
    lent = (caps["cupy"] - part.elastic["cupy"][0]) / GIB
    assert text.startswith(f"cupy has {lent:.2f} GiB more than its min: raise frameworks.torch.min to ")
    assert text.endswith("MiB, or lower frameworks.cupy.max")


def test_a_fixed_cap_may_grow_by_what_is_lent_but_not_at_once() -> None:
    frameworks = {"torch": {"share": "20%"}, "cupy": {"min": "10%", "max": "100%"}}
    plan = plan_of(frameworks)
    assert plan.devices[0].unallocated < 2 * MIB
    cap = plan.devices[0].caps["torch"]
    text = first_remedy({"torch": Usage(cap - GIB, cap - GIB, 0), "cupy": Usage(0, 0, 0)}, plan)
    found = re.fullmatch(r"raise frameworks\.torch\.share to (\d+%) \([\d.]+ GiB\)", text)
    assert found is not None, text
    assert plan_of({**frameworks, "torch": {"share": found[1]}}).devices[0].caps["torch"] - cap >= 5 * GIB


def test_minima_that_leave_no_room_name_the_min_that_could_give_way() -> None:
    frameworks = {"torch": {"min": "40%", "max": "60%"}, "cupy": {"min": "60%", "max": "80%"}}
    budget = from_mapping({"version": 1, "frameworks": frameworks})
    plan = policy.plan(budget, [H200])
    cap = plan.devices[0].caps["torch"]
    usages = {"torch": Usage(cap - GIB, cap - GIB, 0), "cupy": Usage(GIB, GIB, 0)}
    text = first_remedy(usages, plan, budget=budget)
    found = re.search(r"lower frameworks\.cupy\.min, .* to (\d+MiB) and raise frameworks\.torch\.max to (\d+MiB)", text)
    assert found is not None, text
    changed = {"torch": {"min": "40%", "max": found[2]}, "cupy": {"min": found[1], "max": "80%"}}
    assert plan_of(changed).devices[0].caps["torch"] - cap >= 5 * GIB


def test_a_min_that_cannot_move_is_raised_itself() -> None:
    frameworks = {"tensorflow": {"min": "20%", "max": "50%"}, "cupy": {"share": "10%"}}
    budget = from_mapping({"version": 1, "frameworks": frameworks})
    plan = policy.plan(budget, [H200])
    cap = plan.devices[0].caps["tensorflow"]
    mro = ("tensorflow.python.framework.errors_impl.ResourceExhaustedError", "builtins.Exception")
    facts = ErrorFacts(
        mro[0], mro, "OOM when allocating tensor with shape[6,1024,1024,256] and type float on GPU:0", {}
    )
    usages = {"tensorflow": Usage(cap - GIB, cap - GIB, 0), "cupy": Usage(0, 0, 0)}
    texts = [remedy.text for remedy in report(usages, plan=plan, facts=facts, budget=budget).remedies]
    assert any(
        re.fullmatch(r"raise frameworks\.tensorflow\.min to \d+MiB and restart: its pool is fixed", t) for t in texts
    )


def test_fragmentation_is_told_from_a_cap_that_is_too_small() -> None:
    pieces = {"torch": Usage(48 * GIB, 30 * GIB, 0)}
    found = report(pieces, recorded=told("torch", pieces["torch"]))
    assert found.reason == "fragmented" and "expandable_segments:True" in found.remedies[0].text
    assert found.remedies[0].bytes == 18 * GIB
    assert report({"torch": Usage(48 * GIB, 47 * GIB, 0)}).reason == "cap"
    whole = {"torch": Usage(48 * GIB, 30 * GIB, 8 * GIB)}  # and 10 GiB in partly used segments
    found = report(
        whole, facts=torch_error("Tried to allocate 12.00 GiB. GPU 0"), recorded=told("torch", whole["torch"])
    )
    assert found.reason == "fragmented" and found.remedies[0].bytes == 10 * GIB
    assert "but 10.00 GiB of its cache is fragmented" in found.why
    assert report(whole, facts=torch_error("Tried to allocate 20.00 GiB. GPU 0")).reason == "cap"
    jax = ErrorFacts("jaxlib.XlaRuntimeError", ("jaxlib.XlaRuntimeError",),
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.", {})  # fmt: skip
    plan = plan_of({"jax": {"limit": "8GiB"}})
    peaks = {H200.uuid: {"jax": 4 * GIB}}
    assert report({"jax": Usage(8 * GIB, 4 * GIB, None)}, facts=jax, plan=plan, peaks=peaks).reason == "fragmented"
    # Of CuPy's cache nobody knows which part is split: nothing is claimed.
    text = "Out of memory allocating 2,147,483,648 bytes (allocated so far: 14,495,514,624 bytes)."
    cupy = ErrorFacts("cupy.cuda.memory.OutOfMemoryError", ("cupy.cuda.memory.OutOfMemoryError",), text, {})
    found = report({"cupy": Usage(14 * GIB - 512 * MIB, GIB, None)}, facts=cupy)
    assert found.reason == "cap" and found.verdict.requested == 2 * GIB


def test_a_library_asks_outside_every_cap() -> None:
    facts = ErrorFacts(CUBLAS[0], (CUBLAS[0],), CUBLAS[1], {})
    full = {"torch": Usage(55 * GIB, 48 * GIB, 7 * GIB)}
    found = report(full, {4242: 84 * GIB + 100 * MIB}, facts)
    assert found.requester == "cublas" and found.reason == "card" and "outside every cap" in found.why
    assert found.remedies[0].text.startswith("torch holds 7.00 GiB reclaimable: memguard.trim('torch')")
    assert found.remedies[-1].text.startswith("leave libraries more room outside the caps: raise device.reserve (now 1")


def test_possibly_is_said() -> None:
    facts = ErrorFacts("torch.AcceleratorError", ("torch.AcceleratorError",), "CUDA error: out of memory", {})
    found = report({"torch": Usage(GIB, GIB, 0)}, facts=facts)
    assert found.title == "cuda, through torch, possibly ran out of GPU memory" and found.reason == "unknown"
    assert "pin_memory" in found.remedies[0].text


@pytest.mark.parametrize(
    ("facts", "memory", "words"),
    [
        (ErrorFacts("builtins.OSError", ("builtins.OSError",), "[Errno 28] No space left", {"errno": 28}),
         "disk", "shm"),
        (ErrorFacts("builtins.MemoryError", ("builtins.MemoryError",), "", {}), "host", "CPU memory"),
        (ErrorFacts("pycuda._driver.MemoryError", (), "cuMemHostAlloc failed: out of memory", {}),
         "pinned", "pin_memory"),
    ],
)  # fmt: skip
def test_what_the_gpu_budget_has_nothing_to_do_with(facts: ErrorFacts, memory: str, words: str) -> None:
    found = report(SIBLINGS, {4242: 80 * GIB}, facts)
    assert found.verdict.memory == memory and found.reason == "elsewhere" and found.holders == ()
    assert "the GPU budget has nothing to do with it" in str(found) and words in str(found)
    assert "trim" not in str(found)


def test_the_gpu_is_the_one_that_the_text_names() -> None:
    plan = plan_of(devices=(H200, SECOND))
    assert report(SIBLINGS, plan=plan, facts=torch_error("Tried to allocate 9.00 GiB. GPU 1 has")).uuid == SECOND.uuid
    lost = report(SIBLINGS, plan=plan, facts=torch_error("Tried to allocate 9.00 GiB. GPU 7 has"))
    assert lost.uuid is None and lost.why == "the error is about a GPU that the budget does not name"
    tf = "OOM when allocating tensor with shape[9] and type float on device:GPU:1 by allocator GPU_1_bfc"
    assert report(SIBLINGS, plan=plan, facts=ErrorFacts("x", (), tf, {})).uuid == SECOND.uuid


def test_without_a_reading_it_says_so() -> None:
    found = diagnose(torch_error(), classify(torch_error()), None, None, {}, (), time=0.0)
    assert found.reason == "unknown" and found.why == "the GPU could not be read"
    assert "torch ran out of GPU memory: 8.00 GiB asked for" in str(found)


def test_others_that_nobody_can_tell_apart() -> None:
    plan = plan_of()
    facts = torch_error()
    ledger = ledger_of(plan, {"torch": Usage(GIB, GIB, 0)}, 136 * GIB, known=False)
    found = diagnose(facts, classify(facts), ledger, plan, {}, (), time=0.0)
    assert found.reason == "card" and found.remedies[0].text.startswith("NVML cannot say")
    hidden = report({"torch": Usage(GIB, GIB, 0)}, {4242: None})
    assert hidden.processes == {4242: None}


def test_a_framework_outside_the_budget_is_trimmed_by_its_own_call() -> None:
    plan = plan_of({"torch": {"share": "40%"}})
    found = report({"torch": Usage(GIB, GIB, 0), "cupy": Usage(90 * GIB, GIB, None)}, {9: 44 * GIB}, plan=plan)
    assert found.remedies[0].text.startswith("cupy caches 89.00 GiB: cupy.get_default_memory_pool().free_all_blocks()")


def test_who_grew_before_it() -> None:
    def sample(time: float, held: int) -> Sample:
        rows = {"torch": FrameworkSample(held, held, 0, None), "jax": FrameworkSample(None, GIB, None, None)}
        return Sample(time, (DeviceSample(H200.uuid, 0, 0, 0, 0, 0, 0, 0, rows),))

    found = report(SIBLINGS, samples=(sample(1.0, GIB), sample(11.0, 9 * GIB)))
    assert "torch grew by 8.00 GiB in the last 10 s" in str(found)
    assert "grew" not in str(report(SIBLINGS, samples=(sample(1.0, GIB), sample(11.0, GIB))))
    assert found.as_dict()["samples"][0]["devices"][0]["frameworks"]["torch"]["held"] == GIB


def test_the_texts_fit_a_terminal() -> None:
    crowd = dict.fromkeys(range(30), GIB)
    for found in (
        report(SIBLINGS, {4242: 50 * GIB, **crowd}),
        report({**SIBLINGS, "torch": Usage(48 * GIB, 47 * GIB, 0)}, {4242: 52 * GIB}),
        report({"torch": Usage(48 * GIB, 30 * GIB, 0)}, facts=torch_error("Tried to allocate 8.00 GiB " * 300)),
    ):
        lines = str(found).splitlines()
        assert len(lines) <= 14 and all(len(line) <= 80 for line in lines) and lines[0].startswith("memguard: ")
        from rich.console import Console

        console = Console(width=80, force_terminal=True, color_system="truecolor")
        with console.capture() as drawn:
            console.print(found)
        assert re.sub(r"\x1b\[[\d;]*m", "", drawn.get()).rstrip("\n") == str(found) and "\x1b[" in drawn.get()


def test_json_has_everything() -> None:
    found = report(SIBLINGS, {4242: 80 * GIB})
    data = json.loads(found.to_json())
    assert data["memguard_oom"] == 1 and data["requested"] == 8 * GIB and data["memory"] == "gpu"
    assert data["ledger"]["memguard_ledger"] == 1 and data["processes"] == {"4242": 80 * GIB}
    assert data["remedies"][0]["bytes"] == int(6.2 * GIB) and data["holders"][0]["name"] == "process 4242"
    assert data["simulated"] is False
    simulated = replace(found, ledger=replace(found.ledger, simulated=True))  # type: ignore[arg-type]
    assert "(simulated)" in str(simulated) and simulated.as_dict()["simulated"] is True


def test_nothing_of_the_report_is_zero_where_it_is_unknown() -> None:
    assert Row("framework", "x", None).bytes is None
    found = report(
        {"torch": None, "tensorflow": Usage(None, None)}, facts=torch_error("Tried to allocate 1.00 GiB. GPU 0")
    )
    assert "tensorflow" not in [holder.name for holder in found.holders]


def test_a_recommendation_at_the_very_edge_still_fits() -> None:
    """A cap can be a granule less than its share is: what looks free by the caps is not all free."""
    asked, odd = 8 * GIB, {"cupy": {"share": "33.3333%"}, "numba": {"share": "11.1111%"}, "torch": {"limit": "40GiB"}}
    plan = plan_of(odd)
    part = plan.devices[0]
    for short in range(8):
        size = part.caps["torch"] + part.unallocated - short * 2 * MIB - (asked + 20 * MIB + asked // 16)
        found = report({"torch": Usage(size, size, 0)}, facts=torch_error(), plan=plan)
        if match := re.match(r"raise frameworks\.torch\.(share|limit) to (\S+?),? ", found.remedies[0].text):
            plan_of({**odd, "torch": {match[1]: match[2].rstrip(",")}})
    assert match is not None


def test_a_cap_that_is_recommended_leaves_room_for_rounding() -> None:
    """PyCUDA takes 271 MiB for 256 (measured)."""
    kind = "pycuda._driver.MemoryError"
    facts = ErrorFacts(kind, (kind,), "cuMemAlloc failed: out of memory", {"memguard_requested": 16 * GIB})
    found = report({"pycuda": Usage(2 * GIB, 2 * GIB, 0)}, facts=facts, plan=plan_of({"pycuda": {"limit": "4GiB"}}))
    assert found.verdict.requested == 16 * GIB and found.remedies[0].bytes is not None
    assert 4 * GIB + found.remedies[0].bytes >= 2 * GIB + 16 * GIB * 271 // 256


def test_nobody_is_told_to_trim_the_requester_or_a_pool_that_never_gives_back() -> None:
    plan = plan_of({"torch": {"share": "40%"}, "jax": {"share": "30%"}})
    usages = {"torch": Usage(12 * GIB, 4 * GIB, GIB), "jax": Usage(30 * GIB, 2 * GIB, None)}
    found = report(usages, {4242: 96 * GIB}, plan=plan)
    assert found.reason == "card" and "trim" not in " ".join(remedy.text for remedy in found.remedies)
    texts = " ".join(remedy.text for remedy in found.remedies)
    assert "jax's pool of 30.00 GiB (2.00 GiB in use) never returns memory to the driver" in texts


def test_a_resize_is_not_advised_where_another_holds_more_than_its_cap() -> None:
    plan = plan_of({"torch": {"limit": "20GiB"}, "numba": {"limit": "1GiB"}})
    live = {"torch": Usage(16 * GIB, 16 * GIB, 0), "numba": Usage(GIB, GIB, 0)}
    asked = torch_error("Tried to allocate 8.00 GiB. GPU 0")
    (resize,) = re.findall(r"resize\('torch', '(\d+)MiB'\)", report(live, facts=asked, plan=plan).remedies[0].text)
    room = plan.devices[0].limit - plan.devices[0].reserve
    live["numba"] = Usage(room - int(resize) * MIB, GIB, 0)  # just beside it
    assert "memguard.resize" in report(live, facts=asked, plan=plan).remedies[0].text
    held = room - int(resize) * MIB + 2 * MIB
    live["numba"] = Usage(held, held, 0)
    assert not any("memguard.resize" in one.text for one in report(live, facts=asked, plan=plan).remedies)
    with pytest.raises(PlanError):
        policy.resized(plan, "torch", int(resize) * MIB, {H200.uuid: {"numba": held}})


@given(
    shares=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    asked=st.integers(1, 60 * 1024),
    held=st.floats(0.3, 1.0),
)
def test_a_cap_that_is_recommended_fits_and_is_enough(shares: list[int], asked: int, held: float) -> None:
    """Applied to the budget as the remedy says it, the plan is accepted and the cap as large as was promised."""
    assume(sum(shares) <= 100)
    names = ["torch", "cupy", "pycuda", "numba", "jax"][: len(shares)]
    frameworks = {name: {"share": f"{share}%"} for name, share in zip(names, shares, strict=True)}
    plan = plan_of(frameworks, (H200, SECOND))
    cap = plan.devices[0].caps["torch"]
    size = int(cap * held)
    found = report(
        {"torch": Usage(size, size, 0)}, facts=torch_error(f"Tried to allocate {asked}.00 MiB. GPU 0"), plan=plan
    )
    text = found.remedies[0].text
    if match := re.match(r"raise frameworks\.torch\.(share|limit) to ([^\s,]+)", text):
        assert found.remedies[0].bytes is not None
        try:
            better = plan_of({**frameworks, "torch": {match[1]: match[2]}}, (H200, SECOND))
        except PlanError as error:
            raise AssertionError(f"{text}: {error}") from error
        for part in better.devices:
            assert part.caps["torch"] >= cap + found.remedies[0].bytes >= size + asked * MIB
        if resize := re.search(r"resize\('torch', '(\d+)MiB'\)", text):
            policy.resized(plan, "torch", int(resize[1]) * MIB)
    else:
        assert (
            found.reason != "cap" or "lower frameworks" in text or "device.limit" in text or "neither the other" in text
        )


SHARED = replace(H200, name="NVIDIA GB10", total=124_610 * MIB, reserved=None, unified=True)


@given(
    st.integers(0, 60 * GIB), st.integers(0, 60 * GIB), st.integers(0, 121 * GIB), st.booleans(),
    st.none() | st.integers(1, 130 * GIB), st.sampled_from(["torch", "cupy", "library"]), st.booleans(),
    st.none() | st.sampled_from(["refusal", "observer", "text", "peak", "sample"]),
    st.dictionaries(st.integers(2, 9), st.none() | st.integers(0, 60 * GIB), max_size=3),
)  # fmt: skip
def test_where_the_gpu_uses_the_machines_memory_nobody_looks_for_a_card(
    held: int, idle: int, free: int, known: bool, asked: int | None, who: str, capped: bool, source: Any,
    others: dict[int, int | None],
) -> None:  # fmt: skip
    """Reason and advice name the machine, whatever the figures are."""
    plan = plan_of(SHARES if capped else {"jax": {"share": "20%"}}, (SHARED,))
    size = "" if asked is None else f" Tried to allocate {asked / GIB:.2f} GiB. GPU 0"
    facts = torch_error(size)
    if who == "cupy":
        kind = "cupy.cuda.memory.OutOfMemoryError"
        facts = ErrorFacts(kind, (kind,), f"Out of memory allocating {asked or 'some'} bytes", {})
    elif who == "library":
        facts = ErrorFacts(CUBLAS[0], CUBLAS[:1], CUBLAS[1], {})
    usages = {"torch": Usage(held, max(held - idle, 0), idle // 2), "cupy": Usage(idle, 0, idle)}
    own = 612 * MIB + held + idle if known else None
    reading = Reading(SHARED, MemoryInfo(SHARED.total, None, None, free, None), own, usages, Overhead(612 * MIB))
    ledger = Ledger(0.0, (device_ledger(reading, plan.devices[0]),))
    moment = None
    if source is not None and who != "library":
        moment = RefusedRequest(who, source, 0.0, SHARED.uuid, asked, held, max(held - idle, 0), 0, free=free)
    found = diagnose(
        facts, classify(facts), ledger, plan, {SHARED.uuid: others}, (), time=0.0, recorded=moment,
        budget=from_mapping({"version": 1, "frameworks": SHARES if capped else {"jax": {"share": "20%"}}}),
    )  # fmt: skip
    text = "\n".join([found.why, str(found), *(remedy.text for remedy in found.remedies)])
    assert not re.search(r"\bcard\b|nvidia-smi|another GPU", text), text
    if "card" in found.reason:
        assert "the machine" in found.why and any("free -h" in remedy.text for remedy in found.remedies)
