"""The GPUs of the stub library, as its scenario file has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]
GIB, MIB = 1 << 30, 1 << 20
UUIDS = ["GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222"]

TWO = {
    "count": 2,
    "uuid0": UUIDS[0], "name0": "NVIDIA H200", "arch0": 9,
    "total0": 143_771 * MIB, "reserved0": 615 * MIB, "used0": 3 * GIB,
    "uuid1": UUIDS[1], "name1": "Tesla T4", "arch1": 6,
    "total1": 15_360 * MIB, "reserved1": 449 * MIB, "used1": 0, "mig0": 0,
}  # fmt: skip
ONE = {**{key: value for key, value in TWO.items() if not key.endswith("1")}, "count": 1}
