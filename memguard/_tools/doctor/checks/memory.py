"""Memory: settings that disable a limit, second contexts, preallocation, and budgets that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from memguard._base.framework_spec import OVERHEADS, SECOND_CONTEXT
from memguard._base.units import MIB, format_size
from memguard._frameworks.jax.adapter import as_mapping
from memguard._frameworks.specs import SPECS
from memguard._tools.doctor.checks.cpu_only import kept_off
from memguard._tools.doctor.checks.explanations import both_xla_fractions, no_gpu
from memguard._tools.doctor.checks.gpu_memory import filled_by_others, held_by_itself, same_gpu
from memguard._tools.doctor.checks.phrases import few, last_line, listing
from memguard._tools.doctor.checks.probe_outcomes import failed_stage
from memguard._tools.doctor.facts import BudgetFacts, Facts, NvmlDevice
from memguard._tools.doctor.finding import Finding, Severity

_JAX_OPTIONS = "JAX_PJRT_CLIENT_CREATE_OPTIONS"
"""The variable from which JAX reads the option jax_pjrt_client_create_options, as key:value;key:value."""
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")
_ASYNC_POOL = "MemoryAsyncPool"
_CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
_SECOND_CONTEXT = OVERHEADS[SECOND_CONTEXT].modules // MIB
_PRIMARY = ("torch", "tensorflow", "jax", "cupy", "numba")
"""Frameworks that work in the primary context."""
_CAPPED = ("cudaMallocAsync", "cupy.cuda.memory.MemoryPool")
"""Allocators besides the default one on which a cap holds."""


def async_allocator(facts: Facts) -> Iterator[Finding]:
    """An allocator on which no cap can be set. What `init` refuses is an error, with the same reason."""
    for framework, spec in SPECS.items():
        if not _has_gpu_build(facts, framework):
            continue
        capped = facts.budget is not None and framework in facts.budget.frameworks
        for setting, value, where in _chosen_allocators(facts, framework):
            why = spec.allocators.why_uncapped(value)
            unlimited = value.strip().lower() in spec.allocators.unlimited
            if why is None or not (capped or unlimited):  # one of JAX's keeps to a fraction
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
            yield Finding(
                "async-allocator",
                Severity.ERROR if limits else Severity.INFO,
                cause,
                (f"{setting}={value} ({where})", *limits[1:], f"{value.strip().lower()} {why}"),
                remedy if limits else f"{remedy} before you limit {spec.title}",
                framework,
            )
            break


def _chosen_allocators(facts: Facts, framework: str) -> Iterator[tuple[str, str, str]]:
    """The settings that choose the framework's allocator: name, value, and where each was found."""
    variable = SPECS[framework].allocators.variable
    if variable:
        yield variable, facts.environment.get(variable, "").strip(), "environment"
    if framework == "jax":
        options = as_mapping(facts.environment.get(_JAX_OPTIONS, ""))
        yield f"{_JAX_OPTIONS} allocator", options.get("allocator", "").strip(), "environment"
        if facts.process is not None:
            option = f"{_JAX_OPTIONS.lower()} allocator"
            yield option, facts.process.allocators.get(framework, ""), "this process"


def async_pool(facts: Facts) -> Iterator[Finding]:
    """CuPy's async pool: its limit only says when memory is given back, and refuses no allocation."""
    limits = _cupy_limits(facts)
    if facts.process is not None and _has_async_pool(facts) and limits:
        yield Finding(
            "async-allocator",
            Severity.ERROR,
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
    """As `_limits`. An active budget has already reported that it only watches this pool."""
    budget, given = facts.budget, facts.environment.get(_CUPY_LIMIT, "").strip()
    active = facts.process is not None and facts.process.budget
    if budget is not None and "cupy" in budget.frameworks and not active:
        return "its cap", f"{budget.source} caps cupy"
    if not given.rstrip("%").strip("0."):  # not set, or 0, which means no limit
        return ()
    return f"{_CUPY_LIMIT}={given}", f"{_CUPY_LIMIT}={given} (environment)"


def _limits(facts: Facts, framework: str) -> tuple[str, ...]:
    """What is meant to limit it, then where that is set; empty if nothing limits it."""
    budget = facts.budget
    if budget is not None and framework in budget.frameworks:
        return "its cap", f"{budget.source} caps {framework}"
    own = [f"{name}={facts.environment[name]}" for name in _FRACTIONS if facts.environment.get(name)]
    return (own[0], f"{own[0]} (environment)") if framework == "jax" and own else ()


def xla_fractions(facts: Facts) -> Iterator[Finding]:
    """Both names of one setting, of which JAX accepts only one."""
    both = both_xla_fractions(facts)
    cards = facts.driver.cuda.devices or facts.driver.nvml.devices
    if not both or not cards or no_gpu(facts) or kept_off(facts, "jax"):
        return  # there is no GPU, or JAX is kept off it anyway
    stage = failed_stage(facts.frameworks["jax"])
    lines = [] if stage is None or not stage.error else [f"jax: {last_line(stage.error)}"]
    if facts.frameworks["jax"].gpus == 0:
        lines.append("jax sees no GPU")
    yield Finding(
        "xla-fractions",
        Severity.ERROR,
        "XLA_CLIENT_MEM_FRACTION and the deprecated XLA_PYTHON_CLIENT_MEM_FRACTION are both set, which JAX refuses: "
        "it loads no GPU backend and uses the CPU",
        (*(f"{setting} (environment)" for setting in both), *lines),
        f"unset {_FRACTIONS[1]}",
        "jax",
    )


def second_context(facts: Facts) -> Iterator[Finding]:
    """PyCUDA in its own context, beside frameworks that share the primary one."""
    process, script = facts.process, facts.script
    evidence: list[str] = []
    if process is not None:
        others = _of(process.modules)
        # If nobody could ask: autoinit makes its own context, unless a budget gives it the primary one.
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
    budget = facts.budget
    if script is None or (budget is not None and "pycuda" in budget.frameworks):  # which gives it the primary one
        return
    others = _of(name for name, _ in script.imports)
    if others and any(name in _AUTOINIT for name, _ in script.imports):
        wanted = {*_AUTOINIT, *others}
        first = {name if name in wanted else name.partition(".")[0]: line for name, line in reversed(script.imports)}
        evidence = [f"{script.path}:{line}: imports {name}" for name, line in first.items() if name in wanted]
        yield _second_context(others, sorted(evidence))


def _second_context(others: tuple[str, ...], evidence: Sequence[str]) -> Finding:
    return Finding(
        "second-context",
        Severity.WARNING,
        f"PyCUDA makes a second CUDA context beside that of {listing(others)}: {_SECOND_CONTEXT} MiB more (measured on "
        "an H200), and streams and kernels that the others cannot use",
        tuple(evidence),
        "push `Device(0).retain_primary_context()` instead of importing pycuda.gl.autoinit"
        if any(_AUTOINIT[1] in line for line in evidence)
        else "write `import pycuda.autoprimaryctx` instead of `import pycuda.autoinit`, "
        "or work in `memguard.exchange.pycuda_context()`",
        "pycuda",
    )


def preallocation(facts: Facts) -> Iterator[Finding]:
    """A framework that takes the GPU at its first operation, in one process with others."""
    if facts.process is not None and facts.process.budget:
        return
    budget = facts.budget.frameworks if facts.budget is not None else ()
    shared = _together(facts)
    for name, where in shared:
        others = tuple(other for other, _ in shared if other != name)
        framework = facts.frameworks.get(name)
        if not others or name in budget or framework is None or framework.gpu is False or not framework.gpus:
            continue
        if name == "tensorflow" and facts.environment.get(_GROWTH) != "true" and _own_pool(facts, name):
            yield Finding(
                "preallocation",
                Severity.INFO,
                "TensorFlow takes nearly all free memory of every GPU at its first operation, unless the program says "
                f"otherwise, and {listing(others)} in the same process then finds none",
                (*where, f"{_GROWTH} is not set to true", "measured on an H200: 141,350 of 143,156 MiB"),
                f"set {_GROWTH}=true, or cap tensorflow in a budget (`memguard run -c budget.yaml`)",
                name,
            )
        if name == "jax" and _jax_preallocates(facts):
            totals = [device.total for device in facts.driver.cuda.devices if device.total]
            size = f": {format_size(totals[0] * 3 // 4)} of GPU 0" if totals else ""
            yield Finding(
                "preallocation",
                Severity.INFO,
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


def _together(facts: Facts) -> list[tuple[str, tuple[str, ...]]]:
    """The frameworks that are known to share a process, each with its line of evidence."""
    found: dict[str, tuple[str, ...]] = {}
    if facts.process is not None:
        found.update({name: (f"this process has imported {name}",) for name in _of(facts.process.modules, "pycuda")})
    if facts.script is not None:
        for module, line in facts.script.imports:
            for name in _of([module], "pycuda"):
                found.setdefault(name, (f"{facts.script.path}:{line}: imports {module}",))
    return list(found.items())


def allocator_swap(facts: Facts) -> Iterator[Finding]:
    """Memory from another allocator than the one that is capped."""
    budget = facts.budget.frameworks if facts.budget is not None else ()
    if _NO_CACHING in facts.environment and _has_gpu_build(facts, "torch"):
        capped = "torch" in budget
        off = f"{_NO_CACHING} switches PyTorch's caching allocator off"
        yield Finding(
            "allocator-swap",
            Severity.WARNING if capped else Severity.INFO,
            f"{off} and with it every limit: its cap cannot be set"
            if capped
            else f"{off}: each tensor is allocated from the driver",
            (f"{_NO_CACHING}={facts.environment[_NO_CACHING]} (environment)", *_capped_by(facts.budget, "torch")),
            f"unset {_NO_CACHING}" + (", or leave torch out of the budget" if capped else ""),
            "torch",
        )
    if facts.process is None or facts.process.budget:  # init has already reported it
        return
    for name, allocator in facts.process.allocators.items():
        elsewhere = name == "jax" or (name == "cupy" and _has_async_pool(facts))  # another finding says it
        if name in budget and allocator not in _CAPPED and not elsewhere:
            yield Finding(
                "allocator-swap",
                Severity.WARNING,
                f"{name} allocates from {allocator} in this process, so its cap may not hold",
                (f"{name} allocates from {allocator} (this process)", *_capped_by(facts.budget, name)),
                f"call memguard.init before {name}'s allocator is replaced, or leave {name} out of the budget",
                name,
            )


def _capped_by(budget: BudgetFacts | None, name: str) -> tuple[str, ...]:
    return (f"{budget.source} caps {name}",) if budget is not None and name in budget.frameworks else ()


def budget_too_large(facts: Facts) -> Iterator[Finding]:
    """A budget that does not fit these GPUs, at all or at present."""
    budget = facts.budget
    if budget is None or no_gpu(facts):
        return
    if budget.errors:
        lines = [line.strip() for error in budget.errors for line in error.splitlines() if line.strip()]
        fixes = [line.removeprefix("fix:").strip() for line in lines if line.startswith("fix:")]
        errors = [line for line in lines if not line.startswith("fix:")]
        yield Finding(
            "budget-too-large",
            Severity.ERROR,
            "the budget cannot be applied to the GPUs here",
            few(errors),
            fixes[0] if fixes else f"memguard plan {budget.source}",
            budget.source,
        )
    taken = filled_by_others(facts)  # another finding says who holds it
    for device in facts.driver.nvml.devices:
        limit = next((size for uuid, size in budget.limits.items() if same_gpu(uuid, device.uuid)), None)
        if limit is not None and device.free is not None and not device.mig and device not in taken:
            own = held_by_itself(facts, device)
            available = None if own is None else device.free + own
            if available is not None and limit > available:
                yield _not_now(budget, device, limit, available)


def _not_now(budget: BudgetFacts, device: NvmlDevice, limit: int, available: int) -> Finding:
    held = [f"PID {pid} holds {format_size(size)} (NVML)" for pid, size in device.processes.items() if size]
    total = f" of {format_size(device.total)}" if device.total else ""
    return Finding(
        "budget-too-large",
        Severity.WARNING,
        f"the limit of {format_size(limit)} on {device.name or device.uuid} does not fit at present: "
        f"{format_size(available)} is left",
        (f"{budget.source}: {format_size(limit)}", f"NVML: {format_size(device.free)} free{total}", *few(held)),
        f"stop what holds the memory, or lower device.limit to {available // MIB}MiB",
        device.uuid,
    )


def unified(facts: Facts) -> Iterator[Finding]:
    """A GPU that uses the machine's memory, of which NVML has no figures."""
    cards = {device.uuid: device for device in facts.driver.nvml.devices if device.uuid and device.error is None}
    for device in facts.driver.cuda.devices:
        card = next((card for uuid, card in cards.items() if same_gpu(uuid, device.uuid)), None)
        if card is None or card.total or card.mig or not device.total:
            continue
        yield Finding(
            "unified-memory",
            Severity.INFO,
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
    """Whether it allocates from the pool that it takes at its first operation. An allocator without a cap has none."""
    allocators = SPECS[framework].allocators
    return allocators.why_uncapped(facts.environment.get(allocators.variable, "")) is None


def _of(modules: Iterable[str], *more: str) -> tuple[str, ...]:
    """The frameworks of these modules. Numba without its CUDA part is a compiler for the CPU."""
    names = (module.partition(".")[0] for module in modules if module != "numba")
    return tuple(name for name in dict.fromkeys(names) if name in _PRIMARY or name in more)


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    async_allocator,
    async_pool,
    xla_fractions,
    second_context,
    preallocation,
    allocator_swap,
    budget_too_large,
    unified,
)
