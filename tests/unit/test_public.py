"""The public face: few names, bound when first used, and an import that leaves nothing behind."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import logging
import pickle
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest

import memguard
from memguard import errors
from memguard.errors import (
    BudgetExceeded,
    CannotShare,
    CapNotApplied,
    ConfigError,
    LeaseRefused,
    MemguardError,
    PlanError,
    Problem,
)

MODULES = {"exchange"}
"""The public names that are modules with public names of their own."""
SUBMODULES = {"errors", "types"}
"""Reached as `memguard.errors`, too, but not given out by `import *`: one would hide the standard library's `types`."""
HOOKS = {"load_ipython_extension", "unload_ipython_extension"}
"""What IPython calls for `%load_ext memguard`. No name for a program."""
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HEAVY = ("torch", "tensorflow", "pycuda", "numpy", "pynvml", "cuda", "rich", "click", "pydantic", "yaml")


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has beyond its own after running `code`."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nafter = set(sys.modules)\n"
    program += "import json\nprint(json.dumps(sorted(after - before)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_the_standard_library_and_nothing_else() -> None:
    found = loaded_by("import memguard")
    assert {name for name in found if name.startswith("memguard")} == {"memguard"}
    others = {name.partition(".")[0] for name in found} - {"memguard"}
    assert others <= set(sys.stdlib_module_names)


def test_importing_starts_no_thread_and_changes_no_hook() -> None:
    loaded_by(
        "import threading, os, logging, importlib, typing, warnings\n"
        "state = lambda: (list(sys.meta_path), list(sys.path_hooks), threading.active_count(), dict(os.environ),"
        " sys.excepthook, logging.getLogger().handlers[:], warnings.filters[:], sys.path[:])\n"
        "first = state()\nimport memguard\nassert state() == first, 'changed'"
    )


def test_importing_reads_no_environment_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "memguard.yaml").write_text("not a budget")
    done = subprocess.run(
        [sys.executable, "-c", "import memguard\nfor name in memguard.__all__: getattr(memguard, name)"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(memguard.__file__).parents[1]), "MEMGUARD_CONFIG": str(tmp_path / "missing.yaml")},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_opens_no_file_but_its_modules() -> None:
    """Seen by an audit hook: Python's modules, memguard's own, and nothing else."""
    code = (
        "import json, os, sys\nopened, on = [], True\n"
        "def audit(event, arguments):\n    if on and event == 'open': opened.append(str(arguments[0]))\n"
        "sys.addaudithook(audit)\nimport memguard\non = False\n"
        "folders = os.path.dirname(memguard.__file__), os.path.dirname(os.__file__)\n"
        "print(json.dumps([p for p in opened if not (p.startswith(folders) and p.endswith(('.py', '.pyc')))]))"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


def test_a_budget_on_simulated_gpus_loads_no_framework_and_no_driver() -> None:
    found = loaded_by(
        "import memguard\n"
        "memguard.init({'version': 1, 'frameworks': {'torch': {'share': '50%'}, 'tensorflow': {'share': '20%'}}},"
        " simulate='h200')\n"
        "memguard.require('torch', '1GiB'); memguard.ledger().as_dict(); memguard.shutdown()"
    )
    tops = {name.partition(".")[0] for name in found}
    assert not tops & {"torch", "tensorflow", "pycuda", "numpy", "pynvml", "cuda", "rich", "click"}
    assert "memguard._frameworks.torch.adapter" not in found and "memguard._devices.real" not in found


def test_errors_are_bound_without_what_they_do_not_need() -> None:
    found = loaded_by("from memguard import BudgetExceeded, ConfigError, NotActive")
    assert {name for name in found if name.startswith("memguard")} == {
        "memguard",
        "memguard._base.advice",
        "memguard._base",
        "memguard._base.text",
        "memguard.errors",
    }
    assert not {name.partition(".")[0] for name in found} & set(HEAVY)


def home(value: object) -> str:
    """The module that a public name is of; a module's own name."""
    return value.__name__ if isinstance(value, types.ModuleType) else str(value.__module__)


def test_the_public_names() -> None:
    assert memguard.__all__ == sorted(memguard.__all__)
    for name in memguard.__all__:
        value = getattr(memguard, name)
        assert value is getattr(memguard, name)
        assert (value.__doc__ or "").strip(), f"{name} says nothing about itself"
        assert isinstance(value, types.ModuleType) == (name in MODULES)
        assert name in MODULES or callable(value)
        assert home(value).startswith("memguard.")
    assert dir(memguard) == sorted([*memguard.__all__, *SUBMODULES, "__version__"])
    assert len(memguard.__all__) < 40, "what a program calls, and what it may have to catch"
    for name in (*SUBMODULES, *HOOKS):
        assert name not in memguard.__all__ and getattr(memguard, name)
    namespace: dict[str, object] = {}
    exec("from memguard import *", namespace)
    assert set(memguard.__all__) == set(namespace) - {"__builtins__"}


def test_the_types_of_what_is_returned() -> None:
    """Each has a public name and is what the functions return; importing the module loads none of them."""
    types_ = memguard.types
    assert types_.__all__ == sorted(types_.__all__) == dir(types_)
    for name in types_.__all__:
        value = getattr(types_, name)
        assert value is getattr(types_, name)
        assert name == "FrameworkName" or (value.__doc__ or "").strip(), f"{name} says nothing about itself"
        assert name == "FrameworkName" or (value.__name__ == name and home(value).startswith("memguard."))
    with pytest.raises(AttributeError, match=r"module 'memguard\.types' has no attribute 'ledger'"):
        _ = types_.ledger  # type: ignore[attr-defined]
    found = loaded_by("from memguard import types\nimport memguard.types")
    assert {name for name in found if name.startswith("memguard")} == {"memguard", "memguard.types"}


def test_what_public_functions_return_has_a_public_name() -> None:
    """So that it can be written in an annotation: of the functions, and of the fields of what they return."""
    public = {*memguard.__all__, *memguard.types.__all__, *memguard.exchange.__all__, *vars(errors)}
    others = {"Any", "Callable", "Iterator", "Literal", "Mapping", "Sequence", "TypeVar", "None"}
    functions = {name: getattr(memguard, name) for name in memguard.__all__}
    functions |= {f"retry.{name}": getattr(memguard.retry, name) for name in ("call", "attempts")}
    seen = set()
    for name, function in functions.items():
        if inspect.isfunction(function):
            said = str(inspect.signature(function).return_annotation)
            named = set(re.findall(r"\b[A-Z]\w+", said))
            assert named <= public | others, f"{name} returns {said}"
            seen |= named
    assert {"Attempts", "Block", "DoctorReport", "Guard", "Ledger", "Report", "Suspension", "Timeline", "Watch"} <= seen
    fields = {
        "Ledger": ("devices",), "DeviceLedger": ("device", "rows"), "Plan": ("devices",),
        "DevicePlan": ("device",), "Sample": ("devices",), "DeviceSample": ("frameworks",), "Event": ("level",),
        "Reclaimable": ("devices",), "DeviceReclaimable": ("frameworks",), "DoctorReport": ("findings",),
        "Finding": ("severity",), "Report": ("ledger", "samples"),
    }  # fmt: skip
    for owner, names in fields.items():
        cls = getattr(memguard.types, owner, None) or getattr(memguard, owner)
        for field in names:
            said = str(cls.__annotations__.get(field) or typing.get_type_hints(cls)[field])
            assert set(re.findall(r"\b[A-Z]\w+", said)) <= public | others, f"{owner}.{field} is {said}"


def test_a_framework_that_is_known_at_run_time_only_is_checked_then() -> None:
    for name in typing.get_args(memguard.types.FrameworkName):
        assert memguard.types.framework_name(name) == name
    with pytest.raises(ValueError, match=r"'torhc' is no framework that a budget may name: torch, .*'torch'\?$"):
        memguard.types.framework_name("torhc")
    with pytest.raises(ValueError, match="shared pool"):
        memguard.types.framework_name("shared pool")


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    shown = set(re.findall(r"^\.\. auto\w+:: (memguard[\w.]*)$", text, re.MULTILINE))
    for name in memguard.__all__:
        value = getattr(memguard, name)
        of_errors = inspect.isclass(value) and issubclass(value, MemguardError)  # `automodule:: memguard.errors`
        assert of_errors or f"memguard.{name}" in shown, name
    for name in memguard.types.__all__:
        assert f"memguard.types.{name}" in shown, name
    for name in memguard.exchange.__all__:
        assert name == "CannotShare" or f"memguard.exchange.{name}" in shown, name
    assert {"memguard.errors", "memguard.retry.call", "memguard.retry.attempts"} <= shown
    assert "memguard._" not in text, "a private module"


def test_the_public_names_of_the_exchange() -> None:
    exchange = memguard.exchange
    assert exchange.__all__ == sorted(exchange.__all__)
    assert {"CannotShare", "Route", "last_route", "to"} <= set(exchange.__all__)
    for name in exchange.__all__:
        value = getattr(exchange, name)
        assert callable(value) and value.__module__.startswith("memguard.")
        assert (value.__doc__ or "").strip(), f"{name} says nothing about itself"
    assert exchange.CannotShare is errors.CannotShare


def test_the_exchange_is_loaded_when_first_used_and_loads_no_framework() -> None:
    found = loaded_by("import memguard; memguard.errors.CannotShare")
    assert not {name for name in found if name.startswith("memguard.exchange")}
    found = loaded_by("import memguard; memguard.exchange.to")
    assert "memguard.exchange.transfer" in found
    assert not {name for name in found if name.startswith("memguard._frameworks.") and name.endswith(".arrays")} - {
        "memguard._frameworks.arrays"
    }
    assert not {name.partition(".")[0] for name in found} & {*HEAVY, "cupy", "jax", "numba"}


def test_type_checkers_see_the_names_that_exist() -> None:
    tree = ast.parse(Path(memguard.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    modules = MODULES | SUBMODULES
    declared = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            assert name.asname == name.name, "an explicit re-export"
            declared[name.name] = node.module
    assert sorted(declared.keys() - SUBMODULES - HOOKS) == memguard.__all__
    assert declared.keys() >= SUBMODULES | HOOKS
    for name, module in declared.items():
        found = home(getattr(memguard, name))
        expected = f"{module}.{name}" if name in modules else module
        assert found == expected or found.startswith(f"{module}."), "or in a module of that package"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memguard' has no attribute 'limit'"):
        _ = memguard.limit  # type: ignore[attr-defined]
    assert not hasattr(memguard, "_active")


def test_there_is_one_logger_and_it_is_silent_until_asked() -> None:
    logger = logging.getLogger("memguard")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET and logger.propagate


def test_arguments_of_the_public_functions() -> None:
    """What users write by keyword stays."""
    given = {
        name: list(inspect.signature(getattr(memguard, name)).parameters)
        for name in memguard.__all__
        if inspect.isfunction(getattr(memguard, name))
    }
    assert given == {
        "checkpoint": [],
        "doctor": ["budget", "frameworks", "ignore", "timeout"],
        "guard": ["budget", "replace", "simulate", "missing_gpu"],
        "init": ["budget", "replace", "simulate", "missing_gpu"],
        "last_oom": [],
        "ledger": [],
        "load_timeline": ["path"],
        "on_event": ["callback"],
        "on_sample": ["callback"],
        "reclaimable": [],
        "record_trace": ["path", "interval"],
        "require": ["framework", "size"],
        "resize": ["framework", "size"],
        "resume": ["timeout", "progress"],
        "shutdown": [],
        "suspend": ["timeout", "why", "host_memory"],
        "suspended": ["timeout", "host_memory"],
        "trim": ["framework"],
        "workload": ["name", "framework", "needs", "wait"],
    }
    retry = memguard.retry
    assert list(inspect.signature(retry).parameters) == ["times", "shrink", "floor", "multiple", "ranks"]
    assert list(inspect.signature(retry.attempts).parameters) == ["times", "size", "floor", "multiple", "ranks"]
    assert list(inspect.signature(retry.call).parameters) == ["function", "args", "kwargs"]
    to = inspect.signature(memguard.exchange.to).parameters
    assert list(to) == ["x", "framework", "copy", "stream", "device"]
    assert {name for name, one in to.items() if one.kind is one.KEYWORD_ONLY} == {"copy", "stream", "device"}
    assert not inspect.signature(memguard.exchange.last_route).parameters


PUBLIC_ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MemguardError)
]


def test_every_error_is_public_and_in_the_tree_of_the_docstring() -> None:
    """A program's own errors are names of the package; those of tools and of `exchange` have a home of their own."""
    names = {error.__name__ for error in PUBLIC_ERRORS}
    public = {name for name in memguard.__all__ if inspect.isclass(getattr(memguard, name))} - {"Budget", "Guard"}
    elsewhere = {"ProblemsError", "CannotShare", "FactsError", "TraceError", "TimelineError"}
    assert names - elsewhere == public and elsewhere <= names
    for name in names:
        assert name in (errors.__doc__ or "")


def test_exit_codes_are_those_of_the_docstring() -> None:
    codes = {error.__name__: error.exit_code for error in PUBLIC_ERRORS}
    assert codes["MemguardError"] == codes["CapNotApplied"] == codes["BudgetExceeded"] == 1
    assert codes["ConfigError"] == codes["PlanError"] == codes["TraceError"] == 2
    assert codes["DeviceError"] == 3
    for line in (errors.__doc__ or "").splitlines():
        for name, code in codes.items():
            if name in line and "exit code" in line:
                assert f"exit code {code}" in line


@pytest.mark.parametrize(
    "error",
    [
        MemguardError("text"),
        ConfigError([Problem("wrong", "mend it", 3, 4, "device")], "budget.yaml"),
        PlanError([Problem("wrong", "mend it")], "plan"),
        CannotShare("torch", "tensorflow", "a reason", "a remedy"),
        CannotShare("torch", None, "a reason", "a remedy"),
        CapNotApplied("torch", "a reason", "a remedy"),
        BudgetExceeded("torch", 5, 4, "a message"),
        LeaseRefused("a message", [{"pid": 4, "bytes": {"GPU-a": 5}}]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("way", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_errors_come_whole_out_of_another_process(error: MemguardError, way: object) -> None:
    """A pool of worker processes pickles what its workers raise, and hangs where that fails."""
    assert callable(way)
    again = way(error)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_a_problem_is_rendered_with_its_place_and_its_fix() -> None:
    whole = Problem("wrong", "mend it", 3, 4, "device.limit")
    assert whole.render("b.yaml") == "b.yaml:3:4: device.limit: wrong\n    fix: mend it"
    assert Problem("wrong").render("plan") == "plan: wrong"
    assert str(PlanError([whole, Problem("two")], "p")) == "p:3:4: device.limit: wrong\n    fix: mend it\np: two"
    assert str(CapNotApplied("torch", "why", "how")) == "torch: cap not applied: why\n    fix: how"
    assert str(CannotShare("a", "b", "why", "how")) == "a to b: cannot share this array: why\n    fix: how"
    assert str(CannotShare("a", None, "why", "how")) == "a: cannot share this array: why\n    fix: how"


def test_the_older_names_of_producer_and_consumer_still_work() -> None:
    error, route = CannotShare("a", "b", "why", "how"), memguard.exchange.Route("a", "b", "shared", 4)
    assert (error.producer, error.consumer) == (error.source, error.target) == ("a", "b")
    assert (route.producer, route.consumer) == (route.source, route.target) == ("a", "b")
    assert str(route) == "a to b: 4 B shared"
