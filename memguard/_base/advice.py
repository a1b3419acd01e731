"""What a message says, as data: why, what to do, and what else would do; and the base of the errors that carry it.

`str()` makes the text, once, at the edge. `memguard.errors` has the other errors: rooms import all of them from there,
but for `_base`, which is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memguard._base.text import visible


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


class MemguardError(Exception):
    """Base of all of memguard's errors; `exit_code` is what the command line returns.

    `advice` has the parts of the text: `reason`, `fix` (empty if there is none) and `alternatives`, a tuple. An error
    with several problems has that of the first.
    """

    __module__ = "memguard.errors"  # its public home: pickles and tracebacks name it
    exit_code = 1

    def __init__(self, said: str | Advice = "", *, fix: str = "", alternatives: tuple[str, ...] = ()) -> None:
        advice = said if isinstance(said, Advice) else Advice(said, fix, alternatives)
        super().__init__(str(advice))
        self._say(advice)

    @property
    def advice(self) -> Advice:
        """What the text is made of."""
        return Advice(*self._said)

    def _say(self, advice: Advice) -> None:
        # Plain data: a pickle of it is read by other versions of memguard too.
        self._said = visible(advice.reason), visible(advice.fix), tuple(map(visible, advice.alternatives))

    def __str__(self) -> str:
        return visible(super().__str__())
