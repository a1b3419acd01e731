"""The command line as a whole: what it lists, what it imports, how it fails."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from timelines import plan_of

import memguard
from memguard import cli, errors
from memguard._timeline.writer import Writer
from memguard._tools.simulate.trace import read

COMMANDS = sorted(path.stem for path in Path(cli.__file__).parent.glob("*.py") if not path.name.startswith("_"))
HOME = Path(memguard.__file__).parents[1]


def environment() -> dict[str, str]:
    """This process's environment, with memguard importable in a child as it is here."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    if HOME.name != "site-packages":
        environ["PYTHONPATH"] = str(HOME)
    return environ


def call(*arguments: str) -> int:
    """The exit code of a command line, run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main.main(list(arguments), prog_name="memguard")
    code = ended.value.code
    assert isinstance(code, int)
    return code


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `memguard leases` raise."""

    @click.command("leases")
    def command() -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("memguard.cli.leases"), "leases", command)


def test_help_lists_every_command_with_a_line_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    listed = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    firsts = [line for line in listed if not line.startswith("   ")]
    assert [line.split()[0] for line in firsts] == COMMANDS
    assert all(len(line.split()) > 3 for line in firsts)
    assert "..." not in "".join(listed), "no sentence is cut"


def test_every_file_of_the_command_line_is_a_command() -> None:
    context = click.Context(cli.main)
    for name in COMMANDS:
        command = cli.main.get_command(context, name)
        assert command is not None and command.name == name


def test_a_command_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adding one touches no list: its file is found, listed with its first sentence, and run."""
    (tmp_path / "hello.py").write_text(
        "import click\nfrom memguard.cli.support import options\n\n\n"
        "@click.command('hello')\n@options.as_json\ndef hello(as_json):\n"
        '    """Greet whoever runs it. With --json too."""\n    click.echo(f\'hello {as_json}\')\n'
    )
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert call("--help") == 0
    assert "\n  hello    Greet whoever runs it.\n" in capsys.readouterr().out
    assert call("hello", "--json") == 0 and capsys.readouterr().out == "hello True\n"
    monkeypatch.delitem(sys.modules, "memguard.cli.hello")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom memguard.cli import main\n"
        "early = [m for m in sys.modules if m.startswith('memguard.cli.') and '.support' not in m]\n"
        "assert not early, early\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'pydantic', 'yaml', 'rich', 'pynvml', 'torch', 'tensorflow', 'pycuda', 'numpy', 'cuda'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WITHOUT_JSON = {
    "report": "it writes files; the timeline is JSON",
    "run": "it becomes the program, whose output is its own",
}


def test_every_command_has_json_or_a_reason() -> None:
    for name in COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert ("--json" in flags) != (name in WITHOUT_JSON), name


@pytest.mark.parametrize(
    "arguments",
    ["plan absent.yaml --device h200", "plan --device h2000", "replay absent.jsonl", "replay absent.jsonl --smallest",
     "replay -c absent.yaml absent.jsonl", "report absent.jsonl -o -", "doctor -c absent.yaml", "doctor absent.yaml",
     "doctor --explain absent", "doctor --facts absent.json", "suspend 2147483647", "resume 2147483647"],
)  # fmt: skip
def test_an_error_is_text_on_stderr_also_with_json(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments.split(), "--json") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.strip()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"memguard {memguard.__version__}\n"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("chek", "check"), ("chekc", "check"), ("CHECK", "check"), ("repaly", "replay"), ("resum", "resume")],
)
def test_an_unknown_command_is_a_usage_error_with_the_near_one(
    written: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(written, "budget.yaml", "--json") == 2
    assert capsys.readouterr().err.endswith(f"Error: No such command {written!r}. Did you mean {meant!r}?\n")


def test_a_command_that_is_near_to_none_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("xyzzy") == 2
    assert capsys.readouterr().err.endswith("Error: No such command 'xyzzy'.\n")


@pytest.mark.parametrize("written", ["plan --devise h200", "check --jsn b.yaml", "doctor --explane x"])
def test_an_unknown_option_is_a_usage_error_with_the_near_one(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*written.split()) == 2
    meant = {"--devise": "--device", "--jsn": "--json", "--explane": "--explain"}[written.split()[1]]
    assert meant in capsys.readouterr().err.rpartition("Error:")[2]


@pytest.mark.parametrize(
    "error",
    [
        errors.MemguardError("something"),
        errors.ConfigError([errors.Problem("wrong", "put it right", line=3)], "b.yaml"),
        errors.PlanError([errors.Problem("too much")]),
        errors.DeviceError("no GPU"),
        errors.CapNotApplied("torch", "reason", "remedy"),
        errors.TraceError("cut short"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_one_text_and_their_exit_code(
    error: errors.MemguardError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, error)
    assert call("leases") == error.exit_code
    said = capsys.readouterr()
    # A budget's problems begin with file:line:column, so that editors and terminals can follow them.
    prefix = "" if isinstance(error, errors.ProblemsError) else "memguard: "
    assert said.err == f"{prefix}{error}\n"
    assert said.out == ""


def test_an_interrupt_ends_as_shells_expect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert call("leases") == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_fault_of_memguard_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main.main(["leases"])


def test_a_wrong_file_says_so_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "check", "absent.yaml"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("absent.yaml: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("__init__.py", "def another_project(): ...\n"),
        ("__init__.py", None),
        ("errors.py", None),
        ("_base/units.py", None),
    ],
    ids=["overwritten", "removed", "errors removed", "a later module removed"],
)
def test_a_damaged_installation_is_an_error_with_its_fix(tmp_path: Path, file: str, content: str | None) -> None:
    shutil.copytree(HOME / "memguard", tmp_path / "memguard", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "memguard" / file).unlink()
    if content is not None:
        (tmp_path / "memguard" / file).write_text(content)
    others = tmp_path / "others"  # what lies beside memguard: of a wheel these are all the packages
    others.mkdir()
    for entry in HOME.iterdir():
        if entry.name != "memguard":
            (others / entry.name).symlink_to(entry)
    code = (
        "import sys\n"
        f"places = [{str(others)!r} if entry == {str(HOME)!r} else entry for entry in sys.path]\n"
        f"sys.path[:] = [{str(tmp_path)!r}, *places]\n"
        "from memguard.cli import main\nmain(['check', 'budget.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("memguard is damaged: another distribution wrote over it")
    assert "\n    fix: `pip uninstall -y memguard memguard-gpu`, then " in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "instead"),
    [("simulate", "memguard replay"), ("schema", "memguard check --schema"), ("reclaim", "memguard top --once")],
)
def test_a_command_of_an_older_version_names_its_successor(
    command: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(command, "a.trace") == 2
    assert capsys.readouterr().err.endswith(f"Error: {command!r} is now `{instead}`\n")


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ("plan --simulate h200", "--device"), ("run --simulate h200 -- true", "--device"),
        ("suggest --for=l4 a.jsonl", "--device"), ("replay a.trace --budget b.yaml", "-c"),
        ("doctor --budget b.yaml", "-c"), ("report a.jsonl --html a.html", "-o FILE.html"),
        ("report a.jsonl --md", "-o FILE.md"), ("report a.jsonl --csv=a.csv", "-o FILE.csv"),
        ("report a.jsonl --perfetto a", "-o FILE.json"),
    ],
)  # fmt: skip
def test_an_option_of_an_older_version_names_its_successor(
    arguments: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments.split()) == 2
    option = next(word for word in arguments.split() if word.startswith("--")).partition("=")[0]
    assert capsys.readouterr().err.endswith(f"Error: {option} is now `{instead}`\n")


def test_an_option_of_an_older_version_has_no_successor_in_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("leases", "--budget", "b.yaml") == 2
    assert "is now" not in capsys.readouterr().err


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with headers of both kinds of recordings and a budget that is not found by default."""
    monkeypatch.chdir(tmp_path)
    for name in ("trace", "timeline"):
        Path(f"a.{name}").write_text(f'{{"memguard_{name}": 1, "recorded": "2026-01-01"}}\n')
        Path(f"other.{name}").write_text(f'\ufeff{{"recorded": "2026-01-01",\t"memguard_{name}" :1}}')
    Path("b.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("replay b.yaml a.timeline", "the budget is an option: memguard replay -c b.yaml a.timeline"),
        ("replay a.trace b.yaml", "the budget is an option: memguard replay -c b.yaml a.trace"),
        ("replay b.yaml", "b.yaml looks like a budget, and no recording is given: memguard replay -c BUDGET RECORDING"),
        ("replay -c b.yaml b.yaml", "no recording is given: memguard replay -c BUDGET RECORDING"),
        ("replay a.trace a.trace", "2 files are given, and one is replayed: memguard replay -c BUDGET RECORDING"),
        (
            "replay -c b.yaml a.trace a.trace",
            "2 files are given, and one is replayed: memguard replay -c BUDGET RECORDING",
        ),
        ("replay a.trace", "name the file: -c BUDGET, or --without-budget"),
        ("replay other.trace", "name the file: -c BUDGET, or --without-budget"),
        (
            "replay -c b.yaml --without-budget a.trace",
            "-c names a budget and --without-budget uses none: leave one out",
        ),
        (
            "replay --smallest -c b.yaml a.trace",
            "--smallest is for timelines: a trace has no caps to derive a budget from",
        ),
        (
            "replay --device h200 a.timeline",
            "--device is for traces: a timeline is replayed on the GPUs that it was recorded on",
        ),
        ("check --schema b.yaml", "--schema prints the schema and checks no file: leave the rest out"),
        ("check -c b.yaml b.yaml", "the budget is given twice: as BUDGET and with -c"),
        ("plan -c b.yaml b.yaml", "the budget is given twice: as BUDGET and with -c"),
        ("doctor b.yaml", "the budget is an option: memguard doctor -c b.yaml"),
        ("run b.yaml -- python x.py --lr 1", "the budget is an option: memguard run -c b.yaml -- python x.py --lr 1"),
        ("run b.yaml python 'x y.py'", "the budget is an option: memguard run -c b.yaml -- python 'x y.py'"),
        ("run b.yaml", "the budget is an option: memguard run -c b.yaml -- COMMAND"),
        ("run -c b.yaml b.yaml", "the budget is given twice: as b.yaml and with -c"),
        ("run -c - -- python x.py", "standard input is not possible here: name a file"),
        ("doctor -c -", "standard input is not possible here: name a file"),
        ("suggest --device l4 -o a.yaml -o b.yaml", "-o is given twice: one budget is written, to one file"),
        ("top --interval 5years", "unknown unit"),
        ("top --interval 1ms", "1ms is not between 100ms and 1h"),
        ("doctor --timeout 100h", "100h is not between 1s and 24h"),
        ("resume 1 --wait never", "is not a duration"),
    ],
)
def test_a_wrong_command_line_names_the_right_one(
    arguments: str, said: str, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*shlex.split(arguments)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "check ''", "check -c ''", "check b.yaml ''", "plan '' --device l4", "plan -c '' --device l4",
        "run -c '' -- true", "doctor -c ''", "replay -c '' a.timeline",
    ],
)  # fmt: skip
def test_an_empty_name_is_no_budget(arguments: str, recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `-c "$BUDGET"` with an unset variable: the nearest budget would not be the one that was meant."""
    Path("b.yaml").rename("budget.yaml")
    assert call(*shlex.split(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith("Error: the name of the budget is empty\n")


def test_replay_recognises_both_kinds_of_recordings(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "examples/traces/mixed-h200.jsonl"
    Path("b.yaml").write_text("version: 1\nframeworks:\n  torch: {limit: 1GiB}\n")
    with Writer(recordings / "{rank}.jsonl", plan_of("h200", torch="2GiB")) as writer:
        pass
    for recording, code in ((trace, 1), (writer.path, 0)):
        assert call("replay", "-c", "b.yaml", str(recording)) == code
        assert "budget's caps" in " ".join(capsys.readouterr().out.split())
        Path("budget.yaml").write_text(Path("b.yaml").read_text())
        assert call("replay", str(recording)) == code
        assert "budget.yaml: -c names another one, --without-budget uses none" in " ".join(
            capsys.readouterr().out.split()
        )
        Path("budget.yaml").unlink()
    assert call("replay", str(writer.path)) == 0, "without a budget file the caps are the recorded ones"
    assert call("replay", str(trace), "--without-budget") == 1, "the card is full"


ELASTIC = """\
version: 1
device: {limit: 42GiB, reserve: 2GiB}
frameworks:
  torch: {min: 20%, max: 50%}
  jax: {min: 10%, max: 30%}
  cupy: {min: 2GiB, max: 25%}
  numba: {limit: 1GiB}
"""


def test_an_elastic_share_is_shown_with_its_cap_of_now_and_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.yaml").write_text(ELASTIC)
    file = str(tmp_path / "b.yaml")
    assert call("plan", file, "--device", "h200") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "torch 20.00 GiB now; min 8.00 GiB, max 20.00 GiB: its allocator's fraction" in printed
    assert "cupy 10.00 GiB now; min 2.00 GiB, max 10.00 GiB: the limit of its memory pool" in printed
    assert "unallocated 5.00 GiB no framework may take it" in printed, "their maxima leave it"
    assert "note: jax: its limit cannot change while it runs" in printed
    assert call("plan", file, "--device", "h200", "--json") == 0
    (part,) = json.loads(capsys.readouterr().out)["devices"]
    gib = 1 << 30
    assert part["elastic"] == {
        "torch": {"min": 8 * gib, "max": 20 * gib},
        "cupy": {"min": 2 * gib, "max": 10 * gib},
    }
    assert call("check", file) == 0
    printed = capsys.readouterr().out
    assert "  torch        min 20%, max 50% of (limit − reserve), nccl: 0\n" in printed
    assert "  cupy         min 2GiB, max 25% of (limit − reserve)\n" in printed
    assert "  unallocated  70% of (limit − reserve) − 3GiB, of which elastic shares get what they ask for" in printed


def test_a_simulation_says_that_elastic_caps_do_not_move_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.yaml").write_text(ELASTIC)
    trace = str(Path(__file__).parents[2] / "examples" / "traces" / "mixed-h200.jsonl")
    assert call("replay", "-c", str(tmp_path / "b.yaml"), trace) in (0, 1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "note: torch and cupy: elastic caps move while a program runs; here they stay as the plan begins" in printed


def test_a_recording_of_the_other_kind_is_said_by_the_reader_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"recorded": "2026-01-01", "memguard_timeline": 1}\n')
    with pytest.raises(errors.TraceError, match="a:1: this is a timeline, not a trace\n    fix: memguard replay"):
        read(tmp_path / "a")
    (tmp_path / "a").write_text('{"recorded": "2026-01-01", "memguard_trace": 1}\n')
    with pytest.raises(errors.TimelineError, match="a timeline: this is a trace\n    fix: memguard replay"):
        memguard.load_timeline(tmp_path / "a")


def test_a_package_that_is_missing_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ModuleNotFoundError("No module named 'pydantic'", name="pydantic"))
    with pytest.raises(ModuleNotFoundError):
        cli.main.main(["leases"])


NAMED = ["h200", "A10", "rtx5090", "h100-1g.10gb", "24GiB", "gpus.yaml", "./gpus.yaml"]


@pytest.fixture
def budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a budget and a file of devices, and one below it, which is the current one."""
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "gpus.yaml").write_text("devices: [{name: Lab, total: 48GiB, count: 2}]\n")
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path


@pytest.mark.parametrize("name", NAMED)
def test_plan_finds_the_budget_and_takes_every_kind_of_gpu(
    name: str, budgets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", "--device", name) == 0
    assert "(simulated)" in capsys.readouterr().out
    assert call("plan", "../budget.yaml", "--device", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["simulated"] is True


@pytest.mark.parametrize("name", NAMED)
def test_a_program_gets_every_kind_of_gpu_and_the_same_one_again(name: str, budgets: Path) -> None:
    guard = memguard.init("../budget.yaml", simulate=name)
    try:
        assert memguard.init("../budget.yaml", simulate=name.replace("h200", " H200 ")) is guard
    finally:
        memguard.shutdown()


def test_a_file_of_gpus_is_found_by_a_program_that_has_changed_its_folder(budgets: Path) -> None:
    code = "import os; os.chdir('/'); import memguard; print(len(memguard.init({'version': 1, 'frameworks': {'torch': "
    code += "{'share': '50%'}}}, replace=True).plan.devices))"
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "run", "--device", "gpus.yaml", "--", sys.executable, "-c", code],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    ["plan --device {}", "plan ../budget.yaml --device h200 --device {}", "run --device {} -- true"],
)
@pytest.mark.parametrize("name", ["a100", "h20", "24GB", "10MiB", "absent.yaml", ""])
def test_a_wrong_gpu_is_a_wrong_argument(
    arguments: str, name: str, budgets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*(word.format(name) for word in arguments.split())) == 2
    assert "\n    fix: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "replay", "run", "suggest"])
def test_help_lists_the_gpus(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(name in said for name in ("b200", "v100-32gb", "rtx5090", "h200-1g.18gb", "24GiB", "gpus.yaml"))


def test_plan_without_any_budget_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/")  # a budget may lie in any folder above the temporary one
    assert call("plan", "--device", "h200") == 2
    assert "name the file: memguard plan FILE" in capsys.readouterr().err
