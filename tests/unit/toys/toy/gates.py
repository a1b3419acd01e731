"""Which functions of the toy wait while the process is off its GPUs."""

from __future__ import annotations

from memguard._frameworks.optional_modules import Gates, entries

GATES = (Gates(hook="toy", waits=entries("toy", "wait", "its driver", "empty free_cache")),)
