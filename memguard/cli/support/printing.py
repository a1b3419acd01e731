"""The one way in which the commands print, whatever standard output and standard error are.

`safely` runs the whole command with both replaced by streams that show control characters instead of passing them on,
write the characters that the encoding lacks in others, and report a failed write. So no command has to think of it:
`click.echo` and `print` are safe. Colours go through `console`.

    a reader that leaves early (`| head -1`)  nothing is said; exit code 141, as shells give a command ended by SIGPIPE
    a full disk, a closed stdout              one line on stderr; exit code 2, as of grep
    a stderr that takes nothing               the message is lost, and the exit code stays
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, cast

from memguard._base.text import fitting, visible
from memguard.cli.support import exit_codes

if TYPE_CHECKING:
    from rich.console import Console


class Unwritable(Exception):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.left = error.errno == errno.EPIPE


class Stream:
    """A text stream around `inner`, which is None if it was closed when Python started.

    It has no `buffer`: click would write to that one if the encoding is ASCII. `strict`: a failed write raises
    Unwritable. `styled`: control sequences pass.
    """

    def __init__(self, inner: TextIO | None, *, strict: bool, styled: bool = False) -> None:
        self._inner, self._strict, self._styled = inner, strict, styled
        self._used = self.failed = False

    @property
    def encoding(self) -> str:
        return getattr(self._inner, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:
        return getattr(self._inner, "errors", None) or "strict"

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):  # of click's completion. It takes a stream that accepts none for one of text
            if not text:
                raise TypeError("a text stream takes str")
            text = text.decode()
        if text:
            self._used = True
            kept = text if self._styled else visible(text)
            self._try(lambda inner: inner.write(fitting(kept, self.encoding)))
        return len(text)

    def flush(self) -> None:
        if self._used:
            self._try(lambda inner: inner.flush())

    def isatty(self) -> bool:
        try:
            return self._inner is not None and self._inner.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._inner is None:
            raise OSError(errno.EBADF, "it is closed")
        return self._inner.fileno()

    def styled(self) -> Stream:
        return Stream(self._inner, strict=self._strict, styled=True)

    def silence(self) -> None:
        """Else Python tries to write the rest at exit, and says that it could not."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = self.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)

    def _try(self, call: Callable[[TextIO], object]) -> None:
        try:
            if self._inner is None:
                raise OSError(errno.EBADF, "it is closed")
            call(self._inner)
        except ValueError as error:  # closed since
            if self._strict:
                raise Unwritable(OSError(errno.EBADF, "it is closed")) from error
        except OSError as error:
            if self._strict:
                raise Unwritable(error) from None
            self.failed = True


def safely(call: Callable[[], object]) -> int:
    """Run a command and give its exit code. Its output is written when this returns."""
    out, err = Stream(sys.stdout, strict=True), Stream(sys.stderr, strict=False)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    try:
        try:
            code = _code(call())
        except SystemExit as end:
            if isinstance(end.code, str):
                err.write(f"{end.code}\n")
            code = _code(end.code)
        out.flush()
    except Unwritable as wrong:
        out.silence()
        code = exit_codes.READER_LEFT if wrong.left else exit_codes.INPUT
        if not wrong.left:
            err.write(f"memguard: stdout cannot be written: {wrong}\n")
    finally:
        err.flush()
        if err.failed:  # not before: a program that `run` starts has the stderr that it was given
            err.silence()
        sys.stdout, sys.stderr = before
    return code


def console(*, err: bool = False, width: int | None = None) -> Console:
    """For tables and colours. What is printed to it must be `visible`."""
    from rich.console import Console

    stream: Any = sys.stderr if err else sys.stdout
    inner: Any = stream.styled() if isinstance(stream, Stream) else stream
    return Console(file=inner, width=width, highlight=False, markup=False)


def _code(value: object) -> int:
    return value if isinstance(value, int) else 0 if value is None else 1
