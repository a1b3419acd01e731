"""Where users meet memguard, on a real GPU: a notebook, MEMGUARD_CONFIG, a recorded run, pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from environments import environ, make

ROOT = Path(__file__).resolve().parents[2]
BUDGET = """version: 1
device: {limit: 8GiB}
frameworks:
  torch: {limit: 2GiB}
  cupy: {limit: 1GiB}
monitor: {interval: 100ms, timeline: run.jsonl}
"""
SIMULATED = "(simulated)"


def command(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS...` in a folder that has a budget.yaml, in a Python that has `memguard.pth`."""
    (folder / "budget.yaml").write_text(BUDGET)
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return subprocess.run(
        [str(make(folder / "python")), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=150, env=environ(**path, **more),
    )  # fmt: skip


# --- a notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    pytest.importorskip("nbclient", reason="a notebook needs nbclient and ipykernel")
    from notebooks import kernel

    folder = tmp_path_factory.mktemp("kernel")
    (folder / "budget.yaml").write_text(BUDGET)
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    with kernel(folder, MEMGUARD_CONFIG="budget.yaml", **path) as started:
        started.run("import torch, memguard\nGIB = 1 << 30", "%load_ext memguard")
        yield started


def test_the_magics_show_the_real_gpu(notebook: object) -> None:
    from notebooks import Notebook, html, text

    assert isinstance(notebook, Notebook)
    notebook.run("a = torch.zeros(GIB // 2, dtype=torch.uint8, device='cuda')")
    outputs = notebook.run("%memguard")
    assert SIMULATED not in html(outputs) and "torch" in html(outputs) and "NVIDIA" in text(outputs)
    held = notebook.text("print([r.bytes >> 20 for r in memguard.ledger().devices[0].rows if r.name == 'torch'])")
    assert held == "[512]\n"
    assert "2.00 GiB" in notebook.text("%memguard plan") or "2,048" in notebook.text("%memguard plan")
    notebook.run("del a")
    assert notebook.text("%memguard trim torch") == "512.0 MiB given back to the driver\n"


def test_a_cell_with_a_need_and_one_that_does_not_fit(notebook: object) -> None:
    from notebooks import Notebook, error

    assert isinstance(notebook, Notebook)
    shown = notebook.text(
        "%%memguard --framework torch --needs 1GiB", "b = torch.ones(GIB, dtype=torch.uint8, device='cuda')", "del b"
    )
    assert "torch peak 1.00 GiB, 0 B more in use than before" in shown
    assert "BudgetExceeded: torch needs 3.00 GiB" in error(
        notebook.fails("%%memguard --framework torch --needs 3GiB", "ran = True")
    )
    assert notebook.text("print('ran' in globals())") == "False\n"


def test_the_report_comes_under_the_cell_and_the_tracebacks_memory_is_let_go_of(notebook: object) -> None:
    """Without that the next cell would find the first GiB still taken."""
    from notebooks import Notebook, error, text

    assert isinstance(notebook, Notebook)
    outputs = notebook.fails(
        "def train():\n    batch = torch.ones(GIB, dtype=torch.uint8, device='cuda')\n"
        "    return torch.ones(2 * GIB, dtype=torch.uint8, device='cuda')\ntrain()"
    )
    assert "OutOfMemoryError" in error(outputs) and text(outputs).count("ran out of GPU memory: 2.00 GiB") == 1
    assert next(out["output_type"] for out in outputs) == "error", "the report is under the traceback"
    assert "let go of what the traceback held: torch 1.00 GiB" in text(outputs)
    assert notebook.text("print(torch.cuda.memory_allocated())") == "0\n"
    assert notebook.text("print(memguard.last_oom().reason)") == "cap\n"


# --- MEMGUARD_CONFIG, through memguard.pth


def test_memguard_config_caps_a_program_that_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, sys\nkept = []\ntry:\n"
        "    while True: kept.append(torch.empty(64 << 20, dtype=torch.uint8, device='cuda'))\n"
        "except torch.OutOfMemoryError:\n    print(torch.cuda.memory_reserved() >> 20, 'memguard' in sys.modules)\n"
    )
    done = command(tmp_path, "train.py", MEMGUARD_CONFIG="budget.yaml")
    assert (done.returncode, done.stdout) == (0, "2048 True\n"), done.stderr[-2000:]
    without = command(tmp_path, "-c", "import sys; print([m for m in sys.modules if 'memguard' in m])")
    assert (without.returncode, without.stdout) == (0, "[]\n"), "nothing happens without the variable"


# --- timeline and replay


def test_a_recorded_run_is_replayed_under_other_budgets(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        textwrap.dedent(
            """
            import memguard, time
            memguard.init("budget.yaml")
            import torch, cupy
            a = torch.zeros(1536 << 20, dtype=torch.uint8, device="cuda")
            b = cupy.zeros(512 << 20, cupy.uint8)
            time.sleep(1)
            del a, b
            time.sleep(0.5)
            memguard.shutdown()
            """
        )
    )
    done = command(tmp_path, "work.py")
    assert done.returncode == 0, done.stderr[-2000:]
    (timeline,) = [path for path in tmp_path.glob("run-*.jsonl") if path.name.count(".") == 1]

    def replay(*more: str) -> tuple[int, str]:
        done = command(tmp_path, "-m", "memguard", "replay", str(timeline), *more)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, done.stdout

    code, text = replay()
    assert code == 0 and SIMULATED not in text and "NVIDIA" in text
    (tmp_path / "tight.yaml").write_text(BUDGET.replace("2GiB", "1GiB"))
    code, text = replay("-c", "tight.yaml", "--json")
    found = json.loads(text)
    assert code == 1, "torch held 1,536 MiB"
    assert "torch" in json.dumps(found)
    code, smallest = replay("--smallest")
    (tmp_path / "smallest.yaml").write_text(smallest)
    assert code == 0 and replay("-c", "smallest.yaml")[0] == 0


# --- the pytest plugin


def test_a_failed_test_shows_the_report_of_a_real_error(tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(
        textwrap.dedent(
            """
            import pytest, memguard, torch

            @pytest.fixture(autouse=True)
            def budget():
                with memguard.guard("budget.yaml"):
                    yield

            def take(): return torch.empty(4 << 30, dtype=torch.uint8, device="cuda")

            def test_too_large(): take()
            def test_expected():
                with pytest.raises(torch.OutOfMemoryError): take()
            def test_other(): assert 1 == 2
            """
        )
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # otherwise pytest would use one above the temporary folder
    done = command(tmp_path, "-m", "pytest", "-p", "memguard.pytest_plugin", "-p", "no:cacheprovider", "test_model.py")
    assert "2 failed, 1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    sections = done.stdout.split("- memguard -")
    assert len(sections) == 2 and "torch ran out of GPU memory: 4.00 GiB asked for" in sections[1]
    assert "more than its whole cap of 2.00 GiB" in sections[1].replace("\n         ", " ")
