"""The real torch, built without CUDA, under `strategy: pool`: how the backend is asked for, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

SETUP = """
import torch
from memguard._devices import pools
from memguard._frameworks.shared_pool import SharedPool
from memguard._frameworks.torch.pooled import PooledTorch
host = Host()
uuid, gpu = host.uuids[0], host.gpus[0]
class Pool:
    live = []
    def __init__(self, ordinal, size):
        self.size, self.held, self.busy, self.ours = size, 0, 0, True
        Pool.live.append(self)
    def reserved(self): return self.held
    def used(self): return self.busy
    def peak(self): return self.held
    def keep(self): return None
    def current(self): return self.ours
    def trim(self): self.held = self.busy
    def restore(self): Pool.live.remove(self)
pools.CappedPool = Pool
joint = SharedPool({uuid: 4 * GIB}, print)
framework = PooledTorch(host, joint)
def started(backend="cudaMallocAsync"):
    found = card(host, backend=backend)
    applied = apply_caps(framework, {uuid: 4 * GIB})
    torch.cuda.init()
    return found, applied
"""


def test_torch_stops_with_the_pool_and_its_part_is_the_remainder(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
found, applied = started()
(pool,) = Pool.live
result["size"], result["fraction"] = pool.size, int(found.fractions[0] * TOTAL)
result["empty"] = framework.usage(gpu)[:3]
pool.held, pool.busy = 3 * GIB, 2 * GIB
joint.count("cupy", lambda uuid: GIB)
result["usage"], result["about"] = framework.usage(gpu)[:3], framework.about()
result["drift"] = drifts(framework)
pool.ours = False
result["drifted"] = drifts(framework)
pool.ours = True
framework.trim(gpu) if False else pool.trim()
result["trimmed"] = joint.figures(uuid)
applied.undo()
result["pool stays"], result["after"] = len(Pool.live), found.fractions
result["gone"] = framework.usage(gpu)
joint.restore()
result["restored"] = len(Pool.live)
"""
    )
    gib = 1 << 30
    assert found["size"] == found["fraction"] == 4 * gib and found["empty"] == [0, 0, 0]
    assert found["usage"] == [gib, gib, 0] and found["about"] == {"allocator": "cudaMallocAsync", "strategy": "pool"}
    assert found["drift"] == [] and "another memory pool was made current" in found["drifted"][0]
    assert found["trimmed"] == [2 * gib, 2 * gib]
    assert found["pool stays"] == 1, "the others still draw from it: the guard takes it back last"
    assert found["after"] == {"0": 1.0} and found["gone"] is None and found["restored"] == 0


def test_a_torch_with_the_native_backend_is_refused_with_what_to_do(with_torch: Run) -> None:
    found = with_torch(
        SETUP
        + """
from memguard.errors import ConflictingSetting
found = card(host)
try:
    apply_caps(framework, {uuid: 4 * GIB})
except ConflictingSetting as error:
    result["setting"], result["text"] = error.setting, str(error)
result["nothing"] = [len(Pool.live), found.fractions, framework.usage(gpu)]
"""
    )
    assert found["setting"] == "the native backend of a torch that is imported"
    assert "`import torch` after memguard.init()" in found["text"] and "backend:cudaMallocAsync" in found["text"]
    assert found["nothing"] == [0, {}, None]


PREPARE = """
import torch.version
from memguard._frameworks.shared_pool import SharedPool
from memguard._frameworks.torch.pooled import PooledTorch
from memguard._base.undo import Undo
from memguard.errors import ConflictingSetting
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
def now(): return [os.environ.get(name) for name in NAMES]
def prepared(*values):
    for name, value in zip(NAMES, values):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    undo = Undo()
    try:
        PooledTorch(Host(), SharedPool({}, print)).prepare(undo)
    except ConflictingSetting as error:
        return [error.setting, now()]
    there = now()
    undo.run()
    return [there, now()]
"""
ASKED = "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("values", "there"),
    [
        ((None, None), [ASKED, None]),
        (("expandable_segments:False", None), [f"expandable_segments:False,{ASKED}", None]),
        ((None, "max_split_size_mb:40"), [None, f"max_split_size_mb:40,{ASKED}"]),
        (("a:1", "b:2"), [f"a:1,{ASKED}", f"b:2,{ASKED}"]),
        ((ASKED, None), [ASKED, None]),
    ],
)
def test_the_environment_asks_for_the_backend_and_is_taken_back(
    with_torch: Run, values: tuple[str | None, ...], there: list[str | None]
) -> None:
    found = with_torch(PREPARE + f"result['found'] = prepared(*{values!r})")
    assert found["found"] == [there, list(values)]


def test_another_backend_that_the_user_asks_for_is_a_conflict(with_torch: Run) -> None:
    found = with_torch(PREPARE + "result['found'] = prepared('backend:native', None)")
    assert found["found"] == ["PYTORCH_ALLOC_CONF=backend:native", ["backend:native", None]]


def test_what_is_set_meanwhile_stays(with_torch: Run) -> None:
    found = with_torch(
        PREPARE
        + """
undo = Undo()
PooledTorch(Host(), SharedPool({}, print)).prepare(undo)
os.environ["PYTORCH_ALLOC_CONF"] = "backend:native"
undo.run()
result["now"] = now()[0]
"""
    )
    assert found["now"] == "backend:native"


def test_an_older_torch_is_asked_by_the_variable_that_it_reads(with_torch: Run) -> None:
    found = with_torch(
        PREPARE
        + """
from memguard._frameworks.torch import settings
result["version"] = settings.version()
settings.version = lambda: (2, 6)
result["found"] = prepared(None, None)
"""
    )
    assert found["version"][0] == 2 and found["found"] == [[None, ASKED], [None, None]]
