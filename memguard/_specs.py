"""What memguard knows of each framework, one row each. Pure: nothing here imports a framework.

The budget, its schema, the plan, the ledger, the reports, the monitor, the doctor and the simulation all read these
rows. How a framework is capped is in its adapter, which the row names. Adding a framework takes an adapter file under
`_frameworks/`, a row here, and a line in CHANGELOG.md.

Figures are bytes, measured on one NVIDIA H200 (driver 580.159, CUDA 13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from memguard._units import MIB


@dataclass(frozen=True)
class Option:
    """A setting that one framework has in the budget, beside its share or limit.

    `kind` says what it holds: "flag" is true or false, "count" a whole number from 0 to `most`, "word" one of `words`.
    `synonyms` are other words that people write, each with the word that it means. `elsewhere` says what to answer when
    the setting stands below another framework, whose name replaces `{name}`; `fix` says what to do then.
    """

    name: str
    kind: Literal["flag", "count", "word"]
    default: bool | int | str
    description: str
    elsewhere: str
    fix: str = "remove it"
    most: int = 0
    words: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FrameworkSpec:
    """One framework.

    name              its key in the budget, and its name in every table and report
    title             its name in sentences
    module            what is imported to have it
    adapter           module and class of its adapter: "memguard._frameworks.numba:Numba"
    modules           the most that was measured outside its cap: kernels, modules, library workspaces
    workspace         what `reserve: auto` keeps for the same; never less than `modules`
    cap_is            how its cap holds, for `memguard plan`
    allocator         which model of an allocator stands in for it on simulated GPUs
    aliases           other names that people write for it in a budget
    options           its own settings in the budget
    families          first parts of the type names of its errors
    never_gives_back  its pool returns nothing to the driver while the process lives
    own_trim          the framework's own call that frees its cache, for a framework that the budget does not name
    """

    name: str
    title: str
    module: str
    adapter: str
    modules: int
    workspace: int
    cap_is: str
    allocator: str
    aliases: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    families: tuple[str, ...] = ()
    never_gives_back: bool = False
    own_trim: str | None = None


_ROWS = (
    FrameworkSpec(
        name="torch",
        title="PyTorch",
        module="torch",
        adapter="memguard._frameworks.torch.adapter:Torch",
        # 92 MiB after the first tensor, 158 with cuBLAS, 240 after training a small network, 344 with cuSOLVER.
        modules=344 * MIB,
        workspace=384 * MIB,
        cap_is="its allocator's fraction, to the byte",
        allocator="torch",
        aliases=("pytorch",),
        options=(
            Option(
                name="nccl",
                kind="count",
                default=0,
                most=64,  # more are a typing mistake: 64 communicators would take 31 GiB
                description="How many NCCL communicators torch.distributed keeps at once on each GPU: one for each "
                "process group that communicates. They lie outside torch's cap; reserve: auto keeps room for them.",
                elsewhere="it counts the communicators of torch.distributed",
                fix="move it below torch, or remove it",
            ),
        ),
        families=("torch",),
        own_trim="torch.cuda.empty_cache()",
    ),
    FrameworkSpec(
        name="tensorflow",
        title="TensorFlow",
        module="tensorflow",
        adapter="memguard._frameworks.tensorflow:TensorFlow",
        modules=92 * MIB,
        workspace=256 * MIB,
        cap_is="memory_limit, set before its first operation",
        allocator="bfc",
        aliases=("tf", "keras"),
        options=(
            Option(
                name="growth",
                kind="flag",
                default=True,
                description="true: TensorFlow's pool grows up to its cap as it needs memory. false: it takes its whole "
                "cap at its first operation.",
                elsewhere="{name} always grows as it needs memory",
            ),
        ),
        families=("tensorflow",),
        never_gives_back=True,
    ),
    FrameworkSpec(
        name="cupy",
        title="CuPy",
        module="cupy",
        adapter="memguard._frameworks.cupy.adapter:CuPy",
        # 94 MiB beside others, 60 more with cuBLAS, 24 with cuFFT, 100 with cuSOLVER.
        modules=262 * MIB,
        workspace=320 * MIB,
        cap_is="the limit of its memory pool",
        allocator="cupy",
        aliases=("cupy-cuda12x", "cupy-cuda13x"),
        families=("cupy", "cupy_backends"),
        own_trim="cupy.get_default_memory_pool().free_all_blocks()",
    ),
    FrameworkSpec(
        name="jax",
        title="JAX",
        module="jax",
        adapter="memguard._frameworks.jax:JAX",
        # 34 MiB at its first operation, 204 with cuSOLVER and cuFFT.
        modules=206 * MIB,
        workspace=320 * MIB,
        cap_is="memory_fraction, set before its backend starts",
        allocator="xla",
        aliases=("flax",),
        families=("jax", "jaxlib"),
        never_gives_back=True,
    ),
    FrameworkSpec(
        name="pycuda",
        title="PyCUDA",
        module="pycuda",
        adapter="memguard._frameworks.pycuda.adapter:PyCUDA",
        modules=8 * MIB,
        workspace=32 * MIB,
        cap_is="a counted pool behind mem_alloc and gpuarray",
        allocator="pool",
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
            ),
        ),
        families=("pycuda",),
    ),
    FrameworkSpec(
        name="numba",
        title="Numba",
        module="numba",
        adapter="memguard._frameworks.numba:Numba",
        modules=8 * MIB,
        workspace=32 * MIB,
        cap_is="a memory manager that counts its allocations",
        allocator="emm",
        families=("numba",),
    ),
)

SPECS: Mapping[str, FrameworkSpec] = MappingProxyType({row.name: row for row in _ROWS})
"""The frameworks that a budget may name, by name, in the order in which they are listed."""
