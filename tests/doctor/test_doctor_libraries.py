"""What a library's file says of itself, and which of several true things are told."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, of

from memguard._tools.doctor.checks import cudnn, import_order, libraries
from memguard._tools.doctor.cuda_libraries import libraries_not_opened, major, parse
from memguard._tools.doctor.derived import mapped
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.wording import pip_packages

WHEELS = "/venv/lib/python3.12/site-packages/nvidia"


@pytest.mark.parametrize(
    ("path", "stem", "majors", "renamed"),
    [
        ("/x/libcudart.so.13", "libcudart", {13}, False),
        ("/x/libcudart.so.11.8.89", "libcudart", {11}, False),
        ("/x/libcublasLt.so.13.1.0.3", "libcublasLt", {13}, False),
        ("/x/libcufft.so.11", "libcufft", {12}, False),
        ("/x/libcufft.so.12", "libcufft", {13}, False),
        ("/x/libcusolver.so.11", "libcusolver", {11, 12}, False),
        ("/x/libcusparse.so.12.6.3.3", "libcusparse", {12, 13}, False),
        ("/x/libcurand.so.10", "libcurand", set(), False),
        ("/x/libnvrtc-builtins.so.13.0", "libnvrtc-builtins", {13}, False),
        ("/x/libcudnn.so.9", "libcudnn", set(), False),
        ("/x/libcudnn_engines_precompiled.so.9", "libcudnn", set(), False),
        ("/x/torchvision.libs/libcudart.faf08d9a.so.13", "libcudart", {13}, True),
        ("/x/some.libs/libcudart-faf08d9a.so.13.0.96", "libcudart", {13}, True),
    ],
)
def test_a_file_says_what_it_is(path: str, stem: str, majors: set[int], renamed: bool) -> None:
    found = parse(path)
    assert found is not None
    assert (found.library.stem, found.majors, found.renamed) == (stem, majors, renamed)


@pytest.mark.parametrize(
    "path", ["/x/libcuda.so.580.159.04", "/x/libnvidia-ml.so.1", "/x/libtorch_cuda.so", "/x/libc.so.6", "/x/_C.so", ""]
)
def test_the_drivers_and_others_are_none(path: str) -> None:
    assert parse(path) is None


@pytest.mark.parametrize(
    ("name", "cuda", "package"),
    [
        ("libcublas.so.12", 12, "nvidia-cublas-cu12"),
        ("libcublas.so.13", 13, "nvidia-cublas"),
        ("libcudart.so.11.0", 11, "nvidia-cuda-runtime-cu11"),
        ("libcudart.so.13", 13, "nvidia-cuda-runtime"),
        ("libcudnn.so.9", 13, "nvidia-cudnn-cu13"),
        ("libnccl.so.2", 12, "nvidia-nccl-cu12"),
        ("libcusparseLt.so.0", 13, "nvidia-cusparselt-cu13"),
        ("libnvvm.so.4", 12, "nvidia-cuda-nvcc-cu12"),
        ("libnvvm.so.4", 13, "nvidia-nvvm"),
    ],
)
def test_the_pip_package_that_brings_it(name: str, cuda: int, package: str) -> None:
    found = parse(name)
    assert found is not None and found.library.pip(cuda) == package


def test_a_soname_is_believed_before_the_frameworks_cuda() -> None:
    assert pip_packages(["libcublas.so.12", "libcudnn.so.9"], 13) == ["nvidia-cublas-cu12", "nvidia-cudnn-cu13"]
    assert pip_packages(["libcusparse.so.12"], 12) == ["nvidia-cusparse-cu12"]


def test_missing_libraries_are_cudas_only() -> None:
    said = [
        "libcublas.so.12: cannot open shared object file: No such file or directory",
        "libcuda.so.1: cannot open shared object file: No such file or directory",
        "libGL.so.1: cannot open shared object file: No such file or directory",
        "Could not load dynamic library 'libcufft.so.11'; dlerror: libcufft.so.11: cannot open shared object file",
        "Unable to load cuPTI. Is it installed?\nUnable to load frobnicator. Is it installed?",
    ]
    cudas = [name for name in libraries_not_opened(said) if parse(name)]
    assert cudas == ["libcublas.so.12", "libcufft.so.11", "libcupti.so"]


@pytest.mark.parametrize(
    ("text", "number"), [("13.0", 13), ("12.5.1", 12), ("13000", 13), ("12", 12), ("", None), (None, None)]
)
def test_major(text: str | None, number: int | None) -> None:
    assert major(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9.19.0", (9, 19, 0)),
        ("91900", (9, 19, 0)),
        ("8907", (8, 9, 7)),
        ("9", (9,)),
        ("9, 19, 0", (9, 19, 0)),
        (None, ()),
    ],
)
def test_cudnn_versions(text: str | None, number: tuple[int, ...]) -> None:
    assert cudnn.version(text) == number


@pytest.mark.parametrize(
    ("built", "loaded", "old"),
    [
        ("9.19.0", "9.19.0", False),
        ("9.19.0", "9.20.1", False),
        ("9.19.2", "9.19.0", False),
        ("9.19.0", "9.8.0", True),
        ("8.9.7", "9.1.0", True),
        ("9", "9.1.0", False),
        ("9.3", "9", False),
    ],
)
def test_cudnn_needs_its_major_and_at_least_its_minor(built: str, loaded: str, old: bool) -> None:
    facts = edited("healthy-h200.json", {"frameworks": {"torch": {"cudnn": built, "cudnn_loaded": loaded}}})
    assert cudnn.too_old(facts.frameworks["torch"]) is old


def _names(facts: Facts) -> list[tuple[str, str]]:
    return sorted((f.name, f.subject) for f in of(facts, libraries, cudnn, import_order))


def _torch(**changes: Any) -> Facts:
    return edited("healthy-h200.json", {"together": [], "frameworks": {"torch": changes}})


def _with(*paths: str) -> Facts:
    own = [file.path for file in mapped(edited("healthy-h200.json", {}).frameworks["torch"].probe)]  # type: ignore[arg-type]
    return _torch(probe={"libraries": [*own, *paths]})


def test_healthy_has_none() -> None:
    assert _names(_with()) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/extra/nvidia/cuda_runtime/lib/libcudart.so.12", "cuda-majors-mixed"),
        ("/extra/libcudart.so.13", "library-twice"),
        ("/extra/libcudnn.so.9", "library-twice"),
        ("/extra/torchvision.libs/libcudart.faf08d9a.so.13", "library-twice"),
    ],
)
def test_one_strange_file_is_one_finding(path: str, name: str) -> None:
    assert _names(_with(path)) == [(name, "torch")]


@pytest.mark.parametrize("name", ["libnvrtc-builtins.so.13.0.88", "libnvvm.so.4.0.0", "libcuda.so.1"])
def test_what_has_no_state_or_is_there_once_is_none(name: str) -> None:
    assert _names(_with(f"/usr/local/cuda-13.0/lib64/{name}")) == []


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("libcudart.so.13", "warning"),
        ("libcudart.faf08d9a.so.13", "info"),
        ("libnvrtc.so.13", "info"),
        ("libnvJitLink.so.13", "info"),
    ],
)
def test_a_copy_that_nobody_mistakes_is_an_info(name: str, severity: str) -> None:
    (found,) = libraries.library_twice(_with(f"/extra/{name}"))
    assert str(found.severity) == severity


def test_copies_in_the_same_two_folders_are_one_finding() -> None:
    assert _names(_with("/extra/libcublas.so.13", "/extra/libcublasLt.so.13")) == [("library-twice", "torch")]
    two = _with("/extra/libcublas.so.13", "/other/libcublas.so.13")
    assert len(_names(two)) == 3  # three files: each pair of folders


def test_a_wrong_major_needs_the_right_one_to_be_absent() -> None:
    only = _torch(cuda="12.6", probe={"libraries": [f"{WHEELS}/cu13/lib/libcublas.so.13"]})
    assert _names(only) == [("library-wrong-major", "torch")]
    both = [f"{WHEELS}/cublas/lib/libcublas.so.12", f"{WHEELS}/cu13/lib/libcublas.so.13"]
    assert _names(_torch(cuda="12.6", probe={"libraries": both})) == [("cuda-majors-mixed", "torch")]


def test_nothing_is_said_of_a_framework_that_does_not_say_its_cuda() -> None:
    assert _names(_torch(cuda=None, probe={"libraries": ["/x/libcublas.so.12", "/x/libcudart.so.13"]})) == []


def test_a_misread_gpu_makes_two_majors_an_error() -> None:
    stranger = "/extra/nvidia/cuda_runtime/lib/libcudart.so.12"
    facts = _torch(multiprocessors=[1], probe={"libraries": [f"{WHEELS}/cu13/lib/libcudart.so.13", stranger]})
    (found,) = libraries.cuda_majors_mixed(facts)
    assert str(found.severity) == "error"
    assert any("1 multiprocessors, the driver 132" in line for line in found.evidence)


def test_missing_and_working_is_an_info() -> None:
    (found,) = libraries.library_missing(_torch(missing=["libcupti.so.13"]))
    assert str(found.severity) == "info"
    assert found.remedy == "pip install nvidia-cuda-cupti"


BROKEN = {"order": ["tensorflow", "torch"], "multiprocessors": {"torch": 1}, "probe": {"signal": "SIGFPE"}}


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({}, "warning"),
        ({"script": {"path": "a.py", "imports": [["tensorflow.keras", 1], ["torch.nn", 2]]}}, "error"),
        ({"script": {"path": "a.py", "imports": [["torch", 1], ["tensorflow", 2]]}}, "warning"),
        ({"script": {"path": "a.py", "imports": [["memguard", 1], ["tensorflow", 2], ["torch", 3]]}}, "warning"),
        ({"script": {"path": "a.py", "imports": [["tensorflow", 1], ["memguard", 2], ["torch", 3]]}}, "error"),
        ({"process": {"modules": ["tensorflow", "torch"]}}, "error"),
        ({"process": {"modules": ["tensorflow", "torch"], "budget": True}}, "warning"),
        ({"process": {"modules": ["torch", "tensorflow"]}}, "warning"),
        ({"budget": {"frameworks": ["tensorflow", "torch"]}}, "info"),
        ({"budget": {"frameworks": ["tensorflow"]}}, "warning"),
        (
            {"budget": {"frameworks": ["tensorflow", "torch"]}, "process": {"modules": ["tensorflow", "torch"]}},
            "error",
        ),
    ],
)
def test_import_order_is_as_bad_as_what_is_done(changes: dict[str, Any], severity: str) -> None:
    facts = edited("healthy-h200.json", {"together": [BROKEN], **changes})
    assert [str(found.severity) for found in import_order.import_order(facts)] == [severity]


@pytest.mark.parametrize(
    "changes",
    [
        {"together": [{**BROKEN, "order": ["torch", "tensorflow"]}]},
        {"together": [BROKEN, {**BROKEN, "order": ["torch", "tensorflow"]}]},
        {"together": [BROKEN], "frameworks": {"torch": {"probe": {"signal": "SIGSEGV"}}}},
        {"together": [{"order": ["tensorflow", "torch"], "multiprocessors": {"torch": 132}, "probe": {"exit": 0}}]},
        {"together": [{"order": ["tensorflow", "torch"], "probe": {"signal": "SIGKILL"}}]},  # for want of host memory
        {"together": [], "script": {"path": "a.py", "imports": [["tensorflow", 1], ["torch", 2]]}},
    ],
)
def test_no_import_order_without_proof(changes: dict[str, Any]) -> None:
    assert list(import_order.import_order(edited("healthy-h200.json", changes))) == []


CU12, CU13 = f"{WHEELS}/cublas/lib/libcublas.so.12", f"{WHEELS}/cu13/lib/libcublas.so.13"


def _both(tensorflow: str, torch: str, **more: Any) -> Facts:
    """TensorFlow for CUDA 12 with this file and PyTorch for CUDA 13 with that, alone and in one process."""
    frameworks = {
        "tensorflow": {"cuda": "12.5.1", "probe": {"libraries": [tensorflow]}},
        "torch": {"probe": {"libraries": [torch]}},
        **dict.fromkeys(("jax", "cupy", "pycuda", "numba")),
    }
    together = {"order": ["torch", "tensorflow"], "probe": {"exit": 0, "libraries": [tensorflow, torch]}}
    return edited("healthy-h200.json", {"frameworks": frameworks, "together": [together], **more})


def test_two_frameworks_for_two_cudas_are_a_mixture() -> None:
    assert _names(_both(CU12, CU13)) == [("cuda-majors-mixed", "tensorflow")]


def test_what_the_import_order_does_is_told_once() -> None:
    broken = {**BROKEN, "probe": {"signal": "SIGFPE", "libraries": [CU12, CU13]}}
    assert _names(_both(CU12, CU13, together=[broken])) == [("import-order", "torch")]


def test_what_a_wrong_major_brings_into_a_process_of_several_is_told_once() -> None:
    wrong = "/usr/local/cuda-11.8/lib64/libcublas.so.11"
    assert _names(_both(wrong, CU13)) == [("library-wrong-major", "tensorflow")]


def test_what_one_framework_has_alone_is_told_once() -> None:
    together = {"order": ["torch", "tensorflow"], "probe": {"exit": 0, "libraries": [CU12, CU13]}}
    frameworks = {"torch": {"probe": {"libraries": [CU12, CU13]}}}
    facts = edited("healthy-h200.json", {"frameworks": frameworks, "together": [together]})
    assert _names(facts) == [("cuda-majors-mixed", "torch")]


def test_without_a_driver_only_a_failing_import_lacks_a_library() -> None:
    said = {"said": ["Cannot dlopen some GPU libraries. Please make sure the missing libraries"]}
    facts = edited("no-driver.json", {"frameworks": {"tensorflow": {"gpu": True, "probe": said}}})
    assert _names(facts) == []
    error = "libcudart.so.13: cannot open shared object file: No such file or directory"
    stages = [{"name": "import", "seconds": 0.1, "error": error, "kind": "builtins.ImportError"}]
    facts = edited("no-driver.json", {"frameworks": {"torch": {"probe": {"stages": stages, "exit": 1}}}})
    assert _names(facts) == [("library-missing", "torch")]
