"""A thread fills a list with CuPy arrays, and nothing catches its error."""

import threading

import cupy

results = []


def preprocess():
    kept = []
    for number in range(11):
        print("step", number, flush=True)
        kept.append(cupy.zeros(192 << 20, cupy.uint8))
    results.append(len(kept))


thread = threading.Thread(target=preprocess)
thread.start()
thread.join()
if results:
    print("done")
