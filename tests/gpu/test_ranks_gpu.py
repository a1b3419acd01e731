"""Ranks under one budget on two GPUs of one host: two over NCCL, four over gloo, and data-parallel training."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpus_here import TWO_GPUS
from support.suspend_children import TESTS, surroundings

pytestmark = [TWO_GPUS, pytest.mark.two_gpus]
MIB, GIB = 1 << 20, 1 << 30
LIMIT = 16 * GIB


def processes() -> dict[str, dict[int, int]]:
    """Each process's bytes on each GPU by NVML, by UUID and PID."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return {
        pynvml.nvmlDeviceGetUUID(handle): {
            one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        }
        for handle in handles
    }


def ranks_of(folder: Path, count: int, backend: str) -> tuple[list[dict[str, Any]], dict[str, dict[int, int]]]:
    """Each rank's figures, and NVML's as read by this process, which is no rank, while all ranks were full."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["--local-addr=127.0.0.1", str(TESTS / "support" / "ranks_program.py"), str(folder), backend]
    nvml: dict[str, dict[int, int]] = {}
    with (folder / "stderr").open("w+") as errors:
        launcher = subprocess.Popen(
            command, stdout=errors, stderr=errors, env=surroundings(OMP_NUM_THREADS="1"), start_new_session=True
        )
        end = time.monotonic() + 150
        try:
            while launcher.poll() is None and time.monotonic() < end:
                if not nvml and len([*folder.glob("*.json")]) == count:
                    nvml = processes()
                    (folder / "read").touch()
                time.sleep(0.05)
        finally:
            launcher.terminate()  # torchrun then ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(40)
            if launcher.poll() is None:
                os.killpg(launcher.pid, 9)
                launcher.wait()
        errors.seek(0)
        assert launcher.returncode == 0, errors.read()[-3000:]
    return [json.loads(path.read_text()) for path in folder.glob("*.json")], nvml


@pytest.mark.parametrize(("count", "backend"), [(2, "nccl"), (4, "gloo")])
def test_ranks_share_the_budget_of_their_gpu(count: int, backend: str, tmp_path: Path) -> None:
    ranks, nvml = ranks_of(tmp_path, count, backend)
    sharers = count // 2
    use = {uuid: [rank for rank in ranks if rank["uuid"] == uuid] for uuid in {rank["uuid"] for rank in ranks}}
    assert len(ranks) == count and [len(those) for those in use.values()] == [sharers] * 2
    for rank in ranks:
        own = nvml[rank["uuid"]][rank["pid"]]
        assert rank["limit"] == LIMIT // sharers and own <= rank["limit"]
        assert 0.95 * rank["cap"] <= rank["held"] <= rank["cap"] and rank["refused"] == "OutOfMemoryError"
        assert len(rank["table"]) == count
        for other in ranks:  # every rank's table agrees with NVML's reading
            parts = rank["table"][str(other["rank"])]["devices"]
            (process,) = [one["process"] for one in parts if one["uuid"] == other["uuid"]]
            assert abs(process - nvml[other["uuid"]][other["pid"]]) <= 2 * MIB
        if backend == "nccl":
            assert GIB < rank["overhead"] <= rank["reserve"], "NCCL's memory, without a word of it in the budget"
        else:  # the control: without `ranks: auto` each rank gets more than its share
            assert rank["control"]["refused"] is None and rank["control"]["bytes"] > rank["cap"]
    for uuid, those in use.items():
        assert 0 < sum(nvml[uuid][rank["pid"]] for rank in those) <= LIMIT


def test_data_parallel_training_under_a_budget() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environ = surroundings(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2")
    children = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "ddp_program.py"), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environ, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=180) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, said, strict=True):
        assert child.returncode == 0, err[-3000:]
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
        _trained(json.loads(line[7:]))


def _trained(one: dict[str, Any]) -> None:
    readings, cap = one["readings"], one["cap"]
    at = {reading["label"]: reading for reading in readings}
    full, freed = at["full"], at["freed and trimmed"]
    for reading in readings:
        assert not any(reading["sums_minus_total"]), "rows add up to the total on both GPUs"
        assert abs(reading["unaccounted"]) <= 64 * MIB and reading["overhead"] <= one["reserve"], reading
        assert reading["process"] <= LIMIT and reading["held"] <= cap
    back = full["held"] - freed["held"]
    assert back >= cap // 2 and abs(back - (full["nvml"] - freed["nvml"])) <= 2 * MIB, "what the driver has back"
    assert at["second communicator"]["overhead"] - at["first tensor"]["overhead"] >= GIB, "NCCL's, in the reserve"
    assert full["held"] >= 0.95 * cap and one["refused"] == "OutOfMemoryError"
    assert one["losses"][1] < one["losses"][0] and one["weights_equal"]
