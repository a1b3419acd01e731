"""`memguard reclaim`: what each framework of a recorded process could give back."""

from __future__ import annotations

import json
from datetime import UTC

import click

from memguard.cli.support import complete


@click.command("reclaim")
@click.argument("timeline", type=click.Path(), shell_complete=complete.files(".jsonl"))
@click.option("--dry-run", is_flag=True, help="Required: another process cannot be trimmed from here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
def reclaim(timeline: str, dry_run: bool, as_json: bool) -> None:
    """Say what each framework could give back, by the last sample of TIMELINE.

    Only the process that holds a cache can give it back, with memguard.trim(). So this frees nothing, and without
    --dry-run it is an error. Exit code 0: figures were printed; 2: the timeline is invalid or has no sample.
    """
    if not dry_run:
        raise click.UsageError(
            "only the process that holds a cache can give it back: call memguard.trim() in it. "
            f"`memguard reclaim --dry-run {timeline}` says what it could give back"
        )
    from collections import deque
    from datetime import datetime

    from memguard._guard import figures
    from memguard._timeline import load_timeline
    from memguard.cli.support import working
    from memguard.errors import TimelineError

    recorded = load_timeline(timeline)
    with working.on(f"reads {timeline}") as work:
        last = deque(work.counted(recorded.samples()), maxlen=1)
    if not last:
        raise TimelineError(f"{timeline}: it has no sample", fix="let the monitor run for longer than its interval")
    found = figures.of_sample(last[0], recorded.plan, recorded.header.simulated)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    when = datetime.fromtimestamp(found.time, UTC).isoformat(" ", "seconds")
    click.echo(f"process {recorded.header.pid}, {when}\n{found}")
    for note in recorded.notes:
        click.echo(f"note: {note}")
