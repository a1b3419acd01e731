"""For the tests of allocators that are short of memory: who is asked for room then, and what is refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from memguard._base.types import RefusedRequest, Shortage
from memguard._base.units import MIB

PAGE = 2 * MIB


def noted(setting: Any) -> None:
    """From now on `refusals` has what is refused."""
    setting.refusals = []
    setting.framework.on_refusal = setting.refusals.append


def refusals(setting: Any) -> list[RefusedRequest]:
    found: list[RefusedRequest] = setting.refusals
    return found


def shortages(setting: Any, serve: Callable[[Shortage], bool], unlocked: Callable[[Any], bool]) -> list[Shortage]:
    """What is asked for from now on; `serve` answers, while `unlocked` says that no lock of the adapter is held."""
    asked: list[Shortage] = []

    def on_shortage(shortage: Shortage) -> bool:
        asked.append(shortage)
        assert unlocked(setting), "it was asked with the lock held"
        return serve(shortage)

    setting.framework.on_shortage = on_shortage
    return asked


@contextlib.contextmanager
def filled(card: Any) -> Iterator[Callable[[Shortage], bool]]:
    """All that the card has is somebody else's, who gives back what a shortage needs: what to `serve` with."""

    def free() -> int:
        return int(card.total - card.aside - card.taken)

    theirs = [card.take(size) for size in (64 * MIB, PAGE) for _ in range(free() // size)]

    def gave(shortage: Shortage) -> bool:
        while free() < shortage.needed:
            card.give(theirs.pop())
        return True

    yield gave
    for address in theirs:
        card.give(address)


def two_at_once(setting: Any, raise_cap: Callable[[Shortage], None], work: Callable[[], object]) -> None:
    """Two threads that work: if both come to be short, they are asked for at the same time, and served one by one."""
    together, raising = threading.Barrier(2, timeout=20), threading.Lock()

    def raised(shortage: Shortage) -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(2)
        with raising:
            raise_cap(shortage)
        return True

    setting.framework.on_shortage = raised
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
