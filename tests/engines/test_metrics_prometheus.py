"""A real Prometheus scrapes a program, and each query of the dashboard has an answer.

Needs Prometheus and promtool, which Debian's package `prometheus` has: on the PATH, or where `scripts/test --engines`
puts them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "memguard.json"
GIB = 2**30
PATH = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.prefix) / "prometheus" / "usr" / "bin")])
PROGRAM = """
    import select, sys, time
    import memguard

    def fails(framework, size):
        try:
            framework.allocate(size)
        except Exception:
            pass

    frameworks = {"torch": {"limit": "10GiB"}, "cupy": {"min": "2GiB", "max": "20GiB"},
                  "pycuda": {"min": "2GiB", "max": "20GiB"}}
    guard = memguard.init({
        "version": 1, "device": {"limit": "40GiB"}, "frameworks": frameworks, "monitor": {"interval": "100ms"},
        "metrics": {"prometheus": int(sys.argv[1]), "job": "train"},
    }, simulate="h200")
    torch, cupy, pycuda = (guard.frameworks[name] for name in frameworks)
    kept = torch.allocate(3 << 30)
    print("begun", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        for one, other in ((cupy, pycuda), (pycuda, cupy)):
            for block in [one.allocate(1 << 30) for _ in range(18)]:  # what the cache of the other has, too
                one.free(block)
        fails(torch, 11 << 30)
        memguard.trim("torch")
        time.sleep(0.1)
    sys.stdin.readline()
    with memguard.suspended():
        print("suspended", flush=True)
        sys.stdin.readline()
    print("back", flush=True)
    sys.stdin.readline()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Prometheus:
    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._at}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _ask(self, path: str, **given: str) -> Any:
        url = f"{self._at}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        result = self._ask("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in result]

    def labels(self, label: str, match: str) -> list[str]:
        found: list[str] = self._ask(f"label/{label}/values", **{"match[]": match})
        return found

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("targets")["activeTargets"]
        return found


until = functools.partial(waiting.until, seconds=60.0, pause=0.05)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen(
        [sys.executable, str(path), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process, port
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture(scope="module")
def prometheus(
    program: tuple[subprocess.Popen[str], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    found, folder = shutil.which("prometheus", path=PATH), tmp_path_factory.mktemp("prometheus")
    assert found, "prometheus is not on the PATH: apt-get install prometheus, or scripts/test --engines"
    scrape = {"job_name": "memguard", "static_configs": [{"targets": [f"127.0.0.1:{program[1]}"]}]}
    settings = folder / "prometheus.yml"  # JSON is YAML
    settings.write_text(json.dumps({"global": {"scrape_interval": "500ms"}, "scrape_configs": [scrape]}))
    port = free_port()
    arguments = [f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([found, *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        one = Prometheus(port)
        until(one.ready, what="Prometheus is ready")
        until(lambda: len(one.query("count_over_time(memguard_info[5s]) >= 5")) > 0, what="it has scraped five times")
        yield one
    finally:
        process.terminate()
        process.wait(10)


def expressions() -> Iterator[tuple[str, str]]:
    """The title of each panel and annotation with each of its queries, as Grafana asks them."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [(panel["title"], one["expr"]) for panel in dashboard["panels"] for one in panel.get("targets", [])]
    asked += [(one["name"], one["expr"]) for one in dashboard["annotations"]["list"]]
    for title, text in asked:
        for variable, written in (("$__rate_interval", "10s"), ("$job", ".*"), ("$uuid", ".*")):
            text = text.replace(variable, written)
        assert "$" not in text, text
        yield title, text


def test_promtool_finds_nothing_wrong(program: tuple[subprocess.Popen[str], int]) -> None:
    promtool = shutil.which("promtool", path=PATH)
    assert promtool, "promtool is not on the PATH: apt-get install prometheus, or scripts/test --engines"
    with urllib.request.urlopen(f"http://127.0.0.1:{program[1]}/metrics", timeout=5) as answer:
        text = answer.read()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_target_is_up(prometheus: Prometheus) -> None:
    (target,) = prometheus.targets()
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.query("up") == [
        ({"__name__": "up", "instance": target["labels"]["instance"], "job": "memguard"}, 1)
    ]


def test_each_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    asked = list(expressions())
    assert len(asked) > 20
    silent = [(title, text) for title, text in asked if title != "Out of memory" and not prometheus.query(text)]
    assert not silent
    for title, text in asked:  # nothing but numbers
        assert all(value == value for _, value in prometheus.query(text)), (title, text)


def test_the_answers_are_those_of_the_program(prometheus: Prometheus) -> None:
    answers = {text: prometheus.query(text) for _, text in expressions()}

    def of(part: str, **labels: str) -> float:
        found = [
            value
            for text, result in answers.items()
            for has, value in result
            if part in text and labels.items() <= has.items()
        ]
        assert found, (part, labels)
        return found[0]

    assert of("(memguard_framework_held_bytes{", framework="torch") == 3 * GIB
    assert of("(memguard_framework_in_use_bytes{", framework="torch") == 3 * GIB
    assert of("framework) (memguard_framework_cap_bytes{", framework="torch") == 10 * GIB
    assert of("/ (memguard_framework_cap_bytes{", framework="torch") == pytest.approx(0.3)
    assert of("(memguard_process_limit_bytes{") == 40 * GIB
    assert of("increase(memguard_refused_requests_total{", framework="torch") > 1
    assert of("increase(memguard_trims_total{", framework="torch") > 1
    assert of("increase(memguard_lends_total{", framework="cupy") > 1
    assert of("rate(memguard_returned_bytes_total{", framework="pycuda") > GIB
    assert of("increase(memguard_events_total{", kind="reclaim") > 1
    assert 0 <= of("time() - memguard_sample_timestamp_seconds{") < 5
    (shown,) = [result for text, result in answers.items() if "memguard_info" in text]
    assert shown[0][0]["name"] == "NVIDIA H200" and shown[0][0]["version"] and shown[0][0]["simulated"] == "true"


def test_the_variables_of_the_dashboard_have_values(prometheus: Prometheus) -> None:
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
    found = {}
    for one in variables[1:]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", one["query"]["query"])
        assert asked
        found[one["name"]] = prometheus.labels(asked[2], asked[1].replace("$job", ".*"))
    assert found["job"] == ["train"] and len(found["uuid"]) == 1 and found["uuid"][0].startswith("GPU-")


def test_a_suspended_program_goes_on_answering(
    program: tuple[subprocess.Popen[str], int], prometheus: Prometheus
) -> None:
    process, _ = program
    assert process.stdin is not None and process.stdout is not None

    def say() -> None:
        process.stdin.write("\n")
        process.stdin.flush()

    say()
    assert process.stdout.readline() == "suspended\n"
    ((_, size),) = until(
        lambda: prometheus.query("memguard_process_suspended_bytes > 0"), what="it is seen as suspended"
    )
    assert size > 3 * GIB
    until(lambda: not prometheus.query("memguard_framework_held_bytes"), what="nothing is held")
    assert prometheus.query("up == 1") and prometheus.query("memguard_framework_cap_bytes")
    say()
    assert process.stdout.readline() == "back\n"
    held = 'memguard_framework_held_bytes{framework="torch"}'
    until(lambda: [value for _, value in prometheus.query(held)] == [3 * GIB], what="it is back")
