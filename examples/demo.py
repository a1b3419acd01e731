"""The main job, for real where there is a GPU with the frameworks, else its recorded trace on a simulated H200.

scripts/demo [--verbose]
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRACE = HERE / "traces" / "mixed-h200.jsonl"
MORE = "more: scripts/demo --verbose"


def why_simulated() -> str | None:
    """Why the job cannot run for real here; None where it can."""
    try:
        import pynvml

        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetCount():
            return "NVML shows no GPU here"
    except Exception:  # no driver, or one that does not answer
        return "there is no NVIDIA GPU here"
    missing = [
        name
        for name in ("tensorflow", "torch", "cupy", "jax", "numba", "pycuda")
        if importlib.util.find_spec(name) is None
    ]
    return f"there is a GPU, but {', '.join(missing)} cannot be imported" if missing else None


def real(verbose: bool) -> int:
    """Run the job twice. A framework that fails ends the job: the first run shows one failure at most."""
    print("running examples/mixed_workload.py twice on this machine's GPU: about a minute", file=sys.stderr, flush=True)
    runs = [
        subprocess.run(
            [sys.executable, str(HERE / "mixed_workload.py"), *options], capture_output=True, text=True, check=False
        )
        for options in (["--without-memguard"], [])
    ]
    ends = ["finishes" if run.returncode == 0 else f"fails (exit {run.returncode})" for run in runs]
    print(f"without memguard the job {ends[0]}, with memguard it {ends[1]}")
    print("REAL: six frameworks in one process on this machine's GPU")
    for run in runs:
        print(
            *[f"  {line[:150]}" for line in run.stdout.splitlines() if line.startswith(("died:", "result:"))], sep="\n"
        )
    print(MORE)
    if verbose or runs[1].returncode:
        for way, run in zip(("without memguard", "with memguard"), runs):
            print(f"\n== {way} ==\n\n{run.stdout}\n{run.stderr[-3000:]}")
    return runs[1].returncode


def simulated(reason: str, verbose: bool) -> int:
    from memguard import _budget
    from memguard._base.units import format_size
    from memguard._budget import policy
    from memguard._tools.simulate import replay, trace

    recorded = trace.read(TRACE)
    host = replay.host_of(recorded.header)
    plan = policy.plan(_budget.load(HERE / "mixed.yaml"), host.devices())
    caps = {name: plan.caps(name) for name in plan.devices[0].caps}
    before = replay.simulate(recorded, options=plan.options, keep=1)
    after = replay.simulate(recorded, host, caps, plan.options)
    failed, still = ([row for row in run.frameworks if row.refused] for run in (before, after))
    print(
        f"without memguard {len(failed) or 'none'} of {len(before.frameworks)} frameworks fail, "
        f"with memguard {len(still) or 'none'}"
    )
    print(f"SIMULATED, as {reason}: a recording from an H200, replayed without and with caps")
    holder = max(before.frameworks, key=lambda row: row.peak_held)
    holds = f"{holder.framework} holds {format_size(holder.peak_held)} of {format_size(before.devices[0].usable)}"
    for one in sorted((refusal for row in failed for refusal in row.refusals), key=lambda one: one.time):
        print(f"  {one.time:.1f} s  {one.framework:<7} is refused {format_size(one.bytes)}: {holds}")
    most, limit = (format_size(size) for size in (after.devices[0].peak_process, plan.devices[0].limit))
    print(f"under the budget the process takes at most {most} of {limit}; {MORE}")
    if verbose:
        for way, outcome in (("without memguard", before), ("with memguard.init('mixed.yaml')", after)):
            print(f"\n== {way} ==\n\n{outcome.render()}\n\n{outcome.ledger}")
    return 1 if still or not failed else 0


def main() -> int:
    if set(sys.argv[1:]) & {"-h", "--help"}:
        print(__doc__)
        return 0
    if set(sys.argv[1:]) - {"--verbose"}:
        print(f"scripts/demo: unknown argument {sys.argv[1]}; there is --verbose", file=sys.stderr)
        return 2
    verbose = "--verbose" in sys.argv[1:]
    reason = why_simulated()
    return real(verbose) if reason is None else simulated(reason, verbose)


if __name__ == "__main__":
    raise SystemExit(main())
