"""No request fails that idle memory could have served: elastic shares, reclaim, retry and one pool, on a real GPU.

    python benchmarks/elastic.py -o benchmarks/results/h200-elastic.json

a  reclaim     a sibling's idle cache holds all but 2 GiB of the card, and each of the six asks for 8 GiB. Control: the
               same of the plain frameworks. Some 110 s: TensorFlow and JAX wait 10 s for the driver, each twice.
b  moves       8 GiB go from one framework's cache to another's array, 100 times for each of 9 pairs from blocks of
               64 MiB, and as often as there is time from pieces of 2 MiB. Control: the giver is trimmed by hand before.
               Some 110 s, at most 170 (`AT_MOST` of `_elastic_moves.py`).
c  burst       PyTorch's bytes are live and idle in turn, and CuPy asks for its min and its max. Control: fixed shares.
               Some 40 s.
d  pool        five frameworks peak at 8 GiB in turn under `strategy: pool`, and a mix of allocations. Control: caches
               apart under `strategy: caps`; for the mix the plain libraries, twice, and RMM's pool. Some 110 s.
e  schedules   20 seeded schedules of six frameworks whose caps add up to twice the limit, judged by an oracle that
               knows no memguard. Control: two of them with fixed shares, for which it finds what could have been
               served. Some 120 s, eleven at a time: each request of TensorFlow or JAX that fails takes 10 s or 20.

The times are estimates from what the other benchmarks take, until a result has them. `--part ab` runs parts, `--only`
scenarios by name, separated by semicolons, and `--merge` takes the others from another run's JSON: the whole in two
calls is `--part ab -o ab.json`, and then `--part cde --merge ab.json`. Every scenario is a process of its own; another
one samples NVML, every 20 ms or as often as it can.

Part a needs the whole card: its processes import their libraries at the same time, and take turns on the card.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _elastic_arrays import CARD
from _elastic_burst import burst
from _elastic_checks import elastic_checks
from _elastic_moves import moves
from _elastic_pool import CAP, child, peaks, throughput
from _elastic_reclaim import reclaimed
from _elastic_schedules import played
from _listed import ELASTIC_CONTROLS, ELASTIC_SEEDS, SIX
from _run import attempt, conclude, emit, header, merged, run_scenario
from peers import Child

INTERVAL = 0.02
"""Seconds between two samples of a process."""
TIMEOUT = 240.0
GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""For plain TensorFlow and JAX: else each takes the card at its first operation, and no sibling has a cache."""
MIX = "mix"
"""It is run by the parent: its processes are many."""
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"reclaim {name}": functools.partial(reclaimed, name, True) for name in SIX},
    **{f"reclaim {name}, plain": functools.partial(reclaimed, name, False) for name in SIX},
    "moves": moves,
    "burst": functools.partial(burst, True),
    "burst, fixed shares": functools.partial(burst, False),
    "pool": functools.partial(peaks, "pool"),
    "pool, caps": functools.partial(peaks, "caps"),
    **{f"schedule {seed}": functools.partial(played, seed) for seed in ELASTIC_SEEDS},
    **{f"fixed shares, schedule {seed}": functools.partial(played, seed, False) for seed in ELASTIC_CONTROLS},
}
PARTS: dict[str, tuple[str, ...]] = {
    "a": tuple(name for name in SCENARIOS if name.startswith("reclaim ")),
    "b": ("moves",),
    "c": ("burst", "burst, fixed shares"),
    "d": ("pool", "pool, caps", MIX),
    "e": tuple(name for name in SCENARIOS if "schedule " in name),
}
AT_ONCE = {"a": 6, "e": 11}
"""Processes of a part that run at the same time. Where times count it is one."""


def run(card: str, name: str) -> tuple[str, dict[str, Any]]:
    """One scenario in a process of its own; `card` is the file that says who has the whole card."""
    if name == MIX:
        started = time.monotonic()
        outcome = attempt(lambda: throughput(functools.partial(Child, script=__file__)))
        outcome.setdefault("returncode", 0)
        outcome["wall_s"] = round(time.monotonic() - started, 1)
    else:
        plain = GROWING if name.endswith(", plain") else {}
        outcome = run_scenario(__file__, name, env={CARD: card, **plain}, timeout=TIMEOUT, interval=INTERVAL)
        outcome.pop("_stderr")
    print(f"{name}: rc {outcome['returncode']}, {outcome['wall_s']} s", file=sys.stderr, flush=True)
    if outcome["returncode"]:
        print(str(outcome.get("stderr_tail", ""))[-1200:], file=sys.stderr, flush=True)
    return name, outcome


def ran(names: Sequence[str]) -> dict[str, Any]:
    """These scenarios, part by part."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, of in PARTS.items():
            chosen = [name for name in of if name in names]
            with ThreadPoolExecutor(AT_ONCE.get(part, 1)) as threads:
                found.update(threads.map(functools.partial(run, str(Path(folder) / "card")), chosen))
    return found


def chosen(parts: str | None, only: str | None) -> list[str]:
    """The scenarios that are asked for; all if nothing is. SystemExit for a name that is none."""
    every = [name for of in PARTS.values() for name in of]
    if parts is None and only is None:
        return every
    wanted = [name for part in parts or "" for name in PARTS.get(part, (f"part {part}",))]
    wanted += only.split(";") if only else []
    if unknown := [name for name in wanted if name not in every]:
        raise SystemExit(f"no such scenario: {', '.join(unknown)}; there are: {'; '.join(every)}")
    return [name for name in every if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, default=CAP, help=argparse.SUPPRESS)
    parser.add_argument("--part", help="letters of parts, as ab")
    parser.add_argument("--only", help="names of scenarios, separated by semicolons")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    if arguments.child:
        library, way = arguments.child
        child(library, way, arguments.cap, sys.stdin)
        return
    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = [name for name in chosen(arguments.part, arguments.only) if name not in before]
    started = time.monotonic()
    scenarios = {**before, **ran(names)}
    result: dict[str, Any] = {"about": header("python benchmarks/elastic.py")}
    result["seconds"] = round(time.monotonic() - started, 1)
    result["scenarios"] = {name: scenarios[name] for of in PARTS.values() for name in of if name in scenarios}
    result["checks"] = elastic_checks(result["scenarios"])
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
