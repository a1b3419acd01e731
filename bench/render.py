"""Pages of the results: one a release in docs/results/, their index, and at most six rows of README's table.

Everything is made of the result files alone, so a page says what was measured then, whatever the tree is today."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.child import ROOT

README = (
    ("caps.process", "Most memory of a process with six frameworks under a budget of 40 GiB, by NVML"),
    ("training.resnet50", "Training steps of ResNet-50 under a budget and its monitor, against the same without"),
    ("readings.tick", "CPU time of a monitor tick while six frameworks are live and three allocate"),
    ("leak.before", "Time from the announcement of a leak of 1 GiB/s to its out-of-memory error"),
    ("elastic.move", "8 GiB from one framework's idle cache to another's array"),
    ("suspend.out_16_gib", "A process with 16 GiB leaves the GPU"),
)  # Rows of README's table, with what they are in its words.
HEADING = "## Measured"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def figure(row: Mapping[str, Any]) -> str:
    return f"{number(row['median'])} {row['unit']}".strip()


def spread(row: Mapping[str, Any]) -> str:
    return "one value" if row["n"] == 1 else f"{number(row['low'])} to {number(row['high'])}"


def excess(row: Mapping[str, Any]) -> float:
    """How many times its bar a missed row is; infinite without a figure."""
    if "error" in row:
        return float("inf")
    sign, _, bar = row["bar"].partition(" ")
    figures = (row.get("judged", row["median"]), float(bar))
    above, below = figures if sign == "<=" else reversed(figures)
    return above / below if below else float("inf")


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(one) for one in line)} |" for line in lines)


def verdict(row: Mapping[str, Any]) -> str:
    return "no figure" if "error" in row else {None: "", True: "yes", False: "**missed**"}[row["ok"]]


def attempts(row: Mapping[str, Any]) -> str:
    return ", ".join("no figure" if one is None else number(one) for one in row["attempts"])


def judged(row: Mapping[str, Any]) -> str:
    """The bar, and what is held against it if that is not the median."""
    if row["bar"] is None:
        return ""
    if "by" not in row:
        return row["bar"]  # type: ignore[no-any-return]
    what = "bound of the interval" if row["by"] == "high" else f"{row['by'][1:]} % of the values"
    return f"{row['bar']} ({what}: {number(row['judged'])})"


def section(measure: str, title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one measurement."""
    head = ["row", "median", "95 % interval", "n", "bar", "kept"]
    again = any(row["attempts"] for row in rows)
    lines = []
    for row in rows:
        known = "error" not in row
        line = [f"`{row['id']}`", figure(row) if known else "—", spread(row) if known else "—", row["n"]]
        lines.append([*line, judged(row), verdict(row), *([attempts(row)] if again else [])])
    failed = [f"`{row['id']}` has no figure: {cell(row['error'])}" for row in rows if "error" in row]
    parts = [f"## {measure}", f"{title}.", table([*head, *(["earlier attempts"] if again else [])], lines), *failed]
    return "\n\n".join(parts)


def machine(result: Mapping[str, Any]) -> str:
    """Which code, machine and day the figures are of."""
    commits = list(dict.fromkeys(row["commit"][:12] for row in result["rows"]))
    days = sorted({row["date"][:10] for row in result["rows"]})
    when = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "no day"
    where = f"{result['gpu'] or 'no GPU'}, driver {result['driver'] or 'none'}, {when}"
    dirty = ", with changes that were not committed" if result["dirty"] else ""
    return f"{where}; commit {', '.join(f'`{one}`' for one in commits)}{dirty}."


def page(version: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The page of a release: each of its results, one a card."""
    parts = [f"# Results of memguard {version}"]
    parts.append(
        "Each row is the median of n values with its 95 % bootstrap interval, which draws processes first. A bar is a "
        "target that was set before the measurement; for `overheads` it is what `reserve: auto` allows for. A "
        "measurement fails if an array that it reads back has a wrong value. A `control` compares a program with "
        "itself: it shows what chance alone does, and a ratio within it decides nothing."
    )
    for result in found:
        parts.append(f"Measured on {machine(result)}")
        listed = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        parts.append("\n".join([f"- {listed}.", *(f"- {note}" for note in result["notes"])]))
        bars = [row for row in result["rows"] if row["bar"] is not None or "error" in row]
        bad = [row for row in bars if row["ok"] is False]
        parts.append(f"**{len(bad)} of {len(bars)} bars are not reached.**")
        if bad:
            rows = [
                [f"`{one['id']}`", "no figure" if "error" in one else figure(one), judged(one), number(excess(one))]
                for one in sorted(bad, key=excess, reverse=True)
            ]
            parts.append(table(["row", "median", "bar", "times the bar"], rows))
        for name in dict.fromkeys(results.measure_of(row) for row in result["rows"]):
            title = result["measures"].get(name, {}).get("title", "No figure")
            parts.append(section(name, title, results.rows_of(result, name)))
    return "\n\n".join(parts) + "\n"


def index(releases: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The list of releases."""
    rows = []
    for version, found in releases.items():
        for result in found:
            bars = [row for row in result["rows"] if row["bar"] is not None or "error" in row]
            good = sum(row["ok"] is not False for row in bars)
            day = max((row["date"][:10] for row in result["rows"]), default="")
            rows.append([f"[{version}]({version}.md)", result["gpu"], result["driver"], day, f"{good} of {len(bars)}"])
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *releases, "```"])
    listed = table(["version", "card", "driver", "date", "bars reached"], rows)
    said = (
        "Figures of each release, as they were measured then. Its page begins with the bars that it does not reach: "
        "targets that were set before. `python -m bench status` lists what has changed since."
    )
    return f"# Results\n\n{said}\n\n{listed}\n\n{toctree}\n"


def readme(text: str, result: Mapping[str, Any]) -> str:
    """README with its table of figures made anew. As it was, if it has no such heading."""
    rows = {row["id"]: row for row in result["rows"] if "error" not in row}
    day = max((row["date"][:10] for row in rows.values()), default="")
    head = [f"memguard {result['version']} on {result['gpu'] or 'no GPU'}, {day}", "median", "95 % interval", "bar"]
    chosen = [(what, rows[name]) for name, what in README if name in rows][:6]
    lines = [[what, figure(row), spread(row), f"{row['bar'] or ''} {'**missed**' * (row['ok'] is False)}"]
             for what, row in chosen]  # fmt: skip
    before, heading, rest = text.partition(f"\n{HEADING}\n")
    if not heading or not lines:
        return text
    end = re.search(r"^## ", rest, re.MULTILINE)
    body, after = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    new = table(head, lines) + "\n"
    there = re.search(r"(?:^\|.*\n?)+", body, re.MULTILINE)
    body = body[: there.start()] + new + body[there.end() :] if there else f"\n{new}{body}"
    return before + heading + body + after


def files(root: Path = ROOT) -> dict[Path, str]:
    """Every file that is rendered, and its text."""
    releases: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(root.glob("bench/results/v*.json")):
        result = results.load(path)
        releases.setdefault(result["version"], []).append(result)
    newest = dict(sorted(releases.items(), key=lambda one: key(one[0]), reverse=True))
    folder = root / "docs" / "results"
    made = {folder / f"{version}.md": page(version, found) for version, found in newest.items()}
    if newest:
        made[folder / "index.md"] = index(newest)
        path = root / "README.md"
        if path.exists():
            ids, every = {name for name, _ in README}, [one for found in newest.values() for one in found]
            whole = [one for one in every if ids <= {row["id"] for row in one["rows"]}]  # not one in the making
            made[path] = readme(path.read_text(), [*whole, every[0]][0])
    return made


def key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main(check: bool = False, root: Path = ROOT) -> int:
    """Write them; with `check` only say which would change, and return 1 if any would."""
    changed = {path: text for path, text in files(root).items() if not path.exists() or path.read_text() != text}
    for path, text in changed.items():
        print(f"{'would change' if check else 'wrote'} {path.relative_to(root)}", file=sys.stderr)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return 1 if check and changed else 0
