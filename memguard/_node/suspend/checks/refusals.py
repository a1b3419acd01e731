"""Why a process is not suspended, and what to do about it: decided from facts alone, before anything is touched.

What is unknown refuses nothing, except host memory: a process that does not get enough of it is killed. `unknown` says
what nobody could see; whoever suspends a process from outside has to know it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from memguard._base.text import visible
from memguard._base.units import MIB, format_size
from memguard._node.identity import Process
from memguard._node.suspend.checks.facts import Facts
from memguard._node.suspend.types import Reason

Code = Literal[
    "process-gone",
    "wsl",
    "driver-too-old",
    "architecture",
    "mig",
    "vgpu",
    "unified-memory",
    "no-permission",
    "other-namespace",
    "stopped",
    "frozen",
    "debugger",
    "mps",
    "native-thread",
    "managed-memory",
    "cuda-ipc",
    "nccl",
    "capture",
    "profiler",
    "children",
    "host-memory",
    "cgroup-memory",
]
CODES: tuple[str, ...] = get_args(Code)
ARM = ("aarch64", "arm64")


class DriverRule(NamedTuple):
    """A refusal for the drivers from major version `since` to before `until` (None: every later one so far).

    `machines`: those of `uname -m` that it applies to; none: all. `source` is for people.
    """

    code: Code
    since: int
    until: int | None
    source: str
    machines: tuple[str, ...] = ()

    def applies(self, driver: int | None, machine: str | None) -> bool:
        """Whether it refuses on this driver. An unknown driver is refused only what every driver is refused."""
        if self.machines and machine not in self.machines:
            return False
        if driver is None:
            return self.until is None
        return driver >= self.since and (self.until is None or driver < self.until)


BY_DRIVER: Mapping[Code, DriverRule] = {
    rule.code: rule
    for rule in (
        DriverRule("driver-too-old", 0, 570, "NVIDIA/cuda-checkpoint, 570 Features: the driver's functions"),
        DriverRule("architecture", 570, 595, "NVIDIA/cuda-checkpoint, issue 51: 801 after the lock on 580", ARM),
        DriverRule("mig", 0, None, "NVIDIA/cuda-checkpoint, issue 42"),
        DriverRule("managed-memory", 0, None, "measured, 580: 801; gpunap, 595: the context is lost"),
        DriverRule(
            "cuda-ipc",
            0,
            None,
            "measured, 580: the restore fails with error 1. From 610 only for the processes of one `cuda-checkpoint "
            "--launch-job`, suspended together (NVIDIA/cuda-checkpoint, issues 43 and 56; google/gvisor, pull request "
            "13987), and memguard suspends one process at a time",
        ),
        DriverRule("nccl", 0, None, "gpunap: aborts on 595, passes on 580"),
    )
}
"""The refusals that depend on the driver. `docs/suspend.md` shows this table."""
_GROWTH, _SPARE = (21, 20), 256 * MIB
"""Measured on an H200: RssAnon grew by 1.05 bytes for each byte that left the GPU. The spare bytes are a choice."""
_IGNORE = 'if the machine gets more when it is needed: `suspend: {host_memory: ignore}`, or host_memory="ignore"'


def host_needed(bytes: Mapping[str, int]) -> int:  # noqa: A002 (its name in all of these types)
    """The host memory that a process needs to be suspended, for what it holds of each GPU."""
    times, by = _GROWTH
    total = sum(bytes.values())
    return total * times // by + _SPARE if total else 0


def reasons(facts: Facts, *, needs_host: int, override_memory: bool = False) -> tuple[Reason, ...]:
    """All reasons not to suspend the process, what no program can change first. Empty: nothing speaks against it.

    `needs_host`: bytes of host memory that it takes (`host_needed`). `override_memory`: its lack is no reason.
    """
    if gone := tuple(_gone(facts)):
        return gone
    found = [reason for check in _CHECKS for reason in check(facts)]
    return tuple(found if override_memory else [*found, *_memory(facts, needs_host)])


def still(facts: Facts) -> tuple[Reason, ...]:
    """Why the process can answer nobody now: it is stopped, or frozen."""
    return tuple(_stopped(facts))


def unheld(libraries: tuple[str, ...]) -> tuple[Reason, ...]:
    """Of this process: those whose own threads cannot be answered (`native_threads`)."""
    return tuple(_native(Facts(Process(0, 0), inside=True, natives=libraries)))


def machine(
    *,
    driver: str | None,
    calls: bool | None,
    wsl: bool | None,
    mig: tuple[str, ...] = (),
    vgpu: tuple[str, ...] = (),
    unified: tuple[str, ...] = (),
    architecture: str | None = None,
) -> tuple[Reason, ...]:
    """What makes it impossible on this machine, for any process. The doctor asks this too."""
    found = [*_wsl(wsl), *([] if wsl else _old(driver, calls, architecture))]
    mig = mig if BY_DRIVER["mig"].applies(_major(driver), architecture) else ()
    return (*found, *_parts(mig, vgpu, unified))


def unknown(facts: Facts) -> tuple[str, ...]:
    """What nobody could see, one line each: hazards that remain if the process is suspended all the same."""
    blind = {
        "whether a framework has a thread of its own that asks the driver: that crashes it": facts.natives,
        "whether CUDA IPC is in use: a process that has opened another's memory is lost when it is resumed": facts.ipc,
        "whether NCCL has communicators: their threads may crash the process": facts.nccl,
        "whether a CUDA graph is being captured: the capture would be lost": facts.captures,
        "whether a profiler has subscribed to CUPTI": facts.profilers,
        "whether it uses managed memory: some drivers lose the process": facts.uvm,
        "whether processes that it has started use a GPU": facts.children,
        "whether its cgroup has enough memory left: the kernel kills a process that takes more": facts.limits,
        "whether a GPU is divided by MIG": None if any(gpu.mig is None for gpu in facts.gpus) else (),
    }
    return (*(line for line, known in blind.items() if known is None), *map(_clean, facts.unseen))


def _gone(facts: Facts) -> Iterator[Reason]:
    if facts.running is False:
        yield _reason(
            "process-gone",
            f"there is no process {facts.process.pid} any more, or its PID belongs to another one now",
            "list the processes again: memguard ps",
        )


def _machine(facts: Facts) -> Iterator[Reason]:
    yield from machine(
        driver=facts.driver,
        calls=facts.calls,
        wsl=facts.wsl,
        mig=tuple(gpu.uuid for gpu in facts.gpus if gpu.mig),
        vgpu=tuple(gpu.uuid for gpu in facts.gpus if gpu.vgpu),
        unified=tuple(gpu.uuid for gpu in facts.gpus if gpu.unified),
        architecture=facts.machine,
    )


def _wsl(wsl: bool | None) -> Iterator[Reason]:
    if wsl:
        yield _reason(
            "wsl",
            "this is WSL, where the GPU's driver is the one of Windows: CUDA suspends processes on Linux only",
            "run it on Linux itself; here end the program to free the GPU",
        )


def _old(driver: str | None, calls: bool | None, architecture: str | None) -> Iterator[Reason]:
    major = _major(driver)
    oldest, arm = BY_DRIVER["driver-too-old"].until, BY_DRIVER["architecture"]
    if BY_DRIVER["driver-too-old"].applies(major, architecture):
        yield _reason(
            "driver-too-old",
            f"the NVIDIA driver is {_clean(driver)}, and only {oldest} and later can suspend a process",
            f"install a driver of {oldest} or later and reboot (`nvidia-smi` says which one is loaded)",
        )
    elif calls is False:
        yield _reason(
            "driver-too-old",
            "libcuda has no cuCheckpointProcess* functions: it is older than CUDA 12.8, or not the driver's own",
            f"install a driver of {oldest} or later; in a container remove its own libcuda.so.1 (cuda-compat)",
        )
    if arm.applies(major, architecture):
        yield _reason(
            "architecture",
            f"the driver {_clean(driver)} cannot suspend processes on ARM ({architecture}), {arm.until} and later can",
            f"install a driver of {arm.until} or later and reboot",
        )


def _parts(mig: tuple[str, ...], vgpu: tuple[str, ...], unified: tuple[str, ...]) -> Iterator[Reason]:
    if mig:
        yield _reason(
            "mig",
            f"MIG divides {_list(mig)}, and the driver cannot suspend what runs on a part",
            "run it on a whole GPU: another one (CUDA_VISIBLE_DEVICES), or this one without MIG "
            "(`sudo nvidia-smi -i GPU -mig 0`, once nothing runs on it)",
        )
    if vgpu:
        yield _reason(
            "vgpu",
            f"{_list(vgpu)} is a virtual GPU (vGPU), on which suspending was never tried",
            "run it on a machine that has the whole GPU: bare metal, or passed through",
        )
    if unified:
        yield _reason(
            "unified-memory",
            f"{_list(unified)} has no memory of its own: what left it would take as much of the same memory",
            "end the program to free its memory",
        )


def _permission(facts: Facts) -> Iterator[Reason]:
    if facts.inside or facts.capable:
        return
    if facts.user is not None and facts.asker is not None and facts.user != facts.asker:
        yield _reason(
            "no-permission",
            f"process {facts.process.pid} belongs to user {facts.user}, and this is user {facts.asker}: the driver "
            "lets nobody else suspend it",
            f"do it as that user: sudo -u '#{facts.user}' memguard suspend {facts.process.pid}",
        )
    elif facts.dumpable is False:
        yield _reason(
            "no-permission",
            f"process {facts.process.pid} does not let others of its user look into it (it is not dumpable)",
            "start it again without what makes it so: setuid, file capabilities, prctl(PR_SET_DUMPABLE, 0)",
        )


def _namespace(facts: Facts) -> Iterator[Reason]:
    if facts.namespace is False:
        yield _reason(
            "other-namespace",
            f"process {facts.process.pid} runs in another PID namespace (a container), where it has another PID",
            "do it in that container: docker exec CONTAINER memguard suspend PID",
        )


def _stopped(facts: Facts) -> Iterator[Reason]:
    pid = facts.process.pid
    if facts.state in ("T", "t"):
        by = f" by process {facts.tracer}, a debugger or tracer" if facts.state == "t" and facts.tracer else ""
        yield _reason(
            "stopped",
            f"process {pid} is stopped (state {facts.state}){by}: the driver would wait for it for ever",
            "let the debugger continue and detach" if facts.state == "t" else f"continue it first: kill -CONT {pid}",
        )
    if facts.frozen:
        yield _reason(
            "frozen",
            f"process {pid} is in a frozen cgroup (a paused container): the driver would wait for it for ever",
            "thaw it first: docker unpause CONTAINER",
        )


def _debugger(facts: Facts) -> Iterator[Reason]:
    if facts.tracer and facts.state != "t":
        yield _reason(
            "debugger",
            f"process {facts.tracer} traces it (gdb, cuda-gdb, strace)",
            f"detach it: `ps -p {facts.tracer}` says what it is",
        )


def _served(facts: Facts) -> Iterator[Reason]:
    if facts.mps:
        yield _reason(
            "mps",
            "it uses its GPU through the Multi-Process Service (MPS), with which suspending was never tried",
            "start it without MPS: outside the service's CUDA_MPS_PIPE_DIRECTORY, or after "
            "`echo quit | nvidia-cuda-mps-control`",
        )


def _native(facts: Facts) -> Iterator[Reason]:
    if not facts.natives:
        return
    what = (
        f"{_list(facts.natives)} has a thread of its own that asks the driver again and again: that crashes a process"
    )
    if facts.inside:
        yield _reason(
            "native-thread",
            f"{what}, and memguard does not find where this version keeps the driver's functions",
            "try again in 10 s (only its first question may be missing); if this comes again, suspend before that "
            "framework uses a GPU, or take a version that is known to work: JAX 0.11.2, TensorFlow 2.21",
        )
    else:
        yield _reason(
            "native-thread",
            f"{what}, and only memguard within the process can answer it",
            "start it again under a budget with `suspend: {by_others: true}`, or let it call memguard.suspend() "
            "itself (in a notebook: %memguard suspend)",
        )


def _managed(facts: Facts) -> Iterator[Reason]:
    if facts.uvm is not None and facts.uvm > 1 and _applies("managed-memory", facts):
        yield _reason(
            "managed-memory",
            f"it uses managed memory (/dev/nvidia-uvm is mapped {facts.uvm} times, once without): the driver cannot "
            "move it, and some drivers lose the process",
            "free all managed memory first (cudaMallocManaged, cupy.cuda.malloc_managed, pycuda.driver.managed_empty, "
            "numba.cuda.managed_array, RMM's managed pool), or end the program",
        )


def _shared(facts: Facts) -> Iterator[Reason]:
    if facts.ipc and _applies("cuda-ipc", facts):
        yield _reason(
            "cuda-ipc",
            f"GPU memory is shared with other processes ({_list(facts.ipc)}): who has opened another's is lost when "
            "it is resumed, and whom it is shared with would see it no more",
            "close the handles (memguard.exchange: handle.close()), delete the shared tensors in every process, "
            "then gc.collect()",
        )


def _nccl(facts: Facts) -> Iterator[Reason]:
    if facts.nccl and _applies("nccl", facts):
        yield _reason(
            "nccl",
            f"NCCL has communicators here ({_list(facts.nccl)}): the others would wait for it, and its threads may "
            "crash the process",
            "end them first: torch.distributed.destroy_process_group(), or end the program",
        )


def _captured(facts: Facts) -> Iterator[Reason]:
    if facts.captures:
        yield _reason(
            "capture",
            f"a CUDA graph is being captured ({_list(facts.captures)}): the capture would be lost",
            "suspend after the capture has ended",
        )


def _profiled(facts: Facts) -> Iterator[Reason]:
    what = (*(facts.profilers or ()), *(facts.tools or ()))
    if what:
        yield _reason(
            "profiler",
            f"a profiler or tool has subscribed to CUDA (CUPTI): {_list(what)}",
            "stop the profiler first; a process that was started under nsys, ncu, compute-sanitizer or with "
            "CUDA_INJECTION64_PATH has to be started again without",
        )


def _children(facts: Facts) -> Iterator[Reason]:
    if facts.children:
        named = [
            f"{_clean(child.name)} ({child.pid}{'' if child.bytes is None else ', ' + format_size(child.bytes)})"
            for child in facts.children
        ]
        one = len(facts.children) == 1
        together = f"memguard suspend {'' if facts.inside else '--unsafe '}--tree {facts.process.pid}"
        allow = ", if the budget of each has `suspend: {by_others: true}`" if facts.inside else ""
        yield _reason(
            "children",
            f"{len(facts.children)} {'process' if one else 'processes'} that it has started "
            f"{'uses' if one else 'use'} a GPU too: {_list(tuple(named))}",
            f"end them first, or suspend all of them together from a shell: `{together}`{allow}",
        )


def _memory(facts: Facts, needs: int) -> Iterator[Reason]:
    if needs <= 0:
        return
    # The way round is for the process itself: the command that does it from outside has no such option.
    ignore, trim = (f"; {_IGNORE}", ", or trim GPU caches first (memguard.trim())") if facts.inside else ("", "")
    wants = f"what leaves the GPU ({format_size(facts.total)}) takes {format_size(needs)} of host memory"
    if facts.available is None:
        yield _reason(
            "host-memory",
            f"{wants}, and nobody knows how much there is (MemAvailable of /proc/meminfo cannot be read)",
            f"mount /proc where this runs{ignore}",
        )
    elif facts.available < needs:
        yield _reason(
            "host-memory",
            f"{wants}, and the machine has {format_size(facts.available)} available (MemAvailable of /proc/meminfo; "
            "swap does not count)",
            f"free {format_size(needs - facts.available)} of host memory{trim}{ignore}",
        )
    if facts.grantable is not None and facts.grantable < needs:
        yield _reason(
            "host-memory",
            f"{wants}, and the kernel grants {format_size(facts.grantable)} more (vm.overcommit_memory is 2: "
            "CommitLimit less Committed_AS of /proc/meminfo)",
            f"ask for `sysctl vm.overcommit_memory=0`, or a higher vm.overcommit_ratio{ignore}",
        )
    short = next((limit for limit in facts.limits or () if limit.left < needs), None)
    if short is not None:
        then = "the kernel would kill it" if short.kills else "the kernel would slow it to a crawl"
        yield _reason(
            "cgroup-memory",
            f"{wants}, which is charged to its cgroup, and that has {format_size(short.left)} left: {then} "
            f"({_clean(short.file)} is {format_size(short.limit)}, {format_size(short.used)} used)",
            f"raise that limit by {format_size(needs - short.left)} (docker update --memory, systemctl set-property, "
            f"the pod's limits.memory, the job's --mem){ignore}",
        )


_CHECKS: tuple[Callable[[Facts], Iterator[Reason]], ...] = (
    _machine,
    _permission,
    _namespace,
    _stopped,
    _debugger,
    _served,
    _native,
    _managed,
    _shared,
    _nccl,
    _captured,
    _profiled,
    _children,
)


def _applies(code: Code, facts: Facts) -> bool:
    return BY_DRIVER[code].applies(_major(facts.driver), facts.machine)


def _reason(code: Code, reason: str, remedy: str) -> Reason:
    return Reason(code, reason, remedy)


def _major(driver: str | None) -> int | None:
    found = re.match(r"\s*([0-9]{1,6})\b", driver or "")
    return int(found[1]) if found else None


def _clean(text: object) -> str:
    """One line of what a driver, a file or a framework said."""
    said = visible(str(text), keep="")
    return said if len(said) <= 200 else said[:200] + "..."


def _list(lines: tuple[str, ...]) -> str:
    shown = [_clean(line) for line in lines[:4]]
    return ", ".join(shown) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
