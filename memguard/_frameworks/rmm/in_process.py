"""Reads facts of a process that has imported RMM."""

from __future__ import annotations

from memguard._frameworks.optional_modules import InProcess

IN_PROCESS = InProcess(modules=("rmm",))
