"""The doctor's report as text and as plain data.

In order: the verdict, errors and warnings, one line for each framework, infos.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from memguard._base.text import shown, visible
from memguard._base.units import format_size
from memguard._frameworks.specs import SPECS
from memguard._tools.doctor.derived import STEPS, computes, did_not_finish, died, kept_off, step
from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Facts, FrameworkFacts, Probe
from memguard._tools.doctor.finding import Finding, Severity
from memguard._tools.doctor.wording import listing

if TYPE_CHECKING:
    from rich.text import Text

    from memguard._tools.doctor import DoctorReport

WIDTH = 80
_CELL = 24
"""The widest version in the table, in characters: local builds have long ones."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
_GLUE = "\N{NO-BREAK SPACE}"

Piece = tuple[str, str]
"""Style and text."""
Line = list[Piece]


def text(report: DoctorReport, *, brief: bool = False) -> str:
    """The report as text without colours. `brief` as in `lines`."""
    return shown("\n".join("".join(piece for _, piece in line) for line in lines(report, brief=brief)))


def rich(report: DoctorReport, *, brief: bool = False) -> Text:
    """The report in colours, for terminals. `brief` as in `lines`."""
    from rich.text import Text

    out = Text(no_wrap=True, overflow="ignore")
    for number, line in enumerate(lines(report, brief=brief)):
        out.append("\n" if number else "")
        for style, piece in line:
            out.append(visible(piece), style)
    return out


def as_dict(report: DoctorReport) -> dict[str, Any]:
    """The report as plain data, without the facts, which `--dump-facts` prints."""
    facts = report.facts
    return {
        "memguard_doctor": 1,
        "healthy": report.healthy,
        "verdict": verdict(report),
        "findings": [
            {
                "name": finding.name,
                "severity": str(finding.severity),
                "subject": finding.subject,
                "cause": finding.cause,
                "evidence": list(finding.evidence),
                "remedy": finding.remedy,
                "page": finding.page,
            }
            for finding in report.findings
        ],
        "ignored": list(report.ignored),
        "not_installed": list(report.not_installed),
        "frameworks": {
            name: {
                "works": works(framework),
                "state": state(framework, facts, name),
                "version": framework.version,
                "cuda": framework.cuda,
                "seconds": framework.probe.seconds if framework.probe is not None else None,
            }
            for name, framework in facts.frameworks.items()
        },
        "probes": dict(facts.seconds),
    }


def verdict(report: DoctorReport) -> str:
    """One sentence: which frameworks work and which do not."""
    facts = report.facts
    good = [name for name, framework in facts.frameworks.items() if works(framework)]
    off = [name for name, framework in facts.frameworks.items() if _disabled_by_environment(framework, facts, name)]
    bad = [name for name, framework in facts.frameworks.items() if works(framework) is False and name not in off]
    gpus = facts.driver.cuda.devices
    where = f" on {len(gpus)} GPUs" if len(gpus) > 1 else f" on {gpus[0].name or 'the GPU'}" if gpus else ""
    parts = []
    if bad:
        parts.append(f"{listing(bad)} {_verb(bad, 'does', 'do')} not work on the GPU")
    if good:
        parts.append(f"{listing(good)} {_verb(good, 'works', 'work')}{where}")
    if off:
        parts.append(f"{listing(off)} {_verb(off, 'is', 'are')} kept off the GPU by the environment")
    absent = list(report.not_installed)
    python = facts.system.executable or "this Python"
    if absent:
        verb = _verb(absent, "is", "are")
        parts.append(f"{listing(absent)} {verb} not installed for {python}: is it the right environment?")
    elif not facts.frameworks:
        none = f"None of {listing([spec.title for spec in SPECS.values()])} is installed for {python}"
        return ". ".join(filter(None, (_verdict_start(report, bad), f"{none}: is it the right environment?")))
    return ": ".join(filter(None, (_verdict_start(report, bad), "; ".join(parts) or "no framework was tried")))


def _verdict_start(report: DoctorReport, bad: list[str]) -> str:
    """The start of the verdict. "healthy" only if nothing fails, or an info explains each failure."""
    counts = [
        _count(sum(finding.severity is severity for finding in report.findings), str(severity))
        for severity in (Severity.ERROR, Severity.WARNING)
    ]
    if any(counts):
        return ", ".join(filter(None, counts))
    if not report.healthy:
        return ""
    explained = {name for finding in report.findings for name in finding.subject.split(", ")}
    if explained.issuperset(bad):
        return "healthy"
    found = [finding.name for finding in examine(report.facts) if finding.severity is not Severity.INFO]
    left_out = [name for name in dict.fromkeys(found) if name in report.ignored]
    return f"nothing found beyond what is left out ({', '.join(left_out)})" if left_out else "nothing found"


def _disabled_by_environment(framework: FrameworkFacts, facts: Facts, name: str) -> bool:
    """Whether an environment variable disables the GPU for the framework, and its probe succeeded."""
    probe = framework.probe
    return probe is not None and not framework.gpus and not did_not_finish(probe) and kept_off(facts, name)


def works(framework: FrameworkFacts) -> bool | None:
    """Whether the framework computed on a GPU in its probe; None without a probe."""
    probe = framework.probe
    if probe is None:
        return None
    return computes(framework) and not did_not_finish(probe)


def state(framework: FrameworkFacts, facts: Facts | None = None, name: str = "") -> str:
    """The outcome of the probe in a few words. `kept off the GPU` needs `facts` and `name`."""
    probe = framework.probe
    if probe is None:
        return "not tried" if framework.path else "is not installed"
    how = _failure(probe, STEPS, ("hangs", "dies of", "fails", "exits with"))
    if how is not None:
        return how
    if works(framework):
        return "works"
    if facts is not None and _disabled_by_environment(framework, facts, name):
        return "is kept off the GPU"
    return "is a build without CUDA" if framework.gpu is False else "sees no GPU"


def _failure(probe: Probe, steps: tuple[str, ...], verbs: tuple[str, str, str, str]) -> str | None:
    """How the probe failed and in which step, as the finding says it; None if it succeeded."""
    where = step(probe, steps).replace("in the step ", "in ")
    hang, die, fail, leave = verbs
    if probe.hung:
        return f"{hang} {where}"
    if probe.signal is not None:
        return f"{die} {probe.signal} {where}"
    if probe.failed is not None:
        return f"{fail} in {probe.failed.name}"
    return f"{leave} {probe.exit} {where}" if died(probe) else None


def lines(report: DoctorReport, *, brief: bool = False) -> list[Line]:
    """The lines of the report. `brief`: only the verdict, errors and warnings."""
    good = "bold green" if report.healthy else "bold red" if report.errors else "bold yellow"
    out: list[Line] = _wrap([(good, "memguard doctor: ")], verdict(report), good, 2)
    for finding in report.findings:
        if finding.severity is not Severity.INFO:
            out += [[], *_finding(finding)]
    if brief:
        return out
    out += [[], *_frameworks(report.facts), *_machine(report)]
    known = [finding for finding in report.findings if finding.severity is Severity.INFO]
    return [*out, *([[]] if known else []), *(line for finding in known for line in _info(finding))]


def _finding(finding: Finding) -> list[Line]:
    out = [_head(finding)]
    out += _wrap([("", "  ")], finding.cause, "", 2)
    for line in finding.evidence:
        out += _wrap([("dim", "  - ")], line, "dim", 4)
    out += _wrap([("", "  fix: ")], finding.remedy, "green", 7)
    return [*out, _more(finding)]


def _info(finding: Finding) -> list[Line]:
    """An info: no evidence and no remedy, as there is nothing to do."""
    return [_head(finding), *_wrap([("", "  ")], finding.cause, "", 2), _more(finding)]


def _more(finding: Finding) -> Line:
    """The command that prints the finding's page. A path would not exist in an installed package."""
    return [("", "  "), ("dim", f"more: memguard doctor --explain {finding.name}")]


def _head(finding: Finding) -> Line:
    subject = f": {_clean(finding.subject)}" if finding.subject else ""
    return [(_STYLES[finding.severity], f"{finding.severity}  "), ("bold", f"{finding.name}{subject}")]


def _frameworks(facts: Facts) -> list[Line]:
    """One line for each framework, and one for each process with several."""
    rows = []
    for name, framework in facts.frameworks.items():
        cuda = f"CUDA {framework.cuda}" if framework.cuda else ""
        cells = (name, state(framework, facts, name), _cut(framework.version or ""), _cut(cuda))
        rows.append((works(framework), cells, framework.probe))
    widths = [max((len(cells[column]) for _, cells, _ in rows), default=0) for column in range(4)]
    out: list[Line] = []
    for good, cells, probe in rows:
        style = {True: "green", False: "red", None: "dim"}[good]
        shades = zip(cells, widths, ("bold", style, "", ""), strict=True)
        line: Line = [(shade, f"{cell:<{width}}  ") for cell, width, shade in shades]
        out.append(_stripped([*line, ("dim", f"{probe.seconds:5.1f} s")] if probe is not None else line))
    for together in facts.together:
        how = _failure(together.probe, together.order, ("hang", "die of", "fail", "exit with")) or "work"
        style = "green" if how == "work" else "red"
        row = f"{' then '.join(together.order)} in one process: {how}, {together.probe.seconds:.1f} s"
        out += _wrap([("", "")], row, style, 2)
    return out


def _cut(cell: str) -> str:
    plain = _clean(cell)
    return plain if len(plain) <= _CELL else plain[: _CELL - 1] + "…"


def _stripped(line: Line) -> Line:
    """The line without trailing spaces."""
    while line and not line[-1][1].rstrip():
        line = line[:-1]
    return [*line[:-1], (line[-1][0], line[-1][1].rstrip())] if line else line


def _machine(report: DoctorReport) -> list[Line]:
    facts = report.facts
    driver, cuda = facts.driver.nvml.driver or facts.driver.module, facts.driver.cuda.version
    parts = [f"driver {driver}" if driver else "", f"CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""]
    free = {device.uuid: device.free for device in facts.driver.nvml.devices}
    for device in facts.driver.cuda.devices:
        left = free.get(device.uuid)
        parts.append(
            f"GPU {device.ordinal} {device.name}" + (f" ({format_size(left)} free)" if left is not None else "")
        )
    out = _wrap([("dim", "")], ", ".join(filter(None, parts)), "dim", 2) if any(parts) else []
    shown = {name for name, _ in facts.probes()}
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts.seconds.items() if name not in shown)
    out += _wrap([("dim", "time: ")], times, "dim", 6) if times else []
    return out + (_wrap([("dim", "left out: ")], ", ".join(report.ignored), "dim", 10) if report.ignored else [])


def _wrap(start: Line, words: str, style: str, indent: int) -> list[Line]:
    """`start` and the words, wrapped to `WIDTH`. A command in `backquotes` stays on one line."""
    used = sum(len(piece) for _, piece in start)
    quoted = _clean(words).split("`")
    glued = "`".join(part.replace(" ", _GLUE) if number % 2 else part for number, part in enumerate(quoted))
    found = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=" " * used,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
    first, *rest = (line.replace(_GLUE, " ") for line in found)
    return [[*start, (style, first[used:])], *([(style, line)] for line in rest)]


def _clean(words: str) -> str:
    """The text on one line, without control characters: much of it comes from other programs."""
    plain = words if words.isprintable() else "".join(char if char.isprintable() else " " for char in words)
    return " ".join(plain.split())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


def _verb(names: list[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several
