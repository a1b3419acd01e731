"""The report on an out-of-memory error: the requester, the holders of the memory, idle memory, remedies. Pure.

`diagnose` combines the classification of the exception with a reading of the ledger, the plan, the other processes and
the last samples. If the figures prove no cause, the report says `unknown` or "possibly".
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memguard._base.text import fitting, shown, visible
from memguard._base.types import NoHelp, Plan, RefusedRequest, Sample
from memguard._base.units import MIB, format_size
from memguard._frameworks.specs import NEVER_GIVE_BACK
from memguard._ledger.types import DeviceLedger, Ledger
from memguard._oom import causes, refusal
from memguard._oom.causes import Case, Reason, caps_in_force, device_of
from memguard._oom.classify import Classification, ErrorFacts, classify, family
from memguard._oom.remedies import Remedy, if_no_room_was_made, remedies

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memguard._budget import Budget

__all__ = ["Classification", "ErrorFacts", "MemoryHolder", "Reason", "Remedy", "Report", "classify", "diagnose"]

LINES, WIDTH = 14, 80
"""Maximum number of lines and of columns of a printed report."""
_SHOWN = 4
"""Maximum number of memory holders in a printed report. The JSON form lists all."""
_GROWTH = 64 * MIB
"""Minimum growth of a framework's memory, in bytes, that the report mentions."""


@dataclass(frozen=True)
class MemoryHolder:
    """One holder of GPU memory. `kind` is framework, process, overhead or unaccounted.

    `cached` and `reclaimable` are known for frameworks only; None if unknown. `upper_bound`: the framework does not
    report its bytes, and holds at most `bytes`, which are not counted for any other holder.
    """

    kind: str
    name: str
    bytes: int
    cached: int | None = None
    reclaimable: int | None = None
    upper_bound: bool = False


@dataclass(frozen=True)
class Report:
    """The report on one error. `print` it, or use `as_dict()` / `to_json()`. A report has no reference to the
    exception.

    `requester` is a text (`cublas, through cupy`), `error` a short text, `why` the cause in one sentence. `holders` are
    sorted, largest first. `processes` has the bytes of the other processes on the GPU `uuid` by PID, None if NVML does
    not report these bytes.

    `moment` has the figures of the refusal. `moment` is None if memguard knows only the figures of `ledger`, which were
    read when the error reached memguard. `caught`: True if the program caught the error, so that the report is made
    from the recorded request.
    """

    time: float
    verdict: Classification
    error: str
    ledger: Ledger | None
    processes: Mapping[int, int | None]
    samples: tuple[Sample, ...]
    remedies: tuple[Remedy, ...]
    uuid: str | None
    requester: str = "unknown"
    reason: Reason = "unknown"
    why: str = ""
    holders: tuple[MemoryHolder, ...] = field(default=())
    moment: RefusedRequest | None = None
    caught: bool = False

    @property
    def simulated(self) -> bool:
        """True if the GPU is simulated."""
        return self.ledger is not None and self.ledger.simulated

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Sizes are in bytes, None if unknown. The keys are stable within `memguard_oom` 1."""
        return {
            "memguard_oom": 1,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(),
            "simulated": self.simulated,
            **{name: getattr(self.verdict, name) for name in ("memory", "requester", "requested", "certain")},
            "error": self.error,
            "uuid": self.uuid,
            "reason": self.reason,
            "why": self.why,
            "caught": self.caught,
            "moment": _request_dict(self.moment),
            "holders": [vars(holder) for holder in self.holders],
            "processes": {str(pid): size for pid, size in self.processes.items()},
            "remedies": [vars(remedy) for remedy in self.remedies],
            "samples": [_plain(sample) for sample in self.samples],
            "ledger": self.ledger.as_dict() if self.ledger is not None else None,
        }

    def to_json(self) -> str:
        """`as_dict()` as text."""
        return json.dumps(self.as_dict(), indent=2)

    @property
    def title(self) -> str:
        """The requester and the exhausted memory, in one line."""
        possibly = "" if self.verdict.certain else "possibly "
        size = "" if self.verdict.requested is None else f": {format_size(self.verdict.requested)} asked for"
        if self.verdict.memory == "disk":
            return f"{possibly}a full file system, and no lack of GPU memory"
        what = {"gpu": "GPU memory", "pinned": "page-locked host memory"}.get(self.verdict.memory, "CPU memory")
        mark = " (simulated)" if self.simulated else ""
        prefix = "" if self.requester == "unknown" else f"{self.requester} "
        return f"{prefix}{possibly}ran out of {what}{size}{mark}" if prefix else f"{possibly}out of {what}{size}{mark}"

    @property
    def line(self) -> str:
        """Title and cause in one line."""
        return f"memguard: {self.title}" + (f": {self.why}" if self.why else "")

    @property
    def note(self) -> str:
        """The note on the exception: title, cause and the first remedy."""
        texts = [f"memguard: {self.title}", self.why, *(remedy.text for remedy in self.remedies[:1])]
        return "\n  ".join(visible(text) for text in texts if text)

    def __repr__(self) -> str:
        """One line for an interactive prompt. `print` shows the whole report."""
        return shown(f"<Report: {self.title}>")

    def __str__(self) -> str:
        return fitting(full_text(self))

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        out = Text(no_wrap=True)
        for number, (style, label, text) in enumerate(self._lines()):
            out.append("\n" if number else "").append(label, "dim").append(visible(text), style)
        return out

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(full_text(self))}</pre>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the report in IPython's terminal."""
        printer.text(str(self))

    def _lines(self) -> list[tuple[str, str, str]]:
        """The style, label and text of each line. Includes the best remedies, as many as fit in `LINES`."""
        lines = [("bold red", "", textwrap.shorten(f"memguard: {self.title}", WIDTH, placeholder="…"))]
        lines += _wrap("error", self.error, 1)
        gpu = next((gpu for gpu in self.ledger.devices if gpu.device.uuid == self.uuid), None) if self.ledger else None
        if gpu is not None:
            ordinal = "" if gpu.device.ordinal is None else f", cuda:{gpu.device.ordinal}"
            free = format_size(gpu.row("free").bytes)
            shared = ", the machine's memory" if gpu.device.unified else ""
            total = format_size(gpu.device.usable)
            lines += _wrap("GPU", f"{gpu.device.name}{ordinal}: {free} free of {total}{shared}", 1)
        why_no_help = self.moment.why_no_help if self.moment is not None else None
        lines += _wrap("why", self.why, 2 if why_no_help is None else 3, "bold")
        requester = self.verdict.requester
        holders = "; ".join(_described(holder, requester) for holder in self.holders[:_SHOWN])
        lines += _wrap("holds", holders, 2)
        lines += _wrap("before", _growth(self.samples, self.uuid), 1)
        for number, remedy in enumerate(self.remedies):
            more = _wrap("do" if not number else "", f"{number + 1}. {remedy.text}", 3, "green")
            if len(lines) + len(more) > LINES:
                break
            lines += more
        return lines


def full_text(report: Report) -> str:
    """The report as text for a log, a file or another process. `str(report)` also replaces characters that standard
    output cannot encode."""
    return "\n".join(visible(label + text) for _, label, text in report._lines())


def diagnose(
    facts: ErrorFacts,
    classification: Classification,
    ledger: Ledger | None,
    plan: Plan | None,
    processes: Mapping[str, Mapping[int, int | None]],
    samples: Sequence[Sample],
    *,
    time: float,
    budget: Budget | None = None,
    peaks: Mapping[str, Mapping[str, int]] | None = None,
    recorded: RefusedRequest | None = None,
    then: Ledger | None = None,
    caught: bool = False,
) -> Report:
    """The report on one exception, or on a refused request whose exception the program has caught.

    ledger     read while the exception exists; for a caught exception, read at the refusal
    processes  other processes' bytes by device UUID and PID
    samples    the monitor's last samples, oldest first
    time       seconds, as `time.time()`
    budget     the budget of `plan`; if None, no remedy changes `device.limit`
    peaks      each framework's peak of bytes in use, by device UUID and name
    recorded   the recorded request; `then` is a ledger read at its refusal
    """
    raised = family(facts)
    requester = classification.requester or "unknown"
    if classification.requester is None and raised is not None:
        requester = raised
    elif raised is not None and raised != requester:
        requester = f"{requester}, through {raised},"
    if classification.memory != "gpu":
        why = "the GPU budget has nothing to do with it"
        found = remedies(classification, None)
        return Report(time, classification, _short(facts), ledger, {}, (), found, None, requester, "elsewhere", why)
    gpu = device_of(facts.text, classification, ledger, recorded)
    if gpu is None:
        reason, why = causes.unknown(ledger)
        return Report(
            time, classification, _short(facts), ledger, {}, tuple(samples), (), None, requester, reason, why, (),
            recorded, caught,
        )  # fmt: skip
    uuid = gpu.device.uuid
    if recorded is not None:
        requested = classification.requested if classification.requested is not None else recorded.requested
        classification = replace(classification, requested=requested, refused=True)
    before, request = _rows_at_refusal(
        gpu, facts, classification, plan, then, recorded, samples, (peaks or {}).get(uuid, {}), time
    )
    others = dict(processes.get(uuid, {}))
    case = Case(
        caps_in_force(before, classification), classification, raised, plan, others, budget, request is not None,
        next((one.free for one in samples[-1].devices if one.uuid == uuid), None) if samples else None,
    )  # fmt: skip
    pooled = request.pooled if request is not None else None
    since = refusal.changes_since(before, None if caught else gpu, classification.requester, pooled)
    reason, why = causes.reason(case, request, since)
    found = remedies(classification, case, reason)
    if (why_no_help := request.why_no_help if request is not None else None) is not None:
        if why_no_help.kind in (NoHelp.NOTHING_IDLE, NoHelp.NOT_ASKED):
            why = f"{why}; no room was made: {why_no_help.text}"
        else:  # the advice to retry comes first, because a retry may be enough
            why = f"no room was made for it: {why_no_help.text}; {why}"
        found = (*if_no_room_was_made(why_no_help.kind), *found)
    return Report(
        time, classification, _short(facts), ledger, others, tuple(samples), found, uuid, requester, reason, why,
        _holders(case), request, caught,
    )  # fmt: skip


def _rows_at_refusal(
    gpu: DeviceLedger,
    facts: ErrorFacts,
    classification: Classification,
    plan: Plan | None,
    then: Ledger | None,
    recorded: RefusedRequest | None,
    samples: Sequence[Sample],
    peaks: Mapping[str, int],
    time: float,
) -> tuple[DeviceLedger, RefusedRequest | None]:
    """The GPU's ledger rows at the refusal, and the request that supplied the figures; without such figures, the
    current rows and None."""
    from_text = refusal.from_text(facts, classification, time)
    uuid = gpu.device.uuid
    if recorded is not None:
        recorded = refusal.complete(recorded, from_text)
        base = next((one for one in then.devices if one.device.uuid == uuid), gpu) if then is not None else gpu
        return refusal.rows_at(base, recorded), recorded
    if from_text is not None:
        from_text = from_text._replace(uuid=uuid)
        return refusal.rows_at(gpu, from_text), from_text
    need = Case(gpu, classification, plan=plan).needed
    found = refusal.from_sample_or_peak(
        gpu, classification, need, peaks.get(classification.requester or ""), samples, time
    )
    return (gpu, None) if found is None else (refusal.rows_at(gpu, found), found)


def report_of_refusal(
    request: RefusedRequest, then: Ledger | None, plan: Plan | None, processes: Mapping[str, Mapping[int, int | None]],
    budget: Budget | None = None,
) -> Report:  # fmt: skip
    """The report on a refused request whose exception has not reached memguard, probably because the program caught the
    exception."""
    classification = Classification("gpu", request.framework, request.requested, True, refused=True)
    size = "" if request.requested is None else f" {format_size(request.requested)} of"
    facts = ErrorFacts("", (), f"its allocator refused{size} GPU memory; the program caught the error, as it seems", {})
    return diagnose(
        facts, classification, then, plan, processes, (), time=request.time, budget=budget, recorded=request, then=then,
        caught=True,
    )  # fmt: skip


def _holders(case: Case) -> tuple[MemoryHolder, ...]:
    """The frameworks and processes that hold memory on the GPU of `case`, largest first."""
    found = [
        MemoryHolder(row.kind, row.name, row.bytes, row.cached, row.reclaimable)
        for row in case.gpu.rows
        if row.kind in ("framework", "overhead") and row.bytes is not None and row.bytes > 0
    ]
    rest = case.gpu.row("unaccounted").bytes or 0
    if case.gpu.process is not None:  # otherwise `unaccounted` includes other processes' memory
        most = {row.name: min(row.at_most or rest, rest) for row in case.frameworks if row.bytes is None and rest > 0}
        found += [MemoryHolder("framework", name, size, upper_bound=True) for name, size in most.items()]
        rest -= sum(most.values())
    if rest > 0:
        found.append(MemoryHolder("unaccounted", "unaccounted", rest))
    if any(size is not None for size in case.other_processes.values()):
        found += [MemoryHolder("process", f"process {pid}", size) for pid, size in case.other_processes.items() if size]
    elif others := case.gpu.row("other processes").bytes:
        found.append(MemoryHolder("process", "other processes", others))
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


def _described(holder: MemoryHolder, requester: str | None) -> str:
    about = []
    if holder.name == requester:
        about.append("itself")
    if holder.kind == "framework" and holder.name in NEVER_GIVE_BACK:
        about.append("never gives back")
    elif holder.reclaimable:
        about.append(f"{format_size(holder.reclaimable)} reclaimable")
    elif holder.reclaimable is None and holder.cached:
        about.append(f"{format_size(holder.cached)} cached")
    size = format_size(holder.bytes)
    size = f"up to {size}, which it does not report" if holder.upper_bound else size
    return f"{holder.name} {size}" + (f" ({', '.join(about)})" if about else "")


def _growth(samples: Sequence[Sample], uuid: str | None) -> str:
    """A text that names the framework whose memory grew most over the samples; empty if none grew by `_GROWTH`."""
    seen = [
        (sample.time, {name: row.in_use if row.held is None else row.held for name, row in device.frameworks.items()})
        for sample in samples
        for device in sample.devices
        if device.uuid == uuid
    ]
    if len(seen) < 2:
        return ""
    (begin, first), (end, last) = seen[0], seen[-1]
    grown = {n: size - (first.get(n) or 0) for n, size in last.items() if size is not None}
    most = max(grown, key=lambda name: grown[name], default=None)
    if most is None or grown[most] < _GROWTH:
        return ""
    return f"{most} grew by {format_size(grown[most])} in the last {end - begin:.0f} s"


def _short(facts: ErrorFacts) -> str:
    """The exception's type and the first line of its text that mentions memory, in at most 200 characters."""
    text = re.sub(r"\{\{[^{}]*\}\}\s*", "", facts.text)  # remove TensorFlow's node names
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if re.search(r"memory|alloc|\boom\b", line, re.IGNORECASE)), "")
    line = telling or (lines[0] if lines else "")
    kind = facts.type.removeprefix("builtins.")
    text = f"{kind if len(kind) <= 40 else kind.rpartition('.')[2]}: {line}".strip(": ")
    return text if len(text) <= 200 else text[:199] + "…"


def _wrap(label: str, text: str, most: int, style: str = "") -> list[tuple[str, str, str]]:
    """Wrap the text to at most `most` lines, with the label before the first line."""
    indent = 9
    lines = textwrap.wrap(text, WIDTH - indent, max_lines=most, placeholder=" …")
    return [(style, f"  {label if not number else '':<{indent - 2}}", line) for number, line in enumerate(lines)]


def _request_dict(request: RefusedRequest | None) -> dict[str, Any] | None:
    if request is None:
        return None
    names = ("source", "id", "requested", "held", "in_use", "cached", "reclaimable", "free", "cap")
    when = datetime.fromtimestamp(request.time, UTC).isoformat()
    why_no_help = None if request.why_no_help is None else request.why_no_help._asdict()
    return {"time": when, **{name: getattr(request, name) for name in names}, "why_no_help": why_no_help}


def _plain(value: Any) -> Any:
    """Convert named tuples to mappings, recursively."""
    if hasattr(value, "_asdict"):
        return {name: _plain(child) for name, child in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: _plain(child) for name, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, tuple) else value
