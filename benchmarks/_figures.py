"""Figures in the sentences of the documents. Each has its name behind it, in a comment that no reader of the page sees:

    a second context took 518 MiB<!-- = second context --> on an H200

`SOURCES` says where the figure of that name comes from: a path in a result, or in a module of memguard. `table.py`
writes the figures anew; tests/unit/test_figures.py fails for a figure with a unit that has no source.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import _exchange_tables

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    # Measured. `*` in a path is every key, and `least` or `most` says which of the values.
    "1 GiB out": "h200-suspend.json: scenarios.seconds torch.sizes.1.rounds.0.off_s",
    "1 GiB in": "h200-suspend.json: scenarios.seconds torch.sizes.1.rounds.0.on_s",
    "16 GiB out": "h200-suspend.json: scenarios.seconds torch.sizes.16.rounds.0.off_s",
    "16 GiB in": "h200-suspend.json: scenarios.seconds torch.sizes.16.rounds.0.on_s",
    "60 GiB out": "h200-suspend.json: scenarios.seconds torch.sizes.60.rounds.0.off_s",
    "60 GiB in": "h200-suspend.json: scenarios.seconds torch.sizes.60.rounds.0.on_s",
    "bare context": "h200-x2-ddp.json: ranks.0.readings.0.overhead",
    "first tensor": "h200-x2-ddp.json: ranks.0.readings.1.overhead",
    "handed over": "h200-exchange.json: scenarios.speed.bytes",
    "hand-over": "h200-exchange.json: most scenarios.speed.speed.*.memguard.median_us",
    "host, least": "h200-exchange.json: least through_host_ms.*",
    "host, most": "h200-exchange.json: most through_host_ms.*",
    "JAX's cap": "h200-all-frameworks.json: scenarios.jax, later.cap",
    "JAX's limit": "h200-all-frameworks.json: scenarios.jax, later.most_held",
    "JAX's retries": "h200-watch.json: scenarios.jax, own cap.seconds_to_refusal",
    "leak": "h200-watch.json: scenarios.leak.rate",
    "leak announced": "h200-watch.json: scenarios.leak.announced_before_oom_s",
    "overhead of six": "h200-all-frameworks.json: most scenarios.together.readings.*.overhead",
    "replay": "replay.json: runs.1.seconds",
    "reserve of six": "h200-all-frameworks.json: scenarios.together.reserve",
    "start, the file": "startup.json: alone.median_ms",
    "start, with": "startup.json: difference.armed.median_ms",
    "start, without": "startup.json: difference.with.median_ms",
    "TensorFlow alone": "h200-main-job.json: scenarios.without_memguard.tensorflow_took",
    "TensorFlow leaves": "h200-main-job.json: scenarios.without_memguard.left_free",
    "TensorFlow's retries": "h200-watch.json: scenarios.tensorflow, own cap.seconds_to_refusal",
    # Measured once, on one H200 with driver 580.159; the code uses them.
    "context": "memguard._specs: OVERHEADS.context.modules",
    "driver reserve": "memguard._devices.simulated: CATALOGUE.h200.reserved",
    "first communicator": "memguard._specs: OVERHEADS.nccl 1.modules",
    "further communicator": "memguard._specs: OVERHEADS.nccl.modules",
    "modules of cupy": "memguard._frameworks.simulated.adapter: MODELS.cupy.first_work",
    "modules of jax": "memguard._frameworks.simulated.adapter: MODELS.xla.first_work",
    "modules of numba": "memguard._frameworks.simulated.adapter: MODELS.emm.first_work",
    "modules of tensorflow": "memguard._frameworks.simulated.adapter: MODELS.bfc.first_work",
    "modules of torch": "memguard._frameworks.simulated.adapter: MODELS.torch.first_work",
    "lazy": "memguard._specs: LAZY",
    "page": "memguard._units: GRANULE",
    "PyCUDA's bins": "memguard._specs: SPECS.pycuda.rounds_up",
    "second context": "memguard._specs: OVERHEADS.second context.modules",
    "segment": "memguard._frameworks.torch.adapter: SEGMENT",
    "TensorFlow's most": "memguard._specs: SPECS.tensorflow.modules",
    "simulated context": "memguard._devices.simulated: CONTEXT",
    "small": "memguard._frameworks.driver_pages: SMALL",
    "tiny": "memguard._frameworks.driver_pages: TINY",
    "most idle blocks": "memguard._frameworks.cupy.blocks: MOST",
    # What memguard does.
    "answer": "memguard.exchange.ipc.sharing: ANSWER_TIMEOUT",
    "budget file": "memguard._config.positions: MAX_BYTES",
    "burst": "memguard._monitor.sampler: BURST",
    "exit's patience": "memguard._suspend.leaving: PATIENCE",
    "facts": "memguard._doctor.bounds: TEXT",
    "forecast": "memguard._monitor.pressure: Settings.forecast",
    "forgotten lock": "memguard._suspend.helper: FORGOTTEN",
    "hysteresis": "memguard._monitor.pressure: Settings.hysteresis",
    "join": "memguard._monitor.sampler: JOIN",
    "levels kept": "memguard._monitor.pressure: MEMORY",
    "line": "memguard._timeline.format: MAX_LINE",
    "line of a trace": "memguard._simulation.trace: MAX_LINE",
    "monitor's part": "memguard._monitor.pressure: Settings.cpu",
    "no room": "memguard._doctor.checks.gpu_memory: NO_ROOM",
    "probe's room": "memguard._doctor.collect.gather: _EACH",
    "refusals": "memguard._monitor.refusals: EVERY",
    "request": "memguard.exchange.ipc.server: REQUEST_TIMEOUT",
    "rise": "memguard._monitor.pressure: EVIDENCE.0",
    "samples of a rise": "memguard._monitor.pressure: EVIDENCE.1",
    "slowest retry": "memguard._monitor.sampler: SLOWEST_RETRY",
    "spare": "memguard.exchange.ipc.sharing: _SPARE",
    "thread's turn": "memguard._suspend.settling: LONGEST",
    "timeline": "memguard._timeline.writer: LIMIT",
    "timeline's patience": "memguard._timeline.writer: _PATIENCE",
    "timeline's retry": "memguard._timeline.writer: _RETRY",
    "tolerance of a test": "memguard._testing.leaks: TOLERANCE",
    "unaccounted of a test": "memguard._testing.leaks: UNACCOUNTED",
}
TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "seconds": 1, "min": 60, "minutes": 60, "h": 3600, "hours": 3600}
SIZES = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
UNITS = {**TIMES, **SIZES, "%": 0.01}
GIVEN = {"us": 1e-6, "ms": 1e-3}
"""The unit of a time in a result, by how its key ends. Other times are in seconds, sizes in bytes."""
MARKED = re.compile(rf"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<unit>\s?(?:{'|'.join(UNITS)}))?<!-- = (?P<name>[^>]+?) -->")
_CHOICES: dict[str, Callable[[Sequence[Any]], Any]] = {"least": min, "most": max}


def filled(text: str) -> str:
    """The text with its named figures anew, each with the decimals and the unit that it has there."""

    def written(found: re.Match[str]) -> str:
        number, unit = found["number"], (found["unit"] or "").strip()
        decimals = len(number.partition(".")[2])
        return f"{figure(found['name'], unit):,.{decimals}f}" + found[0][len(number) :]

    return MARKED.sub(written, text)


def figure(name: str, unit: str = "") -> float:
    """The figure in that unit, or as its source has it. Raises LookupError for a name or a path that leads nowhere."""
    if name not in SOURCES:
        raise LookupError(f"benchmarks/_figures.py has no source of {name!r}")
    source, _, path = SOURCES[name].partition(": ")
    which, _, rest = path.partition(" ")
    if which not in _CHOICES:
        which, rest = "", path
    values = list(_values(root(source), rest.split(".")))
    if not values or (len(values) > 1 and not which):
        raise LookupError(f"{name!r}: {path} leads to {len(values)} values in {source}")
    chosen = _CHOICES[which](values) if which else values[0]
    if isinstance(chosen, bool) or not isinstance(chosen, Real):
        raise LookupError(f"{name!r}: {path} in {source} is {chosen!r}, which is no number")
    given = GIVEN.get(rest.removesuffix(".*").rpartition("_")[2], 1) if unit in TIMES else 1
    return float(chosen) * given / (UNITS[unit] if unit else 1)


def root(source: str) -> Any:
    """The result of that name, with what is computed from it, or the module."""
    if not source.endswith(".json"):
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        return importlib.import_module(source)
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / source).read_text(encoding="utf-8"))
    if source == "h200-exchange.json":
        speed = result["scenarios"]["speed"]
        result["through_host_ms"] = {pair: _exchange_tables.host_ms(speed, pair) for pair in speed["speed"]}
    return result


def _values(place: Any, path: Sequence[str]) -> Iterator[Any]:
    """What lies at the path: keys of mappings, positions in lists, attributes of others; of a class, defaults."""
    if not path:
        yield place
        return
    key, *rest = path
    if isinstance(place, type) and hasattr(place, "_field_defaults"):  # a named tuple, which has no other defaults
        place = place._field_defaults
    if isinstance(place, Mapping):
        inner = list(place.values()) if key == "*" else [place[key]] if key in place else []
    elif isinstance(place, (list, tuple)) and not hasattr(place, key):
        inner = list(place) if key == "*" else [place[int(key)]] if key.isdigit() and int(key) < len(place) else []
    else:
        inner = [getattr(place, key)] if hasattr(place, key) else []
    for one in inner:
        yield from _values(one, rest)


def overheads() -> str:
    """The table of docs/ledger.md: what may lie outside the caps, in MiB, as the frameworks' rows have it."""
    specs = root("memguard._specs")
    own = {_exchange_tables.PLAIN[name]: specs.SPECS[name] for name in specs.SPECS}
    nccl = {"first communicator": specs.OVERHEADS["nccl 1"], "each further one": specs.OVERHEADS["nccl"]}
    second = {"each second context": specs.OVERHEADS[specs.SECOND_CONTEXT]}
    columns = {"context": specs.OVERHEADS["context"], **own, **nccl, **second}
    most, measured = ([f"{getattr(one, what) >> 20}" for one in columns.values()] for what in ("workspace", "modules"))
    rows = [
        ["", *columns],
        ["---"] * (len(columns) + 1),
        [f"at most, plus {specs.SLACK >> 20} of slack in all", *most],
        ["while TensorFlow does not say what it holds: what was measured", *measured],
        ["of that, first uses", *map(_first_uses, columns.values())],
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _first_uses(row: Any) -> str:
    """The libraries of a framework with what the first use of each takes, in MiB."""
    found: dict[str, list[str]] = {}
    for library, size in getattr(row, "first_uses", ()):
        found.setdefault(library, []).append(str(size >> 20))
    return ", ".join(f"cu{name[2:].upper()} {' and '.join(sizes)}" for name, sizes in found.items()) or "–"


def documents() -> list[str]:
    """The paths of the documents whose figures need a source."""
    return ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
