"""A process to be suspended: it has arrays of some frameworks, and runs its parent's commands, line by line.

python -m support.suspend_target FRAMEWORK..."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from support.suspend_arrays import Kept

HUNG = 40.0  # Seconds after which all stacks are written: a thread is waiting in the driver with the GIL.


class Api:
    """memguard's calls, and the steps within them."""

    def __init__(self) -> None:
        import memguard
        from memguard._node.suspend.course import flow

        self.memguard: Any = memguard
        self.parts: dict[str, float] = {}
        kind, back = flow._Flow, flow.bring_back
        tell = kind._tell

        def told(this: Any, step: str) -> None:
            tell(this, step)
            self.at(step, this.client)

        def brought(*args: Any, **kwargs: Any) -> Any:
            outcome = back(*args, **kwargs)
            self.parts = dict(outcome.parts)
            return outcome

        kind._tell, flow.bring_back = told, brought  # type: ignore[method-assign]
        self.at: Callable[[str, Any], object] = lambda step, client: None

    def suspend(self, timeout: float, host_memory: str | None = None) -> Any:
        return self.memguard.suspend(timeout=timeout, host_memory=host_memory)

    def resume(self, timeout: float | None, progress: Any) -> None:
        self.memguard.resume(timeout=timeout, progress=progress)

    def away(self) -> bool:
        from memguard._devices import suspension

        return suspension.now is not None

    def ledger(self) -> str:
        return str(self.memguard.ledger())

    def ungated(self) -> None:
        """The control: gates that block nobody."""
        from memguard._node.suspend.gates import gate

        close = gate.close
        gate.close = lambda owner=None, undo=None, given=None: close(owner, undo, ())


class Caller:
    """A thread that makes one kind of call on each request."""

    def __init__(self, name: str, call: Callable[[], Any], enter: Callable[[], None]) -> None:
        def named() -> Any:
            return call()

        named.__code__ = named.__code__.replace(co_name=f"call: {name}")  # faulthandler prints it after a crash
        self.name, self._call, self._enter = name, named, enter
        self.outcome, self.seconds = "", 0.0
        self.go, self.over = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def _run(self) -> None:
        self._enter()
        while True:
            self.go.wait()
            self.go.clear()
            begun = time.monotonic()
            try:
                self._call()
                self.outcome = "returned"
            except BaseException as error:
                self.outcome = f"{type(error).__name__}: {error}"[:200]
            self.seconds = time.monotonic() - begun
            self.over.set()


class Target:
    def __init__(self) -> None:
        self.api = Api()
        self.kept: list[Kept] = []
        self.callers: list[Caller] = []
        self.provoked: contextlib.ExitStack = contextlib.ExitStack()

    def begin(
        self, names: list[str], size: int = 0, large: int = 0, seed: int = 1, limit: str | None = None,
        timeline: str | None = None, by_others: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Create arrays of each framework; with `limit`, under a budget whose monitor samples every 100 ms."""
        if limit is not None:
            import memguard

            monitor = {"interval": "100ms", **({"timeline": timeline} if timeline else {})}
            share = f"{100 // len(names)}%"
            budget: dict[str, Any] = {
                "version": 1, "device": {"limit": limit}, "frameworks": {name: {"share": share} for name in names},
                "monitor": monitor,
            }  # fmt: skip
            if by_others:
                budget["suspend"] = {"by_others": True}
            memguard.init(budget)
        for number, name in enumerate(sorted(names, key=lambda name: name != "torch")):  # or TensorFlow breaks torch
            one = Kept(name)
            if size:
                one.random(size, seed + 100 * number)
            if large:
                one.large(large)
            self.kept.append(one)
        return self.check()

    def off(self, timeout: float = 60.0, host_memory: str | None = None) -> dict[str, Any]:
        begun = time.monotonic()
        found = self.api.suspend(timeout, host_memory)
        return {
            "seconds": time.monotonic() - begun, "parts": dict(found.parts), "bytes": sum(found.bytes.values()),
            "host": found.host,
        }  # fmt: skip

    def on(self, timeout: float | None = None) -> dict[str, Any]:
        waits: list[dict[str, Any]] = []

        def progress(wait: Any) -> None:
            if len(waits) < 200:
                waits.append({"free": wait.free, "needs": wait.needs, "holders": list(wait.holders)})

        begun = time.monotonic()
        try:
            self.api.resume(timeout, progress)
        except Exception as error:
            return {**failed(error), "waits": waits, "lost": bool(getattr(error, "lost", False))}
        return {"seconds": time.monotonic() - begun, "parts": self.api.parts, "waits": waits}

    def check(self) -> dict[str, Any]:
        return {"wrong": sum(one.wrong() for one in self.kept), "arrays": sum(one.count for one in self.kept)}

    def away(self) -> dict[str, Any]:
        return {"away": self.api.away()}

    def ledger(self) -> dict[str, Any]:
        return {"text": self.api.ledger()}

    def drop(self) -> dict[str, Any]:
        for one in self.kept:
            one.drop()
        return {}

    def load(self, names: list[str]) -> dict[str, Any]:
        """Import them before `begin`: it takes seconds and does not use the GPU."""
        for name in names:
            importlib.import_module(name)
        return {}

    def calls(self, skip: list[str], gates: bool = True) -> dict[str, Any]:
        """Start the calling threads, and let each make one call before the suspend."""
        if not gates:
            self.api.ungated()
        broken = {}
        for one in self.kept:
            for name, call in one.library.calls().items():
                if name in skip:
                    continue
                caller = Caller(name, call, one.library.enter)
                caller.go.set()
                if caller.over.wait(60) and caller.outcome == "returned":
                    self.callers.append(caller)
                else:
                    broken[name] = caller.outcome or "it does not return"
        return {"kinds": [caller.name for caller in self.callers], "broken": broken}

    def round(self, only: list[str] | None = None, seconds: float = 0.25) -> dict[str, Any]:
        """Suspend; make every call at once; resume; return the outcome of each call."""
        chosen = [caller for caller in self.callers if only is None or caller.name in only]
        faulthandler.dump_traceback_later(HUNG, exit=False)
        self.api.suspend(60.0)
        for caller in chosen:
            caller.over.clear()
            caller.outcome = ""
            caller.go.set()
        time.sleep(seconds)
        meanwhile = {caller.name: caller.outcome for caller in chosen}
        self.api.resume(60.0, None)
        faulthandler.cancel_dump_traceback_later()
        ends = {}
        for caller in chosen:
            ended = caller.over.wait(30)
            before = meanwhile[caller.name]
            if not ended:
                ends[caller.name] = "never returned"
            elif before.startswith("Suspended"):
                ends[caller.name] = "refused"
            elif before == "returned":
                ends[caller.name] = "went on"
            elif before or caller.outcome != "returned":
                ends[caller.name] = before or caller.outcome
            else:
                ends[caller.name] = "waited"
        return {"ends": ends}

    def broken(self, way: str, step: str, what: str, delay: float) -> dict[str, Any]:
        """Suspend or resume, with a SIGINT or the helper's death some seconds after a step began."""
        if way == "on":
            self.api.suspend(60.0)
        armed = [True]
        late: list[threading.Timer] = []

        def strike(client: Any) -> None:
            if what == "sigint":
                os.kill(os.getpid(), signal.SIGINT)
            elif client is not None and client.pid is not None:
                os.kill(client.pid, signal.SIGKILL)

        def at(told: str, client: Any) -> None:
            if told == step and armed[0]:
                armed[0] = False
                if delay:
                    late.append(threading.Timer(delay, strike, [client]))
                    late[0].start()
                else:
                    strike(client)

        self.api.at = at
        said: dict[str, Any] = {"error": None}
        begun = time.monotonic()
        try:
            if way == "off":
                self.api.suspend(60.0)
            else:
                self.api.resume(60.0, None)
            self._after(late)
        except BaseException as error:
            said = failed(error)
        finally:
            self.api.at = lambda told, client: None
            with contextlib.suppress(KeyboardInterrupt):
                self._after(late)
        return {
            "struck": not armed[0],
            "raised": said["error"] and f"{said['error']['exception']}: {said['error']['text']}",
            "away": self.api.away(),
            "seconds": time.monotonic() - begun,
        }

    @staticmethod
    def _after(late: list[threading.Timer]) -> None:
        """On a busy machine the interruption may come late: catch it here, not in later code."""
        for one in late:
            one.join()
            time.sleep(0.02)  # the signal's handler runs on this thread

    def at_restore(self, path: str, wait: float = 0.15) -> dict[str, Any]:
        """From now on, create a file when the room is reserved, and delay the restore a little."""

        def at(told: str, client: Any) -> None:
            if told == "restore":
                with open(path, "w"):
                    pass
                time.sleep(wait)

        self.api.at = at
        return {}

    def provoke(self, what: str) -> dict[str, Any]:
        from support import suspend_provoked

        self.provoked.enter_context(suspend_provoked.PROVOKED[what][0]())
        return {}

    def calm(self) -> dict[str, Any]:
        self.provoked.close()
        return {}


def failed(error: BaseException) -> dict[str, Any]:
    return {
        "error": {
            "exception": type(error).__name__,
            "text": str(error)[:600],
            "codes": [one[0] for one in getattr(error, "reasons", ())],
        }
    }


def lines() -> Iterator[str]:
    while True:
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            continue
        if not line:
            return
        yield line


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that started the tests may ignore it
    target = Target()
    for line in lines():
        asked = json.loads(line)
        try:
            answer = getattr(target, asked.pop("do"))(**asked)
        except BaseException as error:
            answer = failed(error)
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
