"""How frameworks were built and installed: what is said, and what is left to other findings."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, load, of

from memguard._tools.doctor.checks import build, failures, numpy
from memguard._tools.doctor.facts import Facts


def _names(facts: Facts) -> list[tuple[str, str]]:
    return sorted((f.name, f.subject) for f in of(facts, build, failures, numpy))


def _of(framework: str, **changes: Any) -> Facts:
    return edited("healthy-h200.json", {"together": [], "frameworks": {framework: changes}})


def _failing(framework: str, step: str, error: str, kind: str = "builtins.RuntimeError", **more: Any) -> Facts:
    stages = [{"name": step, "seconds": 1.0, "error": error, "kind": kind}]
    return _of(framework, probe={"stages": stages, "exit": 1}, **more)


def test_an_error_that_nothing_explains() -> None:
    assert _names(_failing("cupy", "compute", "something is broken")) == [("framework-fails", "cupy")]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("numpy.dtype size changed, may indicate binary incompatibility. Expected 96, got 88", "numpy-abi"),
        ("numpy.core.multiarray failed to import", "numpy-abi"),
        ("module 'numpy' has no attribute 'row_stack'", "numpy-abi"),
        ("libcublas.so.13: cannot open shared object file: No such file or directory", None),
        ("PyTorch was compiled against (9, 19, 0) but found runtime version (9, 8, 0)", None),
        ("Failed to find C compiler. Please specify via CC environment variable", "compiler-missing"),
    ],
)
def test_an_error_that_another_finding_explains_is_not_told_twice(error: str, name: str | None) -> None:
    assert {found for found, _ in _names(_failing("torch", "import", error))} == ({name} if name else set())


def test_nvcc_that_the_probe_missed_is_found_by_its_message() -> None:
    facts = _of("pycuda", probe={"said": ["OSError: nvcc was not found (is it on the PATH?)"]})
    assert _names(facts) == [("nvcc-missing", "pycuda")]


def test_without_a_gpu_there_is_nothing_to_compile_for() -> None:
    tools = {"nvcc": "", "gcc": "", "g++": "", "cc": ""}
    changes = {"tools": tools, "packages": {"triton": "3"}, "frameworks": {"pycuda": {"version": "2026.1"}}}
    assert _names(edited("no-driver.json", changes)) == []


def test_what_was_not_looked_for_is_not_missing() -> None:
    assert _names(edited("healthy-h200.json", {"tools": {"nvcc": None, "gcc": None, "g++": None, "cc": None}})) == []


def test_both_of_jaxs_fractions_are_a_finding_of_memory() -> None:
    given = {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    changes = {"environment": given, "together": [], "frameworks": {"jax": {"gpus": 0, "probe": {"stages": []}}}}
    assert _names(edited("healthy-h200.json", changes)) == []
    assert _names(edited("healthy-h200.json", {**changes, "environment": {}})) == [("framework-fails", "jax")]


@pytest.mark.parametrize(
    ("names", "keep"),
    [
        (["cupy-cuda12x", "cupy-cuda13x"], "cupy-cuda13x"),
        (["cupy", "cupy-cuda12x"], "cupy-cuda12x"),
        (["tensorflow", "tensorflow-cpu"], "tensorflow"),
    ],
)
def test_the_distribution_to_keep(names: list[str], keep: str) -> None:
    assert build._distribution_to_keep(edited("healthy-h200.json", {}), names) == keep


def test_the_newest_that_the_driver_can_is_kept() -> None:
    old = edited("healthy-h200.json", {"driver": {"cuda": {"version": 12040}}})
    assert build._distribution_to_keep(old, ["cupy-cuda12x", "cupy-cuda13x"]) == "cupy-cuda12x"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({"numba": "0.68.0", "numba-cuda": "0.30.4"}, False),
        ({"jax": "0.11.2", "jaxlib": "0.11.2"}, False),
        ({"tensorflow": "2.21.0", "tensorflow-io": "0.37"}, False),
        ({"tensorflow": "2.21.0", "tf_nightly": "2.22.dev"}, True),
    ],
)
def test_parts_of_one_framework_are_no_two(names: dict[str, str], found: bool) -> None:
    framework = next(iter(names))
    told = build.two_distributions(_of(framework, distributions=names))
    assert bool(list(told)) is found


def test_another_memguard_is_taken_away_and_this_one_named_by_its_distribution() -> None:
    (found,) = build.other_memguard(load("two-memguards.json"))
    assert found.remedy.startswith("`pip uninstall -y memguard memguard-gpu`, then install memguard-gpu again")
    assert any(line.startswith("memguard-gpu 0.1.0 is installed from https://") for line in found.evidence)
    (found,) = build.other_memguard(load("memguard-of-another-project.json"))
    assert found.remedy == "`pip uninstall -y memguard`"


@pytest.mark.parametrize(("version", "extra"), [(12040, "jax[cuda12]"), (13000, "jax[cuda13]"), (14000, "jax[cuda13]")])
def test_the_build_for_the_drivers_cuda(version: int, extra: str) -> None:
    changes = {
        "driver": {"cuda": {"version": version}},
        "together": [],
        "frameworks": {"jax": {"gpu": False, "gpus": 0}},
    }
    (found,) = build.cpu_build(edited("healthy-h200.json", changes))
    assert extra in found.remedy


@pytest.mark.parametrize(
    ("ended", "step"),
    [
        ([], "in the step import"),
        (["import", "devices"], "in the step compute"),
        (["import", "devices", "compute", "compute with numpy.row_stack"], "at its end"),
    ],
)
def test_a_crash_names_the_step_it_was_in(ended: list[str], step: str) -> None:
    stages = [{"name": name, "seconds": 1.0} for name in ended]
    (found,) = failures.probe_crashed(_of("torch", probe={"stages": stages, "signal": "SIGSEGV", "exit": None}))
    assert f"SIGSEGV, {step}" in found.cause


def test_an_exit_without_a_word_is_a_crash() -> None:
    assert _names(_of("torch", probe={"exit": 3})) == [("probe-crashed", "torch")]


def test_harmless_lines_are_no_evidence_of_a_hang() -> None:
    (found,) = failures.probe_hung(_of("tensorflow", probe={"hung": True, "exit": None}))
    assert not any("oneDNN" in line for line in found.evidence)


def test_the_folder_of_nvcc_is_named_only_where_there_is_one() -> None:
    (found,) = build.nvcc_missing(load("pycuda-without-nvcc-on-the-path.json"))
    assert found.remedy == "export PATH=/usr/local/cuda/bin:$PATH"
    assert "found /usr/local/cuda/bin/nvcc" in found.evidence
    (found,) = build.nvcc_missing(load("pycuda-without-nvcc.json"))
    assert "export" not in found.remedy


def test_a_compiler_that_cc_names_is_none_of_nvccs() -> None:
    none = {"tools": {"gcc": "", "g++": "", "cc": ""}, "environment": {"CC": "/usr/bin/clang"}}
    (found,) = build.compiler_missing(edited("healthy-h200.json", none))
    assert found.subject == "pycuda"


def test_a_library_of_nobodys_is_named_as_missing() -> None:
    (found,) = failures.framework_fails(load("pycuda-without-opengl.json"))
    assert found.cause == "pycuda 2026.1 fails in the step import: libGL.so.1 is missing"
    assert "apt-file search libGL.so.1" in found.remedy


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("It broke. Then it stopped.", "It broke; Then it stopped"),
        ("Oh no! it broke?", "Oh no; it broke"),
    ],
)
def test_an_error_of_several_sentences_is_told_in_one(error: str, told: str) -> None:
    (found,) = failures.framework_fails(_failing("cupy", "compute", error))
    assert found.cause == f"cupy 14.2.0 fails in the step compute: RuntimeError: {told}"
    assert error in found.evidence[0]


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "info"),
        ({"budget": {"source": "b.yaml", "frameworks": ["torch"]}}, "info"),
        ({"budget": {"source": "b.yaml", "frameworks": ["numba"]}}, "warning"),
        ({"script": {"path": "a.py", "imports": [["numba", 1], ["numba.njit", 1]]}}, "info"),
        ({"script": {"path": "a.py", "imports": [["numba.cuda.random", 1]]}}, "warning"),
        ({"process": {"modules": ["numba"]}}, "info"),
        ({"process": {"modules": ["numba", "numba.cuda"]}}, "warning"),
    ],
)
def test_numba_without_cuda_matters_where_it_is_to_be_used(changes: dict[str, Any], severity: str) -> None:
    (found,) = build.cpu_build(edited("numba-for-cpus.json", changes))
    assert (found.severity, found.remedy) == (severity, "pip install 'numba-cuda[cu13]'")


@pytest.mark.parametrize(
    "error", ["Numba needs NumPy 2.2 or less. Got NumPy 2.5.", "No module named 'llvmlite'", "bad marshal data"]
)
def test_a_numba_that_cannot_be_imported_is_broken_for_cpus_too(error: str) -> None:
    stages = [{"name": "import", "seconds": 1.0, "error": error, "kind": "builtins.ImportError"}]
    facts = edited("numba-for-cpus.json", {"frameworks": {"numba": {"gpus": None, "probe": {"stages": stages}}}})
    assert list(build.cpu_build(facts)) == []
    assert [name for name, _ in _names(facts)] == ["numpy-abi" if "NumPy" in error else "framework-fails"]
