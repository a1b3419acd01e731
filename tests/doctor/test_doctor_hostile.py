"""Facts that somebody else made: nothing of theirs gets into a command that is copied, and no check is kept busy."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from doctor_facts import FILES, plain

from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Facts
from memguard.errors import FactsError

NAMES = ("1; touch x", "2|touch x", "3`touch x`", "4$(touch x)", "5'; touch x; '", "-6 touch x", "7\ntouch x")


def hostile(value: Any, text: str, inside: str = "") -> Any:
    """The same, with that text after each version and UUID."""
    if isinstance(value, dict):
        names = inside in ("packages", "distributions")
        return {key: hostile(item, text, inside if names else key) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, text, inside) for item in value]
    told = inside in ("version", "cuda", "cudnn", "cudnn_loaded", "uuid", "packages", "distributions", "driver", "name")
    return f"{value}{text}" if isinstance(value, str) and told else value


@pytest.mark.parametrize("text", NAMES)
def test_nothing_of_the_facts_gets_into_a_command(text: str) -> None:
    for file in FILES:
        facts = Facts.from_json(json.dumps(hostile(plain(file), text)))
        for finding in examine(facts):
            assert "touch x" not in finding.remedy, (file, finding.name, finding.remedy)


@pytest.mark.parametrize("name", ["torch; touch x", "torch'", "$(x)", "", "--pre", "a\n", "a" * 201])
def test_names_of_frameworks_and_distributions_are_names(name: str) -> None:
    torch = {"torch": {"distributions": {name: "1"}}}
    for facts in ({"frameworks": {name: {}}}, {"packages": {name: "1"}}, {"frameworks": torch}):
        with pytest.raises(FactsError, match=r"frameworks|packages"):
            Facts.from_json(json.dumps({"memguard_facts": 1, **facts}))


@pytest.mark.parametrize("piece", ["lib", "libcudnn_", "libcudart.so.", " a", "0.", "Error: ", "\n ", "(from "])
def test_texts_that_patterns_go_back_and_forth_in(piece: str) -> None:
    value = json.loads(json.dumps(plain("h200-all-six.json")))
    for found in value["frameworks"].values():
        said = [f"{number}{piece * 600}"[:600] for number in range(400)]
        stage = {"name": "import", "seconds": 1, "error": (piece * 4000)[:4000], "kind": (piece * 4000)[:4000]}
        found["probe"] = {**found["probe"], "said": said, "stages": [stage], "exit": 1}
    _in_time(value)


def test_libraries_and_gpus_by_the_hundred() -> None:
    value = json.loads(json.dumps(plain("h200-all-six.json")))
    for found in value["frameworks"].values():
        found["probe"]["libraries"] = [f"/x/{number}/libcudart.so.{number}" for number in range(256)]
        found["missing"] = [f"libcudart.so.{number}" for number in range(64)]
    libraries = [f"/y/{number}/libcublas.so.{number}" for number in range(256)]
    value["process"] = {"modules": ["torch"] * 64, "libraries": libraries}
    for side, key in (("cuda", "ordinal"), ("nvml", "index")):
        device = value["driver"][side]["devices"][0]
        value["driver"][side]["devices"] = [{**device, key: n, "uuid": f"GPU-{n:08x}"} for n in range(128)]
    value["environment"]["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(900)))
    _in_time(value)


def _in_time(value: Any) -> None:
    started = time.process_time()
    examine(Facts.from_json(json.dumps(value)))
    assert time.process_time() - started < 5


def test_what_was_ended_from_outside_is_no_crash_of_the_framework() -> None:
    """SIGKILL, or 137 where a shell is in between: reinstalling it would not help."""
    value = plain("probe-killed-for-host-memory.json")
    for end in ({"signal": "SIGKILL", "exit": None}, {"signal": None, "exit": 137}):
        probe = {**value["frameworks"]["torch"]["probe"], **end}
        frameworks = {**value["frameworks"], "torch": {**value["frameworks"]["torch"], "probe": probe}}
        found = examine(Facts.from_json(json.dumps({**value, "frameworks": frameworks})))
        crashed = next(finding for finding in found if finding.name == "probe-crashed")
        assert "was ended from outside" in crashed.cause
        assert "host memory" in crashed.remedy and "reinstall" not in crashed.remedy
