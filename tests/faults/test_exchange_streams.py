"""Streams and copies over a stub of libcuda, through the real ctypes: each of the driver's calls fails in turn.

gcc is needed, as for the rest of this folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Stubbed = Callable[..., dict[str, Any]]
PREAMBLE = """
import ctypes, json, os, sys
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_asked.restype = ctypes.c_char_p
from memguard._devices import contexts, copies, streams
from memguard._devices.streams import Mark
from memguard.errors import DeviceError
result = {}
SIDE, OTHER, CAPTURED = 0x7f0000000040, 0x7f0000000080, 0x7f0000ca0000

def asked():
    found, number = [], 0
    while (name := stub.stub_asked(number)) is not None:
        found.append(name.decode())
        number += 1
    return found

def live():
    idle = sum(len(events) for events in streams._idle.values())
    return {"lost": stub.stub_live(0) - idle, "pinned": stub.stub_live(1), "streams": stub.stub_live(2),
            "depth": stub.stub_live(3), "mode": stub.stub_mode()}

def fails(name, code, call, times=1):
    contexts._primaries.clear()
    stub.stub_forget()
    stub.stub_fail(name.encode(), code, times)
    try:
        call()
        return None
    except DeviceError as error:
        return str(error)
    finally:
        stub.stub_forget()
        stub.stub_finish()

SOURCE = ctypes.create_string_buffer(bytes(range(256)) * 16)
TARGET = ctypes.create_string_buffer(4096)
AT, TO = ctypes.addressof(SOURCE), ctypes.addressof(TARGET)

def held():
    with Mark(0, SIDE) as mark:
        mark.passed()
        mark.before(OTHER)
        mark.wait()

WAYS = {
    "stream to stream": lambda: streams.follow(0, SIDE, OTHER),
    "stream to default": lambda: streams.follow(0, SIDE, 0),
    "stream to host": lambda: streams.follow(0, SIDE, None),
    "context to stream": lambda: streams.follow(0, None, SIDE),
    "context to host": lambda: streams.follow(0, None, None),
    "another context": lambda: streams.follow(0, None, SIDE, 0x7f0000001010),
    "a mark": held,
    "copy": lambda: copies.device(TO, AT, 4096, 0),
    "queue a copy": lambda: copies.queue(TO, AT, 4096, contexts.primary(0), SIDE),
    "queue a copy by default": lambda: copies.queue(TO, AT, 4096, contexts.primary(0), 0),
    "copy to the host": lambda: copies.to_host(TO, AT, 4096, 0),
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, flags in (("new", []), ("old", ["-DOLD_DRIVER"])):
        made[name] = tmp_path_factory.mktemp(name)
        source = str(Path(__file__).with_name("cuda_stub.c"))
        library = str(made[name] / "libcuda.so.1")
        subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return made


@pytest.fixture
def stubbed(libraries: dict[str, Path]) -> Stubbed:
    """Run code over the stub; it leaves its findings in `result`."""

    def run(code: str, driver: str = "new") -> dict[str, Any]:
        program = f"{PREAMBLE}\n{textwrap.dedent(code)}\nprint('RESULT', json.dumps(result))"
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries[driver]), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, env=environment
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
        return found

    return run


CLEAN = {"lost": 0, "pinned": 0, "streams": 0, "depth": 0, "mode": 0}
GIVEN_BACK = {"cuThreadExchangeStreamCaptureMode", "cuStreamDestroy_v2", "cuMemFreeHost", "cuEventDestroy_v2"}
"""Calls that give something back: if they fail, there is nothing more to do."""
ASKED = {
    "stream to stream": {"cuStreamQuery", "cuEventRecord", "cuStreamWaitEvent"},
    "stream to default": {"cuStreamQuery", "cuEventRecord", "cuStreamWaitEvent"},
    "stream to host": {"cuStreamQuery", "cuEventRecord", "cuEventSynchronize"},
    "context to stream": {"cuCtxRecordEvent", "cuStreamWaitEvent"},
    "context to host": {"cuCtxRecordEvent", "cuEventSynchronize"},
    "another context": {"cuCtxRecordEvent", "cuStreamWaitEvent", "cuEventDestroy_v2"},
    "a mark": {"cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuEventSynchronize"},
    "copy": {"cuMemcpy", "cuStreamSynchronize"},
    "queue a copy": {"cuMemcpyAsync"},
    "queue a copy by default": {"cuMemcpyAsync"},
    "copy to the host": {"cuMemHostAlloc", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuStreamCreate"},
}


def test_each_way_asks_the_driver_for_what_it_should(stubbed: Stubbed) -> None:
    found = stubbed("""
    for name, way in WAYS.items():
        stub.stub_forget()
        way()
        result[name] = [asked(), live()]
        stub.stub_finish()
    result["copied"] = TARGET.raw == SOURCE.raw[:4096]
    """)
    assert found.pop("copied") and set(found) == set(ASKED)
    for name, (asked, live) in found.items():
        assert ASKED[name] <= set(asked), (name, asked)
        assert live == CLEAN, name


@pytest.mark.parametrize("code", [1, 700, 719, 999])
def test_each_call_that_fails_once_is_a_device_error_and_leaves_nothing(stubbed: Stubbed, code: int) -> None:
    found = stubbed(f"""
    for name, way in WAYS.items():
        for events in streams._idle.values():
            while events:
                stub.cuEventDestroy_v2(ctypes.c_void_p(events.pop()))
        contexts._primaries.clear()
        stub.stub_forget()
        way()
        calls = sorted(set(asked()) - set({sorted(GIVEN_BACK)!r}))
        stub.stub_finish()
        result[name] = {{}}
        for call in calls:
            for events in streams._idle.values():
                while events:
                    stub.cuEventDestroy_v2(ctypes.c_void_p(events.pop()))
            text = fails(call, {code}, way)
            result[name][call] = [text, live()]
            fails("", 0, way)
            assert live() == result[name][call][1], "and afterwards all is well again"
    """)
    for name, calls in found.items():
        assert ASKED[name] - GIVEN_BACK <= set(calls)
        for call, (text, live) in calls.items():
            assert live == CLEAN, (name, call, live)
            if call in ASKED[name]:
                assert text is not None and f"error {code}" in text and "fix:" in text, (name, call, text)


def test_what_cannot_be_given_back_changes_nothing(stubbed: Stubbed) -> None:
    found = stubbed(f"""
    for name, way in WAYS.items():
        for call in {sorted(GIVEN_BACK)!r}:
            result[name + " " + call] = [fails(call, 719, way), live()["depth"], live()["mode"]]
    result["same"] = TARGET.raw == SOURCE.raw[:4096]
    """)
    assert found.pop("same") and set(map(tuple, found.values())) <= {(None, 0, 0)}


def test_a_capture_that_was_ended_is_an_error_of_its_own(stubbed: Stubbed) -> None:
    found = stubbed("""
    result["text"] = fails("cuCtxRecordEvent", 900, lambda: streams.follow(0, None, SIDE))
    try:
        streams.follow(0, SIDE, CAPTURED)
    except streams.Captured as error:
        result["captured"] = str(error)
    stub.stub_forget()
    streams.follow(0, CAPTURED, CAPTURED + 0)
    result["itself"], result["live"] = asked(), live()
    result["default"] = [streams.capturing(0, 0), streams.capturing(0, 1), streams.capturing(0, CAPTURED)]
    """)
    assert "capture of a CUDA graph" in found["text"] and "being captured" in found["captured"]
    assert found["itself"] == [] and found["live"] == CLEAN, "one stream has nothing to wait for in itself"
    assert found["default"] == [False, False, True]


def test_an_idle_stream_needs_no_event(stubbed: Stubbed) -> None:
    found = stubbed("""
    stub.stub_idle(1)
    for name, (first, then) in {"stream": (SIDE, OTHER), "host": (SIDE, None), "default": (0, OTHER)}.items():
        stub.stub_forget()
        streams.follow(0, first, then)
        result[name] = asked()
    stub.stub_forget()
    streams.follow(0, None, SIDE)
    result["context"], result["live"] = asked(), live()
    result["idle"] = [streams.idle(0, SIDE), streams.idle(0, 0), streams.idle(1, SIDE)]
    stub.stub_idle(0)
    result["busy"] = [streams.idle(0, SIDE), streams.idle(0, 0), streams.idle(1, SIDE)]
    """)
    for name in ("stream", "host", "default"):
        assert "cuStreamQuery" in found[name] and not any("Event" in call for call in found[name]), found[name]
    assert "cuCtxRecordEvent" in found["context"] and "cuStreamQuery" not in found["context"]
    assert found["live"] == CLEAN and found["idle"] == [True] * 3
    assert found["busy"] == [False, False, True], "a GPU without a context was never given work"


def test_a_captured_stream_is_not_asked_whether_it_is_idle(stubbed: Stubbed) -> None:
    """It would end the capture: the control, which asks."""
    found = stubbed("""
    for idle in (0, 1):
        stub.stub_idle(idle)
        for pair in ((SIDE, CAPTURED), (CAPTURED, SIDE), (CAPTURED, None)):
            try:
                streams.follow(0, *pair)
            except streams.Captured as error:
                result.setdefault("said", []).append(str(error))
    result["asked"] = "cuStreamQuery" in asked()
    try:
        streams.idle(0, CAPTURED)
    except streams.Captured as error:
        result["control"] = str(error)
    result["live"] = live()
    """)
    assert len(found["said"]) == 6 and set(found["said"]) == {found["said"][0]} and not found["asked"]
    assert "ended the capture" in found["control"] and found["live"] == CLEAN


@pytest.mark.parametrize("code", [900, 901, 906])
def test_every_code_of_a_capture_is_said_as_one(stubbed: Stubbed, code: int) -> None:
    found = stubbed(f"""
    for call, first in {{"cuStreamQuery": SIDE, "cuEventRecord": 0, "cuCtxRecordEvent": None}}.items():
        result[call] = fails(call, {code}, lambda: streams.follow(0, first, OTHER))
    result["live"] = live()
    """)
    assert found.pop("live") == CLEAN and len(found) == 3
    assert all("ended the capture of a CUDA graph" in text for text in found.values()), found


def test_the_default_stream_is_not_used_beside_the_capture_of_one_that_it_waits_for(stubbed: Stubbed) -> None:
    """The driver says so when it is asked whether the default stream is captured. Of another stream it does not."""
    found = stubbed("""
    for name, first in {"null": 0, "legacy": 1, "other": SIDE}.items():
        result[name] = fails("cuStreamIsCapturing", 906, lambda: streams.follow(0, first, OTHER))
    stub.stub_fail(b"cuStreamIsCapturing", 906, 1)
    try:
        streams.follow(0, 0, OTHER)
    except streams.Captured:
        result["asked"] = asked()
    result["live"] = live()
    """)
    for name in ("null", "legacy"):
        assert "a CUDA graph is being captured" in found[name], name
    assert found["other"] is None and found["live"] == CLEAN
    assert not {"cuStreamQuery", "cuEventRecord", "cuStreamWaitEvent"} & set(found["asked"])


def test_which_gpu_reaches_which_memory(stubbed: Stubbed) -> None:
    found = stubbed("""
    result["known"] = [copies.reaches(0, AT), copies.reaches(0, 64), copies.reaches(1, AT)]
    for code in (201, 700, 801):
        stub.stub_fail(b"cuPointerGetAttribute", code, 1)
        result[str(code)] = copies.reaches(0, AT)
    result["live"] = live()
    """)
    assert found.pop("live") == CLEAN
    assert found == {"known": [True, False, None], "201": None, "700": None, "801": None}


def test_an_event_that_could_not_be_recorded_is_destroyed(stubbed: Stubbed) -> None:
    found = stubbed("""
    result["text"] = fails("cuEventRecord", 719, lambda: Mark(0, SIDE))
    result["events"] = stub.stub_live(0)
    result["idle"] = sum(map(len, streams._idle.values()))
    """)
    assert found["text"] is not None and found["events"] == found["idle"] == 0


def test_events_are_used_again(stubbed: Stubbed) -> None:
    found = stubbed("""
    for _ in range(5000):  # more than the stub has
        streams.follow(0, SIDE, OTHER)
        stub.stub_finish()
    marks = [Mark(0, SIDE) for _ in range(100)]
    for mark in marks:
        mark.close()
        mark.close()
    result["events"], result["live"] = stub.stub_live(0), live()
    """)
    assert found == {"events": 100, "live": CLEAN}


def test_a_driver_before_12_5_waits_for_the_whole_context(stubbed: Stubbed) -> None:
    found = stubbed(
        """
        streams.follow(0, None, SIDE)
        result["asked"], result["live"] = asked(), live()
        result["text"] = fails("cuCtxSynchronize", 700, lambda: streams.follow(0, None, SIDE))
        result["after"] = live()
        """,
        "old",
    )
    assert "cuCtxSynchronize" in found["asked"] and "cuEventCreate" not in found["asked"]
    assert "error 700" in found["text"] and found["live"] == found["after"] == CLEAN


def test_a_gpu_without_a_context_waits_for_nothing(stubbed: Stubbed) -> None:
    found = stubbed("""
    streams.follow(1, None, None)
    with Mark(1, SIDE) as mark:
        result["passed"] = mark.passed()
    result["asked"], result["live"] = asked(), live()
    """)
    assert found["passed"] and found["live"] == CLEAN
    assert not {"cuEventCreate", "cuCtxPushCurrent_v2", "cuDevicePrimaryCtxRetain"} & set(found["asked"])


def test_a_context_that_is_current_is_not_pushed_again(stubbed: Stubbed) -> None:
    found = stubbed("""
    primary = contexts.primary(0)
    with contexts.entered(primary):
        stub.stub_forget()
        streams.follow(0, SIDE, OTHER)
        result["asked"], result["depth"] = asked(), live()["depth"]
    result["live"] = live()
    """)
    assert "cuCtxPushCurrent_v2" not in found["asked"] and found["depth"] == 1 and found["live"] == CLEAN


def test_whether_the_legacy_stream_may_be_used_is_asked_of_the_driver(stubbed: Stubbed) -> None:
    """906 is CUDA_ERROR_STREAM_CAPTURE_IMPLICIT. A driver without `cuStreamGetFlags` knows no stream that blocks."""
    found = stubbed("""
context = contexts.primary(0)
result["free"] = streams.awaits_capture(context)
stub.stub_fail(b"cuStreamIsCapturing", 906, 1)
result["captures"] = streams.awaits_capture(context)
result["blocking"] = streams.blocking(SIDE)
with Mark(0, streams.LEGACY, context): pass
before = len(streams._idle[context])
streams.forget(context)
result["forgotten"] = [before, streams._idle.get(context)]
result["live"] = live()
""")
    assert found["free"] is False and found["captures"] is True and found["blocking"] is False
    assert found["forgotten"] == [1, None] and found["live"]["depth"] == 0


def test_where_an_address_lies(stubbed: Stubbed) -> None:
    found = stubbed("""
    result["known"], result["unknown"] = streams.place(AT), streams.place(64)
    contexts.primary(0)
    stub.stub_forget()
    result["primary"] = [streams.place(AT), asked()]
    stub.stub_fail(b"cuPointerGetAttribute", 1, 2)
    result["refused"] = streams.place(AT)
    stub.stub_fail(b"cuPointerGetAttribute", 1, 1)
    result["no context"] = streams.place(AT)
    """)
    assert found.pop("primary") == [[0, 0x7F0000001000], ["cuPointerGetAttribute"]], "one call is enough"
    assert found == {"known": [0, 0x7F0000001000], "unknown": None, "refused": None, "no context": [0, None]}


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 2000, 2500, 4096])
def test_a_copy_to_the_host_goes_in_parts_and_is_whole(stubbed: Stubbed, size: int) -> None:
    found = stubbed(f"""
    copies.STAGE = 1000
    copies.to_host(TO, AT, {size}, 0)
    result["same"] = TARGET.raw[:{size}] == SOURCE.raw[:{size}]
    result["rest"] = TARGET.raw[{size}:4096].strip(b"\\0") == b""
    result["parts"], result["live"] = asked().count("cuMemcpyDtoHAsync_v2"), live()
    """)
    assert found == {"same": True, "rest": True, "parts": -(-size // 1000), "live": CLEAN}


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuMemHostAlloc", "cuStreamCreate"])
def test_a_copy_that_fails_midway_gives_everything_back(stubbed: Stubbed, call: str) -> None:
    """The second of several such calls fails."""
    found = stubbed(f"""
    copies.STAGE = 1000
    import functools
    real = getattr(stub, "{call}")
    done = []
    class Second:
        def __getattr__(self, name):
            found = getattr(contexts_driver, name)
            if name != "{call}":
                return found
            def call(*args):
                done.append(1)
                return 719 if len(done) == 2 else found(*args)
            return call
    contexts_driver = contexts.loaded()
    contexts._initialised = Second()
    try:
        copies.to_host(TO, AT, 4096, 0)
    except DeviceError as error:
        result["text"] = str(error)
    contexts._initialised = contexts_driver
    result["live"], result["calls"] = live(), len(done)
    """)
    if call == "cuStreamCreate":
        assert found["calls"] == 1 and found["live"] == CLEAN
    else:
        assert "error 719" in found["text"] and found["live"] == CLEAN
