"""The machine, its environment and its tools. Reads files and runs nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from memguard._devices import proc
from memguard._tools.doctor.bounds import printable
from memguard._tools.doctor.facts import System
from memguard.errors import FactsError

_PREFIXES = (
    "CUDA_", "NVIDIA_", "XLA_", "TF_", "PYTORCH_", "TORCH_", "CUPY_", "NUMBA_", "JAX_", "RMM_", "NCCL_", "CUDNN_",
    "CUBLAS_", "PYCUDA_", "KERAS_", "MEMGUARD_",
)  # fmt: skip
_NAMES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CC", "CXX", "CONDA_PREFIX"}
_LEFT_OUT = {"NVIDIA_REQUIRE_CUDA"}  # long, and already checked by the container runtime
_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PWD|PW(?![A-Z])|LOGIN|PIN(?![A-Z])|CRED|API(?!S)|AUTH|^TF_(VAR|CLI|TOKEN|WORKSPACE)",
    re.IGNORECASE,
)
"""Names of variables that may hold a secret, and Terraform's, which share a prefix with TensorFlow's."""
_USER = re.compile(r"//[^\s/]+@")
"""User and password in a URL."""
_TOOLS = ("nvcc", "gcc", "g++", "cc")
_ACTIVATE = re.compile(r"(^|/)memguard/_tools/activation/?$")


def require_linux() -> None:
    """Raises FactsError on any other system."""
    if not sys.platform.startswith("linux"):
        here = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        fix = "run it in WSL 2, which counts as Linux" if sys.platform == "win32" else "run it on Linux"
        raise FactsError(
            f"memguard doctor runs on Linux with NVIDIA GPUs, and this is {here}",
            fix=f"{fix}; or examine the facts of another machine: memguard doctor --facts FILE",
        )


def probe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the probes, without the variables that apply a budget."""
    kept = {name: value for name, value in environ.items() if name not in ("MEMGUARD_RUN", "MEMGUARD_CONFIG")}
    if "PYTHONPATH" in kept:  # without the folder that `memguard run` prepends
        folders = [folder for folder in kept["PYTHONPATH"].split(os.pathsep) if not _ACTIVATE.search(folder)]
        kept["PYTHONPATH"] = os.pathsep.join(folders)
        if not folders:
            del kept["PYTHONPATH"]
    kept["MEMGUARD_DISABLE"] = "1"
    return kept


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that CUDA, the loader, a framework or memguard reads. Omits names that suggest a secret."""
    return {
        printable(name): _value(name, printable(value))[:2000]
        for name, value in sorted(environ.items())
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in _LEFT_OUT and not _SECRET.search(name)
    }


def _value(name: str, value: str) -> str:
    """The value of a variable; of CC and CXX only the program, because options may contain a secret."""
    return next(iter(value.split()), "") if name in ("CC", "CXX") else value


def tensorflow_log_level(environ: Mapping[str, str]) -> int:
    """TF_CPP_MIN_LOG_LEVEL: the lowest severity of TensorFlow's messages that are printed, 0 for all."""
    given = environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    return min(int(given), 3) if given.isdecimal() and len(given) < 100 else 0


def tools(environ: Mapping[str, str], root: str = "/") -> dict[str, str | None]:
    """Paths of the compilers that frameworks run. `nvcc off the PATH`: the one in the CUDA toolkit's folder."""
    paths = {name: shutil.which(name, path=environ.get("PATH", os.defpath)) for name in _TOOLS}
    found = {name: printable(path) if path is not None else None for name, path in paths.items()}
    if found["nvcc"] is None:
        for home in filter(None, (environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda")):
            path = os.path.join(home, "bin", "nvcc")
            if os.access(os.path.join(root, path.lstrip("/")), os.X_OK):
                return {**found, "nvcc off the PATH": printable(path)}
    return found


def system(environ: Mapping[str, str], python: str, executable: str, root: str = "/") -> System:
    """The machine and the examined interpreter: `python` is its version, `executable` its path."""
    kernel = platform.release()
    return System(
        platform=sys.platform,
        machine=platform.machine(),
        kernel=kernel,
        python=python,
        executable=executable,
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        wsl=proc.is_wsl(kernel, root),
        container=container(environ, root),
    )


def container(environ: Mapping[str, str], root: str = "/") -> str | None:
    """The kind of container that this process runs in, by the files and variables of each kind."""
    kind = _first_line(os.path.join(root, "run/systemd/container")) or environ.get("container", "")
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ or _exists(root, ".singularity.d"):
        return "apptainer"
    if _exists(root, "run/.containerenv") or kind == "podman":
        return "podman"
    if _exists(root, ".dockerenv") or kind == "docker":
        return "docker"
    return "lxc" if kind.startswith("lxc") else None


def _exists(root: str, path: str) -> bool:
    return os.path.exists(os.path.join(root, path))


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(100).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def without_home(value: Any, homes: tuple[str, ...]) -> Any:
    """Replace the home folder by `~`, and remove user names from URLs: facts are meant to be shared."""
    if isinstance(value, str):
        value = _USER.sub("//***@", printable(value))
        for home in homes:
            value = re.sub(rf"(?<![\w~./-]){re.escape(home)}(?![\w.-])", "~", value)
        return value
    if isinstance(value, dict):
        return {without_home(key, homes): without_home(item, homes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_home(item, homes) for item in value]
    return value


def homes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The spellings of the home folder, the longest first; empty if there is none."""
    named = [environ.get("HOME", ""), os.path.expanduser("~")]
    found = {path.rstrip("/") for name in named if name for path in (name, os.path.realpath(name))}
    return tuple(
        sorted((path for path in found if path.count("/") >= 1 and path not in ("", "~")), key=len, reverse=True)
    )
