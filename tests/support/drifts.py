"""The drift of a framework as text, as the guard notes it."""

from __future__ import annotations

from memguard._frameworks.base import Framework


def drifts(framework: Framework) -> list[str]:
    """A sentence for each change that broke its cap."""
    return [f"{framework.name}: {one}" for one in framework.drift()]
