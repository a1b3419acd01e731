"""What a process that has imported RMM can tell of it."""

from __future__ import annotations

from memguard._frameworks.in_process import InProcess

IN_PROCESS = InProcess(modules=("rmm",))
