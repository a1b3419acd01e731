"""This machine: GPUs by NVML, the processes on them as `memguard ps` has them, and those that top may watch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from memguard._base.logs import text_of
from memguard._devices import proc
from memguard._devices.nvml import Nvml
from memguard._node import identity
from memguard._node.identity import Process
from memguard._node.suspend import processes, sockets
from memguard._node.suspend.driver.client import Client
from memguard._node.suspend.requests import SilentError
from memguard._node.top.server import KIND
from memguard._node.top.snapshot import Gpu, Listed, Snapshot, Target, off
from memguard._tools.top import client
from memguard.errors import DeviceError, MemguardError

LISTED = 10.0
"""Seconds between two listings: each looks at all of /proc, and may ask the driver."""
AGAIN = 5.0
"""Seconds until a process is asked again that did not answer."""
REMEMBERED = 60.0
"""Seconds for which one that has ended is still shown."""
_OR = "memguard top TIMELINE follows what a program wrote, on any machine"
_CALL = "memguard.checkpoint()"


class Card:
    """NVML, opened once."""

    def __init__(self) -> None:
        self._nvml = Nvml()

    def gpus(self) -> tuple[processes.Gpu, ...]:
        """Raises DeviceError."""
        return processes.gpus_of(self._nvml, busy=False)

    def close(self) -> None:
        self._nvml.close()


class Lister:
    """`memguard ps`, on a thread of its own: the driver may take its time. `found` is the last listing."""

    def __init__(self) -> None:
        self._client = Client()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.found: processes.Listing | None = None
        self.wrong: str | None = None

    def once(self) -> None:
        try:
            self.found, self.wrong = processes.listing(processes.read(lambda: self._client)), None
        except (MemguardError, OSError) as error:
            self.wrong = text_of(error)

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="memguard-top-ps", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self.once()
            self._over.wait(LISTED)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with contextlib.suppress(OSError):
            self._client.close()


class Machine:
    """`live`: the listing goes on on a thread. Without it, as for `--once`, each `read` waits for one."""

    def __init__(
        self,
        live: bool,
        clock: Callable[[], float] = time.time,
        *,
        card: Card | None = None,
        lister: Lister | None = None,
        where: str | None = None,
    ) -> None:
        self._clock, self._where = clock, where
        self._card, self._lister, self._live = card or Card(), lister or Lister(), live
        self._before: tuple[processes.Gpu, ...] = ()
        self._targets: dict[Process, tuple[Target, tuple[Gpu, ...]]] = {}
        self._later: dict[Process, float] = {}
        self._people: dict[int, processes.Person] = {}
        self._wrong: str | None = None

    def begin(self) -> None:
        """Raises DeviceError if there is nothing to show here."""
        try:
            self._before = self._card.gpus()
        except DeviceError as error:
            if not self._listening():
                raise DeviceError(error.advice.with_alternatives(_OR), missing=error.missing) from None
            return
        if self._live:
            self._lister.begin()

    def close(self) -> None:
        self._lister.close()
        self._card.close()

    def read(self) -> Snapshot:
        now = self._clock()
        gpus = self._gpus()
        if gpus and not self._live:
            self._lister.once()
        self._ask(now)
        told = [self._targets[process] for process in sorted(self._targets)]
        targets = tuple(target for target, _ in told)
        listing = self._lister.found
        notes = [self._wrong] if self._wrong else []
        notes += [f"processes are not listed: {self._lister.wrong}"] if self._lister.wrong else []
        notes += listing.unread if listing is not None else []
        shown = tuple(_gpu(gpu, targets, self._wrong is None) for gpu in gpus)
        own = {gpu.uuid for gpu in shown}
        extra = {gpu.uuid: gpu for _, found in told for gpu in found if gpu.uuid not in own}
        return Snapshot(now, True, (*shown, *extra.values()), targets, self._listed(gpus, listing), tuple(notes))

    def _gpus(self) -> tuple[processes.Gpu, ...]:
        """Those of before, if NVML fails now: what they hold is then unknown, and is shown so."""
        try:
            self._before, self._wrong = self._card.gpus(), None
        except DeviceError as error:
            self._wrong = error.advice.reason if self._before else None
        return self._before

    # processes that let themselves be watched

    def _listening(self) -> list[Process]:
        try:
            return client.listening(self._where)
        except (OSError, MemguardError):
            return []

    def _ask(self, now: float) -> None:
        listening = self._listening()
        for process in dict.fromkeys([*listening, *self._targets]):
            if self._later.get(process, 0.0) > now:
                continue
            try:
                self._targets[process] = client.snapshot(process, self._where)
                self._later.pop(process, None)
            except SilentError:
                self._silent(process, now, process in listening)
            except MemguardError as error:
                self._keep(process, "silent", now, error.advice.reason)

    def _silent(self, process: Process, now: float, listens: bool) -> None:
        """One that lives and has no socket any more is as one that has ended: its budget has."""
        if listens and identity.lives(process):
            self._keep(process, "silent", now, f"process {process.pid} does not answer")
            self._later[process] = now + AGAIN
            return
        self._keep(process, "ended", now)
        with contextlib.suppress(OSError, MemguardError):
            sockets.tidy(KIND, self._where)
        if process in self._targets and now - (self._targets[process][0].since or 0.0) > REMEMBERED:
            del self._targets[process]

    def _keep(self, process: Process, state: str, now: float, note: str | None = None) -> None:
        """Its last figures, with what is known of it now. One that never answered and has ended is not shown."""
        before = self._targets.get(process)
        if before is None and state == "ended":
            return
        key = f"{process.pid}-{process.start}"
        target, gpus = before or (Target(key, proc.command(process.pid) or "a process", process.pid, "silent"), ())
        since = target.since if target.state == state else now
        notes = (note,) if note else ()
        self._targets[process] = replace(target, state=state, since=since, notes=notes), gpus  # type: ignore[arg-type]

    # the others

    def _listed(self, gpus: Sequence[processes.Gpu], listing: processes.Listing | None) -> tuple[Listed, ...]:
        rows = {row.pid: row for row in listing.rows} if listing is not None else {}
        sizes: dict[int, dict[str, int | None]] = {}
        for gpu in gpus:
            for pid, size in gpu.processes.items():
                sizes.setdefault(pid, {})[gpu.uuid] = size
        found = []
        for pid, held in sizes.items():
            person, row = self._person(pid), rows.get(pid)
            state = row.state if row is not None and row.start == person.start else "running"
            budget = row.budget if row is not None else None
            found.append(Listed(pid, person.user or None, person.command or None, state, held, budget))
        for row in rows.values():
            if row.pid not in sizes and row.state != "running":
                about = Listed(row.pid, row.user or None, row.command or None, row.state, dict(row.bytes), row.budget)
                found.append(replace(about, since=row.since))
        self._people = {pid: person for pid, person in self._people.items() if pid in sizes}
        return tuple(found)

    def _person(self, pid: int) -> processes.Person:
        """Read once for each process: a PID may have become another's."""
        known = self._people.get(pid)
        if known is None or known.start != identity.start_of(pid):
            known = self._people[pid] = processes.person(pid)
        return known

    # keys

    def check(self, key: str) -> None:
        self._process(key)

    def trim(self, key: str, framework: str | None) -> str:
        process = self._process(key)
        client.trim(process, framework, self._where)
        return f"asked process {process.pid} to trim: it does so at its next {_CALL}"

    def resize(self, key: str, framework: str, cap: int) -> str:
        process = self._process(key)
        client.resize(process, framework, cap, self._where)
        return f"asked process {process.pid} to change the cap: it does so at its next {_CALL}"

    def _process(self, key: str) -> Process:
        for process, (target, _) in self._targets.copy().items():
            if target.key == key and target.state != "ended":
                return process
        raise MemguardError("the process, or its budget, has ended", fix="select another one")


def _gpu(gpu: processes.Gpu, targets: Sequence[Target], known: bool) -> Gpu:
    """`others`: what NVML counts beside the targets. They were read a moment later: never below 0."""
    held = [
        0 if off(target, share) else share.process
        for target in targets
        for share in target.shares
        if share.uuid == gpu.uuid and target.state != "ended"
    ]
    used, free = (gpu.used, gpu.free) if known else (None, None)
    sizes = [size for size in held if size is not None]
    others = None if used is None or len(sizes) < len(held) else max(used - sum(sizes), 0)
    reserved = None if used is None or free is None else max(gpu.total - used - free, 0)
    return Gpu(gpu.uuid, gpu.index, gpu.name, gpu.total, used, free, others, reserved, unified=gpu.used is None)
