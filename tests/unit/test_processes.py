"""How programs run: forks, workers, threads, notebooks, ends of the program, and other systems than Linux."""

from __future__ import annotations

import contextlib
import gc
import html
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard import _budget, api
from memguard._base.types import Applied
from memguard._frameworks import registry
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.guard import Guard
from memguard._runtime import runtime, workers
from memguard.errors import AlreadyActive, CapNotApplied, ConfigError, MemguardError, NotActive, PlanError

HOME = Path(memguard.__file__).parents[1]
BUDGET = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
OTHER = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"limit": "2GiB"}}}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    memguard.shutdown()
    assert sys.meta_path == finders


def start(budget: Any = BUDGET, **more: Any) -> Guard:
    return memguard.init(budget, simulate="h200", **more)


def program(folder: Path, text: str, *options: str, env: dict[str, str] | None = None) -> Any:
    """What a script of its own prints, its errors and its exit code."""
    script = folder / "script.py"
    script.write_text(f"BUDGET = {BUDGET!r}\n{textwrap.dedent(text)}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    if HOME.name != "site-packages":
        kept["PYTHONPATH"] = str(HOME)
    return subprocess.run(
        [sys.executable, "-W", "error", *options, str(script)],
        cwd=folder, env={**kept, **(env or {})}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# forks

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
SAID = "forked: memguard is inert in the child; call memguard.init there for a budget of its own"


class Pipe(logging.Handler):
    """What is logged in a child comes out here."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.reading, self._writing = os.pipe()

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._writing, f"{os.getpid()} {record.levelname} {record.getMessage()}\n".encode())

    def lines(self) -> list[str]:
        os.close(self._writing)
        with open(self.reading, encoding="utf-8") as pipe:
            return [line.rstrip("\n") for line in pipe if not line.startswith(f"{os.getpid()} ")]


@pytest.fixture
def said() -> Iterator[Pipe]:
    logger, pipe = logging.getLogger("memguard"), Pipe()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(pipe)
    yield pipe
    logger.removeHandler(pipe)
    logger.setLevel(level)


def inert() -> str:
    """In a child: empty where nothing of the parent's budget acts, else what does."""
    if any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        return "an import hook"
    try:
        memguard.ledger()
    except NotActive as error:
        return "" if "it was forked" in str(error) and "fix: call memguard.init here" in str(error) else str(error)
    return "a ledger"


def by_fork() -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if inert() == "" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_fork_in_a_thread() -> int:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(by_fork()))
    thread.start()
    thread.join(30)
    return codes[0]


def _exit_inert() -> None:
    sys.exit(inert() or 0)


def by_multiprocessing() -> int:
    child = multiprocessing.get_context("fork").Process(target=_exit_inert)
    child.start()
    child.join(30)
    assert child.exitcode is not None
    return child.exitcode


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("way", [by_fork, by_fork_in_a_thread, by_multiprocessing])
def test_a_forked_child_is_inert_and_warns_once(said: Pipe, way: Callable[[], int]) -> None:
    guard = start()
    assert way() == 0
    (line,) = said.lines()
    assert line.endswith(f" DEBUG {SAID}")
    assert guard.active and memguard.ledger().simulated, "the parent goes on"


@forks
def test_a_child_of_a_process_without_a_budget_has_nothing_to_say(said: Pipe) -> None:
    start()
    memguard.shutdown()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert said.lines() == []


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_the_first_init_still_runs_can_have_a_budget(tmp_path: Path) -> None:
    """The lock is held by a thread that the child does not have."""
    done = program(
        tmp_path,
        """
        import os, signal, threading
        import memguard
        from memguard import api
        from memguard._runtime import runtime
        from memguard._devices.simulated import SimulatedHost
        from memguard._base.types import Device
        inside, go_on = threading.Event(), threading.Event()
        class Slow(SimulatedHost):
            def devices(self, **more):
                if threading.current_thread() is not threading.main_thread():
                    inside.set()
                    go_on.wait(20)
                return super().devices(**more)
        runtime.open_host = lambda simulate: Slow(("h200",))
        thread = threading.Thread(target=memguard.init, args=(BUDGET,))
        thread.start()
        inside.wait(20)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            os._exit(0 if memguard.init(BUDGET).active and memguard.ledger().simulated else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        go_on.set()
        thread.join()
        print(code, memguard.ledger().simulated)
        """,
        "-W", "ignore::DeprecationWarning",
    )  # fmt: skip
    assert done.stdout == "0 True\n", done.stderr


# workers of multiprocessing


class Process:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({}, False),
        ({"multiprocessing.process": None}, False),
        ({"multiprocessing.process": types.SimpleNamespace()}, False),
        ({"multiprocessing.process": types.SimpleNamespace(current_process=Process)}, False),
        ({"multiprocessing.process": types.SimpleNamespace(current_process=lambda: Process(_inheriting=True))}, True),
        ({"multiprocessing.process": types.SimpleNamespace(current_process=lambda: Process(_inheriting=False))}, False),
        ({"multiprocess.process": types.SimpleNamespace(current_process=lambda: Process(_inheriting=True))}, True),
        ({"billiard.process": types.SimpleNamespace(current_process=lambda: Process(_inheriting=True))}, True),
    ],
)
def test_where_a_script_is_imported_again(modules: dict[str, object], expected: bool) -> None:
    assert workers.reimporting(modules) is expected


@pytest.mark.parametrize(
    ("reimporting", "environ", "expected"),
    [
        (False, {}, True),
        (False, {"MEMGUARD_CHILDREN": "0"}, True),
        (True, {}, False),
        (True, {"MEMGUARD_CHILDREN": ""}, False),
        (True, {"MEMGUARD_CHILDREN": "0"}, False),
        (True, {"MEMGUARD_CHILDREN": "1"}, True),
    ],
)
def test_whether_init_is_wanted(reimporting: bool, environ: dict[str, str], expected: bool) -> None:
    assert workers.wanted(reimporting, environ) is expected


def test_init_imports_no_multiprocessing(tmp_path: Path) -> None:
    text = (
        "import sys, memguard\nmemguard.init(BUDGET, simulate='h200')\nmemguard.ledger()\n"
        "print('multiprocessing' in sys.modules)"
    )
    assert program(tmp_path, text).stdout == "False\n"


@pytest.fixture
def importing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like a worker in which multiprocessing imports the script again."""
    monkeypatch.setattr(multiprocessing.process.current_process(), "_inheriting", True, raising=False)
    monkeypatch.delenv(workers.CHILDREN, raising=False)


@pytest.mark.usefixtures("importing_again")
def test_what_a_passive_init_returns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "memguard"):
        guard = memguard.init("no such file.yaml")
    assert [record.levelname for record in caplog.records] == ["DEBUG"] and "worker" in caplog.text
    assert isinstance(guard, Guard) and guard.active is False and not guard.frameworks and guard.stop() == []
    assert "memguard.init does nothing" in str(guard) and "Passive" in repr(guard)
    calls: list[Callable[[], object]] = [
        memguard.ledger, memguard.trim, lambda: guard.ledger(), lambda: guard.plan, lambda: guard.budget,
        lambda: memguard.require("torch", "1GiB"), lambda: guard.require("torch", "1GiB"),
        lambda: memguard.resize("torch", "1GiB"), guard.start,
        lambda: memguard.workload("w", framework="torch").__enter__(),
        lambda: memguard.record_trace("trace.jsonl").__enter__(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotActive) as caught:
            call()
        assert "it is a worker, and memguard.init does nothing while" in str(caught.value)
        assert "fix: put this call under `if __name__ == '__main__':`" in str(caught.value)
        assert "set MEMGUARD_CHILDREN=1 and start workers with spawn" in str(caught.value)
    assert memguard.shutdown() == []


@pytest.mark.usefixtures("importing_again")
def test_whatever_a_guard_can_do_a_passive_one_answers_or_refuses() -> None:
    guard = memguard.init(BUDGET)
    public = {name for name in {*dir(Guard), *vars(Guard.__new__(Guard))} if not name.startswith("_")}
    for name in public - {"active", "frameworks", "start", "stop", "forked", "notes", "permanent"}:
        with pytest.raises(NotActive):
            getattr(guard, name)
    guard.forked()
    assert guard.notes == guard.permanent == []
    assert guard._repr_html_() == f"<pre>{html.escape(str(guard))}</pre>"


@pytest.mark.usefixtures("importing_again")
def test_a_block_under_a_passive_budget_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with memguard.guard(BUDGET) as guard:
        assert not guard.active
        monkeypatch.setenv(workers.CHILDREN, "1")
        assert start().active
    assert memguard.ledger().simulated, "the block ends what it began, which is nothing"


def test_after_the_import_init_works_and_the_reason_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.current_process(), "_inheriting", True, raising=False)
        memguard.init(BUDGET)
    with pytest.raises(NotActive, match="it is a worker"):
        memguard.ledger()
    assert start().active and memguard.ledger().simulated
    memguard.shutdown()
    with pytest.raises(NotActive) as caught:
        memguard.ledger()
    assert "worker" not in str(caught.value)


def test_a_budget_that_is_active_in_the_worker_already_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = start()
    monkeypatch.setattr(multiprocessing.process.current_process(), "_inheriting", True, raising=False)
    assert start() is guard and start(OTHER, replace=True) is guard and guard.active


WORKERS = """
import json, logging, multiprocessing, os, pathlib, sys
import memguard
logging.basicConfig(filename=f"log.{os.getpid()}", level=logging.DEBUG, format="%(levelname)s %(message)s")
guard = memguard.init(BUDGET, simulate="h200")
at_import, importer = guard.active, os.getpid()

def why():
    try:
        return "simulated" if memguard.ledger().simulated else "real"
    except memguard.NotActive as error:
        return str(error)

def work(_):
    import memguard.api
    loaded = [name for name in ("nvml", "real", "simulated") if f"memguard._devices.{name}" in sys.modules]
    before = why()
    own = memguard.init(BUDGET, simulate="h200")
    after = why()
    memguard.shutdown()
    log = pathlib.Path(f"log.{os.getpid()}")
    return {"pid": os.getpid(), "importer": importer, "name": __name__, "at_import": at_import,
            "before": before, "after": after, "loaded": loaded, "log": log.read_text() if log.exists() else ""}

if __name__ == "__main__":
    with multiprocessing.get_context(os.environ["METHOD"]).Pool(1) as pool:
        print(json.dumps([os.getpid(), at_import, why(), pool.map(work, [0])[0]]))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_has_a_budget_if_it_asks_for_one(tmp_path: Path, method: str, asked: bool) -> None:
    done = program(tmp_path, WORKERS, env={"METHOD": method, **({"MEMGUARD_CHILDREN": "1"} if asked else {})})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pid, at_import, parent, worker = json.loads(done.stdout)
    assert worker["pid"] != pid and at_import and parent == "simulated"
    assert worker["name"] == "__mp_main__", "the script was imported again"
    assert worker["after"] == "simulated", "init in the function that the worker runs"
    preloaded = worker["importer"] != worker["pid"]  # by the fork server, from Python 3.12.8 on
    assert not preloaded or method == "forkserver"
    if not preloaded:
        assert worker["at_import"] is asked
        assert (worker["before"] == "simulated") is asked
        assert ("imports the script again in a worker" in worker["log"]) is not asked
    elif asked:
        assert "MEMGUARD_CHILDREN=1 does not reach them" in worker["before"]
    if not asked:
        assert worker["loaded"] == []
        assert "it is a worker" in worker["before"] and "MEMGUARD_CHILDREN=1" in worker["before"]


SERVED = """
import logging, multiprocessing, os, sys
def work(_):
    import memguard
    try:
        said = memguard.ledger().simulated
    except memguard.NotActive as error:
        said = str(error).splitlines()[0]
    return said, memguard.init({budget!r}, simulate="h200").active
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with context.Pool(1) as pool:
        print(*pool.map(work, [0])[0], sep="|")
"""


def test_a_budget_that_only_the_fork_server_got_is_missed_aloud(tmp_path: Path) -> None:
    """From Python 3.12.8 on the server imports the script itself, and the workers do not: as here a module."""
    (tmp_path / "preloaded.py").write_text(
        "import logging\nlogging.basicConfig(format='%(levelname)s %(message)s')\n"
        f"import memguard\nmemguard.init({BUDGET!r}, simulate='h200')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(HOME)] if HOME.name != "site-packages" else [str(tmp_path)])
    done = program(tmp_path, SERVED.format(budget=BUDGET), env={"PYTHONPATH": path})
    said = "no budget is active in this process: it is a worker of multiprocessing's fork server"
    assert done.stdout.startswith(said) and done.stdout.endswith("|True\n"), done.stderr
    assert f"WARNING {said}" in done.stderr and "fix: call memguard.init in the function" in done.stderr


@pytest.mark.parametrize(
    ("command", "parent", "expected"),
    [
        (["-c", "from multiprocessing.forkserver import main; main(3)"], None, True),
        (["-c", "from multiprocessing.forkserver import main; main(3)"], object(), False),
        (["script.py"], None, False),
    ],
)
def test_whose_fork_it_is(command: list[str], parent: object, expected: bool) -> None:
    modules = {"multiprocessing.process": types.SimpleNamespace(parent_process=lambda: parent)}
    assert workers.from_fork_server(modules, command) is expected
    assert workers.from_fork_server({}, command) is False


def test_a_program_that_a_program_starts_is_like_any_other(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
        import os, subprocess, sys
        import memguard
        memguard.init(BUDGET, simulate="h200")
        print(os.environ.get("RANK"), memguard.ledger().simulated, flush=True)
        if "RANK" not in os.environ:  # as torchrun does it
            subprocess.run([sys.executable, __file__], env={**os.environ, "RANK": "0"}, check=True)
        """,
    )
    assert done.stdout == "None True\n0 True\n", done.stderr


# ends of the program


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("raise SystemExit", 0, ""),
        ("sys.exit('stopped')", 1, "stopped"),
        ("os._exit(9)", 9, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_the_end_of_a_program_is_its_own(tmp_path: Path, end: str, code: int, last: str) -> None:
    text = f"""
    import atexit, os, sys, threading
    import memguard
    atexit.register(lambda: print(threading.active_count(), flush=True))
    guard = memguard.init(BUDGET, simulate="h200")
    {end}
    """
    done = program(tmp_path, text, "-X", "dev")
    without = program(tmp_path, text.replace('guard = memguard.init(BUDGET, simulate="h200")', "guard = 1"))
    assert (done.returncode, done.stdout, done.stderr) == (without.returncode, without.stdout, without.stderr)
    assert done.returncode == code and done.stderr.strip().endswith(last) and bool(done.stderr) is bool(last)
    assert done.stdout in ("1\n", "") and bool(done.stdout) is (code not in (9, -15))


@forks
def test_a_child_may_end_at_once(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
        import multiprocessing, os
        import memguard
        def work():
            memguard.init(BUDGET, simulate="h200")
            os._exit(4)
        memguard.init(BUDGET, simulate="h200")
        for method in ("fork", "spawn"):
            if __name__ == "__main__":
                child = multiprocessing.get_context(method).Process(target=work)
                child.start()
                child.join(30)
                print(child.exitcode, memguard.ledger().simulated)
        """,
    )
    assert (done.stdout, done.stderr) == ("4 True\n4 True\n", "")


# threads


@pytest.fixture
def impatient() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], object]) -> list[BaseException]:
    """Run all of them at once; what they raise."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait(20)
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    return raised


def test_a_budget_from_a_thread_is_the_processs() -> None:
    assert together(start) == []
    assert memguard.ledger().simulated


@pytest.mark.usefixtures("impatient")
def test_threads_that_begin_the_same_budget_have_one_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Guard] = []
    begin = Guard.start

    def count(guard: Guard) -> None:
        made.append(guard)
        time.sleep(0.001)
        begin(guard)

    monkeypatch.setattr(Guard, "start", count)
    for turn in range(20):
        guards: list[Guard] = []
        made.clear()
        assert together(*[lambda guards=guards: guards.append(start())] * 6) == []
        assert len(guards) == 6 and len({id(guard) for guard in guards}) == 1 == len(made), turn
        assert len([finder for finder in sys.meta_path if isinstance(finder, ImportHook)]) == 1
        memguard.shutdown()


def test_of_blocks_that_begin_at_once_the_one_that_began_the_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other leaves it as it found it: active."""
    load, begin = _budget.of, Guard.start
    both, inside, left = threading.Barrier(2), threading.Barrier(2), threading.Event()
    began, seen = [], []

    def loading(budget: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # they meet here only where neither waits for the other
        return load(budget)

    def starting(guard: Guard) -> None:
        began.append(threading.current_thread())
        begin(guard)

    def work() -> None:
        with memguard.guard(BUDGET, simulate="h200"):
            inside.wait(20)
            if [threading.current_thread()] == began:
                left.wait(20)
                seen.append(runtime.this.session is not None and runtime.this.session.active)
        left.set()

    monkeypatch.setattr(_budget, "of", loading)
    monkeypatch.setattr(Guard, "start", starting)
    assert together(work, work) == []
    assert seen == [True] and runtime.this.session is None


@pytest.mark.usefixtures("impatient")
def test_a_ledger_during_a_shutdown_is_one_or_none() -> None:
    stop = threading.Event()
    read = [0, 0]

    def reading() -> None:
        while not stop.is_set():
            try:
                for part in memguard.ledger().devices:
                    assert sum(row.bytes or 0 for row in part.rows) == part.device.total
                read[0] += 1
            except NotActive:
                read[1] += 1

    def ending() -> None:
        try:
            end = time.monotonic() + 20
            for turn in range(150):
                start(replace=bool(turn % 2))
                while read[0] < turn and time.monotonic() < end:
                    time.sleep(0)
                memguard.shutdown()
        finally:
            stop.set()

    assert together(ending, reading, reading) == []
    assert min(read) > 0


# notebooks


def hooks() -> int:
    return len([finder for finder in sys.meta_path if isinstance(finder, ImportHook)])


def test_a_cell_that_is_run_again_and_again() -> None:
    guards: list[weakref.ref[Guard]] = []
    for turn in range(30):
        guard = start(OTHER if turn % 2 else BUDGET, replace=True)
        assert guard.active and hooks() == 1, "one budget, one hook"
        guards.append(weakref.ref(guard))
        assert start(OTHER if turn % 2 else BUDGET) is guard, "the same cell, unchanged"
        assert start(OTHER if turn % 2 else BUDGET, replace=True) is guard
    del guard
    gc.collect()
    assert sum(kept() is not None for kept in guards) == 1, "nothing keeps the ones before"


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        ({"version": 1, "frameworks": {"torch": {"limt": "1GiB"}}}, ConfigError),
        ({**BUDGET, "device": {"limit": "900GiB"}}, PlanError),
        ("no such file.yaml", ConfigError),
        (OTHER, AlreadyActive),
    ],
)
def test_an_edit_that_is_wrong_leaves_the_budget_before(edit: Any, error: type[MemguardError]) -> None:
    guard = start()
    for _ in range(3):
        with pytest.raises(error):
            start(edit, replace=error is not AlreadyActive)
        assert guard.active and start() is guard and hooks() == 1
        assert memguard.ledger().devices[0].row("torch").cap == 4 << 30


def test_an_edit_whose_cap_cannot_hold_brings_the_budget_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(SimulatedFramework):
        def apply(self, caps: Any, options: Any, undo: Any) -> Applied:
            if min(caps.values()) < 3 << 30:
                raise CapNotApplied(self.name, "it is too small", "ask for more")
            return super().apply(caps, options, undo)

    monkeypatch.setattr(registry, "create", lambda name, host: Refuses(host, name, imported=True))
    start()
    for _ in range(3):
        with pytest.raises(CapNotApplied, match="too small"):
            start(OTHER, replace=True)
        assert memguard.ledger().devices[0].row("torch").cap == 4 << 30
        assert start() is api.current() and hooks() == 0
    memguard.shutdown()
    with pytest.raises(CapNotApplied, match="too small"):
        start(OTHER)
    with pytest.raises(NotActive):
        memguard.ledger()


def test_a_budget_that_its_owner_stopped_is_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    start().stop()
    begin = Guard.start
    started: list[Guard] = []

    def fails(guard: Guard) -> None:
        started.append(guard)
        begin(guard)
        raise CapNotApplied("torch", "a reason", "a remedy")

    monkeypatch.setattr(Guard, "start", fails)
    with pytest.raises(CapNotApplied):
        start(OTHER)
    assert len(started) == 1
    with pytest.raises(NotActive):
        memguard.ledger()
    started[0].stop()


# what an exception holds


class Tensor:
    """Stands for what fills a card: it must go when its last user's name goes."""


class Keeps(logging.Handler):
    """A log that keeps its records, as breadcrumbs of error reports do."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept_log() -> Iterator[Keeps]:
    logger, handler = logging.getLogger("memguard"), Keeps()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    gc.disable()
    yield handler
    gc.enable()
    logger.removeHandler(handler)
    logger.setLevel(level)


def block(name: str) -> contextlib.AbstractContextManager[Any]:
    if name == "workload":
        return memguard.workload("w", framework="torch", needs="1GiB")
    return memguard.guard(BUDGET if name == "the same budget" else OTHER, replace=True, simulate="h200")


@pytest.mark.parametrize("name", ["workload", "the same budget", "another budget"])
def test_an_exception_goes_through_as_it_is_and_takes_what_it_held_along(kept_log: Keeps, name: str) -> None:
    start()
    alive: list[weakref.ref[Tensor]] = []

    class Mine(Exception):
        pass

    def fails() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        raise Mine("text")

    def user() -> None:
        with block(name):
            fails()

    try:
        user()
    except Mine as error:
        functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        said = (type(error), str(error), error.__cause__, error.__context__, functions[1:])
        assert alive[0]() is not None
    assert said == (Mine, "text", None, None, ["user", "fails"])
    assert alive[0]() is None
    assert kept_log is not None


def test_an_init_that_fails_keeps_nothing_of_who_called_it(kept_log: Keeps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says that the budget before could not come back either: it must say it as text."""
    start()
    begin = Guard.start

    def fails(guard: Guard) -> None:
        begin(guard)
        guard.stop()
        raise CapNotApplied("torch", "a reason", "a remedy")

    monkeypatch.setattr(Guard, "start", fails)
    alive: list[weakref.ref[Tensor]] = []

    def user() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        start(OTHER, replace=True)

    with contextlib.suppress(CapNotApplied):
        user()
    assert any("no budget is active any more" in record.getMessage() for record in kept_log.records)
    assert alive[0]() is None


# other systems


ELSEWHERE = """
import sys
import click, json, logging, pydantic, pydantic_core, rich.console, rich.table, rich.box, subprocess, threading, yaml
import click.testing, ctypes, multiprocessing
import os, signal
pydantic.create_model("All", of=(pydantic.BaseModel, None))  # it imports when it is first used
sys.platform = {system!r}
for name in ("register_at_fork", "fork", "RTLD_NOLOAD", "RTLD_GLOBAL"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGPIPE", "SIGXFSZ"):
    if sys.platform == "win32":
        delattr(signal, name)
        os.execvpe = lambda *given: os._exit(0)  # the shell goes on while the program still runs
for name in ("resource", "fcntl"):
    sys.modules[name] = None
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
import memguard
from memguard.cli import main
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_without_an_nvidia_system_what_needs_none_works(tmp_path: Path, system: str) -> None:
    (tmp_path / "budget.yaml").write_text(json.dumps(BUDGET))
    done = program(
        tmp_path,
        ELSEWHERE.format(system=system)
        + """
def cli(*words):
    done = click.testing.CliRunner().invoke(main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return [done.exit_code, done.output]
result = {"check": cli("check", "budget.yaml"), "plan": cli("plan", "budget.yaml", "--device", "h200"),
          "schema": cli("check", "--schema"), "here": cli("plan", "budget.yaml")}
guard = memguard.init("budget.yaml", simulate="h200")
result["active"], result["sum"] = guard.active, sum(row.bytes or 0 for row in memguard.ledger().devices[0].rows)
memguard.require("torch", "1GiB")
with memguard.workload("w", framework="torch"):
    pass
result["stays"] = memguard.shutdown()
try:
    memguard.init("budget.yaml")
except memguard.DeviceError as error:
    result["real"] = str(error)
try:
    memguard.ledger()
except memguard.NotActive:
    result["none"] = True
print(json.dumps(result))
""",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["check"][0] == found["plan"][0] == found["schema"][0] == 0, found
    assert "NVIDIA H200 (simulated)" in found["plan"][1] and json.loads(found["schema"][1])
    assert found["active"] and found["sum"] == 143_771 << 20 and found["stays"] == [] and found["none"]
    name = {"darwin": "macOS", "win32": "Windows"}[system]
    assert f"this is {name} ({system})" in found["real"] and "simulate='h200'" in found["real"]
    assert "\n    fix: run on Linux" in found["real"]
    assert found["here"][0] == 3 and name in found["here"][1] and "--device h200" in found["here"][1]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_run_on_another_system_starts_the_program_and_has_its_exit_code(tmp_path: Path, system: str) -> None:
    (tmp_path / "budget.yaml").write_text(json.dumps(BUDGET))
    code = "import memguard, sys; print(memguard.ledger().simulated); sys.exit(6)"
    done = program(
        tmp_path,
        ELSEWHERE.format(system=system)
        + f"main(['run', '-c', 'budget.yaml', '--device', 'h200', '--', sys.executable, '-c', {code!r}])",
    )
    assert (done.returncode, done.stdout) == (6, "True\n"), done.stderr
