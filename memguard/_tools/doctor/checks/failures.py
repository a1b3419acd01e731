"""Failed, crashed and hung probes whose cause no other check reports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memguard._tools.doctor.checks import import_order
from memguard._tools.doctor.checks.cudnn import too_old
from memguard._tools.doctor.checks.libraries import without_libraries
from memguard._tools.doctor.checks.noise import meaning
from memguard._tools.doctor.derived import (
    NO_COMPILER,
    NO_NVCC,
    STEPS,
    died,
    explained,
    failed_stage,
    imported_from_elsewhere,
    kept_off,
    killed,
    not_opened,
    numpy_messages,
    out_of_memory,
    step,
    without_cuda,
)
from memguard._tools.doctor.facts import Facts, FrameworkFacts, Probe, Stage
from memguard._tools.doctor.finding import Found, check
from memguard._tools.doctor.wording import full_name, how_it_ended, last_line, listing

_APART = "run them in separate processes, or try another order of their imports"
_OUTSIDE = "usually for lack of host memory: check `dmesg | grep -i oom` and the container's memory limit"


def _explained_elsewhere(facts: Facts, name: str) -> bool:
    """Whether another check reports why this framework fails."""
    found = facts.frameworks[name]
    return (
        explained(facts, name)
        or without_libraries(facts, name)
        or too_old(found)
        or bool(numpy_messages(facts, name))
        or imported_from_elsewhere(found)
        or without_cuda(facts, name)
        or _lacks_a_tool(found)
    )


def _lacks_a_tool(found: FrameworkFacts) -> bool:
    failed = failed_stage(found)
    error = failed.error or "" if failed is not None else ""
    return NO_NVCC.search(error) is not None or NO_COMPILER.search(error) is not None


def _last_lines(probe: Probe) -> tuple[str, ...]:
    """The probe's last lines on stderr, without known harmless messages."""
    lines = [last_line(text) for text in probe.said if meaning(text) is None]
    return tuple(filter(None, lines[-6:]))


def _error(stage: Stage) -> str:
    line, kind = last_line(stage.error or ""), (stage.kind or "").removeprefix("builtins.")
    return line if not kind or line.startswith(kind.rpartition(".")[2]) else f"{kind}: {line}"


def _in_a_sentence(stage: Stage) -> str:
    return re.sub(r"[.!?]+\s+", "; ", _error(stage)).rstrip(".!?")


def _remedy(name: str, failed: Stage, absent: list[str]) -> str:
    if absent:
        return (
            f"install the package that has {absent[0]} (on Debian apt-file search {absent[0]} names it), or add its "
            "folder to LD_LIBRARY_PATH"
        )
    if failed.name == "import":
        return f"python -c 'import {name}' shows the whole error"
    return f"search the issues of {name} for this text; a short script that does the same shows the whole error"


@check("framework-fails", order=440)
def framework_fails(facts: Facts) -> Iterator[Found]:
    """A step of the probe raised, or the framework sees no GPU although CUDA shows one."""
    for name, found in facts.frameworks.items():
        probe = found.probe
        if probe is None or probe.hung or died(probe) or _explained_elsewhere(facts, name):
            continue
        failed = probe.failed
        if failed is not None:
            absent = [*dict.fromkeys(lib for line, lib in not_opened(found) if line in (failed.error or ""))]
            yield Found(
                f"{full_name(facts, name)} fails in the step {failed.name}: "
                + (f"{listing(absent)} is missing" if absent else _in_a_sentence(failed)),
                (f"{name}, {failed.name}: {_error(failed)}", *_last_lines(probe)),
                _remedy(name, failed, absent),
                name,
            )
        elif failed is None and found.gpus == 0 and facts.driver.cuda.devices and not kept_off(facts, name):
            yield Found(
                f"{full_name(facts, name)} sees no GPU, and CUDA shows {len(facts.driver.cuda.devices)}",
                (f"{name} counts 0 GPUs", f"libcuda counts {len(facts.driver.cuda.devices)}", *_last_lines(probe)),
                f"read what {name} logs to stderr when it is imported; if nothing, reinstall it",
                name,
            )
    yield from _together(facts)


def _each_works_alone(facts: Facts, names: tuple[str, ...]) -> bool:
    """Whether each framework's own probe succeeded."""
    probes = [facts.frameworks[name].probe for name in names if name in facts.frameworks]
    return all(probe is None or not (probe.failed or probe.hung or died(probe)) for probe in probes)


def _together(facts: Facts) -> Iterator[Found]:
    """A framework raises in a process with others, and not in its own."""
    for together in facts.together:
        failed = together.probe.failed
        if failed is None or not _each_works_alone(facts, together.order) or import_order.breaks(facts, together):
            continue
        if out_of_memory(failed) or any(explained(facts, name) for name in together.order):
            continue
        names = listing(together.order)
        yield Found(
            f"{failed.name} works alone and fails in a process with {names}: {_in_a_sentence(failed)}",
            (f"{' then '.join(together.order)}, {failed.name}: {_error(failed)}", *_last_lines(together.probe)),
            _APART,
            ", ".join(together.order),
        )


@check("probe-crashed", order=445)
def probe_crashed(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        if found.probe is not None and died(found.probe) and not _explained_elsewhere(facts, name):
            what = f"a process that only imports and uses {full_name(facts, name)}"
            where = f"{name}: the process", f" after {found.probe.seconds:.1f} s"
            remedy = f"python -X faulthandler -c 'import {name}' shows where; then reinstall {name} with its libraries"
            yield _crashed(name, what, step(found.probe, STEPS), where, found.probe, remedy)
    if import_order.witness(facts) is not None:
        return
    for together in facts.together:
        if died(together.probe) and _each_works_alone(facts, together.order):
            what = f"a process of {listing(together.order)}"
            at = f"{step(together.probe, together.order)}, and each works alone"
            where = f"{' then '.join(together.order)}: the process", ""
            yield _crashed(", ".join(together.order), what, at, where, together.probe, _APART)


def _crashed(subject: str, what: str, at: str, where: tuple[str, str], probe: Probe, remedy: str) -> Found:
    """`where`: the words before and after the exit status in the line of evidence."""
    how = how_it_ended(probe)
    return Found(
        f"{what} {how}, {at}",
        (f"{where[0]} {how}{where[1]}", *_last_lines(probe)),
        _OUTSIDE if killed(probe) else remedy,
        subject,
    )


@check("probe-hung", order=450)
def probe_hung(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        if found.probe is not None and found.probe.hung and not explained(facts, name):
            yield _hung(name, full_name(facts, name), found.probe, STEPS)
    for together in facts.together:
        if together.probe.hung and _each_works_alone(facts, together.order):
            names = listing(together.order)
            yield _hung(", ".join(together.order), names, together.probe, together.order)


def _hung(subject: str, what: str, probe: Probe, steps: tuple[str, ...]) -> Found:
    return Found(
        f"{what} did not finish within {probe.seconds:.0f} s, {step(probe, steps)}, and was stopped",
        (
            *(f"{subject}: {stage.name} took {stage.seconds:.1f} s" for stage in probe.stages),
            f"{subject}: stopped after {probe.seconds:.1f} s",
            *_last_lines(probe),
        ),
        "run memguard doctor --timeout 300: compiling kernels at the first start can take minutes",
        subject,
    )
