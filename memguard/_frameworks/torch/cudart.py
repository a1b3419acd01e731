"""Makes PyTorch and TensorFlow built for different major versions of CUDA work in one process.

TensorFlow loads CUDA runtime symbols into the global scope. If torch needs another major version, torch's calls of
`cudaGetDeviceProperties` bind to TensorFlow's symbol and misread the struct (1 multiprocessor instead of 132). The
process then dies of SIGFPE in torch's first matrix product (measured: TensorFlow for CUDA 12, torch for CUDA 13). Two
load orders work, as measured with training and with exceptions that torch raises:

- Before TensorFlow is loaded: load torch's own `libcudart` with RTLD_GLOBAL, so that the loader finds it first.
- After TensorFlow and before torch: load torch's CUDA libraries with RTLD_DEEPBIND, so that they bind to torch's own
  `libcudart`.

A loaded library cannot be unloaded, so the load order is permanent. When torch initialises CUDA, the adapter checks
that torch reads the right device properties.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from memguard._frameworks.torch import settings
from memguard.errors import CapNotApplied


def cure_installed() -> str | None:
    """Call `cure` with the CUDA version of the installed PyTorch, and return its result. None if PyTorch is built
    without CUDA."""
    version = settings.cuda_version()
    return None if version is None else cure(version)


def cure(cuda_version: str) -> str | None:
    """Load torch's CUDA runtime in the load order that is still possible. Torch is built for `cuda_version` (`13.0`).

    Returns a sentence that names the loaded libraries; None if torch is already imported.
    """
    if "torch" in sys.modules:
        return None
    try:
        if "tensorflow" not in sys.modules:
            library = _runtime(cuda_version)
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return f"loaded {library.name} of torch first, so that it does not bind to TensorFlow's"
        names = _bind_deeply(cuda_version)
    except (OSError, LookupError) as error:
        raise CapNotApplied(
            "torch",
            f"torch and TensorFlow may need different CUDA runtimes, and torch's could not be loaded first: {error}",
            "import torch before tensorflow",
        ) from error
    return f"loaded {' and '.join(names)} bound to their own CUDA runtime, because TensorFlow was imported first"


def _bind_deeply(cuda_version: str) -> list[str]:
    ctypes.CDLL(str(_runtime(cuda_version)))
    folder = _torch_folder() / "lib"
    first = folder / "libtorch_global_deps.so"
    if first.exists():  # `import torch` also loads this library first, because the other libraries depend on it
        ctypes.CDLL(str(first), mode=ctypes.RTLD_GLOBAL)
    names = ["libc10_cuda.so", "libtorch_cuda.so"]
    for name in names:
        ctypes.CDLL(str(folder / name), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
    return names


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise LookupError("torch is not installed")
    return Path(spec.origin).parent


def _runtime(cuda_version: str) -> Path:
    """The path of the `libcudart` that torch loads: in its wheel, the adjacent NVIDIA wheels, or the library path."""
    major = cuda_version.partition(".")[0]
    for folder in _folders():
        for found in sorted(folder.glob(f"libcudart.so.{major}*")) + sorted(folder.glob(f"libcudart-*.so.{major}*")):
            return found
    raise LookupError(f"libcudart.so.{major} is in none of the folders of torch's libraries")


def _folders() -> Iterator[Path]:
    torch = _torch_folder()
    yield torch / "lib"
    for base in [torch.parent, *(Path(entry) for entry in sys.path if entry)]:
        yield from sorted((base / "nvidia").glob("*/lib"))
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry:
            yield Path(entry)
    yield Path(sys.prefix) / "lib"
    yield from (Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"))
