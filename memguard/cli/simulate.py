"""`memguard simulate`: try a budget on a recorded trace, without a GPU."""

from __future__ import annotations

import json

import click

from memguard.cli.support import gpus


@click.command("simulate")
@click.argument("budget")
@click.argument("trace", required=False)
@gpus.option("--device", "devices")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--without-budget", is_flag=True, help="Replay without caps; BUDGET may then be left out.")
@click.pass_context
def simulate(
    context: click.Context,
    budget: str,
    trace: str | None,
    devices: tuple[str, ...],
    as_json: bool,
    without_budget: bool,
) -> None:
    """Replay the allocation trace TRACE under BUDGET on simulated GPUs.

    The GPUs are those of the trace, or the ones named with --device. Exit code 0: every allocation was served;
    1: at least one was refused; 2: the budget or the trace is invalid. Nothing simulated counts as measured.
    """
    from memguard import _config, _policy
    from memguard._devices.simulated import SimulatedHost
    from memguard._simulation import replay as simulation
    from memguard._simulation import trace as traces
    from memguard.cli.support import recordings
    from memguard.errors import TraceError

    if trace is None:
        if not without_budget:
            raise click.UsageError("give BUDGET and TRACE, or only TRACE with --without-budget")
        trace = budget
    elif (found := recordings.kind(budget)) is not None and not without_budget:
        raise click.UsageError(f"{budget} is a {found}, not a budget: memguard simulate BUDGET TRACE")
    if recordings.kind(trace) == "timeline":
        replay = f"memguard replay {trace}" + ("" if without_budget else f" --budget {budget}")
        raise TraceError(f"{trace}: it is a timeline, not a trace\n    fix: {replay}")
    plan = None
    declared = None if without_budget else _config.load(budget)
    recorded = traces.read(trace)
    host = SimulatedHost(devices) if devices else simulation.host_of(recorded.header)
    if declared is not None:
        plan = _policy.plan(declared, host.devices())
    if plan is not None:
        names = {name for part in plan.devices for name in part.caps}
        outcome = simulation.simulate(recorded, host, {name: plan.caps(name) for name in names}, plan.options)
    else:
        outcome = simulation.simulate(recorded, host)
    click.echo(json.dumps(outcome.as_dict(), indent=2) if as_json else outcome.render())
    context.exit(1 if outcome.refused else 0)
