"""Plays schedules on the simulated frameworks of a guard."""

from __future__ import annotations

from collections.abc import Mapping

from support.oracle import Refused

from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard.guard import Guard


class SimulatedRunner:
    """`Runner` on one simulated GPU, which has no values to compare. Without `lends` nobody makes room: the caps stay,
    and no framework gives anything back for another."""

    def __init__(self, guard: Guard, lends: bool = True) -> None:
        assert isinstance(guard.host, SimulatedHost)
        self.guard, self.host, self.lends = guard, guard.host, lends
        (self.gpu,) = self.host.devices()
        self.frameworks: dict[str, SimulatedFramework] = {}
        for name, framework in guard.frameworks.items():
            assert isinstance(framework, SimulatedFramework)
            self.frameworks[name] = framework
            if not lends:
                framework.on_shortage = None

    def allocate(self, framework: str, size: int) -> int | Refused:
        one = self.frameworks[framework]
        try:
            return one.allocate(size)
        except FrameworkOutOfMemory as error:
            refused = Refused(str(error), error.driver is not None)
        if one.requests_room or not self.lends:
            return refused
        self.guard.make_room(framework, one.footprint(size), self.gpu)
        try:
            return one.allocate(size)
        except FrameworkOutOfMemory as error:
            return Refused(str(error), error.driver is not None)

    def free(self, framework: str, array: int) -> bool:
        self.frameworks[framework].free(array)
        return True

    def idle(self) -> None:
        sample = self.guard.sample()
        if self.lends:
            self.guard.rebalance(sample)

    def held(self) -> Mapping[str, int]:
        return {name: one.stats(self.gpu).held for name, one in self.frameworks.items()}

    def held_by_process(self) -> int:
        return self.host.processes(self.gpu).get(self.host.pid) or 0

    def trimmed(self) -> Mapping[str, int]:
        for one in self.frameworks.values():
            one.trim(self.gpu)
        return self.held()
