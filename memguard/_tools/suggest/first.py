"""A first budget, for a program of which nothing was recorded yet: from what is installed and the GPUs. Pure.

Nothing is known of the program, so the shares are a guess by the usual roles: PyTorch, TensorFlow and JAX hold models
and their data, CuPy arrays beside them, PyCUDA and Numba buffers of kernels. The budget records what the program does,
so that the next one is no guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memguard import _budget
from memguard._base.types import Device, DevicePlan, Plan
from memguard._base.units import format_size
from memguard._budget import policy
from memguard._frameworks.specs import SPECS
from memguard._tools.suggest.text import comment, cut
from memguard.errors import MemguardError, PlanError

_LIMIT = "90%"
_TIMELINE = "run.jsonl"


def shares(names: Sequence[str]) -> dict[str, int]:
    """Whole percentages that add up to 100, the largest first."""
    weights = {name: SPECS[name].weight for name in names}
    total = sum(weights.values())
    found = {name: weight * 100 // total for name, weight in weights.items()}
    ordered = sorted(found, key=lambda name: (-weights[name], list(SPECS).index(name)))
    for name in ordered[: 100 - sum(found.values())]:
        found[name] += 1
    return {name: found[name] for name in ordered}


def first(installed: Mapping[str, str | None], devices: Sequence[Device], python: str, named: bool) -> str:
    """A budget file for the frameworks, with the version of each, if known. Raises MemguardError if it does not fit.

    `python` is the interpreter for which they are installed; `named`: the GPUs are not those here, but were asked for.
    """
    parts = shares(list(installed))
    lines = [line for text in _head(python) for line in comment(text)]
    plan = _plan(parts, devices, named)
    lines += ["version: 1", "device:"]
    for text in _device(plan, named):
        lines += comment(text, "  ")
    lines += [f"  limit: {_LIMIT}"]
    lines += comment("Context and library workspaces, which lie outside every cap: memguard's own table.", "  ")
    for part in _kinds(plan):
        lines += comment(f"{format_size(part.reserve)} on {cut(part.device.name)}", "  ")
    lines += ["  reserve: auto", "frameworks:"]
    lines += comment("Take out what the program does not use: what is left out is only watched.", "  ")
    for name, share in parts.items():
        version = f" {cut(str(installed[name]))}" if installed[name] else ""
        sizes = ", ".join(f"{format_size(part.caps[name])} of {cut(part.device.name)}" for part in _kinds(plan))
        lines += comment(f"{SPECS[name].title}{version}: {sizes}; {SPECS[name].cap_is}", "  ")
        lines.append(f"  {name}: {{share: {share}%}}")
    lines.append("monitor:")
    lines += comment("What the next budget is made of; {pid} and {rank} are put into the name.", "  ")
    lines.append(f"  timeline: {_TIMELINE}")
    return "\n".join(lines) + "\n"


def _head(python: str) -> Iterator[str]:
    stem, _, suffix = _TIMELINE.rpartition(".")
    yield "Written by `memguard suggest` without a recording: the shares are a guess, not a measurement."
    yield f"The frameworks are those that are installed for {cut(python)}."
    yield "1. memguard check budget.yaml; memguard doctor says which of the frameworks work on this GPU."
    yield "2. memguard run -c budget.yaml -- python train.py"
    yield f"3. memguard suggest {stem}-*.{suffix} -o budget.yaml --force"


def _device(plan: Plan, named: bool) -> Iterator[str]:
    yield "What this process may take of each GPU. Several processes on one GPU: divide it among them."
    for part in _kinds(plan):
        count = sum(other.device.name == part.device.name for other in plan.devices)
        times = f"{count} x " if count > 1 else ""
        of = "" if not named else ", which was asked for"
        yield f"{times}{cut(part.device.name)}{of}: {format_size(part.limit)} of {format_size(part.device.usable)}"


def _kinds(plan: Plan) -> list[DevicePlan]:
    """One GPU of each name and size."""
    return list({(part.device.name, part.device.usable): part for part in plan.devices}.values())


def _plan(parts: Mapping[str, int], devices: Sequence[Device], named: bool) -> Plan:
    frameworks = {name: {"share": f"{share}%"} for name, share in parts.items()}
    budget = _budget.from_mapping({"version": 1, "device": {"limit": _LIMIT}, "frameworks": frameworks})
    try:
        return policy.plan(budget, devices)
    except PlanError as error:  # its fix is for a file, and there is none yet
        larger = "name a larger GPU with --device"
        fix = larger if named else f"leave this GPU out with CUDA_VISIBLE_DEVICES, or {larger}"
        raise MemguardError(f"no first budget fits: {error.problems[0].message}", fix=fix) from None
