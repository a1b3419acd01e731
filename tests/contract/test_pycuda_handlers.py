"""A signal handler that uses PyCUDA, at points of memguard's code at which Python may run one (`fake_pycuda`)."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
from support.interrupted import interruptions
from test_pycuda_model import Model, Setting, model  # noqa: F401 (a fixture)

from memguard._base.units import MIB

CAP = 40 * MIB


STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "61"))
"""Every so many points are tried. 1 tries all, about 23,000, which takes some minutes."""


class Program:
    """A program with idle blocks, live arrays and two pools of its own. A handler may make the same calls."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.live = setting, list[Any]()
        setting.apply(CAP)
        self.fill()

    def fill(self) -> None:
        """As it was at first."""
        self.live.clear()
        drv = self.setting.drv
        self.pool, self.unused = drv.DeviceMemoryPool(), drv.DeviceMemoryPool()
        self.block = self.pool.allocate(3 * MIB)
        self.pitched, _ = drv.mem_alloc_pitch(1000, 1000, 4)
        for way in (drv.mem_alloc, self.pool.allocate):
            for size in (3 * MIB, 1000):
                way(size)
                self.live.append(way(size))

    def hit(self) -> None:
        self.live.append(self.setting.drv.mem_alloc(3 * MIB))

    def hit_of_a_pool(self) -> None:
        self.live.append(self.pool.allocate(1000))

    def grow(self) -> None:
        self.live.append(self.setting.drv.mem_alloc(5 * MIB))

    def first_of_a_pool(self) -> None:
        self.live.append(self.unused.allocate(2 * MIB))

    def refused(self) -> None:
        self.setting.drv.mem_alloc(CAP)

    def free(self) -> None:
        if self.block is not None:
            block, self.block = self.block, None
            block.free()

    def free_held(self) -> None:
        self.pool.free_held()

    def trim(self) -> None:
        self.setting.framework.trim(self.setting.gpu)

    def usage(self) -> None:
        self.setting.usage()

    def drop(self) -> None:
        """Pools and a pitched allocation go, and are noticed."""
        self.block = None
        self.live.clear()
        self.pool, self.unused = self.setting.drv.DeviceMemoryPool(), self.setting.drv.DeviceMemoryPool()
        self.pitched = None
        self.setting.usage()

    def first_of_a_context(self) -> None:
        context = self.setting.drv.Device(0).retain_primary_context()
        context.push()
        try:
            self.live.append(self.setting.drv.mem_alloc(3 * MIB))
        finally:
            self.setting.drv.Context.pop()


OUTER = [
    "hit", "hit_of_a_pool", "grow", "first_of_a_pool", "refused", "free", "free_held", "trim", "usage", "drop",
    "first_of_a_context",
]  # fmt: skip
HANDLERS = ["trim", "refused", "grow", "first_of_a_pool", "drop", "first_of_a_context", "free"]


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("outer", OUTER)
def test_a_handler_that_uses_pycuda_breaks_nothing(
    model: Model,  # noqa: F811
    outer: str,
    handler: str,
) -> None:
    """No error of Python's comes out, and the books are the driver's at the end."""
    setting = model()
    program, wrong, points = Program(setting), list[str](), 0
    refused = contextlib.suppress(setting.drv.MemoryError)

    def nested() -> None:
        with refused:
            getattr(program, handler)()

    while True:
        point = interruptions.Points(1 + points * STRIDE, nested)
        try:
            with refused:
                point.run(getattr(program, outer))
        except Exception as error:
            wrong.append(f"{point.place}: {error!r}")
        if not point.place:
            break
        gc.collect()
        held = setting.usage().held
        if held != setting.taken:
            wrong.append(f"{point.place}: held {held}, taken {setting.taken}")
            setting.framework.trim(setting.gpu)
        points += 1
        program.fill()
    print(f"{handler} within {outer}: {points} points")
    assert points and not wrong, "\n".join(sorted(set(wrong)))
