"""Every exception that memguard raises.

Exceptions that a program may have to catch are also attributes of the package `memguard`.

::

    MemguardError
    ├── ProblemsError        base of the next two, with all `problems`
    │   ├── ConfigError      the budget file is wrong: every problem, with line and fix (exit code 2)
    │   └── PlanError        the budget is right but does not fit these devices (exit code 2)
    ├── DeviceError          no NVIDIA driver, no GPU, or NVML refuses (exit code 3)
    ├── CapNotApplied        a framework cannot be capped as declared: `reason` and `remedy`
    │   └── ConflictingSetting   because of a `setting` that the user made
    ├── BudgetExceeded       `require` or `workload`: the requested memory is not available
    ├── LeaseRefused         `device: {lease: true}`: other processes (`holders`) hold the GPU, or the GPU is too small
    ├── UnderPressure        critical pressure under `on_pressure: [raise]`, at the next checkpoint
    ├── CannotShare          `exchange`: an array cannot be shared or copied as requested: `reason` and `remedy`
    ├── CannotSuspend        this process cannot be suspended now (`reasons`); nothing was changed
    ├── CannotResume         the process stays suspended: the GPU is too full, or the driver does not answer
    ├── Suspended            a call that needs the GPU, in a suspended process
    ├── NotActive            a call that needs `memguard.init` first
    ├── AlreadyActive        another budget is active; `replace=True` replaces it
    ├── FactsError           facts for `doctor` that cannot be read (exit code 2)
    ├── TraceError           an allocation trace that cannot be read (exit code 2)
    └── TimelineError        a timeline that cannot be read or created (exit code 2)

memguard never replaces the frameworks' own out-of-memory errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memguard._base.advice import Advice
from memguard._base.advice import MemguardError as MemguardError  # noqa: PLC0414 (public here)
from memguard._base.advice import Problem as Problem  # noqa: PLC0414 (public here)
from memguard._base.text import visible

Problem.__module__ = __name__  # so that pickles and tracebacks name `memguard.errors.Problem`


class ProblemsError(MemguardError):
    """Base of ConfigError and PlanError. `problems` has every problem, with its position in the file and its fix."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], source: str = "budget") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__("\n".join(p.render(source) for p in self.problems))
        if self.problems:
            self._say(self.problems[0].advice(source))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.source)


class ConfigError(ProblemsError):
    """The budget file is wrong; `problems` holds every error found, in file order."""


class PlanError(ProblemsError):
    """The budget is valid but does not fit the GPUs of this process."""


class DeviceError(MemguardError):
    """No usable GPU: no driver, no device, or NVML refused. The text names the cause and the fix.

    `missing` is True if this process has no GPU at all; `missing_gpu` of `memguard.init` handles this case. `missing`
    is False if the process has a GPU that cannot be used, for example because the driver is broken.
    """

    exit_code = 3

    def __init__(
        self, said: str | Advice = "", *, fix: str = "", alternatives: tuple[str, ...] = (), missing: bool = False
    ) -> None:
        self.missing = missing
        super().__init__(said, fix=fix, alternatives=alternatives)


class CapNotApplied(MemguardError):
    """A framework named in the budget cannot be capped as declared."""

    def __init__(self, framework: str, reason: str, remedy: str) -> None:
        self.framework, self.reason, self.remedy = framework, reason, remedy
        super().__init__(f"{framework}: cap not applied: {reason}", fix=remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.framework, self.reason, self.remedy)


class ConflictingSetting(CapNotApplied):
    """A setting that the user made is looser than the cap, or bypasses the capped allocator. `setting` names the
    environment variable, option or call. A stricter setting is no conflict, and stays in effect.
    """

    def __init__(self, framework: str, setting: str, reason: str, remedy: str) -> None:
        self.setting = setting
        super().__init__(framework, f"{setting} {reason}", remedy)
        self._arguments = (framework, setting, reason, remedy)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


class BudgetExceeded(MemguardError):
    """The memory requested by `require` or `workload` is not available within the budget.

    `needed` and `available` are bytes.
    """

    def __init__(self, framework: str, needed: int, available: int, message: str | Advice) -> None:
        self.framework, self.needed, self.available = framework, needed, available
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.framework, self.needed, self.available, self.args[0]), self.__dict__


class LeaseRefused(MemguardError):
    """The lease that the budget requests was not granted, immediately or within the time to wait. Nothing was changed.

    `holders` has a dict for each process with a lease on one of the GPUs: `pid` (None in another container), `command`,
    `budget`, `bytes` by GPU (UUID), and `since`, a time as from `time.time()`. `holders` is empty if the GPU is too
    small for the lease.
    """

    def __init__(self, message: str | Advice = "", holders: Sequence[Mapping[str, object]] = ()) -> None:
        self.holders = tuple(dict(one) for one in holders)
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.holders), self.__dict__


class UnderPressure(MemguardError):
    """Memory pressure is critical, and the budget has `on_pressure: [raise]`. Raised at the next checkpoint.

    `framework` is None if the process as a whole nears its limit on the GPU `uuid`.
    """

    def __init__(self, framework: str | None, uuid: str | None, message: str) -> None:
        super().__init__(message, fix="free arrays, or take 'raise' out of on_pressure in the budget")
        self.args = framework, uuid, message
        self.framework, self.uuid = framework, uuid

    def __str__(self) -> str:
        return visible(str(self.advice))


class CannotShare(MemguardError):
    """An array cannot be shared with, or copied to, another framework as requested. Nothing was changed.

    `producer` is the framework of the array, `consumer` the requested framework, or None if no framework can share the
    array. `copied` is True if a copy was requested. `source` and `target` are older names of `producer` and `consumer`.
    """

    ag_pass_through = True  # TensorFlow must not rewrite this exception when it is raised inside a tf.function

    def __init__(self, producer: str, consumer: str | None, reason: str, remedy: str, copied: bool = False) -> None:
        self.producer, self.consumer, self.reason, self.remedy, self.copied = producer, consumer, reason, remedy, copied
        pair = producer if consumer is None else f"{producer} to {consumer}"
        super().__init__(f"{pair}: cannot {'copy' if copied else 'share'} this array: {reason}", fix=remedy)

    @property
    def source(self) -> str:
        """The same as `producer`."""
        return self.producer

    @property
    def target(self) -> str | None:
        """The same as `consumer`."""
        return self.consumer

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.producer, self.consumer, self.reason, self.remedy, self.copied)


class CannotSuspend(MemguardError):
    """This process cannot be suspended now. Nothing was changed.

    `reasons` holds a tuple (code, reason, remedy) for each reason found.
    """

    def __init__(self, reasons: Sequence[tuple[str, str, str]]) -> None:
        self.reasons = tuple(tuple(r) for r in reasons)
        said = [Advice(f"cannot suspend: {reason}", remedy) for _, reason, remedy in reasons]
        super().__init__("\n".join(map(str, said)))
        if said:
            self._say(said[0])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reasons,)


class CannotResume(MemguardError):
    """The process stays suspended and intact, unless `lost` is True: then the driver destroyed the process's GPU state.
    The text has the cause and the fix."""

    def __init__(self, said: str | Advice = "", *, fix: str = "", lost: bool = False) -> None:
        self.lost = lost
        super().__init__(said, fix=fix)


class Suspended(MemguardError):
    """The call needs the GPU, but this process is suspended."""


class NotActive(MemguardError):
    """No budget is active: `init` has not run, `shutdown` has ended it, or this is a forked child."""


class AlreadyActive(MemguardError):
    """A different budget is active in this process."""


class FactsError(MemguardError):
    """An input of `memguard doctor`, a file of facts or a script, that cannot be read."""

    exit_code = 2


class TraceError(MemguardError):
    """An allocation trace that cannot be read or written."""

    exit_code = 2


class TimelineError(MemguardError):
    """A timeline that cannot be read, or cannot be created at its path."""

    exit_code = 2
