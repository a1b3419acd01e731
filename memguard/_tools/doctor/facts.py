"""The facts that `memguard doctor` collects, as plain data. Findings are derived from them alone.

Its JSON (`memguard doctor --dump-facts`) gives the same findings on any machine (`--facts FILE`). None means that the
value could not be read; an empty tuple means that there is none. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Concatenate, Final, Literal, ParamSpec, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memguard._tools.doctor import bounds
from memguard.errors import FactsError

VERSION: Final = 1

NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
"""The name of a distribution or framework. The pattern keeps shell syntax out of commands that users copy."""


class _Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """Results of `once` functions for this object."""
        return {}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("derived", None)  # an edited copy has other results
        return copied


F = TypeVar("F", bound=_Fact)
P = ParamSpec("P")
R = TypeVar("R")


def once(derive: Callable[Concatenate[F, P], R]) -> Callable[Concatenate[F, P], R]:
    """Cache the result of a pure function of facts in the facts object. Facts are frozen, so it never expires."""

    @functools.wraps(derive)
    def computed(facts: F, /, *args: P.args, **more: P.kwargs) -> R:
        key = (derive, *args)
        if key not in facts.derived:
            facts.derived[key] = derive(facts, *args, **more)
        return cast("R", facts.derived[key])

    return cast("Callable[Concatenate[F, P], R]", computed)


class System(_Fact):
    """The machine and the interpreter. `container`: docker, podman, kubernetes, apptainer or lxc."""

    platform: str = "linux"
    machine: str = "x86_64"
    kernel: str = ""
    python: str = ""
    executable: str = ""
    root: bool = False
    wsl: bool = False
    container: str | None = None


class Cuda(_Fact):
    """libcuda. `path` is the file that was loaded, links resolved; `candidates`: all files that the loader could find.

    `version` is cuDriverGetVersion (13000), `init` cuInit's result by name (CUDA_SUCCESS), `error` dlopen's.
    `checkpoint`: whether it has the functions that suspend a process.
    """

    path: str | None = None
    candidates: tuple[str, ...] = ()
    error: str | None = None
    version: int | None = None
    init: str | None = None
    checkpoint: bool | None = None
    devices: tuple[CudaDevice, ...] = ()


class CudaDevice(_Fact):
    """A GPU as CUDA numbers it in this environment. `peers`: ordinals of the GPUs whose memory it can reach."""

    ordinal: int
    uuid: str
    name: str = ""
    capability: tuple[int, int]
    multiprocessors: int
    total: int | None = None
    peers: tuple[int, ...] = ()


class NvmlFacts(_Fact):
    """NVML. `path` is the library's file, links resolved; `error` is the name of its error (NVMLError_NoPermission)."""

    path: str | None = None
    error: str | None = None
    text: str | None = None
    driver: str | None = None
    cuda: int | None = None
    devices: tuple[NvmlDevice, ...] = ()


class NvmlDevice(_Fact):
    """A GPU as NVML numbers it. `mode`: Default, Exclusive_Process, Prohibited. `error`: why NVML gives no handle.
    `vgpu`: the machine is a guest with a part of the card.

    `processes`: bytes by PID, None if NVML does not say how many; the doctor's own processes are left out.
    """

    index: int
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] | None = None
    total: int | None = None
    used: int | None = None
    free: int | None = None
    mig: bool | None = None
    vgpu: bool | None = None
    mode: str | None = None
    processes: dict[str, int | None] = {}
    error: str | None = None


class Driver(_Fact):
    """The driver: kernel module, libcuda and NVML. `module` is the module's version, "" if it does not report one.

    `pci`: addresses of NVIDIA GPUs on the bus. `files`: device files by path: ok, denied, or the error's name (EIO).
    """

    module: str | None = None
    pci: tuple[str, ...] = ()
    files: dict[str, str] = {}
    cuda: Cuda = Cuda()
    nvml: NvmlFacts = NvmlFacts()


class Stage(_Fact):
    """A finished step of a probe: import, devices, compute; in a process with several frameworks, the framework's name.

    If it failed, `error` is the exception's text and `kind` its type with the module.
    """

    name: str
    seconds: float
    error: str | None = None
    kind: str | None = None


class Probe(_Fact):
    """The outcome of a probe's process. `signal`: the signal that ended it (SIGFPE). `hung`: stopped after `seconds`.
    `complete`: False if it exited with code 0 before its last step.

    `libraries`: the mapped files of CUDA and of frameworks, links resolved. `said`: the lines on stderr.
    """

    stages: tuple[Stage, ...] = ()
    seconds: float = 0.0
    exit: int | None = None
    signal: str | None = None
    hung: bool = False
    complete: bool = True
    libraries: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def failed(self) -> Stage | None:
        """The first step that raised an exception."""
        return next((stage for stage in self.stages if stage.error is not None), None)


class FrameworkFacts(_Fact):
    """One framework: its installation, its build, and the outcome of its probe.

    `distributions`: versions by name of the distributions that install its module; `folder` is where they install it,
    `path` the file that `import` found. `gpu`: whether it is built for CUDA. `architectures` in CUDA's notation (sm_90,
    compute_90). `cuda`, `cudnn`: the versions of the build; `cudnn_loaded`: the one at run time. `missing`: libraries
    that it could not open. `gpus`: the number it sees; `multiprocessors`: the number it counts on each.
    """

    distributions: dict[Name, str] = {}
    folder: str | None = None
    path: str | None = None
    version: str | None = None
    gpu: bool | None = None
    cuda: str | None = None
    cudnn: str | None = None
    cudnn_loaded: str | None = None
    architectures: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    gpus: int | None = None
    multiprocessors: tuple[int, ...] = ()
    probe: Probe | None = None


class Together(_Fact):
    """Several frameworks in one process, used in this order. `multiprocessors`: as each counts them on GPU 0."""

    order: tuple[str, ...]
    multiprocessors: dict[str, int] = {}
    probe: Probe


class Process(_Fact):
    """The process that called `memguard.doctor()`; there is none for the command line.

    `modules`: imported frameworks and relevant submodules (`pycuda.autoinit`), in the order of import.
    `contexts`: for each GPU with a context of this process, by UUID, its bytes according to NVML; None if NVML does not
    list it, as in a container, where NVML lists the host's PIDs. `foreign_context`: PyCUDA's current context is not
    the primary one. `allocators`: the allocators that replace a framework's own, by framework. `budget`: whether one is
    active.
    """

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    contexts: dict[str, int | None] = {}
    foreign_context: bool | None = None
    allocators: dict[str, str] = {}
    budget: bool = False


class Namesakes(_Fact):
    """Distributions that install a package memguard, if one of them is not memguard-gpu.

    `distributions`: versions by name. `path`: the file that `import memguard` finds; `own`: whether it is this
    project's. `origin`: the path or URL that memguard-gpu was installed from, None for an index.
    """

    distributions: dict[Name, str] = {}
    path: str | None = None
    own: bool = True
    origin: str | None = None


class Script(_Fact):
    """A program that was parsed and not run: the modules that it imports, in order, with their lines."""

    path: str
    imports: tuple[tuple[str, int], ...] = ()
    error: str | None = None


class BudgetFacts(_Fact):
    """The budget to check. `limits`: bytes by UUID of its GPUs; `errors`: why it cannot be planned. `suspend`: whether
    it has a section `suspend`.
    """

    source: str = "budget"
    frameworks: tuple[str, ...] = ()
    limits: dict[str, int] = {}
    errors: tuple[str, ...] = ()
    suspend: bool = False


class Facts(_Fact):
    """All facts. `label`: the origin of stored facts, and what was edited in them.

    `environment`: variables that CUDA or a framework reads. `tools`: paths of programs by name, None if not found.
    `packages`: versions by name of related distributions. `seconds`: by probe.
    """

    memguard_facts: Literal[1] = VERSION
    label: str = ""
    memguard: str = ""
    time: str = ""
    system: System = System()
    environment: dict[str, str] = {}
    tools: dict[str, str | None] = {}
    packages: dict[Name, str] = {}
    driver: Driver = Driver()
    frameworks: dict[Name, FrameworkFacts] = {}
    together: tuple[Together, ...] = ()
    namesakes: Namesakes | None = None
    process: Process | None = None
    script: Script | None = None
    budget: BudgetFacts | None = None
    seconds: dict[str, float] = {}

    def probes(self) -> Iterator[tuple[str, Probe]]:
        """Every probe, with the name that messages use."""
        for name, framework in self.frameworks.items():
            if framework.probe is not None:
                yield name, framework.probe
        for together in self.together:
            yield " then ".join(together.order), together.probe

    def to_json(self) -> str:
        """JSON without the fields that have default values."""
        plain = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps({"memguard_facts": VERSION, **plain}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "facts") -> Facts:
        """Parse facts from JSON. Raises FactsError that names the first problem."""
        try:
            if len(text) > bounds.TEXT:
                raise ValueError(f"it is larger than {bounds.TEXT >> 20} MiB")
            facts = cls.model_validate_json(text)
            plain = json.loads(text)
            if "memguard_facts" not in plain:
                raise ValueError("memguard_facts: Field required")
            wrong = bounds.first_violation(plain)
            if wrong is not None:
                raise ValueError(wrong)
            return facts
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            said = f"{where + ': ' if where else ''}{first['msg']}"
        except ValueError as error:
            said = str(error)
        said = "".join(char if char.isprintable() else "?" for char in said[:500])
        raise FactsError(
            f"{source}: {said}", fix="give a file that `memguard doctor --dump-facts` of this version wrote"
        )


Cuda.model_rebuild()
NvmlFacts.model_rebuild()
