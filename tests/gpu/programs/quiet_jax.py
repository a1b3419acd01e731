"""Without a fault: training in JAX, with occasional checkpoints copied to the CPU."""

import functools
import os
import time

import jax
import jax.numpy as jnp

until = time.monotonic() + float(os.environ.get("MOMENT_SECONDS", "120"))


def loss(parameters, x):
    for layer in parameters:
        x = jnp.tanh(x @ layer)
    return jnp.mean(x**2)


@functools.partial(jax.jit, donate_argnums=0)
def step(parameters, x):
    gradients = jax.grad(loss)(parameters, x)
    return [p - 0.01 * g for p, g in zip(parameters, gradients, strict=False)]


key = jax.random.key(7)
parameters = [jax.random.normal(jax.random.fold_in(key, n), (2048, 2048)) / 45 for n in range(8)]
steps = 0
while time.monotonic() < until:
    x = jax.random.normal(jax.random.fold_in(key, steps), (8192, 2048))
    parameters = step(parameters, x)
    if steps % 200 == 0:
        saved = jax.device_get(parameters)
    jax.block_until_ready(parameters)
    steps += 1
    time.sleep(0.01)
print("step", steps)
print("done")
