"""The blocks of code in README.md and docs/: what each is, and what holds it.

As a command it has mypy read the Python that no test runs, because it needs a GPU or a framework:

    python tests/unit/doc_blocks.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts),
]
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE
)
_NAME = re.compile(r"# ([\w./-]+\.(?:ya?ml|py))\b")

RUN = {
    "README.md": "",
    "docs/activation.md": "import memguard",
    "docs/budget.md": "",
    "docs/metrics.md": "",
    "docs/retry.md": ("import types\nmodel = lambda x: x\nmodel.predict = lambda x: x\nx = 1\nimport memguard\n"),
    "docs/simulation.md": "",
    "docs/timeline.md": "import memguard",
    "docs/watching.md": (
        "import threading\nsave_soon = threading.Event()\nimport memguard\nmemguard.init('budget.yaml')"
    ),
    "docs/workloads.md": (
        "embed, batch = list, [1]\nimport memguard\n"
        "memguard.init({'version': 1, 'frameworks': {'cupy': {'share': '80%'}}})"
    ),
}
"""Pages whose Python runs on a simulated H200, each with what the page takes for granted."""

TYPED = {
    "docs/dask.md": ("a cluster of Dask; tests/engines/test_dask.py has one", ""),
    "docs/ddp.md": ("two GPUs and NCCL; tests/gpu/test_ranks_gpu.py is the like", ""),
    "docs/doctor/README.md": ("it tries every framework, which takes long; tests/doctor does", ""),
    "docs/doctor/import-order.md": ("two frameworks", ""),
    "docs/doctor/second-context.md": ("PyCUDA and a GPU", ""),
    "docs/exchange-processes.md": ("a GPU", "x: Any\nstart_worker: Any"),
    "docs/exchange.md": (
        "frameworks: tests/native/test_exchange_examples.py runs it on host arrays, tests/gpu on a GPU",
        "x: Any\ny: Any\ntorch: Any\ntf: Any\ncupy: Any\nnumpy: Any\njax: Any\njnp: Any\ngpuarray: Any\ncuda: Any\n"
        "drv: Any\npycuda: Any",
    ),
    "docs/frameworks.md": ("PyCUDA and a GPU", "pycuda: Any\nnumpy: Any"),
    "docs/loggers.md": ("frameworks and loggers; tests/native/test_loggers.py runs it with them", ""),
    "docs/quickstart.md": ("arrays of frameworks, and a model", "x: Any\nstep: Any\nbatch: Any"),
    "docs/ray.md": ("a cluster of Ray; tests/engines/test_ray.py has one", ""),
    "docs/ranks.md": ("several ranks; tests/engines/test_torchrun.py has them", ""),
    "docs/suspend.md": ("a GPU whose driver can suspend; tests/gpu/test_suspend_gpu.py", "corpus: Any\ntokenize: Any"),
}
"""Pages whose Python mypy reads: what it would need to run, and the names that the page takes for granted."""

SHOWN = {
    "README.md": "test_readme.py: the ledger that was recorded",
    "docs/activation.md": "a message, shortened; test_environment.py holds its first line",
    "docs/budget.md": "test_config.py and test_doc_blocks.py: the errors of the budget before it",
    "docs/doctor/README.md": "tests/doctor/test_doctor_docs.py",
    "docs/leases.md": "a line and a table whose figures are examples; test_leases_store.py holds their form",
    "docs/ledger.md": "sums, in words",
    "docs/notebooks.md": "lines whose figures are examples; test_notebook.py holds their form",
    "docs/oom.md": "test_oom_hooks.py: the report itself",
    "docs/quickstart.md": "tests/doctor/test_doctor_docs.py",
    "docs/retry.md": "a line whose figures are examples; test_retry.py holds its form",
    "docs/suspend.md": "test_suspend_phase.py: the table of the transitions",
    "docs/top.md": "test_top_cli.py: the screen of the timeline in timeline.md",
    "docs/watching.md": "events with figures as examples; test_pressure.py and test_thresholds.py hold when they come",
    "docs/workloads.md": "lines whose figures are examples; test_workloads.py and test_reclaimable.py hold their form",
}
"""Pages that show what something prints, and what holds that. Those of the doctor's findings quote libraries."""

_TIMELINE = ("docs/timeline.md", "json")
FILES = {
    "docs/timeline.md": {
        "run-4711-0.jsonl": _TIMELINE,
        "memguard-4711-0.jsonl": _TIMELINE,
        "other.yaml": ("docs/timeline.md", "yaml"),
    },
    "docs/suggest.md": {"run-4711-0.jsonl": _TIMELINE},
}
"""Files that a page's commands and programs take for granted: each the only block of a language in some page."""

COMMAND = re.compile(r"(?:\w+=\S+ )*(?:memguard|pip|python3?|apt-get|export|unset|docker|torchrun|scripts/\w+)\b")
MISUSE = (
    "arg-type", "attr-defined", "call-arg", "call-overload", "misc", "name-defined", "operator", "syntax",
    "used-before-def",
)  # fmt: skip


class Block(NamedTuple):
    document: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name in its first line, by which the page calls it: `# budget.yaml`."""
        found = _NAME.match(self.text)
        return found[1] if found else None

    @property
    def kind(self) -> str:
        """What has to hold of it. Raises for one that is nothing of what is known."""
        if self.language.startswith("{"):
            return "directive"  # Sphinx's: scripts/docs fails if it is wrong
        if self.language == "python":
            if self.document in RUN:
                return "run"
            if self.document in TYPED:
                return "typed"
            if self.file:
                return "file"  # which a command of the page runs
        if self.language in ("yaml", "json", "console", "dockerfile"):
            return self.language
        if self.language == "sh":
            return "shell"
        if self.language in ("", "text"):
            if self.text.startswith("%"):
                return "magic"
            if all(COMMAND.match(line) for line in self.text.splitlines()):
                return "shell"
            if self.document in SHOWN or self.document.startswith("docs/doctor/") or self.text.startswith("# yaml-"):
                return "shown"
        raise AssertionError(f"{self.document}:{self.line}: what holds this block? See tests/unit/doc_blocks.py")

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str) -> Iterator[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        inner = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield Block(document, line, found["language"].strip(), inner)


def every() -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document)]


def main() -> None:
    """mypy over what is only typed. Of its errors those count that are one whatever the types of others' arrays."""
    with tempfile.TemporaryDirectory() as folder:
        names: dict[str, tuple[Block, int]] = {}
        for block in every():
            if block.kind == "typed":
                before = (
                    "import io, os, weakref\nfrom typing import Any\nimport memguard\nfrom memguard import exchange\n"
                )
                before += TYPED[block.document][1] + "\n"
                path = Path(folder, re.sub(r"\W+", "_", str(block)) + ".py")
                path.write_text(before + block.text)
                names[path.name] = block, before.count("\n")
        paths = sorted(map(str, Path(folder).iterdir()))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent",
             "--check-untyped-defs", "--no-error-summary", "--scripts-are-modules", *paths],
            env={**os.environ, "MYPYPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or done.stderr:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        wrong = []
        for line in done.stdout.splitlines():
            where = re.match(r"(?:.*/)?(\w+\.py):(\d+):(.*)", line)
            if where and line.endswith(tuple(f"[{name}]" for name in MISUSE)):
                block, above = names[where[1]]
                wrong.append(f"{block.document}:{block.line + int(where[2]) - above}:{where[3]}")
        print("\n".join(wrong) or f"{len(names)} blocks of the documents: nothing is misused")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
