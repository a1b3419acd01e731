"""Records what a program holds that has no budget: nothing is capped, and no allocator, setting or call is changed.

`arm` waits for the import of a framework, and costs nothing where there is none. From then on a thread samples the
GPUs and writes a timeline, with the allocators' own peaks. It sees what frameworks say of themselves: not what they
refuse, and not what PyCUDA and Numba hold, which count nothing without a budget.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from memguard._base import life

if TYPE_CHECKING:
    from memguard._base.types import Event, Sample
    from memguard._devices.host import Host

INTERVAL = 0.1
"""Seconds between two samples; more if they would take more than `_SHARE` of a core."""
_SHARE = 0.05
"""More than a monitor may take: a recording is for once, and misses what comes between two samples."""
MODULES = ("torch", "tensorflow", "cupy", "jax", "pycuda.driver", "numba.cuda")
"""The imports that begin the recording: the rows' `hook`s. Written out, as `arm` runs in Pythons without frameworks."""
_LOOK, _PATIENCE = 0.02, 600.0
"""Seconds between two looks whether the import has ended, and for which it may take."""
_HANGS = 0.5
"""Seconds after which a sample is taken to hang, at the end of the program."""
_LAST = 2.0
"""Seconds for which the end of a program waits at most for a recording that has not begun."""


def arm(path: str) -> None:
    """Record into `path`, with PID and rank in its name, once a framework is imported."""
    sys.meta_path.insert(0, _Finder(path))


class _Finder:
    """Finds nothing. The first look for a framework begins the recording."""

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _Beginning(self._path).start()
        return None


class _Beginning:
    """Begins the recording, on a thread of its own. A program that ends before that gets a line that says why."""

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self.begin, name="memguard-recorder", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            _say(f"nothing is recorded: {error}")
        else:
            life.at_exit(life.HookOrder.RECORDER, self.end)

    def begin(self) -> None:
        """Begin once a framework is there: this thread must not import beside its import."""
        try:
            until = time.monotonic() + _PATIENCE
            while not any(_is_imported(name) for name in MODULES):
                if self._ending.is_set() or time.monotonic() > until:
                    return
                self._ending.wait(_LOOK)
            from memguard._devices.real import RealHost

            recorder = Recorder(self._path, RealHost())
            if self._ending.is_set():  # frameworks are being torn down
                _say("nothing is recorded: the program ended before the first sample")
                return
            recorder.start()
        except Exception as error:
            _say(f"nothing is recorded: {error}")

    def end(self) -> None:
        """The program ends. Waits for what has not begun yet, so that it can say why."""
        if os.getpid() != self._pid:  # forked: the thread is not here
            return
        self._ending.set()
        with contextlib.suppress(KeyboardInterrupt):
            self._thread.join(_LAST)
            if self._thread.is_alive():
                _say("nothing is recorded: the program ended before the recording began")


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class Recorder:
    """One process's recording. `stop` may be called twice."""

    def __init__(self, path: str, host: Host, interval: float = INTERVAL) -> None:
        from memguard._base.types import DevicePlan, Plan
        from memguard._budget.ranks import rank_of
        from memguard._frameworks.specs import SPECS
        from memguard._ledger.reader import LedgerReader
        from memguard._runtime.pressure import Settings
        from memguard._runtime.sampler import Monitor
        from memguard._runtime.timeline_extras import Peaks
        from memguard._timeline import Writer

        # All of it is reserve: there are no caps, and overhead of any size is no matter for a warning.
        self._parts = [DevicePlan(one, one.usable, one.usable, {}, 0, "auto") for one in host.devices()]
        plan = Plan(tuple(self._parts), {}, ("recorded without a budget: nothing was capped",))
        self.reader = LedgerReader(host, tuple(SPECS), lambda sentence: None)
        rank = rank_of(os.environ)
        self._writer = Writer(path, plan, rank=rank, simulated=host.simulated, say=_say, begin=False)
        self._monitor = Monitor(
            self.take, lambda action: None, Settings(interval=interval, cpu=_SHARE), record=self.record
        )
        self._peaks, self._pid, self._taken = Peaks(every=1.0), os.getpid(), False
        self._here = threading.local()
        self._uncounted = {name: row.hook for name, row in SPECS.items() if row.uncounted}
        """What is imported to have one that counts nothing without a budget; the recording says when that is."""

    def start(self) -> None:
        self._writer.begin()
        life.at_fork(life.HookOrder.RECORDER, child=self._forked)
        with contextlib.suppress(Exception):  # the first sample imports much; the monitor would wait long after it
            self.record(self.take(), [])
        self._monitor.start()
        life.at_main_thread_end(self._last)
        life.at_exit(life.HookOrder.RECORDER, self.stop)

    def stop(self) -> None:
        """Ends the thread first: it must not look at frameworks that are being torn down."""
        self._monitor.stop()
        if not self._taken:  # by now frameworks may have ended by exit functions of their own
            self._last()
        self._writer.close()

    def _last(self) -> None:
        """One more sample: what came since the thread's last one would be in none. Raises nothing."""
        from memguard._devices import suspension

        if self._pid != os.getpid() or suspension.now is not None or sys.is_finalizing():
            return
        if self._monitor.wait_for_sample(_HANGS):
            with contextlib.suppress(Exception):
                self.record(self.take(relaxed=True), [], last=True)
                self._taken = True

    def _forked(self) -> None:
        self._monitor.forked()
        self._writer.forked()

    def take(self, relaxed: bool = False) -> Sample:
        """A sample, by the thread; `relaxed`: by the program's own."""
        from memguard._base.types import sample_of
        from memguard._devices import contexts

        here = self._here
        if not relaxed and not getattr(here, "relaxed", False):  # it may break no other thread's CUDA graph capture
            here.relaxed = contexts.relax()
        return sample_of((time.time(), tuple([self.reader.sample(part, {}) for part in self._parts])))

    def record(self, sample: Sample, events: list[Event], *, last: bool = False) -> None:
        from memguard._base.types import Event
        from memguard._tools.suggest.evidence import UNCOUNTED

        self._writer.sample(sample)
        for event in events:
            self._writer.event(event)
        for name in [name for name, hook in self._uncounted.items() if hook in sys.modules]:
            del self._uncounted[name]
            text = f"{name} was imported, and counts nothing without a budget"
            self._writer.event(Event(sample.time, UNCOUNTED, text, framework=name))
        if sample.devices and (last or self._peaks.due()):
            for event in self._peaks.events(sample.time, self.reader.peaks(), last=last):
                self._writer.event(event)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"memguard: {text}\n")
    except Exception:  # closed, or full
        return
