"""The process that makes every driver call and NVML call of a suspension.

    python -m memguard._node.suspend.driver.helper

JSON lines on stdin and stdout. A request is `{"id": 1, "op": "lock", "pid": 7, "start": 9, "limit": 30, …}`; `limit` is
in seconds. Each runs on a thread of its own, so that one that hangs does not stop the others. The answers:

    {"id": 1, "code": 0, "state": 2}    a CUresult, and for `state` the state
    {"id": 1, "ended": true}            that process has ended: nothing was called
    {"id": 1, "timeout": true}          no answer within `limit`; the call goes on
    {"id": 1, "error": "…"}             it cannot be done here
    {"event": "running", "pid": 7, "start": 9}   a watched process runs again, or "ended", "failed"

It ends when its stdin closes or its parent has ended, but not within an operation. A lock that nobody is left to undo
is undone then. So is one after which nothing is asked for `FORGOTTEN` seconds: who asked may be stopped by that very
lock, by a thread that waits in the driver with Python's interpreter lock. It has a session of its own and ignores
signals: a Ctrl-C in the terminal is for the program.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from memguard._devices.checkpoint import Checkpoint, State
from memguard._node.identity import Process, lives
from memguard.errors import MemguardError

_TICK = 0.5
"""Seconds between two looks at the parent, at deadlines and at watched processes."""
FORGOTTEN = 10.0
"""Seconds. A flow asks for the copy 2 s after the lock at the latest, and for the unlock at once after the restore."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGUSR1", "SIGUSR2", "SIGPIPE")
_CALLS = ("state", "lock", "checkpoint", "restore", "unlock")
_LOCKS = ("lock", "restore")
"""What leaves the process locked; the other two do not."""
_EVENTS = {State.RUNNING: "running", State.FAILED: "failed"}


class _Job:
    """A request that is under way."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.id, self.op = request.get("id"), str(request.get("op"))
        self.request = request
        self.deadline = time.monotonic() + float(request.get("limit", 60))
        self.answered = self.over = False


class Helper:
    """Serves requests from `read` to `write` until `read` closes, or `parent` is no longer its parent.

    `driver` is opened at the first need.
    """

    def __init__(self, read: int, write: int, driver: Callable[[], Checkpoint], parent: int) -> None:
        self._read, self._write, self._open, self._parent = read, write, driver, parent
        self._lock = threading.RLock()
        self._opening = threading.Lock()
        self._driver: Checkpoint | None = None
        self._nvml: Any = None
        self._stamps: dict[tuple[int, str], int] = {}
        """NVML's newest word on the use of a GPU (UUID) by a process (PID)."""
        self._holder: Any = None
        self._jobs: list[_Job] = []
        self._locked: dict[Process, float] = {}
        """Processes that this helper has locked, or restored, and not unlocked, each with the time."""
        self._watched: dict[Process, object] = {}

    def run(self) -> None:
        data, poll = b"", select.poll()
        poll.register(self._read, select.POLLIN)
        while os.getppid() == self._parent:
            now = time.monotonic()
            self._late(now)
            self._forgotten(now)
            next_one = min([job.deadline for job in self._jobs if not job.answered], default=now + _TICK)
            if not poll.poll(1000 * max(0.0, min(_TICK, next_one - now + 0.001))):
                continue
            got = os.read(self._read, 1 << 16)
            if not got:
                break
            *lines, data = (data + got).split(b"\n")
            for line in lines:
                self._begin(line)
        self._leave()

    def _begin(self, line: bytes) -> None:
        try:
            job = _Job(json.loads(line))
        except (ValueError, TypeError, AttributeError):
            return  # not of our client
        with self._lock:
            self._jobs = [other for other in self._jobs if not other.over]
            self._jobs.append(job)
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: _Job) -> None:
        try:
            answer = self._do(job)
        except MemguardError as error:
            answer = {"error": error.advice.reason, "fix": error.advice.fix}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        with self._lock:
            job.over = True
            self._answer(job, answer)

    def _late(self, now: float) -> None:
        with self._lock:
            for job in self._jobs:
                if now >= job.deadline and not job.over:
                    self._answer(job, {"timeout": True})

    def _forgotten(self, now: float) -> None:
        """Unlock what was locked and then forgotten. An unlock of what is not locked any more is harmless (401)."""
        with self._lock:
            if any(not job.over and job.op in _CALLS[1:] for job in self._jobs):
                return
            late = [process for process, since in self._locked.items() if now - since > FORGOTTEN]
            for process in late:
                del self._locked[process]
        for process in late:
            threading.Thread(target=self._checkpoint().unlock, args=(process.pid,), daemon=True).start()

    def _answer(self, job: _Job, answer: dict[str, Any]) -> None:
        if not job.answered:
            job.answered = True
            self._say({"id": job.id, **answer})

    def _say(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._write, data) :]
            except OSError:
                return  # the client has gone; `run` sees it too

    def _do(self, job: _Job) -> dict[str, Any]:
        request = job.request
        if job.op in _CALLS:
            process = Process(int(request["pid"]), int(request["start"]))
            return self._call(job.op, process, request)
        if job.op == "ping":
            self._checkpoint()
            return {"pid": os.getpid()}
        if job.op == "usage":
            return {"gpus": self._usage()}
        if job.op == "used":
            return {"used": self._used(int(request["pid"]))}
        if job.op == "hold":
            return {"held": self._room().hold({uuid: int(size) for uuid, size in request["bytes"].items()})}
        if job.op == "release":
            self._release()
            return {}
        if job.op in ("watch", "unwatch"):
            self._watch(Process(int(request["pid"]), int(request["start"])), job.op == "watch")
            return {}
        return {"error": f"no operation is called {job.op!r}"}

    def _checkpoint(self) -> Checkpoint:
        with self._opening:
            if self._driver is None:
                self._driver = self._open()
            return self._driver

    def _call(self, op: str, process: Process, request: dict[str, Any]) -> dict[str, Any]:
        driver = self._checkpoint()
        if not lives(process):
            return {"ended": True}
        if op == "state":
            code, state = driver.state(process.pid)
            return {"code": code, "state": None if state is None else int(state)}
        if op == "lock":
            code = driver.lock(process.pid, int(request["timeout_ms"]))
        else:
            if request.get("release"):
                self._release()  # at once before the restore: what is free now belongs to whoever is first
            code = {"checkpoint": driver.checkpoint, "restore": driver.restore, "unlock": driver.unlock}[op](
                process.pid
            )
        if code == 0:
            with self._lock:
                if op in _LOCKS:
                    self._locked[process] = time.monotonic()
                else:
                    self._locked.pop(process, None)
        return {"code": code}

    def _usage(self) -> dict[str, Any]:
        """What NVML says of each GPU, bytes: total, free, used, and those of each process, None where it does not."""
        nvml = self._opened()
        found = {}
        for device in nvml.devices():
            memory = nvml.memory(device.uuid)
            found[device.uuid] = {
                "total": memory.total,
                "free": memory.free,
                "used": memory.used,
                "processes": {str(pid): size for pid, size in nvml.processes(device.uuid).items()},
            }
        return found

    def _used(self, pid: int) -> bool | None:
        """Whether a process has used a GPU since that was asked last; None if NVML does not say."""
        nvml, answers = self._opened(), []
        for device in nvml.devices():
            key = pid, device.uuid
            if pid in nvml.processes(device.uuid):
                used, self._stamps[key] = nvml.used_since(device.uuid, pid, self._stamps.get(key, 0))
                answers.append(used)
        return True if True in answers else None if not answers or None in answers else False

    def _opened(self) -> Any:
        from memguard._devices.nvml import Nvml

        with self._opening:
            self._nvml = self._nvml or Nvml()
            return self._nvml

    def _room(self) -> Any:
        with self._opening:
            if self._holder is None:
                from memguard._devices.checkpoint import MemoryPlaceholder

                self._holder = MemoryPlaceholder()
            return self._holder

    def _release(self) -> None:
        if self._holder is not None:
            self._holder.release()

    def _watch(self, process: Process, wanted: bool) -> None:
        with self._lock:
            if not wanted:
                self._watched.pop(process, None)
                return
            mark = self._watched[process] = object()
        threading.Thread(target=self._look, args=(process, mark), daemon=True).start()

    def _look(self, process: Process, mark: object) -> None:
        """Until somebody has brought it back: also who is not of this program."""
        driver = self._checkpoint()
        while True:
            code, state = driver.state(process.pid)
            event = _EVENTS.get(state, "") if code == 0 and state is not None else ""
            if not lives(process):
                event = "ended"
            with self._lock:
                if self._watched.get(process) is not mark:
                    return
                if event:
                    del self._watched[process]
                    self._say({"event": event, **process._asdict()})
                    return
            time.sleep(_TICK)

    def _leave(self) -> None:
        """End, once no operation is under way: one that nobody waits for any more, too."""
        while True:
            with self._lock:
                under_way = [job for job in self._jobs if not job.over and job.op in _CALLS[1:]]
            if not under_way:
                break
            time.sleep(0.02)
        for process in self._locked:
            if lives(process):
                self._checkpoint().unlock(process.pid)  # 401 if it is no longer locked, which does no harm


def main(parent: int | None = None) -> None:
    """`parent`: the PID of who started it, which may have ended already."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # A library that prints must not do it into the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        Helper(0, answers, _driver, parent or os.getppid()).run()
    finally:
        os._exit(0)  # not through the exits of libcuda, in which a call that hangs would be waited for


def _driver() -> Checkpoint:
    from memguard._devices.checkpoint import Driver

    return Driver()


if __name__ == "__main__":
    main()
