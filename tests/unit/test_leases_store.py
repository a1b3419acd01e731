"""The database of leases and the locks beside it, with real processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leasing import GPU, OTHER, TOTAL, heard, lease, other, parts, told, until

from memguard._node.identity import Process
from memguard._node.leases import folders, locks, store, wakeups
from memguard._node.leases import lease as leases
from memguard._node.leases.lease import Lease
from memguard._node.leases.store import Store
from memguard._node.leases.types import Part
from memguard.errors import LeaseRefused, MemguardError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "leases"
    monkeypatch.setenv("MEMGUARD_LEASES", str(where))
    return where


def held(folder: Path) -> list[int]:
    return [next(iter(claim.parts.values())).bytes for claim in Store(str(folder)).claims() if claim.state == "held"]


def descriptors(folder: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [name for name in found if str(folder) in name]


def test_a_lease_is_held_and_given_back(folder: Path) -> None:
    one = lease(60)
    assert not folder.exists() or held(folder) == []
    one.take()
    (claim,) = Store(str(folder)).claims()
    assert (claim.state, claim.pid, claim.budget) == ("held", os.getpid(), "budget.yaml")
    assert claim.parts == parts(60) and claim.since is not None and claim.command
    assert descriptors(folder) == [str(folder / "leases.lock")], "the database is open only while it is used"
    one.close()
    one.close()
    assert held(folder) == [] and descriptors(folder) == []
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and Store(str(folder)).check() == "ok"


def test_without_a_database_there_is_nothing_and_nothing_is_made(folder: Path) -> None:
    assert Store(str(folder)).claims() == [] and Store(str(folder)).check() == "ok" and not folder.exists()


def test_what_others_hold_is_refused_and_they_are_named(folder: Path) -> None:
    with other(folder, 60) as child:
        assert heard(child) == "held"
        with pytest.raises(
            LeaseRefused, match=rf"no room for 50 B of GPU 0 \(NVIDIA H200\): process {child.pid} "
        ) as no:
            lease(50).take()
        assert "holds 60 B since" in str(no.value) and "'wait: 10min'" in str(no.value) and "fix:" in str(no.value)
        (holder,) = no.value.holders
        assert holder["pid"] == child.pid and holder["bytes"] == {GPU: 60} and holder["budget"] == "budget.yaml"
        assert held(folder) == [60], "what was refused leaves nothing behind"
        fits = lease(40)
        fits.take()
        assert held(folder) == [60, 40]
        fits.close()


def test_kill_9_frees_it_and_a_forked_child_does_not_keep_it(folder: Path) -> None:
    """A trainer with a worker is killed; the worker lives on."""
    code = OTHER.format(here=str(Path(__file__).parent)).replace(
        'print("held"', 'import os; pid = os.fork(); pid or time.sleep(60); print(pid or "", flush=True); print("held"'
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "60", "0"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker = int(heard(child))
    try:
        assert heard(child) == "held" and held(folder) == [60]
        child.kill()
        child.wait()
        os.kill(worker, 0)
        assert held(folder) == []
        one = lease(100)
        one.take()
        one.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        child.communicate()


def test_who_waits_is_told_who_holds_and_served_in_order(folder: Path) -> None:
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with other(folder, 50, 60) as second:
            said = heard(second)
            assert said.startswith(f"waiting for 50 B of GPU 0 (NVIDIA H200): process {first.pid} (")
            with other(folder, 10, 60) as third:
                said = heard(third)
                assert f"process {first.pid}" in said and said.endswith("; 1 waits before this one")
                told(first)
                assert (heard(first), heard(second), heard(third)) == ("given back", "held", "held")
                assert held(folder) == [50, 10]
        until(lambda: held(folder) == [])


def test_the_time_to_wait_ends(folder: Path) -> None:
    with other(folder, 60) as child:
        assert heard(child) == "held"
        said: list[str] = []
        with pytest.raises(LeaseRefused, match=r"no room for 50 B of GPU 0 \(NVIDIA H200\) after 0 s: process") as no:
            lease(50).take(0.3, said.append)
        assert len(said) == 1 and "write a longer 'wait'" in str(no.value)
        assert [claim.pid for claim in Store(str(folder)).claims()] == [child.pid]


def test_it_is_said_again_while_it_lasts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "AGAIN", 0.1)
    with other(folder, 60) as child:
        assert heard(child) == "held"
        said: list[str] = []
        with pytest.raises(LeaseRefused):
            lease(50).take(1.5, said.append)
    assert len(said) > 1


def test_a_process_that_dies_while_it_waits_is_in_nobodys_way(folder: Path) -> None:
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with other(folder, 100, 60) as second:
            heard(second)
            second.kill()
            second.wait()
            one = lease(40)
            one.take()
            assert held(folder) == [60, 40]
            one.close()


def test_more_than_there_is_can_never_be_had(folder: Path) -> None:
    with pytest.raises(LeaseRefused, match=r"101 B can never be had: GPU 0 \(NVIDIA H200\) has 100 B\n    fix: lower"):
        lease(101).take(60)


def test_a_replacement_counts_with_what_it_has_more_and_the_first_stays(folder: Path) -> None:
    first = lease(60)
    first.take()
    second = lease(100, first)
    second.take()
    assert held(folder) == [60, 100]
    first.close()
    assert held(folder) == [100]
    third = lease(10, second)
    third.take()
    with other(folder, 50) as child:  # until the second is given back, the two count as the larger
        assert heard(child) == ""
    second.close()
    with other(folder, 90) as child:
        assert heard(child) == "held"
    third.close()


def test_a_larger_replacement_waits_and_a_refused_one_keeps_the_first(folder: Path) -> None:
    with other(folder, 40) as child:
        assert heard(child) == "held"
        first = lease(60)
        first.take()
        with pytest.raises(LeaseRefused, match=f"process {child.pid}") as no:
            lease(70, first).take()
        assert str(os.getpid()) not in str(no.value), "it does not wait for itself"
        assert held(folder) == [40, 60]
        first.close()


def test_of_many_holders_five_are_named(folder: Path) -> None:
    many = [lease(10) for _ in range(8)]
    for one in many:
        one.take()
    with pytest.raises(LeaseRefused, match="; 3 more hold some\n") as no:
        lease(30).take()
    assert str(no.value).count("holds 10 B") == 5 and len(no.value.holders) == 8
    for one in many:
        one.close()


def test_a_python_without_sqlite_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(MemguardError, match=r"leases need Python's sqlite3, .*\n    fix: use a Python that has it"):
        lease(1).take()


# Locks.


def test_ones_own_byte_does_not_show_and_another_ones_does(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch(0o600)
    with locks.opened(str(path)) as file:
        assert file.take(3) and file.alive(3) and not file.alive(4)
        child = os.fork()
        if not child:
            try:
                with locks.opened(str(path)) as mine:
                    right = mine.alive(3) and not mine.alive(2) and not mine.take(3) and mine.take(4)
                os._exit(0 if right else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert file.alive(3), "neither the child's descriptor nor its end frees the parent's"
        file.drop(3)
        assert not file.alive(3)


def test_it_is_opened_once_so_that_no_close_frees_what_is_held(folder: Path) -> None:
    """Looks of other threads meanwhile: a second descriptor, closed, would free everything."""
    one = lease(60)
    one.take()
    threads = [threading.Thread(target=lambda: [Store(str(folder)).claims() for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    linked = folder.parent / "linked"
    linked.symlink_to(folder)
    assert held(linked) == [60]  # by another path
    assert descriptors(folder) == [str(folder / "leases.lock")]
    with other(folder, 50) as child:
        assert heard(child) == "", "refused"
    one.close()


def test_children_of_every_kind_leave_it_held(folder: Path) -> None:
    """They close their copies of the descriptor, or inherit none: both free nothing."""
    one = lease(60)
    one.take()
    subprocess.run([sys.executable, "-c", ""], check=True)
    subprocess.run(["true"], check=True, close_fds=False)
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)
    assert os.system("true") == 0
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)
    with other(folder, 50) as child:
        assert heard(child) == "", "refused"
    one.close()


def forked(child: Callable[[], object]) -> None:
    """`child` is true in a forked child."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if child() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_waits_for_nobody_who_waits_for_another_process(folder: Path) -> None:
    """The child uses the database as if nothing were."""
    one, waits, order = lease(60), threading.Event(), list[str]()
    one.take()

    def ask() -> None:
        try:
            Store(str(folder)).change(lambda *_: None, 20)
        finally:
            order.append("had it")

    connection = sqlite3.connect(folder / "leases.sqlite", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    pause = store.time.sleep
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(store.time, "sleep", lambda seconds: (waits.set(), pause(seconds)))
            thread = threading.Thread(target=ask)
            thread.start()
            waits.wait(20)
            forked(lambda: held(folder) == [60])
            order.append("forked")
    finally:
        connection.close()
    thread.join()
    assert order == ["forked", "had it"]
    one.close()


def test_a_fork_in_the_midst_of_a_transaction_makes_a_child_that_uses_none(folder: Path) -> None:
    """On a disk that hangs, say. No handle of the database is used in it."""
    one, inside, end, order = lease(60), threading.Event(), threading.Event(), list[str]()
    one.take()

    def slow(*_: object) -> None:
        inside.set()
        end.wait(20)
        order.append("closed")

    thread = threading.Thread(target=lambda: Store(str(folder)).change(slow))
    thread.start()
    inside.wait(20)

    def child() -> bool:
        with pytest.raises(MemguardError, match=r"was forked while the database .*\n    fix: fork it again"):
            lease(10).take()
        with pytest.raises(MemguardError, match="was forked while the database"):
            held(folder)
        return True

    forked(child)
    order.append("forked")
    end.set()
    thread.join()
    assert order == ["forked", "closed"] and held(folder) == [60]
    forked(lambda: held(folder) == [60])
    one.close()


def test_a_forked_child_gives_nothing_of_its_parents_back(folder: Path) -> None:
    one = lease(60)
    one.take()
    child = os.fork()
    if not child:
        try:
            one.close()
            own = lease(30)
            own.take()
            os._exit(0 if held(folder) == [60, 30] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert held(folder) == [60]
    one.close()


def test_a_call_within_a_change_is_refused_and_its_bytes_are_free(folder: Path) -> None:
    """A signal handler that ends the budget while a lease is being changed."""
    one, two = lease(60), lease(20)
    one.take()
    two.take()

    def handler(*_: object) -> None:
        with pytest.raises(MemguardError, match="from a signal handler"):
            Store(str(folder)).claims()
        one.close()

    Store(str(folder)).change(handler)
    assert held(folder) == [20]
    two.close()


# Where no leases can be kept.


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("ext4", False), ("tmpfs", False), ("overlay", False), ("xfs", False), ("fuse.fuse-overlayfs", False),
        ("nfs4", True), ("nfs", True), ("cifs", True), ("smb3", True), ("9p", True), ("fuse.sshfs", True),
        ("lustre", True), ("gpfs", True), ("ceph", True), ("fuse.glusterfs", True), ("beegfs", True), ("fuse", True),
    ],
)  # fmt: skip
def test_network_file_systems_are_refused(kind: str, network: bool) -> None:
    mounts = (
        "22 27 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:44 / /home/al\\040ice rw shared:7 master:2 - {kind} server:/x rw\n"
        "31 30 0:45 / /home/al\\040ice/local rw - tmpfs tmpfs rw\nnonsense\n"
    )
    assert folders.file_system("/home/al ice/x", mounts) == kind
    assert folders.file_system("/home/al icex", mounts) == "ext4"
    folders.refuse_network("/home/al ice/local/x", mounts)
    folders.refuse_network("/home/al ice", "")
    if network:
        with pytest.raises(
            MemguardError, match=f"type {kind}, which other .*\n    fix: set MEMGUARD_LEASES to a folder"
        ):
            folders.refuse_network("/home/al ice/x", mounts)
    else:
        folders.refuse_network("/home/al ice/x", mounts)


def test_the_last_of_two_file_systems_at_one_place_counts() -> None:
    mounts = "1 2 0:1 / /a rw - nfs4 x rw\n3 1 0:2 / /a rw - tmpfs x rw\n"
    assert folders.file_system("/a/b", mounts) == "tmpfs"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda path: "relative/leases", "no absolute path\n    fix: begin it with /"),
        (lambda path: str(path / "no" / "leases"), "cannot be used: No such file .*\n    fix: name a folder whose"),
        (
            lambda path: (path.mkdir(0o755), str(path))[1],
            "not a folder that only this user can enter.*\n    fix: .*chmod",
        ),
        (lambda path: (path.write_text("x"), str(path))[1], "not a folder that only this user"),
        (lambda path: (path.symlink_to("/tmp"), str(path))[1], "not a folder that only this user"),
    ],
)
def test_a_folder_that_others_may_enter_is_refused(
    wrong: Callable[[Path], str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGUARD_LEASES", wrong(tmp_path / "new"))
    with pytest.raises(MemguardError, match=text):
        lease(1)


def test_without_the_variable_it_is_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMGUARD_LEASES")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert lease(1).store.folder == str(tmp_path / "memguard")


@pytest.mark.parametrize("name", ["leases.sqlite", "leases.lock"])
def test_another_users_file_is_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease(1).take()
    found = os.lstat(folder / name)
    real = os.lstat
    foreign = os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])
    monkeypatch.setattr(os, "lstat", lambda path: foreign if str(path).endswith(name) else real(path))
    with pytest.raises(MemguardError, match="not a file of this user's only"):
        lease(1).take()


@pytest.mark.parametrize("name", ["leases.sqlite", "leases.lock"])
def test_a_link_in_its_place_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    folder.mkdir(0o700)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MemguardError, match="not a file of this user's only"):
        lease(1).take()
    assert not (tmp_path / "elsewhere").exists()


def test_a_damaged_database_is_refused_with_the_remedy(folder: Path) -> None:
    folder.mkdir(0o700)
    database = folder / "leases.sqlite"
    database.write_bytes(b"this is no database" * 400)
    database.chmod(0o600)
    with pytest.raises(MemguardError, match=r"is damaged .*\n    fix: end the processes .* then `rm .*/leases\.\*`"):
        lease(1).take()


@pytest.mark.parametrize("statements", ["PRAGMA user_version = 99", "CREATE TABLE another (a)"])
def test_a_database_of_another_version_is_refused(folder: Path, statements: str) -> None:
    folder.mkdir(0o700)
    database = folder / "leases.sqlite"
    database.touch(0o600)
    connection = sqlite3.connect(database)
    connection.executescript(statements)
    connection.close()
    with pytest.raises(MemguardError, match=r"is of version \d+, and this memguard reads version 1\n    fix: end"):
        lease(1).take()


def test_one_that_is_in_use_for_too_long_is_named(folder: Path) -> None:
    one = lease(1)
    one.take()
    connection = sqlite3.connect(folder / "leases.sqlite", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(MemguardError, match="in use by another process for 0 s\n    fix: find out who has it"):
            Store(str(folder)).change(lambda *_: None, 0.1)
        assert len(Store(str(folder)).claims()) == 1, "reading goes on"
    finally:
        connection.close()
    one.close()


def test_locks_that_were_removed_are_not_replaced_by_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of old temporary files: nobody can ask for the locks in it any more."""
    with other(folder, 60) as child:
        assert heard(child) == "held"
        (folder / "leases.lock").unlink()
        with pytest.raises(
            MemguardError, match=rf"leases.lock was removed while process {child.pid} \(.*\n    fix: end"
        ):
            lease(50).take()
    one = lease(50)  # that process has ended
    one.take()
    (folder / "leases.lock").unlink()
    monkeypatch.setattr(store, "lives", lambda process: process != Process(os.getpid(), 0))
    with pytest.raises(MemguardError, match=f"while process {os.getpid()} "):
        lease(50).take()
    one.close()


def test_a_process_of_an_unknown_boot_may_live(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hide /proc/sys."""
    with monkeypatch.context() as patched:
        patched.setattr(leases, "machine", lambda: "")
        one = lease(50)
    one.take()
    (folder / "leases.lock").unlink()
    with pytest.raises(MemguardError, match=f"while process {os.getpid()} "):
        lease(60).take()
    one.close()


def test_a_database_that_was_removed_begins_anew_and_who_waits_goes_on(folder: Path) -> None:
    with contextlib.ExitStack() as both:
        assert heard(both.enter_context(other(folder, 60))) == "held"
        second = both.enter_context(other(folder, 60, 60))
        assert heard(second).startswith("waiting")
        for path in folder.glob("leases.sqlite*"):
            path.unlink()
        assert heard(second) == "held"
        assert [claim.id for claim in Store(str(folder)).claims()] != [1], "the first has that byte"


def test_a_database_that_is_removed_within_a_look_is_looked_at_again(folder: Path) -> None:
    one, looks = lease(60), []
    one.take()

    def look(connection: sqlite3.Connection, _: locks.File) -> int:
        looks.append(connection)
        if len(looks) == 1:
            for path in folder.glob("leases.sqlite*"):
                path.unlink()
            raise sqlite3.OperationalError("disk I/O error")
        return len(looks)

    assert Store(str(folder)).read(look) == 2
    one.close()


def test_leases_of_simulated_gpus_are_apart() -> None:
    real = Lease(parts(100))
    real.take()
    name = f"simulated:{GPU}"
    one = Lease({name: Part(name, 100, 100, 0, "NVIDIA H200")})
    one.take()
    other_one = Lease({name: Part(name, 1, 100, 0, "NVIDIA H200")})
    with pytest.raises(LeaseRefused, match=r"no room for 1 B of simulated GPU 0 \(NVIDIA H200\)") as no:
        other_one.take()
    assert no.value.holders[0]["bytes"] == {GPU: 100}
    one.close()
    real.close()


def test_a_claim_of_another_container_has_no_pid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lease(60)
    one.take()
    monkeypatch.setattr(leases, "machine", lambda: "another")
    with pytest.raises(LeaseRefused, match=r": a process of another container \(.*budget.yaml\) holds 60 B") as no:
        lease(50).take()
    assert no.value.holders[0]["pid"] is None
    one.close()


# Waking who waits.


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who waits looks by itself."""
    monkeypatch.setattr(leases, "LOOK", (1000.0, 1000.0))
    monkeypatch.setattr(leases, "AGAIN", 1000.0)


@contextlib.contextmanager
def waits(folder: Path, size: int) -> Iterator[Lease]:
    """It waits on a thread, and has looked."""
    one, ended = lease(size), threading.Event()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: (one.take(60, look=seen.append), ended.set()))
    thread.start()
    until(lambda: bool(seen))
    try:
        yield one
    finally:
        thread.join(20)
        assert ended.is_set() and one.held
        one.close()
        assert wakes(folder) == []


def wakes(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("leases.wake-*")]


@pytest.mark.usefixtures("never")
def test_who_is_granted_is_woken_and_so_is_who_comes_first_then(folder: Path) -> None:
    """The third cannot be granted with the second, and looks by itself once the first has ended."""
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with waits(folder, 50) as second, waits(folder, 40) as third:
            assert not second.held and not third.held and len(wakes(folder)) == 2
            told(first)
            until(lambda: second.held and third.held)


@pytest.mark.usefixtures("never")
def test_who_comes_first_after_one_gave_up_is_woken(folder: Path) -> None:
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with other(folder, 60, 60) as second:
            heard(second)
            with waits(folder, 30) as third:
                assert not third.held
                os.kill(second.pid, signal.SIGINT)  # closes it
                until(lambda: third.held)


def test_the_fifo_of_a_killed_process_is_removed(folder: Path) -> None:
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with other(folder, 60, 60) as second:
            heard(second)
            until(lambda: len(wakes(folder)) == 1)
            second.kill()
            second.wait()
            assert len(wakes(folder)) == 1
            lease(1).take()
            assert wakes(folder) == []


@pytest.mark.parametrize(("ahead", "least", "most"), [(0, 240, 960), (1, 60, 240), (20, 3, 5), (100, 3, 5)])
def test_the_more_come_before_one_that_waits_the_more_seldom_it_looks(
    folder: Path, ahead: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a minute: the first eight times a second, the last of many when it is woken, and some times.

    However seldom it polls, `look` is called twice a second: it observes whether the others use their GPUs.
    """
    clock, looks, told = [0.0], [], [0.0]
    read = Store.read

    def wait(_: object, seconds: float) -> bool:
        clock[0] += min(seconds, wakeups._SLICE)
        return False

    def add(connection: sqlite3.Connection, file: locks.File) -> None:
        for _ in range(ahead + 1):
            number = store.add(connection, leases.claimer("b.yaml"), None, parts(TOTAL))
            file.take(number)
        store.serve(connection)

    lease(1).store.change(add)
    monkeypatch.setattr(leases.WakeupFifo, "wait", wait)
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(Store, "read", lambda self, *given: (looks.append(clock[0]), read(self, *given))[1])
    one = lease(TOTAL)
    with pytest.raises(LeaseRefused, match="after 60 s"):
        one.take(60, look=lambda _: told.append(clock[0]))
    assert least <= len(looks) <= most and looks[-1] == 60.0, "a last look at the end"
    assert told[-1] == 60.0 and max(later - before for before, later in itertools.pairwise(told)) < 0.6
    Store(str(folder)).change(lambda connection, _: connection.execute("DELETE FROM claims"))
    locks.let_go(0, 1 << 40)


def test_a_process_polls_where_no_fifo_can_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no FIFO here")

    monkeypatch.setattr(os, "mkfifo", fails)
    with other(folder, 60) as first:
        assert heard(first) == "held"
        with waits(folder, 50):
            told(first)


def test_a_file_in_place_of_the_fifo_is_not_read_and_wakes_nobody(folder: Path) -> None:
    """It would be ready to be read for ever, so that the wait would never block."""
    folder.mkdir(0o700)
    path = Path(wakeups.path_of(str(folder), 7))
    path.write_text("not memguard's")
    wakeup = wakeups.WakeupFifo(str(folder))
    assert not wakeup.open_for(7) and not wakeup.is_open and not wakeup.wait(0)
    assert descriptors(folder) == []
    wakeup.close()
    assert path.read_text() == "not memguard's"


def test_one_that_changes_the_database_keeps_others_from_opening_it(folder: Path, monkeypatch: Any) -> None:
    one = lease(60)
    one.take()
    file = locks.hold(one.store.locks, (store._WRITER,))
    assert file is not None

    def child() -> bool:
        monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: os._exit(3))
        with pytest.raises(MemguardError, match="in use by another process for 0 s"):
            Store(str(folder)).change(lambda *_: None, 0.0)
        return True

    forked(child)
    locks.release(file, (store._WRITER,))
    one.close()
