"""`memguard doctor` and `memguard run --doctor`: options, exit codes, and what goes to which stream."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click_runner
import pytest
from click.testing import CliRunner, Result

import memguard
from memguard import _budget
from memguard._base import findings
from memguard._devices import cuda_order
from memguard._tools.doctor.collect import gather
from memguard._tools.doctor.facts import (
    Cuda,
    CudaDevice,
    Driver,
    Facts,
    FrameworkFacts,
    NvmlFacts,
    Probe,
    Script,
    Stage,
    System,
)
from memguard.cli import main
from memguard.cli.support import program, signals
from memguard.errors import FactsError

ROOT = Path(__file__).parents[2]
RUNNER = click_runner.apart()
UUID = "GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53"
BUDGET = "version: 1\nframeworks:\n  jax: {share: 50%}\n"
STAGES = tuple(Stage(name=name, seconds=1.0) for name in ("import", "devices", "compute"))
HEALTHY = Facts(
    driver=Driver(
        module="580.159.04",
        cuda=Cuda(
            path="/usr/lib/libcuda.so.580.159.04",
            version=13000,
            init="CUDA_SUCCESS",
            devices=(CudaDevice(ordinal=0, uuid=UUID, name="NVIDIA H200", capability=(9, 0), multiprocessors=132),),
        ),
    ),
    frameworks={
        "jax": FrameworkFacts(version="0.11.2", gpu=True, gpus=1, probe=Probe(stages=STAGES, seconds=3.0, exit=0)),
        "torch": FrameworkFacts(version="2.11.0", gpu=True, gpus=1, probe=Probe(stages=STAGES, seconds=3.0, exit=0)),
    },
    seconds={"jax": 3.0, "torch": 3.0},
)
FRACTIONS = {"XLA_CLIENT_MEM_FRACTION": ".3", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}
NO_JAX = {"jax": HEALTHY.frameworks["jax"].model_copy(update={"gpus": 0}), "torch": HEALTHY.frameworks["torch"]}
NO_DRIVER = Driver(
    cuda=Cuda(error="libcuda.so.1: cannot open shared object file: No such file or directory"),
    nvml=NvmlFacts(error="NVMLError_LibraryNotFound"),
)
SICK = HEALTHY.model_copy(update={"environment": FRACTIONS, "frameworks": NO_JAX})
"""An error: xla-fractions."""


class Gathered:
    """Stands in for `gather.facts`; what it was asked for, and what it gives."""

    def __init__(self) -> None:
        self.facts, self.asked, self.error = HEALTHY, [], None  # type: ignore[var-annotated]

    def __call__(self, budget: Any, **asked: Any) -> Facts:
        self.asked.append((budget, asked))
        if self.error is not None:
            raise self.error
        found: Facts = self.facts
        return found


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gathered:
    stand_in = Gathered()
    monkeypatch.setattr(gather, "facts", stand_in)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget.yaml").write_text(BUDGET)
    return stand_in


def doctor(*arguments: str, stdin: str | None = None) -> Result:
    return RUNNER.invoke(main, ["doctor", *arguments], input=stdin)


# Exit codes


def test_healthy_is_0_and_findings_are_1(gathered: Gathered) -> None:
    done = doctor()
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("memguard doctor: healthy: jax and torch work on NVIDIA H200\n")
    gathered.facts = SICK
    done = doctor()
    assert (done.exit_code, done.stderr) == (1, "")
    assert done.stdout.startswith(
        "memguard doctor: 1 error: jax does not work on the GPU; torch works on NVIDIA\n  H200\n"
    )
    assert "error  xla-fractions: jax\n" in done.stdout
    warned = {"process": {"modules": ["torch", "pycuda"], "foreign_context": True}}
    gathered.facts = Facts.model_validate({**HEALTHY.model_dump(), **warned})
    assert doctor().exit_code == 1
    gathered.facts = HEALTHY.model_copy(update={"environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}})
    done = doctor()
    assert done.exit_code == 0 and "info  allocator-swap: torch" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "absent.yaml"], "absent.yaml: there is no such file"),
        (["budget.yaml"], "the budget is an option: memguard doctor -c budget.yaml"),
        (["--json", "--dump-facts"], "choose one"),
        (["--dump-facts", "f.json"], "--dump-facts writes to stdout: memguard doctor --dump-facts > f.json"),
        (["--ignore", "second-contexts"], "no finding has the name 'second-contexts'\n    fix: write second-context"),
        (["--framework", "pytorch"], "no framework has the name 'pytorch'; there are torch, tensorflow, cupy,"),
        (["--timeout", "0"], "0"),
        (["--frobnicate"], "No such option"),
        (["--facts", "absent.json"], "absent.json: No such file or directory\n    fix: check the path"),
        (["--facts", "budget.yaml"], "budget.yaml: Invalid JSON"),
        (["--facts", "."], "Is a directory"),
        (["--facts", "f.json", "-c", "budget.yaml"], "--facts FILE reads nothing of this machine"),
        (["--facts", "f.json", "--script", "a.py"], "--facts FILE reads nothing of this machine"),
        (["--facts", "f.json", "--framework", "jax"], "--facts FILE reads nothing of this machine"),
        (["--facts", "f.json", "--timeout", "60"], "--facts FILE reads nothing of this machine"),
        (["--timeout", "nan"], "'nan' is not a duration"),
        (["--facts", "/dev/zero"], "/dev/zero: it is larger than any facts (16 MiB)"),
        (["--script", "absent.py"], "absent.py: No such file or directory\n    fix: check the path"),
        (["--script", "-"], "-: No such file or directory"),
        (["--script", "."], ".: it is a folder\n    fix: name a Python file"),
        (["--script", "fifo"], "fifo: it is not a regular file"),
        (["--explain", "second-contexts"], "no finding has the name 'second-contexts'\n    fix: write second-context"),
    ],
)
def test_wrong_input_is_2(gathered: Gathered, arguments: list[str], said: str) -> None:
    os.mkfifo("fifo")
    done = doctor(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr and done.stdout == ""
    assert gathered.asked == []


def test_an_error_while_it_looks_is_never_1(gathered: Gathered) -> None:
    for error, code in ((FactsError("no"), 2), (memguard.DeviceError("no"), 3), (memguard.MemguardError("no"), 4)):
        gathered.error = error
        assert doctor().exit_code == code
    assert memguard.MemguardError.exit_code == 1  # of the one error, not of its class


def test_a_mistake_of_the_doctors_own_is_4_with_its_traceback(
    gathered: Gathered, capsys: pytest.CaptureFixture[str]
) -> None:
    gathered.error = ZeroDivisionError("oh")
    with pytest.raises(SystemExit) as ended:  # not click's runner: before 8.2 it loses what was not flushed
        main.main(["doctor"], prog_name="memguard")
    out, err = capsys.readouterr()
    assert ended.value.code == 4 and "ZeroDivisionError: oh" in err and out == ""


def test_no_framework_at_all_is_4_and_one_that_was_asked_for_1(gathered: Gathered) -> None:
    gathered.facts = Facts(system=System(executable="~/other/bin/python"))
    done = doctor()
    assert done.exit_code == 4
    assert done.stdout.startswith(
        "memguard doctor: None of PyTorch, TensorFlow, CuPy, JAX, PyCUDA and Numba is\n"
        "  installed for ~/other/bin/python: is it the right environment?\n"
    )
    gathered.facts = HEALTHY.model_copy(update={"frameworks": {**HEALTHY.frameworks, "cupy": FrameworkFacts()}})
    done = doctor("--framework", "cupy", "--framework", "jax", "--framework", "torch")
    assert done.exit_code == 1 and "; cupy is not installed for\n  this Python: is it the right" in done.stdout
    data = json.loads(doctor("-c", "budget.yaml", "--json").stdout)
    assert data["healthy"] is False and data["not_installed"] == ["cupy"] and data["findings"] == []


def test_findings_are_1_where_no_framework_is_installed_too(gathered: Gathered) -> None:
    gathered.facts = SICK.model_copy(update={"frameworks": {}, "driver": NO_DRIVER})
    done = doctor()
    assert done.exit_code == 1 and "error  driver-absent\n" in done.stdout


def test_what_is_left_out_is_not_called_healthy(gathered: Gathered) -> None:
    gathered.facts = SICK
    done = doctor("--ignore", "xla-fractions")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "memguard doctor: nothing found beyond what is left out (xla-fractions): jax does\n  not"
    )


# Options


def test_what_is_asked_for_is_passed_on(gathered: Gathered) -> None:
    doctor()
    budget, asked = gathered.asked.pop()
    assert budget is None and asked.pop("say") is None  # nobody looks on
    assert asked == {"frameworks": None, "timeout": 60.0, "script": None}
    Path("train.py").write_text("import torch\n")
    doctor("-c", "budget.yaml", "--framework", "jax", "--framework", "torch", "--timeout", "5", "--script", "train.py")
    budget, asked = gathered.asked.pop()
    assert budget == _budget.load("budget.yaml")
    assert (asked["frameworks"], asked["timeout"], asked["script"]) == (("jax", "torch"), 5.0, "train.py")
    doctor("-c", "budget.yaml")
    assert gathered.asked.pop()[0] == _budget.load("budget.yaml")


def test_findings_are_left_out_by_name_and_by_the_budget(gathered: Gathered) -> None:
    gathered.facts = SICK
    done = doctor("--ignore", "xla-fractions", "--ignore", "mig")
    assert done.exit_code == 0 and "left out: mig, xla-fractions" in done.stdout
    Path("budget.yaml").write_text(BUDGET + "doctor: {ignore: [xla-fractions]}")
    assert doctor("-c", "budget.yaml").exit_code == 0
    done = doctor("-c", "budget.yaml", "--ignore", "mig")
    assert done.exit_code == 0 and "left out: mig, xla-fractions" in done.stdout


def test_json(gathered: Gathered) -> None:
    gathered.facts = SICK
    done = doctor("--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["healthy"] is False
    assert [(f["name"], f["severity"], f["subject"]) for f in data["findings"]] == [("xla-fractions", "error", "jax")]
    assert data["probes"] == {"jax": 3.0, "torch": 3.0}


def test_facts_are_dumped_alone_and_give_the_same_findings_anywhere(gathered: Gathered, tmp_path: Path) -> None:
    gathered.facts = SICK
    dumped = doctor("--dump-facts")
    assert dumped.exit_code == 0 and Facts.from_json(dumped.stdout) == SICK
    (tmp_path / "f.json").write_text(dumped.stdout)
    gathered.facts, gathered.asked = HEALTHY, []
    for done in (doctor("--facts", "f.json"), doctor("--facts", "-", stdin=dumped.stdout)):
        assert done.exit_code == 1 and "error  xla-fractions: jax\n" in done.stdout
    again = doctor("--facts", "f.json", "--dump-facts")
    assert (again.exit_code, again.stdout) == (0, dumped.stdout)
    assert doctor("--facts", "f.json", "--ignore", "xla-fractions").exit_code == 0
    assert gathered.asked == []


def test_the_list_is_that_of_the_names(gathered: Gathered) -> None:
    done = doctor("--list")
    assert done.exit_code == 0 and tuple(done.stdout.splitlines()) == findings.names()
    assert gathered.asked == []


def test_the_list_and_a_page_as_json(gathered: Gathered) -> None:
    listed = json.loads(doctor("--list", "--json").stdout)
    assert listed["memguard_findings"] == 1
    assert listed["findings"] == [{"name": name, "page": f"docs/doctor/{name}.md"} for name in findings.names()]
    page = json.loads(doctor("--explain", "mig", "--json").stdout)
    assert page.pop("text") + "\n" == doctor("--explain", "mig").stdout
    assert page == {"memguard_finding": 1, "name": "mig", "page": "docs/doctor/mig.md"}


@pytest.mark.parametrize("name", findings.names())
def test_a_page_is_printed(gathered: Gathered, name: str) -> None:
    done = doctor("--explain", name)
    assert (done.exit_code, done.stderr) == (0, "")
    page = (ROOT / "docs" / "doctor" / f"{name}.md").read_text(encoding="utf-8")
    title = re.search(r'^title: "?(.+?)"?$', page, re.MULTILINE)
    assert title is not None and done.stdout.startswith(f"# {name}\n\n**{title[1]}.** ")
    assert done.stdout.endswith(page.rstrip().partition("\n## ")[2] + "\n") and "severity:" not in done.stdout
    assert gathered.asked == []


def test_a_page_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings, "PAGES", tmp_path)
    done = doctor("--explain", "mig")
    assert done.exit_code == 2 and done.stderr.startswith("memguard: the page of mig is not installed\n    fix: ")
    (tmp_path / "mig.md").write_text(
        "---\ntitle: Parts\nseverity: info\nsection: GPUs\norder: 1\n---\n\n# mig\n\n## Why\n"
    )
    assert doctor("--explain", "mig").stdout == "# mig\n\n**Parts.** Info.\n\n## Why\n"


def test_a_script_that_cannot_be_read_is_said(gathered: Gathered) -> None:
    Path("train.py").write_text("import torch\n")
    gathered.facts = HEALTHY.model_copy(update={"script": Script(path="train.py", error="SyntaxError: oh")})
    said = "memguard: train.py was not examined: SyntaxError: oh\n"
    for arguments in ([], ["--json"], ["--dump-facts"]):
        done = doctor("--script", "train.py", *arguments)
        assert (done.exit_code, done.stderr) == (0, said)


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    code = "from memguard.cli import main; main(prog_name='memguard')"
    environ = {**os.environ, "PYTHONPATH": str(Path(memguard.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environ, stderr=subprocess.PIPE, text=True, timeout=60, **more
    )


@pytest.mark.parametrize("arguments", [["--facts", "f.json", "--dump-facts"], ["--facts", "f.json"], ["--list"]])
def test_a_stdout_that_takes_nothing_is_2_and_a_line(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "f.json").write_text(HEALTHY.to_json())
    with open("/dev/full", "w") as full:
        done = command("doctor", *arguments, stdout=full, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "memguard: stdout cannot be written: No space left on device\n"
    done = command("doctor", *arguments, cwd=tmp_path, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (2, "memguard: stdout cannot be written: it is closed\n")


@pytest.mark.parametrize("option", ["--facts", "--script"])
@pytest.mark.parametrize("path", ["fifo", ".", "/dev/zero", "/dev/null", "/dev/stdin", "absent", "socket", "x" * 5000])
def test_what_is_no_regular_file_is_refused_at_once(gathered: Gathered, option: str, path: str) -> None:
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        done = doctor(option, path, stdin="{}")
    assert done.exit_code == 2 and "\n    fix: " in done.stderr and "Traceback" not in done.stderr
    assert gathered.asked == []


def test_facts_that_are_huge_are_refused_before_they_are_read(gathered: Gathered) -> None:
    with open("huge", "wb") as file:
        file.truncate(1 << 40)
    done = doctor("--facts", "huge")
    assert done.exit_code == 2 and "larger than any facts (16 MiB)" in done.stderr
    done = doctor("--facts", "-", stdin=" " * ((16 << 20) + 1))
    assert done.exit_code == 2 and "larger than any facts (16 MiB)" in done.stderr


# What lies in the current folder is not imported


PACKAGES = ("click", "pydantic", "pydantic_core", "yaml", "pynvml", "rich", "numpy", "memguard", "sitecustomize")
TORCH = "__version__ = '1'\nclass version: cuda = None\n"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for every module of the standard library and every package that is needed."""
    folder = tmp_path_factory.mktemp("hostile")
    names = [name for name in (*sys.stdlib_module_names, *PACKAGES) if name.isidentifier()]
    for name in names:
        text = f"open({str(folder / 'ran')!r}, 'a').write({name!r} + ' ')\nraise SystemExit('ran {name}')\n"
        (folder / f"{name}.py").write_text(text)
    assert len(names) > 280
    (folder / "site").mkdir()
    (folder / "site" / "torch.py").write_text(TORCH)
    (folder / "bin").mkdir()
    (folder / "bin" / "memguard").write_text("from memguard.cli import main\nmain(prog_name='memguard')\n")
    (folder / "b.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--framework", "torch"],
        ["doctor", "--framework", "torch", "--script", "json.py", "-c", "b.yaml"],
        ["doctor", "--framework", "torch", "--dump-facts"],
        ["plan", "b.yaml", "--device", "h200"],
        ["check", "b.yaml"],
        ["run", "--doctor", "-c", "b.yaml", "--", sys.executable, "-P", "-c", "0"],
        ["run", "--device", "h200", "-c", "b.yaml", "--", sys.executable, "-I", "-c", "0"],
    ],
    ids=lambda words: " ".join(words[:5:2]),
)
def test_no_command_imports_from_the_current_folder(hostile: Path, arguments: list[str]) -> None:
    (hostile / "ran").unlink(missing_ok=True)
    places = [str(Path(memguard.__file__).parents[1]), str(hostile / "site")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, str(hostile / "bin" / "memguard"), *arguments],
        cwd=hostile, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
    if arguments[0] == "doctor":
        assert "torch" in done.stdout, done.stderr


def test_the_child_that_asks_cuda_imports_nothing_of_it(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hostile / "ran").unlink(missing_ok=True)
    monkeypatch.chdir(hostile)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "" not in cuda_order.importable()
    cuda_order._ask_child()
    assert not (hostile / "ran").exists(), (hostile / "ran").read_text()


def test_a_program_under_run_imports_from_its_own_folder_as_ever(hostile: Path, tmp_path: Path) -> None:
    """What protects memguard's own processes does not reach the user's."""
    (tmp_path / "own_json.py").write_text("print('mine')")
    (tmp_path / "train.py").write_text("import sys, own_json; print(sys.path[0])")
    code = "import sys, own_json; print(sys.path[0])"
    for words in (["train.py"], ["-c", code], ["-m", "train"]):
        plain = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        under = command(
            "run", "--device", "h200", "-c", str(hostile / "b.yaml"), "--", sys.executable, *words,
            cwd=tmp_path, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert (under.returncode, under.stdout) == (0, plain.stdout) and "mine" in plain.stdout


def test_facts_from_a_stdin_that_is_closed(tmp_path: Path) -> None:
    done = command("doctor", "--facts", "-", cwd=tmp_path, preexec_fn=lambda: os.close(0))
    assert done.returncode == 2 and done.stderr.startswith("memguard: -: standard input is closed\n    fix: ")


SLEEPER = """\
import os, pathlib, time
path = pathlib.Path(os.environ["SLEEPER"])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    "arguments", [["doctor", "-c", "budget.yaml"], ["run", "--doctor", "--", sys.executable, "a.py"]]
)
def test_what_ends_it_ends_the_processes_that_it_started(
    tmp_path: Path, number: signal.Signals, arguments: list[str]
) -> None:
    """Real ones: a JAX whose import takes for ever."""
    (tmp_path / "budget.yaml").write_text(BUDGET)
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(SLEEPER)
    path = tmp_path / "pid"
    own = os.pathsep.join([str(tmp_path), str(Path(memguard.__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-c", "from memguard.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": own, "SLEEPER": str(path)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        probe = int(path.read_text())
        process.send_signal(number)
        if number == signal.SIGINT:
            process.send_signal(number)  # people press it twice
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number), said
    assert b"Traceback" not in said
    assert not os.path.exists(f"/proc/{probe}")


def test_handlers_are_put_back_and_what_is_ignored_stays_so() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit) as left, signals.unwinding():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert left.value.code == 143
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    with pytest.raises(KeyboardInterrupt), signals.unwinding():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        finally:  # the clean-up
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with signals.unwinding():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[2])
    with ThreadPoolExecutor() as pool:  # no thread but the main one may set handlers
        assert pool.submit(lambda: signals.unwinding().__enter__()).result() is None


# memguard.doctor


def test_one_name_is_a_name_and_not_its_letters(gathered: Gathered) -> None:
    report = memguard.doctor(frameworks="torch", ignore="mig", timeout=5)
    assert gathered.asked.pop()[1] == {"frameworks": ("torch",), "timeout": 5, "this_process": True}
    assert report.ignored == ("mig",)
    memguard.doctor(frameworks=["jax", "torch"], ignore={"mig"})
    assert gathered.asked.pop()[1]["frameworks"] == ("jax", "torch")
    memguard.doctor(frameworks=[])
    assert gathered.asked.pop()[1]["frameworks"] is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": 0}, "timeout is a number of seconds, above 0 and up to 86400, not 0\n    fix: timeout=60"),
        ({"timeout": math.nan}, "not nan"),
        ({"timeout": math.inf}, "not inf"),
        ({"timeout": "x"}, "not 'x'"),
        ({"timeout": None}, "not None"),
        ({"timeout": True}, "not True"),
        ({"frameworks": 5}, "frameworks is a list of names, not 5\n    fix: frameworks=['...']"),
        ({"ignore": [5]}, "ignore is a list of names, not [5]"),
        ({"ignore": "second-contexts"}, "no finding has the name 'second-contexts'"),
    ],
)
def test_wrong_arguments_are_said_in_a_sentence(gathered: Gathered, given: dict[str, Any], said: str) -> None:
    with pytest.raises(memguard.MemguardError) as raised:
        memguard.doctor(**given)
    assert said in str(raised.value) and gathered.asked == []


def test_progress_is_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    progress = importlib.import_module("memguard.cli.doctor").progress
    with progress() as say:
        assert say is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with progress() as say:
        say("torch: 4.2 s")
    assert capsys.readouterr() == ("", "  torch: 4.2 s\n")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as say:
        say("torch: 4.2 s")
    assert capsys.readouterr() == ("", "\r\x1b[K  torch: 4.2 s\n")


def test_the_help_of_the_command_line_has_it() -> None:
    done = CliRunner().invoke(main, ["--help"])
    assert "doctor   Find out why a framework does not work here." in done.stdout
    assert "Exit code 0: healthy" in CliRunner().invoke(main, ["doctor", "--help"]).stdout


# memguard run --doctor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `run` would have started."""
    commands: list[Any] = []

    def exec_(command: Any, environ: Any) -> None:
        commands.append(list(command))
        raise SystemExit(0)

    monkeypatch.setattr(importlib.import_module("memguard.cli.run"), "_exec", exec_)
    return commands


def run(*arguments: str) -> Result:
    return RUNNER.invoke(main, ["run", *arguments])


def test_a_healthy_program_is_started_without_a_word(gathered: Gathered, started: list[Any]) -> None:
    done = run("--doctor", "-c", "budget.yaml", "--", sys.executable, "train.py")
    assert (done.exit_code, done.output) == (0, "")
    assert started == [[sys.executable, "train.py"]]
    budget, asked = gathered.asked.pop()
    assert budget == _budget.load("budget.yaml")
    assert (asked["python"], asked["script"]) == ([sys.executable], "train.py") and "this_process" not in asked
    assert asked["environ"] == dict(os.environ)
    run("-c", "budget.yaml", "--", sys.executable, "train.py")
    assert gathered.asked == [] and len(started) == 2


def test_an_error_stops_the_program_before_it_starts(gathered: Gathered, started: list[Any]) -> None:
    gathered.facts = SICK
    done = run("--doctor", "--", "python", "train.py")
    assert done.exit_code == 1 and started == [] and done.stdout == ""
    assert "error  xla-fractions: jax\n" in done.stderr
    assert done.stderr.endswith(
        "\nmemguard: python was not started\n"
        "    fix: see above, or leave it out in the budget: doctor: {ignore: [xla-fractions]}\n"
    )
    Path("budget.yaml").write_text(BUDGET + "doctor: {ignore: [xla-fractions]}")
    assert run("--doctor", "--", "python", "train.py").exit_code == 0 and started


def test_what_no_program_survives_is_not_offered_to_be_left_out(gathered: Gathered, started: list[Any]) -> None:
    gathered.facts = SICK.model_copy(update={"driver": NO_DRIVER})
    done = run("--doctor", "--", "python", "train.py")
    assert done.exit_code == 1 and started == [] and "error  driver-absent\n" in done.stderr
    assert done.stderr.endswith("\nmemguard: python was not started\n    fix: see above\n")


def test_a_framework_that_is_not_installed_is_said_and_the_program_starts(
    gathered: Gathered, started: list[Any]
) -> None:
    gathered.facts = HEALTHY.model_copy(update={"frameworks": {"jax": FrameworkFacts()}})
    done = run("--doctor", "--", sys.executable, "train.py")
    assert done.exit_code == 0 and started
    assert done.stderr == ("memguard doctor: jax is not installed for this Python: is it the right\n  environment?\n")


def test_a_command_whose_python_is_not_known_is_said(gathered: Gathered, started: list[Any]) -> None:
    done = run("--doctor", "--", "sh", "train.sh")
    assert done.exit_code == 0 and started == [["sh", "train.sh"]]
    assert done.stderr == (f"memguard: cannot tell which Python `sh` runs: examined memguard's own, {sys.executable}\n")
    assert gathered.asked.pop()[1]["python"] is None


def test_a_script_that_cannot_be_read_is_said_before_a_run(gathered: Gathered, started: list[Any]) -> None:
    gathered.facts = HEALTHY.model_copy(update={"script": Script(path="train.py", error="SyntaxError: oh")})
    done = run("--doctor", "--", sys.executable, "train.py")
    assert started and done.stderr == "memguard: train.py was not examined: SyntaxError: oh\n"


def test_a_warning_is_printed_and_the_program_starts(gathered: Gathered, started: list[Any]) -> None:
    warned = {"process": {"modules": ["torch", "pycuda"], "foreign_context": True}}
    gathered.facts = Facts.model_validate({**HEALTHY.model_dump(), **warned})
    done = run("--doctor", "--", "python", "train.py")
    assert done.exit_code == 0 and started and done.stdout == ""
    assert "warning  second-context: pycuda\n" in done.stderr and "not started" not in done.stderr


def test_simulated_gpus_are_not_examined(gathered: Gathered, started: list[Any]) -> None:
    done = run("--doctor", "--device", "h200", "--", "python", "train.py")
    assert done.exit_code == 2 and "leave one out" in done.stderr
    assert (gathered.asked, started) == ([], [])


def test_a_python_that_cannot_be_asked_does_not_start(gathered: Gathered, started: list[Any]) -> None:
    gathered.error = FactsError("the Python in question ended with 1")
    assert run("--doctor", "--", "python", "train.py").exit_code == 2 and started == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with programs, to be found by PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "python": "", "python3.12": "", "sh": "", "other": "#!/bin/sh\n", "jupyter": f"#!{folder}/python3.12\n",
        "torchrun": "#!/usr/bin/env python\n", "accelerate": f"#!{folder}/python\n",
        "train.py": "#!/usr/bin/env -S python3.12 -u\n",
    }.items():  # fmt: skip
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("command", "python", "script"),
    [
        ("python train.py --lr 1", "python", "train.py"),
        ("python3.12 -u -X dev -W error -I train.py", "python3.12", "train.py"),
        ("python -Wignore -- -odd.py", "python", "-odd.py"),
        ("python --check-hash-based-pycs always a.py", "python", "a.py"),
        ("python -m package.train", "python", None),
        ("python -uc code", "python", None),
        ("python -", "python", None),
        ("python", "python", None),
        ("jupyter lab", "python3.12", "{bin}/jupyter"),
        ("torchrun train.py", "python", "train.py"),
        ("torchrun --nproc_per_node 2 --rdzv-id=a.py src/train.py --config other.py", "python", "src/train.py"),
        ("torchrun -m package.train --config other.py", "python", "{bin}/torchrun"),
        ("accelerate launch --num_processes 2 train.py", "python", "train.py"),
        ("accelerate test train.py", "python", "{bin}/accelerate"),
        ("python -m torch.distributed.run --standalone --nproc-per-node gpu train.py", "python", "train.py"),
        ("python -um accelerate.commands.launch train.py", "python", "train.py"),
        ("python -m torch.distributed.run --no-python ./train.py", "python", None),
        ("python -m pytest tests/test_a.py", "python", None),
        ("train.py", "python3.12", "{bin}/train.py"),
        ("env python a.py", "python", "a.py"),
        ("env A=1 CUDA_VISIBLE_DEVICES=1 python3.12 a.py", "python3.12", "a.py"),
        ("env -u A python a.py", None, None),
        ("env", None, None),
        ("sh train.sh", None, None),
        ("other", None, None),
        ("absent.py", None, None),
    ],
)
def test_the_python_and_the_script_of_a_command(
    path: Path, command: str, python: str | None, script: str | None
) -> None:
    found = program.of(command.split(), {"PATH": str(path), "B": "2"})
    assert found.python == (None if python is None else str(path / python))
    assert found.script == (None if script is None else script.format(bin=path))
    assert found.environ["B"] == "2"
    assert ("CUDA_VISIBLE_DEVICES" in found.environ) == ("CUDA_VISIBLE_DEVICES" in command)


def test_run_has_the_option() -> None:
    assert "--doctor" in CliRunner().invoke(main, ["run", "--help"]).stdout
