"""The tables of `exchange.py`'s results: in short for docs/results.md, whole for docs/exchange.md. Pure."""

from __future__ import annotations

from typing import Any

from _run import numba_note

PLAIN = {
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
    "jax": "JAX",
    "cupy": "CuPy",
    "pycuda": "PyCUDA",
    "numba": "Numba",
}
GIB = 1 << 30


def in_short(result: dict[str, Any], two: dict[str, Any] | None) -> list[str]:
    s = result["scenarios"]
    speed, order = s["speed"], _joined(s, "order from ", "order")
    same = sum(1 for name, one in s["pairs"]["pairs"].items() if name in order and one.get("same_pointer"))
    extra, worst = max((one["extra_us"], name) for name, one in speed["speed"].items() if one["extra_us"] is not None)
    slowest = max(one["memguard"]["median_us"] for one in speed["speed"].values())
    host = sorted(host_ms(speed, name) for name in speed["speed"])
    # A round in which nobody saw the kernel running shows nothing.
    seen, stale = sum(one["running_before"] for one in order.values()), sum(one["stale"] for one in order.values())
    by_hand = max(one["stale"] / one["rounds"] for one in s["order without memguard"]["ways"].values())
    edges = [one for name, one in s.items() if name.startswith("edges from ")]
    cases, deaths = sum(len(one["cases"]) for one in edges), sum(len(one["deaths"]) for one in edges)
    by_hand_died = ("misaligned into TensorFlow", "reversed into PyTorch")
    signals = [-s[f"control: {name}"]["returncode"] for name in by_hand_died]
    leak, gib = s["leak"], speed["bytes"] / GIB
    routes = "; ".join(f"{name} {_route(one)}" for name, one in s["routes"]["routes"].items())
    lines = [
        "| `memguard.exchange` | measured |",
        "| --- | --- |",
        f"| pairs of two of the six that share one pointer | {same} of {len(order)} |",
        f"| {gib:.0f} GiB handed over, idle streams | at most {slowest:.0f} µs (median of {speed['rounds']}), "
        f"{extra:+.0f} µs to the best way by hand at worst ({_pair(worst)}); through the host {host[0]:,.0f} to "
        f"{host[-1]:,.0f} ms |",
        f"| handed over while the producer's kernel was seen running | {stale} of {seen:,} stale; "
        f"by hand without order up to {by_hand:.0%} |",
        f"| sliced, reversed, misaligned, read-only and other odd arrays | {deaths} processes died in {cases} "
        f"hand-overs; by hand signal {signals[0]} (misaligned, TensorFlow) and {signals[1]} (reversed, PyTorch) |",
        f"| memory of the process after {leak.get('hand_overs', 0):,} hand-overs, by NVML | {_growth(leak)} |",
        f"| the same after a process that had attached an array was killed with -9 | {_growth(s['killed'])} |",
        f"| {gib:.0f} GiB from PyTorch to TensorFlow ¹ | {routes} |",
    ]
    if two is not None:
        copied = ", ".join(
            f"{PLAIN[name]} {one['gb_per_s']:.0f} GB/s{_through(one['route'])}"
            for name, one in two["scenarios"]["peers"]["peers"].items()
            if "gb_per_s" in one
        )
        lines.append(f"| {gib:.0f} GiB copied to another GPU | {copied} |")
    return lines


def whole(result: dict[str, Any], state: str = "") -> list[str]:
    """`state` is appended to the last line, such as that the result is stale."""
    about, s = result["about"], result["scenarios"]
    pairs, speed, order = s["pairs"]["pairs"], s["speed"], _joined(s, "order from ", "order")
    matrix = s["dtypes"]["dtypes"]
    columns = "| from \\ to | " + " | ".join(PLAIN.values()) + " |"
    rule = "| --- |" + " --- |" * len(PLAIN)

    def rows(cell: Any) -> list[str]:
        return [
            f"| {PLAIN[source]} | "
            + " | ".join("–" if source == target else cell(f"{source} > {target}") for target in PLAIN)
            + " |"
            for source in PLAIN
        ]

    def what(name: str) -> str:
        one = pairs[name]
        shared = "same pointer" if one.get("same_pointer") and one.get("right") else "**not shared**"
        count = sum(1 for outcome in matrix[name].values() if outcome == "shared")
        return f"{shared}; {_waits(name, order[name])} waits; {count} dtypes"

    def times(name: str) -> str:
        one = speed["speed"][name]
        best = "–" if one["best"] is None else f"{one['by_hand'][one['best']]['median_us']:.1f}"
        return f"{one['memguard']['median_us']:.1f} / {best} / {host_ms(speed, name):,.0f} ms"

    calls = {target: pairs[f"{'torch' if target != 'torch' else 'cupy'} > {target}"]["call"] for target in PLAIN}
    size = f"{speed['bytes'] / GIB:.0f} GiB"
    return [
        "What each hand-over does, as measured. The host waits if a kernel of a millisecond that ran before the",
        "hand-over was done after it; otherwise a stream waits.",
        "",
        columns,
        rule,
        "| *made with* | " + " | ".join(f"`{call}`" for call in calls.values()) + " |",
        *rows(what),
        "",
        f"{size}, idle streams: median of {speed['rounds']} with memguard / of the best way by hand, both in µs with",
        f"the end of the view / through the host (median of {speed['host']['rounds']}).",
        "",
        columns,
        rule,
        *rows(times),
        "",
        "Dtypes that are shared, by what the producer can make:",
        "",
        "| dtypes | made by | " + " | ".join(PLAIN.values()) + " |",
        "| --- | --- |" + " --- |" * len(PLAIN),
        *_dtype_rows(matrix),
        "",
        "Odd arrays, from all producers that can make them; with `copy=True` each of these arrives with equal values:",
        "",
        "| | " + " | ".join(PLAIN.values()) + " |",
        rule,
        *_edge_rows(s),
        "",
        f"{size} from PyTorch to TensorFlow, by each way:",
        "",
        "| way | |",
        "| --- | --- |",
        *(f"| {name} | {_route(one)} |" for name, one in s["routes"]["routes"].items()),
        "",
        f"{about['gpu']}, driver {about['driver']}, {about['date'][:10]}: `{about['command']}`, "
        "[h200-exchange.json](../benchmarks/results/h200-exchange.json). "
        f"TensorFlow {about['versions']['tensorflow']}, {about['tensorflow_build']}.{about_numba(about)}{state}",
    ]


def about_numba(about: dict[str, Any]) -> str:
    """A sentence on what was put back for Numba, if anything was."""
    note = numba_note(about)
    return f" Numba-CUDA {about['versions'].get('numba-cuda', '')} {note}." if note else ""


def _joined(scenarios: dict[str, Any], beginning: str, key: str) -> dict[str, Any]:
    return {
        name: one
        for scenario, outcome in scenarios.items()
        if scenario.startswith(beginning)
        for name, one in outcome.get(key, {}).items()
    }


def _pair(name: str) -> str:
    source, _, target = name.partition(" > ")
    return f"{PLAIN[source]} to {PLAIN[target]}"


def _through(route: str) -> str:
    """The route between two GPUs, where a result has one."""
    route = route.rpartition(", ")[2]
    return f" {route}" if route in ("peer to peer", "through the host") else ""


def _waits(name: str, one: dict[str, Any]) -> str:
    """Who waits for the producer's work. TensorFlow does not say whether it has any; its export waits."""
    return "stream" if one["running_before"] and one["running_after"] >= 0.5 * one["running_before"] else "host"


def host_ms(speed: dict[str, Any], name: str) -> float:
    source, _, target = name.partition(" > ")
    figure: float = speed["host"]["to_host_ms"][source] + speed["host"]["from_host_ms"][target]
    return figure


def _growth(one: dict[str, Any]) -> str:
    return f"{one['nvml_after'] - one['nvml_before']:+d} bytes" if "nvml_after" in one else "not measured"


def _route(one: dict[str, Any]) -> str:
    if "ms" not in one:
        return "not measured"
    figure = f"{one['ms'] * 1e3:.0f} µs" if one["ms"] < 1 else f"{one['ms']:,.0f} ms"
    if "export_ms" in one:
        figure += f" (export {one['export_ms']:.1f}, attach {one['attach_ms']:.1f})"
    return figure


def _dtype_rows(matrix: dict[str, dict[str, str]]) -> list[str]:
    """Dtypes of the same producers and consumers share a row."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    names = dict.fromkeys(dtype for outcomes in matrix.values() for dtype in outcomes)
    for dtype in names:
        made, takes = [], {}
        for source in PLAIN:
            into = {t: matrix.get(f"{source} > {t}", {}).get(dtype, "not made") for t in PLAIN if t != source}
            if all(outcome.startswith("not made") for outcome in into.values()):
                continue
            made.append(source)
            for target, outcome in into.items():
                takes.setdefault(target, []).append(outcome == "shared")
        cells = []
        for target in PLAIN:
            found = takes.get(target, [])
            cells.append("yes" if found and all(found) else "no" if not any(found) else "in part")
        groups.setdefault((tuple(made), tuple(cells)), []).append(dtype)
    rows = []
    for (made, cells), dtypes in groups.items():
        producers = "all six" if len(made) == len(PLAIN) else ", ".join(PLAIN[name] for name in made) or "none"
        rows.append(f"| {', '.join(dtypes)} | {producers} | {' | '.join(cells)} |")
    return rows


def _edge_rows(scenarios: dict[str, Any]) -> list[str]:
    """Each odd array: shared or refused by each consumer. Names the producers if they differ."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for scenario, outcome in scenarios.items():
        source = scenario.removeprefix("edges from ")
        if source == scenario:
            continue
        for case in outcome.get("cases", ()):
            if case["expected_copy"] == "equal":
                said = found.setdefault(case["case"], {}).setdefault(case["target"], {})
                said.setdefault(case["outcome"].partition(":")[0], []).append(PLAIN.get(source, source))

    def cell(said: dict[str, list[str]]) -> str:
        if len(said) < 2:
            return next(iter(said), "–")
        return ", ".join(f"{outcome} from {' and '.join(names)}" for outcome, names in said.items())

    return [
        f"| {name} | " + " | ".join(cell(targets.get(target, {})) for target in PLAIN) + " |"
        for name, targets in found.items()
    ]
