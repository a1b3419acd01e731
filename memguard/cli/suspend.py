"""`memguard suspend`: take another process off its GPUs."""

from __future__ import annotations

import json
import sys

import click

from memguard.cli.support import exit_codes, options


@click.command("suspend")
@click.argument("pid", type=options.Pid())
@click.option("--tree", is_flag=True, help="Also the processes that it has started, and theirs: all or none.")
@click.option("--unsafe", is_flag=True, help="Also if the process does not allow it: it may crash, or be lost.")
@click.option("-y", "--yes", is_flag=True, help="With --unsafe: do not ask. Required where nobody can answer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes. Never asks.")
@click.pass_context
def suspend(context: click.Context, pid: int, tree: bool, unsafe: bool, yes: bool, as_json: bool) -> None:
    """Take process PID off its GPUs: all that it has there goes into its host memory until `memguard resume PID`.

    The process must run under a budget with `suspend: {by_others: true}`, and then suspends itself if nothing speaks
    against it. Any other process is only suspended with --unsafe, which lists the hazards and asks before it begins;
    with --json or without a terminal it needs --yes. Only processes of your own, in this container.

    Exit code 0: it is suspended; 1: no, and why: it runs on; 2: there is no such process; 3: no NVIDIA
    driver; 4: the driver or the process does not say; 130: Ctrl-C.
    """
    from memguard._node.suspend import processes, remote_suspend
    from memguard._node.suspend.driver.client import Client
    from memguard.cli.support import waiting

    process, stop = remote_suspend.found(pid), remote_suspend.Stop()
    if not remote_suspend.simulated(process):  # else the answer is that its GPUs hold no memory
        exit_codes.require_gpu()
    if unsafe and not yes and (as_json or not _asks()):
        raise click.UsageError(
            "--unsafe may crash or lose the process, and nobody can be asked here: add --yes if that is meant"
        )
    if unsafe and not as_json:
        _warn()
        if not yes and not _confirmed(pid, tree):
            click.echo("nothing was changed", err=True)
            context.exit(remote_suspend.NO)
    with Client() as client:
        chosen, sizes = [process], dict[int, dict[str, int]]()
        if tree or unsafe:
            listed = processes.listing(processes.read(lambda: client))
            if tree:
                chosen = remote_suspend.family(process, listed, lambda row: row.state == "running")
            sizes = {one.pid: remote_suspend.sizes_of(listed.of(one.pid)) for one in chosen}
        results, interrupted = waiting.interruptible(
            lambda: remote_suspend.suspend(
                chosen, client, sizes=sizes, unsafe=unsafe, stop=stop, say=lambda line: click.echo(line, err=True)
            ),
            stop,
            "interrupted: what was done is taken back; interrupt again to leave it as it is",
        )
    if as_json:
        found = {"memguard_suspend": 1, "processes": [one.as_dict() for one in results]}
        if unsafe:
            found["hazards"] = list(remote_suspend.HAZARDS)
        click.echo(json.dumps(found, indent=2))
    else:
        for result in results:
            click.echo(result.text, err=result.code != remote_suspend.DONE)
    context.exit(waiting.exit_code(results, interrupted))


def _warn() -> None:
    from memguard._node.suspend import remote_suspend

    click.echo(
        "--unsafe: the process does not know that it is suspended. What memguard can neither see nor prevent from here "
        "(docs/suspend.md says more):",
        err=True,
    )
    for line in remote_suspend.HAZARDS:
        click.echo(f"  - {line}", err=True)


def _asks() -> bool:
    """Whether somebody can read the question and answer it."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _confirmed(pid: int, tree: bool) -> bool:
    from memguard._devices import proc

    below = " and all that it has started" if tree else ""
    return click.confirm(f"Suspend {proc.described(pid)}{below} all the same?", err=True)
