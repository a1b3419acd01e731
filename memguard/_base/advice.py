"""What a message says, as data: why, what to do, and what else would do. `str()` makes the text, once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass, replace


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

    def line(self) -> str:
        """The text in one line, for a log or a note."""
        parts = [self.reason, *([f"fix: {self.fix}"] if self.fix else ()), *(f"or: {one}" for one in self.alternatives)]
        return "; ".join(line.strip() for part in parts for line in part.splitlines())

    def within(self, where: str) -> Advice:
        """The same, with text before the reason: `where: reason`."""
        return replace(self, reason=f"{where}: {self.reason}")

    def with_alternatives(self, *alternatives: str) -> Advice:
        """The same with these alternatives, and no others."""
        return replace(self, alternatives=alternatives)


class InvalidValue(ValueError):
    """A value that is written wrongly. `advice.fix` says what to write instead, if that can be told.

    `general`: the fix only shows what such values look like. pydantic keeps the exception of a validator in the context
    of its own error, as `error`: so the fix travels with it.
    """

    def __init__(self, reason: str, fix: str = "", general: bool = False) -> None:
        super().__init__(f"{reason}; {fix}" if fix else reason)
        self.advice, self.general = Advice(reason, fix), general

    def __reduce__(self) -> tuple[object, ...]:
        return InvalidValue, (self.advice.reason, self.advice.fix, self.general)
