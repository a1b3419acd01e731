"""What watching costs real programs: training steps with a budget and a monitor at 10 Hz, against none.

    python benchmarks/training.py -o benchmarks/results/h200-training.json

A ResNet-50 on random images, and GPT-2 (small) on random tokens, each in a process of its own. One process, and not a
pair of them, because two processes differ by more than what is asked for: in where their memory lies, in the kernels
that cuDNN chose, in their cores. So a block is three short segments of steps, in an order that changes: one with budget
and monitor, and two without, which are each other's control. Before each of the three `memguard.init` runs, and before
those without also `memguard.shutdown`; then some steps that are not timed, so that each begins with the same GPU, and
the monitor's samples fall anywhere in the timed ones. What `memguard.init` itself takes is in `light.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _spread
from _run import conclude, emit, header, run_scenario
from checks import TRAINING_PAIRS, training_checks

BLOCKS = int(os.environ.get("MEMGUARD_TRAINING_BLOCKS", str(TRAINING_PAIRS)))
SECONDS = float(os.environ.get("MEMGUARD_TRAINING_SECONDS", "0.1"))
"""That a segment takes."""
INTERVAL = 0.1
BUDGET = {
    "version": 1,
    "device": {"limit": "48GiB"},
    "frameworks": {"torch": {"limit": "40GiB"}},
    "monitor": {"interval": f"{INTERVAL * 1000:.0f}ms"},
}
WARM = 15
"""Steps before anything is timed: cuDNN chooses its kernels, torch's cache grows."""


class Missing(Exception):
    """What the program needs is not here."""


def resnet() -> tuple[Callable[[], Any], str]:
    """One step of a ResNet-50: 64 images, bf16, SGD. Returns it and what it is."""
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
    images = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (64,), device="cuda")
    torch.backends.cudnn.benchmark = True

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, f"ResNet-50 of {origin}, 64 images of 224 x 224, bf16, SGD"


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
        self.watched, self.samples = 0.0, 0
        self.states: dict[str, set[bool]] = {}

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
        """Seconds for its steps, after `warm` others. Only the one called `watched` has a budget and a monitor."""
        import memguard
        from memguard import _api

        memguard.init(BUDGET, simulate=self.simulate)
        monitor: Any = _api.current_session().monitor
        if name != "watched":
            memguard.shutdown()
        gc.collect()
        self.timed(warm)
        since = time.time()
        took = self.timed(self.count)
        until = time.time()
        self.states.setdefault(name, set()).add(active())
        if name == "watched":
            self.watched += until - since
            self.samples += sum(since <= sample.time <= until for sample in monitor.last(60))
            memguard.shutdown()
        return took

    def block(self, number: int) -> dict[str, float]:
        names, draw = ["watched", "without", "again"], random.Random(number)
        draw.shuffle(names)
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
    for number in range(2):  # what `init` imports, and does once
        segments.block(number)
    segments.watched, segments.samples = 0.0, 0
    taken = [segments.block(number) for number in range(blocks)]
    return {
        "step_ms": round(each * 1e3, 3),
        "steps": segments.count,
        "pairs": blocks,
        "watched_s": round(segments.watched, 2),
        "samples": segments.samples,
        "active": {name: sorted(states) for name, states in segments.states.items()},
        "seconds": {name: [round(one[name], 6) for one in taken] for name in ("watched", "without", "again")},
        **ratios(taken),
    }


def ratios(taken: list[dict[str, float]]) -> dict[str, Any]:
    """Watched against without, without against without, and the first as a multiple of the second."""
    pairs = [(one["watched"] / one["without"], one["again"] / one["without"]) for one in taken]
    draw = random.Random(11)
    beyond = sorted(_beyond(draw.choices(pairs, k=len(pairs))) for _ in range(_spread.RESAMPLES))
    low, high = beyond[_spread.RESAMPLES * 25 // 1000], beyond[_spread.RESAMPLES * 975 // 1000 - 1]
    return {
        "ratio": _spread.interval([[ratio] for ratio, _ in pairs]),
        "control": _spread.interval([[control] for _, control in pairs]),
        "beyond": {"median": _beyond(pairs), "low": low, "high": high},
    }


def _beyond(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(ratio for ratio, _ in pairs) / statistics.median(control for _, control in pairs)


def program(make: Callable[[], tuple[Callable[[], Any], str]]) -> dict[str, Any]:
    try:
        step, says = make()
    except Missing as missing:
        return {"skipped": str(missing)}
    return {"says": says, **measure(Segments(step, wait), BLOCKS, SECONDS)}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {"ResNet-50": lambda: program(resnet), "GPT": lambda: program(gpt)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    scenarios = {}
    for name in SCENARIOS:
        outcome = run_scenario(__file__, name, timeout=240)
        outcome["stderr_tail"] = outcome.pop("_stderr")[-3000:] if outcome["returncode"] else ""
        print(f"{name}: rc {outcome['returncode']}, {outcome['wall_s']} s", file=sys.stderr, flush=True)
        scenarios[name] = outcome
    result: dict[str, Any] = {"about": header("python benchmarks/training.py"), "scenarios": scenarios}
    result["checks"] = training_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
