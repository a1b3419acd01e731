"""Ask another process of this user to suspend itself, or for its phase. `triggers.listener` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memguard._base.logs import text_of
from memguard._base.units import is_whole
from memguard._node.identity import Process
from memguard._node.suspend import sockets
from memguard.errors import MemguardError
from memguard.exchange.ipc import wire

VERSION = 1
KIND = "listen"
"""How the socket's name begins."""
ANSWER = 600.0
"""Seconds in which the answer must come: the GPUs' work ends first, and the copy takes as long as it takes."""
TEXT, REASON = 2000, 300
"""Characters of an answer's text, and of its reason alone: in JSON each takes up to 6 bytes of a message's 16 KiB."""


def path_of(process: Process, where: str | None = None) -> str:
    return sockets.path_of(KIND, process, where)


def tidy(where: str | None = None) -> None:
    """Remove the sockets that nobody listens at any more."""
    sockets.tidy(KIND, where)


class RefusedError(MemguardError):
    """The process says no. `suspended`: because it is suspended already. `reason`: the first one, without its fix."""

    def __init__(self, text: str, suspended: bool = False, reason: str = "") -> None:
        self.suspended, self.reason = suspended, reason or text
        super().__init__(text)


class SilentError(MemguardError):
    """The process gave no answer."""


def request(process: Process, op: str = "suspend", *, seconds: float = ANSWER, where: str | None = None) -> Any:
    """Ask a process. Its answer, checked: for `suspend` `(bytes, seconds)`, for `state` the step.

    Raises RefusedError; SilentError if it does not listen, is not the process that it claims to be, or does not answer.
    """
    try:
        with sockets.connected(KIND, process, where) as connection:
            wire.send(connection, {"memguard": VERSION, "op": op})
            message = sockets.received(connection, seconds)
        return _checked(message, op)
    except (OSError, EOFError, wire.BadMessage) as error:
        raise SilentError(f"process {process.pid} does not answer: {text_of(error)}") from None


def _checked(message: Mapping[str, Any], op: str) -> Any:
    if message.get("memguard") != VERSION:
        raise wire.BadMessage("it is not an answer")
    if message.get("done") is False:
        text, reason, suspended = message.get("text"), message.get("reason"), message.get("suspended")
        if not isinstance(text, str):
            raise wire.BadMessage("it refuses without a text")
        raise RefusedError(text[:TEXT], suspended is True, reason[:REASON] if isinstance(reason, str) else "")
    if message.get("done") is not True:
        raise wire.BadMessage("it is not an answer")
    if op == "state":
        if message.get("step") not in ("running", "suspended"):
            raise wire.BadMessage("its state is unknown")
        return message["step"]
    sizes, spent = message.get("bytes"), message.get("seconds")
    if not isinstance(sizes, dict) or not all(map(is_whole, sizes.values())) or not isinstance(spent, (int, float)):
        raise wire.BadMessage("its figures are malformed")
    return sizes, float(spent)
