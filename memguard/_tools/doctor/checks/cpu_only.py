"""Frameworks that do not use the GPU here: builds without CUDA, and those that a variable keeps off it."""

from __future__ import annotations

import re

from memguard._tools.doctor.checks.numpy import fails_of_numpy
from memguard._tools.doctor.checks.probe_outcomes import messages
from memguard._tools.doctor.facts import Facts

_JAX_SAYS = "CUDA-enabled jaxlib is not installed"
_NO_NUMBA_CUDA = re.compile(r"No module named 'numba\.cuda'|cannot import name 'cuda' from 'numba'")


def without_cuda(facts: Facts, name: str) -> bool:
    """Whether it is a build for CPUs."""
    found = facts.frameworks[name]
    if name == "jax" and any(_JAX_SAYS in text for text in messages(found.probe)):
        return True
    if name == "numba" and "numba-cuda" not in (*found.distributions, *facts.packages):
        return _numba_without(facts)
    return found.gpu is False


def _numba_without(facts: Facts) -> bool:
    """Whether Numba has no CUDA beyond its own old part, which needs the toolkit of the system.

    Numba is mostly installed as a compiler for CPUs, so an error of that part is no error of a Numba meant for the GPU.
    """
    found = facts.frameworks["numba"]
    failed = found.probe.failed if found.probe is not None else None
    if found.gpu is False or any(_NO_NUMBA_CUDA.search(text) for text in messages(found.probe)):
        return True
    return failed is not None and failed.name != "import" and not fails_of_numpy(facts, "numba")


def wants_cuda(facts: Facts, name: str) -> bool:
    """Whether it is meant for a GPU. Numba alone is just as often meant for CPUs, the others are not."""
    if name != "numba":
        return True
    if facts.budget is not None and name in facts.budget.frameworks:
        return True
    imported = [module for module, _ in facts.script.imports] if facts.script is not None else []
    there = facts.process.modules if facts.process is not None else ()
    return any(module == "numba.cuda" or module.startswith("numba.cuda.") for module in (*imported, *there))


def kept_off(facts: Facts, name: str) -> bool:
    """Whether a variable keeps it from using a GPU."""
    given = facts.environment
    if name == "jax":
        asked = given.get("JAX_PLATFORMS") or given.get("JAX_PLATFORM_NAME") or ""
        return bool(asked) and not re.search("cuda|gpu", asked)
    return name == "numba" and any(given.get(key) == "1" for key in ("NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"))
