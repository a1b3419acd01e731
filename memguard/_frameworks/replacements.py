"""Replaces a framework's functions, to apply the cap to the user's later settings.

A replacement has its original's name, docstring and signature. One undo restores all originals; after an interruption
it can be repeated.
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

        After `undo`, a replacement that other code still references calls the original. With `direct` the replacement
        tests `active` itself, which saves a function call.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        replacement = wrap(original)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.active else original)(*args, **kwargs)

        call = replacement if direct else pass_on
        with contextlib.suppress(AttributeError, TypeError):  # a built-in function may lack some of these attributes
            update_wrapper(call, original)
        # The entry in the class's own dictionary: a static method stays static, and an inherited name is inherited
        # again.
        entry = owner, name, vars(owner).get(name, _ABSENT), call
        self._replaced.append(entry)  # recorded before the change, so that an interruption leaves no replacement
        setattr(owner, name, call)
        return True

    def undo(self) -> None:
        """Restore all originals, last first; a second call continues an interrupted one.

        It does not restore a function that other code has replaced since. If that function calls memguard's
        replacement, the replacement from now on calls the original.
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
