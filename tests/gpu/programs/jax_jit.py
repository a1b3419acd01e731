"""A jitted function that creates six variants of every image at once."""

import jax
import jax.numpy as jnp


@jax.jit
def augment(images):
    return [images + 1, images * 2, images[::-1], images[:, ::-1], -images, jnp.clip(images, 0.1, 0.9)]


images = jax.jit(lambda: jnp.full((16384, 8192), 0.5, jnp.float32))().block_until_ready()
print("images loaded", flush=True)
variants = augment(images)
jax.block_until_ready(variants)
print("done")
