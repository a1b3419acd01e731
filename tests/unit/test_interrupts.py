"""`deferred_signals`: no handler of the program runs within the block, and none is lost."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions import Points

from memguard._base.interrupts import deferred_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def heard(number: int, log: list[Any]) -> Callable[..., None]:
    """Install a handler that records its signal."""

    def handler(number: int, frame: object) -> None:
        log.append(number)

    signal.signal(number, handler)
    return handler


def send(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_a_ctrl_c_is_raised_at_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        send()
        done.append("the rest of the block")
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_kept() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_signals():
        send()
        send()
    assert isinstance(caught.value.__context__, KeyboardInterrupt) and caught.value.__context__.__context__ is None


def test_an_error_of_the_block_is_the_context_of_the_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_signals():
        send()
        raise LookupError("of the block")
    assert repr(caught.value.__context__) == "LookupError('of the block')"


def test_a_handler_that_raises_does_not_lose_the_other_signals() -> None:
    log: list[int] = []
    heard(signal.SIGTERM, log)
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        send()
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert log == [signal.SIGTERM] * 2


@given(st.recursive(st.sampled_from(SIGNALS), lambda inner: st.lists(inner, max_size=4)))
def test_nested_blocks_deliver_every_signal_in_order_at_the_end_of_the_outermost(tree: Any) -> None:
    log: list[int] = []
    made = {number: heard(number, log) for number in SIGNALS}
    sent: list[int] = []

    def play(tree: Any) -> None:
        if isinstance(tree, list):
            with deferred_signals():
                for one in tree:
                    play(one)
        else:
            sent.append(tree)
            send(tree)

    with deferred_signals():
        play(tree)
        assert log == []
    assert log == sent
    assert {number: signal.getsignal(number) for number in SIGNALS} == made


def test_a_handler_set_within_the_block_stays_and_gets_what_was_recorded() -> None:
    first: list[int] = []
    second: list[int] = []
    heard(signal.SIGUSR1, first)
    with deferred_signals():
        send(signal.SIGUSR1)
        handler = heard(signal.SIGUSR1, second)
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert (first, second) == ([], [signal.SIGUSR1])


def test_a_signal_ignored_within_the_block_stays_ignored() -> None:
    heard(signal.SIGUSR1, [])
    with deferred_signals():
        send(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_kept_beyond_the_block_calls_the_program_s() -> None:
    log: list[int] = []
    heard(signal.SIGUSR1, log)
    with deferred_signals():
        kept = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, kept)
    send(signal.SIGUSR1)
    assert log == [signal.SIGUSR1]
    with deferred_signals():
        send(signal.SIGUSR1)
        assert len(log) == 1, "and is deferred again"
    assert len(log) == 2


def test_a_handler_sees_its_own_blocks() -> None:
    """A handler that runs at the end of a block may use the shield itself."""
    done: list[str] = []

    def handler(number: int, frame: object) -> None:
        with deferred_signals():
            send(signal.SIGINT)
            done.append("its state change")

    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        send(signal.SIGUSR1)
    assert done == ["its state change"]


def test_a_handler_gets_the_frame_of_the_block() -> None:
    frames: list[Any] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: frames.append(frame))
    with deferred_signals():
        send(signal.SIGUSR1)
    assert frames == [sys._getframe()]
    frames.clear()


def test_other_threads_leave_the_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with deferred_signals():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    try:
        with pytest.raises(KeyboardInterrupt), deferred_signals():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "another's block is no outer one"
            send()
    finally:
        leave.set()
        thread.join()


def test_a_subinterpreter_leaves_the_handlers_alone() -> None:
    interpreters: Any = pytest.importorskip("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
    one = interpreters.create("legacy") if sys.version_info >= (3, 13) else interpreters.create(isolated=False)
    run = interpreters.exec if sys.version_info >= (3, 13) else interpreters.run_string
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import signal\n"
        "from memguard._base.interrupts import deferred_signals\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "with deferred_signals():\n"
        "    assert signal.getsignal(signal.SIGINT) is before\n"
    )
    try:
        assert run(one, code) is None
    finally:
        interpreters.destroy(one)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_disposition_stays() -> None:
    """`signal.signal` resets `siginterrupt`, and takes the signal from faulthandler."""
    log: list[int] = []
    heard(signal.SIGUSR1, log)
    signal.siginterrupt(signal.SIGUSR1, False)
    heard(signal.SIGTERM, log)
    read, write = os.pipe()
    with open(write, "w") as file:
        faulthandler.register(signal.SIGTERM, file, chain=False)
        before = [disposition(number) for number in SIGNALS]
        try:
            with deferred_signals():
                assert [disposition(number) for number in SIGNALS] == before
                send(signal.SIGTERM)
            assert [disposition(number) for number in SIGNALS] == before
        finally:
            faulthandler.unregister(signal.SIGTERM)
    with open(read) as file:
        assert "most recent call first" in file.read() and log == [], "faulthandler alone got it"


def disposition(number: int) -> str:
    """Handler, mask and flags as the kernel has them. What follows the mask of 64 signals is padding."""
    import ctypes

    buffer = ctypes.create_string_buffer(512)
    assert ctypes.CDLL(None).sigaction(int(number), None, buffer) == 0
    return buffer.raw[:16].hex() + buffer.raw[136:140].hex()


def test_the_wakeup_fd_gets_each_signal_once() -> None:
    heard(signal.SIGUSR1, [])
    read, write = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write)
    try:
        with deferred_signals():
            send(signal.SIGUSR1)
        assert os.read(read, 10) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_its_own_signals_only() -> None:
    log: list[int] = []
    heard(signal.SIGUSR1, log)
    heard(signal.SIGTERM, log)
    with deferred_signals():
        send(signal.SIGUSR1)
        if (child := os.fork()) == 0:
            send(signal.SIGTERM)
    if child == 0:
        os._exit(0 if log == [signal.SIGTERM] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert log == [signal.SIGUSR1]


@pytest.mark.parametrize("sent", [(signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)], ids=str)
def test_a_signal_at_any_point_of_entering_and_leaving_is_delivered_once(sent: tuple[int, ...]) -> None:
    """Handlers that raise: SIGINT's, and the one of SIGTERM, as of a program that ends by an exception."""
    raised: list[int] = []

    def raising(number: int, frame: object) -> None:
        raised.append(number)
        raise KeyboardInterrupt

    def block() -> None:
        with deferred_signals():
            pass

    for number in SIGNALS:
        signal.signal(number, raising)
    block()
    counted = Points()
    counted.run(block)
    assert counted.count > 50
    for at in range(1, counted.count + 1):
        raised.clear()
        points = Points(at, each(sent))
        with pytest.raises(KeyboardInterrupt):
            points.run(block)
        assert sorted(raised) == sorted(sent), points.place
        assert [signal.getsignal(number) for number in SIGNALS] == [raising] * len(SIGNALS), points.place
        assert not deferring(), points.place


def each(numbers: tuple[int, ...]) -> Callable[[], None]:
    """Send the signals so that a handler that raises is followed by the next."""

    def send_all(rest: tuple[int, ...] = numbers) -> None:
        try:
            send(rest[0])
        finally:
            if rest[1:]:
                send_all(rest[1:])

    return send_all


def deferring() -> bool:
    log: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    heard(signal.SIGUSR1, log)
    send(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    return not log


def test_an_exception_from_another_thread_in_place_of_the_end_leaves_nothing_deferred() -> None:
    """Whatever prevents `__exit__`: the handlers work again once the block is gone."""
    block = deferred_signals()
    block.__enter__()
    del block
    with pytest.raises(KeyboardInterrupt):
        send()
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        send()
