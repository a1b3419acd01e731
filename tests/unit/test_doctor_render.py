"""The screen of `memguard doctor`, and its plain data."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from memguard._base.units import GIB
from memguard._tools.doctor import DoctorReport, render
from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import (
    Cuda,
    CudaDevice,
    Driver,
    Facts,
    FrameworkFacts,
    NvmlDevice,
    NvmlFacts,
    Probe,
    Stage,
    System,
    Together,
)
from memguard._tools.doctor.finding import Finding, Severity

UUID = "GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53"


def probed(*stages: Stage, **more: Any) -> Probe:
    return Probe(stages=stages, **{"seconds": 4.2, "exit": 0, **more})


def step(name: str, error: str | None = None) -> Stage:
    return Stage(name=name, seconds=1.0, error=error, kind=error and "builtins.RuntimeError")


THROUGH = probed(step("import"), step("devices"), step("compute"))
TORCH = FrameworkFacts(version="2.11.0+cu130", gpu=True, cuda="13.0", gpus=1, probe=THROUGH)
DRIVER = Driver(
    module="580.159.04",
    cuda=Cuda(
        version=13000,
        init="CUDA_SUCCESS",
        devices=(CudaDevice(ordinal=0, uuid=UUID, name="NVIDIA H200", capability=(9, 0), multiprocessors=132),),
    ),
    nvml=NvmlFacts(driver="580.159.04", devices=(NvmlDevice(index=0, uuid=UUID, free=100 * GIB),)),
)
NO_DRIVER = Driver(
    cuda=Cuda(error="libcuda.so.1: cannot open shared object file: No such file or directory"),
    nvml=NvmlFacts(error="NVMLError_LibraryNotFound"),
)
MISSING = Finding(
    "library-missing",
    Severity.ERROR,
    "TensorFlow 2.21.0 was built for CUDA 12 and cannot open the library libcudart.so.12, which nothing installed has",
    ("tensorflow: libcudart.so.12: cannot open shared object file: No such file or directory",),
    "`pip install nvidia-cuda-runtime-cu12`, or `pip install 'tensorflow[and-cuda]'` for all of them at once",
    "tensorflow",
)
CONTEXT = Finding("second-context", Severity.WARNING, "PyCUDA makes a second context", ("a.py:1",), "do", "pycuda")
MINOR = Finding("driver-minor-version", Severity.INFO, "cupy was built for a newer CUDA", ("evidence",), "nothing", "")


def report(*findings: Finding, ignored: tuple[str, ...] = (), **frameworks: FrameworkFacts) -> DoctorReport:
    facts = Facts(driver=DRIVER, frameworks=frameworks or {"torch": TORCH}, seconds={"torch": 4.2, "driver": 0.3})
    return DoctorReport(facts, findings, ignored)


def test_a_healthy_machine_is_a_few_lines() -> None:
    assert str(report(cupy=TORCH, torch=TORCH)).splitlines() == [
        "memguard doctor: healthy: cupy and torch work on NVIDIA H200",
        "",
        "cupy   works  2.11.0+cu130  CUDA 13.0    4.2 s",
        "torch  works  2.11.0+cu130  CUDA 13.0    4.2 s",
        "driver 580.159.04, CUDA 13.0, GPU 0 NVIDIA H200 (100.00 GiB free)",
        "time: driver 0.3 s",
    ]


def test_the_verdict_comes_first_then_what_is_wrong_then_the_frameworks_then_the_rest() -> None:
    broken = TORCH.model_copy(update={"probe": probed(step("import", "no libcudart.so.12"), exit=1), "gpus": None})
    shown = str(report(MISSING, CONTEXT, MINOR, ignored=("mig",), torch=TORCH, tensorflow=broken))
    assert shown == (
        "memguard doctor: 1 error, 1 warning: tensorflow does not work on the GPU; torch\n"
        "  works on NVIDIA H200\n"
        "\n"
        "error  library-missing: tensorflow\n"
        "  TensorFlow 2.21.0 was built for CUDA 12 and cannot open the library\n"
        "  libcudart.so.12, which nothing installed has\n"
        "  - tensorflow: libcudart.so.12: cannot open shared object file: No such file or\n"
        "    directory\n"
        "  fix: `pip install nvidia-cuda-runtime-cu12`, or\n"
        "       `pip install 'tensorflow[and-cuda]'` for all of them at once\n"
        "  more: memguard doctor --explain library-missing\n"
        "\n"
        "warning  second-context: pycuda\n"
        "  PyCUDA makes a second context\n"
        "  - a.py:1\n"
        "  fix: do\n"
        "  more: memguard doctor --explain second-context\n"
        "\n"
        "torch       works            2.11.0+cu130  CUDA 13.0    4.2 s\n"
        "tensorflow  fails in import  2.11.0+cu130  CUDA 13.0    4.2 s\n"
        "driver 580.159.04, CUDA 13.0, GPU 0 NVIDIA H200 (100.00 GiB free)\n"
        "time: driver 0.3 s\n"
        "left out: mig\n"
        "\n"
        "info  driver-minor-version\n"
        "  cupy was built for a newer CUDA\n"
        "  more: memguard doctor --explain driver-minor-version"
    )


def test_before_a_run_only_what_is_wrong_is_shown() -> None:
    shown = render.text(report(CONTEXT, MINOR), brief=True)
    assert shown.startswith(
        "memguard doctor: 1 warning: torch works on NVIDIA H200\n\nwarning  second-context: pycuda\n"
    )
    assert shown.endswith("  more: memguard doctor --explain second-context")


@pytest.mark.parametrize(
    ("framework", "works", "state"),
    [
        (TORCH, True, "works"),
        (FrameworkFacts(), None, "is not installed"),
        (FrameworkFacts(path="/venv/torch/__init__.py"), None, "not tried"),
        (TORCH.model_copy(update={"gpus": 0}), False, "sees no GPU"),
        (FrameworkFacts(gpu=False, probe=THROUGH), False, "is a build without CUDA"),
        (FrameworkFacts(gpus=1, probe=probed(step("import"), step("devices", "no"))), False, "fails in devices"),
        (
            FrameworkFacts(gpus=1, probe=probed(step("import"), exit=None, signal="SIGFPE")),
            False,
            "dies of SIGFPE in devices",
        ),
        (
            FrameworkFacts(gpus=1, probe=probed(step("import"), step("devices"), exit=None, hung=True)),
            False,
            "hangs in compute",
        ),
        (
            FrameworkFacts(gpus=1, probe=probed(step("import"), step("devices"), step("compute"), exit=134)),
            False,
            "exits with 134 at its end",
        ),
        (FrameworkFacts(gpus=1, probe=probed(step("import"))), False, "sees no GPU"),
        (FrameworkFacts(probe=probed(exit=1)), False, "exits with 1 in import"),
        (FrameworkFacts(distributions={"torch": "2.11.0"}), None, "is not installed"),
    ],
)
def test_the_state_of_a_framework(framework: FrameworkFacts, works: bool | None, state: str) -> None:
    assert render.works(framework) is works
    assert render.state(framework) == state


def test_verdicts() -> None:
    errors = render.verdict(report(MISSING, MISSING, torch=FrameworkFacts(probe=probed(exit=1))))
    assert errors == "2 errors: torch does not work on the GPU"
    assert (
        render.verdict(report(torch=FrameworkFacts(path="/venv/torch/__init__.py")))
        == "healthy: no framework was tried"
    )


def test_the_wrong_environment_is_not_healthy() -> None:
    seen = DoctorReport(Facts(system=System(executable="~/venv/bin/python")), ())
    none = "None of PyTorch, TensorFlow, CuPy, JAX, PyCUDA and Numba is installed for"
    said = f"{none} ~/venv/bin/python: is it the right environment?"
    assert render.verdict(seen) == said and not seen.healthy
    assert seen.as_dict()["healthy"] is False and seen.as_dict()["not_installed"] == []
    assert "healthy" not in str(seen)
    ill = DoctorReport(Facts(), (MISSING,))
    assert render.verdict(ill) == f"1 error. {none} this Python: is it the right environment?"
    asked = report(torch=FrameworkFacts())
    assert render.verdict(asked) == "torch is not installed for this Python: is it the right environment?"
    asked = report(torch=TORCH, jax=FrameworkFacts(), cupy=FrameworkFacts())
    assert render.verdict(asked) == (
        "torch works on NVIDIA H200; jax and cupy are not installed for this Python: is it the right environment?"
    )
    assert not asked.healthy and asked.not_installed == ("jax", "cupy")
    assert asked.as_dict()["not_installed"] == ["jax", "cupy"]


def test_what_does_not_work_is_never_next_to_healthy_unless_the_reason_is_told() -> None:
    blind = TORCH.model_copy(update={"gpus": 0, "probe": probed(step("import"), step("devices"))})
    alone = report(torch=blind)
    assert render.verdict(alone) == "nothing found: torch does not work on the GPU"
    told = Finding("cpu-build", Severity.INFO, "torch is for CPUs", ("torch 2.11.0+cpu",), "nothing", "torch")
    assert render.verdict(report(told, torch=blind)) == "healthy: torch does not work on the GPU"
    assert render.verdict(report(told, torch=blind, cupy=blind)).startswith("nothing found: ")

    facts = alone.facts.model_copy(update={"driver": NO_DRIVER})
    assert "driver-absent" in [finding.name for finding in examine(facts)]
    left_out = DoctorReport(facts, examine(facts, {"driver-absent", "mig"}), ("driver-absent", "mig"))
    assert left_out.healthy  # as far as it was asked: the exit code is 0
    assert render.verdict(left_out) == (
        "nothing found beyond what is left out (driver-absent): torch does not work on the GPU"
    )
    assert render.verdict(report(torch=TORCH, ignored=("mig",))).startswith("healthy: ")


def test_what_is_kept_off_the_gpu_is_said_so() -> None:
    blind = TORCH.model_copy(update={"gpus": 0, "probe": probed(step("import"), step("devices"))})
    facts = report(torch=TORCH, jax=blind).facts.model_copy(update={"environment": {"JAX_PLATFORMS": "cpu"}})
    seen = DoctorReport(facts, ())
    assert render.verdict(seen) == "healthy: torch works on NVIDIA H200; jax is kept off the GPU by the environment"
    assert seen.as_dict()["frameworks"]["jax"]["state"] == "is kept off the GPU"


@pytest.mark.parametrize(
    "probe",
    [
        probed(step("import"), exit=None, signal="SIGFPE"),
        probed(step("import"), step("devices"), exit=None, hung=True),
        probed(step("import"), step("devices"), step("compute"), exit=134),
        probed(exit=3),
    ],
)
def test_the_table_and_the_finding_name_the_same_step(probe: Probe) -> None:
    facts = report(torch=TORCH.model_copy(update={"probe": probe})).facts
    (finding,) = examine(facts)
    step_of = re.search(r"in the step (\w+)|at its end", finding.cause)
    assert step_of is not None
    where = f"in {step_of[1]}" if step_of[1] else "at its end"
    assert render.state(facts.frameworks["torch"]).endswith(f" {where}")

    alone = {"torch": TORCH, "jax": TORCH}
    both = Together(order=("jax", "torch"), probe=probed(step("jax"), exit=None, signal="SIGSEGV"))
    seen = Facts(driver=DRIVER, frameworks=alone, together=(both,))
    assert "in the step torch" in examine(seen)[0].cause
    assert "jax then torch in one process: die of SIGSEGV in torch, 4.2 s" in str(DoctorReport(seen, ()))


def test_the_table_keeps_to_the_screen() -> None:
    long = TORCH.model_copy(update={"version": "2.11.0a0+gitdeadbeef" * 5, "cuda": "13.0." * 20})
    absent = FrameworkFacts()
    rows = str(report(torch=long, jax=TORCH, cupy=absent)).splitlines()
    (row,) = [row for row in rows if row.startswith("torch  works")]
    assert len(row) <= render.WIDTH + 10 and "2.11.0a0+gitdeadbeef2.1…  CUDA 13.0.13.0.13.0.13.…  " in row
    assert rows == [row.rstrip() for row in rows]
    assert [span.style for span in render.rich(report(torch=long, cupy=absent)).spans]


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (probed(step("tensorflow"), step("torch")), "work, 4.2 s"),
        (probed(step("tensorflow"), exit=None, signal="SIGFPE"), "die of SIGFPE in torch, 4.2 s"),
        (probed(step("tensorflow"), step("torch"), exit=134), "exit with 134 at its end, 4.2 s"),
        (probed(step("tensorflow"), step("torch", "no")), "fail in torch, 4.2 s"),
        (probed(exit=None, hung=True), "hang in tensorflow, 4.2 s"),
    ],
)
def test_frameworks_in_one_process_have_a_line_too(probe: Probe, said: str) -> None:
    facts = Facts(together=(Together(order=("tensorflow", "torch"), probe=probe),))
    assert f"tensorflow then torch in one process: {said}" in str(DoctorReport(facts, ())).splitlines()


def test_no_line_is_wider_than_the_screen_but_what_is_to_be_copied_stays_whole() -> None:
    command = f"`pip install {' '.join(f'nvidia-package-{number}' for number in range(9))}`"
    long = Finding("mig", Severity.ERROR, "word " * 60, ("x " * 90, "/a" * 60), f"run {command}, then look", "gpu")
    lines = str(report(long)).splitlines()
    wide = [line.strip() for line in lines if len(line) > render.WIDTH]
    assert wide == ["- " + "/a" * 60, f"{command},"]
    assert not any("\N{NO-BREAK SPACE}" in line for line in lines)


def test_what_others_said_cannot_steer_the_terminal_or_forge_a_line() -> None:
    evil = Finding("mig", Severity.ERROR, "a\nb", ("\x1b[31mred\x1b[0m\r\nerror  forged", "\u202eb"), "c\td", "gpu\n0")
    shown = str(report(evil, torch=TORCH.model_copy(update={"version": "1\x1b[2J"})))
    assert all(line.isprintable() for line in shown.splitlines())
    assert "\nerror  forged" not in shown
    assert "error  mig: gpu 0" in shown


def test_in_a_terminal_it_is_the_same_text_with_colours() -> None:
    seen = report(MISSING, CONTEXT, MINOR)
    drawn = render.rich(seen)
    assert drawn.plain == str(seen)
    assert {"bold red", "green"} <= {str(span.style) for span in drawn.spans}
    assert render.rich(seen, brief=True).plain == render.text(seen, brief=True)


def test_plain_data() -> None:
    seen = report(MISSING, MINOR, ignored=("mig",), torch=TORCH, jax=FrameworkFacts())
    data = seen.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["memguard_doctor"] == 1 and data["healthy"] is False and data["ignored"] == ["mig"]
    assert data["verdict"] == (
        "1 error: torch works on NVIDIA H200; jax is not installed for this Python: is it the right environment?"
    )
    assert data["findings"][0] == {
        "name": "library-missing",
        "severity": "error",
        "subject": "tensorflow",
        "cause": MISSING.cause,
        "evidence": list(MISSING.evidence),
        "remedy": MISSING.remedy,
        "page": "docs/doctor/library-missing.md",
    }
    assert data["frameworks"]["torch"] == {
        "works": True, "state": "works", "version": "2.11.0+cu130", "cuda": "13.0", "seconds": 4.2,
    }  # fmt: skip
    assert data["frameworks"]["jax"]["works"] is None
    assert data["probes"] == {"torch": 4.2, "driver": 0.3}


def test_a_prompt_shows_one_line_and_a_notebook_all() -> None:
    seen = report(CONTEXT)
    assert repr(seen) == "<DoctorReport: 1 warning: torch works on NVIDIA H200>"
    shown: list[str] = []
    printer = type("Printer", (), {"text": lambda self, text: shown.append(text)})()
    seen._repr_pretty_(printer, False)
    assert shown == [str(seen)]
