"""The loaded cuDNN must have the major, and at least the minor, of the one that a framework was compiled with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memguard._tools.doctor.cuda_libraries import major
from memguard._tools.doctor.derived import did_not_finish, mapped, messages
from memguard._tools.doctor.facts import Facts, FrameworkFacts, once
from memguard._tools.doctor.finding import Found, Severity, check
from memguard._tools.doctor.wording import full_name

Version = tuple[int, ...]

# messages with two versions: the cuDNN that was loaded (`found`) and the one of the build (`built`)
_VERSION_MESSAGES = (
    re.compile(r"Loaded runtime CuDNN library: (?P<found>[\d.]+) but source was compiled with:? (?P<built>[\d.]+)"),
    re.compile(
        r"PyTorch was compiled\s+against \((?P<built>[\d, ]+)\) but (?:found runtime version|linked against) "
        r"\((?P<found>[\d, ]+)\)"
    ),
    re.compile(
        r"Outdated cuDNN installation found\.\s*Version JAX was built against: (?P<built>\d+)"
        r".*?Installed version: (?P<found>\d+)",
        re.DOTALL,
    ),
)


def version(text: str | None) -> Version:
    """Parse 9.19.0, "9, 19, 0", 91900 (cuDNN 9) or 8907 (cuDNN 8); () without a number."""
    numbers = [int(number) for number in re.findall(r"\d+", text or "")]
    if len(numbers) == 1 and numbers[0] >= 1000:
        number = numbers[0]
        thousands = 10_000 if number >= 10_000 else 1000
        return number // thousands, number % thousands // 100, number % 100
    return tuple(numbers)


@once
def _pair(found: FrameworkFacts) -> tuple[Version, Version, str] | None:
    """The loaded cuDNN, the cuDNN of the build, and the message that reports both, if any."""
    stderr = "\n".join(found.probe.said) if found.probe is not None else ""  # JAX's message spans several lines
    for text in (*messages(found.probe), stderr):
        for pattern in _VERSION_MESSAGES:
            if match := pattern.search(text):
                line = " ".join(text.split())
                return version(match["found"]), version(match["built"]), line[max(line.find(match[0][:20]), 0) :][:240]
    loaded, built = version(found.cudnn_loaded), version(found.cudnn)
    return (loaded, built, "") if loaded and built else None


def too_old(found: FrameworkFacts) -> bool:
    """Whether the framework was compiled with another major, or a newer minor, than the loaded cuDNN has."""
    pair = _pair(found)
    if pair is None:
        return False
    loaded, built, message = pair
    return bool(message) or loaded[0] != built[0] or loaded[:2] < built[: min(2, len(loaded))]


def _dotted(number: Version) -> str:
    return ".".join(map(str, number))


@check("cudnn-older", order=325)
def cudnn_older(facts: Facts) -> Iterator[Found]:
    for name, found in facts.frameworks.items():
        pair = _pair(found)
        if pair is None or found.probe is None or not too_old(found):
            continue
        loaded, built, message = pair
        files = [file for file in mapped(found.probe) if file.path.rpartition("/")[2].startswith("libcudnn.so")]
        search = {folder.rstrip("/") for folder in facts.environment.get("LD_LIBRARY_PATH", "").split(":")}
        outside = sorted({file.folder for file in files if "/nvidia/cudnn/" not in file.path} & search)
        cuda = major(found.cuda)
        package = f"nvidia-cudnn-cu{cuda}" if cuda is not None else "nvidia-cudnn-cu13"
        least = _dotted(built[:2])
        yield Found(
            f"{full_name(facts, name)} was compiled with cuDNN {_dotted(built)} and found cuDNN {_dotted(loaded)}: "
            "it needs the same major and at least that minor",
            (
                f"{name}: {message}" if message else f"{name} runs with cuDNN {_dotted(loaded)}",
                *(f"{name} has mapped {file.path}" for file in files),
                f"{package} {facts.packages[package]} is installed" if package in facts.packages else "",
            ),
            f"pip install '{package}>={least},<{built[0] + 1}'"
            + (f", with {' and '.join(outside)} out of LD_LIBRARY_PATH" if outside else ""),
            name,
            severity=Severity.ERROR
            if message or did_not_finish(found.probe) or loaded[0] != built[0]
            else Severity.WARNING,
        )
