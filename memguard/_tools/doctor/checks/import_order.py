"""TensorFlow is imported before PyTorch and built for another CUDA: PyTorch then calls functions of TensorFlow's CUDA.

Measured with TensorFlow for CUDA 12 and PyTorch for CUDA 13: PyTorch reads wrong properties of the GPU (1
multiprocessor instead of 132), and SIGFPE ends the process in the first matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memguard._tools.doctor.derived import budgeted, did_not_finish, died, killed
from memguard._tools.doctor.facts import Facts, Together, once
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import built_for, how_it_ended

_CURE = "`import torch` before `import tensorflow`, or memguard.init(...) with both in the budget above the two imports"


def _tensorflow_first(order: Sequence[str]) -> bool:
    """Whether this order imports TensorFlow before PyTorch."""
    return "tensorflow" in order and "torch" in order and order.index("tensorflow") < order.index("torch")


def _true_multiprocessors(facts: Facts) -> int | None:
    """The number of multiprocessors of GPU 0, as the driver or PyTorch's own probe reports it."""
    if facts.driver.cuda.devices:
        return facts.driver.cuda.devices[0].multiprocessors
    torch = facts.frameworks.get("torch")
    return torch.multiprocessors[0] if torch is not None and torch.multiprocessors else None


def breaks(facts: Facts, together: Together) -> bool:
    """Whether PyTorch read wrong properties in this probe, or crashed. A kill by SIGKILL does not count."""
    count, right = together.multiprocessors.get("torch"), _true_multiprocessors(facts)
    return (died(together.probe) and not killed(together.probe)) or (
        count is not None and right is not None and count != right
    )


@once
def witness(facts: Facts) -> Together | None:
    """The failed probe with TensorFlow first, if each framework works alone and PyTorch first works."""
    if any(
        did_not_finish(facts.frameworks[name].probe) for name in ("tensorflow", "torch") if name in facts.frameworks
    ):
        return None
    if any(
        breaks(facts, each) for each in facts.together if not _tensorflow_first(each.order) and "torch" in each.order
    ):
        return None
    return next((each for each in facts.together if _tensorflow_first(each.order) and breaks(facts, each)), None)


def _importer(facts: Facts) -> tuple[str, str] | None:
    """Whether this process or the script imports TensorFlow first without a budget: which, and the evidence."""
    process, script = facts.process, facts.script
    if process is not None and not process.budget:
        tops = [module.partition(".")[0] for module in process.modules]
        if _tensorflow_first(tops):
            return "this process", "this process has imported tensorflow before torch (sys.modules)"
    if script is not None:
        tops = [module.partition(".")[0] for module, _ in script.imports]
        lines = {module.partition(".")[0]: line for module, line in reversed(script.imports)}
        if _tensorflow_first(tops) and "memguard" not in tops[: tops.index("tensorflow")]:
            evidence = f"{script.path}: line {lines['tensorflow']} imports tensorflow, line {lines['torch']} torch"
            return script.path, evidence
    return None


@check("import-order", order=330)
def import_order(facts: Facts) -> Iterator[Found]:
    broken = witness(facts)
    if broken is None:
        return
    count, right, who = broken.multiprocessors.get("torch"), _true_multiprocessors(facts), _importer(facts)
    cured = {"tensorflow", "torch"} <= set(budgeted(facts)) and (who is None or who[0] != "this process")
    severity = Severity.INFO if cured else Severity.ERROR if who is not None else Severity.WARNING
    does = "dies" if died(broken.probe) and not killed(broken.probe) else "reads its GPU wrongly"
    built = [name for name in ("tensorflow", "torch") if name in facts.frameworks and facts.frameworks[name].cuda]
    yield Found(
        f"torch {does} in a process that has imported tensorflow before it, because it then finds functions of "
        "tensorflow's CUDA in place of its own" + (": this budget prevents it" if cured else ""),
        (
            f"a process that imported {' then '.join(broken.order)} {how_it_ended(broken.probe)}"
            if died(broken.probe)
            else "",
            f"GPU 0's multiprocessors as torch counts them there: {count}; in truth: {right}"
            if count is not None and count != right
            else "",
            *(built_for(facts, name) for name in built),
            who[1] if who is not None else "",
        ),
        "nothing to do while both are in the budget" if cured else _CURE,
        "torch",
        severity=severity,
    )
