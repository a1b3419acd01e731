"""`memguard run --mps`: CUDA's Multi-Process Service refuses what a program asks for beyond its budget."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memguard._base.units import format_size
from memguard._budget import mps
from memguard._budget import ranks as _ranks
from memguard.cli.support.exit_codes import InputError
from memguard.errors import DeviceError

if TYPE_CHECKING:
    from memguard._base.types import Plan
    from memguard._budget import Budget

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
READ = frozenset({mps.LIMIT, PIPES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""What the program must not be given otherwise after memguard has looked: MPS would drop the limit, or not be met."""
_FOLDER = "/tmp/nvidia-mps"
_ROOTS = "/run/nvidia-mps"
"""Where a daemon of MPS v3 that runs as root makes its sockets (mpsv3-interface.html); CUDA has to be told."""
_CONTROL = "control"


class _Silence(NamedTuple):
    """Why no daemon can be met. `forbidden`: there is a socket, which this user may not open."""

    why: str
    forbidden: bool = False


def environment(environ: Mapping[str, str], budget: Budget, gpus: Sequence[str]) -> tuple[dict[str, str], str]:
    """`environ` with the limit in it, and a line that says so. Of simulated GPUs only the line.

    Raises InputError, with a fix, if MPS would not hold the limit here.
    """
    plan = _plan(environ, budget, gpus)
    old = mps.too_old(plan)
    if old is not None:
        raise DeviceError(
            f"{old.device.name} ({old.device.uuid}) is older than Volta, and MPS limits no memory there",
            fix="leave --mps out: the caps of the frameworks hold without it",
        )
    ranks = _of_ranks(budget, environ)
    if gpus:
        text = mps.value(mps.limits(plan))
        return dict(environ), f"--mps would set {mps.LIMIT}={text}; these GPUs are simulated, so it is not set{ranks}"
    sizes = mps.strictest(plan, environ.get(mps.LIMIT))
    text = mps.value(sizes)
    each = ", ".join(f"{format_size(sizes[part.device.uuid])} of {part.device.name}" for part in plan.devices)
    said = f"MPS lets each process have {each}, its CUDA context included: {mps.LIMIT}={text}{ranks}"
    return {**environ, mps.LIMIT: text}, said


def _of_ranks(budget: Budget, environ: Mapping[str, str]) -> str:
    """What to add where the limit is undivided: a launcher that is started here hands it to each of its ranks."""
    if budget.ranks != "auto" or _ranks.of(environ) is not None:
        return ""
    return (
        "\n    note: this process is no rank, so this limit is the whole one, and each process that it starts may have "
        "all of it\n    fix: for ranks, have the launcher start this: `torchrun --no-python ... memguard run --mps ...`"
    )


def _plan(environ: Mapping[str, str], budget: Budget, gpus: Sequence[str]) -> Plan:
    """What this process would have by the budget: as a rank, its part."""
    from memguard._budget import policy

    if gpus:
        from memguard._devices.simulated import SimulatedHost

        shown = SimulatedHost(gpus).devices()
        return policy.plan(budget, shown, _ranks.of_budget(budget, len(shown), environ, simulated=True))
    from memguard._devices.real import RealHost

    host = RealHost()  # raises where there is no Linux
    require_daemon(environ)  # first: CUDA that is told of a folder without a daemon cannot be asked for its GPUs
    try:
        devices = host.devices(ordinals=True)
    finally:
        host.close()
    if any(device.ordinal is None for device in devices):
        raise DeviceError(
            "CUDA could not be asked which GPUs the program sees; if an entry names another, MPS drops every limit",
            fix="run `memguard doctor` to see why CUDA does not start",
        )
    return policy.plan(budget, devices, _ranks.of_budget(budget, len(devices), environ, simulated=False))


def require_daemon(environ: Mapping[str, str]) -> None:
    """Raise InputError if no control daemon listens where CUDA will look for it.

    CUDA itself says nothing then: the program runs without MPS, and nothing limits it.
    """
    folder = environ.get(PIPES) or _FOLDER
    found = _silent(folder)
    if found is None:
        return
    fix = f"start it with `{_started(folder, environ)}`"
    if found.forbidden:
        fix = "run as the user who started it, or have root start it: then it serves every user"
    elif not environ.get(PIPES) and _silent(_ROOTS) is None:
        fix = f"export {PIPES}={_ROOTS}: a daemon listens there"
    elif environ.get(PIPES):
        fix += f", or set {PIPES} to the folder of one that runs"
    raise InputError(f"no MPS control daemon: {found.why}", fix=f"{fix}; or leave --mps out")


def _started(folder: str, environ: Mapping[str, str]) -> str:
    return (f"{PIPES}={shlex.quote(folder)} " if environ.get(PIPES) else "") + "nvidia-cuda-mps-control -d"


def _silent(folder: str) -> _Silence | None:
    """Why no daemon can be met in this folder; None if one listens.

    The daemon's socket is SOCK_SEQPACKET. Connecting to it as SOCK_DGRAM fails with EPROTOTYPE if it listens and with
    ECONNREFUSED if nobody does, and the daemon does not notice either.
    """
    path = os.path.join(folder, _CONTROL)
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return _Silence(f"{path} is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.connect(path)
    except FileNotFoundError:
        return _Silence(f"there is no {path}")
    except (OSError, ValueError) as error:  # ValueError: a null byte, which no environment can hold
        number = getattr(error, "errno", None)
        if number == errno.EPROTOTYPE:
            return None
        if number in (errno.EACCES, errno.EPERM):
            return _Silence(f"{path} may not be opened by this user", forbidden=True)
        if number == errno.ECONNREFUSED:
            return _Silence(f"nobody listens at {path}, which a daemon has left behind")
        return _Silence(f"{path}: {getattr(error, 'strerror', None) or error}")
    return _Silence(f"{path} is the socket of something else")
