"""What each style name of `view` looks like: the terminal's own 16 colours, so that its theme applies. Pure."""

from __future__ import annotations

from memguard._frameworks.specs import SPECS

_FRAMEWORKS = {name: row.terminal_colour for name, row in SPECS.items()}
_OTHERS = ("red", "yellow", "magenta", "green", "blue", "cyan")
_LEVELS = {"ok": "green", "warn": "bold yellow", "critical": "bold red"}
_STYLES = {
    "title": "reverse",
    "foot": "reverse",
    "gpu": "bold",
    "target": "bold",
    "head": "dim",
    "small": "",
    "selected": "reverse",
    "note": "yellow",
    "others": "",
    "forecast": "bold yellow",
    "free": "dim",
    "unknown": "dim",
    "cap": "bold",
    "event:oom": "bold red",
    "event:leak": "yellow",
    "event:forecast": "yellow",
    "request:waiting": "yellow",
    "request:done": "green",
    "request:failed": "bold red",
    "part:overhead": "white",
    "part:unaccounted": "white",
    "part:others": "bright_black",
    "part:reserve": "bright_black",
    "part:free": "dim",
    "rule": "dim",
    "answer": "bold",
    "wrong": "bold red",
}
_ATTRIBUTES = ("bold", "dim", "reverse")


def style(name: str, colour: bool = True) -> str:
    """As rich writes it: `bold red`. Without colour only its attributes are left."""
    kind, _, rest = name.partition(":")
    if name in _STYLES:
        found = _STYLES[name]
    elif kind == "level":
        found = _LEVELS.get(rest, "")
    elif kind in ("used", "cached", "name", "part"):
        found = _FRAMEWORKS.get(rest) or _OTHERS[sum(map(ord, rest)) % len(_OTHERS)]
    else:
        found = ""
    if not colour:
        found = " ".join(word for word in found.split() if word in _ATTRIBUTES)
    return found
