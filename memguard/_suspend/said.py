"""What is said of how it ended, for an engineer at 2 a.m. Pure."""

from __future__ import annotations

from memguard._devices import checkpoint as driver
from memguard._devices.checkpoint import State
from memguard._processes.identity import Process
from memguard._suspend.steps import Do, End, Goal, Why


def text(
    goal: Goal, end: End, why: Why | None, process: Process, state: State | None = None, stopped: bool = False
) -> str:
    """What happened, with its remedy; empty if it went as asked.

    `state` is the last one that the driver said. `stopped`: the process is in state T now.
    """
    if end is (End.SUSPENDED if goal is Goal.OFF else End.RUNNING):
        return ""
    pid = process.pid
    if end is End.ENDED:
        return f"process {pid} has ended"
    reason, remedy = _reason(why, pid, stopped)
    if end is End.LOST:
        return (
            f"process {pid}: {reason}; what it had on its GPUs is lost, and what the driver had brought back of it "
            f"stays taken until the process ends\n    fix: end it (`kill -KILL {pid}`) and start it again"
        )
    if end is End.UNTOUCHED:
        return f"process {pid}: {reason}; nothing was changed\n    fix: {remedy}"
    if end is End.RUNNING:
        return f"process {pid}: {reason}; it was unlocked again and runs on\n    fix: {remedy}"
    if end is End.SUSPENDED:
        assert why is not None, "it was given up because of something"
        return f"process {pid}: it stays suspended and whole: {reason}\n    fix: {_for_room(why, pid)}"
    resume = f"`memguard resume {pid}`"
    fix = remedy.replace("try again", resume) if "try again" in remedy else f"{remedy}, then {resume}"
    return f"process {pid}: {reason}; {_STATES[state]}\n    fix: {fix}"


def _reason(why: Why | None, pid: int, stopped: bool) -> tuple[str, str]:
    """What went wrong, and what to do."""
    again = "try again"
    if why is None:
        return "the driver says that it failed", again
    if why.trouble == "timeout":
        if stopped:
            return "it is stopped, and the driver waits for it", f"`kill -CONT {pid}`"
        return f"the driver did not answer in time ({why.step.value})", "see whether the process hangs"
    if why.trouble == "died":
        said = f" ({why.text})" if why.text else ""
        return f"the helper process was ended during `{why.step.value}`{said}", again
    if why.trouble == "start":
        head, _, fix = why.text.partition("\n    fix: ")
        return head or "the helper process did not start", fix or again
    if why.trouble in ("cancelled", "interrupted"):
        return "this was interrupted", again
    if why.trouble:
        return why.text.partition("\n    fix: ")[0] or "there is no room", again
    known = _KNOWN.get((why.step, why.code))
    if known is not None:
        return known
    if why.step is Do.ASK and why.code == driver.SUCCESS:
        return "another program has locked or suspended it", f"`memguard resume {pid}` first, if that program has ended"
    return f"the driver's {why.step.value} returned error {why.code}", again


def _for_room(why: Why, pid: int) -> str:
    """What to do about one that waited for room in vain. Who holds the room comes last: it is many lines."""
    _, _, fix = why.text.partition("\n    fix: ")
    if fix:
        return fix
    if why.trouble == "room":
        return f"look at that GPU (`nvidia-smi`, `memguard ps`), then `memguard resume {pid}`"
    return f"`memguard resume {pid}` brings it back"


_STATES = {
    None: "the driver does not say how it is",
    State.RUNNING: "it ran when the driver was asked last",
    State.LOCKED: "it is locked: its CUDA calls wait",
    State.CHECKPOINTED: "it was off its GPUs when the driver was asked last",
    State.FAILED: "the driver says that it failed",
}
_KNOWN: dict[tuple[Do, int | None], tuple[str, str]] = {
    (Do.ASK, driver.NOT_INITIALIZED): ("it has not used CUDA", "nothing is to be done: it has no GPU memory"),
    (Do.ASK, driver.OPERATING_SYSTEM): (
        "the driver may not control it (error 304): it is another user's, or ptrace is not permitted",
        "run this as its user; in a container with --cap-add=SYS_PTRACE",
    ),
    (Do.LOCK, driver.NOT_READY): (
        "its work on the GPU did not end within the time for the lock",
        "try again when its kernels have ended, or allow more time",
    ),
    (Do.LOCK, driver.NOT_SUPPORTED): (
        "the driver does not do it with this process (error 801): a profiler has used CUDA's profiling interface "
        "(CUPTI) in it, and has not let go of it",
        "start the program anew, without a profiler; PyTorch's does not let go when it has ended",
    ),
    (Do.LOCK, driver.ILLEGAL_STATE): ("another program has locked it meanwhile", "wait for that program to end"),
    (Do.CHECKPOINT, driver.NOT_SUPPORTED): (
        "it has managed memory (cudaMallocManaged), which the driver does not copy out",
        "free the managed memory, or do not use any",
    ),
    (Do.CHECKPOINT, driver.ILLEGAL_STATE): (
        "it was unlocked before the copy, as memguard's helper does where nothing is asked for 10 s: a thread may have "
        "waited in the driver with Python's interpreter lock",
        "try again when no other thread uses the GPU through code that calls CUDA itself",
    ),
    (Do.RESTORE, driver.OUT_OF_MEMORY): ("there was too little room on the GPU for its restore", ""),
    (Do.RESTORE, driver.INVALID_VALUE): ("it had opened another process's CUDA IPC memory, which no restore does", ""),
    (Do.RESTORE, driver.OPERATING_SYSTEM): (
        "the driver does not restore it (error 304), as after an earlier restore that failed",
        "try again; if the error stays, end the process and start it anew",
    ),
}
