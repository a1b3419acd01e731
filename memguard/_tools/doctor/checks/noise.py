"""Messages that look like errors and are harmless. docs/doctor/harmless-message.md has the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, check
from memguard._tools.doctor.wording import listing

HARMLESS: tuple[tuple[str, str], ...] = (
    (
        r"Unable to register cu(DNN|FFT|BLAS) factory",
        "a second copy of XLA in this process uses the libraries of the first",
    ),
    (r"computation.placer already registered", "the same, for where XLA places programs"),
    (r"NUMA node read from SysFS had negative value", "the machine reports no NUMA node for the GPU, so 0 is used"),
    (r"could not open file to read NUMA node", "the kernel reports no NUMA node for the GPU, so 0 is used"),
    (r"TF-TRT Warning: (Could not find TensorRT|Cannot dlopen some TensorRT libraries)", "TensorRT is optional"),
    (r"(?:TensorFlow|This TensorFlow) binary is optimized", "a note on the CPU instructions that TensorFlow uses"),
    (r"oneDNN custom operations are on", "a note on rounding on the CPU"),
    (r"All log messages before absl::InitializeLog\(\)", "a note of the logging library"),
    (r"Delay kernel timed out: measured time has sub-optimal accuracy", "one timing while kernels are chosen is rough"),
    (r"Skipping the delay kernel", "timings while kernels are chosen are rough"),
    (
        r"NumbaPerformanceWarning:.*(low occupancy|under-utilization)",
        "a kernel with few blocks, as small examples have",
    ),
    (r"disabling MLIR crash reproducer", "a facility for XLA's developers is off"),
    (r"Loaded cuDNN version \d+", "a note of XLA"),
    (r"Created device /job:localhost.* with \d+ MB memory", "TensorFlow says how much it may take"),
    (r"This process is running with a very low file descriptor limit|Compiled cluster using XLA!", "a note of XLA"),
)

_RULES = tuple((re.compile(pattern), meaning) for pattern, meaning in HARMLESS)


def meaning(line: str) -> str | None:
    """The meaning of a known harmless line; None for any other."""
    return next((explanation for pattern, explanation in _RULES if pattern.search(line)), None)


def _short(line: str) -> str:
    """The line without time stamp, thread and source file."""
    message = re.sub(r"^.*?\.(?:cc|py):\d+[\]:] *", "", line.strip())
    return message if len(message) <= 100 else message[:100].rpartition(" ")[0] + " …"


@check("harmless-message", order=805)
def harmless_message(facts: Facts) -> Iterator[Found]:
    """Harmless messages in the probes' stderr: one finding for all."""
    seen: dict[str, tuple[str, str]] = {}
    who: dict[str, None] = {}
    for name, probe in facts.probes():
        for line in probe.said:
            explanation = meaning(line)
            if explanation is not None:
                seen.setdefault(explanation, (name, line))
                who.update(dict.fromkeys(name.split(" then ")) if name not in facts.frameworks else {name: None})
    if seen:
        what = f"{len(seen)} kinds of message look like errors" if len(seen) > 1 else "a message looks like an error"
        yield Found(
            f"{what} and {'are' if len(seen) > 1 else 'is'} harmless, from {listing(who)}",
            tuple(f"{name}: {_short(line)} ({explanation})" for explanation, (name, line) in seen.items()),
            "nothing to do",
        )
