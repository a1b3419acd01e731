"""`memguard simulate`: try a budget on a recorded trace, without a GPU."""

from __future__ import annotations

import json

import click

from memguard.cli.support import complete, gpus


@click.command("simulate")
@click.argument(
    "files",
    metavar="[BUDGET] TRACE",
    nargs=-1,
    required=True,
    type=click.Path(),
    shell_complete=complete.recorded,
)
@click.option(
    "--budget",
    type=click.Path(),
    shell_complete=complete.budgets,
    help="The budget to try, if it is not given before TRACE.",
)
@gpus.option("--device", "devices")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--without-budget", is_flag=True, help="Replay without caps; BUDGET may then be left out.")
@click.pass_context
def simulate(
    context: click.Context,
    files: tuple[str, ...],
    budget: str | None,
    devices: tuple[str, ...],
    as_json: bool,
    without_budget: bool,
) -> None:
    """Replay the allocation trace TRACE under BUDGET on simulated GPUs.

    The GPUs are those of the trace, or the ones named with --device. Exit code 0: every allocation was served;
    1: at least one was refused; 2: the budget or the trace is invalid. Nothing simulated counts as measured.
    """
    from dataclasses import replace

    from memguard import _budget
    from memguard._budget import policy
    from memguard._devices.simulated import SimulatedHost
    from memguard._tools.simulate import replay as simulation
    from memguard._tools.simulate import trace as traces
    from memguard.cli.support import recordings, working
    from memguard.errors import PlanError, TraceError

    given = recordings.given(files, budget, "trace", without_budget=without_budget)
    if given.wrong is not None:
        raise TraceError(f"{given.recording}: it is a timeline, not a trace", fix=given.wrong)
    if given.budget is None and not without_budget:
        raise click.UsageError("give BUDGET and TRACE, or only TRACE with --without-budget")
    plan = None
    declared = None if without_budget or given.budget is None else _budget.load(given.budget)
    with working.on(f"reads {given.recording}"):
        recorded = traces.read(given.recording)
    host = SimulatedHost(devices) if devices else simulation.host_of(recorded.header)
    if declared is not None:
        plan = policy.plan(declared, host.devices())
        if any(part.joined for part in plan.devices):
            fix = "write 'strategy: caps' for the simulation"
            raise PlanError([declared.problem(("strategy",), "simulated GPUs have no driver pool to share", fix)])
    caps = None if plan is None else {name: plan.caps(name) for part in plan.devices for name in part.caps}
    with working.on(f"simulates {given.recording}"):
        outcome = simulation.simulate(recorded, host, caps, None if plan is None else plan.options)
    elastic = [] if plan is None else dict.fromkeys(name for part in plan.devices for name in part.elastic)
    if elastic:
        note = f"{' and '.join(elastic)}: elastic caps move while a program runs; here they stay as the plan begins"
        outcome = replace(outcome, notes=(*outcome.notes, note))
    click.echo(json.dumps(outcome.as_dict(), indent=2) if as_json else outcome.render())
    context.exit(1 if outcome.refused else 0)
