"""A dict that nothing may change."""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V")


class Frozen(dict[str, V]):
    """A dict in file order that nothing may change, so that it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (dict(self),)  # pickle would set its entries one by one

    def _refuse(self, *args: object, **more: object) -> Any:
        raise TypeError("a budget cannot be changed")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def frozen(entries: dict[str, V]) -> Frozen[V]:
    return Frozen(entries)  # pydantic takes a millisecond to find out how the class itself is called
