"""The states of this process's budget, and the transitions by `init`, `guard`, `shutdown`, `suspend` and fork.

    Empty ──init──▶ Starting ──▶ Active ──shutdown──▶ Empty
      └─ nothing is applied (MEMGUARD_DISABLE, no GPU) ─▶ Idle        Active ──suspend──▶ Suspended ──resume──▶ Active
    A fork changes Active and Starting to Forked in the child.

`this` is the `Runtime` of this process, which the public functions in `memguard.api` call. A `Session` runs one budget;
its `Guard` applies the caps to the frameworks' allocators.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args

from memguard._base import life
from memguard._base.advice import Advice
from memguard._base.locks import InterruptSafeLock, LockOrder, free, ordered
from memguard._base.logs import is_heard
from memguard._base.logs import log as _log
from memguard._devices import suspension
from memguard._frameworks import import_hook
from memguard._guard.guard import Guard
from memguard._runtime import extensions, workers
from memguard._runtime.session import Session, outlived, sample_callbacks
from memguard._runtime.workers import IdleGuard
from memguard.errors import AlreadyActive, DeviceError, MemguardError, NotActive

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._devices.host import Host
    from memguard._runtime.extensions import BudgetLease

BudgetLike = Union["str | os.PathLike[str] | Mapping[str, Any] | Budget"]
MissingGpu = Literal["raise", "warn", "simulate"]

_NONE = Advice("no budget is active in this process", "call memguard.init('budget.yaml') first")
_FORKED = Advice(
    "no budget is active in this process: it was forked from one that has a budget, and a budget belongs to one "
    "process",
    "call memguard.init here, for a budget of its own",
)
_WITHOUT = 'try it without a GPU: simulate="h200" (`memguard run --device h200`)'
_MISSING = (
    'go on without a GPU: missing_gpu="warn" (no budget) or missing_gpu="simulate", or set '
    f"{workers.DISABLE}=1 or {workers.SIMULATE}=h200"
)
_DISABLED = f"no budget is active, and nothing caps this program: {workers.DISABLE} is set"
_STAND_IN = "h200"
"""The GPU that `missing_gpu="simulate"` simulates: the model on which memguard's figures were measured."""
_FREED = 3.0
"""After the lease of an ended process is free, the most seconds to wait until the driver has freed the memory."""
_PATIENCE = 5.0
"""The most seconds that a public call waits for an `init` on another thread."""


class Empty:
    """No budget is active: calls that need a budget raise NotActive with the reason `why`. Base class of the states."""

    session: Session | None = None
    """The session of a budget that is in effect, is being applied, or is not completely undone; else None."""
    idle: IdleGuard | None = None

    def __init__(self, why: Advice = _NONE) -> None:
        self.why = why

    def guard(self) -> Guard:
        """The guard, which implements `ledger`, `require` and other public calls. Raises NotActive without a budget."""
        return self.need_session().guard

    def need_session(self) -> Session:
        """The session. Raises NotActive without one."""
        if self.session is None:
            raise NotActive(self.why)
        return self.session

    def checkpoint(self) -> None:
        """Implements `memguard.checkpoint`. Raises NotActive without a session."""
        self.need_session().checkpoint()

    def check(self, what: str) -> None:
        """Raise Suspended if the process is suspended and its budget cannot change. `what` names the public call."""

    def without_session(self) -> Empty:
        """The state after the budget has ended."""
        return self


class Forked(Empty):
    """This process was forked from a process with a budget, and has no budget itself."""


class Idle(Empty):
    """`init` applied no budget because of MEMGUARD_DISABLE or a missing GPU (`missing_gpu="warn"`). Public calls do
    nothing."""

    def __init__(self, guard: IdleGuard, why: Advice) -> None:
        super().__init__(why)
        self.idle: IdleGuard = guard

    def guard(self) -> Guard:
        return self.idle

    def checkpoint(self) -> None:
        pass


class Active(Empty):
    """A budget is in effect, or an interruption left it partly undone. The next `init` or `shutdown` completes
    the undo.

    `otherwise` is the state after the budget has ended.
    """

    def __init__(self, session: Session, otherwise: Empty) -> None:
        self.why = otherwise.why
        self.session: Session = session
        self.idle = otherwise.idle
        self._otherwise = otherwise

    def guard(self) -> Guard:
        return self.session.guard

    def without_session(self) -> Empty:
        return self._otherwise


class Starting(Active):
    """`init` is applying a budget. Public calls on other threads wait for `init`."""


class Suspended(Empty):
    """The process is suspended; its budget stays in effect. The guard's methods return the last reading or raise
    Suspended."""

    def __init__(self, inner: Empty) -> None:
        super().__init__(inner.why)
        self.session, self.idle, self._inner = inner.session, inner.idle, inner

    def guard(self) -> Guard:
        return self._inner.guard()

    def check(self, what: str) -> None:
        suspension.check(what)


class Runtime:
    """The budget of one process. Methods that change `state` hold `lock`; reading `state` needs no lock."""

    def __init__(self) -> None:
        self.lock: InterruptSafeLock = ordered(InterruptSafeLock(), LockOrder.RUNTIME)
        self.extensions: Mapping[str, str] = {}
        """The table of extensions, which `memguard.api` sets. See `extensions.load`."""
        self.simulated_by_default: Sequence[str] | None = None
        """The simulated GPUs of `memguard run --device`, which the program's own `init` uses too."""
        self.from_environment: Guard | None = None
        """The guard of the budget in MEMGUARD_CONFIG. The program's `init` replaces it without `replace=True`."""
        self.claimed: list[BudgetLease] = []
        """While `init` runs: the leases that it has claimed or taken over from the previous budget."""
        self.applying = False
        """True while `init` runs."""
        self.claiming = False
        """True while `init` waits for a lease. `shutdown` ends the wait."""
        self._shutdown_requested = False
        """True if `shutdown` was called during `init`, by a signal handler or another thread."""
        self._environment: Any = sys.modules.get("_memguard_environment")
        """The module that applies MEMGUARD_CONFIG; None if the variable was not set when Python started."""
        self._state = Empty()

    # the current state

    @property
    def state(self) -> Empty:
        return self._state if suspension.now is None else Suspended(self._state)

    @property
    def session(self) -> Session | None:
        """The session of a budget that is in effect (`session.active`), being applied, or being undone; else None."""
        return self._state.session

    @property
    def idle(self) -> IdleGuard | None:
        """The guard of the Idle state; None in other states."""
        return self._state.idle

    @property
    def was_forked(self) -> bool:
        """True in a forked child that has not applied a budget itself."""
        return self._state.why == _FORKED

    def state_for_call(self) -> Empty:
        """The state for a public call, after applying MEMGUARD_CONFIG and waiting for an `init` on another thread."""
        state = self._state
        if type(state) is Active or type(state) is Idle:
            return state
        if self._environment is not None and state.session is None and workers.disabled(os.environ):
            self._stay_idle(_DISABLED, os.environ.get("MEMGUARD_CONFIG", ""))  # MEMGUARD_CONFIG names the only budget
            return self._state
        return self._awaited()

    def need_session(self) -> Session:
        """The session of the budget in effect. Raises NotActive without a budget, also in the Idle state."""
        state = self._state
        return (state if type(state) is Active else self._awaited()).need_session()

    def _awaited(self) -> Empty:
        if self._environment is not None:
            self._environment.activate()
        if type(self._state) is Starting:
            # Wait with a timeout: `init` on another thread may be waiting for an import lock that this thread holds.
            free(self.lock, _PATIENCE)
        state = self._state
        why = getattr(self._environment, "why", None)
        return Empty(Advice(*why)) if why and state.session is None and state.idle is None else state

    # init

    def init(
        self, budget: BudgetLike, replace: bool, simulate: str | Sequence[str] | None, missing_gpu: MissingGpu
    ) -> tuple[Guard, Session | None]:
        """Implements `memguard.init`. Returns the guard, and the session if this call began it, else None."""
        if missing_gpu not in get_args(MissingGpu):
            raise ValueError(f"missing_gpu is 'raise', 'warn' or 'simulate', found {missing_gpu!r}")
        if simulate is None and self.simulated_by_default is None and workers.disabled(os.environ):
            return self._stay_idle(_DISABLED, budget), None
        if not workers.wanted(workers.reimporting(sys.modules), os.environ):
            return self._stay_passive(), None
        from memguard import _budget

        loaded = _budget.of(budget)
        simulate = self._simulated_by_default() if simulate is None else simulate
        with self.lock:
            if not self.applying:
                self.applying = True
                try:
                    return self._apply(loaded, simulate, replace, missing_gpu)
                finally:
                    self.applying = False
                    self._release_unused_leases()
            state = self._state
            if isinstance(state, Starting) and _same(state.session, loaded, simulate):
                self._shutdown_requested = False  # this `init` cancels an earlier `shutdown`
                return state.session.guard, None
            raise AlreadyActive(
                "memguard.init is at work on this thread, and was called within that by a signal handler, a log "
                "handler or a finalizer",
                fix="call it once the other call has returned",
            )

    def _apply(
        self, loaded: Budget, simulate: str | Sequence[str] | None, replace: bool, missing_gpu: MissingGpu
    ) -> tuple[Guard, Session | None]:
        """Apply the budget, for `init`. Callers hold the lock."""
        self._shutdown_requested = False
        before = self._in_effect()
        if before is not None:
            now = before.guard
            if _same(before, loaded, simulate):
                return now, None
            if outlived(before):
                raise AlreadyActive(
                    "another budget became active while this function ran for one that is over",
                    fix="memguard.init(..., replace=True) on a thread of the program",
                )
            if not replace and now is not self.from_environment:
                which = f": that of {now.budget.source}" if now.budget.source else ""
                raise AlreadyActive(
                    f"another budget is active in this process{which}",
                    fix="memguard.shutdown() first, or memguard.init(..., replace=True)",
                )
        self.state.check("memguard.init")
        why = None
        try:
            session = self._planned(loaded, simulate, before)  # before any change, because the budget may not fit
        except DeviceError as error:
            if missing_gpu == "raise" or not error.missing:
                raise
            why = str(error.advice.with_alternatives())
        if why is not None:  # outside `except`, so that errors raised below do not have `error` as context
            if missing_gpu == "warn":
                idle = self._stay_idle(f"no budget is active, and nothing caps this program: {why}", loaded, loud=True)
                return idle, None
            session = self._without_gpu(loaded, before, why)
        kept = before.lease if before is not None else None
        if kept is not None:  # keep the lease: if the new budget fails, the previous one is applied again
            self.claimed.append(kept)
            kept.kept = True
        if before is not None:
            before.guard.stop()
        try:
            self._start(session)
        except BaseException:
            session.guard.stop()
            self._in_effect()
            if before is not None:
                again = self._again(before.guard, kept)
                if before.guard is self.from_environment:
                    self.from_environment = again.guard if again is not None else None
            raise
        if self.session is session:  # False in a child that was forked within `_start`
            self._state = Active(session, Empty())
        self.from_environment = None
        if self._environment is not None:
            self._environment.disarm()
        return session.guard, session

    def _planned(self, budget: Budget, simulate: str | Sequence[str] | None, before: Session | None) -> Session:
        """Create the session: plan the budget for its GPUs and claim its lease, without applying any cap."""
        host: Host | None = None
        try:
            host = open_host(simulate)
            session = Session(Guard(budget, host), extensions.load(budget, self.extensions))
            session.prepare(before)
            if session.lease is not None:
                self._claim(session.lease, session)
        except BaseException as error:
            if host is not None:
                host.close()
            if isinstance(error, DeviceError) and (simulate is None if host is None else not host.simulated):
                # If `open_host` failed (`host` is None), its error already suggests simulated GPUs.
                more = [_WITHOUT] if host is not None else []
                more += [_MISSING] if error.missing else []
                raise DeviceError(error.advice.with_alternatives(*more), missing=error.missing) from None
            raise
        return session

    def _claim(self, lease: BudgetLease, session: Session) -> None:
        """Claim the lease, waiting for at most `device.wait` seconds. Holds the lock meanwhile, so that `init` and
        `shutdown` on other threads wait too."""
        self.claimed.append(lease)
        try:
            self.claiming = True
            say = _log.warning if is_heard() else import_hook.to_stderr
            wait = session.guard.budget.device.wait or 0.0
            if lease.take(wait, say, lambda: self._shutdown_requested, session.while_waiting(say)):
                until = time.monotonic() + _FREED
                while any(session.guard.busy()) and time.monotonic() < until and not self._shutdown_requested:
                    time.sleep(0.05)
        finally:
            self.claiming = False

    def _release_unused_leases(self) -> None:
        """Release the leases in `claimed`, except the lease of the budget in effect."""
        active = self._state.session
        own = active.lease if active is not None and active.active else None
        for lease in [*self.claimed]:
            lease.kept = False
            if lease is not own:
                lease.close()
            if lease in self.claimed:
                self.claimed.remove(lease)

    def _without_gpu(self, budget: Budget, before: Session | None, why: str) -> Session:
        """Create the session on a simulated GPU instead of the missing real one. Prints a warning on stderr."""
        session = self._planned(budget, _STAND_IN, before)
        session.simulated_stand_in = True
        import_hook.warned = True
        import_hook.to_stderr(
            f"a simulated {_STAND_IN} stands in for the missing GPU: nothing limits a real one: {why}"
        )
        return session

    def _start(self, session: Session) -> None:
        """Make the session current and start it. `_in_effect` undoes an interrupted start. Callers hold the lock."""
        try:
            # Set before `start`, because an import on another thread may call memguard while `start` runs.
            self._state = Starting(session, self._state.without_session())
            session.start()
        finally:
            if self.session is session:  # False in a child that was forked within `start`
                self._state = Active(session, self._state.without_session())
        if self._shutdown_requested:  # `shutdown` was called during `start`
            session.guard.stop()

    def _in_effect(self) -> Session | None:
        """The session of the budget in effect, or None. First completes an interrupted undo. Callers hold the lock."""
        if self.claimed and not self.applying:
            self._release_unused_leases()
        found = self._state.session
        if found is None or found.active:
            return found
        found.guard.stop()
        self._forget(found)
        return None

    def _forget(self, session: Session) -> None:
        if self.session is session and session.guard.undone:
            self._state = self._state.without_session()

    def _again(self, before: Guard, lease: BudgetLease | None) -> Session | None:
        """Apply the previous budget again after its replacement failed. Returns None if this fails too."""
        session: Session | None = None
        try:
            session = Session(Guard(before.budget, before.host), extensions.load(before.budget, self.extensions))
            session.guard.plan = before.plan  # includes changes by `memguard.resize`
            if lease is not None:
                session.set_lease(lease)
            self._start(session)
        except MemguardError as error:
            if session is not None:
                session.guard.stop()
            self._in_effect()
            # As text: a log handler that stores records would keep the error object, its causes and their frames alive.
            _log.warning("no budget is active any more: the one before could not be applied again: %s", str(error))
            return None
        return session

    # the Idle state
    def _stay_idle(self, why: str, budget: BudgetLike, *, loud: bool = False) -> Guard:
        """Enter the Idle state for the reason `why`, and return its guard. `loud` logs at level warning, not info.

        If a budget is in effect, the state stays, and the guard of the budget in effect is returned.
        """
        state = self._state
        before, found = state.idle, state.session
        if found is not None and found.active:
            _log.log(
                logging.WARNING if loud else logging.INFO,
                "the budget that was active stays, and this one is not applied: %s",
                why,
            )
            return found.guard
        if before is not None and (before.why, before.given) == (why, budget):
            return before
        idle = IdleGuard(why, budget)
        self._state = self._with(Idle(idle, state.why))
        if before is None or before.why != why:
            if not loud:
                _log.info("%s", why)
            elif is_heard():
                _log.warning("%s", why)
            else:
                import_hook.to_stderr(why)
        return idle

    def _stay_passive(self) -> Guard:
        """Apply no budget and access no GPU. Called in a multiprocessing worker that imports the program's script.

        Returns a `PassiveGuard`, or the guard of a budget in effect.
        """
        state = self._state
        if state.session is not None and state.session.active:
            return state.session.guard
        self._state = self._with(Empty(workers.WHY) if state.idle is None else Idle(state.idle, workers.WHY))
        _log.debug("memguard.init applies nothing while multiprocessing imports the script again in a worker")
        return workers.PassiveGuard()

    def _with(self, otherwise: Empty) -> Empty:
        """A copy of the state that changes to `otherwise` when its budget ends; without a budget, `otherwise`."""
        state = self._state
        return type(state)(state.session, otherwise) if isinstance(state, Active) else otherwise

    # the end

    def shutdown(self) -> list[str]:
        """Implements `memguard.shutdown`. Returns the list that `Guard.stop` returns; empty without a budget."""
        if self.claiming:  # ends the wait of an `init` on another thread or in an outer call
            self._shutdown_requested = True
        with self.lock:
            if outlived(self.session):
                _log.debug("memguard.shutdown of a budget that is over: the one that came after it stays")
                return []
            if self.claimed and not self.applying:
                self._release_unused_leases()
            if self.session is not None:
                self.state.check("memguard.shutdown")  # the undo steps access the GPUs
            self._end_idling()
            if self._environment is not None:
                self._environment.disarm()
            self._shutdown_requested = True  # for an `init` that this call, in a signal handler, interrupted
            found = self.session
            # In the state Starting, a signal handler called this during `init`, which stops the guard afterwards.
            if found is None or isinstance(self._state, Starting):
                return []
            stays = found.guard.stop()  # also completes an interrupted undo
            self._forget(found)
            return stays

    def _end_idling(self) -> None:
        state = self._state
        if state.idle is not None:
            self._state = self._with(Empty(state.why))

    def end_of(self, session: Session | None, idle: Guard | None, error: BaseException | None) -> None:
        """End the session or Idle state that a `with` block began, if it is still current.

        `error` is the exception that the block raised, or None. With an `error`, a failure here is only logged, so that
        it does not replace `error`.
        """
        if (session is None or self.session is not session) and (idle is None or idle is not self.idle):
            return  # nothing to end
        try:
            with self.lock:
                if session is not None and self.session is session:
                    self.shutdown()
                if idle is not None and idle is self.idle:
                    self._end_idling()
        except Exception as failure:
            if error is None:
                raise
            _log.warning("the budget of a block could not be ended: %s", str(failure))

    def forked(self) -> None:
        """Reset in a forked child: no budget, and a new lock, because a parent's thread may have held the old lock."""
        self.lock, self.claiming, self.applying = ordered(InterruptSafeLock(), LockOrder.RUNTIME), False, False
        self.claimed.clear()
        sample_callbacks.clear()  # callbacks may depend on threads of the parent
        before = self.session
        if before is None:
            return
        self._state = Forked(_FORKED)
        before.forked()
        if workers.from_fork_server(sys.modules, sys.orig_argv):  # the parent is multiprocessing's fork server
            self._state = Forked(workers.FROM_FORK_SERVER)
            _log.warning("%s", workers.FROM_FORK_SERVER)
            return
        _log.debug("forked: memguard is inert in the child; call memguard.init there for a budget of its own")

    # GPUs

    def _simulated_by_default(self) -> Sequence[str] | None:
        """The simulated GPUs of `memguard run --device`, else of MEMGUARD_SIMULATE; None without either. Prints GPUs of
        MEMGUARD_SIMULATE on stderr once."""
        if self.simulated_by_default is not None:
            return self.simulated_by_default
        names = workers.simulated(os.environ)
        if names is None:
            return None
        from memguard._devices import catalog

        try:
            for name in names:
                catalog.models(name)
        except DeviceError as error:  # raise for an invalid name before printing
            raise DeviceError(error.advice.within(workers.SIMULATE)) from None
        if not import_hook.warned:
            import_hook.warned = True
            import_hook.to_stderr(f"simulated GPUs ({', '.join(names)}): nothing limits a real one")
        return names


def _same(active: Session, budget: Budget, simulate: str | Sequence[str] | None) -> bool:
    if active.guard.budget != budget:
        return False
    return simulated_names(active.guard.host) == _names(simulate) or (active.simulated_stand_in and simulate is None)


def _names(simulate: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if simulate is None:
        return None
    names: Sequence[object] = simulate if isinstance(simulate, (list, tuple)) else [simulate]
    for name in names:
        if not isinstance(name, str):
            text = f"simulate names GPUs as text, found {name!r}"
            raise DeviceError(text, fix="simulate='h200', or a list of names")
    from memguard._devices.catalog import canonical

    return tuple(canonical(str(name)) for name in names)


def simulated_names(host: Host) -> tuple[str, ...] | None:
    """The names of the simulated GPUs of `host`; None for real GPUs."""
    return getattr(host, "names", ()) if host.simulated else None


def open_host(simulate: str | Sequence[str] | None) -> Host:
    """Open this process's GPUs, or simulated GPUs of the models that `simulate` names. Raises DeviceError."""
    names = _names(simulate)
    if names is not None:
        from memguard._devices.simulated import SimulatedHost

        return SimulatedHost(names)
    from memguard._devices.real import RealHost

    return RealHost()


this = Runtime()
life.at_fork(life.HookOrder.BUDGET, child=this.forked)
