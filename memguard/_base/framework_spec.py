"""One framework's static description (`FrameworkSpec`), and the GPU memory that belongs to no framework. Pure types.

Each framework defines its spec in `_frameworks/<name>/spec.py`; `specs` discovers them.

Figures are bytes, measured on one NVIDIA H200 (driver 580.159, CUDA 13). `OVERHEADS` has the figures of memory that
belongs to no framework: the CUDA context and NCCL. `python -m bench run overheads` measures all but NCCL's again.
"""

# No `from __future__ import annotations`: with it, typing compiles the annotation of each field of a NamedTuple.

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from memguard._base.units import MIB

FrameworkName: TypeAlias = Literal["torch", "tensorflow", "cupy", "jax", "pycuda", "numba"]
"""The framework names, for type checkers and editors, which cannot discover `_frameworks/`. `framework_name` checks a
name at run time."""
ArraysName: TypeAlias = FrameworkName | Literal["numpy"]
"""The libraries between which `exchange` converts arrays."""
CacheName: TypeAlias = FrameworkName | Literal["shared pool"]
"""The caches that `trim` can empty. `shared pool` is the driver pool of `strategy: pool`, which frameworks share."""
CONTEXT = 544 * MIB
"""The reserve of `reserve: auto` for the CUDA context: 518 MiB plus growth. Counted once, because frameworks share the
context."""
SLACK = 64 * MIB
"""The reserve of `reserve: auto` for the driver's rounding."""
SECOND_CONTEXT = "second context"
"""The name of a CUDA context other than the primary one. A third context is `second context 2`."""


LAZY = 8 * MIB
"""The ledger's allowance for kernels loaded at their first launch, in total for each live framework. The driver
allocates 2 MiB for several kernels."""
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"cublas": "libcublas.so", "cudnn": "libcudnn_", "cusolver": "libcusolver.so", "cufft": "libcufft.so"}
)
"""Libraries whose first use allocates GPU memory, each with the prefix of the library's file name. For cuDNN the list
has the libraries that it loads at first use, because an import already loads `libcudnn.so`."""
KERNELS = "kernels"
ENTRY_POINTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
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
"""The entry points of each library (they create a handle or a plan, and load kernels): the prefix of the library's
file name, and the function names."""


class Outside(NamedTuple):
    """Memory outside every cap. `modules` and `workspace` are as in `FrameworkSpec`."""

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
"""Memory outside the caps that belongs to no framework, by name. `nccl 3` has the entry of `nccl`."""


class Option(NamedTuple):
    """A budget key of one framework, in addition to share and limit.

    `kind` is the type: "flag" is true or false, "count" a whole number from 0 to `most`, "word" one of `words`.
    `advice` is the fix for an invalid value. `synonyms` map other spellings of a value to the valid one, and `aliases`
    are other spellings of the key. `elsewhere` is the message for the key below another framework, whose name replaces
    `{name}`; `fix` is its fix. `applied` is False for a key that only changes the reserve: the adapter does not
    receive it.
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
"""The memory that an error reports as exhausted. `pinned` is page-locked host memory, `host` the CPU's, `disk` a full
file system (/dev/shm too), `none` no memory."""


class ErrorPattern(NamedTuple):
    """One of a framework's own out-of-memory errors. The first matching pattern of the spec wins.

    `text` is a regular expression for the error's text, ignoring case; `type` is one for the qualified name of its type
    and of each base class. Both must match. Errors are only matched if a type's name contains "Memory", or the text one
    of `STEMS` in `memguard._oom.classify` or of the spec's `stems`. `certain` is False if errors with other causes have
    the same text. `why` explains the match in a few words. `shared`: other frameworks use the same words, so the
    error's type identifies the requester. `refused`: the requester's own allocator raises this error, and only for two
    reasons: its cap is reached or the GPU is full.
    """

    memory: Memory
    certain: bool
    why: str
    text: str = ""
    type: str = ""
    shared: bool = False
    refused: bool = False


class Allocators(NamedTuple):
    """The environment variable that selects a framework's allocator, and the values under which no cap can be set.

    `uncapped` maps each value of the variable under which no cap can be set to the reason: the end of a sentence that
    begins with `VARIABLE=value`. `unlimited` lists the values of `uncapped` under which no limit at all applies.
    `capped` lists the values under which a cap holds; a cap also holds if the variable is empty. `unknown` is the
    reason why no cap can be set under any other value. If `unknown` is None, any other value selects the default
    allocator.
    """

    variable: str = ""
    uncapped: Mapping[str, str] = MappingProxyType({})
    unlimited: frozenset[str] = frozenset()
    capped: frozenset[str] = frozenset()
    unknown: str | None = None

    def why_uncapped(self, value: str) -> str | None:
        """Why no cap can be set on the allocator of this name; None if one can be set."""
        name = value.strip().lower()
        return self.uncapped.get(name, None if not name or name in self.capped else self.unknown)


_NO_CHOICE = Allocators()


class Examined(NamedTuple):
    """How the doctor examines a framework, in addition to its `probe.py`.

    `distributions`: a regular expression for the name prefixes of the distributions that install it; empty: its name.
    `brings_cuda`: these distributions install CUDA's libraries too. In one process such a framework must be imported
    before the frameworks that use libraries already loaded. `length` orders the probes by duration: longest first.
    """

    distributions: str = ""
    brings_cuda: bool = False
    length: int = 0


_PLAIN = Examined()


class Exchanged(NamedTuple):
    """A framework's properties that `exchange` reads before it imports the framework's `arrays.py`.

    `arrays` is the class in `arrays.py`. `short` are abbreviations of the framework, in addition to its `aliases`;
    `packages` are other packages that define its array types. `compacts`: it accepts any strides, so it can make a
    compact copy for a framework that cannot.
    """

    arrays: str
    short: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    compacts: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class FrameworkSpec:
    """One framework. The fields without a default are required.

    name              its key in the budget, and its name in every table and report
    title             its name in sentences
    place             its rank in every list of frameworks: lowest first, equal ranks by name
    module            the module whose import loads the framework
    adapter           the class in its `adapter.py`
    modules           the most that was measured outside its cap: kernels, modules, library workspaces
    workspace         the reserve of `reserve: auto` for the same memory; never less than `modules`
    first_uses        the part of `modules` that first uses of libraries allocate: pairs of a key of `LIBRARIES` and the
                      measured bytes; a library is listed twice if a second thread gets its own handle
    cap_is            how its cap is enforced, for `memguard plan`
    hook              the module after whose import the cap can be applied, if it is not `module`
    allocator         the model that simulates it on simulated GPUs, a key of `MODELS` in
                      `memguard._frameworks.simulated.adapter`; any other name means a caching pool
    simulates         the allocators that this model covers, as traces name them, the default one first; empty if the
                      framework has only one
    aliases           other spellings of its name in a budget
    options           its own keys in the budget
    families          first components of the type names of its errors
    errors            its own out-of-memory errors
    stems             lower-case words of its errors, for texts that contain none of `STEMS`
    size_attribute    the attribute of its errors that holds the requested bytes
    never_gives_back  its pool returns nothing to the driver while the process lives (measured)
    rounds_up         the most by which its allocator rounds a request up, as a fraction of the request
    install           the package that installs it, if it is not `module`: the content of the extra of its name
    own_trim          the framework's own call that frees its cache, for a framework that the budget does not name
    trims_on_own_thread   its cache can only be freed on the thread on which its CUDA context is current
    context_module    the module whose import creates a second CUDA context
    unfragment        how the user avoids a fragmented cache, as the end of a sentence
    figures           the figures in the text of its errors: pairs of a field of `RefusedRequest` (or `cached`) and a
                      pattern, whose first group is a size
    pads              held memory beyond live arrays and reclaimable cache is rounding, as it caches no fragments
    refuses_silently  its allocator reports no refused request, so memguard misses an error that the program catches
    pooled            the class in its `pooled.py`, for `strategy: pool`; empty if it cannot use the shared pool
    default_pool      it allocates only from the device's default pool, which cannot be capped
    remainder         its figures cover the whole shared pool: its use is the remainder that no other one counts
    allocators        the variable that selects its allocator, and the values under which no cap can be set
    examined          how the doctor examines it
    cures             fixes for conflicts of its libraries with another framework's in one process: pairs of the other
                      framework's name and a module of its folder, whose function returns what it changed
    uncounted         without a budget nothing counts its memory, which is then unaccounted
    frees_late        a trim of it also frees memory that the program released and the framework still holds
    tells_peak        its allocator reports its peak
    regions           its pool grows by regions that it neither joins nor returns: a request must fit into one
    weight            its weight in the first guess of `memguard suggest`
    colour            its colour in reports, `#rrggbb`; empty: the next free colour of a default list
    terminal_colour   its colour on the screen of `memguard top`: one of the terminal's 16 colours
    exchanged         how `exchange` reads and makes its arrays; None if it cannot
    requests_room     its allocator is memguard's: before it refuses, it requests room and a higher elastic cap
    """

    name: str
    title: str
    module: str
    adapter: str
    modules: int
    workspace: int
    cap_is: str
    place: int = 1000
    first_uses: tuple[tuple[str, int], ...] = ()
    hook: str = ""
    allocator: str = ""
    simulates: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    families: tuple[str, ...] = ()
    errors: tuple[ErrorPattern, ...] = ()
    stems: tuple[str, ...] = ()
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
    pooled: str = ""
    default_pool: bool = False
    remainder: bool = False
    allocators: Allocators = _NO_CHOICE
    examined: Examined = _PLAIN
    cures: tuple[tuple[str, str], ...] = ()
    uncounted: bool = False
    frees_late: bool = False
    tells_peak: bool = True
    regions: bool = False
    weight: int = 4
    colour: str = ""
    terminal_colour: str = ""
    exchanged: Exchanged | None = None
    requests_room: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hook", self.hook or self.module)
        object.__setattr__(self, "install", self.install or self.module)
