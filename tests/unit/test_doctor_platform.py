"""On a system without NVIDIA's driver for Linux the doctor says so first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memguard import doctor
from memguard.errors import MemguardError


@pytest.mark.parametrize(("platform", "words"), [("darwin", "macOS"), ("win32", "WSL 2"), ("freebsd14", "freebsd14")])
def test_elsewhere_it_says_where_it_runs(monkeypatch: pytest.MonkeyPatch, platform: str, words: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(MemguardError, match="runs on Linux") as raised:
        doctor()
    assert words in str(raised.value) and "fix: " in str(raised.value)


def test_what_only_unix_has_is_not_imported_before_that() -> None:
    """On Windows what is said must not be that a module cannot be imported."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['fcntl', 'resource', 'pwd', 'grp', 'termios']))\n"
        "from memguard._tools.doctor.collect import gather; "
        "assert 'memguard._tools.doctor.collect.processes' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
