"""Run measurements one after another and write each row as soon as it is known."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import results
from bench.child import TOKEN, Child, kill_run
from bench.measure import Failed, Measure

QUICK_SECONDS = 150.0  # After which an untimed pass is stopped.
QUICK_ROOM = 60.0  # Seconds that must be left of `--until` for an untimed pass to start.
AT_ONCE = 6
RUNNING: set[str] = set()  # The tokens of what runs.
CONTINUE = 3  # Exit code: there is more to measure, and no time for it.


def run_one(one: Measure, quick: bool, timeout: float, record: bool = False) -> dict[str, Any]:
    """One measurement in a process of its own, and the end of all that it started. Returns `values` or `error`,
    `seconds`, and with `record` the names of the modules that `ran`."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    token, covers, began = uuid.uuid4().hex, folder / "covers", time.monotonic()
    env = {TOKEN: token, "TMPDIR": str(folder), "BENCH_COVERS": str(covers) if record else None}
    words = ["-m", "bench.one", one.function.__module__, one.id, *(["--quick"] if quick else [])]
    RUNNING.add(token)
    process = Child(words, name=one.id, env=env, timeout=timeout)
    try:
        found = process.end()
    except Failed as error:
        found = {"error": str(error), "seconds": time.monotonic() - began}
    finally:
        process.kill()
        kill_run(token)
        RUNNING.discard(token)
        names = set(covers.read_text().split()) - results.RUNNER if covers.exists() else set()
        shutil.rmtree(folder, ignore_errors=True)
    return {**found, "ran": sorted(name for name in names if results.file_of(name) is not None)}


def end(number: int, _frame: object = None) -> None:
    """A signal's handler: end what runs, and this process."""
    for token in [*RUNNING]:
        kill_run(token)
    sys.exit(128 + number)


def rows(one: Measure, found: Mapping[str, Any], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of what a measurement came to. `about`: hashes, commit and date."""
    tail = {"attempts": [], "seconds": round(found["seconds"], 1), **about}
    made = []
    values = {"": {"error": found["error"]}} if "error" in found else found["values"]
    for name, value in values.items():
        unit, bar, by = (one.of(what, name) for what in ("unit", "bar", "by"))
        row: dict[str, Any] = {"id": f"{one.id}.{name}" if name else one.id}
        try:
            if isinstance(value, Mapping):
                raise Failed(value["error"])
            row |= results.figures(value, unit or "", bar, by) | tail
        except (Failed, ValueError, TypeError) as error:
            empty = dict.fromkeys(("median", "low", "high"))
            row |= {
                "unit": unit or "", **empty, "n": 0, "bar": bar, "ok": False, **tail, "error": shortened(str(error)),
            }  # fmt: skip
        made.append(row)
    return made


def errors(found: Mapping[str, Any]) -> list[str]:
    """What went wrong, whole and each once: rows say it shortened."""
    if "error" in found:
        return [found["error"]]
    return list(dict.fromkeys(one["error"] for one in found["values"].values() if isinstance(one, Mapping)))


def shortened(text: str, characters: int = 300) -> str:
    """Its begin and its end: stderr says at its end what went wrong."""
    return text if len(text) <= characters else f"{text[:100]} … {text[103 - characters :]}"


def line(row: Mapping[str, Any]) -> str:
    """A row in a line."""
    if "error" in row:
        return f"FAILED  {row['id']}: {' '.join(row['error'].split())}"
    said = {None: "      ", True: "ok    ", False: "MISSED"}[row["ok"]]
    text = f"{said}  {row['id']}: {row['median']:g} {row['unit']} ({row['low']:g} to {row['high']:g}, n {row['n']})"
    if row["bar"]:
        text += f", bar {row['bar']}" + (f" by {row['by']}: {row['judged']:g}" if "by" in row else "")
    return text + (f", before: {row['attempts']}" if row["attempts"] else "")


class Runner:
    """Measures into one result.

    path    where it is written after each row; None: nowhere
    until   seconds from now, after which nothing may run any more
    """

    def __init__(
        self, measures: Mapping[str, Measure], path: Path | None, commit: str | None = None,
        until: float | None = None, say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:  # fmt: skip
        self._began, self.until, self.say = time.monotonic(), until, say
        self.measures, self.path, self._lock = measures, path, threading.Lock()
        self.there = results.device()
        self.result = results.begun(path, commit, self.there)
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            results.save(self.result, self.path)

    def left(self) -> float:
        """Seconds until `until`."""
        return float("inf") if self.until is None else self.until - (time.monotonic() - self._began)

    def wanted(self, ids: Iterable[str], resume: bool) -> list[Measure]:
        """Those to run, in the order of a full run. Says what is skipped for want of GPUs."""
        asked, found = set(ids), []
        for name, one in self.measures.items():
            if name not in asked or (resume and results.state(self.result, name) == "measured"):
                continue
            if results.state(self.result, name) == "failed":  # so may have what said which modules run
                self.result["measures"].pop(name, None)
            if one.gpus > max(self.there["gpus"], 1):
                self.say(f"skipped {name}: it needs {one.gpus} GPUs, and {self.there['gpus']} are here")
                continue
            found.append(one)
        return found

    def record(self, wanted: Iterable[Measure]) -> dict[str, str]:
        """The untimed pass: which modules each runs. Returns the errors of those that failed, by id."""
        need = [one for one in wanted if not self._recorded(one.id)]
        failed: dict[str, str] = {}

        def quick(one: Measure) -> None:
            if self.left() < QUICK_ROOM:
                return
            found = run_one(one, True, min(QUICK_SECONDS, self.left()), record=True)
            said = f"quick   {one.id}: {found['seconds']:.1f} s"
            self.say("\n".join([said, *errors(found)]))
            if "error" in found:  # what it covers is not known
                failed[one.id] = found["error"]
                return
            failed.pop(one.id, None)
            ran = found["ran"]
            with self._lock:
                self.result["measures"][one.id] = {"title": one.title, "ran": ran, **results.hashes(ran)}
                self._save()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(quick, [one for one in need if not one.whole_card]))
        for one in need:
            if one.whole_card or one.id in failed:  # once more alone: it may have lacked room beside the others
                quick(one)
        return failed

    def _measure(self, one: Measure, failed: Mapping[str, str], later: list[str]) -> None:
        """One measurement into the result; into `later` if the time left does not suffice for it."""
        hashed = {"covers": "", "bench": ""}
        if one.id in failed:
            found: dict[str, Any] = {"error": f"its untimed pass failed: {failed[one.id]}", "seconds": 0.0}
        elif self.left() < one.seconds or not self._recorded(one.id):
            later.append(one.id)
            return
        else:
            hashed = {what: self.result["measures"][one.id][what] for what in hashed}
            limit = max(2 * one.seconds, one.seconds + 60)
            found = run_one(one, False, min(limit, max(self.left(), one.seconds) + 20))
        about = {**hashed, "commit": self.result["commit"][:12], "date": results.now()}
        with self._lock:
            results.put(self.result, one.id, rows(one, found, about), [*self.measures])
            self._save()
            self.say("\n".join([*errors(found), *map(line, results.rows_of(self.result, one.id))]))

    def _recorded(self, name: str) -> bool:
        one = self.result["measures"].get(name)
        return one is not None and results.hashes(one["ran"]) == {what: one[what] for what in ("covers", "bench")}

    def run(self, ids: Iterable[str], resume: bool) -> int:
        """Measure and say the verdict. Returns 0, 1 if a bar was missed or a figure is missing, 3 if time ran out."""
        asked = [*ids]
        wanted = self.wanted(asked, resume)
        failed = self.record(wanted)
        later: list[str] = []
        together = [one for one in wanted if one.beside]
        with ThreadPoolExecutor(max(len(together), 1)) as pool:
            list(pool.map(lambda one: self._measure(one, failed, later), together))
        for one in wanted:
            if not one.beside:
                self._measure(one, failed, later)
        return self._verdict(asked, later)

    def _verdict(self, asked: Iterable[str], later: list[str]) -> int:
        told = [row for name in asked for row in results.rows_of(self.result, name)]
        missed = [row["id"] for row in told if row["ok"] is False and "error" not in row]
        failed = [row["id"] for row in told if "error" in row]
        self.say(
            f"{len(told)} rows, {round(time.monotonic() - self._began)} s: "
            f"{len(missed)} bars missed{': ' if missed else ''}{', '.join(missed)}; "
            f"{len(failed)} without a figure{': ' if failed else ''}{', '.join(failed)}"
        )
        if later:
            self.say(f"not measured yet: {', '.join(later)}; `python -m bench run-all --resume …` continues")
            return CONTINUE
        return 1 if missed or failed else 0
