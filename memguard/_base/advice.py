"""`Advice`, a message as data (reason, fix, alternatives), and the base classes of errors with an `advice` attribute.

Only `str()` and `line()` join the fields to one text. Other subpackages import errors from `memguard.errors`; `_base`
cannot, because it may not import a higher layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memguard._base.text import visible


@dataclass(frozen=True, slots=True)
class Advice:
    """The reason for a message, the fix, and alternative fixes. Code reads these fields and never parses the text.

    The user can apply any of `alternatives` in place of `fix`. A field may have several lines; the lines after the
    first include their indentation.
    """

    reason: str
    fix: str = ""
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.reason}\n    fix: {self.fix}" if self.fix else self.reason
        return "".join([text, *(f"\n    or: {one}" for one in self.alternatives)])

    def line(self) -> str:
        """All fields joined into one line, for a log or a note."""
        parts = [self.reason, *([f"fix: {self.fix}"] if self.fix else ()), *(f"or: {one}" for one in self.alternatives)]
        return "; ".join(line.strip() for part in parts for line in part.splitlines())

    def within(self, where: str) -> Advice:
        """Return a copy whose reason starts with `where`, for example a file name: `where: reason`."""
        return replace(self, reason=f"{where}: {self.reason}")

    def with_alternatives(self, *alternatives: str) -> Advice:
        """A copy with `alternatives` replaced."""
        return replace(self, alternatives=alternatives)


@dataclass(frozen=True)
class Problem:
    """One mistake in a budget: message, fix, line and column in the file, and the path of the key."""

    message: str
    fix: str = ""
    line: int | None = None
    column: int | None = None
    path: str = ""

    def render(self, source: str) -> str:
        """Format as `source:line:column: path: message`, with the fix on the next line."""
        return str(self.advice(source))

    def advice(self, source: str) -> Advice:
        """The problem as `Advice`, whose `str()` is the text of `render`."""
        where = source
        if self.line is not None:
            where += f":{self.line}:{self.column or 1}"
        return Advice(f"{where}: {self.path + ': ' if self.path else ''}{self.message}", self.fix)


class InvalidValue(ValueError):
    """A malformed value. `advice.fix` names a replacement; it is empty if none can be derived.

    `general` is True if the fix is only an example of the format. If a validator raises InvalidValue, pydantic's error
    holds the exception as `ctx["error"]`, from which callers read the fix.
    """

    def __init__(self, reason: str, fix: str = "", general: bool = False) -> None:
        super().__init__(f"{reason}; {fix}" if fix else reason)
        self.advice, self.general = Advice(reason, fix), general

    def __reduce__(self) -> tuple[object, ...]:
        return InvalidValue, (self.advice.reason, self.advice.fix, self.general)


class MemguardError(Exception):
    """Base of all of memguard's errors; `exit_code` is the exit status with which the command line ends.

    `advice` holds the text as fields: `reason`, `fix` (empty if there is none) and `alternatives`, a tuple. For an
    error with several problems, `advice` describes the first.
    """

    __module__ = "memguard.errors"  # the public module, which pickles and tracebacks name
    exit_code = 1

    def __init__(self, said: str | Advice = "", *, fix: str = "", alternatives: tuple[str, ...] = ()) -> None:
        advice = said if isinstance(said, Advice) else Advice(said, fix, alternatives)
        super().__init__(str(advice))
        self._say(advice)

    @property
    def advice(self) -> Advice:
        """The text as fields: `reason`, `fix` and `alternatives`."""
        return Advice(*self._said)

    def _say(self, advice: Advice) -> None:
        # Built-in types only, because another version of memguard may unpickle the error.
        self._said = visible(advice.reason), visible(advice.fix), tuple(map(visible, advice.alternatives))

    def __str__(self) -> str:
        return visible(super().__str__())
