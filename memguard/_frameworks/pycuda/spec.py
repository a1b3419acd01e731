"""PyCUDA's `FrameworkSpec`: static properties that the budget, plan, reports and simulation read."""

from fractions import Fraction

from memguard._base.framework_spec import ErrorPattern, Exchanged, FrameworkSpec, Option
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="pycuda",
    title="PyCUDA",
    place=50,
    module="pycuda",
    adapter="PyCUDA",
    weight=2,
    colour="#56b4e9",
    terminal_colour="bright_blue",
    uncounted=True,
    exchanged=Exchanged("PyCUDAArrays"),
    pooled="PooledPyCUDA",
    modules=8 * MIB,
    workspace=32 * MIB,
    cap_is="a counted pool behind mem_alloc and gpuarray",
    hook="pycuda.driver",
    allocator="pool",
    trims_on_own_thread=True,
    options=(
        Option(
            name="context",
            kind="word",
            default="primary",
            words=("primary", "own"),
            synonyms={
                "shared": "primary",
                "main": "primary",
                "private": "own",
                "second": "own",
                "separate": "own",
            },
            description="primary: Device.make_context() and pycuda.autoinit give the CUDA context that the other "
            "frameworks share. own: they make a second one, which takes about 518 MiB more; reserve: auto keeps "
            "room for one.",
            elsewhere="{name} works in the primary context as it is",
            advice="write 'primary' for the one that all share, or 'own' for a second one",
            aliases=("ctx",),
        ),
    ),
    families=("pycuda",),
    errors=(
        ErrorPattern("gpu", True, "PyCUDA's own type", type=r"^pycuda\._driver\.MemoryError$"),
        ErrorPattern("gpu", False, "a context takes half a GiB", "wasn't able to create a context"),
    ),
    context_module="pycuda.autoinit",
    rounds_up=Fraction(1, 16),  # a bin is up to 1/16 larger than the request: 272 MiB for 256 MiB
    pads=True,
    requests_room=True,
)
