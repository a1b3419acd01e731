"""The processes that tests/gpu suspends, without a GPU: what they answer, and that a death and a silence are told."""

from __future__ import annotations

import signal
import time

import pytest
from support.suspend_children import Broke, Child, apart, surroundings

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run


def test_a_process_answers_and_an_error_is_its_answer() -> None:
    with apart(), Child("suspend_target", "nothing") as child:
        assert child.must("load", names=["json"]) == {} and child.must("away") == {"away": False}
        assert child.ask("off", timeout=1)["error"]["exception"] != ""
        with pytest.raises(Broke, match="AttributeError"):
            child.must("no such thing")


def test_a_process_that_dies_or_is_silent_is_reported() -> None:
    with Child("leases_job", "torch") as child:
        with pytest.raises(Broke, match="did not come in 0 s"):
            child.answer(0.1)
        child.process.send_signal(signal.SIGKILL)
        with pytest.raises(Broke, match="it died at check, rc -9"):
            child.ask("check")


def test_the_function_in_which_it_crashed_is_named() -> None:
    with Child("suspend_target", "nothing") as child:
        child.errors.write('Current thread 0x7f (most recent call first):\n  File "x.py", line 7 in call: item\n')
        child.errors.flush()
        assert child.crashed_in() == "call: item"


def test_processes_of_a_scenario_share_a_folder_of_their_own() -> None:
    before = surroundings().get("XDG_RUNTIME_DIR")
    with apart():
        inside = surroundings()["XDG_RUNTIME_DIR"]
        assert inside != before and surroundings()["XDG_RUNTIME_DIR"] == inside
    assert surroundings().get("XDG_RUNTIME_DIR") == before


def test_a_process_that_exits_by_itself_is_not_killed() -> None:
    child, begun = Child("suspend_others", "robber"), time.monotonic()
    with child:
        pass
    assert child.process.returncode == 0 and time.monotonic() - begun < 30
