"""Print the number and duration of the tests of each tier, from pytest's JUnit files."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

tests: Counter[str] = Counter()
seconds: Counter[str] = Counter()
wall = 0.0
for path in map(Path, sys.argv[1:]):
    try:
        suites = list(ElementTree.parse(path).iter("testsuite"))
    except (OSError, ElementTree.ParseError):  # the run ended before it wrote the file
        continue
    for suite in suites:
        wall += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            tier = "/".join((case.get("classname") or "?").split(".")[:2])
            tests[tier] += 1
            seconds[tier] += float(case.get("time", 0))  # type: ignore[assignment]
if tests:
    width = max(map(len, tests))
    print("\ntests by tier, seconds summed over processes")
    for tier in sorted(tests):
        print(f"{tier:<{width}}  {tests[tier]:>6} tests  {seconds[tier]:>7.0f} s")
    print(f"{'all':<{width}}  {sum(tests.values()):>6} tests  {wall:>7.0f} s from start to end")
