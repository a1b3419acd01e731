"""The report of a recorded run: what is in it, what stays out of it, and that texts of a timeline stay text."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hostile_names
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import SIX, many, record
from timelines import START, Clock, plan_of, sample_of

from memguard._base.types import Event, FrameworkSample, Pressure
from memguard._base.units import GIB, MIB
from memguard._timeline import Oom, load_timeline
from memguard._timeline.writer import Writer
from memguard._tools.report import diagnosis, edges, figures, lanes, palette
from memguard._tools.report.collect import MOST_ENTRIES, MOST_SPANS, collect, points
from memguard._tools.report.model import MOST_POINTS, Run, Span
from memguard._tools.report.page import page, script_json


class Page(HTMLParser):
    """Elements and text of a page, as a browser takes them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._inside == "script" else self.texts).append(data)

    @property
    def figures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.scripts[0])
        return found


def run_of(path: Path, **more: Any) -> Run:
    return collect(load_timeline(path), path.name, **more)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(record(tmp_path_factory.mktemp("recorded"), steps=240))


@pytest.fixture(scope="module")
def shown(recorded: Run) -> Page:
    return Page(page([recorded]))


def test_every_framework_is_drawn_with_its_cap_and_the_suggested_one(shown: Page) -> None:
    (figure,) = shown.figures
    names = {trace["name"] for trace in figure["traces"]}
    for name in SIX:
        assert {f"{name} in use", f"{name} idle", f"{name} cap", f"{name} suggested cap"} <= names, name
        assert (f"{name} held" in names) == (name != "tensorflow"), "it does not say what it holds"
    assert {"overhead", "process, by NVML", "limit", "suggested limit"} <= names
    assert all(len(trace["y"]) == len(figure["times"][trace["x"]]) for trace in figure["traces"])


def test_the_stack_reaches_what_nvml_says_of_the_process(recorded: Run, shown: Page) -> None:
    (figure,) = shown.figures
    bands = [trace["y"] for trace in figure["traces"] if trace.get("stackgroup")]
    (line,) = [trace for trace in figure["traces"] if trace["name"] == "process, by NVML"]
    process, times = line["y"], figure["times"][line["x"]]
    read = {round((moment.time - recorded.begin) * 1000) for moment in recorded.gpus[0].moments}
    checked = 0
    for at, size in enumerate(process):
        if size is not None and times[at] in read:  # and no edge, beside which a framework is unknown
            assert sum(band[at] or 0 for band in bands) == pytest.approx(size, abs=1)
            checked += 1
    assert checked > 200
    peak = recorded.gpus[0].peak_process
    assert peak is not None and max(size for size in process if size is not None) == round(peak.size / MIB, 2)


def test_an_error_is_a_marker_and_a_row_with_its_diagnosis(recorded: Run, shown: Page) -> None:
    (entry,) = [entry for entry in recorded.entries if entry.severity == "oom"]
    why = dict(entry.lines)["why"]
    assert "its cap of 14.00 GiB is reached" in why and entry.remedies and entry.holders
    (marks,) = [trace for trace in shown.figures[0]["traces"] if trace["name"] == "out of memory"]
    (number,), (text,) = marks["customdata"], marks["hovertext"]
    assert why in html.unescape(text.replace("<br>", " "))
    assert [attrs["id"] for tag, attrs in shown.tags if tag == "tr" and attrs.get("class") == "serious"] == [
        f"entry-{number}"
    ]
    said = "\n".join(shown.texts)
    for part in (entry.title, why, *entry.remedies, *(holder.name for holder in entry.holders)):
        assert part in said, part


def test_a_suspension_and_a_workload_are_spans_and_the_lines_end(recorded: Run, shown: Page) -> None:
    assert [(span.kind, span.name, round((span.end or 0) - span.begin)) for span in recorded.spans] == [
        ("workload", "validation", 12),
        ("suspended", "suspended", 20),
    ]
    begin = recorded.spans[1].begin
    for view in recorded.gpus[0].frameworks:
        assert (begin, None) in zip(view.held.times, view.held.values, strict=True)
    labels = [shape["label"]["text"] for shape in shown.figures[0]["layout"]["shapes"] if "label" in shape]
    assert labels == ["validation", "suspended"]


def test_workloads_in_a_row_are_one_span_and_the_longest_are_drawn(tmp_path: Path) -> None:
    plan = plan_of(torch="4GiB", cupy="4GiB")
    with Writer(tmp_path / "run.jsonl", plan, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START))
        for at in range(60):  # a loop, with a pause in it
            time = START + at * 1.5 + (30 if at >= 40 else 0)
            writer.event(Event(time + 1, "workload", "train", framework="torch", seconds=1.0, times=9, bytes=GIB))
        for at in range(1100):
            writer.event(Event(START + 200 + at, "workload", f"short {at}", framework="cupy", seconds=0.1))
        writer.event(Event(START + 1400, "note", "the last word"))
        writer.sample(sample_of(plan, START + 1400))
    (path,) = tmp_path.iterdir()
    run = run_of(path)
    drawn = [(span.name, round(span.begin - START, 1), round((span.end or 0) - START, 1)) for span in run.spans]
    assert drawn[:2] == [("train", 0.0, 59.5), ("train", 90.0, 119.5)] and len(drawn) == MOST_SPANS
    assert run.counts["workload"] == 1160
    assert [entry.title for entry in run.entries][-1] == "the last word", "workloads leave room for it"
    (figure,) = Page(page([run])).figures
    labels = [shape["label"]["text"] for shape in figure["layout"]["shapes"] if "label" in shape]
    assert labels == ["train"], "a name that would cover others is left out"
    notes = [trace for trace in figure["traces"] if trace["name"] == "note"]
    assert [len(trace["x"] and trace["y"]) for trace in notes] == [1], "a span has no marker as well"


def test_workloads_at_the_same_time_lie_beneath_each_other(tmp_path: Path) -> None:
    """Their names can be read, and no marker lies on one."""
    plan = plan_of(torch="4GiB", cupy="4GiB")
    with Writer(tmp_path / "run.jsonl", plan, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START))
        spans = (0, 40, "train", "torch"), (10, 30, "features", "cupy"), (40, 90, "score", "torch")
        for begin, end, name, framework in spans:
            writer.event(Event(START + end, "workload", name, framework=framework, seconds=float(end - begin)))
        writer.event(Event(START + 95, "oom", "cupy ran out of GPU memory", framework="cupy"))
        writer.sample(sample_of(plan, START + 100))
    (path,) = tmp_path.iterdir()
    (figure,) = Page(page([run_of(path)])).figures
    layout = figure["layout"]
    drawn = {shape["label"]["text"]: shape for shape in layout["shapes"] if "label" in shape}
    assert set(drawn) == {"train", "features", "score"}
    assert drawn["train"]["y0"] == drawn["score"]["y0"] > drawn["features"]["y1"] > drawn["features"]["y0"]
    low, high = layout["yaxis2"]["domain"]
    marks = [low + (high - low) * y for trace in figure["traces"] if trace["meta"].get("lane") for y in trace["y"]]
    assert drawn["train"]["y1"] == pytest.approx(high) and marks and max(marks) < drawn["features"]["y0"]


@given(st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30))))
def test_spans_of_one_row_never_overlap(pairs: list[tuple[int, int | None]]) -> None:
    spans = [Span(a, None if b is None else max(a, b), "workload", "x", None) for a, b in pairs]
    found = lanes.rows(spans, 60.0)
    ends = [60.0 if span.end is None else span.end for span in spans]
    for one, (span, row) in enumerate(zip(spans, found, strict=True)):
        others = [n for n in range(len(spans)) if n != one and spans[n].begin < ends[one] and span.begin < ends[n]]
        assert row is None or row not in [found[n] for n in others]
        if row is None:
            busy = [n for n in range(len(spans)) if n != one and spans[n].begin <= span.begin < ends[n]]
            assert {found[n] for n in busy} >= set(range(lanes.MOST)), "no row was free"
    assert 1 <= lanes.count(spans, 60.0) <= lanes.MOST


def test_the_figures_of_a_refusal_are_in_its_row(tmp_path: Path) -> None:
    plan = plan_of(torch="4GiB")
    refused = Event(START, "refused", "no", framework="torch", bytes=GIB, held=4 * GIB, cap=4 * GIB, free=9 * GIB)
    with Writer(tmp_path / "run.jsonl", plan, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START))
        writer.event(refused)
    (path,) = tmp_path.iterdir()
    (entry,) = run_of(path).entries
    assert dict(entry.lines)["at the refusal"] == "held 4.00 GiB, cap 4.00 GiB, free on the GPU 9.00 GiB"


def test_the_peak_in_use_is_the_allocators_own_where_it_says_more(tmp_path: Path) -> None:
    plan = plan_of(torch="4GiB", cupy="4GiB")
    uuid = plan.devices[0].device.uuid
    with Writer(tmp_path / "run.jsonl", plan, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START, torch=usage_of(2 * GIB, GIB), cupy=usage_of(2 * GIB, GIB)))
        for name, size in (("torch", 3 * GIB), ("cupy", GIB // 2), ("torch", 2 * GIB), ("jax", GIB)):
            writer.event(Event(START + 1, "peak", "", uuid=uuid, framework=name, bytes=size))
    (path,) = tmp_path.iterdir()
    run = run_of(path)
    found = {view.name: view.peak_in_use for view in run.gpus[0].frameworks}
    assert {name: peak and peak.size for name, peak in found.items()} == {"torch": 3 * GIB, "cupy": GIB}
    assert not run.entries and not run.counts, "it is a figure, and no event to look at"


def usage_of(held: int, in_use: int) -> FrameworkSample:
    return FrameworkSample(held, in_use, held - in_use, 4 * GIB)


def test_two_runs_have_the_same_axes_and_colours(tmp_path: Path, recorded: Run) -> None:
    other = run_of(record(tmp_path, "other", 60, torch=0.5, cap="16GiB"))
    both = Page(page([recorded, other]))
    first, second = both.figures
    assert first["span"] == second["span"] and first["elapsed"] and second["elapsed"]
    for key in ("yaxis", *(f"yaxis{number}" for number in range(3, 9))):
        assert first["layout"][key] == second["layout"][key]
    colours = [
        {(trace["name"], trace["yaxis"]): trace["fillcolor"] for trace in figure["traces"] if "fillcolor" in trace}
        for figure in (first, second)
    ]
    assert len(colours[0]) > 20 and colours[0] == colours[1]
    numbers = [number for trace in second["traces"] for number in trace.get("customdata", ())]
    assert min(numbers) == len(recorded.entries), "rows are numbered on the page"
    ids = [attrs["id"] for tag, attrs in both.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_colours_depend_on_the_names_alone_and_differ() -> None:
    names = [*SIX, "exchange", "mine", "other"]
    found = palette.colours(names)
    assert found == palette.colours(reversed(names)) and len(set(found.values())) == len(names)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    path = hostile_names.record(tmp_path)
    text = page([run_of(path), run_of(path)])
    shown = Page(text)
    assert len(shown.scripts) == 3, "no name ended a script or began one"
    assert {tag for tag, _ in shown.tags} & {"img", "b", "a", "extra", "iframe"} == set()
    assert not [name for _, attrs in shown.tags for name in attrs if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u202e]", text.split("<script")[0])
    drawn = shown.figures
    for trace in (trace for figure in drawn for trace in figure["traces"]):
        del trace["meta"]  # which Plotly does not show
        assert trace.pop("hovertemplate", "%{hovertext}<extra></extra>") == "%{hovertext}<extra></extra>"
    assert not re.search(r"<(?!/?b>|br>)", json.dumps(drawn)), "Plotly knows a few tags"
    said = "\n".join(shown.texts)
    for name in hostile_names.NAMES:
        assert diagnosis.clean(name) in said or diagnosis.clean(name)[:1].upper() in said, name


@given(st.text())
def test_json_in_a_script_is_the_same_and_ends_nothing(text: str) -> None:
    made = script_json({"name": text})
    assert json.loads(made) == {"name": text}
    assert made.isascii() and not set("<>&") & set(made)


def test_the_policy_lets_only_the_two_scripts_run(shown: Page) -> None:
    import base64
    import hashlib

    (policy,) = [attrs["content"] or "" for tag, attrs in shown.tags if attrs.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules and "unsafe" not in rules["script-src"]
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in shown.scripts[1:]]
    assert rules["script-src"] == " ".join(f"'sha256-{one}'" for one in hashes)
    assert not [attrs for tag, attrs in shown.tags if {"src", "href"} & attrs.keys()]


def test_plotly_is_the_version_that_was_checked() -> None:
    import hashlib

    import memguard

    root = Path(__file__).parents[2]
    script = (root / "scripts" / "vendor-plotly").read_text(encoding="utf-8")
    declared = dict(re.findall(r"^(VERSION|FILE_SHA256)=(\S+)$", script, re.MULTILINE))
    assets = Path(memguard.__file__).parent / "_tools/report" / "assets"
    bundle = (assets / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() == declared["FILE_SHA256"]
    assert f"plotly.js (basic - minified) v{declared['VERSION']}\n" in bundle[:200].decode()
    assert "MIT License" in (assets / "plotly-LICENSE.txt").read_text(encoding="utf-8")
    notices = (assets / "plotly-NOTICES.txt").read_text(encoding="utf-8")
    assert notices.startswith(f"Plotly {declared['VERSION']}, "), "made anew for another version"
    (said,) = re.findall(r"Bundled license information:(.*?)\*/\n\nwindow", bundle.decode(), re.DOTALL)
    named = re.findall(r"^([\w-]+)/.*:$", said, re.MULTILINE)
    assert len(named) >= 3 and not [name for name in named if f"\n{name} " not in notices]


def test_other_processes_are_one_sum_unless_they_are_asked_for() -> None:
    holders = [
        {"kind": "process", "name": "process 4711", "bytes": 2 * GIB},
        {"kind": "process", "name": "process 12", "bytes": GIB},
        {"kind": "framework", "name": "torch", "bytes": GIB // 2},
    ]
    oom = Oom(1.0, {"holders": holders, "remedies": [{"text": "process 4711 holds 2.00 GiB of the card: end it"}]})
    told = diagnosis.of_oom(oom, processes=True)
    assert [holder.name for holder in told.holders] == ["process 4711", "process 12", "torch"]
    silent = diagnosis.of_oom(oom, processes=False)
    assert silent.holders == (("other processes", "3.00 GiB"), ("torch", "512.0 MiB"))
    assert silent.remedies == ("another process holds 2.00 GiB of the card: end it",)
    assert "4711" not in str(silent)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
)
def test_a_report_may_be_anything(value: Any) -> None:
    keys = (
        "requester",
        "requested",
        "memory",
        "certain",
        "error",
        "why",
        "uuid",
        "holders",
        "remedies",
        "moment",
        "cut",
    )
    for report in (dict.fromkeys(keys, value), {"holders": [value], "remedies": [value], "moment": {"held": value}}):
        entry = diagnosis.of_oom(Oom(1.0, report), processes=False)
        assert entry.severity == "oom" and entry.title


def test_unknown_is_a_gap_and_never_zero(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="4GiB", cupy="2GiB")
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for step in range(9):
            clock.now += 1
            torch = FrameworkSample(
                None if step in (3, 4) else GIB, None if step in (3, 4) else GIB // 2, None, 4 * GIB
            )
            writer.sample(sample_of(plan, clock.now, torch=torch, cupy=FrameworkSample(GIB, GIB, 0, 2 * GIB)))
    run = run_of(Path(writer.path))
    torch_view, cupy = sorted(run.gpus[0].frameworks, key=lambda view: view.name, reverse=True)
    assert torch_view.held.values == (GIB, GIB, GIB, None, None, GIB, GIB, GIB, GIB) and torch_view.silent
    assert set(cupy.held.values) == {GIB} and not cupy.silent
    rows = edges.with_edges(run.gpus[0].moments)
    assert len(rows) == 9 + 4
    times = [row.time for row in rows]
    assert times == sorted(times)
    at = {round(row.time - START, 3): row.held for row in rows}
    assert at[3.0] == (GIB, GIB) and at[3.001][0] is None and at[5.999][0] is None and at[6.0] == (GIB, GIB)
    assert all(row.held[1] == GIB for row in rows), "the other one goes on"
    drawn = {(trace["name"], trace["yaxis"]): trace["y"] for trace in Page(page([run])).figures[0]["traces"]}
    assert drawn["torch in use", "y"] == [512] * 3 + [None] * 6 + [512] * 4
    assert drawn["torch in use", "y3"] == [512] * 3 + [None] * 2 + [512] * 4


def test_before_a_framework_was_seen_first_it_is_unknown(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="4GiB")
    used = FrameworkSample(GIB, GIB, 0, None)
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for late in ({}, {}, {"mine": used}):
            clock.now += 1
            writer.sample(sample_of(plan, clock.now, torch=used, **late))
    (gpu,) = run_of(Path(writer.path)).gpus
    assert [view.name for view in gpu.frameworks] == ["torch", "mine"]
    assert [moment.held for moment in gpu.moments] == [(GIB, None), (GIB, None), (GIB, GIB)]


def test_a_cap_that_moved_is_drawn_in_steps_to_the_end(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="4GiB")
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for cap in (4, 4, 6, 6, 6, 4, 4):
            clock.now += 1
            writer.sample(sample_of(plan, clock.now, torch=FrameworkSample(3 * GIB, GIB, 0, cap * GIB)))
    run = run_of(Path(writer.path))
    (view,) = run.gpus[0].frameworks
    assert [time - START for time in view.cap.times] == [1, 3, 6, 7]
    assert view.cap.values == (4 * GIB, 6 * GIB, 4 * GIB, 4 * GIB)
    (figure,) = Page(page([run])).figures
    (line,) = [trace["line"] for trace in figure["traces"] if trace["name"] == "torch cap"]
    assert line["shape"] == "hv"
    low, high = figure["layout"]["yaxis2"]["domain"]
    assert high - low < 0.01, "there is no event: no room is left for any"
    assert "<b>torch</b>  cap 4.00 GiB, moved" in [note["text"] for note in figure["layout"]["annotations"]]


def test_a_limit_far_above_all_does_not_flatten_the_picture(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="30GiB", cupy="2GiB")
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for _ in range(3):
            clock.now += 1
            used = {"torch": FrameworkSample(GIB, GIB, 0, 30 * GIB), "cupy": FrameworkSample(GIB, GIB, 0, 2 * GIB)}
            writer.sample(sample_of(plan, clock.now, **used))
    run = run_of(Path(writer.path))
    (gpu,) = run.gpus
    assert figures.top_of(gpu) == 3 * GIB * 6 // 5, "its limit is 40 GiB"
    assert {view.name: figures.top_of_framework(view) for view in gpu.frameworks} == {
        "torch": GIB * 6 // 5,
        "cupy": 2 * GIB,
    }
    titles = [note["text"] for note in Page(page([run])).figures[0]["layout"]["annotations"]]
    assert titles == [
        "<b>all together</b>  limit 40.00 GiB, above the picture",
        "<b>torch</b>  cap 30.00 GiB, above the picture",
        "<b>cupy</b>  cap 2.00 GiB",
    ]


def test_the_most_serious_events_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="4GiB")
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for number in range(MOST_ENTRIES + 5):
            writer.event(Event(START + number, "note", f"note {number}"))
        writer.event(Event(START, "pressure", "torch: near its cap", Pressure.CRITICAL, framework="torch"))
        writer.oom({"requester": "torch"})
    run = run_of(Path(writer.path))
    assert len(run.entries) == MOST_ENTRIES and run.left_out == 7
    assert {"oom", "critical", "note"} == {entry.severity for entry in run.entries}
    assert run.counts == {"note": MOST_ENTRIES + 5, "pressure": 1, "oom": 1}
    assert "7 more are left out" in page([run])


def test_a_timeline_without_a_sample_is_a_page(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", plan_of("h200", torch="4GiB"), clock=Clock()) as writer:
        writer.event(Event(START, "note", "nothing was sampled"))
        writer.event(Event(START + 90, "note", "nor later"))
    run = run_of(Path(writer.path))
    assert (run.begin, run.end) == (START, START + 90)
    text = page([run])
    assert "nothing was sampled" in text and "0 samples" in text


def test_long_runs_have_few_points_and_their_peaks(tmp_path: Path) -> None:
    path = many(tmp_path, 6_000)
    run = run_of(path)
    whole = [sample.devices[0] for sample in load_timeline(path).samples()]
    for view in run.gpus[0].frameworks:
        assert len(view.held.values) <= MOST_POINTS and len(view.in_use.values) <= MOST_POINTS
        for line, at in ((view.held, "held"), (view.in_use, "in_use")):
            seen = [getattr(device.frameworks[view.name], at) for device in whole]
            known = [size for size in seen if size is not None]
            drawn = [size for size in line.values if size is not None]
            assert (max(drawn, default=0), min(drawn, default=0)) == (max(known, default=0), min(known, default=0))
    assert len(run.gpus[0].moments) <= MOST_POINTS
    assert points(10_000) < points(100) <= MOST_POINTS


def test_what_a_framework_came_to_hold_is_nobody_elses_before(tmp_path: Path) -> None:
    """Nothing is held, then both are seen first: between them the stack has no band of what no framework reports."""
    clock, plan = Clock(), plan_of("h200", torch="4GiB", cupy="2GiB")
    used = {"torch": FrameworkSample(2 * GIB, GIB, 0, 4 * GIB), "cupy": FrameworkSample(GIB, GIB, 0, 2 * GIB)}
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for frameworks in ({}, used, used, {"cupy": used["cupy"]}):
            clock.now += 1
            sample = sample_of(plan, clock.now, **frameworks)
            if not frameworks:
                sample = sample._replace(devices=(sample.devices[0]._replace(process=0, used=0, overhead=0),))
            writer.sample(sample)
    run = run_of(Path(writer.path))
    names = [trace["name"] for trace in Page(page([run])).figures[0]["traces"]]
    assert "torch in use" in names and "reported by no framework" not in names


def test_what_turns_unknown_is_reported_by_no_framework_from_then_on(tmp_path: Path) -> None:
    clock, plan = Clock(), plan_of("h200", torch="4GiB")
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=clock) as writer:
        for held in (2 * GIB, 2 * GIB, None):
            clock.now += 1
            sample = sample_of(plan, clock.now, torch=FrameworkSample(held, held, 0, 4 * GIB))
            writer.sample(sample._replace(devices=(sample.devices[0]._replace(process=3 * GIB),)))
    (figure,) = Page(page([run_of(Path(writer.path))])).figures
    (band,) = [trace for trace in figure["traces"] if trace["name"] == "reported by no framework"]
    assert list(zip(figure["times"][band["x"]], band["y"], strict=True)) == [
        (0, 0), (1000, 0), (1001, 0), (1999, 0), (2000, 2048),
    ]  # fmt: skip


def test_two_runs_have_the_same_rows(tmp_path: Path) -> None:
    """Only A has events, and only A has torch: B leaves room for both, so that cupy's charts lie side by side."""
    paths = []
    for name in "ab":
        clock, plan = Clock(), plan_of("h200", torch="4GiB", cupy="2GiB")
        used = {"torch": FrameworkSample(GIB, GIB, 0, 4 * GIB), "cupy": FrameworkSample(GIB, GIB, 0, 2 * GIB)}
        with Writer(tmp_path / f"{name}-{{rank}}.jsonl", plan, clock=clock) as writer:
            for _ in range(3):
                clock.now += 1
                writer.sample(sample_of(plan, clock.now, **{key: used[key] for key in used if name + key != "btorch"}))
            if name == "a":
                writer.event(Event(clock.now, "note", "only here"))
        paths.append(Path(writer.path))
    a, b = (run_of(path) for path in paths)
    for first, second in (Page(page([a, b])).figures, Page(page([b, a])).figures):
        assert first["last"] == second["last"] and first["layout"]["height"] == second["layout"]["height"]
        axes = [{key: one["layout"][key] for key in one["layout"] if "axis" in key} for one in (first, second)]
        assert axes[0] == axes[1]
        on = [
            {one["name"]: one["yaxis"] for one in figure["traces"] if "cap" in one["name"]}
            for figure in (first, second)
        ]
        assert on[0]["cupy cap"] == on[1]["cupy cap"]
        for figure in (first, second):  # Plotly draws no axis that has no series
            assert {trace["yaxis"] for trace in figure["traces"]} == {"y", "y2", "y3", "y4"}
    titles = [note["text"] for note in Page(page([a, b])).figures[1]["layout"]["annotations"]]
    assert "<b>torch</b>  not in this run" in titles
