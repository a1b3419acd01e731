"""CUDA's libraries by file name: their CUDA version, their pip package, and messages that report them as missing.

SONAMEs as in NVIDIA's wheels: cuFFT and cuSOLVER have their own numbers; cuSPARSE 12 is part of CUDA 12 and 13.
Since CUDA 13 most packages have no suffix (`nvidia-cublas-cu12`, but `nvidia-cublas`).
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Library:
    """`soname`: the first number of its SONAME by CUDA major; empty if the number does not depend on CUDA.

    `package`: the pip package without suffix; `suffixed`: also for CUDA 13 with one. `renamed`: by CUDA major.
    """

    stem: str
    package: str
    soname: Mapping[int, int] = field(default_factory=dict, hash=False)
    suffixed: bool = False
    renamed: Mapping[int, str] = field(default_factory=dict, hash=False)

    def majors(self, version: str) -> frozenset[int]:
        """The CUDA majors whose library has this version; empty if unknown."""
        first = re.match(r"\d+", version)
        return frozenset(major for major, number in self.soname.items() if first and number == int(first.group()))

    def pip(self, major: int) -> str:
        """The pip package of the library for this CUDA major."""
        name = self.renamed.get(major, self.package)
        return name if major >= 13 and not self.suffixed else f"{name}-cu{major}"


def _same(*majors: int) -> Mapping[int, int]:
    return MappingProxyType({major: major for major in majors})


_FFT = MappingProxyType({11: 10, 12: 11, 13: 12})
_SOLVER = MappingProxyType({11: 11, 12: 11, 13: 12})

_ALL, _NEWER = _same(11, 12, 13), _same(12, 13)
_NVCC = MappingProxyType({11: "nvidia-cuda-nvcc", 12: "nvidia-cuda-nvcc"})
_NPP = ("c", "ial", "icc", "idei", "if", "ig", "im", "ist", "isu", "itc", "s")
_LIBRARIES = (
    Library("libcudart", "nvidia-cuda-runtime", _ALL),
    *(Library(stem, "nvidia-cublas", _ALL) for stem in ("libcublas", "libcublasLt", "libnvblas")),
    *(Library(stem, "nvidia-cufft", _FFT) for stem in ("libcufft", "libcufftw")),
    Library("libcurand", "nvidia-curand"),
    *(Library(stem, "nvidia-cusolver", _SOLVER) for stem in ("libcusolver", "libcusolverMg")),
    Library("libcusparse", "nvidia-cusparse", MappingProxyType({11: 11, 12: 12, 13: 12})),
    *(Library(stem, "nvidia-cuda-nvrtc", _ALL) for stem in ("libnvrtc", "libnvrtc-builtins")),
    Library("libnvJitLink", "nvidia-nvjitlink", _NEWER),
    Library("libcupti", "nvidia-cuda-cupti", _ALL),
    Library("libnvjpeg", "nvidia-nvjpeg", _ALL),
    Library("libcufile", "nvidia-cufile"),
    Library("libnvToolsExt", "nvidia-nvtx"),
    Library("libnvvm", "nvidia-nvvm", renamed=_NVCC),
    Library("libcudnn", "nvidia-cudnn", suffixed=True),
    Library("libnccl", "nvidia-nccl", suffixed=True),
    Library("libnvshmem_host", "nvidia-nvshmem", suffixed=True),
    Library("libcusparseLt", "nvidia-cusparselt", suffixed=True),
    Library("libcudss", "nvidia-cudss", suffixed=True),
    *(Library(stem, "cutensor", suffixed=True) for stem in ("libcutensor", "libcutensorMg")),
    Library("libnvfatbin", "nvidia-nvfatbin", _NEWER),
    *(Library(f"libnpp{part}", "nvidia-npp", _ALL) for part in _NPP),
)
TABLE: Mapping[str, Library] = MappingProxyType({library.stem: library for library in _LIBRARIES})

# libcudart.so.13, libcublasLt.so.13.1.0.3; libcudart.faf08d9a.so.13 and libcudart-faf08d9a.so.13.0.96 are copies that
# auditwheel renamed
_FILE = re.compile(
    r"(?P<stem>lib[A-Za-z_]+(?:-builtins)?)(?P<hash>[.-][0-9a-f]{8})?\.so(?:\.(?P<version>\d[\d.]*))?", re.ASCII
)


@dataclass(frozen=True)
class Mapped:
    """A file of a CUDA library that a process has mapped. `renamed`: auditwheel's copy with a hash in its name."""

    path: str
    library: Library
    version: str
    renamed: bool

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @functools.cached_property
    def majors(self) -> frozenset[int]:
        return self.library.majors(self.version)

    @property
    def name(self) -> str:
        return f"{self.library.stem}.so.{self.version}" if self.version else f"{self.library.stem}.so"

    @property
    def of(self) -> str:
        """The CUDA version of the file, for messages."""
        return "CUDA " + " or ".join(str(major) for major in sorted(self.majors)) if self.majors else "any CUDA"


def parse(path: str) -> Mapped | None:
    """The CUDA library of a file; None for other files. cuDNN's parts count as cuDNN."""
    found = _FILE.fullmatch(os.path.basename(path))
    if found is None:
        return None
    stem = found["stem"]
    library = TABLE.get("libcudnn" if stem.startswith("libcudnn_") else stem)
    if library is None:
        return None
    return Mapped(path, library, found["version"] or "", found["hash"] is not None)


def by_stem(files: Iterable[Mapped]) -> dict[str, tuple[Mapped, ...]]:
    """Group the files by library. Of cuDNN's files only libcudnn.so counts."""
    groups: dict[str, list[Mapped]] = defaultdict(list)
    for file in files:
        if re.match(re.escape(file.library.stem) + r"[.-]", os.path.basename(file.path)):
            groups[file.library.stem].append(file)
    return {stem: tuple(group) for stem, group in groups.items()}


def major(version: str | None) -> int | None:
    """Parse CUDA's major from 13.0, 12.5.1 or 13000."""
    found = re.match(r"\d+", version or "")
    if found is None:
        return None
    number = int(found.group())
    return number // 1000 if number >= 1000 else number


_NAME = r"lib[\w.+-]{1,100}?\.so(?:\.\d+)*"
_MISSING = {
    ": cannot open shared object file": re.compile(rf"({_NAME}): cannot open shared object file"),  # the loader
    "Could not load dynamic": re.compile(rf"Could not load dynamic library '({_NAME})'"),  # TensorFlow
    "Could not load library": re.compile(rf"Could not load library ({_NAME})"),  # cuDNN 8
    "failed to open": re.compile(rf"failed to open ({_NAME})"),  # NVRTC, for its builtins
    "Failure finding": re.compile(
        rf'Failure finding "({_NAME})["\s]'
    ),  # cuda-pathfinder, used by Numba and cuda-bindings
    "CuPy failed to load": re.compile(rf"CuPy failed to load ({_NAME})"),
}
"""Messages with the name of a library, by words that a text is searched for first: the patterns are slow."""
_ANY = re.compile(r"Unable to load any of \{([^}]*)\}")  # cuDNN 9: one library by several names
_SPOKEN = re.compile(r"Unable to load (cu\w+)\. Is it installed\?", re.IGNORECASE)  # JAX, without a version


def not_opened(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The libraries that these texts report as not opened, in order: the line, and the library's name.

    One library may be reported in several lines. `libcudart.so.12` is a name.
    """
    found: list[tuple[str, str]] = []
    for text in texts:
        at = [
            (match.start(1), match[1])
            for words, pattern in _MISSING.items()
            if words in text
            for match in pattern.finditer(text)
        ]
        for match in _ANY.finditer(text):
            names = re.findall(_NAME, match[1])
            short = [name for name in names if re.search(r"\.so\.\d+$", name)]
            at += [(match.start(1), name) for name in (short or names)[:1]]
        at += [(match.start(1), _stem_of(match[1]) + ".so") for match in _SPOKEN.finditer(text)]
        for place, name in sorted(at):
            line = text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0]
            found.append((line.strip(), name))
    return tuple(found)


def libraries_not_opened(texts: Iterable[str]) -> tuple[str, ...]:
    """The distinct library names of `not_opened`."""
    return tuple(dict.fromkeys(name for _, name in not_opened(texts)))


def _stem_of(spoken: str) -> str:
    """The file name's stem for JAX's `cuDNN`."""
    return "libcudart" if spoken.lower() == "cuda" else f"lib{spoken.lower()}"
