"""Ten broken copies of memguard, each with the gate that must detect the fault.

    python tests/support/broken.py [--only NAME] [-j 4] [--sound]

For each one, copy the tree to a temporary folder, replace one text in one file, and run the gate there. Exit code: 0
every gate failed as expected; 1 a gate passed; 2 the text does not occur exactly once, or a gate could not run (its
tests were skipped).
`--sound` runs the same gates on an unchanged copy, where they must pass: otherwise their failures prove nothing."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0  # Seconds for one gate. At the limit it and its children are killed: the fault is undetected.


class Broken(NamedTuple):
    """One fault: a file of memguard/, the original text, its replacement, and the test that must fail."""

    file: str
    text: str
    instead: str
    gate: str


BROKEN: dict[str, Broken] = {
    "a cap is not applied": Broken(
        "_frameworks/pycuda/adapter.py", "cap = self._caps.get(uuid)\n        for last in (False, True):",
        "cap = None\n        for last in (False, True):",
        "tests/gpu/test_guard.py::test_pycuda_cap_holds_for_every_way_to_allocate",
    ),
    "a ledger row is off by a slab": Broken(
        "_frameworks/driver_pages.py", "            self._large += pages\n",
        "            self._large += pages + GRANULE\n",
        "tests/gpu/test_evidence.py::test_a_row_grows_and_shrinks_as_the_driver_says[pycuda]",
    ),
    "an undo is left out": Broken(
        "_frameworks/cupy/adapter.py", "        undo.add(self.name, functools.partial(self._restore, cupy))\n", "",
        "tests/gpu/test_elastic_gpu.py::test_a_shutdown_gives_the_limits_back",
    ),
    "a lease is not checked": Broken(
        "_node/leases/decide.py",
        "room = all(taken.get(gpu, 0) + size <= capacity.get(gpu, -1) for gpu, size in more.items())", "room = True",
        "tests/gpu/test_leases_gpu.py::test_without_that_key_it_is_refused_when_its_time_is_up_and_nobody_leaves",
    ),
    "an allocation asks the driver once more": Broken(
        "_frameworks/pycuda/pool.py", "        address, held = index(allocation), found.held\n",
        "        address, held = index(allocation), found.held\n        contexts.current()\n",
        "tests/native/test_pycuda.py::test_a_hit_asks_the_driver_for_nothing_and_waits_for_no_lock",
    ),
    "a refusal is not reported": Broken(
        "_frameworks/base.py",
        "            record = self.on_refusal(request._replace(**known))\n", "            record = None\n",
        "tests/gpu/test_moment.py::test_memguards_own_refusals_caught_and_retried[pycuda]",
    ),
    "a trim reports more than came back": Broken(
        "_guard/reclaim.py", "        got = max(self.available(device) - before, 0)\n",
        "        got = 2 * max(self.available(device) - before, 0)\n",
        "tests/gpu/test_elastic_gpu.py::test_cupys_cache_goes_to_torch_when_room_is_made",
    ),
    "the import order is not cured": Broken(
        "_frameworks/registry.py",
        "            done = specs.load(name, module, function)() if other in names else None\n",
        "            done = None\n",
        "tests/gpu/test_all_frameworks.py::test_tensorflow_before_torch_under_a_budget[after init]",
    ),
    "the max of an elastic cap is not honoured": Broken(
        "_guard/lending.py", "    if wanted > own.most:\n", "    if wanted > own.most + room:\n",
        "tests/unit/test_lending.py::test_above_its_max_nothing_is_lent",
    ),
    "a suspension skips a check": Broken(
        "_node/suspend/checks/refusals.py", "    elif facts.available < needs:\n", "    elif facts.available < 0:\n",
        "tests/gpu/test_suspend_rounds.py::"
        "test_what_would_be_lost_is_refused_and_nothing_is_touched[too little host memory]",
    ),
}  # fmt: skip


def ran(folder: Path, gate: str) -> tuple[int, str]:
    """pytest's exit code and the end of its output; 5 if every test was skipped, -9 after the time limit."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", gate]
    with (folder / "said").open("w+") as said:
        child = subprocess.Popen(command, cwd=folder, env=environ, stdout=said, stderr=said, start_new_session=True)
        try:
            code = child.wait(SECONDS)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -9
        said.seek(0)
        text = said.read()
    skipped = code == 0 and re.search(r"\bskipped\b", text) and not re.search(r"\bpassed\b", text)
    return (5 if skipped else code), text[-1500:]


def tried(name: str, sound: bool) -> int:
    one = BROKEN[name]
    with tempfile.TemporaryDirectory(prefix="memguard-broken-", ignore_cleanup_errors=True) as made:
        folder = Path(made) / "tree"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        path = folder / "memguard" / one.file
        text = path.read_text(encoding="utf-8")
        if text.count(one.text) != 1:
            print(f"{name}: the text is {text.count(one.text)} times in memguard/{one.file}, not once", flush=True)
            return 2
        if not sound:
            path.write_text(text.replace(one.text, one.instead), encoding="utf-8")
        code, said = ran(folder, one.gate)
    if code not in (0, 1):
        print(f"{name}: the gate could not run (exit code {code}): {one.gate}\n{said}", flush=True)
        return 2
    good = code == (0 if sound else 1)
    print(f"{name}: {('passes' if good else 'FAILS') if sound else ('noticed' if good else 'NOT noticed')}", flush=True)
    if not good:
        print(f"{one.gate}\n{said}", flush=True)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(BROKEN))
    parser.add_argument("-j", type=int, default=4, metavar="COUNT", help="gates at once")
    parser.add_argument("--sound", action="store_true", help="run the gates on an unchanged copy")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(BROKEN)
    with ThreadPoolExecutor(arguments.j) as threads:
        return max(threads.map(lambda name: tried(name, arguments.sound), names))


if __name__ == "__main__":
    sys.exit(main())
