"""The budget file: what it means, and that every problem is named with its place and its fix."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from budget_texts import GOOD, METRICS, UUID, WATCHED, fw, problems
from click.testing import CliRunner
from jsonschema import Draft202012Validator

import memguard
from memguard import _budget
from memguard._base.findings import names
from memguard._base.units import GIB, MIB
from memguard._budget import (
    FRAMEWORKS,
    Budget,
    DeviceOverride,
    DoctorConfig,
    FrameworkBudget,
    MetricsConfig,
    MonitorConfig,
    SuspendConfig,
    from_mapping,
    json_schema,
    load,
    parse,
)
from memguard._budget.schema import MODELS
from memguard._frameworks.specs import SPECS
from memguard.cli.check import check
from memguard.cli.plan import plan
from memguard.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


# What a budget means


def test_the_least_budget_and_its_defaults() -> None:
    budget = parse(GOOD)
    assert budget.version == 1
    assert (budget.device.limit, budget.device.reserve) == (Fraction(9, 10), "auto")
    assert dict(budget.devices) == {}
    assert budget.on_busy == "warn"
    assert dict(budget.frameworks) == {"torch": MODELS["torch"](share=Fraction(1, 2), nccl=0)}


def test_the_sample_says_what_its_comments_say() -> None:
    budget = load(CONFIGS / "budget.yaml")
    assert (budget.device.limit, budget.device.reserve) == (Fraction(9, 10), "auto")
    assert list(budget.frameworks) == ["torch", "tensorflow", "pycuda"]
    assert budget.frameworks["torch"].share == Fraction(1, 2)
    assert budget.frameworks["tensorflow"].share == Fraction(1, 4)
    assert [f.growth for f in budget.frameworks.values()] == [None, True, None]
    assert [f.nccl for f in budget.frameworks.values()] == [0, None, None]
    assert budget.on_busy == "warn"
    assert budget.frameworks["pycuda"].limit == GIB
    assert budget.frameworks["pycuda"].share is None


def test_per_gpu_overrides_are_kept_in_one_spelling_and_in_file_order() -> None:
    text = f'devices:\n  "{UUID.upper()}": {{limit: 40GiB}}\n  0: {{limit: 50%}}\n  "NVIDIA A100*": {{reserve: 2GiB}}\n'
    assert dict(parse(GOOD + text).devices) == {
        UUID: DeviceOverride(limit=40 * GIB),
        "0": DeviceOverride(limit=Fraction(1, 2)),
        "NVIDIA A100*": DeviceOverride(reserve=2 * GIB),
    }
    assert list(parse(GOOD + text).devices) == [UUID, "0", "NVIDIA A100*"]


def test_growth_is_true_by_default() -> None:
    assert parse(fw("tensorflow: {share: 25%}")).frameworks["tensorflow"].growth is True
    assert parse(fw("tensorflow: {share: 25%, growth: false}")).frameworks["tensorflow"].growth is False


def test_all_six_frameworks_may_be_named_and_only_their_own_settings_are_set() -> None:
    budget = parse(fw("\n".join(f"{name}: {{limit: 1GiB}}" for name in FRAMEWORKS)))
    assert list(budget.frameworks) == ["torch", "tensorflow", "cupy", "jax", "pycuda", "numba"] == list(FRAMEWORKS)
    settings = {name: (f.growth, f.nccl) for name, f in budget.frameworks.items()}
    assert settings.pop("torch") == (None, 0)
    assert settings.pop("tensorflow") == (True, None)
    assert set(settings.values()) == {(None, None)}


@pytest.mark.parametrize(("written", "meant"), [("0", 0), ("1", 1), ("+1", 1), ("64", 64)])
def test_nccl_is_0_by_default(written: str, meant: int) -> None:
    assert parse(GOOD).frameworks["torch"].nccl == 0
    assert parse(fw(f"torch: {{share: 50%, nccl: {written}}}")).frameworks["torch"].nccl == meant


@pytest.mark.parametrize("written", ["primary", "own", "'own'"])
def test_pycudas_context_is_the_primary_one_by_default(written: str) -> None:
    assert parse(fw("pycuda: {share: 5%}")).frameworks["pycuda"].context == "primary"
    assert parse(fw(f"pycuda: {{share: 5%, context: {written}}}")).frameworks["pycuda"].context == written.strip("'")
    assert parse(GOOD).frameworks["torch"].context is None, "another framework has no such setting"


def test_a_busy_gpu_is_a_warning_by_default() -> None:
    assert parse(GOOD + "on_busy: warn").on_busy == parse(GOOD).on_busy == "warn"
    assert parse(GOOD + "on_busy: raise").on_busy == parse(GOOD + "on_busy: 'raise'").on_busy == "raise"


def test_there_is_no_monitor_by_default() -> None:
    assert parse(GOOD).monitor is None
    assert parse(GOOD).on_pressure == parse(GOOD + "on_pressure: []").on_pressure == ()
    assert parse(WATCHED).monitor == MonitorConfig()
    default = MonitorConfig()
    assert (default.interval, default.forecast) == (0.5, 20.0)
    assert (default.warn, default.critical) == (Fraction(85, 100), Fraction(95, 100))
    assert (default.timeline, default.timeline_size, default.top) == (None, 64 * MIB, False)


def test_every_key_of_the_monitor() -> None:
    text = "monitor: {interval: 2s, warn: 60%, critical: 80.5%, forecast: 1min, timeline: a.jsonl, timeline_size: 1MiB"
    text += ", top: true}"
    budget = parse(GOOD + text + "\non_pressure: [trim, raise]")
    assert budget.monitor == MonitorConfig(
        interval=2.0,
        warn=Fraction(6, 10),
        critical=Fraction(805, 1000),
        forecast=60.0,
        timeline="a.jsonl",
        timeline_size=MIB,
        top=True,
    )
    assert budget.on_pressure == ("trim", "raise")


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("50ms", 0.05), ("500ms", 0.5), ("500 MS", 0.5), ("0.5", 0.5), ("'0.5'", 0.5), ("1", 1.0), ("2s", 2.0),
        ("1.5s", 1.5), ("90s", 90.0), ("5min", 300.0), ("1h", 3600.0), ("3600", 3600.0), ("'2 s'", 2.0),
    ],
)  # fmt: skip
def test_intervals(written: str, seconds: float) -> None:
    monitor = parse(GOOD + f"monitor: {{interval: {written}}}").monitor
    assert monitor is not None and monitor.interval == seconds
    assert Draft202012Validator(json_schema()).is_valid(plain(GOOD + f"monitor: {{interval: {written}}}"))


@pytest.mark.parametrize("written", ["0", "0s", "0.0", "'0'"])
def test_a_forecast_of_0_is_none(written: str) -> None:
    monitor = parse(GOOD + f"monitor: {{forecast: {written}}}").monitor
    assert monitor is not None and monitor.forecast == 0
    assert Draft202012Validator(json_schema()).is_valid(plain(GOOD + f"monitor: {{forecast: {written}}}"))


def test_when_a_process_may_leave_its_gpus() -> None:
    assert parse(GOOD).suspend is parse(GOOD + "suspend: {}").suspend is None
    assert parse(GOOD + "suspend: {by_others: false, host_memory: check}").suspend is None
    budget = parse(GOOD + "suspend: {when_idle: 10min}")
    assert budget.suspend == SuspendConfig(when_idle=600.0, by_others=False, host_memory="check")
    assert budget.model_dump(exclude_none=True)["suspend"] == {
        "when_idle": "10min",
        "by_others": False,
        "host_memory": "check",
    }


@pytest.mark.parametrize(("written", "seconds"), [("1s", 1.0), ("2", 2.0), ("1.5h", 5400.0), ("168h", 604800.0)])
def test_how_long_idle_is(written: str, seconds: float) -> None:
    suspend = parse(GOOD + f"suspend: {{when_idle: {written}}}").suspend
    assert suspend is not None and suspend.when_idle == seconds
    assert Draft202012Validator(json_schema()).is_valid(plain(GOOD + f"suspend: {{when_idle: {written}}}"))


def test_who_gets_metrics() -> None:
    assert parse(GOOD).metrics is None
    budget = parse(GOOD + "metrics: {prometheus: 9477, job: train/a-1}")
    assert budget.metrics == MetricsConfig(prometheus=9477, opentelemetry=False, job="train/a-1")
    assert budget.monitor == MonitorConfig(), "whose figures they are"
    assert budget.model_dump(exclude_none=True)["metrics"] == {
        "prometheus": 9477,
        "opentelemetry": False,
        "job": "train/a-1",
    }
    assert parse(GOOD + "monitor: {interval: 1s}\nmetrics: {opentelemetry: true}").monitor == MonitorConfig(
        interval=1.0
    )


def test_the_findings_that_the_doctor_ignores() -> None:
    assert parse(GOOD).doctor is None
    assert parse(GOOD + "doctor: {}").doctor is parse(GOOD + "doctor: {ignore: []}").doctor is None
    budget = parse(GOOD + "doctor: {ignore: [preallocation, driver-minor-version]}")
    assert budget.doctor == DoctorConfig(ignore=("driver-minor-version", "preallocation"))
    assert budget.model_dump(exclude_none=True)["doctor"] == {"ignore": ["driver-minor-version", "preallocation"]}


def test_what_a_budget_for_ranks_does_not_say_stays_unsaid() -> None:
    """`nccl: 0` and none are the same for one process, and not in a rank, whose reserve has room for one then."""
    unsaid, said = parse(GOOD + "ranks: auto"), parse(fw("torch: {share: 50%, nccl: 0}") + "ranks: auto")
    assert unsaid.frameworks["torch"].nccl is None and said.frameworks["torch"].nccl == 0 and unsaid != said
    assert parse(GOOD).frameworks["torch"].nccl == 0
    assert unsaid.model_dump()["frameworks"]["torch"]["nccl"] is None, "without a warning of pydantic"
    for budget in (unsaid, said):
        assert from_mapping(budget.model_dump(mode="json", exclude_none=True)) == budget


def test_equal_means_the_same_budget_however_written() -> None:
    one = parse("version: 1\nframeworks: {torch: {limit: 1GiB}, tensorflow: {share: 50%}}")
    two = parse("frameworks:\n  tensorflow: {growth: true, share: '50.0 %'}\n  torch: {limit: 1024 mib}\nversion: 1\n"
                "device: {limit: 90%, reserve: auto}\ndevices: {}\non_busy: warn")  # fmt: skip
    assert one == two
    assert hash(one) == hash(two)
    assert one != parse("version: 1\nframeworks: {torch: {limit: 1GiB}, tensorflow: {share: 50%, growth: false}}")


@pytest.mark.parametrize(
    ("left_out", "written", "another"),
    [
        (GOOD, GOOD + "on_busy: warn", GOOD + "on_busy: raise"),
        (GOOD + "ranks: auto", GOOD + "ranks: 'auto'", GOOD + "ranks: {per_gpu: 2}"),
        (GOOD + "ranks: {per_gpu: 1}", GOOD + "ranks:\n  per_gpu: 1", GOOD),
        (GOOD, fw("torch: {share: 50%, nccl: 0}"), fw("torch: {share: 50%, nccl: 1}")),
        (
            fw("pycuda: {share: 5%}"),
            fw("pycuda: {share: 5%, context: primary}"),
            fw("pycuda: {share: 5%, context: own}"),
        ),
        (GOOD, GOOD, fw("numba: {share: 50%}")),
        (GOOD, GOOD, WATCHED),
        (WATCHED, GOOD + "monitor: {interval: 0.5, forecast: 20}", GOOD + "monitor: {interval: 1}"),
        (WATCHED, GOOD + "monitor: {warn: 85.0%}", GOOD + "monitor: {warn: 80%}"),
        (WATCHED, GOOD + "monitor: {critical: 95%}", GOOD + "monitor: {critical: 100%}"),
        (WATCHED, GOOD + "monitor: {forecast: 20s}", GOOD + "monitor: {forecast: 0}"),
        (WATCHED, WATCHED, GOOD + "monitor: {timeline: a.jsonl}"),
        (WATCHED, GOOD + "monitor: {timeline_size: 64MiB}", GOOD + "monitor: {timeline_size: 1MiB}"),
        (WATCHED, GOOD + "monitor: {top: false}", GOOD + "monitor: {top: true}"),
        (WATCHED, WATCHED + "on_pressure: []", WATCHED + "on_pressure: [trim]"),
        (GOOD, GOOD + "doctor: {ignore: []}", GOOD + "doctor: {ignore: [mig]}"),
        (
            GOOD + "doctor: {ignore: [mig, wsl]}",
            GOOD + "doctor: {ignore: [wsl, mig]}",
            GOOD + "doctor: {ignore: [wsl]}",
        ),
        (GOOD + "suspend: {when_idle: 60}", GOOD + "suspend: {when_idle: 1min}", GOOD + "suspend: {when_idle: 1h}"),
        (GOOD, GOOD + "suspend: {by_others: false}", GOOD + "suspend: {by_others: true}"),
        (GOOD, GOOD + "suspend: {host_memory: check}", GOOD + "suspend: {host_memory: ignore}"),
        (METRICS, GOOD + "monitor: {}\nmetrics: {prometheus: 9477}", GOOD + "metrics: {prometheus: 9478}"),
        (METRICS, METRICS[:-1] + ", opentelemetry: false}", METRICS[:-1] + ", opentelemetry: true}"),
        (METRICS, METRICS, METRICS[:-1] + ", job: train}"),
        (GOOD, GOOD + "device: {lease: false}", GOOD + "device: {lease: true}"),
        (
            GOOD + "device: {lease: true}",
            GOOD + "device: {lease: true, wait: 0}",
            GOOD + "device: {lease: true, wait: 10min}",
        ),
        (
            GOOD + "device: {lease: true, wait: 1h}",
            GOOD + "device: {lease: true, wait: 1h, on_wait: wait}",
            GOOD + "device: {lease: true, wait: 1h, on_wait: suspend-idle}",
        ),
        (
            GOOD,
            GOOD + "suspend: {by_others: false}",
            GOOD + "suspend: {on_demand: 1min}",
        ),
    ],
    ids=[
        "on_busy",
        "ranks",
        "per_gpu",
        "nccl",
        "context",
        "framework",
        "monitor",
        "interval",
        "warn",
        "critical",
        "forecast",
        "timeline",
        "timeline_size",
        "top",
        "on_pressure",
        "doctor",
        "ignore",
        "when_idle",
        "by_others",
        "host_memory",
        "prometheus",
        "opentelemetry",
        "job",
        "lease",
        "wait",
        "on_wait",
        "on_demand",
    ],
)
def test_equality_hash_and_pickle_know_every_key(left_out: str, written: str, another: str) -> None:
    one, same, other = parse(left_out), parse(written), parse(another)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert hash(one) != hash(other)
    for budget in (one, other):
        again = pickle.loads(pickle.dumps(budget))
        assert again == budget
        assert hash(again) == hash(budget)
        assert from_mapping(budget.model_dump(exclude_none=True)) == budget
        assert from_mapping(budget.model_dump(mode="json", exclude_none=True)) == budget


def test_a_dump_says_what_a_file_would_say() -> None:
    text = fw("torch: {limit: 4GiB, nccl: 2}\njax: {share: 12.5%}") + "on_busy: raise"
    assert parse(text).model_dump(exclude_none=True) == {
        "version": 1,
        "device": {"limit": "90%", "reserve": "auto", "lease": False, "on_wait": "wait"},
        "devices": {},
        "frameworks": {"torch": {"limit": "4GiB", "nccl": 2}, "jax": {"share": "12.5%"}},
        "strategy": "caps",
        "on_busy": "raise",
        "on_pressure": [],
    }
    text = GOOD + "monitor: {interval: 0.25, forecast: 0, warn: 70%, timeline_size: 2MiB}\non_pressure: [raise, trim]"
    dumped = parse(text).model_dump(exclude_none=True)
    assert dumped["monitor"] == {
        "interval": "250ms",
        "warn": "70%",
        "critical": "95%",
        "forecast": "0s",
        "timeline_size": "2MiB",
        "top": False,
    }
    assert dumped["on_pressure"] == ["raise", "trim"]


def test_a_budget_cannot_be_changed_and_survives_pickling() -> None:
    budget = load(CONFIGS / "several-gpus.yaml")
    with pytest.raises(ValueError, match="frozen"):
        budget.version = 2
    with pytest.raises(TypeError):
        budget.frameworks["torch"] = FrameworkBudget(limit=GIB)  # type: ignore[index]
    assert pickle.loads(pickle.dumps(budget)) == budget


@pytest.mark.filterwarnings("error")
def test_a_dumped_budget_is_read_back() -> None:
    odd = from_mapping({"version": 1, "frameworks": {"pycuda": {"limit": (2 << 20) + 1}}})
    for budget in [odd, *map(load, CONFIGS.glob("*.yaml"))]:
        assert from_mapping(budget.model_dump(exclude_none=True)) == budget


def test_a_mapping_and_a_file_mean_the_same() -> None:
    data = {
        "version": 1,
        "device": {"limit": 40 * GIB},
        "devices": {0: {"limit": Fraction(1, 2)}},
        "frameworks": {"torch": {"share": "50%"}, "pycuda": {"limit": 512 * MIB}},
    }
    text = "version: 1\ndevice: {limit: 40GiB}\ndevices: {0: {limit: 50%}}\n"
    assert from_mapping(data) == parse(text + "frameworks: {torch: {share: 50%}, pycuda: {limit: 512MiB}}")


ROW = """
from memguard._base.framework_spec import FrameworkSpec, Option

SPEC = FrameworkSpec(
    name="toy", title="Toy", module="toy", adapter="toy:Toy", modules=0, workspace=0, cap_is="", allocator="pool",
    aliases=("toybox",),
    options=(
        Option(name="lazy", kind="flag", default=False, description="Lazy or not.", elsewhere="{name} is not lazy"),
        Option(name="streams", kind="count", default=2, most=8, description="How many streams.",
               elsewhere="it counts Toy's streams", aliases=("lanes",)),
        Option(name="mode", kind="word", default="near", words=("near", "far"), synonyms={"close": "near"},
               description="Near or far.", elsewhere="{name} has no mode"),
    ),
)
"""
SEVENTH = """
import json, pickle
from memguard import _budget
from memguard.errors import ConfigError

budget = _budget.parse("version: 1\\nframeworks: {toy: {share: 5%, streams: 3}}")
toy = budget.frameworks["toy"]
assert (toy.lazy, toy.streams, toy.mode) == (False, 3, "near")
assert pickle.loads(pickle.dumps(budget)) == _budget.from_mapping(budget.model_dump(exclude_none=True)) == budget
assert _budget.parse("version: 1\\nframeworks: {torch: {share: 5%}}").frameworks["torch"].streams is None
try:
    _budget.parse(open(0).read(), "b.yaml")
except ConfigError as error:
    problems = [(problem.path, problem.message, problem.fix) for problem in error.problems]
print(json.dumps([problems, _budget.json_schema()]))
"""


def test_a_row_is_enough_for_a_framework_and_its_options(tmp_path: Path) -> None:
    shutil.copytree(
        Path(_budget.__file__).parents[1], tmp_path / "memguard", ignore=shutil.ignore_patterns("__pycache__")
    )
    folder = tmp_path / "memguard" / "_frameworks" / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "spec.py").write_text(ROW)
    twice = "did you mean 'streams'? It is there too: keep one of them"
    wrong = "toybox: {share: 1%}\ntoy: {share: 1%, lazy: yes, streams: 9, mode: close, sterams: 1, lanes: 1}\n"
    run = subprocess.run(
        [sys.executable, "-c", SEVENTH],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        input=fw(wrong + "torch: {share: 1%, streams: 1}") + "mode: far",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    problems, schema = json.loads(run.stdout)
    choice = "allowed: share, limit, min, max, lazy, streams, mode"
    assert [tuple(problem) for problem in problems] == [
        (
            "frameworks.toybox",
            f"unknown framework 'toybox'; allowed: {', '.join(FRAMEWORKS)}, toy",
            "did you mean 'toy'? It is there too: keep one of them",
        ),
        ("frameworks.toy.lazy", "lazy is true or false, found 'yes'", "write 'true'"),
        ("frameworks.toy.streams", "streams is a whole number from 0 to 8, found 9", "write '2'"),
        ("frameworks.toy.mode", "mode is near or far, found 'close'", "write 'near'"),
        (
            "frameworks.toy.sterams",
            f"unknown key 'sterams'; {choice}",
            "did you mean 'streams'? It is there too: keep one of them",
        ),
        ("frameworks.toy.lanes", f"unknown key 'lanes'; {choice}", twice),
        ("frameworks.torch.streams", "streams is a setting of toy; it counts Toy's streams", "remove it"),
        ("mode", "unknown key 'mode' here; allowed: " + ", ".join(Budget.model_fields), "move it below 'toy:'"),
    ]
    valid = Draft202012Validator(schema).is_valid
    for written, right in [
        ({"lazy": True, "streams": 8, "mode": "far"}, True),
        ({"lazy": "yes"}, False), ({"streams": 9}, False), ({"mode": "close"}, False), ({"limit": "1GiB"}, False),
    ]:  # fmt: skip
        assert valid({"version": 1, "frameworks": {"toy": {"share": "5%", **written}}}) is right


def test_importing_builds_no_model_and_python_values_need_no_yaml() -> None:
    script = """
import sys
from collections import Counter
from collections.abc import Callable
from memguard import _budget
models = [_budget.Budget, _budget.DeviceBudget, _budget.FrameworkBudget, _budget.MonitorConfig, _budget.DoctorConfig]
assert not any(model.__pydantic_complete__ for model in models)
_budget.from_mapping({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
assert _budget.Budget.__pydantic_complete__ and "yaml" not in sys.modules
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(_budget.__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


ONCE = """\
version: 1
device: {limit: 120GiB, reserve: 4GiB}
devices: {'cuda:0': {limit: 100GiB}}
frameworks:
  torch: {min: 10%, max: 50%}
  tensorflow: {limit: 8GiB}
  jax: {share: 10%}
monitor: {interval: 1s, warn: 80%, critical: 90%, forecast: 20s, timeline_size: 8MiB}
"""
"""Five sizes, five percentages, two durations, and no default that is written as text."""


@pytest.mark.parametrize("read", [lambda: parse(ONCE), lambda: from_mapping(plain(ONCE))], ids=["text", "mapping"])
def test_each_value_is_read_once(read: Callable[[], Budget]) -> None:
    parsers = ("parse_size", "parse_percent", "parse_duration")
    assert read() == parse(ONCE)  # builds the models
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("memguard._"):
            calls[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        read()
    finally:
        sys.setprofile(before)
    assert [calls[name] for name in parsers] == [5, 5, 2]


def test_lines_are_known_for_problems_that_are_found_later() -> None:
    for budget in (parse(ONCE), pickle.loads(pickle.dumps(parse(ONCE))), parse(ONCE).model_copy()):
        problem = budget.problem(("devices", "0", "limit"), "is odd", "change it")
        assert (problem.line, problem.column, problem.path) == (3, 29, "devices['0'].limit")
        assert budget.problem(("frameworks", "jax", "min"), "is odd", "change it").line == 7
    assert from_mapping(plain(ONCE)).problem(("device",), "is odd", "change it").line is None


def test_building_the_models_looks_up_no_signature_for_each_field() -> None:
    """pydantic inspects what a field's validators and serializers are made of, unless the field says it itself.

    74 signatures took two thirds of the time; 7 are left, 19 with pydantic 2.7.
    """
    script = """
import inspect
from memguard import _budget
asked, before = [], inspect.Signature.from_callable.__func__
def from_callable(cls, called, **more):
    asked.append(called)
    return before(cls, called, **more)
inspect.Signature.from_callable = classmethod(from_callable)
parts = {name: {"share": "10%"} for name in _budget.FRAMEWORKS}
_budget.from_mapping({"version": 1, "frameworks": parts, "monitor": {}, "doctor": {"ignore": ["mig"]}})
assert 0 < len(asked) <= 25, asked
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(_budget.__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


# The sample files, the schema and the commands


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_sample_is_a_budget_and_passes_the_schema(path: Path) -> None:
    assert isinstance(load(path), Budget)
    Draft202012Validator(json_schema()).validate(plain(path.read_text()))
    result = CliRunner().invoke(check, [str(path)])
    assert result.exit_code == 0
    assert result.output.startswith(f"{path}: ok\n")
    assert len(result.output.splitlines()) < 20


def resolved(entry: dict[str, Any]) -> dict[str, Any]:
    """What a property of the schema refers to, with what it says itself."""
    reference = entry.get("allOf", [entry])[0]["$ref"]  # the first for pydantic before 2.9
    definition: dict[str, Any] = json_schema()["$defs"][reference.rpartition("/")[2]]
    return definition | entry


def plain(text: str) -> Any:
    from memguard._base.yaml import read

    return read(text).data


@pytest.mark.parametrize(
    "text",
    [
        "version: 2\nframeworks: {torch: {share: 1%}}",
        "version: 1",
        "version: 1\nframeworks: {}",
        "version: 1\nframeworks: {mxnet: {share: 1%}}",
        GOOD + "foo: 1",
        GOOD + "device: {limits: 1}",
        GOOD + "device: {limit: 5GB}",
        GOOD + "device: {limit: 120%}",
        GOOD + "device: {limit: 0%}",
        GOOD + "device: {limit: 90}",
        GOOD + "device: {reserve: 5%}",
        GOOD + "device: {reserve: 017777777}",
        GOOD + "devices: {GPU-12: {limit: 5%}}",
        GOOD + "devices: {-1: {limit: 5%}}",
        GOOD + "devices: {'cuda:01': {limit: 5%}}",
        GOOD + "devices: {0: {share: 5%}}",
        fw("torch: {}"),
        fw("torch: {share: 50}"),
        fw("torch: {share: 100.5%}"),
        fw("torch: {share: 5GiB}"),
        fw("torch: {limit: 5%}"),
        fw("torch: {limit: 512}"),
        fw("torch: {share: 5%, limit: 1GiB}"),
        fw("torch: {share: 5%, growth: true}"),
        fw("tensorflow: {share: 5%, growth: yes}"),
        fw("tensorflow: {share: 5%, nccl: 1}"),
        fw("numba: {share: 5%, nccl: 1}"),
        fw("jax: {share: 5%, growth: true}"),
        fw("torch: {share: 5%, nccl: true}"),
        fw("torch: {share: 5%, nccl: -1}"),
        fw("torch: {share: 5%, nccl: 65}"),
        fw("torch: {share: 5%, nccl: '1'}"),
        fw("torch: {share: 5%, nccl: 1.5}"),
        fw("torch: {share: 5%, nccl: }"),
        fw("torch: {nccl: 1}"),
        fw("torch: {share: 5%, context: own}"),
        fw("pycuda: {share: 5%, context: Own}"),
        fw("pycuda: {share: 5%, context: true}"),
        fw("pycuda: {share: 5%, context: }"),
        fw("pycuda: {context: own}"),
        GOOD + "on_busy: ignore",
        GOOD + "on_busy: RAISE",
        GOOD + "on_busy: true",
        GOOD + "on_busy:",
        GOOD + "monitor:",
        GOOD + "monitor: on",
        GOOD + "monitor: {intervall: 1s}",
        GOOD + "monitor: {interval: 0}",
        GOOD + "monitor: {interval: 5us}",
        GOOD + "monitor: {interval: 5000}",
        GOOD + "monitor: {warn: 85}",
        GOOD + "monitor: {critical: 101%}",
        GOOD + "monitor: {forecast: off}",
        GOOD + "monitor: {timeline: runs/}",
        GOOD + "monitor: {timeline: ''}",
        GOOD + "monitor: {timeline: ~/a}",
        GOOD + "monitor: {timeline: $HOME/a}",
        GOOD + "monitor: {timeline: '{host}'}",
        GOOD + "monitor: {timeline: 5}",
        GOOD + "monitor: {timeline_size: 5}",
        GOOD + "monitor: {top: yes}",
        GOOD + "monitor: {top: 1}",
        GOOD + "on_pressure: [trim]",
        WATCHED + "on_pressure: trim",
        WATCHED + "on_pressure: [warn]",
        WATCHED + "on_pressure: [trim, trim]",
        GOOD + "doctor:",
        GOOD + "doctor: off",
        GOOD + "suspend:",
        GOOD + "suspend: on",
        GOOD + "suspend: {idle: 1s}",
        GOOD + "suspend: {when_idle: 0}",
        GOOD + "suspend: {when_idle: never}",
        GOOD + "suspend: {when_idle: 700000}",
        GOOD + "suspend: {by_others: yes}",
        GOOD + "suspend: {host_memory: false}",
        GOOD + "device: {lease: yes}",
        GOOD + "device: {lease: 1}",
        GOOD + "device: {wait: 10min}",
        GOOD + "device: {lease: false, wait: 10min}",
        GOOD + "device: {lease: true, wait: 8d}",
        GOOD + "device: {lease: true, wait: forever}",
        GOOD + "devices: {0: {lease: true}}",
        GOOD + "device: {on_wait: suspend-idle}",
        GOOD + "device: {on_wait: suspend-idle, wait: 10min}",
        GOOD + "device: {lease: true, on_wait: suspend-idle}",
        GOOD + "device: {lease: true, wait: 10min, on_wait: suspend}",
        GOOD + "suspend: {by_others: true, on_demand: 0}",
        GOOD + "metrics: {}",
        GOOD + "metrics: {job: train}",
        GOOD + "metrics: {prometheus: 80}",
        GOOD + "metrics: {prometheus: 65536}",
        GOOD + "metrics: {prometheus: '9477'}",
        GOOD + "metrics: {prometheus: true}",
        GOOD + "metrics: {prometheus: 9477, job: a b}",
        GOOD + "metrics: {prometheus: 9477, job: 17}",
        GOOD + "metrics: {opentelemetry: yes}",
        GOOD + "doctor: {ignored: []}",
        GOOD + "doctor: {ignore: }",
        GOOD + "doctor: {ignore: mig}",
        GOOD + "doctor: {ignore: [MIG]}",
        GOOD + "doctor: {ignore: [gpu]}",
        GOOD + "doctor: {ignore: [mig, mig]}",
    ],
)
def test_the_schema_refuses_what_the_parser_refuses(text: str) -> None:
    assert problems(text)
    assert not Draft202012Validator(json_schema()).is_valid(plain(text))


def test_the_schema_is_a_schema_and_names_what_the_models_name() -> None:
    Draft202012Validator.check_schema(json_schema())
    properties = json_schema()["properties"]
    assert set(properties) == set(Budget.model_fields)
    assert tuple(properties["frameworks"]["properties"]) == FRAMEWORKS
    frameworks = {name: resolved(entry) for name, entry in properties["frameworks"]["properties"].items()}
    for name, spec in SPECS.items():
        amounts = ["share", "limit", "min", "max"]
        assert list(frameworks[name]["properties"]) == [*amounts, *(option.name for option in spec.options)]
        assert spec.title in frameworks[name]["description"]
        for option in spec.options:
            written = frameworks[name]["properties"][option.name]
            assert (written["default"], written["description"]) == (option.default, option.description)
    assert set(resolved(properties["device"])["properties"]) == {
        *DeviceOverride.model_fields, "lease", "wait", "on_wait",
    }  # fmt: skip
    monitor = resolved(properties["monitor"])["properties"]
    assert set(monitor) == set(MonitorConfig.model_fields)
    ignore = resolved(properties["doctor"])["properties"]["ignore"]
    assert ignore["items"]["enum"] == list(names())
    assert ignore["default"] == list(DoctorConfig().ignore)
    suspend = resolved(properties["suspend"])["properties"]
    assert list(suspend) == list(SuspendConfig.model_fields)
    dumped = MonitorConfig().model_dump(exclude_none=True)
    assert {key: entry["default"] for key, entry in monitor.items() if "default" in entry} == dumped
    least = parse(GOOD)
    assert properties["on_pressure"]["default"] == list(least.on_pressure)
    assert properties["on_busy"]["default"] == least.on_busy
    json_schema()["properties"].clear()
    assert json_schema()["properties"]


def test_the_commands() -> None:
    assert json.loads(CliRunner().invoke(check, ["--schema"]).output) == json_schema()
    output = CliRunner().invoke(check, [str(CONFIGS / "several-gpus.yaml")]).output
    assert f"{UUID}: limit 40GiB" in output
    assert "GPU 0: limit 50% of what CUDA can give" in output
    assert "'NVIDIA A100*': reserve 2GiB" in output
    assert "unallocated  10% of (limit − reserve)" in output
    assert "monitor" not in output
    output = CliRunner().invoke(check, [str(CONFIGS / "budget.yaml")]).output
    assert "tensorflow   25% of (limit − reserve), growth: true\n" in output
    negative = "; init fails on a GPU where that is negative\n"
    assert f"unallocated  25% of (limit − reserve) − 1GiB{negative}" in output
    wrong = CliRunner().invoke(check, ["absent.yaml"])
    assert wrong.exit_code == 2 and "absent.yaml: there is no such file\n    fix: " in wrong.output


def test_what_is_unallocated_may_be_less_than_nothing_on_a_small_gpu(tmp_path: Path) -> None:
    def said(text: str) -> str:
        (tmp_path / "b.yaml").write_text(text)
        return CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output

    sizes = fw("torch: {limit: 20GiB}\ncupy: {limit: 3074MiB}")
    assert "  unallocated  (limit − reserve) − 23554MiB; init fails on a GPU where that is negative\n" in said(sizes)
    memguard.init(parse(sizes), simulate="h200")
    with pytest.raises(memguard.PlanError):
        memguard.init(parse(sizes), simulate="t4", replace=True)
    memguard.shutdown()
    known = "device: {limit: 8GiB, reserve: 1GiB}\n"
    assert "  unallocated  (limit − reserve) − 5GiB\n" in said(known + fw("torch: {limit: 5GiB}"))


def test_the_commands_show_that_pycuda_has_contexts_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "budget.yaml"

    def said(text: str) -> list[str]:
        file.write_text(text)
        outputs = [CliRunner().invoke(check, [str(file)]).output]
        outputs.append(CliRunner().invoke(plan, [str(file), "--device", "h200"]).output)
        return [" ".join(output.split()) for output in outputs]

    checked, planned = said(fw("pycuda: {limit: 1GiB, context: own}"))
    assert "pycuda 1GiB, context: own unallocated" in checked
    assert "auto: context and library workspaces, a second context limit" in planned.replace(" unallocated", " limit")
    checked, planned = said(fw("pycuda: {limit: 1GiB}"))
    assert "pycuda 1GiB, context: primary unallocated" in checked and "context and library workspaces" in planned
    assert "second context" not in planned


def test_check_warns_if_the_timeline_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(timeline: str) -> str:
        (tmp_path / "b.yaml").write_text(f"version: 1\nframeworks: {{torch: {{share: 50%}}}}\nmonitor: {timeline}\n")
        run = CliRunner().invoke(check, [str(tmp_path / "b.yaml")])
        assert run.exit_code == 0 and "b.yaml: ok" in run.output
        return run.output

    warning = f"  warning      the timeline's folder {tmp_path}/logs %s: here init would fail, and cap nothing\n"
    assert warning % "does not exist" in checked("{timeline: 'logs/{pid}.jsonl'}")
    (tmp_path / "logs").mkdir()
    for timeline in ("{}", "{timeline: run.jsonl}", "{timeline: 'logs/{pid}.jsonl'}"):
        assert "warning  " not in checked(timeline)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # root may write everywhere
    assert warning % "cannot be written to" in checked("{timeline: logs/run.jsonl}")


def test_check_shows_the_monitor(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(WATCHED.replace("{}", "{timeline: a.jsonl}") + "on_pressure: [trim, raise]")
    output = CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output
    assert "  monitor      every 500ms, warn from 85%, critical from 95%, forecast 20s ahead\n" in output
    assert f"  timeline     {tmp_path / 'a.jsonl'}, at most 64MiB\n" in output
    assert "  on_pressure  trim and raise when the pressure becomes critical\n" in output
    (tmp_path / "b.yaml").write_text(GOOD + "monitor: {top: true}")
    output = CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output
    assert "  top          memguard top of the same user may watch, and ask for a trim or another cap\n" in output
    (tmp_path / "b.yaml").write_text(GOOD + "monitor: {interval: 2s, forecast: 0}")
    output = CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output
    assert "every 2s, warn from 85%, critical from 95%, no forecast\n" in output
    assert "timeline" not in output


def test_check_shows_who_gets_metrics(tmp_path: Path) -> None:
    def said(metrics: str) -> str:
        (tmp_path / "b.yaml").write_text(GOOD + metrics)
        return CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output

    metrics = said("metrics: {prometheus: 9477, opentelemetry: true, job: train}")
    assert "metrics      for Prometheus at 127.0.0.1:9477 and OpenTelemetry, job train\n" in metrics
    assert "monitor      every 500ms" in metrics
    assert "for OpenTelemetry, job called as the script\n" in said("metrics: {opentelemetry: true}")


def test_check_shows_when_the_process_may_leave_its_gpus(tmp_path: Path) -> None:
    def said(suspend: str) -> str:
        (tmp_path / "b.yaml").write_text(GOOD + suspend)
        return CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output

    line = "  suspend      when it asks for it, in a notebook after 10min without work, by other processes of the user"
    assert f"{line}\n" in said("suspend: {when_idle: 10min, by_others: true}")
    assert "when it asks for it; host memory is not checked\n" in said("suspend: {host_memory: ignore}")
    assert "suspend" not in said("suspend: {}")


def test_check_and_plan_show_that_the_limit_is_leased(tmp_path: Path) -> None:
    def said(command: Any, device: str, *more: str) -> str:
        (tmp_path / "b.yaml").write_text(GOOD + device)
        return CliRunner().invoke(command, [str(tmp_path / "b.yaml"), *more]).output

    line = "  device       limit 90% of what CUDA can give, reserve auto"
    assert f"{line}, leased, waits up to 10min\n" in said(check, "device: {lease: true, wait: 10min}")
    asks = "device: {lease: true, wait: 90s, on_wait: suspend-idle}"
    assert f"{line}, leased, waits up to 90s, asks idle holders to leave\n" in said(check, asks)
    assert "by a process that waits for its lease, after 1h without work\n" in said(check, "suspend: {on_demand: 1h}")
    assert f"{line}, leased\n" in said(check, "device: {lease: true}")
    assert f"{line}\n" in said(check, "device: {lease: false}")
    assert "that CUDA can give; leased" in said(plan, "device: {lease: true}", "--device", "h200")
    assert "leased" not in said(plan, "", "--device", "h200")


def test_check_shows_what_the_doctor_ignores(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(GOOD + "doctor: {ignore: [wsl, mig]}")
    output = CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output
    assert "  doctor       leaves out wsl, mig\n" in output
    (tmp_path / "b.yaml").write_text(GOOD + "doctor: {}")
    assert "doctor" not in CliRunner().invoke(check, [str(tmp_path / "b.yaml")]).output


def test_the_reference_shows_what_is_really_printed() -> None:
    document = (CONFIGS.parent / "docs" / "budget.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```\n(?:```text\n(.*?)```)?", document, re.DOTALL)
    assert [bool(output) for _, output in blocks] == [False, False, True, True, True, True]
    for text, output in blocks:
        try:
            parse(text, "budget.yaml")
            printed = ""
        except ConfigError as error:
            printed = f"{error}\n"
        assert printed == output


def test_a_fraction_without_an_exact_percentage_is_refused_with_one_that_has() -> None:
    with pytest.raises(ConfigError, match=r"1/3 has no exact percentage\n    fix: write '33.3333%'"):
        from_mapping({"version": 1, "frameworks": {"torch": {"share": Fraction(1, 3)}}})
    assert from_mapping({"version": 1, "frameworks": {"torch": {"share": Fraction(1, 8)}}}).frameworks["torch"].share
