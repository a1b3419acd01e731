"""200 processes, 20 at a time, that claim and die at random, kill -9 among them, for 30 s.

What is true of them is found without memguard: by plain SQLite, many times a second, and afterwards from what each
process has written down by CLOCK_MONOTONIC. The figures are printed (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

SECONDS = float(os.environ.get("MEMGUARD_TEST_CROWD", "30"))
LEAST, AT_ONCE, TOTAL = 200, 20, 1000
FREE = 10.0
"""Seconds within which what a dead process had must be another's, on a machine with other work."""
HELD = "SELECT gpu, sum(bytes) FROM claims JOIN parts ON parts.claim = claims.id WHERE state = 'held' GROUP BY gpu"
Line = dict[str, Any]


def looked(database: Path) -> dict[str, int] | None:
    """What is held now by the rows; None while the database is not there, or is being opened by another."""
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)
        try:
            return dict(connection.execute(HELD).fetchall())
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return None


def spans(lines: list[Line]) -> list[tuple[float, float, dict[str, int]]]:
    """When each process surely held what: from its own first word after the grant to the last before its end."""
    began: dict[str, Line] = {}
    found = []
    for line in lines:
        name = line["name"]
        if line["what"] == "has":
            began[name] = line
        elif line["what"] in ("ends", "is killed") and name in began:
            first = began.pop(name)
            found.append((first["at"], line["at"], first["sizes"]))
    return found


def most(found: list[tuple[float, float, dict[str, int]]]) -> dict[str, int]:
    """The largest sum that was held at one moment, by GPU."""
    moves = [(begin, 1, gpu, size) for begin, _, sizes in found for gpu, size in sizes.items()]
    moves += [(end, 0, gpu, -size) for _, end, sizes in found for gpu, size in sizes.items()]  # an end comes first
    now, top = defaultdict[str, int](int), defaultdict[str, int](int)
    for _, _, gpu, size in sorted(moves):
        now[gpu] += size
        top[gpu] = max(top[gpu], now[gpu])
    return dict(top)


def overtaken(lines: list[Line]) -> list[str]:
    """Who was granted a GPU before one that had waited longer for it and lived."""
    numbers = {line["name"]: line["number"] for line in lines if line.get("number") is not None}
    sizes = {line["name"]: line["sizes"] for line in lines if "sizes" in line}
    since = {line["name"]: line["since"] for line in lines if line["what"] == "has"}
    died = {line["name"]: line["unix"] for line in lines if line["what"] in ("is killed", "ends", "fails")}
    wrong = []
    for later, granted in since.items():
        for earlier, number in numbers.items():
            if number < numbers[later] and not set(sizes[earlier]).isdisjoint(sizes[later]):
                own = since.get(earlier)
                if own is None:  # killed while it waited, or granted and killed before it could say so
                    own = died[earlier]
                if own > granted + (0 if earlier in since else 0.5):
                    wrong.append(f"{later} before {earlier}: {own - granted:.3f} s")
    return wrong


def turns(lines: list[Line]) -> list[float]:
    """Of the GPU that one holds and the next waits for: seconds from each death to the next one's first word."""
    deaths = [line["at"] for line in lines if line["what"] == "is killed" and line["name"].startswith("probe")]
    grants = [line["at"] for line in lines if line["what"] == "has" and line["name"].startswith("probe")]
    return [next(at for at in grants if at > death) - death for death in deaths if any(at > death for at in grants)]


def test_a_crowd_that_claims_and_dies(tmp_path: Path) -> None:
    folder, log = tmp_path / "leases", tmp_path / "log.jsonl"
    script = Path(__file__).with_name("leases_crowd.py")
    given = [folder, log, SECONDS, LEAST, AT_ONCE, int(time.time())]
    print("seed", given[-1])
    environ = {**os.environ, "MEMGUARD_LEASES": str(folder)}
    folder.mkdir(0o700)
    began = time.monotonic()
    with subprocess.Popen([sys.executable, str(script), *map(str, given)], env=environ) as crowd:
        looks, rows = 0, defaultdict[str, int](int)
        try:
            while crowd.poll() is None:
                for gpu, size in (looked(folder / "leases.sqlite") or {}).items():
                    looks += 1
                    rows[gpu] = max(rows[gpu], size)
                time.sleep(0.02)
        finally:
            crowd.kill()
    seconds = time.monotonic() - began
    assert crowd.returncode == 0
    lines = sorted(map(json.loads, log.read_text().splitlines()), key=lambda line: line["at"])
    by = defaultdict[str, set[str]](set)
    for line in lines:
        by[line["what"]].add(line["name"])
    held, free, turn = most(spans(lines)), [line["after"] for line in lines if line["what"] == "is free"], turns(lines)
    ends = defaultdict[str, int](int)
    for line in lines:
        if line["what"] == "ends":
            ends[line["by"]] += 1
    asked = {line["name"]: line["at"] for line in lines if line["what"] == "claims"}
    waits = [line["at"] - asked[line["name"]] for line in lines if line["what"] == "has"]
    print(
        f"{len(by['claims'])} processes in {seconds:.0f} s; {len(by['has'])} had a lease, {len(by['waits'])} waited, "
        f"{waits and max(waits):.1f} s at most; {len(by['is killed'])} killed from outside; ends {dict(ends)}; "
        f"most held by their own words {held}, by {looks} looks into the database {dict(rows)}, of {TOTAL}; "
        f"{len(free)} dead leases free after {max(free):.3f} s at most; {len(turn)} times the next one's turn after "
        f"{max(turn):.3f} s at most"
    )
    assert len(by["claims"]) > 0.9 * LEAST and seconds >= SECONDS  # a few are killed before their first word
    assert not by["fails"], [line for line in lines if line["what"] == "fails"]
    assert held and all(size <= TOTAL for size in held.values()) and looks > 100
    assert rows and all(size <= TOTAL for size in rows.values())
    assert len(free) > 20 and max(free) < FREE
    assert len(turn) > 5 and max(turn) < FREE
    assert overtaken(lines) == []
    dead = by["is killed"]
    assert by["claims"] - dead <= by["has"], "somebody starved"
    connection = sqlite3.connect(folder / "leases.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    finally:
        connection.close()
