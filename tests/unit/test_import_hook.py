"""The import hook: called once, right after the module's code has run, and gone without a trace."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.resources
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from memguard._frameworks import import_hook
from memguard._frameworks.import_hook import ImportHook
from memguard._tools.activation import _memguard_environment as environment

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules by file name into a folder on sys.path; they and every hook are gone afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    modules, finders = set(sys.modules), list(sys.meta_path)

    def call(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / (name.replace("__dot__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return next(iter(files))

    yield call
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    left = [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]
    monkeypatch.undo()
    sys.meta_path[:] = finders
    assert left == [], "a hook was left behind"


class Calls(list[str]):
    def by(self, name: str) -> Callable[[], None]:
        return lambda: self.append(name)


def test_called_once_after_the_modules_code_has_run(write: Write) -> None:
    write(mg_late_a="value = 1\nvalue = 2\n")
    hook, seen = ImportHook(), []
    hook.watch("mg_late_a", lambda: seen.append(sys.modules["mg_late_a"].value))
    assert sys.meta_path[0] is hook and seen == []
    module = importlib.import_module("mg_late_a")
    importlib.import_module("mg_late_a")
    importlib.reload(module)
    assert seen == [2] and hook not in sys.meta_path


def test_the_module_looks_as_if_nobody_had_been_there(write: Write) -> None:
    write(mg_late_a="during = __loader__, __spec__.loader\n")
    plain = importlib.import_module("mg_late_a")
    kind, keys = type(plain.__loader__), set(vars(plain))
    del sys.modules["mg_late_a"]
    hook = ImportHook()
    hook.watch("mg_late_a", lambda: None)
    module = importlib.import_module("mg_late_a")
    assert type(module.__loader__) is kind and module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__ is module.during[0] is module.during[1]
    assert set(vars(module)) == keys
    assert importlib.util.find_spec("mg_late_a") is module.__spec__
    assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
    assert module.__loader__.get_source("mg_late_a") == "during = __loader__, __spec__.loader\n"


def test_packages_submodules_and_their_data(write: Write, tmp_path: Path) -> None:
    write(mg_late_p__dot____init__="from mg_late_p import inner\n", mg_late_p__dot__inner="x = 1\n")
    (tmp_path / "mg_late_p" / "data.txt").write_text("data")
    hook, seen = ImportHook(), Calls()
    for name in ("mg_late_p", "mg_late_p.inner"):
        hook.watch(name, seen.by(name))
    package = importlib.import_module("mg_late_p")
    assert seen == ["mg_late_p.inner", "mg_late_p"] and hook not in sys.meta_path
    assert importlib.resources.files("mg_late_p").joinpath("data.txt").read_text() == "data"
    assert package.__loader__.get_data(str(tmp_path / "mg_late_p" / "data.txt")) == b"data"
    assert package.__path__ == [str(tmp_path / "mg_late_p")]


def test_data_of_a_package_that_is_still_being_imported(write: Write, tmp_path: Path) -> None:
    write(
        mg_late_p__dot____init__="import importlib.resources, pkgutil\n"
        "read = importlib.resources.files(__name__).joinpath('data.txt').read_text()\n"
        "got = pkgutil.get_data(__name__, 'data.txt')\n"
    )
    (tmp_path / "mg_late_p" / "data.txt").write_text("data")
    hook = ImportHook()
    hook.watch("mg_late_p", lambda: None)
    package = importlib.import_module("mg_late_p")
    assert package.read == "data" and package.got == b"data"


def test_a_submodule_of_a_package_that_is_not_watched(write: Write) -> None:
    write(mg_late_p__dot____init__="", mg_late_p__dot__driver="x = 1\n")
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_p.driver", seen.by("driver"))
    importlib.import_module("mg_late_p")
    assert seen == []
    from mg_late_p import driver  # type: ignore[import-not-found]

    assert seen == ["driver"] and driver.x == 1


def test_looking_for_a_module_is_not_importing_it(write: Write) -> None:
    write(mg_late_a="x = 1\n")
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    for _ in range(2):
        spec = importlib.util.find_spec("mg_late_a")
        assert spec is not None and spec.origin is not None and spec.origin.endswith("mg_late_a.py")
        assert spec.loader is not None and spec.loader.get_source("mg_late_a") == "x = 1\n"  # type: ignore[attr-defined]
    assert seen == [] and "mg_late_a" not in sys.modules and hook in sys.meta_path
    importlib.import_module("mg_late_a")
    assert seen == ["a"]


def test_a_spec_that_was_found_earlier_still_calls_back_once(write: Write) -> None:
    """As `importlib.util.module_from_spec` and `runpy` use it."""
    write(mg_late_a="x = 1\n")
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    spec = importlib.util.find_spec("mg_late_a")
    assert spec is not None and spec.loader is not None
    loader = spec.loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    loader.exec_module(module)
    assert seen == ["a"]


def test_forgotten_callbacks_are_not_called(write: Write) -> None:
    write(mg_late_a="", mg_late_b="")
    hook, seen = ImportHook(), Calls()
    forget_a = hook.watch("mg_late_a", seen.by("a"))
    forget_b = hook.watch("mg_late_b", seen.by("b"))
    forget_a()
    assert hook in sys.meta_path
    importlib.import_module("mg_late_a")
    assert seen == []
    forget_b()
    assert hook not in sys.meta_path
    forget_b()
    importlib.import_module("mg_late_b")
    assert seen == []


def test_forgetting_an_old_callback_leaves_a_newer_one(write: Write) -> None:
    write(mg_late_a="")
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_a", seen.by("old"))
    hook.watch("mg_late_a", seen.by("new"))
    forget()
    importlib.import_module("mg_late_a")
    assert seen == ["new"]


def test_forgetting_between_finding_and_running(write: Write) -> None:
    write(mg_late_a="")
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_a", seen.by("a"))
    spec = importlib.util.find_spec("mg_late_a")
    assert spec is not None and spec.loader is not None
    forget()
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == []


def test_clear_takes_everything_back(write: Write) -> None:
    write(mg_late_a="", mg_late_b="")
    hook, seen = ImportHook(), Calls()
    for name in ("mg_late_a", "mg_late_b"):
        hook.watch(name, seen.by(name))
    hook.clear()
    hook.clear()
    assert hook not in sys.meta_path
    for name in ("mg_late_a", "mg_late_b"):
        importlib.import_module(name)
    assert seen == []


def test_the_callbacks_error_comes_out_of_the_import(write: Write) -> None:
    class Mine(Exception):
        pass

    def refuse() -> None:
        raise Mine("no")

    write(mg_late_a="runs = []\n")
    hook = ImportHook()
    forget = hook.watch("mg_late_a", refuse)
    with pytest.raises(Mine, match="no"):
        importlib.import_module("mg_late_a")
    assert "mg_late_a" not in sys.modules
    with pytest.raises(Mine, match="no"):
        importlib.import_module("mg_late_a")  # a second attempt does not slip through
    forget()
    assert hook not in sys.meta_path
    importlib.import_module("mg_late_a")


def test_a_module_that_fails_to_import_keeps_its_own_error_and_is_watched_further(write: Write) -> None:
    write(mg_late_a="raise ImportError('libcudart.so.13 not found')\n")
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    with pytest.raises(ImportError, match=r"libcudart\.so\.13"):
        importlib.import_module("mg_late_a")
    assert seen == [] and hook in sys.meta_path
    write(mg_late_a="x = 'now it is installed'\n")
    importlib.import_module("mg_late_a")
    assert seen == ["a"] and hook not in sys.meta_path


def test_a_module_that_does_not_exist(write: Write) -> None:
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_missing", seen.by("missing"))
    with pytest.raises(ModuleNotFoundError, match="mg_late_missing"):
        importlib.import_module("mg_late_missing")
    assert importlib.util.find_spec("mg_late_missing") is None
    assert seen == [] and hook in sys.meta_path
    forget()


def test_a_namespace_package_is_left_alone(write: Write, tmp_path: Path) -> None:
    """It has no loader to wrap and no code to run; no framework's hook is one."""
    (tmp_path / "mg_late_space").mkdir()
    write(mg_late_space__dot__part="x = 1\n")
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_space", seen.by("space"))
    hook.watch("mg_late_space.part", seen.by("part"))
    package = importlib.import_module("mg_late_space")
    assert list(package.__path__) == [str(tmp_path / "mg_late_space")]
    importlib.import_module("mg_late_space.part")
    assert seen == ["part"]
    forget()


def test_a_built_in_module() -> None:
    """Other loaders than Python source: `create_module` matters for them."""
    before = sys.modules.pop("_heapq")
    try:
        hook, seen = ImportHook(), Calls()
        hook.watch("_heapq", seen.by("_heapq"))
        module = importlib.import_module("_heapq")
        assert seen == ["_heapq"] and module.heappush and hook not in sys.meta_path
    finally:
        sys.modules["_heapq"] = before


class Finder(importlib.abc.MetaPathFinder):
    """Another library's finder."""

    def __init__(self, find: Callable[[str], importlib.machinery.ModuleSpec | None]) -> None:
        self.find = find

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return self.find(fullname)


def test_another_hook_in_front_that_finds_through_importlib(write: Write) -> None:
    """As wrapt, OpenTelemetry and the like do it: both see the import."""
    write(mg_late_a="")
    finding: list[str] = []

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if name != "mg_late_a" or name in finding:
            return None
        finding.append(name)
        try:
            return importlib.util.find_spec(name)
        finally:
            finding.remove(name)

    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    sys.meta_path.insert(0, Finder(find))
    importlib.import_module("mg_late_a")
    assert seen == ["a"]
    hook.clear()


def test_two_hooks_for_one_module_are_both_called(write: Write) -> None:
    write(mg_late_a="")
    first, second, seen = ImportHook(), ImportHook(), Calls()
    first.watch("mg_late_a", seen.by("first"))
    second.watch("mg_late_a", seen.by("second"))
    module = importlib.import_module("mg_late_a")
    assert sorted(seen) == ["first", "second"] and len(seen) == 2
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__


def test_a_module_that_another_finder_brings(write: Write, tmp_path: Path) -> None:
    """As editable installs do it."""
    elsewhere = tmp_path / "elsewhere" / "mg_late_e.py"
    elsewhere.parent.mkdir()
    elsewhere.write_text("x = 1\n")

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, elsewhere) if name == "mg_late_e" else None

    sys.meta_path.append(Finder(find))
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_e", seen.by("e"))
    importlib.import_module("mg_late_e")
    assert seen == ["e"]


@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_finders_and_loaders_of_old_kinds_are_left_alone(write: Write) -> None:
    class OldFinder:
        """Without find_spec, as Python itself skips it."""

    class OldLoader:
        def load_module(self, name: str) -> ModuleType:
            module = sys.modules[name] = ModuleType(name)
            return module

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, OldLoader()) if name == "mg_late_old" else None  # type: ignore[arg-type]

    sys.meta_path[:0] = [OldFinder(), Finder(find)]
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_old", seen.by("old"))
    assert importlib.import_module("mg_late_old").__name__ == "mg_late_old"
    forget()


def test_a_finder_that_imports_a_watched_module_while_it_finds(write: Write) -> None:
    write(mg_late_a="", mg_late_b="")

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if name == "mg_late_a":
            importlib.import_module("mg_late_b")
        return None

    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    hook.watch("mg_late_b", seen.by("b"))
    sys.meta_path.insert(1, Finder(find))
    importlib.import_module("mg_late_a")
    assert seen == ["b", "a"]


def test_a_finder_that_fails_leaves_the_hook_working(write: Write) -> None:
    write(mg_late_a="")
    fails = [True]

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if name == "mg_late_a" and fails.pop():
            raise RuntimeError("mine")
        return None

    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", seen.by("a"))
    sys.meta_path.insert(1, Finder(find))
    with pytest.raises(RuntimeError, match="mine"):
        importlib.import_module("mg_late_a")
    fails.append(False)
    importlib.import_module("mg_late_a")
    assert seen == ["a"]


def test_a_callback_may_import_another_watched_module(write: Write) -> None:
    write(mg_late_a="", mg_late_b="")
    hook, seen = ImportHook(), Calls()

    def first() -> None:
        importlib.import_module("mg_late_b")
        seen.append("a")

    hook.watch("mg_late_a", first)
    hook.watch("mg_late_b", seen.by("b"))
    importlib.import_module("mg_late_a")
    assert seen == ["b", "a"]


def test_a_callback_may_watch_again(write: Write) -> None:
    write(mg_late_a="", mg_late_b="")
    hook, seen = ImportHook(), Calls()
    hook.watch("mg_late_a", lambda: hook.watch("mg_late_b", seen.by("b")) and None)
    importlib.import_module("mg_late_a")
    assert hook in sys.meta_path
    importlib.import_module("mg_late_b")
    assert seen == ["b"]


def test_imports_of_one_module_from_many_threads_call_back_once(write: Write) -> None:
    write(mg_late_slow="import time\ntime.sleep(0.05)\nx = 1\n")
    hook, seen, states = ImportHook(), Calls(), []
    hook.watch("mg_late_slow", seen.by("slow"))
    start = threading.Barrier(6)

    def work() -> None:
        start.wait()
        states.append((importlib.import_module("mg_late_slow").x, list(seen)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert states == [(1, ["slow"])] * 6, "nobody may go on before the caps are there"


def test_watching_while_the_last_one_is_leaving(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread watches one more module at the moment in which the hook sees that none is left."""
    write(mg_late_a="", mg_late_b="")
    hook, seen = ImportHook(), Calls()

    leave = import_hook.leave

    def slow(finder: object) -> None:
        thread = threading.Thread(target=hook.watch, args=("mg_late_b", seen.by("b")))
        thread.start()
        thread.join(0.05)
        leave(finder)
        threads.append(thread)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(import_hook, "leave", slow)
    hook.watch("mg_late_a", seen.by("a"))
    importlib.import_module("mg_late_a")
    threads[0].join(10)
    assert hook in sys.meta_path
    hook.clear()


def test_a_hook_that_somebody_else_removed(write: Write) -> None:
    """Libraries that restore sys.meta_path as it was before them."""
    write(mg_late_a="")
    hook, seen = ImportHook(), Calls()
    forget = hook.watch("mg_late_a", seen.by("a"))
    spec = importlib.util.find_spec("mg_late_a")
    assert spec is not None and spec.loader is not None
    sys.meta_path.remove(hook)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == ["a"]
    forget()
    hook.clear()


def test_clear_waits_for_nobody(write: Write) -> None:
    """In a forked child the lock may be held for ever by a thread that does not exist there."""
    hook = ImportHook()
    hook.watch("mg_late_a", lambda: None)
    held = hook._lock
    held.acquire()
    thread = threading.Thread(target=hook.clear)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and hook not in sys.meta_path
    hook.watch("mg_late_a", lambda: None)()


@pytest.mark.parametrize("seconds", [1.5])
def test_imports_of_other_threads_never_fail_while_hooks_come_and_go(write: Write, seconds: float) -> None:
    """Each import walks through `sys.meta_path`, and skips a finder if those before it move."""
    write(mg_late_a="", mg_late_b="", mg_late_c="", mg_late_never="")
    end, failed, imports, cycles, switch = time.monotonic() + seconds, [], [0], 0, sys.getswitchinterval()

    def work(name: str) -> None:
        while time.monotonic() < end:
            sys.modules.pop(name, None)
            imports[0] += 1
            try:
                importlib.import_module(name)
            except ImportError as error:
                failed.append(str(error))

    threads = [threading.Thread(target=work, args=(f"mg_late_{letter}",)) for letter in "abc"]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            cycles += 1
            environment._wait(environment._Finder())
            hook = ImportHook()
            forget = hook.watch("mg_late_never", lambda: None)
            environment.disarm()
            forget()
    finally:
        sys.setswitchinterval(switch)
        for thread in threads:
            thread.join(10)
    assert failed == [], f"{len(failed)} of {imports[0]} imports, in {cycles} cycles"
    assert not [one for one in sys.meta_path if isinstance(one, (ImportHook, environment._Finder))]


def test_no_finder_that_another_thread_adds_is_lost(write: Write) -> None:
    """Finders of editable installations and of pytest are added in place while ours come and go."""

    class Theirs(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            return None

    theirs, switch = [Theirs() for _ in range(3000)], sys.getswitchinterval()

    def work() -> None:
        for number, finder in enumerate(theirs):
            sys.meta_path.insert(0, finder)
            if number >= 5:
                sys.meta_path.remove(theirs[number - 5])

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            ImportHook().watch("mg_late_never", lambda: None)()
    finally:
        sys.setswitchinterval(switch)
        thread.join(10)
    assert [one for one in sys.meta_path if isinstance(one, Theirs)] == theirs[:-6:-1]
