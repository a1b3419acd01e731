"""The result file of a release: one schema, checked when it is read and written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.child import ROOT, package

FOLDER = ROOT / "bench" / "results"
RUNNER = {"bench", "bench.child", "bench.measure", "bench.measures", "bench.one"}
"""Modules of bench that start measurements and measure nothing: they are in no hash."""
PACKAGES = (
    "torch", "tensorflow", "pycuda", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib", "numba", "numba-cuda", "rmm-cu13",
    "rmm-cu12", "cuda-core", "ml-dtypes", "nvidia-ml-py", "cuda-bindings", "cupti-python", "pydantic", "PyYAML",
    "numpy", "keras", "textual",
)  # fmt: skip
HEAD: dict[str, tuple[type, ...]] = {
    "version": (str,), "commit": (str,), "dirty": (bool,), "gpu": (str, type(None)), "driver": (str, type(None)),
    "date": (str,), "versions": (dict,), "notes": (list,), "measures": (dict,), "modules": (list,), "rows": (list,),
}  # fmt: skip
NUMBER = (int, float)
ROW: dict[str, tuple[type, ...]] = {
    "id": (str,), "unit": (str,), "median": (*NUMBER, type(None)), "low": (*NUMBER, type(None)),
    "high": (*NUMBER, type(None)), "n": (int,), "bar": (str, type(None)), "ok": (bool, type(None)), "attempts": (list,),
    "seconds": NUMBER, "covers": (str,), "bench": (str,), "commit": (str,), "date": (str,),
}  # fmt: skip
OPTIONAL: dict[str, tuple[type, ...]] = {"error": (str,), "by": (str,), "judged": NUMBER}
"""`by` and `judged`: what is held against the bar, if that is not the median, and its value."""
SHARED = ("seconds", "covers", "bench", "commit", "date")
"""What all rows of a measurement have in common: the file says it once, and a row only where it differs."""
MEASURE = {"title": (str,), "ran": (str,), "covers": (str,), "bench": (str,)}


def interval(groups: Sequence[Sequence[float]], seed: int = 11) -> tuple[float, float, float]:
    """The median of all values, and the bounds that 95 % of the medians of 1,000 resamples lie between. `groups` are
    the values of each process, or pair of processes. Values of one process share its luck: where its memory lies, on
    which core it runs. So groups are drawn first, and then values within each."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median([v for g in draw.choices(groups, k=len(groups)) for v in draw.choices(g, k=len(g))])
        for _ in range(1000)
    )
    return statistics.median(v for g in groups for v in g), medians[25], medians[974]


def judge(bar: str | None, by: str, values: Sequence[float], low: float, high: float) -> tuple[float, bool | None]:
    """The figure that is held against a bar such as "<= 40", and whether it passes; None if there is no bar.

    by   "median"; "high": the bound of the interval on the bad side; "p95": 95 % of the values are at least as good
    """
    ranked = sorted(values)
    found = statistics.median(ranked)
    if bar is None:
        return found, None
    sign, _, number = bar.partition(" ")
    if sign not in ("<=", ">="):
        raise ValueError(f"a bar is '<= number' or '>= number', not {bar!r}")
    below = sign == "<="
    if by == "high":
        found = high if below else low
    elif by.startswith("p"):
        last = len(ranked) - 1
        rank = last * (100 - int(by[1:])) // 100  # of the best of those left out; all count if there are few
        found = ranked[last - rank] if below else ranked[rank]
    elif by != "median":
        raise ValueError(f"nothing is judged by {by!r}")
    return found, found <= float(number) if below else found >= float(number)


def figures(values: Any, unit: str, bar: str | None, by: str) -> dict[str, Any]:
    """The measured part of a row. `values`: numbers, or numbers grouped by process."""
    listed = [list(one) if isinstance(one, Sequence) else [one] for one in values]
    grouped = any(isinstance(one, Sequence) for one in values)
    groups = [[float(v) for v in one] for one in (listed if grouped else [[v for one in listed for v in one]]) if one]
    if not groups or not groups[0]:
        raise ValueError("no value")
    median, low, high = interval(groups)
    flat = [value for group in groups for value in group]
    judged, ok = judge(bar, by, flat, low, high)
    row = {"unit": unit, "median": short(median), "low": short(low), "high": short(high), "n": len(flat), "bar": bar}
    return {**row, "ok": ok, **({"by": by, "judged": short(judged)} if by != "median" and bar else {})}


def short(value: float) -> float:
    """Five significant digits: more are not resolved."""
    return float(f"{value:.5g}")


def file_of(name: str) -> Path | None:
    """The file of a module of this checkout, or of a path relative to it; None if there is none."""
    if name in ("_memguard_child", "_memguard_environment"):
        name = f"memguard._tools.activation.{name}"
    root = package().parent if name.startswith("memguard") else ROOT
    base = root / name if "/" in name else root.joinpath(*name.split("."))
    for path in (base,) if "/" in name else (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def hash_of(names: Iterable[str]) -> str:
    """A hash of the sources of these modules as they are now. Another version of memguard changes no figure."""
    digest = hashlib.sha256()
    for name in sorted(names):
        path = file_of(name)
        source = b"" if path is None else re.sub(rb'(?m)^__version__ = ".*"$', b"", path.read_bytes())
        digest.update(f"{name}\0".encode() + source + b"\0")
    return digest.hexdigest()[:12]


def hashes(names: Iterable[str]) -> dict[str, str]:
    """Of the modules of memguard that ran, and of those of bench that measured."""
    bench = {name for name in names if name.startswith("bench.")}
    return {"covers": hash_of(set(names) - bench), "bench": hash_of(bench)}


def version() -> str:
    import memguard

    return memguard.__version__


def base(of: str) -> str:
    """The release that a version in the making becomes."""
    return re.sub(r"\.?dev\d*$", "", of)


def default_path(gpu: str | None) -> Path | None:
    """Where the figures of this version on this card belong; None without a GPU."""
    if gpu is None:
        return None
    words = gpu.lower().removeprefix("nvidia").split()
    return FOLDER / f"v{base(version())}-{words[0]}.json"


def device() -> dict[str, Any]:
    """Name of the first GPU, driver, and how many GPUs there are."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return {"gpu": name, "driver": pynvml.nvmlSystemGetDriverVersion(), "gpus": pynvml.nvmlDeviceGetCount()}
    except Exception:
        return {"gpu": None, "driver": None, "gpus": 0}


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def commit_here(given: str | None) -> tuple[str, bool]:
    """The commit of this tree and whether it has changes. `given` is for a copy of a commit's tree, and is believed."""
    if given is not None:
        return given, False
    if (ROOT / ".git").exists():
        changed = [line for line in _git("status", "--porcelain").splitlines() if "bench/results/" not in line]
        return _git("rev-parse", "HEAD"), bool(changed)
    raise SystemExit("there is no git repository here: --commit SHA says which commit this tree is")


def released(name: str) -> bool:
    """Whether the repository has a tag of this version."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return bool((ROOT / ".git").exists() and _git("tag", "--list", f"v{name}"))
    return False


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def notes(found: Mapping[str, str]) -> list[str]:
    """What was changed about the frameworks so that they run here."""
    said = []
    numpy = re.match(r"(\d+)\.(\d+)", found.get("numpy", ""))
    if "numba-cuda" in found and numpy is not None and (int(numpy[1]), int(numpy[2])) >= (2, 5):
        said.append(f"Numba: np.row_stack was put back, without which it compiles nothing with NumPy {found['numpy']}.")
    if "tensorflow" in found:
        said.append(f"TensorFlow build: {os.environ.get('MEMGUARD_TF_BUILD', 'as it is installed')}.")
    return said


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def begun(path: Path | None, commit: str | None, there: Mapping[str, Any]) -> dict[str, Any]:
    """The result to extend: that of the file, or a new one, with this tree, machine and day in its head. Raises
    SystemExit if the file belongs to another version or card."""
    sha, dirty = commit_here(commit)
    found = versions()
    head = {
        "version": base(version()), "commit": sha, "dirty": dirty, "gpu": there["gpu"], "driver": there["driver"],
        "date": now(), "versions": found, "notes": notes(found),
    }  # fmt: skip
    if path is None or not path.exists():
        return {**head, "measures": {}, "modules": [], "rows": []}
    before = load(path)
    if before["version"] != head["version"] or released(head["version"]):
        raise SystemExit(f"{path.name} belongs to {before['version']}, which is released: its figures are frozen")
    if before["gpu"] != head["gpu"]:
        raise SystemExit(f"{path.name} was measured on {before['gpu']}, not on {head['gpu']}: -o names another")
    was = {"driver": before["driver"], **before["versions"]}
    new = {"driver": head["driver"], **found}
    moved = [f"{name} {was.get(name, 'absent')}" for name in {**was, **new} if was.get(name) != new.get(name)]
    earlier = [note for note in before["notes"] if note.startswith("Rows until ")]
    if before["rows"] and moved:
        earlier.append(f"Rows until {before['date']}: {', '.join(moved)}.")
    return {**before, **head, "notes": [*head["notes"], *earlier]}


def load(path: Path) -> dict[str, Any]:
    """A result, with the modules that ran by name. Raises ValueError if it does not keep the schema."""
    found: dict[str, Any] = json.loads(path.read_text())
    shared = found.pop("shared", {})
    for row in found.get("rows", ()):
        row.update({"attempts": [], **shared.get(measure_of(row), {})} | row)
    check(found)
    modules = [f"memguard{name}" if name.startswith(".") else name for name in found["modules"]]
    for one in found["measures"].values():
        bits = int(one["ran"], 16)
        one["ran"] = [name for place, name in enumerate(modules) if bits >> place & 1]
    return found


def save(result: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all, a row in a line. Where the checkout lies is nobody's business."""
    modules = sorted({name for one in result["measures"].values() for name in one["ran"]})
    place = {name: 1 << number for number, name in enumerate(modules)}
    measures = {
        key: {**one, "ran": f"{sum(place[name] for name in set(one['ran'])):x}"}
        for key, one in sorted(result["measures"].items())
    }
    short_names = [re.sub(r"^memguard\.", ".", name) for name in modules]
    whole = {name: result[name] for name in HEAD} | {"measures": measures, "modules": short_names}
    check(whole)
    shared: dict[str, dict[str, Any]] = {}
    rows = []
    for row in whole["rows"]:
        common = shared.setdefault(measure_of(row), {name: row[name] for name in SHARED})
        default = {"attempts": [], **common}
        rows.append({name: value for name, value in row.items() if name not in default or default[name] != value})

    def dumped(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    lines = [f' "{name}": {dumped(whole[name])}' for name in HEAD if name not in ("measures", "rows")]
    for name, table in (("measures", measures), ("shared", shared)):
        entries = [f"  {dumped(key)}: {dumped(value)}" for key, value in table.items()]
        lines.append(f' "{name}": {{\n' + ",\n".join(entries) + "\n }")
    lines.append(' "rows": [\n' + ",\n".join(f"  {dumped(row)}" for row in rows) + "\n ]")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".part")
    new.write_text(text.replace(f"{ROOT}{os.sep}", ""))
    new.replace(path)


def check(found: Any) -> None:
    """Raises ValueError with what does not keep the schema."""

    def keep(what: str, one: Any, fields: Mapping[str, tuple[type, ...]], more: Mapping[str, Any] = {}) -> None:
        if not isinstance(one, dict):
            raise ValueError(f"{what} is no mapping")
        if missing := [name for name in fields if name not in one]:
            raise ValueError(f"{what} lacks {', '.join(missing)}")
        if unknown := [name for name in one if name not in fields and name not in more]:
            raise ValueError(f"{what} has unknown fields: {', '.join(unknown)}")
        for name, value in one.items():
            kinds = {**fields, **more}[name]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"{what}: {name} is {value!r}")

    keep("the result", found, HEAD)
    for row in found["rows"]:
        keep(f"row {row.get('id')}", row, ROW, OPTIONAL)
        if (row["median"] is None) != ("error" in row):
            raise ValueError(f"row {row['id']}: it has either a median or an error")
    for name, one in found["measures"].items():
        keep(f"measure {name}", one, MEASURE)
    ids = [row["id"] for row in found["rows"]]
    if len(set(ids)) != len(ids):
        raise ValueError("two rows have the same id")


def measure_of(row: Mapping[str, Any]) -> str:
    return str(row["id"]).partition(".")[0]


def rows_of(result: Mapping[str, Any], measure: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if measure_of(row) == measure]


def put(result: dict[str, Any], measure: str, new: Sequence[dict[str, Any]], order: Sequence[str]) -> None:
    """Put a measurement's new rows in place of its old ones. Earlier medians of the same sources stay, as attempts. An
    attempt that gave no figure stays as null."""
    old = {row["id"]: row for row in rows_of(result, measure)}
    if len(new) == 1 and new[0]["median"] is None and new[0]["id"] == measure:  # it failed as a whole
        new = [{**new[0], **{name: old[key][name] for name in ("id", "unit", "bar")}} for key in old] or new
    for row in new:
        before = old.get(row["id"], old.get(measure))
        row["attempts"] = []
        if before is not None and (before["covers"], before["bench"]) == (row["covers"], row["bench"]):
            row["attempts"] = [*before["attempts"], before["median"]]
    place = {name: number for number, name in enumerate(order)}
    kept = [row for row in result["rows"] if row["id"] not in old]
    result["rows"] = sorted([*kept, *new], key=lambda row: place.get(measure_of(row), len(place)))


def state(result: Mapping[str, Any], measure: str) -> str:
    """Whether a measurement's rows still stand: "measured", or why it has to be measured again."""
    rows, recorded = rows_of(result, measure), result["measures"].get(measure)
    if any("error" in row for row in rows):
        return "failed"
    if not rows or recorded is None:
        return "never measured"
    today = hashes(recorded["ran"])
    changed = {what for row in rows for what in ("covers", "bench") if row[what] != today[what]}
    if changed:
        names = {"covers": "the code that ran", "bench": "the measurement"}
        return f"changed: {' and '.join(names[what] for what in sorted(changed, reverse=True))}"
    return "measured"
