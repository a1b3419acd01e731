"""What a row about a framework may say (`FrameworkSpec`), and the GPU memory that no framework owns. Pure data types.

Each row is in its framework's folder, `_frameworks/<name>/spec.py`; `specs` finds them.

Figures are bytes, measured on one NVIDIA H200 (driver 580.159, CUDA 13). Those of what no framework owns, the CUDA
context and NCCL, are in `OVERHEADS`. `python -m bench run overheads` holds all but NCCL's to a GPU again.
"""

# Without `from __future__ import annotations`, which makes typing compile the annotation of each field of a NamedTuple.

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from memguard._base.units import MIB

FrameworkName: TypeAlias = Literal["torch", "tensorflow", "cupy", "jax", "pycuda", "numba"]
"""The names of the rows in `_frameworks/`, for type checkers and editors, which cannot read those. For a name that is
only known at run time: `framework_name`."""
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
    class; both are regular expressions, and both must fit. Errors are only searched if a type's name contains "Memory",
    or the text one of `STEMS` in `memguard._oom.classify` or of the row's `stems`. Not `certain`: the same words have
    other causes. `why` says in a few words why they mean that. `shared`: other frameworks use the same words, so the
    type of the error decides who asked for the memory. `refused`: the requester's own allocator says so, which refuses
    for two reasons only: its cap and the full GPU.
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


class Examined(NamedTuple):
    """How the doctor examines a framework, beside what its `probe.py` does.

    `distributions`: how the names of the distributions begin that bring it, as a regular expression; empty: its name.
    `brings_cuda`: they bring CUDA's libraries too, and in one process it works before those that take what is loaded.
    `length` ranks its probe by how long it takes: the longest begin first.
    """

    distributions: str = ""
    brings_cuda: bool = False
    length: int = 0


_PLAIN = Examined()


class Exchanged(NamedTuple):
    """What `exchange` knows of a framework before it loads the module of its arrays.

    `arrays` is the class in its `arrays.py`. `short` are other names that people
    write for it, beside those for a budget, and `packages` other packages whose classes are arrays of it. `compacts`:
    it takes any strides, so it can make a compact copy for a framework that cannot.
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
    place             its place in every list of frameworks: the lowest comes first, and those of one place go by name
    module            what is imported to have it
    adapter           the class in its `adapter.py`
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
    stems             words of these errors, in small letters, for those that have none of those of all frameworks
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
    joint             the class in its `joint.py`, for `strategy: pool`; empty if it cannot draw from that pool
    default_pool      it takes from the device's default pool alone, which cannot be capped
    remainder         what it has in use in that pool is what no other counts: its own figures cover everybody there
    allocators        how the user chooses its allocator by a variable, and on which ones no cap can be set
    examined          how the doctor examines it
    cures             what to do before its libraries meet another framework's in one process: pairs of that one's name,
                      and a module of its folder with a function, which returns what was done
    uncounted         it counts nothing without a budget: what it holds is unaccounted then
    frees_late        a trim of it also frees what the program has let go of, and it has kept so far
    tells_peak        its allocator says the most that it has held
    regions           its pool grows by regions that it neither joins nor gives back: a request must fit into one
    weight            its part of a first guess of `memguard suggest`, beside the others'
    colour            its colour in reports, `#rrggbb`; empty: the next of some that none has
    terminal_colour   the same on the screen of `memguard top`: one of the terminal's own 16
    exchanged         how `exchange` reads and makes its arrays; None if it cannot
    asks              its allocator is memguard's: it has room made, and an elastic cap raised, before it refuses
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
    joint: str = ""
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
    asks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hook", self.hook or self.module)
        object.__setattr__(self, "install", self.install or self.module)
