"""The ledger against what NVML and CUPTI say of the same memory, with six frameworks in one process."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs.six import GIB, MIB, NAMES, PAGE, RETURNING

if TYPE_CHECKING:
    from memguard.types import FrameworkName

LIMIT = 40 * GIB
SEED = 20261122
SEEN = tuple(name for name in NAMES if name != "jax")
"""The frameworks of which CUPTI's records have every allocation. Of JAX's pool they have a part only."""
LIBRARIES = (
    ("tensorflow", "libtensorflow"), ("torch", "libc10_cuda"), ("torch", "libcudart"), ("jax", "xla_cuda_plugin"),
    ("cupy", "runtime.cpython"), ("pycuda", "_driver.cpython"), ("numba", "cydriver"),
)  # fmt: skip
"""The beginning of the file name of the library that takes memory for each framework (seen by CUPTI on an H200).

PyTorch alone takes memory through the shared CUDA runtime, which CUPTI names if TensorFlow is in the process too.
"""
PARTS = {"large": ("MiB", "<= 2"), "small": ("%", "<= 5"), "emptied": ("MiB", "<= 16"), "in_use": ("%", "<= 6.25")}
ROWS = {f"{part}.{name}": what for part, what in PARTS.items() for name in RETURNING}
CUPTI = {f"cupti.{name}": ("%", "<= 2") for name in SEEN}
MORE = {"large.jax": ("MiB", "<= 2"), "raw": ("MiB", "<= 2"), "unaccounted": ("MiB", "<= 64")}
EVERY = {**ROWS, **CUPTI, **MORE}


@measure(
    "ledger",
    unit={name: unit for name, (unit, _) in EVERY.items()},
    bar={name: bar for name, (_, bar) in EVERY.items()},
    seconds=35,
)
def ledger(run: Run) -> dict[str, Any]:
    """What the ledger says of six frameworks' memory, held to NVML's figures and CUPTI's."""

    def program(name: str) -> dict[str, Any] | Failed:
        try:
            return run.program(name, *(["quick"] if run.quick else []), timeout=120)
        except Failed as error:  # the other one's rows count
            return error

    with ThreadPoolExecutor(2) as both:  # each has its own process's figures only
        told, seen = both.map(program, ("counted", "cupti"))
    return {**_by_nvml(told), **_by_cupti(seen)}


def _by_nvml(told: dict[str, Any] | Failed) -> dict[str, Any]:
    if isinstance(told, Failed):
        return dict.fromkeys(("raw", "unaccounted", *ROWS), told)
    counted = {f"{part}.{name}": [figure] for name, one in told["counted"].items() for part, figure in one.items()}
    return {"raw": [told["raw"] / MIB], "unaccounted": [told["unaccounted"] / MIB], **counted}


def _by_cupti(seen: dict[str, Any] | Failed) -> dict[str, Any]:
    if isinstance(seen, Failed):
        return dict.fromkeys(("large.jax", *CUPTI), seen)
    found = {"large.jax": [seen["jax"] / MIB]}
    for name in SEEN:
        held, taken = seen["held"][name], seen["cupti"].get(name, 0)
        found[f"cupti.{name}"] = [100 * abs(held - taken) / taken if taken else 100]
    return found


# By NVML


def program_counted(quick: str = "") -> dict[str, Any]:
    """Arrays of each framework that returns memory, by the ledger and NVML, and memory past every framework.

    TensorFlow without growth: then it says what it holds, and nothing of its pool is unaccounted.
    """
    from bench.programs import six

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
    from bench.programs import six

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
    from bench.programs import six

    raw, off = six.Raw(), []
    for size in (16 * MIB, 100 * MIB, 300 * MIB):
        before = six.reading()["unaccounted"]
        address = raw.take(size)
        off.append(abs(six.reading()["unaccounted"] - before - size))
        raw.give(address)
        off.append(abs(six.reading()["unaccounted"] - before))
    return int(max(off))


# By CUPTI


class Cupti:
    """The device memory that each library has taken from the driver and not given back, as CUPTI's records tell it.

    Made before CUDA starts. CUPTI serves one subscriber, so nothing else in the process may use it.
    """

    def __init__(self) -> None:
        from cupti import cupti  # type: ignore[import-not-found]

        self.cupti, self.records = cupti, []  # type: ignore[var-annotated]
        cupti.activity_enable(cupti.ActivityKind.MEMORY2)
        cupti.activity_enable_allocation_source(1)
        cupti.activity_register_callbacks(lambda: (64 * MIB, 0), self._take)  # so few ask for a buffer

    def _take(self, activities: Iterable[Any]) -> None:
        kind = self.cupti.ActivityKind.MEMORY2
        for one in activities:
            if one.kind == kind:
                self.records.append(
                    (one.timestamp, one.memory_operation_type, one.memory_kind, one.address, one.bytes, one.source)
                )

    def live(self) -> dict[str, int]:
        """Bytes by framework, and by library for the others. An allocation above 1 MiB counts in whole pages."""
        self.cupti.activity_flush_all(1)
        operation, kind = self.cupti.ActivityMemoryOperationType, self.cupti.ActivityMemoryKind
        return live_bytes(self.records, int(operation.ALLOCATION), int(operation.RELEASE), int(kind.DEVICE))


def live_bytes(records: Iterable[tuple[Any, ...]], taken: int, given: int, device: int) -> dict[str, int]:
    """The sum of what was taken and not given back: (time, operation, kind, address, bytes, library) each."""
    live: dict[int, tuple[int, str]] = {}
    for _, operation, kind, address, size, source in sorted(records, key=lambda record: record[0]):
        if operation == taken and kind == device:
            live[address] = (size if size <= MIB else -(-size // PAGE) * PAGE, framework_of(source))
        elif operation == given:
            live.pop(address, None)
    found: dict[str, int] = {}
    for size, name in live.values():
        found[name] = found.get(name, 0) + size
    return found


def framework_of(source: str | None) -> str:
    """The framework of a library that takes memory; the library's own name if it is none of the six."""
    file = PurePosixPath(source or "unknown").name
    return next((name for name, begins in LIBRARIES if file.startswith(begins)), file)


def program_cupti(quick: str = "") -> dict[str, Any]:
    """All six live and with arrays: what each holds by the ledger, and what CUPTI saw its library take.

    Of JAX's pool CUPTI's records have a part only, of which NVML's figure has all. So that pool grows once more: `jax`
    is the difference of what the ledger and NVML say of that growth. CUPTI is asked before: it has named Numba's
    library for 512 MiB of that growth.
    """
    seen = Cupti()
    from bench.programs import six

    guard, _ = six.all_live(six.budget((16 if quick else 40) * GIB, growth=False))
    caps = guard.plan.devices[0].caps
    driven = {name: six.Driven(name, caps[name], SEED) for name in NAMES}
    for one in driven.values():
        for _ in range(12):
            one.add(PAGE, 64 * MIB)
        for _ in range(20):
            one.add(1, MIB)
    held, taken = {name: one.held() for name, one in driven.items()}, seen.live()
    jax = driven["jax"]
    before = jax.held(), six.bytes_now()
    while jax.held() - before[0] < 512 * MIB and len(jax.live) < 100:
        jax.add(64 * MIB, 64 * MIB)
    said, true = jax.held() - before[0], six.bytes_now() - before[1]
    if true < 256 * MIB:
        raise AssertionError(f"JAX's pool grew by {true} bytes only")
    return {"held": held, "cupti": taken, "jax": abs(said - true), "records": len(seen.records)}


if __name__ == "__main__":
    main({"counted": program_counted, "cupti": program_cupti})
