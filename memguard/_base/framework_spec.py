"""`FrameworkSpec`, the static description of one framework, and the sizes of GPU memory that belongs to no framework.

`_frameworks/<name>/spec.py` defines the spec of each framework; `_frameworks.specs` discovers these files.

Sizes are bytes, measured on one NVIDIA H200 (driver 580.159, CUDA 13). `OVERHEADS` has the sizes of memory that belongs
to no framework: CUDA contexts and NCCL. `python -m bench run overheads` measures every size again except NCCL's.
"""

# Without `from __future__ import annotations`, which would make typing compile each NamedTuple field's annotation.

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
"""The caches that `trim` can empty. `shared pool` is the CUDA memory pool that frameworks share under `strategy:
pool`."""
CONTEXT = 544 * MIB
"""Bytes that `reserve: auto` includes for the primary CUDA context: 518 MiB measured, plus growth. Included once,
because frameworks share this context."""
SLACK = 64 * MIB
"""Bytes that `reserve: auto` includes because the driver rounds allocations up."""
SECOND_CONTEXT = "second context"
"""The name of a CUDA context other than the primary one. A third context is `second context 2`."""


LAZY = 8 * MIB
"""The most bytes that the ledger (memguard's account of GPU memory) attributes, for each framework in use, to kernels
loaded at their first launch. The driver allocates 2 MiB at a time, for several kernels."""
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"cublas": "libcublas.so", "cudnn": "libcudnn_", "cusolver": "libcusolver.so", "cufft": "libcufft.so"}
)
"""Libraries whose first use allocates GPU memory, each with the prefix of its file name. cuDNN's prefix matches only
the libraries that cuDNN loads at first use, because importing a framework already loads `libcudnn.so`."""
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
"""For each library, the prefix of its file name and the functions that create a handle or plan, or load kernels."""


class Outside(NamedTuple):
    """GPU memory that no allocator cap covers. `modules` and `workspace` are as in `FrameworkSpec`."""

    modules: int
    workspace: int


OVERHEADS: Mapping[str, Outside] = MappingProxyType(
    {
        "context": Outside(518 * MIB, CONTEXT),
        # NCCL allocates 838 MiB at the first collective, and 486 MiB for each further communicator: `nccl 2`, ...
        "nccl 1": Outside(838 * MIB, 896 * MIB),
        "nccl": Outside(486 * MIB, 512 * MIB),
        SECOND_CONTEXT: Outside(518 * MIB, CONTEXT),
    }
)
"""Memory outside the caps that belongs to no framework, by name. The entry `nccl` applies to `nccl 2`, `nccl 3`, ..."""


class Option(NamedTuple):
    """A key that a budget accepts below one framework, in addition to share, limit, min and max.

    `kind` is the type: "flag" is true or false, "count" a whole number from 0 to `most`, "word" one of `words`.
    `advice` is the fix for an invalid value. `synonyms` map other spellings of a value to the valid one, and `aliases`
    are other spellings of the key. `elsewhere` and `fix` are message and fix of the error if the key is below another
    framework, whose name replaces `{name}`. `applied` is False for a key that only changes the reserve and is not
    passed to the framework's adapter.
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
file system (/dev/shm too); for `none` no memory is exhausted."""


class ErrorPattern(NamedTuple):
    """Recognises one out-of-memory error of a framework. The first pattern of the spec that matches is used.

    `text` is a case-insensitive regular expression searched in the error's text. `type` is a regular expression
    searched in the qualified names of the error's type and base classes. Both must match. Patterns are tried only if
    one of these names contains "Memory", or the text contains one of `STEMS` in `memguard._oom.classify` or of the
    spec's `stems`. `certain` is False if errors with other causes have the same text. `why` explains the match in a few
    words. `shared` is True if other frameworks' errors have the same text: the error's type then identifies the
    framework that requested the memory. `refused` is True if this framework's own allocator raises the error, and only
    because its cap is reached or the GPU is full.
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

    `uncapped` maps each value under which no cap can be set to the reason, as the end of a sentence that begins with
    `VARIABLE=value`. `unlimited` lists the values of `uncapped` under which no limit at all applies.
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
        """Why no cap can be set if the variable has this value; None if a cap can be set."""
        name = value.strip().lower()
        return self.uncapped.get(name, None if not name or name in self.capped else self.unknown)


_NO_CHOICE = Allocators()


class Examined(NamedTuple):
    """How `memguard doctor` checks a framework, in addition to the framework's `probe.py`.

    `distributions` is a regular expression for the start of the names of the Python distributions that install the
    framework; if empty, the framework's name. `brings_cuda` is True if these distributions also install CUDA libraries.
    A process must import such a framework before frameworks that use CUDA libraries already loaded. Probes start in
    descending order of `length`, the rank of their duration.
    """

    distributions: str = ""
    brings_cuda: bool = False
    length: int = 0


_PLAIN = Examined()


class Exchanged(NamedTuple):
    """Properties of a framework that `exchange` reads before importing the framework's `arrays.py`.

    `arrays` is the class in `arrays.py`. `short` are abbreviations of the framework's name, in addition to `aliases`;
    `packages` are other packages that define array types of the framework. `compacts` is True if the framework accepts
    arrays of any strides, and so can make a contiguous copy for a framework that accepts only contiguous arrays.
    """

    arrays: str
    short: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    compacts: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class FrameworkSpec:
    """One framework. The fields without a default are required.

    name              key in the budget, and name in tables and reports
    title             name in sentences
    place             rank in every list of frameworks: lowest first, equal ranks by name
    module            the module whose import loads the framework
    adapter           the class in the framework's `adapter.py`
    modules           the largest measured bytes outside the cap: kernels, modules, library workspaces
    workspace         the bytes that `reserve: auto` includes for the same memory; at least `modules`
    first_uses        the bytes of `modules` that first uses of libraries allocate: pairs of a key of `LIBRARIES` and
                      the measured bytes; a library is listed twice if a second thread gets its own handle
    cap_is            how the cap is enforced, for `memguard plan`
    hook              the module after whose import the cap can be applied, if it is not `module`
    allocator         the allocator model on simulated GPUs, a key of `MODELS` in
                      `memguard._frameworks.simulated.adapter`; any other name selects a caching pool
    simulates         the names in traces of the allocators that the model covers, the default one first; empty if the
                      framework has only one allocator
    aliases           other spellings of the name in a budget
    options           the keys that only this framework has in a budget
    families          first components of the type names of the framework's errors
    errors            patterns of the framework's out-of-memory errors
    stems             lower-case words of the framework's errors, for texts that contain none of `STEMS`
    size_attribute    the attribute of the framework's errors that holds the requested bytes
    never_gives_back  True if the pool returns no memory to the driver while the process lives (measured)
    rounds_up         the largest fraction of a request by which the allocator rounds the request up
    install           the package that installs the framework, if it is not named like `module`; memguard's extra with
                      the framework's name installs this package
    own_trim          the framework's own call that frees its cache, for a framework that the budget does not name
    trims_on_own_thread   True if only the thread on which the framework's CUDA context is current can free the cache
    context_module    the module whose import creates a second CUDA context
    unfragment        how the user avoids a fragmented cache, as the end of a sentence
    figures           how to read sizes from the text of errors: pairs of a field of `RefusedRequest` (or `cached`) and
                      a pattern, whose first group is the size
    pads              True if held memory beyond live arrays and reclaimable cache is rounding, not cached fragments
    refuses_silently  True if the allocator reports no refused request, so that memguard misses an error that the
                      program catches
    pooled            the class in `pooled.py`, for `strategy: pool`; empty if the framework cannot use the shared pool
    default_pool      True if the framework allocates only from the device's default pool, which cannot be capped
    remainder         True if the framework reports only the use of the whole shared pool: its use is then computed as
                      the remainder that no other framework counts
    allocators        the variable that selects the allocator, and the values under which no cap can be set
    examined          how `memguard doctor` checks the framework
    cures             fixes for conflicts with another framework's libraries in one process, applied before both are
                      loaded: pairs of the other framework's name and a module of this framework's folder, whose
                      function returns the changes that it made
    uncounted         True if the framework counts no memory without a budget: the memory is then unaccounted
    frees_late        True if a trim also frees memory that the program released and the framework still holds
    tells_peak        True if the allocator reports its peak use
    regions           True if the pool grows by regions that are never joined or returned: a request must fit one region
    weight            relative weight in the first guess of `memguard suggest`
    colour            colour in reports, `#rrggbb`; empty: the next free colour of a default list
    terminal_colour   colour on the screen of `memguard top`: one of the terminal's 16 colours
    exchanged         how `exchange` reads and makes the framework's arrays; None if `exchange` does not support them
    requests_room     True if memguard provides the allocator, which requests free memory and a higher elastic cap from
                      memguard before it refuses a request
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
