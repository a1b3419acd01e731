"""The only module that writes to the logger `memguard`; logging never raises into the caller.

A handler, filter or stream of the program may raise, and so may `str(error)`. Such an exception must neither end the
monitor's thread nor surface in the user's code.
"""

from __future__ import annotations

import logging
import threading

_TEXT = 300
"""The maximum length of an error's text in a log line."""


class Log:
    """The methods of a `logging.Logger` that memguard uses. An error among the arguments is logged as its text."""

    def debugs(self) -> bool:
        """True if the level `debug` is enabled. Called before formatting an expensive line."""
        try:
            try:  # unlike `getLogger`, acquires no lock
                return logging.Logger.manager.loggerDict["memguard"].isEnabledFor(logging.DEBUG)  # type: ignore[union-attr]
            except (KeyError, AttributeError):
                return logging.getLogger("memguard").isEnabledFor(logging.DEBUG)
        except BaseException as error:
            if not stays_here(error):
                raise
            return False

    def debug(self, text: str, *args: object, exc_info: bool = False) -> None:
        _write(logging.DEBUG, text, args, exc_info)

    def info(self, text: str, *args: object) -> None:
        _write(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        _write(logging.WARNING, text, args)

    def log(self, level: int, text: str, *args: object) -> None:
        _write(level, text, args)


log = Log()


def is_heard() -> bool:
    """True if the program configured a handler for memguard's log; memguard's own NullHandler does not count."""
    logger: logging.Logger | None = logging.getLogger("memguard")
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def text_of(error: BaseException) -> str:
    """Type and text of an error in one line. Suppresses exceptions raised by the error's `__str__`."""
    try:
        name = str(type.__getattribute__(type(error), "__name__"))
    except BaseException as failure:
        if not stays_here(failure):
            raise
        name = "an error"
    words = " ".join(words_of(error).split())[:_TEXT]
    return f"{name}: {words}" if words else name


def words_of(error: BaseException) -> str:
    """The text of an error; empty if `str(error)` raises."""
    try:
        return str(error)
    except BaseException as failure:
        if not stays_here(failure):
            raise
        return ""


def stays_here(error: BaseException) -> bool:
    """True if memguard must suppress an exception that the program's code raised. False for KeyboardInterrupt and
    SystemExit on the main thread."""
    return isinstance(error, Exception) or threading.get_ident() != threading.main_thread().ident


def _write(level: int, text: str, args: tuple[object, ...], exc_info: bool = False) -> None:
    try:
        logger = logging.getLogger("memguard")
        if logger.isEnabledFor(level):
            plain = [words_of(one) if isinstance(one, BaseException) else one for one in args]
            # stacklevel=3: the record names the line that called `debug`, `info` or `warning`.
            logger.log(level, text, *plain, exc_info=exc_info, stacklevel=3)
    except BaseException as error:
        if not stays_here(error):
            raise
