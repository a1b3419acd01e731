"""Frameworks that do not support the installed NumPy, recognised by their messages."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._tools.doctor.derived import NUMBA_NEEDS, REMOVED, numpy_messages
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import full_name, last_line, listing, shortened

# Numba's probe tries again with `numpy.row_stack`, which NumPy 2.5 removed and numba-cuda 0.30 needs.
_PUT_BACK = "compute with numpy.row_stack"


def _put_back(facts: Facts) -> bool:
    """Whether Numba's second try, with the removed function restored, succeeded."""
    probe = facts.frameworks["numba"].probe if "numba" in facts.frameworks else None
    return probe is not None and any(stage.name == _PUT_BACK and stage.error is None for stage in probe.stages)


def _remedy(lines: list[str], who: str, put_back: bool) -> str:
    if put_back:
        return "pip install 'numpy<2.5', or `numpy.row_stack = numpy.vstack` before the first kernel, which works here"
    for line in lines:
        if found := NUMBA_NEEDS.search(line):
            major, minor = int(found["major"]), int(found["minor"])
            return (
                f"pip install 'numpy<{major}.{minor + 1}'"
                if found["which"] == "less"
                else f"pip install 'numpy>={major}.{minor}'"
            )
    if any("1.x" in line or "_ARRAY_API" in line for line in lines):
        return f"pip install --upgrade {who}; if no release is for NumPy 2, pip install 'numpy<2'"
    return f"pip install --upgrade --force-reinstall {who} numpy"


@check("numpy-abi", order=415)
def numpy_abi(facts: Facts) -> Iterator[Found]:
    """Frameworks that do not support the installed NumPy: one finding for all."""
    affected = {name: lines for name in facts.frameworks if (lines := numpy_messages(facts, name))}
    numpy = f"NumPy {facts.packages['numpy']}" if "numpy" in facts.packages else "the NumPy that is installed"
    if affected:
        gone = [name for lines in affected.values() for line in lines for name in REMOVED.findall(line)]
        failed = [
            name for name in affected if (probe := facts.frameworks[name].probe) and (probe.failed or probe.signal)
        ]
        yield Found(
            f"{listing(full_name(facts, name) for name in affected)} (or a module that it imports) does not support "
            f"{numpy}" + (f", which no longer has {listing(gone)}" if gone else ""),
            shortened([f"{name}: {last_line(line)}" for name, lines in affected.items() for line in lines]),
            _remedy([line for lines in affected.values() for line in lines], " ".join(affected), _put_back(facts)),
            ", ".join(affected),
            severity=Severity.ERROR if failed else Severity.WARNING,
        )
