"""One function of a framework, replaced in place and put back exactly as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import update_wrapper
from types import ModuleType
from typing import Any

from memguard._base.undo import Undo
from memguard._devices import c_functions

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_ABSENT = c_functions.ABSENT


def holders(name: str, but: tuple[str, ...] = ()) -> list[tuple[Any, str, str]]:
    """What has the entry `module:Class.name`, its name there, and its full name. Nothing if nobody imported it.

    The last part may be a pattern; `but` are patterns of what it leaves out. This looks into dicts only: an attribute
    that a module makes when it is asked for may be an import.
    """
    module, _, path = name.partition(":")
    owner: Any = sys.modules.get(module)
    *outer, last = path.split(".")
    for step in outer:
        owner = _raw(owner, step)
    if owner is None:
        return []
    if "*" not in last:
        return [] if _raw(owner, last) is None else [(owner, last, f"{module}.{path}")]
    return [
        (owner, one, ".".join((module, *outer, one)))
        for one, value in [*getattr(owner, "__dict__", {}).items()]
        if fnmatchcase(one, last) and not any(fnmatchcase(one, other) for other in but)
        if callable(value) and not isinstance(value, type)
    ]


def swap(owner: Any, name: str, wrap: Wrap, undo: Undo, what: str) -> bool:
    """Replace `owner.name` by `wrap(original)`, and add to `undo` what puts it back. False if it stayed as it was.

    What somebody has put there meanwhile stays: what they call underneath is inert by then.
    """
    here = vars(owner).get(name, _ABSENT)
    call = _wrapped(owner, _raw(owner, name), wrap)

    def back() -> None:
        if vars(owner).get(name, _ABSENT) is call:
            _put(owner, name, here)
        elif isinstance(owner, type):
            c_functions.clear_method_cache(owner)  # an interruption may have come within `put_method`

    undo.add(what, back)
    if not _put(owner, name, call):
        back()
        return False
    return True


def _raw(owner: Any, name: str) -> Any:
    """The entry as the owner's dict has it, or that of a base or of its type; None without one."""
    if owner is None:
        return None
    places: tuple[Any, ...] = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    for place in places[:1] if isinstance(owner, ModuleType) else places:
        found = getattr(place, "__dict__", {}).get(name)
        if found is not None:
            return found
    return None


def _put(owner: Any, name: str, value: Any) -> bool:
    try:
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    except (AttributeError, TypeError):
        return isinstance(owner, type) and c_functions.put_method(owner, name, value)
    return bool(vars(owner).get(name, _ABSENT) is value)


def _wrapped(owner: Any, raw: Any, wrap: Wrap) -> Any:
    """The replacement, of the same kind as what it replaces: a static method stays one, a property too."""
    if not isinstance(owner, type):
        return _named(wrap(raw), raw)
    if isinstance(raw, staticmethod):
        return staticmethod(_named(wrap(raw.__func__), raw.__func__))
    if isinstance(raw, classmethod):
        return classmethod(_named(wrap(raw.__func__), raw.__func__))
    if isinstance(raw, property):
        return property(raw.fget and wrap(raw.fget), raw.fset, raw.fdel, raw.__doc__)
    if type(raw).__name__ == "classmethod_descriptor":
        return classmethod(_named(wrap(lambda cls, *args, **kwargs: raw.__get__(None, cls)(*args, **kwargs)), raw))
    if hasattr(type(raw), "__set__"):  # an attribute of a C type
        return property(wrap(lambda this: raw.__get__(this, type(this))), raw.__set__, None, raw.__doc__)
    call = _named(wrap(raw), raw)
    return call if hasattr(type(raw), "__get__") else staticmethod(call)


def _named(call: Callable[..., Any], raw: Any) -> Callable[..., Any]:
    with contextlib.suppress(AttributeError, TypeError):  # a function written in C may lack some of it
        update_wrapper(call, raw, updated=())
    return call
