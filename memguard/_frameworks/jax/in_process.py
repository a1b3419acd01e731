"""Reads JAX's state in the running process, for the doctor, suspension and retries."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._frameworks.jax.spec import SPEC
from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question


def _profilers(modules: Modules, _: Objects) -> Iterator[str]:
    profiler = modules.get("jax._src.profiler")
    if profiler is not None and profiler._profile_state.profile_session is not None:
        yield "jax.profiler runs"


def _ranks(modules: Modules) -> int | None:
    state = getattr(modules.get("jax._src.distributed"), "global_state", None)
    return None if getattr(state, "client", None) is None else int(getattr(state, "num_processes", None) or 1)


def _swapped(modules: Modules) -> str | None:
    """The name of the allocator in JAX's client options if memguard cannot cap this allocator; else None."""
    from memguard._frameworks.jax.adapter import as_mapping

    options = modules["jax"].config.jax_pjrt_client_create_options if "jax" in modules else None
    allocator = str(as_mapping(options).get("allocator", ""))
    return None if SPEC.allocators.why_uncapped(allocator) is None else allocator


IN_PROCESS = InProcess(
    modules=("jax", "jaxlib"),
    profilers=(Question("whether JAX's profiler runs", _profilers),),
    ranks=("jax.distributed", _ranks),
    swapped=_swapped,
)
