"""Numba's `FrameworkSpec`: static properties that the budget, plan, reports and simulation read."""

from memguard._base.framework_spec import Examined, Exchanged, FrameworkSpec
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="numba",
    title="Numba",
    place=60,
    module="numba",
    adapter="Numba",
    weight=1,
    colour="#999933",
    terminal_colour="bright_cyan",
    uncounted=True,
    frees_late=True,
    examined=Examined(length=1),
    exchanged=Exchanged("NumbaArrays", packages=("numba_cuda",)),
    pooled="PooledNumba",
    modules=8 * MIB,
    workspace=32 * MIB,
    cap_is="a memory manager that counts its allocations",
    hook="numba.cuda",
    allocator="emm",
    families=("numba",),
    pads=True,
    install="numba-cuda[cu13]",
    requests_room=True,
)
