"""What others than memguard know of this process's memory, to hold its ledger and its refusals to.

NVML's figure for the process, memory of a known size taken past every framework, the driver's figure before and after a
framework is emptied, what CUPTI saw each library take, and whether a request that was refused would have stayed within
the cap. The ledger's figures come from outside, as calls, to be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.programs.six import GIB, MIB, PAGE, Raw
from support.arrays import nvml_bytes

SEED = 20261122


def bytes_now() -> int:
    """What this process holds of the first GPU by NVML, in bytes. RuntimeError if that is not told."""
    found = nvml_bytes()
    if found < 0:
        raise RuntimeError("NVML does not tell this process's bytes")
    return found


def raw_memory(unaccounted: Callable[[], int], sizes: Iterable[int] = (16 * MIB, 100 * MIB, 300 * MIB)) -> list[Any]:
    """For each size: `unaccounted` before, with so much raw memory, and after its free; and NVML's figure of each."""
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
    """Whether each raw allocation appears within a page, and goes with its free."""
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
    """What the ledger says that a framework holds, and what the driver says of the process, before and after. Small
    pieces of several frameworks lie in the same slabs: a slab goes back with its last piece, whoever has it. The
    ledger has what is free in slabs in `overhead`, of which nothing else goes back meanwhile: it is given if others
    are there too."""
    before = held(), bytes_now(), overhead and overhead()
    empty()
    after = held(), bytes_now(), overhead and overhead()
    more = {"overhead": [before[2], after[2]]} if overhead is not None else {}
    return {"name": name, "held": [before[0], after[0]], "nvml": [before[1], after[1]], **more}


def agrees(one: Mapping[str, Any], bound: int, least: int) -> tuple[bool, str]:
    """Whether both changed by the same within `bound` bytes, and by `least` at least."""
    if None in one["held"]:
        return False, "held is not known"
    said, true = one["held"][0] - one["held"][1], one["nvml"][0] - one["nvml"][1]
    gaps = one["overhead"][0] - one["overhead"][1] if "overhead" in one else 0
    good = abs(said + gaps - true) <= bound and abs(true) >= least
    slabs = f" and what is free in slabs by {gaps / MIB:,.1f}" if "overhead" in one else ""
    return good, f"held changed by {said / MIB:,.1f} MiB{slabs}, the driver's figure by {true / MIB:,.1f}"


def counted(take: Callable[[int], Any], row: Callable[[], Mapping[str, Any]], empty: Callable[[], Any]) -> Any:
    """One framework's large arrays, small arrays and end: the ledger's row and the driver's figure around each.
    `asked` is what all live arrays were asked for with, which `in_use` of the row is held to."""
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
    """Whether `in_use` is what was asked for: not less, and about a sixteenth more at most, as PyCUDA rounds."""
    asked, said = one["asked"], one["in_use"]
    good = said is not None and asked <= said <= asked + asked // 16 + 4 * MIB
    return good, f"{(said or 0) / MIB:,.1f} MiB in use, {asked / MIB:,.1f} asked for"


def refusals(name: str, cap: int = GIB, rounds: int = 40, beside: bool = False) -> dict[str, Any]:
    """Random requests until each is refused, and then the same request under a cap that is raised page by page. If
    what the driver then gives leaves the framework within the old cap, the refusal was wrong: no account of pages is
    asked, neither memguard's nor another model. The framework is alone: what the process's figure grows by is its own.
    `beside`: there are slabs of others with holes, as other frameworks leave them. The framework's pieces in those
    cost the driver nothing, so what counts is `held` of the ledger once the request was granted."""
    import memguard
    from memguard import _api

    memguard.init({"version": 1, "device": {"limit": 4 * GIB}, "frameworks": {name: {"limit": cap}}})
    from support.driving import allocator, load

    load(name)
    take, native = allocator(name)
    take(MIB)  # live, with its context; freed at once
    memguard.trim(name)
    rng, live = random.Random(SEED), []
    if beside:
        raw = Raw()
        pieces = [raw.take(rng.randint(1, MIB)) for _ in range(120)]
        for address in pieces[::2]:
            raw.give(address)
    empty = bytes_now()  # a trim of a pool without live blocks leaves nothing in it
    guard = _api.current()
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
        memguard.trim(name)  # what the trial left idle is above the cap
    return {"name": name, "cap": cap, "beside": beside, "tried": tried, "foreign": foreign}


def trial(
    size: int, cap: int, held: Callable[[], int], take: Callable[[int], Any], native: type[BaseException],
    resize: Callable[[int], Any],
) -> dict[str, Any]:  # fmt: skip
    """Take what was refused under the smallest cap that allows it, and what `held` grows by."""
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
"""CuPy's pool counts what it asks for: the gaps in its slabs may pass its cap, by one part in so many at most."""


def refused_rightly(found: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether each refused request would have passed the cap, had it been granted, and nothing passed it before."""
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
    """Whether the ledger's figure is CUPTI's, within 2 % and two pages: small allocations leave room in their slabs."""
    held, taken = found["held"][name], found["cupti"].get(name, 0)
    bound = taken // 50 + 2 * PAGE
    good = taken >= 64 * MIB and abs(held - taken) <= bound
    return good, f"held {held / MIB:,.1f} MiB, its library took {taken / MIB:,.1f} (within {bound / MIB:.1f})"
