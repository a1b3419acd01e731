"""The moment of a refusal: the figures of then, errors that the program catches, and one report for each."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import memguard
from memguard._base.types import (
    Device,
    DeviceSample,
    Event,
    FrameworkSample,
    MemoryInfo,
    Plan,
    RefusedRequest,
    Sample,
    Usage,
)
from memguard._base.units import GIB, MIB, format_size
from memguard._budget import from_mapping, policy
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._frameworks.specs import SPECS
from memguard._frameworks.tensorflow.adapter import TensorFlow
from memguard._frameworks.torch.adapter import Torch
from memguard._ledger.overhead import Overhead
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import DeviceLedger, Ledger
from memguard._oom import hooks, refusal
from memguard._oom.classify import Classification, ErrorFacts, classify
from memguard._oom.refusal import EVERY, RefusalEvents
from memguard._oom.report import Report, diagnose
from memguard._timeline import load_timeline
from memguard._timeline.replay import replay_timeline
from memguard.errors import PlanError

ROOT = Path(memguard.__file__).parents[1]
H200 = Device("GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53", "NVIDIA H200", 0, 143_771 * MIB, 615 * MIB, "hopper", 0)
TELL = [name for name, row in SPECS.items() if not row.refuses_silently]
SILENT = [name for name, row in SPECS.items() if row.refuses_silently]


# what a report makes of the figures


def plan_of(frameworks: dict[str, Any]) -> Plan:
    return policy.plan(from_mapping({"version": 1, "frameworks": frameworks}), [H200])


def ledger_of(plan: Plan, usages: dict[str, Usage | None], others: int = 0) -> Ledger:
    own = 612 * MIB + sum((u.held or u.held_at_least or 0) for u in usages.values() if u)
    memory = MemoryInfo(H200.total, 615 * MIB, own + others, H200.usable - own - others)
    state = Overhead().after(612 * MIB, frozenset({"context", "torch"}))
    return Ledger(0.0, (device_ledger(Reading(H200, memory, own, usages, state), plan.devices[0]),))


def error(name: str, text: str) -> ErrorFacts:
    kinds = {
        "torch": "torch.OutOfMemoryError", "cupy": "cupy.cuda.memory.OutOfMemoryError",
        "jax": "jaxlib.XlaRuntimeError", "tensorflow": "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
        "pycuda": "pycuda._driver.MemoryError",
    }  # fmt: skip
    return ErrorFacts(kinds[name], (kinds[name], "builtins.RuntimeError"), text, {})


def explained(
    facts: ErrorFacts, usages: dict[str, Usage | None], frameworks: dict[str, Any], others: int = 0, **more: Any
) -> Report:
    plan = plan_of(frameworks)
    then = more.pop("then", None)
    more["then"] = ledger_of(plan, then) if then else None
    return diagnose(facts, classify(facts), ledger_of(plan, usages, others), plan, {}, more.pop("samples", ()),
                    time=9.0, **more)  # fmt: skip


GPT = (
    "CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 62.71 GiB is "
    "free. Process 1 has 16.39 GiB memory in use. 14.36 GiB allowed; Of the allocated memory 14.01 GiB is allocated by "
    "PyTorch, with 20.00 MiB allocated in private pools (e.g., CUDA Graphs), and 305.02 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 136.00 GiB\n"
    "Requested               : 4.00 GiB\nDevice limit            : 139.80 GiB\nFree (according to CUDA): 31.12 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
OLD = (
    "CUDA out of memory. Tried to allocate 376.00 MiB (GPU 0; 3.95 GiB total capacity; 1.72 GiB already allocated; "
    "354.88 MiB free; 2.46 GiB reserved in total by PyTorch)"
)


def near(found: int | None, size: float) -> bool:
    return found is not None and abs(found - size) < 6 * MIB


def test_the_text_of_torch_gives_the_figures_of_the_moment() -> None:
    facts = error("torch", GPT)
    told = refusal.from_text(facts, classify(facts), 3.0)
    assert told is not None and told.source == "text" and told.reclaimable == 0
    assert near(told.in_use, 14.01 * GIB) and near(told.held, 14.01 * GIB + 305 * MIB) and near(told.free, 62.71 * GIB)
    facts = error("torch", OLD)
    told = refusal.from_text(facts, classify(facts), 3.0)
    assert told is not None
    assert near(told.in_use, 1.72 * GIB) and near(told.held, 2.46 * GIB) and near(told.free, 354.88 * MIB)
    facts = error(
        "cupy", "Out of memory allocating 512 bytes (allocated so far: 8,589,934,592 bytes, limit set to: 9)."
    )
    told = refusal.from_text(facts, classify(facts), 3.0)
    assert told is not None and (told.held, told.in_use) == (8 * GIB, None)
    facts = error("torch", ASYNC)
    told = refusal.from_text(facts, classify(facts), 3.0)
    assert told is not None and (told.held, told.reclaimable) == (None, None)
    assert near(told.in_use, 136 * GIB) and near(told.free, 31.12 * MIB)
    for text in ("CUDA out of memory.", "CUDA out of memory. Of the allocated memory x GiB is allocated by PyTorch"):
        assert refusal.from_text(error("torch", text), classify(error("torch", text)), 3.0) is None


def test_a_forward_pass_whose_activations_are_gone_reached_its_cap() -> None:
    """Measured on an H100: 10.26 of 14.36 GiB were left in use when the exception was seen."""
    now: dict[str, Usage | None] = {"torch": Usage(int(14.3 * GIB), int(10.26 * GIB), 0)}
    found = explained(error("torch", GPT), now, {"torch": {"limit": "14704MiB"}})
    assert found.reason == "cap" and found.moment is not None and found.moment.source == "text"
    assert found.why == (
        "its cap of 14.36 GiB was reached: it held 14.31 GiB (14.01 GiB in use) when the request failed; "
        "now 10.26 GiB are in use"
    )
    assert found.holders[0].name == "torch" and near(found.holders[0].bytes, 14.31 * GIB)
    bare = explained(
        error("torch", "CUDA out of memory. Tried to allocate 148.00 MiB"), now, {"torch": {"limit": "14704MiB"}}
    )
    assert bare.reason == "cap" and "what was in use when the request failed is not known" in bare.why
    assert "pieces" not in str(bare) and "partly used" not in str(bare)


def test_a_stricter_limit_of_the_users_own_is_what_has_to_be_raised() -> None:
    usage: dict[str, Usage | None] = {"torch": Usage(3 * GIB, 3 * GIB, 0)}
    told = RefusedRequest("torch", "observer", 1.0, H200.uuid, GIB, 3 * GIB, 3 * GIB, 0, 3 * GIB + MIB)
    text = "CUDA out of memory. Tried to allocate 1.00 GiB."
    found = explained(error("torch", text), usage, {"torch": {"limit": "14GiB"}}, recorded=told, then=usage)
    assert found.reason == "cap" and found.why.startswith("its cap of 3.00 GiB is reached")
    assert found.remedies[0].text == (
        "torch's own limit of 3.00 GiB is stricter than its cap of 14.00 GiB: raise or remove that limit"
    )


def test_that_the_error_means_something_else_is_said_only_of_figures_of_the_moment() -> None:
    small: dict[str, Usage | None] = {"torch": Usage(GIB, GIB, 0)}
    cap = {"torch": {"limit": "14GiB"}}
    text = "CUDA out of memory. Tried to allocate 2.00 GiB."
    now = explained(error("torch", text), small, cap)
    assert now.reason == "unknown" and "something else" not in now.why and "freed since" in now.why
    told = RefusedRequest("torch", "observer", 1.0, H200.uuid, 2 * GIB, GIB, GIB, 0, free=100 * GIB)
    sure = explained(error("torch", text), small, cap, recorded=told, then=small)
    assert sure.reason == "unknown" and sure.why.endswith("the error means something else")
    full = explained(
        error("torch", text), small, cap, recorded=RefusedRequest("torch", "observer", 1.0, H200.uuid, free=GIB)
    )
    assert full.reason == "card" and "was full" in full.why and "now the card has" in full.why


def test_arrays_of_jax_in_a_list_that_is_gone_reached_its_cap() -> None:
    now: dict[str, Usage | None] = {"jax": Usage(14 * GIB, 100 * MIB, 0)}
    facts = error("jax", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.")
    cap = {"jax": {"limit": "14GiB"}}
    found = explained(facts, now, cap, peaks={H200.uuid: {"jax": int(13.5 * GIB)}})
    assert found.reason == "cap" and found.moment is not None and found.moment.source == "peak"
    assert "13.50 GiB in use at its peak" in found.why and "now 100.0 MiB are in use" in found.why
    never = explained(facts, now, cap, peaks={H200.uuid: {"jax": 9 * GIB}})
    assert never.reason == "fragmented", "it never had so much in use that its cap was reached"


def test_the_last_sample_is_the_last_resort() -> None:
    now: dict[str, Usage | None] = {"pycuda": Usage(GIB, GIB, 0)}
    facts = error("pycuda", "cuMemAlloc failed: out of memory")
    row = FrameworkSample(13 * GIB + 900 * MIB, 13 * GIB + 800 * MIB, 0, 14 * GIB)
    gpu = DeviceSample(H200.uuid, H200.total, 0, 100 * GIB, None, None, 0, None, {"pycuda": row})
    found = explained(facts, now, {"pycuda": {"limit": "14GiB"}}, samples=[Sample(8.0, (gpu,))])
    assert found.reason == "cap" and found.moment is not None and found.moment.source == "sample"
    full = DeviceSample(H200.uuid, H200.total, 0, 30 * MIB, None, None, 0, None, {})
    blas = ErrorFacts("builtins.RuntimeError", ("builtins.RuntimeError",), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", {})
    found = explained(blas, now, {"pycuda": {"limit": "14GiB"}}, samples=[Sample(8.0, (full,))])
    assert found.reason == "card" and "was full" in found.why


KERAS = """Graph execution error:

Detected at node sequential_1/dense_2_1/Gelu/Erfc defined at (most recent call last):
  File "program.py", line 10, in <module>

  File "/site/keras/src/backend/tensorflow/nn.py", line 131, in gelu

failed to allocate memory
\t [[{{node sequential_1/dense_2_1/Gelu/Erfc}}]]
Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom to \
RunOptions for current allocation info. This isn't available when running in Eager mode.
 [Op:__inference_multi_step_on_iterator_694]"""
SESSION = """Graph execution error:

Detected at node 'Roll_10' defined at (most recent call last):
    File "program.py", line 10, in <module>
Node: 'Roll_10'
2 root error(s) found.
  (0) RESOURCE_EXHAUSTED: OOM when allocating tensor with shape[8192,8192] and type float on \
/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc
\t [[{{node Roll_10}}]]"""
GRAPHS = (
    "CUDA out of memory. Tried to allocate 288.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 55.80 GiB is "
    "free. Including non-PyTorch memory, this process has 3.41 GiB memory in use. 2.86 GiB allowed; Of the allocated "
    "memory 2.67 GiB is allocated by PyTorch, with 1.12 GiB allocated in private pools (e.g., CUDA Graphs), and 6.98 "
    "MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_keras_whose_error_names_no_size_did_not_fit_under_its_cap() -> None:
    """Measured on an H100: 2,592 of 2,867 MiB were in use, and the card had 54.61 GiB free."""
    now: dict[str, Usage | None] = {
        "tensorflow": Usage(None, 100 * MIB, 0, held_at_least=2717947904, held_at_most=2867 * MIB)
    }
    facts, cap = error("tensorflow", KERAS), {"tensorflow": {"limit": "2867MiB"}}
    peaks = {H200.uuid: {"tensorflow": 2717947904}}
    found = explained(facts, now, cap, H200.usable - int(60 * GIB), peaks=peaks)
    assert found.verdict.requested is None and found.reason == "cap"
    assert found.why.startswith(
        "a request of unknown size did not fit under its cap of 2.80 GiB, of which 2.53 GiB were in use at its peak; "
        "the card had "
    ), found.why
    assert found.holders[0].name == "tensorflow" or found.holders[0].kind == "process"
    raised, smaller = found.remedies
    assert re.match(r"raise frameworks\.tensorflow\.\w+ to at least .* and restart", raised.text), raised.text
    assert raised.bytes is None and "make the batch smaller" in smaller.text
    assert "page-locked" not in str(found.as_dict()["remedies"])
    more = explained(facts, now, cap, H200.usable - int(60 * GIB), peaks={H200.uuid: {"tensorflow": int(2.3 * GIB)}})
    assert more.reason == "cap" and "pieces" not in str(more) and "fragmented" not in more.why
    full = explained(facts, now, cap, H200.usable - int(3.5 * GIB), peaks=peaks)  # less free than under its cap
    assert full.reason != "cap", full.why
    gpu = DeviceSample(H200.uuid, H200.total, 0, 100 * MIB, None, None, 0, None, {})
    seen = explained(facts, now, cap, H200.usable - int(60 * GIB), peaks=peaks, samples=[Sample(8.0, (gpu,))])
    assert seen.reason == "unknown", "the card was full in the last sample"
    assert "the size of the request is unknown: 274.0 MiB of its cap were left" in seen.why, seen.why
    assert "page-locked" not in str(seen)


def test_a_session_of_tensorflow_1_whose_use_is_unknown_reached_its_cap() -> None:
    """Measured on an H100: 3,374 MiB of the process were unaccounted, and the card had 55.80 GiB free."""
    plan = plan_of({"tensorflow": {"limit": "2867MiB"}})
    usages = {"tensorflow": Usage(None, None, 0, held_at_most=2867 * MIB)}

    def read(own: int | None, others: int) -> Ledger:
        memory = MemoryInfo(H200.total, 615 * MIB, 3388 * MIB + others, H200.usable - 3388 * MIB - others)
        state = Overhead().after(3388 * MIB, frozenset({"context", "tensorflow"}), exact=False)
        return Ledger(0.0, (device_ledger(Reading(H200, memory, own, usages, state), plan.devices[0]),))

    def judged(ledger: Ledger, text: str = SESSION) -> Report:
        facts = error("tensorflow", text)
        return diagnose(facts, classify(facts), ledger, plan, {}, (), time=9.0)

    ledger = read(3388 * MIB, 0)
    (part,) = ledger.devices
    row = part.row("tensorflow")
    assert (row.bytes, row.in_use, row.at_most) == (None, None, 2867 * MIB)
    assert row.note == "held unknown, at most 2.80 GiB" and part.sum == H200.total
    found = judged(ledger)
    assert found.verdict.requested == 256 * MIB and found.reason == "cap"
    assert found.why.startswith(
        "a request for 256.0 MiB did not fit under its cap of 2.80 GiB; how much of it is in use is unknown; the card "
        "has "
    ), found.why
    first, *others = found.holders
    assert (first.kind, first.name, first.upper_bound) == ("framework", "tensorflow", True)
    assert first.bytes == min(2867 * MIB, part.row("unaccounted").bytes or 0)
    own = part.row("overhead").bytes or 0
    assert first.bytes + sum(holder.bytes for holder in others) == 3388 * MIB and own
    assert "tensorflow up to 2." in str(found) and "which it does not report" in " ".join(str(found).split())
    raised, smaller = found.remedies
    assert raised.text.startswith("raise frameworks.tensorflow") and (raised.bytes or 0) >= 256 * MIB
    assert "make the batch smaller" in smaller.text
    full = judged(read(3388 * MIB, H200.usable - 3388 * MIB - 100 * MIB))
    assert full.reason == "card", full.why
    nobody = judged(read(None, 0))
    assert nobody.reason == "cap" and not any(holder.upper_bound for holder in nobody.holders)
    whole = judged(ledger, SESSION.replace("8192,8192", "65536,65536"))
    assert whole.reason == "cap" and "more than its whole cap" in whole.why


def test_what_idles_in_the_pools_of_cuda_graphs_serves_nobody() -> None:
    """Measured on an H100: torch's counters take 1.12 GiB for reclaimable, its text for allocated."""
    cap = {"torch": {"limit": "2928MiB"}}
    free, rest = 59912683520, H200.usable - 612 * MIB - 2877292544  # what others have now, so that nothing changed
    usage: dict[str, Usage | None] = {"torch": Usage(2877292544, 1662010368, 1207959552)}
    told = RefusedRequest("torch", "observer", 9.0, H200.uuid, 301989888, 2877292544, 1662010368, 0, 2928 * MIB, free)
    found = explained(error("torch", GRAPHS), usage, cap, rest - free, recorded=told, then=usage)
    assert found.reason == "cap" and found.why.startswith("its cap of 2.86 GiB is reached"), found.why
    assert found.moment is not None and near(found.moment.in_use, 2.67 * GIB)
    assert "expandable" not in str(found.remedies) and found.remedies[0].text.startswith("raise frameworks.torch")
    assert found.why.endswith("it holds 2.68 GiB (2.67 GiB in use); the card has 55.80 GiB free"), "nothing was freed"
    bare = explained(error("torch", "CUDA out of memory."), usage, cap, recorded=told, then=usage)
    assert bare.verdict.requested == 301989888, "the record knows what the text does not"
    alone = explained(error("torch", GRAPHS), usage, cap)
    assert alone.reason == "cap", "the text alone tells as much"
    exact = refusal.complete(told, RefusedRequest("torch", "text", 9.0, in_use=1665000000))
    assert exact.in_use == 1662010368, "a text's two decimals do not take the place of the exact figure"


@pytest.mark.parametrize("history", [False, True])
def test_torchs_observer_counts_what_idles_in_private_pools_without_a_text(
    history: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an error that the program catches. Listing blocks is left out where a history would come with it."""
    listed: list[int] = []

    def segment(device: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        return {
            "device": device, "segment_pool_id": pool,
            "blocks": [{"size": size * MIB, "state": state} for size, state in blocks],
        }  # fmt: skip

    def snapshot() -> list[dict[str, Any]]:
        listed.append(1)
        return [
            segment(0, (0, 0), (700, "inactive"), (500, "active_allocated")),
            segment(0, (0, 1), (900, "inactive"), (500, "active_allocated"), (30, "active_pending_free")),
            segment(0, (1, 0), (300, "inactive")),
            segment(1, (0, 1), (100, "inactive")),
        ]

    figures = {"reserved_bytes": 3000 * MIB, "allocated_bytes": 1000 * MIB}
    stats = {name: {"all": {"current": size}} for name, size in figures.items()}
    core = SimpleNamespace(_cuda_memoryStats=lambda _: stats, _cuda_isHistoryEnabled=lambda: history)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=core, cuda=SimpleNamespace(memory_snapshot=snapshot)))
    torch = Torch(SimpleNamespace())
    torch._uuids, torch._caps, told = {H200.uuid: 0}, {H200.uuid: 3 * GIB}, []
    torch.on_refusal = told.append  # type: ignore[assignment]
    torch._report_observed(0, 400 * MIB, 3 * GIB, 50 * GIB)
    assert (told[0].in_use, told[0].reclaimable) == ((1000 if history else 2200) * MIB, 0)
    assert told[0].pooled == (0 if history else 1200 * MIB)
    torch._report_observed(0, 2100 * MIB, 3 * GIB, 50 * GIB)  # all that it caches would not have been enough
    assert told[1].in_use is None and len(listed) == (not history)
    stats.clear()
    torch._report_observed(0, 1, 3 * GIB, 50 * GIB)
    assert told[2].in_use is None


def test_a_session_of_tensorflow_1_holds_an_unknown_part_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures would start the eager context, so they are not asked for; and unknown is not 0."""
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace())
    framework = TensorFlow(SimpleNamespace())
    framework._logical, framework._limits = {H200.uuid: 0}, {H200.uuid: 2867 * MIB}
    assert framework.usage(H200) is None, "nothing holds memory yet"
    framework._session = True
    assert framework.usage(H200) == Usage(None, None, 0, held_at_most=2867 * MIB)
    assert framework.usage(dataclasses.replace(H200, uuid="GPU-1")) is None
    framework._growth = False
    assert framework.usage(H200) == Usage(2867 * MIB, None, 0)


UNSIZED = {
    "torch": "CUDA out of memory occurred when warming up sampler",
    "tensorflow": KERAS,
    "cupy": "Out of memory",
    "jax": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate a buffer",
}


@given(
    st.sampled_from(sorted(UNSIZED)),
    st.integers(1, 60 * 1024),
    st.none() | st.floats(0, 1),
    st.integers(0, 130 * 1024),
    st.none() | st.integers(0, 130 * 1024),
)
def test_a_request_of_unknown_size_is_laid_to_the_cap_only_if_the_card_had_more(
    name: str, cap: int, part: float | None, filled: int, seen: int | None
) -> None:
    cap *= MIB
    used = None if part is None else int(cap * part)
    usage: dict[str, Usage | None] = {name: Usage(used, used, 0)}
    free = H200.usable - 612 * MIB - (used or 0) - filled * MIB
    assume(free >= 0)
    assume(cap >= 2 * MIB)
    plan = plan_of({name: {"limit": cap // MIB * MIB}})
    facts = error(name, UNSIZED[name])
    classification = classify(facts)
    assert classification.requested is None and classification.refused
    gpu = DeviceSample(H200.uuid, H200.total, 0, seen * MIB if seen is not None else 0, None, None, 0, None, {})
    samples = () if seen is None else (Sample(8.0, (gpu,)),)
    found = diagnose(facts, classification, ledger_of(plan, usage, filled * MIB), plan, {}, samples, time=9.0)
    room = plan.devices[0].caps[name] - (used or 0)
    card = min(free, free if seen is None else seen * MIB)
    if card >= room + 256 * MIB:
        assert found.reason == "cap" and "of unknown size did not fit under its cap" in found.why
        assert "at least" in found.remedies[0].text and found.remedies[0].bytes is None
    else:
        assert "did not fit" not in found.why
        assert found.reason != "cap" or room < 256 * MIB
    assert "page-locked" not in str(found.as_dict()["remedies"]) and "something else" not in found.why


@given(st.integers(0, 14 * 1024), st.integers(0, 14 * 1024), st.integers(0, 14 * 1024))
def test_of_peak_and_last_sample_the_larger_that_explains_the_error_counts(peak: int, sampled: int, now: int) -> None:
    """A peak is never below a sample or the present. It may be from long before, and the sample from before the end."""
    peak = max(peak, sampled, now)
    plan = plan_of({"jax": {"limit": "14GiB"}})
    row = FrameworkSample(14 * GIB, sampled * MIB, 0, 14 * GIB)
    gpu = DeviceSample(H200.uuid, H200.total, 0, 90 * GIB, None, None, 0, None, {"jax": row})
    (part,) = ledger_of(plan, {"jax": Usage(14 * GIB, now * MIB, 0)}).devices
    classification = Classification("gpu", "jax", GIB, True)
    found = refusal.from_sample_or_peak(part, classification, GIB, peak * MIB, [Sample(8.0, (gpu,))], 9.0)
    assert found is not None and found.source == "peak" and found.in_use == peak * MIB
    without = refusal.from_sample_or_peak(part, classification, GIB, None, [Sample(8.0, (gpu,))], 9.0)
    assert (without is None) == (sampled - now < 64) and (without is None or without.source == "sample")


def test_an_error_finds_the_record_of_its_own_request() -> None:
    """By its mark; or, of an observer, by framework and size, first of the same thread and then the newest."""
    classification = Classification("gpu", "torch", 2 * GIB, True)
    records = {
        number: RefusedRequest("torch", "observer", 0.0, requested=size, thread=thread)
        for number, size, thread in ((1, 2 * GIB, 7), (2, 2 * GIB + 4 * MIB, 8), (3, 3 * GIB, 7), (4, None, 9))
    }
    records[5] = RefusedRequest("cupy", "refusal", 0.0, requested=2 * GIB, thread=7)
    bare = ErrorFacts("x", (), "", {})

    def of(facts: ErrorFacts, thread: int, name: str = "torch") -> int | None:
        return refusal.record_of(records, facts, classification, name, 100, thread)

    assert (of(bare, 7), of(bare, 8), of(bare, 9), of(bare, 1)) == (1, 2, 4, 4)
    assert of(bare, 7, "cupy") is None, "memguard's own allocators mark their errors"
    assert of(ErrorFacts("x", (), "", {"memguard_refusal": "100:5"}), 1, "cupy") == 5
    for mark in ("101:5", "100:99", 5, "100"):  # pickled in another process; forgotten; another's attribute
        assert of(ErrorFacts("x", (), "", {"memguard_refusal": mark}), 1, "cupy") is None


@given(
    st.fixed_dictionaries(
        {name: st.none() | st.integers(0, 200 * GIB) for name in ("held", "in_use", "free", "reclaimable")}
    ),
    st.fixed_dictionaries({name: st.integers(0, 60 * GIB) for name in ("held", "in_use")}),
    st.sampled_from(["refusal", "observer", "text", "peak", "sample"]),
    st.integers(1, 80 * GIB),
    st.booleans(),
)
def test_any_figures_give_a_report(
    then: dict[str, int | None], now: dict[str, int], source: Any, asked: int, silent: bool
) -> None:
    """Nothing raises; a fragmented cache and another meaning are only claimed where figures of then show it."""
    usage = Usage(None, now["in_use"], None, now["held"], 60 * GIB) if silent else Usage(now["held"], now["in_use"], 0)
    moment = RefusedRequest(
        "torch", source, 1.0, H200.uuid, asked, then["held"], then["in_use"], then["reclaimable"], free=then["free"]
    )
    found = explained(error("torch", f"CUDA out of memory. Tried to allocate {asked / GIB:.2f} GiB"),
                      {"torch": usage}, {"torch": {"share": "50%"}}, recorded=moment)  # fmt: skip
    text = str(found)
    assert len(text.splitlines()) <= 14 and json.loads(found.to_json())["moment"]["source"] == source
    if "something else" in found.why:
        assert source in ("refusal", "observer", "text")
        room = found.moment and ((then["held"], then["in_use"]) != (None, None) or then["free"] is not None)
        assert room and (then["free"] is None or then["free"] >= asked * 9 // 10 or (then["reclaimable"] or 0) > 0)


# advice


@given(
    shares=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    fixed=st.lists(st.booleans(), min_size=5, max_size=5),
    limit=st.integers(4, 95),
    asked=st.integers(1, 60 * 1024),
    filled=st.floats(0.3, 1.0),
    idle=st.floats(0.0, 1.0),
)
def test_followed_advice_about_the_budget_helps(
    shares: list[int], fixed: list[bool], limit: int, asked: int, filled: float, idle: float
) -> None:
    """What it says is written into the budget, and the budget planned anew: the cap is as large as was promised, and
    the request fits."""
    assume(sum(shares) <= 100)
    names = ["torch", "cupy", "pycuda", "numba", "jax"][: len(shares)]
    written: dict[str, Any] = {"version": 1, "device": {"limit": f"{limit}%"}, "frameworks": {}}
    room = int(H200.usable * limit / 100) - 3 * GIB
    for name, share, bytes_ in zip(names, shares, fixed, strict=False):
        size = room * share // 100 // MIB
        assume(not bytes_ or size >= 2)
        written["frameworks"][name] = {"limit": f"{size}MiB"} if bytes_ else {"share": f"{share}%"}
    try:
        budget = from_mapping(written)
        plan = policy.plan(budget, [H200])
    except (PlanError, memguard.errors.ConfigError):
        assume(False)
    caps = plan.devices[0].caps
    held = int(caps["torch"] * filled)
    usages: dict[str, Usage | None] = {"torch": Usage(held, held, 0)}
    usages |= {name: Usage(int(caps[name] * idle), int(caps[name] * idle), 0) for name in names[1:]}
    facts = error("torch", f"CUDA out of memory. Tried to allocate {asked}.00 MiB. GPU 0")
    moment = RefusedRequest("torch", "observer", 1.0, H200.uuid, asked * MIB, held, held, 0, free=H200.usable)
    ledger = ledger_of(plan, usages)
    found = diagnose(
        facts, classify(facts), ledger, plan, {}, (), time=0.0, budget=budget, recorded=moment, then=ledger
    )
    for remedy in found.remedies:
        changed = apply(written, remedy.text)
        if changed is None:
            assert not remedy.bytes or not re.search(r"frameworks\.torch|device\.limit", remedy.text)
            continue
        better = policy.plan(from_mapping(changed), [H200]).devices[0].caps["torch"]
        assert remedy.bytes is not None and better >= caps["torch"] + remedy.bytes, remedy.text
        assert better >= held + asked * MIB, remedy.text


def apply(written: dict[str, Any], text: str) -> dict[str, Any] | None:
    """The budget with what the remedy says; None if it says nothing of the budget."""
    frameworks = dict(written["frameworks"])
    changed = {**written, "frameworks": frameworks}
    if match := re.match(r"raise frameworks\.torch\.(share|limit) to ([^\s,]+)", text):
        frameworks["torch"] = {match[1]: match[2]}
        return changed
    if match := re.search(r"lower frameworks\.(\w+), .* to (\d+MiB) and raise frameworks\.torch to (\d+MiB)", text):
        frameworks[match[1]], frameworks["torch"] = {"limit": match[2]}, {"limit": match[3]}
        return changed
    if match := re.search(
        r"raise device\.limit from [\d.]+ \w+ to (\d+MiB)(?:, and frameworks\.torch to (\d+MiB))?$", text
    ):
        changed["device"] = {**written["device"], "limit": match[1]}
        if match[2]:
            frameworks["torch"] = {"limit": match[2]}
        return changed
    return None


# programs on simulated GPUs


class Array:
    """Frees itself, as arrays do."""

    def __init__(self, framework: Any, nbytes: int) -> None:
        self.framework, self.id = framework, framework.allocate(nbytes)

    def __del__(self) -> None:
        if hasattr(self, "id"):
            self.framework.free(self.id)


def comprehension(framework: Any) -> Any:
    return [Array(framework, 200 * MIB) for _ in range(40)]


def forward(framework: Any) -> Any:
    """Activations that the pass lets go of on its way out, as C++ does."""
    activations: list[Array] = []
    try:
        while True:
            activations.append(Array(framework, 200 * MIB))
    finally:
        activations.clear()


def backward(framework: Any) -> Any:
    """Gradients that a helper of another thread allocates, whose error is raised again here."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            comprehension(framework)
        except FrameworkOutOfMemory as error:
            raised.append(error.with_traceback(None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise raised.pop()


PROGRAMS = {"comprehension": comprehension, "forward": forward, "backward": backward}


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[memguard.Guard]:
    budget = {
        "version": 1, "device": {"limit": "20GiB", "reserve": "2GiB"},
        "frameworks": {name: {"limit": "2GiB"} for name in SPECS},
        "monitor": {"interval": "1h", "timeline": str(tmp_path / "run.jsonl")},
    }  # fmt: skip
    with memguard.guard(budget, simulate="h200") as found:
        yield found


def run_of(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("run*.jsonl")
    return found


def ooms_of(tmp_path: Path) -> list[Event]:
    return [event for event in load_timeline(run_of(tmp_path)).events() if event.kind == "refused"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", SPECS)
def test_what_was_dropped_on_the_way_out_is_in_the_report(
    guard: memguard.Guard, capsys: pytest.CaptureFixture[str], name: str, program: str
) -> None:
    framework: Any = guard.frameworks[name]
    with pytest.raises(FrameworkOutOfMemory), memguard.workload("step", framework=name):
        PROGRAMS[program](framework)
    report = memguard.last_oom()
    assert report is not None and not report.caught and report.requester == name
    assert report.reason == "cap" and report.verdict.requested == 200 * MIB
    assert report.moment is not None
    assert report.moment.source == ("peak" if name in SILENT else "refusal")
    assert report.moment.in_use is not None and report.moment.in_use >= 1800 * MIB
    assert report.holders[0].name == name and report.holders[0].bytes >= 1800 * MIB
    assert "was reached" in report.why and ") when the request failed; now " in report.why
    assert report.remedies[0].text.startswith(f"raise frameworks.{name}.")
    row = guard.ledger().devices[0].row(name)
    assert row.refused == 1 and row.last_refused == report.time
    assert capsys.readouterr().err.count("\n  error  ") == 1


@pytest.mark.parametrize("name", TELL)
def test_a_caught_error_counts(
    guard: memguard.Guard, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    framework: Any = guard.frameworks[name]
    before = guard.ledger().devices[0].row(name)
    assert (before.refused, before.last_refused) == (0, None)
    kept = Array(framework, GIB)
    for batch in (4, 3, 2):
        with pytest.raises(FrameworkOutOfMemory):
            Array(framework, batch * GIB)
    served = Array(framework, GIB // 2)  # the retry
    report = memguard.last_oom()
    assert report is not None and report.caught and report is memguard.last_oom()
    assert (report.requester, report.reason, report.verdict.requested) == (name, "cap", 2 * GIB)
    assert report.moment is not None and report.moment.in_use == GIB, "before the retry"
    assert report.as_dict()["moment"]["in_use"] == GIB and report.as_dict()["caught"] is True
    ledger = guard.ledger()
    row = ledger.devices[0].row(name)
    assert (
        row.refused == 3
        and row.last_refused == report.time
        and f"* {name}: was refused memory 3 times, the last time at " in str(ledger)
    )
    assert ledger.as_dict()["devices"][0]["rows"][list(SPECS).index(name)]["refused"] == 3
    assert capsys.readouterr().err == "", "nothing is printed for a caught error"
    plan = guard.plan
    memguard.shutdown()
    events = ooms_of(tmp_path)
    assert [(event.framework, event.times) for event in events] == [(name, 1), (name, 2)]
    replayed = replay_timeline(load_timeline(run_of(tmp_path)).records(), plan, recorded=True)
    (found,) = (one for one in replayed.frameworks if one.framework == name)
    assert found.requests == 3 and found.times == "3" and not replayed.fits
    assert "memory was refused 3 times during the recording" in replayed.render()
    del kept, served


@pytest.mark.parametrize("name", SILENT)
def test_a_framework_that_tells_nobody_says_so(guard: memguard.Guard, name: str) -> None:
    framework: Any = guard.frameworks[name]
    with pytest.raises(FrameworkOutOfMemory):
        Array(framework, 4 * GIB)
    assert framework.unseen() and guard.ledger().devices[0].row(name).refused is None, "unknown, and not 0"


def test_an_error_that_a_hook_sees_later_is_in_the_timeline_and_the_replay_once(
    guard: memguard.Guard, tmp_path: Path
) -> None:
    framework: Any = guard.frameworks["torch"]
    with pytest.raises(FrameworkOutOfMemory), memguard.workload("step", framework="torch"):
        comprehension(framework)
    report = memguard.last_oom()
    assert report is not None and not report.caught
    plan = guard.plan
    memguard.shutdown()
    timeline = load_timeline(run_of(tmp_path))
    assert len(ooms_of(tmp_path)) == 1 and len(list(timeline.ooms())) == 1
    found = replay_timeline(timeline.records(), plan, recorded=True)
    assert [row.requests for row in found.frameworks if row.framework == "torch"] == [1]


def test_another_budget_judges_what_was_refused(guard: memguard.Guard, tmp_path: Path) -> None:
    framework: Any = guard.frameworks["torch"]
    for _ in range(2):
        with pytest.raises(FrameworkOutOfMemory):
            comprehension(framework)
    assert guard.ledger() is not None
    sample = guard.sample()
    memguard.shutdown()
    records = [sample, *load_timeline(run_of(tmp_path)).records()]
    for limit, times in (("1GiB", "2"), ("2GiB", "2"), ("8GiB", "?")):
        budget = from_mapping(
            {"version": 1, "device": {"limit": "20GiB", "reserve": "2GiB"}, "frameworks": {"torch": {"limit": limit}}}
        )
        plan = policy.plan(budget, guard.host.devices())
        found = replay_timeline(records, plan)
        (row,) = (row for row in found.frameworks if row.framework == "torch")
        assert row.times == times and found.fits is (times == "?")


def test_two_threads_at_once_have_a_report_each(guard: memguard.Guard) -> None:
    found: dict[str, Report | None] = {}
    barrier = threading.Barrier(2)

    def fail(name: str) -> None:
        framework: Any = guard.frameworks[name]
        barrier.wait()
        try:
            with memguard.workload(name, framework=name):
                comprehension(framework)
        except FrameworkOutOfMemory as caught:
            found[name] = hooks.report_error(caught)

    threads = [threading.Thread(target=fail, args=(name,)) for name in ("torch", "pycuda")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("torch", "pycuda"):
        report = found[name]
        assert report is not None and (report.requester, report.reason) == (name, "cap")
        assert report.moment is not None and report.moment.framework == name


@pytest.mark.long
def test_ten_thousand_caught_errors_stay_cheap(guard: memguard.Guard, tmp_path: Path) -> None:
    """A program that probes batch sizes: few events, little memory, well below a millisecond each."""
    framework: Any = guard.frameworks["torch"]

    def probe(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            with contextlib.suppress(FrameworkOutOfMemory):
                framework.allocate(4 * GIB)
        return time.perf_counter() - begun

    tracemalloc.start()
    probe(200)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    probe(500)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    seconds = min(probe(3000) for _ in range(3))
    print(f"{seconds / 3000 * 1e6:.0f} µs each")
    assert grown < 100_000 and seconds < 3, "a millisecond each"
    assert guard.ledger().devices[0].row("torch").refused == 9700
    memguard.shutdown()
    events = ooms_of(tmp_path)
    assert sum(event.times or 0 for event in events) == 9700 and len(events) < 10


def test_repetitions_become_one_event_at_times() -> None:
    now = [100.0]
    refusals = RefusalEvents(lambda: now[0])
    moment = RefusedRequest("torch", "refusal", 1.0, "GPU-0", GIB, 3 * GIB, 3 * GIB, 0, 4 * GIB, 5 * GIB)
    other = RefusedRequest("cupy", "refusal", 1.0, "GPU-0")
    (first,) = refusals.refused(moment)
    assert first.times == 1 and first.text == (
        "torch: a request for 1.00 GiB was refused; it held 3.00 GiB of its cap of 4.00 GiB, and the GPU had 5.00 GiB "
        "free"
    )
    assert [event.framework for event in refusals.refused(other)] == ["cupy"]
    written = 0
    for _ in range(10_000):
        now[0] += 0.004
        written += len(refusals.refused(moment))
    assert written == 40 // EVERY - 1 or written == 40 // EVERY
    rest = refusals.due(True)
    assert len(rest) == 1 and refusals.due(True) == []


def test_nothing_of_the_failing_code_is_kept(guard: memguard.Guard) -> None:
    framework: Any = guard.frameworks["torch"]
    gc.disable()
    try:
        with pytest.raises(FrameworkOutOfMemory):
            comprehension(framework)
        assert memguard.last_oom() is not None
    finally:
        gc.enable()
    gc.collect()
    assert framework.stats(guard.plan.devices[0].device).in_use == 0


def test_after_the_budget_nothing_is_recorded_and_the_report_stays(guard: memguard.Guard) -> None:
    framework: Any = guard.frameworks["torch"]
    with pytest.raises(FrameworkOutOfMemory):
        Array(framework, 4 * GIB)
    report = memguard.last_oom()
    memguard.shutdown()
    assert framework.on_refusal is None
    with pytest.raises(FrameworkOutOfMemory):
        Array(framework, 4000 * GIB)
    assert memguard.last_oom() is report is not None


def test_a_forked_child_records_nothing(guard: memguard.Guard) -> None:
    framework: Any = guard.frameworks["torch"]
    pid = os.fork()
    if pid == 0:
        try:
            framework.allocate(4000 * GIB)
        except FrameworkOutOfMemory:
            os._exit(0 if memguard.last_oom() is None else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# one report, once


def run(code: str) -> subprocess.CompletedProcess[str]:
    start = """
        import sys, threading, memguard
        BUDGET = {"version": 1, "device": {"limit": "20GiB"}, "frameworks": {"torch": {"limit": "2GiB"}}}
        guard = memguard.init(BUDGET, simulate="h200")
        torch = guard.frameworks["torch"]
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} if ROOT.name != "site-packages" else dict(os.environ)
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)


ONCE = {
    "of the main thread": "torch.allocate(4 << 30)",
    "of a block": "with memguard.workload('step', framework='torch'):\n    torch.allocate(4 << 30)",
    "of a thread": "t = threading.Thread(target=torch.allocate, args=(4 << 30,)); t.start(); t.join()",
    "raised from": "try:\n    torch.allocate(4 << 30)\nexcept Exception as error:\n    raise ValueError from error",
    "of a group": """
        try:
            torch.allocate(4 << 30)
        except Exception as error:
            raise ExceptionGroup("two", [KeyError(1), error])
    """,
}


@pytest.mark.parametrize("which", ONCE)
def test_an_uncaught_error_has_one_report(which: str) -> None:
    err = run(textwrap.dedent(ONCE[which])).stderr
    assert err.count("memguard: torch ran out of GPU memory") == 1, err
    assert err.count("  error  ") == 1 and err.count("Traceback (most recent call last)") >= 1


def test_another_hook_gets_the_note_in_one_line_and_the_error_keeps_it_whole() -> None:
    err = run("""
        kept = []
        def theirs(kind, error, trace):
            kept.append((error, list(getattr(error, "__notes__", []))))
        memguard.shutdown()
        sys.excepthook = theirs
        guard = memguard.init(BUDGET, simulate="h200")
        import atexit
        def told():
            error, notes = kept[0]
            print("SENT", notes)
            print("WHOLE", getattr(error, "__notes__", []))
        atexit.register(told)
        guard.frameworks["torch"].allocate(4 << 30)
    """)
    sent, whole = (line for line in err.stdout.splitlines() if line.startswith(("SENT", "WHOLE")))
    assert sent.count("\\n") == 0 and "ran out of GPU memory" in sent and whole.count("\\n") >= 2
    assert err.stderr.count("  error  ") == 1


def test_an_error_without_notes_has_one_report_too(
    guard: memguard.Guard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the note cannot be added."""

    def refuse(*_: object) -> None:
        raise AttributeError("add_note")

    monkeypatch.setattr(hooks, "add_note", refuse)
    try:
        raise _Oom("CUDA out of memory. Tried to allocate 2.00 GiB")
    except _Oom as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)
        assert not hasattr(caught, "__notes__")
    assert capsys.readouterr().err.count("memguard: torch ran out of GPU memory") == 1


def test_the_note_is_back_after_the_traceback(
    guard: memguard.Guard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever hook of Python printed it, and if that was interrupted; notes of others stay in their places."""
    error = _Oom("CUDA out of memory. Tried to allocate 2.00 GiB")
    error.add_note("first")
    report = hooks.report_error(error, show=True)
    assert report is not None
    error.add_note("last")
    whole = ["first", report.note, "last"]
    capsys.readouterr()
    monkeypatch.setattr(threading.excepthook, "_previous", threading.__excepthook__)  # pytest has its own
    for hook in (sys.excepthook, threading.excepthook):
        arguments = (type(error), error, None)
        hook(*arguments) if hook is sys.excepthook else hook(threading.ExceptHookArgs([*arguments, None]))
        err = capsys.readouterr().err
        assert "memguard" not in err and "first" in err and "last" in err
        assert error.__notes__ == whole

    def broken(*_: object) -> None:
        assert error.__notes__ == ["first", report.line, "last"]
        raise KeyboardInterrupt

    hook = sys.excepthook
    assert isinstance(hook, hooks._Hook)
    hook._previous, before = broken, hook._previous
    with pytest.raises(KeyboardInterrupt):
        sys.excepthook(type(error), error, None)
    hook._previous = before
    assert error.__notes__ == whole


def test_the_note_stays_where_only_the_exception_is_seen(guard: memguard.Guard) -> None:
    framework: Any = guard.frameworks["torch"]
    with pytest.raises(FrameworkOutOfMemory) as caught, memguard.workload("step", framework="torch"):
        framework.allocate(4 * GIB)
    report = memguard.last_oom()
    assert report is not None
    assert caught.value.__notes__ == [report.note]


def test_no_line_about_another_time_comes_before_the_first_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rounds of 4 threads, whose first is held up between its claim and its writing."""
    write = hooks._write

    def slow(shown: Any) -> None:
        if not isinstance(shown, str):
            time.sleep(0.002)
        write(shown)

    monkeypatch.setattr(hooks, "_write", slow)
    undo = hooks.install(hooks.OomContext)
    try:
        for _ in range(200):
            hooks.show_next_in_full()

            def fail() -> None:
                hooks.report_error(_Oom("CUDA out of memory. Tried to allocate 2.00 GiB"))

            threads = [threading.Thread(target=fail) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memguard: ")]
            assert len(lines) == 4 and "ran out" in lines[0] and all("again" in line for line in lines[1:])
            assert sorted(re.findall(r"\((\w+) time", "".join(lines))) == ["2nd", "3rd", "4th"]
    finally:
        undo()


class _Oom(RuntimeError):
    pass


_Oom.__name__ = _Oom.__qualname__ = "OutOfMemoryError"
_Oom.__module__ = "torch"


def test_a_signal_handler_that_runs_out_of_memory_within_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the claim and the writing of the first: nothing waits for itself, and the line comes after the report."""
    undo = hooks.install(hooks.OomContext)
    write, fired = hooks._write, []

    def interrupted(shown: Any) -> None:
        if not fired:
            fired.append(1)
            signal.raise_signal(signal.SIGUSR1)
        write(shown)

    monkeypatch.setattr(hooks, "_write", interrupted)
    before = signal.signal(
        signal.SIGUSR1, lambda *_: hooks.report_error(_Oom("CUDA out of memory. Tried to allocate 2.00 GiB"))
    )
    try:
        hooks.report_error(_Oom("CUDA out of memory. Tried to allocate 2.00 GiB"))
    finally:
        signal.signal(signal.SIGUSR1, before)
        undo()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memguard: ")]
    assert len(lines) == 2 and "ran out" in lines[0] and "2nd time" in lines[1]


def test_parts_of_a_ledger_of_then_add_up() -> None:
    """The reading within an allocation has the rows of every other one."""
    with memguard.guard(
        {"version": 1, "frameworks": {"torch": {"limit": "2GiB"}, "cupy": {"limit": "2GiB"}}}, simulate="h200"
    ) as guard:
        for name in ("torch", "cupy"):
            framework: Any = guard.frameworks[name]
            framework.allocate(GIB)
        with pytest.raises(FrameworkOutOfMemory):
            framework.allocate(4 * GIB)
        report = memguard.last_oom()
        assert report is not None and report.ledger is not None
        (part,), (now,) = report.ledger.devices, guard.ledger().devices
        assert isinstance(part, DeviceLedger) and sum(row.bytes or 0 for row in part.rows) == part.device.total
        assert part.row("unaccounted").bytes == now.row("unaccounted").bytes == 0
        assert format_size(part.row("torch").bytes) == "1.00 GiB"


def test_requests_refused_just_before_the_end_are_in_the_timeline(tmp_path: Path) -> None:
    """The program catches its errors and ends without `shutdown`."""
    monitor = {"interval": "60s", "timeline": str(tmp_path / "run.jsonl")}
    done = run(f"""
        torch = memguard.init({{**BUDGET, "monitor": {monitor}}}, replace=True, simulate="h200").frameworks["torch"]
        for batch in (5, 4, 3):
            try:
                torch.allocate(batch << 30)
            except Exception:
                pass
    """)
    assert done.returncode == 0, done.stderr
    assert [(event.framework, event.times) for event in ooms_of(tmp_path)] == [("torch", 1), ("torch", 2)]
