"""What `memguard.init` loads, on NVML's stub and on a simulated GPU: each module costs every program its start.

A module that init begins to load fails here. Import it inside the function that needs it. If init itself needs it, add
it to the list, and say in the commit what `python -m bench` showed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import ONE

import memguard

SIX = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
ALWAYS = {
    "", "_base.advice", "api", "_base",
    "_base.blocks", "_guard.caps", "_guard.guard", "_base.interrupts", "_base.life", "_base.locks", "_base.logs",
    "_budget.policy", "_guard.elastic", "_base.framework_spec", "_frameworks.specs", "_base.text",
    "_base.types", "_base.undo", "_base.units",
    "_runtime.workers", "errors", "_base.findings", "_budget.shared_pool",
    "_budget", "_budget.rules", "_budget.schema", "_base.source_map", "_budget.values",
    "_devices", "_devices.contexts", "_devices.host", "_devices.libcuda", "_devices.phase", "_devices.suspension",
    "_frameworks", "_frameworks.base", "_frameworks.driver_pages", "_frameworks.import_hook",
    "_frameworks.registry", "_frameworks.replacements", "_frameworks.second_contexts",
    "_frameworks.pycuda", "_frameworks.pycuda.contexts",
    "_ledger", "_ledger.overhead", "_ledger.reader", "_ledger.rows", "_ledger.types",
    "_runtime", "_runtime.extensions", "_runtime.leaks", "_runtime.runtime", "_runtime.session",
    "_oom", "_oom.hooks", "_oom.refusal", "_guard", "_guard.lending", "_guard.reclaim",
    *(f"_frameworks.{name}" for name in SIX), *(f"_frameworks.{name}.spec" for name in SIX),
}  # fmt: skip
"""What init loads of memguard for any budget: names below `memguard`, which is "" itself."""
FILE = {"_base.yaml"}
MONITOR = {"_runtime.pressure", "_runtime.sampler"}
TIMELINE = {
    "_budget.ranks",
    "_runtime.timeline_extras",
    *("_timeline", "_timeline.files", "_timeline.format", "_timeline.writer"),
}
REAL = {"_devices.cuda_order", "_devices.proc", "_devices.nvml", "_devices.real"}
SIMULATED = {
    "_devices.catalog", "_devices.simulated", "_frameworks.simulated", "_frameworks.simulated.adapter",
    "_frameworks.simulated.allocators", "_frameworks.simulated.arena", "_frameworks.simulated.driver_allocators",
}  # fmt: skip
CUPY = {f"_frameworks.cupy.{name}" for name in ("adapter", "blocks", "limits", "room_before_gc")}
ADAPTERS = {
    "tensorflow": {"_frameworks.tensorflow", "_frameworks.tensorflow.adapter"},
    "torch": {f"_frameworks.{name}" for name in ("torch", "torch.adapter", "torch.settings", "rmm", "rmm.resource")},
    "jax": {"_frameworks.jax", "_frameworks.jax.adapter"},
    "cupy": {"_frameworks.cupy", "_frameworks.rmm", "_frameworks.rmm.resource", *CUPY},
    "pycuda": {f"_frameworks.pycuda.{name}" for name in ("adapter", "partial_free", "pool")},
    "numba": {
        "_frameworks.numba",
        "_frameworks.numba.adapter",
        "_frameworks.numba.contexts",
        "_frameworks.rmm",
        "_frameworks.rmm.resource",
    },
}
BOTH_INSTALLED = {"_frameworks.torch.cudart"}
"""With torch and TensorFlow installed."""
NEVER = {
    *SIX, "numpy", "rich", "click", "cuda", "rmm", "jaxlib", "keras",
    "statistics", "difflib", "glob", "asyncio", "socket", "multiprocessing", "concurrent.futures", "csv", "html",
    "sqlite3", "textwrap", "pydantic.functional_serializers",
}  # fmt: skip
"""What a start does not need, unless pydantic, PyYAML or nvidia-ml-py have loaded it themselves."""

PROGRAM = """
import sys
import pydantic, pynvml, yaml
class Used(pydantic.BaseModel):
    size: int = 0
before = set(sys.modules)
import memguard
budget, more = eval(sys.argv[1])
try:
    memguard.init(budget, **more)
except memguard.ConfigError as error:
    sys.stderr.write(str(error))
loaded = sorted(set(sys.modules) - before)
memguard.shutdown()
print("LOADED", *loaded)
"""


@pytest.fixture
def loaded(build: Callable[..., Path], tmp_path: Path) -> Callable[..., set[str]]:
    """The modules that `init` loads in a fresh interpreter beyond its dependencies' own."""

    def run(budget: Any, **more: Any) -> set[str]:
        scenario = tmp_path / "scenario"
        scenario.write_text("".join(f"{key}={value}\n" for key, value in ONE.items()))
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "MEMGUARD_"))}
        environ |= {
            "LD_LIBRARY_PATH": str(build()), "NVML_STUB": str(scenario),
            "PYTHONPATH": str(Path(memguard.__file__).parents[1]),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, repr((budget, more))],
            capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return set(done.stdout.rpartition("LOADED ")[2].split())

    return run


def ours(loaded: set[str]) -> set[str]:
    """The modules of memguard among them, as the lists name them."""
    names = {name.removeprefix("memguard").removeprefix(".") for name in loaded if name.split(".")[0] == "memguard"}
    return names - BOTH_INSTALLED


def budget(*frameworks: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "frameworks": {name: {"share": "10%"} for name in frameworks}, **more}


@pytest.mark.parametrize("names", [SIX, *((name,) for name in SIX)], ids=lambda names: "-".join(names))
def test_init_loads_the_adapters_that_it_names_and_no_other(
    loaded: Callable[..., set[str]], names: tuple[str, ...]
) -> None:
    found = loaded(budget(*names))
    assert ours(found) == ALWAYS | REAL | set().union(*(ADAPTERS[name] for name in names))
    assert not found & {*NEVER, "json"}


def test_a_file_a_monitor_and_a_timeline_load_what_is_theirs(loaded: Callable[..., set[str]], tmp_path: Path) -> None:
    adapters = set().union(*ADAPTERS.values())
    parts = "".join(f"  {name}: {{share: 10%}}\n" for name in SIX)
    (tmp_path / "budget.yaml").write_text(f"version: 1\nframeworks:\n{parts}")
    found = loaded("budget.yaml")
    assert ours(found) == ALWAYS | REAL | FILE | adapters
    assert not found & {*NEVER, "json"}
    watched = loaded(budget(*SIX, monitor={"interval": "1s"}, on_pressure=["trim"]))
    assert ours(watched) == ALWAYS | REAL | MONITOR | adapters
    assert not watched & {*NEVER, "json"}
    recorded = loaded(budget(*SIX, monitor={"timeline": str(tmp_path / "run.jsonl")}))
    assert ours(recorded) == ALWAYS | REAL | MONITOR | TIMELINE | adapters
    assert not recorded & NEVER


def test_on_a_simulated_gpu_nothing_of_a_real_one_is_loaded(loaded: Callable[..., set[str]]) -> None:
    found = loaded(budget(*SIX, monitor={}), simulate="h200")
    assert ours(found) == ALWAYS | SIMULATED | MONITOR
    assert not found & {*NEVER, "pynvml", "json"}


@pytest.mark.parametrize("share", ["4GiB", "50", "0.5", "fifty percent"])
def test_what_explains_a_wrong_budget_is_loaded_when_one_is_wrong(loaded: Callable[..., set[str]], share: str) -> None:
    """The control: these are modules that the lists above would catch."""
    found = loaded({"version": 1, "frameworks": {"torch": {"share": share}}})
    assert {"_budget.problems", "_budget.suggestions"} <= ours(found)
    assert "difflib" in found and not ours(found) & (REAL | MONITOR)


def test_every_name_in_the_lists_is_a_module() -> None:
    """So that a misspelt one does not let its module pass."""
    lists = [ALWAYS, FILE, MONITOR, TIMELINE, REAL, SIMULATED, BOTH_INSTALLED, *ADAPTERS.values()]
    for name in set().union(*lists):
        assert importlib.util.find_spec(f"memguard.{name}".removesuffix(".")) is not None, name
    for name in NEVER & sys.stdlib_module_names:
        assert importlib.util.find_spec(name) is not None, name
