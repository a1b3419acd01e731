"""`memguard doctor` on a real GPU: healthy where it is, and each fault that can be provoked found and named.

    python benchmarks/doctor.py -o benchmarks/results/h200-doctor.json

Every scenario runs a doctor in a process of its own. `checks.py` says what each must find; it may find no other error
or warning. If frameworks were added to those of the machine, `--shipped NAME=VALUE` (as often as needed) gives the
environment without them. `--facts FILE` keeps the facts that were read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _run import ROOT, conclude, header
from checks import doctor_checks

TIMEOUT = 180
ROUNDS = 3

BUDGET = """\
version: 1
device: {limit: 8GiB}
frameworks:
  tensorflow: {limit: 2GiB}
  torch: {limit: 2GiB}
"""

IN_PROCESS = """
import json, sys
%s
import memguard
report = memguard.doctor(frameworks=%r)
print("FACTS" + report.facts.to_json().replace("\\n", " "))
"""

FILLED = """
import sys, torch
free, total = torch.cuda.mem_get_info()
kept = [torch.empty(free - (320 << 20), dtype=torch.uint8, device="cuda")]
print("full", flush=True)
sys.stdin.read()
"""


def environment(changes: dict[str, str]) -> dict[str, str]:
    result = {**os.environ, **changes}
    result["PYTHONPATH"] = f"{ROOT}{os.pathsep}{result.get('PYTHONPATH', '')}"
    return result


def doctor(arguments: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Run the command line. Its facts, and how long it took."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "doctor", "--dump-facts", *arguments],
        capture_output=True, text=True, env=environ, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.monotonic() - started
    if done.returncode not in (0, 1):
        return {"error": done.stderr[-3000:], "rc": done.returncode}
    return {"facts": json.loads(done.stdout), "seconds": round(seconds, 2), "rc": done.returncode}


def within(code: str, frameworks: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Run `memguard.doctor()` in a process that has run `code` before."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IN_PROCESS % (code, frameworks)],
        capture_output=True, text=True, env=environ, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("FACTS")]
    if not lines:
        return {"error": done.stderr[-3000:], "rc": done.returncode}
    return {"facts": json.loads(lines[0]), "seconds": round(time.monotonic() - started, 2)}


def filled(arguments: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Run a doctor while another process holds all but 320 MiB of the GPU."""
    other = subprocess.Popen(
        [sys.executable, "-c", FILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert other.stdout is not None
        if other.stdout.readline().strip() != "full":
            return {"error": "the other process did not fill the GPU"}
        return doctor(arguments, environ)
    finally:
        other.communicate(timeout=60)


TWICE = """
import ctypes, glob, torch
torch.ones(1, device="cuda")
major = torch.version.cuda.partition(".")[0]
ctypes.CDLL(sorted(glob.glob(f"/usr/local/cuda-{major}*/targets/*/lib/libcudart.so.{major}"))[0])
"""
"""Opens CUDA in the toolkit by its path, as some libraries do."""


def scenarios(shipped: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    own, plain = environment({}), environment(shipped)
    budget, script = folder / "budget.yaml", folder / "train.py"
    budget.write_text(BUDGET)
    script.write_text("import tensorflow as tf\nimport torch\n")
    some = [word for name in ("torch", "cupy") for word in ("--framework", name)]
    return {
        "as shipped": doctor([], plain),
        "all six": doctor([], own),
        "no such GPU": doctor(some, {**plain, "CUDA_VISIBLE_DEVICES": "7"}),
        "both XLA fractions": doctor(
            ["--framework", "jax"],
            {**plain, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", "XLA_CLIENT_MEM_FRACTION": "0.3"},
        ),
        "async allocator with a limit": doctor(
            ["-c", str(budget), "--framework", "tensorflow"], {**own, "TF_GPU_ALLOCATOR": "cuda_malloc_async"}
        ),
        "second context": within("import torch, pycuda.autoinit\ntorch.ones(1, device='cuda')", ["torch"], own),
        "two copies of a library": within(TWICE, ["torch"], plain),
        "TensorFlow before PyTorch": doctor(
            ["--script", str(script), "--framework", "torch", "--framework", "tensorflow"], own
        ),
        "a full card": filled(some, plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--shipped", metavar="NAME=VALUE", action="append", default=[])
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        found = scenarios(dict(pair.split("=", 1) for pair in arguments.shipped), Path(folder))
        again = [doctor([], environment({})).get("seconds") for _ in range(ROUNDS - 1)]
    from memguard._doctor.examine import examine
    from memguard._doctor.facts import Facts

    kept = {}
    for name, scenario in found.items():
        plain = kept[name] = scenario.pop("facts", None)
        if plain is not None:
            facts = Facts.from_json(json.dumps(plain))
            scenario["findings"] = [[f.name, str(f.severity), f.subject, f.cause] for f in examine(facts)]
            scenario["probes_s"] = facts.seconds
    if arguments.facts:
        arguments.facts.write_text(json.dumps(kept) + "\n")
    times = sorted(t for t in [found["all six"].get("seconds"), *again] if t is not None)
    result = {
        "about": header("python benchmarks/doctor.py", "_doctor", "cli"),
        "scenarios": found,
        "all_six_s": {"runs": times, "median": statistics.median(times) if times else None},
    }
    result["checks"] = doctor_checks(result)
    conclude(result, arguments.output)
    if not all(passed for passed, _ in result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
