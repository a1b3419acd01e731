"""Suspends and resumes other processes of this user: `memguard suspend PID`, `memguard resume PID`.

A process that allows it suspends itself, with all that it knows of its own state. Any other is only suspended if the
user takes the risk (`unsafe`): what can be seen from outside is checked, and the rest of HAZARDS is not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._base.units import GIB, format_size
from memguard._devices import proc
from memguard._devices.checkpoint import State
from memguard._node.identity import Process, process_of
from memguard._node.suspend import processes, requests
from memguard._node.suspend.checks import facts, refusals
from memguard._node.suspend.course import flow, room, steps
from memguard._node.suspend.course.steps import End
from memguard._node.suspend.driver.channel import CheckpointChannel
from memguard._node.suspend.processes import Listing
from memguard._node.suspend.store import records
from memguard._node.suspend.store.work_lock import BusyError, Work
from memguard._node.suspend.types import Progress, Reason
from memguard.errors import MemguardError

DONE, NO, UNKNOWN = 0, 1, 4
"""What a command answers, and its exit code."""
ROLL_BACK = 60.0
"""Seconds for which a process that was just taken off waits for the room that it has left."""
SPARE = GIB
"""What a process may have on a GPU beyond what NVML listed for it, where nobody has measured what it left."""
_LOOK = 0.05
ALLOW = "allow it in the budget with which it is started: `suspend: {by_others: true}`"
HAZARDS = (
    "another thread that synchronizes a device, stream or event, or asks an event, crashes the process (SIGSEGV)",
    "a process that has opened another's CUDA IPC memory is lost when it is resumed",
    "NCCL's other ranks wait for it, and its threads may crash it",
    "a CUDA graph that is being captured is lost",
    "a profiler or debugger in the process may crash it",
    "the program is not told: its time-outs go on, and every CUDA call waits until it is resumed",
)
"""What happens if a process is suspended without its knowledge."""


class NotThereError(MemguardError):
    """There is no such process."""

    exit_code = 2  # a wrong argument


class NotAllowedError(MemguardError):
    """Another user's process, or one that does not allow it."""

    exit_code = NO


@dataclass(frozen=True)
class Result:
    """How it went with one process. `code` is DONE, NO or UNKNOWN, `state` how it is now, as far as known.

    `text` says what happened, for people. `bytes` left each GPU or came back, None if nobody knows. `changed`: by this.
    """

    process: Process
    code: int
    text: str
    state: str = "unknown"
    bytes: Mapping[str, int] | None = None
    seconds: float | None = None
    changed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.process._asdict(),
            "done": self.code == DONE,
            "code": self.code,
            "text": self.text,
            "state": self.state,
            "bytes": None if self.bytes is None else dict(self.bytes),
            "seconds": self.seconds,
            "changed": self.changed,
        }


@dataclass
class Stop:
    """A Ctrl-C: `once` takes back what can be taken back, `twice` ends the wait for that too."""

    once: threading.Event = field(default_factory=threading.Event)
    twice: threading.Event = field(default_factory=threading.Event)


Say = Callable[[str], object]


def found(pid: int) -> Process:
    """The process, which is this user's. Raises NotThereError or NotAllowedError."""
    process = process_of(pid)
    if process is None:
        raise NotThereError(f"there is no process {pid} here", fix="`memguard ps` lists those with GPU memory")
    user = proc.user_of(pid)
    if user is not None and user != os.geteuid():
        name = proc.owner(pid)
        raise NotAllowedError(
            f"process {pid} is {name}'s: only its own user can suspend or resume it",
            fix=f"as that user: sudo -u {name} memguard ...",
        )
    return process


def family(process: Process, listed: Listing, wanted: Callable[[processes.Row], bool]) -> list[Process]:
    """The process and all below it that are `wanted`; those furthest down first. Other users' are left out.

    The process itself is left out if it is not, and others are: a launcher often has no GPU memory.
    """
    chosen = []
    for pid, stat in (proc.descendants("/", process.pid) or {}).items():
        row = listed.of(pid)
        own = proc.user_of(pid) == os.geteuid() and not processes.is_helper(pid)
        if row is not None and own and wanted(row):
            chosen.append(Process(pid, stat.start))
    first = listed.of(process.pid)
    if not chosen or (first is not None and wanted(first)):
        chosen.insert(0, process)
    return chosen[::-1]


def sizes_of(row: processes.Row | None) -> dict[str, int]:
    """What NVML lists for a process, by GPU; empty if it does not say it for each GPU."""
    sizes = {} if row is None else row.bytes
    return {uuid: size for uuid, size in sizes.items() if size} if all(sizes.values()) else {}


def suspend(
    chosen: Iterable[Process],
    client: CheckpointChannel,
    *,
    sizes: Mapping[int, Mapping[str, int]],
    unsafe: bool = False,
    stop: Stop | None = None,
    say: Say = lambda line: None,
) -> list[Result]:
    """Take them off their GPUs, in this order: all, or none. `sizes` by PID is what NVML lists for them.

    If one cannot go, those that went before it are brought back.
    """
    chosen, stop = list(chosen), stop or Stop()
    on_simulated = [process for process in chosen if simulated(process)]
    if on_simulated:  # nor with `unsafe`: the driver knows nothing of them
        return [_simulated(process) if process in on_simulated else _not_begun(process) for process in chosen]
    listening = {process: _listens(process) for process in chosen}
    if not unsafe and not all(listening.values()):
        return [_not_allowed(process, not listening[process]) for process in chosen]
    results: list[Result] = []
    pids = {process.pid for process in chosen}
    for process in chosen:
        if len(chosen) > 1:
            say(f"process {process.pid}")
        if stop.once.is_set():
            result = Result(process, NO, f"process {process.pid}: this was interrupted; nothing was changed", "running")
        elif listening[process]:
            result = _asked(process, stop)
        else:
            result = _taken(process, client, sizes.get(process.pid, {}), pids, stop)
        results.append(result)
        if result.code != DONE:
            break
    if results[-1].code == DONE:
        return results
    for place, result in reversed(list(enumerate(results[:-1]))):
        if result.changed:
            say(f"process {result.process.pid} comes back")
            back = resume(result.process, client, timeout=ROLL_BACK, cancel=stop.twice)
            code = NO if back.code == DONE else back.code
            brought = f"process {result.process.pid} was brought back, as not all could be suspended: all or none"
            text = back.text if back.code != DONE else brought
            results[place] = Result(result.process, code, text, back.state, back.bytes, back.seconds)
    left = [_not_begun(process) for process in chosen[len(results) :]]
    return [*results, *left]


def _listens(process: Process) -> bool:
    budget = records.budget_of(process)
    return budget is not None and budget.by_others


def simulated(process: Process) -> bool:
    """Whether its budget is for simulated GPUs."""
    budget = records.budget_of(process)
    return budget is not None and budget.simulated


def _simulated(process: Process) -> Result:
    text = (
        f"process {process.pid} is not suspended from outside: its GPUs are simulated, and hold no memory\n"
        "    fix: call memguard.suspend() in the program, which simulates that too; or run it on a real GPU"
    )
    return Result(process, NO, text, "running", None)


def _not_allowed(process: Process, this: bool) -> Result:
    if not this:
        return _not_begun(process)
    budget = records.budget_of(process)
    how = f"its budget {budget.budget} does not allow it" if budget else _unknown()
    text = (
        f"process {process.pid} is not suspended from outside: {how}\n"
        f"    fix: {ALLOW}; or the same command with --unsafe, which may crash it or lose it (docs/suspend.md, "
        "What can go wrong, lists how): it does it at once, and only on a terminal it asks first"
    )
    return Result(process, NO, text, "running", None)


def _unknown() -> str:
    try:
        records.budgets()
    except (OSError, MemguardError) as error:
        why = error.advice if isinstance(error, MemguardError) else Advice(str(error))
        return f"whether a budget allows it cannot be read: {why.reason}" + (f" ({why.fix})" if why.fix else "")
    return "nobody knows of a budget that allows it"


def _not_begun(process: Process) -> Result:
    text = f"process {process.pid}: nothing was changed, as another one cannot be suspended: all or none"
    return Result(process, NO, text, "running", None)


def _asked(process: Process, stop: Stop) -> Result:
    """It does it itself. An interruption only ends the wait for its answer."""
    if still := refusals.still(facts.paused(process)):
        return _refused(process, still)
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(_answered(process)), daemon=True)
    thread.start()
    while thread.is_alive() and not stop.once.is_set():
        thread.join(_LOOK)
    if results:
        return results[0]
    text = f"process {process.pid} was asked, and may do it yet\n    fix: `memguard ps` says how it is"
    return Result(process, UNKNOWN, text)


def _refused(process: Process, reasons: Iterable[Reason]) -> Result:
    lines = "".join(f"\n  {one.reason}\n    fix: {one.remedy}" for one in reasons)
    text = f"process {process.pid} cannot be suspended, and nothing was changed:{lines}"
    return Result(process, NO, text, "running")


def _answered(process: Process) -> Result:
    try:
        sizes, seconds = requests.request(process)
    except requests.RefusedError as error:
        if error.suspended:
            return Result(process, DONE, f"process {process.pid} is suspended already", "suspended")
        return Result(process, NO, f"process {process.pid} refuses: {error}", "running")
    except requests.SilentError as error:
        text = f"{error}\n    fix: `memguard ps` says how it is; if it hangs, look at it with py-spy or gdb"
        return Result(process, UNKNOWN, text)
    return Result(process, DONE, _went(process, sizes, seconds), "suspended", sizes, seconds, True)


def _taken(process: Process, client: CheckpointChannel, sizes: Mapping[str, int], pids: set[int], stop: Stop) -> Result:
    """Without its knowledge."""
    pid = process.pid
    if client.state(process).state is State.CHECKPOINTED:
        return Result(process, DONE, f"process {pid} is suspended already", "suspended")
    seen = facts.collect(process, inside=False, bytes=sizes, together=pids)
    reasons = refusals.reasons(seen, needs_host=refusals.host_needed(sizes))
    if reasons:
        return _refused(process, reasons)
    try:
        with Work(process, "unsafe", sizes=lambda: sizes) as work:
            wait = room.Waiting(ROLL_BACK)
            done = flow.take_off(process, client=client, on_step=work, cancel=stop.once, give_up=stop.twice, room=wait)
            work.ended(done.end.value, done.bytes)
    except (BusyError, OSError) as error:
        return Result(process, NO, str(error))
    if done.end is End.SUSPENDED and not done.text:
        return Result(
            process, DONE, _went(process, done.bytes, done.seconds), "suspended", done.bytes, done.seconds, True
        )
    return Result(process, _code(done), _said(process, done), _state(done), done.bytes, done.seconds)


def resume(
    process: Process,
    client: CheckpointChannel,
    *,
    timeout: float | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Result:
    """Bring a process back, whatever state it is in and whoever has left it there. It waits for room until `timeout`.

    With `cancel` it stays suspended and whole, unless its restore has begun.
    """
    pid = process.pid
    if records.of(process) is not None and (why := _without_lease(process)):
        return Result(process, NO, why, "suspended")
    try:
        with Work(process, "asked") as work:
            found = work.found
            wait = room.Waiting(timeout, progress)
            needs = needs_of(found)
            done = flow.bring_back(process, client=client, needs=needs, room=wait, on_step=work, cancel=cancel)
            work.ended(done.end.value)
    except (BusyError, OSError) as error:
        return Result(process, NO, str(error))
    if done.end is not End.RUNNING or done.text:
        return Result(process, _code(done), _said(process, done), _state(done), needs, done.seconds)
    if not {"restore", "unlock"} & set(done.parts):
        return Result(process, DONE, f"process {pid} is on its GPUs: nothing was to be done", "running")
    if "restore" not in done.parts:
        return Result(process, DONE, f"process {pid} was locked, and runs on", "running", None, done.seconds, True)
    size = f" with {format_size(sum(needs.values()))}" if needs else ""
    away = f", after {max(0.0, time.time() - found.since):,.0f} s" if found is not None else ""
    text = f"process {pid} is back on its GPUs{size}{away}"
    return Result(process, DONE, text, "running", needs, done.seconds, True)


def _without_lease(process: Process) -> str:
    """Why a process that gave its lease back must not come back now; empty if nothing of its lease is against it."""
    from memguard._node.leases import returning

    for place in records.databases(process):  # it may have been started with another folder for leases
        try:
            if why := returning.refusal(process, place):
                return why
        except MemguardError as error:
            _log.debug("whether process %d has a lease in %s is unknown: %s", process.pid, place, error)
    return ""


def needs_of(record: records.Record | None) -> dict[str, int] | None:
    """The bytes by GPU that a process needs to come back: rather too many, as too few destroy it. None: unknown."""
    if record is None or not record.bytes:
        return None
    return dict(record.bytes) if record.measured else {uuid: size + SPARE for uuid, size in record.bytes.items()}


def _went(process: Process, sizes: Mapping[str, int] | None, seconds: float) -> str:
    size = format_size(sum(sizes.values())) if sizes is not None else "all that it had on its GPUs"
    return (
        f"process {process.pid} is suspended: {size} in host memory, {seconds:.1f} s\n"
        f"    `memguard resume {process.pid}` brings it back"
    )


def _said(process: Process, done: flow.Outcome) -> str:
    said = done.text or f"process {process.pid}: {done.end.value}"
    error = done.interruption
    return f"{said}\n    because of {type(error).__name__}: {error}" if isinstance(error, Exception) else said


def _state(done: flow.Outcome) -> str:
    known = {End.SUSPENDED: "suspended", End.RUNNING: "running", End.LOST: "lost", End.ENDED: "ended"}
    return known.get(done.end, "unknown")


def _code(done: flow.Outcome) -> int:
    if done.end in (End.UNKNOWN, End.ENDED):
        return UNKNOWN
    silent = done.end is End.UNTOUCHED and done.why is not None and done.why.trouble in ("start", "timeout", "died")
    return UNKNOWN if silent and done.why is not None and done.why.step is steps.Do.ASK else NO
