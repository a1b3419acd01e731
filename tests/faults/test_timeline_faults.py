"""Timelines of processes that are killed, that fork, and whose disk is full. None of them may lose more than a line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from memguard._base.types import Event, FrameworkSample, Sample
from memguard._timeline import load_timeline

START = 1763737200.0
ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from timelines import START, plan_of, sample_of
from memguard._base.types import Event, FrameworkSample
from memguard._timeline import Writer
plan = plan_of()

def sample(at):
    return sample_of(plan, START + at, torch=FrameworkSample(at, at // 2, None, 1 << 30))
"""


def command(code: str, *arguments: object) -> list[str]:
    program = PREAMBLE + textwrap.dedent(code)
    return [sys.executable, "-W", "error", "-c", program, str(ROOT / "tests" / "unit"), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


SMALL = 1 << 19


@pytest.mark.parametrize("limit", [SMALL, 1 << 26], ids=["rotating", "one file"])
def test_a_process_that_is_killed_loses_at_most_its_last_line(tmp_path: Path, limit: int) -> None:
    """kill -9 of a writing process, 15 times at random moments; each sample that was acknowledged must be there."""
    rng = random.Random(limit)
    code = """
    out = Writer(sys.argv[2], plan, limit_bytes=int(sys.argv[3]))
    at = 0
    while True:
        at += 1
        out.sample(sample(at))
        if at % 7 == 0:
            out.event(Event(START + at, "note", str(at)))
        os.write(1, b"%d\\n" % at)  # after the line was written: what is told here must be read
    """
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = command(code, folder / "{rank}.jsonl", limit)
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment()) as child:
            assert child.stdout is not None
            seen = [child.stdout.readline() for _ in range(rng.randrange(1, 9000))]
            time.sleep(rng.random() * 0.02)
            child.kill()
            seen += child.stdout.readlines()
        assert child.returncode == -9
        told = int(seen[-1])
        timeline = load_timeline(folder / "0.jsonl")
        found = []
        for record in timeline.records():
            at = round(record.time - START)
            if isinstance(record, Sample):
                assert record.devices[0].frameworks["torch"] == FrameworkSample(at, at // 2, None, 1 << 30)
                found.append(at)
            else:
                assert isinstance(record, Event) and at % 7 == 0 and record.text == str(at)
        assert found[-1] in (told, told + 1), "one that is in the file need not have been told yet"
        assert found == sorted(set(found))
        if timeline.dropped:
            assert limit == SMALL and len(found) + timeline.dropped.samples >= told
        else:
            assert found == list(range(1, found[-1] + 1))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= limit


def test_a_torn_write_is_the_last_line_and_nothing_else(tmp_path: Path) -> None:
    """Killed in the middle of a write, as a machine that stops leaves it."""
    code = """
    import signal
    from memguard._timeline import writer
    out = Writer(sys.argv[2], plan)
    for at in range(5):
        out.sample(sample(at))
    real = os.write
    def write(handle, data):
        real(handle, data[:int(sys.argv[3])])
        os.kill(os.getpid(), signal.SIGKILL)
    os.write = write
    out.sample(sample(5))
    """
    for number, kept in enumerate((1, 20, 60)):
        path = tmp_path / f"{number}-{{rank}}.jsonl"
        assert subprocess.run(command(code, path, kept), env=environment()).returncode == -9
        timeline = load_timeline(str(path).format(rank=0))
        assert len(list(timeline.samples())) == 5
        assert timeline.notes == (f"{tmp_path}/{number}-0.jsonl: the last line was cut short, and is left out",)


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """The kernel's own short write and refusal, by RLIMIT_FSIZE; the program goes on."""
    code = """
    import resource
    said = []
    clock = [START]
    out = Writer(sys.argv[2], plan, clock=lambda: clock[0], say=said.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_001, resource.RLIM_INFINITY))
    for at in range(2000):
        clock[0] += 1
        out.sample(sample(at))
    size = os.path.getsize(out.path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    clock[0] += 10
    out.sample(sample(3000))
    print(json.dumps([out.path, size, said]))
    """
    done = subprocess.run(command(code, tmp_path / "run.jsonl"), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, size, said = json.loads(done.stdout)
    assert 9_000 < size <= 10_001 and len(said) == 2
    assert "cannot be written: " in said[0] and "is written again; left out: " in said[1]
    timeline = load_timeline(path)
    samples = list(timeline.samples())
    assert samples[-1].time == START + 3000 and timeline.notes == ()
    (event,) = timeline.events()
    assert f"{2001 - len(samples):,} samples" in event.text


def test_dev_full(tmp_path: Path) -> None:
    """The device that is always full: refused, as it is no file."""
    code = """
    from memguard.errors import TimelineError
    try:
        Writer("/dev/{pid}/../full", plan)
    except TimelineError as error:
        print(error)
    """
    done = subprocess.run(command(code), env=environment(), capture_output=True, text=True)
    assert "/dev/full: is not a regular file\n    fix: " in done.stdout, done.stderr


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """Not even where a thread of the parent holds the lock at the fork; the parent goes on undisturbed."""
    code = """
    import threading
    out = Writer(sys.argv[2], plan)
    out.sample(sample(0))
    with out._locked._lock:
        child = os.fork()
        if child == 0:
            for at in range(100):
                out.sample(sample(100 + at))
                out.event(Event(START, "note", "child"))
                out.oom({})
            out.forked()
            out.sample(sample(999))
            out.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out.sample(sample(1))
    out.forked()
    out.sample(sample(2))
    print(out.path)
    """
    done = subprocess.run(
        command(code, tmp_path / "run.jsonl"), env=environment(), capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    timeline = load_timeline(done.stdout.strip())
    assert [sample.time - START for sample in timeline.samples()] == [0, 1, 2]
    assert not list(timeline.events()) and not list(timeline.ooms()) and len(list(tmp_path.iterdir())) == 1


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    """Ten times the length read in the same memory, within a few percent."""
    code = """
    from memguard._timeline import load_timeline
    name = sys.argv[2] % sys.argv[3]
    out = Writer(name, plan, limit_bytes=1 << 30)
    for at in range(int(sys.argv[3])):
        out.sample(sample(at))
    out.close()
    assert sum(1 for _ in load_timeline(out.path).samples()) == int(sys.argv[3])
    # Not ru_maxrss, with which a child inherits the peak of the process that started it.
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
    """
    peaks = []
    for length in (5_000, 50_000):
        done = subprocess.run(
            command(code, tmp_path / "%s.jsonl", length), env=environment(), capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] * 1.05
