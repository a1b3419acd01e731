"""Whether a suspended process may come back, for who brings it back from outside."""

from __future__ import annotations

from memguard._base.units import format_size
from memguard._node.identity import Process, machine
from memguard._node.leases import decide, said, store
from memguard._node.leases.folders import folder
from memguard._node.leases.store import Store


def refusal(process: Process, where: str | None = None) -> str:
    """Why not, with its remedy: it gave its lease back, and others have it now. Empty if nothing is against it.

    Raises MemguardError if the leases cannot be read.
    """
    claims = Store(where or folder(make=False)).read_soon(store.claims_of) or []
    here = machine()
    for claim in claims:
        if claim.state != "held" and (claim.pid, claim.start, claim.machine) == (*process, here):
            wants, asked = store.wants(claims), store.want(claim)
            if claim.state == "off":  # it would come after all who wait now
                asked = asked._replace(id=max(one.id for one in claims) + 1, replaces=None)
                wants = [*wants, asked]
            if asked.id in decide.grantable(wants, store.capacities(claims)):
                continue
            others, ahead = decide.before(asked, wants)
            held = [one for one in claims if one.id in {other.id for other in others}]
            lines = [said.holding(one, gpu, here) for one in held for gpu in claim.parts if gpu in one.parts]
            sizes = ", ".join(format_size(part.bytes) for part in claim.parts.values())
            waits = f", and {len(ahead)} wait before it" if ahead else ""
            return "\n".join([
                f"process {process.pid} gave its lease of {sizes} back, and there is no room for it again{waits}",
                "    fix: end or suspend one of those below; with `on_wait: suspend-idle` it comes back by itself",
                *(f"        {line}" for line in lines),
            ])  # fmt: skip
    return ""
