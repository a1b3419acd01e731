"""Which out-of-memory error an exception is, by its type first and its text second. Pure: a table of rules.

A rule names the memory that ran out and says why its words mean that. The first rule that fits wins, so the order
matters: what only reads like it, then disks, page-locked memory and CPU memory, then GPU memory from sure to possible.
`tests/oom` holds the texts that it has to tell apart, with their sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

Memory = Literal["gpu", "pinned", "host", "disk", "none"]
"""`pinned` is page-locked host memory, `host` the CPU's, `disk` a full file system (/dev/shm too)."""


@dataclass(frozen=True)
class Facts:
    """An exception as plain data. `mro` holds the qualified names of its type and of all bases but `object`."""

    type: str
    mro: tuple[str, ...] = field()  # without it dataclass takes `type.mro` for the default
    text: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What ran out, who asked, and for how many bytes. Not `certain`: type and text leave other causes open.

    `requester` is a framework, or the library (`cublas`, `cuda`) whose error it is; None where nothing says.
    """

    memory: Memory
    requester: str | None
    requested: int | None
    certain: bool


@dataclass(frozen=True)
class Rule:
    """`text` is searched in the exception's text, `type` in each name of its mro; both regular expressions.

    requester: a name; TYPE the framework whose type it is; GROUP what the text's first group caught. With a name
    after it (`TYPE jax`) that is the requester where the type is no framework's.
    """

    memory: Memory
    requester: str | None
    certain: bool
    why: str
    text: str = ""
    type: str = ""

    @cached_property
    def _text(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE | re.DOTALL)

    @cached_property
    def _type(self) -> re.Pattern[str]:
        return re.compile(self.type)

    def match(self, text: str, mro: Iterable[str]) -> re.Match[str] | None:
        """Where the text fits, if the type does too."""
        found = self._text.search(text)
        return found if found and (not self.type or any(self._type.search(name) for name in mro)) else None


_OOM = r"out.of.memory"
_MISTAKES = "Assertion|Attribute|Import|Lookup|Name|Recursion|Syntax|Type"
_HOST_CALLS = "cuMemHostAlloc|cuMemAllocHost|cuMemHostRegister|cudaHostAlloc|cudaMallocHost|cudaHostRegister"
_DEVICE_CALLS = r"cuMemAlloc|cuMemCreate|cudaMalloc"
_LIBRARIES = "(cublas|cudnn|cusolver|cufft|cusparse)"

RULES = (
    # What only reads like it.
    Rule("none", None, False, "cuInit takes no device memory", "Call to cuInit"),
    Rule("none", None, True, "a mistake in a program quotes what it stumbled over", type=rf"^builtins\.({_MISTAKES})"),
    Rule("none", None, True, "a refusal of memguard's own, which explains itself", type=r"^memguard\.errors\."),
    Rule("none", None, True, "a server's quota or message size", type=r"^grpc\."),
    Rule("none", None, True, "a launch that wants more than a block has", "out of resource"),
    Rule("none", None, True, "the allocator goes on without it", "this is not a failure"),
    Rule("none", None, False, "NCCL does not say which call failed", "unhandled cuda error(?!.*Last error)"),
    # Disks.
    Rule("disk", "torch", True, "torch shares tensors through /dev/shm", r"file </torch_\w+>: No space left"),
    Rule("disk", "torch", False, "an older torch does not say why", r"unable to \w+( to)? file </torch_"),
    Rule("disk", "torch", False, "a bus error of a full /dev/shm", "DataLoader worker.*out of shared memory"),
    Rule("disk", None, True, "ENOSPC in words", "No space left on device"),
    Rule("disk", None, False, "SQLite's word for both", "database or disk is full"),
    # Page-locked host memory.
    Rule("pinned", "TYPE", True, "the call that failed locks host memory", rf"({_HOST_CALLS})\b.*{_OOM}"),
    Rule("pinned", "nccl", True, "NCCL's cudaHostAlloc", "CUDA host alloc"),
    Rule("pinned", None, True, "StreamExecutor's host allocation", rf"bytes on host: CUDA_ERROR_{_OOM}"),
    Rule("pinned", "TYPE tensorflow", True, "the pool of page-locked memory, by its name", r"allocator \w*host_bfc"),
    Rule("pinned", "cupy", True, "CuPy falls back to a copy without it", "pinned memory .*could not be allocated"),
    # CPU memory.
    Rule("host", "torch", True, "torch's allocator for the CPU", "DefaultCPUAllocator"),
    Rule("host", None, True, "NumPy's words", "Unable to allocate .* for an array with shape"),
    Rule("host", "tensorflow", True, "its allocators for the CPU", r"allocating tensor.*allocator (mkl)?cpu\b"),
    Rule("host", "tensorflow", True, "the node ran on the CPU", r"allocating tensor.*_device=\S*\bcpu:\d"),
    Rule("host", "jax", True, "words of XLA's CPU client alone", r"RESOURCE_EXHAUSTED: Out of memory allocating \d"),
    Rule("host", None, True, "killed for memory", "OOM.?Killed|oom.kill event|running low on memory|% memory budget"),
    Rule("host", None, True, "Ray speaks of the node's memory", type=r"^ray\..*OutOfMemory"),
    Rule("host", None, True, "in so many words", "out of host memory|cannot allocate memory"),
    Rule("host", None, False, "mostly a limit on threads", "can't start new thread"),
    Rule("host", None, False, "no word of which memory", "^(Memory usage limit exceeded|Insufficient Memory)$"),
    Rule("host", None, False, "ONNX Runtime on a CPU: bad_alloc, or a layout that only CPU nodes have",
         "ONNXRuntimeError.*bad allocation|nchwc.*BFCArena"),
    # GPU memory: the type says so.
    Rule("gpu", "torch", True, "torch's own type", type=r"^torch\.(cuda\.)?OutOfMemoryError$"),
    Rule("gpu", "cupy", True, "CuPy's own type", type=r"^cupy\..*OutOfMemoryError$"),
    Rule("gpu", "pycuda", True, "PyCUDA's own type", type=r"^pycuda\._driver\.MemoryError$"),
    Rule("gpu", "TYPE", True, "memguard's simulated GPUs", type=r"^memguard\..*OutOfMemory$"),
    Rule("gpu", "rmm", True, "RMM raises the built-in MemoryError", r"bad_alloc.*(RMM failure|[/\\]rmm[/\\])"),
    # GPU memory: the text says so.
    Rule("gpu", "GROUP", True, "the library's own status for it", rf"{_LIBRARIES}_(?:STATUS_)?ALLOC_FAILED"),
    Rule("gpu", "tensorflow", True, "a tensor on a GPU", r"OOM when allocating tensor.*(allocator GPU_|\bgpu:\d)"),
    Rule("gpu", "tensorflow", False, "a tensor, and no word of the device", "OOM when allocating tensor"),
    Rule("gpu", "tensorflow", False, "no word of the device", "^failed to allocate memory", r"ResourceExhaustedError$"),
    Rule("gpu", "tensorflow", True, "a copy to a GPU found no room", r"\bgpu:\d.*Dst tensor|Dst tensor.*\bgpu:\d"),
    Rule("gpu", "tensorflow", False, "a copy to a device found no room", "Dst tensor is not initialized"),
    Rule("gpu", "tensorflow", True, "a context, a module or XLA's buffers", _OOM, r"^tensorflow\."),
    Rule("gpu", "TYPE jax", True, "words that XLA has for devices", "Out of memory while trying to allocate|space hbm"),
    Rule("gpu", "TYPE jax", False, "older words, the CPU's too", "RESOURCE.EXHAUSTED: Failed to allocate"),
    Rule("gpu", "torch", True, "torch's text, by whatever type", "(CUDA|HIP|XPU|MPS backend) out of memory"),
    Rule("gpu", "torch", False, "torch asks NVML for figures only after a request was refused",
         "NVML_SUCCESS == .*INTERNAL ASSERT FAILED.*CUDACachingAllocator"),
    Rule("gpu", None, True, "an allocator of device memory that has no row of its own",
         "bytes of device memory|memory error on GPU|from device: CUDA_ERROR|allocation error on worker.*cudaError"),
    Rule("gpu", "TYPE cuda", True, "the call that failed takes device memory", rf"({_DEVICE_CALLS})\w*\b.*{_OOM}"),
    Rule("gpu", "cuda", True, "Thrust's allocator of device memory", "bad_alloc: cudaErrorMemoryAllocation"),
    # GPU memory, possibly: page-locked memory gives CUDA's error 2 too, and a library's status has many causes.
    Rule("gpu", "torch", False, "error 2 of an early torch", r"cuda runtime error \(2\)"),
    Rule("gpu", "GROUP", False, "NCCL's buffers", r"(NCCL).*(CUDA [cm]alloc|Cuda failure (2 )?'out of memory)"),
    Rule("gpu", "cuda", False, "error 2 of any call", rf"CUDA (driver )?(failed with )?error:? (2 )?{_OOM}"),
    Rule("gpu", "TYPE cuda", False, "error 2 by name", "CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
    Rule("gpu", "GROUP", False, "what a full GPU makes of them",
         rf"{_LIBRARIES}_(?:STATUS_)?(?:NOT_INITIALIZED|INTERNAL_ERROR)|(cusolver) error: 7\b"),
    Rule("gpu", "cudnn", False, "no algorithm whose workspace fits", "Unable to find a valid cuDNN algorithm"),
    Rule("gpu", "pycuda", False, "a context takes half a GiB", "wasn't able to create a context"),
    Rule("gpu", None, False, "an arena of a GPU, or of a CPU", "BFCArena.*Failed to allocate memory"),
    Rule("gpu", None, False, "what comes after out-of-memory errors that were caught",
         "No executable batch size|No available memory for the cache|less than desired GPU memory"),
    # What is left.
    Rule("host", None, False, "C++'s word, of whatever memory", r"^(std::)?bad_alloc$", r"^builtins\.MemoryError$"),
    Rule("host", None, True, "Python's own", type=r"^builtins\.MemoryError$"),
    Rule("none", None, False, "a process that was killed, by whom is not said", "exited unexpectedly|Signals.SIGKILL"),
    Rule("none", None, False, "one of many causes is a full GPU or too much locked memory",
         "CUDNN_STATUS_(EXECUTION_FAILED|NOT_SUPPORTED)|cuSolver (internal error|has not been initialized)"
         r"|DNN library initialization failed|Blas \w+ launch failed|cudaErrorOperatingSystem"),
)  # fmt: skip

STEMS = (
    "memory", "alloc", "cud", "cuinit", "cusolver", "kill", "torch_", "initializ", "internal_error", "launch failed",
    "no space left", "disk is full", "bfcarena", "dst tensor", "space hbm", "batch size", "new thread",
    "able to create", "unexpectedly",
)  # fmt: skip
"""Of every text that a rule fits, but for those that rule it out for sure, at least one is a part, in small letters:
what has none of them and no type that speaks of memory is no out-of-memory error, and is not searched for it."""

_ERRNO: Mapping[int, Memory] = {12: "host", 28: "disk", 122: "disk"}
"""ENOMEM, ENOSPC, EDQUOT."""
_FAMILIES = {
    "torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax", "cupy": "cupy",
    "cupy_backends": "cupy", "pycuda": "pycuda", "numba": "numba", "rmm": "rmm",
}  # fmt: skip
"""Framework by the first part of a type's name."""
_SCALE = {unit: 1 << 10 * power for power, unit in enumerate("BKMGTPE")}
_SIZE = r"(\d[\d,]*(?:\.\d*)?) ?(bytes|B|[KMGTPE]i?B?)(?![\w])"
_VERB = r"(?:[Aa]llocat(?:e|ing)|request for|asked for|to alloc|[cm]alloc async|cudaMalloc|pinned memory|Requested *:)"
_ASKED = re.compile(rf"{_VERB} \(?{_SIZE}(?: \((\d+) ?B(?:ytes)?\)| \((\d+) bytes\))?")
_BYTES = re.compile(r"(?:buffer of size|Requested memory:|Requested bytes) (\d+)")
_TENSOR = re.compile(r"tensor (?:with|of) shape ?\[([\d, ]+)\] and type (\w+)")
_DTYPES = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "float8_e5m2", "float8_e4m3fn"), 1),
    **dict.fromkeys(("half", "float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float", "float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("double", "float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_FREE = re.compile(r"Free memory: (\d+).*Requested memory: (\d+)", re.DOTALL)
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception)): ", re.MULTILINE)
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")


def classify(facts: Facts) -> Verdict:
    """What ran out, by type first and text second. `none` where it is no out-of-memory error at all."""
    if "builtins.OSError" in facts.mro and isinstance(number := facts.attributes.get("errno"), int):
        memory = _ERRNO.get(number, "none")
        return Verdict(memory, None, asked(facts) if memory != "none" else None, True)
    if not _worth_a_look(facts):
        return Verdict("none", None, None, True)
    text, mro = facts.text, (*facts.mro, *_wrapped(facts.text))
    if "builtins.ValueError" in mro:
        text = _QUOTED.sub("''", text)  # the value that was wrong, which may be anything
    for rule in RULES:
        found = rule.match(text, mro)
        if found is None:
            continue
        if rule.memory == "none" or _had_more_free(text):
            return Verdict("none", None, None, rule.certain and rule.memory == "none")
        return Verdict(rule.memory, _requester(rule, found, facts), asked(facts), rule.certain)
    return Verdict("none", None, None, True)


def _worth_a_look(facts: Facts) -> bool:
    """Whether a rule may fit: quickly, as every error that leaves a block comes by here."""
    if any("Memory" in name for name in facts.mro):
        return True
    text = facts.text.casefold()
    return any(stem in text for stem in STEMS)


def family(facts: Facts) -> str | None:
    """The framework that raised the exception, by its type."""
    if facts.type.startswith("memguard."):  # a simulated one
        return facts.attributes.get("framework")
    names = (*facts.mro, *_wrapped(facts.text))
    return next((_FAMILIES[top] for name in names if (top := name.partition(".")[0]) in _FAMILIES), None)


def asked(facts: Facts) -> int | None:
    """The bytes asked for, as exactly as attributes or text have them; None where they do not."""
    own = "requested" if facts.type.startswith("memguard.") else "_size" if family(facts) == "cupy" else ""
    for name in ("memguard_requested", own):  # of memguard's allocators, whose drivers do not say it; simulated; CuPy's
        if type(size := facts.attributes.get(name)) is int and size > 0:
            return size
    text = re.sub(r"[ \t]+", " ", facts.text)
    if found := _ASKED.search(text):
        number, unit, *in_bytes = found.groups()
        printed = Fraction(number.replace(",", "").rstrip(".")) * _SCALE[unit[0].upper()]
        return next((int(size) for size in in_bytes if size), round(printed)) or None
    if found := _BYTES.search(text):
        return int(found[1]) or None
    if (found := _TENSOR.search(text)) and found[2] in _DTYPES:
        return math.prod(int(part) for part in found[1].split(",") if part.strip()) * _DTYPES[found[2]] or None
    return None


def _wrapped(text: str) -> tuple[str, ...]:
    """The type that a traceback within the text ends in: workers send their errors as text."""
    if "Traceback (most recent call last)" not in text:
        return ()
    names = _RAISED.findall(text)[-1:]
    return tuple(name if "." in name else f"builtins.{name}" for name in names)


def _requester(rule: Rule, found: re.Match[str], facts: Facts) -> str | None:
    if rule.requester == "GROUP":
        return next(group for group in found.groups() if group).lower()
    if rule.requester is not None and rule.requester.startswith("TYPE"):
        return family(facts) or rule.requester[len("TYPE ") :] or None
    return rule.requester


def _had_more_free(text: str) -> bool:
    """Where the text itself gives both figures, and there was room: an earlier error that came out late."""
    found = _FREE.search(text)
    return found is not None and int(found[1]) > int(found[2])
