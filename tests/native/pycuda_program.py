"""A random program of the real PyCUDA under a budget, over the stub of libcuda: started by test_pycuda.py.

`python pycuda_program.py KIND SEED STEPS`, with KIND one of `plain`, `signals`, `finalizers`, `threads`, `contexts`.
It prints how many requests it made, how many an idle block served, and how many were refused, and fails at the first
figure that is not the driver's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import threading
from typing import Any

import pycuda.driver as drv
from support.capping import apply_caps

from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.pycuda.adapter import PyCUDA

MIB, PAGE = 1 << 20, 2 << 20
CAP = 40 * MIB


class Host(SimulatedHost):
    simulated = False


class Program:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.dice = kind, random.Random(seed)
        self.stub = ctypes.CDLL("libcuda.so.1")
        for name in ("stub_taken", "stub_most"):
            getattr(self.stub, name).restype = ctypes.c_size_t
        drv.init()
        host = Host(["h200"])
        self.gpu = host.devices()[0]
        self.framework = PyCUDA(host)
        self.applied = apply_caps(
            self.framework, {self.gpu.uuid: CAP}, {"context": "own"} if kind == "contexts" else {}
        )
        self.contexts = [drv.Device(0).retain_primary_context()]
        self.contexts[0].push()
        self.pools = [drv.DeviceMemoryPool() for _ in range(2)]
        self.sizes = self.pools[0]
        self.live: list[Any] = []
        self.by_hand: list[Any] = []
        self.requests = self.hits = self.refusals = self.nested = 0

    def allocate(self, dice: random.Random, live: list[Any]) -> None:
        size = dice.choice([1, 1024, 700_000, 3 * MIB, 5 * MIB, dice.randint(1, 9 * MIB)])
        way = dice.choice([drv.mem_alloc, *(pool.allocate for pool in self.pools)])
        self.requests += 1
        before = self.stub.stub_taken()
        try:
            live.append(way(size))
        except drv.MemoryError:
            self.refusals += 1
            if self.kind in ("plain", "contexts"):
                self.judge(size)
        else:
            self.hits += before == self.stub.stub_taken()

    def judge(self, size: int) -> None:
        """After a refusal: nothing that could have gone lies idle, and the request did not fit."""
        block = self.sizes.alloc_size(self.sizes.bin_number(size))
        mine = [*self.pools, *(pool.own for pool in self.framework._own.values())]
        if self.kind == "plain":
            assert all(pool.held_blocks <= 1 for pool in mine)
        empty = any(not pool.managed_bytes for pool in mine)  # its first block comes with one of a byte
        room = CAP - self.stub.stub_taken()
        assert self.kind != "plain" or -(-block // PAGE) * PAGE + PAGE * empty > room, (size, room)

    def step(self, dice: random.Random, live: list[Any]) -> None:
        what = dice.random()
        if what < 0.5:
            self.allocate(dice, live)
        elif what < 0.8 and live:
            live.pop(dice.randrange(len(live)))
        elif what < 0.9 and live:
            freed = live.pop(dice.randrange(len(live)))
            freed.free()
            if dice.random() < 0.5:
                self.by_hand.append(freed)
        elif what < 0.92:
            self.by_hand.clear()
        elif what < 0.94:
            dice.choice(self.pools).free_held()
        elif what < 0.95:
            self.framework.trim(self.gpu)
        elif what < 0.96:
            self.trim_partly(dice)
        elif what < 0.97 and self.kind == "plain" and dice.random() < 0.2:
            number = dice.randrange(len(self.pools))
            self.pools[number].stop_holding()
            self.pools[number] = drv.DeviceMemoryPool()
        else:
            self.framework.usage(self.gpu)

    def trim_partly(self, dice: random.Random) -> None:
        """Asked for a part: it comes, and little more. The stub has whole pages only, one for each small block."""
        needed = dice.choice([1, PAGE, 3 * MIB, dice.randint(1, CAP)])
        before, usage = self.stub.stub_taken(), self.framework.usage(self.gpu)
        self.framework.trim_partly(self.gpu, needed)
        if self.kind == "plain" and usage is not None and usage.reclaimable is not None:
            got, pools = before - self.stub.stub_taken(), len(self.framework._pools(self.gpu.uuid))
            assert got >= min(needed, usage.reclaimable - PAGE * pools), (got, needed, usage)
            assert got < needed + 12 * MIB + PAGE * pools, (got, needed, usage)

    def check(self, settled: bool = True) -> None:
        taken = self.stub.stub_taken()
        # What allocates within an allocation may leave a pool with one idle block too many, which is a page of the
        # stub's, until the next request that has to ask the driver.
        assert taken <= CAP + PAGE * (self.kind in ("signals", "finalizers")), taken
        usage = self.framework.usage(self.gpu)
        if usage is None:
            return
        assert usage.held is not None and usage.held >= self.stub.stub_taken(), "the books have all that there is"
        if not settled:
            return
        assert usage.held == self.stub.stub_taken(), (usage, self.stub.stub_taken())
        pools = self.framework._pools(self.gpu.uuid)
        assert usage.in_use == sum(pool.active_bytes() for pool in pools)
        managed = sum(pool.reference().managed_bytes for pool in pools)
        known = sum(found.size * len(found.held) for pool in pools for found in pool._bins.values())
        assert managed == known, (managed, known)

    def plain(self, steps: int) -> None:
        for number in range(steps):
            before = self.framework.usage(self.gpu) if number % 50 == 0 else None
            if before is not None and before.reclaimable is not None:
                taken, pools = self.stub.stub_taken(), len(self.framework._pools(self.gpu.uuid))
                self.framework.trim(self.gpu)
                gone = taken - self.stub.stub_taken()
                assert before.reclaimable - PAGE * pools <= gone <= before.reclaimable, (before, gone)
            self.step(self.dice, self.live)
            self.check()

    def contexts_too(self, steps: int) -> None:
        """A context beside the primary one comes and goes, with the handle of the one before it."""
        for _ in range(steps // 40):
            own = drv.Device(0).make_context()
            pools, self.pools = self.pools, []
            live: list[Any] = []
            for _ in range(15):
                self.step_here(live)
            live.clear()
            own.detach()
            self.pools = pools
            taken = self.stub.stub_taken()
            assert taken == sum(
                -(-found.size // PAGE) * PAGE * len(found.held)
                for pool in self.framework._pools(self.gpu.uuid)
                for found in pool._bins.values()
            ), "what was in the context is gone"
            for _ in range(25):
                self.step(self.dice, self.live)
                self.check()

    def step_here(self, live: list[Any]) -> None:
        if live and self.dice.random() < 0.4:
            live.pop()
        else:
            self.allocate(self.dice, live)
            if live:
                found = ctypes.c_uint64()
                at = ctypes.c_uint64(int(live[-1]))
                assert self.stub.cuPointerGetAttribute(ctypes.byref(found), 7, at) == 0, "a block that is not there"
        assert self.stub.stub_taken() <= CAP

    def signals(self, steps: int) -> None:
        dice, live = random.Random(self.dice.random()), []

        within = []

        def handle(*_: object) -> None:
            if not within:
                within.append(True)
                self.nested += 1
                for _ in range(3):
                    self.step(dice, live)
                within.clear()

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        for _ in range(steps):
            self.step(self.dice, self.live)
            within.append(True)  # blocking it for this thread is not enough: another, as NumPy's, may receive it
            self.check(settled=False)
            within.clear()
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        live.clear()

    def finalizers(self, steps: int) -> None:
        dice, live, program = random.Random(self.dice.random()), [], self

        class Cycle:
            def __init__(self) -> None:
                self.itself, self.array = self, None

            def __del__(self) -> None:
                program.nested += 1
                program.step(dice, live)

        gc.set_threshold(15, 2, 2)
        for _ in range(steps):
            cycle = Cycle()
            with contextlib.suppress(drv.MemoryError):
                cycle.array = drv.mem_alloc(3000)
            del cycle
            self.step(self.dice, self.live)
            gc.disable()
            self.check(settled=False)
            gc.enable()
        gc.set_threshold(700)
        gc.collect()
        live.clear()

    def threads(self, steps: int) -> None:
        context, errors = drv.Context.get_current(), []

        def work(seed: int) -> None:
            dice, live = random.Random(seed), []
            context.push()
            try:
                for _ in range(steps):
                    what = dice.random()
                    if what < 0.55:
                        self.allocate(dice, live)
                    elif live:
                        live.pop(dice.randrange(len(live)))
                    elif what > 0.98:
                        self.framework.trim(self.gpu)
                    elif what > 0.96:
                        self.trim_partly(dice)
                    else:
                        self.framework.usage(self.gpu)
                    if self.stub.stub_taken() > CAP + 2 * PAGE:  # others are within a call
                        raise AssertionError(self.stub.stub_taken())
                live.clear()
            except BaseException as error:
                errors.append(error)
            finally:
                drv.Context.pop()

        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work, args=(self.dice.random(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def main(kind: str, seed: int, steps: int) -> None:
    program = Program(kind, seed)
    getattr(program, {"contexts": "contexts_too"}.get(kind, kind))(steps)
    program.live.clear()
    program.by_hand.clear()
    gc.collect()
    for pool in program.framework._pools(program.gpu.uuid):
        pool.free_if_unknown()  # as the next request that idle blocks cannot serve
    program.check()
    program.framework.trim(program.gpu)
    assert program.framework.usage(program.gpu).in_use == 0  # type: ignore[union-attr]
    program.applied.undo()
    program.pools.clear()
    print(program.requests, program.hits, program.refusals, program.nested, flush=True)
    drv.Context.pop()
    os._exit(0)  # the contexts of the stub are not PyCUDA's to end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
