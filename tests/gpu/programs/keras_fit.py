"""Keras: `fit` with too large a batch."""

import keras
import numpy as np

model = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024, "gelu") for _ in range(8))])
model.compile(optimizer="sgd", loss="mse", jit_compile=False)
images = np.zeros((65536, 1024), np.float32)
print("images loaded", flush=True)
model.fit(images, images, batch_size=65536, epochs=1, verbose=0)
print("done")
