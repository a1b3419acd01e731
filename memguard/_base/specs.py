"""What memguard knows of each framework, one row each. Pure: nothing here imports a framework.

The budget, its schema, the plan, the ledger, the reports, the monitor, the doctor and the simulation all read these
rows. How a framework is capped is in its adapter, which the row names. Adding a framework takes an adapter file under
`_frameworks/`, a row and the name (`FrameworkName`) here, and a fragment in `changes/`.

Figures are bytes, measured on one NVIDIA H200 (driver 580.159, CUDA 13). Those of what no framework owns, the CUDA
context and NCCL, are in `OVERHEADS`. `python -m bench run overheads` holds all but NCCL's to a GPU again.
"""

# Without `from __future__ import annotations`, which makes typing compile the annotation of each field of a NamedTuple.

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

from memguard._base.units import MIB

FrameworkName: TypeAlias = Literal["torch", "tensorflow", "cupy", "jax", "pycuda", "numba"]
"""The names of the rows below, for type checkers and editors, which cannot read those. For a name that is only known at
run time: `framework_name`."""
ArraysName: TypeAlias = FrameworkName | Literal["numpy"]
"""What `exchange` can make arrays of."""
CacheName: TypeAlias = FrameworkName | Literal["shared pool"]
"""What `trim` can empty: the second is the pool of `strategy: pool`, which several frameworks draw from."""
CONTEXT = 544 * MIB
"""What `reserve: auto` keeps for a CUDA context: 518 MiB, and room for its growth. Contexts are shared: kept once."""
SLACK = 64 * MIB
"""What `reserve: auto` leaves for the driver's own rounding."""
SECOND_CONTEXT = "second context"
"""The name of a CUDA context beside the primary one. A third is `second context 2`."""


LAZY = 8 * MIB
"""What the ledger takes for kernels that are loaded at their first launch, for each live framework in all. The driver
takes 2 MiB for several of them."""
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"cublas": "libcublas.so", "cudnn": "libcudnn_", "cusolver": "libcusolver.so", "cufft": "libcufft.so"}
)
"""Libraries whose first use takes GPU memory, each with how its file's name begins. Of cuDNN these are the parts that
it loads at its first use: `libcudnn.so` itself comes with an import."""
KERNELS = "kernels"
DOORS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cublas": ("libcublas.so", ("cublasCreate_v2",)),
        "cudnn": ("libcudnn_graph.so", ("cudnnCreate",)),
        "cusolver": ("libcusolver.so", ("cusolverDnCreate",)),
        "cufft": ("libcufft.so", ("cufftPlan1d", "cufftXtMakePlanMany")),
        KERNELS: (
            "libcuda.so",
            ("cuLibraryLoadData", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary"),
        ),
    }
)
"""The functions with which each use of a library begins, which makes a handle or a plan, and with which kernels are
loaded: how the name of their library's file begins, and theirs."""


class Outside(NamedTuple):
    """Memory that lies outside every cap. `modules` and `workspace` are as in `FrameworkSpec`."""

    modules: int
    workspace: int


OVERHEADS: Mapping[str, Outside] = MappingProxyType(
    {
        "context": Outside(518 * MIB, CONTEXT),
        # NCCL takes 838 MiB at the first collective, and 486 MiB for each further communicator: `nccl 2`, `nccl 3`, ...
        "nccl 1": Outside(838 * MIB, 896 * MIB),
        "nccl": Outside(486 * MIB, 512 * MIB),
        SECOND_CONTEXT: Outside(518 * MIB, CONTEXT),
    }
)
"""What lies outside the caps and belongs to no framework, by name. A numbered name counts as the one without."""


class Option(NamedTuple):
    """A setting that one framework has in the budget, beside its share or limit.

    `kind` says what it holds: "flag" is true or false, "count" a whole number from 0 to `most`, "word" one of `words`.
    `advice` says what to write instead of a wrong value. `synonyms` are other words that people write for a value, each
    with the word that it means, and `aliases` other names that they write for the setting. `elsewhere` says what to
    answer when the setting stands below another framework, whose name replaces `{name}`; `fix` says what to do then.
    `applied` is False for a setting that only changes the reserve: the adapter does not get it.
    """

    name: str
    kind: Literal["flag", "count", "word"]
    default: bool | int | str
    description: str
    elsewhere: str
    fix: str = "remove it"
    advice: str = ""
    most: int = 0
    words: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = MappingProxyType({})
    aliases: tuple[str, ...] = ()
    applied: bool = True


Memory = Literal["gpu", "pinned", "host", "disk", "none"]
"""What an error says ran out. `pinned` is page-locked host memory, `host` the CPU's, `disk` a full file system
(/dev/shm too), `none` nothing."""


class ErrorPattern(NamedTuple):
    """One of a framework's own out-of-memory errors. The first pattern of the row that fits wins.

    `text` is searched in the error's text, ignoring case, `type` in the qualified name of its type and of each base
    class; both are regular expressions, and both must fit. Errors are only searched if a type's name contains "Memory"
    or the text contains one of `STEMS` in `memguard._oom.classify`. Not `certain`: the same words have other causes.
    `why` says in a few words why they mean that. `shared`: other frameworks use the same words, so the type of the
    error decides who asked for the memory. `refused`: the requester's own allocator says so, which refuses for two
    reasons only: its cap and the full GPU.
    """

    memory: Memory
    certain: bool
    why: str
    text: str = ""
    type: str = ""
    shared: bool = False
    refused: bool = False


class Allocators(NamedTuple):
    """The variable by which a user chooses a framework's allocator, and on which choices no cap can be set.

    `uncapped` has each known one with the reason, as the end of a sentence that begins with the setting. `unlimited`
    are those of them that keep to no limit at all. `capped` are the values under which a cap holds, as it does under an
    empty one, and `unknown` is the reason for any other. Without it any other is the framework's default allocator.
    """

    variable: str = ""
    uncapped: Mapping[str, str] = MappingProxyType({})
    unlimited: frozenset[str] = frozenset()
    capped: frozenset[str] = frozenset()
    unknown: str | None = None

    def why_uncapped(self, value: str) -> str | None:
        """Why no cap can be set on the allocator of this name; None if one can."""
        name = value.strip().lower()
        return self.uncapped.get(name, None if not name or name in self.capped else self.unknown)


_NO_CHOICE = Allocators()


@dataclass(frozen=True, eq=False, repr=False)
class FrameworkSpec:
    """One framework. The fields without a default are required.

    name              its key in the budget, and its name in every table and report
    title             its name in sentences
    module            what is imported to have it
    adapter           module and class of its adapter: "memguard._frameworks.numba.adapter:Numba"
    modules           the most that was measured outside its cap: kernels, modules, library workspaces
    workspace         what `reserve: auto` keeps for the same; never less than `modules`
    first_uses        the part of `modules` that comes with the first use of a library: pairs of a key of `LIBRARIES`
                      and what was measured; the same library twice if a second thread has a handle of its own
    cap_is            how its cap holds, for `memguard plan`
    hook              the module after whose import the cap can be applied, if it is not `module`
    allocator         the model that stands in for it on simulated GPUs, a key of `MODELS` in
                      `memguard._frameworks.simulated.adapter`; any other name means a caching pool
    simulates         the allocators that this model stands for, as traces name them, the usual one first; empty if the
                      framework has only one
    aliases           other names that people write for it in a budget
    options           its own settings in the budget
    families          first parts of the type names of its errors
    errors            its own out-of-memory errors
    size_attribute    the attribute of its errors that holds the bytes asked for
    never_gives_back  its pool returns nothing to the driver while the process lives (measured)
    rounds_up         the most by which its allocator rounds a request up, as a part of the request
    install           the package that brings it, if it is not `module`: what the extra of that name has
    own_trim          the framework's own call that frees its cache, for a framework that the budget does not name
    trims_on_own_thread   its cache can only be freed on the thread on which its CUDA context is current
    context_module    the module whose import makes a CUDA context beside the primary one
    unfragment        how the user avoids a fragmented cache, as the end of a sentence
    figures           what its errors say of the moment: pairs of a field of `RefusedRequest` (or `cached`) and a
                      pattern, whose first group is a size
    pads              what it holds beyond live arrays and what a trim returns is rounding: it caches nothing in pieces
    refuses_silently  its allocator tells nobody of a refused request, so an error that the program catches is not seen
    joint             module and class of its adapter under `strategy: pool`; empty if it cannot draw from that pool
    default_pool      it takes from the device's default pool alone, which cannot be capped
    remainder         what it has in use in that pool is what no other counts: its own figures cover everybody there
    allocators        how the user chooses its allocator by a variable, and on which ones no cap can be set
    asks              its allocator is memguard's: it has room made, and an elastic cap raised, before it refuses
    """

    name: str
    title: str
    module: str
    adapter: str
    modules: int
    workspace: int
    cap_is: str
    first_uses: tuple[tuple[str, int], ...] = ()
    hook: str = ""
    allocator: str = ""
    simulates: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    families: tuple[str, ...] = ()
    errors: tuple[ErrorPattern, ...] = ()
    size_attribute: str = ""
    never_gives_back: bool = False
    rounds_up: Fraction = Fraction(0)
    install: str = ""
    own_trim: str | None = None
    trims_on_own_thread: bool = False
    context_module: str = ""
    unfragment: str | None = None
    figures: tuple[tuple[str, str], ...] = ()
    pads: bool = False
    refuses_silently: bool = False
    joint: str = ""
    default_pool: bool = False
    remainder: bool = False
    allocators: Allocators = _NO_CHOICE
    asks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hook", self.hook or self.module)
        object.__setattr__(self, "install", self.install or self.module)


_ROWS = (
    FrameworkSpec(
        name="torch",
        title="PyTorch",
        module="torch",
        adapter="memguard._frameworks.torch.adapter:Torch",
        joint="memguard._frameworks.torch.joint:JointTorch",
        remainder=True,
        # 92 MiB after the first tensor, 158 with cuBLAS, 240 after training a small network, 344 with cuSOLVER; and 24
        # for cuFFT, as with CuPy.
        modules=368 * MIB,
        workspace=384 * MIB,
        # A backward pass runs on a thread of its own, with a handle of cuBLAS of its own.
        first_uses=(
            ("cublas", 66 * MIB),
            ("cublas", 64 * MIB),
            ("cudnn", 16 * MIB),
            ("cusolver", 98 * MIB),
            ("cufft", 24 * MIB),
        ),
        cap_is="its allocator's fraction, to the byte",
        allocator="torch",
        simulates=("native",),
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
                advice="write how many process groups communicate on one GPU: '1' for plain data parallel training, "
                "'0' for none",
                aliases=("communicators",),
                applied=False,
            ),
        ),
        families=("torch",),
        errors=(
            ErrorPattern("disk", True, "torch shares tensors through /dev/shm", r"file </torch_\w+>: No space left"),
            ErrorPattern("disk", False, "an older torch does not say why", r"unable to \w+( to)? file </torch_"),
            ErrorPattern(
                "disk", False, "a bus error because /dev/shm is full", "DataLoader worker.*out of shared memory"
            ),
            ErrorPattern("host", True, "torch's allocator for the CPU", "DefaultCPUAllocator"),
            ErrorPattern("gpu", True, "torch's own type", type=r"^torch\.(cuda\.)?OutOfMemoryError$", refused=True),
            ErrorPattern(
                "gpu",
                True,
                "torch's text, whatever the type",
                r"(CUDA|HIP|XPU) out of memory\. Tried to allocate|MPS backend out of memory \("
                "|out of memory occurred when warming up",
                refused=True,
            ),
            ErrorPattern(
                "gpu",
                False,
                "its first words: a program that read torch's error, or quotes it",
                "(CUDA|HIP|XPU|MPS backend) out of memory",
            ),
            ErrorPattern(
                "gpu",
                False,
                "torch asks NVML for figures only after a request was refused",
                "NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator",
            ),
            # Page-locked memory gives CUDA's error 2 too.
            ErrorPattern("gpu", False, "error 2 of an early torch", r"cuda runtime error \(2\)"),
        ),
        figures=(
            ("in_use", r"Of the allocated memory ([\d.]+ \w+) is allocated by PyTorch"),
            ("pooled", r"with ([\d.]+ \w+) allocated in private pools"),
            ("cached", r"([\d.]+ \w+) is reserved by PyTorch but unallocated"),
            ("free", r"total capacity of [\d.]+ \w+ of which ([\d.]+ \w+) is free"),
            # cudaMallocAsync.
            ("in_use", r"Currently allocated\s*: ([\d.]+ \w+)"),
            ("free", r"Free \(according to CUDA\)\s*: ([\d.]+ \w+)"),
            # Until torch 2.0.
            ("in_use", r"([\d.]+ \w+) already allocated"),
            ("held", r"([\d.]+ \w+) reserved in total by PyTorch"),
            ("free", r"already allocated; ([\d.]+ \w+) free"),
        ),
        own_trim="torch.cuda.empty_cache()",
        unfragment="PYTORCH_ALLOC_CONF=expandable_segments:True, set before torch starts, avoids that",
    ),
    FrameworkSpec(
        name="tensorflow",
        title="TensorFlow",
        module="tensorflow",
        adapter="memguard._frameworks.tensorflow.adapter:TensorFlow",
        joint="memguard._frameworks.tensorflow.joint:JointTensorFlow",
        default_pool=True,
        modules=92 * MIB,
        workspace=256 * MIB,
        first_uses=(("cublas", 66 * MIB), ("cudnn", 16 * MIB)),
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
        errors=(
            ErrorPattern(
                "pinned", True, "the pool of page-locked memory, by its name", r"allocator \w*host_bfc", shared=True
            ),
            ErrorPattern("host", True, "its allocators for the CPU", r"allocating tensor.*allocator (mkl)?cpu\b"),
            # Of several nodes in the text the first has failed; the others only wait for it.
            ErrorPattern(
                "host",
                True,
                "the node ran on the CPU",
                r"allocating tensor(?:(?!\]\]).)*_device=\S*\bcpu:\d",
            ),
            ErrorPattern(
                "gpu", True, "a tensor on a GPU", r"OOM when allocating tensor.*(allocator GPU_|\bgpu:\d)", refused=True
            ),
            ErrorPattern(
                "gpu", False, "a tensor, and no word of the device", "OOM when allocating tensor", refused=True
            ),
            # Eager errors begin with the node, and Keras puts the layer's name before that.
            ErrorPattern(
                "gpu",
                True,
                "a kernel on a GPU",
                r"\bgpu:\d+\}\}\s+failed to allocate memory",
                r"ResourceExhaustedError$",
                refused=True,
            ),
            ErrorPattern(
                "gpu",
                False,
                "no word of the device",
                r"(^|\n|\}\}\s+)failed to allocate memory",
                r"ResourceExhaustedError$",
                refused=True,
            ),
            ErrorPattern(
                "gpu", True, "no room for a copy to a GPU", r"\bgpu:\d.*Dst tensor|Dst tensor.*\bgpu:\d", refused=True
            ),
            ErrorPattern("gpu", False, "no room for a copy to a device", "Dst tensor is not initialized", refused=True),
            ErrorPattern("gpu", True, "a context, a module or XLA's buffers", "out.of.memory", r"^tensorflow\."),
        ),
        never_gives_back=True,
        refuses_silently=True,
        allocators=Allocators(
            "TF_GPU_ALLOCATOR",
            {
                "cuda_malloc_async": "ignores memory_limit",
                "cuda_malloc": "passes every request on to the driver and has no limit",
            },
            unlimited=frozenset({"cuda_malloc_async", "cuda_malloc"}),
        ),
    ),
    FrameworkSpec(
        name="cupy",
        title="CuPy",
        module="cupy",
        adapter="memguard._frameworks.cupy.adapter:CuPy",
        joint="memguard._frameworks.cupy.joint:JointCuPy",
        # 94 MiB beside others, 60 more with cuBLAS, 24 with cuFFT, 100 with cuSOLVER.
        modules=262 * MIB,
        workspace=320 * MIB,
        first_uses=(("cublas", 60 * MIB), ("cufft", 24 * MIB), ("cusolver", 100 * MIB)),
        cap_is="the limit of its memory pool",
        allocator="cupy",
        simulates=("MemoryPool",),
        aliases=("cupy-cuda12x", "cupy-cuda13x"),
        families=("cupy", "cupy_backends"),
        errors=(
            ErrorPattern(
                "pinned", True, "CuPy falls back to a copy without it", "pinned memory .*could not be allocated"
            ),
            ErrorPattern("gpu", True, "CuPy's own type", type=r"^cupy\..*OutOfMemoryError$", refused=True),
        ),
        size_attribute="_size",
        figures=(("held", r"allocated so far: ([\d,]+ bytes)"),),
        install="cupy-cuda13x",
        own_trim="cupy.get_default_memory_pool().free_all_blocks()",
        asks=True,
    ),
    FrameworkSpec(
        name="jax",
        title="JAX",
        module="jax",
        adapter="memguard._frameworks.jax.adapter:JAX",
        joint="memguard._frameworks.jax.joint:JointJAX",
        default_pool=True,
        # 34 MiB at its first operation, 204 with cuSOLVER and cuFFT.
        modules=206 * MIB,
        workspace=320 * MIB,
        first_uses=(("cublas", 66 * MIB), ("cufft", 24 * MIB), ("cusolver", 80 * MIB)),
        cap_is="memory_fraction, set before its backend starts",
        allocator="xla",
        simulates=("bfc", "default"),
        aliases=("flax",),
        families=("jax", "jaxlib"),
        errors=(
            ErrorPattern(
                "host", True, "only XLA's CPU client says that", r"RESOURCE_EXHAUSTED: Out of memory allocating \d"
            ),
            ErrorPattern(
                "gpu",
                True,
                "only XLA's clients of devices say that",
                "Out of memory while trying to allocate|space hbm",
                shared=True,
                refused=True,
            ),
            ErrorPattern(
                "gpu",
                False,
                "older words, the CPU's too",
                "RESOURCE.EXHAUSTED: Failed to allocate",
                shared=True,
                refused=True,
            ),
        ),
        never_gives_back=True,
        refuses_silently=True,
        # XLA's source: `vmm` (DeviceAddressVmmAllocator) refuses what would pass the fraction of the GPU's total, but
        # GetAllocatorStats of se_gpu_pjrt_client.cc does not know that allocator, so JAX's memory_stats() is None.
        allocators=Allocators(
            "XLA_PYTHON_CLIENT_ALLOCATOR",
            {
                "platform": "passes every request on to the driver and has no limit",
                "cuda_async": "has no limit",
                "vmm": "keeps to JAX's fraction, but tells neither its limit nor what it holds: memguard could not "
                "check the cap, nor say what JAX takes",
            },
            unlimited=frozenset({"platform", "cuda_async"}),
            capped=frozenset({"default", "bfc"}),
            unknown="is no allocator of which memguard knows that it keeps to a limit",
        ),
        install="jax[cuda13]",
    ),
    FrameworkSpec(
        name="pycuda",
        title="PyCUDA",
        module="pycuda",
        adapter="memguard._frameworks.pycuda.adapter:PyCUDA",
        joint="memguard._frameworks.pycuda.joint:JointPyCUDA",
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
        rounds_up=Fraction(1, 16),  # its bins: 256 MiB asked, 272 MiB taken
        pads=True,
        asks=True,
    ),
    FrameworkSpec(
        name="numba",
        title="Numba",
        module="numba",
        adapter="memguard._frameworks.numba.adapter:Numba",
        joint="memguard._frameworks.numba.joint:JointNumba",
        modules=8 * MIB,
        workspace=32 * MIB,
        cap_is="a memory manager that counts its allocations",
        hook="numba.cuda",
        allocator="emm",
        families=("numba",),
        pads=True,
        install="numba-cuda[cu13]",
        asks=True,
    ),
)

SPECS: Mapping[str, FrameworkSpec] = MappingProxyType({row.name: row for row in _ROWS})
"""The frameworks that a budget may name, by name, in the order in which they are listed."""

NEVER_GIVE_BACK = frozenset(row.name for row in _ROWS if row.never_gives_back)
"""The frameworks whose pools return nothing to the driver while the process lives."""

CONTEXT_MAKER = next(row for row in _ROWS if row.context_module)
"""The framework that can make a CUDA context beside the primary one."""


def setting(option: str) -> str:
    """The place in the budget of an option that one framework has: `frameworks.torch.nccl` for `nccl`."""
    owner = next(row.name for row in _ROWS if any(own.name == option for own in row.options))
    return f"frameworks.{owner}.{option}"


def framework_name(text: str) -> FrameworkName:
    """The name, checked, for a type checker: of a framework that is only known at run time. ValueError for another."""
    for name in get_args(FrameworkName):
        if name == text:
            known: FrameworkName = name
            return known
    import difflib

    near = difflib.get_close_matches(str(text), get_args(FrameworkName), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{text!r} is no framework that a budget may name: {', '.join(get_args(FrameworkName))}{hint}")
