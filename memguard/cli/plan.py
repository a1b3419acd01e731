"""`memguard plan`: what each framework would get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete, options

if TYPE_CHECKING:
    from memguard._base.types import Plan
    from memguard._budget import Budget


@click.command("plan")
@click.argument(
    "named",
    metavar="[BUDGET]",
    type=click.Path(),
    required=False,
    shell_complete=complete.budgets,
    callback=options.budget_name,
)
@options.budget("The budget file, as the argument BUDGET.")
@options.devices
@click.option("--ranks", type=click.IntRange(1, 1024), help="For so many ranks on this node: which GPU each uses.")
@options.as_json
def plan(named: str | None, budget: str | None, devices: tuple[str, ...], ranks: int | None, as_json: bool) -> None:
    """Show what each framework would get on this machine's GPUs, or on a named one, and how each cap holds.

    BUDGET is by default budget.yaml in this folder or one above.
    """
    import json

    from memguard._base.text import visible
    from memguard._budget import policy
    from memguard._devices.host import Host
    from memguard.cli.support import budget_file, printing
    from memguard.errors import DeviceError

    loaded = budget_file.load(budget_file.one(named, budget) or str(budget_file.nearest("memguard plan FILE")))
    host: Host
    if devices:
        from memguard._devices.simulated import SimulatedHost

        host = SimulatedHost(devices)
        found = host.devices()
    else:
        from memguard._devices.real import RealHost

        try:
            host = RealHost()
            found = host.devices(ordinals=True)
        except DeviceError as error:
            advice = error.advice.with_alternatives("plan for another GPU with --device h200")
            raise DeviceError(advice) from None
    if ranks is None:
        resolved = policy.plan(loaded, found)
        data, tables, notes = _as_dict(resolved), _tables(resolved, loaded), [*resolved.notes, *_of_ranks(loaded)]
    else:
        from memguard.cli.support import node

        whole = node.of(loaded, found, ranks)
        data, tables = node.as_dict(whole, _as_dict(whole.plan)), node.tables(whole)
        notes = [*node.notes(whole, loaded)]
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    console = printing.console()
    if not console.is_terminal:
        console.width = 80
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(f"note: {visible(note)}")


def _of_ranks(budget: Budget) -> list[str]:
    if budget.ranks == "auto":
        return ["ranks: this is the plan of one process; with --ranks 4 that of a node with four ranks"]
    if budget.ranks is not None and budget.ranks > 1:
        return [f"ranks: this is the plan of one process, of {budget.ranks} that share each GPU"]
    return []


def _tables(resolved: Plan, budget: Budget) -> list[object]:
    from rich import box
    from rich.table import Table

    from memguard._base.units import GRANULE, format_size
    from memguard._budget import shared_pool
    from memguard._frameworks.specs import SPECS

    tables: list[object] = []
    for part in resolved.devices:
        mark = " (simulated)" if part.device.simulated else ""
        table = Table(
            title=f"{part.device.name}{mark}  {part.device.uuid}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("")
        table.add_column("bytes", justify="right")
        table.add_column("how it holds")
        for name, cap in part.caps.items():
            growth = resolved.options.get(name, {}).get("growth")
            how = shared_pool.how(part, name) if name in part.joined else SPECS[name].cap_is
            if name in part.elastic:
                least, most = part.elastic[name]
                how = f"now; min {format_size(least)}, max {format_size(most)}: {how}"
            table.add_row(name, format_size(cap), f"{how}; taken whole at once" if growth is False else how)
        table.add_section()
        table.add_row("reserve", format_size(part.reserve), _reserve(part.reserve_source, budget))
        lent = any(part.caps[name] < most for name, (_, most) in part.elastic.items())
        rest = "elastic frameworks may take it" if lent and part.unallocated >= GRANULE else "no framework may take it"
        table.add_row("unallocated", format_size(part.unallocated), rest)
        lease = "; leased" if budget.device.lease else ""
        table.add_row(
            "limit", format_size(part.limit), f"of {format_size(part.device.usable)} that CUDA can give{lease}"
        )
        tables.append(table)
    return tables


def _reserve(source: str, budget: Budget) -> str:
    from memguard._budget import policy

    count = policy.communicators(budget)
    nccl = f", {count} NCCL communicator{'s' if count > 1 else ''}" if count else ""
    second = ", a second context" if policy.own_context(budget) else ""
    return f"{source}: context and library workspaces{second}{nccl}"


def _as_dict(resolved: Plan) -> dict[str, object]:
    return {
        "memguard_plan": 1,
        "notes": list(resolved.notes),
        "devices": [
            {
                "uuid": part.device.uuid,
                "name": part.device.name,
                "simulated": part.device.simulated,
                "usable": part.device.usable,
                "limit": part.limit,
                "reserve": part.reserve,
                "reserve_source": part.reserve_source,
                "caps": dict(part.caps),
                "elastic": {name: {"min": least, "max": most} for name, (least, most) in part.elastic.items()},
                "joined": list(part.joined),
                "unallocated": part.unallocated,
            }
            for part in resolved.devices
        ],
    }
