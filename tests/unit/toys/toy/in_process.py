"""What a process that has imported the toy can tell of it."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question, count


def _captures(modules: Modules, _: Objects) -> Iterator[str]:
    toy = modules.get("toy")
    if toy is not None and toy.capturing:
        yield f"toy: {count(toy.capturing, 'capture')} under way"


IN_PROCESS = InProcess(modules=("toy",), captures=(Question("whether the toy captures", _captures),))
