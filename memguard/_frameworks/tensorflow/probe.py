"""The doctor's probe for TensorFlow."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    """Import TensorFlow, list its devices and compute.

    If TensorFlow finds no GPU, it logs the reason without raising, and the probe ends.
    """
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # without growth TensorFlow takes the whole GPU
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    os.environ.setdefault("TF_CPP_VMODULE", "dso_loader=1")  # logs each library that TensorFlow opens or fails to open
    with report.stage("import"):
        import tensorflow as tf

        report.put(path=tf.__file__)
        build = tf.sysconfig.get_build_info()
        report.put(version=tf.__version__, gpu=bool(build.get("is_cuda_build")))
        report.put(cuda=build.get("cuda_version"), cudnn=build.get("cudnn_version"))
        report.put(architectures=[str(name) for name in build.get("cuda_compute_capabilities", ())])
    with report.stage("devices"):
        count = len(tf.config.list_physical_devices("GPU"))
        report.put(gpus=count)
    if not count:
        return
    with report.stage("compute"), tf.device("/GPU:0"):
        x = tf.ones((64, 64))
        float(tf.reduce_sum(x @ x))
        float(tf.reduce_sum(tf.nn.conv2d(tf.ones((1, 8, 8, 1)), tf.ones((3, 3, 1, 1)), 1, "SAME")))
    report.loaded()
