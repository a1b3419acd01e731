"""A `CheckpointChannel` without a helper process, over a simulated driver: for simulated guards and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memguard._devices.simulated_checkpoint import HelperDied, HelperHangs, SimulatedCheckpoint
from memguard._node.identity import Process
from memguard._node.suspend.driver.channel import Answer, Card


class Direct:
    """Asks the simulated driver at once. `lives` says whether a process is still the same (all are)."""

    def __init__(self, driver: SimulatedCheckpoint, lives: Callable[[Process], bool] = lambda process: True) -> None:
        self.driver, self._lives = driver, lives
        self._holding = False
        """Whether room was held by a helper, which may have been killed since."""

    def state(self, process: Process, limit: float = 10.0) -> Answer:
        if not self._lives(process):
            return Answer(None, trouble="ended")
        try:
            code, state = self.driver.state(process.pid)
        except (HelperHangs, HelperDied) as error:
            return self._trouble(error)
        return Answer(code, state)

    def lock(self, process: Process, timeout_ms: int, limit: float) -> Answer:
        return self._call(lambda pid: self.driver.lock(pid, timeout_ms), process)

    def checkpoint(self, process: Process, limit: float) -> Answer:
        return self._call(self.driver.checkpoint, process)

    def restore(self, process: Process, limit: float) -> Answer:
        holding, self._holding = self._holding, False
        if holding and not any(self.driver.held.values()):
            return Answer(None, trouble="unheld")
        self.release()
        return self._call(self.driver.restore, process)

    def unlock(self, process: Process, limit: float) -> Answer:
        return self._call(self.driver.unlock, process)

    def usage(self, limit: float = 20.0) -> Mapping[str, Card] | None:
        driver = self.driver
        return {
            uuid: Card(
                total,
                driver.free(uuid),
                driver.used(uuid),
                {pid: size for pid, target in driver.targets.items() if (size := target.on_card.get(uuid))},
            )
            for uuid, total in driver.cards.items()
        }

    def hold(self, sizes: Mapping[str, int], limit: float = 60.0) -> Answer:
        if any(size > self.driver.free(uuid) for uuid, size in sizes.items()):
            return Answer(None, trouble="room", text="too little memory is free")
        for uuid, size in sizes.items():
            self.driver.held[uuid] += size
        self._holding = True
        return Answer(0)

    def release(self, limit: float = 60.0) -> None:
        self._holding = False
        self.driver.held = dict.fromkeys(self.driver.cards, 0)

    def _call(self, call: Callable[[int], int], process: Process) -> Answer:
        if not self._lives(process):
            return Answer(None, trouble="ended")
        try:
            return Answer(call(process.pid))
        except (HelperHangs, HelperDied) as error:
            return self._trouble(error)

    def _trouble(self, error: Exception) -> Answer:
        self.driver.held = dict.fromkeys(self.driver.cards, 0)  # the placeholder goes with the helper
        return Answer(None, trouble="timeout" if isinstance(error, HelperHangs) else "died")
