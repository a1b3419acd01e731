"""MEMGUARD_CONFIG: every Python of an environment gets the budget, none pays for it before a framework, none breaks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from environments import PACKAGE, PTH, environ, make

from memguard._frameworks.specs import SPECS
from memguard._runtime import workers
from memguard._tools.activation import _memguard_environment as environment

BUDGET = "version: 1\nframeworks:\n  torch: {share: 50%}\n"
APPLIED = """
import sys
found = sys.modules.get("memguard._runtime.runtime")
guard = found and found.this.session and found.this.session.guard
print(None if guard is None else (guard.host.simulated, sorted(guard.frameworks)))
"""
SIMULATED = "memguard: simulated GPUs (h200): nothing limits a real one\n"
NOT_APPLIED = (
    "memguard: NO budget is active: that of MEMGUARD_CONFIG could not be applied, and nothing caps this program\n"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module", params=[False, True], ids=["start", "both"])
def starting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As from Python 3.15 on: `memguard.start` alone, and beside a `memguard.pth` whose line has run before."""
    return make(tmp_path_factory.mktemp("environment"), pth=request.param, start=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a budget, and frameworks that have nothing in them but print when they are imported."""
    (tmp_path / "budget.yaml").write_text(BUDGET)
    for name in ("torch", "cupy"):
        (tmp_path / f"{name}.py").write_text("")
    for name, module in (("pycuda", "driver"), ("numba", "cuda")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / f"{module}.py").write_text("")
    return tmp_path


def run(
    python: Path, folder: Path, code: str, *options: str, config: str | None = "budget.yaml", **more: str
) -> subprocess.CompletedProcess[str]:
    """`code` as `program.py` in the folder, with simulated GPUs."""
    (folder / "program.py").write_text(code)
    return command([str(python), *options, "program.py"], folder, config, **more)


def command(
    words: list[str], folder: Path, config: str | None = "budget.yaml", **more: str
) -> subprocess.CompletedProcess[str]:
    given = {"MEMGUARD_SIMULATE": "h200", **({} if config is None else {"MEMGUARD_CONFIG": config}), **more}
    return subprocess.run(words, cwd=folder, env=environ(**given), capture_output=True, text=True, timeout=120)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("names", ["h200, l4", " h200 ,, l4 ,"])
def test_several_simulated_gpus_with_spaces_as_for_init(python: Path, folder: Path, names: str) -> None:
    code = "import torch, memguard\nprint(memguard.init('budget.yaml').host.names)"
    done = run(python, folder, code, MEMGUARD_SIMULATE=names)
    assert said(done) == ["('h200', 'l4')"]
    assert done.stderr == SIMULATED.replace("(h200)", "(h200, l4)")


@pytest.mark.parametrize("module", ["torch", "cupy", "pycuda.driver", "numba.cuda"])
def test_the_first_framework_brings_the_budget(python: Path, folder: Path, module: str) -> None:
    done = run(python, folder, f"import {module}\n{APPLIED}")
    assert said(done) == ["(True, ['torch'])"]
    assert done.stderr == SIMULATED


def test_until_then_nothing_of_memguard_is_imported(python: Path, folder: Path) -> None:
    done = run(
        python, folder,
        "import importlib.util, json, numba, sys\nassert importlib.util.find_spec('torch')\n"
        "print(sorted(n for n in sys.modules if 'memguard' in n), sum('memguard' in str(f) for f in sys.meta_path))",
    )  # fmt: skip
    assert said(done) == ["['_memguard_environment'] 1"]
    assert done.stderr == ""


def test_a_start_file_brings_the_budget_once(starting: Path, folder: Path) -> None:
    waiting = "sum('memguard' in str(f) for f in sys.meta_path), 'memguard' in sys.modules"
    done = run(starting, folder, f"import sys\nprint({waiting})\nimport torch\n{APPLIED}")
    assert said(done) == ["1 False", "(True, ['torch'])"]
    assert done.stderr == SIMULATED


def test_a_start_file_without_the_variable_or_without_memguard_does_nothing(starting: Path, folder: Path) -> None:
    shown = "import sys\nprint([n for n in sys.modules if n in ('memguard', '_memguard_environment')])"
    assert said(run(starting, folder, shown, config=None)) == ["[]"]
    hidden = "import importlib.util, sys, os\nimportlib.util.find_spec = lambda name: None\n"
    hidden += "sys.modules.pop('_memguard_environment', None)\nimport _memguard_start\nprint(_memguard_start.start())"
    done = run(starting, folder, hidden)
    assert said(done) == ["None"] and done.stderr == ""


def test_the_first_use_of_memguard_brings_the_budget(python: Path, folder: Path) -> None:
    done = run(python, folder, f"import memguard\nfrom memguard import api\n{APPLIED}memguard.ledger()\n{APPLIED}")
    assert said(done) == ["None", "(True, ['torch'])"]


def test_without_the_variable_nothing_happens(python: Path, folder: Path) -> None:
    shown = "import sys, torch\nprint([n for n in sys.modules if 'memguard' in n])\n"
    shown += "print([f for f in sys.meta_path if 'memguard' in str(f)])"
    for config in (None, ""):
        done = run(python, folder, shown, config=config)
        assert said(done) in (["[]", "[]"], ["['_memguard_environment']", "[]"])
        assert done.stderr == ""


def test_the_budget_is_there_before_the_frameworks_code_runs_and_its_hooks_see_that_import(
    python: Path, folder: Path
) -> None:
    (folder / "torch.py").write_text("from memguard import api\nprint('torch runs', api.seen)\n")
    done = run(
        python, folder,
        "from memguard import api\nfrom memguard._frameworks.import_hook import ImportHook\nhook = ImportHook()\n"
        "def init(config, simulate=None):\n"
        "    hook.watch('torch', lambda: print('after torch'))\n"
        "    api.seen = 'applied'\n"
        "api.init = init\nimport torch, sys\n"
        "print(torch.__spec__.name, type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__,\n"
        "      [f for f in sys.meta_path if 'memguard' in str(f)])\n",
    )  # fmt: skip
    assert said(done) == ["torch runs applied", "after torch", "torch SourceFileLoader True []"]


def test_children_in_another_folder_find_a_relative_file(python: Path, folder: Path) -> None:
    (folder / "below").mkdir()
    child = "import os\nos.chdir('below')\nimport subprocess, sys\n"
    child += f"print(subprocess.run([sys.executable, '-c', 'import memguard; memguard.ledger()\\n' + {APPLIED!r}],"
    child += " capture_output=True, text=True, check=True).stdout, end='')\nprint(os.environ['MEMGUARD_CONFIG'])"
    assert said(run(python, folder, child)) == ["(True, ['torch'])", str(folder / "budget.yaml")]


CHILD = f"""
import os, subprocess, sys
os.chdir("below")
print(os.environ["MEMGUARD_CONFIG"], [n for n in sys.modules if n.partition(".")[0] == "memguard"])
env = {{k: v for k, v in os.environ.items() if k != "MEMGUARD_DISABLE"}} | {{"MEMGUARD_SIMULATE": "h200"}}
code = "import torch\\n" + {APPLIED!r}
sys.stdout.write(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout)
"""


def test_children_find_it_too_where_their_parent_was_told_to_apply_nothing(python: Path, folder: Path) -> None:
    (folder / "below").mkdir()
    done = run(python, folder, CHILD, MEMGUARD_DISABLE="1", PYTHONPATH=str(folder))
    assert said(done) == [f"{folder / 'budget.yaml'} []", "(True, ['torch'])"]
    assert done.stderr == ""


def test_children_find_it_too_where_their_parent_has_the_budget_of_memguard_run(python: Path, folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "own.yaml").write_text("version: 1\nframeworks:\n  cupy: {share: 50%}\n")
    (folder / "program.py").write_text(f"{APPLIED}{CHILD}")
    shown = [str(python), "program.py"]
    env = {"MEMGUARD_RUN": str(folder / "own.yaml"), "PYTHONPATH": f"{PACKAGE / '_tools/activation'}:{folder}"}
    own, child, budget = said(command(shown, folder, **env))
    assert own == "(True, ['cupy'])" and budget == "(True, ['torch'])"
    assert child.startswith(f"{folder / 'budget.yaml'} ['memguard'")


def test_the_home_folder_may_be_written_as_a_tilde(python: Path, folder: Path) -> None:
    done = run(python, folder, f"import torch\n{APPLIED}", config="~/budget.yaml", HOME=str(folder))
    assert said(done) == ["(True, ['torch'])"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: 1\nframeworks:\n  torch: {shre: 50%}\n", "budget.yaml:3:"),
        ("version: [", "budget.yaml:"),
        ("version: 1\nframeworks:\n  torch: {limit: 900GiB}\n", "900"),
        (None, "there is no such file"),
    ],
    ids=["key", "yaml", "plan", "missing"],
)
def test_a_broken_budget_is_one_message_and_the_program_runs(
    python: Path, folder: Path, text: str | None, words: str
) -> None:
    (folder / "budget.yaml").unlink() if text is None else (folder / "budget.yaml").write_text(text)
    done = run(
        python, folder,
        f"import torch, cupy, pycuda.driver\n{APPLIED}import memguard\n"
        "for _ in range(2):\n    try: memguard.ledger()\n"
        "    except memguard.NotActive as error: print(str(error).splitlines()[0])",
    )  # fmt: skip
    assert (
        said(done)
        == ["None"] + ["no budget is active in this process: that of MEMGUARD_CONFIG could not be applied"] * 2
    )
    assert done.stderr.startswith(NOT_APPLIED)
    assert done.stderr.count("memguard:") == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_a_fault_of_memguards_is_one_line_too(python: Path, folder: Path) -> None:
    code = "from memguard import api\ndef init(*a, **k): raise KeyError('fault')\n"
    code += "api.init = init\nimport torch, cupy"
    assert run(python, folder, code).stderr == f"{NOT_APPLIED}KeyError: 'fault'\n"


def test_each_child_says_it_once_itself(python: Path, folder: Path) -> None:
    (folder / "budget.yaml").write_text("no budget")
    code = (
        "import os, torch, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import torch, cupy'], check=True)\n"
        "child = os.fork()\nif not child:\n    import cupy, pycuda.driver, memguard\n    os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    assert run(python, folder, code).stderr.count(NOT_APPLIED) == 2


def test_an_interrupt_leaves_the_budget_waiting(python: Path, folder: Path) -> None:
    done = run(
        python, folder,
        "from memguard import api\nreal = api.init\ndef init(*a, **k): raise KeyboardInterrupt\n"
        "api.init = init\n"
        f"try: import torch\nexcept KeyboardInterrupt: print('stopped')\napi.init = real\nimport torch\n{APPLIED}",
    )  # fmt: skip
    assert said(done) == ["stopped", "(True, ['torch'])"]


@pytest.mark.parametrize(
    ("value", "applied"), [("1", "None"), ("yes", "None"), ("0", "(True, ['torch'])"), ("", "(True, ['torch'])")]
)
def test_memguard_disable_wins_over_the_variable(python: Path, folder: Path, value: str, applied: str) -> None:
    waiting = "import sys\nprint(sum('_Finder' in str(f) for f in sys.meta_path))\n"
    done = run(python, folder, f"{waiting}import torch\n{APPLIED}", MEMGUARD_DISABLE=value)
    assert said(done) == ["0" if applied == "None" else "1", applied]


def test_a_program_that_has_its_budget_from_the_variable_runs_through_without_it(python: Path, folder: Path) -> None:
    code = "import memguard\nmemguard.require('torch', '1TiB')\nprint(memguard.ledger().devices, memguard.trim())\n"
    code += "with memguard.workload('step', framework='torch') as report: pass\nmemguard.shutdown()\n"
    done = run(python, folder, f"{code}memguard.checkpoint()\n{APPLIED}", MEMGUARD_DISABLE="1")
    assert said(done) == ["() 0", "None"] and done.stderr == ""


def test_memguard_disable_may_come_later_and_leaves_init_alone(python: Path, folder: Path) -> None:
    code = f"import os\nos.environ['MEMGUARD_DISABLE'] = '1'\nimport torch\n{APPLIED}"
    code += f"import memguard\nmemguard.init('budget.yaml', simulate='h200')\n{APPLIED}"
    assert said(run(python, folder, code)) == ["None", "(True, ['torch'])"]


@pytest.mark.parametrize(
    "options", [["-m", "pip", "--version"], ["-m", "venv", "--help"], ["-m", "compileall", "-q", "."]]
)
def test_tools_start_nothing(python: Path, folder: Path, options: list[str]) -> None:
    (folder / "probe").mkdir()
    code = "import atexit, sys\n@atexit.register\ndef end():\n"
    code += "    sys.stderr.write(str([n for n in sys.modules if n.startswith('memguard')]))"
    (folder / "probe" / "sitecustomize.py").write_text(code)
    done = command([str(python), *options], folder, PYTHONPATH=str(folder / "probe"))
    assert (done.returncode, done.stderr) == (0, "[]")


@pytest.mark.parametrize(
    ("argv", "tool"),
    [
        ("/env/lib/python3.12/site-packages/pip/__main__.py", True), ("/env/bin/pip", True), ("pip3.12", True),
        ("setup.py", True), ("/tmp/x/_in_process.py", True), ("/env/lib/x/pip/__pip-runner__.py", True),
        ("/x/torch/_inductor/compile_worker/__main__.py", True), ("/opt/conda/bin/conda", True),
        ("/env/bin/memguard", True),
        ("train.py", False), ("pip.py", False), ("build.py", False), ("venv.py", False), ("-c", False), ("", False),
        ("/x/ipykernel_launcher.py", False), ("/env/bin/torchrun", False), ("/job/__main__.py", False),
    ],
)  # fmt: skip
def test_what_is_a_tool(argv: str, tool: bool) -> None:
    assert environment._is_tool([argv, "train.py"]) is tool
    assert not environment._is_tool([])


def test_a_tool_that_imports_a_framework_gets_no_budget(python: Path, folder: Path) -> None:
    (folder / "setup.py").write_text(f"import torch\n{APPLIED}")
    assert said(command([str(python), "setup.py"], folder)) == ["None"]


def test_an_environment_without_memguard_says_nothing(python: Path, folder: Path) -> None:
    """As where pip builds a package: the finder is there, and then the path is another."""
    done = run(
        python, folder, f"import sys\nsys.path[:] = [p for p in sys.path if p != {str(PACKAGE.parent)!r}]\nimport torch"
    )
    if PACKAGE.parent.name != "site-packages":
        assert (done.returncode, done.stderr) == (0, "")


def test_the_programs_own_init_with_that_file_is_the_same_guard(python: Path, folder: Path) -> None:
    code = "import torch, memguard\nfrom memguard import api\nfirst = api.current()\n"
    assert said(run(python, folder, f"{code}print(memguard.init('budget.yaml') is first)")) == ["True"]


@pytest.mark.parametrize("first", ["import torch", "pass"], ids=["applied", "waiting"])
def test_the_programs_own_init_replaces_it(python: Path, folder: Path, first: str) -> None:
    (folder / "own.yaml").write_text("version: 1\nframeworks:\n  cupy: {share: 50%}\n")
    code = (
        f"{first}\nimport memguard\nmemguard.init('own.yaml', simulate='h200')\nimport cupy, pycuda.driver\n{APPLIED}"
    )
    code += (
        "try: memguard.init('budget.yaml')\nexcept memguard.AlreadyActive: print('as ever')\n"
        "import logging\nprint(len(logging.getLogger('memguard').handlers))"
    )
    assert said(run(python, folder, code)) == ["(True, ['cupy'])", "as ever", "1"]


@pytest.mark.parametrize("call", ["if memguard.init('budget.yaml')", "with memguard.guard('budget.yaml')"])
def test_the_programs_own_first_call_means_the_simulated_gpus_too(python: Path, folder: Path, call: str) -> None:
    done = run(python, folder, f"import memguard\n{call}:\n    import torch, cupy\n{textwrap.indent(APPLIED, '    ')}")
    assert said(done) == ["(True, ['torch'])"]
    assert done.stderr == SIMULATED


def test_its_init_means_them_after_a_file_that_is_missing_too(python: Path, folder: Path) -> None:
    done = run(python, folder, f"import torch, memguard\nmemguard.init('budget.yaml')\n{APPLIED}", config="absent.yaml")
    assert said(done) == ["(True, ['torch'])"]
    assert done.stderr.startswith(NOT_APPLIED) and done.stderr.endswith(SIMULATED)


@pytest.mark.parametrize(
    ("config", "first"),
    [(None, "pass"), ("budget.yaml", "import os; os.environ['MEMGUARD_DISABLE'] = '1'")],
    ids=["no budget", "disabled"],
)
def test_its_init_means_the_simulated_ones_unless_it_is_disabled(
    python: Path, folder: Path, config: str | None, first: str
) -> None:
    code = f"{first}\nimport memguard\nfrom memguard._runtime import runtime\n"
    code += "def host(simulate):\n    print(simulate)\n    raise SystemExit\n"
    code += "runtime.open_host = host\nprint(memguard.init('budget.yaml').active)"
    done = run(python, folder, code, config=config)
    assert said(done) == (["['h200']"] if config is None else ["False"])
    assert done.stderr == (SIMULATED if config is None else "")


def test_a_timeline_without_a_folder_is_no_budget_and_says_so(python: Path, folder: Path) -> None:
    (folder / "budget.yaml").write_text(f"{BUDGET}monitor: {{timeline: absent/run.jsonl}}\n")
    done = run(python, folder, f"import torch\n{APPLIED}")
    assert said(done) == ["None"]
    assert done.stderr.startswith(NOT_APPLIED) and "make the folder" in done.stderr


def test_how_to_get_at_the_guard(python: Path, folder: Path) -> None:
    code = "import memguard\nmemguard.ledger()\nprint(list(memguard.init('budget.yaml').frameworks))"
    assert said(run(python, folder, code)) == ["['torch']"]


FAILING = """
import torch, memguard
from memguard._frameworks.simulated.adapter import SimulatedFramework as Framework
real = Framework.state
def state(self):
    if self.name == "cupy":
        raise memguard.DeviceError("gone")
    return real(self)
Framework.state = state
try:
    memguard.init("own.yaml")
except memguard.DeviceError:
    Framework.state = real
"""


def test_where_the_programs_own_cannot_be_applied_the_environments_stays_and_stays_replaceable(
    python: Path, folder: Path
) -> None:
    (folder / "own.yaml").write_text("version: 1\nframeworks:\n  cupy: {share: 50%}\n")
    done = run(python, folder, f"{FAILING}{APPLIED}memguard.init('own.yaml')\n{APPLIED}")
    assert said(done) == ["(True, ['torch'])", "(True, ['cupy'])"]


@pytest.mark.parametrize("first", ["import torch", "pass"], ids=["applied", "waiting"])
def test_shutdown_disarms(python: Path, folder: Path, first: str) -> None:
    code = f"{first}\nimport memguard, sys\nmemguard.shutdown()\nimport torch, cupy\n{APPLIED}"
    code += "print([f for f in sys.meta_path if 'memguard' in str(f)])\n"
    code += "import logging\nprint(len(logging.getLogger('memguard').handlers))\n"
    code += "try: memguard.ledger()\nexcept memguard.NotActive as error: print('MEMGUARD' in str(error))"
    assert said(run(python, folder, code)) == ["None", "[]", "1", "False"]


def test_memguard_run_brings_its_own_and_nothing_is_applied_twice(python: Path, folder: Path) -> None:
    (folder / "own.yaml").write_text("version: 1\nframeworks:\n  cupy: {share: 50%}\n")
    (folder / "program.py").write_text(
        f"import torch, cupy, sys\n{APPLIED}print(sum('memguard' in str(f) for f in sys.meta_path))"
    )
    words = [str(python), "-m", "memguard", "run", "-c", "own.yaml", "--device", "h200", str(python), "program.py"]
    done = command(words, folder)
    assert said(done) == ["(True, ['cupy'])", "1"]  # the one finder is the guard's, for the simulated framework
    assert done.stderr == SIMULATED


def test_memguard_run_comes_before_a_framework_of_the_users_sitecustomize(python: Path, folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import torch")
    (folder / "program.py").write_text(APPLIED)
    path = f"{folder / 'site'}:{folder}"
    words = [str(python), "-m", "memguard", "run", "-c", "budget.yaml", "--device", "h200", str(python), "program.py"]
    done = command(words, folder, config="none.yaml", PYTHONPATH=path, MEMGUARD_DISABLE="")
    assert said(done) == ["(True, ['torch'])"]
    assert done.stderr.count(NOT_APPLIED) == 1  # of the Python that runs `memguard run`, whose sitecustomize it is too


def test_finders_that_ask_around_are_no_trouble(python: Path, folder: Path) -> None:
    """As numba-cuda's, which sends `numba.cuda` elsewhere."""
    code = (
        "import importlib.util, sys\nclass Asks:\n    busy = False\n    def find_spec(self, name, *rest):\n"
        "        if self.busy: return None\n        self.busy = True\n"
        "        try: return importlib.util.find_spec(name)\n"
        "        finally: self.busy = False\nsys.meta_path.insert(0, Asks())\nimport torch\n"
        "print(type(torch.__spec__.loader).__name__, type(torch.__loader__).__name__)\n"
    )
    assert said(run(python, folder, code + APPLIED)) == ["SourceFileLoader SourceFileLoader", "(True, ['torch'])"]


def test_the_command_line_applies_nothing(python: Path, folder: Path) -> None:
    (folder / "broken.yaml").write_text("no budget")
    done = command([str(python), "-m", "memguard", "check", "budget.yaml"], folder, config="broken.yaml")
    assert (done.returncode, done.stderr) == (0, "")


POOL = """
import multiprocessing, sys
{top}
def work(_):
    import torch, memguard
    from memguard import api
    from memguard._runtime import runtime
    if runtime.this.session is None:
        try: memguard.ledger()
        except memguard.NotActive as error: return str(error).splitlines()[0]
    return "active"
if __name__ == "__main__":
    import torch
    context = multiprocessing.get_context({method!r})
    {more}
    with context.Pool(1) as pool:
        print(pool.map(work, [0])[0])
"""
A_WORKER = (
    "no budget is active in this process: it is a worker, and MEMGUARD_CONFIG applies to the program that starts "
    "workers"
)


@pytest.mark.parametrize("top", ["pass", "import torch"], ids=["within", "top"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_multiprocessing_are_passive(python: Path, folder: Path, method: str, top: str) -> None:
    done = run(python, folder, POOL.format(method=method, top=top, more=""))
    assert said(done) == [A_WORKER]
    assert done.stderr == SIMULATED  # the program's own


@pytest.mark.parametrize(
    ("method", "more"), [("spawn", ""), ("forkserver", "context.set_forkserver_preload(['torch'])")]
)
def test_workers_that_are_asked_to_get_the_budget(python: Path, folder: Path, method: str, more: str) -> None:
    done = run(python, folder, POOL.format(method=method, top="pass", more=more), MEMGUARD_CHILDREN="1")
    assert said(done) == ["active"]


def test_a_forked_child_of_a_process_with_the_budget_is_inert(python: Path, folder: Path) -> None:
    code = f"import os, torch\nif os.fork():\n    os.wait()\n    os._exit(0)\nimport cupy\n{APPLIED}"
    assert said(run(python, folder, code)) == ["None"]


@pytest.mark.parametrize(("option", "applied"), [("-S", False), ("-I", True), ("-E", True), ("-s", True)])
def test_options_of_python(python: Path, folder: Path, option: str, applied: bool) -> None:
    code = "import sys\nprint('_memguard_environment' in sys.modules)"
    assert said(run(python, folder, code, option)) == [str(applied)]


def test_two_installations_arm_once(python: Path, folder: Path) -> None:
    code = f"import site, sys\nsite.addsitedir({str(PTH.parent)!r})\n"
    code += "print(sum('_Finder' in str(f) for f in sys.meta_path))"
    assert said(run(python, folder, code)) == ["1"]


def test_without_the_variable_the_line_looks_up_and_does_nothing_else() -> None:
    """One line, as `site` wants it: an import, two looks into the environment, and the rest behind them."""
    lines = PTH.read_text().splitlines()
    assert len(lines) == 1
    looks = '"MEMGUARD_CONFIG" in os.environ or "MEMGUARD_WHEN_IDLE" in os.environ'
    assert lines[0].startswith(f"import os; ({looks}) and exec(")
    before = set(sys.modules)
    exec(lines[0].replace("MEMGUARD_CONFIG", "MEMGUARD_NEVER_SET"), {})
    assert set(sys.modules) == before


def test_what_stands_twice_is_the_same() -> None:
    """The file that waits imports nothing of memguard's, so it repeats some names."""
    assert tuple(row.hook for row in SPECS.values()) == environment.MODULES
    assert environment.POOLS == workers._POOLS
    assert environment.CHILDREN == workers.CHILDREN


def test_an_installation_has_the_line_at_the_top_of_its_site_packages() -> None:
    """Nothing to look at where the checkout is used without being installed."""
    for installed in metadata.distributions(name="memguard-gpu"):
        files = {str(file) for file in installed.files or []}
        top = {"memguard.pth", "memguard.start", "_memguard_start.py"}
        assert not files or top <= files  # a checkout's own metadata has none
