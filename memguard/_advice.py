"""What a message says, as data: why, what to do, and what else would do. `str()` makes the text, once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """A reason with its remedy. Code that needs one part reads the field; no code takes the text apart again.

    `alternatives` do as well as the fix. Each part may have several lines; the later ones bring their own indent.
    """

    reason: str
    fix: str = ""
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.reason}\n    fix: {self.fix}" if self.fix else self.reason
        return "".join([text, *(f"\n    or: {one}" for one in self.alternatives)])
