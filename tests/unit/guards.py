"""Budgets on simulated GPUs, for the tests of the guard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import memguard
from memguard._base.types import Applied, Enforcement, State
from memguard._base.undo import Undo
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import registry
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.guard import Guard

BUDGET = {
    "version": 1,
    "device": {"limit": "16GiB", "reserve": "2GiB"},
    "frameworks": {"torch": {"limit": "4GiB"}, "tensorflow": {"limit": "4GiB"}, "pycuda": {"limit": "2GiB"}},
}
TORCH = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}


def start(budget: Any = BUDGET, simulate: Any = "h200", **more: Any) -> Guard:
    return memguard.init(budget, simulate=simulate, **more)


def simulated(guard: Guard, name: str) -> SimulatedFramework:
    framework = guard.frameworks[name]
    assert isinstance(framework, SimulatedFramework)
    return framework


def host_of(guard: Guard) -> SimulatedHost:
    assert isinstance(guard.host, SimulatedHost)
    return guard.host


def cap_of(framework: SimulatedFramework) -> int | None:
    return framework.stats(framework.host.devices()[0]).cap


def hooks() -> list[Any]:
    return [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]


def replaced(monkeypatch: pytest.MonkeyPatch, **classes: Callable[[SimulatedHost, str], SimulatedFramework]) -> None:
    """Other stand-ins for some frameworks of the budget."""
    create = registry.create

    def choose(name: str, host: Any) -> Any:
        return classes[name](host, name) if name in classes else create(name, host)

    monkeypatch.setattr(registry, "create", choose)


def imported(host: SimulatedHost, name: str) -> SimulatedFramework:
    return SimulatedFramework(host, name, imported=True)


class Absent(SimulatedFramework):
    """Not there, or found to be of no use once it is imported."""

    at_import = False

    def why_absent(self) -> str | None:
        return "torch is not installed"

    def state(self) -> State:
        return super().state() if self.at_import and not self.imported else State.ABSENT


class Steps(SimulatedFramework):
    """Writes down what is done to it; `fails` names the steps that raise."""

    done: list[str]
    fails: tuple[str, ...] = ()

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        self._step("apply")
        super().apply(caps, options, undo)
        undo.add(self.name, lambda: self._step("undo"))
        return Applied(Enforcement.ENFORCED)

    def _step(self, step: str) -> None:
        self.done.append(f"{step} {self.name}")
        if f"{step} {self.name}" in self.fails:
            raise RuntimeError(f"{step} of {self.name} failed")
