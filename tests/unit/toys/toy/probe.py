"""The toy."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    with report.stage("import"):
        import toy

        report.put(path=toy.__file__, version=toy.__version__, gpu=True, gpus=0)
