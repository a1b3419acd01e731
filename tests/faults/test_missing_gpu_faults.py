"""`missing_gpu` on machines without a GPU, and on those whose GPU does not work: the real nvidia-ml-py over a stub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import ONE, UUIDS, Run

NONE, BROKEN = True, False
MACHINES: dict[str, tuple[bool, dict[str, Any], dict[str, str], set[str], list[str]]] = {
    # whether the GPU is missing; NVML's scenario, the environment, files of the machine, its PCI bus
    "no driver": (NONE, {"init": 12}, {}, set(), []),
    "a card without a driver": (NONE, {"init": 12}, {}, set(), ["0000:01:00.0"]),
    "a container without --gpus": (NONE, {"init": 12}, {}, {"/proc/driver/nvidia/version"}, ["0000:01:00.0"]),
    "libraries without a card": (NONE, {"init": 9}, {}, set(), []),
    "libraries in a container without --gpus": (
        NONE, {"init": 9}, {}, {"/proc/driver/nvidia/version"}, ["0000:01:00.0"]
    ),
    "WSL without Windows' driver": (NONE, {"init": 12}, {}, {"/dev/dxg"}, []),
    "AMD": (NONE, {"init": 12}, {}, {"/sys/class/kfd"}, []),
    "no card in NVML": (NONE, {"count": 0}, {}, {"/dev/nvidiactl"}, []),
    "hidden": (NONE, {}, {"CUDA_VISIBLE_DEVICES": ""}, {"/dev/nvidiactl"}, []),
    "hidden by -1": (NONE, {}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"/dev/nvidiactl"}, []),
    "another name": (NONE, {}, {"CUDA_VISIBLE_DEVICES": "GPU-nobody"}, {"/dev/nvidiactl"}, []),
    "a driver that is not loaded": (BROKEN, {"init": 9}, {}, set(), ["0000:01:00.0"]),
    "a driver that does not answer": (BROKEN, {"init": 9}, {}, {"/dev/nvidiactl"}, ["0000:01:00.0"]),
    "a container without NVML": (BROKEN, {"init": 12}, {}, {"/dev/nvidiactl"}, ["0000:01:00.0"]),
    "a Jetson without NVML": (BROKEN, {"init": 12}, {}, {"/etc/nv_tegra_release"}, []),
    "another version": (BROKEN, {"init": 18}, {}, {"/dev/nvidiactl"}, []),
    "no permission": (BROKEN, {"init": 4}, {}, {"/dev/nvidiactl"}, []),
    "no permission for the card": (BROKEN, {"handle": 4}, {}, {"/dev/nvidiactl"}, []),
    "a lost card": (BROKEN, {"handle": 15}, {}, {"/dev/nvidiactl"}, []),
    "an unknown error": (BROKEN, {"init": 999}, {}, {"/dev/nvidiactl"}, []),
    "no figures": (BROKEN, {"memory": 999, "memory_v2": 999}, {}, {"/dev/nvidiactl"}, []),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_missing_gpu_on_each_machine(run: Run, cuda: Path, build: Callable[..., Path], machine: str) -> None:
    missing, scenario, env, there, pci = MACHINES[machine]
    found = run(
        f"""
        import traceback
        from memguard._devices import nvml, survey
        nvml._exists = {there!r}.__contains__
        survey.pci = lambda root="/": {pci!r}
        for how in ("raise", "warn", "simulate"):
            try:
                guard = memguard.init({{"version": 1, "frameworks": {{"torch": {{"share": "50%"}}}}}}, missing_gpu=how)
            except DeviceError as error:
                result[how] = [error.missing, "".join(traceback.format_exception(error)).count("Traceback"), str(error)]
            else:
                result[how] = [guard.active, memguard.ledger().simulated]
                memguard.trim()
            memguard.shutdown()
        """,
        {**ONE, **scenario},
        env={
            "LD_LIBRARY_PATH": f"{cuda}{os.pathsep}{build()}",
            "CUDA_STUB_UUIDS": "" if "CUDA_VISIBLE_DEVICES" in env else UUIDS[0],
            **env,
        },
    )
    assert found["raise"][:2] == [missing, 1] and "\n    fix: " in found["raise"][2]
    assert ("missing_gpu=" in found["raise"][2]) is missing
    if missing:
        assert found["warn"] == [False, False] and found["simulate"] == [True, True]
        assert found["stderr"].count("nothing caps this program") == found["stderr"].count("stands in") == 1
    else:
        assert found["warn"] == found["simulate"] == found["raise"] and found["stderr"] == ""
