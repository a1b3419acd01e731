"""What is collected of a process before it is suspended: from made /proc and cgroup trees, and from real processes of
this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.units import GIB, MIB
from memguard._devices import proc
from memguard._node.identity import Process
from memguard._node.suspend.checks import cgroups, facts, refusals
from memguard._node.suspend.checks.facts import Child, Facts
from memguard.errors import DeviceError

GPU = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be"
PID, START = 4242, 77_000
MAPS = """\
200000000-200200000 ---p 00000000 00:00 0
203800000-203a00000 rw-s 00000000 00:06 412                      /dev/nvidia-uvm
203a00000-203c00000 rw-s 00000000 00:06 410                      /dev/nvidiactl
203c00000-203e00000 rw-s 00000000 00:06 411                      /dev/nvidia0
7f10aa000000-7f10ab000000 r-xp 00000000 08:01 55                 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
7f10ac000000-7f10ad000000 r-xp 00000000 08:01 56                 /usr/lib/libnccl.so.2
7f10ad000000-7f10ae000000 r-xp 00000000 08:01 57                 /cuda/libcupti.so.13
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0                  [stack]
"""
UVM_TOO = "204000000-204200000 rw-s 00200000 00:06 412                      /dev/nvidia-uvm\n"


class Machine:
    """A /proc and a /sys/fs/cgroup of files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/self/status", "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n")
        self.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
        self.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  x\n")
        self.link("proc/self/ns/pid", "pid:[1]")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))

    def link(self, name: str, to: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)

    def process(
        self,
        pid: int = PID,
        *,
        parent: int = 1,
        state: str = "S",
        name: str = "python",
        user: int = 1000,
        tracer: int = 0,
        maps: str | None = MAPS,
        cgroup: str | None = "0::/job\n",
        namespace: str = "pid:[1]",
        environ: str = "PATH=/bin\0",
        threads: tuple[str, ...] = ("python",),
    ) -> None:
        fields = [state, str(parent), *["0"] * 17, str(START), *["0"] * 30]
        self.write(f"proc/{pid}/stat", f"{pid} ({name}) {' '.join(fields)}\n")
        self.write(f"proc/{pid}/status", f"Name:\t{name}\nUid:{f'	{user}' * 4}\nTracerPid:\t{tracer}\n")
        self.write(f"proc/{pid}/environ", environ)
        self.link(f"proc/{pid}/ns/pid", namespace)
        for place, thread in enumerate(threads):
            self.write(f"proc/{pid}/task/{pid + place}/comm", f"{thread}\n")
        if maps is not None:
            self.write(f"proc/{pid}/maps", maps)
        if cgroup is not None:
            self.write(f"proc/{pid}/cgroup", cgroup)

    def group(self, folder: str, files: Mapping[str, object]) -> None:
        for name, value in files.items():
            self.write(f"sys/fs/cgroup/{folder}/{name}", f"{value}\n")

    def facts(self, pid: int = PID, **more: Any) -> Facts:
        given = {"inside": False, "bytes": {GPU: GIB}, **more}
        return facts.collect(Process(pid, START), root=str(self.root), **given)

    def codes(self, needs: int = GIB, **more: Any) -> list[str]:
        return [reason.code for reason in refusals.reasons(self.facts(**more), needs_host=needs)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An NVML of one GPU, or of none while `answers` is False."""
    said = SimpleNamespace(answers=True, processes={PID: GIB}, mps=(), mig=False, vgpu=False, unified=False, refused=())

    class Fake:
        @property
        def refused(self) -> tuple[str, ...]:
            return said.refused

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*_: str) -> Any:
                if not said.answers:
                    raise DeviceError("no driver")
                devices = (SimpleNamespace(uuid=GPU, unified=said.unified),)
                return {"devices": devices, "driver": "580.1"}[name] if name in ("devices", "driver") else getattr(
                    said, name)  # fmt: skip

            return call

        def close(self) -> None:
            pass

    monkeypatch.setattr(facts, "Nvml", Fake)
    return said


def test_a_plain_process_of_the_same_user(machine: Machine) -> None:
    machine.process(name="a) b (c")
    found = machine.facts()
    assert (found.running, found.state, found.tracer, found.user, found.asker) == (True, "S", 0, 1000, 1000)
    assert (found.uvm, found.tools, found.nccl, found.children) == (1, (), None, ())
    assert (found.driver, found.available, found.total) == ("580.159.04", 32 * GIB, GIB)
    assert (found.capable, found.dumpable, found.namespace) == (False, os.getuid() != 0, True)
    assert found.gpus == (facts.Gpu(GPU, False, False, False),)
    assert found.ipc is found.captures is found.profilers is None, "nobody can see them from outside"


def test_a_pid_that_was_given_again_is_another_process(machine: Machine) -> None:
    machine.process()
    assert machine.facts().running
    later = facts.collect(Process(PID, START + 1), inside=False, bytes={}, root=str(machine.root))
    assert later.running is False
    assert machine.facts(5).running is False, "there is none"
    machine.process(6, state="Z")
    assert machine.facts(6).running is False, "it has ended"


def test_without_a_proc_everything_is_unknown(tmp_path: Path, nvml: SimpleNamespace) -> None:
    nvml.answers = False
    found = facts.collect(Process(PID, START), inside=False, bytes={GPU: GIB}, root=str(tmp_path))
    known = {name: value for name, value in vars(found).items() if value not in (None, (), False)}
    assert set(known) <= {"process", "bytes", "machine", "gpus", "calls", "wsl"}
    assert [one.code for one in refusals.reasons(found, needs_host=GIB)] == ["host-memory"]


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        ({"state": "T"}, ["stopped"]),
        ({"state": "t", "tracer": 9}, ["stopped"]),
        ({"tracer": 9}, ["debugger"]),
        ({"maps": MAPS + UVM_TOO}, ["managed-memory"]),
        ({"maps": MAPS.replace("nvidia-uvm", "nvidia-uvm-tools")}, []),
        ({"namespace": "pid:[2]"}, ["other-namespace"]),
        ({"user": 0}, ["no-permission"]),
        ({"environ": "A=1\0CUDA_INJECTION64_PATH=/x.so\0"}, ["profiler"]),
        ({"environ": "CUDA_INJECTION64_PATH=\0"}, []),
        ({"maps": MAPS + "7f00-7f01 r-xp 0 08:01 9 /opt/nsys/libToolsInjection64.so\n"}, ["profiler"]),
        ({"maps": MAPS + "7f00-7f01 rw-s 0 00:17 9 /dev/shm/nccl-aB3 (deleted)\n"}, ["nccl"]),
        ({"threads": ("python", "pt_nccl_watchdg")}, ["nccl"]),
    ],
)
def test_what_proc_says_of_a_process_refuses_it(machine: Machine, given: Any, codes: list[str]) -> None:
    machine.process(**given)
    assert [code for code in machine.codes() if code != "no-permission" or codes == ["no-permission"]] == codes


@pytest.mark.parametrize(
    ("answer", "code"), [("mig", "mig"), ("vgpu", "vgpu"), ("unified", "unified-memory"), ("nothing", None)]
)
def test_what_nvml_says_of_the_gpu_refuses_it(
    machine: Machine, nvml: SimpleNamespace, answer: str, code: str | None
) -> None:
    machine.process()
    setattr(nvml, answer, True)
    assert (code in machine.codes()) if code else not {"mig", "vgpu", "unified-memory"} & set(machine.codes())


def test_a_client_of_mps(machine: Machine, nvml: SimpleNamespace) -> None:
    machine.process()
    nvml.mps = {PID + 1}
    assert machine.facts().mps is False
    nvml.mps = {PID, PID + 1}
    assert "mps" in machine.codes()
    nvml.answers = False
    assert machine.facts().mps is None


def test_a_part_of_a_gpu_is_known_by_its_name(machine: Machine, nvml: SimpleNamespace) -> None:
    machine.process()
    nvml.answers = False
    assert "mig" in machine.codes(bytes={"MIG-1": 1})


def test_wsl_by_its_device(machine: Machine) -> None:
    machine.process()
    machine.write("dev/dxg", "")
    assert "wsl" in machine.codes()


def test_children_by_nvml_where_it_knows_our_pids(machine: Machine, nvml: SimpleNamespace) -> None:
    machine.process()
    machine.process(50, parent=PID, name="forked")  # with its parent's mappings and no context
    machine.process(51, parent=50, name="own")
    machine.process(52, parent=1, name="stranger")
    machine.process(53, parent=PID, name="over", state="Z")
    nvml.processes = {PID: GIB, 51: 3 * MIB, 52: GIB, 53: GIB}
    assert machine.facts().children == (Child(51, "own", 3 * MIB),)
    assert machine.facts(together={51}).children == ()


@pytest.mark.parametrize("listed", [{1: GIB}, None])
def test_children_by_their_mappings_where_it_does_not(
    machine: Machine, nvml: SimpleNamespace, listed: dict[int, int] | None
) -> None:
    nvml.processes, nvml.answers = listed, listed is not None
    machine.process()
    machine.process(50, parent=PID, name="forked")
    machine.process(51, parent=PID, name="own", maps=MAPS.replace("7f10aa000000", "7f20aa000000"))
    machine.process(52, parent=PID, name="without", maps="7ffd00000000-7ffd00001000 rw-p 0 00:00 0 [stack]\n")
    machine.process(53, parent=PID, name="hidden", maps=None)
    assert machine.facts().children == (Child(51, "own", None),)


def test_a_ring_of_parents_ends(machine: Machine) -> None:
    machine.process(parent=50)
    machine.process(50, parent=PID, maps="")
    assert machine.facts().children == ()


# Host memory: what the kernel allows


def test_limits_of_the_whole_path_the_tightest_first(machine: Machine) -> None:
    machine.process(cgroup="0::/slice/job\n")
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nfile_dirty {512 * MIB}\nfile_writeback 0\n"
    machine.group("slice/job", {"memory.max": "max", "memory.high": 9 * GIB, "memory.current": 3 * GIB})
    machine.group("slice", {"memory.max": 8 * GIB, "memory.high": "max", "memory.current": 6 * GIB})
    machine.group("slice", {"memory.stat": stat})
    machine.group(".", {"memory.stat": "anon 1"})  # the root has no limits
    first, second = machine.facts().limits or ()
    assert (first.file, first.limit, first.used) == ("/sys/fs/cgroup/slice/memory.max", 8 * GIB, 4.5 * GIB)
    assert first.kills and not second.kills and second.left == 6 * GIB
    assert machine.codes(needs=3 * GIB) == machine.codes(needs=int(3.5 * GIB)) == _rights(machine)
    assert machine.codes(needs=4 * GIB) == [*_rights(machine), "cgroup-memory"]


@pytest.mark.parametrize(("mode", "room"), [("0", None), ("1", None), ("2", 3 * GIB), ("", None)])
def test_a_kernel_that_promises_no_more_than_it_has(machine: Machine, mode: str, room: int | None) -> None:
    machine.process()
    machine.write("proc/sys/vm/overcommit_memory", f"{mode}\n")
    text = f"MemAvailable: {32 << 20} kB\nCommitLimit: {8 << 20} kB\nCommitted_AS: {5 << 20} kB\n"
    machine.write("proc/meminfo", text)
    assert machine.facts().grantable == room
    assert ("host-memory" in machine.codes(needs=4 * GIB)) is (room is not None)
    machine.write("proc/meminfo", f"MemAvailable: {32 << 20} kB\n")
    assert machine.facts().grantable is None


def _rights(machine: Machine) -> list[str]:
    """Files that this test writes as root look like those of a process that is not dumpable."""
    return [] if os.getuid() else ["no-permission"]


def test_limits_of_version_1_and_its_word_for_none(machine: Machine) -> None:
    machine.process(cgroup="9:cpu,cpuacct:/x\n4:memory:/a/b\n0::/x\n")
    machine.write(
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    machine.group("unified/x", {"cgroup.events": "populated 1"})
    machine.group("memory/a/b", {"memory.limit_in_bytes": (1 << 63) - 4096, "memory.usage_in_bytes": GIB})
    machine.group("memory/a", {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB})
    machine.group("memory/a", {"memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\ntotal_dirty {MIB}"})
    (limit,) = machine.facts().limits or ()
    assert limit.file == "/sys/fs/cgroup/memory/a/memory.limit_in_bytes"
    assert limit.left == 2 * GIB - MIB


def test_limits_in_a_container_whose_mount_begins_within_the_tree(machine: Machine) -> None:
    machine.process(cgroup="4:memory:/docker/ab cd\n")
    machine.write(
        "proc/self/mountinfo", r"35 31 0:32 /docker/ab\040cd /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory" "\n"
    )
    machine.group("memory", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
    assert [limit.left for limit in machine.facts().limits or ()] == [GIB]


@pytest.mark.parametrize(("path", "begin"), [("/../other", "/"), ("/elsewhere", "/docker/ab"), ("/", "/../..")])
def test_limits_of_a_cgroup_that_is_not_mounted_here_are_unknown(machine: Machine, path: str, begin: str) -> None:
    machine.process(cgroup=f"0::{path}\n")
    machine.write("proc/self/mountinfo", f"31 23 0:28 {begin} /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    machine.group(".", {"memory.max": 1, "memory.current": 1})
    assert machine.facts().limits is None
    assert any("cgroup" in line for line in refusals.unknown(machine.facts()))


def test_a_cgroup_that_was_removed_leaves_those_above_it(machine: Machine) -> None:
    machine.process(cgroup="0::/job/gone (deleted)\n")
    machine.group("job", {"memory.max": 2 * GIB, "memory.current": GIB})
    assert [limit.left for limit in machine.facts().limits or ()] == [GIB]


@pytest.mark.parametrize("events", ["populated 1\nfrozen 1", "populated 1\nfrozen 0"])
def test_a_paused_container(machine: Machine, events: str) -> None:
    machine.process(cgroup="0::/job\n")
    machine.group("job", {"cgroup.events": events})
    assert ("frozen" in machine.codes()) is events.endswith("1")
    assert "frozen" not in machine.codes(inside=True), "it would not ask"


def test_a_container_that_version_1_has_paused(machine: Machine) -> None:
    machine.process(cgroup="6:freezer:/job\n")
    machine.write("proc/self/mountinfo", "37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n")
    machine.group("freezer/job", {"freezer.state": "FROZEN"})
    assert "frozen" in machine.codes()


# Real processes of this machine


def itself(**more: Any) -> Facts:
    stat = proc.stat("/", os.getpid())
    assert stat is not None
    return facts.collect(Process(os.getpid(), stat.start), inside=True, bytes={}, **more)


def test_this_process() -> None:
    found = itself()
    assert (found.running, found.state, found.tracer, found.uvm) == (True, "R", 0, 0)
    assert found.user == os.geteuid() and found.available and found.limits is not None
    assert refusals.reasons(found, needs_host=0) == ()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        yield child
        child.kill()


def test_a_stopped_process_is_refused_until_it_goes_on(sleeper: subprocess.Popen[bytes]) -> None:
    def codes() -> list[str]:
        stat = proc.stat("/", sleeper.pid)
        assert stat is not None
        found = facts.collect(Process(sleeper.pid, stat.start), inside=False, bytes={})
        return [one.code for one in refusals.reasons(found, needs_host=0)]

    def until(wanted: list[str]) -> None:
        end = time.monotonic() + 10
        while codes() != wanted:
            assert time.monotonic() < end, codes()
            time.sleep(0.01)

    until([])
    sleeper.send_signal(signal.SIGSTOP)
    until(["stopped"])
    sleeper.send_signal(signal.SIGCONT)
    until([])


def test_a_child_with_a_context(nvml: SimpleNamespace, sleeper: subprocess.Popen[bytes]) -> None:
    nvml.processes = {os.getpid(): GIB, sleeper.pid: MIB}
    (child,) = itself().children or ()
    assert (child.pid, child.bytes) == (sleeper.pid, MIB)
    assert itself(together={sleeper.pid}).children == ()


def test_files_that_are_mapped_and_no_longer_there() -> None:
    """As after an update of the driver's package, or when device files were made anew."""
    found = proc.parse_maps(MAPS.replace("580.159.04", "580.159.04 (deleted)").replace("-uvm", "-uvm (deleted)"))
    assert found == proc.parse_maps(MAPS) and found.driver == "7f10aa000000"
    assert len(found.gpu) == 3


# Whatever the files hold


@settings(max_examples=60, deadline=None)
@given(said=st.text(max_size=400))
def test_no_text_of_the_kernel_raises(said: str) -> None:
    proc.parse_stat(said)
    proc.parse_status(said)
    proc.parse_maps(said)


@settings(max_examples=60, deadline=None)
@given(
    mounts=st.lists(st.tuples(st.text(max_size=12), st.sampled_from(["cgroup", "cgroup2"])), max_size=3),
    path=st.text(max_size=20),
    files=st.dictionaries(
        st.sampled_from(["memory.max", "memory.high", "memory.current", "memory.stat", "cgroup.events"]),
        st.text(max_size=30) | st.integers(0, 1 << 66).map(str),
    ),
)
def test_no_cgroup_raises(
    tmp_path_factory: pytest.TempPathFactory, mounts: Any, path: str, files: dict[str, str]
) -> None:
    machine = Machine(tmp_path_factory.mktemp("odd"))
    lines = [f"31 23 0:28 {begin} /sys/fs/cgroup rw - {kind} x rw,memory" for begin, kind in mounts]
    machine.write("proc/self/mountinfo", "\n".join(["31 23 0:28 / /sys/fs/cgroup rw - cgroup2 x rw", *lines]))
    machine.write(f"proc/{PID}/cgroup", f"0::/{path}\n4:memory:{path}\n".encode(errors="replace").decode())
    machine.group(".", {name: text.encode(errors="replace").decode() for name, text in files.items()})
    for limit in cgroups.limits(str(machine.root), PID) or ():
        assert 0 <= limit.left <= limit.limit and limit.used >= 0
    cgroups.frozen(str(machine.root), PID)
