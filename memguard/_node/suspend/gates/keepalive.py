"""Objects whose destructors call the driver stay alive until the process is back on its GPUs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable
from types import FrameType
from typing import Any

from memguard._frameworks.optional_modules import Gates
from memguard._node.suspend.gates.replaced import holders


class Kept:
    """References to objects whose destructors call the driver, as long as the gate is closed.

    Their last other reference may go meanwhile, by a `del` or a garbage collection on any thread. Then their destructor
    runs when the gate opens, and not now.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []

    def take(self, tables: Iterable[Gates]) -> None:
        """Keep the objects that the tables of imported frameworks name, as far as Python can list them."""
        kinds: dict[type, Callable[[Any], bool] | None] = {}
        for table in tables:
            if table.hook not in sys.modules:
                continue
            for kind in table.kept_alive:
                for owner, name, _ in holders(kind.name):
                    _with_subclasses(vars(owner)[name], kind.which, kinds)
            if table.holds is not None:
                self._objects.append(table.holds())
        if kinds:
            self._objects.extend(one for one in objects_of(kinds) if _wanted(kinds[type(one)], one))

    def drop(self) -> None:
        """Let them go: what nobody else wants is destroyed here."""
        self._objects.clear()


def objects_of(kinds: Container[type]) -> list[Any]:
    """The objects of these types that the garbage collector lists, that one of those refers to, or a running function.

    Types without members that Python sees are not listed themselves.
    """
    found: dict[int, Any] = {}
    listed = gc.get_objects()
    frames: list[Any] = []
    for frame in [*sys._current_frames().values()]:
        walked: FrameType | None = frame
        while walked is not None:
            frames.append(walked)
            walked = walked.f_back
    groups: tuple[list[Any], ...] = (listed, gc.get_referents(*listed), gc.get_referents(*frames))
    for group in groups:
        found.update({id(each): each for each in group if type(each) in kinds})
    return [*found.values()]


def _wanted(which: Callable[[Any], bool] | None, one: object) -> bool:
    try:
        return which is None or bool(which(one))
    except Exception:  # half made, or already destroyed
        return True


def _with_subclasses(
    kind: object, which: Callable[[Any], bool] | None, kinds: dict[type, Callable[[Any], bool] | None]
) -> None:
    if isinstance(kind, type) and kind not in kinds:
        kinds[kind] = which
        subclasses: list[type] = type.__subclasses__(kind)
        for one in subclasses:
            _with_subclasses(one, which, kinds)
