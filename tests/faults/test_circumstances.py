"""A budget on troublesome machines: no driver, half a driver, a slow or failing NVML, GPUs in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import GIB, ONE, TWO, UUIDS, Run

from memguard._devices import cuda_order
from memguard._devices.nvml import without_library

BUDGET = "BUDGET = {'version': 1, 'frameworks': {'pycuda': {'share': '50%'}}}\n"
READINGS = """
def rows():
    return [[repr(row) for row in part.rows] for part in memguard.ledger().devices]
def sums():
    return [sum(row.bytes or 0 for row in part.rows) - part.device.total for part in memguard.ledger().devices]
"""
Shown = Callable[..., dict[str, str]]


@pytest.fixture
def shown(cuda: Path, build: Callable[..., Path]) -> Shown:
    """The environment of a process to which CUDA (the stub) shows these GPUs, in this order."""

    def environment(*uuids: str, visible: str | None = "0") -> dict[str, str]:
        env = {"LD_LIBRARY_PATH": f"{cuda}{os.pathsep}{build()}", "CUDA_STUB_UUIDS": ",".join(uuids)}
        return env if visible is None else {**env, "CUDA_VISIBLE_DEVICES": visible}

    return environment


# no library


@pytest.mark.parametrize(
    ("there", "fix"),
    [
        ({"control": True, "module": True}, "--gpus all and NVIDIA_DRIVER_CAPABILITIES=utility,compute"),
        ({"control": True, "amd": "an AMD GPU"}, "--gpus all and NVIDIA_DRIVER_CAPABILITIES=utility,compute"),
        ({"module": True, "amd": "an AMD GPU"}, "this container no GPU: start it with --gpus all"),
        ({"wsl": True}, "install the NVIDIA driver on Windows"),
        ({"amd": "an AMD GPU (ROCm)"}, "there is an AMD GPU (ROCm) here, and memguard budgets NVIDIA GPUs only"),
        ({}, "install the NVIDIA driver; in a container start it with --gpus all"),
    ],
)
def test_the_fix_for_a_missing_library_depends_on_the_machine(there: dict[str, Any], fix: str) -> None:
    assert fix in without_library(**{"control": False, "module": False, "wsl": False, "amd": None, **there})


@pytest.mark.parametrize(
    ("setup", "fix"),
    [
        ("there = {'/dev/nvidiactl'}", "NVIDIA_DRIVER_CAPABILITIES=utility,compute"),
        ("there = {'/proc/driver/nvidia/version'}", "the machine has an NVIDIA driver"),
        ("there = {'/dev/dxg'}", "WSL"),
        ("there = {'/sys/class/kfd'}", "an AMD GPU (ROCm)"),
        ("sys.modules['torch.version'] = types.SimpleNamespace(hip='6.4')", "a PyTorch built for ROCm (AMD GPUs)"),
        ("sys.modules['torch.version'] = types.SimpleNamespace(hip=None)", "install the NVIDIA driver; in a container"),
    ],
)
def test_the_missing_library_is_explained_by_the_machine(run: Run, tmp_path: Path, setup: str, fix: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_text("no library")
    found = run(
        f"""
        import types
        from memguard._devices import nvml
        there = set()
        nvml._exists = lambda path: path in there
        {setup}
        result["text"] = refused(lambda: memguard.init({{"version": 1, "frameworks": {{"torch": {{"share": "50%"}}}}}}))
        result["imported"] = "torch" in sys.modules
        """,
        library=tmp_path / "lib",
    )
    assert found["text"].startswith("no usable NVIDIA driver here: NVML ")
    assert f"\n    fix: {found['text'].split('fix: ')[1]}" in found["text"]
    assert fix in found["text"] and not found["imported"]


# not every GPU may be opened


def test_a_gpu_that_may_not_be_opened_is_left_out(run: Run) -> None:
    """NVML counts the GPUs of others too, and refuses their handles: SLURM, containers."""
    found = run(
        BUDGET
        + READINGS
        + """
guard = memguard.init(BUDGET)
result["devices"] = [[part.device.uuid, part.device.index, part.device.ordinal] for part in guard.plan.devices]
result["sums"] = sums()
""",
        TWO,
        handle0=4,
    )
    assert found["devices"] == [[UUIDS[1], 1, None]] and found["sums"] == [0]


def test_no_gpu_may_be_opened(run: Run) -> None:
    found = run(BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))", TWO, handle=4)
    assert "(GPU 0)\n    fix: run as a user who may open /dev/nvidia*" in found["text"]


def test_a_gpu_that_cuda_shows_and_nvml_refuses_is_not_left_without_a_cap(run: Run, shown: Shown) -> None:
    code = BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))"
    env = shown(*UUIDS, visible="0,1")
    assert "(GPU 1)\n    fix: run as a user who may open" in run(code, TWO, handle1=4, env=env)["text"]
    env = shown("GPU-33333333-3333-3333-3333-333333333333", UUIDS[0], visible="0,1")
    assert "CUDA shows GPU-33333333-3333-3333-3333-333333333333, and NVML does not" in run(code, TWO, env=env)["text"]


def test_only_root_may_read_the_memory_of_a_gpu_that_mig_divides(run: Run, shown: Shown) -> None:
    code = BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))"
    for env in (None, shown("GPU-33333333-3333-3333-3333-333333333333")):  # the UUID of the part
        text = run(code, mig0=1, denied0=4, env=env)["text"]
        assert "NVIDIA H200" in text and "MIG enabled" in text and "\n    fix: choose another GPU" in text
    text = run(code, mig0=0, denied0=4)["text"]
    assert "may open /dev/nvidia" in text and UUIDS[0] in text and "MIG" not in text


def test_a_gpu_beside_one_that_mig_divides_is_budgeted_if_cuda_shows_only_it(run: Run, shown: Shown) -> None:
    code = BUDGET + "result['devices'] = [part.device.uuid for part in memguard.init(BUDGET).plan.devices]"
    found = run(code, TWO, mig0=1, denied0=4, env=shown(UUIDS[1], visible="1"))
    assert found["devices"] == [UUIDS[1]]


def test_a_part_of_a_gpu_that_cuda_shows_is_refused_with_the_gpus_name(run: Run, shown: Shown) -> None:
    code = BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))"
    found = run(code, TWO, mig1=1, env=shown("GPU-33333333-3333-3333-3333-333333333333"))
    assert f"Tesla T4 ({UUIDS[1]}) has MIG enabled" in found["text"]


@pytest.mark.parametrize("what", ["mig_code", "arch_code"])
def test_an_answer_that_fails_is_no_answer(run: Run, what: str) -> None:
    """A GPU whose MIG mode could not be read is not one without MIG."""
    found = run(BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))", **{what: 15})
    assert "fell off the bus" in (found["text"] or "")


# which GPUs CUDA shows


@pytest.mark.parametrize(("value", "none"), [("", True), ("-1", True), ("NoDevFiles", True)] + [
    (value, False) for value in (None, "0", " ", "-1,0", "-2", "GPU-1", "nodevfiles", "all")
])  # fmt: skip
def test_which_values_hide_every_gpu_is_known_without_cuda(value: str | None, none: bool) -> None:
    assert cuda_order.hides_all(value) is none


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
@pytest.mark.parametrize("there", [True, False])
def test_hidden_gpus_are_reported_with_and_without_a_libcuda(
    run: Run, shown: Shown, without_cuda: dict[str, str], value: str, there: bool
) -> None:
    code = BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))"
    env = shown(visible=value) if there else {**without_cuda, "CUDA_VISIBLE_DEVICES": value}
    found = run(code, TWO, env=env)
    assert f"CUDA shows this process no GPU (CUDA_VISIBLE_DEVICES={value!r}); NVML sees 2" in found["text"]
    assert "fix: unset CUDA_VISIBLE_DEVICES" in found["text"]


def test_a_variable_that_changes_after_cuda_was_initialised_hides_nothing(run: Run) -> None:
    found = run(
        BUDGET
        + """
from memguard._devices import contexts, cuda_order
contexts.initialised = lambda: True
cuda_order.visible = lambda ask_child=True: (contexts.VisibleDevice(0, json.loads(os.environ["GPU"]), 132),)
contexts.active = lambda ordinal: False
os.environ["CUDA_VISIBLE_DEVICES"] = ""
result["count"] = len(memguard.init(BUDGET).plan.devices)
""",
        env={"GPU": f'"{UUIDS[0]}"'},
    )
    assert found["count"] == 1


def test_only_cuda_knows_that_a_name_fits_no_gpu(run: Run, shown: Shown) -> None:
    code = BUDGET + "result['text'] = refused(lambda: memguard.init(BUDGET))"
    found = run(code, TWO, env=shown(visible="GPU-nobody"))
    assert "CUDA shows this process no GPU (CUDA_VISIBLE_DEVICES='GPU-nobody')" in found["text"]


def test_gpus_that_cuda_numbers_in_another_order_are_matched_by_uuid(run: Run, shown: Shown) -> None:
    found = run(
        BUDGET
        + READINGS
        + """
guard = memguard.init({**BUDGET, "devices": {"0": {"limit": "2GiB"}}})
result["plan"] = [[p.device.ordinal, p.device.index, p.device.name, p.device.uuid, p.limit] for p in guard.plan.devices]
result["used"] = [guard.host.memory(part.device).used for part in guard.plan.devices]
result["sums"] = sums()
""",
        TWO,
        env=shown(UUIDS[1], UUIDS[0], visible="1,0"),
    )
    first, second = found["plan"]
    assert first == [0, 1, "Tesla T4", UUIDS[1], 2 * GIB]
    assert second[:4] == [1, 0, "NVIDIA H200", UUIDS[0]] and second[4] > 100 * GIB
    assert found["used"] == [0, 3 * GIB] and found["sums"] == [0, 0]


@pytest.mark.parametrize("ordinals", [True, False])
def test_cudas_numbers_are_asked_for_if_the_budget_uses_them(run: Run, shown: Shown, ordinals: bool) -> None:
    named = '"devices": {"1": {"limit": "2GiB"}}' if ordinals else ""
    code = BUDGET + (
        f"guard = memguard.init({{**BUDGET, {named}}})\n"
        "result['ordinals'] = [part.device.ordinal for part in guard.plan.devices]"
    )
    found = run(code, TWO, env=shown(UUIDS[1], UUIDS[0], visible=None))
    assert found["ordinals"] == ([0, 1] if ordinals else [None, None])


def test_a_cuda_that_does_not_start_is_reported_with_the_way_to_find_out_why(run: Run, shown: Shown) -> None:
    found = run(
        BUDGET
        + """
import logging
logging.basicConfig(level=logging.DEBUG)
result["count"] = len(memguard.init(BUDGET).plan.devices)
""",
        TWO,
        env={**shown(*UUIDS, visible="1"), "CUDA_STUB_INIT": "803"},
    )
    assert found["count"] == 2
    assert "CUDA could not be asked: CUDA: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in found["stderr"]
    assert "budgeting all 2. fix: run `memguard doctor` to see why CUDA does not start" in found["stderr"]


def test_a_machine_without_libcuda_is_reported_in_the_same_way(run: Run, without_cuda: dict[str, str]) -> None:
    found = run(
        BUDGET
        + """
import logging
logging.basicConfig(level=logging.DEBUG)
result["count"] = len(memguard.init(BUDGET).plan.devices)
""",
        TWO,
        env={**without_cuda, "CUDA_VISIBLE_DEVICES": "1"},
    )
    assert found["count"] == 2 and "CUDA could not be asked: " in found["stderr"]
    assert "libcuda.so.1" in found["stderr"] and "fix: run `memguard doctor`" in found["stderr"]


def test_cudas_order_comes_from_a_child_without_any_extra_package(run: Run, shown: Shown, tmp_path: Path) -> None:
    """The child imports no framework and no `cuda` package, and this process neither loads libcuda nor runs cuInit."""
    extra = tmp_path / "extra"
    extra.mkdir()
    for name in ("cuda", "torch", "tensorflow", "cupy", "jax", "pycuda", "numba"):
        (extra / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    found = run(
        f"""
        sys.path.insert(0, {str(extra)!r})
        from memguard._devices import contexts, cuda_order
        result["gpus"] = [[gpu.ordinal, gpu.uuid, gpu.multiprocessors] for gpu in cuda_order.visible()]
        result["here"] = [contexts.initialised(), cuda_order.visible(ask_child=False)]
        result["loaded"] = "libcuda" in open("/proc/self/maps").read()
        """,
        TWO,
        env=shown(UUIDS[1], UUIDS[0], visible="1,0"),
    )
    assert found["gpus"] == [[0, UUIDS[1], 132], [1, UUIDS[0], 132]]
    assert found["here"] == [False, None] and not found["loaded"]


# figures that are not there


@pytest.mark.parametrize("own", ["named without bytes", "of another namespace", "named"])
def test_nvml_gives_no_bytes_for_this_process(run: Run, own: str) -> None:
    """WSL, vGPU: no bytes; a container: the PIDs of the host."""
    found = run(
        BUDGET
        + READINGS
        + f"""
names = {{"named without bytes": f"{{os.getpid()}}:na", "of another namespace": f"4000000:{2 * GIB}",
         "named": f"{{os.getpid()}}:{2 * GIB}"}}
scenario(processes0=names[{own!r}])
guard = memguard.init(BUDGET)
result["sums"] = sums()
part = memguard.ledger().devices[0]
result["process"], result["text"] = part.process, str(memguard.ledger())
result["stays"] = memguard.shutdown()
"""
    )
    assert found["sums"] == [0] and found["stays"] == []
    expected = {"named without bytes": None, "of another namespace": 0, "named": 2 * GIB}[own]
    assert found["process"] == expected
    assert ("unknown" in found["text"]) is (expected is None)


# GPUs that go, and others in this process


def test_a_lost_gpu_is_named(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
scenario(lost=1)
calls = [memguard.ledger, memguard.trim, lambda: memguard.init(BUDGET, replace=True).host.memory(
    guard.plan.devices[1].device)]
result["texts"] = [refused(call) for call in calls]
""",
        TWO,
    )
    assert all(UUIDS[1] in text and "fell off the bus" in text for text in found["texts"]), found["texts"]


def test_an_nvml_that_other_code_shut_down_is_started_again(run: Run) -> None:
    found = run(
        BUDGET
        + READINGS
        + """
import pynvml
memguard.init(BUDGET)
first = rows()
pynvml.nvmlShutdown()
result["same"] = rows() == first and rows() == first
result["stays"] = memguard.shutdown()
"""
    )
    assert found["same"] and found["stays"] == []
    assert [entry[0] for entry in found["log"]] == ["init", "shutdown", "init", "shutdown"]


def test_memory_figures_do_not_change_from_v2_to_v1(run: Run) -> None:
    """Memory as NVML v1 gives it counts the driver's part as used: it does not fit a plan that was made with v2."""
    found = run(
        BUDGET
        + READINGS
        + """
memguard.init(BUDGET)
first = rows()
scenario(memory_v2=3)
result["text"] = refused(rows)
scenario(memory_v2=0)
result["same"] = rows() == first
"""
    )
    assert found["text"] is not None and "fix: " in found["text"] and found["same"]


# slow


SLOW = """
import logging, threading, time
from memguard import api
logging.basicConfig(level=logging.WARNING)

def beside(work):
    # the longest that `current` took in another thread meanwhile
    longest, stop = [0.0], threading.Event()
    def ask():
        while not stop.is_set():
            started = time.monotonic()
            try:
                api.current()
            except memguard.NotActive:
                pass
            longest[0] = max(longest[0], time.monotonic() - started)
            time.sleep(0.005)
    thread = threading.Thread(target=ask)
    thread.start()
    started = time.monotonic()
    work()
    took = time.monotonic() - started
    stop.set()
    thread.join()
    return took, longest[0]
"""


def test_a_slow_nvml_is_waited_for_warned_about_once_and_blocks_no_other_thread(run: Run) -> None:
    found = run(
        BUDGET
        + READINGS
        + SLOW
        + """
result["init"] = beside(lambda: memguard.init(BUDGET))
scenario(slow_init=0, slow_processes=4000)
result["ledger"] = beside(memguard.ledger)
scenario(slow_processes=0, slow_init=4000)
result["replace"] = beside(lambda: memguard.init({**BUDGET, "device": {"limit": "9GiB"}}, replace=True))
scenario(slow_init=0)
result["sums"] = sums()
""",
        slow_init=4000,
    )
    for what in ("init", "ledger", "replace"):
        took, longest = found[what]
        # While a budget takes the place of another, who asks for the active one waits for it: it may not be there yet.
        assert took >= 4 and (longest < 2 or (what == "replace" and longest < took)), what
    assert found["sums"] == [0]
    (warning,) = (line for line in found["stderr"].splitlines() if "NVML is slow" in line)
    assert warning.startswith("WARNING:memguard:NVML is slow: 4.") and "fix: " in warning


def test_a_quick_nvml_is_not_called_slow(run: Run) -> None:
    found = run(BUDGET + SLOW + "memguard.init(BUDGET)\nmemguard.ledger()", slow_init=100, slow_processes=100)
    assert "slow" not in found["stderr"]


def test_a_log_handler_that_calls_memguard_does_not_deadlock(run: Run) -> None:
    found = run(
        BUDGET
        + """
import faulthandler, logging
faulthandler.dump_traceback_later(20, exit=True)
class Asks(logging.Handler):
    def emit(self, record):
        if "slow" in record.getMessage():
            result["used"] = guard.host.memory(guard.plan.devices[0].device).used
guard = memguard.init(BUDGET)
logging.getLogger("memguard").addHandler(Asks())
scenario(slow_processes=1100)
memguard.ledger()
"""
    )
    assert found["used"] == 3 * GIB


# failing now and then


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_ledger_over_calls_that_fail_at_random_is_whole_or_refused(run: Run, seed: int) -> None:
    found = run(
        BUDGET
        + READINGS
        + f"""
scenario(processes0=f"{{os.getpid()}}:{GIB},7:{2 * GIB}")
guard = memguard.init(BUDGET)
rows()
first = rows()
scenario(fail=80, seed={seed})
result["refused"] = result["whole"] = 0
result["strange"] = []
for turn in range(200):
    try:
        seen = rows()
        result["whole"] += 1
        if seen != first:
            result["strange"].append([turn, seen])
    except DeviceError as error:
        result["refused"] += 1
        if not str(error).startswith("NVML") or "fix: " not in str(error):
            result["strange"].append(str(error))
    except BaseException as error:
        result["strange"].append(repr(error))
result["active"] = guard.active
scenario(fail=0)
result["then"] = rows() == first
result["stays"] = memguard.shutdown()
""",
        TWO,
    )
    assert found["strange"] == []
    assert found["refused"] > 20 and found["whole"] > 20 and found["refused"] + found["whole"] == 200
    assert found["active"] and found["then"] and found["stays"] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_every_other_call_over_an_nvml_that_fails_at_random_too(run: Run, seed: int) -> None:
    found = run(
        BUDGET
        + READINGS
        + f"""
memguard.init(BUDGET)
first = rows()
memguard.shutdown()
scenario(fail=40, seed={seed})
result["strange"], done, failed = [], set(), set()
for turn in range(60):
    for name, call in {{
        "init": lambda: memguard.init(BUDGET),
        "require": lambda: memguard.require("pycuda", "1GiB"),
        "trim": memguard.trim,
        "replace": lambda: memguard.init({{**BUDGET, "device": {{"limit": "9GiB"}}}}, replace=True),
        "ledger": memguard.ledger,
        "shutdown": memguard.shutdown,
    }}.items():
        try:
            call()
            done.add(name)
        except DeviceError:
            failed.add(name)
        except memguard.NotActive:
            pass
        except BaseException as error:
            result["strange"].append(f"{{name}}: {{error!r}}")
scenario(fail=0)
memguard.shutdown()
memguard.init(BUDGET)
result["then"], result["done"], result["failed"] = rows() == first, sorted(done), sorted(failed)
""",
        TWO,
    )
    assert found["strange"] == [] and found["then"]
    assert found["done"] == ["init", "ledger", "replace", "require", "shutdown", "trim"]
    assert {"init", "ledger", "replace", "trim"} <= set(found["failed"]) and "shutdown" not in found["failed"]


# ends of the program, and workers


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("os._exit(5)", 5), ("memguard.shutdown(); memguard.shutdown()", 0)]
)
def test_a_program_that_ends_with_a_budget_ends_quietly(build: Any, tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "scenario").write_text("".join(f"{key}={value}\n" for key, value in ONE.items()))
    program = f"import os, sys, memguard\n{BUDGET}memguard.init(BUDGET)\nmemguard.ledger()\n{end}"
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | {
        "LD_LIBRARY_PATH": str(build()), "NVML_STUB": str(tmp_path / "scenario"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "error", "-X", "dev", "-c", program], capture_output=True, env=env,
                          text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_that_imports_the_script_again_touches_no_nvml(run: Run, tmp_path: Path, asked: bool) -> None:
    (tmp_path / "script.py").write_text(
        f"import memguard, multiprocessing, os, sys\n{BUDGET}"
        "memguard.init(BUDGET)\n"
        "def work(_):\n"
        "    return 'pynvml' in sys.modules, os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(*pool.map(work, [0])[0])\n"
    )
    found = run(
        f"""
        import subprocess
        done = subprocess.run([sys.executable, {str(tmp_path / "script.py")!r}], capture_output=True, text=True)
        result["out"], result["err"] = done.stdout.split(), done.stderr
        """,
        env={"MEMGUARD_CHILDREN": "1"} if asked else None,
    )
    loaded, pid = found["out"]
    assert found["err"] == "" and loaded == str(asked)
    assert (pid in {entry[1] for entry in found["log"]}) is asked
