"""Metrics: which figures there are, where they come from, and who gets them."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import waiting
from guards import host_of, simulated, start
from hypothesis import given
from hypothesis import strategies as st
from interruptions import Points
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import memguard
from memguard import api
from memguard._base import life
from memguard._base.types import (
    Device,
    DevicePlan,
    DeviceSample,
    Event,
    FrameworkSample,
    Plan,
    Pressure,
    Sample,
)
from memguard._base.undo import Undo
from memguard._base.units import GIB, MIB
from memguard._budget import ranks
from memguard._devices import suspension
from memguard._devices.suspension import Off
from memguard._node import metrics as _metrics
from memguard._node.metrics import figures, otel, prometheus, server, source
from memguard._node.metrics.figures import EVERY, KINDS, Figure, Scene
from memguard._runtime import session
from memguard.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def can_listen(port: int) -> bool:
    """Whether nobody listens there. What is only closing keeps nobody from it."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
            one.listen()
        except OSError:
            return False
        return True


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", *(one.local for one in ranks._LAUNCHERS)):
        monkeypatch.delenv(name, raising=False)
    yield
    memguard.shutdown()
    assert not [one for one in threading.enumerate() if one.name in ("memguard-metrics", "memguard-monitor")]
    assert not session.event_callbacks and not server._live and otel._source is None


@pytest.fixture
def port() -> Iterator[int]:
    found = free_port()
    yield found
    memguard.shutdown()
    assert can_listen(found)


def budget(port: int | None, **more: Any) -> dict[str, Any]:
    metrics = {"job": "train", **({"prometheus": port} if port is not None else {}), **more.pop("metrics", {})}
    return {
        "version": 1,
        "device": {"limit": "40GiB"},
        "frameworks": {"torch": {"min": "5GiB", "max": "20GiB"}, "cupy": {"limit": "8GiB"}},
        "monitor": {"interval": "1h"},
        "metrics": metrics,
        **more,
    }


until = functools.partial(waiting.until, seconds=60.0)


def sampled(**enough: int) -> Sample:
    """The monitor's last sample, once it has the frameworks' bytes that are given."""
    monitor = api.current_session().monitor
    assert monitor is not None

    def look() -> Sample | None:
        for one in monitor.last(0.0)[-1:]:
            if all(getattr(one.devices[0].frameworks.get(name), "held", None) == n for name, n in enough.items()):
                return one
        return None

    found: Sample = until(look)
    return found


def again() -> None:
    """Have the monitor take a sample now, on a thread as its own."""
    monitor = api.current_session().monitor
    assert monitor is not None
    thread = threading.Thread(target=monitor._tick, args=(lambda: False,))
    thread.start()
    thread.join()


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def read(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"told twice: {key}"
            found[key] = sample.value
    return found


def value(series: Series, metric: str, /, **labels: str) -> float | None:
    """What it is worth; None if it is not told."""
    found = [one for (called, has), one in series.items() if called == metric and labels.items() <= dict(has).items()]
    assert len(found) < 2
    return found[0] if found else None


# What is told

SIZES = st.none() | st.integers(0, 1 << 50)
NAMES = st.sampled_from(["torch", "cupy", "a\nb", 'quo"te', "back\\slash", "ö"])
UUIDS = ["GPU-0", "GPU-1"]
COUNTS = st.dictionaries(st.tuples(NAMES, st.sampled_from([*UUIDS, "GPU-9"])), st.integers(0, 1 << 60))


def plan(caps: list[dict[str, int]]) -> Plan:
    return Plan(
        tuple(
            DevicePlan(Device(uuid, f"NVIDIA {uuid}", n, 1 << 40, None, "hopper"), 1 << 38, 1 << 30, own, 0)
            for n, (uuid, own) in enumerate(zip(UUIDS, caps, strict=False))
        )
    )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    caps = draw(st.lists(st.dictionaries(NAMES, st.integers(0, 1 << 40), max_size=3), min_size=1, max_size=2))
    devices = [
        DeviceSample(
            uuid, 1 << 40, draw(SIZES), draw(st.integers(0, 1 << 40)), draw(SIZES), draw(SIZES),
            draw(st.integers(0, 1 << 40)), draw(st.none() | st.integers(-(1 << 40), 1 << 40)),
            draw(st.dictionaries(NAMES, st.builds(FrameworkSample, SIZES, SIZES, SIZES, SIZES), max_size=3)),
        )
        for uuid in draw(st.lists(st.sampled_from(UUIDS), unique=True))
    ]  # fmt: skip
    keys = st.tuples(st.none() | NAMES, st.sampled_from(UUIDS))
    return Scene(
        plan(caps),
        "1.0",
        draw(st.none() | st.just(Sample(5.0, tuple(devices)))),
        draw(st.none() | st.floats(0, 1e10)),
        draw(st.dictionaries(keys, st.sampled_from(Pressure))),
        draw(st.frozensets(NAMES)),
        *(draw(COUNTS) for _ in range(4)),
        draw(st.dictionaries(st.sampled_from([*KINDS, "other"]), st.integers(0, 9))),
        draw(st.none() | st.builds(Off, st.dictionaries(st.sampled_from(UUIDS), st.integers(0, 9)), st.just(1.0))),
    )


class Still:
    """A source of one scene."""

    def __init__(self, scene: Scene | None) -> None:
        self.found, self.constant = scene, {"job_name": "train"}

    def scene(self) -> Scene | None:
        return self.found


@given(scenes())
def test_whatever_is_known_is_told_once_and_in_prometheus_own_words(scene: Scene) -> None:
    told = list(figures.figures(scene))
    assert len({(one.metric.name, one.values) for one in told}) == len(told)
    for one in told:
        assert len(one.values) == len(one.metric.labels) and math.isfinite(one.value)
        assert one.metric.kind == "gauge" or one.value >= 0
    registry = CollectorRegistry()
    registry.register(prometheus.Collector(Still(scene)))  # type: ignore[arg-type]
    read_back = read(generate_latest(registry).decode())
    assert sorted(read_back.values()) == sorted(one.value for one in told)


@given(scenes())
def test_the_parts_of_opentelemetrys_usage_add_up_to_what_is_used(scene: Scene) -> None:
    for instrument in otel.instruments():
        seen = [(frozenset(attributes.items()), value) for value, attributes in instrument.observed(scene)]
        assert len({key for key, _ in seen}) == len(seen)
        for attributes, _ in seen:
            assert "hw.id" in dict(attributes) or instrument.name == "memguard.events"
    parts: dict[str, float] = {}
    for size, attributes in otel._usage(scene):
        assert size >= 0
        parts[attributes["hw.id"]] = parts.get(attributes["hw.id"], 0) + size
    for device in scene.sample.devices if scene.sample is not None else ():
        held = sum(one.held or 0 for one in device.frameworks.values()) + device.overhead
        assert parts[device.uuid] == (held if device.used is None else max(device.used, held))


def test_what_is_not_known_is_left_out() -> None:
    nothing = FrameworkSample(None, None, None, None)
    sample = Sample(5.0, (DeviceSample("GPU-0", 1 << 40, None, 7, None, None, 3, None, {"tensorflow": nothing}),))
    told = {one.metric.name: one for one in figures.figures(Scene(plan([{"tensorflow": 9}]), "1.0", sample))}
    assert told["memguard_framework_cap_bytes"].value == 9 and told["memguard_gpu_free_bytes"].value == 7
    unknown = ("framework_held", "framework_in_use", "framework_reclaimable", "gpu_used", "process_held")
    assert not {f"memguard_{name}_bytes" for name in (*unknown, "process_unaccounted")} & set(told)
    assert "memguard_refused_requests" not in told, "its allocator tells nobody"
    assert "memguard_framework_pressure_level" not in told and "memguard_sample_timestamp_seconds" not in told


def test_names_are_in_base_units_and_labels_are_few() -> None:
    for metric in EVERY:
        unit = metric.name.rpartition("_")[2]
        assert metric.name.startswith("memguard_") and not metric.name.endswith("_total")
        assert (unit == "bytes") is (metric.unit == "By"), metric
        assert set(metric.labels) <= {"gpu", "uuid", "framework", "kind", "name", "version"}
    assert len({metric.name for metric in EVERY}) == len(EVERY)
    otel_names = [one.name for one in otel.instruments()]
    assert len(set(otel_names)) == len(otel_names)


def test_every_kind_of_event_is_counted_by_its_name() -> None:
    text = (Event.__doc__ or "").partition("kind:")[2]
    assert all(f"{kind} (" in text or f"{kind}," in text or f"{kind}." in text for kind in KINDS)
    running = start(budget(None, metrics={"opentelemetry": True}))
    found = source.Source(api.current_session(), "train")
    for kind in (*KINDS, "of a later version"):
        found._counted(Event(0.0, kind, "x"))
    scene = found.scene()
    assert running.active and scene is not None and set(scene.events.values()) == {1}
    assert set(scene.events) == {*KINDS, "other"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/train.py", "train.py"), ("/x/pkg/__main__.py", "pkg"), ("-c", "python"), ("", "python"),
        ("my job.py", "my_job.py"), ("/x/" + "a" * 90, "a" * 64), ("/x/ä.py", "python"), ("__main__.py", "python"),
    ],
)  # fmt: skip
def test_the_job_is_called_as_its_script(path: str, name: str) -> None:
    assert source.script(path) == name


def test_the_labels_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.constant("train", False) == {"job_name": "train"}
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert source.constant("train", True) == {"job_name": "train", "rank": "11", "simulated": "true"}
    assert prometheus.local_rank(os.environ) == 3
    assert prometheus.local_rank({"LOCAL_RANK": "x", "SLURM_LOCALID": " 2 "}) == 2
    assert prometheus.local_rank({"LOCAL_RANK": "-1"}) == prometheus.local_rank({}) == 0


# Where it comes from


def test_a_scrape_tells_what_the_monitor_saw(port: int) -> None:
    guard = start(budget(port))
    torch, cupy = simulated(guard, "torch"), simulated(guard, "cupy")
    kept = torch.allocate(3 * GIB)
    torch.free(torch.allocate(512 * MIB))
    array = cupy.allocate(GIB)
    again()
    device = sampled(cupy=GIB).devices[0]
    series = read(get(port))
    own = {"job_name": "train", "simulated": "true", "uuid": device.uuid, "gpu": "0"}
    for name in ("torch", "cupy"):
        one, cap = device.frameworks[name], guard.plan.devices[0].caps[name]
        for what, size in zip(("held", "in_use", "reclaimable"), one, strict=False):
            assert value(series, f"memguard_framework_{what}_bytes", framework=name, **own) == size
        assert value(series, "memguard_framework_cap_bytes", framework=name) == cap
        assert value(series, "memguard_framework_pressure_level", framework=name) == 0
    assert value(series, "memguard_gpu_used_bytes") == device.used
    assert value(series, "memguard_gpu_free_bytes") == device.free
    assert value(series, "memguard_process_held_bytes") == device.process
    assert value(series, "memguard_process_limit_bytes") == 40 * GIB
    assert value(series, "memguard_process_overhead_bytes") == device.overhead
    assert value(series, "memguard_process_suspended_bytes") == 0
    assert value(series, "memguard_gpu_info", name="NVIDIA H200") == 1
    assert value(series, "memguard_info", version=memguard.__version__) == 1
    taken = value(series, "memguard_sample_timestamp_seconds")
    assert taken is not None and abs(time.time() - taken) < 60
    assert not any("pid" in dict(has) for _, has in series)
    assert torch.usage(host_of(guard).devices()[0]) and kept and array


def test_counters_of_what_was_refused_given_back_and_lent(port: int) -> None:
    guard = start(budget(port))
    cupy = simulated(guard, "cupy")
    simulated(guard, "torch").allocate(GIB)
    before = read(get(port))
    counters = ("refused_requests", "trims", "lends", "returned_bytes")
    for name in counters:
        for framework in ("torch", "cupy"):
            assert value(before, f"memguard_{name}_total", framework=framework) == 0
    with pytest.raises(Exception, match="out of memory"):
        cupy.allocate(11 * GIB)
    assert value(read(get(port)), "memguard_refused_requests_total", framework="cupy") == 1
    trimmed = value(read(get(port)), "memguard_trims_total", framework="torch")
    memguard.trim("torch")
    series = read(get(port))
    assert trimmed is not None and value(series, "memguard_trims_total", framework="torch") == trimmed + 1
    assert value(series, "memguard_refused_requests_total", framework="torch") == 0


def test_counters_of_lends(port: int) -> None:
    frameworks = {"cupy": {"min": "2GiB", "max": "20GiB"}, "pycuda": {"min": "2GiB", "max": "20GiB"}}
    guard = start(budget(port, frameworks=frameworks))
    one, other = simulated(guard, "cupy"), simulated(guard, "pycuda")
    kept = [one.allocate(GIB) for _ in range(12)]
    for block in kept:
        one.free(block)
    held = [other.allocate(GIB) for _ in range(18)]  # what the cache of the first has, too
    series = read(get(port))
    assert value(series, "memguard_lends_total", framework="pycuda")
    moved = guard.elastic.reclaimer.returned
    uuid = guard.plan.devices[0].device.uuid
    assert len(held) == 18
    assert value(series, "memguard_returned_bytes_total", framework="cupy") == moved["cupy", uuid]


def test_events_are_counted(port: int) -> None:
    start(budget(port))
    api.current_session().announce(Event(time.time(), "note", "a note"))
    series = read(get(port))
    assert value(series, "memguard_events_total", kind="note") == 1
    assert value(series, "memguard_events_total", kind="oom") == 0


def test_pressure_is_a_level(port: int) -> None:
    guard = start(budget(port))
    simulated(guard, "cupy").allocate(7 * GIB)
    again()
    series = read(get(port))
    assert value(series, "memguard_framework_pressure_level", framework="cupy") == 1
    assert value(series, "memguard_process_pressure_level") == 0


def test_a_scrape_asks_no_gpu_and_no_framework(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = start(budget(port))
    simulated(guard, "torch").allocate(GIB)
    again()
    before = read(get(port))

    def asked(*given: object, **more: object) -> Any:
        raise AssertionError("a scrape asked")

    for name in ("memory", "processes", "context_active", "devices", "libraries", "entries"):
        monkeypatch.setattr(type(guard.host), name, asked)
    for name in ("usage", "stats", "trim", "capturing", "drift"):
        monkeypatch.setattr(type(guard.frameworks["torch"]), name, asked)
    assert read(get(port)) == before


def test_a_scrape_waits_for_no_lock(port: int) -> None:
    """As while a driver hangs, with the guard's lock held, and the reader's."""
    guard = start(budget(port))
    sampled()
    taken, done = threading.Event(), threading.Event()

    def hang() -> None:
        with guard.caps.lock, guard.reader._locked._lock:
            taken.set()
            done.wait(20)

    thread = threading.Thread(target=hang)
    thread.start()
    taken.wait(5)
    try:
        assert value(read(get(port)), "memguard_framework_cap_bytes", framework="cupy") == 8 * GIB
    finally:
        done.set()
        thread.join()


def test_while_it_is_suspended(port: int) -> None:
    guard = start(budget(port))
    simulated(guard, "torch").allocate(3 * GIB)
    again()
    sampled(torch=3 * GIB)
    with memguard.suspended():
        off = suspension.now
        assert off is not None
        series = read(get(port))
        assert value(series, "memguard_process_suspended_bytes") == sum(off.bytes.values()) > 3 * GIB
        assert value(series, "memguard_framework_cap_bytes", framework="torch")
        gone = ("memguard_framework_held_bytes", "memguard_gpu_free_bytes", "memguard_framework_pressure_level")
        assert not [name for name, _ in series if name in gone]
        assert value(series, "memguard_events_total", kind="suspended") == 1
    again()
    series = read(get(port))
    assert value(series, "memguard_process_suspended_bytes") == 0
    assert value(series, "memguard_framework_held_bytes", framework="torch") == 3 * GIB


@pytest.mark.parametrize("why", ["fails", "old"])
def test_what_the_gpus_said_before_is_not_told_as_of_now(
    why: str, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard = start(budget(port))
    taken = sampled()
    monitor = api.current_session().monitor
    assert monitor is not None
    if why == "fails":
        monkeypatch.setattr(guard, "sample", lambda: 1 / 0)
        again()
    else:
        monitor._ring.append(taken._replace(time=taken.time - 3 * 3600 - 60))
    series = read(get(port))
    assert value(series, "memguard_gpu_free_bytes") is None
    assert value(series, "memguard_framework_held_bytes", framework="torch") is None
    last = monitor.last(0.0)[-1].time
    assert value(series, "memguard_sample_timestamp_seconds") == pytest.approx(last)
    assert value(series, "memguard_process_limit_bytes") == 40 * GIB


# Begin and end


def test_nothing_is_imported_unless_it_is_asked_for() -> None:
    code = """
        import sys, memguard
        B = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "monitor": {}}
        memguard.init(B, simulate="h200")
        names = ("prometheus_client", "opentelemetry", "memguard._node.metrics")
        assert not [name for name in sys.modules if name.startswith(names)]
        memguard.init({**B, "metrics": {"opentelemetry": True}}, simulate="h200", replace=True)
        assert "prometheus_client" not in sys.modules and "opentelemetry.sdk" not in sys.modules
        from opentelemetry import metrics
        assert "Proxy" in type(metrics.get_meter_provider()).__name__, "no provider was set"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT, timeout=60)


def test_it_ends_with_the_budget_and_begins_again(port: int) -> None:
    names = set(REGISTRY._names_to_collectors)
    for _ in range(2):
        with memguard.guard(budget(port), simulate="h200"):
            assert "memguard_info" in get(port)
            assert set(REGISTRY._names_to_collectors) == names, "the default registry is the program's"
        assert can_listen(port) and not session.event_callbacks
        with pytest.raises(urllib.error.URLError):
            get(port)
    start(budget(port))
    start(budget(port, device={"limit": "20GiB"}), replace=True)
    assert value(read(get(port)), "memguard_process_limit_bytes") == 20 * GIB


def test_a_guard_that_is_over_is_not_kept_alive(port: int) -> None:
    import weakref

    guard = weakref.ref(start(budget(port, metrics={"opentelemetry": True})))
    get(port)
    memguard.shutdown()
    gc.collect()
    assert guard() is None


def test_a_taken_port_is_an_error_with_its_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        path = tmp_path / "budget.yaml"
        path.write_text(f"version: 1\nframeworks: {{torch: {{share: 50%}}}}\nmetrics: {{prometheus: {port}}}\n")
        with pytest.raises(PlanError) as caught:
            start(path)
        assert f"budget.yaml:3:23: metrics.prometheus: port {port} of 127.0.0.1 is taken" in str(caught.value)
        assert f"sport = :{port}" in caught.value.problems[0].fix
        with pytest.raises(memguard.NotActive):
            memguard.ledger()


def test_a_budget_that_cannot_have_its_port_leaves_the_one_before(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        start(budget(port))
        with pytest.raises(PlanError, match="is taken"):
            start(budget(other.getsockname()[1]), replace=True)
    assert value(read(get(port)), "memguard_process_limit_bytes") == 40 * GIB


def test_each_rank_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    port = next(one for one in (free_port() for _ in range(50)) if one < 65000 and can_listen(one + 3))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "11")
    start(budget(port))
    assert value(read(get(port + 3)), "memguard_info", rank="11") == 1
    with pytest.raises(PlanError, match="port 65538 does not exist"):
        start(budget(65535), replace=True)


def test_a_local_rank_that_is_none_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert prometheus.local_rank({"LOCAL_RANK": "abc", "SLURM_LOCALID": "2"}) == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "LOCAL_RANK='abc' is no local rank" in record.getMessage()
    assert prometheus.local_rank({"LOCAL_RANK": "-1"}) == 0 and len(caplog.records) == 2
    assert prometheus.local_rank({"LOCAL_RANK": " ", "SLURM_LOCALID": "1"}) == 1 and len(caplog.records) == 2


@pytest.mark.parametrize(
    ("package", "metrics", "fix"),
    [
        ("prometheus_client", {"prometheus": 9477}, "pip install 'prometheus-client>=0.20'"),
        ("opentelemetry.metrics", {"opentelemetry": True}, "pip install 'opentelemetry-sdk>=1.25'"),
    ],
)
def test_a_missing_package_is_an_error_with_its_remedy(
    package: str, metrics: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PlanError, match="cannot be imported") as caught:
        start({**budget(None), "metrics": metrics})
    assert caught.value.problems[0].fix == fix
    assert caught.value.problems[0].path == f"metrics.{next(iter(metrics))}"


@pytest.mark.parametrize("where", ["bind", "listen", "thread", "opentelemetry"])
def test_what_fails_in_the_middle_is_undone(where: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(socket.socket):
        def bind(self, address: Any) -> None:
            if where == "bind":
                raise KeyboardInterrupt
            super().bind(address)

        def listen(self, backlog: int = 16) -> None:
            if where == "listen":
                raise OSError(12, "Cannot allocate memory")
            super().listen(backlog)

    def start_thread(self: threading.Thread) -> None:
        if where == "thread" and self.name == "memguard-metrics":
            raise RuntimeError("can't start new thread")
        begin(self)

    begin = threading.Thread.start
    if where in ("bind", "listen"):
        monkeypatch.setattr(server.socket, "socket", Broken)
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    if where == "opentelemetry":
        monkeypatch.setattr(otel, "instruments", lambda: 1 / 0)
    errors = {
        "bind": KeyboardInterrupt,
        "listen": PlanError,
        "thread": RuntimeError,
        "opentelemetry": ZeroDivisionError,
    }
    with pytest.raises(errors[where]):
        start(budget(port, metrics={"opentelemetry": True}))
    assert not server._live and not session.event_callbacks
    monkeypatch.undo()
    assert can_listen(port)


# A socket that was made and not yet kept is closed as garbage.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
def test_interrupted_anywhere_it_is_undone(port: int) -> None:
    """A Ctrl-C at points of `of_budget` and of its undoing, which the next `run` finishes."""
    start({**budget(None), "metrics": {"opentelemetry": True}})
    running = api.current_session()
    wanted = running.guard.budget.model_copy(
        update={"metrics": running.guard.budget.metrics.model_copy(update={"prometheus": port})}  # type: ignore[union-attr]
    )
    running.guard.budget, before = wanted, list(session.event_callbacks)
    (own,) = before

    def both(undo: Undo) -> None:
        _metrics.of_budget(running, undo)
        undo.run()

    whole = Points()
    whole.run(lambda: both(Undo()))
    assert whole.count > 100 and can_listen(port)
    for at in range(1, whole.count + 1, 3):
        undo, points = Undo(), Points(at)
        with contextlib.suppress(KeyboardInterrupt):
            points.run(lambda undo=undo: both(undo))
        undo.run()
        undo.run()
        assert undo.done and session.event_callbacks == [own] and not server._live, points.place
        until(lambda: not [one for one in threading.enumerate() if one.name == "memguard-metrics"])
        assert can_listen(port), points.place
    otel._source = None


def test_a_forked_child_serves_nobody_and_keeps_no_port(port: int) -> None:
    start(budget(port, metrics={"opentelemetry": True}))
    sampled()
    found, kept = otel._source, list(server._live)
    assert found is not None and kept
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        silent = found.scene() is None and not server._live
        for one in kept:
            one.end()  # as at the child's exit
        os.write(ready[1], b"y" if silent else b"n")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"y"
        assert "memguard_info" in get(port), "the parent goes on"
        memguard.shutdown()
        assert can_listen(port), "while the child lives"
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for one in (*ready, *go):
            os.close(one)


def test_the_exit_ends_it(port: int) -> None:
    start(budget(port))
    (end,) = [one.call for one in life.exits if getattr(one.call, "__self__", None).__class__ is server.Server]
    end()
    assert can_listen(port)


# HTTP


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        peer.sendall(request)
        found = b""
        while piece := peer.recv(65536):
            found += piece
        return found


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9477\r\n\r\n", 200), (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n", 200), (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:9477\r\n\r\n", 403),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 403),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405), (b"GET  HTTP/1.1\r\n\r\n", 404), (b"hello\r\n\r\n", 400),
        (b"\r\n\r\n", 400), (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_what_is_answered(request_: bytes, status: int) -> None:
    found, head, body, kind = server._checked(request_)
    assert (found, head) == (status, False) and (found == 200) is (body == b"") and kind


@given(st.binary(max_size=300))
def test_any_request_has_an_answer(request: bytes) -> None:
    assert server._checked(request)[0] in server._REASONS


def test_those_who_say_nothing_keep_nobody_from_the_figures(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few connections that stay open would otherwise outlast a scrape's time-out, one after the other."""
    monkeypatch.setattr(server, "PATIENCE", 60.0)
    with contextlib.ExitStack() as idle:
        start(budget(port))
        silent = [idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(5)]
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
        silent[4].sendall(b"GET /metrics HTTP/1.1\r\n")  # half a request
        silent += [idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(7)]
        assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert silent[0].recv(1) == b""  # the oldest went; those that came late may still ask
        silent[-1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.1 200"
        assert len(server._live[0]._peers) <= server.MOST
        (one,) = server._live
        memguard.shutdown()
        assert not one._peers and silent[-2].recv(1) == b""
        forked = server.Server(lambda: (b"", ""), port)
        forked.begin()
        try:
            silent = [idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(2)]
            until(lambda: len(forked._peers) == 2)
            if not (child := os.fork()):
                os._exit(len(forked._peers) + len(server._live))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and len(forked._peers) == 2
        finally:
            forked.end()


def test_over_a_socket(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start(budget(port))
    whole = ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and f"Content-Length: {len(body)}".encode() in head
    assert b"text/plain" in head and b"Access-Control" not in head
    alone = ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert alone.startswith(b"HTTP/1.1 200 OK") and alone.endswith(b"\r\n\r\n")
    (one,) = server._live
    assert one._socket is not None and one._socket.getsockname() == ("127.0.0.1", port)
    monkeypatch.setattr(one, "_page", lambda: 1 / 0)
    assert ask(port, b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500 ")
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(b"GET /met")
    assert ask(port, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404 ")


def test_who_says_nothing_keeps_nobody_waiting_for_long(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.1)
    start(budget(port))
    with socket.create_connection(("127.0.0.1", port)) as silent:
        begun = time.monotonic()
        silent.sendall(b"G")
        assert "memguard_info" in get(port)
        assert time.monotonic() - begun < 30


def test_the_end_does_not_wait_for_who_says_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 60.0)
    monkeypatch.setattr(server, "_JOIN", 60.0)
    start(budget(port))
    with socket.create_connection(("127.0.0.1", port)) as silent:
        until(lambda: server._live[0]._peers)
        begun = time.monotonic()
        memguard.shutdown()
        assert time.monotonic() - begun < 30 and can_listen(port)
        assert silent.recv(10) == b""


# OpenTelemetry


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The metrics of a program that has a MeterProvider."""
    import opentelemetry.metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    found = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[found], shutdown_on_exit=False)
    monkeypatch.setattr(opentelemetry.metrics, "get_meter", provider.get_meter)
    monkeypatch.setattr(otel, "_made", set())
    yield found
    provider.shutdown()


def observed(reader: Any) -> dict[str, list[tuple[dict[str, Any], float]]]:
    data = reader.get_metrics_data()
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            assert (scope.scope.name, scope.scope.version) == ("memguard", memguard.__version__)
            for metric in scope.metrics:
                found[metric.name] = [(dict(point.attributes), point.value) for point in metric.data.data_points]
    return found


def test_the_semantic_conventions(reader: Any) -> None:
    guard = start(budget(None, metrics={"opentelemetry": True}))
    simulated(guard, "torch").allocate(3 * GIB)
    again()
    device, seen = sampled().devices[0], observed(reader)
    ((attributes, size),) = seen["hw.gpu.memory.limit"]
    assert size == device.total and attributes == {
        "hw.id": device.uuid, "hw.name": "GPU 0", "hw.model": "NVIDIA H200", "hw.type": "gpu", "hw.vendor": "NVIDIA",
        "memguard.job": "train", "memguard.simulated": "true",
    }  # fmt: skip
    parts = {one["memguard.framework"]: size for one, size in seen["hw.gpu.memory.usage"]}
    assert parts["torch"] == 3 * GIB and parts["overhead"] == device.overhead
    assert sum(parts.values()) == device.used
    ((_, ratio),) = seen["hw.gpu.memory.utilization"]
    assert device.used is not None and ratio == pytest.approx(device.used / device.total)
    caps = {one["memguard.framework"]: size for one, size in seen["memguard.framework.cap"]}
    assert caps == guard.plan.devices[0].caps
    assert {one["memguard.event"] for one, _ in seen["memguard.events"]} == {*KINDS, "other"}
    memguard.shutdown()
    assert not any(observed(reader).values())


def test_a_second_budget_makes_no_instrument_twice(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, callback = [], otel._callback
    monkeypatch.setattr(otel, "_callback", lambda one: made.append(one.name) or callback(one))
    for limit in ("30GiB", "20GiB"):
        with memguard.guard(budget(None, device={"limit": limit}, metrics={"opentelemetry": True}), simulate="h200"):
            ((_, size),) = observed(reader)["memguard.process.limit"]
            assert size == int(limit[:2]) * GIB
    assert made == [one.name for one in otel.instruments()]


def test_a_provider_that_the_program_sets_later_gets_them() -> None:
    code = """
        import memguard, os
        B = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "metrics": {"opentelemetry": True}}
        memguard.init(B, simulate="h200")
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        reader = InMemoryMetricReader()
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
        def told():
            data = reader.get_metrics_data()
            return [m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        assert "memguard.framework.cap" in told(), told()
        child = os.fork()
        if child == 0:
            os._exit(len(told()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        memguard.shutdown()
        assert not told()
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, cwd=ROOT, timeout=60)


def test_figures_are_plain(port: int) -> None:
    start(budget(port))
    scene = source.Source(api.current_session(), None).scene()
    assert scene is not None and all(isinstance(one, Figure) for one in figures.figures(scene))
    assert isinstance(scene.levels, Mapping)


# What is written about it


def test_the_page_names_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(memguard_\w+)` \|(.*?)\|(.*?)\|", page, re.MULTILINE)
    conventions = {"memguard_framework_held_bytes": "usage", "memguard_gpu_used_bytes": "usage"}
    conventions["memguard_gpu_size_bytes"] = "limit"
    written = []
    for metric in EVERY:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        labels = [f"`{label}`" for label in metric.labels if label not in ("gpu", "uuid")]
        also = f"hw.gpu.memory.{conventions[metric.name]}" if metric.name in conventions else metric.otel
        written.append((name, ", ".join(labels), f"`{also}`" if also else ""))
    assert [(name, labels.strip(), also.strip()) for name, labels, also in rows] == written
    assert all(f"| `{one.name}` |" in page for one in otel.instruments()[:3])
    assert all(f"`{kind}`" in page for kind in (*KINDS, "other"))


def test_the_page_says_how_many_series_there_are_at_most() -> None:
    caps = {"torch": 1, "cupy": 2}
    one = {name: FrameworkSample(1, 1, 1, 1) for name in caps}
    devices = tuple(DeviceSample(uuid, 9, 9, 9, 9, 9, 9, 9, one) for uuid in UUIDS)
    levels = {(name, uuid): Pressure.OK for name in (None, *caps) for uuid in UUIDS}
    scene = Scene(plan([caps, caps]), "1", Sample(1.0, devices), 1.0, levels, frozenset(caps))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = re.search(r"GPUs × \((\d+) × frameworks \+ (\d+)\) \+ (\d+)", page)
    assert found is not None
    each, gpu, rest = map(int, found.groups())
    assert len(list(figures.figures(scene))) == 2 * (each * 2 + gpu) + rest


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Whether it is answered, a real Prometheus says: tests/engines."""
    dashboard = json.loads((ROOT / "docs" / "grafana" / "memguard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    asked = " ".join(one["expr"] for panel in panels for one in panel.get("targets", []))
    names = {f"{one.name}_total" if one.kind == "counter" else one.name for one in EVERY}
    assert set(re.findall(r"memguard_\w+", asked)) == names
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & places and at["x"] + at["w"] <= 24, panel["title"]
        places |= cells
        assert panel["type"] == "row" or (panel["description"] and panel["datasource"]["uid"] == "${datasource}")
