"""The contract of a framework's `probe.py`: a function `probe(report)` that the doctor runs in a process of its own.

It runs in the examined interpreter, which may lack memguard: it uses the standard library alone, imports no memguard
module at run time, and keeps to the syntax of Python 3.8. `memguard._tools.doctor.probes.main` runs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class ProbeReport(Protocol):
    """Sends the probe's findings to the doctor. Facts have their names in `_tools.doctor.facts.FrameworkFacts`."""

    def put(self, **facts: Any) -> None:
        """Send facts of the framework."""

    def stage(self, name: str, quiet: bool = False) -> AbstractContextManager[None]:
        """A step of the probe: `import`, `devices`, `compute`. An exception is reported and ends the probe."""
        ...

    def loaded(self) -> None:
        """Send the version of the loaded cuDNN."""

    @staticmethod
    def cuda_version(number: int) -> str:
        """CUDA's version as text: 13.2 for 13020."""
        ...

    @staticmethod
    def cudnn_version(number: int) -> str:
        """cuDNN's version as text: 9.19.0 for 91900, and before version 9 8.9.2 for 8902."""
        ...
