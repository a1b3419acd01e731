"""A graph and a session, as programs of TensorFlow 1 have them."""

import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
with tf.device("/GPU:0"):
    x = tf.random.normal([8192, 8192])
    parts = [tf.tanh(x + number) for number in range(20)]
    with tf.control_dependencies(parts):
        total = tf.add_n([tf.reduce_sum(part) for part in parts])
print("graph made", flush=True)
with tf.Session() as session:
    print("done", session.run(total))
