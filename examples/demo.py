"""The main job, for real where there is a GPU with the frameworks, else its recorded trace on a simulated H200.

scripts/demo
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRACE = HERE / "traces" / "mixed-h200.jsonl"


def why_simulated() -> str | None:
    """Why the job cannot run for real here; None where it can."""
    try:
        import pynvml

        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return "NVML shows no GPU"
    except Exception as error:
        return f"no NVIDIA GPU here ({error})"
    missing = [
        name
        for name in ("tensorflow", "torch", "cupy", "jax", "numba", "pycuda")
        if importlib.util.find_spec(name) is None
    ]
    return f"there is a GPU, but {', '.join(missing)} cannot be imported" if missing else None


def real() -> int:
    print("FOR REAL, on this machine's GPU: examples/mixed_workload.py", flush=True)
    script = str(HERE / "mixed_workload.py")
    print("\n== without memguard ==\n", flush=True)
    subprocess.run([sys.executable, script, "--without-memguard"], check=False)
    print("\n== with memguard, one line added ==\n", flush=True)
    return subprocess.run([sys.executable, script], check=False).returncode


def simulated(reason: str) -> int:
    from memguard import _config, _policy
    from memguard._simulation import replay, trace

    print(f"SIMULATED: {reason}.")
    print("Replaying what examples/mixed_workload.py allocated on a real H200, on a simulated one.")
    recorded = trace.read(TRACE)
    print("\n== before: the same allocations without memguard ==\n")
    before = replay.simulate(recorded, options={"tensorflow": {"growth": False}}, keep=1)
    print(before.render())
    host = replay.host_of(recorded.header)
    plan = _policy.plan(_config.load(HERE / "mixed.yaml"), host.devices())
    caps = {name: plan.caps(name) for name in plan.devices[0].caps}
    print("\n== after: with memguard.init('mixed.yaml') as the first line ==\n")
    after = replay.simulate(recorded, host, caps, plan.options)
    print(after.render())
    print("\n== the ledger, before and after ==\n")
    print(before.ledger)
    print()
    print(after.ledger)
    return 1 if after.refused or not before.refused else 0


def main() -> int:
    reason = why_simulated()
    return real() if reason is None else simulated(reason)


if __name__ == "__main__":
    raise SystemExit(main())
