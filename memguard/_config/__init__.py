"""The budget file: text to a checked `Budget`, or every problem at once with line, column and fix.

Pure: `load` reads one file; nothing here looks at the environment, the clock or a GPU. Build budgets with `load`,
`parse` or `from_mapping`; each of them raises ConfigError and nothing else. What the keys mean is in `docs/budget.md`.
"""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
)
from pydantic_core import PydanticCustomError

from memguard._config import checks, document, positions, values
from memguard._config.document import Document
from memguard._config.problems import Origin, in_order, problems
from memguard._config.schema import SCHEMA
from memguard._findings import Name
from memguard._specs import SPECS
from memguard._units import MIB, short
from memguard.errors import ConfigError, Problem

FRAMEWORKS = tuple(SPECS)
"""The frameworks that a budget may name."""

V = TypeVar("V")


class Frozen(Mapping[str, V], Generic[V]):
    """A read-only mapping in file order that can be hashed and pickled."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, V]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


class _Model(BaseModel):
    """`model_dump(exclude_none=True)` gives what a file would say, so `from_mapping` reads it back."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _entries(entries: Mapping[str, Any], dump: SerializerFunctionWrapHandler) -> Any:
    return dump(dict(entries))


_TEXT = PlainSerializer(values.text)


class DeviceBudget(_Model):
    """What this process may take of each GPU. `limit`: a fraction of what CUDA can give, or bytes. `reserve`: bytes."""

    limit: Annotated[Fraction | int, PlainValidator(values.device_limit), _TEXT] = Fraction(9, 10)
    reserve: Annotated[int | Literal["auto"], PlainValidator(values.reserve), _TEXT] = "auto"


class DeviceOverride(_Model):
    """What differs on some GPUs; None means as in `device`."""

    limit: Annotated[Fraction | int | None, PlainValidator(values.device_limit), _TEXT] = None
    reserve: Annotated[int | Literal["auto"] | None, PlainValidator(values.reserve), _TEXT] = None


class FrameworkBudget(_Model):
    """One framework's part: exactly one of `share`, a fraction of (limit − reserve), and `limit`, bytes.

    `growth` is TensorFlow's (True: its pool grows up to the cap; False: it takes the cap at its first operation),
    `nccl` is torch's (how many communicators it will keep on each GPU, 0 to 64), `context` PyCUDA's (`primary`: it
    works in the context that all share; `own`: in a second one where it makes one); each is None for the others.
    """

    share: Annotated[Fraction | None, PlainValidator(values.share), _TEXT] = None
    limit: Annotated[int | None, PlainValidator(values.limit), _TEXT] = None
    growth: Annotated[bool | None, PlainValidator(values.growth)] = None
    nccl: Annotated[int | None, PlainValidator(values.nccl)] = None
    context: Annotated[Literal["primary", "own"] | None, PlainValidator(values.context)] = None


_SECONDS = PlainSerializer(values.duration_text)


class MonitorConfig(_Model):
    """What watches the process. `interval` and `forecast` are seconds, `forecast` 0 where none is wanted; `warn` and
    `critical` fractions of a cap or limit. `timeline` is a path as it is written, and a whole one where the budget was
    read from a file: it is relative to that file's folder. `timeline_size` is bytes on disk.
    """

    interval: Annotated[float, PlainValidator(values.interval), _SECONDS] = 0.5
    warn: Annotated[Fraction, PlainValidator(values.warn), _TEXT] = Fraction(85, 100)
    critical: Annotated[Fraction, PlainValidator(values.critical), _TEXT] = Fraction(95, 100)
    forecast: Annotated[float, PlainValidator(values.forecast), _SECONDS] = 20.0
    timeline: Annotated[str | None, PlainValidator(values.timeline)] = None
    timeline_size: Annotated[int, PlainValidator(values.timeline_size), _TEXT] = 64 * MIB


class DoctorConfig(_Model):
    """What `memguard doctor` is told. `ignore`: findings that it leaves out, by name, in the order of their list."""

    ignore: Annotated[
        tuple[Annotated[Name, PlainValidator(values.finding)], ...],
        BeforeValidator(values.findings),
        AfterValidator(values.in_order),
        PlainSerializer(list),
    ] = ()


def _said(doctor: DoctorConfig | None) -> DoctorConfig | None:
    """None where it says nothing: the same as no such key."""
    return doctor if doctor is not None and doctor.ignore else None


_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "torch": {"nccl": 0},
    "tensorflow": {"growth": True},
    "pycuda": {"context": "primary"},
}


def _framework_name(name: str) -> str:
    if name not in FRAMEWORKS:
        raise PydanticCustomError("unknown_framework", "unknown framework")
    return name


def _frameworks(entries: Mapping[str, FrameworkBudget]) -> Frozen[FrameworkBudget]:
    if not entries:
        raise values.wrong("names no framework", "add a line such as '  torch: {share: 50%}'")
    return Frozen({name: _with_defaults(name, entry) for name, entry in entries.items()})


def _with_defaults(name: str, entry: FrameworkBudget) -> FrameworkBudget:
    """What is not written gets its value, so that budgets that mean the same are equal."""
    missing = {key: value for key, value in _DEFAULTS.get(name, {}).items() if getattr(entry, key) is None}
    return entry.model_copy(update=missing) if missing else entry


class Budget(_Model):
    """A checked budget. Two are equal where they mean the same, however they were written.

    `devices` has a whole UUID (`GPU-` and lower case), a CUDA ordinal in digits, or a name pattern as key. `on_busy`
    is what init does where other processes hold so much of a GPU that its limit cannot be had. `monitor` is None where
    nothing watches; `on_pressure` is what is done besides warning where the pressure becomes critical. `doctor` is for
    `memguard doctor` alone, None where it says nothing.
    """

    version: Annotated[int, PlainValidator(values.version)]
    device: DeviceBudget = DeviceBudget()
    devices: Annotated[
        Mapping[Annotated[str, AfterValidator(values.device_key)], DeviceOverride],
        AfterValidator(Frozen),
        WrapSerializer(_entries),
    ] = Frozen({})
    frameworks: Annotated[
        Mapping[Annotated[str, AfterValidator(_framework_name)], FrameworkBudget],
        AfterValidator(_frameworks),
        WrapSerializer(_entries),
    ]
    on_busy: Annotated[Literal["warn", "raise"], PlainValidator(values.on_busy)] = "warn"
    monitor: Annotated[MonitorConfig | None, BeforeValidator(values.monitor)] = None
    on_pressure: Annotated[
        tuple[Annotated[Literal["trim", "raise"], PlainValidator(values.pressure)], ...],
        BeforeValidator(values.pressures),
        PlainSerializer(list),
    ] = ()
    doctor: Annotated[DoctorConfig | None, BeforeValidator(values.doctor), AfterValidator(_said)] = None
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def source(self) -> str:
        """The file that it was read from, as messages name it; "" where it was made of plain Python values."""
        return self._origin.source

    def problem(self, loc: tuple[str, ...], message: str, fix: str) -> Problem:
        """A problem that turned out later with what stands at `loc`, with its line and column where known."""
        return self._origin.problem(loc, message, fix)


_NAMES = {
    "": tuple(Budget.model_fields),
    "device": tuple(DeviceBudget.model_fields),
    "framework": ("share", "limit"),
    **{name: ("share", "limit", *settings) for name, settings in _DEFAULTS.items()},
    "frameworks": FRAMEWORKS,
    "monitor": tuple(MonitorConfig.model_fields),
    "doctor": tuple(DoctorConfig.model_fields),
}


def load(path: str | os.PathLike[str]) -> Budget:
    """The budget in a file. Raises ConfigError, also where the file cannot be read."""
    source = short(path)
    try:
        source = os.fsdecode(path)
        # O_NONBLOCK: opening a FIFO that nobody writes must fail below and not wait for ever.
        handle = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode) and not stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(0, "it is not a regular file")
            raw = file.read(positions.MAX_BYTES + 1)
    except (OSError, TypeError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError([_unreadable(error)], _printable(source)) from None
    return _in_folder(parse(raw, source), os.path.dirname(os.path.abspath(source)))


def _in_folder(budget: Budget, folder: str) -> Budget:
    """A relative path in a file is one from its folder: the same whatever folder the program is started in."""
    monitor = budget.monitor
    if monitor is None or monitor.timeline is None:
        return budget
    whole = monitor.model_copy(update={"timeline": os.path.join(folder, monitor.timeline)})
    return budget.model_copy(update={"monitor": whole})


def of(budget: Budget | str | os.PathLike[str] | Mapping[str, Any]) -> Budget:
    """The budget, however it is given: itself, a file, or plain Python values. Raises ConfigError."""
    if isinstance(budget, Budget):
        return budget
    return from_mapping(budget) if isinstance(budget, Mapping) else load(budget)


def parse(text: str | bytes, source: str = "budget") -> Budget:
    """The budget in a text, or in bytes of UTF-8. `source` names it in messages. Raises ConfigError."""
    try:
        document = positions.read(text if isinstance(text, str) else positions.decode(text))
    except positions.Unreadable as error:
        raise ConfigError([error.problem], _printable(source)) from None
    return _budget(document, _printable(source))


def from_mapping(mapping: Mapping[str, Any]) -> Budget:
    """The budget in plain Python values, as `yaml.safe_load` would give them. Raises ConfigError, without lines."""
    return _budget(document.of_mapping(mapping), "budget")


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the file, for editors. Sums of shares and sizes are checked by memguard only."""
    return copy.deepcopy(SCHEMA)


def _budget(document: Document, source: str) -> Budget:
    if not isinstance(document.data, dict) and () not in document.bad:
        document.problems.append(_not_a_mapping(document))
        document.bad.add(())
    if () in document.bad:
        raise ConfigError(in_order(document.problems), source)
    assert isinstance(document.data, dict)
    findings = checks.check(document.data, FRAMEWORKS)
    errors: list[Any] = []
    try:
        budget = Budget.model_validate(document.data)
    except ValidationError as error:
        errors = list(error.errors())
    if errors or findings or document.problems:
        raise ConfigError(problems(errors, findings, document, _NAMES), source)
    budget._origin = Origin(document, source)
    return budget


def _not_a_mapping(document: Document) -> Problem:
    line, column = document.values.get(()) or (None, None)
    fix = "start with 'version: 1' and 'frameworks:'; `memguard schema` prints every key"
    if document.data is None:
        return Problem("is empty", fix, line, column)
    return Problem(f"holds {values.found(document.data)}, not the keys of a budget", fix, line, column)


def _unreadable(error: OSError | TypeError | ValueError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem("there is no such file", "check the path, and the folder that the program is started in")
    if isinstance(error, IsADirectoryError):
        return Problem("is a folder", "name the file in it, for example budget.yaml")
    if isinstance(error, PermissionError):
        return Problem("may not be read by this user", "check the permissions of the file and its folders")
    if isinstance(error, OSError):
        return Problem(f"cannot be read: {error.strerror or type(error).__name__}", "check the path")
    return Problem("is not a path", "give the path of the budget file")


def _printable(source: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in source)
