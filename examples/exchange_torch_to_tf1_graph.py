"""A TensorFlow 1 graph, and a tf.function, fed from PyTorch without a copy to the host.

    python examples/exchange_torch_to_tf1_graph.py [--cpu]

A graph takes arrays as its arguments: hand them over outside, and pass them. `tf.compat.v1.wrap_function` makes such a
function of TensorFlow 1 code with variables and tf.compat.v1 operations. There is no session and no feed_dict:
`Session.run` takes NumPy arrays, which is host memory.

Shows: eight dtypes; that the graph gets the same memory; that an error in the graph leaves nothing behind. Each step is
checked, and the exit code is 1 if one fails. `--cpu` runs it on host arrays.
"""

from __future__ import annotations

import gc
import sys
import weakref

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
        memguard.init(budget)
    import tensorflow as tf
    import torch

    v1 = tf.compat.v1

    def model(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As it was written for TensorFlow 1."""
        with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
            scale = v1.get_variable("scale", shape=[], initializer=v1.constant_initializer(0.5))
        return tf.identity(images), scale * tf.cast(images, tf.float32)

    half = tf.Variable(0.5)
    function = tf.function(lambda images: half * tf.cast(images, tf.float32))
    checks: dict[str, bool] = {}
    for dtype in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int64", "bool"):
        x = torch.arange(64, device=device).remainder(2).to(getattr(torch, dtype)).reshape(4, 16)
        graph = v1.wrap_function(model, [tf.TensorSpec([None, 16], dtype)])
        fed = exchange.to(x, "tensorflow")
        same, scaled = graph(fed)
        again = function.get_concrete_function(tf.TensorSpec([None, 16], dtype))(fed)
        result = exchange.to(scaled, "torch")
        checks[f"{dtype} through the graph"] = torch.equal(result, x.float() * 0.5)
        checks[f"{dtype} through tf.function"] = torch.equal(exchange.to(again, "torch"), x.float() * 0.5)
        checks[f"{dtype} is the same memory inside"] = exchange.to(same, "torch").data_ptr() == x.data_ptr()
        checks[f"{dtype} stays on the {device}"] = result.device.type == device

    x = torch.ones(4, 16, device=device)
    alive = weakref.ref(x)
    fed = exchange.to(x, "tensorflow")
    product = v1.wrap_function(lambda a, b: tf.matmul(a, b), [tf.TensorSpec(None, tf.float32)] * 2)
    try:
        product(fed, fed)  # 4 x 16 by 4 x 16: no product
        checks["the graph's error is raised"] = False
    except tf.errors.InvalidArgumentError as error:
        print(f"the graph raised {type(error).__name__}")
        checks["the graph's error is raised"] = True
    checks["the memory lives while a view does"] = float(tf.reduce_sum(fed)) == 64
    del x, fed
    gc.collect()
    checks["after an error nothing is left"] = alive() is None

    for name, passed in checks.items():
        print(f"{'yes' if passed else 'NO '}  {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
