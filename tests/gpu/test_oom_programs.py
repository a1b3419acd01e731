"""Typical programs that run out of memory, and memguard's reports on them; typical programs without a fault.

Each report is compared with the ground truth (`support.moment`). The test follows the first advice that needs no
person, and runs the program again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.moment import ARRANGED, QUIET
from support.oom_programs import in_order, out_of_memory

Run = Callable[..., dict[str, Any]]
LONG = ("generate", "keras_fit", "tf1_session", "compiled", "jax_donated")
"""They compile for half a minute, or refuse after ten seconds: their advice is followed only with --thorough."""
ALONE = [name for name, one in ARRANGED.items() if one.alone]
BESIDE = [
    ("generate", "keras_fit", "compiled", "data_loader", "graph_capture", "comprehension"),
    ("tf1_session", "jax_jit", "optimizer_step", "in_thread", "forked_worker", "cupy_fft"),
    ("jax_donated", "forward", "backward", "caught", "numba_kernel", "pycuda_expression"),
]
"""Programs that run in parallel."""


def test_each_program_is_run() -> None:
    assert sorted(name for names in BESIDE for name in names) == sorted(set(ARRANGED) - set(ALONE))


@pytest.mark.parametrize("names", BESIDE, ids=lambda names: names[0])
def test_out_of_memory(names: tuple[str, ...], tmp_path: Path, thorough: bool) -> None:
    def one(name: str) -> list[str]:
        followed = thorough or name not in LONG
        return out_of_memory(name, ARRANGED[name], tmp_path, 150 if followed else 300, followed)

    with ThreadPoolExecutor(len(names)) as pool:
        wrong = [line for lines in pool.map(one, names) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.whole_card
@pytest.mark.parametrize("name", ALONE)
def test_out_of_memory_on_a_full_card(name: str, tmp_path: Path) -> None:
    wrong = out_of_memory(name, ARRANGED[name], tmp_path, 90)
    assert not wrong, "\n".join(wrong)


SAWTOOTH = """
import random, threading, time
CAP, UNIT = 4 * GIB, 32 * MIB
memguard.init({"version": 1, "device": {"limit": "12GiB"}, "monitor": {"interval": "100ms"},
               "frameworks": {"torch": {"limit": CAP}, "cupy": {"limit": CAP}}})
said = []
memguard.on_event(lambda event: said.append([event.kind, event.text]))
import cupy, torch
takes = {"torch": lambda: torch.empty(UNIT, dtype=torch.uint8, device="cuda"),
         "cupy": lambda: cupy.empty(UNIT, cupy.uint8)}
live, most, rng = {"torch": [], "cupy": []}, {"torch": 0, "cupy": 0}, random.Random(7)
HIGH, LOW = 0.82, 0.2

def work(name, shapes):
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < SECONDS:
        shape, period = shapes[int(elapsed // 60) % len(shapes)]
        phase = elapsed % period / period
        if shape == "saw":
            level = LOW + (HIGH - LOW) * phase
        elif shape == "triangle":
            level = LOW + (HIGH - LOW) * (2 * phase if phase < 0.5 else 2 - 2 * phase)
        elif shape == "square":
            level = HIGH if phase < 0.5 else LOW
        else:  # batches of any size
            level = rng.uniform(LOW, HIGH) if phase < 0.1 else len(live[name]) * UNIT / CAP
        wanted = int(level * CAP / UNIT)
        while len(live[name]) < wanted:
            live[name].append(takes[name]())
        del live[name][wanted:]
        most[name] = max(most[name], len(live[name]) * UNIT / CAP)
        with memguard.workload(f"step of {name}", framework=name):
            time.sleep(0.02)

shapes = [("saw", 1.0), ("saw", 5.0), ("triangle", 10.0), ("square", 2.0), ("random", 0.5), ("saw", 30.0)]
begun = time.monotonic()
threads = [threading.Thread(target=work, args=("torch", shapes)),
           threading.Thread(target=work, args=("cupy", shapes[3:] + shapes[:3]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
result.update(seconds=time.monotonic() - begun, most=most)
result["alarms"] = [one for one in said if one[0] in ("forecast", "leak", "pressure")]
"""


def test_rising_and_falling_use_raises_no_alarm(run: Run, thorough: bool) -> None:
    """Fill up to 82 % of each cap, a minute for each shape."""
    seconds = 600 if thorough else 60
    found = run(f"SECONDS = {seconds}\n{SAWTOOTH}", timeout=seconds + 120)
    assert found["seconds"] >= seconds and not found["alarms"], found
    assert all(part >= 0.75 for part in found["most"].values()), found["most"]


def test_no_alarm_of_programs_in_order(tmp_path: Path, thorough: bool) -> None:
    seconds = 120 if thorough else 30
    with ThreadPoolExecutor(len(QUIET)) as pool:
        going = [pool.submit(in_order, name, budget, tmp_path, seconds) for name, budget in QUIET.items()]
    wrong = [line for one in going for line in one.result()]
    assert not wrong, "\n".join(wrong)
