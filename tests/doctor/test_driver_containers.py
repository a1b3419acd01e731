"""Checks of the driver in containers and schedulers' jobs: what each kind is told, and whose trouble it is."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, findings, load

from memguard._tools.doctor import derived
from memguard._tools.doctor.checks import driver
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Finding, Severity

KINDS = ("docker", "podman", "kubernetes", "apptainer", "lxc")


def container(name: str, **system: Any) -> Finding:
    (found,) = driver.container(edited(name, {"system": system}))
    return found


def test_apptainer_shows_the_hosts_devices_and_not_its_libraries() -> None:
    found = container("apptainer-without-nv.json")
    assert found.name == "container-without-gpu" and found.remedy.startswith("apptainer exec --nv")
    assert "without its libraries" in found.cause
    assert not any("NVIDIA_VISIBLE_DEVICES" in line for line in found.evidence), "apptainer does not want it"
    facts = edited("apptainer-without-nv.json", {"environment": {"NVIDIA_DRIVER_CAPABILITIES": "utility"}})
    assert derived.blocked_by(facts) == "container-without-gpu"
    without_module = edited("apptainer-without-nv.json", {"driver": {"module": None}})
    assert derived.blocked_by(without_module) == "driver-absent"


def test_a_container_in_wsl_is_not_told_to_install_a_driver_on_windows() -> None:
    found = container("wsl-container-without-gpu.json")
    assert found.name == "container-without-gpu" and found.remedy.startswith("docker run --gpus all")
    assert "/dev/dxg" in found.cause and "/dev/dxg: not there" in found.evidence
    assert container("wsl-container-without-gpu.json", container="podman").remedy.startswith("podman run --device")


def test_a_libcuda_of_the_image_is_not_taken_for_a_linux_driver_in_wsl() -> None:
    facts = edited("wsl-linux-driver.json", {"system": {"container": "docker"}, "driver": {"files": None}})
    assert derived.blocked_by(facts) == "container-without-gpu"
    given = edited(
        "wsl-linux-driver.json", {"system": {"container": "docker"}, "driver": {"files": {"/dev/dxg": "ok"}}}
    )
    assert derived.blocked_by(given) == "wsl"


def test_wsl_with_its_device_and_without_libcuda() -> None:
    has = {"system": {"container": "docker"}, "driver": {"files": {"/dev/dxg": "ok"}}}
    assert derived.blocked_by(edited("wsl-container-without-gpu.json", has)) == "driver-absent"
    utility = {**has, "environment": {"NVIDIA_DRIVER_CAPABILITIES": "utility"}}
    assert derived.blocked_by(edited("wsl-container-without-gpu.json", utility)) == "container-capabilities"
    assert derived.blocked_by(load("wsl-without-windows-driver.json")) == "driver-absent"


@pytest.mark.parametrize("name", ["container-without-compute.json", "container-without-utility.json"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("docker", "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("podman", "podman run --device nvidia.com/gpu=all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("kubernetes", "env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: 'compute,utility'}]"),
        ("lxc", "lxc config set NAME nvidia.driver.capabilities=compute,utility"),
        ("apptainer", "apptainer exec --nv"),
    ],
)
def test_capabilities_are_asked_for_as_each_kind_of_container_has_it(name: str, kind: str, words: str) -> None:
    found = container(name, container=kind)
    assert words in found.remedy
    assert kind == "docker" or "docker" not in found.remedy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["driver-libraries-missing.json", "driver-not-installed.json"])
def test_no_kind_of_container_is_told_dockers_way(name: str, kind: str) -> None:
    facts = edited(name, {"system": {"container": kind}})
    every = [*driver.driver_absent(facts), *driver.container(facts)]
    assert len(every) == 1 and ("docker" in every[0].remedy) == (kind == "docker")


def test_the_gpus_of_other_jobs_are_told_once_and_as_no_trouble() -> None:
    (found,) = driver.nvml_blocked(load("scheduler-job-of-one-gpu.json"))
    assert found.severity is Severity.INFO and "may not use 3 of the 4 GPUs that NVML counts" in found.cause
    assert found.evidence[0] == "NVML, GPU 1: NVMLError_NoPermission, /dev/nvidia1: EPERM"
    devices = [card.model_dump(mode="json") for card in load("scheduler-job-of-one-gpu.json").driver.nvml.devices]
    budgeted = edited("scheduler-job-of-one-gpu.json", {"budget": {"frameworks": ["torch"]}})
    assert [finding.severity for finding in driver.nvml_blocked(budgeted)] == [Severity.INFO]
    devices[1]["error"] = "NVMLError_GpuIsLost"
    lost = edited("scheduler-job-of-one-gpu.json", {"driver": {"nvml": {"devices": devices}}})
    assert sorted((str(finding.severity), finding.subject) for finding in driver.nvml_blocked(lost)) == [
        ("info", ""),
        ("warning", "GPU 1"),
    ]


def test_a_gpu_that_cuda_shows_and_nvml_refuses_is_told() -> None:
    (found,) = driver.nvml_blocked(load("nvml-not-permitted-for-one-gpu.json"))
    assert found.severity is Severity.WARNING
    assert any(line.startswith("CUDA shows GPU-1c2f6a64") for line in found.evidence)
    budget = {"budget": {"frameworks": ["torch"]}}
    (found,) = driver.nvml_blocked(edited("nvml-not-permitted-for-one-gpu.json", budget))
    assert found.severity is Severity.ERROR


def test_an_instance_of_mig_is_no_gpu_that_nvml_keeps_to_itself() -> None:
    cards = [card.model_dump(mode="json") for card in load("mig.json").driver.nvml.devices]
    cards.append({"index": 1, "error": "NVMLError_NoPermission"})
    (found,) = driver.nvml_blocked(edited("mig.json", {"driver": {"nvml": {"devices": cards}}}))
    assert found.severity is Severity.INFO and "may not use 1 of the 2 GPUs that NVML counts" in found.cause


REFUSED = (
    "mig.json",
    "nvml-not-permitted.json",
    "nvml-not-permitted-for-one-gpu.json",
    "container-without-utility.json",
    "driver-mismatch-of-nvml.json",
)


@pytest.mark.parametrize("name", REFUSED)
def test_where_memguard_init_fails_a_budget_makes_it_an_error(name: str) -> None:
    """`memguard run --doctor` does not start what is known to fail."""
    from memguard._tools.doctor.examine import examine

    def errors(facts: Facts) -> int:
        return sum(finding.severity is Severity.ERROR for finding in examine(facts))

    assert not any(finding.severity is Severity.ERROR for finding in findings(name))
    assert errors(edited(name, {"budget": {"source": "budget.yaml", "frameworks": ["torch"]}})) == 1
