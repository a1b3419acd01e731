"""Colours that people with any colour vision can tell apart, on white and on near-black. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memguard._frameworks.specs import SPECS

# Of Okabe and Ito, and Tol's; yellow is left out, which nobody sees on white.
_KNOWN: Mapping[str, str] = {
    **{name: row.colour for name, row in SPECS.items() if row.colour},
    "exchange": "#aa4499",
}
_MORE = ("#44aa99", "#d55e00", "#6699cc", "#c44a82", "#ddaa33", "#7f7fd5")
OVERHEAD, UNACCOUNTED = "#8c8c8c", "#b8b8b8"
NEUTRAL = "#767676"
"""Lines that belong to no framework: on white and on near-black it has a contrast above 4 to 1."""
ALARM = "#d62839"


def colours(frameworks: Iterable[str]) -> dict[str, str]:
    """The colour of each framework. It depends on the names alone, and so is the same in both runs of a page."""
    names = sorted(set(frameworks))
    strangers = [name for name in names if name not in _KNOWN]
    found = {name: _MORE[number % len(_MORE)] for number, name in enumerate(strangers)}
    return {name: _KNOWN.get(name) or found[name] for name in names}


def pale(colour: str, alpha: float) -> str:
    """`#rrggbb` as CSS's rgba()."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"
