"""`memguard plan --ranks`: one plan for the ranks of a node, and what they take of each GPU together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memguard._base.types import Device, DevicePlan, Plan

if TYPE_CHECKING:
    from memguard._budget import Budget


class Node(NamedTuple):
    """`plan` is what a rank gets of each GPU, and `ranks` the local ranks that use it, by UUID. `size` is of all.

    `nccl`: the reserve has room for a communicator that the budget does not name.
    """

    plan: Plan
    ranks: Mapping[str, Sequence[int]]
    size: int
    nccl: bool

    def together(self, part: DevicePlan) -> int:
        """Bytes of that GPU which its ranks may take."""
        return part.limit * len(self.ranks[part.device.uuid])


def of(budget: Budget, devices: Sequence[Device], count: int) -> Node:
    """The plan of a node with so many ranks, as its launcher would start them. Raises PlanError."""
    from memguard._budget import policy
    from memguard._budget import ranks as _ranks
    from memguard._budget.parts import without_nccl

    rank = _ranks.ProcessRank("a launcher", 0, count, 0, count)
    found = None
    if budget.ranks is not None:
        auto = budget.ranks == "auto"
        found = _ranks.sharing(rank, len(devices), {}) if auto else _ranks.declared(int(budget.ranks), rank)
    resolved = policy.plan(budget, devices, found)
    ranks = {}
    for position, device in enumerate(devices):
        ordinal = position if device.ordinal is None else device.ordinal
        ranks[device.uuid] = range(ordinal, count, len(devices))
    nccl = found is not None and found.nccl and bool(without_nccl(budget))
    return Node(resolved, ranks, count, nccl)


def notes(node: Node, budget: Budget) -> Iterator[str]:
    """Those of the plan, and what is wrong with so many ranks."""
    from memguard._base.units import format_size

    yield from node.plan.notes
    for part in node.plan.devices:
        if (sum_ := node.together(part)) > part.device.usable:
            fix = "write 'ranks: auto'" if budget.ranks is None else f"write 'ranks: {{per_gpu: {_most(node)}}}'"
            yield (
                f"the ranks on {part.device.name} ({part.device.uuid}) may take {format_size(sum_)} together, more "
                f"than it has: {fix} in the budget, so that they divide its limit"
            )


def _most(node: Node) -> int:
    return max(len(ranks) for ranks in node.ranks.values())


def tables(node: Node) -> list[object]:
    from rich import box
    from rich.table import Table

    from memguard._base.units import format_size

    found: list[object] = []
    for part in node.plan.devices:
        ranks = node.ranks[part.device.uuid]
        mark = " (simulated)" if part.device.simulated else ""
        title = f"{part.device.name}{mark}  {part.device.uuid}"
        if not ranks:
            found.append(f"{title}: no rank uses it\n")
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, min_width=len(title))
        table.add_column("")
        table.add_column(f"local rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}", justify="right")
        table.add_column("together", justify="right")
        reserve = "reserve, 1 NCCL" if node.nccl and part.reserve_source == "auto" else "reserve"
        for name, size in (*part.caps.items(), (reserve, part.reserve)):
            table.add_row(name, format_size(size), format_size(size * len(ranks)))
        table.add_section()
        table.add_row("limit", format_size(part.limit), format_size(node.together(part)))
        table.add_row("CUDA can give", "", format_size(part.device.usable))
        found.append(table)
    return found


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) < 5:
        return ", ".join(str(rank) for rank in ranks)
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def as_dict(node: Node, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of one rank as `memguard plan --json` has it, with the local ranks of each GPU, and their sum."""
    devices = [
        {**one, "local_ranks": [*node.ranks[part.device.uuid]], "together": node.together(part)}
        for one, part in zip(plan["devices"], node.plan.devices, strict=True)
    ]
    return {**plan, "ranks": node.size, "devices": devices}
