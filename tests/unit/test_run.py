"""`memguard run`: the command is its own, the first Python is capped, and nothing runs uncapped by accident."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

import memguard
from memguard._base.distribution import requirement
from memguard.cli import main
from memguard.cli.run import environment
from memguard.cli.support import ignored_environment
from memguard.errors import MemguardError

HOME = Path(memguard.__file__).parents[1]
ACTIVATE = HOME / "memguard" / "_tools/activation"
SEEN = """
import json, os, sys
import memguard
from memguard.errors import NotActive
try:
    active = "simulated" if memguard.ledger().simulated else "real"
except NotActive:
    active = None
names = [n for n in os.environ if n.startswith("MEMGUARD_")]
print(json.dumps({"active": active, "names": names, "pythonpath": os.environ.get("PYTHONPATH"),
                  "path": sys.path, "argv": sys.argv, "cwd": os.getcwd()}))
"""


def environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "PYTHONPATH"))}
    if HOME.name != "site-packages":
        kept["PYTHONPATH"] = str(HOME)
    return {**kept, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a budget in it, and `seen.py`, which says what it finds."""
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    (tmp_path / "seen.py").write_text(SEEN)
    return tmp_path


def run(
    folder: Path, *command: str, options: tuple[str, ...] = ("-c", "budget.yaml", "--device", "h200"),
    stdin: str = "", env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "memguard", "run", *options, "--", *command],
        cwd=folder, env=env or environ(), input=stdin, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def started(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What `run` would exec, without the memguard that execs it."""
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_the_program_is_capped_and_sees_nothing_of_it(folder: Path) -> None:
    before = environ().get("PYTHONPATH")
    found = seen(run(folder, sys.executable, "seen.py"))
    assert found["active"] == "simulated"
    assert found["names"] == []
    assert found["pythonpath"] == before
    assert str(ACTIVATE) not in found["path"]  # type: ignore[operator]


def test_simulated_gpus_are_announced_as_such(folder: Path) -> None:
    assert "simulated GPUs (h200): nothing limits a real one" in run(folder, sys.executable, "seen.py").stderr


def test_the_programs_own_init_means_the_simulated_gpus_too(folder: Path) -> None:
    code = """
import memguard
from memguard import api
before = api.current()
print(memguard.init("budget.yaml") is before, memguard.init("budget.yaml", replace=True) is before)
for other in ({"budget": {"version": 1, "frameworks": {"torch": {"share": "20%"}}}},
              {"budget": "budget.yaml", "simulate": "h100"}):
    try:
        memguard.init(**other)
    except memguard.AlreadyActive:
        print("another one")
memguard.shutdown()
print(memguard.init("budget.yaml").host.simulated, [part.device.name for part in memguard.ledger().devices])
"""
    done = run(folder, sys.executable, "-c", code, options=("--device", "H200", "--device", "l4"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True True", "another one", "another one", "True ['NVIDIA H200', 'NVIDIA L4']",
    ]  # fmt: skip


def test_arguments_arrive_as_they_were_given(folder: Path) -> None:
    given = ["a b", "--", "-c", "--config", "*", "", "é"]
    assert seen(run(folder, sys.executable, "seen.py", *given))["argv"] == ["seen.py", *given]


def test_the_dashes_before_the_command_may_be_left_out(folder: Path) -> None:
    command = [sys.executable, "-m", "memguard", "run", "--device", "h200", sys.executable, "seen.py", "--device"]
    done = subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True)
    assert seen(done)["argv"] == ["seen.py", "--device"]


def test_standard_input_is_the_programs(folder: Path) -> None:
    done = run(folder, sys.executable, "-c", "print(input()[::-1])", stdin="abc\n")
    assert done.stdout == "cba\n"


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_programs(folder: Path, code: int) -> None:
    assert run(folder, sys.executable, "-c", f"raise SystemExit({code})").returncode == code


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV"])
def test_death_by_a_signal_stays_death_by_a_signal(folder: Path, name: str) -> None:
    done = run(folder, sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert done.returncode == -getattr(signal, name)


def test_a_signal_reaches_the_program(folder: Path) -> None:
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "for _ in range(3000):\n    time.sleep(0.01)\n"  # short ones: a signal just before a sleep does not end it
    )
    command = [sys.executable, "-m", "memguard", "run", "--device", "h200", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=folder, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(30) == 42


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="signal masks are read from /proc")
def test_signals_that_python_ignores_are_not_ignored_in_the_command(folder: Path) -> None:
    status = run(folder, "cat", "/proc/self/status").stdout
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="SIGPIPE")
def test_a_command_that_is_not_found_leaves_the_signals_as_they_were(folder: Path) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    done = CliRunner().invoke(main, ["run", "-c", str(folder / "budget.yaml"), "--", "no-such-command"])
    assert done.exit_code == 127 and signal.getsignal(signal.SIGPIPE) is before


def test_the_budget_is_found_from_wherever_python_starts(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    script = f'cd "{elsewhere}" && exec "{sys.executable}" "{folder / "seen.py"}"'
    found = seen(run(folder, "sh", "-c", script))
    assert found["cwd"] == str(elsewhere)
    assert found["active"] == "simulated"


def test_without_a_name_the_budget_is_looked_for_upward(folder: Path) -> None:
    below = folder / "a" / "b"
    below.mkdir(parents=True)
    done = run(below, sys.executable, str(folder / "seen.py"), options=("--device", "h200"))
    assert seen(done)["active"] == "simulated"


def test_no_budget_anywhere_says_what_to_do(tmp_path: Path) -> None:
    done = run(Path("/"), "touch", str(tmp_path / "ran"), options=())
    assert done.returncode == 2
    assert "fix: name the file" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_wrong_budget_starts_nothing(folder: Path) -> None:
    (folder / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {shre: 50%}\n")
    done = run(folder, "touch", "ran")
    assert done.returncode == 2
    assert "budget.yaml:3" in done.stderr
    assert not (folder / "ran").exists()


def test_an_unknown_simulated_gpu_starts_nothing(folder: Path) -> None:
    done = run(folder, "touch", "ran", options=("--device", "h9000"))
    assert done.returncode == 2
    assert "h9000" in done.stderr
    assert not (folder / "ran").exists()


def test_exit_codes_of_commands_that_cannot_start(folder: Path) -> None:
    absent = run(folder, "no-such-command-anywhere")
    assert (absent.returncode, "Traceback" in absent.stderr) == (127, False)
    (folder / "plain").write_text("text")
    refused = run(folder, "./plain")
    assert (refused.returncode, "Traceback" in refused.stderr) == (126, False)


def test_every_python_of_a_shell_script_is_capped(folder: Path) -> None:
    (folder / "job.sh").write_text(f'"{sys.executable}" seen.py one\n"{sys.executable}" seen.py two\n')
    done = run(folder, "sh", "job.sh")
    assert [json.loads(line)["active"] for line in done.stdout.splitlines()] == ["simulated", "simulated"]


def test_a_child_of_the_program_is_passive(folder: Path) -> None:
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'seen.py']))"
    found = seen(run(folder, sys.executable, "-c", code, env=environ(MEMGUARD_SIMULATE="a100")))
    assert found["active"] is None
    assert found["names"] == []


def test_a_spawned_worker_is_passive(folder: Path) -> None:
    (folder / "spawn.py").write_text(
        "import multiprocessing, os, sys\n"
        "def work(_):\n"
        "    return 'memguard.api' in sys.modules, any('_tools/activation' in p for p in sys.path)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [0]))\n"
    )
    assert run(folder, sys.executable, "spawn.py").stdout == "[(False, False)]\n"


def test_an_inherited_setting_does_not_make_a_run_simulated(folder: Path) -> None:
    changed = environment({"MEMGUARD_SIMULATE": "h200", "KEPT": "1"}, folder / "budget.yaml")
    assert "MEMGUARD_SIMULATE" not in changed
    assert changed["KEPT"] == "1"


def test_without_a_gpu_the_ways_on_are_those_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is followed. What `memguard.init` suggests to a program does nothing here."""
    (folder / "lib").mkdir()
    (folder / "lib" / "libnvidia-ml.so.1").write_text("no library")  # so that no machine has a GPU
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder / "lib"))
    real = ("-c", "budget.yaml")
    for more in ({}, {"MEMGUARD_SIMULATE": "h200"}):
        done = run(folder, sys.executable, "-c", "print('ran')", options=real, env=environ(**more))
        assert (done.returncode, done.stdout) == (3, "")
        assert "missing_gpu" not in done.stderr and "MEMGUARD_SIMULATE" not in done.stderr
        assert done.stderr.count("\n    fix: ") == done.stderr.count("\n    or: ") == 1
        assert "`memguard run --device h200`" in done.stderr and "MEMGUARD_DISABLE=1" in done.stderr
    simulated = run(folder, sys.executable, "-c", "print('ran')", options=(*real, "--device", "h200"))
    disabled = run(folder, sys.executable, "-c", "print('ran')", options=real, env=environ(MEMGUARD_DISABLE="1"))
    assert simulated.stdout == disabled.stdout == "ran\n"


@pytest.mark.parametrize("budget", ["budget.yaml", "absent.yaml"])
def test_a_run_that_is_disabled_says_so_and_reads_no_file(folder: Path, budget: str) -> None:
    words = [sys.executable, "-m", "memguard", "run", "-c", budget, "--", sys.executable, "-c", "print('ran')"]
    env = environ(MEMGUARD_DISABLE="1")
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr == f"memguard: MEMGUARD_DISABLE is set: {sys.executable} runs without a budget\n"


def test_a_folder_that_pythonpath_cannot_hold_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memguard.cli.run._ACTIVATE", Path("/odd:name/memguard/_tools/activation"))
    with pytest.raises(MemguardError, match="PYTHONPATH cannot hold"):
        environment({}, folder / "budget.yaml")


def test_the_sitecustomize_that_ours_hides_still_runs(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import os; os.environ['SHADOWED'] = __file__\nvalue = 5\n")
    inherited = environ().get("PYTHONPATH", "")
    code = "import os, sitecustomize; print(os.environ['SHADOWED'], sitecustomize.value)"
    done = run(folder, sys.executable, "-c", code, env=environ(PYTHONPATH=f"{folder / 'site'}{os.pathsep}{inherited}"))
    assert done.stdout.split() == [str(folder / "site" / "sitecustomize.py"), "5"], done.stderr


def test_a_hidden_sitecustomize_that_fails_does_not_lift_the_cap(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("raise ValueError('broken')")
    inherited = environ().get("PYTHONPATH", "")
    done = run(folder, sys.executable, "seen.py", env=environ(PYTHONPATH=f"{folder / 'site'}{os.pathsep}{inherited}"))
    assert "ValueError: broken" in done.stderr
    assert seen(done)["active"] == "simulated"


def test_a_budget_that_cannot_be_applied_ends_the_program_first(folder: Path) -> None:
    script = f"rm budget.yaml; exec \"{sys.executable}\" -c \"open('ran', 'w')\""
    done = run(folder, "sh", "-c", script)
    assert done.returncode == 2
    assert str(folder / "budget.yaml") in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "ran").exists()


def fake(folder: Path, body: str) -> dict[str, str]:
    """The environment of a run in which `memguard.init` is `body`."""
    package = folder / "fake" / "memguard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import logging, sys\ndef init(budget, simulate=None):\n    {body}\n")
    return environment(environ(PYTHONPATH=str(package.parent)), folder / "budget.yaml")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise ValueError('a fault')", 1, "Traceback"),
        ("raise KeyboardInterrupt", 130, ""),
        ("import no_such_module_at_all", 1, "has no no_such_module_at_all, which memguard needs"),
    ],
    ids=["fault", "interrupt", "missing"],
)
def test_a_failing_activation_ends_the_program_first(folder: Path, body: str, code: int, said: str) -> None:
    done = started([sys.executable, "-c", "print('ran')"], fake(folder, body))
    assert done.returncode == code
    assert said in done.stderr
    assert done.stdout == ""


def test_without_simulated_gpus_the_real_ones_are_asked(folder: Path) -> None:
    done = started([sys.executable, "-c", ""], fake(folder, "print(budget, simulate)"))
    assert done.stdout == f"{folder / 'budget.yaml'} None\n"


def test_warnings_are_shown_unless_the_program_logs_them_itself(folder: Path) -> None:
    env = fake(folder, "logging.getLogger('memguard').info('detail')")
    code = (
        "import logging, sys\nlog = logging.getLogger('memguard')\nlog.warning('tight')\nlog.info('detail')\n"
        "logging.basicConfig(stream=sys.stdout, format='own %(message)s')\nlog.warning('tighter')\n"
    )
    done = started([sys.executable, "-c", code], env)
    assert done.stderr == "memguard: tight\n"
    assert done.stdout == "own tighter\n"


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nothing but its standard library."""
    path = tmp_path_factory.mktemp("bare") / "env"
    venv.create(path, with_pip=False, symlinks=True)
    return path / "bin" / "python"


NEEDED = (
    "annotated_types", "markdown_it", "mdurl", "pydantic", "pydantic_core", "pygments", "pynvml", "rich",
    "typing_extensions", "typing_inspection", "yaml",
)  # fmt: skip


def test_a_python_without_memguard_uses_the_one_that_runs_it(folder: Path, bare: Path) -> None:
    needed = folder / "needed"
    needed.mkdir()
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            (needed / origin.name).symlink_to(origin)
    code = "import memguard, sys; print(memguard.__file__); print(memguard.ledger().simulated, *sys.path, sep='|')"
    env = environment(environ(PYTHONPATH=str(needed)), folder / "budget.yaml", ["h200"])
    done = started([str(bare), "-c", code], env)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == str(HOME / "memguard" / "__init__.py")
    assert second.startswith("True|")
    assert str(HOME) not in second.split("|")  # nothing else that lies beside memguard became importable


def test_a_python_without_what_memguard_needs_says_so(folder: Path, bare: Path) -> None:
    env = environment(environ(PYTHONPATH=""), folder / "budget.yaml", ["h200"])
    done = started([str(bare), "-c", "print('ran')"], env)
    assert done.returncode == 1
    here = requirement().removeprefix("-e ")  # that Python cannot know that this installation is editable
    assert f"fix: {bare} -m pip install {here}\n" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("module", "name"), [("rich", "rich"), ("pynvml", "nvidia-ml-py"), ("yaml", "PyYAML")])
def test_what_memguard_needs_later_is_missing_before_the_start(
    folder: Path, bare: Path, module: str, name: str
) -> None:
    """Without rich, `print(memguard.ledger())` would end the program long after its start."""
    needed = folder / "needed"
    needed.mkdir()
    for other in ("pydantic", "pynvml", "rich", "yaml"):
        if other != module:
            (needed / f"{other}.py").touch()
    env = environment(environ(PYTHONPATH=str(needed)), folder / "budget.yaml", ["h200"])
    done = started([str(bare), "-c", "print('ran')"], env)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(
        f"memguard: {bare} has no {name}, which memguard needs\n    fix: {bare} -m pip install "
    )


def test_another_projects_memguard_is_told_from_this_one(folder: Path, bare: Path) -> None:
    other = folder / "other"
    (other / "memguard").mkdir(parents=True)
    (other / "memguard" / "__init__.py").touch()
    done = started(
        [str(bare), "-c", "print('ran')"], environment(environ(PYTHONPATH=str(other)), folder / "budget.yaml")
    )
    assert done.returncode == 1 and done.stdout == ""
    assert f"another project's memguard: {other / 'memguard' / '__init__.py'}" in done.stderr
    assert "two-distributions" in done.stderr


def test_an_unsupported_python_runs_nothing(folder: Path) -> None:
    code = f"import runpy, sys; sys.version_info = (3, 10); runpy.run_path({str(ACTIVATE / 'sitecustomize.py')!r})"
    done = started([sys.executable, "-c", code], environ())
    assert done.returncode == 1
    assert done.stderr.startswith("memguard: Python 3.11 or newer is needed")


@pytest.mark.parametrize(
    "command",
    [
        "python -I train.py", "python -E train.py", "python -S train.py", "python3.12 -IB train.py",
        "/usr/bin/python3 -B -Wignore -I train.py", "python -W ignore -X dev -uE train.py", "python3.13t -I",
        "pypy3 -E -m train", "python -Ic pass", "python --check-hash-based-pycs always -I x.py",
        "env python -I train.py", "env A=1 -u B python3 -S x.py", "nice -n 5 python -E train.py",
        "env -i python train.py", "env - python train.py", "env -vi sh job.sh", "env PYTHONPATH=src python train.py",
        "env -u PYTHONPATH sh job.sh", "env --unset=MEMGUARD_RUN sh job.sh", "env -uPYTHONPATH sh job.sh",
        "env -S python3 -I", "sudo python train.py", "doas -u a python train.py",
    ],
)  # fmt: skip
def test_a_python_that_could_not_see_the_budget_is_refused(command: str) -> None:
    with pytest.raises(MemguardError, match=r"would not be applied: .*\n    fix: "):
        ignored_environment.check(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python train.py -I", "python -c pass -I", "python -m train -E", "python -mtrain -S", "python -", "python",
        "python -W ignore::ImportWarning train.py", "python -X importtime -B -O train.py", "python -WI train.py",
        "python -XS train.py", "python -X S train.py", "python -- -I", "env A=1 python train.py -I",
        "env -u PYTHONHOME python x.py", "sh job.sh", "pythonic -I", "train -i -S -E", "python x.py env -i",
        "bash -c true",
    ],
)  # fmt: skip
def test_a_python_that_sees_the_budget_is_not_refused(command: str) -> None:
    ignored_environment.check(command.split())


def test_a_refused_command_is_not_started(folder: Path) -> None:
    done = run(folder, sys.executable, "-I", "-c", "open('ran', 'w')")
    assert done.returncode == 2
    assert "isolated" in done.stderr
    assert not (folder / "ran").exists()


def test_a_script_whose_first_line_isolates_python_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "tool"
    script.write_text(f"#!{sys.executable} -sE\nprint(1)\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert shutil.which("tool") == str(script)
    with pytest.raises(MemguardError, match="-E"):
        ignored_environment.check(["tool", "x"])
    script.write_text(f"#!{sys.executable} -s\nprint(1)\n")
    ignored_environment.check(["tool", "x"])
    script.write_text("#!/usr/bin/env -S python3 -I\nprint(1)\n")
    with pytest.raises(MemguardError, match="-I"):
        ignored_environment.check([str(script)])


def test_a_budget_that_cannot_be_applied_ends_the_program_whatever_stderr_is(folder: Path) -> None:
    """It is applied while Python starts: an error there would else start the program without its budget."""
    (folder / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {limit: 900GiB}\n")
    for how in ("full", "closed"):
        with open("/dev/full", "wb") as full:
            program = [sys.executable, "-c", "print('on')"]
            done = subprocess.run(
                [sys.executable, "-m", "memguard", "run", "--device", "h200", "--", *program],
                cwd=folder, env=environ(), stdout=subprocess.PIPE, stderr=full,
                preexec_fn=(lambda: os.close(2)) if how == "closed" else None,
            )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, b""), how


def test_notebooks_below_hear_of_when_idle_through_the_environment(folder: Path) -> None:
    show = "import os; print(os.environ.get('MEMGUARD_WHEN_IDLE'), 'IPython' in __import__('sys').modules)"
    with_budget = ("-c", "budget.yaml", "--device", "h200", "--when-idle", "10min")
    assert run(folder, sys.executable, "-c", show, options=with_budget).stdout == "10min False\n"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}])"
    assert run(folder, sys.executable, "-c", child, options=with_budget).stdout == "10min False\n"
    bare = Path("/")  # a budget may lie in any folder above the temporary one
    found = run(bare, sys.executable, "-c", show, options=("--when-idle", "1h"))
    assert (found.stdout, found.stderr, found.returncode) == ("1h False\n", "", 0)
    wrong = run(bare, sys.executable, "-c", show, options=("--when-idle", "soon"))
    assert wrong.returncode == 2 and "'soon' is not a duration" in wrong.stderr
