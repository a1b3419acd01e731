"""TensorFlow reads a PyTorch matrix in place, and PyTorch reads TensorFlow's product in place.

    python examples/exchange_torch_to_tensorflow.py [--cpu]

Shows: one call each way and no copy; a refusal with its remedy; that the memory lives as long as its last view, even
after its owner is gone. Each step is checked, and the exit code is 1 if one fails. `--cpu` runs it on host arrays.
"""

from __future__ import annotations

import sys

import memguard
from memguard import exchange

budget = {
    "version": 1,
    "device": {"limit": "8GiB"},
    "frameworks": {"tensorflow": {"share": "50%"}, "torch": {"share": "50%"}},
}


def main() -> int:
    device = "cpu" if "--cpu" in sys.argv[1:] else "cuda"
    if device == "cuda":
        memguard.init(budget)  # without a limit TensorFlow takes the whole GPU
    import tensorflow as tf
    import torch

    matrix = torch.rand(512, 512, device=device)
    address, expected = matrix.data_ptr(), matrix @ matrix.T

    seen = exchange.to(matrix, "tensorflow")
    print(exchange.last_route())
    shared = exchange.to(seen, "torch").data_ptr() == address

    if device == "cuda":
        print(memguard.ledger())  # the memory is charged once, to PyTorch

    try:
        exchange.to(matrix.T, "tensorflow")
        refused = False
    except exchange.CannotShare as error:
        print(error)
        refused = True
    columns = exchange.to(matrix.T, "tensorflow", copy=True)

    del matrix  # the view keeps the memory
    product = exchange.to(tf.matmul(seen, columns), "torch")
    close = torch.allclose(product, expected, rtol=1e-2)  # TensorFlow multiplies in TF32 on a GPU

    print(f"the same memory: {shared}; transposed refused: {refused}; values right: {close}")
    return 0 if shared and refused and close else 1


if __name__ == "__main__":
    raise SystemExit(main())
