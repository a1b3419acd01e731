"""Import each module of a framework first, with a budget and without: both must end alike.

    python tests/native/every_module.py             # every module of every framework: about half an hour
    python tests/native/every_module.py torch 100   # 100 of one framework, chosen as the tests choose them

Python imports a package before its modules, so what a process has before the first line of `torch.nn.functional` is
what it has after `import torch`. A server has imported that much, and nothing else of the framework, and forks for each
module. Where the import hook waits for a module inside the package (`pycuda.driver`), the package is as good as empty,
and all of the framework's code runs in the fork.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from served import environment

PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch", "functorch", "torchgen"),
    "tensorflow": ("tensorflow", "keras"),
    "cupy": ("cupy", "cupyx", "cupy_backends"),
    "jax": ("jax", "jaxlib"),
    "pycuda": ("pycuda",),
    "numba": ("numba.cuda", "numba", "numba_cuda"),
}
"""What each framework's packages install at the top level, and `numba.cuda`, which another package brings."""

SERVER = r"""
import importlib, json, os, re, signal, sys
mode, base = sys.argv[1:]
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import numpy
from stand_ins import *
if mode == "budget":
    from memguard._budget import from_mapping
    from memguard._frameworks.import_hook import ImportHook
    from memguard._frameworks.tensorflow.adapter import TensorFlow
    from memguard._frameworks.torch import settings
    from memguard._frameworks.torch.adapter import Torch
    from memguard._guard.guard import Guard
    from memguard._frameworks.specs import SPECS
    sys.path.append(PLUGIN)
    settings.cuda_version = lambda: "13.0"

    def with_gpus(adapter, bring):
        # What a build for CPUs lacks, put there as soon as the framework is imported.
        apply = adapter.apply
        adapter.apply = lambda self, caps, options, undo: (bring(self), apply(self, caps, options, undo))[1]

    def allocator(self):  # no more than that: other code must not think that there is CUDA
        torch = sys.modules["torch"]
        torch._C._cuda_setMemoryFraction = lambda fraction, device: None
        torch._C._cuda_getAllocatorBackend = lambda: "native"

    with_gpus(Torch, allocator)
    with_gpus(TensorFlow, lambda self: gpus())
    share = {"version": 1, "frameworks": {name: {"share": "15%"} for name in SPECS}}
    guard = Guard(from_mapping(share), Host())
    guard.start()


def outcome(name):
    try:
        importlib.import_module(name)
        return "imported"
    except BaseException as error:
        return re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")[:500]


def caps():
    # How it stands with each framework that the import brought, and what the undo left.
    found = {}
    for name, entry in guard.caps.entries.items():
        loaded = sys.modules.get(entry.framework.hook)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            found[name] = entry.enforcement.value
    stays = [one for one in guard.stop() if "could not be undone" in one]
    stays += [repr(finder) for finder in sys.meta_path if isinstance(finder, ImportHook)]
    return [found, stays]


if base:
    before = outcome(base)
for line in sys.stdin:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        if mode == "budget":
            guard.caps.pid = os.getpid()  # a forked child has no budget, but this one stands for a process of its own
        answer = [outcome(line.strip())]
        if mode == "budget":
            answer += caps()
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    answers.write((text or json.dumps([f"the process ended with status {status}", {}, []])) + "\n")
    answers.flush()
"""


@dataclass(frozen=True)
class Outcome:
    """What an import came to: without a budget, with one, how the frameworks stood then, what the undo left."""

    module: str
    plain: str
    budget: str
    caps: Mapping[str, str]
    left: Sequence[str]

    @property
    def wrong(self) -> str | None:
        """What is wrong in one sentence."""
        if self.plain != self.budget:
            return f"{self.module}: {self.budget!r} under a budget, {self.plain!r} without"
        if set(self.caps.values()) - {"enforced"}:
            return f"{self.module}: under a budget {dict(self.caps)}"
        return f"{self.module}: the undo left {list(self.left)}" if self.left else None


def modules(package: str) -> list[str]:
    """Every module of a package by its files, the package first. Imports nothing but the packages above it."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = {package}
    for place in places:
        for folder, folders, files in os.walk(place):
            folders[:] = sorted(name for name in folders if name.isidentifier() and name != "__pycache__")
            inside = [package, *Path(folder).relative_to(place).parts]
            for file in files:
                suffix = next((end for end in (".py", *EXTENSION_SUFFIXES) if file.endswith(end)), None)
                name = file.removesuffix(suffix) if suffix else ""
                if name == "__init__":
                    found.add(".".join(inside))
                elif name.isidentifier() and name != "__main__":
                    found.add(".".join([*inside, name]))
    return sorted(found)


def all_modules(framework: str) -> dict[str, list[str]]:
    """The modules of a framework by the package that is imported before them."""
    found = {package: modules(package) for package in PACKAGES[framework] if find_spec(package) is not None}
    if "numba" in found:  # the one that numba itself brings is hidden by numba-cuda's
        found["numba"] = [name for name in found["numba"] if not name.startswith("numba.cuda")]
    return found


def sample(names: Sequence[str], count: int) -> list[str]:
    """The package, what is directly below it, and some of the others, the same ones each time."""
    chosen = [name for name in names if name.count(".") <= names[0].count(".") + 1 and "._" not in name]
    others = sorted(set(names) - set(chosen))
    numbers = random.Random(len(names))
    if len(chosen) > count // 2:
        chosen = [names[0], *numbers.sample(chosen[1:], count // 2)]
    return chosen + numbers.sample(others, max(min(count - len(chosen), len(others)), 0))


def outcomes(package: str, names: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Outcome]:
    """Import each module, first in a process, without a budget and with one."""
    # Of a package that the hook waits inside of, nothing may be there beforehand.
    base = "" if package == "pycuda" else package
    here = {**environment(), **(env or {})}
    with tempfile.TemporaryDirectory(prefix="mg") as folder, ThreadPoolExecutor(2) as threads:

        def ask(mode: str) -> list[Any]:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", SERVER, mode, base],
                input="\n".join(names), capture_output=True, text=True, env=here, cwd=folder, check=False,
            )  # fmt: skip
            answers = [json.loads(line) for line in done.stdout.splitlines()]
            assert len(answers) == len(names), f"{package}, {mode}: {done.stderr[-2000:]}"
            return answers

        asked = [threads.submit(ask, mode) for mode in ("plain", "budget")]
        plain, budget = (each.result() for each in asked)
    for name, (without, *_), (within, caps, left) in zip(names, plain, budget, strict=True):
        yield Outcome(name, without, within, caps, left)


def main(arguments: Sequence[str]) -> int:
    import stub_driver

    counts: Counter[str] = Counter()
    only = arguments[0] if arguments else None
    with tempfile.TemporaryDirectory(prefix="mg") as folder:
        for framework in [only] if only else PACKAGES:
            env = stub_driver.build(Path(folder)) if framework == "pycuda" else None
            for package, names in all_modules(framework).items():
                chosen = sample(names, int(arguments[1])) if len(arguments) > 1 else names
                for outcome in outcomes(package, chosen, env):
                    counts[f"{package}: {'wrong' if outcome.wrong else outcome.plain.partition(':')[0]}"] += 1
                    if outcome.wrong:
                        print(outcome.wrong, flush=True)
                print({key: n for key, n in counts.items() if key.startswith(f"{package}:")}, flush=True)
    return any(key.endswith(": wrong") for key in counts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
