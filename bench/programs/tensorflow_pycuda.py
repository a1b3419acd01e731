"""TensorFlow trains while PyCUDA holds buffers beside it; every tenth step has more of both."""

import time

import tensorflow as tf

WIDTH, LAYERS, BATCH, STEPS, SECONDS, PIECE = 2048, 10, 4096, 40, 2.0, 32 << 20
weights = [tf.Variable(0.02 * tf.random.normal((WIDTH, WIDTH))) for _ in range(LAYERS)]
slopes = [tf.Variable(tf.zeros((WIDTH, WIDTH))) for _ in range(LAYERS)]

import pycuda.driver as cuda  # noqa: E402 (it takes the context that TensorFlow has made)

cuda.init()
context = cuda.Device(0).retain_primary_context()
context.push()


@tf.function
def trained(images):
    with tf.GradientTape() as tape:
        found = images
        for one in weights:
            found = tf.nn.gelu(found @ one)
        loss = tf.reduce_mean(found**2)
    for one, slope, new in zip(weights, slopes, tape.gradient(loss, weights), strict=True):
        slope.assign(0.9 * slope + new)
        one.assign_sub(1e-3 * slope)
    return loss


step, until = 0, None
while step < STEPS or (until is not None and time.monotonic() < until):
    large = step % 10 == 0
    buffers = [cuda.mem_alloc(PIECE) for _ in range(24 if large else 16)]
    for buffer in buffers:
        cuda.memset_d8(buffer, 0, PIECE)
    float(trained(tf.random.normal((2 * BATCH if large else BATCH, WIDTH))))
    for buffer in buffers:
        buffer.free()
    until = until or time.monotonic() + SECONDS
    step += 1
context.pop()
print("done", step)
