"""The report on an out-of-memory error: the requester, the holders of the memory, idle memory, remedies. Pure.

`diagnose` combines the verdict on the exception (`classify`) with a reading of the ledger, the plan, the other
processes and the last samples. Without evidence in the figures the report states `unknown` or "possibly".
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
from memguard._oom.classify import ErrorFacts, Verdict, classify, family
from memguard._oom.remedies import Remedy, remedies, without_help

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memguard._budget import Budget

__all__ = ["ErrorFacts", "Holder", "Reason", "Remedy", "Report", "Verdict", "classify", "diagnose"]

LINES, WIDTH = 14, 80
"""The most lines and columns of a printed report."""
_SHOWN = 4
"""The most holders printed. The JSON has all."""
_GROWTH = 64 * MIB
"""The smallest growth before the error that is reported."""


@dataclass(frozen=True)
class Holder:
    """A holder of this GPU's memory: `kind` is framework, process, overhead or unaccounted.

    `cached` and `reclaimable` are known for frameworks only; None if unknown. `upper_bound`: the framework does not
    report its bytes; they are at most `bytes`, which no other row contains.
    """

    kind: str
    name: str
    bytes: int
    cached: int | None = None
    reclaimable: int | None = None
    upper_bound: bool = False


@dataclass(frozen=True)
class Report:
    """The report on one error. `print` it, or use `as_dict()` / `to_json()`. It never holds the exception itself.

    `requester` is the requester in words (`cublas, through cupy`), `error` the short text, `why` one sentence,
    `holders` the largest first, `processes` the other processes on that GPU (bytes by PID, None if NVML does not report
    them).

    `moment` has the figures of the refusal; None if only those of `ledger` are known, which are from the time at which
    memguard saw the error. `caught`: the refusal was seen, and its error has not left a block or the program.
    """

    time: float
    verdict: Verdict
    error: str
    ledger: Ledger | None
    processes: Mapping[int, int | None]
    samples: tuple[Sample, ...]
    remedies: tuple[Remedy, ...]
    uuid: str | None
    requester: str = "unknown"
    reason: Reason = "unknown"
    why: str = ""
    holders: tuple[Holder, ...] = field(default=())
    moment: RefusedRequest | None = None
    caught: bool = False

    @property
    def simulated(self) -> bool:
        """Whether the GPU is simulated."""
        return self.ledger is not None and self.ledger.simulated

    def as_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes, unknown as null. The keys are stable within `memguard_oom` 1."""
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
            "moment": _moment(self.moment),
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
        who = "" if self.requester == "unknown" else f"{self.requester} "
        return f"{who}{possibly}ran out of {what}{size}{mark}" if who else f"{possibly}out of {what}{size}{mark}"

    @property
    def line(self) -> str:
        """Title and cause in one line."""
        return f"memguard: {self.title}" + (f": {self.why}" if self.why else "")

    @property
    def note(self) -> str:
        """The note on the exception: title, cause and the first remedy."""
        parts = [f"memguard: {self.title}", self.why, *(remedy.text for remedy in self.remedies[:1])]
        return "\n  ".join(visible(part) for part in parts if part)

    def __repr__(self) -> str:
        """One line, for a prompt; `print` shows the whole report."""
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
        """The text that IPython shows in a terminal."""
        printer.text(str(self))

    def _lines(self) -> list[tuple[str, str, str]]:
        """Style, label and text of each line; the best remedies, as many as fit."""
        lines = [("bold red", "", textwrap.shorten(f"memguard: {self.title}", WIDTH, placeholder="…"))]
        lines += _wrap("error", self.error, 1)
        part = (
            next((part for part in self.ledger.devices if part.device.uuid == self.uuid), None) if self.ledger else None
        )
        if part is not None:
            ordinal = "" if part.device.ordinal is None else f", cuda:{part.device.ordinal}"
            free = format_size(part.row("free").bytes)
            shared = ", the machine's memory" if part.device.unified else ""
            total = format_size(part.device.usable)
            lines += _wrap("GPU", f"{part.device.name}{ordinal}: {free} free of {total}{shared}", 1)
        unhelped = self.moment.why_no_help if self.moment is not None else None
        lines += _wrap("why", self.why, 2 if unhelped is None else 3, "bold")
        asker = self.verdict.requester
        holders = "; ".join(_described(holder, asker) for holder in self.holders[:_SHOWN])
        lines += _wrap("holds", holders, 2)
        lines += _wrap("before", _growth(self.samples, self.uuid), 1)
        for number, remedy in enumerate(self.remedies):
            more = _wrap("do" if not number else "", f"{number + 1}. {remedy.text}", 3, "green")
            if len(lines) + len(more) > LINES:
                break
            lines += more
        return lines


def full_text(report: Report) -> str:
    """The whole report, for a log, a file or another process. `str` is for `print`: it fits standard output."""
    return "\n".join(visible(label + text) for _, label, text in report._lines())


def diagnose(
    facts: ErrorFacts,
    verdict: Verdict,
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

    ledger     a current reading, while the exception is alive; of the refusal, if the exception was not seen
    processes  other processes' bytes by device UUID and PID
    samples    the monitor's last ones, oldest first
    time       seconds, as `time.time()`
    budget     the source of `plan`; without it no remedy changes `device.limit`
    peaks      each framework's largest use so far, by device UUID and name
    recorded   the record of the refusal, and `then` a reading of that moment
    """
    raised = family(facts)
    who = verdict.requester or "unknown"
    if verdict.requester is None and raised is not None:
        who = raised
    elif raised is not None and raised != who:
        who = f"{who}, through {raised},"
    if verdict.memory != "gpu":
        why = "the GPU budget has nothing to do with it"
        found = remedies(verdict, None)
        return Report(time, verdict, _short(facts), ledger, {}, (), found, None, who, "elsewhere", why)
    part = device_of(facts.text, verdict, ledger, recorded)
    if part is None:
        reason, why = causes.unknown(ledger)
        return Report(
            time, verdict, _short(facts), ledger, {}, tuple(samples), (), None, who, reason, why, (), recorded, caught
        )
    uuid = part.device.uuid
    if recorded is not None:
        asked = verdict.requested if verdict.requested is not None else recorded.requested
        verdict = replace(verdict, requested=asked, refused=True)
    before, moment = _then(part, facts, verdict, plan, then, recorded, samples, (peaks or {}).get(uuid, {}), time)
    others = dict(processes.get(uuid, {}))
    case = Case(
        caps_in_force(before, verdict), verdict, raised, plan, others, budget, moment is not None,
        next((one.free for one in samples[-1].devices if one.uuid == uuid), None) if samples else None,
    )  # fmt: skip
    pooled = moment.pooled if moment is not None else None
    since = refusal.since(before, None if caught else part, verdict.requester, pooled)
    reason, why = causes.reason(case, moment, since)
    found = remedies(verdict, case, reason)
    if (unhelped := moment.why_no_help if moment is not None else None) is not None:
        if unhelped.kind in (NoHelp.NOTHING_IDLE, NoHelp.NOT_ASKED):
            why = f"{why}; no room was made: {unhelped.text}"
        else:  # first, because a retry may be enough
            why = f"no room was made for it: {unhelped.text}; {why}"
        found = (*without_help(unhelped.kind), *found)
    return Report(
        time, verdict, _short(facts), ledger, others, tuple(samples), found, uuid, who, reason, why, _holders(case),
        moment, caught,
    )  # fmt: skip


def _then(
    part: DeviceLedger,
    facts: ErrorFacts,
    verdict: Verdict,
    plan: Plan | None,
    then: Ledger | None,
    recorded: RefusedRequest | None,
    samples: Sequence[Sample],
    peaks: Mapping[str, int],
    time: float,
) -> tuple[DeviceLedger, RefusedRequest | None]:
    """The GPU's rows at the refusal, and their source; the current rows, and None, if no figures are known."""
    told = refusal.of_text(facts, verdict, time)
    uuid = part.device.uuid
    if recorded is not None:
        recorded = refusal.complete(recorded, told)
        base = next((one for one in then.devices if one.device.uuid == uuid), part) if then is not None else part
        return refusal.at(base, recorded), recorded
    if told is not None:
        told = told._replace(uuid=uuid)
        return refusal.at(part, told), told
    need = Case(part, verdict, plan=plan).need
    found = refusal.from_now(part, verdict, need, peaks.get(verdict.requester or ""), samples, time)
    return (part, None) if found is None else (refusal.at(part, found), found)


def of_refusal(
    moment: RefusedRequest, then: Ledger | None, plan: Plan | None, processes: Mapping[str, Mapping[int, int | None]],
    budget: Budget | None = None,
) -> Report:  # fmt: skip
    """The report on a refused request whose exception was not seen: the program has probably caught it."""
    verdict = Verdict("gpu", moment.framework, moment.requested, True, refused=True)
    size = "" if moment.requested is None else f" {format_size(moment.requested)} of"
    facts = ErrorFacts("", (), f"its allocator refused{size} GPU memory; the program caught the error, as it seems", {})
    return diagnose(
        facts, verdict, then, plan, processes, (), time=moment.time, budget=budget, recorded=moment, then=then,
        caught=True,
    )  # fmt: skip


def _holders(case: Case) -> tuple[Holder, ...]:
    """The holders of memory on this GPU, largest first."""
    found = [
        Holder(row.kind, row.name, row.bytes, row.cached, row.reclaimable)
        for row in case.part.rows
        if row.kind in ("framework", "overhead") and row.bytes is not None and row.bytes > 0
    ]
    rest = case.part.row("unaccounted").bytes or 0
    if case.part.process is not None:  # otherwise it includes other processes' memory
        most = {row.name: min(row.at_most or rest, rest) for row in case.frameworks if row.bytes is None and rest > 0}
        found += [Holder("framework", name, size, upper_bound=True) for name, size in most.items()]
        rest -= sum(most.values())
    if rest > 0:
        found.append(Holder("unaccounted", "unaccounted", rest))
    if any(size is not None for size in case.others.values()):
        found += [Holder("process", f"process {pid}", size) for pid, size in case.others.items() if size]
    elif others := case.part.row("other processes").bytes:
        found.append(Holder("process", "other processes", others))
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


def _described(holder: Holder, requester: str | None) -> str:
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
    """The framework with the largest growth over the samples."""
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
    """Type and the line about memory, in at most 200 characters."""
    text = re.sub(r"\{\{[^{}]*\}\}\s*", "", facts.text)  # TensorFlow's node names
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if re.search(r"memory|alloc|\boom\b", line, re.IGNORECASE)), "")
    line = telling or (lines[0] if lines else "")
    kind = facts.type.removeprefix("builtins.")
    text = f"{kind if len(kind) <= 40 else kind.rpartition('.')[2]}: {line}".strip(": ")
    return text if len(text) <= 200 else text[:199] + "…"


def _wrap(label: str, text: str, most: int, style: str = "") -> list[tuple[str, str, str]]:
    """At most `most` lines, with the label before the first."""
    indent = 9
    lines = textwrap.wrap(text, WIDTH - indent, max_lines=most, placeholder=" …")
    return [(style, f"  {label if not number else '':<{indent - 2}}", line) for number, line in enumerate(lines)]


def _moment(moment: RefusedRequest | None) -> dict[str, Any] | None:
    if moment is None:
        return None
    names = ("source", "id", "requested", "held", "in_use", "cached", "reclaimable", "free", "cap")
    when = datetime.fromtimestamp(moment.time, UTC).isoformat()
    unhelped = None if moment.why_no_help is None else moment.why_no_help._asdict()
    return {"time": when, **{name: getattr(moment, name) for name in names}, "why_no_help": unhelped}


def _plain(value: Any) -> Any:
    """Convert named tuples to mappings, recursively."""
    if hasattr(value, "_asdict"):
        return {name: _plain(child) for name, child in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: _plain(child) for name, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, tuple) else value
