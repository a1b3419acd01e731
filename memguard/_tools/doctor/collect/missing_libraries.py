"""Which libraries a framework could not open, from its messages, and which of these the user sees too. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = r"lib[\w.+-]{1,100}?\.so(?:\.\d+)*"
_MISSING = (
    re.compile(rf"({_NAME}): cannot open shared object file"),  # the loader, in an ImportError
    re.compile(rf"Could not load dynamic library '({_NAME})'"),  # TensorFlow
    re.compile(rf"Could not load library ({_NAME})"),  # cuDNN 8
    re.compile(rf"failed to open ({_NAME})"),  # NVRTC, of its builtins
    re.compile(rf'Failure finding "({_NAME})["\s]'),  # cuda-pathfinder, which Numba and cuda-bindings ask
    re.compile(rf"CuPy failed to load ({_NAME})"),
)
_ANY = re.compile(r"Unable to load any of \{([^}]*)\}")  # cuDNN 9: one library by several names
_SPOKEN = re.compile(r"Unable to load (cu\w+)\. Is it installed\?", re.IGNORECASE)  # JAX, without a version
_OPENED = re.compile(rf"Successfully opened dynamic library ({_NAME})")


def libraries_not_opened(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of the libraries that these texts report as not opened, in order: `libcudart.so.12`."""
    found: dict[str, None] = {}
    for text in texts:
        at = [(match.start(1), match[1]) for pattern in _MISSING for match in pattern.finditer(text)]
        for match in _ANY.finditer(text):
            names = re.findall(_NAME, match[1])
            short = [name for name in names if re.search(r"\.so\.\d+$", name)]
            at += [(match.start(1), name) for name in (short or names)[:1]]
        at += [(match.start(1), _stem(match[1]) + ".so") for match in _SPOKEN.finditer(text)]
        found.update(dict.fromkeys(name for _, name in sorted(at)))
    return tuple(found)


def _stem(spoken: str) -> str:
    """The beginning of a library's name, from JAX's `cuDNN`."""
    return "libcudart" if spoken.lower() == "cuda" else f"lib{spoken.lower()}"


def shown(lines: Iterable[str], level: int) -> tuple[str, ...]:
    """The lines that the user sees too: the probe makes TensorFlow log more than the user's TF_CPP_MIN_LOG_LEVEL."""
    return tuple(line for line in lines if not _OPENED.search(line) and _severity(line) >= level)


def _severity(line: str) -> int:
    """TensorFlow's severity: 0 info, 1 warning, 2 error, 3 fatal. Lines of other loggers are 3: always shown."""
    if line.startswith("To enable the following instructions"):  # the second half of an info message
        return 0
    found = re.match(r"([IWEF])\d{4} |[\d: .-]+([IWEF]) \w+/", line)
    return "IWEF".index(found[1] or found[2]) if found else 3
