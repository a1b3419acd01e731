"""The budget file: parse text to a validated `Budget`, or report every problem at once with line, column and fix.

Create budgets with `Budget.load`, which reads one file and nothing else, `from_text` or `from_mapping`. These raise
only ConfigError. `docs/budget.md` defines the keys. pydantic builds a model at its first use (`defer_build`), so
importing this module builds none.
"""

# Without `from __future__ import annotations`, with which pydantic would compile the annotations for each model.

import os
import stat
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    create_model,
)
from pydantic_core import core_schema

from memguard._base.advice import InvalidValue
from memguard._base.findings import names
from memguard._base.framework_spec import Option
from memguard._base.source_map import Document, Origin, in_order, of_mapping
from memguard._base.units import short
from memguard._budget import rules, values
from memguard._budget.values import WRITTEN, Frozen, frozen
from memguard._frameworks.specs import SPECS
from memguard.errors import ConfigError, Problem

if TYPE_CHECKING:
    from memguard._budget.problems import Fields

FRAMEWORKS = tuple(SPECS)
"""The frameworks that a budget may name."""

_UNIQUE: dict[str, Any] = {"uniqueItems": True}


def _key(description: str, default: Any = None, **more: Any) -> Any:
    """An optional key. `default` is in the syntax of the file."""
    return Field(default=default, validate_default=default is not None, description=description, **more)


class _Model(BaseModel):
    # `model_dump(exclude_none=True)` returns the content of the file, which `from_mapping` parses.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class DeviceBudget(_Model):
    """The memory that this process may use on each GPU. `wait` is the wait for a lease in seconds; None: no wait."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {
                    "if": {"required": ["wait"]},
                    "then": {"required": ["lease"], "properties": {"lease": {"const": True}}},
                },
                {
                    "if": {"required": ["on_wait"], "properties": {"on_wait": {"const": "suspend-idle"}}},
                    "then": {"required": ["lease", "wait"], "properties": {"lease": {"const": True}}},
                },
            ]
        }
    )

    limit: values.DeviceLimit = _key(
        "A percentage of the memory that CUDA can allocate, or bytes.", "90%", examples=["90%", "40GiB"]
    )
    reserve: values.Reserve = _key(
        "Memory reserved for allocations outside every cap: auto, or bytes.", "auto", examples=["auto", "2GiB"]
    )
    lease: bool = _key(
        "Whether init claims a lease of the limit on each GPU. The leases of a user's processes never exceed the GPU: "
        "memguard leases.",
        False,
        strict=True,
    )
    wait: values.LeaseWait = _key(
        "With lease: how long init waits for other processes to release enough, in order of arrival. From 1s to "
        "7 days; 0: no wait.",
        examples=["10min"],
    )
    on_wait: Literal["wait", "suspend-idle"] = _key(
        "With lease: the action during the wait. suspend-idle: suspend idle processes that hold a lease and allow it "
        "(suspend: {on_demand: 10s}), until there is room for them again.",
        "wait",
    )


class DeviceOverride(_Model):
    """Overrides for some GPUs. A missing key, None here, has the value of `device`."""

    limit: values.OwnLimit = _key("As in device.", examples=["90%", "40GiB"])
    reserve: values.OwnReserve = _key("As in device.", examples=["auto", "2GiB"])


class FrameworkBudget(_Model):
    """One framework's part: share, or limit, or min with max. Options are attributes too; options of other frameworks
    are None."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["share"]}, {"required": ["limit"]}, {"required": ["min", "max"]}],
            "dependentRequired": {"min": ["max"], "max": ["min"]},
        }
    )

    share: values.Share = _key("A part of (limit − reserve).", examples=["50%"])
    limit: values.Limit = _key(
        "The same on every GPU: 512MiB, 1.5GiB (base 1024) or bytes; at least 2MiB.", examples=["4GiB", "512MiB"]
    )
    min: values.Least = _key(
        "With max, an elastic share: its guaranteed memory. A part of (limit − reserve), or bytes.",
        examples=["5%", "1GiB"],
    )
    max: values.Most = _key(
        "With min: the most to which its cap rises while others leave room. A part of (limit − reserve), or bytes.",
        examples=["15%", "4GiB"],
    )

    @property
    def guaranteed(self) -> Fraction | int:
        """The framework's guaranteed amount: share, limit or min, as a fraction of (limit − reserve) or in bytes."""
        part = self.share if self.share is not None else self.limit if self.limit is not None else self.min
        assert part is not None
        return part

    def __getattr__(self, name: str) -> Any:
        if any(name == option.name for spec in SPECS.values() for option in spec.options):
            return None
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


def _option(option: Option) -> Any:
    about: dict[str, Any] = {"default": option.default, "description": option.description}
    if option.kind == "word":
        return Literal[option.words], Field(**about)
    if option.kind == "flag":
        return bool, Field(strict=True, **about)
    # Serialised unchanged, because `_unsaid` sets the value to None if a budget with `ranks` omits the key.
    return Annotated[int, values.AS_IT_IS], Field(strict=True, ge=0, le=option.most, **about)


MODELS: dict[str, type[FrameworkBudget]] = {
    name: create_model(
        name,
        __base__=FrameworkBudget,
        __module__=__name__,
        __doc__=f"What {spec.title} may take of each GPU: share, or limit, or min with max.",
        **{option.name: _option(option) for option in spec.options},
    )
    for name, spec in SPECS.items()
}
"""The model for the mapping below each framework: share, limit, min, max, and the options of the framework's spec."""
globals().update(MODELS)  # pickle looks up these classes in this module


class _ByFramework:
    """Makes pydantic validate the value of each framework with the framework's own model, and keep file order."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schemas = {name: handler.generate_schema(model) for name, model in MODELS.items()}
        fields = {name: core_schema.typed_dict_field(one, required=False) for name, one in schemas.items()}
        entries = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        return core_schema.no_info_wrap_validator_function(cls._in_file_order, entries)

    @staticmethod
    def _in_file_order(written: Any, check: core_schema.ValidatorFunctionWrapHandler) -> Frozen[FrameworkBudget]:
        if not (entries := check(written)):
            raise InvalidValue("names no framework", "add a line such as '  torch: {share: 50%}'")
        return Frozen({name: entries[name] for name in written})


class MonitorConfig(_Model):
    """The monitor, which samples the process's GPU memory.

    Durations are in seconds, levels are fractions, sizes are in bytes. The path `timeline` is absolute if the budget
    was read from a file.
    """

    interval: values.Interval = _key("How often the GPUs are sampled: from 50ms to 1h.", "500ms")
    warn: values.Percent = _key("The part of a cap or a GPU's limit above which a warning is logged.", values.WARN)
    critical: values.Percent = _key("The part above which the pressure is critical; above warn.", values.CRITICAL)
    forecast: values.Forecast = _key("How long before a cap is reached to log a warning; 0: never.", "20s")
    timeline: values.Timeline = _key(
        "The file for all samples and events, relative to this file's folder. {pid} and {rank} are replaced.",
        examples=["memguard.jsonl"],
    )
    timeline_size: values.TimelineSize = _key("The maximum size of the timeline on disk; at least 1MiB.", "64MiB")
    top: bool = _key(
        "Whether memguard top of the same user may show this process, and request trims and cap changes.",
        False,
        strict=True,
    )


class SuspendConfig(_Model):
    """When this process may be suspended. `when_idle` and `on_demand` are in seconds; None: never."""

    when_idle: values.WhenIdle = _key(
        "In a notebook: the idle time after which the process is suspended until the next cell. From 1s to 7 days.",
        examples=["10min"],
    )
    by_others: bool = _key(
        "Whether other processes of the user may suspend it: memguard suspend PID.", False, strict=True
    )
    on_demand: values.WhenIdle = _key(
        "The idle time after which another process that waits for its lease (device: {on_wait: suspend-idle}) may "
        "suspend this one; it resumes when there is room. From 1s to 7 days.",
        examples=["10s"],
    )
    host_memory: Literal["check", "ignore"] = _key(
        "check: refuse to suspend if host memory is too small. ignore: for a machine whose memory grows.", "check"
    )


class MetricsConfig(_Model):
    """Exporters of the monitor's samples. `prometheus` is a port; None: no Prometheus endpoint."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prometheus"]}, {
        "required": ["opentelemetry"], "properties": {"opentelemetry": {"const": True}},
    }]})  # fmt: skip

    prometheus: values.Port = _key(
        "The port of 127.0.0.1 that serves Prometheus metrics: from 1024 to 65535. LOCAL_RANK is added to it.",
        examples=[9477],
    )
    opentelemetry: bool = _key(
        "Whether to export the metrics to the program's own OpenTelemetry MeterProvider.", False, strict=True
    )
    job: values.Job = _key(
        "The name of this program in the metrics; by default that of its script.", examples=["train"]
    )


class DoctorConfig(_Model):
    """Settings of `memguard doctor`; nothing else uses them."""

    # Sorted, so that budgets which ignore the same findings are equal.
    ignore: Annotated[
        tuple[values.Finding, ...],
        AfterValidator(lambda ignored: tuple(sorted(ignored, key=lambda name: (*names(), name).index(name)))),
        values.LISTED,
    ] = _key("Findings that it omits, by name: docs/doctor has a page for each.", (), json_schema_extra=_UNIQUE)


class Budget(_Model):
    """The memory of each GPU that one process may use, and each framework's part of it.

    Immutable. Two budgets with the same values are equal, even if the files spell the values differently. A key of
    `devices` is a whole UUID (`GPU-` and lower case), a CUDA ordinal in digits, or a name pattern. `ranks` is "auto" or
    the number of ranks on each GPU. `ranks`, `monitor`, `metrics`, `suspend` and `doctor` are None if the file omits
    them.
    """

    model_config = ConfigDict(
        title="memguard budget",
        json_schema_extra={
            "if": {"required": ["on_pressure"], "properties": {"on_pressure": {"minItems": 1}}},
            "then": {"required": ["monitor"]},
        },
    )

    version: values.Version = Field(description="The version of this format.", examples=[1])
    device: DeviceBudget = Field(
        default_factory=DeviceBudget, description="The memory that this process may use on each GPU."
    )
    devices: Annotated[
        Mapping[Annotated[str, AfterValidator(values.device_key)], DeviceOverride],
        AfterValidator(frozen),
    ] = Field(
        default_factory=lambda: Frozen({}),
        description="Overrides for single GPUs: by UUID, CUDA ordinal (0 or cuda:0), or pattern of the name.",
        json_schema_extra={"propertyNames": {"anyOf": values.DEVICE_KEYS}},
    )
    frameworks: Annotated[Mapping[str, FrameworkBudget], _ByFramework] = Field(
        description="The frameworks of this process that use the GPU. A framework that is not named gets no cap.",
        json_schema_extra={"minProperties": 1},
    )
    strategy: Literal["caps", "pool"] = _key(
        "caps: each framework has its own cap. pool: the frameworks that can allocate from one driver pool share it; "
        "its size is the sum of their parts.",
        "caps",
    )
    on_busy: Literal["warn", "raise"] = _key(
        "What init does if other processes hold so much of a GPU that the limit is out of reach: warn (in the log) or "
        "raise.",
        "warn",
    )
    ranks: values.Ranks = _key(
        "For the ranks of torchrun, mpirun and srun. auto: ranks that use the same GPU divide its limit. {per_gpu: 2}: "
        "two processes share each GPU. Without this key each process has the whole budget.",
        examples=["auto"],
    )
    monitor: Annotated[MonitorConfig | None, WRITTEN] = _key(
        "A thread that samples the GPU memory of each framework. Without this key there is none; {} takes the defaults."
    )
    on_pressure: Annotated[tuple[Literal["trim", "raise"], ...], values.LISTED] = _key(
        "At critical pressure, trim: free idle caches; raise: an error in the next workload or require. Needs monitor.",
        (),
        examples=[["trim"]],
        json_schema_extra=_UNIQUE,
    )
    metrics: Annotated[
        MetricsConfig | None,
        WRITTEN,
        AfterValidator(lambda metrics: metrics if metrics.prometheus or metrics.opentelemetry else None),
    ] = _key("Export metrics to Prometheus or OpenTelemetry. Starts the monitor too. By default nothing is exported.")
    suspend: Annotated[
        SuspendConfig | None,
        WRITTEN,
        AfterValidator(lambda suspend: suspend if suspend != SuspendConfig() else None),
    ] = _key("When this process may be suspended. Without this key only at its own call.")
    doctor: Annotated[
        DoctorConfig | None, WRITTEN, AfterValidator(lambda doctor: doctor if doctor.ignore else None)
    ] = _key("Settings of `memguard doctor`; nothing else uses them.")
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Budget":
        """Parse the budget in a file. Raises ConfigError if the budget is invalid or the file cannot be read."""
        from memguard._base.yaml import MAX_BYTES

        source = short(path)
        try:
            source = os.fsdecode(path)
            # O_NONBLOCK: opening a FIFO without a writer must fail below instead of blocking.
            with open(source, "rb", opener=lambda at, flags: os.open(at, flags | getattr(os, "O_NONBLOCK", 0))) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(0, "it is not a regular file")
                raw = file.read(MAX_BYTES + 1)
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError([_unreadable(error)], _printable(source)) from None
        return _in_folder(cls.from_text(raw, source), os.path.dirname(os.path.abspath(source)))

    @classmethod
    def from_text(cls, text: str | bytes, source: str = "budget") -> "Budget":
        """Parse text, or bytes of UTF-8. Messages call the text `source`. Raises ConfigError."""
        from memguard._base.yaml import read  # imports PyYAML, which only text needs

        return _budget(read(text), _printable(source))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Budget":
        """Validate plain Python values, as `yaml.safe_load` returns them. Raises ConfigError, without line numbers."""
        return _budget(of_mapping(mapping), "budget")

    @property
    def source(self) -> str:
        """The name of the budget's file in messages; "" if the budget was made from plain Python values."""
        return self._origin.source

    def problem(self, loc: tuple[str, ...], message: str, fix: str) -> Problem:
        """A problem with the value at `loc` that is found after parsing, with line and column if known."""
        return self._origin.problem(loc, message, fix)


def _in_folder(budget: Budget, folder: str) -> Budget:
    """Resolve a relative `timeline` path against the budget file's folder, not against the working directory."""
    monitor = budget.monitor
    if monitor is None or monitor.timeline is None:
        return budget
    whole = monitor.model_copy(update={"timeline": os.path.join(folder, monitor.timeline)})
    return budget.model_copy(update={"monitor": whole})


def of(budget: Budget | str | os.PathLike[str] | Mapping[str, Any]) -> Budget:
    """The budget from any accepted form: a Budget, a file, or plain Python values. Raises ConfigError."""
    if isinstance(budget, Budget):
        return budget
    return Budget.from_mapping(budget) if isinstance(budget, Mapping) else Budget.load(budget)


def received(mapping: Mapping[str, Any], source: str) -> Budget:
    """Validate a budget that another process read from the file `source` and sent. Raises ConfigError."""
    budget = Budget.from_mapping(mapping)
    budget._origin = Origin(source)
    return budget


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the file, for editors. It does not check the sums of shares and sizes."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generate(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def nullable_schema(self, schema: Any) -> dict[str, Any]:
            return self.generate_inner(schema["schema"])  # an optional key may be omitted, but null is invalid

        def default_schema(self, schema: Any) -> dict[str, Any]:
            written = super().default_schema(schema)
            return {key: value for key, value in written.items() if key != "default" or value is not None}

    schema = Budget.model_json_schema(schema_generator=Generate)
    for model in (schema, *schema["$defs"].values()):
        model["description"] = model["description"].partition("\n\n")[0]  # later paragraphs are for Python users
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _budget(document: Document, source: str) -> Budget:
    if () in document.bad or not isinstance(document.data, dict):
        wrong = [] if () in document.bad else [_not_a_mapping(document)]
        raise ConfigError(in_order([*document.problems, *wrong]), source)
    budget, errors = None, []
    try:
        budget = Budget.model_validate(document.data)
    except ValidationError as error:
        errors = error.errors()
    violations = rules.check(document.data, budget)
    if budget is None or violations or document.problems:
        from memguard._budget.problems import problems  # imported only for an invalid budget

        raise ConfigError(problems(errors, violations, document, _fields()), source)
    if budget.metrics is not None and budget.monitor is None:  # metrics export the monitor's samples
        budget = budget.model_copy(update={"monitor": MonitorConfig()})
    if budget.ranks is not None:
        budget = _unsaid(budget)
    if document.text is not None:
        budget._origin = Origin(source, document, values.device_key)
    return budget


def _unsaid(budget: Budget) -> Budget:
    """Set each count that the file omits, such as `nccl`, to None: a rank's default depends on the other ranks."""
    found = {}
    for name, one in budget.frameworks.items():
        counts = {option.name for option in SPECS[name].options if option.kind == "count"} - one.model_fields_set
        found[name] = one.model_copy(update=dict.fromkeys(counts)) if counts else one
    return budget.model_copy(update={"frameworks": Frozen(found)})


def _fields() -> "Fields":
    """The model fields of each level of the file, by key."""
    models: dict[str, type[_Model]] = {"": Budget, "device": DeviceBudget, "monitor": MonitorConfig, **MODELS}
    models |= {"metrics": MetricsConfig, "suspend": SuspendConfig, "doctor": DoctorConfig}
    return {"frameworks": MODELS, **{level: model.model_fields for level, model in models.items()}}


def _not_a_mapping(document: Document) -> Problem:
    found = f"holds {values.excerpt(document.data)}, not the keys of a budget"
    fix = "start with 'version: 1' and 'frameworks:'; `memguard check --schema` prints every key"
    return Problem("is empty" if document.data is None else found, fix, *(document.values.get(()) or ()))


_UNREADABLE = {
    FileNotFoundError: Problem(
        "there is no such file", "check the path, and the folder that the program is started in"
    ),
    IsADirectoryError: Problem("is a folder", "name the file in it, for example budget.yaml"),
    PermissionError: Problem("may not be read by this user", "check the permissions of the file and its folders"),
}


def _unreadable(error: OSError | TypeError | ValueError) -> Problem:
    if not isinstance(error, OSError):  # a wrong type, or a NUL character in the path
        return Problem("is not a path", "give the path of the budget file")
    other = Problem(f"cannot be read: {error.strerror or type(error).__name__}", "check the path")
    return _UNREADABLE.get(type(error), other)


def _printable(source: str) -> str:
    return source if source.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in source)
