"""What a framework's `probe.py` gets: a function `probe(report)` that the doctor runs in a process of its own.

It runs in the interpreter to examine, which may not have memguard: it uses the standard library alone, imports nothing
of memguard at run time, and keeps to the syntax of Python 3.8. `memguard._tools.doctor.probes.main` runs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class ProbeReport(Protocol):
    """Sends what the probe finds to the doctor. Facts have their names in `_tools.doctor.facts.FrameworkFacts`."""

    def put(self, **facts: Any) -> None:
        """Facts of the framework."""

    def stage(self, name: str, quiet: bool = False) -> AbstractContextManager[None]:
        """A step of the probe: `import`, `devices`, `compute`. An error is reported and ends the probe."""
        ...

    def loaded(self) -> None:
        """Report the cuDNN that is loaded."""

    @staticmethod
    def cuda_version(number: int) -> str:
        """CUDA's number as it is written: 13020 is 13.2."""
        ...

    @staticmethod
    def cudnn_version(number: int) -> str:
        """cuDNN's number as it is written: 91900 is 9.19.0, and before version 9 8902 was 8.9.2."""
        ...
