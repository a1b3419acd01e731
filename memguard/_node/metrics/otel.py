"""For OpenTelemetry: observable instruments of the program's own MeterProvider; none is set here.

`hw.gpu.memory.*` are those of the semantic conventions for hardware (status: development), with `memguard.framework` as
one more attribute: per GPU (`hw.id`, its UUID) the parts of `hw.gpu.memory.usage` add up to what NVML has as used.

Instruments cannot be taken out of a MeterProvider. So they are made once in a process, and tell nothing while no budget
asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from memguard._base.logs import text_of
from memguard._node.metrics.figures import EVERY, Metric, Scene, figures
from memguard._node.metrics.source import CannotExport, Source, version

Observed = Iterator[tuple[float, Mapping[str, Any]]]
"""A value and its attributes."""
FRAMEWORK = "memguard.framework"
OVERHEAD, OTHER = "overhead", "other"
"""What stands for a framework's name in `hw.gpu.memory.usage`: this process's overhead, and all else that is used."""
_ATTRIBUTES = {"uuid": "hw.id", "framework": FRAMEWORK, "kind": "memguard.event"}
_CONSTANT = {"job_name": "memguard.job", "rank": "memguard.rank", "simulated": "memguard.simulated"}
_source: Source | None = None
_made: set[str] = set()


class Instrument(NamedTuple):
    """`kind` is that of OpenTelemetry; `observed` says what it is worth."""

    name: str
    kind: str
    unit: str
    text: str
    observed: Callable[[Scene], Observed]


def begin(source: Source) -> None:
    """Tell the figures of this source. Raises CannotExport."""
    global _source
    try:
        from opentelemetry.metrics import get_meter
    except ImportError as error:
        raise CannotExport(
            f"opentelemetry-api cannot be imported: {text_of(error)}", "pip install 'opentelemetry-sdk>=1.25'"
        ) from None
    meter = get_meter("memguard", version())
    for instrument in instruments():
        if instrument.name not in _made:
            make = getattr(meter, f"create_observable_{instrument.kind}")
            make(instrument.name, [_callback(instrument)], unit=instrument.unit, description=instrument.text)
            _made.add(instrument.name)
    _source = source


def end(source: Source) -> None:
    """Tell nothing from now on. May be called again."""
    global _source
    if _source is source:
        _source = None


def _callback(instrument: Instrument) -> Callable[[Any], list[Any]]:
    from opentelemetry.metrics import Observation

    def observe(options: Any) -> list[Any]:
        source = _source
        scene = source.scene() if source is not None else None
        if source is None or scene is None:
            return []
        constant = {_CONSTANT[name]: value for name, value in source.constant.items()}
        return [Observation(value, {**attributes, **constant}) for value, attributes in instrument.observed(scene)]

    return observe


def instruments() -> tuple[Instrument, ...]:
    """Every instrument: those of the conventions, and memguard's own."""
    updown, gauge = "up_down_counter", "gauge"
    own = [_own(metric) for metric in EVERY if metric.otel]
    return (
        Instrument("hw.gpu.memory.limit", updown, "By", "Size of the GPU memory.", _limit),
        Instrument("hw.gpu.memory.usage", updown, "By", "GPU memory used.", _usage),
        Instrument("hw.gpu.memory.utilization", gauge, "1", "Fraction of GPU memory used.", _utilization),
        *own,
    )


def _own(metric: Metric) -> Instrument:
    def observed(scene: Scene) -> Observed:
        gpus = _gpus(scene)
        for found, values, value in figures(scene):
            if found is metric:
                labels = zip(metric.labels, values, strict=True)
                named = {_ATTRIBUTES[name]: one for name, one in labels if name in _ATTRIBUTES}
                yield value, {**gpus.get(named.get("hw.id", ""), {}), **named}

    kind = "counter" if metric.kind == "counter" else "up_down_counter" if metric.unit == "By" else "gauge"
    return Instrument(metric.otel, kind, metric.unit, metric.help, observed)


def _gpus(scene: Scene) -> dict[str, dict[str, str]]:
    """The attributes of each GPU, by UUID."""
    return {
        part.device.uuid: {
            "hw.id": part.device.uuid,
            "hw.name": f"GPU {part.device.index}",
            "hw.model": part.device.name,
            "hw.type": "gpu",
            "hw.vendor": "NVIDIA",
        }
        for part in scene.plan.devices
    }


def _limit(scene: Scene) -> Observed:
    gpus = _gpus(scene)
    for device in scene.sample.devices if scene.sample is not None else ():
        yield device.total, gpus.get(device.uuid, {"hw.id": device.uuid})


def _utilization(scene: Scene) -> Observed:
    gpus = _gpus(scene)
    for device in scene.sample.devices if scene.sample is not None else ():
        if device.used is not None and device.total:
            yield device.used / device.total, gpus.get(device.uuid, {"hw.id": device.uuid})


def _usage(scene: Scene) -> Observed:
    """Each framework that tells what it holds, the overhead, and the rest of what is used. They add up."""
    gpus = _gpus(scene)
    for device in scene.sample.devices if scene.sample is not None else ():
        about = gpus.get(device.uuid, {"hw.id": device.uuid})
        parts = {name: one.held for name, one in device.frameworks.items() if one.held is not None}
        parts[OVERHEAD] = device.overhead
        if device.used is not None:  # readings that follow each other need not agree
            parts[OTHER] = max(device.used - sum(parts.values()), 0)
        for name, size in parts.items():
            yield size, {**about, FRAMEWORK: name}
