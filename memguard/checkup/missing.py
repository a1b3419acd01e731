"""Which libraries a framework could not open, and which it opened by name: from what it says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = r"lib[\w.+-]+?\.so(?:\.\d+)*"
_MISSING = (
    re.compile(rf"({_NAME}): cannot open shared object file"),  # the loader itself, in everybody's ImportError
    re.compile(rf"Could not load dynamic library '({_NAME})'"),  # TensorFlow
    re.compile(rf"Could not load library ({_NAME})"),  # cuDNN 8
    re.compile(rf"failed to open ({_NAME})"),  # NVRTC, of its builtins
    re.compile(rf'Failure finding "({_NAME})"'),  # cuda-pathfinder, which Numba and cuda-bindings ask
    re.compile(rf"CuPy failed to load ({_NAME})"),
)
_ANY = re.compile(r"Unable to load any of \{([^}]*)\}")  # cuDNN 9: the same library by several names
_OPENED = re.compile(rf"Successfully opened dynamic library ({_NAME})")


def missing(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of libraries that these texts say could not be opened, in their order: `libcudart.so.12`."""
    found: dict[str, None] = {}
    for text in texts:
        at = [(match.start(1), match[1]) for pattern in _MISSING for match in pattern.finditer(text)]
        for match in _ANY.finditer(text):
            names = re.findall(_NAME, match[1])
            short = [name for name in names if re.search(r"\.so\.\d+$", name)]
            at += [(match.start(1), name) for name in (short or names)[:1]]
        found.update(dict.fromkeys(name for _, name in sorted(at)))
    return tuple(found)


def opened(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of libraries that TensorFlow says it opened."""
    return tuple(dict.fromkeys(match[1] for text in texts for match in _OPENED.finditer(text)))


def noise(line: str) -> bool:
    """Whether a line is there only because the probe asked TensorFlow to name the libraries it opens."""
    return _OPENED.search(line) is not None
