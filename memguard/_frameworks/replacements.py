"""Replaces a framework's functions, so that a setting made later meets the cap.

A replacement has the name, docstring and signature of its original. One undo restores all of them, even after an
interrupted attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

_ABSENT = object()


class Replacements:
    """Replaced functions of a framework, and their undo."""

    def __init__(self) -> None:
        self.active = True
        """False once `undo` has begun."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(
        self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, direct: bool = False
    ) -> bool:
        """Replace `owner.name`, of a module or a class, with `wrap(original)`. False if there is no such function.

        A replacement kept by other code calls the original after `undo`. With `direct` the replacement tests `active`
        itself: that saves a second function call.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        replacement = wrap(original)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        call = replacement if direct else pass_on
        with contextlib.suppress(AttributeError, TypeError):  # a built-in function may lack some of these
            update_wrapper(call, original)
        # The class's own entry: a static method stays static, and an inherited name is inherited again.
        entry = owner, name, vars(owner).get(name, _ABSENT), call
        self._replaced.append(entry)  # recorded before the change, so that an interruption leaves no replacement
        setattr(owner, name, call)
        return True

    def undo(self) -> None:
        """Restore all originals, last first; a second call continues an interrupted one.

        It leaves a function that other code has replaced since. Where that function calls memguard's replacement, the
        replacement now calls the original.
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
        """Whether `owner.name` is still memguard's replacement."""
        found = vars(owner).get(name)
        return any(call is found for at, called, _, call in self._replaced if at is owner and called == name)
