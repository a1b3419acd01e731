"""The commands that are given: for the CUDA that is there, and by what installed the framework."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, load

from memguard._tools.doctor.checks import build
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.wording import (
    install_libraries,
    install_pytorch,
    install_with_cuda,
    match_driver,
    may_be_conda,
)

INDEX = "https://download.pytorch.org/whl/"
PREFIX = "/conda/envs/train"
SITE = f"{PREFIX}/lib/python3.12/site-packages"


def _facts(cuda: int = 13000, **framework: Any) -> Facts:
    return edited("healthy-h200.json", {"driver": {"cuda": {"version": cuda}}, "frameworks": framework})


@pytest.mark.parametrize(
    ("cuda", "index"),
    [
        ((11, 8), "cu118"),
        ((12, 2), "cu126"),  # which runs on every driver for CUDA 12
        ((12, 6), "cu126"),
        ((12, 7, 1), "cu126"),
        ((12, 9), "cu128"),
        ((13, 0), "cu130"),
        ((13, 4), "cu130"),
        ((14, 1), "cu130"),
    ],
)
def test_pytorch_is_taken_away_before_the_build_for_the_cuda_is_installed(cuda: tuple[int, ...], index: str) -> None:
    assert install_pytorch(cuda) == f"pip uninstall -y torch && pip install torch --index-url {INDEX}{index}"


@pytest.mark.parametrize("cuda", [(), (10, 2), (11, 4)])
def test_no_build_of_pytorch_is_invented(cuda: tuple[int, ...]) -> None:
    assert INDEX not in install_pytorch(cuda)


def test_a_build_for_cpus_is_replaced_by_one_that_the_driver_runs() -> None:
    changes = {"driver": {"cuda": {"version": 12040}}}
    (found,) = build.cpu_build(edited("torch-for-cpus.json", changes))
    assert found.remedy.endswith("cu126")


def test_a_broken_pytorch_is_replaced_by_one_for_the_same_cuda() -> None:
    facts = _facts(torch={"cuda": "12.8"})
    assert install_libraries(facts, "torch", 12).endswith("cu128")


@pytest.mark.parametrize(
    ("release", "wanted", "command"),
    [
        ("14.2.0", 13, "pip install 'cupy-cuda13x[ctk]==14.2.0'"),
        (
            "13.6.0",
            12,
            "pip install 'cupy-cuda12x[ctk]>=14' (an older CuPy does not look into pip's packages), or "
            "install CUDA's toolkit 12 and add its lib64 to LD_LIBRARY_PATH",
        ),
        ("13.6.0", 11, "install CUDA's toolkit 11 and add its lib64 to LD_LIBRARY_PATH"),
    ],
)
def test_cupy_has_its_libraries_in_pip_from_14_on(release: str, wanted: int, command: str) -> None:
    there = {"cupy-cuda13x": None, f"cupy-cuda{wanted}x": release}
    facts = _facts(cupy={"version": release, "distributions": there})
    assert install_libraries(facts, "cupy", wanted, ["libnvrtc.so.12"]) == command


@pytest.mark.parametrize(
    ("there", "command"),
    [
        ({"cupy-cuda13x": "14.2.0"}, "pip install 'cupy-cuda13x[ctk]==14.2.0'"),
        ({"cupy": "14.2.0"}, "pip uninstall -y cupy && pip install 'cupy-cuda13x[ctk]==14.2.0'"),
        ({"cupy-cuda12x": "14.2.0"}, "pip uninstall -y cupy-cuda12x && pip install 'cupy-cuda13x[ctk]==14.2.0'"),
    ],
)
def test_no_wheel_of_cupy_is_put_beside_another(there: dict[str, str], command: str) -> None:
    facts = _facts(cupy={"distributions": {"cupy-cuda13x": None, **there}})
    assert install_libraries(facts, "cupy", 13) == command
    assert install_with_cuda(facts, "cupy") == command.replace("==14.2.0", "")


def _conda(framework: str, **more: Any) -> Facts:
    """One framework and nothing else, in an active environment of conda's."""
    found = {"version": "14.2.0", "folder": SITE, "path": SITE, **more}
    driver = load("healthy-h200.json").driver.model_dump()
    given = {"CONDA_PREFIX": PREFIX}
    packages = {"numpy": "2.3.0", "nvidia-ml-py": "13.580.82"}
    return Facts.model_validate(
        {"environment": given, "packages": packages, "driver": driver, "frameworks": {framework: found}}
    )


def test_in_conda_the_libraries_are_condas() -> None:
    facts = _conda("cupy", distributions={"cupy": "14.2.0"})
    command = install_libraries(facts, "cupy", 12, ["libcublas.so.12"])
    assert command.startswith("conda install -c conda-forge cupy cuda-version=12; where pip has installed cupy: pip ")
    assert install_with_cuda(_conda("numba"), "numba").startswith(
        "conda install -c conda-forge numba-cuda cuda-version=13; "
    )


@pytest.mark.parametrize(
    "more",
    [
        {"folder": "/venv/lib/python3.12/site-packages"},
        {"folder": None},
        {"folder": f"{PREFIX}2/lib/python3.12/site-packages"},
        {"distributions": {"cupy-cuda12x": "13.6.0"}},
        {"version": "2.11.0+cu130"},
    ],
)
def test_what_pip_has_installed_is_none_of_condas(more: dict[str, Any]) -> None:
    facts = _conda("cupy", **more)
    assert not may_be_conda(facts, facts.frameworks["cupy"])


@pytest.mark.parametrize(
    ("framework", "cuda", "says"),
    [
        ("cupy", 13000, "nvidia-cuda-nvrtc==13.0.*"),
        ("cupy", 12040, "nvidia-cuda-nvrtc-cu12==12.4.*"),
        ("torch", 12080, f"{INDEX}cu128"),
        ("torch", 12040, None),  # the oldest for CUDA 12 is of 12.6
        ("jax", 13000, None),
        ("numba", 13000, None),
        ("tensorflow", 12040, None),
    ],
)
def test_who_can_be_made_to_compile_for_an_older_driver(framework: str, cuda: int, says: str | None) -> None:
    command = match_driver(_facts(cuda), framework)
    assert (command is None) if says is None else says in (command or "")


def test_a_cupy_before_14_takes_no_nvrtc_of_pip() -> None:
    assert match_driver(_facts(cupy={"version": "13.6.0"}), "cupy") is None
