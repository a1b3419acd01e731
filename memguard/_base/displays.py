"""Pure functions that render a plan as text and as notebook HTML, and tables as HTML.

The HTML uses inline styles, because notebooks strip style sheets from output.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memguard._base.text import html
from memguard._base.units import format_size

if TYPE_CHECKING:
    from memguard._base.types import DevicePlan, Plan

_LEFT, _RIGHT = "text-align: left", "text-align: right"
_RULE = "border-top: 1px solid #888"


def table(caption: str, head: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], numbers: Container[str]) -> str:
    """An HTML table: caption, head row, and groups of rows separated by a line. Columns whose heading is in `numbers`
    are right-aligned."""
    sides = [_RIGHT if name in numbers else _LEFT for name in head]
    styles = ["", *[f' style="{_RULE}"'] * len(groups)]
    bodies = (
        f"<tbody{style}>{''.join(_row('td', row, sides) for row in group)}</tbody>"
        for style, group in zip(styles, groups, strict=False)
        if group
    )
    top = f'<caption style="{_LEFT}; caption-side: top">{caption}</caption>'
    return "\n".join(["<table>", top, f"<thead>{_row('th', head, sides)}</thead>", *bodies, "</table>"])


def _row(tag: str, row: Sequence[str], sides: Sequence[str]) -> str:
    written = (f'<{tag} style="{side}">{html(cell)}</{tag}>' for side, cell in zip(sides, row, strict=True))
    return f"<tr>{''.join(written)}</tr>"


def plan_text(plan: Plan, holds: Mapping[str, str] | None, notes: Iterable[str] = ()) -> str:
    """Format each GPU's plan as lines of text.

    `holds` maps each framework to how its cap is enforced; a framework missing from `holds` is shown as shut down. If
    `holds` is None, the text omits the enforcement.
    """
    lines = []
    for part in plan.devices:
        lines.append(f"{_name(part)} {part.device.uuid}: {_about(part)}")
        lines += [f"  {name:<11}{cap:>12}  {how}".rstrip() for name, cap, how in _caps(part, holds)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def plan_html(plan: Plan, holds: Mapping[str, str] | None, notes: Iterable[str] = ()) -> str:
    """`plan_text` as HTML for notebooks."""
    tables = [
        table(
            f"<b>{html(_name(part))}</b> {html(part.device.uuid)}<br>{html(_about(part))}",
            ("framework", "cap", "" if holds is None else "cap is"),
            [list(_caps(part, holds))],
            ("cap",),
        )
        for part in plan.devices
    ]
    return "\n".join([*tables, *(f"<div>note: {html(note)}</div>" for note in notes)])


def _name(part: DevicePlan) -> str:
    return part.device.name + (" (simulated)" if part.device.simulated else "")


def _about(part: DevicePlan) -> str:
    return (
        f"limit {format_size(part.limit)}, reserve {format_size(part.reserve)} ({part.reserve_source}), "
        f"unallocated {format_size(part.unallocated)}"
    )


def _caps(part: DevicePlan, holds: Mapping[str, str] | None) -> Iterator[tuple[str, str, str]]:
    for name, cap in part.caps.items():
        how = [] if holds is None else [holds.get(name, "shut down")]
        if name in part.elastic:
            least, most = part.elastic[name]
            how.append(f"min {format_size(least)}, max {format_size(most)}")
        yield name, format_size(cap), ", ".join(how)
