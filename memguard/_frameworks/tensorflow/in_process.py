"""Reads TensorFlow's state in the running process, for the doctor, suspension and retries."""

from __future__ import annotations

from collections.abc import Iterator

from memguard._frameworks.optional_modules import InProcess, Modules, Objects, Question


def _profilers(modules: Modules, _: Objects) -> Iterator[str]:
    profiler = modules.get("tensorflow.python.profiler.profiler_v2")
    if profiler is not None and profiler._profiler is not None:
        yield "tf.profiler runs"


IN_PROCESS = InProcess(
    modules=("tensorflow", "keras"),
    profilers=(Question("whether TensorFlow's profiler runs", _profilers),),
)
