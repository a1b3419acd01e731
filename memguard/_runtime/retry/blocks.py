"""Retries a block of code: `for attempt in memguard.retry.attempts():` around `with attempt:`."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from memguard._runtime.retry.run import Policy, Run


class Attempt:
    """One run of the block. `number` counts from 1; `size` is None without the argument `size` of `attempts`."""

    def __init__(self, run: Run, number: int) -> None:
        self._run, self.number, self.size = run, number, run.size
        self.state: Literal["new", "begun", "over", "failed"] = "new"

    def __enter__(self) -> Attempt:
        if self.state != "new":
            raise RuntimeError("this attempt has begun already\n    fix: one `with attempt:` for each turn of the loop")
        self.state = "begun"
        self._run.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Suppress the error (True) if the block should run again. The loop prepares the run when the error is gone."""
        self.state = "over"
        if error is None or not issubclass(type(error), Exception) or not self._run.again(error):
            return False
        self.state = "failed"
        return True


class Attempts:
    """The attempts of one block. Iteration ends after the first success."""

    def __init__(self, policy: Policy, size: int | None) -> None:
        self._run = Run(policy, size)
        self._last: Attempt | None = None

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> Attempt:
        last, number = self._last, 1
        if last is not None:
            if last.state == "over":
                raise StopIteration
            if last.state != "failed":
                raise RuntimeError(
                    "this attempt had no block\n"
                    "    fix: for attempt in memguard.retry.attempts():\n        with attempt: ..."
                )
            self._run.prepare()
            number = last.number + 1
        self._last = Attempt(self._run, number)
        return self._last
