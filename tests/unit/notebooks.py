"""A real Jupyter kernel for tests, in a Python that has `memguard.pth`, spoken to through nbclient."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from environments import environ, make
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

BUDGET = "version: 1\nframeworks:\n  torch: {share: 50%}\n  cupy: {share: 20%}\n"


class Notebook:
    """Cells, run one after the other. `run` returns a cell's outputs; `fails` those of one that must fail."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client

    def run(self, *lines: str) -> list[Any]:
        cells = self._client.nb.cells
        cells.append(nbformat.v4.new_code_cell("\n".join(lines)))
        for _ in range(100):
            cell = self._client.execute_cell(cells[-1], len(cells) - 1)
            if cell.execution_count is not None:
                break
            time.sleep(0.05)  # ipykernel drops what is asked for right after a cell that failed
        return joined(cell.outputs)

    def text(self, *lines: str) -> str:
        """Everything that the cell shows as text."""
        return text(self.run(*lines))

    def fails(self, *lines: str) -> list[Any]:
        with pytest.raises(CellExecutionError):
            self.run(*lines)
        return joined(self._client.nb.cells[-1].outputs)


def joined(outputs: list[Any]) -> list[Any]:
    """With what follows within one stream as one output: the kernel cuts it where its clock says so, even in a line."""
    found: list[Any] = []
    for out in outputs:
        if found and out["output_type"] == "stream" and out["name"] == found[-1].get("name"):
            found[-1] = {**found[-1], "text": found[-1]["text"] + out["text"]}
        else:
            found.append(out)
    return found


def text(outputs: list[Any]) -> str:
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs)


def html(outputs: list[Any]) -> str:
    return "".join(out.get("data", {}).get("text/html", "") for out in outputs)


def error(outputs: list[Any]) -> str:
    """The traceback without its colours."""
    import re

    shown = ["\n".join(out["traceback"]) for out in outputs if out["output_type"] == "error"]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown))


def kernel_spec(folder: Path, python: Path) -> str:
    """A kernel's name, for a Jupyter that looks into `folder`; as `ipykernel install` writes them."""
    spec = folder / "kernels" / "memguard-test" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": "test", "language": "python"}))
    return "memguard-test"


@contextlib.contextmanager
def kernel(folder: Path, nb: Any = None, **more: str) -> Iterator[Notebook]:
    """A kernel started in `folder`, which gets a `budget.yaml` and is its home; `more` is its environment."""
    python = make(folder / "python")
    if not (folder / "budget.yaml").exists():
        (folder / "budget.yaml").write_text(BUDGET)
    given = {"HOME": folder, "IPYTHONDIR": folder / "ipython", "JUPYTER_RUNTIME_DIR": folder / "runtime"}
    places = {name: str(path) for name, path in given.items()} | {"JUPYTER_PLATFORM_DIRS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (places | {"JUPYTER_PATH": str(folder)}).items():
            patch.setenv(name, value)  # for the Jupyter of this process, which finds and starts the kernel
        notebook = nb if nb is not None else nbformat.v4.new_notebook()
        # A busy machine may take longer than the default of 4 s for what a cell has printed.
        name = kernel_spec(folder, python)
        client = NotebookClient(notebook, kernel_name=name, timeout=120, iopub_timeout=60)
        with client.setup_kernel(cwd=str(folder), env=environ(**places, **more)):
            yield Notebook(client)
