"""What memguard costs before any work: import, init, plan. Ratios against a control in the same run, with spread.

    python benchmarks/light.py -o benchmarks/results/h200-light.json

`init` runs on this machine's GPU where there is one, else on a simulated one, and the result says which.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import ROOT, attempt, conclude, header
from checks import light_checks

PAIRS = 25


def timed(code: str) -> float:
    """Seconds of `code` inside a fresh interpreter: its start is not counted."""
    program = f"import time\nt = time.perf_counter()\n{code}\nprint(time.perf_counter() - t)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"median": statistics.median(values), "p5": cuts[0], "p95": cuts[-1], "n": len(values)}


def import_ratio() -> dict[str, Any]:
    """`import memguard` against `import pydantic, yaml`, interleaved; beside it the control against itself."""
    ours, control, again = [], [], []
    for _ in range(PAIRS):
        control.append(timed("import pydantic, yaml"))
        ours.append(timed("import memguard"))
        again.append(timed("import pydantic, yaml"))
    return {
        "memguard_s": spread(ours),
        "control_s": spread(control),
        "ratio": spread([a / b for a, b in zip(ours, control)]),
        "control_against_itself": spread([a / b for a, b in zip(again, control)]),
    }


def init_time(simulate: str | None) -> dict[str, Any]:
    """`memguard.init` of a file, no framework imported; alone, and with what it imports from a fresh interpreter."""
    budget = ROOT / "configs" / "budget.yaml"
    argument = f", simulate={simulate!r}" if simulate else ""
    alone, everything = [], []
    for _ in range(PAIRS):
        call = f"memguard.init({str(budget)!r}{argument})"
        loaded = "import memguard, yaml, pynvml, pydantic\nclass Used(pydantic.BaseModel):\n    size: int = 0\n"
        alone.append(timed(f"{loaded}t = time.perf_counter()\n{call}"))
        everything.append(timed(f"import memguard\n{call}"))
    return {"simulated": simulate, "init_s": spread(alone), "import_and_init_s": spread(everything)}


def plan_time() -> dict[str, Any]:
    """A plan of six frameworks on eight GPUs."""
    from memguard import _config, _policy
    from memguard._devices.simulated import SimulatedHost

    devices = SimulatedHost(["h200"] * 8).devices()
    frameworks = {name: {"share": "15%"} for name in _config.FRAMEWORKS}
    budget = _config.from_mapping({"version": 1, "frameworks": frameworks})
    values = []
    for _ in range(500):
        started = time.perf_counter()
        _policy.plan(budget, devices)
        values.append(time.perf_counter() - started)
    return {"frameworks": len(frameworks), "gpus": 8, "plan_s": spread(values)}


def gpu_here() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except Exception:
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    simulate = None if gpu_here() else "h200"
    result: dict[str, Any] = {"about": header("python benchmarks/light.py"), "import": attempt(import_ratio)}
    result["init"] = attempt(lambda: init_time(simulate))
    result["plan"] = attempt(plan_time)
    result["checks"] = light_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
