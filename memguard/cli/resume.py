"""`memguard resume`: bring a suspended process back on its GPUs."""

from __future__ import annotations

import json

import click

from memguard.cli.support.pid import Pid


@click.command("resume")
@click.argument("pid", type=Pid())
@click.option("--tree", is_flag=True, help="Also the processes that it has started, and theirs.")
@click.option("--wait", help='Wait for room at most this long, as "60s" or "10min"; without it, until there is room.')
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
@click.pass_context
def resume(context: click.Context, pid: int, tree: bool, wait: str | None, as_json: bool) -> None:
    """Bring process PID back on its GPUs: whoever suspended it, and however far that got before it was killed.

    It waits until there is room, and says who holds it. Ctrl-C leaves the process suspended and whole.

    Exit code 0: it runs; 1: no, and why; 2: the driver or the process does not say; 130: Ctrl-C.
    """
    from memguard._base.units import parse_duration
    from memguard._node.suspend import processes, remote_suspend
    from memguard._node.suspend.driver.client import Client
    from memguard.cli.support import waiting

    try:
        seconds = None if wait is None else parse_duration(wait)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--wait") from None
    chosen, stop = [remote_suspend.found(pid)], remote_suspend.Stop()
    with Client() as client:
        if tree:
            listed = processes.listing(processes.read(lambda: client))
            chosen = remote_suspend.family(chosen[0], listed, lambda row: row.state != "running")[::-1]
        results = []
        interrupted = False
        for process in chosen:
            with waiting.progress() as progress:
                result, interrupted = waiting.interruptible(
                    lambda process=process, progress=progress: remote_suspend.resume(  # type: ignore[misc]
                        process, client, timeout=seconds, progress=progress, cancel=stop.once
                    ),
                    stop,
                    "interrupted: it stays suspended, unless its restore has begun",
                )
            results.append(result)
            if interrupted:
                break
    if as_json:
        click.echo(json.dumps({"memguard_resume": 1, "processes": [one.as_dict() for one in results]}, indent=2))
    else:
        for one in results:
            click.echo(one.text, err=one.code != remote_suspend.DONE)
    code = max(one.code for one in results)
    context.exit(130 if interrupted and code else code)
