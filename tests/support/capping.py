"""Caps applied by an adapter alone, as the guard applies them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memguard._base.types import Enforcement
from memguard._base.undo import Undo
from memguard._frameworks.base import Framework


class AppliedCaps(NamedTuple):
    """What `apply` returned, and its undo, which raises the first error of a step and can be called again."""

    enforcement: Enforcement
    permanent: str | None
    notes: tuple[str, ...]
    undo: Callable[[], None]


def apply_caps(framework: Framework, caps: Mapping[str, int], options: Mapping[str, Any] | None = None) -> AppliedCaps:
    """Apply the caps. If that raises, the steps that it has added are run, as the guard does."""
    errors: list[BaseException] = []
    steps = Undo(lambda what, error: errors.append(error))

    def undo() -> None:
        errors.clear()
        steps.run()
        if errors:
            raise errors[0]

    try:
        return AppliedCaps(*framework.apply(caps, options or {}, steps), undo)
    except BaseException:
        steps.run()
        raise
