"""What a measurement is: a function with an id, a unit, a bar and a time budget, called with a `Run`.

A measurement returns its values: `list[float]`, or `list[list[float]]` grouped by process, or a dict of either by the
names of its rows. Its docstring's first line is its title in the documents."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import child
from bench.child import Failed as Failed  # noqa: PLC0414 (for measures)

Values = Sequence[float] | Sequence[Sequence[float]]
"""Values of one row, or values grouped by process. Groups are resampled before the values within them."""


@dataclass(frozen=True)
class Measure:
    """One registered measurement.

    unit, bar, by   of every row, or by the names of the rows
    by              what is judged. "median"; "high": the bound of the 95 % interval on the bad side of the bar; "p95":
                    95 % of the values are at least as good
    seconds         that the timed pass takes on an H200; a run of twice this time is stopped
    whole_card      no other process may use the GPU meanwhile
    gpus            that it needs
    needs           modules that must be installed
    beside          no figure of it is a time that other processes change: such measurements run at the same time
    """

    id: str
    function: Callable[[Run], Any]
    unit: str | Mapping[str, str]
    seconds: float
    bar: str | Mapping[str, str | None] | None = None
    by: str | Mapping[str, str] = "median"
    whole_card: bool = False
    gpus: int = 1
    needs: tuple[str, ...] = ()
    beside: bool = False

    @property
    def title(self) -> str:
        return (self.function.__doc__ or self.id).strip().splitlines()[0].rstrip(".")

    def of(self, what: str, row: str) -> Any:
        """`unit`, `bar` or `by` of a row; `row` is "" for the only row."""
        value = getattr(self, what)
        return value.get(row, "median" if what == "by" else None) if isinstance(value, Mapping) else value


REGISTRY: dict[str, Measure] = {}


def measure(id: str, **settings: Any) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:  # noqa: A002
    """Register a `Measure` with these fields. Raises ValueError if its id is taken."""

    def register(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
        if id in REGISTRY:
            raise ValueError(f"two measurements are called {id!r}")
        REGISTRY[id] = Measure(id, function, **settings)
        return function

    return register


def discover(package: str = "bench.measures") -> dict[str, Measure]:
    """Every measurement by its id, in the order of a full run: those that run beside others first, whole card last."""
    found = importlib.import_module(package)
    for module in sorted(pkgutil.iter_modules(found.__path__), key=lambda one: one.name):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(REGISTRY.items(), key=lambda one: (one[1].whole_card, not one[1].beside, one[0])))


class Run:
    """What a measurement is given: its programs in processes of their own, a folder, and how thorough to be."""

    def __init__(self, module: str, quick: bool = False) -> None:
        self.module = module
        self.quick = quick  # The untimed pass: the same code paths, the fewest rounds, little memory.
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._children: list[child.Child] = []

    def rounds(self, count: int, few: int = 2) -> int:
        """`count`, or `few` in the quick pass."""
        return min(count, few) if self.quick else count

    def start(
        self, name: str, *args: object, env: Mapping[str, str | None] | None = None, timeout: float = 120,
        sampled: float = 0,
    ) -> child.Child:  # fmt: skip
        """Start a program of the measurement's module, or of another as "bench.programs.x:name".

        env       more environment; None removes a variable
        timeout   seconds after which the process and its children are killed
        sampled   seconds between two samples of its bytes by NVML, from another process: `Child.end()["nvml"]`
        """
        module, _, program = name.rpartition(":")
        words = ["-m", module or self.module, program, *map(str, args)]
        started = child.Child(words, name=name, env=env, timeout=timeout, sampled=sampled)
        self._children.append(started)
        return started

    def program(self, name: str, *args: object, **settings: Any) -> dict[str, Any]:
        """`start` a program and run it to its end; what it emitted last. Raises Failed if it fails or takes long."""
        return self.start(name, *args, **settings).end()

    def covers(self, path: Path) -> None:
        """Note a file of memguard that is no module, such as `memguard.pth`, among what this measurement covers."""
        if "BENCH_COVERS" in os.environ:
            with open(os.environ["BENCH_COVERS"], "a") as file:
                file.write(f"{path.relative_to(child.package().parent)}\n")

    def close(self) -> None:
        """Kill what still runs and delete the folder."""
        for one in self._children:
            one.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def measured(module: str, name: str, quick: bool) -> dict[str, Any]:
    """Call a measurement of one module in this process: its values by the names of its rows, "" for the only one."""
    importlib.import_module(module)
    one = REGISTRY[name]
    missing = [need for need in one.needs if importlib.util.find_spec(need) is None]
    if missing:
        raise Failed(f"not installed: {', '.join(missing)}")
    run = Run(one.function.__module__, quick)
    os.environ["TMPDIR"] = str(run.folder)
    try:
        values = one.function(run)
    finally:
        run.close()
    return dict(values) if isinstance(values, Mapping) else {"": values}


def gpu_here() -> bool:
    """Whether NVML finds a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except Exception:
        return False
