"""A forked worker uses the GPU under a budget that it applies itself: a forked child inherits none."""

import multiprocessing

import memguard


def work(files):
    memguard.init("budget.yaml")
    import torch

    kept = []
    for number in range(files):
        print("step", number, flush=True)
        kept.append(torch.zeros(320 << 20, dtype=torch.uint8, device="cuda"))


if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=work, args=(8,))
    worker.start()
    worker.join()
    if not worker.exitcode:
        print("done")
