"""`cupy.cuda.runtime`."""

import card
import fake_card

_OUT_OF_MEMORY, _CONTEXT_IS_DESTROYED, _CAPTURE_IMPLICIT = 2, 709, 906


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"CUDA error {status}")


def getDevice():  # noqa: N802
    return fake_card.here()


def getDeviceCount():  # noqa: N802
    fake_card.runtime()
    return len(fake_card.gpus)


def getDeviceProperties(ordinal):  # noqa: N802
    fake_card.runtime()
    return {"uuid": fake_card.gpus[ordinal].uuid.partition(b"\0")[0]}  # as CuPy does


def memGetInfo():  # noqa: N802
    gpu = fake_card.gpu_here()
    return gpu.total - gpu.taken, gpu.total


def malloc(size):
    try:
        return fake_card.gpu_here().card.take(size)
    except card.OutOfMemory:
        raise CUDARuntimeError(_OUT_OF_MEMORY) from None
