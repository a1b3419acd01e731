"""Statistics, the schema and the pages of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import render, results

ROW: dict[str, Any] = {
    "id": "leak.before", "unit": "s", "median": 9.78, "low": 9.7, "high": 9.9, "n": 3, "bar": ">= 5", "ok": True,
    "attempts": [], "seconds": 25.0, "covers": "c" * 12, "bench": "b" * 12, "commit": "0123456789ab",
    "date": "2026-11-28T10:00:00+00:00",
}  # fmt: skip
MISSED = ROW | {"id": "top", "unit": "% of a core", "median": 2.5, "bar": "<= 2", "ok": False, "attempts": [3.1, None],
                "by": "p95", "judged": 2.6}  # fmt: skip
FAILED = ROW | {"id": "caps", "median": None, "low": None, "high": None, "n": 0, "ok": False, "error": "no | GPU"}
RESULT: dict[str, Any] = {
    "version": "0.1.0", "commit": "0123456789ab", "dirty": False, "gpu": "NVIDIA H200", "driver": "580.1",
    "date": "2026-11-28T11:00:00+00:00", "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "notes": ["TensorFlow build: linked to CUDA 13."], "modules": [], "rows": [ROW, MISSED, FAILED],
    "measures": {"leak": {"title": "A leak is announced", "ran": [], "covers": "c" * 12, "bench": "b" * 12}},
}  # fmt: skip


def test_groups_are_drawn_before_the_values_in_them() -> None:
    apart = [[1.0] * 50, [3.0] * 50]
    assert results.interval(apart)[1:] == (1, 3)
    together = [[1.0, 3.0] * 50]
    median, low, high = results.interval(together)
    assert (low, high) == (1, 3)
    assert median == 2
    assert results.interval([[5.0]]) == (5, 5, 5)


@pytest.mark.parametrize(
    ("bar", "by", "found"),
    [
        ("<= 50", "median", (50, True)), ("<= 49", "median", (50, False)), (">= 50", "median", (50, True)),
        ("<= 50", "high", (60, False)), (">= 50", "high", (40, False)), ("<= 95", "p95", (95, True)),
        (">= 5", "p95", (5, True)), (">= 6", "p95", (5, False)), (None, "median", (50, None)),
    ],
)  # fmt: skip
def test_what_is_held_against_a_bar(bar: str | None, by: str, found: tuple[float, bool | None]) -> None:
    assert results.judge(bar, by, range(101), 40, 60) == found


@pytest.mark.parametrize(("bar", "by"), [("< 5", "median"), ("5", "median"), ("<= 5", "mean")])
def test_a_bar_that_says_nothing_is_refused(bar: str, by: str) -> None:
    with pytest.raises(ValueError, match=r"bar is|judged by"):
        results.judge(bar, by, [1.0], 1, 1)


def test_few_values_all_count_as_the_worst() -> None:
    assert results.judge("<= 2", "p95", [1.0, 2.5], 1, 2.5) == (2.5, False)


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    ran = ["memguard.api", "bench.measures.leak"]
    whole = RESULT | {"measures": {"leak": RESULT["measures"]["leak"] | {"ran": ran}}}
    results.save(whole, tmp_path / "v0.1.0-h200.json")
    found = results.load(tmp_path / "v0.1.0-h200.json")
    assert found["rows"] == whole["rows"]
    assert found["measures"]["leak"]["ran"] == sorted(ran)
    assert [path.name for path in tmp_path.iterdir()] == ["v0.1.0-h200.json"]


def test_a_full_result_is_under_60_kb(tmp_path: Path) -> None:
    modules = [f"memguard._frameworks.{'module' * 2}_{number}" for number in range(430)]
    measures = {f"measure{n}": RESULT["measures"]["leak"] | {"ran": modules[n::2]} for n in range(15)}
    rows = [MISSED | {"id": f"measure{n % 15}.of some row {n}"} for n in range(240)]
    results.save(RESULT | {"measures": measures, "rows": rows}, tmp_path / "v.json")
    assert (tmp_path / "v.json").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({key: value for key, value in ROW.items() if key != "covers"}, "lacks covers"),
        (ROW | {"figure": 1}, "unknown fields: figure"), (ROW | {"n": True}, "n is True"),
        (ROW | {"median": None}, "either a median or an error"), (MISSED | {"id": "leak.before"}, "the same id"),
    ],
)  # fmt: skip
def test_what_does_not_keep_the_schema_is_refused(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = tmp_path / "v.json"
    path.write_text(json.dumps(RESULT | {"measures": {}, "rows": [ROW, row] if "same" in said else [row]}))
    with pytest.raises(ValueError, match=said):
        results.load(path)


def test_versions_in_the_making_write_into_the_coming_release() -> None:
    assert [results.base(one) for one in ("0.2.0.dev0", "0.2.0.dev12", "0.1.0")] == ["0.2.0", "0.2.0", "0.1.0"]


def test_committed_results_are_whole_and_their_pages_are_made_of_them() -> None:
    for path in results.FOLDER.glob("*.json"):
        results.load(path)
        assert path.stat().st_size < 60_000
    if not render.ROOT.joinpath("README.md").exists() or not results.FOLDER.exists():
        return
    assert render.main(check=True) == 0


def test_the_pages_of_a_release(tmp_path: Path) -> None:
    results.save(RESULT, tmp_path / "bench" / "results" / "v0.1.0-h200.json")
    results.save(RESULT | {"version": "0.10.0"}, tmp_path / "bench" / "results" / "v0.10.0-h200.json")
    readme = tmp_path / "README.md"
    table = "| old |\n| --- |\n| 1 |\n"
    readme.write_text(f"# memguard\n\n## Measured\n\nOn one card:\n\n{table}\nMore.\n\n## Next\n\n| kept |\n")
    assert render.main(root=tmp_path) == 0
    page = (tmp_path / "docs" / "results" / "0.1.0.md").read_text()
    assert "Measured on NVIDIA H200, driver 580.1, 2026-11-28; commit `0123456789ab`." in page
    assert "TensorFlow build: linked to CUDA 13." in page
    assert "torch 2.11.0" in page
    assert page.index("**2 of 3 bars are not reached.**") < page.index("## leak")
    assert "| `top` | 2.5 % of a core | <= 2 (95 % of the values: 2.6) | 1.3 |" in page
    assert "| `leak.before` | 9.78 s | 9.7 to 9.9 | 3 | >= 5 | yes |" in page
    assert "**missed** | 3.1, no figure |" in page
    assert "`caps` has no figure: no \\| GPU" in page
    index = (tmp_path / "docs" / "results" / "index.md").read_text()
    assert index.index("[0.10.0](0.10.0.md)") < index.index("[0.1.0](0.1.0.md)")
    assert "| NVIDIA H200 | 580.1 | 2026-11-28 | 1 of 3 |" in index
    text = readme.read_text()
    assert "| memguard 0.10.0 on NVIDIA H200, 2026-11-28 | median |" in text
    assert "out-of-memory error | 9.78 s | 9.7 to 9.9 | >= 5 |" in text
    assert "old" not in text
    assert text.startswith("# memguard\n\n## Measured\n\nOn one card:\n\n| memguard")
    assert text.endswith("|\n\nMore.\n\n## Next\n\n| kept |\n")
    assert render.main(check=True, root=tmp_path) == 0
    readme.write_text(text.replace("9.78", "9.8"))
    assert render.main(check=True, root=tmp_path) == 1


def test_another_version_alone_asks_for_no_new_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a_package" / "__init__.py"
    file.parent.mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    found = []
    for text in ('__version__ = "0.1.0"\nA = 1\n', '__version__ = "0.2.0"\nA = 1\n', '__version__ = "0.2.0"\nA = 2\n'):
        file.write_text(text)
        found.append(results.hash_of(["a_package"]))
    assert found[0] == found[1] != found[2]
