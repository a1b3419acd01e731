"""Memory: settings that disable a limit, second contexts, preallocation, and budgets that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memguard._base.framework_spec import OVERHEADS, SECOND_CONTEXT
from memguard._base.types import Device, DevicePlan, Plan
from memguard._base.units import MIB, format_size
from memguard._budget import mps
from memguard._frameworks.jax.adapter import as_mapping
from memguard._frameworks.specs import SPECS
from memguard._tools.doctor.derived import (
    both_xla_fractions,
    budgeted,
    failed_stage,
    filled_by_others,
    held_by_caller,
    kept_off,
    no_gpu,
    same_gpu,
)
from memguard._tools.doctor.facts import BudgetFacts, Facts, NvmlDevice
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import last_line, listing, shortened, variable

_JAX_OPTIONS = "JAX_PJRT_CLIENT_CREATE_OPTIONS"
"""JAX's option jax_pjrt_client_create_options as an environment variable: key:value;key:value."""
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")
_ASYNC_POOL = "MemoryAsyncPool"
_CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
_SECOND_CONTEXT = OVERHEADS[SECOND_CONTEXT].modules // MIB
_PRIMARY = ("torch", "tensorflow", "jax", "cupy", "numba")
"""Frameworks that use CUDA's primary context."""
_CAPPED = ("cudaMallocAsync", "cupy.cuda.memory.MemoryPool")
"""Allocators on which a cap holds, in addition to each framework's default."""


@check("async-allocator", order=505)
def async_allocator(facts: Facts) -> Iterator[Found]:
    """The chosen allocator supports no cap. An error where `init` refuses it, for the same reason."""
    for framework, spec in SPECS.items():
        if not _has_gpu_build(facts, framework):
            continue
        capped = framework in budgeted(facts)
        for setting, value, where in _chosen_allocators(facts, framework):
            why = spec.allocators.why_uncapped(value)
            unlimited = value.strip().lower() in spec.allocators.unlimited
            if why is None or not (capped or unlimited):  # JAX's `vmm` respects the memory fraction
                continue
            limits = _limits(facts, framework)
            if not limits:
                cause = f"with {setting}={value} {spec.title} has no memory limit"
            elif unlimited:
                cause = f"with {setting}={value} {spec.title} has no memory limit: {limits[0]} does not hold"
            else:
                cause = f"with {setting}={value} its cap cannot be set, and memguard.init refuses it"
            option, _, key = setting.partition(" ")
            remedy = f"take {key} out of {option}" if key else f"unset {setting}"
            yield Found(
                cause,
                (f"{setting}={value} ({where})", *limits[1:], f"{value.strip().lower()} {why}"),
                remedy if limits else f"{remedy} before you limit {spec.title}",
                framework,
                severity=Severity.ERROR if limits else Severity.INFO,
            )
            break


def _chosen_allocators(facts: Facts, framework: str) -> Iterator[tuple[str, str, str]]:
    """The settings that choose the framework's allocator: name, value, and source."""
    variable = SPECS[framework].allocators.variable
    if variable:
        yield variable, facts.environment.get(variable, "").strip(), "environment"
    if framework == "jax":
        options = as_mapping(facts.environment.get(_JAX_OPTIONS, ""))
        yield f"{_JAX_OPTIONS} allocator", options.get("allocator", "").strip(), "environment"
        if facts.process is not None:
            option = f"{_JAX_OPTIONS.lower()} allocator"
            yield option, facts.process.allocators.get(framework, ""), "this process"


@check("async-allocator", order=510)
def async_pool(facts: Facts) -> Iterator[Found]:
    """CuPy's async pool: its limit is a release threshold, which refuses no allocation."""
    limits = _cupy_limits(facts)
    if facts.process is not None and _has_async_pool(facts) and limits:
        yield Found(
            f"with {_ASYNC_POOL} CuPy has no memory limit: {limits[0]} does not hold",
            (
                f"cupy allocates from {facts.process.allocators['cupy']} (this process)",
                *limits[1:],
                "its limit is the release threshold of a pool that the whole process shares",
            ),
            "cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc): limits of that pool hold",
            "cupy",
        )


def _has_async_pool(facts: Facts) -> bool:
    return facts.process is not None and facts.process.allocators.get("cupy", "").rpartition(".")[2] == _ASYNC_POOL


def _cupy_limits(facts: Facts) -> tuple[str, ...]:
    """As `_limits`. An active budget is not counted: it has already warned that this pool is only watched."""
    given = facts.environment.get(_CUPY_LIMIT, "").strip()
    active = facts.process is not None and facts.process.budget
    if "cupy" in budgeted(facts) and not active:
        return "its cap", _capped_by(facts, "cupy")
    if not given.rstrip("%").strip("0."):  # not set; 0 means no limit
        return ()
    return f"{_CUPY_LIMIT}={given}", f"{_CUPY_LIMIT}={given} (environment)"


def _limits(facts: Facts, framework: str) -> tuple[str, ...]:
    """The limit that should hold and the line of evidence for it; empty if no limit is set."""
    if framework in budgeted(facts):
        return "its cap", _capped_by(facts, framework)
    own = [f"{name}={facts.environment[name]}" for name in _FRACTIONS if facts.environment.get(name)]
    return (own[0], f"{own[0]} (environment)") if framework == "jax" and own else ()


@check("xla-fractions", order=515)
def xla_fractions(facts: Facts) -> Iterator[Found]:
    """Both names of JAX's memory fraction are set; JAX accepts only one of them."""
    both = both_xla_fractions(facts)
    cards = facts.driver.cuda.devices or facts.driver.nvml.devices
    if not both or not cards or no_gpu(facts) or kept_off(facts, "jax"):
        return  # no GPU, or another setting disables it for JAX
    stage = failed_stage(facts.frameworks["jax"])
    lines = [] if stage is None or not stage.error else [f"jax: {last_line(stage.error)}"]
    if facts.frameworks["jax"].gpus == 0:
        lines.append("jax sees no GPU")
    yield Found(
        "XLA_CLIENT_MEM_FRACTION and the deprecated XLA_PYTHON_CLIENT_MEM_FRACTION are both set, which JAX refuses: "
        "it loads no GPU backend and uses the CPU",
        (*(f"{setting} (environment)" for setting in both), *lines),
        f"unset {_FRACTIONS[1]}",
        "jax",
    )


@check("second-context", order=520)
def second_context(facts: Facts) -> Iterator[Found]:
    """PyCUDA uses a context of its own in a process whose other frameworks share the primary context."""
    process, script = facts.process, facts.script
    evidence: list[str] = []
    if process is not None:
        others = _frameworks_of(process.modules)
        # If the context is unknown: autoinit creates a second one, unless an active budget retains the primary one.
        autoinit = [name for name in _AUTOINIT if name in process.modules]
        unasked = process.foreign_context is None and autoinit and not process.budget
        if others and (process.foreign_context or unasked):
            if process.foreign_context:
                evidence.append("PyCUDA's current context is not the primary one")
            evidence += [f"{name} is imported in this process" for name in autoinit]
            evidence += [
                f"this process holds {format_size(size)} on {uuid}" for uuid, size in process.contexts.items() if size
            ]
            yield _second_context(others, evidence)
            return
    if script is None or "pycuda" in budgeted(facts):  # the budget makes PyCUDA retain the primary context
        return
    others = _frameworks_of(name for name, _ in script.imports)
    if others and any(name in _AUTOINIT for name, _ in script.imports):
        wanted = {*_AUTOINIT, *others}
        first = {name if name in wanted else name.partition(".")[0]: line for name, line in reversed(script.imports)}
        evidence = [f"{script.path}:{line}: imports {name}" for name, line in first.items() if name in wanted]
        yield _second_context(others, sorted(evidence))


def _second_context(others: tuple[str, ...], evidence: Sequence[str]) -> Found:
    return Found(
        f"PyCUDA makes a second CUDA context beside that of {listing(others)}: {_SECOND_CONTEXT} MiB more (measured on "
        "an H200), and streams and kernels that the others cannot use",
        evidence,
        "push `Device(0).retain_primary_context()` instead of importing pycuda.gl.autoinit"
        if any(_AUTOINIT[1] in line for line in evidence)
        else "write `import pycuda.autoprimaryctx` instead of `import pycuda.autoinit`, "
        "or work in `memguard.exchange.pycuda_context()`",
        "pycuda",
    )


@check("preallocation", order=525)
def preallocation(facts: Facts) -> Iterator[Found]:
    """TensorFlow or JAX reserves the GPU at its first operation, and other frameworks run in the same process."""
    if facts.process is not None and facts.process.budget:
        return
    shared = _sharing_a_process(facts)
    for name, where in shared:
        others = tuple(other for other, _ in shared if other != name)
        framework = facts.frameworks.get(name)
        if not others or name in budgeted(facts) or framework is None or framework.gpu is False or not framework.gpus:
            continue
        if name == "tensorflow" and facts.environment.get(_GROWTH) != "true" and _own_pool(facts, name):
            yield Found(
                "TensorFlow takes nearly all free memory of every GPU at its first operation, unless the program says "
                f"otherwise, and {listing(others)} in the same process then finds none",
                (*where, f"{_GROWTH} is not set to true", "measured on an H200: 141,350 of 143,156 MiB"),
                f"set {_GROWTH}=true, or cap tensorflow in a budget (`memguard run -c budget.yaml`)",
                name,
            )
        if name == "jax" and _jax_preallocates(facts):
            totals = [device.total for device in facts.driver.cuda.devices if device.total]
            size = f": {format_size(totals[0] * 3 // 4)} of GPU 0" if totals else ""
            yield Found(
                "JAX takes 75% of each GPU's memory at its first operation, unless the program says otherwise, and "
                f"{listing(others)} in the same process must do with the rest",
                (*where, f"neither {_PREALLOCATE} nor {_FRACTIONS[0]} is set", f"JAX's default is 75%{size}"),
                f"set {_PREALLOCATE}=false, or cap jax in a budget (`memguard run -c budget.yaml`)",
                name,
            )


def _jax_preallocates(facts: Facts) -> bool:
    environment = facts.environment
    off = environment.get(_PREALLOCATE, "").lower() in ("false", "0")
    return not off and not any(environment.get(name) for name in _FRACTIONS) and _own_pool(facts, "jax")


def _sharing_a_process(facts: Facts) -> list[tuple[str, tuple[str, ...]]]:
    """The frameworks imported in the calling process or the script, each with its line of evidence."""
    found: dict[str, tuple[str, ...]] = {}
    if facts.process is not None:
        found.update(
            {name: (f"this process has imported {name}",) for name in _frameworks_of(facts.process.modules, "pycuda")}
        )
    if facts.script is not None:
        for module, line in facts.script.imports:
            for name in _frameworks_of([module], "pycuda"):
                found.setdefault(name, (f"{facts.script.path}:{line}: imports {module}",))
    return list(found.items())


@check("allocator-swap", order=530)
def allocator_swap(facts: Facts) -> Iterator[Found]:
    """A framework allocates from another allocator than the capped one."""
    if _NO_CACHING in facts.environment and _has_gpu_build(facts, "torch"):
        capped = "torch" in budgeted(facts)
        off = f"{_NO_CACHING} switches PyTorch's caching allocator off"
        yield Found(
            f"{off} and with it every limit: its cap cannot be set"
            if capped
            else f"{off}: each tensor is allocated from the driver",
            (variable(facts, _NO_CACHING), _capped_by(facts, "torch")),
            f"unset {_NO_CACHING}" + (", or leave torch out of the budget" if capped else ""),
            "torch",
            severity=Severity.WARNING if capped else Severity.INFO,
        )
    if facts.process is None or facts.process.budget:  # an active budget has already reported it
        return
    for name, allocator in facts.process.allocators.items():
        elsewhere = name == "jax" or (name == "cupy" and _has_async_pool(facts))  # `async-allocator` reports it
        if name in budgeted(facts) and allocator not in _CAPPED and not elsewhere:
            yield Found(
                f"{name} allocates from {allocator} in this process, so its cap may not hold",
                (f"{name} allocates from {allocator} (this process)", _capped_by(facts, name)),
                f"call memguard.init before {name}'s allocator is replaced, or leave {name} out of the budget",
                name,
            )


def _capped_by(facts: Facts, name: str) -> str:
    budget = facts.budget
    return f"{budget.source} caps {name}" if budget is not None and name in budget.frameworks else ""


@check("budget-too-large", order=535)
def budget_too_large(facts: Facts) -> Iterator[Found]:
    """The budget does not fit these GPUs, either never or at present."""
    budget = facts.budget
    if budget is None or no_gpu(facts):
        return
    if budget.errors:
        lines = [line.strip() for error in budget.errors for line in error.splitlines() if line.strip()]
        fixes = [line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")]
        errors = [line for line in lines if not line.startswith("fix:")]
        yield Found(
            "the budget cannot be applied to the GPUs here",
            shortened(errors),
            fixes[0] if fixes else f"memguard plan {budget.source}",
            budget.source,
        )
    taken = filled_by_others(facts)  # `card-filled` reports these
    for device in facts.driver.nvml.devices:
        limit = next((size for uuid, size in budget.limits.items() if same_gpu(uuid, device.uuid)), None)
        if limit is not None and device.free is not None and not device.mig and device not in taken:
            own = held_by_caller(facts, device)
            available = None if own is None else device.free + own
            if available is not None and limit > available:
                yield _too_large_at_present(budget, device, limit, available)


def _too_large_at_present(budget: BudgetFacts, device: NvmlDevice, limit: int, available: int) -> Found:
    held = [f"PID {pid} holds {format_size(size)} (NVML)" for pid, size in device.processes.items() if size]
    total = f" of {format_size(device.total)}" if device.total else ""
    return Found(
        f"the limit of {format_size(limit)} on {device.name or device.uuid} does not fit at present: "
        f"{format_size(available)} is left",
        (f"{budget.source}: {format_size(limit)}", f"NVML: {format_size(device.free)} free{total}", *shortened(held)),
        f"stop what holds the memory, or lower device.limit to {available // MIB}MiB",
        device.uuid,
        severity=Severity.WARNING,
    )


@check("unified-memory", order=540)
def unified_memory(facts: Facts) -> Iterator[Found]:
    """A GPU with unified memory, whose use NVML does not report."""
    cards = {device.uuid: device for device in facts.driver.nvml.devices if device.uuid and device.error is None}
    for device in facts.driver.cuda.devices:
        card = next((card for uuid, card in cards.items() if same_gpu(uuid, device.uuid)), None)
        if card is None or card.total or card.mig or not device.total:
            continue
        yield Found(
            f"NVML does not report the memory of {device.name}, as of a GPU that uses the machine's: the ledger adds "
            "up to this process, and shows the rest as unknown",
            (f"CUDA: {format_size(device.total)} in all", "NVML: no figures"),
            "nothing to do; leave the programs of the CPU enough: device.limit is a part of the machine's memory",
            device.uuid,
        )


def _has_gpu_build(facts: Facts, framework: str) -> bool:
    found = facts.frameworks.get(framework)
    return found is not None and found.gpu is not False


def _own_pool(facts: Facts, framework: str) -> bool:
    """Whether the framework uses its own pool, which it reserves at the first operation."""
    allocators = SPECS[framework].allocators
    return allocators.why_uncapped(facts.environment.get(allocators.variable, "")) is None


def _frameworks_of(modules: Iterable[str], *more: str) -> tuple[str, ...]:
    """The frameworks that these modules belong to. `numba` alone is no use of the GPU: `numba.cuda` is."""
    names = (module.partition(".")[0] for module in modules if module != "numba")
    return tuple(name for name in dict.fromkeys(names) if name in _PRIMARY or name in more)


@check("mps-limit", order=605)
def mps_limit(facts: Facts) -> Iterator[Found]:
    """A memory limit of MPS (docs/mps.md) is below the budget's, or MPS cannot parse it and drops every limit."""
    given, shown = facts.environment.get(mps.LIMIT, ""), facts.driver.cuda.devices
    if not given.strip() or not shown:
        return
    limits = facts.budget.limits if facts.budget is not None else {}
    parts = []
    for gpu in shown:
        device = Device(gpu.uuid, gpu.name or gpu.uuid, gpu.ordinal, gpu.total or 0, None, "unknown", gpu.ordinal)
        size = next((size for uuid, size in limits.items() if same_gpu(uuid, gpu.uuid)), 0)
        parts.append(DevicePlan(device, size, 0, {}, size))
    visible = f"CUDA shows {', '.join(gpu.uuid for gpu in shown[:4])}{' and others' if len(shown) > 4 else ''}"
    source = f"{facts.budget.source} has the limit" if facts.budget is not None and limits else ""
    for said in mps.shortfalls(Plan(tuple(parts)), given):
        yield Found(
            said.reason,
            (variable(facts, mps.LIMIT), visible, source),
            said.fix or f"unset {mps.LIMIT} and start the program by `memguard run --mps`, or lower device.limit",
        )
