"""The exit codes of every command."""

from __future__ import annotations

from typing import Final

from memguard.errors import DeviceError, MemguardError

YES: Final = 0
"""Done, or the answer is yes."""
NO: Final = 1
"""The answer is no: it does not fit, it is refused, something is wrong with what was examined."""
INPUT: Final = 2
"""The command line or a file that is read is invalid, or a file or standard output cannot be written."""
NO_GPU: Final = 3
"""No NVIDIA driver or no GPU."""
UNKNOWN: Final = 4
"""The answer could not be found out."""
INTERRUPTED: Final = 130
"""128 + SIGINT: Ctrl-C."""
READER_LEFT: Final = 141
"""128 + SIGPIPE: nobody reads standard output any more, as with `| head -1`."""


class InputError(MemguardError):
    """The command line asks for something that cannot be done here, or names a file that cannot be used."""

    exit_code = INPUT


def require_gpu() -> None:
    """Raise DeviceError if this machine has no NVIDIA driver or no GPU.

    Passes if NVML fails for another reason: CUDA may work without it.
    """
    if (why := _why_no_gpu()) is not None and why.missing:
        raise why


def gpu_here() -> bool:
    """Whether NVML finds a GPU: without one, what could not be answered ends with `NO_GPU`."""
    return _why_no_gpu() is None


def _why_no_gpu() -> DeviceError | None:
    from memguard._devices.nvml import Nvml

    nvml = Nvml()
    try:
        if not nvml.devices():
            return DeviceError("NVML sees no GPU", fix="check `nvidia-smi -L`", missing=not nvml.refused)
    except DeviceError as error:
        return error
    finally:
        nvml.close()
    return None
