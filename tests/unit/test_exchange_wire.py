"""What processes say to each other about exported arrays: read with care, and nothing of it believed unread."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.exchange.ipc import wire
from memguard.exchange.ipc.wire import BadMessage, Description

SENT = Description("file", "GPU-0a1b2c3d", (3, 4), (4, 1), "float32", size=2 << 20)
GOOD = json.loads(json.dumps(SENT.message()))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_description_comes_back_as_it_was_sent() -> None:
    found = wire.description(GOOD)
    assert found == SENT
    assert found.view(4096, 1) == (4096, (3, 4), (4, 1), "float32", 1, False)


@pytest.mark.parametrize(
    "change",
    [
        {"memguard": 2},
        {"memguard": None},
        {"more": 1},
        {"kind": "pickle"},
        {"kind": ["file"]},
        {"kind": "nothing"},
        {"kind": "block"},
        {"kind": "block", "handle": "00" * 63},
        {"handle": "00" * 64},
        {"handle": "zz" * 64},
        {"handle": 7},
        {"uuid": ""},
        {"uuid": "GPU 0"},
        {"uuid": "GPU-0\n"},
        {"uuid": None},
        {"shape": [3, -4]},
        {"shape": [3, 4.0]},
        {"shape": [3, True]},
        {"shape": [3, "4"]},
        {"shape": "34"},
        {"shape": None},
        {"shape": [3]},
        {"shape": [1] * 65, "strides": [1] * 65},
        {"shape": [1 << 63, 1]},
        {"shape": [1 << 40, 1 << 40], "strides": [0, 0]},
        {"shape": [0, 4]},
        {"strides": [4]},
        {"strides": [1 << 63, 1]},
        {"strides": [-4, 1]},
        {"strides": [1 << 40, 1]},
        {"dtype": "object"},
        {"dtype": ["float32"]},
        {"readonly": 0},
        {"offset": -1},
        {"offset": 2},
        {"offset": 2 << 20},
        {"offset": (2 << 20) - 47},
        {"size": 47},
        {"size": -1},
        {"size": 1 << 70},
        {"size": True},
    ],
    ids=str,
)
def test_a_description_that_is_wrong_or_exceeds_its_memory_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        wire.description({**GOOD, **change})


def test_a_refusal_is_checked() -> None:
    good = wire.Refusal(wire.EXPORT, 128)
    assert wire.refusal(good.message()) == good and wire.refusal(SENT.message()) is None
    for change in (
        {"full": "disk"}, {"full": None}, {"full": ["export"]}, {"limit": 0}, {"limit": True}, {"limit": "9"},
        {"limit": -1}, {"limit": wire.MOST_HOLDERS + 1}, {"limit": None}, {"memguard": 2}, {"more": 1},
    ):  # fmt: skip
        with pytest.raises(BadMessage):
            wire.refusal({**good.message(), **change})
    with pytest.raises(BadMessage):
        wire.refusal({"memguard": 1, "full": "export"})


def test_each_field_is_needed() -> None:
    for name in GOOD:
        with pytest.raises(BadMessage):
            wire.description({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    "change",
    [
        {"size": 48},
        {"offset": (2 << 20) - 48},
        {"offset": 32, "strides": [-4, 1]},
        {"kind": "nothing", "shape": [0, 4], "size": 0},
        {"kind": "block", "handle": "ab" * 64, "readonly": True},
        {"shape": [], "strides": []},
    ],
    ids=str,
)
def test_a_description_within_its_memory_is_accepted(change: dict[str, Any]) -> None:
    assert wire.description({**GOOD, **change}).uuid == "GPU-0a1b2c3d"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(GOOD)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(list(GOOD)), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(GOOD)), JSON))
def test_no_accepted_description_exceeds_its_memory(change: dict[str, Any]) -> None:
    try:
        found = wire.description({**GOOD, **change})
    except BadMessage:
        return
    first, behind = found.view(0, 0).extent
    assert not found.view(0, 0).size or 0 <= first <= behind <= found.size


@given(st.binary(max_size=64))
def test_bytes_are_a_message_or_incomplete_or_refused(data: bytes) -> None:
    try:
        found = wire.decode(data)
    except BadMessage:
        return
    assert found is None or isinstance(found, dict)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 20),
        struct.pack(">I", 2) + b"{}more",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 2) + b"\xff\xff",
        struct.pack(">I", 10_000) + b"[" * 10_000,
        struct.pack(">I", 8_000) + b"[" + b"9" * 7_998 + b"]",
        b"GET / HTTP/1.1\r\n",
    ],
    ids=["too long", "more than it says", "no object", "no text", "deep", "long number", "another protocol"],
)
def test_bad_messages_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        wire.decode(data)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(BadMessage):
        wire.encode({"text": "x" * wire.LIMIT})


@pytest.mark.parametrize("token", [None, 7, "", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "\n", ["0" * 32]])
def test_a_request_without_a_valid_token_is_refused(token: object) -> None:
    with pytest.raises(BadMessage):
        wire.requested_token({"memguard": 1, "token": token})
    assert wire.requested_token(wire.request("0" * 32)) == "0" * 32
    with pytest.raises(BadMessage):
        wire.requested_token({"memguard": 2, "token": "0" * 32})


def test_a_file_descriptor_comes_with_its_message_and_is_not_inherited(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    with open(os.devnull) as file:
        wire.send(here, GOOD, file.fileno())
        before = open_files()
        message, fd = wire.receive(there, 5)
        assert message == GOOD and fd is not None and fd != file.fileno()
        assert not os.get_inheritable(fd) and os.path.samestat(os.fstat(fd), os.fstat(file.fileno()))
        assert open_files() == before + 1
        os.close(fd)


def test_a_message_may_come_byte_by_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair

    def trickle() -> None:
        for byte in wire.encode(GOOD):
            here.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    assert wire.receive(there, 5) == (GOOD, None)
    thread.join()


def test_several_file_descriptors_are_refused_and_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    before = open_files()
    for count in (2, 4, 50):
        with open(os.devnull) as file:
            fds = array.array("i", [file.fileno()] * count)
            here.sendmsg([wire.encode(GOOD)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            with pytest.raises(BadMessage, match="more than one file descriptor"):
                wire.receive(there, 5)
        assert open_files() == before


def test_a_file_descriptor_of_a_bad_message_is_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    with open(os.devnull) as file:
        before = open_files()
        here.sendmsg([b"\xff" * 9], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))])
        with pytest.raises(BadMessage):
            wire.receive(there, 5)
        assert open_files() == before


def test_a_slow_sender_times_out(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.send(b"\0\0")
    with pytest.raises(TimeoutError):
        wire.receive(there, 0.05)
    here.close()
    with pytest.raises(EOFError):
        wire.receive(there, 5)


def test_a_peer_that_does_not_read_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    here, _ = pair
    here.setblocking(False)
    with pytest.raises(ConnectionError):
        for _ in range(10_000):
            wire.send(here, GOOD)


def test_the_kernel_says_who_is_at_the_other_end(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    who = wire.peer(pair[0])
    assert who == (os.getpid(), os.geteuid()) and wire.same_user(who)
    assert not wire.same_user(who._replace(uid=who.uid + 1))
    monkeypatch.setattr(os, "geteuid", lambda: who.uid + 1)
    assert not wire.same_user(who)
