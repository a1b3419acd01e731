"""Turns the processes' reports into facts. Pure. Malformed output and crashes do not make it raise."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from memguard._base.types import Device
from memguard._tools.doctor.cuda_libraries import libraries_not_opened
from memguard._tools.doctor.facts import NAME, Driver, FrameworkFacts, Namesakes, Probe, Stage, Together
from memguard.errors import FactsError

if TYPE_CHECKING:
    from memguard._tools.doctor.collect.processes import Ended

F = TypeVar("F", bound=BaseModel)
_ERROR = re.compile(r"[A-Za-z_][\w.]*: \S")
_FRAME = re.compile(r'File "([^"]*)", line \d+')
_STANDARD = re.compile(r"/(python3[^/]*|pypy3[^/]*)(/|$)")


@dataclass
class Installed:
    """The inventory of an interpreter. `frameworks`: facts by framework, as reported."""

    python: str = ""
    executable: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    frameworks: dict[str, dict[str, Any]] = field(default_factory=dict)
    namesakes: Namesakes | None = None

    def path(self, name: str) -> str | None:
        """The file that `import` would load."""
        found = self.frameworks.get(name, {}).get("path")
        return found if isinstance(found, str) else None


def installed(ended: Ended, python: Sequence[str] = ("python",)) -> Installed:
    """Parse the inventory. Raises FactsError if the interpreter, which the command `python` starts, reported none."""
    own = _facts(ended, "")
    if not isinstance(own.get("packages"), dict):
        how = "did not answer" if ended.hung else f"ended with {ended.signal or ended.exit}"
        errors = [str(stage["error"]) for stage in ended.reported if stage.get("error")]
        error = errors[-1] if errors else _quoted(ended.said)
        raise FactsError(
            f"the Python to examine, {shlex.join(python)}, {how} after {ended.seconds:.1f} s"
            f"{': ' + error if error else ''}",
            fix=_remedy(python, ended.said),
        )
    names = [str(line["of"]) for line in ended.reported if line.get("of")]
    return Installed(
        str(own.get("python", "")),
        str(own.get("executable", "")),
        {str(name): str(version) for name, version in own["packages"].items() if re.fullmatch(NAME, str(name))},
        {name: _facts(ended, name) for name in dict.fromkeys(names)},
        _checked(Namesakes, own["namesakes"]) if isinstance(own.get("namesakes"), dict) else None,
    )


def _quoted(stderr: Sequence[str]) -> str:
    """The line of stderr to quote: the traceback's error, or else the last line."""
    return next((line.strip() for line in reversed(stderr) if _ERROR.match(line)), stderr[-1].strip() if stderr else "")


def _remedy(python: Sequence[str], stderr: Sequence[str]) -> str:
    """The fix for an interpreter that fails before it runs the probe."""
    for path in (match[1] for line in stderr for match in _FRAME.finditer(line)):
        folder, name = os.path.split(path)
        if name.removesuffix(".py") in sys.stdlib_module_names and folder and not _STANDARD.search(folder):
            return f"rename {name} in {folder}: it hides Python's own module of that name"
    command = shlex.join((*python, "-c", "pass"))
    return f"`{command}` must work, with Python 3.8 or newer: check its sitecustomize and PYTHONPATH"


def framework(found: Mapping[str, Any], ended: Ended | None, level: int = 0) -> FrameworkFacts:
    """The facts of a framework, from the inventory and its probe. `level`: the user's TF_CPP_MIN_LOG_LEVEL."""
    if ended is None:
        return _checked(FrameworkFacts, found)
    texts = [*(str(line["error"]) for line in ended.reported if line.get("error")), *ended.said]
    facts = {**found, **_facts(ended, "")}
    if found.get("shadow"):  # the probe imported the framework, not the file that shadows it
        facts["path"] = found["shadow"]
    return _checked(FrameworkFacts, {**facts, "missing": libraries_not_opened(texts), "probe": probe(ended, level)})


def together(order: tuple[str, ...], ended: Ended, level: int = 0) -> Together:
    """The facts of several frameworks in one process: one step for each framework whose probe finished."""
    counts = {}
    for name in order:
        each = _facts(ended, name).get("multiprocessors")
        if isinstance(each, list) and each and isinstance(each[0], int):
            counts[name] = each[0]
    steps = list(_stages(ended))
    done = dict.fromkeys(str(line["done"]) for line in ended.reported if line.get("done"))
    stages = []
    for name in done:
        own = [stage for of, stage in steps if of == name]
        failed = next((stage for stage in own if stage.error is not None), None)
        seconds = round(sum(stage.seconds for stage in own), 3)
        error, kind = (failed.error, failed.kind) if failed is not None else (None, None)
        stages.append(Stage(name=name, seconds=seconds, error=error, kind=kind))
    return Together(order=order, multiprocessors=counts, probe=probe(ended, level, stages, order))


def probe(ended: Ended, level: int = 0, stages: Sequence[Stage] | None = None, order: Sequence[str] = ()) -> Probe:
    """The outcome of a probe process. `order`: its frameworks, if it had several."""
    mapped = [line["libraries"] for line in ended.reported if isinstance(line.get("libraries"), list)]
    libraries = {path for paths in (*mapped, ended.libraries) for path in paths if isinstance(path, str)}
    return Probe(
        stages=tuple(stages if stages is not None else (stage for _, stage in _stages(ended))),
        seconds=ended.seconds,
        exit=ended.exit,
        signal=ended.signal if not ended.hung else None,
        hung=ended.hung,
        complete=ended.exit != 0 or _done(ended, order),
        libraries=tuple(sorted(libraries)),
        said=visible_lines(ended.said, level),
    )


def _stages(ended: Ended) -> Iterator[tuple[str, Stage]]:
    """The finished steps, each with the name of its framework."""
    for line in ended.reported:
        name, seconds = line.get("stage"), line.get("seconds")
        if isinstance(name, str) and isinstance(seconds, (int, float)):
            yield str(line.get("of", "")), _checked(Stage, {**line, "name": name})


def driver(ended: Ended) -> Driver:
    """The driver's facts. If the survey hung, crashed or failed, the earlier reports count, and NVML's error or
    CUDA's `init`, whichever it was reading, says how it ended.
    """
    found: dict[str, Any] = {}
    for line in ended.reported:
        found.update(line)
    facts = _checked(Driver, found)
    how = _early_end(ended)
    if how is not None and "nvml" not in found:
        return facts.model_copy(update={"nvml": facts.nvml.model_copy(update={"error": how})})
    answered = facts.cuda.init not in (None, "CUDA_SUCCESS") or facts.cuda.devices
    if how is not None and facts.cuda.error is None and not answered:
        return facts.model_copy(update={"cuda": facts.cuda.model_copy(update={"init": how})})
    return facts


def _early_end(ended: Ended) -> str | None:
    """How a process ended early; None if it finished."""
    if ended.hung:
        return f"no answer in {ended.seconds:.0f} s"
    if ended.signal:
        return f"ended by {ended.signal}"
    if ended.exit is None or (ended.exit == 0 and _done(ended)):
        return None
    last = next((line.strip() for line in reversed(ended.said) if line.strip()), "")
    early = "" if ended.exit else "early "
    return f"ended {early}with exit code {ended.exit}{': ' + last if last else ''}"


_ARCHITECTURES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}


def devices(driver: Driver) -> tuple[Device, ...]:
    """The GPUs that CUDA shows, for `_budget.policy.plan`; NVML's if CUDA was not queried."""
    ordinals = {gpu.uuid: gpu.ordinal for gpu in driver.cuda.devices}
    by_cuda = {gpu.uuid: gpu.total for gpu in driver.cuda.devices}
    found = []
    for uuid, gpu in {gpu.uuid: gpu for gpu in driver.nvml.devices if gpu.uuid}.items():
        if driver.cuda.init is not None and uuid not in ordinals:
            continue
        total = gpu.total or by_cuda.get(uuid)  # NVML reports no sizes of unified memory
        if total is None:
            continue
        reserved = total - gpu.used - gpu.free if gpu.used is not None and gpu.free is not None else None
        major, minor = gpu.capability or (0, 0)
        architecture = {(7, 5): "turing", (8, 9): "ada"}.get((major, minor)) or _ARCHITECTURES.get(major, "unknown")
        ordinal, unified = ordinals.get(uuid), not gpu.total
        found.append(Device(uuid, gpu.name, gpu.index, total, reserved or None, architecture, ordinal, unified=unified))
    return tuple(sorted(found, key=lambda device: (device.ordinal is None, device.ordinal, device.index)))


def _done(ended: Ended, names: Sequence[str] = ()) -> bool:
    """Whether the process reported its end, for each of `names`. Exit code 0 is no proof: a library may call exit."""
    done = {str(line["done"]) for line in ended.reported if line.get("done")}
    return bool(done) and done.issuperset(names)


def _facts(ended: Ended, of: str) -> dict[str, Any]:
    """The facts reported about one framework; "" for the process itself."""
    found: dict[str, Any] = {}
    for line in ended.reported:
        if line.get("of", "") == of and isinstance(line.get("facts"), dict):
            found.update({name: value for name, value in line["facts"].items() if value is not None})
    return found


def _checked(model: type[F], found: Mapping[str, Any]) -> F:
    """Build the model from the values that fit it. Ignores unknown names and wrong types: no probe writes them."""
    known = {name: value for name, value in found.items() if name in model.model_fields}
    while True:
        try:
            return model.model_validate(known)
        except ValidationError as error:
            wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]} & set(known)
            if not wrong:
                raise
            known = {name: value for name, value in known.items() if name not in wrong}


_OPENED = re.compile("Successfully opened dynamic library lib")


def visible_lines(lines: Iterable[str], level: int) -> tuple[str, ...]:
    """The lines that the user would see. The probe's TF_CPP_MIN_LOG_LEVEL is lower than the user's `level`."""
    return tuple(line for line in lines if not _OPENED.search(line) and _severity(line) >= level)


def _severity(line: str) -> int:
    """TensorFlow's severity: 0 info, 1 warning, 2 error, 3 fatal. Lines of other loggers are 3: always shown."""
    if line.startswith("To enable the following instructions"):  # the continuation of an info message
        return 0
    found = re.match(r"([IWEF])\d{4} |[\d: .-]+([IWEF]) \w+/", line)
    return "IWEF".index(found[1] or found[2]) if found else 3
