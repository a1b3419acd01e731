"""Probes run to their end, whatever the framework in them does, and what was read until then is kept."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from doctor_processes import TORCH, environ, run, write

import memguard
from memguard._devices import proc
from memguard._tools.doctor.collect import answers, processes
from memguard._tools.doctor.collect.gather import PROBES
from memguard._tools.doctor.collect.processes import lines, watch
from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Facts, FrameworkFacts
from memguard._tools.doctor.finding import Severity
from memguard._tools.doctor.probes import main

IMPORTED, USED = 0, 1


def torch(tmp_path: Path, bad: str = "", when: int = USED, timeout: float = 30) -> FrameworkFacts:
    """What is told of a PyTorch that runs `bad` when it is imported, or when a tensor is made."""
    body = "import os, signal, sys, time\n" + "".join(f"    {line}\n" for line in bad.splitlines())
    hook = f"def _bad():\n    {body}\n"
    source = hook + TORCH.replace("def ones(*shape, device): return", "def ones(*shape, device): _bad(); return")
    if when == IMPORTED:
        source = f"{hook}\n_bad()\n{TORCH}"
    return answers.framework({}, run(environ(write(tmp_path, "torch", source)), "torch", timeout=timeout))


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone(path: Path) -> bool:
    """Whether the process whose number is in the file ends."""
    pid = int(path.read_text())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_framework_that_works(tmp_path: Path) -> None:
    found = torch(tmp_path)
    assert found.probe is not None
    assert [stage.name for stage in found.probe.stages] == ["import", "devices", "compute"]
    assert found.probe.failed is None
    assert (found.probe.exit, found.probe.signal, found.probe.hung) == (0, None, False)
    assert (found.version, found.cuda, found.cudnn, found.gpus) == ("2.11.0+cu130", "13.0", "9.19.0", 1)
    assert (found.multiprocessors, found.architectures) == ((132,), ("sm_90",))
    assert found.path == str(tmp_path / "torch" / "__init__.py")


def test_an_import_that_fails_is_told_with_the_library_that_it_lacks(tmp_path: Path) -> None:
    text = "libcudart.so.12: cannot open shared object file: No such file or directory"
    found = torch(tmp_path, f"raise ImportError({text!r})", IMPORTED)
    assert found.probe is not None and found.probe.failed is not None
    assert (found.probe.failed.name, found.probe.failed.error) == ("import", text)
    assert found.probe.failed.kind == "builtins.ImportError"
    assert found.missing == ("libcudart.so.12",)


def test_what_an_error_arose_from_is_told_too(tmp_path: Path) -> None:
    bad = "try: raise OSError('libnvrtc.so.13 is not there')\nexcept OSError as e: raise ValueError('no') from e"
    found = torch(tmp_path, bad)
    assert found.probe is not None and found.probe.failed is not None
    assert found.probe.failed.error == "no (from OSError: libnvrtc.so.13 is not there)"


def test_a_crash_keeps_what_was_read_before(tmp_path: Path) -> None:
    found = torch(tmp_path, "os.kill(os.getpid(), signal.SIGFPE); time.sleep(9)")
    assert found.probe is not None
    assert (found.probe.signal, found.probe.exit, found.probe.hung) == ("SIGFPE", None, False)
    assert [stage.name for stage in found.probe.stages] == ["import", "devices"]
    assert found.multiprocessors == (132,)
    assert any("Fatal Python error" in line for line in found.probe.said)


@pytest.mark.parametrize("asked", [True, False], ids=["it can be asked where", "it blocks every signal"])
def test_a_probe_that_hangs_is_stopped_and_told(tmp_path: Path, asked: bool) -> None:
    library = tmp_path / "libcudart.so.13"
    library.write_bytes(b"\0" * 4096)
    bad = f"import mmap; f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
    started = time.monotonic()
    blocked = "set(range(1, 65)) - {signal.SIGUSR1}" if asked else "range(1, 65)"
    found = torch(tmp_path, bad + f"signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})\ntime.sleep(60)", timeout=4)
    assert time.monotonic() - started < 30
    assert found.probe is not None
    assert (found.probe.hung, found.probe.signal) == (True, None)
    assert [stage.name for stage in found.probe.stages] == ["import", "devices"]
    assert found.probe.libraries == (str(library),)  # mapped after the last step: read from outside
    assert not asked or any("in _bad" in line for line in found.probe.said), "where it hangs is said"


def test_a_hang_at_the_end_is_one_too(tmp_path: Path) -> None:
    found = torch(tmp_path, "import atexit; atexit.register(time.sleep, 60)", timeout=4)
    assert found.probe is not None and found.probe.hung
    assert [stage.name for stage in found.probe.stages] == ["import", "devices", "compute"]


def test_a_crash_at_the_end_is_one_too(tmp_path: Path) -> None:
    found = torch(tmp_path, "import atexit; atexit.register(os.abort)")
    assert found.probe is not None and found.probe.signal == "SIGABRT"
    assert [stage.name for stage in found.probe.stages] == ["import", "devices", "compute"]


@pytest.mark.parametrize(("bad", "code", "kind"), [("sys.exit(3)", 0, "builtins.SystemExit"), ("os._exit(3)", 3, None)])
def test_a_framework_that_ends_the_process(tmp_path: Path, bad: str, code: int, kind: str | None) -> None:
    found = torch(tmp_path, bad, IMPORTED)
    assert found.probe is not None and found.probe.exit == code
    assert (found.probe.failed.kind if found.probe.failed else None) == kind


GARBAGE = r"""
for fd in range(3, 30):
    try:
        os.write(fd, b'\xff\x00 nonsense\n[1]\n{"facts": 3, "stage": 4, "of": {}}\n{"stage": "x", "seconds": "long"}\n')
        os.write(fd, b'{"facts": {"gpus": "many", "unheard": 1}, "of": ""}\n{"libraries": [1]}\n')
    except OSError:
        pass
"""


def test_garbage_on_the_pipe_is_passed_over(tmp_path: Path) -> None:
    found = torch(tmp_path, GARBAGE)
    assert found.probe is not None and found.probe.failed is None
    assert found.version == "2.11.0+cu130"
    assert "compute" in [stage.name for stage in found.probe.stages]


def test_a_report_cut_short_keeps_what_was_whole(tmp_path: Path) -> None:
    bad = "\n".join(
        (
            "for fd in range(3, 30):",
            '    try: os.write(fd, b\'{"facts": {"version": "9.9\')',
            "    except OSError: pass",
            "os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    found = torch(tmp_path, bad)
    assert found.probe is not None and found.probe.signal == "SIGKILL"
    assert (found.version, found.gpus) == ("2.11.0+cu130", 1)


def test_a_child_that_outlives_its_probe_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    bad = (
        "import subprocess; p = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        f"open({str(note)!r}, 'w').write(str(p.pid))"
    )
    started = time.monotonic()
    found = torch(tmp_path, bad)
    assert time.monotonic() - started < 15
    assert found.probe is not None and not found.probe.hung and found.probe.exit == 0
    assert gone(note)


def test_at_the_time_out_children_in_sessions_of_their_own_go_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    bad = (
        "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    found = torch(tmp_path, bad, timeout=4)
    assert found.probe is not None and found.probe.hung
    assert gone(note)


def test_a_torrent_of_messages_is_bounded_and_holds_nothing_up(tmp_path: Path) -> None:
    names = "'first ' + 'x' * 1000, *(chr(0x4e00 + i) * 100 for i in range(3000)), 'the last'"
    found = torch(tmp_path, f"for text in ({names}): print(text, file=sys.stderr)")
    assert found.probe is not None and found.probe.failed is None
    said = found.probe.said
    assert len(said) == 200 and max(map(len, said)) == 400
    assert said[0].startswith("first") and said[-1] == "the last"


def test_messages_are_told_once_however_their_numbers_change() -> None:
    said = lines(b"I0000 17952.5 port.cc] on\n\nI0000 17953.1 port.cc] on\n\x1b[1mbold\x1b[0m\x07\n  \nother \xff\n")
    assert said == ("I0000 17952.5 port.cc] on", "bold", "other \ufffd")


def test_stop_ends_a_probe_that_runs(tmp_path: Path) -> None:
    site = write(tmp_path, "torch", "import time\ntime.sleep(60)")
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    started = time.monotonic()
    run(environ(site), "torch", stop=stop)
    assert time.monotonic() - started < 30


def test_a_process_that_cannot_be_killed_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in a driver that does not answer: its memory map may not be read either."""
    write(tmp_path, "torch", "import time\ntime.sleep(60)")
    killed, over = list[int](), threading.Event()
    with monkeypatch.context() as stuck:
        stuck.setattr(processes, "_KILL_WAIT", 0.2)
        stuck.setattr(os, "killpg", lambda group, number: killed.append(group))
        stuck.setattr(processes, "_kill_marked", lambda mark: None)
        stuck.setattr(os, "kill", lambda pid, number: None)
        stuck.setattr(processes, "libraries", lambda pid: [over.wait(60)][:0])
        started = time.monotonic()
        with pytest.warns(ResourceWarning, match="still running"):  # of subprocess, whose process is left
            ended = run(environ(tmp_path), "torch", timeout=1)
        assert time.monotonic() - started < 30
    over.set()
    assert (ended.hung, ended.exit, ended.signal, ended.libraries) == (True, None, None, ())
    os.killpg(killed[0], 9)


@pytest.mark.parametrize("mine", ["torch.py", "torch/__init__.py"])
@pytest.mark.parametrize("script", [False, True], ids=["the current folder", "the program's"])
def test_a_file_that_a_program_would_import_instead_is_found_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, script: bool
) -> None:
    site = write(tmp_path / "site", "torch", TORCH)
    folder = tmp_path / "project"
    (folder / mine).parent.mkdir(parents=True)
    (folder / mine).write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nnotes = 'mine'")
    monkeypatch.chdir(tmp_path if script else folder)
    first = str(folder) if script else None
    inventory = answers.installed(run(environ(site), "inventory", first=first))
    assert inventory.path("torch") == str(folder / mine)
    found = answers.framework(
        {**inventory.frameworks["torch"], "distributions": {"torch": "2.11.0"}, "folder": str(site)},
        run(environ(site), "torch", first=first),
    )
    assert found.path == str(folder / mine) and found.version == "2.11.0+cu130"
    assert found.probe is not None and found.probe.failed is None
    assert not (tmp_path / "was run").exists()
    (finding,) = (one for one in examine(Facts(frameworks={"torch": found})) if one.name == "unexpected-path")
    assert finding.severity is (Severity.ERROR if mine == "torch.py" else Severity.WARNING)
    assert str(folder / mine) in finding.remedy


def test_a_folder_without_a_module_and_what_is_not_installed_are_no_shadow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write(tmp_path / "site", "torch", TORCH)
    (tmp_path / "torch").mkdir()  # data: `import` takes the package further down the path
    (tmp_path / "jax.py").write_text("")
    monkeypatch.chdir(tmp_path)
    inventory = answers.installed(run(environ(site), "inventory"))
    assert inventory.path("torch") == str(site / "torch" / "__init__.py")
    installed = importlib.util.find_spec("jax") is not None  # then the module would be a shadow
    assert inventory.path("jax") == (str(tmp_path / "jax.py") if installed else None)
    safe = answers.installed(run(environ(site, PYTHONSAFEPATH="1"), "inventory"))
    assert safe.path("torch") == inventory.path("torch")


def distribution(site: Path, name: str, version: str, *files: str, **others: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in (*files, "a/torch/__init__.py")))
    for file, text in others.items():
        (folder / file.replace("_json", ".json")).write_text(text)


def test_what_is_installed_is_told_without_an_import(tmp_path: Path) -> None:
    site = write(tmp_path / "lib", "torch", "raise SystemExit('imported')")
    write(site, "tensorflow", "raise SystemExit('imported')")
    distribution(site, "torch", "2.11.0", "torch/__init__.py")
    distribution(site, "torchmetrics", "1.0", "torchmetrics/__init__.py")
    distribution(site, "tensorflow", "2.21.0", "tensorflow/__init__.py")
    distribution(site, "tensorflow_cpu", "2.20.0", "tensorflow/__init__.py")
    distribution(site, "Nvidia_Cublas.cu12", "12.9")
    distribution(site, "secret-project", "1.0")
    distribution(site, "pycuda", "2026.1", direct_url_json='{"dir_info": {"editable": true}}')
    distribution(tmp_path / "later", "torch", "1.0", "torch/__init__.py")
    both = f"{site}{os.pathsep}{tmp_path / 'later'}"
    found = answers.installed(run({**environ(site), "PYTHONPATH": both}, "inventory"))
    assert found.packages["torch"] == "2.11.0", "the first on the path, as `import` has it"
    torch, tensorflow = found.frameworks["torch"], found.frameworks["tensorflow"]
    assert (torch["distributions"], torch["folder"]) == ({"torch": "2.11.0"}, str(site))
    assert tensorflow["distributions"] == {"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"}
    assert found.path("torch") == str(site / "torch" / "__init__.py")
    assert found.packages["nvidia-cublas-cu12"] == "12.9" and "secret-project" not in found.packages
    pycuda = found.frameworks["pycuda"]
    assert pycuda["distributions"] == {"pycuda": "2026.1"} and "folder" not in pycuda, "its modules are elsewhere"
    assert found.executable == sys.executable


def test_another_distributions_memguard_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # away from a checkout
    site = write(tmp_path / "lib", "memguard", "raise SystemExit('imported')")
    origin = '{"url": "file:///src/memguard", "dir_info": {"editable": true}}'
    distribution(site, "memguard-gpu", "0.1.0", "memguard.pth", direct_url_json=origin)
    distribution(site, "ml-memguard", "0.5.0", "ml_memguard/__init__.py")
    before = answers.installed(run(environ(site), "inventory")).namesakes
    assert before is None or "ml-memguard" not in before.distributions, "its package has another name"
    distribution(site, "memguard", "0.1.0", "memguard/__init__.py")
    found = answers.installed(run(environ(site), "inventory")).namesakes
    assert found is not None and found.distributions == {"memguard": "0.1.0", "memguard-gpu": "0.1.0"}
    assert (found.own, found.origin, found.path) == (
        False,
        "/src/memguard",
        str(site / "memguard" / "__init__.py"),
    )
    (site / "memguard" / "__init__.py").write_text("raise SystemExit('imported')  # memguard._oom.hooks")
    found = answers.installed(run(environ(site), "inventory")).namesakes
    assert found is not None and found.own


@pytest.mark.parametrize("last", ["memguard", "memguard-gpu"])
def test_the_memguard_that_was_installed_last_is_the_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Both are in one folder, so that files of both are there. What `import memguard` finds decides."""
    monkeypatch.chdir(tmp_path)
    contents = {"memguard": "def own(): ...\n", "memguard-gpu": Path(memguard.__file__).read_text()}
    site = write(tmp_path / "lib", "memguard", contents[last])
    (site / "memguard" / "_tools" / "activation").mkdir(parents=True)
    (site / "memguard" / "_tools/activation" / "sitecustomize.py").touch()
    for name, content in contents.items():
        distribution(site, name, "0.1.0")
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        record = f"memguard/__init__.py,sha256={digest},{len(content)}\n"
        (site / f"{name}-0.1.0.dist-info" / "RECORD").write_text(record)
    found = answers.installed(run(environ(site), "inventory")).namesakes
    assert found is not None and found.own is (last == "memguard-gpu")
    [finding] = examine(Facts(namesakes=found))
    assert finding.name == "two-distributions"
    if last == "memguard-gpu":
        assert finding.severity is Severity.WARNING and "`import memguard` finds that of memguard-gpu" in finding.cause
    else:
        assert finding.severity is Severity.ERROR
        assert "finds the package of memguard, which is another project, and not" in finding.cause


def test_one_folder_by_two_names_is_one(tmp_path: Path) -> None:
    """As lib64 for lib: what `import` finds is where the distribution has put it."""
    site = write(tmp_path / "lib", "torch", TORCH)
    (tmp_path / "lib64").symlink_to(site)
    distribution(tmp_path / "meta", "torch", "2.11.0", "torch/__init__.py")
    (tmp_path / "meta" / "torch").symlink_to(site / "torch")
    both = f"{tmp_path / 'lib64'}{os.pathsep}{tmp_path / 'meta'}"
    torch = answers.installed(run({**environ(site), "PYTHONPATH": both}, "inventory")).frameworks["torch"]
    assert torch["path"] == str(tmp_path / "lib64" / "torch" / "__init__.py")
    assert torch["folder"] == str(tmp_path / "lib64")


def test_frameworks_in_one_process_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, "torch", "import sys\n" + TORCH)
    write(tmp_path, "cupy", "raise ImportError('not here')")
    order = ("cupy", "torch")
    found = answers.together(order, run(environ(tmp_path), *order))
    assert found.multiprocessors == {"torch": 132}
    assert [(stage.name, stage.error) for stage in found.probe.stages] == [("cupy", "not here"), ("torch", None)]


def test_a_crash_in_one_process_names_those_that_were_done(tmp_path: Path) -> None:
    write(tmp_path, "cupy", "raise ImportError('not here')")
    crash = "def ones(*shape, device): import os; os.abort()"
    write(tmp_path, "torch", TORCH.replace("def ones(*shape, device): return Tensor(1)", crash))
    found = answers.together(("cupy", "torch"), run(environ(tmp_path), "cupy", "torch"))
    assert found.probe.signal == "SIGABRT"
    assert [stage.name for stage in found.probe.stages] == ["cupy"]
    assert found.multiprocessors == {"torch": 132}, "it had told before it crashed"


def test_an_error_between_steps_is_told_as_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def probe(report):\n    with report.stage('import'): pass\n    raise KeyError('x')")
    spec = {"probes": ["mine"], "files": {"mine": str(mine)}, "path": [], "first": None}
    ended = watch((sys.executable, main.__file__), spec, environ(tmp_path), 30, threading.Event())
    found = answers.probe(ended)
    assert [(stage.name, stage.kind) for stage in found.stages] == [("import", None), ("probe", "builtins.KeyError")]
    assert found.exit == 0 and not found.said


def test_no_core_file_is_written(tmp_path: Path) -> None:
    note = tmp_path / "limit"
    bad = f"import resource; open({str(note)!r}, 'w').write(str(resource.getrlimit(resource.RLIMIT_CORE)))"
    torch(tmp_path, bad)
    assert note.read_text() == "(0, 0)"


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", True),
        ("/site/nvidia/cu13/lib/libcudart.so.13", True),
        ("/site/torchvision.libs/libcudart.faf08d9a.so.13", True),
        ("/site/nvidia/cudnn/lib/libcudnn_graph.so.9", True),
        ("/site/nvidia/cu13/lib/libnvJitLink.so.13", True),
        ("/usr/local/cuda-13.0/nvvm/lib64/libnvvm.so.4.0.0", True),
        ("/site/torch/lib/libc10_cuda.so", True),
        ("/site/tensorflow/libtensorflow_framework.so.2", True),
        ("/site/jax_plugins/xla_cuda13/xla_cuda_plugin.so", True),
        ("/site/pycuda/_driver.cpython-312-x86_64-linux-gnu.so", True),
        ("/site/cuda/bindings/driver.cpython-312-x86_64-linux-gnu.so", False),
        ("/site/numpy.libs/libscipy_openblas64_-61654e39.so", False),
        ("/site/pandas/_libs/lib.cpython-312-x86_64-linux-gnu.so", False),
        ("/site/torch/_C.cpython-312-x86_64-linux-gnu.so", False),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", False),
    ],
)
def test_which_mapped_files_are_told(path: str, counts: bool) -> None:
    assert bool(main.LIBRARY.search(path)) is counts


def test_versions_as_they_are_written() -> None:
    assert [main.ProbeReport.cudnn_version(number) for number in (91900, 90100, 8902)] == ["9.19.0", "9.1.0", "8.9.2"]
    assert [main.ProbeReport.cuda_version(number) for number in (13020, 12040, 11080)] == ["13.2", "12.4", "11.8"]


def test_probes_need_nothing_of_memguards() -> None:
    """They run in interpreters that have none of it."""
    files = {*Path(main.__file__).parent.glob("*.py"), *map(Path, PROBES["files"].values())}
    assert len(files) >= 9
    code = (
        "import ast, sys\n"
        "for name in sys.argv[1:]:\n"
        "    tree = ast.parse(open(name).read(), feature_version=(3, 8))\n"
        "    for node in tree.body:\n"
        "        for alias in getattr(node, 'names', ()):\n"
        "            module = getattr(node, 'module', None) or alias.name\n"
        "            assert module.partition('.')[0] in sys.stdlib_module_names, (name, module)\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, *map(str, files)], check=True)


def test_descendants() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 30 & wait"], start_new_session=True)
    try:
        deadline = time.monotonic() + 5
        while not proc.descendants("/", child.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(proc.descendants("/", child.pid) or ()) == 1
        assert child.pid in (proc.descendants("/", os.getpid()) or ())
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_a_hang_in_the_middle_of_an_import_is_no_crash(tmp_path: Path) -> None:
    """Reading the frames of threads that run crashes some: the process is asked, and its main thread says its own."""
    (tmp_path / "modules").mkdir()
    for number in range(200):
        (tmp_path / "modules" / f"m{number}.py").write_text("import os\ndef f(n): return f(n - 1) if n else 0\nf(50)")
    bad = (
        f"import importlib, sys, threading; sys.path.insert(0, {str(tmp_path / 'modules')!r})\n"
        "def spin(n): return spin(n - 1) if n else 0\n"
        "def often():\n"
        "    while True: spin(100)\n"
        "for _ in range(4): threading.Thread(target=often, daemon=True).start()\n"
        "while True:\n"
        "    for n in range(200):\n"
        "        sys.modules.pop(f'm{n}', None); importlib.import_module(f'm{n}')"
    )
    site = write(tmp_path, "torch", bad)
    for tenth in range(3):
        found = answers.framework({}, run(environ(site), "torch", timeout=3 + tenth / 10))
        assert found.probe is not None and (found.probe.hung, found.probe.signal) == (True, None)
        assert any("most recent call first" in line for line in found.probe.said)
        assert not any("Fatal Python error" in line for line in found.probe.said)


def test_one_that_was_stopped_by_the_user_is_not_asked_where_it_is(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    ended = run(environ(write(tmp_path, "torch", "import time\ntime.sleep(60)")), "torch", stop=stop)
    assert ended.hung and not ended.said


DAEMON = """
import os, signal, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    open({note!r}, 'w').write(str(os.getpid()))
    for fd in range(30):
        try: os.close(fd)
        except OSError: pass
    time.sleep(60)
    os._exit(0)
while not os.path.exists({note!r}) or not open({note!r}).read():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["", "time.sleep(60)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_daemon_of_its_own_does_not_outlive_the_probe(tmp_path: Path, end: str) -> None:
    note = tmp_path / "pid"
    run(environ(write(tmp_path, "torch", DAEMON.format(note=str(note)) + end)), "torch", timeout=2)
    assert gone(note)


def test_only_what_the_probe_started_is_ended() -> None:
    """Another probe's, and what has the variable as a part of something else."""
    mark = "MEMGUARD_PROBE=abc"
    kept = [
        subprocess.Popen(["sleep", "30"], env={"MEMGUARD_PROBE": "abcd"}),
        subprocess.Popen(["sleep", "30"], env={"OTHER": mark}),
    ]
    own = subprocess.Popen(["sleep", "30"], env={"MEMGUARD_PROBE": "abc"})
    try:
        assert list(processes._marked(mark.encode())) == [own.pid]
        processes._kill_marked("abc")
        assert own.wait(5) == -9 and all(process.poll() is None for process in kept)
    finally:
        for process in (*kept, own):
            process.kill()
            process.wait()


def test_one_that_is_only_just_starting_is_found() -> None:
    """The kernel shows an empty environment while it loads the program: of 3,000 read at once, 62 to 1,220 were."""
    for _ in range(300):
        process = subprocess.Popen(["sleep", "30"], env={"MEMGUARD_PROBE": "abc"})
        try:
            assert processes._environment(process.pid, time.monotonic() + 10) == b"MEMGUARD_PROBE=abc\0"
        finally:
            process.kill()
            process.wait()


def test_one_whose_environment_is_still_being_measured_is_found() -> None:
    """The kernel sets both of its ends to its begin, and then walks through it: thousands of variables take long."""
    environment = {f"A{number}": "x" * 10 for number in range(6000)}
    for _ in range(30):
        process = subprocess.Popen(["sleep", "30"], env=environment)
        try:
            assert processes._environment(process.pid, time.monotonic() + 10).count(b"\0") == 6000
        finally:
            process.kill()
            process.wait()


def test_one_that_is_about_to_start_another_program_is_found() -> None:
    """Asked at any moment of that: while it still has its parent's memory, while the new one is being filled."""
    slow = "import os, sys, time; time.sleep(float(sys.argv[1])); os.execve('/bin/sleep', ['sleep', '30'], {'A': 'b'})"
    for number in range(40):
        process = subprocess.Popen([sys.executable, "-IS", "-c", slow, str(number / 4000)], env={"C": "d"})
        try:
            deadline = time.monotonic() + 20
            while (found := processes._environment(process.pid, deadline)) == b"C=d\0":
                pass
            assert found == b"A=b\0"
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("name", "state", "flags", "code", "start", "end", "expected"),
    [
        ("loading", "R", 0x400000, 0, "0", "0", True),
        ("measured", "R", 0x400000, 0, "140726283145170", "140726283145170", True),
        ("laid out since", "S", 0x400000, 94044, "140726283145170", "140726283145192", True),
        ("has none", "S", 0x400000, 94044, "140726283145170", "140726283145170", False),
        ("a) S 1 (b", "R", 0x400000, 0, "0", "0", True),
        ("ended", "Z", 0x400000, 0, "0", "0", False),
        ("ending", "R", 0x40040C, 0, "0", "0", False),
        ("kthreadd", "S", 0x208040, 0, "0", "0", False),
        ("cut", "R", 0x400000, 0, "0", "", False),
        ("odd", "R", 0x400000, 0, "?", "?", False),
    ],
)
def test_who_may_have_an_environment_that_was_read_as_empty(
    name: str, state: str, flags: int, code: int, start: str, end: str, expected: bool
) -> None:
    """What has ended, a thread of the kernel, and a kernel that does not say are not waited for."""
    between = f"{' 0' * 17} {code}{' 0' * 22}"  # the end of the code is field 27
    stat = f"7 ({name}) {state} 1 7 7 0 -1 {flags}{between} {start} {end}{' 0' if end else ''}\n"
    assert processes._may_have_environment(stat.encode()) is expected


def test_what_has_no_environment_is_not_waited_for() -> None:
    without = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], env={}, stdin=-1, stdout=-1)
    assert without.stdout is not None
    begun = time.monotonic()
    try:
        assert without.stdout.readline() == b"\n"
        assert processes._environment(without.pid, begun + 60) == b""
    finally:
        without.kill()
        without.communicate()
    with pytest.raises(FileNotFoundError):
        processes._environment(without.pid, begun + 60)
    assert time.monotonic() < begun + 50


def test_an_orphan_ends_by_itself(tmp_path: Path) -> None:
    """The first module that it imports hangs."""
    (tmp_path / "contextlib.py").write_text("import time; time.sleep(60)")
    given = environ(tmp_path, MEMGUARD_PROBE="abc.1")
    with subprocess.Popen([sys.executable, "-S", main.__file__, "{}"], env=given) as orphan:
        assert orphan.wait(10) == -signal.SIGALRM


def test_standard_streams_that_are_closed_are_not_taken_for_the_report(tmp_path: Path) -> None:
    write(tmp_path, "torch", TORCH)
    code = (
        "import os, sys; os.close(0); os.close(1); os.close(2)\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from doctor_processes import environ, run\n"
        f"ended = run(environ(Path({str(tmp_path)!r})), 'torch')\n"
        f"open({str(tmp_path / 'note')!r}, 'w').write(repr([line.get('stage') for line in ended.reported]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    stages = [stage for stage in eval((tmp_path / "note").read_text()) if stage]
    assert stages == ["import", "devices", "compute"]


def test_where_somebody_else_takes_the_exit_code_it_is_unknown(tmp_path: Path) -> None:
    site = write(tmp_path, "torch", TORCH)
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        ended, bad = run(environ(site), "torch"), run(environ(site), "nosuchprobe")
        (site / "torch" / "__init__.py").write_text("import time; time.sleep(60)")
        hung = run(environ(site), "torch", timeout=1)
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert (ended.exit, ended.signal, ended.hung) == (None, None, False)
    assert answers.framework({}, ended).multiprocessors == (132,)
    assert (bad.exit, bad.signal) == (None, None)
    assert (hung.exit, hung.signal, hung.hung) == (None, None, True)


@pytest.mark.parametrize("when", [IMPORTED, USED])
def test_one_that_ends_early_without_an_error_is_told(tmp_path: Path, when: int) -> None:
    found = torch(tmp_path, "os._exit(0)", when)
    assert found.probe is not None
    assert (found.probe.exit, found.probe.failed, found.probe.complete) == (0, None, False)
    facts = Facts(frameworks={"torch": found})
    crashed = [finding for finding in examine(facts) if finding.name == "probe-crashed"]
    assert len(crashed) == 1
    step = "import" if when == IMPORTED else "compute"
    assert f"ended early with exit code 0, in the step {step}" in crashed[0].cause


def test_one_of_several_that_ends_early_without_an_error_is_told(tmp_path: Path) -> None:
    write(tmp_path, "cupy", "raise ImportError('not here')")
    write(tmp_path, "torch", "import os; os._exit(0)")
    found = answers.together(("cupy", "torch"), run(environ(tmp_path), "cupy", "torch"))
    assert (found.probe.exit, found.probe.complete) == (0, False)
