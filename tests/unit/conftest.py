"""What tests of the guard share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from guards import Steps, replaced

import memguard
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework


@pytest.fixture(autouse=True)
def no_callback_of_another_test() -> Iterator[None]:
    """`on_event` keeps a function for every later budget of the process."""
    yield
    session = sys.modules.get("memguard._runtime.session")
    if session is not None:
        session.event_callbacks.clear()


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    memguard.shutdown()
    left = [f for f in sys.meta_path if f not in finders]
    sys.meta_path[:] = finders
    assert left == []


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def arrange(*fails: str, pending: tuple[str, ...] = ()) -> list[str]:
        done: list[str] = []

        def make(host: SimulatedHost, name: str) -> SimulatedFramework:
            framework = Steps(host, name, imported=name not in pending)
            framework.done, framework.fails = done, fails
            return framework

        replaced(monkeypatch, torch=make, tensorflow=make, pycuda=make)
        return done

    return arrange
