"""What is told: every metric with its name, and what each is worth at one moment. Pure.

Sizes are bytes, times seconds. What is not known is left out, never 0. Labels have few values: GPUs of the budget,
frameworks, kinds of events. There is none for a process, a thread or an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from memguard._base.types import DevicePlan, FrameworkSample, Plan, Pressure, Sample
from memguard._devices.suspension import Off

KINDS = (
    "pressure", "forecast", "leak", "probe", "trim", "oom", "note", "reclaim", "retry", "suspended", "resumed",
    "lease",
)  # fmt: skip
"""The kinds of events that are counted; any other one counts as `other`."""
_GPU = ("gpu", "uuid")
_FRAMEWORK = ("gpu", "uuid", "framework")
Values = tuple[str, ...]


class Metric(NamedTuple):
    """One metric. `otel` is its name for OpenTelemetry, "" if it has none there; `unit` is UCUM's, as that wants it.

    A counter's name has no `_total` here: both clients add what they want.
    """

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    otel: str
    unit: str
    help: str


class Figure(NamedTuple):
    """What a metric is worth, for these values of its labels."""

    metric: Metric
    values: Values
    value: float


class Scene(NamedTuple):
    """What is known at one moment. Keys are a framework's name and a GPU's UUID.

    `sample` is None if there is none that tells of now: before the first one, while the process is suspended, and if
    the GPUs cannot be read. `taken` is when the last one was. `told` are frameworks whose refused requests are seen.
    """

    plan: Plan
    version: str
    sample: Sample | None = None
    taken: float | None = None
    levels: Mapping[tuple[str | None, str], Pressure] = {}
    told: frozenset[str] = frozenset()
    refused: Mapping[tuple[str, str], int] = {}
    trims: Mapping[tuple[str, str], int] = {}
    returned: Mapping[tuple[str, str], int] = {}
    lends: Mapping[tuple[str, str], int] = {}
    events: Mapping[str, int] = {}
    off: Off | None = None


def _of_framework(what: str, unit: str, text: str, otel: str = "") -> Metric:
    return Metric(f"memguard_framework_{what}", "gauge", _FRAMEWORK, otel, unit, text)


def _of_process(what: str, unit: str, text: str, otel: str) -> Metric:
    return Metric(f"memguard_process_{what}", "gauge", _GPU, otel, unit, text)


def _counter(what: str, unit: str, text: str, otel: str, labels: tuple[str, ...] = _FRAMEWORK) -> Metric:
    return Metric(f"memguard_{what}", "counter", labels, otel, unit, text)


HELD = _of_framework("held_bytes", "By", "Bytes that the framework has taken from the driver.")
IN_USE = _of_framework("in_use_bytes", "By", "Bytes that live arrays occupy.", "memguard.framework.in_use")
RECLAIMABLE = _of_framework(
    "reclaimable_bytes", "By", "Bytes that a trim would give back to the driver.", "memguard.framework.reclaimable"
)
CAP = _of_framework("cap_bytes", "By", "The most that the framework may hold now.", "memguard.framework.cap")
PRESSURE = _of_framework(
    "pressure_level", "1", "How close the framework is to its cap: 0 ok, 1 warn, 2 critical.",
    "memguard.framework.pressure",
)  # fmt: skip
REFUSED = _counter(
    "refused_requests", "{request}", "Requests that the framework's allocator refused.", "memguard.requests.refused"
)
TRIMS = _counter("trims", "{trim}", "How often the framework was told to give back its idle cache.", "memguard.trims")
RETURNED = _counter(
    "returned_bytes", "By", "Bytes that the framework gave back for requests of others.", "memguard.returned"
)
LENDS = _counter("lends", "{lend}", "How often the framework's elastic cap was raised.", "memguard.lends")
EVENTS = _counter("events", "{event}", "Events of the monitor and the guard, by kind.", "memguard.events", ("kind",))
SIZE = Metric("memguard_gpu_size_bytes", "gauge", _GPU, "", "By", "The GPU's memory, as NVML has it.")
USED = Metric("memguard_gpu_used_bytes", "gauge", _GPU, "", "By", "What all processes hold of the GPU, by NVML.")
FREE = Metric("memguard_gpu_free_bytes", "gauge", _GPU, "memguard.gpu.free", "By", "What is free on the GPU, by NVML.")
GPU = Metric("memguard_gpu_info", "gauge", (*_GPU, "name"), "", "1", "Always 1: the name of the GPU.")
OWN = _of_process("held_bytes", "By", "What this process holds of the GPU, by NVML.", "memguard.process.held")
LIMIT = _of_process("limit_bytes", "By", "What this process may take of the GPU.", "memguard.process.limit")
RESERVE = _of_process(
    "reserve_bytes", "By", "The part of the limit that is kept for overhead.", "memguard.process.reserve"
)
OVERHEAD = _of_process(
    "overhead_bytes", "By", "CUDA context and library workspaces, as measured.", "memguard.process.overhead"
)
UNACCOUNTED = _of_process(
    "unaccounted_bytes", "By", "What this process holds and nobody tells of; negative if more was told of.",
    "memguard.process.unaccounted",
)  # fmt: skip
PROCESS_PRESSURE = _of_process(
    "pressure_level", "1", "How close the process is to its limit: 0 ok, 1 warn, 2 critical.",
    "memguard.process.pressure",
)  # fmt: skip
SUSPENDED = _of_process(
    "suspended_bytes", "By", "What has left the GPU for host memory; 0 while the process is not suspended.",
    "memguard.process.suspended",
)  # fmt: skip
TAKEN = Metric("memguard_sample_timestamp_seconds", "gauge", (), "", "s", "When the GPUs were read last (Unix time).")
INFO = Metric("memguard_info", "gauge", ("version",), "", "1", "Always 1: the version of memguard.")
EVERY = (
    HELD, IN_USE, RECLAIMABLE, CAP, PRESSURE, REFUSED, TRIMS, RETURNED, LENDS, EVENTS, SIZE, USED, FREE, GPU, OWN,
    LIMIT, RESERVE, OVERHEAD, UNACCOUNTED, PROCESS_PRESSURE, SUSPENDED, TAKEN, INFO,
)  # fmt: skip


def figures(scene: Scene) -> Iterator[Figure]:
    """Everything that is known, in the order of `EVERY`."""
    found: dict[Metric, list[Figure]] = {metric: [] for metric in EVERY}
    for metric, values, value in _all(scene):
        if value is not None:
            found[metric].append(Figure(metric, values, float(value)))
    for metric in EVERY:
        yield from found[metric]


_Found = Iterator[tuple[Metric, Values, float | None]]


def _all(scene: Scene) -> _Found:
    yield INFO, (scene.version,), 1
    yield TAKEN, (), scene.taken
    for kind in (*KINDS, "other"):
        yield EVENTS, (kind,), scene.events.get(kind, 0)
    sampled = {device.uuid: device for device in scene.sample.devices} if scene.sample is not None else {}
    for part in scene.plan.devices:
        uuid = part.device.uuid
        gpu = str(part.device.index), uuid
        yield GPU, (*gpu, part.device.name), 1
        yield LIMIT, gpu, part.limit
        yield RESERVE, gpu, part.reserve
        yield SUSPENDED, gpu, _suspended(scene.off, uuid)
        device = sampled.get(uuid)
        if device is not None:
            yield SIZE, gpu, device.total
            yield USED, gpu, device.used
            yield FREE, gpu, device.free
            yield OWN, gpu, device.process
            yield OVERHEAD, gpu, device.overhead
            yield UNACCOUNTED, gpu, device.unaccounted
            yield PROCESS_PRESSURE, gpu, _rank(scene, None, uuid)
        frameworks = device.frameworks if device is not None else {}
        yield from _of_frameworks(scene, part, gpu, frameworks)


def _of_frameworks(scene: Scene, part: DevicePlan, gpu: Values, frameworks: Mapping[str, FrameworkSample]) -> _Found:
    uuid = part.device.uuid
    for name, one in frameworks.items():
        where = (*gpu, name)
        yield HELD, where, one.held
        yield IN_USE, where, one.in_use
        yield RECLAIMABLE, where, one.reclaimable
    for name, cap in part.caps.items():
        where = (*gpu, name)
        yield CAP, where, cap
        yield PRESSURE, where, _rank(scene, name, uuid)
        yield REFUSED, where, scene.refused.get((name, uuid), 0 if name in scene.told else None)
    for metric, counted in ((TRIMS, scene.trims), (RETURNED, scene.returned), (LENDS, scene.lends)):
        for name in _names(part, counted):
            yield metric, (*gpu, name), counted.get((name, uuid), 0)


def _names(part: DevicePlan, counted: Iterable[tuple[str, str]]) -> dict[str, None]:
    """The frameworks of the budget, and what else was counted on that GPU."""
    return dict.fromkeys([*part.caps, *(name for name, uuid in counted if uuid == part.device.uuid)])


def _rank(scene: Scene, framework: str | None, uuid: str) -> int | None:
    level = scene.levels.get((framework, uuid))
    return None if level is None else level.rank


def _suspended(off: Off | None, uuid: str) -> int | None:
    """Not known while it leaves: what has left is told once it has."""
    if off is None:
        return 0
    return off.bytes.get(uuid, 0) if off.bytes else None
