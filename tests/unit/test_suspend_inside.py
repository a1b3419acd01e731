"""What a process tells of itself before it is suspended, by stand-ins with the names of the real frameworks.

tests/native asks the real ones.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memguard._devices import contexts, streams
from memguard._node.identity import Process
from memguard._node.suspend.checks import in_process_checks, refusals
from memguard._node.suspend.checks.facts import Facts
from memguard._node.suspend.checks.in_process_checks import Inside

HANDLE = b"\x07" * 64


class Storage:
    def __init__(self, expired: bool = False) -> None:
        self.gone = expired

    def expired(self) -> bool:
        return self.gone


def shared(*entries: tuple[object, Storage]) -> dict[str, Any]:
    return {"torch.multiprocessing.reductions": SimpleNamespace(shared_cache=dict(entries))}


def look(modules: dict[str, Any]) -> Inside:
    return in_process_checks.look(modules)


def test_nothing_imported_is_nothing_found() -> None:
    assert look({}) == Inside()


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (HANDLE, "torch.multiprocessing: 1 tensor given to other processes"),
        ((HANDLE, 512), "torch.multiprocessing: 1 tensor of other processes opened"),
        ((77, 3), None),  # a file of host memory
        (b"/torch_1_2_3", None),
    ],
)
def test_tensors_that_torch_shares(key: object, line: str | None) -> None:
    found = look(shared((key, Storage())))
    assert found == Inside(ipc=(line,) if line else ())
    assert look(shared((key, Storage(expired=True)))) == Inside(), "everybody has deleted it"


def test_several_are_counted() -> None:
    found = look(shared((HANDLE, Storage()), (b"\x08", Storage()), ((HANDLE, 0), Storage()), ((HANDLE, 1), Storage())))
    assert [line.split(": ")[1] for line in found.ipc] == [
        "2 tensors given to other processes",
        "2 tensors of other processes opened",
    ]


def test_what_memguard_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard.exchange.ipc import server, wire
    from memguard.exchange.ipc.server import Export

    mine = server.Server()
    monkeypatch.setattr(server, "_server", mine)
    assert look(dict(sys.modules)).ipc == ()
    described = SimpleNamespace(kind=wire.FILE)
    mine._exports["a"] = Export(described, None, True, lambda: None)  # type: ignore[arg-type]
    mine._exports["b"] = Export(SimpleNamespace(kind=wire.NOTHING), None, True, lambda: None)  # type: ignore[arg-type]
    assert look(dict(sys.modules)).ipc == ("memguard.exchange: 1 array exported",), "the other has no elements"
    mine._attached.add(object())  # type: ignore[arg-type]
    assert look(dict(sys.modules)).ipc[1:] == ("memguard.exchange: 1 array of other processes attached",)


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made


class IpcHandle:
    def __init__(self, impl: object = None) -> None:
        self._impl = impl


def test_handles_that_numba_has() -> None:
    modules = {"numba.cuda.cudadrv.driver": module("driver", IpcHandle=IpcHandle)}
    assert look(modules) == Inside()
    handles = [IpcHandle(), IpcHandle(object()), IpcHandle(object())]
    assert look(modules).ipc == (
        "numba: 2 IPC handles of other processes opened",
        "numba: 1 IPC handle made",
    )
    handles.clear()
    assert look(modules) == Inside()


@pytest.mark.parametrize(
    ("kind", "config", "count"),
    [("nccl", "cuda:nccl", 1), ("undefined", "cpu:gloo,cuda:nccl", 1), ("gloo", "cpu:gloo,cuda:gloo", 0)],
)
def test_process_groups_of_torch(kind: str, config: str, count: int) -> None:
    world = SimpleNamespace(pg_map={"group": (kind, None)}, pg_backend_config={"group": config})
    found = look({"torch.distributed.distributed_c10d": SimpleNamespace(_world=world)})
    assert found.nccl == ("torch.distributed: 1 process group of NCCL",) * count


class NCCLBackend:
    _comm = object()


def test_communicators_of_cupy() -> None:
    modules = {"cupyx.distributed._nccl_comm": module("comm", NCCLBackend=NCCLBackend)}
    assert look(modules) == Inside()
    one = NCCLBackend()
    one.itself = one  # type: ignore[attr-defined]
    assert look(modules).nccl == ("cupyx.distributed: 1 communicator",)


def torch(here: bool, elsewhere: Any = None, live: bool = True) -> SimpleNamespace:
    graph = SimpleNamespace(default_capture_stream=elsewhere)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: live, is_current_stream_capturing=lambda: here, graph=graph
        )
    )  # fmt: skip


def test_captures_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(device_index=1, cuda_stream=77)
    monkeypatch.setattr(streams, "capturing", lambda ordinal, handle: (ordinal, handle) == (1, 77))
    assert look({"torch": torch(False)}) == Inside()
    assert look({"torch": torch(True)}).captures == ("torch: a capture is under way",)
    assert look({"torch": torch(False, stream)}).captures == ("torch: a capture is under way",), "on another thread"
    assert look({"torch": torch(True, live=False)}) == Inside(), "CUDA is not there to be asked"


@pytest.mark.parametrize(("answer", "count"), [(True, 1), (False, 0), (906, 1), (700, 0)])
def test_captures_of_cupy(monkeypatch: pytest.MonkeyPatch, answer: int, count: int) -> None:
    class CUDARuntimeError(Exception):
        status = answer

    def is_capturing() -> bool:
        if answer not in (True, False):
            raise CUDARuntimeError
        return bool(answer)

    monkeypatch.setattr(contexts, "current", lambda: 0)
    stream = SimpleNamespace(is_capturing=is_capturing)
    cuda = SimpleNamespace(
        get_current_stream=lambda: stream, runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError)
    )
    assert look({"cupy": SimpleNamespace(cuda=cuda)}).captures == ("cupy: a capture is under way",) * count


def test_captures_of_anybody_on_a_stream_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "ordinals", lambda: {"GPU-a": 0, "GPU-b": 1})
    monkeypatch.setattr(contexts, "primary", lambda ordinal: 10 + ordinal if ordinal else None)
    monkeypatch.setattr(contexts, "current_handle", lambda: 5)
    asked: list[int] = []

    def awaits(context: int) -> bool:
        asked.append(context)
        return context == 11

    monkeypatch.setattr(streams, "awaits_capture", awaits)
    assert look({}).captures == ("a capture is under way on a blocking stream",)
    assert set(asked) <= {5, 11} and 11 in asked


class profile:  # noqa: N801 (as torch calls it)
    enabled = True

    def __init__(self, entered: bool, results: object = None) -> None:
        self.entered, self.kineto_results = entered, results


def test_profilers() -> None:
    autograd = module("profiler", profile=profile, _is_profiler_enabled=False)
    modules: dict[str, Any] = {"torch.autograd.profiler": autograd}
    over = [profile(False), profile(True, object())]
    assert look(modules) == Inside(), over
    over.append(profile(True))
    assert look(modules).profilers == ("torch.profiler runs",), "it warms up"
    over.clear()
    vars(autograd)["_is_profiler_enabled"] = True
    assert look(modules).profilers == ("torch.profiler runs",)
    state = SimpleNamespace(profile_session=None)
    modules = {
        "jax._src.profiler": SimpleNamespace(_profile_state=state),
        "tensorflow.python.profiler.profiler_v2": SimpleNamespace(_profiler=None),
        "torch.profiler._cupti_monitor": SimpleNamespace(get_monitor=lambda: None),
    }
    assert look(modules) == Inside()
    state.profile_session = object()
    modules["tensorflow.python.profiler.profiler_v2"]._profiler = object()
    modules["torch.profiler._cupti_monitor"].get_monitor = object
    assert look(modules).profilers == ("torch's CUPTI monitor runs", "tf.profiler runs", "jax.profiler runs")


def test_what_a_version_keeps_elsewhere_is_said_to_be_unknown() -> None:
    """A module of each name that has nothing in it: nothing is raised, and each is named once."""
    names = (
        "memguard.exchange.ipc.server",
        "torch.multiprocessing.reductions",
        "torch.distributed.distributed_c10d",
        "torch",
        "torch.autograd.profiler",
        "torch.profiler._cupti_monitor",
        "jax._src.profiler",
        "tensorflow.python.profiler.profiler_v2",
        "numba.cuda.cudadrv.driver",
        "cupyx.distributed._nccl_comm",
    )
    found = look({name: ModuleType(name) for name in names})
    assert found[:4] == ((), (), (), ())
    assert len(found.unseen) == len(set(found.unseen)) >= 6
    assert all("AttributeError" in line for line in found.unseen)
    assert refusals.unknown(Facts(Process(1, 1), unseen=found.unseen))[-len(found.unseen) :] == found.unseen
