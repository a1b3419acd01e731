"""Processes leave the GPU and come back: seconds, the values afterwards, and what stays on the card."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.child import Child, main
from bench.measure import Failed, Run, measure
from bench.programs.patterned import GIB, MIB, Arrays, Card, serve, torch_first

LARGE = ("torch", "cupy")
"""Timed at 16 GiB too. The others at 1 GiB alone: a process is suspended again before it ends, with all it has."""
SMALL = ("tensorflow", "numba", "pycuda", "jax")
ROUNDS = 6
TOGETHER = ("torch", "cupy", "numba", "pycuda")
"""In one process, under a budget with its monitor on: off and back `ROUNDS` times."""
QUIET_JAX = 7.0
"""Seconds after which XLA's thread has asked the driver once: before that `suspend` waits for it, up to 5 s."""
GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
LEAVES = 60.0


@measure(
    "suspend",
    unit={"out_1_gib": "s", "in_1_gib": "s", "out_16_gib": "s", "in_16_gib": "s", "left": "MiB", "grown": "MiB"},
    bar={"left": "<= 0", "grown": "<= 2"}, by={"left": "high", "grown": "high"}, seconds=85,
    needs=("torch", "cupy", "tensorflow", "jax", "numba", "pycuda"),
)  # fmt: skip
def suspend(run: Run) -> dict[str, list[float] | list[list[float]]]:
    """Seconds of a process to leave the GPU and to come back, twice each, grouped by process.

    1 GiB of each of six frameworks and 16 GiB of PyTorch and CuPy. `left`: what NVML lists for a suspended process.
    `grown`: what a process of four frameworks has more on the card after its last round than after its first.
    """
    unit, card = (32 * MIB if run.quick else GIB), Card()
    found: dict[str, list[list[float]]] = {f"{way}_{size}_gib": [] for size in (1, 16) for way in ("out", "in")}
    left: list[float] = []
    env = {**GROWING, "XDG_RUNTIME_DIR": str(run.folder)}  # its processes take turns among themselves alone

    def started(*names: str) -> Child:
        child = run.start("target", *names, env=env, timeout=230)
        child.name = " ".join(names)
        return child

    def rounds(child: Child, times: int) -> tuple[list[float], list[float], list[int]]:
        out, back, bytes_ = [], [], []
        for _ in range(times):
            out.append(child.ask("off")["seconds"])
            left.append(card.listed().get(child.pid, 0) / MIB)
            back.append(child.ask("on")["seconds"])
            wrong = child.ask("check")["wrong"]
            if wrong:
                raise Failed(f"{child.name}: {wrong} arrays have other values")
            bytes_.append(card.listed().get(child.pid, 0))
        return out, back, bytes_

    def timed(child: Child, size: int) -> None:
        out, back, _ = rounds(child, run.rounds(2, 1))
        found[f"out_{size}_gib"].append(out)
        found[f"in_{size}_gib"].append(back)

    children = {name: started(name) for name in (*LARGE, *SMALL)}
    together = started(*TOGETHER)
    with ThreadPoolExecutor(len(children) + 1) as threads, contextlib.ExitStack() as end:
        end.callback(lambda: list(threads.map(left_card, [*children.values(), together])))
        begun = [threads.submit(child.ask, f'begin {{"size": {unit}}}') for child in children.values()]
        limits = threads.submit(together.ask, f'begin {{"size": {64 * MIB}, "limit": "16GiB"}}')
        for one in (*begun, limits):
            one.result()
        ready = time.monotonic()
        for name, child in children.items():
            if name == "jax":
                time.sleep(max(0.0, ready + QUIET_JAX - time.monotonic()))
            timed(child, 1)
            if name in LARGE:
                child.ask(f'begin {{"size": {15 * unit}}}')
                timed(child, 16)
        *_, bytes_ = rounds(together, run.rounds(ROUNDS, 2))
        if min(bytes_) < 64 * MIB:
            raise Failed(f"NVML listed {min(bytes_)} bytes of a process that was back")
    return {**found, "left": left, "grown": [(bytes_[-1] - bytes_[0]) / MIB]}


def left_card(child: Child) -> None:
    """End a process while it is suspended: one that was restored is not to be killed as it is."""
    with contextlib.suppress(Failed):
        child.ask("leave", LEAVES)
        child.close()


def program_target(*names: str) -> None:
    """Arrays of these frameworks, and what the parent asks."""
    import memguard

    frameworks = {name: Arrays(name) for name in torch_first(names)}
    kept: list[tuple[Arrays, Any, int, int]] = []

    def begin(size: int, limit: str | None = None) -> None:
        """So many bytes more of each framework, in blocks of 1 GiB; with `limit` under a budget with its monitor."""
        if limit is not None:
            share = {"share": f"{100 // len(names)}%"}
            monitor = {"interval": "100ms"}
            budget = {"version": 1, "device": {"limit": limit}, "frameworks": dict.fromkeys(names, share)}
            memguard.init({**budget, "monitor": monitor})
        for one in frameworks.values():
            if not any(owner is one for owner, *_ in kept):
                one.load()
                one.begin()
            left = size
            while left > 0:
                piece, seed = min(left, GIB), len(kept) + 1
                array = one.take(piece, seed)
                one.write(array, piece, seed)
                kept.append((one, array, piece, seed))
                left -= piece

    def off() -> dict[str, Any]:
        begun = time.monotonic()
        memguard.suspend(timeout=60)
        return {"seconds": time.monotonic() - begun}

    def on() -> dict[str, Any]:
        begun = time.monotonic()
        memguard.resume(timeout=60)
        return {"seconds": time.monotonic() - begun}

    def check() -> dict[str, Any]:
        return {"wrong": sum(not one.right(array, piece, seed) for one, array, piece, seed in kept)}

    def leave() -> dict[str, Any]:
        kept.clear()
        for one in frameworks.values():
            one.trim()
        memguard.suspend(timeout=60)
        return {}

    serve({"begin": begin, "off": off, "on": on, "check": check, "leave": leave})
    os._exit(0)


if __name__ == "__main__":
    main({"target": program_target})
