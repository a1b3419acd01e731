"""`memguard replay`: how a recorded run would have gone under another budget."""

from __future__ import annotations

import json

import click

from memguard.cli.support import complete


@click.command("replay")
@click.argument(
    "files",
    metavar="[BUDGET] TIMELINE",
    nargs=-1,
    required=True,
    type=click.Path(),
    shell_complete=complete.recorded,
)
@click.option(
    "--budget",
    type=click.Path(),
    shell_complete=complete.budgets,
    help="The budget to try; without one the caps of the recording.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
@click.option("--smallest", is_flag=True, help="Print only the smallest budget that fits, as YAML or JSON.")
@click.pass_context
def replay(context: click.Context, files: tuple[str, ...], budget: str | None, as_json: bool, smallest: bool) -> None:
    """Replay the timeline TIMELINE of a run under another budget: who would have hit a cap, and when.

    Exit code 0: it would have fitted; 1: a framework would have hit its cap, or would fit only with less
    fragmentation; 2: the budget or the timeline is invalid.
    """
    from dataclasses import replace

    from memguard import _budget
    from memguard._budget import policy
    from memguard._timeline import load_timeline
    from memguard._timeline.replay import replay_timeline, unmet_under
    from memguard.cli.support import recordings, working
    from memguard.errors import TimelineError

    given = recordings.given(files, budget, "timeline")
    timeline = given.recording
    if given.wrong is not None:
        raise TimelineError(f"{timeline}: it is a trace, not a timeline", fix=given.wrong)
    declared = None if given.budget is None else _budget.load(given.budget)
    recorded = load_timeline(timeline)
    devices = [part.device for part in recorded.plan.devices]
    plan = recorded.plan if declared is None else policy.plan(declared, devices)
    with working.on(f"replays {timeline}") as work:
        outcome = replay_timeline(
            work.counted(recorded.records()),
            plan,
            recorded=declared is None,
            simulated=recorded.header.simulated,
            unmet=unmet_under(recorded.plan),
        )
    outcome = replace(outcome, notes=(*outcome.notes, *plan.notes, *recorded.notes))
    if not smallest:
        click.echo(json.dumps(outcome.as_dict(), indent=2) if as_json else outcome.render())
        context.exit(0 if outcome.fits else 1)
    if outcome.smallest is None or outcome.smallest.problem is not None:
        why = "no framework held anything" if outcome.smallest is None else outcome.smallest.problem
        raise TimelineError(f"{timeline}: no budget can be derived from it: {why}", fix="replay another run")
    text = outcome.smallest.yaml()
    if as_json:  # a budget too: YAML reads it
        import yaml

        text = json.dumps(yaml.safe_load(text), indent=2) + "\n"
    click.echo(text, nl=False)
