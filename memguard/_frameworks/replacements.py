"""What an adapter puts in the place of a framework's functions, so that a setting made later meets the cap.

A replacement has the name, docstring and signature of what it replaces. All of them are undone together, also if the
first attempt was interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

_ABSENT = object()


class Replacements:
    """Functions of a framework that were replaced, and their undo."""

    def __init__(self) -> None:
        self.active = True
        """False once `undo` has begun."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, direct: bool = False
    ) -> bool:
        """Replace `owner.name`, of a module or a class, with `wrap(original)`. False if there is no such function.

        Who has kept the replacement gets the original from it after `undo`. With `direct` it sees to that by itself, by
        `active`: that spares each call another one.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        replacement = wrap(original)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        call = replacement if direct else pass_on
        with contextlib.suppress(AttributeError, TypeError):  # a built-in function may lack some of it
            update_wrapper(call, original)
        # As the class itself has it: a static method stays one, and what is inherited is inherited again.
        entry = owner, name, vars(owner).get(name, _ABSENT), call
        self._replaced.append(entry)  # before it is there, so that an interruption leaves nothing behind
        setattr(owner, name, call)
        return True

    def undo(self) -> None:
        """Put everything back, last first; a second call goes on where an interrupted one stopped.

        What somebody has replaced since stays theirs: what they call underneath passes calls on unchanged.
        """
        self.active = False
        while self._replaced:
            owner, name, before, call = self._replaced[-1]
            if vars(owner).get(name) is call:
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
            self._replaced.pop()

    def standing(self, owner: Any, name: str) -> bool:
        """Whether `owner.name` is still what was put there."""
        found = vars(owner).get(name)
        return any(call is found for at, called, _, call in self._replaced if at is owner and called == name)
