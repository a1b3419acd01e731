"""The judge of programs that run out of memory, without a GPU: made-up reports, and real ones on simulated GPUs."""

from __future__ import annotations

import ast
import copy
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import moment, oom_programs
from support.oom_programs import PROGRAMS

import memguard
from memguard._base.types import MemoryInfo, Usage
from memguard._budget import from_mapping, policy
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._frameworks.specs import SPECS
from memguard._ledger.overhead import Overhead
from memguard._ledger.rows import Reading, device_ledger
from memguard._oom import causes, hooks, remedies
from memguard._oom.classify import Classification

pytestmark = pytest.mark.long  # no version of what is installed changes what this code does

MIB, GIB = 1 << 20, 1 << 30
BUDGETS = 120
"""That are filled until an advice is given."""
ALONE = [name for name, one in moment.ARRANGED.items() if one.alone]
BESIDE = [name for name, one in moment.ARRANGED.items() if not one.alone]
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total of 139.80 GiB "
    "of which 90.00 GiB is free. 3.50 GiB allowed; Of the allocated memory {} is allocated by PyTorch, and "
    "20.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
)


def advice_of(name: str) -> str:
    """One text for each kind of advice that a program expects."""
    framework = moment.ARRANGED[name].holder
    return {
        "cap": f"raise frameworks.{framework}.share to 71% (3.55 GiB), or memguard.resize({framework!r}, '3640MiB')",
        "device.limit": "cupy would need a cap of 2.20 GiB, 240.00 MiB more than the budget has left: "
        "raise device.limit from 2.97 GiB to 3280MiB, and frameworks.cupy to 2256MiB",
        "lower": "torch would need a cap of 2.11 GiB, 84.00 MiB more than the budget has left: "
        "lower frameworks.cupy, which holds 0 B of its 3.00 GiB, to 2988MiB and raise frameworks.torch to 2160MiB",
        "trim": "torch holds 14.00 GiB reclaimable: memguard.trim('torch') frees it, which is enough",
        "process": "process 77 holds 120.00 GiB of this GPU: end it, or use another GPU",
    }[moment.ARRANGED[name].advice[0]]


def right(name: str) -> tuple[Any, dict[str, Any]]:
    """A run of a program as it should be, and its report."""
    one = moment.ARRANGED[name]
    asked = 256 * MIB if one.requested == moment.TEXT else one.requested
    holders = [{"kind": "framework", "name": "torch" if one.alone else one.holder, "bytes": 3 * GIB}]
    # Beside others the rest of the card is held by programs that have nothing to do with this one.
    holders.append({"kind": "process", "name": "process 77", "bytes": 100 * GIB})
    report = {
        "memory": "gpu",
        "reason": "cap" if one.reason == moment.TEXT else one.reason,
        "requester": one.requester,
        "requested": asked,
        "why": "its cap is reached",
        "holders": holders,
        "remedies": [{"text": advice_of(name), "bytes": 20 * GIB}],
    }
    out = "done" if one.caught else f"{one.stage}\n"
    return moment.Ran(0 if one.caught else 1, out, TORCH.format("3.40 GiB"), report, 3 * GIB, 77), report


@pytest.mark.parametrize("name", moment.ARRANGED)
def test_a_right_report_is_right_and_each_wrong_field_is_wrong(name: str) -> None:
    one = moment.ARRANGED[name]
    ran, report = right(name)
    fields = moment.judge(one, ran)
    assert all(passed for passed, _ in fields.values()), fields
    wrong = {
        "memory": ("memory", "host"),
        "reason": ("reason", "unknown"),
        "requester": ("requester", "nobody"),
        "bytes": ("requested", 7 if one.requested is None else report["requested"] + 64 * MIB),
        "largest holder": ("holders", [{"kind": "framework", "name": "numpy", "bytes": 200 * GIB}]),
        "advice": ("remedies", [{"text": "buy a larger GPU", "bytes": 1}]),
    }
    for field, (key, value) in wrong.items():
        judged = moment.judge(one, replace(ran, report={**report, key: value}))
        assert [name for name, (passed, _) in judged.items() if not passed] == [field]
    missing = moment.judge(one, replace(ran, report=None, returncode=None))
    assert missing["reported"][0] is False and "time limit" in missing["reported"][1]
    if not one.caught:
        elsewhere = moment.judge(one, replace(ran, stdout="done\n"))
        assert not elsewhere["failed as arranged"][0]


def test_the_largest_holder_of_this_process_alone_counts_beside_others() -> None:
    """A process beside it may hold more; what belongs to no framework counts."""
    for name in BESIDE:
        ran, report = right(name)
        own = {"kind": "overhead", "name": "overhead", "bytes": 4 * GIB}
        judged = moment.judge(
            moment.ARRANGED[name], replace(ran, report={**report, "holders": [*report["holders"], own]})
        )
        assert [field for field, (passed, _) in judged.items() if not passed] == ["largest holder"]


def test_bytes_that_a_library_says_and_memguard_does_not_are_wrong() -> None:
    ran, report = right("generate")
    assert not moment.judge(moment.ARRANGED["generate"], replace(ran, report={**report, "requested": None}))["bytes"][0]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Tried to allocate 256.00 MiB. GPU", 256 * MIB),
        ("Out of memory allocating 1,073,741,824 bytes (allocated so far: 0 bytes)", GIB),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 536870912 bytes.", 512 * MIB),
        ("Out of memory while trying to allocate 1.50GiB.", 1536 * MIB),
        ("Tried to allocate 2.00 GiB. ... Tried to allocate 20.00 MiB.", 20 * MIB),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", None),
    ],
)
def test_the_size_in_a_library_s_own_text(text: str, size: int | None) -> None:
    assert moment.asked_by_text(text) == size


@pytest.mark.parametrize(
    ("used", "reasons"),
    [
        ("3.40 GiB", ("cap",)),
        ("3.40 GiB is allocated by PyTorch, with 1.20 GiB allocated in private pools (e.g., CUDA Graphs),", ("cap",)),
        ("618.02 MiB", ("fragmented",)),
        ("2.20 GiB", ("fragmented",)),
        ("3.26 GiB", ("cap", "fragmented")),
        ("3.24 GiB", ("cap", "fragmented")),
    ],
)
def test_the_reason_in_torch_s_own_text(used: str, reasons: tuple[str, ...]) -> None:
    assert moment.torch_reason(TORCH.format(used)) == reasons
    assert moment.torch_reason("no such words") is None


def test_a_reason_that_torch_s_text_contradicts_is_wrong() -> None:
    ran, _ = right("generate")
    judged = moment.judge(moment.ARRANGED["generate"], replace(ran, stderr=TORCH.format("2.20 GiB")))
    assert [name for name, (passed, _) in judged.items() if not passed] == ["reason", "advice"]


COMPILED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 54.67 GiB is free. 1.94 GiB allowed; Of the allocated memory {} is allocated by PyTorch, and 479.98 MiB "
    "is reserved by PyTorch but unallocated."
)
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True, set before torch starts, avoids that"


@pytest.mark.parametrize(
    ("used", "said", "advice", "wrong"),
    [
        ("1.10 GiB", "fragmented", "expandable", []),
        ("1.10 GiB", "cap", "expandable", ["reason"]),
        ("1.10 GiB", "fragmented", "cap", ["advice"]),
        ("1.62 GiB", "cap", "cap", []),
        ("1.62 GiB", "fragmented", "cap", ["reason"]),
        ("1.62 GiB", "cap", "expandable", ["advice"]),
        ("1.44 GiB", "cap", "expandable", []),
        ("1.44 GiB", "fragmented", "cap", []),
        ("1.10 GiB", "unknown", "expandable", ["reason"]),
    ],
)
def test_reason_and_advice_of_a_compiled_model_follow_torch_s_text(
    used: str, said: str, advice: str, wrong: list[str]
) -> None:
    ran, report = right("compiled")
    text = {"cap": advice_of("compiled"), "expandable": EXPANDABLE}[advice]
    report = {**report, "reason": said, "remedies": [{"text": text, "bytes": GIB}]}
    judged = moment.judge(moment.ARRANGED["compiled"], replace(ran, report=report, stderr=COMPILED.format(used)))
    assert [name for name, (passed, _) in judged.items() if not passed] == wrong


@pytest.mark.parametrize("name", moment.ARRANGED)
def test_each_program_s_advice_can_be_followed(name: str) -> None:
    ran, _ = right(name)
    deed, skipped = moment.follow(moment.ARRANGED[name], ran)
    assert deed is not None and not skipped
    kind = moment.ARRANGED[name].advice[0]
    assert (deed.end, deed.call) == {"process": (77, None), "trim": (None, "memguard.trim('torch')")}.get(
        kind, (None, None)
    )
    if deed.budget is not None:
        assert deed.budget != moment.ARRANGED[name].budget
        memguard.Budget.from_mapping(deed.budget)


@pytest.mark.parametrize(
    ("remedy", "why"),
    [
        ({"text": "torch has 3 GiB in live arrays: free some, or make the batch smaller", "bytes": None}, "no bytes"),
        ({"text": "process 4242 holds 9.00 GiB of this GPU: end it, or use another GPU", "bytes": GIB}, "arrangement"),
        ({"text": "torch holds 1.00 GiB reclaimable: memguard.trim('torch') frees it", "bytes": MIB}, "enough"),
        ({"text": "something new", "bytes": GIB}, "would have to change"),
        ({"text": "torch would need a cap of 9 GiB, 1 GiB more than the budget has left: raise device.limit from 1 GiB",
          "bytes": GIB}, "no figure"),
    ],
)  # fmt: skip
def test_advice_that_is_not_tried_says_why(remedy: dict[str, Any], why: str) -> None:
    ran, report = right("comprehension")
    both = {**report, "remedies": [remedy, *report["remedies"]]}
    deed, skipped = moment.follow(moment.ARRANGED["comprehension"], replace(ran, report=both))
    assert deed is not None and len(skipped) == 1 and skipped[0].startswith("not tried: ") and why in skipped[0]


def test_a_call_stands_before_the_line_that_failed() -> None:
    program = "import torch\n\nif True:\n    x = big()\n"
    trace = 'Traceback:\n  File "program.py", line 4, in <module>\n  File "torch/x.py", line 1, in big\n'
    changed = moment.with_call(program, "program.py", trace, "memguard.trim('torch')")
    assert changed == "import torch\n\nif True:\n    import memguard; memguard.trim('torch')\n    x = big()\n"
    assert moment.with_call(program, "program.py", "no traceback", "f()") is None
    assert moment.with_call(program, "program.py", 'File "program.py", line 40', "f()") is None


def test_past_the_request_by_its_end_a_step_or_memory() -> None:
    one = moment.ARRANGED["comprehension"]
    before, _ = right("comprehension")
    for after, helped in (
        (replace(before, stdout="done 12\n", returncode=0), True),
        (replace(before, stdout="step 13\n"), True),
        (replace(before, peak=before.peak + 256 * MIB), True),
        (replace(before, peak=before.peak + 2 * MIB), False),
        (replace(before, stderr=TORCH.format("3.60 GiB")), True),
        (replace(before, stderr=TORCH.format("3.45 GiB")), False),
        (replace(before, stdout="done\n", returncode=None), False),
    ):
        assert moment.got_past(one, before, after)[0] is helped


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("name", BESIDE)
def test_reports_on_simulated_gpus_are_judged_right_and_their_advice_helps(name: str, gpu: str) -> None:
    """The same budget and sizes, by memguard's own report: what tests/gpu does with real programs."""
    one = moment.ARRANGED[name]
    size = one.requested if isinstance(one.requested, int) else 192 * MIB
    before, count = simulated(one.budget, one, size, gpu)
    judged = moment.judge(replace(one, reason="cap", requested=size), before)
    assert all(passed for passed, _ in judged.values()), judged
    deed, _ = moment.follow(one, before)
    assert deed is not None, before.report
    budget = deed.budget if deed.budget is not None else one.budget
    assert simulated(budget, one, size, gpu)[1] > count


def simulated(budget: Any, one: Any, size: int, gpu: str) -> tuple[Any, int]:
    """One framework asks for `size` until it is refused: the run, and how many times it got it."""
    with memguard.guard(dict(budget), simulate=gpu) as guard:
        framework: Any = guard.frameworks[one.holder]
        count = 0
        try:
            while count < 200:
                framework.allocate(size)
                count += 1
        except FrameworkOutOfMemory as error:
            report = hooks.report_error(error, show=False)
            assert report is not None
            return moment.Ran(1, one.stage, "", report.as_dict(), count * size), count
    return moment.Ran(0, "done", "", None), count


FORMS = {
    "share": r"^raise frameworks\.\w+\.share to ",
    "limit": r"^raise frameworks\.\w+\.limit to ",
    "lower": r": lower frameworks\.\w+, ",
    "device.limit and cap": r": raise device\.limit from [^,]+, and frameworks\.",
    "device.limit": r": raise device\.limit from [^,]+$",
}
"""The ways in which an advice of `memguard/_oom/remedies.py` names another budget."""


def budgets(seed: int) -> tuple[dict[str, Any], str, int, list[str]]:
    """A budget, who asks under it, for how much at once, and the GPUs. The last asks for the largest."""
    chance = random.Random(seed)
    names = chance.sample(["torch", "cupy", "numba", "pycuda", "jax", "tensorflow"], chance.randint(1, 3))
    room = chance.randrange(3 * GIB, 12 * GIB, MIB)
    kinds = [chance.choice(["share", "limit"]) for _ in names]
    # Some leave nothing, some a little, some much.
    parts = [chance.choice([100, 99, 60]) // len(names)] * len(names)
    rows = {
        name: {"share": f"{part}%"} if kind == "share" else {"limit": f"{room * part // 100 // MIB}MiB"}
        for name, kind, part in zip(names, kinds, parts, strict=True)
    }
    device = {"limit": f"{room // MIB + 1024}MiB", "reserve": "1GiB"}
    gpus = chance.choice([["h200"], ["t4"], ["h100", "t4"]])
    size = chance.choice([64, 192, 512]) * MIB
    return {"version": 1, "device": device, "frameworks": rows, "monitor": {}}, names[0], size, gpus


def remedies_of(budget: dict[str, Any], name: str, size: int, gpus: list[str]) -> tuple[list[Any], int, Any]:
    """What memguard advises when `name` fills its cap, the cap, and the devices."""
    with memguard.guard(copy.deepcopy(budget), simulate=gpus) as guard:
        framework: Any = guard.frameworks[name]
        devices = [part.device for part in guard.plan.devices]
        cap = guard.plan.devices[0].caps[name]
        for _ in range(400):
            try:
                framework.allocate(size)
            except FrameworkOutOfMemory as error:
                report = hooks.report_error(error, show=False)
                assert report is not None
                return list(report.remedies), cap, devices
    raise AssertionError("it was never refused")


def test_every_wording_that_names_a_budget_is_followed_as_it_stands() -> None:
    """Over texts that memguard makes: the edited budget can be planned, and gives the bytes that were promised."""
    met = dict.fromkeys(FORMS, 0)
    for seed in range(BUDGETS):
        budget, name, size, gpus = budgets(seed)
        for remedy in (found := remedies_of(budget, name, size, gpus))[0]:
            forms = [form for form, pattern in FORMS.items() if re.search(pattern, remedy.text)]
            changed = moment.edited(budget, remedy.text)
            if not forms:
                assert changed is None, remedy.text
                assert remedy.bytes is None or not re.search(r"frameworks\.|device\.", remedy.text), remedy.text
                continue
            (form,) = forms
            met[form] += 1
            kind = {"share": "cap", "limit": "cap", "device.limit and cap": "device.limit"}.get(form, form)
            assert moment.kind_of(remedy.text) == kind
            assert changed is not None, remedy.text
            numbers = set(re.findall(r"(?<= to )(?:[\d.]+%|\d+MiB)", remedy.text))
            assert numbers <= set(re.findall(r"[\d.]+%|\d+MiB", str(changed))), (remedy.text, changed)
            plan = policy.plan(memguard.Budget.from_mapping(changed), found[2])
            assert plan.devices[0].caps[name] >= found[1] + remedy.bytes, (budget, remedy.text, changed)
    assert all(met.values()), met


def test_every_wording_that_names_a_call_or_a_process_is_followed_as_it_stands() -> None:
    """Each framework as the one that holds a cache, of the budget and beside it."""
    one = moment.ARRANGED["sibling_cache"]
    device = SimulatedHost(["t4"]).devices()[0]
    calls = set()
    for spec in SPECS.values():
        for of_the_budget in (True, False):
            rows = {"cupy": {"limit": "4GiB"}} | ({spec.name: {"limit": "6GiB"}} if of_the_budget else {})
            if spec.name == "cupy":
                continue
            plan = policy.plan(from_mapping({"version": 1, "frameworks": rows}), [device])
            usages = {spec.name: Usage(5 * GIB, GIB, 4 * GIB), "cupy": Usage(0, 0, 0)}
            memory = MemoryInfo(device.total, device.total - device.usable, 5 * GIB, 256 * MIB)
            state = Overhead().after(200 * MIB, frozenset({"context"}))
            part = device_ledger(Reading(device, memory, 5 * GIB, usages, state), plan.devices[0])
            case = causes.Case(
                part, Classification("gpu", "cupy", 3 * GIB, True), plan=plan, other_processes={77: 5 * GIB}
            )
            for remedy in remedies.remedies(case.classification, case, "card"):
                said = {"requested": 3 * GIB, "remedies": [{"text": remedy.text, "bytes": remedy.bytes}]}
                deed, skipped = moment.follow(one, moment.Ran(1, "", "", said, 0, 77))
                if "frees it" in remedy.text and (of_the_budget or spec.own_trim):
                    assert deed is not None, skipped
                    assert deed.call == (f"memguard.trim({spec.name!r})" if of_the_budget else spec.own_trim)
                    ast.parse(deed.call)
                    calls.add(deed.call)
                elif remedy.text.startswith("process 77 "):
                    assert deed is not None and deed.end == 77
                else:
                    assert deed is None, remedy.text
    assert {"memguard.trim('torch')", SPECS["torch"].own_trim} <= calls and len(calls) >= 4, calls


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_every_budget_fits_the_card(gpu: str) -> None:
    for name, budget in {**{n: one.budget for n, one in moment.ARRANGED.items()}, **moment.QUIET}.items():
        with memguard.guard(dict(budget), simulate=gpu) as guard:
            part = guard.plan.devices[0]
            for framework, row in budget["frameworks"].items():
                if "limit" in row:  # not rounded away, nor cut to what is left
                    assert part.caps[framework] >= moment.size_of(row["limit"]) - 2 * MIB, name
            assert part.limit <= part.device.usable


def test_there_is_a_program_for_each_name_and_it_asks_for_nothing_of_memguard() -> None:
    files = {path.stem for path in PROGRAMS.glob("*.py")}
    assert files == {*moment.ARRANGED, *moment.QUIET} and len(moment.ARRANGED) == 21 and len(moment.QUIET) == 4
    for path in PROGRAMS.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        # A forked child has no budget: its function calls memguard.init itself.
        assert ("memguard" in names) == (path.stem == "forked_worker")


def test_alarms_are_what_asks_for_attention() -> None:
    kinds = [("pressure", "warn"), ("pressure", "ok"), ("forecast", None), ("leak", None), ("oom", None)]
    kinds += [("trim", None), ("probe", None), ("note", None)]
    events = [{"kind": kind, "level": level, "text": "x"} for kind, level in kinds]
    assert [text.partition(":")[0] for text in moment.alarms(events)] == ["pressure", "forecast", "leak", "oom"]


def test_a_program_that_hangs_or_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it started is killed with it."""
    budget = {"version": 1, "frameworks": {"torch": {"limit": "1GiB"}}}
    folder = oom_programs.Folder(tmp_path / "dies", "raise SystemExit(3)", budget)
    ran, lines = folder.run({}, 60)
    assert ran.returncode in (1, 3) and ran.report is None  # 1: there is no GPU
    assert all(line["report"] is None for line in lines)
    (tmp_path / "support").mkdir()
    (tmp_path / "support" / "moment_child.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(oom_programs, "TESTS", tmp_path)
    ran, _ = oom_programs.Folder(tmp_path / "hangs", "", budget).run({}, 0.5)
    assert ran.returncode is None
