"""A process that has imported a framework, and runs each piece of code in a fork of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Run = Callable[..., dict[str, Any]]

SERVER = """
import json, os, signal, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the framework prints stays out of the answers
import {module}
for line in sys.stdin:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        answer = {{}}
        try:
            exec(compile(json.loads(line), "test", "exec"), {{"__name__": "test", "result": answer}})
        except BaseException:
            answer["raised"] = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    answers.write((text or json.dumps({{"raised": f"the child ended with {{status}}"}})) + "\\n")
    answers.flush()
"""


def environment() -> dict[str, str]:
    theirs = ("TF_", "PYTORCH_", "CUDA_", "CUPY_", "JAX_", "XLA_", "NUMBA_", "TORCH_", "NCCL_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(theirs)}
    path = os.pathsep.join([str(ROOT), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def serve(module: str, env: Mapping[str, str] | None = None) -> Iterator[Run]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER.format(module=module)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**environment(), **(env or {})},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def run(code: str) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(f"from stand_ins import *\n{textwrap.dedent(code)}") + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        assert "raised" not in answer, answer["raised"]
        return answer

    yield run
    process.stdin.close()
    process.wait(30)
    process.stdout.close()
