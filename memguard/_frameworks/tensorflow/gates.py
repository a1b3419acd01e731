"""The functions of TensorFlow that wait while the process is suspended.

Every eager operation and every `tf.function` calls a function `TFE_Py_*Execute*`; TensorFlow 1 graphs call
`TF_SessionRun*`. Whether these functions release the GIL is unknown.
"""

from __future__ import annotations

import sys
from typing import Any

from memguard._frameworks.optional_modules import Gates, NativeThread, entries


def with_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call may use a GPU: TensorFlow uses GPUs, and either no `tf.device` selects the CPU or an argument
    is on a GPU."""
    if not live():
        return False
    context = sys.modules["tensorflow.python.eager.context"]._context
    return "CPU" not in (context.device_name or "").upper() or any(_on_gpu(one) for one in (*args, *kwargs.values()))


def live() -> bool:
    """True once TensorFlow is initialised with at least one GPU."""
    context: Any = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return context is not None and bool(context._initialized and context._num_gpus)


def of_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the method's tensor is on a GPU."""
    return _on_gpu(args[0])


def constant_on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if `convert_to_eager_tensor(value, context, dtype)` runs inside a `tf.device` block of a GPU."""
    context = args[1] if len(args) > 1 else kwargs["ctx"]
    return "GPU" in str(context.device_name or "").upper()


def _on_gpu(one: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return any(_on_gpu(inner) for inner in one)
    return ":GPU:" in str(getattr(one, "backing_device", "")).upper()


_TFE = "tensorflow.python._pywrap_tfe"
_NAMES = "TFE_Py_FastPathExecute TFE_Py_Execute TFE_Py_ExecuteCancelable"

GATES = (
    Gates(
        hook="tensorflow",
        waits=(
            *entries("tensorflow.python.pywrap_tfe", "wait", "cuLaunchKernel, copies", _NAMES, touches=with_gpu),
            *entries(_TFE, "wait", "cuLaunchKernel, copies", _NAMES, touches=with_gpu, optional=True),
            *entries(
                "tensorflow.python.pywrap_tfe",
                "crash",
                "cuStreamSynchronize",
                "TFE_ToDlpackCapsule TFE_FromDlpackCapsule",
                touches=of_gpu,
            ),
            *entries(
                "tensorflow.python.pywrap_tfe",
                "crash",
                "cuCtxSynchronize",
                "TFE_ContextSyncExecutors TFE_ExecutorWaitForAllPendingNodes",
                touches=with_gpu,
            ),
            *entries("tensorflow.python.pywrap_tfe", "wait", "cuInit, cuCtxCreate", "TFE_NewContext"),
            *entries(
                "tensorflow.python.framework.constant_op",
                "hold",
                "cuMemcpyHtoDAsync",
                "convert_to_eager_tensor",
                touches=constant_on_gpu,
            ),
            *entries(
                "tensorflow.python.framework.ops",
                "wait",
                "cuMemcpyDtoHAsync, then an event that TensorFlow's own thread waits for",
                "_EagerTensorBase.numpy _EagerTensorBase._numpy _EagerTensorBase.__array__ _EagerTensorBase._copy"
                " _EagerTensorBase._copy_nograd _EagerTensorBase.__repr__ _EagerTensorBase.__str__"
                " _EagerTensorBase.__int__ _EagerTensorBase.__float__ _EagerTensorBase.__bool__"
                " _EagerTensorBase.__index__ _EagerTensorBase.__format__ EagerTensor._numpy_internal"
                " EagerTensor._copy_to_device",
                touches=of_gpu,
            ),
            *entries(
                "tensorflow.python.eager.context",
                "wait",
                "cuInit",
                "Context.ensure_initialized Context._initialize_physical_devices Context.sync_executors",
                touches=lambda args, kwargs: not getattr(args[0], "_initialized", False),
            ),
            *entries(
                "tensorflow.python.client.pywrap_tf_session",
                "wait",
                "cuLaunchKernel, copies",
                "TF_SessionRun_wrapper TF_SessionPRun_wrapper TF_SessionRunCallable",
            ),
        ),
        # TensorFlow 2.21 has no `cuda_stream_monitor` thread: its library does not contain that string. XLA starts the
        # thread since 2026, see `jax/gates.py`.
        natives=(NativeThread("libtensorflow_framework.so", "cuStreamQuery", 5.0, b"cuda_stream_monitor", live),),
    ),
)
