"""The catalogue of simulated GPUs: a card, a MIG slice, a memory size, or a file that describes GPUs.

h200, rtx4090, NVIDIA H200      a card of `CATALOGUE`, by its key or by its NVML name
h100-1g.10gb                    a MIG slice
24GiB                           a GPU with this much memory and no driver reserve
lab.yaml, ./machines/lab.yml    the GPUs of a file (docs/simulation.md)
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memguard._base.units import GIB, MIB, format_size, parse_size, short
from memguard.errors import ConfigError, DeviceError, Problem

if TYPE_CHECKING:
    from memguard._base.source_map import Document, Loc

SMALLEST = 256 * MIB
"""The smallest valid size in bytes. A smaller size is a typing mistake, such as a size without a unit."""
MOST = 64
"""The largest number of GPUs in one file."""
ARCHITECTURES = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "unknown")
_KEYS = ("name", "total", "driver_reserve", "architecture", "multiprocessors", "count")
_BOUNDS = {"multiprocessors": 1024, "count": MOST}
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Model:
    """The NVML properties of one GPU model. `total` and `reserved` (the driver reserve) are bytes.

    `source`: `measured` by this project; `nvidia-smi`: the total is from public output of nvidia-smi, the reserve is
    typical of such cards; `cudaMemGetInfo`: users reported the total; `typical`: usual for such a card. Empty for a GPU
    of a user's file.

    `unified`: the GPU uses the machine's memory, so NVML reports no memory, and `total` is CUDA's total. `processes`:
    what NVML's process list contains. `spills`: see `Host`.
    """

    name: str
    architecture: str
    total: int
    reserved: int = 0
    multiprocessors: int | None = None
    source: str = ""
    unified: bool = False
    processes: Literal["bytes", "pids", "nothing"] = "bytes"
    spills: bool = False


_SMI = "nvidia-smi"
CATALOGUE: Mapping[str, Model] = {
    "b200": Model("NVIDIA B200", "blackwell", 183_359 * MIB, 717 * MIB, 148, _SMI),
    "h200": Model("NVIDIA H200", "hopper", 143_771 * MIB, 615 * MIB, 132, "measured"),
    "h100": Model("NVIDIA H100 80GB HBM3", "hopper", 81_559 * MIB, 551 * MIB, 132, _SMI),
    "a100-40gb": Model("NVIDIA A100-SXM4-40GB", "ampere", 40_960 * MIB, 571 * MIB, 108, _SMI),
    "a100-80gb": Model("NVIDIA A100-SXM4-80GB", "ampere", 81_920 * MIB, 869 * MIB, 108, _SMI),
    "a6000": Model("NVIDIA RTX A6000", "ampere", 49_140 * MIB, 459 * MIB, 84, _SMI),  # ECC off, the factory setting
    "a10": Model("NVIDIA A10", "ampere", 23_028 * MIB, 475 * MIB, 72, _SMI),
    "l40s": Model("NVIDIA L40S", "ada", 46_068 * MIB, 596 * MIB, 142, _SMI),
    "l4": Model("NVIDIA L4", "ada", 23_034 * MIB, 467 * MIB, 58, _SMI),
    "t4": Model("Tesla T4", "turing", 15_360 * MIB, 449 * MIB, 40, _SMI),
    "v100-16gb": Model("Tesla V100-SXM2-16GB", "volta", 16_384 * MIB, 233 * MIB, 80, _SMI),
    "v100-32gb": Model("Tesla V100-SXM2-32GB", "volta", 32_768 * MIB, 274 * MIB, 80, _SMI),
    "rtx4090": Model("NVIDIA GeForce RTX 4090", "ada", 24_564 * MIB, 381 * MIB, 128, _SMI),
    "rtx5090": Model("NVIDIA GeForce RTX 5090", "blackwell", 32_607 * MIB, 487 * MIB, 170, _SMI),
    # Unified memory. GB10's total is CUDA's figure from users' machines (121.69 GiB: unslothai/unsloth, pull request
    # 10283), Orin's is typical of a module with 64 GiB.
    "gb10": Model("NVIDIA GB10", "blackwell", 124_610 * MIB, 0, 48, "cudaMemGetInfo", unified=True),
    "jetson-agx-orin": Model(
        "Orin (nvgpu)", "ampere", 62_841 * MIB, 0, 16, "typical", unified=True, processes="nothing"
    ),
}
"""Whole GPUs. `_PROFILES` has the MIG slices."""

# Memory (GiB) and multiprocessors of each profile, from `nvidia-smi mig -lgip` on the card. For the H200, 1g.35gb and
# 4g.71gb have the figures of the profile with the same memory; 3g.71gb is from nvidia-smi's list.
_PROFILES: Mapping[str, Mapping[str, tuple[float, int]]] = {
    "a100-40gb": {
        "1g.5gb": (4.75, 14), "1g.10gb": (9.75, 14), "2g.10gb": (9.75, 28), "3g.20gb": (19.625, 42),
        "4g.20gb": (19.625, 56), "7g.40gb": (39.5, 98),
    },
    "a100-80gb": {
        "1g.10gb": (9.5, 14), "1g.20gb": (19.5, 14), "2g.20gb": (19.5, 28), "3g.40gb": (39.25, 42),
        "4g.40gb": (39.25, 56), "7g.80gb": (79.0, 98),
    },
    "h100": {
        "1g.10gb": (9.75, 16), "1g.20gb": (19.625, 26), "2g.20gb": (19.625, 32), "3g.40gb": (39.5, 60),
        "4g.40gb": (39.5, 64), "7g.80gb": (79.25, 132),
    },
    "h200": {
        "1g.18gb": (16.0, 16), "1g.35gb": (32.5, 26), "2g.35gb": (32.5, 32), "3g.71gb": (69.75, 60),
        "4g.71gb": (69.75, 64), "7g.141gb": (140.0, 132),
    },
}  # fmt: skip


def _slice(card: Model, profile: str, memory: float, multiprocessors: int) -> Model:
    # An idle slice reports about this many used bytes: 12 MiB for 1g, 37 MiB for 3g.
    reserve = 12 * MIB * int(profile[0])
    name = f"{card.name} MIG {profile}"
    return Model(name, card.architecture, int(memory * GIB), reserve, multiprocessors, "nvidia-smi")


SLICES: Mapping[str, Model] = {
    f"{card}-{profile}": _slice(CATALOGUE[card], profile, *figures)
    for card, profiles in _PROFILES.items()
    for profile, figures in profiles.items()
}


def names(*, every: bool = True) -> str:
    """The accepted names, with every MIG slice (for a help text) or with one slice as an example (for an error)."""
    slices = "; ".join(f"{card}-{', '.join(profiles)}" for card, profiles in _PROFILES.items())
    slices = f"({slices})" if every else "such as h100-1g.10gb"
    return f"{', '.join(CATALOGUE)}; a MIG slice {slices}; a size such as 24GiB; a file of devices such as gpus.yaml"


def canonical(name: str) -> str:
    """Return the canonical spelling of `name`, so that two names of the same GPU compare equal. A file's path becomes
    absolute."""
    name = name.strip()
    return os.path.abspath(name) if _is_file(name) else name.lower()


def models(name: str) -> tuple[Model, ...]:
    """Resolve `name` to GPU models. A catalogue name or a memory size gives one model; a device file may define
    several. Raises DeviceError; ConfigError for an invalid file."""
    wanted = name.strip()
    found = _known(wanted.lower())
    if found is not None:
        return (found,)
    if _is_file(wanted):
        return tuple(_file(wanted))
    if re.fullmatch(r"[0-9.]+\s*([kmgt]i?b?|b)", wanted, re.IGNORECASE | re.ASCII):
        return (_sized(wanted),)
    near = suggested(wanted)
    if wanted.isdecimal() and wanted.isascii() and not near:
        if int(wanted[:20]) >= SMALLEST:
            return (_sized(wanted),)
        near = (f"{wanted}GiB",) if 1 <= int(wanted[:20]) <= 1024 else ()
    raise _wrong(f"no simulated GPU {short(wanted)}", near)


def model(name: str) -> Model:
    """Resolve `name` to one GPU model. Raises the errors of `models`, and DeviceError for a file with several GPUs."""
    found = models(name)
    if len(found) != 1:
        raise _wrong(f"{short(name)} has {len(found)} GPUs, and one is needed", ())
    return found[0]


def suggested(wanted: str) -> tuple[str, ...]:
    """The catalogue names similar to the unknown name `wanted`: two for `a100`, none for the unknown card `a30`."""
    parts = _parts(wanted)
    if all(part.isdecimal() and len(part) < 4 for part in parts):  # the name is only a size, or empty
        return ()
    cards = [key for key, card in CATALOGUE.items() if _means(parts, key, card)]
    return tuple(cards or [key for key, card in SLICES.items() if _means(parts, key, card)])


def _known(wanted: str) -> Model | None:
    for key, card in (*CATALOGUE.items(), *SLICES.items()):
        if wanted in (key, card.name.lower()):
            return card
    profile = [key for key in SLICES if wanted in (key, _unsized(key))]
    return SLICES[profile[0]] if len(profile) == 1 else None


def _unsized(key: str) -> str:
    """The key without the card's memory size: `a100-3g.40gb` for `a100-80gb-3g.40gb`."""
    card, _, profile = key.rpartition("-")
    return f"{card.partition('-')[0]}-{profile}"


_NOISE = {"nvidia", "geforce", "tesla", "mig", "gpu"}


def _parts(text: str) -> list[str]:
    """The lower-case tokens of a name: `["a100", "80"]` for `NVIDIA A100-80`."""
    return [part for part in re.findall(r"[a-z0-9]+", text.lower()) if part not in _NOISE]


def _means(parts: Sequence[str], key: str, card: Model) -> bool:
    """True if each token in `parts` equals a token of the card's key or name. A size may omit its unit: 80 matches
    80gb."""
    own = {*_parts(key), *_parts(card.name)}
    number = key.removeprefix("rtx")
    return all(part in own or f"{part}gb" in own or part == number for part in parts)


def _sized(written: str) -> Model:
    try:
        size = parse_size(written)
    except ValueError as error:
        raise _wrong(str(error), ()) from None
    if size < SMALLEST:
        raise _wrong(f"{short(written)} is {format_size(size)}: smaller than any GPU", ())
    return Model(f"GPU of {format_size(size)}", "unknown", size)


def _wrong(what: str, near: Sequence[str]) -> DeviceError:
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    error = DeviceError(f"{what}{hint}", fix=f"use one of {names(every=False)}")
    error.exit_code = 2  # the exit code of a wrong argument instead of a missing GPU
    return error


def _is_file(name: str) -> bool:
    return name.lower().endswith((".yaml", ".yml")) or os.sep in name


def _file(path: str) -> list[Model]:
    from memguard._base.yaml import read

    document = read(_read(path))
    found = _Profile(document)
    kinds = [kind for loc, entry in found.entries() for kind in found.gpus(loc, entry)]
    if not found.problems and not kinds:
        found.add(("devices",), "it has no GPU", "give at least one: '- {name: Lab card, total: 48GiB}'")
    if len(kinds) > MOST:
        found.add(("devices",), f"{len(kinds)} GPUs", f"at most {MOST} are possible")
    if found.problems:
        raise ConfigError(sorted(found.problems, key=lambda problem: (problem.line or 0, problem.column or 0)), path)
    return kinds


def _read(path: str) -> bytes:
    try:
        # O_NONBLOCK: opening a FIFO without a writer must not block.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(0, "it is not a regular file")
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise OSError(0, "it is larger than 1 MiB")
    except (OSError, ValueError) as error:
        what = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            [Problem(f"cannot be read: {what}", "give the path of a file with 'devices:'")], path
        ) from None
    return raw


class _Profile:
    """The entries of a device file, and the errors found in them."""

    def __init__(self, document: Document) -> None:
        self._document, self.problems = document, list(document.problems)

    def add(self, loc: Loc, what: str, fix: str) -> None:
        line, column = self._document.values.get(loc) or self._document.values.get(loc[:-1]) or (None, None)
        self.problems.append(Problem(what, fix, line, column, ".".join(str(part) for part in loc)))

    def entries(self) -> Iterator[tuple[Loc, Mapping[str, Any]]]:
        """Yield the location and the settings of each GPU. `devices` may be a list, or a mapping by GPU name."""
        data = self._document.data
        if self._document.bad and not data:
            return
        if not isinstance(data, dict) or "devices" not in data:
            fix = "begin with 'devices:', then a line '- {name: Lab card, total: 48GiB}' for each"
            return self.add((), "it does not describe GPUs", fix)
        for key in data:
            if key not in ("devices", "version"):
                self.add((key,), f"unknown key {short(key)}", "a file of devices has 'devices' only")
        listed = data["devices"]
        if isinstance(listed, dict):
            named = [((key,), entry, key) for key, entry in listed.items()]
        elif isinstance(listed, list):
            named = [((number,), entry, None) for number, entry in enumerate(listed)]
        else:
            return self.add(("devices",), f"found {short(listed)}", "list the GPUs: '- {name: Lab card, total: 48GiB}'")
        for where, entry, name in named:
            loc: Loc = ("devices", *where)
            if not isinstance(entry, dict):
                self.add(loc, f"found {short(entry)}", "give its keys: {name: Lab card, total: 48GiB}")
            else:
                yield loc, {**({} if name is None else {"name": name}), **entry}

    def gpus(self, loc: Loc, entry: Mapping[str, Any]) -> list[Model]:
        import difflib

        before = len(self.problems)
        for key in entry:
            if key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                self.add((*loc, key), f"unknown key {short(key)}{hint}", f"allowed: {', '.join(_KEYS)}")
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip() or len(name) > 96:
            what = f"found {short(name)}" if "name" in entry else "is missing"
            self.add((*loc, "name"), what, "give a text of at most 96 characters, as NVML names it")
        total = self._size(loc, entry, "total", SMALLEST)
        reserve = self._size(loc, entry, "driver_reserve", 0)
        if total is not None and reserve is not None and reserve >= total:
            self.add(
                (*loc, "driver_reserve"), f"{format_size(reserve)} of {format_size(total)}", "give less than total"
            )
        architecture = entry.get("architecture", "unknown")
        if architecture not in ARCHITECTURES:
            self.add((*loc, "architecture"), f"found {short(architecture)}", f"one of {', '.join(ARCHITECTURES)}")
        multiprocessors, count = self._whole(loc, entry, "multiprocessors"), self._whole(loc, entry, "count")
        if len(self.problems) > before:
            return []
        return [Model(str(name).strip(), architecture, total or 0, reserve or 0, multiprocessors)] * (count or 1)

    def _size(self, loc: Loc, entry: Mapping[str, Any], key: str, least: int) -> int | None:
        if key not in entry and not least:
            return 0
        if key not in entry:
            self.add((*loc, key), "is missing", "write for example 48GiB: nvidia-smi shows it")
            return None
        try:
            size = 0 if not least and entry.get(key) == 0 else parse_size(entry.get(key))
        except ValueError as error:
            self.add((*loc, key), str(error), "write for example 48GiB or 512MiB")
            return None
        if size < least:
            self.add((*loc, key), f"{format_size(size)} is smaller than any GPU", "write for example 48GiB")
            return None
        return size

    def _whole(self, loc: Loc, entry: Mapping[str, Any], key: str) -> int | None:
        value = entry.get(key)
        if value is None and key not in entry:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _BOUNDS[key]:
            self.add((*loc, key), f"found {short(value)}", f"give a whole number from 1 to {_BOUNDS[key]}")
            return None
        return value
