"""What watching costs real programs: training steps with a budget and a monitor at 10 Hz, against none.

    python benchmarks/training.py -o benchmarks/results/h200-training.json

A ResNet-50 on random images, and GPT-2 (small) on random tokens, each in a process of its own. One process, and not a
pair of them, because two processes differ by more than what is asked for: in where their memory lies, in the kernels
that cuDNN chose, in their cores. So a block is three short segments of steps: one with budget and monitor, and two
without, which are each other's control. Every second block runs in the reverse order, so that steady drift cancels, and
so that the budget of one watched segment serves for the next: it ends one block and begins the other.

A monitor's first sample costs the most, and the second waits until the CPU time of the first is within the monitor's
share. So after `memguard.init` steps go on untimed until the second sample is there. What `memguard.init` itself takes
is in `light.py` and `init.py`. `spent_s` says what the run's time went to.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _spread
from _run import conclude, emit, header, merged, run_scenario
from checks import TRAINING_PAIRS, training_checks

BLOCKS = int(os.environ.get("MEMGUARD_TRAINING_BLOCKS", str(TRAINING_PAIRS)))
SECONDS = float(os.environ.get("MEMGUARD_TRAINING_SECONDS", "0.14"))
"""That a segment takes: more than the monitor's interval."""
INTERVAL = 0.1
SETTLED, PATIENCE = 2, 1.5
"""Samples after `init` before anything is timed, and the seconds after which it is timed without them."""
BUDGET = {
    "version": 1,
    "device": {"limit": "48GiB"},
    "frameworks": {"torch": {"limit": "40GiB"}},
    "monitor": {"interval": f"{INTERVAL * 1000:.0f}ms"},
}
WARM = 25
"""Steps before anything is timed: cuDNN chooses its kernels, torch's cache grows."""


class Missing(Exception):
    """What the program needs is not here."""


def resnet() -> tuple[Callable[[], Any], str]:
    """One step of a ResNet-50: 256 images, bf16, SGD. Returns it and what it is.

    With 64 images the GPU waits for the CPU, which starts its kernels, and the step's time is the CPU's. On a busy host
    (h200-training.json of 2026-11-23) 22 such steps without a budget took 0.37 to 0.90 s, which hides half a percent.
    """
    torch = with_cuda()
    try:
        from torchvision.models import resnet50

        made, origin = resnet50(), "torchvision"
    except ImportError:
        try:
            import timm
        except ImportError as error:
            raise Missing(f"neither torchvision nor timm is here: {error}") from error
        made, origin = timm.create_model("resnet50", pretrained=False), "timm"
    model = made.cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (256,), device="cuda")
    torch.backends.cudnn.benchmark = True

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, f"ResNet-50 of {origin}, 256 images of 224 x 224, bf16, SGD"


def gpt() -> tuple[Callable[[], Any], str]:
    """One step of GPT-2 (small): 8 texts of 1,024 tokens, bf16, AdamW."""
    torch = with_cuda()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise Missing(f"transformers is not here: {error}") from error
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 50257, (8, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, "GPT-2 small of transformers, 8 texts of 1,024 tokens, bf16, AdamW"


def with_cuda() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Missing(f"torch is not here: {error}") from error
    if not torch.cuda.is_available():
        raise Missing("this torch sees no GPU")
    return torch


def wait() -> None:
    import torch

    torch.cuda.synchronize()


class Segments:
    """Steps with memguard and without. `simulate`: on a simulated GPU, to try the code."""

    def __init__(self, step: Callable[[], Any], wait: Callable[[], None], simulate: str | None = None) -> None:
        self.step, self.wait, self.simulate = step, wait, simulate
        self.count = 1
        self.monitor: Any = None
        """The monitor of the budget that is active; None between budgets."""
        self.forget()

    def forget(self) -> None:
        """What was counted so far."""
        self.watched, self.samples, self.empty = 0.0, 0, 0
        self.budgets, self.settled = 0, 0
        self.states: dict[str, set[bool]] = {}
        self.spent: dict[str, float] = {}

    def calibrate(self, seconds: float) -> float:
        """Set how many steps a segment has. Returns the seconds of one."""
        for _ in range(WARM):
            self.step()
        each = min(self.timed(5) / 5 for _ in range(3))
        self.count = max(round(seconds / each), 1)
        return each

    def timed(self, count: int) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return time.perf_counter() - begun

    def segment(self, name: str, warm: int) -> float:
        """Seconds for its steps. Only the one called `watched` has a budget and a monitor.

        `warm` other steps come before, if the segment before was of the other kind.
        """
        if (name == "watched") != (self.monitor is not None):
            if name == "watched":
                self.begin()
            else:
                self.end()
            with self.part("between"):
                self.timed(warm)
        since = time.time()
        with self.part("timed"):
            took = self.timed(self.count)
        until = time.time()
        self.states.setdefault(name, set()).add(active())
        if name == "watched":
            seen = sum(since <= sample.time <= until for sample in self.monitor.last(60))
            self.watched += until - since
            self.samples += seen
            self.empty += not seen
        return took

    def begin(self) -> None:
        """A budget, and steps until its monitor samples at its pace."""
        import memguard
        from memguard import _api

        with self.part("init"):
            memguard.init(BUDGET, simulate=self.simulate)
            session: Any = _api.current_session()
            self.monitor = session.monitor
        with self.part("until the second sample"):
            begun = time.perf_counter()
            while not (settled := len(self.monitor.last(60)) >= SETTLED) and time.perf_counter() - begun < PATIENCE:
                self.timed(1)
        self.budgets += 1
        self.settled += settled

    def end(self) -> None:
        """No budget, and no garbage of one that later steps would have to collect."""
        import memguard

        with self.part("shutdown"):
            memguard.shutdown()
            self.monitor = None
            gc.collect()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what runs inside to `spent`."""
        begun = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begun

    def block(self, number: int) -> dict[str, float]:
        """The times of three segments. The watched one is the last, and in the block after it the first."""
        names, draw = ["without", "again"], random.Random(number // 2)
        draw.shuffle(names)
        names.append("watched")
        if number % 2:
            names.reverse()
        draw = random.Random(number)
        return {name: self.segment(name, 1 + draw.randrange(self.count)) for name in names}


def active() -> bool:
    """Whether a budget is active."""
    import memguard

    try:
        memguard.ledger()
    except memguard.NotActive:
        return False
    return True


def measure(segments: Segments, blocks: int, seconds: float) -> dict[str, Any]:
    each = segments.calibrate(seconds)
    try:
        for number in range(4):  # what `init` imports, and does once
            segments.block(number)
        gc.collect()
        gc.freeze()  # the frameworks' own objects: to look through them takes longer than a segment
        segments.forget()
        taken = [segments.block(number) for number in range(blocks)]
    finally:
        segments.end()
        gc.unfreeze()
    return {
        "step_ms": round(each * 1e3, 3),
        "steps": segments.count,
        "pairs": blocks,
        "watched_s": round(segments.watched, 2),
        "samples": segments.samples,
        "without_a_sample": segments.empty,
        "budgets": {"begun": segments.budgets, "settled": segments.settled},
        "active": {name: sorted(states) for name, states in segments.states.items()},
        "spent_s": {name: round(took, 2) for name, took in segments.spent.items()},
        "seconds": {name: [round(one[name], 6) for one in taken] for name in ("watched", "without", "again")},
        **ratios(taken),
    }


def ratios(taken: list[dict[str, float]]) -> dict[str, Any]:
    """Watched against without, without against without, and watched against both of its block.

    The last is what a bar is held against: the two without are equals, and so their mean is the better divisor. The
    bounds come from resampling whole blocks.
    """
    beyond = [one["watched"] / math.sqrt(one["without"] * one["again"]) for one in taken]
    return {
        "ratio": _spread.interval([[one["watched"] / one["without"]] for one in taken]),
        "control": _spread.interval([[one["again"] / one["without"]] for one in taken]),
        "beyond": _spread.interval([[ratio] for ratio in beyond]),
    }


def program(name: str, make: Callable[[], tuple[Callable[[], Any], str]]) -> dict[str, Any]:
    try:
        step, says = make()
    except Missing as missing:
        return {"skipped": str(missing)}
    return {"says": says, **measure(Segments(step, wait), BLOCKS, SECONDS)}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "ResNet-50": lambda: program("ResNet-50", resnet),
    "GPT": lambda: program("GPT", gpt),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help=argparse.SUPPRESS)
    parser.add_argument("--only", help="names of programs, separated by semicolons; else all")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="programs from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    only = arguments.only.split(";") if arguments.only else list(SCENARIOS)
    scenarios: dict[str, Any] = merged(arguments.merge, "scenarios")["scenarios"]
    for name in only:
        outcome = run_scenario(__file__, name, timeout=240)
        outcome["stderr_tail"] = outcome.pop("_stderr")[-3000:] if outcome["returncode"] else ""
        print(f"{name}: rc {outcome['returncode']}, {outcome['wall_s']} s", file=sys.stderr, flush=True)
        scenarios[name] = outcome
    result: dict[str, Any] = {"about": header("python benchmarks/training.py"), "scenarios": scenarios}
    result["checks"] = training_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
