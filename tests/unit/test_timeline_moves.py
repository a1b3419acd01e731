"""What happens to a timeline's files while it is written: no sample is lost that a disk could take."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from timelines import START, plan_of, sample_of

from memguard._base.types import FrameworkSample, Sample
from memguard._base.units import GIB
from memguard._timeline import Writer, load_timeline
from memguard._timeline.writer import MIN_LIMIT

PLAN = plan_of()
_TIME = re.compile(rb'^\{"t":([0-9.]+),"sample":', re.MULTILINE)


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


class Disk:
    """A writer of a timeline, what it said, and the faults of its disk."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int = 1 << 26) -> None:
        self.top, self.folder = tmp_path, tmp_path / "logs"
        self.folder.mkdir()
        self.said: list[str] = []
        self.clock, self.fault, self.count, self.moves = Clock(), 0, 0, 0
        self.out = Writer(self.folder / "{rank}.jsonl", PLAN, limit_bytes=limit, clock=self.clock, say=self.said.append)
        for name in ("write", "open", "rename"):
            self._break(monkeypatch, name, getattr(os, name))

    def _break(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Callable[..., object]) -> None:
        def call(first: object, *more: object, **named: object) -> object:
            writes = name != "open" or (more and isinstance(more[0], int) and more[0] & (os.O_WRONLY | os.O_RDWR))
            if self.fault and writes and str(first) != str(os.devnull):
                raise OSError(self.fault, os.strerror(self.fault))
            return real(first, *more, **named)

        monkeypatch.setattr(os, name, call)

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += 0.5
            self.count += 1
            self.out.sample(sample_of(PLAN, self.clock.now, torch=FrameworkSample(GIB, GIB // 2, 0, 7 * GIB)))

    def aside(self, path: str | Path) -> Path:
        self.moves += 1
        target = self.top / f"aside-{self.moves}"
        shutil.move(path, target)
        return target

    def times(self) -> list[float]:
        """Of all samples in all files, wherever they are now."""
        files = [path for path in self.top.rglob("*") if path.is_file()]
        return sorted(float(found) for path in files for found in _TIME.findall(path.read_bytes()))


def test_a_folder_that_was_moved_is_followed_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch, MIN_LIMIT)
    disk.write(300)
    moved = disk.aside(disk.folder)
    disk.write(4000)  # rotates and thins
    disk.out.close()
    assert disk.said == [
        f"the folder of the timeline {disk.folder}/0.jsonl was moved: it is now written to {moved}/0.jsonl"
    ]
    timeline = load_timeline(moved / "0.jsonl")
    assert len(list(timeline.samples())) + timeline.dropped.samples == 4300 and len(list(moved.iterdir())) > 3
    assert sum(path.stat().st_size for path in moved.iterdir()) <= MIN_LIMIT


def test_a_folder_that_was_rotated_gets_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    disk.write(10)
    moved = disk.aside(disk.folder)
    disk.folder.mkdir()
    disk.write(20)
    disk.out.close()
    assert disk.said == [f"the timeline {disk.folder}/0.jsonl was moved: it is begun anew"]
    assert len(list(load_timeline(moved / "0.jsonl").samples())) == 10
    timeline = load_timeline(disk.folder / "0.jsonl")
    assert len(list(timeline.samples())) == 20 and timeline.header.part == 2


def test_a_file_that_was_moved_or_removed_is_begun_anew_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    for turn in range(50):
        disk.write(3)
        if turn % 2:
            disk.aside(disk.out.path)
        else:
            os.unlink(disk.out.path)
    disk.write()
    assert len(disk.said) == 50 and {text.rpartition(" was ")[2] for text in disk.said} == {
        "moved: it is begun anew", "removed: it is begun anew",
    }  # fmt: skip
    assert len(disk.times()) == 25 * 3 + 1 and len(list(load_timeline(disk.out.path).samples())) == 1


def test_a_name_that_is_taken_leaves_the_moved_file_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    disk.write(5)
    moved = disk.aside(disk.out.path)
    Path(disk.out.path).write_text("precious")
    disk.write(5)
    assert disk.said == [] and len(_TIME.findall(moved.read_bytes())) == 10
    os.unlink(disk.out.path)
    disk.write(5)
    assert len(disk.said) == 1 and len(disk.times()) == 15 and load_timeline(disk.out.path).header.part == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("before", [0, 37, 131, 151, 200])
def test_a_disk_that_refuses_and_then_takes_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, before: int
) -> None:
    """Also if it refuses just when a file is full: 16 KiB here, some 150 samples."""
    disk = Disk(tmp_path, monkeypatch, MIN_LIMIT)
    disk.write(before)
    disk.fault = code
    disk.write(300)
    disk.fault = 0
    disk.clock.now += 10
    disk.write(400)
    disk.out.close()
    assert len(disk.said) == 2 and os.strerror(code) in disk.said[0] and "left out: 300 samples" in disk.said[1]
    timeline = load_timeline(disk.out.path)
    assert len(list(timeline.samples())) == before + 400 and timeline.dropped.samples == 300


def test_anything_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves, faults, foreign and earlier files in the way, rotation: what is not in some file was said to be lost."""
    operations = 0
    for seed in range(40):
        rng = random.Random(seed)
        top = tmp_path / str(seed)
        top.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(top, patch, MIN_LIMIT * 16)  # nothing is thinned
            for _ in range(30):
                operations += 1
                match rng.randrange(9):
                    case 0:
                        disk.aside(disk.out.path) if os.path.exists(disk.out.path) else None
                    case 1:
                        folder = os.path.dirname(disk.out.path)
                        disk.aside(folder) if os.path.isdir(folder) else None
                    case 2:
                        os.makedirs(os.path.dirname(disk.out.path), exist_ok=True)
                    case 3:
                        disk.fault = rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO])
                    case 4 | 5:
                        disk.fault = 0
                    case 6:
                        if os.path.isdir(disk.folder) and not os.path.exists(disk.folder / "0.jsonl"):
                            fault, disk.fault = disk.fault, 0
                            (disk.folder / "0.jsonl").write_text(rng.choice(["precious", ""]))
                            disk.fault = fault
                    case _:
                        disk.write(rng.randrange(400))
                disk.write(rng.randrange(3))
                disk.clock.now += rng.choice([0, 0, 6, -6])
            disk.fault = 0
            os.makedirs(os.path.dirname(disk.out.path), exist_ok=True)
            if os.path.exists(disk.out.path) and Path(disk.out.path).read_bytes()[:1] == b"p":
                os.unlink(disk.out.path)
            disk.clock.now += 10
            disk.write(2)
            disk.out.close()
        timeline = load_timeline(disk.out.path)
        assert isinstance(next(timeline.samples()), Sample)
        lost = sum(
            int(text.replace(",", "")) for text in re.findall(r"left out: ([0-9,]+) sample", "\n".join(disk.said))
        )
        assert len(disk.times()) + lost == disk.count, (seed, disk.said)
    assert operations == 1200
