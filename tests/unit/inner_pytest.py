"""pytest runs within tests, which take no settings from around: no file above the folder, no variable of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(folder: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m pytest` in the folder, which gets a `pytest.ini`: else pytest goes up, to that of someone else."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pytest.ini", "--rootdir", "."]
    given = {name: value for name, value in (os.environ if env is None else env).items() if not _of_pytest(name)}
    return subprocess.run([*command, *options], cwd=folder, env=given, capture_output=True, text=True, timeout=100)


def _of_pytest(name: str) -> bool:
    return name.startswith("PYTEST_") and not name.startswith("PYTEST_TIME_KEPT_")
