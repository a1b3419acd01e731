"""Which lines are harmless, and which only look like those."""

from __future__ import annotations

import pytest
from doctor_facts import edited

from memguard._tools.doctor.checks import noise


@pytest.mark.parametrize(
    "line",
    [
        "E0000 00:00:1744.717753 1370911 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register",
        "E external/local_xla/xla/cuda_blas.cc:1515] Unable to register cuBLAS factory",
        "W0000 computation_placer.cc:177] computation placer already registered. Please check linkage",
        "cuda_executor.cc:901] successful NUMA node read from SysFS had negative value (-1)",
        "W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
        "I cpu_feature_guard.cc:182] This TensorFlow binary is optimized to use available CPU instructions in",
        "I0000 port.cc:153] oneDNN custom operations are on. You may see slightly different numerical results",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E cuda_timer.cc:86] Delay kernel timed out: measured time has sub-optimal accuracy.",
        "dispatcher.py:748: NumbaPerformanceWarning: Grid size 1 will likely result in GPU under-utilization",
    ],
)
def test_harmless(line: str) -> None:
    assert noise.meaning(line)


@pytest.mark.parametrize(
    "line",
    [
        "An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed.",
        "CuPy may not function correctly because multiple CuPy packages are installed in your environment",
        "Cannot dlopen some GPU libraries. Please make sure the missing libraries mentioned above are installed",
        "Loaded runtime CuDNN library: 9.1.0 but source was compiled with: 9.3.0.",
        "could not find cuda drivers on your machine, GPU will not be used",
        "Fatal Python error: Floating-point exception",
        "failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "",
    ],
)
def test_not_harmless(line: str) -> None:
    assert noise.meaning(line) is None


def test_one_finding_for_all_that_were_seen() -> None:
    said = ["oneDNN custom operations are on.", "who knows what this is", "oneDNN custom operations are on."]
    changes = {"tensorflow": {"probe": {"said": said}}, "numba": {"probe": {"said": []}}}
    (found,) = noise.harmless_message(edited("healthy-h200.json", {"frameworks": changes}))
    assert str(found.severity) == "info"
    assert found.evidence == ("tensorflow: oneDNN custom operations are on. (a note on rounding on the CPU)",)


def test_none_where_nothing_was_said() -> None:
    silent = {"tensorflow": {"probe": {"said": []}}, "numba": {"probe": {"said": []}}}
    assert list(noise.harmless_message(edited("healthy-h200.json", {"frameworks": silent}))) == []


def test_nothing_is_to_be_done_and_no_warning_is_to_be_hidden() -> None:
    (found,) = noise.harmless_message(edited("healthy-h200.json", {}))
    assert found.remedy == "nothing to do"
