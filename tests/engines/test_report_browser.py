"""The report in a real browser: it asks for nothing, shows all, and works by keyboard, on paper, without a script."""

from __future__ import annotations

from pathlib import Path

import hostile_names
import pytest
from browser import Browser
from recorded import SIX, many, record
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from memguard import cli
from memguard._base.units import GIB, MIB
from memguard._timeline import load_timeline
from memguard._tools.report.model import MOST_POINTS


def report(folder: Path, *timelines: Path) -> Path:
    with pytest.raises(SystemExit) as ended:
        cli.main.main(["report", *map(str, timelines), "-o", str(folder / "report.html"), "--force"])
    assert ended.value.code == 0
    return folder / "report.html"


@pytest.fixture(scope="session")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("recorded")
    return record(folder, "a", 240), record(folder, "b", 200, seed=3, torch=0.8, cap="12GiB")


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory, timelines: tuple[Path, Path]) -> Path:
    return report(tmp_path_factory.mktemp("one"), timelines[0])


@pytest.fixture(scope="session")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run on an H200: PyTorch, JAX and CuPy, with two out-of-memory errors that the program caught."""
    recording = Path(__file__).parents[2] / "docs" / "pictures" / "recording.jsonl"
    return report(tmp_path_factory.mktemp("h200"), recording)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory, timelines: tuple[Path, Path]) -> Path:
    return report(tmp_path_factory.mktemp("two"), *timelines)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("which", "figures"), [("one", 1), ("two", 2), ("h200", 1)])
def test_it_opens_from_a_file_without_network_or_complaint_and_can_be_read_by_all(
    browser: Browser, request: pytest.FixtureRequest, which: str, figures: int, scheme: str
) -> None:
    browser.media(scheme)
    browser.open(request.getfixturevalue(which), figures)
    browser.js("document.querySelectorAll('details').forEach(one => one.open = true)")
    ground, ink = browser.js(
        "const style = getComputedStyle(document.body), text = document.querySelector('.ytick text');"
        "return [style.backgroundColor, getComputedStyle(text).fill]"
    )
    assert (ground == "rgb(255, 255, 255)") == (ink == "rgb(27, 31, 36)") == (scheme == "light")
    assert browser.requests() == []
    assert browser.complaints() == []
    assert browser.violations() == []


def test_what_would_be_wrong_is_seen(browser: Browser, tmp_path: Path) -> None:
    """Else a page without a fault would prove nothing."""
    (tmp_path / "bad.html").write_text(
        "<!DOCTYPE html><title>bad</title><img src='http://127.0.0.1:9/x.png'><script>console.error('wrong')</script>"
    )
    browser.driver.get((tmp_path / "bad.html").as_uri())
    assert any("image-alt (critical)" in one for one in browser.violations())
    assert browser.requests() == ["http://127.0.0.1:9/x.png"]
    assert any("wrong" in one for one in browser.complaints())


def test_a_page_that_was_tampered_with_asks_for_nothing(browser: Browser, one: Path, tmp_path: Path) -> None:
    """Its policy holds even if a text of a timeline had become markup."""
    bad = "<img src='http://127.0.0.1:9/x.png' onerror='window.owned=1'><script>window.owned=1</script></body>"
    (tmp_path / "report.html").write_text(one.read_text(encoding="utf-8").replace("</body>", bad), encoding="utf-8")
    browser.open(tmp_path / "report.html")
    assert browser.requests() == [] and browser.js("return window.owned === undefined")
    assert sum("Content Security Policy" in complaint for complaint in browser.complaints()) >= 2


def test_every_framework_is_there_with_held_in_use_and_caps(browser: Browser, two: Path) -> None:
    browser.open(two, 2)
    for number in (0, 1):
        names = set(browser.js(f"return document.querySelectorAll('.plot')[{number}].data.map(trace => trace.name)"))
        for name in SIX:
            assert {f"{name} in use", f"{name} idle", f"{name} cap", f"{name} suggested cap"} <= names
        # What is drawn: a path for the area or the line of each of them.
        drawn = browser.js(f"return document.querySelectorAll('.plot')[{number}].querySelectorAll('.scatter').length")
        assert drawn >= 6 * 5


def test_a_run_on_an_h200_has_every_series_its_workloads_and_errors(browser: Browser, h200: Path) -> None:
    browser.open(h200)
    names = set(browser.js("return document.querySelector('.plot').data.map(trace => trace.name)"))
    for name in ("torch", "jax", "cupy"):
        assert {f"{name} in use", f"{name} idle", f"{name} cap", f"{name} suggested cap"} <= names
    spans = set(browser.js("return [...document.querySelectorAll('.shape-group text')].map(one => one.textContent)"))
    assert {"train", "score", "features"} <= spans
    assert len(browser.driver.find_elements("css selector", ".serious details")) == 2


def test_a_pointer_on_the_stack_reads_what_each_framework_held(
    browser: Browser, timelines: tuple[Path, Path], one: Path
) -> None:
    browser.open(one)
    stack = browser.js(
        "return document.querySelector('.plot').data.filter(trace => trace.yaxis === 'y' && trace.hoverinfo !== 'skip')"
        ".map(trace => [trace.name, trace.text[trace.text.length - 1]])"
    )
    last = list(load_timeline(timelines[0]).samples())[-1].devices[0]
    said = {
        name: f"{name} {'held unknown' if row.held is None else f'{sizes(row.held)} held'}, {sizes(row.in_use)} in use"
        for name, row in last.frameworks.items()
    }
    assert said["tensorflow"].startswith("tensorflow held unknown, ")
    assert dict(stack) == {
        **{f"{name} in use": text for name, text in said.items()},
        "overhead": f"overhead {sizes(last.overhead)}",
        "process, by NVML": f"process, by NVML {sizes(last.process)}",
        "reported by no framework": dict(stack)["reported by no framework"],
    }


def sizes(size: int | None) -> str:
    """As the page's script writes them: of MiB with two digits."""
    assert size is not None
    mib = round(size / MIB, 2)
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


@pytest.mark.parametrize(
    ("which", "reason"), [("one", "its cap of 14.00 GiB is reached"), ("h200", "its cap of 2.00 GiB is reached")]
)
def test_a_marker_and_its_row_show_the_diagnosis(
    browser: Browser, request: pytest.FixtureRequest, which: str, reason: str
) -> None:
    browser.open(request.getfixturevalue(which))
    browser.js("document.querySelector('.plot').scrollIntoView()")
    at = browser.js(
        "const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect(), all = plot._fullLayout;"
        "const trace = plot._fullData.find(one => one.name === 'out of memory');"
        "const x = all.xaxis.d2p(trace.x[0]) + all.xaxis._offset, y = all.yaxis2.d2p(trace.y[0]) + all.yaxis2._offset;"
        "return [box.left + x, box.top + y]"
    )
    pointer = ActionChains(browser.driver, duration=50)
    pointer.w3c_actions.pointer_action.move_to_location(round(at[0]), round(at[1]))
    pointer.perform()
    said = browser.wait(
        lambda: browser.js("return document.querySelector('.hoverlayer').textContent"), "the marker says what it is"
    )
    assert "torch ran out of GPU memory" in said and reason in said
    pointer = ActionChains(browser.driver, duration=50)
    pointer.w3c_actions.pointer_action.click()
    pointer.perform()
    browser.wait(lambda: browser.js("return document.querySelector('.serious details').open"), "its row opens")
    row = browser.one(".serious").text
    assert reason in row and "who held it" in row and "what to do" in row
    assert browser.js("return document.activeElement === document.querySelector('.serious summary')")


def test_workloads_and_suspensions_are_named_spans(browser: Browser, one: Path) -> None:
    browser.open(one, 1)
    names = browser.js("return [...document.querySelectorAll('.shape-group text')].map(one => one.textContent)")
    assert sorted(names) == ["suspended", "validation"]


def test_a_row_opens_by_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.js("document.body.focus()")
    for _ in range(80):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        if browser.js("return document.activeElement.matches('.serious summary')"):
            break
    else:
        raise AssertionError("the row of the error is not reached by Tab")
    assert not browser.js("return document.querySelector('.serious details').open")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert browser.js("return document.querySelector('.serious details').open")
    assert "its cap of 14.00 GiB is reached" in browser.one(".serious").text


def test_a_framework_is_hidden_and_shown_in_both_runs(browser: Browser, two: Path) -> None:
    browser.open(two, 2)
    shown = (
        "return [...document.querySelectorAll('.plot')].map(plot => plot.data.filter("
        "trace => trace.meta && trace.meta.framework === 'jax' && trace.visible !== false).length)"
    )
    before = browser.js(shown)
    assert min(before) >= 4
    browser.one("input[data-framework=jax]").click()
    browser.wait(lambda: browser.js(shown) == [0, 0], "jax is hidden")
    browser.one("input[data-framework=jax]").click()
    browser.wait(lambda: browser.js(shown) == before, "jax is back")


def test_a_zoom_in_one_run_is_one_in_the_other_and_is_undone(browser: Browser, two: Path) -> None:
    browser.open(two, 2)
    ranges = "return [...document.querySelectorAll('.plot')].map(plot => plot.layout.xaxis.range.map(Math.round))"
    whole = browser.js(ranges)
    assert whole[0] == whole[1]
    browser.js("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range[0]': 20, 'xaxis.range[1]': 40})")
    browser.wait(lambda: browser.js(ranges) == [[20, 40], [20, 40]], "both are zoomed")
    browser.one("button[data-reset]").click()
    browser.wait(lambda: browser.js(ranges) == whole, "both show the whole run")


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    path = hostile_names.record(tmp_path)
    browser.open(report(tmp_path, path, path), 2)
    browser.js("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.js("return window.owned === undefined")
    assert browser.js("return document.querySelectorAll('img, .plot a[href], td b').length") == 0
    labels = browser.js("return [...document.querySelectorAll('.plot .annotation-text')].map(one => one.textContent)")
    for name in hostile_names.NAMES[:8]:
        assert any(label.replace("\u00a0", " ").startswith(f"{name} ") for label in labels), (name, labels)
        assert browser.one(".events").text.count(name) >= 3, name
    assert browser.requests() == [] and browser.complaints() == []


def test_a_hundred_thousand_samples_open_within_three_seconds_and_eight_megabytes(
    browser: Browser, tmp_path: Path
) -> None:
    timeline = many(tmp_path, 100_000)
    path = report(tmp_path, timeline)
    assert path.stat().st_size <= 8_000_000
    browser.open(path)
    took = browser.js("return performance.getEntriesByName('memguard-drawn')[0].startTime")
    series = browser.js("return document.querySelector('.plot').data.map(trace => [trace.name, trace.x.length])")
    print(f"{took:.0f} ms, {path.stat().st_size:,} bytes, {max(count for _, count in series):,} points at most")
    assert took <= 3_000
    assert max(count for _, count in series) <= MOST_POINTS + 1 and len(series) > 25
    most: dict[str, int] = {}
    for sample in load_timeline(timeline).samples():
        for name, usage in sample.devices[0].frameworks.items():
            if usage.held is not None and usage.held > most.get(name, 0):
                most[name] = usage.held
    drawn = dict(
        browser.js(
            "return document.querySelector('.plot').data.filter(trace => / held$/.test(trace.name))"
            ".map(trace => [trace.name, trace.y.reduce((most, y) => Math.max(most, y ?? 0), 0)])"
        )
    )
    assert len(drawn) == 5
    for name, size in most.items():
        assert drawn[f"{name} held"] == pytest.approx(size / GIB, abs=1e-4)
    assert browser.requests() == [] and browser.complaints() == []


def test_on_paper_everything_is_drawn_and_errors_are_open(browser: Browser, two: Path) -> None:
    browser.media("dark")
    browser.open(two, 1)
    browser.media("dark", "print")
    assert browser.pdf().startswith(b"%PDF")
    browser.js("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.js("return [...document.querySelectorAll('.serious details')].every(one => one.open)")
    assert browser.js("return document.querySelectorAll('.plot .main-svg').length >= 2")
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js("return getComputedStyle(document.querySelector('.ytick text')).fill") == "rgb(0, 0, 0)"
    browser.js("window.dispatchEvent(new Event('afterprint'))")
    assert browser.js("return [...document.querySelectorAll('.serious details')].every(one => !one.open)")


def test_without_a_script_the_tables_and_diagnoses_are_there(browser: Browser, one: Path) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.driver.get(one.as_uri())
    browser.one(".serious summary").click()
    assert "its cap of 14.00 GiB is reached" in browser.one(".serious").text
    peaks = browser.one("table.peaks").text
    assert all(name in peaks for name in SIX) and "GiB" in peaks


@pytest.mark.parametrize("width", [360, 700, 1300, 1900])
def test_nothing_is_wider_than_the_window(browser: Browser, two: Path, width: int) -> None:
    browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        browser.open(two, 1)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        side_by_side = browser.js(
            "const [a, b] = document.querySelectorAll('.plot');"
            "return Math.abs(a.getBoundingClientRect().top - b.getBoundingClientRect().top) < 2"
        )
        assert side_by_side == (width >= 1100)
        hidden = browser.js("const box = document.querySelector('.scroll'); return box.scrollWidth - box.clientWidth")
        assert (hidden <= 0) == (width >= 1300), "the peaks of six frameworks fit, or a shadow says that there is more"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
