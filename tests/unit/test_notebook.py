"""`%load_ext memguard` in a real Jupyter kernel, under a budget of the environment on a simulated GPU."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from notebooks import Notebook, error, html, kernel, text

from memguard import notebook
from memguard._base.types import WorkloadReport

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
# Arrays that are freed when nothing holds them any more, as a framework's are.
ARRAYS = """
from memguard import api
GIB = 1 << 30
class Array:
    def __init__(self, name, size):
        self.framework = api.current().frameworks[name]
        self.id = self.framework.allocate(size)
    def __del__(self):
        if hasattr(self, "id"):
            self.framework.free(self.id)
def in_use(name):
    return api.ledger().devices[0].row(name).in_use / GIB
def train(size):
    weights = Array("torch", 40 * GIB)
    return grow(weights, size)
def grow(weights, size):
    gradients = Array("torch", 10 * GIB)
    return Array("torch", size)
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with kernel(tmp_path_factory.mktemp("kernel"), MEMGUARD_CONFIG="budget.yaml", MEMGUARD_SIMULATE="h200") as started:
        yield started


@pytest.fixture
def nb(shared: Notebook) -> Notebook:
    """With the extension and the budget, and with nothing allocated."""
    shared.run("%reset -f")  # the user's names, and what was shown
    shared.run(ARRAYS, "import gc, memguard, sys", "%load_ext memguard", "gc.collect()", "api.trim();")
    return shared


def test_the_kernel_has_the_environments_budget(nb: Notebook) -> None:
    assert nb.text("print(memguard.ledger().simulated, sorted(api.current().frameworks))") == "True ['cupy', 'torch']\n"


def test_the_ledger_is_a_table_and_plain_text_beside_it(nb: Notebook) -> None:
    nb.run("a = Array('torch', GIB)")
    outputs = nb.run("%memguard")
    assert html(outputs).count("<tr>") == 9 and "1,024.0" in html(outputs)
    assert "(simulated)" in html(outputs)
    plain = text(outputs)
    assert "NVIDIA H200 (simulated)" in plain and "1,024.0" in plain
    assert "\x1b" not in plain and "<" not in plain


def test_a_printed_ledger_is_text_and_nothing_else(nb: Notebook) -> None:
    """rich would show it itself in a notebook, in colours."""
    outputs = nb.run("print(memguard.ledger())")
    assert [out["output_type"] for out in outputs] == ["stream"]
    assert text(outputs) == nb.text("%memguard") + "\n" and "\x1b" not in text(outputs)


def test_plan_and_trim(nb: Notebook) -> None:
    assert "cupy" in nb.text("%memguard plan") and "reserve" in nb.text("%memguard plan")
    nb.run("a = Array('torch', GIB)\ndel a\nb = Array('cupy', 2 * GIB)\ndel b")
    assert nb.text("%memguard trim torch") == "1.00 GiB given back to the driver\n"
    assert nb.text("%memguard trim") == "2.00 GiB given back to the driver\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%memguard trim tensorflow", "'tensorflow' is not in the budget"),
        ("%memguard tirm", "usage: %memguard [plan"), ("%memguard trim torch cupy", "usage: %memguard [plan"),
        ("%memguard 'trim", "No closing quotation"), ("%%memguard\n1", "usage: %%memguard --framework NAME"),
        ("%%memguard --framwork torch\n1", "required: -f/--framework"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_sentence(nb: Notebook, line: str, says: str) -> None:
    outputs = nb.fails(line)
    assert says in text(outputs) and "Traceback" not in text(outputs)
    assert error(outputs) == ""


def test_a_cell_with_a_need(nb: Notebook) -> None:
    outputs = nb.run(
        "%%memguard --framework torch --needs 4GiB", "a = Array('torch', 3 * GIB)", "del a", "a = 40", "a + 2"
    )
    assert "torch peak 3.00 GiB, 0 B more in use than before" in text(outputs)
    number = next(out["execution_count"] for out in outputs if out["output_type"] == "execute_result")
    assert text(outputs).startswith(f"cell {number}: ") and text(outputs).endswith("42")
    assert nb.text("print(a)") == "40\n"  # the cell ran among the user's names


def test_a_cell_that_leaves_something_and_one_that_frees(nb: Notebook) -> None:
    assert "embed: torch peak" in nb.text("%%memguard -f torch --name embed", "a = Array('torch', 5 * GIB)")
    shown = nb.text("%%memguard -f torch", "del a")
    assert "peak no higher than it had been, 5.00 GiB less in use than before" in shown


def test_the_last_line_is_shown_as_in_any_cell(nb: Notebook) -> None:
    head = "%%memguard --framework torch"
    assert nb.text(head, "x = 1").count("\n") == 1
    assert nb.text(head, "x + 1;").endswith("before\n")
    assert nb.text(head, "print('first')", "x + 1").endswith("2")
    assert nb.text(head, "!echo from the shell", "%memguard trim").count("\n") == 3


def test_a_cell_that_does_not_fit_is_refused_before_it_runs(nb: Notebook) -> None:
    outputs = nb.fails("%%memguard --framework torch --needs 90GiB", "ran = True")
    assert "BudgetExceeded: torch needs 90.00 GiB" in error(outputs)
    assert "_guard/guard.py" not in error(outputs)  # the way to the refusal is of no interest
    assert nb.text("print('ran' in globals())") == "False\n"


def test_an_error_of_a_cell_with_a_need_is_explained_once(nb: Notebook) -> None:
    """The report follows the traceback, which leaves the note out; the error keeps it."""
    for _ in range(2):
        outputs = nb.fails("%%memguard --framework torch", "keep = Array('torch', 500 * GIB)")
        assert "ran out of GPU memory" not in error(outputs)
        assert text(outputs).count("ran out of GPU memory") == 1, "the report"
        assert "ran out of GPU memory" in nb.text("import sys\nprint(sys.last_value.__notes__)")


def test_an_error_of_the_cell_is_the_cells(nb: Notebook) -> None:
    outputs = nb.fails("%%memguard --framework torch", "def f():", "    return 1 / 0", "f()")
    assert error(outputs).endswith("ZeroDivisionError: division by zero")
    assert "----> 3     return 1 / 0" in error(outputs) or "----> 2     return 1 / 0" in error(outputs)
    assert "notebook.py" not in error(outputs)
    assert "torch peak" in text(outputs)
    assert "let go" not in text(outputs)
    assert nb.text("import sys\nprint(type(sys.last_value).__name__)") == "ZeroDivisionError\n"


def test_a_syntax_error_of_the_cell_runs_nothing(nb: Notebook) -> None:
    outputs = nb.fails("%%memguard --framework torch", "ran = True", "f())")
    assert "SyntaxError" in error(outputs)
    assert nb.text("print('ran' in globals())") == "False\n"


@pytest.mark.parametrize("head", [[], ["%%memguard --framework torch"]], ids=["plain", "magic"])
def test_an_out_of_memory_is_reported_and_lets_go_of_what_its_traceback_held(nb: Notebook, head: list[str]) -> None:
    nb.run("a = Array('torch', 4 * GIB)", "a")
    outputs = nb.fails(*head, "train(30 * GIB)")
    assert "SimulatedTorchOutOfMemory" in error(outputs) and "gradients = " in error(outputs)
    assert text(outputs).count("ran out of GPU memory") == 1
    assert text(outputs).endswith("memguard: let go of what the traceback held: torch 50.00 GiB\n")
    kinds = [out["output_type"] for out in outputs]
    assert kinds == [*(["stream"] if head else []), "error", "display_data", "stream"]  # under the traceback
    assert "torch ran out of GPU memory" in html(outputs)
    assert nb.text("print(in_use('torch'))") == "4.0\n"  # the user's own, which is in Out too, stays
    assert nb.text("import sys\nprint(type(sys.last_value).__name__)") == "SimulatedTorchOutOfMemory\n"
    assert "in grow" in nb.text("%tb") + error(nb.run("%tb"))


def test_each_cell_has_a_whole_report_and_one_that_tries_again_lines_after_it(nb: Notebook) -> None:
    for _ in range(2):
        outputs = nb.run(
            "for size in (90, 80, 70):\n    try:\n        with memguard.workload('try', framework='torch'):\n"
            "            train(size * GIB)\n    except Exception:\n        pass"
        )
        assert html(outputs).count("torch ran out of GPU memory") == 1
        again = re.findall(r"memguard: torch out of memory again \((\w+) time in", text(outputs))
        assert again == ["2nd", "3rd"]


def test_what_it_came_from_is_let_go_of_too(nb: Notebook) -> None:
    nb.fails(
        "def outer():\n    big = Array('cupy', 5 * GIB)\n    try:\n        train(30 * GIB)\n"
        "    except Exception as error:\n        raise error from KeyError('cause')\nouter()"
    )
    assert nb.text("print(in_use('torch'), in_use('cupy'))") == "0.0 0.0\n"


def test_what_the_user_keeps_of_it_is_the_users(nb: Notebook) -> None:
    nb.fails(
        "a = Array('torch', 4 * GIB)\n"
        "try:\n    train(30 * GIB)\nexcept Exception as error:\n    kept = error\n    raise"
    )
    assert nb.text("print(type(kept).__name__, kept.__traceback__ is not None, in_use('torch'))").endswith("True 4.0\n")


def test_another_error_keeps_what_debug_needs(nb: Notebook) -> None:
    nb.fails("def g():\n    here = Array('torch', 2 * GIB)\n    raise KeyError('x')\ng()")
    assert nb.text("print(in_use('torch'))") == "2.0\n"
    nb.fails("1 / 0")  # the next error takes its place
    nb.run("gc.collect();")
    assert nb.text("print(in_use('torch'))") == "0.0\n"


def test_unloading_leaves_nothing_and_touches_nothing_foreign(nb: Notebook) -> None:
    nb.run(
        "ip = get_ipython()\ndef theirs(*_): pass\nip.events.register('post_run_cell', theirs)\n"
        "ip.set_custom_exc((LookupError,), lambda self, *rest, **more: print('custom'))\n"
        "from memguard._oom import hooks\nevents = lambda: [c for cs in ip.events.callbacks.values() for c in cs]\n"
        "state = lambda: (ip.CustomTB, ip.custom_exceptions)\nbefore = state()"
    )
    nb.run("%reload_ext memguard")
    nb.run("%unload_ext memguard")
    shown = nb.text(
        "print('memguard' in ip.magics_manager.magics['line'], 'memguard' in ip.magics_manager.magics['cell'])\n"
        "print(state() == before, theirs in events(), [c for c in events() if 'memguard' in str(c)], hooks.display)\n"
        "print(api.current().active)"
    )
    assert shown == "False False\nTrue True [] None\nTrue\n"
    assert "not found" in text(nb.fails("%memguard"))
    assert text(nb.fails("raise KeyError('x')")) == "custom\n"
    nb.run("ip.set_custom_exc((), None)\nip.events.unregister('post_run_cell', theirs)")


def test_a_magic_that_another_took_over_stays_his(nb: Notebook) -> None:
    nb.run("%load_ext memguard\nget_ipython().register_magic_function(lambda line: print('his'), 'line', 'memguard')")
    nb.run("%unload_ext memguard")
    assert nb.text("%memguard") == "his\n"


def test_without_a_budget_the_magic_says_what_to_do(tmp_path: Path) -> None:
    with kernel(tmp_path) as nb:
        nb.run("%load_ext memguard")
        assert "fix: call memguard.init('budget.yaml') first" in text(nb.fails("%memguard"))
        nb.run("import memguard\nmemguard.init('budget.yaml', simulate='l4')")
        assert "NVIDIA L4" in nb.text("%memguard")


def test_a_broken_budget_leaves_the_kernel_running(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {shre: 50%}\n")
    (tmp_path / "cupy.py").write_text("")
    (tmp_path / "torch.py").write_text("")
    with kernel(tmp_path, MEMGUARD_CONFIG="budget.yaml", MEMGUARD_SIMULATE="h200") as nb:
        assert nb.text("1 + 1") == "2"
        assert "budget.yaml:3:" in nb.text("import torch")
        assert nb.text("import cupy\n1 + 1") == "2"
        assert "that of MEMGUARD_CONFIG could not be applied" in text(nb.fails("%load_ext memguard\n%memguard"))


def test_the_example_runs(tmp_path: Path) -> None:
    example = nbformat.read(EXAMPLE, as_version=4)
    cells = list(example.cells)
    example.cells = []
    with kernel(tmp_path, example) as nb:
        for cell in cells:
            if cell.cell_type == "code":
                fails = "raises-exception" in cell.metadata.get("tags", [])
                outputs = (nb.fails if fails else nb.run)(cell.source)
                assert ("error" in {out["output_type"] for out in outputs}) == fails


def test_the_example_is_stored_without_outputs_and_without_a_machine() -> None:
    example = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(example)
    assert set(example.metadata) == {"kernelspec", "language_info"}
    assert example.metadata.kernelspec.name == "python3" and set(example.metadata.language_info) == {"name"}
    for cell in example.cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)
        assert set(cell.metadata) <= {"tags"}


class Held:
    pass


def failing(held: list[weakref.ref[Held]]) -> None:
    mine = Held()
    held.append(weakref.ref(mine))
    raise ValueError("full")


def caught(depth: int, held: list[weakref.ref[Held]]) -> BaseException:
    """An error that came from another, whose frames somebody has looked into."""
    try:
        try:
            failing(held)
        except ValueError:
            failing(held)
    except ValueError as found:
        place = found.__traceback__
        while place is not None:
            _ = dict(place.tb_frame.f_locals)
            place = place.tb_next
        return found
    raise AssertionError


def test_let_go_empties_frames_and_keeps_the_error() -> None:
    held: list[weakref.ref[Held]] = []
    found = caught(1, held)
    assert [ref() is not None for ref in held] == [True, True]
    notebook.let_go(found)
    assert [ref() for ref in held] == [None, None]
    assert str(found) == "full" and found.__traceback__ is not None and found.__context__ is not None


def generator(held: list[weakref.ref[Held]], kept: list[BaseException], catches: bool) -> Iterator[str]:
    mine = Held()
    held.append(weakref.ref(mine))
    try:
        failing(held)
    except ValueError as error:
        kept.append(error)
        if not catches:
            raise
    try:
        yield "caught"
        yield "goes on"
    finally:
        kept.append(KeyError("ended"))


async def coroutine(held: list[weakref.ref[Held]], kept: list[BaseException], catches: bool) -> str:
    mine = Held()
    held.append(weakref.ref(mine))
    try:
        failing(held)
    except ValueError as error:
        kept.append(error)
        if not catches:
            raise
    try:
        await Once()
        await Once()
    finally:
        kept.append(KeyError("ended"))
    return "done"


async def asynchronous(held: list[weakref.ref[Held]], kept: list[BaseException], catches: bool) -> AsyncIterator[str]:
    mine = Held()
    held.append(weakref.ref(mine))
    try:
        failing(held)
    except ValueError as error:
        kept.append(error)
        if not catches:
            raise
    try:
        yield "caught"
        yield "goes on"
    finally:
        kept.append(KeyError("ended"))


class Once:
    def __await__(self) -> Iterator[None]:
        yield


def started(kind: Any, held: list[weakref.ref[Held]], kept: list[BaseException], catches: bool) -> Any:
    """A generator or its like, with its first step done: what sends it on."""
    made = kind(held, kept, catches)
    if kind is not asynchronous:
        made.send(None)
        return made
    with contextlib.suppress(StopIteration):
        made.__anext__().send(None)
    return made


@pytest.mark.parametrize("kind", [generator, coroutine, asynchronous])
def test_let_go_ends_nothing_that_caught_the_error_and_waits_to_go_on(kind: Any) -> None:
    held, kept = list[weakref.ref[Held]](), list[BaseException]()
    made = started(kind, held, kept, True)
    (error,) = kept
    notebook.let_go(error)
    assert len(kept) == 1, "its finally has not run"
    assert [ref() is not None for ref in held] == [True, False], "what it came through is empty, and it is not"
    if kind is asynchronous:
        with pytest.raises(StopIteration) as step:
            made.__anext__().send(None)
        assert step.value.value == "goes on"
    else:
        assert made.send(None) == ("goes on" if kind is generator else None)


@pytest.mark.parametrize("kind", [generator, coroutine, asynchronous])
def test_let_go_empties_those_that_the_error_ended(kind: Any) -> None:
    held, kept = list[weakref.ref[Held]](), list[BaseException]()
    with pytest.raises(ValueError, match="full") as caught:
        started(kind, held, kept, False)
    notebook.let_go(caught.value)
    assert [ref() for ref in held] == [None, None]


def test_let_go_leaves_one_that_merely_waits_alone() -> None:
    ended = list[bool]()

    def waits() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    one = waits()
    assert next(one) == 1
    try:
        failing([])
    except ValueError as error:
        notebook.let_go(error)
    assert ended == [] and next(one) == 2


class Group(Exception):
    """As Python has it from 3.11 on, and a package before that."""

    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def test_let_go_of_a_group_and_of_errors_in_a_ring() -> None:
    held: list[weakref.ref[Held]] = []
    first, second = caught(1, held), caught(1, held)
    first.__cause__, second.__cause__ = second, first
    notebook.let_go(Group(first, KeyError("x")))
    assert [ref() for ref in held] == [None] * 4


def test_let_go_leaves_what_still_runs_and_the_names_of_a_module_alone() -> None:
    mine = Held()
    names: dict[str, Any] = {"mine": mine}
    try:
        exec("raise ValueError('full')", names)
    except ValueError as error:
        notebook.let_go(error)
    assert mine is names["mine"]


@pytest.mark.parametrize(
    ("before", "after", "peak", "says"),
    [
        (0, 1 << 30, 2 << 30, "x: torch peak 2.00 GiB, 1.00 GiB more in use than before"),
        (1 << 30, 0, None, "x: torch peak no higher than it had been, 1.00 GiB less in use than before"),
        (None, None, None, "x: torch peak no higher than it had been, what it left is unknown"),
    ],
)
def test_the_summary(before: int | None, after: int | None, peak: int | None, says: str) -> None:
    assert notebook._summary(WorkloadReport("x", "torch", before, after, peak)) == says
    if before is not None:
        failed = notebook._summary(WorkloadReport("x", "torch", before, after, peak), failed=True)
        assert failed == f"{says}, with what the traceback holds"


def test_a_report_of_another_thread_is_shown_when_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    extension = notebook.Extension(None)
    extension.show("from between the cells")  # type: ignore[arg-type]
    assert capsys.readouterr().err == "from between the cells\n"
    extension.ran(SimpleNamespace(error_in_exec=None))
    extension.ran(SimpleNamespace())
    assert capsys.readouterr() == ("", "")
