"""A graph and a session, as in TensorFlow 1 programs."""

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
with tf.device("/GPU:0"):
    images = [tf.random.normal([8192, 8192])]
    # Sequential: each operation that runs out of memory blocks TensorFlow for ten seconds.
    for number in range(20):
        images.append(tf.roll(images[-1], shift=number + 1, axis=0))
    with tf.control_dependencies(images[-1:]):
        total = tf.add_n([tf.reduce_sum(image) for image in images])
print("graph made", flush=True)
with tf.Session() as session:
    print("done", session.run(total))
