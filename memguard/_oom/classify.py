"""Determines from an exception's type and text which memory ran out, by a table of rules. Pure.

Each rule names the memory and explains the match. The first matching rule applies, so the order of the rules matters:
rules for texts that only resemble an out-of-memory error; for disks, page-locked memory and CPU memory; for certain,
then for possible GPU memory. Rules for one framework's errors are in its `FrameworkSpec`. `tests/oom` holds example
texts with their sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from memguard._base.framework_spec import Memory
from memguard._frameworks.specs import SPECS


@dataclass(frozen=True)
class ErrorFacts:
    """An exception as plain data. `mro`: the qualified names of the exception's type and of all its bases except
    `object`."""

    type: str
    mro: tuple[str, ...] = field()  # without field(), dataclass uses `type.mro` as the default
    text: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Classification:
    """The exhausted memory, the requester, and the requested bytes. `certain` is False if the exception's type and text
    also fit other causes.

    `refused`: the requester's own allocator refused GPU memory; see `ErrorPattern`.

    `requester` is a framework, or the library (`cublas`, `cuda`) that raised the error; None if unknown.
    """

    memory: Memory
    requester: str | None
    requested: int | None
    certain: bool
    refused: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Rule:
    """`text` and `type` are regular expressions, searched in the exception's text and in each name of `ErrorFacts.mro`.

    `requester`: a name; `TYPE`: the framework that defines the exception's type; `TYPE jax`: like `TYPE`, but jax if no
    framework defines the type; `GROUP`: the first group of the match in the text.
    """

    memory: Memory
    requester: str | None
    certain: bool
    why: str
    text: str = ""
    type: str = ""
    refused: bool = False

    @cached_property
    def _text(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE | re.DOTALL)

    @cached_property
    def _type(self) -> re.Pattern[str]:
        return re.compile(self.type)

    def match(self, text: str, mro: Iterable[str]) -> re.Match[str] | None:
        """The match in the text; None if the text or the type does not match."""
        found = self._text.search(text)
        return found if found and (not self.type or any(map(self._type.search, mro))) else None


_OOM = r"out.of.memory"
_MISTAKES = "Assertion|Attribute|Import|Lookup|Name|NotImplemented|Recursion|Syntax|Type|Value"
_TF_MISTAKES = "InvalidArgument|NotFound|AlreadyExists|OutOfRange|FailedPrecondition|PermissionDenied|Unimplemented"
_PARSERS = "Validation|Parse|Parsing|Parser|Usage|Scanner|Decode|SectionHeader|(?<!Invalid)Argument"
_HOST_CALLS = "cuMemHostAlloc|cuMemAllocHost|cuMemHostRegister|cudaHostAlloc|cudaMallocHost|cudaHostRegister"
_DEVICE_CALLS = r"cuMemAlloc|cuMemCreate|cudaMalloc"
_LIBRARIES = "(cublas|cudnn|cusolver|cufft|cusparse)"

_NOT_OUT_OF_MEMORY = (
    Rule("gpu", None, False, "vLLM found too little left before it began",
         "^(No available memory for the cache|Free memory on device .* less than desired)", r"^builtins\.ValueError$"),
    Rule("none", None, False, "cuInit takes no device memory", "Call to cuInit"),
    Rule("none", None, True, "a mistake in a program quotes the value at fault", type=rf"^builtins\.({_MISTAKES})"),
    Rule("none", None, True, "the same in TensorFlow, which begins each text with a node and its device",
         type=rf"^tensorflow\..*\.({_TF_MISTAKES})Error$"),
    Rule("none", None, True, "a warning that a filter made an error", type=r"^builtins\.\w*Warning$"),
    Rule("none", None, True, "a test says what it found or expected",
         type=r"^(_pytest\.outcomes|unittest\.case)\.|^builtins\.(Failed|Skipped)$"),
    Rule("none", None, True, "a parser quotes what it read", type=rf"\.\w*({_PARSERS})Error$|BadParameter$"),
    Rule("none", None, True, "the command of another process is quoted",
         r"Command (?!.*Signals\.SIG)", r"^subprocess\."),
    Rule("none", None, True, "a refusal of memguard's own, which explains itself", type=r"^memguard\.errors\."),
    Rule("none", None, True, "Ray's copy of the error of another process", type=r"^ray\.exceptions\.RayTaskError\b"),
    Rule("none", None, True, "a server's quota or message size", type=r"^grpc\."),
    Rule("none", None, True, "a launch that wants more than a block has", "out of resource"),
    Rule("none", None, True, "the allocator continues without it", "this is not a failure"),
    Rule("none", None, False, "NCCL does not say which call failed", "unhandled cuda error(?!.*Last error)"),
)  # fmt: skip
_DISK = (
    Rule("disk", None, True, "ENOSPC in words", "No space left on device"),
    Rule("disk", None, False, "SQLite's word for both", "database or disk is full"),
)
_PINNED = (
    Rule("pinned", "TYPE", True, "the call that failed locks host memory", rf"({_HOST_CALLS})\b.*{_OOM}"),
    Rule("pinned", "nccl", True, "NCCL's cudaHostAlloc", "CUDA host alloc"),
    Rule("pinned", None, True, "StreamExecutor's host allocation", rf"bytes on host: CUDA_ERROR_{_OOM}"),
)
_HOST = (
    Rule("host", None, True, "NumPy's words", "Unable to allocate .* for an array with shape"),
    Rule("host", None, True, "killed for memory", "OOM.?Killed|oom.kill event|running low on memory|% memory budget"),
    Rule("host", None, True, "Ray speaks of the node's memory", type=r"^ray\..*OutOfMemory"),
    Rule("host", None, True, "in so many words", "out of host memory|cannot allocate memory"),
    Rule("host", None, False, "mostly a limit on threads", "can't start new thread"),
    Rule("host", None, False, "it does not say which memory", "^(Memory usage limit exceeded|Insufficient Memory)$"),
    Rule("host", None, False, "ONNX Runtime on a CPU: bad_alloc, or a layout that only CPU nodes have",
         "ONNXRuntimeError.*bad allocation|nchwc.*BFCArena"),
)  # fmt: skip
_GPU_BY_TYPE = (
    Rule("gpu", "TYPE", True, "memguard's simulated GPUs", type=r"^memguard\..*OutOfMemory$", refused=True),
    Rule("gpu", "rmm", True, "RMM raises the built-in MemoryError", r"bad_alloc.*(RMM failure|[/\\]rmm[/\\])"),
    Rule("gpu", "GROUP", True, "the library's own status for it", rf"{_LIBRARIES}_(?:STATUS_)?ALLOC_FAILED"),
)
_GPU_BY_TEXT = (
    Rule("gpu", None, True, "an allocator of device memory that has no row of its own",
         "bytes of device memory|memory error on GPU|from device: CUDA_ERROR|allocation error on worker.*cudaError"),
    Rule("gpu", "TYPE cuda", True, "the call that failed takes device memory", rf"({_DEVICE_CALLS})\w*\b.*{_OOM}"),
    Rule("gpu", "cuda", True, "Thrust's allocator of device memory", "bad_alloc: cudaErrorMemoryAllocation"),
)  # fmt: skip
_GPU_POSSIBLY = (  # uncertain, because CUDA's error 2 also means page-locked memory, and a status has many causes
    Rule("gpu", "GROUP", False, "NCCL's buffers", r"(NCCL).*(CUDA [cm]alloc|Cuda failure (2 )?'out of memory)"),
    Rule("gpu", "cuda", False, "error 2 of any call", rf"CUDA (driver )?(failed with )?error:? (2 )?{_OOM}"),
    Rule("gpu", "TYPE cuda", False, "error 2 by name", "CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
    Rule("gpu", "GROUP", False, "what a full GPU makes of them",
         rf"{_LIBRARIES}_(?:STATUS_)?(?:NOT_INITIALIZED|INTERNAL_ERROR)|(cusolver) error: 7\b"),
    Rule("gpu", "cudnn", False, "no algorithm whose workspace fits", "Unable to find a valid cuDNN algorithm"),
    Rule("gpu", None, False, "an arena of a GPU, or of a CPU", "BFCArena.*Failed to allocate memory"),
    Rule("gpu", None, False, "what follows out-of-memory errors that were caught",
         "No executable batch size|No available memory for the cache|less than desired GPU memory"),
)  # fmt: skip
_REST = (
    Rule("host", None, False, "C++'s word for any memory", r"^(std::)?bad_alloc$", r"^builtins\.MemoryError$"),
    Rule("host", None, True, "Python's own", type=r"^builtins\.MemoryError$"),
    Rule("none", None, False, "a process was killed; what killed it is unknown", "exited unexpectedly|Signals.SIGKILL"),
    Rule("none", None, False, "one of many causes is a full GPU or too much locked memory",
         "CUDNN_STATUS_(EXECUTION_FAILED|NOT_SUPPORTED)|cuSolver (internal error|has not been initialized)"
         r"|DNN library initialization failed|Blas \w+ launch failed|cudaErrorOperatingSystem"),
)  # fmt: skip


def _own_rules(memory: Memory, by_type: bool = False) -> Iterator[Rule]:
    """The rules for `memory` in the frameworks' specs: with `by_type` only rules without a text, otherwise only rules
    with a text.

    Frameworks that have rules with both text and type come first, so that another framework's rule with only a text
    cannot match their errors.
    """
    found = {
        spec.name: [own for own in spec.errors if own.memory == memory and (not own.text) is by_type]
        for spec in SPECS.values()
    }
    for name in sorted(found, key=lambda name: not any(own.text and own.type for own in found[name])):
        for own in found[name]:
            yield Rule(
                memory, f"TYPE {name}" if own.shared else name, own.certain, own.why, own.text, own.type, own.refused
            )


RULES = (
    *_NOT_OUT_OF_MEMORY,
    *_own_rules("disk"), *_DISK,
    *_PINNED, *_own_rules("pinned"),
    *_own_rules("host"), *_HOST,
    *_own_rules("gpu", by_type=True), *_GPU_BY_TYPE,
    *_own_rules("gpu"), *_GPU_BY_TEXT,
    *_GPU_POSSIBLY,
    *_REST,
)  # fmt: skip
"""The general rules above and the rules in each framework's spec (`FrameworkSpec.errors`), in order of precedence."""

STEMS = (
    "memory", "alloc", "cud", "cuinit", "cusolver", "kill", "initializ", "internal_error", "launch failed",
    "no space left", "disk is full", "bfcarena", "batch size", "new thread", "able to create", "unexpectedly",
    *(stem for spec in SPECS.values() for stem in spec.stems),
)  # fmt: skip
"""Every text that a rule matches contains one of these strings in lower case. Rules whose result is certainly `none`
are exempt. So `classify` skips an error if its text contains none of these strings and no name in its `mro` contains
"Memory"."""

_ERRNO: Mapping[int, Memory] = {12: "host", 28: "disk", 122: "disk"}
"""The error numbers ENOMEM, ENOSPC and EDQUOT."""
_FAMILIES = {**{first: spec.name for spec in SPECS.values() for first in spec.families}, "rmm": "rmm"}
"""Maps the top-level package of an exception's type to the name of the framework."""
_SCALE = {unit: 1 << 10 * power for power, unit in enumerate("BKMGTPE")}
_SIZE = r"(\d[\d,]*(?:\.\d*)?) ?(bytes|B|[KMGTPE]i?B?)(?![\w])"
_VERB = r"(?:[Aa]llocat(?:e|ing)|request for|asked for|to alloc|[cm]alloc async|cudaMalloc|pinned memory|Requested *:)"
_REQUESTED = re.compile(rf"{_VERB} \(?{_SIZE}(?: \((\d+) ?B(?:ytes)?\)| \((\d+) bytes\))?")
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
_RAISED = re.compile(
    r"^((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Warning|Failed|Skipped|SkipTest|Expired|Parameter)): ", re.MULTILINE
)


def classify(facts: ErrorFacts) -> Classification:
    """Classify the exception by type first and text second. `memory` is `none` if the exception is no out-of-memory
    error."""
    if "builtins.OSError" in facts.mro and isinstance(number := facts.attributes.get("errno"), int):
        memory = _ERRNO.get(number, "none")
        return Classification(memory, None, requested_bytes(facts) if memory != "none" else None, True)
    if not _may_match(facts):
        return Classification("none", None, None, True)
    # Ignore the base class ValueError, because XGBoost's out-of-memory error derives from ValueError.
    own = (name for name in facts.mro if name != "builtins.ValueError" or name == facts.type)
    text, mro = facts.text, (*own, *_wrapped(facts.text))
    for rule in RULES:
        found = rule.match(text, mro)
        if found is None:
            continue
        if rule.memory == "none" or _had_enough_free(text):
            return Classification("none", None, None, rule.certain and rule.memory == "none")
        return Classification(
            rule.memory, _requester(rule, found, facts), requested_bytes(facts), rule.certain, rule.refused
        )
    return Classification("none", None, None, True)


def _may_match(facts: ErrorFacts) -> bool:
    """False if no rule can match. Fast, because it runs for every exception that leaves a `workload` or `guard`
    block."""
    if any("Memory" in name for name in facts.mro):
        return True
    text = facts.text.casefold()
    return any(stem in text for stem in STEMS)


def family(facts: ErrorFacts) -> str | None:
    """The framework that raised the exception, by its type; None if no framework did."""
    if facts.type.startswith("memguard."):  # simulated GPUs raise memguard's own type
        return facts.attributes.get("framework")
    names = (*facts.mro, *_wrapped(facts.text))
    return next((_FAMILIES[top] for name in names if (top := name.partition(".")[0]) in _FAMILIES), None)


def requested_bytes(facts: ErrorFacts) -> int | None:
    """The requested bytes, from the exception's attributes or else from its text; None if neither states them."""
    raised = SPECS.get(family(facts) or "")
    own = "requested" if facts.type.startswith("memguard.") else raised.size_attribute if raised is not None else ""
    for name in ("memguard_requested", own):  # adapters set `memguard_requested` on driver errors
        if type(size := facts.attributes.get(name)) is int and size > 0:
            return size
    text = re.sub(r"[ \t]+", " ", facts.text)
    if found := _REQUESTED.search(text):
        number, unit, *in_bytes = found.groups()
        printed = Fraction(number.replace(",", "").rstrip(".")) * _SCALE[unit[0].upper()]
        return next((int(size) for size in in_bytes if size), round(printed)) or None
    if found := _BYTES.search(text):
        return int(found[1]) or None
    if (found := _TENSOR.search(text)) and found[2] in _DTYPES:
        return math.prod(int(part) for part in found[1].split(",") if part.strip()) * _DTYPES[found[2]] or None
    return None


def _wrapped(text: str) -> tuple[str, ...]:
    """The exception type at the end of a traceback in the text, because worker processes send errors as text."""
    if "Traceback (most recent call last)" not in text:
        return ()
    names = _RAISED.findall(text)[-1:]
    return tuple(name if "." in name else f"builtins.{name}" for name in names)


def _requester(rule: Rule, found: re.Match[str], facts: ErrorFacts) -> str | None:
    if rule.requester == "GROUP":
        return next(group for group in found.groups() if group).lower()
    if rule.requester is not None and rule.requester.startswith("TYPE"):
        return family(facts) or rule.requester[len("TYPE ") :] or None
    return rule.requester


def _had_enough_free(text: str) -> bool:
    """True if the text states more free than requested bytes. Such a text describes an earlier error."""
    found = _FREE.search(text)
    return found is not None and int(found[1]) > int(found[2])
