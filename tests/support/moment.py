"""The expected report of each program in `tests/gpu/programs/`, and the judge that compares it with memguard's. Pure.

An `Arranged` is the ground truth about one program: it follows from the sizes in the program and its budget, not from
memguard. Figures that only the library knows are parsed from the library's own text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
TEXT = "text"  # For `requested` and `reason`: use the value in the library's own text.
STRANGER = "the other process"
ADVICE_FOR = {"cap": ("cap",), "fragmented": ("expandable",)}  # The advice required by the reason in torch's text.
NEAR = 32 * MIB
"""Within this distance from the cap both reasons are accepted: torch's text has two decimals of a GiB."""


@dataclass(frozen=True)
class Arranged:
    """One program, its budget, and the ground truth about its error.

    budget     as in a budget file
    reason     as `Report.reason`; TEXT: derived from torch's text, by whether its memory in use left room
    requester  the requesting framework, as in the report
    requested  bytes; TEXT: the value in the error's own text; None: the library does not report it, so it is unknown
    holder     the largest holder: within this process, or, with `alone`, on the whole GPU
    advice     kinds of `kind_of`, one of which memguard must give
    stage      the program's last output before it failed; a number may follow
    caught     the program catches its error and exits normally
    alone      needs the whole GPU, with `leave` bytes free at the start: another process holds the rest
    """

    budget: Mapping[str, Any]
    requester: str
    requested: int | str | None
    holder: str
    stage: str = "step"
    reason: str = "cap"
    advice: tuple[str, ...] = ("cap",)
    caught: bool = False
    leave: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.leave is not None


def _budget(limit: str, reserve: str | None = None, **frameworks: Any) -> dict[str, Any]:
    """Convert a text to a cap; keep a mapping unchanged."""
    rows = {name: {"limit": cap} if isinstance(cap, str) else cap for name, cap in frameworks.items()}
    device = {"limit": limit} if reserve is None else {"limit": limit, "reserve": reserve}
    return {"version": 1, "device": device, "frameworks": rows, "monitor": {}}


ARRANGED: dict[str, Arranged] = {
    # The slow ones first: they run in parallel with the others.
    # The cache's fragmentation when Triton tries its kernels is unknown: torch's text states it.
    "compiled": Arranged(
        _budget("6GiB", torch="1984MiB"), "torch", 512 * MIB, "torch", "model loaded", TEXT, ("cap", "expandable")
    ),
    # Its kernels are generated; their error contains no size.
    "keras_fit": Arranged(_budget("6GiB", tensorflow="2867MiB"), "tensorflow", None, "tensorflow", "images loaded"),
    "tf1_session": Arranged(_budget("6GiB", tensorflow="2867MiB"), "tensorflow", 256 * MIB, "tensorflow", "graph made"),
    "jax_jit": Arranged(_budget("6GiB", jax="3328MiB"), "jax", 512 * MIB, "jax", "images loaded"),
    "jax_donated": Arranged(_budget("6GiB", jax="2304MiB"), "jax", 512 * MIB, "jax"),
    "generate": Arranged(
        _budget("6GiB", torch="3GiB"), "torch", TEXT, "torch", reason=TEXT, advice=("cap", "expandable")
    ),
    "data_loader": Arranged(
        _budget("6176MiB", "1GiB", torch="2080MiB", cupy="3GiB"), "torch", 64 * MIB, "torch", advice=("lower",)
    ),
    "graph_capture": Arranged(_budget("6GiB", torch="2928MiB"), "torch", TEXT, "torch", "capturing"),
    "comprehension": Arranged(_budget("6GiB", torch="3200MiB"), "torch", 256 * MIB, "torch"),
    "forward": Arranged(
        _budget("6GiB", "1GiB", torch={"share": "70%"}), "torch", 256 * MIB, "torch", "model loaded"
    ),
    "backward": Arranged(_budget("7GiB", torch="4584MiB"), "torch", 256 * MIB, "torch", "forward done"),
    "optimizer_step": Arranged(_budget("6GiB", torch="3090MiB"), "torch", 64 * MIB, "torch", "backward done"),
    "caught": Arranged(_budget("7GiB", torch="3584MiB"), "torch", 2 * GIB, "torch", "step", caught=True),
    "in_thread": Arranged(
        _budget("3040MiB", "1GiB", cupy="2016MiB"), "cupy", 192 * MIB, "cupy", advice=("device.limit",)
    ),
    "forked_worker": Arranged(_budget("6GiB", torch="2400MiB"), "torch", 320 * MIB, "torch"),
    "cupy_fft": Arranged(_budget("6GiB", cupy="1536MiB"), "cupy", TEXT, "cupy", "step 0"),
    "numba_kernel": Arranged(_budget("4GiB", numba="1280MiB"), "numba", 512 * MIB, "numba", "arrays made"),
    "pycuda_expression": Arranged(_budget("4GiB", pycuda="1792MiB"), "pycuda", 512 * MIB, "pycuda", "array loaded"),
    "sibling_cache": Arranged(
        _budget("28GiB", torch="8GiB", cupy="16GiB"), "torch", 6 * GIB, STRANGER, "preprocessed", "card",
        ("trim",), leave=18 * GIB,
    ),
    "other_process": Arranged(
        _budget("14GiB", torch="12GiB"), "torch", GIB, STRANGER, "step", "card", ("process",), leave=8 * GIB
    ),
    "full_card_cublas": Arranged(
        _budget("10GiB", torch="8GiB"), "cublas", None, STRANGER, "data loaded", "card", ("process",), leave=3 * GIB,
        # PyTorch allocates cuBLAS's workspace from its own pool: only cuBLAS itself calls the driver.
        environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    ),
}  # fmt: skip
"""Each key is the name of a file in `tests/gpu/programs/`."""

QUIET: dict[str, dict[str, Any]] = {
    "quiet_images": _budget("11GiB", torch="9GiB"), "quiet_generate": _budget("7GiB", torch="5GiB"),
    "quiet_data_set": _budget("8GiB", torch="6GiB"), "quiet_jax": _budget("5GiB", jax="3GiB"),
}  # fmt: skip
"""Programs without a fault. None of them justifies an alarm."""
ALARMS = ("pressure", "forecast", "leak", "oom")


@dataclass(frozen=True)
class Ran:
    """One run of a program: its exit, its output, memguard's records, and its peak of GPU memory by NVML."""

    returncode: int | None
    stdout: str
    stderr: str
    report: Mapping[str, Any] | None
    peak: int = 0
    stranger: int | None = None

    @property
    def done(self) -> bool:
        return any(line.startswith("done") for line in self.stdout.splitlines())

    @property
    def stage(self) -> str:
        lines = [line for line in self.stdout.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    @property
    def step(self) -> int:
        """The last number that it printed; -1 if none."""
        return max((int(found) for found in re.findall(r"^step (\d+)", self.stdout, re.MULTILINE)), default=-1)


Field = tuple[bool, str]  # Whether a field is right, its actual and its expected value.


def judge(arranged: Arranged, ran: Ran) -> dict[str, Field]:
    """Compare every field of the report with the ground truth."""
    found: dict[str, Field] = {}
    if not arranged.caught:
        found["failed as arranged"] = (not ran.done and ran.stage.startswith(arranged.stage), _ended(ran))
    report = ran.report
    if report is None:
        found["reported"] = (False, f"no report; {_ended(ran)}")
        return found
    found["memory"] = _is(report.get("memory"), "gpu")
    found["reason"] = _reason(arranged, ran, report)
    found["requester"] = _is(report.get("requester"), arranged.requester)
    found["bytes"] = _bytes(arranged, ran, report)
    found["largest holder"] = _holder(arranged, ran, report)
    kinds = [kind_of(remedy["text"]) for remedy in report.get("remedies", ())]
    wanted = _advice(arranged, ran)
    found["advice"] = (any(kind in wanted for kind in kinds), f"{kinds}, expected {' or '.join(wanted)}")
    return found


def _advice(arranged: Arranged, ran: Ran) -> tuple[str, ...]:
    """The kinds of advice, one of which memguard must give; if torch's text determines the reason, its kinds."""
    true = (torch_reason(ran.stderr) if arranged.reason == TEXT else None) or ()
    return ADVICE_FOR[true[0]] if len(true) == 1 else arranged.advice


def _ended(ran: Ran) -> str:
    how = "killed: time limit" if ran.returncode is None else f"rc {ran.returncode}"
    return f"{how}, last printed {ran.stage[:60]!r}"


def _is(said: Any, true: Any) -> Field:
    return said == true, f"{said}" if said == true else f"{said}, expected {true}"


def _reason(arranged: Arranged, ran: Ran, report: Mapping[str, Any]) -> Field:
    true = (arranged.reason,)
    if arranged.reason == TEXT:
        true = torch_reason(ran.stderr) or ("cap", "fragmented")
    said = report.get("reason")
    why = str(report.get("why", ""))[:160]
    return said in true, f"{said} ({why})" if said in true else f"{said} ({why}), expected {' or '.join(true)}"


def _bytes(arranged: Arranged, ran: Ran, report: Mapping[str, Any]) -> Field:
    true = asked_by_text(ran.stderr) if arranged.requested == TEXT else arranged.requested
    said = report.get("requested")
    if true is None or said is None:
        return said == true, f"{said}" if said == true else f"{said}, expected {true}"
    slack = max(MIB, 5 * MIB if int(true) >= GIB else 0)  # texts have two decimals of the unit
    right = abs(said - int(true)) <= slack
    return right, f"{said}" if right else f"{said}, expected {true}"


def _holder(arranged: Arranged, ran: Ran, report: Mapping[str, Any]) -> Field:
    true = f"process {ran.stranger}" if arranged.holder == STRANGER else arranged.holder
    # In a parallel run other processes use the GPU too: compare this process's memory only.
    holders = [h for h in report.get("holders", ()) if arranged.alone or h["kind"] != "process"]
    first = max(holders, key=lambda holder: holder["bytes"], default=None)
    said = None if first is None else first["name"]
    size = "" if first is None else f": {first['bytes'] / MIB:,.0f} MiB"
    return said == true, f"{said}{size}" if said == true else f"{said}{size}, expected {true}"


_SCALE = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}
_SIZE = r"([\d.,]+) ?([KMGT]?)(?:i?B|bytes)"


def size_of(text: str) -> int:
    """The bytes named in a text: `1.50 GiB`, `536,870,912 bytes`, `20 MiB`."""
    found = re.fullmatch(_SIZE, text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size")
    return round(float(found[1].rstrip(".,").replace(",", "")) * _SCALE[found[2]])


def asked_by_text(stderr: str) -> int | None:
    """The bytes in the last error's own text, by torch, CuPy or JAX."""
    pattern = rf"(?:Tried to allocate|allocating|trying to allocate) {_SIZE}"
    found = re.findall(pattern, stderr, re.IGNORECASE)
    return size_of(f"{found[-1][0]} {found[-1][1]}B") if found else None


def _last(pattern: str, stderr: str) -> int | None:
    """The bytes of the last match, whose two groups are the number and its unit."""
    found = re.findall(pattern, stderr)
    return size_of(f"{found[-1][0]} {found[-1][1]}B") if found else None


def in_use_by_text(stderr: str) -> int | None:
    """The allocated bytes in torch's last error, including idle memory in the pools of CUDA graphs."""
    return _last(rf"Of the allocated memory {_SIZE} is allocated by PyTorch", stderr)


def torch_reason(stderr: str) -> tuple[str, ...] | None:
    """From torch's own text: whether the request would fit with torch's cache freed. Both answers if it is close."""
    asked, used, allowed = asked_by_text(stderr), in_use_by_text(stderr), _last(rf"{_SIZE} allowed", stderr)
    if asked is None or used is None or allowed is None:
        return None
    over = used + asked - allowed
    if abs(over) <= NEAR:
        return ("cap", "fragmented")
    return ("cap",) if over > 0 else ("fragmented",)


_KINDS = (
    ("device.limit", r"raise device\.limit"), ("lower", r"more than the budget has left: lower frameworks\.\w+"),
    ("cap", r"raise frameworks\.\w+\.(share|limit|max)"),
    ("trim", r"memguard\.trim\('\w+'\)|\bfrees it\b|\bempty_cache\(\)|\bfree_all_blocks\(\)"),
    ("process", r"process \d+ holds .*\bend it\b"), ("expandable", r"expandable_segments:True"),
    ("reserve", r"raise device\.reserve"),
    ("smaller", r"make the batch smaller|smaller requests|largest arrays first"), ("pinned", r"page-locked"),
)  # fmt: skip


def kind_of(text: str) -> str:
    """The kind of an advice, as named in `Arranged.advice`; otherwise `other`."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "other")


@dataclass(frozen=True)
class Deed:
    """The steps that follow an advice: another budget, a call before the failing line, the end of a process, or a
    variable."""

    text: str
    budget: Mapping[str, Any] | None = None
    call: str | None = None
    end: int | None = None
    environment: Mapping[str, str] | None = None


def follow(arranged: Arranged, ran: Ran) -> tuple[Deed | None, list[str]]:
    """The first advice that promises bytes and needs no person to follow, and why earlier ones do not qualify. If none
    promises bytes, for example with an unknown request size, choose the first that names a setting."""
    skipped = []
    found = (ran.report or {}).get("remedies", ())
    promise = any(remedy.get("bytes") is not None for remedy in found)
    for remedy in found:
        deed = _deed(arranged, ran, remedy if promise else {**remedy, "bytes": 0})
        if isinstance(deed, Deed):
            return deed, skipped
        skipped.append(f"not tried: {deed}: {remedy['text'][:100]}")
    return None, skipped


def _deed(arranged: Arranged, ran: Ran, remedy: Mapping[str, Any]) -> Deed | str:
    """The steps for one advice, or the reason to skip it."""
    text, kind = str(remedy["text"]), kind_of(str(remedy["text"]))
    if remedy.get("bytes") is None:
        return "it promises no bytes"
    if kind in ("cap", "device.limit", "lower"):
        budget = edited(arranged.budget, text)
        return "no figure that could be written down" if budget is None else Deed(text, budget=budget)
    if kind == "trim":
        asked = (ran.report or {}).get("requested")
        if asked is not None and remedy["bytes"] < asked and "enough" not in text:
            return "it does not promise enough"
        found = re.search(r"memguard\.trim\('\w+'\)|[\w.]+(?:\(\)\.\w+)*\(\)", text)
        return "it names no call" if found is None else Deed(text, call=found[0])
    if kind == "process":
        found = re.search(r"process (\d+) holds", text)
        if found is None or int(found[1]) != ran.stranger:
            return "that process is not of this arrangement"
        return Deed(text, end=int(found[1]))
    if kind == "expandable":
        return Deed(text, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    return "the program itself would have to change"


def edited(budget: Mapping[str, Any], text: str) -> dict[str, Any] | None:
    """The budget changed as the advice says; None if it names no change of a budget."""
    frameworks = {name: dict(row) for name, row in budget["frameworks"].items()}
    device = dict(budget.get("device", {}))

    def cap(name: str, key: str, value: str) -> None:
        kept = {other: one for other, one in frameworks.get(name, {}).items() if other not in ("share", "limit")}
        frameworks[name] = {**kept, key: value}

    if found := re.search(r"raise frameworks\.(\w+)\.(share|limit) to (?:at least )?([\d.]+%|\d+MiB)", text):
        cap(*found.groups())
    elif found := re.search(r"lower frameworks\.(\w+), .* to (\d+MiB) and raise frameworks\.(\w+) to (\d+MiB)", text):
        cap(found[1], "limit", found[2])
        cap(found[3], "limit", found[4])
    elif found := re.search(r"raise device\.limit from .+? to (\d+MiB)(?:, and frameworks\.(\w+) to (\d+MiB))?", text):
        device["limit"] = found[1]
        if found[2] is not None:
            cap(found[2], "limit", found[3])
    else:
        return None
    return {**budget, "device": device, "frameworks": frameworks}


def with_call(program: str, name: str, stderr: str, call: str) -> str | None:
    """The program with a call inserted before the failing line: the last line of its own in the traceback."""
    lines = program.splitlines()
    numbers = [int(n) for n in re.findall(rf'File "[^"]*{re.escape(name)}", line (\d+)', stderr)]
    if not numbers or not 0 < numbers[-1] <= len(lines):
        return None
    at = numbers[-1] - 1
    margin = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    before = "import memguard; " if call.startswith("memguard.") else ""
    return "\n".join([*lines[:at], f"{margin}{before}{call}", *lines[at:]]) + "\n"


def got_past(arranged: Arranged, before: Ran, after: Ran) -> Field:
    """Whether the second run got past the request that failed in the first run."""
    if after.returncode is None:
        return False, "killed: time limit"
    if after.done and not before.done:
        return True, "ran to its end"
    if after.step > before.step:
        return True, f"step {after.step} after step {before.step}"
    report = before.report or {}
    asked = report.get("requested") or asked_by_text(before.stderr) or 64 * MIB
    grown = after.peak - before.peak
    figure = f"at most {after.peak / MIB:,.0f} MiB by NVML, {before.peak / MIB:,.0f} before"
    # The first run held a fragmented cache too: torch's memory in use at the failure shows whether it became usable.
    used, then = in_use_by_text(after.stderr), in_use_by_text(before.stderr)
    if used is not None and then is not None:
        grown = max(grown, used - then)
        figure += f"; {used / MIB:,.0f} MiB in use when it failed, {then / MIB:,.0f} before"
    return grown >= asked // 2, f"{figure}; {_ended(after)}"


def alarms(events: list[Mapping[str, Any]]) -> list[str]:
    """The events that call for attention, as texts."""
    return [
        f"{event['kind']}: {event['text']}"
        for event in events
        if event["kind"] in ALARMS and event.get("level") != "ok"
    ]


def verdict(one: Mapping[str, Any]) -> Iterator[str]:
    """The errors in one program's result, field by field."""
    for name, (right, figure) in one.get("fields", {}).items():
        if not right:
            yield f"{name}: {figure}"
