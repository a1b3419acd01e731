"""Checks of the driver: what each says, and that one cause is said once."""

from __future__ import annotations

import pytest
from doctor_facts import FILES, edited, findings, load, of, plain

from memguard._tools.doctor import derived
from memguard._tools.doctor.checks import driver, versions
from memguard._tools.doctor.facts import Cuda, Driver, Facts, FrameworkFacts, NvmlFacts, Probe, Stage, System
from memguard._tools.doctor.finding import Finding, Severity

NOTHING = "libcuda.so.1: cannot open shared object file: No such file or directory"
BUSY = "device-files-denied.json"


def one(facts: str, name: str) -> Finding:
    found = [finding for finding in findings(facts) if finding.name == name and finding.severity is not Severity.INFO]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", FILES)
def test_where_no_framework_can_have_a_gpu_one_error_says_why(name: str) -> None:
    facts = load(name)
    blocked = derived.blocked_by(facts)
    of_the_machine = [finding.name for finding in of(facts, driver, versions)]
    assert derived.no_gpu(facts) == (blocked is not None)
    if blocked is None:
        assert facts.driver.cuda.devices
        return
    errors = [finding.name for finding in findings(name) if finding.severity is Severity.ERROR]
    assert blocked in errors
    assert set(of_the_machine) <= {blocked}
    assert all(derived.explained(facts, framework) for framework in facts.frameworks)


def test_what_was_not_read_is_no_finding() -> None:
    facts = Facts(frameworks={"torch": FrameworkFacts(gpu=True, cuda="13.0")})
    assert derived.blocked_by(facts) is None
    assert of(facts, driver, versions) == []


def test_a_driver_that_is_absent_says_which_half() -> None:
    causes = {
        "no-driver.json": "no NVIDIA GPU and no NVIDIA driver",
        "driver-not-installed.json": "0000:00:06.0",
        "driver-module-not-loaded.json": "kernel module is not loaded",
        "driver-libraries-missing.json": "580.159.04 is loaded and its libraries (libcuda.so.1) are not found",
        "wsl-without-windows-driver.json": "Windows driver",
    }
    for name, words in causes.items():
        assert words in one(name, "driver-absent").cause
    assert "modprobe nvidia" in one("driver-module-not-loaded.json", "driver-absent").remedy
    assert "libnvidia-compute-580" in one("driver-libraries-missing.json", "driver-absent").remedy
    assert "Windows" in one("wsl-without-windows-driver.json", "driver-absent").remedy


def test_a_container_is_not_told_to_install_a_driver() -> None:
    facts = load("driver-not-installed.json").model_copy(update={"system": System(container="docker")})
    assert "--gpus all" in next(iter(driver.driver_absent(facts))).remedy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("docker", "docker run --gpus all"),
        ("podman", "nvidia.com/gpu=all"),
        ("kubernetes", "nvidia.com/gpu: 1"),
        ("apptainer", "--nv"),
        ("lxc", "lxc config device add"),
    ],
)
def test_each_kind_of_container_is_told_its_own_way(kind: str, words: str) -> None:
    facts = edited("container-without-gpu.json", {"system": {"container": kind}})
    (found,) = driver.container(facts)
    assert found.name == "container-without-gpu" and words in found.remedy
    assert "NVIDIA_VISIBLE_DEVICES=void (environment)" in found.evidence


def test_capabilities_that_are_not_set_are_no_finding() -> None:
    facts = edited("container-without-utility.json", {"environment": {"NVIDIA_DRIVER_CAPABILITIES": None}})
    assert [finding.name for finding in of(facts, driver, versions)][-1:] == ["nvml-blocked"]
    facts = edited("container-without-utility.json", {"environment": {"NVIDIA_DRIVER_CAPABILITIES": "all"}})
    assert list(driver.container(facts)) == []
    facts = edited("container-without-compute.json", {"environment": {"NVIDIA_DRIVER_CAPABILITIES": "compute"}})
    assert derived.blocked_by(facts) == "driver-absent"


def test_nvml_that_refuses_for_a_reason_of_its_own_is_told_in_a_container_without_utility_too() -> None:
    facts = edited("container-without-utility.json", {"driver": {"nvml": {"error": "NVMLError_GpuIsLost"}}})
    assert [finding.name for finding in driver.nvml_blocked(facts)] == ["nvml-blocked"]
    assert list(driver.container(facts)) == []


def test_versions_are_named_where_they_differ() -> None:
    found = one("driver-mismatch.json", "driver-mismatch")
    assert "580.159.04 and 580.95.05" in found.cause and found.remedy.startswith("reboot")
    # rmmod would stop at the first module that is not loaded, as nvidia_drm on a server.
    assert "modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia; " in found.remedy and "rmmod" not in found.remedy
    assert "container" in one("driver-mismatch-in-a-container.json", "driver-mismatch").remedy
    assert "NVML does not" in one("driver-mismatch-of-nvml.json", "driver-mismatch").cause


def test_the_module_and_libcuda_differing_alone_is_a_mismatch_where_cuda_fails() -> None:
    facts = edited("init-unknown-error.json", {"driver": {"module": "570.133.07"}})
    assert derived.blocked_by(facts) == "driver-mismatch"


def test_too_old_names_driver_cuda_frameworks_and_the_oldest_that_will_do() -> None:
    found = one("driver-too-old.json", "driver-too-old")
    assert "535.183.06 supports CUDA 12.2" in found.cause and "580.65.06" in found.cause
    assert all(name in found.cause for name in ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba"))
    assert any("torch 2.11.0+cu130 was built for CUDA 13.0" in line for line in found.evidence)
    assert "cuda-compat-13-2" in found.remedy and "numba built for CUDA 12" in found.remedy
    assert "torch needs CUDA 13" in one("driver-too-old-for-one.json", "driver-too-old").cause


@pytest.mark.parametrize(
    ("built", "driver_has", "old"),
    [
        ("13.0", 12090, True),
        ("12.9", 12000, False),
        ("12.4", 13000, False),
        ("11.8", 12000, False),
        (None, 12000, False),
    ],
)
def test_a_major_decides(built: str | None, driver_has: int, old: bool) -> None:
    facts = Facts(driver=Driver(cuda=Cuda(version=driver_has)))
    assert derived.too_old(facts, FrameworkFacts(gpu=True, cuda=built)) is old
    assert not derived.too_old(facts, FrameworkFacts(gpu=False, cuda=built))


def test_what_computes_is_not_too_old() -> None:
    """As with cuda-compat, whatever the numbers say."""
    works = Probe(stages=(Stage(name="compute", seconds=1.0),))
    facts = Facts(driver=Driver(cuda=Cuda(version=12020)))
    assert not derived.too_old(facts, FrameworkFacts(gpu=True, cuda="13.0", gpus=1, probe=works))
    assert derived.too_old(facts, FrameworkFacts(gpu=True, cuda="13.0", gpus=0, probe=works))


def test_the_minima_are_those_of_the_release_notes() -> None:
    assert versions.MINIMUM == {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def test_ptx_that_the_driver_does_not_know_names_the_package_of_its_cuda_where_one_can_be_chosen() -> None:
    found = one("ptx-newer-than-the-driver.json", "driver-minor-version")
    assert found.remedy == "update the NVIDIA driver" and found.subject == "numba"  # its compilers come as a set
    assert derived.explained(load("ptx-newer-than-the-driver.json"), "numba")
    failed = {"probe": {"stages": plain("ptx-newer-than-the-driver.json")["frameworks"]["numba"]["probe"]["stages"]}}
    for number, package in ((13000, "nvidia-cuda-nvrtc==13.0.*"), (12040, "nvidia-cuda-nvrtc-cu12==12.4.*")):
        changes = {"frameworks": {"numba": None, "cupy": failed}, "driver": {"cuda": {"version": number}}}
        assert any(
            package in finding.remedy for finding in versions.driver_minor_version(edited("healthy-h200.json", changes))
        )


def test_an_older_compat_library_is_the_one_cause_of_all_that_it_makes_too_old() -> None:
    found = one("forward-compatibility-too-old.json", "forward-compatibility")
    assert "550.54.15" in found.cause and "too old for torch" in found.cause
    assert derived.explained(load("forward-compatibility-too-old.json"), "torch")


def test_compat_on_a_gpu_that_it_is_not_for() -> None:
    found = one("forward-compatibility-on-geforce.json", "forward-compatibility")
    assert "804" in found.cause and "LD_LIBRARY_PATH" in found.remedy and "update the NVIDIA driver" in found.remedy


def test_compat_that_lies_about_and_is_not_loaded_is_no_finding() -> None:
    facts = edited(
        "healthy-h200.json", {"driver": {"cuda": {"candidates": ["/usr/local/cuda/compat/libcuda.so.550.54.15"]}}}
    )
    assert list(versions.forward_compatibility(facts)) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fabric-manager-not-started.json", "nvidia-fabricmanager"),
        ("init-unknown-error.json", "nvidia_uvm"),
        ("devices-unavailable.json", "nvidia-smi -q -d COMPUTE,PIDS"),
        ("stub-library.json", "stubs"),
        ("libcuda-broken.json", "reinstall the NVIDIA driver"),
        ("init-hangs.json", "dmesg"),
    ],
)
def test_each_code_of_cuinit_has_its_remedy(name: str, words: str) -> None:
    assert words in one(name, "cuda-init-failed").remedy


def test_a_driver_that_could_not_be_asked_is_said_with_how_that_ended() -> None:
    found = one("survey-fails.json", "cuda-init-failed")
    assert "the process that does it ended with exit code 1" in found.cause and "Python" in found.remedy
    assert "No module named 'memguard'" in found.evidence[-1], "what it said last"
    assert not any("not there" in line for line in found.evidence), "nobody looked"
    assert "gave no answer in 60 s" in one("survey-hangs-in-nvml.json", "cuda-init-failed").cause
    found = one("survey-dies-in-cuda.json", "cuda-init-failed")
    assert "ended by SIGSEGV" in found.cause and "dmesg" in found.remedy


def test_a_driver_that_could_not_be_asked_is_no_error_where_a_framework_computes() -> None:
    torch = load("healthy-h200.json").frameworks["torch"].model_dump(mode="json")
    facts = edited("survey-fails.json", {"frameworks": {"torch": torch}})
    assert [finding.severity for finding in driver.cuda_init_failed(facts)] == [Severity.WARNING]


def test_a_code_that_nobody_foresaw_is_named() -> None:
    facts = edited("init-unknown-error.json", {"driver": {"cuda": {"init": "CUDA_ERROR_NVLINK_UNCORRECTABLE"}}})
    (found,) = driver.cuda_init_failed(facts)
    assert "CUDA_ERROR_NVLINK_UNCORRECTABLE" in found.cause


def test_a_stub_that_knows_no_names_of_errors_is_known_by_its_folder() -> None:
    facts = edited("stub-library.json", {"driver": {"cuda": {"init": "error 34"}}})
    assert "stub" in next(iter(driver.cuda_init_failed(facts))).cause


def test_codes_that_name_their_cause_are_not_laid_on_device_files() -> None:
    """nvidia-uvm is made by the first process that initialises CUDA: where that fails early it is not there."""
    facts = edited("fabric-manager-not-started.json", {"driver": {"files": {"/dev/nvidia-uvm": None}}})
    assert derived.blocked_by(facts) == "cuda-init-failed"


def test_device_files_say_what_is_wrong_with_which() -> None:
    assert "/dev/nvidia-uvm" in one("device-files-without-uvm.json", "device-files").cause
    assert "EIO" in one("device-files-input-output-error.json", "device-files").cause
    assert "usermod" in one("device-files-denied.json", "device-files").remedy
    assert "--gpus all" in one("device-files-by-rule.json", "device-files").remedy
    facts = edited("device-files-denied.json", {"driver": {"files": dict.fromkeys(load(BUSY).driver.files)}})
    (found,) = driver.device_files_unusable(facts)
    assert "/dev/nvidia0, /dev/nvidiactl and /dev/nvidia-uvm are missing" in found.cause
    assert "nvidia-modprobe" in found.remedy


def test_nvml_is_no_finding_where_nothing_works() -> None:
    facts = Facts(driver=Driver(cuda=Cuda(error=NOTHING), nvml=NvmlFacts(error="NVMLError_LibraryNotFound")))
    assert list(driver.nvml_blocked(facts)) == []
