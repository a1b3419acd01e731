"""The ledger against what NVML and CUPTI say of the same memory, with six frameworks in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs import cupti, six
from bench.programs.six import GIB, MIB, NAMES, PAGE, RETURNING

if TYPE_CHECKING:
    from memguard.types import FrameworkName

SEED = 20261122
SEEN = tuple(name for name in NAMES if name != "jax")
"""The frameworks of which CUPTI's records have every allocation. Of JAX's pool they have a part only."""
PARTS = {"large": ("MiB", "<= 2"), "small": ("%", "<= 5"), "emptied": ("MiB", "<= 16"), "in_use": ("%", "<= 6.25")}
ROWS = {f"{part}.{name}": what for part, what in PARTS.items() for name in RETURNING}
CUPTI = {f"cupti.{name}": ("%", "<= 2") for name in SEEN}
MORE = {"large.jax": ("MiB", "<= 2"), "raw": ("MiB", "<= 2"), "unaccounted": ("MiB", "<= 64")}
EVERY = {**ROWS, **CUPTI, **MORE}


@measure(
    "ledger", unit={name: unit for name, (unit, _) in EVERY.items()},
    bar={name: bar for name, (_, bar) in EVERY.items()}, seconds=35,
)  # fmt: skip
def ledger(run: Run) -> dict[str, Any]:
    """What the ledger says of six frameworks' memory, held to NVML's figures and CUPTI's."""

    def rows(name: str, read: Callable[[dict[str, Any]], dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
        try:
            return read(run.program(name, *(["quick"] if run.quick else []), timeout=120))
        except Failed as error:  # the other one's rows count
            return dict.fromkeys(names, error)

    with ThreadPoolExecutor(2) as both:  # each has its own process's figures only
        told = both.submit(rows, "counted", _by_nvml, ("raw", "unaccounted", *ROWS))
        return {**rows("cupti", _by_cupti, ("large.jax", *CUPTI)), **told.result()}


def _by_nvml(told: dict[str, Any]) -> dict[str, Any]:
    counted = {f"{part}.{name}": [figure] for name, one in told["counted"].items() for part, figure in one.items()}
    return {"raw": [told["raw"] / MIB], "unaccounted": [told["unaccounted"] / MIB], **counted}


def _by_cupti(seen: dict[str, Any]) -> dict[str, Any]:
    found = {"large.jax": [seen["jax"] / MIB]}
    for name in SEEN:
        held, taken = seen["held"][name], seen["cupti"].get(name, 0)
        found[f"cupti.{name}"] = [100 * abs(held - taken) / taken if taken else 100]
    return found


def program_counted(quick: str = "") -> dict[str, Any]:
    """Arrays of each framework that returns memory, by the ledger and NVML, and memory past every framework.
    TensorFlow without growth: then it says what it holds, and nothing of its pool is unaccounted."""
    _, readings = six.all_live(six.budget((16 if quick else 40) * GIB, growth=False))
    counts = (4, 40) if quick else (24, 400)
    counted = {}
    for name in RETURNING:
        counted[name] = _counted(name, *counts)
        readings.append(six.reading())
    return {"counted": counted, "raw": _raw(), "unaccounted": six.worst(readings)}


def _counted(name: FrameworkName, large: int, small: int) -> dict[str, float]:
    """One framework's large arrays, small arrays and end.

    large, emptied   MiB by which the change of `held` and that of NVML's figure differ
    small            the same in percent of NVML's change
    in_use           percent of `in_use` beyond what the live arrays were asked for with
    """
    import memguard

    take, rng = six.allocator(name)[0], random.Random(SEED)
    memguard.trim(name)
    before, asked = (six.held(name), six.bytes_now()), six.row_of(name)["in_use"] or 0
    live: list[Any] = []

    def change() -> tuple[int, int]:
        """Bytes by which both changes differ, and NVML's."""
        nonlocal before
        after = six.held(name), six.bytes_now()
        said, true = after[0] - before[0], after[1] - before[1]
        before = after
        return abs(said - true), abs(true)

    def add(count: int, low: int, high: int) -> tuple[int, int]:
        nonlocal asked
        sizes = [rng.randint(low, high) for _ in range(count)]
        live.extend([take(size) for size in sizes])
        asked += sum(sizes)
        return change()

    off_large, _ = add(large, PAGE, 64 * MIB)
    off_small, true_small = add(small, 1, MIB)
    in_use = six.row_of(name)["in_use"]
    if in_use < asked:
        raise AssertionError(f"{name}: {asked} bytes asked for are live, and the ledger says {in_use} in use")
    live.clear()
    memguard.trim(name)
    off_emptied, _ = change()
    return {
        "large": off_large / MIB, "small": 100 * off_small / max(true_small, 1), "emptied": off_emptied / MIB,
        "in_use": 100 * (in_use - asked) / asked,
    }  # fmt: skip


def _raw() -> int:
    """The most bytes by which `unaccounted` differs from memory that no framework took, and after its free from 0."""
    raw, off = six.Raw(), []
    for size in (16 * MIB, 100 * MIB, 300 * MIB):
        before = six.reading()["unaccounted"]
        address = raw.take(size)
        off.append(abs(six.reading()["unaccounted"] - before - size))
        raw.give(address)
        off.append(abs(six.reading()["unaccounted"] - before))
    return int(max(off))


def program_cupti(quick: str = "") -> dict[str, Any]:
    """What each of six holds by the ledger, and what CUPTI saw its library take. `jax`: see `by_cupti`."""
    found = cupti.by_cupti(six.budget((16 if quick else 40) * GIB, growth=False))
    said, true = (found["pool"][who][0] - found["pool"][who][1] for who in ("held", "nvml"))
    if true < 256 * MIB:
        raise AssertionError(f"JAX's pool grew by {true} bytes only")
    return {"held": found["held"], "cupti": found["cupti"], "jax": abs(said - true)}


if __name__ == "__main__":
    main({"counted": program_counted, "cupti": program_cupti})
