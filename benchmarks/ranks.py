"""Ranks of torchrun under one budget on two GPUs of one host: two over NCCL, and four, two on each, over gloo.

    python benchmarks/ranks.py -o benchmarks/results/h200-x2-ranks.json

Each rank applies `ranks: auto`, is filled until it is refused, and stays full while this process, which is no rank,
reads NVML. The control: without that key a rank gets more than its part. It takes at most six minutes, and
is written after each scenario.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _listed
from _run import GIB, MIB, ROOT, Judge, Tell, attempt, conclude, header, judged, write
from ddp import filled

LIMIT = 16 * GIB
BUDGET = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"share": "100%"}}}
SCENARIOS = {"two": (2, "nccl"), "four": (4, "gloo")}
"""How many ranks, and over what they communicate."""
GPUS = 2
CONTROL = 9 * GIB // (64 * MIB)
"""Tensors of 64 MiB: more than half of the budget."""
PATIENCE = 150.0
"""Seconds for one scenario."""
PARTING = 40.0
"""Seconds in which torchrun must have ended its ranks: it gives them 30."""


def worker(folder: Path, backend: str) -> None:
    """One rank. It leaves its figures in a file, and stays full until `read` is there."""
    import memguard

    memguard.init(BUDGET)  # the control: each has the budget whole
    import torch
    import torch.distributed as dist

    from memguard.integrations import torchrun

    gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    live: list[Any] = []
    control = {"refused": filled(live, CONTROL), "bytes": len(live) * 64 * MIB}
    live.clear()
    torch.cuda.empty_cache()
    guard = memguard.init({**BUDGET, "ranks": "auto"}, replace=True)
    dist.init_process_group(backend)
    told = torch.ones(1 << 20, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(told)
    refused = filled(live)
    dist.all_reduce(told)  # works on while torch is at its cap
    torch.cuda.synchronize()
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    part = next(one for one in guard.plan.devices if one.device.uuid == uuid)
    mine = next(one for one in memguard.ledger().devices if one.device.uuid == uuid)
    table = torchrun.ledgers()
    rank = dist.get_rank()
    leave(folder, rank, {
        "rank": rank, "pid": os.getpid(), "uuid": uuid, "limit": part.limit, "reserve": part.reserve,
        "cap": part.caps["torch"], "held": mine.row("torch").bytes, "overhead": mine.row("overhead").bytes,
        "refused": refused, "control": control, "table": table.as_dict(), "notes": list(guard.notes),
    })  # fmt: skip
    end = time.monotonic() + PATIENCE
    while not (folder / "read").exists() and time.monotonic() < end:
        time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()


def leave(folder: Path, rank: int, found: Mapping[str, Any]) -> None:
    """Write a rank's figures, whole or not at all."""
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"{rank}.json")


def processes() -> dict[str, dict[str, int | None]]:
    """What NVML says that each process holds on each GPU, in bytes by UUID and PID."""
    import pynvml

    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found[str(pynvml.nvmlDeviceGetUUID(handle))] = {str(one.pid): one.usedGpuMemory for one in running}
    return found


def scenario(
    command: Sequence[str], count: int, folder: Path, read: Callable[[], Any] = processes, patience: float = PATIENCE
) -> dict[str, Any]:
    """Start the ranks, read NVML while all of them are full, and let them go."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    nvml = None
    with (folder / "stderr").open("w+") as errors:
        launcher = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, start_new_session=True)
        end = time.monotonic() + patience
        try:
            while launcher.poll() is None and time.monotonic() < end:
                if nvml is None and len([*folder.glob("*.json")]) == count:
                    nvml = read()
                    (folder / "read").touch()
                time.sleep(0.05)
        finally:
            end_of(launcher)
        errors.seek(0)
        tail = errors.read()[-1500:]
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem))]
    ended = {} if launcher.returncode == 0 else {"stderr_tail": tail}
    return {"returncode": launcher.returncode, "ranks": ranks, "nvml": nvml, **ended}


def end_of(launcher: subprocess.Popen[bytes]) -> None:
    """End it, by SIGTERM first: torchrun ends its ranks then, which are in sessions of their own."""
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(PARTING)
    if launcher.poll() is None:
        os.killpg(launcher.pid, 9)
    launcher.wait()


def measured(name: str) -> dict[str, Any]:
    count, backend = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command.append("--local-addr=127.0.0.1")  # the machine's name may not be known to any resolver
        return scenario([*command, __file__, "--worker", folder, "--backend", backend], count, Path(folder))


def ranks_checks(scenarios: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of this benchmark."""

    def of(name: str) -> Judge:
        count, backend = SCENARIOS[name]
        sharers = count // GPUS
        names = _listed.RANKS[name]

        def judge(check: Tell) -> None:
            one = scenarios[name]
            ranks, nvml = one["ranks"], one["nvml"]
            mib = [[round(rank[key] / MIB) for rank in ranks] for key in ("limit", "cap", "held")]
            use = {uuid: [r for r in ranks if r["uuid"] == uuid] for uuid in {r["uuid"] for r in ranks}}
            even = sorted(map(len, use.values())) == [sharers] * GPUS
            check(names[0], even and all(r["limit"] == LIMIT // sharers for r in ranks), f"limits {mib[0]} MiB")
            own = all(0.95 * r["cap"] <= r["held"] <= r["cap"] and r["refused"] == "OutOfMemoryError" for r in ranks)
            errors = ", ".join(sorted({str(r["refused"]) for r in ranks}))
            check(names[1], own and len(ranks) == count, f"{mib[2]} of {mib[1]} MiB, {errors}")
            sums = {uuid: sum(nvml[uuid][str(r["pid"])] for r in those) for uuid, those in use.items()}
            each = all(nvml[r["uuid"]][str(r["pid"])] <= r["limit"] for r in ranks)
            most = max(sums.values())
            check(names[2], each and 0 < most <= LIMIT, f"{most / MIB:,.0f} of {LIMIT / MIB:,.0f} MiB on a GPU at most")
            worst = max(abs(gap(r, other, nvml)) for r in ranks for other in ranks)
            whole = all(len(r["table"]) == count for r in ranks)
            figure = f"at most {worst / MIB:.1f} MiB from it, {min(len(r['table']) for r in ranks)} ranks in each"
            check(names[3], whole and worst <= 2 * MIB, figure)
            if backend == "nccl":
                over, kept = [r["overhead"] for r in ranks], min(r["reserve"] for r in ranks)
                figure = f"overhead {max(over) / MIB:,.0f} of {kept / MIB:,.0f} MiB"
                check(names[4], min(over) > GIB and max(over) <= kept, figure)
            else:
                controls = [r["control"] for r in ranks]
                passed = all(r["control"]["refused"] is None and r["control"]["bytes"] > r["cap"] for r in ranks)
                check(names[4], passed, f"each got {min(c['bytes'] for c in controls) / MIB:,.0f} MiB")

        return judge

    return judged(_listed.RANKS, {name: of(name) for name in SCENARIOS}, scenarios)


def gap(rank: Mapping[str, Any], other: Mapping[str, Any], nvml: Mapping[str, Mapping[str, int]]) -> int:
    """By how many bytes one rank's table of another's process differs from what NVML said of it to a third one."""
    row = rank["table"][str(other["rank"])]
    part = next(one for one in row["devices"] if one["uuid"] == other["uuid"])
    return int(part["process"]) - int(nvml[other["uuid"]][str(other["pid"])])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.backend)
        return
    result: dict[str, Any] = {"about": header("python benchmarks/ranks.py")}
    for name in SCENARIOS:
        began = time.monotonic()
        result[name] = attempt(lambda name=name: measured(name))
        print(f"{name}: rc {result[name]['returncode']}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if arguments.output is not None:  # what ends the run does not lose what was measured
            write(result, arguments.output.with_suffix(".part"))
    result["checks"] = ranks_checks({name: result[name] for name in SCENARIOS})
    conclude(result, arguments.output)
    if arguments.output is not None:
        arguments.output.with_suffix(".part").unlink(missing_ok=True)
    if not all(passed for passed, _ in result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
