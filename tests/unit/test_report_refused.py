"""What a report says of a request that was refused: once, and in the budget that it suggests."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from timelines import START, Clock, plan_of, sample_of

import memguard
from memguard import cli
from memguard._base.types import Event, FrameworkSample, RefusedRequest
from memguard._base.units import GIB
from memguard._oom import hooks
from memguard._oom.refusal import RefusalEvents
from memguard._timeline import load_timeline
from memguard._timeline.writer import Writer
from memguard._tools.report import tables, texts
from memguard._tools.report.collect import collect
from memguard._tools.report.model import Run
from memguard._tools.report.page import page


def refused(folder: Path, asked: int = 10 * GIB, *, times: int = 1, moment_at: float = 0.0) -> Path:
    """torch holds 6 GiB of its cap of 11 and asks for more; the same request is an event and an error."""
    clock, plan = Clock(), plan_of("h200", torch="11GiB", cupy="5GiB")
    uuid = plan.devices[0].device.uuid
    used = {
        "torch": FrameworkSample(6 * GIB, 6 * GIB, 0, 11 * GIB),
        "cupy": FrameworkSample(4 * GIB, 4 * GIB, 0, 5 * GIB),
    }
    with Writer(folder / "{rank}.jsonl", plan, clock=clock) as writer:
        for _ in range(4):
            clock.now += 0.5
            writer.sample(sample_of(plan, clock.now, **used))
        at = clock.now + 0.1
        text = f"torch: a request was refused {times}"
        writer.event(Event(at, "refused", text, uuid=uuid, framework="torch", bytes=asked, times=times))
        when = datetime.fromtimestamp(at + moment_at, UTC).isoformat()
        moment = {"time": when, "source": "refusal", "requested": asked, "held": 6 * GIB, "in_use": 6 * GIB}
        clock.now = at + 0.04
        writer.oom({"requester": "torch", "requested": asked, "uuid": uuid, "certain": True, "moment": moment})
    return Path(writer.path)


def run_of(path: Path) -> Run:
    return collect(load_timeline(path), path.name)


def suggested(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        cli.main.main(["suggest", str(path), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_suggested_budget_is_that_of_memguard_suggest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = refused(tmp_path)
    found = suggested(path, capsys)
    run = collect(load_timeline(path), str(path))
    (gpu,) = run.gpus
    limits = {view.name: view.suggested for view in gpu.frameworks}
    assert limits == {row["framework"]: row["limit"] for row in found["frameworks"]}
    assert gpu.suggested == found["limit"] and (limits["torch"] or 0) > 16 * GIB, "10 GiB on top of 6 were refused"
    assert found["yaml"].replace("`", "'").rstrip() in texts.markdown([run])
    assert tables.esc(found["yaml"].rstrip()) in page([run])
    assert any("18.40 GiB" in cell for cell in tables.peaks_of([run], 0).rows["torch"])
    assert not [note for note in run.notes if "these figures do not include" in note]


def test_a_budget_that_fits_nowhere_is_not_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = refused(tmp_path, 200 * GIB)
    found = suggested(path, capsys)
    assert not found["fits"]
    run = run_of(path)
    assert run.gpus[0].suggested is None and not [view for view in run.gpus[0].frameworks if view.suggested is not None]
    for text in (page([run]), texts.markdown([run])):
        assert "the budget does not fit NVIDIA H200" in text and "--ignore-refused" in text
    assert "suggested limit" not in page([run])


def test_a_suggestion_far_above_all_does_not_flatten_the_picture(tmp_path: Path) -> None:
    run = run_of(refused(tmp_path, 90 * GIB))
    text = page([run])
    assert "cap 11.00 GiB; suggested 110.40 GiB, above the picture" in text
    assert run.gpus[0].frameworks[0].name == "torch"
    from memguard._tools.report import figures

    assert figures.top_of_framework(run.gpus[0].frameworks[0]) == 11 * GIB


def test_one_request_is_one_entry(tmp_path: Path) -> None:
    run = run_of(refused(tmp_path))
    (entry,) = run.entries
    assert entry.severity == "oom" and ("refused", "torch: a request was refused 1") in entry.lines
    assert (run.left_out, run.ooms, run.gpus[0].frameworks[0].refused) == (0, 1, 1)
    assert texts.markdown([run]).count(" UTC: **") == 1 and "1 event or error" in page([run])


def test_an_event_of_several_requests_stays_and_the_error_says_that_it_is_one_of_them(tmp_path: Path) -> None:
    run = run_of(refused(tmp_path, times=4))
    assert [entry.severity for entry in run.entries] == ["critical", "oom"]
    assert run.entries[1].lines[-1] == ("refused", "the last of 4 requests, which an event counts together")


def test_a_file_of_0_1_0_is_joined_as_memguard_suggest_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its event of several requests has the time of the last; the error is an earlier one of the same size."""
    path = refused(tmp_path, times=4, moment_at=-0.5)
    run = run_of(path)
    assert run.entries[1].lines[-1] == ("refused", "one of 4 requests, which an event counts together")
    assert run.gpus[0].frameworks[0].refused == 4 and suggested(path, capsys)["yaml"].count(" were refused ") == 1


@pytest.mark.parametrize("requester", [["torch"], {"a": 1}, 7])
def test_an_error_of_who_knows_whom_is_joined_with_nothing(tmp_path: Path, requester: object) -> None:
    path = refused(tmp_path)
    path.write_text(path.read_text().replace('"requester":"torch"', f'"requester":{json.dumps(requester)}'))
    assert [entry.severity for entry in run_of(path).entries] == ["critical", "oom"]


def test_two_requests_of_one_moment_and_size_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """The report names the event, and no two events have the same time."""
    plan, refusals = plan_of("h200", torch="11GiB"), RefusalEvents(lambda: 0.0)
    uuid = plan.devices[0].device.uuid
    first, second = (
        RefusedRequest("torch", "refusal", START, uuid, 10 * GIB, held * GIB, cap=11 * GIB, id=f"7:{held}")
        for held in (5, 6)
    )
    events = [*refusals.refused(first), *refusals.refused(second), *refusals.due(True)]
    when = datetime.fromtimestamp(START, UTC).isoformat()
    moment = {"time": when, "source": "refusal", "id": second.id, "requested": 10 * GIB}
    with Writer(tmp_path / "{rank}.jsonl", plan, clock=Clock()) as writer:
        for event in events:
            writer.event(event)
        moment["event"] = refusals.event_of(second.id)
        writer.oom({"requester": "torch", "requested": 10 * GIB, "uuid": uuid, "certain": True, "moment": moment})
    run = run_of(Path(writer.path))
    event, error = run.entries
    assert "it held 5.00 GiB" in event.title and "it held 6.00 GiB" in dict(error.lines)["refused"]


def test_the_error_of_one_of_several_requests_is_joined_with_their_event(tmp_path: Path) -> None:
    """It was not the last of them, whose size and time the event has."""
    budget = {
        "version": 1,
        "frameworks": {"torch": {"limit": "1GiB"}},
        "monitor": {"timeline": f"{tmp_path}/run.jsonl"},
    }
    torch: Any = memguard.init(budget, simulate="h200").frameworks["torch"]
    errors = []
    for size in (2, 3, 4):
        with pytest.raises(RuntimeError) as refusal:
            torch.allocate(size * GIB)
        errors.append(refusal.value)
    report = hooks.report_error(errors[1], show=False)
    memguard.shutdown()
    (path,) = tmp_path.glob("run*.jsonl")
    (oom,), found = load_timeline(path).ooms(), [one for one in load_timeline(path).events() if one.kind == "refused"]
    assert report is not None and report.moment is not None
    assert report.moment.id == oom.report["moment"]["id"] == vars(errors[1])["memguard_refusal"]
    assert [event.times for event in found] == [1, 2] and oom.report["moment"]["event"] == found[1].time
    entry = next(entry for entry in run_of(path).entries if entry.severity == "oom")
    assert entry.lines[-1] == ("refused", "one of 2 requests, which an event counts together")


def test_another_request_is_another_entry(tmp_path: Path) -> None:
    run = run_of(refused(tmp_path, moment_at=0.5))
    assert [entry.severity for entry in run.entries] == ["critical", "oom"] and run.left_out == 0
    assert "refused" not in dict(run.entries[1].lines)


def test_a_run_is_as_long_as_memguard_suggest_says(tmp_path: Path) -> None:
    """From the first sample to the last one: an error that was recorded later adds nothing."""
    run = run_of(refused(tmp_path, moment_at=0.0))
    assert run.suggestion is not None
    (evidence,) = run.suggestion.runs
    assert run.seconds == evidence.end - evidence.begin == 1.5 and run.end - run.begin > 1.6
    text = texts.markdown([run])
    assert "4 samples over 1.5 s, " in text and "4 samples over 1.5 s from " in text
    assert ">1.5 s</strong><span>4 samples</span>" in page([run])


def test_the_evidence_names_a_request_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suggested(refused(tmp_path), capsys)["yaml"].count(" were refused ") == 1
