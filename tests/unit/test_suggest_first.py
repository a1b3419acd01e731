"""The first budget, of a program of which nothing was recorded: valid on any GPU, for whatever is installed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import click_runner
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard import _budget, cli
from memguard._budget import policy
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.specs import SPECS
from memguard._tools.suggest import installed
from memguard._tools.suggest.first import first, shares
from memguard.errors import MemguardError

SETS = st.lists(st.sampled_from(list(SPECS)), min_size=1, unique=True)
TEXTS = st.none() | st.text(max_size=30) | st.sampled_from(["1\nversion: 2", "\u2028", "\x00\x1b[2J", "# {}", "\ud800"])


@given(SETS)
def test_shares_are_all_of_it_and_each_framework_gets_some(names: list[str]) -> None:
    found = shares(names)
    assert sum(found.values()) == 100 and sorted(found) == sorted(names) and min(found.values()) >= 1
    assert found == shares(sorted(names)), "the order in which they are found means nothing"


@settings(max_examples=30, deadline=None)
@given(SETS, st.sampled_from(list(CATALOGUE)), TEXTS, st.booleans())
def test_it_is_valid_on_every_gpu_and_no_text_gets_out_of_its_comment(
    names: list[str], gpu: str, hostile: str | None, named: bool
) -> None:
    devices = SimulatedHost([gpu, gpu]).devices()
    written = first(dict.fromkeys(names, hostile), devices, hostile or "python", named)
    budget = _budget.Budget.from_text(written.encode())
    assert sorted(budget.frameworks) == sorted(names) and budget.monitor is not None
    assert written.count("2 x ") == 1
    for part in policy.plan(budget, devices).devices:
        assert part.limit < part.device.usable
    plain = first(dict.fromkeys(names), devices, "python", named)
    assert budget == _budget.Budget.from_text(plain)


def test_a_gpu_that_is_too_small_is_refused_with_the_reason() -> None:
    with pytest.raises(MemguardError, match=r"no first budget fits: .*\n    fix: "):
        first({"torch": None, "jax": None}, SimulatedHost(["256MiB"]).devices(), "python", True)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder from which this test can import frameworks. Each of them fails when it is imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("torch", "cupy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    (tmp_path / "torch-2.11.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0")
    importlib.invalidate_caches()
    for name in SPECS:
        monkeypatch.delitem(sys.modules, SPECS[name].module, raising=False)
    return tmp_path


def test_what_is_installed_is_found_without_an_import(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.frameworks() == {"torch": "2.11.0", "cupy": None}
    without_a_spec = type(sys)("jax")
    monkeypatch.setitem(sys.modules, "jax", without_a_spec)
    assert installed.frameworks() == {"torch": "2.11.0", "cupy": None}


def test_the_command_without_a_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "frameworks", lambda: {"torch": "2.11.0", "numba": None})
    target = tmp_path / "budget.yaml"
    runner = click_runner.apart()
    assert runner.invoke(cli.main, ["suggest", "--device", "l4", "-o", str(target)]).exit_code == 0
    budget = _budget.load(target)
    assert list(budget.frameworks) == ["torch", "numba"]
    assert "# PyTorch 2.11.0: " in target.read_text() and "NVIDIA L4, which was asked for" in target.read_text()
    done = runner.invoke(cli.main, ["suggest", "--device", "l4", "--json"])
    found = json.loads(done.stdout)
    assert found["yaml"] == target.read_text() and found["recorded"] is False
    monkeypatch.setattr(installed, "frameworks", dict)
    done = runner.invoke(cli.main, ["suggest", "--device", "l4"])
    assert done.exit_code == 1 and "none of the frameworks" in done.stderr and done.stdout == ""
    assert runner.invoke(cli.main, ["suggest", "--device", "l4", "--force"]).exit_code == 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--headroom", "15%"], "--headroom is for what was recorded"),
        (["--ignore-refused"], "--ignore-refused is for what was recorded"),
        (["--ignore-refused", "--headroom", "9%"], "--headroom and --ignore-refused are for what was recorded"),
    ],
)
def test_options_of_a_recording_are_refused_without_one(more: list[str], named: str) -> None:
    done = click_runner.apart().invoke(cli.main, ["suggest", "--device", "l4", *more])
    assert (done.exit_code, done.stdout) == (2, "") and named in done.stderr


@pytest.mark.parametrize("names", [["torch"], ["torch", "jax", "numba"]])
def test_a_gpu_that_is_too_small_gets_no_advice_for_a_file_that_is_not_there(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "frameworks", lambda: dict.fromkeys(names))
    done = click_runner.apart().invoke(cli.main, ["suggest", "--device", "1GiB"])
    assert (done.exit_code, done.stdout) == (1, "") and "no first budget fits" in done.stderr
    assert done.stderr.endswith("\n    fix: name a larger GPU with --device\n")
    with pytest.raises(MemguardError, match=r"\n    fix: leave this GPU out with CUDA_VISIBLE_DEVICES, or name"):
        first(dict.fromkeys(names), SimulatedHost(["1GiB"]).devices(), "python", False)


def test_without_a_gpu_it_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._devices import real
    from memguard.errors import DeviceError

    def absent() -> None:
        raise DeviceError("no usable NVIDIA driver here", fix="install it")

    monkeypatch.setattr(real, "RealHost", absent)
    done = click_runner.apart().invoke(cli.main, ["suggest"])
    assert done.exit_code == 3 and done.stdout == "" and "memguard suggest --device h100" in done.stderr
