"""`memguard replay`: how a recorded run would have gone under another budget."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete, exit_codes, options

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._timeline.replay import TimelineOutcome


@click.command("replay")
@click.argument(
    "files", metavar="RECORDING", nargs=-1, required=True, type=click.Path(), shell_complete=complete.recordings
)
@options.budget()
@click.option(
    "--without-budget", is_flag=True, help="A timeline under the caps that it was recorded with, a trace without caps."
)
@options.devices
@click.option("--smallest", is_flag=True, help="Print only the smallest budget that fits a timeline.")
@options.as_json
@click.pass_context
def replay(
    context: click.Context,
    files: tuple[str, ...],
    budget: str | None,
    without_budget: bool,
    devices: tuple[str, ...],
    smallest: bool,
    as_json: bool,
) -> None:
    """Replay the recording of a run under another budget: which framework would hit its cap, and when.

    RECORDING is a timeline, or an allocation trace (docs/trace.md), which is replayed request by request on simulated
    GPUs: those of the trace, or those of --device. Without a budget file a timeline is replayed under the caps that it
    was recorded with. Nothing simulated counts as measured.

    Exit code 0: it fits: no cap is hit, no request refused; 1: it does not; 2: the budget or the recording is invalid.
    """
    from memguard.cli.support import budget_file, recordings

    recording = recordings.one(files, budget)
    trace = recordings.kind(recording) == "trace"
    if budget is not None and without_budget:
        raise click.UsageError("-c names a budget and --without-budget uses none: leave one out")
    if trace and smallest:
        raise click.UsageError("--smallest is for timelines: a trace has no caps to derive a budget from")
    if devices and not trace:
        raise click.UsageError("--device is for traces: a timeline is replayed on the GPUs that it was recorded on")
    path: str | None = budget
    notes: tuple[str, ...] = ()
    if budget is None and not without_budget and not smallest:
        if trace:
            path = str(budget_file.nearest("-c BUDGET, or --without-budget"))
        elif (found := budget_file.found()) is not None:
            path = str(found)
        if path is not None:
            notes = (f"the budget is {path}: -c names another one, --without-budget uses none",)
    declared = None if path is None else budget_file.load(path)
    if trace:
        fits = _trace(recording, declared, devices, notes, as_json)
    elif smallest:
        _smallest(recording, declared, as_json)
        return
    else:
        fits = _timeline(recording, declared, notes, as_json)
    context.exit(exit_codes.YES if fits else exit_codes.NO)


def _timeline(path: str, declared: Budget | None, notes: tuple[str, ...], as_json: bool) -> bool:
    outcome = _replayed(path, declared)
    outcome = replace(outcome, notes=(*notes, *outcome.notes))
    click.echo(json.dumps(outcome.as_dict(), indent=2) if as_json else outcome.render())
    return outcome.fits


def _smallest(path: str, declared: Budget | None, as_json: bool) -> None:
    from memguard.errors import TimelineError

    found = _replayed(path, declared).smallest
    if found is None or found.problem is not None:
        why = "no framework held anything" if found is None else found.problem
        raise TimelineError(f"{path}: no budget can be derived from it: {why}", fix="replay another run")
    text = found.yaml()
    if as_json:  # a budget too: YAML reads it
        import yaml

        text = json.dumps(yaml.safe_load(text), indent=2) + "\n"
    click.echo(text, nl=False)


def _replayed(path: str, declared: Budget | None) -> TimelineOutcome:
    from memguard._budget import policy
    from memguard._timeline import load_timeline
    from memguard._timeline.replay import replay_timeline, unmet_under
    from memguard.cli.support import working

    recorded = load_timeline(path)
    devices = [part.device for part in recorded.plan.devices]
    plan = recorded.plan if declared is None else policy.plan(declared, devices)
    with working.on(f"replays {path}") as work:
        outcome = replay_timeline(
            work.counted(recorded.records()),
            plan,
            recorded=declared is None,
            simulated=recorded.header.simulated,
            unmet=unmet_under(recorded.plan),
        )
    return replace(outcome, notes=(*outcome.notes, *plan.notes, *recorded.notes))


def _trace(path: str, declared: Budget | None, devices: tuple[str, ...], notes: tuple[str, ...], as_json: bool) -> bool:
    from memguard._budget import policy
    from memguard._devices.simulated import SimulatedHost
    from memguard._tools.simulate import replay as simulation
    from memguard._tools.simulate import trace as traces
    from memguard.cli.support import working
    from memguard.errors import PlanError

    with working.on(f"reads {path}"):
        recorded = traces.read(path)
    host = SimulatedHost(devices) if devices else simulation.host_of(recorded.header)
    plan = None
    if declared is not None:
        plan = policy.plan(declared, host.devices())
        if any(part.joined for part in plan.devices):
            fix = "write 'strategy: caps' for the simulation"
            raise PlanError([declared.problem(("strategy",), "simulated GPUs have no driver pool to share", fix)])
    caps = None if plan is None else {name: plan.caps(name) for part in plan.devices for name in part.caps}
    with working.on(f"simulates {path}"):
        outcome = simulation.simulate(recorded, host, caps, None if plan is None else plan.options)
    elastic = [] if plan is None else dict.fromkeys(name for part in plan.devices for name in part.elastic)
    if elastic:
        notes += (
            f"{' and '.join(elastic)}: elastic caps move while a program runs; here they stay as the plan begins",
        )
    outcome = replace(outcome, notes=(*outcome.notes, *notes))
    click.echo(json.dumps(outcome.as_dict(), indent=2) if as_json else outcome.render())
    return not outcome.refused
