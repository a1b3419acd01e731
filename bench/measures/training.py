"""What watching costs real programs: training steps with a budget and a monitor at 10 Hz, against none.

One process, because two differ by more than what is asked for. A block is three short segments of steps: one with
budget and monitor, and two without, which are each other's control. Every second block runs in the reverse order, so
that steady drift cancels, and the budget of one watched segment serves for the next. A monitor's first sample costs the
most: after `memguard.init` steps go on untimed until the second one is there."""

from __future__ import annotations

import gc
import importlib
import math
import random
import time
from collections.abc import Callable
from typing import Any

from bench.child import main
from bench.measure import Failed, Run, measure

BLOCKS, AT_MOST = 95, 28.0  # Of each program, or as many as begin within so many seconds.
SEGMENT = 0.14  # Seconds of a segment: more than the monitor's interval.
SETTLED, PATIENCE = 2, 1.5
"""Samples after `init` before anything is timed, and the seconds after which it is timed without them."""
WARM = 25  # Steps before anything is timed: cuDNN chooses its kernels, torch's cache grows.
RATE = (8, 12)  # Samples a second, at least and at most: fewer would be cheap, and more were miscounted.
BUDGET = {
    "version": 1, "device": {"limit": "48GiB"}, "frameworks": {"torch": {"limit": "40GiB"}},
    "monitor": {"interval": "100ms"},
}  # fmt: skip
BAR = "<= 1.005"


@measure(
    "training", unit="ratio", bar={"resnet50": BAR, "gpt2": BAR}, by={"resnet50": "high", "gpt2": "high"}, seconds=90,
    needs=("torch",),
)  # fmt: skip
def training(run: Run) -> dict[str, list[float] | Failed]:
    """Time of training steps with a budget and its monitor at 10 Hz, over that of the same steps without.

    ResNet-50 on 256 random images and GPT-2 (small) on 8 texts of 1,024 tokens, in bf16; a value is of one block: the
    watched segment over the geometric mean of the two without. `again`: one of those two over the other, the control.
    """
    found: dict[str, list[float] | Failed] = {}
    for name in ("resnet50", "gpt2"):
        try:
            one = run.program(name, run.rounds(BLOCKS, 2), timeout=125)
            held(name, one, run.quick)
            found[name], found[f"{name}_again"] = one["ratio"], one["again"]
        except Failed as error:
            found[name] = found[f"{name}_again"] = error
    return found


def held(name: str, one: dict[str, Any], quick: bool) -> None:
    """Raise Failed if what was compared is not steps under a budget with samples at 10 Hz, and steps without."""
    if one["active"] != {"watched": [True], "without": [False], "again": [False]}:
        raise Failed(f"{name}: a budget was active in {one['active']}")
    rate = one["samples"] / one["watched_s"]
    if not quick and not (RATE[0] <= rate <= RATE[1] and one["empty"] <= len(one["ratio"]) // 5):
        raise Failed(f"{name}: {rate:.1f} samples a second, {one['empty']} segments without one")


def resnet50() -> Callable[[], Any]:
    """One step of a ResNet-50: 256 images, bf16, SGD. With 64 the GPU waits for the CPU, whose time varies more."""
    import torch

    try:
        model = importlib.import_module("torchvision.models").resnet50()
    except ImportError:
        model = importlib.import_module("timm").create_model("resnet50", pretrained=False)
    model = model.cuda().to(memory_format=torch.channels_last)
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

    return step


def gpt2() -> Callable[[], Any]:
    """One step of GPT-2 (small): 8 texts of 1,024 tokens, bf16, AdamW."""
    import torch

    transformers = importlib.import_module("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 50257, (8, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Segments:
    """Steps with memguard and without. `wait` waits for the GPU."""

    def __init__(self, step: Callable[[], Any], wait: Callable[[], None]) -> None:
        self.step, self.wait = step, wait
        self.count = 1  # Steps of a segment.
        self.monitor: Any = None  # The monitor of the budget that is active; None between budgets.
        self.forget()

    def forget(self) -> None:
        """What was counted so far."""
        self.watched, self.samples, self.empty = 0.0, 0, 0
        self.states: dict[str, set[bool]] = {}

    def calibrate(self) -> None:
        for _ in range(WARM):
            self.step()
        each = min(self.timed(5) / 5 for _ in range(3))
        self.count = max(round(SEGMENT / each), 1)

    def timed(self, count: int) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return time.perf_counter() - begun

    def segment(self, name: str, warm: int) -> float:
        """Seconds for its steps. Only the one called `watched` has a budget and a monitor. `warm` other steps come
        before, if the segment before was of the other kind."""
        if (name == "watched") != (self.monitor is not None):
            if name == "watched":
                self.begin()
            else:
                self.end()
            self.timed(warm)
        since = time.time()
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
        from memguard import api

        memguard.init(BUDGET)
        session: Any = api.current_session()
        self.monitor = session.monitor
        begun = time.perf_counter()
        while len(self.monitor.last(60)) < SETTLED and time.perf_counter() - begun < PATIENCE:
            self.timed(1)

    def end(self) -> None:
        """No budget, and no garbage of one that later steps would have to collect."""
        import memguard

        memguard.shutdown()
        self.monitor = None
        gc.collect()

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
    from memguard.errors import NotActive

    try:
        memguard.ledger()
    except NotActive:
        return False
    return True


def compared(step: Callable[[], Any], wait: Callable[[], None], blocks: int) -> dict[str, Any]:
    """Watched against without, and without against without, in each block; and what was watched."""
    segments, taken = Segments(step, wait), []
    segments.calibrate()
    try:
        for number in range(min(4, 2 * blocks)):  # what `init` imports, and does once
            segments.block(number)
        gc.collect()
        gc.freeze()  # the frameworks' own objects: to look through them takes longer than a segment
        segments.forget()
        begun = time.monotonic()
        for number in range(blocks):
            if time.monotonic() - begun > AT_MOST:
                break
            taken.append(segments.block(number))
    finally:
        segments.end()
        gc.unfreeze()
    return {
        "ratio": [one["watched"] / math.sqrt(one["without"] * one["again"]) for one in taken],
        "again": [one["again"] / one["without"] for one in taken], "watched_s": segments.watched,
        "samples": segments.samples, "empty": segments.empty,
        "active": {name: sorted(states) for name, states in segments.states.items()},
    }  # fmt: skip


def program(make: Callable[[], Callable[[], Any]]) -> Callable[[str], dict[str, Any]]:
    def run(blocks: str) -> dict[str, Any]:
        import torch

        return compared(make(), torch.cuda.synchronize, int(blocks))

    return run


if __name__ == "__main__":
    main({"resnet50": program(resnet50), "gpt2": program(gpt2)})
