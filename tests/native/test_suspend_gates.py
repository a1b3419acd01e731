"""Every entry of the tables of gates, in the real frameworks: it is there, waits, refuses the owner, and comes back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import stub_driver
from served import environment

PROGRAM = """
import importlib, sys, threading, time
from types import ModuleType
for name in sys.argv[1:]:
    importlib.import_module(name)
from memguard._frameworks.optional_modules import Gates
from memguard._node.suspend.gates import gate as gates
from memguard._node.suspend.gates.replaced import holders, _raw
from memguard._node.suspend.gates.tables import tables
from memguard.errors import Suspended

hooks = {name for name in sys.argv[1:]}
chosen = [table for table in tables() if table.hook in hooks]
assert {table.hook for table in chosen} == hooks
# Without their question whether a call needs a GPU, of which there is none here.
every = [table._replace(waits=tuple(entry._replace(touches=None) for entry in table.waits)) for table in chosen]
rows = [entry for table in every for entry in (*table.waits, *table.later)]
places = [place for entry in rows for place in holders(entry.name, entry.but)]
owners = {id(owner): owner for owner, _, _ in places}


def state():
    return {key: {name: id(value) for name, value in vars(owner).items()} for key, owner in owners.items()}


for table in every:
    for entry in (*table.waits, *table.later):
        assert entry.optional or holders(entry.name, entry.but), f"{entry.name} is not in this version"
    for kind in table.kept_alive:
        if not kind.name.startswith(("rmm", "torch._C:_MemPool", "cupy.cuda.cufft")):
            assert holders(kind.name), f"{kind.name} is not in this version"
before, originals = state(), {(id(owner), name): _raw(owner, name) for owner, name, _ in places}
waits = [place for table in every for entry in table.waits for place in holders(entry.name, entry.but)]
gate = gates.close(threading.get_ident(), given=every)
refused = []
try:
    for owner, name, what in waits:
        found = _raw(owner, name)
        if found is originals[id(owner), name]:
            refused.append(what)  # `left` says so
            continue
        call = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
        try:
            call()
        except Suspended as error:
            assert "fix: end the `with memguard.suspended():`" in str(error), what
        else:
            raise AssertionError(f"{what} does not refuse the owner")
    assert all(any(what in line for line in gate.left) for what in refused), refused
    assert not [line for line in gate.left if "not in this version" in line], gate.left
    # A call on another thread waits: of all of them at once.
    ended, threads = [], []

    def call_it(call):
        try:
            call(object(), object(), object(), object(), object(), object(), object(), object(), object())
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    some = waits[:: max(1, len(waits) // 40)]
    for owner, name, what in some:
        found = _raw(owner, name)
        if found is not originals[id(owner), name]:
            call = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
            threads.append(threading.Thread(target=call_it, args=(call,), daemon=True))
            threads[-1].start()
    until = time.monotonic() + 10
    while gate.inside < len(threads) and time.monotonic() < until:
        time.sleep(0.01)
    assert gate.inside == len(threads) and not ended, (gate.inside, len(threads), ended)
finally:
    gate.open()
for thread in threads:
    thread.join(10)
assert len(ended) == len(threads)
now = state()
for key, owner in owners.items():
    changed = {name for name in before[key].keys() | now[key].keys() if before[key].get(name) != now[key].get(name)}
    assert not changed, (owner, changed)
print(len(places), len(refused))
"""


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**environment(), **stub_driver.build(tmp_path_factory.mktemp("cuda"))}


@pytest.mark.parametrize(
    ("modules", "least"),
    [
        ("torch", 70),
        ("cupy", 150),
        ("pycuda.driver", 90),
        ("numba.cuda.cudadrv.driver", 10),
        ("jax", 25),
        ("tensorflow", 25),
        ("cuda.bindings.driver cuda.bindings.runtime cuda.core", 500),
    ],
)
def test_every_entry(stubbed: dict[str, str], modules: str, least: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), *modules.split()],
        env={**stubbed, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    places, refused = map(int, done.stdout.split()[-2:])
    assert places >= least and refused <= 1


def test_torchs_operators_refuse_the_thread_of_a_block() -> None:
    """Tensors without data stand for those on a GPU."""
    code = """
    import threading, torch
    from memguard._frameworks.torch import gates as table
    from memguard._node.suspend.gates import gate as gates
    from memguard.errors import Suspended

    table._cuda = lambda one: getattr(one, "is_meta", False) is True or one == "meta"
    x, host = torch.ones(3, device="meta"), torch.ones(3)
    calls = {
        "add": lambda: x + x, "sum": lambda: x.sum(), "cat": lambda: torch.cat([host, x]), "index": lambda: x[0],
        "factory": lambda: torch.ones(2, device="meta"), "in place": lambda: x.add_(1), "print": lambda: repr(x),
    }
    chosen = [part._replace(waits=(), kept_alive=()) for part in table.GATES]
    gate = gates.close(threading.get_ident(), given=chosen)
    with gate.on_this_thread():
        for name, call in calls.items():
            try:
                call()
            except Suspended as error:
                assert "needs the GPU" in str(error), name
            else:
                raise AssertionError(name)
        assert (x.shape, x.dtype, x.size(0), float((host + host).sum())) == ((3,), torch.float32, 3, 6.0)
        thread = threading.Thread(target=lambda: done.append(x + x))
        done = []
        thread.start()
        thread.join()
        assert done, "another thread is not held by it"
        gate.closed = False
        x + x
        gate.closed = True
    x + x
    gate.open()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
