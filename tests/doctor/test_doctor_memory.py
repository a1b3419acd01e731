"""What the checks of memory say, and where they say nothing. The corpus says which findings there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from doctor_facts import edited, of, plain

from memguard._base.units import GIB, MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.jax.adapter import JAX
from memguard._frameworks.specs import SPECS
from memguard._frameworks.tensorflow.adapter import TensorFlow
from memguard._tools.doctor.checks import memory
from memguard._tools.doctor.collect import this_process
from memguard._tools.doctor.facts import Facts, Process
from memguard._tools.doctor.finding import Finding, Severity
from memguard.errors import ConflictingSetting

UUID = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be"
HEALTHY = "healthy-h200.json"


def found(changes: dict[str, Any], base: str = HEALTHY) -> list[Finding]:
    """What the checks of this module find."""
    facts = edited(base, changes)
    return of(facts, memory)


def only(name: str) -> Finding:
    (finding,) = found({}, name)
    return finding


def budget(*frameworks: str, **more: Any) -> dict[str, Any]:
    return {"source": "budget.yaml", "frameworks": list(frameworks), **more}


# Allocators without a limit


def test_an_allocator_without_a_limit_is_an_error_where_a_limit_is_set() -> None:
    finding = only("async-allocator-budget.json")
    assert (
        finding.cause == "with TF_GPU_ALLOCATOR=cuda_malloc_async TensorFlow has no memory limit: its cap does not hold"
    )
    assert finding.evidence[:2] == ("TF_GPU_ALLOCATOR=cuda_malloc_async (environment)", "budget.yaml caps tensorflow")
    assert finding.evidence[2] == "cuda_malloc_async ignores memory_limit"
    assert finding.remedy == "unset TF_GPU_ALLOCATOR"
    finding = only("async-allocator-fraction.json")
    assert "XLA_CLIENT_MEM_FRACTION=.30 does not hold" in finding.cause
    assert "XLA_CLIENT_MEM_FRACTION=.30 (environment)" in finding.evidence


def test_an_allocator_of_a_framework_that_is_not_there_or_not_for_gpus_is_none_of_ours() -> None:
    environment = {"environment": {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, "budget": budget("tensorflow")}
    assert found(environment)
    assert not found({**environment, "frameworks": {"tensorflow": None}})
    assert not found({**environment, "frameworks": {"tensorflow": {"gpu": False}}})


ALLOCATORS = [
    "", "default", "bfc", "BFC", " bfc ", "platform", "cuda_async", "CUDA_Async", "vmm", "VMM", " vmm", "address",
    "bfcc", "cuda_malloc_async", " CUDA_malloc_async", "cuda_malloc", "nothing",
]  # fmt: skip
VARIABLES = {"jax": "XLA_PYTHON_CLIENT_ALLOCATOR", "tensorflow": "TF_GPU_ALLOCATOR"}
OPTION = "jax_pjrt_client_create_options allocator"


def refused_by_init(framework: str, options: dict[str, str]) -> str | None:
    """What `init` says of the environment, and of JAX's client options."""
    try:
        if framework == "jax":
            JAX(SimulatedHost())._refuse_conflicts(options)
        else:
            TensorFlow(SimulatedHost())._refuse_unlimited()
    except ConflictingSetting as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", ALLOCATORS)
@pytest.mark.parametrize("where", [*VARIABLES, OPTION.upper().replace(" ALLOCATOR", ""), OPTION])
def test_the_doctor_finds_the_allocators_that_init_refuses_and_no_others(
    where: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the same reason: both read the framework's row."""
    framework = where if where in VARIABLES else "jax"
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    options, changes = {}, {"budget": budget(framework)}
    if where in VARIABLES:
        monkeypatch.setenv(VARIABLES[where], value)
        changes["environment"] = {VARIABLES[where]: value}
    elif where == OPTION:
        options = {"allocator": value}
        modules = {"jax": SimpleNamespace(config=SimpleNamespace(jax_pjrt_client_create_options=options))}
        changes["process"] = {"modules": ["jax"], "allocators": this_process.allocators(modules)}
    else:  # what JAX makes of the variable of that name is tested with JAX itself
        options = {"allocator": value}
        changes["environment"] = {where: f"memory_fraction:0.1;allocator:{value}"}
    refused = refused_by_init(framework, options)
    findings = [finding for finding in found(changes) if finding.name == "async-allocator"]
    assert len(findings) == (refused is not None) == len(found(changes))
    if refused is not None:
        (finding,) = findings
        name, why = value.strip().lower(), SPECS[framework].allocators.why_uncapped(value)
        assert why is not None and why in refused
        assert finding.severity is Severity.ERROR and finding.evidence[-1] == f"{name} {why}"
        assert finding.cause.startswith(f"with {VARIABLES.get(where, where)}") and "budget.yaml" in finding.evidence[1]


def test_xlas_vmm_keeps_to_a_limit_and_cannot_be_capped_all_the_same() -> None:
    vmm = {"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}
    (finding,) = found({"environment": vmm, "budget": budget("jax")})
    assert finding.cause == ("with XLA_PYTHON_CLIENT_ALLOCATOR=vmm its cap cannot be set, and memguard.init refuses it")
    assert "keeps to JAX's fraction" in finding.evidence[-1] and "no limit" not in str(finding)
    assert finding.remedy == "unset XLA_PYTHON_CLIENT_ALLOCATOR"
    for more in ({}, {"XLA_CLIENT_MEM_FRACTION": ".3"}):  # which holds
        for caps in ({}, {"budget": budget("torch")}):
            assert not found({"environment": {**vmm, **more}, **caps})


ASYNC = {"modules": ["cupy"], "allocators": {"cupy": "cupy.cuda.memory.MemoryAsyncPool"}}


def test_the_limit_of_cupys_async_pool_is_none() -> None:
    finding = only("async-pool-of-cupy.json")
    assert finding.cause == "with MemoryAsyncPool CuPy has no memory limit: CUPY_GPU_MEMORY_LIMIT=50% does not hold"
    assert finding.evidence[:2] == (
        "cupy allocates from cupy.cuda.memory.MemoryAsyncPool (this process)",
        "CUPY_GPU_MEMORY_LIMIT=50% (environment)",
    )
    assert "budget.yaml caps cupy" in only("async-pool-of-cupy-budget.json").evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"process": ASYNC},  # no limit is wanted
        {"process": ASYNC, "environment": {"CUPY_GPU_MEMORY_LIMIT": "0"}},
        {"process": ASYNC, "environment": {"CUPY_GPU_MEMORY_LIMIT": "0%"}},
        {"process": ASYNC, "budget": budget("torch")},
        {"process": {**ASYNC, "budget": True}, "budget": budget("cupy")},  # init says that it only watches it
        {"process": {"modules": ["cupy"]}, "environment": {"CUPY_GPU_MEMORY_LIMIT": "50%"}},
        {"environment": {"CUPY_GPU_MEMORY_LIMIT": "50%"}},
    ],
)
def test_cupys_async_pool_is_nothing_where_no_limit_is_meant(changes: dict[str, Any]) -> None:
    assert not found(changes)


# Both fractions


def test_both_fractions_are_named_with_what_jax_said() -> None:
    finding = only("xla-fractions.json")
    assert finding.evidence[:2] == (
        "XLA_CLIENT_MEM_FRACTION=.30 (environment)",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=.30 (environment)",
    )
    assert finding.evidence[2].startswith("jax: Unknown backend cuda")
    assert finding.remedy == "unset XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_both_fractions_are_nothing_where_jax_has_its_gpu_all_the_same() -> None:
    both = {"XLA_CLIENT_MEM_FRACTION": ".3", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}
    assert not found({"environment": both})  # a JAX that knows only one of them
    assert not found({"environment": both, "frameworks": {"jax": {"gpus": 0, "gpu": False}}})
    assert not found({"environment": both, "frameworks": {"jax": None}})
    (finding,) = found({"environment": both, "frameworks": {"jax": {"gpus": 0}}})
    assert finding.evidence[-1] == "jax sees no GPU"


# Contexts


def test_a_second_context_is_named_with_what_it_costs_and_what_the_process_holds() -> None:
    finding = only("second-context.json")
    assert "beside that of torch: 518 MiB more (measured on an H200)" in finding.cause
    assert f"this process holds 1.10 GiB on {UUID}" in finding.evidence
    assert "pycuda.autoprimaryctx" in finding.remedy
    assert only("second-context-script.json").evidence == (
        "train.py:2: imports torch",
        "train.py:5: imports pycuda.autoinit",
    )


def test_a_context_for_opengl_is_one_too_and_has_a_remedy_of_its_own() -> None:
    finding = only("second-context-of-opengl.json")
    assert "pycuda.gl.autoinit is imported in this process" in finding.evidence
    assert "retain_primary_context" in finding.remedy and "autoprimaryctx" not in finding.remedy


@pytest.mark.parametrize(
    ("process", "there"),
    [
        ({"modules": ["torch", "pycuda"], "foreign_context": True}, True),
        ({"modules": ["cupy", "pycuda.autoinit"], "foreign_context": True, "budget": True}, True),
        ({"modules": ["torch", "pycuda.autoinit"]}, True),  # nobody could ask
        ({"modules": ["torch", "pycuda.autoinit"], "budget": True}, False),  # which hands it the primary one
        ({"modules": ["torch", "pycuda.autoinit"], "foreign_context": False}, False),
        ({"modules": ["pycuda", "pycuda.autoinit"], "foreign_context": True}, False),  # the only one
        ({"modules": ["numba", "numba.cuda", "pycuda"], "foreign_context": True}, True),
        ({"modules": ["numba", "pycuda"], "foreign_context": True}, False),  # for the CPU
        ({"modules": ["torch", "pycuda.gl.autoinit"]}, True),
        ({"modules": ["torch", "pycuda"]}, False),
        ({}, False),
    ],
)
def test_when_a_context_is_a_second_one(process: dict[str, Any], there: bool) -> None:
    names = [finding.name for finding in found({"process": process})]
    assert names == (["second-context"] if there else [])


# Preallocation


def test_frameworks_that_take_the_card_are_named_where_they_share_a_process() -> None:
    tensorflow, jax = found({}, "preallocation.json")
    assert "torch and jax in the same process then finds none" in tensorflow.cause
    assert tensorflow.evidence[0] == "train.py:2: imports tensorflow"
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in tensorflow.remedy
    assert jax.evidence[0] == "train.py:3: imports jax.numpy"
    assert jax.evidence[-1] == "JAX's default is 75%: 104.85 GiB of GPU 0"
    (finding,) = found({"process": {"modules": ["cupy", "jax"]}})
    assert finding.evidence[0] == "this process has imported jax"


@pytest.mark.parametrize(
    "changes",
    [
        {"script": {"path": "a.py", "imports": [["tensorflow", 1]]}},  # alone
        {"script": {"path": "a.py", "imports": [["numpy", 1], ["jax", 2]]}},
        {"process": {"modules": ["torch", "tensorflow"], "budget": True}},
        {"process": {"modules": ["torch", "jax"]}, "environment": {"XLA_CLIENT_MEM_FRACTION": ".2"}},
        {"process": {"modules": ["torch", "jax"]}, "environment": {"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}},
        {"process": {"modules": ["torch", "jax"]}, "frameworks": {"jax": {"gpus": 0}}},
        {"process": {"modules": ["torch", "jax"]}, "frameworks": {"jax": None}},
    ],
)
def test_preallocation_is_nothing_where_nobody_is_beside_it_or_it_is_off(changes: dict[str, Any]) -> None:
    assert not found(changes)


def test_growth_has_to_be_written_as_tensorflow_reads_it() -> None:
    process = {"process": {"modules": ["torch", "tensorflow"]}}
    assert not found({**process, "environment": {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}})
    assert found({**process, "environment": {"TF_FORCE_GPU_ALLOW_GROWTH": "True"}})  # it logs an error and ignores it


# Allocators


def test_a_swapped_allocator_is_a_warning_only_where_the_budget_caps_it() -> None:
    finding = only("allocator-swap-rmm.json")
    assert "cupy allocates from rmm.allocators.cupy.rmm_cupy_allocator" in finding.cause
    allocators = {"cupy": "RMM", "torch": "a pluggable allocator"}
    swapped = {"process": {"modules": ["cupy"], "allocators": allocators}}
    assert not found(swapped)
    assert [f.subject for f in found({**swapped, "budget": budget("torch", "jax")})] == ["torch"]
    capped = {"torch": "cudaMallocAsync", "cupy": "cupy.cuda.memory.MemoryPool"}
    assert not found({"process": {"allocators": capped}, "budget": budget("torch", "cupy")})
    swapped["process"]["budget"] = True
    assert not found({**swapped, "budget": budget("torch", "cupy")})  # init has judged it


# Budgets that do not fit


def test_a_budget_that_cannot_be_planned_says_why_and_what_to_do() -> None:
    finding = only("budget-too-large.json")
    assert finding.evidence == (
        "budget.yaml:2:17: device.limit: the limit of 150.00 GiB is more than NVIDIA H200 has (139.80 GiB)",
    )
    assert finding.remedy == "lower it to at most 143156MiB or write a percentage"
    errors = [f"budget.yaml:{line}:1: wrong" for line in range(9)]
    (finding,) = found({"budget": budget("torch", errors=errors)})
    assert finding.evidence == (*errors[:4], "and 5 more")
    assert finding.remedy == "memguard plan budget.yaml"
    assert not found({"budget": budget("torch", errors=errors)}, "no-driver.json")  # there is nothing to plan for


def test_a_budget_that_others_leave_no_room_for() -> None:
    finding = only("budget-not-now.json")
    assert finding.cause == "the limit of 120.00 GiB on NVIDIA H200 does not fit at present: 44.80 GiB is left"
    assert "PID 4242 holds 95.00 GiB (NVML)" in finding.evidence
    assert finding.remedy == "stop what holds the memory, or lower device.limit to 45876MiB"


def test_what_the_process_holds_itself_counts_as_free_for_its_budget() -> None:
    base = "budget-not-now.json"
    assert found({"process": {"contexts": {UUID: 50 * GIB}}}, base)
    assert not found({"process": {"contexts": {UUID: 80 * GIB}}}, base)
    facts = edited(base, {"process": {}})  # a merge patch holds no null
    unknown = facts.model_copy(update={"process": Process(contexts={UUID: None})})  # as in a container
    assert not list(memory.budget_too_large(unknown)) and list(memory.budget_too_large(facts))
    assert not found({"budget": budget("torch", limits={UUID: 40 * GIB})}, base)
    assert not found({"budget": budget("torch", limits={UUID: None, "GPU-0": 120 * GIB})}, base)


def test_of_a_gpu_that_mig_has_divided_nvml_says_nothing_that_a_limit_can_be_held_against() -> None:
    devices = plain("budget-not-now.json")["driver"]["nvml"]["devices"]
    divided = [{**devices[0], "mig": True}]
    assert not found({"driver": {"nvml": {"devices": divided}}}, "budget-not-now.json")


def test_a_full_card_is_told_once() -> None:
    devices = plain("budget-not-now.json")["driver"]["nvml"]["devices"]
    devices = [{**devices[0], "free": 100 * MIB, "used": 139 * GIB}]
    assert not found({"driver": {"nvml": {"devices": devices}}}, "budget-not-now.json")


def test_facts_that_say_nothing_have_no_finding() -> None:
    assert of(Facts(), memory) == []
