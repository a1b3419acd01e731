"""Replaces a framework's functions, so that settings which the user makes later cannot exceed the cap.

A replacement has the name, docstring and signature of the original. `Replacements.undo` restores all originals; after
an interruption it can be called again.
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
        """Replace the function `name` of a module or class with `wrap(original)`. Returns False if the
        module or class has no such function, else True.

        After `undo`, a replacement that other code still references calls the original. With `direct`, the function
        that `wrap` returns must test `active` itself; this saves a function call.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        replacement = wrap(original)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        call = replacement if direct else pass_on
        with contextlib.suppress(AttributeError, TypeError):  # a built-in function may lack attributes that this copies
            update_wrapper(call, original)
        # `undo` restores the entry of the owner's own `__dict__`, so a static method stays static. For an inherited
        # name, `undo` deletes the override.
        entry = owner, name, vars(owner).get(name, _ABSENT), call
        self._replaced.append(entry)  # recorded first, so that `undo` finds it even after an interruption
        setattr(owner, name, call)
        return True

    def undo(self) -> None:
        """Restore all originals, last first. After an interruption, a second call restores the remaining originals.

        Leaves a function in place that other code has set since. If that function calls memguard's replacement, the
        replacement calls the original.
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
        """True while `owner.name` is memguard's replacement."""
        found = vars(owner).get(name)
        return any(call is found for at, called, _, call in self._replaced if at is owner and called == name)
