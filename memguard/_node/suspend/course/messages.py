"""What is said of how it ended, for an engineer at 2 a.m. Pure."""

from __future__ import annotations

from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._devices import checkpoint as driver
from memguard._devices.checkpoint import State
from memguard._node.identity import Process
from memguard._node.suspend.course.steps import Do, End, Goal, Why


class Remedy(NamedTuple):
    """What to do: another attempt, which is `memguard resume` for a process that is off its GPUs, and more."""

    text: str
    again: bool = False

    def __str__(self) -> str:
        return f"try again{self.text}" if self.again else self.text

    def resuming(self, pid: int) -> str:
        resume = f"`memguard resume {pid}`"
        return f"{resume}{self.text}" if self.again else f"{self.text}, then {resume}"


_AGAIN, _NOTHING = Remedy("", again=True), Remedy("")


def advice(
    goal: Goal, end: End, why: Why | None, process: Process, state: State | None = None, stopped: bool = False
) -> Advice | None:
    """What happened, with its remedy; None if it went as asked.

    `state` is the last one that the driver said. `stopped`: the process is in state T now.
    """
    if end is (End.SUSPENDED if goal is Goal.OFF else End.RUNNING):
        return None
    pid = process.pid
    if end is End.ENDED:
        return Advice(f"process {pid} has ended")
    reason, remedy = _reason(why, pid, stopped)
    if end is End.LOST:
        return Advice(
            f"process {pid}: {reason}; what it had on its GPUs is lost, and what the driver had brought back of it "
            "stays taken until the process ends",
            f"end it (`kill -KILL {pid}`) and start it again",
        )
    if end is End.UNTOUCHED:
        return Advice(f"process {pid}: {reason}; nothing was changed", str(remedy))
    if end is End.RUNNING:
        return Advice(f"process {pid}: {reason}; it was unlocked again and runs on", str(remedy))
    if end is End.SUSPENDED:
        assert why is not None, "it was given up because of something"
        return Advice(f"process {pid}: it stays suspended and whole: {reason}", _for_room(why, pid))
    return Advice(f"process {pid}: {reason}; {_STATES[state]}", remedy.resuming(pid))


def _reason(why: Why | None, pid: int, stopped: bool) -> tuple[str, Remedy]:
    """What went wrong, and what to do."""
    if why is None:
        return "the driver says that it failed", _AGAIN
    if why.trouble == "timeout":
        if stopped:
            return "it is stopped, and the driver waits for it", Remedy(f"`kill -CONT {pid}`")
        return f"the driver did not answer in time ({why.step.value})", Remedy("see whether the process hangs")
    if why.trouble == "died":
        said = f" ({why.text})" if why.text else ""
        return f"the helper process was ended during `{why.step.value}`{said}", _AGAIN
    if why.trouble == "start":
        return why.text or "the helper process did not start", Remedy(why.fix) if why.fix else _AGAIN
    if why.trouble in ("cancelled", "interrupted"):
        return "this was interrupted", _AGAIN
    if why.trouble:
        return why.text or "there is no room", _AGAIN
    known = _KNOWN.get((why.step, why.code))
    if known is not None:
        return known
    if why.step is Do.ASK and why.code == driver.SUCCESS:
        first = Remedy(f"`memguard resume {pid}` first, if that program has ended")
        return "another program has locked or suspended it", first
    return f"the driver's {why.step.value} returned error {why.code}", _AGAIN


def _for_room(why: Why, pid: int) -> str:
    """What to do about one that waited for room in vain. Who holds the room comes last: it is many lines."""
    if why.fix:
        return why.fix
    if why.trouble == "room":
        return f"look at that GPU (`nvidia-smi`, `memguard ps`), then `memguard resume {pid}`"
    return f"`memguard resume {pid}` brings it back"


_STATES = {
    None: "the driver does not say how it is",
    State.RUNNING: "it ran when the driver was asked last",
    State.LOCKED: "it is locked: its CUDA calls wait",
    State.CHECKPOINTED: "it was off its GPUs when the driver was asked last",
    State.FAILED: "the driver says that it failed",
    State.CHECKPOINTING: "the driver is moving its memory to the host",
    State.RESTORING: "the driver is restoring it",
}
_KNOWN: dict[tuple[Do, int | None], tuple[str, Remedy]] = {
    (Do.ASK, driver.NOT_INITIALIZED): ("it has not used CUDA", Remedy("nothing is to be done: it has no GPU memory")),
    (Do.ASK, driver.OPERATING_SYSTEM): (
        "the driver may not control it (error 304): it is another user's, or ptrace is not permitted",
        Remedy("run this as its user; in a container with --cap-add=SYS_PTRACE"),
    ),
    (Do.LOCK, driver.NOT_READY): (
        "its work on the GPU did not end within the time for the lock",
        Remedy(" when its kernels have ended, or allow more time", again=True),
    ),
    (Do.LOCK, driver.NOT_SUPPORTED): (
        "the driver does not do it with this process (error 801): a profiler has used CUDA's profiling interface "
        "(CUPTI) in it, and has not let go of it",
        Remedy("start the program anew, without a profiler; PyTorch's does not let go when it has ended"),
    ),
    (Do.LOCK, driver.ILLEGAL_STATE): (
        "another program has locked it meanwhile",
        Remedy("wait for that program to end"),
    ),
    (Do.CHECKPOINT, driver.NOT_SUPPORTED): (
        "it has managed memory (cudaMallocManaged), which the driver does not copy out",
        Remedy("free the managed memory, or do not use any"),
    ),
    (Do.CHECKPOINT, driver.ILLEGAL_STATE): (
        "it was unlocked before the copy, as memguard's helper does where nothing is asked for 10 s: a thread may have "
        "waited in the driver with Python's interpreter lock",
        Remedy(" when no other thread uses the GPU through code that calls CUDA itself", again=True),
    ),
    (Do.RESTORE, driver.OUT_OF_MEMORY): ("there was too little room on the GPU for its restore", _NOTHING),
    (Do.RESTORE, driver.INVALID_VALUE): (
        "it had opened another process's CUDA IPC memory, which no restore does",
        _NOTHING,
    ),
    (Do.RESTORE, driver.OPERATING_SYSTEM): (
        "the driver does not restore it (error 304), as after an earlier restore that failed",
        Remedy("; if the error stays, end the process and start it anew", again=True),
    ),
}
