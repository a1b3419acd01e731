"""A libcuda.so.1 without a GPU for the real PyCUDA and Numba: the stub of tests/faults, and all that PyCUDA links to.

PyCUDA's extension needs all of it to be there when it is imported. Those that the stub does not have answer
CUDA_ERROR_NOT_SUPPORTED.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from stub_gpus import ONE, UUIDS

HERE = Path(__file__).parent
FAULTS = HERE.parent / "faults"


def build(folder: Path) -> dict[str, str]:
    """The environment in which PyCUDA finds the library, which is built in the folder. Fails without gcc and nm."""
    spec = find_spec("pycuda")
    assert spec is not None and spec.origin is not None, "PyCUDA is not installed: scripts/test --all builds it"
    (extension,) = Path(spec.origin).parent.glob("_driver*.so")
    asked = subprocess.run(["nm", "-D", "--undefined-only", str(extension)], capture_output=True, text=True, check=True)
    names = re.findall(r" U (cu[A-Z]\w*)", asked.stdout)
    assert names, "PyCUDA's extension links to no call of CUDA's driver"
    rest = folder / "rest.c"
    rest.write_text("".join(f"__attribute__((weak)) int {name}(void) {{ return 801; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    sources = [FAULTS / "cuda_stub.c", HERE / "memory_stub.c", HERE / "address_stub.c", rest]
    options = ["-shared", "-fPIC", "-DPER_THREAD=__thread", "-o", str(library)]
    subprocess.run(["gcc", *options, *map(str, sources), "-ldl"], check=True)
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])}


def build_numbas(folder: Path, *options: str) -> dict[str, str]:
    """The same for Numba alone, and for CuPy: with the calls that Numba's driver looks up, and none of PyCUDA's."""
    sources = [FAULTS / "cuda_stub.c", HERE / "memory_stub.c", HERE / "numba_driver.c"]
    library = str(folder / "libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *options, "-o", library, *map(str, sources), "-ldl"], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def one_gpu(folder: Path) -> dict[str, str]:
    """The environment of a program that sees one GPU of 64 GiB, of which neither the driver nor NVML is real."""
    found = build(folder)
    nvml, source = folder / "libnvidia-ml.so.1", FAULTS / "nvml_stub.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(nvml), str(source)], check=True)
    scenario = folder / "gpus"
    scenario.write_text("\n".join(f"{key}={value}" for key, value in {**ONE, "driver": "580.0"}.items()) + "\n")
    more = {"NVML_STUB": str(scenario), "CUDA_STUB_UUIDS": UUIDS[0], "CUDA_STUB_MIB": "65536", "CUDA_STUB_IDLE": "1"}
    return {**os.environ, **found, **more}
