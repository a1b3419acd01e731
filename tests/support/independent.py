"""Measurements independent of memguard, as the reference for its ledger and its refusals.

They are: NVML's figure for the process; raw memory of a known size allocated outside every framework; the driver's
figure before and after emptying a framework; the allocations of each library by CUPTI; and whether granting a refused
request would have exceeded the cap. The ledger's figures are passed in as callables and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.programs.six import GIB, MIB, PAGE, Raw
from support.arrays import nvml_bytes

SEED = 20261122


def bytes_now() -> int:
    """This process's bytes on the first GPU by NVML. RuntimeError if NVML does not report them."""
    found = nvml_bytes()
    if found < 0:
        raise RuntimeError("NVML does not tell this process's bytes")
    return found


def raw_memory(unaccounted: Callable[[], int], sizes: Iterable[int] = (16 * MIB, 100 * MIB, 300 * MIB)) -> list[Any]:
    """For each size, `unaccounted` and NVML's figure: before the raw allocation, with it, and after its free."""
    raw, found = Raw(), []
    for size in sizes:
        figures = [(unaccounted(), bytes_now())]
        address = raw.take(size)
        figures.append((unaccounted(), bytes_now()))
        raw.give(address)
        figures.append((unaccounted(), bytes_now()))
        found.append({"bytes": size, "unaccounted": [u for u, _ in figures], "nvml": [n for _, n in figures]})
    return found


def raw_is_unaccounted(found: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether each raw allocation appears in `unaccounted`, within a page, and disappears with its free."""
    wrong, said = [], []
    for one in found:
        before, with_it, after = one["unaccounted"]
        grown, left = with_it - before, after - before
        true = one["nvml"][1] - one["nvml"][0]
        good = abs(grown - one["bytes"]) <= PAGE and abs(left) <= PAGE and abs(true - one["bytes"]) <= PAGE
        said.append(f"{one['bytes'] / MIB:.0f} MiB: {grown / MIB:+.1f}, freed: {left / MIB:+.1f}")
        if not good:
            wrong.append(said[-1])
    return len(found) >= 3 and not wrong, "; ".join(said) or "none was taken"


def emptied(
    name: str, held: Callable[[], int | None], empty: Callable[[], Any], overhead: Callable[[], int] | None = None
) -> dict[str, Any]:
    """The ledger's bytes of a framework, and the driver's of the process, before and after. Small blocks of several
    frameworks share slabs, and the last block's free returns a slab. The ledger counts free slab space in `overhead`,
    from which nothing else is freed here: `overhead` is included if other frameworks are live."""
    before = held(), bytes_now(), overhead and overhead()
    empty()
    after = held(), bytes_now(), overhead and overhead()
    more = {"overhead": [before[2], after[2]]} if overhead is not None else {}
    return {"name": name, "held": [before[0], after[0]], "nvml": [before[1], after[1]], **more}


def agrees(one: Mapping[str, Any], bound: int, least: int) -> tuple[bool, str]:
    """Whether both figures changed by the same amount within `bound` bytes, and by at least `least`."""
    if None in one["held"]:
        return False, "held is not known"
    said, true = one["held"][0] - one["held"][1], one["nvml"][0] - one["nvml"][1]
    gaps = one["overhead"][0] - one["overhead"][1] if "overhead" in one else 0
    good = abs(said + gaps - true) <= bound and abs(true) >= least
    slabs = f" and what is free in slabs by {gaps / MIB:,.1f}" if "overhead" in one else ""
    return good, f"held changed by {said / MIB:,.1f} MiB{slabs}, the driver's figure by {true / MIB:,.1f}"


def counted(take: Callable[[int], Any], row: Callable[[], Mapping[str, Any]], empty: Callable[[], Any]) -> Any:
    """Large arrays, small arrays and their frees for one framework: the ledger's row and the driver's figure around
    each. `asked` is the requested size of all live arrays, to compare with `in_use`."""
    rng = random.Random(SEED)
    empty()
    before, found, live, asked = (row(), bytes_now()), {}, [], row()["in_use"] or 0
    for label, count, low, high in (("large", 24, 2 * MIB, 64 * MIB), ("small", 400, 1, MIB), ("emptied", 0, 0, 0)):
        sizes = [rng.randint(low, high) for _ in range(count)]
        if label == "emptied":
            live.clear()
            empty()
        live += [take(size) for size in sizes]
        asked += sum(sizes)
        after = row(), bytes_now()
        found[label] = {
            "held": [after[0]["held"], before[0]["held"]], "nvml": [after[1], before[1]], "in_use": after[0]["in_use"],
            "asked": asked if live else None,
        }  # fmt: skip
        before = after
    return found


def in_use_is_live(one: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether `in_use` is at least the requested size, and at most about a sixteenth above it, since PyCUDA rounds
    up."""
    asked, said = one["asked"], one["in_use"]
    good = said is not None and asked <= said <= asked + asked // 16 + 4 * MIB
    return good, f"{(said or 0) / MIB:,.1f} MiB in use, {asked / MIB:,.1f} asked for"


def refusals(name: str, cap: int = GIB, rounds: int = 40, beside: bool = False) -> dict[str, Any]:
    """Make random requests until each is refused, then repeat the refused one while raising the cap page by page. The
    refusal was wrong if the framework stays within the old cap after the grant. This needs no page accounting, neither
    memguard's nor another model's. No other framework allocates, so the process's figure grows only by this one's
    memory. `beside`: other frameworks have slabs with holes. Blocks in these holes cost the driver nothing, so the
    criterion is then the ledger's `held` after the grant."""
    import memguard
    from memguard import api

    memguard.init({"version": 1, "device": {"limit": 4 * GIB}, "frameworks": {name: {"limit": cap}}})
    from support.driving import allocator, load

    load(name)
    take, native = allocator(name)
    take(MIB)  # initialised, with its context; freed at once
    memguard.trim(name)
    rng, live = random.Random(SEED), []
    if beside:
        raw = Raw()
        pieces = [raw.take(rng.randint(1, MIB)) for _ in range(120)]
        for address in pieces[::2]:
            raw.give(address)
    empty = bytes_now()  # a trim of a pool without live blocks empties it
    guard = api.current()
    device, framework = guard.plan.devices[0].device, guard.frameworks[name]

    def held() -> int:
        if not beside:
            return bytes_now() - empty
        usage = framework.usage(device)
        return (usage.held or 0) if usage is not None else 0

    tried, foreign = [], []
    for number in range(rounds):
        low, high = (1, MIB) if number % 2 else (MIB + 1, 64 * MIB)
        rng.shuffle(live)
        del live[: rng.randint(1, 1 + len(live) // 4)]
        while True:
            size = rng.randint(low, high)
            try:
                live.append(take(size))
            except native:
                break
            except Exception as error:
                foreign.append(f"{type(error).__name__}: {error}"[:160])
                break
        tried.append(trial(size, cap, held, take, native, lambda to: memguard.resize(name, to)))
        memguard.trim(name)  # the idle remainder of the trial exceeds the cap
    return {"name": name, "cap": cap, "beside": beside, "tried": tried, "foreign": foreign}


def trial(
    size: int, cap: int, held: Callable[[], int], take: Callable[[int], Any], native: type[BaseException],
    resize: Callable[[int], Any],
) -> dict[str, Any]:  # fmt: skip
    """Grant the refused request under the smallest sufficient cap, and return the growth of `held`."""
    before, more, one = held(), 0, None
    try:
        while one is None and more <= 256 * MIB:
            more = max(2 * more, PAGE)
            resize(cap + more)
            try:
                one = take(size)
            except native:
                continue
        after = held()
    finally:
        one = None
        resize(cap)
    return {"bytes": size, "held": before, "raised_by": more, "grown": after - before, "would_hold": after}


GAPS = {"cupy": 20}
"""CuPy's pool counts requested bytes: gaps in its slabs may exceed its cap, by at most this fraction."""


def refused_rightly(found: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether every refused request, if granted, would have exceeded the cap, and nothing exceeded it before."""
    tried, cap = found["tried"], found["cap"]
    gaps = cap // GAPS[found["name"]] if found["name"] in GAPS and not found["beside"] else 0
    wrong = [one for one in tried if one["would_hold"] <= cap]
    said = "; ".join(
        f"{one['bytes']:,} bytes with {one['held']:,} of {cap:,} held: {one['grown']:+,} when granted"
        for one in wrong[:3]
    )
    over = [one for one in tried if one["held"] > cap + gaps]
    good = len(tried) >= 40 and not wrong and not over and not found["foreign"]
    return good, (
        f"{len(tried) - len(wrong)} of {len(tried)} right {said} {found['foreign'][:2] or ''}"
        f"{f' {len(over)} times above the cap already' if over else ''}"
    ).strip()


def seen_by_cupti(found: Mapping[str, Any], name: str) -> tuple[bool, str]:
    """Whether the ledger's figure matches CUPTI's within 2 % and two pages: small allocations leave gaps in slabs."""
    held, taken = found["held"][name], found["cupti"].get(name, 0)
    bound = taken // 50 + 2 * PAGE
    good = taken >= 64 * MIB and abs(held - taken) <= bound
    return good, f"held {held / MIB:,.1f} MiB, its library took {taken / MIB:,.1f} (within {bound / MIB:.1f})"
