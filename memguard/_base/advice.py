"""A message as data (reason, fix, alternatives), and the base classes of the errors that carry it.

Only `str()` joins the parts to text. Other rooms import errors from `memguard.errors`; `_base` cannot, as it is a lower
room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memguard._base.text import visible


@dataclass(frozen=True, slots=True)
class Advice:
    """A reason with its remedy. Code that needs one part reads that field; no code parses the text.

    Each of `alternatives` may replace the fix. A part may have several lines; lines after the first include their
    indentation.
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
        """A copy whose reason is prefixed with a place: `where: reason`."""
        return replace(self, reason=f"{where}: {self.reason}")

    def with_alternatives(self, *alternatives: str) -> Advice:
        """A copy with exactly these alternatives."""
        return replace(self, alternatives=alternatives)


@dataclass(frozen=True)
class Problem:
    """One mistake in a budget file: its place, the value found, and the fix."""

    message: str
    fix: str = ""
    line: int | None = None
    column: int | None = None
    path: str = ""

    def render(self, source: str) -> str:
        """`file:line:column: message`, the fix on the next line."""
        return str(self.advice(source))

    def advice(self, source: str) -> Advice:
        """The text of `render` as data."""
        where = source
        if self.line is not None:
            where += f":{self.line}:{self.column or 1}"
        return Advice(f"{where}: {self.path + ': ' if self.path else ''}{self.message}", self.fix)


class InvalidValue(ValueError):
    """A malformed value. `advice.fix` names a replacement; it is empty if none can be derived.

    `general`: the fix is only an example of the format. pydantic stores a validator's exception as `error` in the
    context of its own error, so callers can read the fix there.
    """

    def __init__(self, reason: str, fix: str = "", general: bool = False) -> None:
        super().__init__(f"{reason}; {fix}" if fix else reason)
        self.advice, self.general = Advice(reason, fix), general

    def __reduce__(self) -> tuple[object, ...]:
        return InvalidValue, (self.advice.reason, self.advice.fix, self.general)


class MemguardError(Exception):
    """Base of all of memguard's errors; `exit_code` is what the command line returns.

    `advice` holds the parts of the text: `reason`, `fix` (empty if there is none) and `alternatives`, a tuple. An error
    with several problems holds the advice of the first.
    """

    __module__ = "memguard.errors"  # its public home: pickles and tracebacks name it
    exit_code = 1

    def __init__(self, said: str | Advice = "", *, fix: str = "", alternatives: tuple[str, ...] = ()) -> None:
        advice = said if isinstance(said, Advice) else Advice(said, fix, alternatives)
        super().__init__(str(advice))
        self._say(advice)

    @property
    def advice(self) -> Advice:
        """The parts of the text."""
        return Advice(*self._said)

    def _say(self, advice: Advice) -> None:
        # Plain data: other versions of memguard may unpickle it.
        self._said = visible(advice.reason), visible(advice.fix), tuple(map(visible, advice.alternatives))

    def __str__(self) -> str:
        return visible(super().__str__())
