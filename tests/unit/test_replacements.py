"""What is put in the place of a framework's functions: it looks like them, and the next call finishes an undo."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

from memguard._frameworks.replacements import Replacements


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def module() -> Any:
    made: Any = types.ModuleType("theirs")

    def limit(size: int, *, device: int = 0) -> int:
        """Sets a limit."""
        return size + device

    class Pool:
        def limit(self, size: int) -> int:
            """A pool's."""
            return size

        @staticmethod
        def fixed(size: int) -> int:
            return size

    class Sub(Pool):
        pass

    made.limit, made.Pool, made.Sub, made.builtin = limit, Pool, Sub, len
    return made


@pytest.mark.parametrize(
    ("owner", "name", "arguments"),
    [("", "limit", (3,)), ("Pool", "limit", (None, 3)), ("Pool", "fixed", (3,)), ("Sub", "limit", (None, 3))],
)
def test_it_looks_like_the_original_and_goes_without_a_trace(owner: str, name: str, arguments: Any) -> None:
    theirs = module()
    at = getattr(theirs, owner) if owner else theirs
    before, entries = getattr(at, name), dict(vars(at))
    replaced = Replacements()
    assert replaced.put(at, name, doubled) and replaced.standing(at, name)
    now = getattr(at, name)
    assert now is not before and now(*arguments) == 6
    assert inspect.signature(now) == inspect.signature(before)
    assert (now.__name__, now.__doc__, now.__qualname__) == (before.__name__, before.__doc__, before.__qualname__)
    replaced.undo()
    assert dict(vars(at)) == entries and getattr(at, name)(*arguments) == 3 and not replaced.standing(at, name)
    assert now(*arguments) == 3, "whoever kept it calls the original"
    replaced.undo()


def test_a_static_method_stays_one() -> None:
    theirs = module()
    replaced = Replacements()
    replaced.put(theirs.Pool, "fixed", doubled)
    assert theirs.Pool.fixed(3) == 6
    replaced.undo()
    assert theirs.Pool().fixed(3) == 3 and isinstance(vars(theirs.Pool)["fixed"], staticmethod)


def test_what_is_not_there_is_not_replaced() -> None:
    replaced = Replacements()
    assert not replaced.put(module(), "missing", doubled)
    replaced.undo()


def test_what_somebody_put_there_since_stays() -> None:
    theirs, replaced = module(), Replacements()
    replaced.put(theirs, "limit", doubled)
    ours = theirs.limit
    theirs.limit = wrapped = lambda size: ours(size) + 100
    assert wrapped(3) == 106 and not replaced.standing(theirs, "limit")
    replaced.undo()
    assert theirs.limit is wrapped and wrapped(3) == 103


def test_two_for_one_function_are_undone_in_any_order() -> None:
    for first in (0, 1):
        theirs = module()
        original, both = theirs.limit, [Replacements(), Replacements()]
        for each in both:
            each.put(theirs, "limit", doubled)
        assert theirs.limit(3) == 12
        both[first].undo()
        assert theirs.limit(3) == 6
        both[1 - first].undo()
        assert theirs.limit(3) == 3 and (theirs.limit is original) is (first == 1)


def test_an_interrupted_undo_is_finished_by_the_next() -> None:
    """Ctrl-C at each of the steps in turn."""

    class Owner(types.ModuleType):
        left = 0

        def __setattr__(self, name: str, value: object) -> None:
            if Owner.left == 1:
                Owner.left = 0
                raise KeyboardInterrupt
            Owner.left -= Owner.left > 0
            super().__setattr__(name, value)

    for step in range(1, 4):
        theirs = Owner("theirs")
        for name in "abc":
            setattr(theirs, name, abs)
        replaced = Replacements()
        for name in "abc":
            replaced.put(theirs, name, doubled)
        Owner.left = step
        with pytest.raises(KeyboardInterrupt):
            replaced.undo()
        assert theirs.a(-3) == theirs.b(-3) == theirs.c(-3) == 3, "all of them pass calls on at once"
        replaced.undo()
        assert theirs.a is theirs.b is theirs.c is abs


def test_an_interrupted_beginning_is_undone_too() -> None:
    class Owner(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "b" and value is not abs:
                raise KeyboardInterrupt

    theirs = Owner("theirs")
    theirs.a = theirs.b = abs
    replaced = Replacements()
    replaced.put(theirs, "a", doubled)
    with pytest.raises(KeyboardInterrupt):
        replaced.put(theirs, "b", doubled)
    replaced.undo()
    assert theirs.a is theirs.b is abs
