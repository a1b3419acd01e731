"""Calls of other threads while the process is off its GPU; and whoever suspends it is killed or interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import _listed
from _run import MIB, ROOT
from _suspend_arrays import REHEARSAL
from _suspend_children import HERE, Broke, Child, end, resume, surroundings, target
from _suspend_rounds import small

ROUNDS = 30
AGAIN = 4
"""Processes that may crash before a framework's calls are given up."""
AT_MOST = 200.0
"""Seconds after which no other one begins: each that hangs takes two minutes, and what was seen is to be told."""
DELAYS = (0.0, 0.0, 0.02, 0.1, 0.25)
"""Seconds after the beginning of a step: one for each round."""


def calls(name: str) -> dict[str, Any]:
    """Every kind of call at once, each on a thread of its own, in 30 rounds."""
    found: dict[str, Any] = {
        "rounds": 0, "ends": {}, "crashed": [], "broken": {}, "wrong": 0, "hung": [], "kinds": [],
    }  # fmt: skip
    until = time.monotonic() + AT_MOST
    for number in range(AGAIN):
        if number and time.monotonic() >= until:
            break
        child = Child("_suspend_target.py", name)
        try:
            child.must("begin", 180, names=[name], size=small(16 * MIB))
            begun = child.must("calls", 180, skip=[one["call"] for one in found["crashed"]])
            found["kinds"] = sorted({*found["kinds"], *begun["kinds"]})
            found["broken"].update(begun["broken"])
            while found["rounds"] < ROUNDS:
                for kind, came in child.must("round", 75)["ends"].items():
                    ends = found["ends"].setdefault(kind, {})
                    ends[came] = ends.get(came, 0) + 1
                found["rounds"] += 1
            found["wrong"] += child.must("check")["wrong"]
            return found
        except Broke as error:
            code = child.process.poll()
            if code is None:
                said = resume(child.pid)  # whatever holds the GIL goes on
                how = f"memguard resume: rc {said['rc']} in {said['seconds']} s: {(said['err'] + said['out'])[-300:]}"
                found["hung"].append(f"{str(error)[-1500:]}\n{how}")
            else:
                found["crashed"].append({"call": child.crashed_in(), "rc": code, "text": str(error)[-700:]})
        finally:
            end(child)
    return found


def control() -> dict[str, Any]:
    """Without gates the process must die: else the rounds above would show nothing."""
    child = Child("_suspend_target.py", "torch")
    try:
        child.must("begin", 180, names=["torch"], size=small(16 * MIB))
        child.must("calls", 180, skip=[], gates=False)
        try:
            child.must("round", 150, only=["device synchronize", "synchronize"])
            return {"rc": None, "call": ""}
        except Broke:
            return {"rc": child.process.poll(), "call": child.crashed_in()}
    finally:
        end(child)


def inside(what: str, way: str) -> dict[str, Any]:
    """SIGINT, or the death of the helper, at each step of this process's own suspension or return."""
    rounds = []
    with target("cupy", size=small(64 * MIB)) as child:
        for step in _listed.SUSPEND_STEPS[way]:
            for delay in DELAYS:
                one = child.must("broken", 150, way=way, step=step, what=what, delay=delay)
                one.update(step=step, delay=delay, back="by itself")
                if one["away"]:
                    said = resume(child.pid)
                    one["back"] = "by memguard resume" if said["rc"] == 0 else f"rc {said['rc']}: {said['err'][-300:]}"
                    _until_on(child)
                if child.must("away")["away"]:
                    on = child.ask("on", 120, timeout=60)
                    one["back"] += "; then by memguard.resume()" if "error" not in on else f"; {on['error']['text']}"
                one["away_at_last"] = child.must("away")["away"]
                one["wrong"] = child.must("check")["wrong"]
                rounds.append(one)
    return {"rounds": rounds}


def _until_on(child: Child, patience: float = 5.0) -> None:
    """Its own helper looks twice a second whether somebody has brought it back."""
    until = time.monotonic() + patience
    while child.must("away")["away"] and time.monotonic() < until:
        time.sleep(0.1)


CONTROLLER = """
import json, os, sys
pid, way = int(sys.argv[1]), sys.argv[2]
from memguard._suspend import flow
from memguard._suspend.client import Client
from memguard._processes.identity import process_of
client, process = Client(), process_of(pid)
client.state(process)
def told(step): print(json.dumps([step, client.pid]), flush=True)
do = flow.take_off if way == "off" else flow.bring_back
more = {"needs": json.loads(sys.argv[3])} if way == "on" else {}
print(json.dumps(["over", str(do(process, client=client, on_step=told, **more).end)]), flush=True)
"""
REHEARSED = """
import json, sys, time
sys.path.insert(0, sys.argv.pop())
import _suspend_stand_in as stand
for step in stand.STEPS[sys.argv[2]]:
    print(json.dumps([step, None]), flush=True)
    time.sleep(0.05)
stand.write(int(sys.argv[1]), suspended=sys.argv[2] == "off")
print(json.dumps(["over", "as asked"]), flush=True)
"""


def controller(way: str) -> dict[str, Any]:
    """Who suspends another process, or brings it back, is killed with its helper at each step."""
    rounds = []
    with target("cupy", size=small(64 * MIB)) as child:
        child.touched = True
        for step in _listed.SUSPEND_STEPS[way]:
            for delay in DELAYS:
                rounds.append({"step": step, "delay": delay, **_killed(child, way, step, delay)})
    return {"rounds": rounds}


def _killed(child: Child, way: str, step: str, delay: float) -> dict[str, Any]:
    found: dict[str, Any] = {"reached": None}
    if way == "on":
        found["first"] = _controlled(child, "off", None, 0.0)["reached"]
    found |= _controlled(child, way, step, delay)
    said = resume(child.pid)
    found["back"] = (
        "by memguard resume" if said["rc"] == 0 else f"rc {said['rc']}: {(said['err'] + said['out'])[-300:]}"
    )
    found["resume_s"] = said["seconds"]
    if said["rc"]:  # so that the next round begins as this one did
        found["finished"] = _controlled(child, "on", None, 0.0)["reached"]
    checked = child.ask("check", 60)
    found["wrong"] = checked.get("wrong", f"{checked.get('error')}")
    return found


def _controlled(child: Child, way: str, step: str | None, delay: float) -> dict[str, Any]:
    """Run it, and kill it and its helper that long after it began the step. `reached`: how far it came."""
    import json

    from _suspend_children import Card

    card = Card()
    if not hasattr(child, "needs"):
        child.needs = json.dumps({_uuid(): card.of(child.pid) or 0})  # type: ignore[attr-defined]
    code, words = (REHEARSED, [str(HERE)]) if REHEARSAL else (CONTROLLER, [])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(child.pid), way, child.needs, *words],  # type: ignore[attr-defined]
        stdout=subprocess.PIPE, text=True, env=surroundings(ROOT),
    )  # fmt: skip
    reached = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            reached, helper = json.loads(line)
            if reached == "over":
                return {"reached": f"over: {helper}"}
            if reached == step:
                time.sleep(delay)
                for pid in (helper, process.pid):
                    if pid is not None:
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            continue
                break
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None
    return {"reached": reached}


def _uuid() -> str:
    if REHEARSAL:
        return "GPU"
    import pynvml

    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))
