"""Facts are gathered from whatever is there, without harm to it and without its secrets."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from doctor_processes import TORCH, environ, write

import memguard
from memguard import _budget
from memguard._tools.doctor.collect import answers, gather, machine, script, this_process
from memguard._tools.doctor.collect.processes import Ended
from memguard._tools.doctor.cuda_libraries import libraries_not_opened
from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Cuda, CudaDevice, Driver, Facts, NvmlDevice, NvmlFacts
from memguard._tools.doctor.finding import Severity
from memguard.errors import FactsError

UUID = "GPU-11111111-1111-1111-1111-111111111111"
OTHER = "GPU-22222222-2222-2222-2222-222222222222"
GIB = 1 << 30
DONE = {"done": "driver"}
SIX = ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba")


def h200(**changes: Any) -> Driver:
    gpu = CudaDevice(ordinal=0, uuid=UUID, capability=(9, 0), multiprocessors=132)
    seen = {"uuid": UUID, "capability": (9, 0), "total": 140 * GIB, "used": GIB, "free": 138 * GIB, **changes}
    return Driver(
        cuda=Cuda(init="CUDA_SUCCESS", devices=(gpu,)), nvml=NvmlFacts(devices=(NvmlDevice(index=0, **seen),))
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Stand-ins for all six, so that none that is installed is started."""
    folder = write(tmp_path / "site", "torch", TORCH)
    for name in SIX[1:]:
        write(folder, name, f"raise ImportError('this {name} is of a test')")
    return folder


def gathered(site: Path, budget: Any = None, **given: Any) -> Facts:
    asked = {"frameworks": None, "timeout": 30, "environ": environ(site), **given}
    return gather.facts(_budget.of(budget) if budget is not None else None, python=[sys.executable], **asked)


def test_everything_at_once(site: Path) -> None:
    said: list[str] = []
    found = gathered(site, say=said.append)
    assert tuple(found.frameworks) == SIX
    torch = found.frameworks["torch"]
    assert torch.probe is not None and torch.probe.failed is None and torch.multiprocessors == (132,)
    for name in SIX[1:]:
        probe = found.frameworks[name].probe
        assert probe is not None and probe.failed is not None and probe.failed.error == f"this {name} is of a test"
        assert found.frameworks[name].path == str(site / name / "__init__.py"), "from the inventory"
    assert found.memguard == memguard.__version__
    assert found.system.python == ".".join(map(str, sys.version_info[:3]))
    assert {"driver", "inventory", "total", *SIX} <= set(found.seconds)
    assert {line.partition(":")[0] for line in said} == {"driver", "inventory", *SIX}
    assert Facts.from_json(found.to_json()) == found


def test_only_those_that_were_asked_for(site: Path) -> None:
    assert list(gathered(site, frameworks=["cupy", "torch"]).frameworks) == ["torch", "cupy"]


def test_only_those_that_the_budget_names(site: Path) -> None:
    found = gathered(site, {"version": 1, "frameworks": {"cupy": {"share": "10%"}}})
    assert list(found.frameworks) == ["cupy"]
    assert found.budget is not None and found.budget.frameworks == ("cupy",)


def test_one_that_is_not_installed_is_told_without_a_probe(tmp_path: Path) -> None:
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; del sys.argv[0]"
    python = [sys.executable, "-S", "-c", f"{code}; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"]
    found = gather.facts(None, frameworks=["torch"], timeout=30, python=python, environ=environ(tmp_path))
    assert found.frameworks["torch"].path is None
    assert found.frameworks["torch"].probe is None


def test_a_python_that_cannot_be_started(site: Path) -> None:
    with pytest.raises(FactsError, match=r"/no/such/python cannot be started: No such file"):
        gather.facts(None, frameworks=None, timeout=30, python=["/no/such/python"], environ=environ(site))


@pytest.mark.parametrize(("program", "how"), [("/bin/false", "ended with 1"), ("/bin/echo", "ended with 0")])
def test_a_program_that_is_no_python(site: Path, program: str, how: str) -> None:
    with pytest.raises(FactsError, match=how):
        gather.facts(None, frameworks=None, timeout=30, python=[program], environ=environ(site))


def test_no_budget_applies_in_the_probes(site: Path, tmp_path: Path) -> None:
    """Under `memguard run` and MEMGUARD_CONFIG the framework alone is looked at."""
    note = tmp_path / "note"
    (site / "torch" / "__init__.py").write_text(
        f"import os, sys\nopen({str(note)!r}, 'w').write(repr(['memguard' in sys.modules, dict(os.environ)]))\n{TORCH}"
    )
    activate = str(Path(memguard.__file__).parent / "_tools/activation")
    given = environ(site, MEMGUARD_RUN="/no/budget.yaml", MEMGUARD_CONFIG="/no/budget.yaml")
    given["PYTHONPATH"] = os.pathsep.join((activate, str(site)))
    found = gathered(site, frameworks=["torch"], environ=given)
    assert found.frameworks["torch"].gpus == 1
    imported, environment = eval(note.read_text())
    assert not imported
    assert environment["PYTHONPATH"] == str(site)
    assert not {"MEMGUARD_RUN", "MEMGUARD_CONFIG"} & set(environment)
    assert found.environment["MEMGUARD_CONFIG"] == "/no/budget.yaml", "what the user set is a fact all the same"


def test_what_memguard_has_put_into_the_environment_is_taken_out_of_the_probes() -> None:
    activate = str(Path(memguard.__file__).parent / "_tools/activation")
    assert machine.probe_environment({"PYTHONPATH": activate, "MEMGUARD_RUN": "x", "A": "b"}) == {
        "A": "b",
        "MEMGUARD_DISABLE": "1",
    }
    assert (
        machine.probe_environment({"PYTHONPATH": f"{activate}:/mine:/y/_activation"})["PYTHONPATH"]
        == "/mine:/y/_activation"
    )


def test_a_framework_that_there_is_not(site: Path) -> None:
    with pytest.raises(FactsError, match="no framework has the name 'pytorch'"):
        gathered(site, frameworks=["torch", "pytorch"])


def test_a_program_s_own_folder_comes_first_as_python_has_it(site: Path, tmp_path: Path) -> None:
    program = tmp_path / "program" / "train.py"
    write(program.parent, "cupy", "raise ImportError('beside the program')")
    program.write_text("import torch\n\ndef later():\n    import cupy\n")
    found = gathered(site, frameworks=["cupy"], script=str(program))
    assert found.frameworks["cupy"].path == str(program.parent / "cupy" / "__init__.py")
    assert found.script is not None and found.script.imports == (("torch", 1), ("cupy", 4))


def test_this_process_and_its_path(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `memguard.doctor()`: the probes find what this process would."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("LD_PRELOAD", "")
    found = gather.facts(None, frameworks=["torch", "cupy"], timeout=30, this_process=True)
    assert found.frameworks["torch"].path == str(site / "torch" / "__init__.py")
    assert found.process is not None and found.process.budget is False
    assert found.process.foreign_context is None and found.process.contexts == {}


def test_the_home_folder_and_secrets_stay_out(site: Path, tmp_path: Path) -> None:
    given = environ(site, HOME=str(tmp_path), HF_TOKEN="x", NCCL_API_KEY="geheim", TF_PASSWORD="geheim", CUDA_HOME="/c")
    given |= {"TF_VAR_db": "geheim", "TF_CLI_CONFIG_FILE": "geheim", "JAX_auth": "geheim", "cupy_secret": "geheim"}
    given |= {"NVIDIA_REQUIRE_CUDA": "cuda>=13", "LD_LIBRARY_PATH": f"{tmp_path}/lib:/x{tmp_path}"}
    found = gathered(site, frameworks=["torch", "cupy"], environ=given)
    text = found.to_json()
    assert "geheim" not in text and "HF_TOKEN" not in text and "REQUIRE_CUDA" not in text
    assert found.environment["CUDA_HOME"] == "/c"
    assert found.environment["LD_LIBRARY_PATH"] == f"~/lib:/x{tmp_path}"
    assert found.frameworks["torch"].path == "~/site/torch/__init__.py"
    assert text.count(str(tmp_path)) == 1


def asked(site: Path) -> gather._Runner:
    import threading

    return gather._Runner((sys.executable,), environ(site), 30, threading.Event(), (), None, print)


def test_with_a_gpu_they_are_tried_together(site: Path) -> None:
    """All in the order that is good for them, and PyTorch after TensorFlow, which here breaks it."""
    (site / "tensorflow" / "__init__.py").write_text(
        "import sys\nsys.first = 'torch' not in sys.modules\n" + "raise ImportError"
    )
    torch = site / "torch" / "__init__.py"
    torch.write_text("import sys\n" + TORCH.replace("= 132", "= 1 if getattr(sys, 'first', False) else 132"))
    ended = gather._probe(asked(site), h200(), ["torch", "tensorflow", "cupy"])
    alone = [order for order in ended if len(order) == 1]
    assert sorted(alone) == [("cupy",), ("tensorflow",), ("torch",)]
    counts = {order: answers.together(order, how).multiprocessors for order, how in ended.items() if len(order) > 1}
    assert counts == {("torch", "tensorflow", "cupy"): {"torch": 132}, ("tensorflow", "torch"): {"torch": 1}}


def test_tensorflow_is_only_imported_before_pytorch(site: Path) -> None:
    """Its import alone brings its CUDA runtime: what it computes would only take time."""
    ended = gather._probe(asked(site), h200(), ["torch", "tensorflow"])
    steps = [
        (line["of"], line["stage"]) for line in ended[("tensorflow", "torch")].reported if line.get("stage") is not None
    ]
    assert [stage for of, stage in steps if of == "tensorflow"] == ["import"]
    assert "devices" in [stage for of, stage in steps if of == "torch"]
    assert [line["done"] for line in ended[("tensorflow", "torch")].reported if "done" in line] == [
        "tensorflow",
        "torch",
    ]


def test_without_a_gpu_each_is_tried_alone(site: Path) -> None:
    assert all(len(order) == 1 for order in gather._probe(asked(site), Driver(), ["torch", "tensorflow"]))


def test_an_interrupt_ends_all_probes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "torch" / "__init__.py").write_text("import time\ntime.sleep(60)")
    waiting = asked(site)
    monkeypatch.setattr(gather.Future, "result", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gather._probe(waiting, h200(), ["torch"])
    assert waiting.stop.is_set()


@pytest.mark.parametrize(
    ("driver", "probes", "cpus", "most"),
    [
        (h200(), 8, 16, 8),
        (h200(), 8, 2, 2),
        (h200(free=4 * GIB), 8, 16, 2),
        (h200(free=0), 8, 16, 1),
        (h200(free=None), 8, 16, 8),
        (h200(mode="Exclusive_Process"), 8, 16, 1),
        (h200(uuid=OTHER, free=0), 8, 16, 8),  # one that CUDA does not show
        (Driver(), 8, 4, 4),
    ],
)
def test_how_many_run_at_once(driver: Driver, probes: int, cpus: int, most: int) -> None:
    assert gather.concurrency(driver, probes, cpus) == most


def test_what_a_budget_comes_to() -> None:
    budget = _budget.of({"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"tensorflow": {"share": "50%"}}})
    found = gather._budget(budget, h200())
    assert found is not None and found.limits == {UUID: 40 * GIB}
    assert found.frameworks == ("tensorflow",) and found.errors == ()


def test_a_budget_that_does_not_fit_its_gpu() -> None:
    budget = _budget.of({"version": 1, "device": {"limit": "200GiB"}, "frameworks": {"torch": {"share": "50%"}}})
    found = gather._budget(budget, h200())
    assert found is not None and found.limits == {} and "200" in found.errors[0]


def test_a_budget_is_of_the_gpus_that_cuda_shows() -> None:
    shown = h200().nvml.devices[0]
    driver = h200().model_copy(update={"nvml": NvmlFacts(devices=(shown.model_copy(update={"uuid": OTHER}), shown))})
    assert [
        (device.uuid, device.ordinal, device.architecture, device.reserved) for device in answers.devices(driver)
    ] == [(UUID, 0, "hopper", GIB)]


def test_a_gpu_with_unified_memory_has_cudas_total() -> None:
    """NVML has no figures of it. Without CUDA's it cannot be planned."""
    driver = h200()
    silent = driver.nvml.devices[0].model_copy(update={"total": None, "used": None, "free": None})
    for total, planned in ((122 * GIB, [(UUID, 122 * GIB, None, True)]), (None, [])):
        shown = driver.cuda.devices[0].model_copy(update={"total": total})
        cuda = driver.cuda.model_copy(update={"devices": (shown,)})
        found = answers.devices(driver.model_copy(update={"nvml": NvmlFacts(devices=(silent,)), "cuda": cuda}))
        assert [(device.uuid, device.total, device.reserved, device.unified) for device in found] == planned


def test_a_survey_that_did_not_come_back() -> None:
    nvml, cuda = {"nvml": {"driver": "580.1"}}, {"cuda": {"path": "/lib/libcuda.so.580.1", "version": 13000}}
    hung = answers.driver(Ended(20.0, hung=True, reported=[{"module": "580.1"}, nvml, cuda]))
    assert (hung.module, hung.cuda.version, hung.cuda.init) == ("580.1", 13000, "no answer in 20 s")
    crashed = answers.driver(Ended(1.0, signal="SIGSEGV", reported=[{"module": "580.1"}]))
    assert (crashed.nvml.error, crashed.cuda.init) == ("ended by SIGSEGV", None)
    good = answers.driver(
        Ended(1.0, exit=0, reported=[nvml, cuda, {"cuda": {**cuda["cuda"], "init": "CUDA_SUCCESS"}}, DONE])
    )
    assert good.cuda.init == "CUDA_SUCCESS" and good.nvml.error is None


@pytest.mark.parametrize(
    ("reported", "error", "init"),
    [
        ([], True, None),
        ([{"module": "580.1"}], True, None),
        ([{"nvml": {}}], False, True),
        ([{"nvml": {}}, {"cuda": {"path": "/lib/libcuda.so.580.1"}}], False, True),
        ([{"nvml": {}}, {"cuda": {"path": "/lib/libcuda.so.580.1", "init": "CUDA_SUCCESS"}}], False, True),
        ([{"nvml": {}}, {"cuda": {"init": "CUDA_ERROR_NO_DEVICE"}}], False, "CUDA_ERROR_NO_DEVICE"),
        ([{"nvml": {}}, {"cuda": {"error": "file too short"}}], False, None),
    ],
)
def test_a_survey_that_ended_with_an_exception(reported: Any, error: bool, init: bool | str | None) -> None:
    said = ("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'memguard'", "")
    how = f"ended with exit code 1: {said[1]}"
    found = answers.driver(Ended(0.4, exit=1, said=said, reported=reported))
    assert found.nvml.error == (how if error else None)
    assert found.cuda.init == (how if init is True else init)
    (finding,) = examine(Facts(driver=found))
    assert finding.severity is Severity.ERROR and (finding.name == "cuda-init-failed" or isinstance(init, str))


def test_a_survey_that_ended_well_or_was_read_to_its_end_says_nothing_of_it() -> None:
    shown = [line.model_dump(mode="json") for line in h200().cuda.devices]
    read = [{"nvml": {}}, {"cuda": {"init": "CUDA_SUCCESS", "devices": shown}}]
    for code in (0, 1):
        found = answers.driver(Ended(0.4, exit=code, reported=read))
        assert found.cuda.init == "CUDA_SUCCESS" and found.nvml.error is None
    assert answers.driver(Ended(0.4, exit=0, reported=[DONE])) == Driver()


def test_a_survey_that_something_ended_early_is_no_healthy_one() -> None:
    """As a library that calls `_exit(0)`: the last line is not there."""
    assert answers.driver(Ended(0.4, exit=0, reported=[])).nvml.error == "ended early with exit code 0"
    assert answers.driver(Ended(0.4, exit=0, reported=[{"nvml": {}}])).cuda.init == "ended early with exit code 0"


def test_a_survey_says_when_it_is_done(site: Path) -> None:
    stop = threading.Event()
    ended = gather._Runner((sys.executable,), environ(site), 30, stop, (), None, lambda line: None).survey()
    assert ended.reported[-1] == DONE and answers.driver(ended).nvml.error != "ended early with exit code 0"


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ((), {}, None),
        ((".dockerenv",), {}, "docker"),
        (("run/.containerenv",), {}, "podman"),
        ((), {"container": "podman"}, "podman"),
        ((".singularity.d",), {}, "apptainer"),
        ((), {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ((".dockerenv",), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ((), {"container": "lxc"}, "lxc"),
    ],
)
def test_kinds_of_containers(
    tmp_path: Path, files: tuple[str, ...], environment: dict[str, str], kind: str | None
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert machine.container(environment, str(tmp_path)) == kind


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ada", "~"),
        ("/home/ada/x:/home/ada/y", "~/x:~/y"),
        ('File "/home/ada/a.py", line 1', 'File "~/a.py", line 1'),
        ("/home/adam/x", "/home/adam/x"),
        ("/home/ada.old", "/home/ada.old"),
        ("/mnt/home/ada/x", "/mnt/home/ada/x"),
    ],
)
def test_home_is_a_tilde(text: str, shown: str) -> None:
    assert machine.without_home({"a": [text], text: 1}, ("/home/ada",)) == {"a": [shown], shown: 1}


def test_no_home_is_not_the_root_folder() -> None:
    assert "/" not in machine.homes({"HOME": "/"}) and "" not in machine.homes({"HOME": "/"})


def test_imports_of_a_program(tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text(
        textwrap.dedent(
            """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import jax
            def later():
                import cupy
            try:
                import tensorflow as tf
            except ImportError:
                import numba.cuda
            from . import mine
            import torch, torch
            with open("x"): from pycuda import autoinit
            class Net:
                import rmm
            """
        )
    )
    found = script.read(str(program))
    names = [name for name, _ in found.imports if not name.startswith("typing")]
    assert names == ["tensorflow", "numba.cuda", "torch", "pycuda", "pycuda.autoinit", "rmm", "cupy"]
    assert dict(found.imports)["tensorflow"] == 8


@pytest.mark.parametrize(
    ("source", "error"), [(b"import (", "SyntaxError"), (b"\0", ""), (None, "FileNotFoundError"), (b"\xff", "")]
)
def test_a_program_that_cannot_be_read(tmp_path: Path, source: bytes | None, error: str) -> None:
    program = tmp_path / "a.py"
    if source is not None:
        program.write_bytes(source)
    found = script.read(str(program))
    assert found.error is not None and found.error.startswith(error)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("libcudart.so.12: cannot open shared object file: No such file or directory", ("libcudart.so.12",)),
        (
            "W external/local_xla/xla/tsl/platform/default/dso_loader.cc:60] Could not load dynamic library "
            "'libcudnn.so.9'; dlerror: libcudnn.so.9: cannot open shared object file: No such file or directory; "
            "LD_LIBRARY_PATH: /usr/local/cuda/lib64",
            ("libcudnn.so.9",),
        ),
        (
            "Could not load dynamic library 'libcusolver.so.11'; dlerror: libnvJitLink.so.12: cannot open shared "
            "object file: No such file or directory",
            ("libcusolver.so.11", "libnvJitLink.so.12"),
        ),
        ("Could not load library libcudnn_cnn_infer.so.8. Error: libnvrtc.so: cannot open shared object file: No such "
         "file or directory", ("libcudnn_cnn_infer.so.8", "libnvrtc.so")),
        (
            "Unable to load any of {libcudnn_graph.so.9.1.0, libcudnn_graph.so.9.1, libcudnn_graph.so.9, "
            "libcudnn_graph.so}",
            ("libcudnn_graph.so.9",),
        ),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.12.1.", ("libnvrtc-builtins.so.12.1",)),
        ('DynamicLibNotFoundError: Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file',
         ("libnvrtc.so.13",)),
        ("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open shared object file",
         ("libnvrtc.so.12",)),
        ("RuntimeError: Unable to load cuDNN. Is it installed?", ("libcudnn.so",)),
        ("RuntimeError: Unable to load CUDA. Is it installed?", ("libcudart.so",)),
        ("Successfully opened dynamic library libcudart.so.12", ()),
        ("No module named 'libfoo.so'", ()),
    ],
)  # fmt: skip
def test_libraries_that_could_not_be_opened(text: str, names: tuple[str, ...]) -> None:
    assert libraries_not_opened([text, text]) == names


LOGGED = (
    "I0000 00:00:1795.5 926 dso_loader.cc:59] Successfully opened dynamic library libcudart.so.12",
    "2024-03-18 00:32:05.073: I external/local_tsl/dso_loader.cc:59] Successfully opened dynamic library libcudnn.so.9",
    "I0000 00:00:1795.5 926 port.cc:153] oneDNN custom operations are on.",
    "2024-03-18 00:32:05.073: I tensorflow/core/cpu_feature_guard.cc:1] This binary is optimized",
    "To enable the following instructions: AVX2",
    "W0000 00:00:1795.5 926 gpu_device.cc:2342] Cannot dlopen some GPU libraries.",
    "E0000 00:00:1795.5 926 cuda_fft.cc:477] Unable to register cuFFT factory",
    "Traceback (most recent call last):",
)


@pytest.mark.parametrize(("level", "count"), [(0, 6), (1, 3), (2, 2), (3, 1)])
def test_what_the_user_has_silenced_is_not_told(level: int, count: int) -> None:
    assert answers.visible_lines(LOGGED, level) == LOGGED[-count:]


@pytest.mark.parametrize(
    ("given", "level"), [({}, 0), ({"TF_CPP_MIN_LOG_LEVEL": "2"}, 2), ({"TF_CPP_MIN_LOG_LEVEL": "x"}, 0)]
)
def test_the_level_of_tensorflows_messages(given: dict[str, str], level: int) -> None:
    assert machine.tensorflow_log_level(given) == level


class Pool:
    def malloc(self, size: int) -> None: ...


def rmm_cupy_allocator(size: int) -> None: ...


def cupy(allocator: Any, default: Pool) -> dict[str, Any]:
    return {"cupy": Namespace(cuda=Namespace(get_allocator=lambda: allocator), get_default_memory_pool=lambda: default)}


def test_allocators_that_stand_in_for_a_frameworks_own() -> None:
    pool = Pool()
    assert this_process.allocators({}) == {}
    assert this_process.allocators(cupy(pool.malloc, pool)) == {}
    assert this_process.allocators(cupy(Pool().malloc, pool)) == {"cupy": f"{__name__}.Pool"}
    assert this_process.allocators(cupy(rmm_cupy_allocator, pool)) == {"cupy": f"{__name__}.rmm_cupy_allocator"}
    assert this_process.allocators({"cupy": Namespace()}) == {}, "one that is being imported"
    for backend, told_as in (("native", {}), ("cudaMallocAsync", {"torch": "cudaMallocAsync"})):
        memory = Namespace(get_allocator_backend=lambda backend=backend: backend)
        torch = Namespace(_C=Namespace(_cuda_getAllocatorBackend=None))
        assert this_process.allocators({"torch": torch, "torch.cuda.memory": memory}) == told_as
    driver = Namespace(_memory_manager=Pool, NumbaCUDAMemoryManager=str)
    assert this_process.allocators({"numba.cuda.cudadrv.driver": driver}) == {"numba": f"{__name__}.Pool"}
    driver._memory_manager = str
    assert this_process.allocators({"numba.cuda.cudadrv.driver": driver}) == {}


@pytest.mark.parametrize(
    ("listed", "active", "current", "held"),
    [
        ({os.getpid(): 5 * GIB}, True, None, {UUID: 5 * GIB}),
        ({os.getpid(): None}, True, None, {UUID: None}),
        ({1: 5 * GIB}, True, None, {UUID: None}),
        ({1: 5 * GIB}, None, None, {UUID: None}),
        ({1: 5 * GIB}, False, 0, {UUID: None}),
        ({1: 5 * GIB}, False, None, {}),
    ],
)
def test_a_context_that_nvml_does_not_list_is_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch, listed: Any, active: bool | None, current: int | None, held: Any
) -> None:
    """In a container NVML lists the host's PIDs, and PyCUDA's own context is no primary one."""
    monkeypatch.setattr(this_process.Nvml, "processes", lambda self, uuid: listed)
    monkeypatch.setattr(this_process.contexts, "ordinals", lambda: {UUID: 0})
    monkeypatch.setattr(this_process.contexts, "active", lambda ordinal: active)
    monkeypatch.setattr(this_process.contexts, "current", lambda: current)
    assert this_process._context_bytes([UUID]) == held


@pytest.mark.parametrize("executable", [None, ""])
def test_a_python_inside_of_another_program(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(FactsError, match="has no executable that could start processes\n    fix: run"):
        gather.facts(None, frameworks=["torch"], timeout=30, this_process=True)


def test_what_may_be_a_secret_is_left_out() -> None:
    secrets = (
        "CUDA_password", "CUDA_PIN", "CUPY_login", "JAX_AUTH", "KERAS_apikey", "NCCL_PW", "NVIDIA_API", "TF_CRED",
        "TORCH_PASSPHRASE", "XLA_PWD", "TF_CLI_CONFIG_FILE", "TF_VAR_x", "MEMGUARD_TOKEN",
    )  # fmt: skip
    kept = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MODULE_LOADING",
        "NCCL_APIS",
        "CUDA_POWER",
        "TF_MAPPING",
        "CUDA_MPS_PIPE_DIRECTORY",
    )
    given = {**dict.fromkeys(secrets, "s3cret"), **dict.fromkeys(kept, "1")}
    found = machine.environment({**given, "CC": "/usr/bin/gcc -DPASSWORD=s3cret", "CXX": "", "HOME": "/root"})
    assert found == {**dict.fromkeys(kept, "1"), "CC": "/usr/bin/gcc", "CXX": ""}


def test_users_of_urls_are_blanked_everywhere() -> None:
    value = {"a": ["https://me:s3cret@host/x and http://tok3n@b/", "//u:p@ss@h"], "//a:b@c": "a@b.c //x/y@z"}
    assert machine.without_home(value, ()) == {
        "a": ["https://***@host/x and http://***@b/", "//***@h"],
        "//***@c": "a@b.c //x/y@z",
    }


def test_bytes_that_are_no_text_can_be_written_and_read_again(site: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe")
    given = environ(site, TF_X=odd, PATH=os.environ["PATH"])
    found = gathered(site, frameworks=["torch"], environ=given, script=str(site / f"{odd}.py"))
    assert found.environment["TF_X"] == "\\udcff\\udcfe"
    assert found.script is not None and found.script.path.endswith("\\udcff\\udcfe.py")
    assert Facts.from_json(found.to_json().encode()) == found


def test_more_than_anybody_has_is_cut_to_what_can_be_read_again(site: Path) -> None:
    (site / "torch" / "__init__.py").write_text(
        "import sys\nfor n in range(3000): print(chr(0x4e00 + n) * 900, file=sys.stderr)\nraise ValueError('x' * 99999)"
    )
    given = environ(site, **{f"TF_{number}": "x" * 3000 for number in range(300)})
    found = gathered(site, frameworks=["torch"], environ=given)
    assert Facts.from_json(found.to_json()) == found
    probe = found.frameworks["torch"].probe
    assert probe is not None and probe.failed is not None and len(probe.said) > 50


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seconds": {"total": float("nan")}}, "seconds.total: no size, time or count"),
        ({"seconds": {"total": float("inf")}}, "seconds.total: no size, time or count"),
        ({"driver": {"cuda": {"version": -1}}}, "driver.cuda.version: no size"),
        ({"label": "x" * 4001}, "label: more than 4000 characters"),
        ({"packages": {str(number): "" for number in range(4097)}}, "packages: more than 4096 entries"),
        ({"environment": {"x" * 4001: ""}}, "environment: a name of more than"),
        ({"driver": {"pci": ["x"] * 4097}}, "driver.pci: more than 4096 entries"),
        ({"frameworks": {"torch": {"probe": {"said": ["x" * 601]}}}}, "torch.probe.said: a line of more than 600"),
        ({"frameworks": {"torch": {"missing": ["x"] * 65}}}, "torch.missing: more than 64"),
        ({"label": "x" * (16 << 20)}, "it is larger than 16 MiB"),
    ],
)
def test_facts_that_no_machine_gave_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(FactsError, match=why):
        Facts.from_json(json.dumps({"memguard_facts": 1, **changes}))


def test_what_a_file_of_facts_holds_is_said_in_one_short_line() -> None:
    with pytest.raises(FactsError) as raised:
        Facts.from_json(json.dumps({"memguard_facts": 1, "seconds": {"\x1b[2J\n" + "x" * 3000: -1}}))
    first, fix = str(raised.value).split("\n")
    assert first.startswith("facts: seconds.?[2J?xxx") and len(first) < 600 and first.isprintable()
    assert fix.startswith("    fix: ")


def test_a_file_that_says_nothing_is_none_of_facts() -> None:
    with pytest.raises(FactsError, match="memguard_facts: Field required"):
        Facts.from_json("{}")


def test_a_program_of_a_thousand_branches(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    branches = "".join(f"elif x == {n}:\n    import m{n}\n" for n in range(2000))
    program.write_text(f"if x:\n    import torch\n{branches}else:\n    import jax\nimport cupy\n")
    found = script.read(str(program)).imports
    assert [name for name, _ in found] == ["torch", *(f"m{n}" for n in range(2000)), "jax", "cupy"]


def test_what_is_no_program_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert script.read(str(tmp_path / "fifo")).error == "OSError: it is not a regular file"
    assert script.read("/dev/zero").error == "OSError: it is not a regular file"
    (tmp_path / "large.py").write_text("import torch\n" + "#" * (1 << 22))
    assert script.read(str(tmp_path / "large.py")).error == "ValueError: larger than 4 MiB: not read"


def test_a_program_in_a_folder_that_was_deleted(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = gathered(site, frameworks=["cupy"], script="train.py")
    assert found.script is not None and found.script.error == "FileNotFoundError: No such file or directory"


def test_a_python_that_does_not_start_is_named_with_what_it_said(site: Path, tmp_path: Path) -> None:
    (site / "sitecustomize.py").write_text("import os, sys\nprint('KeyError: 7', file=sys.stderr); os._exit(1)")
    command = (
        f"{sys.executable}, ended with 1 after [0-9.]+ s: KeyError: 7\n    fix: `{sys.executable} -c pass` must work"
    )
    with pytest.raises(FactsError, match=command):
        gathered(site)
    (site / "sitecustomize.py").unlink()
    (site / "json.py").write_text("raise ValueError('mine')")
    with pytest.raises(FactsError, match=f"ValueError: mine\n    fix: rename json.py in {site}: it hides"):
        gathered(site)


def test_a_text_that_begins_a_library_s_name_again_and_again_is_soon_read() -> None:
    started = time.process_time()
    assert libraries_not_opened(["lib" * 40000]) == ()
    assert time.process_time() - started < 3
