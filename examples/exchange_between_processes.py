"""A GPU array from one process to another, from PyTorch to CuPy, without going through the host.

    python examples/exchange_between_processes.py

The first process exports a tensor and starts the second with the handle in its environment. All processes that attach
it see what the second writes. The tensor itself does not change, because a copy was exported. In a real program each
process has a budget: `memguard.init("budget.yaml")` in the first line of each.
"""

from __future__ import annotations

import os
import subprocess
import sys

from memguard import exchange


def first() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this example needs a GPU: between processes, host memory is multiprocessing.shared_memory's")
    x = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    with exchange.export(x) as handle:
        print("exported: ", handle.shape, handle.dtype, "on", handle.uuid)
        environment = {**os.environ, "ARRAY": str(handle)}
        subprocess.run([sys.executable, __file__, "second"], env=environment, check=True)
        print("attached: ", handle.attached, "processes, now that it is gone")
    print("untouched:", x.sum().item())


def second() -> None:
    y = exchange.attach(os.environ["ARRAY"], "cupy")
    y *= 2
    print("attached: ", exchange.last_route(), "with the sum", float(y.sum()))


if __name__ == "__main__":
    second() if sys.argv[1:] == ["second"] else first()
