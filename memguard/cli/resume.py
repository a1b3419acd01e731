"""`memguard resume`: bring a suspended process back on its GPUs."""

from __future__ import annotations

import json

import click

from memguard.cli.support import options


@click.command("resume")
@click.argument("pid", type=options.Pid())
@click.option("--tree", is_flag=True, help="Also the processes that it has started, and theirs.")
@options.duration("--wait", "Wait at most this long for room; else until there is room.", least="0s", most="168h")
@options.as_json
@click.pass_context
def resume(context: click.Context, pid: int, tree: bool, wait: float | None, as_json: bool) -> None:
    """Bring process PID back on its GPUs: whoever suspended it, and however far that got before it was killed.

    It waits until there is room, and says who holds it. Ctrl-C leaves the process suspended and whole.

    Exit code 0: it runs; 1: no, and why; 2: there is no such process; 3: no NVIDIA driver; 4: the driver or the
    process does not say; 130: Ctrl-C.
    """
    from memguard._node.suspend import processes, remote_suspend
    from memguard._node.suspend.driver.client import Client
    from memguard.cli.support import waiting

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
                        process, client, timeout=wait, progress=progress, cancel=stop.once
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
    context.exit(waiting.exit_code(results, interrupted))
