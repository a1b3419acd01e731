"""The processes that the real torch starts: data loaders' workers, and those of torch.compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET = "version: 1\nframeworks:\n  torch: {share: 50%}\n"
WITNESS = """
import os, sys
def note(what):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(f"{os.getpid()} {what} {' '.join(sys.orig_argv[1:])[:300]!r}\\n")
def hear(event, arguments):
    if event == "import" and arguments[0] in ("memguard.api", "memguard._devices.simulated"):
        note(arguments[0])
note("started")
sys.addaudithook(hear)
"""


def program(folder: Path, text: str, *, run: bool = False, **env: str) -> tuple[Any, list[list[str]]]:
    """What a script prints as JSON, and what each of its Pythons did: PID, what, its command line."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WITNESS)
    (folder / "budget.yaml").write_text(BUDGET)
    (folder / "script.py").write_text(textwrap.dedent(text))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "TORCH"))}
    path = os.pathsep.join([str(folder / "site"), str(ROOT)])
    env = {**kept, "PYTHONPATH": path, "WITNESS": str(folder / "witness"), "CUDA_VISIBLE_DEVICES": "", **env}
    command = [sys.executable, "-W", "ignore", "script.py"]
    if run:
        command = [sys.executable, "-m", "memguard", "run", "--device", "h200", "--", *command]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [line.split(maxsplit=2) for line in (folder / "witness").read_text().splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), seen


def with_budget(seen: list[list[str]]) -> set[str]:
    """The PIDs that made GPUs for a budget."""
    return {pid for pid, what, _ in seen if what == "memguard._devices.simulated"}


LOADER = """
import json, os
import torch
import memguard
memguard.init("budget.yaml", simulate="h200")

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        try:
            return [os.getpid(), __name__, memguard.ledger().simulated]
        except memguard.NotActive as error:
            return [os.getpid(), __name__, str(error)]

def own_budget(worker):
    memguard.init("budget.yaml", simulate="h200")

if __name__ == "__main__":
    found = [os.getpid(), memguard.ledger().simulated]
    for start in (None, own_budget):
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=None, num_workers=1, multiprocessing_context=os.environ["METHOD"], worker_init_fn=start
        )
        found.append(list(loader))
    print(json.dumps(found))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_of_a_data_loader_have_a_budget_where_they_ask_for_one(tmp_path: Path, method: str) -> None:
    (pid, active, passive, asking), seen = program(tmp_path, LOADER, METHOD=method)
    assert active
    for worker, name, text in passive:
        assert worker != pid and name == ("__main__" if method == "fork" else "__mp_main__")
        assert ("it was forked" if method == "fork" else "it is a worker") in text
    assert [answer for _, _, answer in asking] == [True, True]
    imported = {str(pid)} if method == "fork" else {str(pid), *(str(worker) for worker, _, _ in asking)}
    assert with_budget(seen) == imported, "in a fork it is imported already"


COMPILE = """
import json, os, sys
import torch
{init}

@torch.compile
def f(x):
    return torch.sin(x) * 2 + torch.cos(x)

LOOK = (
    "(__import__('os').getpid(), __import__('multiprocessing').current_process().name, "
    "'memguard.api' in __import__('sys').modules "
    "and __import__('sys').modules['memguard._runtime.runtime'].this.session is not None, "
    "[n for n in __import__('os').environ if n.startswith('MEMGUARD')], "
    "[p for p in __import__('sys').path if '_tools/activation' in p], "
    "[type(f).__name__ for f in __import__('sys').meta_path if type(f).__name__ == 'ImportHook'])"
)

def main():
    import memguard
    from torch._inductor.async_compile import AsyncCompile
    x = torch.randn(100)
    same = bool(torch.allclose(f(x), torch.sin(x) * 2 + torch.cos(x), atol=1e-5)) if {compile} else True
    AsyncCompile.wait_pool_ready()
    pool = AsyncCompile.process_pool()
    workers = [pool.submit(eval, LOOK).result(120) for _ in range(4)]
    print(json.dumps([os.getpid(), memguard.ledger().simulated, same, type(pool).__name__, workers]), flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("started", "way"), [("run", "subprocess"), ("init", "subprocess"), ("init", "fork"), ("init", "spawn")]
)
def test_workers_of_torch_compile_have_no_budget(tmp_path: Path, started: str, way: str) -> None:
    init = "import memguard\nmemguard.init('budget.yaml', simulate='h200')" if started == "init" else ""
    (pid, active, same, pool, workers), seen = program(
        tmp_path,
        COMPILE.format(init=init, compile=started == "run"),
        run=started == "run",
        TORCHINDUCTOR_WORKER_START=way,
        TORCHINDUCTOR_COMPILE_THREADS="2",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert active and same, "compiled under the budget, and right"
    assert (pool == "SubprocPool") is (way == "subprocess")
    for worker, _, budget, names, path, hooks in workers:
        assert worker != pid and not budget and names == path == hooks == []
    assert with_budget(seen) == {str(pid)}
    if way == "subprocess":
        workers_started = [command for _, what, command in seen if what == "started" and "compile_worker" in command]
        assert len(workers_started) == 1, seen
        assert not any(what == "memguard.api" and "compile_worker" in command for _, what, command in seen)
