"""A timeline, as memguard's writer writes it, whose names and texts would like to be more than text."""

from __future__ import annotations

from pathlib import Path

from timelines import Clock, plan_of, sample_of

from memguard._base.types import Event, FrameworkSample, Pressure
from memguard._base.units import GIB
from memguard._timeline.writer import Writer

NAMES = (
    "</script><script>window.owned=1</script>",
    "<img src=x onerror=window.owned=1>",
    '"><b onclick=window.owned=1>',
    "<a href='https://example.com/'>link</a>",
    "%{x} $\\alpha$ <extra>",
    "=HYPERLINK(1)",
    "a|b`c*d_e",
    "@everyone #12 https://example.com www.example.com",
    "\u202egnp.exe \x1b[31m red \u2028 line",
    "__proto__",
)


def record(folder: Path, name: str = "hostile") -> Path:
    """Each name is a framework's, and the text of an event and of a report."""
    clock, plan = Clock(), plan_of("h200", torch="2GiB")
    about = {hostile: {"version": hostile} for hostile in NAMES}
    with Writer(folder / f"{name}-{{rank}}.jsonl", plan, clock=clock, rank=0, frameworks=about) as writer:
        for step in range(40):
            clock.now += 0.5
            used = FrameworkSample(GIB, GIB // 2, None, 2 * GIB)
            writer.sample(sample_of(plan, clock.now, 0, **dict.fromkeys(NAMES, used)))
            if step < len(NAMES):
                text = NAMES[step]
                writer.event(Event(clock.now, "pressure", text, Pressure.CRITICAL, framework=text))
                writer.event(Event(clock.now, "workload", text, framework=text, seconds=3.0))
                holder = {"kind": "framework", "name": text, "bytes": GIB}
                report = {"requester": text, "error": text, "why": text, "cut": [text], "memory": text}
                writer.oom({**report, "holders": [holder], "remedies": [{"text": text}], "uuid": text})
        return Path(writer.path)
