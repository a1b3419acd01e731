"""NVML when all is well, and when it is not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import GIB, MIB, TWO, UUIDS, Run

# all is well


def test_two_gpus(run: Run) -> None:
    found = run(
        """
        nvml = Nvml()
        result["devices"] = [vars(device) for device in nvml.devices()]
        result["memory"] = [nvml.memory(device["uuid"])._asdict() for device in result["devices"]]
        result["processes"] = [list(nvml.processes(device["uuid"]).items()) for device in result["devices"]]
        nvml.close()
        """,
        TWO,
        processes0=f"7:{GIB},8:{2 * GIB}",
    )
    first, second = found["devices"]
    assert (first["uuid"], first["name"], first["index"], first["architecture"]) == (
        UUIDS[0],
        "NVIDIA H200",
        0,
        "hopper",
    )
    assert (first["total"], first["reserved"]) == (143_771 * MIB, 615 * MIB)
    assert (second["name"], second["index"], second["architecture"]) == ("Tesla T4", 1, "turing")
    assert first["ordinal"] is None and first["simulated"] is False
    for memory in found["memory"]:
        assert memory["total"] == memory["reserved"] + memory["used"] + memory["free"]
    assert found["memory"][0]["used"] == 3 * GIB
    assert found["processes"] == [[[7, GIB], [8, 2 * GIB]], []]
    assert [entry[0] for entry in found["log"]] == ["init", "shutdown"]


def test_nvml_opens_again_after_close(run: Run) -> None:
    found = run(
        f"""
        nvml = Nvml()
        nvml.close()
        nvml.devices()
        nvml.close()
        nvml.close()
        result["used"] = nvml.memory({UUIDS[0]!r}).used
        """
    )
    assert found["used"] == 3 * GIB
    assert [entry[0] for entry in found["log"]] == ["init", "shutdown", "init"]


def test_a_process_that_is_listed_twice_is_added_up(run: Run) -> None:
    code = f"result['found'] = list(Nvml().processes({UUIDS[0]!r}).items())"
    assert run(code, processes0="7:100,7:50,8:1")["found"] == [[7, 150], [8, 1]]
    assert run(code, processes0="7:100,7:na,7:50")["found"] == [[7, None]]


@pytest.mark.parametrize(("number", "name"), [(7, "ampere"), (8, "ada"), (10, "blackwell"), (77, "unknown")])
def test_architectures(run: Run, number: int, name: str) -> None:
    assert run("result['is'] = Nvml().devices()[0].architecture", arch0=number)["is"] == name


def test_a_library_that_does_not_know_architectures(run: Run) -> None:
    assert run("result['is'] = Nvml().devices()[0].architecture", without=("ARCHITECTURE",))["is"] == "unknown"


def test_threads_share_one_nvml(run: Run) -> None:
    found = run(
        f"""
        import threading
        nvml, errors = Nvml(), []
        def work():
            try:
                for _ in range(100):
                    assert nvml.memory({UUIDS[0]!r}).used == 3 * GIB and nvml.processes({UUIDS[0]!r}) == {{7: 5}}
            except BaseException as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        result["errors"] = errors
        """,
        processes0="7:5",
    )
    assert found["errors"] == [] and [entry[0] for entry in found["log"]] == ["init"]


# no NVML


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (9, "load the NVIDIA kernel module"),
        (18, "the driver was updated while loaded: reboot"),
        (4, "run as a user who may open /dev/nvidia"),
        (999, "run `nvidia-smi`"),
    ],
)
def test_nvml_that_does_not_start(run: Run, code: int, fix: str) -> None:
    found = run("result['text'] = refused(Nvml().devices); Nvml().close()", init=code)
    assert found["text"].startswith("NVML: ") and f"\n    fix: {fix}" in found["text"]


def test_no_library(run: Run, tmp_path: Path) -> None:
    """One that cannot be loaded, so that a real one elsewhere is not found in its place."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_text("no library")
    found = run(
        """
        from memguard._devices import nvml
        nvml._exists = lambda path: False
        result["text"] = refused(Nvml().devices)
        try:
            memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
        except memguard.DeviceError as error:
            result["init"] = str(error)
        try:
            memguard.ledger()
        except memguard.NotActive:
            result["inactive"] = True
        """,
        library=tmp_path / "lib",
    )
    without = '    or: try it without a GPU: simulate="h200" (`memguard run --device h200`)'
    missing = '    or: go on without a GPU: missing_gpu="warn" (no budget) or missing_gpu="simulate", or set '
    missing += "MEMGUARD_DISABLE=1 or MEMGUARD_SIMULATE=h200"
    assert found["init"] == f"{found['text']}\n{without}\n{missing}"
    assert "install the NVIDIA driver" in found["text"] and found["inactive"]


def test_an_nvml_too_old_to_start(run: Run) -> None:
    assert "fix: " in run("result['text'] = refused(Nvml().devices)", without=("INIT",))["text"]


def test_no_python_bindings(run: Run) -> None:
    found = run("sys.modules['pynvml'] = None\nresult['text'] = refused(Nvml().devices)")
    assert "fix: pip install nvidia-ml-py" in found["text"]


def test_no_gpu(run: Run) -> None:
    found = run(
        """
        from memguard._devices.real import RealHost
        result["text"] = refused(RealHost().devices)
        """,
        count=0,
    )
    assert "NVML sees no GPU" in found["text"] and "fix: " in found["text"]


def test_a_gpu_divided_by_mig_is_refused_with_its_name(run: Run) -> None:
    found = run(
        """
        from memguard._devices.real import RealHost
        result["text"] = refused(RealHost().devices)
        scenario(mig1=0)
        result["count"] = len(RealHost().devices())
        """,
        TWO,
        mig1=1,
    )
    assert "Tesla T4" in found["text"] and "MIG enabled" in found["text"] and "\n    fix: " in found["text"]
    assert found["count"] == 2


def test_virtual_gpus_and_the_version_of_the_driver(run: Run) -> None:
    code = f"result['found'] = [Nvml().vgpu({UUIDS[0]!r}), Nvml().vgpu({UUIDS[1]!r}), Nvml().driver()]"
    assert run(code, TWO, virtual0=2, driver="570.1")["found"] == [True, False, "570.1"]
    assert run(code, TWO, virtual0=1, driver="570.1")["found"] == [False, False, "570.1"], "passed on whole"


def test_clients_of_mps(run: Run) -> None:
    code = f"result['found'] = sorted(Nvml().mps({UUIDS[0]!r}))"
    assert run(code, mps0="7:1024,9:2048")["found"] == [7, 9]
    assert run(code)["found"] == []


def test_a_gpu_that_knows_no_mig_has_none(run: Run) -> None:
    code = f"result['mig'] = [Nvml().mig({UUIDS[0]!r}), Nvml().mig({UUIDS[1]!r})]"
    assert run(code, TWO)["mig"] == [False, False]
    assert run(code, TWO, mig0=1)["mig"] == [True, False]


# a GPU that goes


def test_a_gpu_lost_and_back(run: Run) -> None:
    found = run(
        f"""
        nvml, uuid = Nvml(), {UUIDS[0]!r}
        nvml.devices()
        scenario(lost=0)
        calls = [lambda: nvml.memory(uuid), lambda: nvml.processes(uuid), nvml.devices]
        result["lost"] = [refused(call) for call in calls]
        scenario(lost=-1)
        result["used"] = nvml.memory(uuid).used
        """
    )
    assert all("fell off the bus" in text for text in found["lost"]) and found["used"] == 3 * GIB


def test_a_gpu_that_is_lost_from_the_start(run: Run) -> None:
    found = run(
        f"""
        nvml, uuid = Nvml(), {UUIDS[1]!r}
        result["lost"] = [refused(nvml.devices), refused(nvml.devices), refused(lambda: nvml.memory(uuid))]
        scenario(lost=-1)
        result["then"] = [len(nvml.devices()), nvml.memory(uuid).used]
        """,
        TWO,
        lost=1,
    )
    assert all("fell off the bus" in (text or "") for text in found["lost"]), found["lost"]
    assert found["then"] == [2, 0]
    assert [entry[0] for entry in found["log"]] == ["init", "shutdown"] * 3 + ["init"], "NVML counts its users"


def test_a_gpu_that_has_gone(run: Run) -> None:
    found = run(
        f"""
        nvml = Nvml()
        nvml.devices()
        nvml.close()
        scenario(count=1)
        result["text"] = [refused(lambda: nvml.memory({UUIDS[1]!r})), refused(lambda: nvml.processes({UUIDS[1]!r}))]
        """,
        TWO,
    )
    assert all(UUIDS[1] in (text or "") and "fix: " in text for text in found["text"])


def test_a_budget_survives_a_gpu_that_is_lost(run: Run) -> None:
    found = run(
        """
        guard = memguard.init({"version": 1, "frameworks": {"pycuda": {"limit": "1GiB"}}})
        scenario(lost=0)
        result["text"] = [refused(memguard.ledger), refused(memguard.trim)]
        result["active"] = guard.active
        scenario(lost=-1)
        part = memguard.ledger().devices[0]
        result["sum"] = sum(row.bytes or 0 for row in part.rows) - part.device.total
        scenario(lost=0, shutdown=15)
        result["stays"] = memguard.shutdown()
        """
    )
    assert all("fell off the bus" in text for text in found["text"]) and found["active"]
    assert found["sum"] == 0 and found["stays"] == []


# what an older or limited NVML does not say


@pytest.mark.parametrize("way", ["missing", "not supported", "not found"])
def test_memory_without_v2_has_no_reserve(run: Run, way: str) -> None:
    found = run(
        f"""
        nvml = Nvml()
        (device,) = nvml.devices()
        result["reserved"], result["memory"] = device.reserved, nvml.memory({UUIDS[0]!r})._asdict()
        """,
        without=("MEMORY_V2",) if way == "missing" else (),
        memory_v2={"missing": 0, "not supported": 3, "not found": 13}[way],
    )
    assert found["reserved"] is None and found["memory"]["reserved"] is None
    assert found["memory"]["used"] == 3 * GIB + 615 * MIB
    assert found["memory"]["used"] + found["memory"]["free"] == found["memory"]["total"]


def test_memory_that_may_not_be_read(run: Run) -> None:
    assert "may open /dev/nvidia" in run("result['text'] = refused(Nvml().devices)", memory_v2=4)["text"]


def test_bytes_that_nvml_does_not_give_are_unknown(run: Run) -> None:
    found = run(f"result['found'] = list(Nvml().processes({UUIDS[0]!r}).items())", processes0="7:na,8:5")
    assert found["found"] == [[7, None], [8, 5]]


@pytest.mark.parametrize(
    ("driver", "believed"),
    [
        ("535.43.02", False), ("535.54.03", False), ("535.85.12", False), ("535.86.10", True), ("535.104.05", True),
        ("534.99", True), ("525.60", True), ("580.159.03", True), ("a preview", True),
    ],
)  # fmt: skip
def test_bytes_of_drivers_that_swap_fields_are_ignored(run: Run, driver: str, believed: bool) -> None:
    found = run(f"result['found'] = list(Nvml().processes({UUIDS[0]!r}).items())", processes0=f"7:{GIB}", driver=driver)
    assert found["found"] == [[7, GIB if believed else None]]


def test_readings_that_cannot_be_true_are_refused_and_the_next_one_is_read(run: Run) -> None:
    """2⁶⁴-1 and its like, as a driver in trouble gives them, for each figure and with both versions of the call."""
    found = run(
        f"""
        nvml = Nvml()
        good = nvml.memory({UUIDS[0]!r})
        result["said"] = []
        for version in ("0", "3"):
            for key, values in {{
                "used0": (2**64 - 1, 2**63, 2**51, 2**50, 144 * GIB),
                "total0": (2**64 - 1, 2**63, 2**51, 0, 1),
                "reserved0": (2**64 - 1, 2**63, 2**51, 144 * GIB),
            }}.items():
                for value in values if key != "reserved0" or version == "0" else ():  # v1 has no reserve
                    before = pathlib.Path(os.environ["NVML_STUB"]).read_text()
                    scenario(**{{"memory_v2": version, **({{"reserved0": 0}} if version == "3" else {{}}), key: value}})
                    result["said"].append(refused(lambda: Nvml().memory({UUIDS[0]!r})))
                    pathlib.Path(os.environ["NVML_STUB"]).write_text(before)
        result["again"] = nvml.memory({UUIDS[0]!r}) == good
        """
    )
    assert len(found["said"]) == 24 and found["again"]
    assert all("which cannot be\n    fix: run `nvidia-smi`" in (text or "") for text in found["said"]), [
        n for n, t in enumerate(found["said"]) if not t
    ]


def test_bytes_of_a_process_that_cannot_be_true_are_unknown(run: Run) -> None:
    figures = [2**64 - 1, 2**64 - 2, 2**63, 2**51, 2**50, 200 * GIB]
    listed = ",".join(f"{pid}:{size}" for pid, size in enumerate([*figures, GIB], 7))
    found = run(
        f"nvml = Nvml()\nnvml.devices()\nresult['found'] = list(nvml.processes({UUIDS[0]!r}).items())",
        processes0=listed,
    )
    assert found["found"] == [*([pid, None] for pid in range(7, 13)), [13, GIB]]


def test_a_process_list_that_may_not_be_read(run: Run) -> None:
    text = run(f"result['text'] = refused(lambda: Nvml().processes({UUIDS[0]!r}))", processes_code=4)["text"]
    assert "may open /dev/nvidia" in text


def test_a_driver_without_the_process_list_of_these_bindings(run: Run) -> None:
    """nvidia-ml-py raises NVMLLibraryMismatchError, which is no NVMLError."""
    found = run(f"result['text'] = refused(lambda: Nvml().processes({UUIDS[0]!r}))", without=("PROCESSES_V3",))
    assert "fix: update the NVIDIA driver" in found["text"]


# forks


def test_a_forked_child_starts_nvml_again_and_leaves_its_parents_alone(run: Run) -> None:
    found = run(
        f"""
        nvml = Nvml()
        nvml.devices()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answer = [nvml.memory({UUIDS[0]!r}).used, len(nvml.devices())]
            nvml.close()
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        result["child"] = json.loads(os.read(reading, 1000))
        result["parent"] = nvml.memory({UUIDS[0]!r}).used
        result["pids"] = [os.getpid(), pid]
        """
    )
    parent, child = map(str, found["pids"])
    assert found["child"] == [3 * GIB, 1] and found["parent"] == 3 * GIB
    assert found["log"] == [["init", parent], ["init", child], ["shutdown", child]]


def test_a_forked_child_that_closes_an_unused_nvml_shuts_nothing_down(run: Run) -> None:
    found = run(
        """
        nvml = Nvml()
        nvml.devices()
        pid = os.fork()
        if pid == 0:
            nvml.close()
            os._exit(0)
        os.waitpid(pid, 0)
        """
    )
    assert [entry[0] for entry in found["log"]] == ["init"]


# a budget over it


def test_a_budget_on_two_gpus_whose_processes_have_other_pids(run: Run) -> None:
    """A container: NVML lists PIDs of the host."""
    found = run(
        """
        guard = memguard.init({"version": 1, "frameworks": {"pycuda": {"share": "50%"}}})
        ledger = memguard.ledger()
        result["sums"] = [sum(row.bytes or 0 for row in part.rows) - part.device.total for part in ledger.devices]
        result["others"] = [part.row("other processes").bytes for part in ledger.devices]
        result["caps"] = [part.limit - part.reserve - 2 * part.caps["pycuda"] for part in guard.plan.devices]
        result["simulated"] = ledger.simulated or "simulated" in str(ledger)
        result["stays"] = memguard.shutdown()
        """,
        TWO,
        processes0=f"4000000:{3 * GIB}",
    )
    assert found["sums"] == [0, 0] and found["others"] == [3 * GIB, 0] and not found["simulated"]
    assert all(0 <= rest < 4 * MIB for rest in found["caps"]) and found["stays"] == []
    assert [entry[0] for entry in found["log"]] == ["init", "shutdown"]


def test_a_card_that_others_fill_is_warned_about(run: Run) -> None:
    found = run(
        "result['notes'] = memguard.init({'version': 1, 'frameworks': {'pycuda': {'share': '50%'}}}).notes",
        used0=130_000 * MIB,
    )
    assert any("other processes hold 126.95 GiB" in note for note in found["notes"])


def test_gpus_named_by_ordinal_need_cuda_to_be_asked(run: Run, without_cuda: dict[str, str]) -> None:
    found = run(
        """
        try:
            budget = {"version": 1, "frameworks": {"pycuda": {"share": "50%"}}}
            memguard.init({**budget, "devices": {"1": {"limit": "2GiB"}}})
        except memguard.PlanError as error:
            result["text"] = str(error)
        """,
        TWO,
        env=without_cuda,
    )
    assert "CUDA ordinal" in found["text"] and "memguard doctor" in found["text"]


def test_the_only_gpu_is_the_first_one_without_asking(run: Run) -> None:
    found = run(
        """
        import subprocess
        subprocess.run = None  # no child is started
        budget = {"version": 1, "frameworks": {"pycuda": {"share": "50%"}}}
        guard = memguard.init({**budget, "devices": {"0": {"limit": "2GiB"}}})
        result["limit"] = guard.plan.devices[0].limit
        """
    )
    assert found["limit"] == 2 * GIB


def test_hidden_gpus_that_cannot_be_told_apart_are_all_budgeted_with_a_warning(
    run: Run, without_cuda: dict[str, str]
) -> None:
    found = run(
        """
        import logging
        logging.basicConfig(level=logging.WARNING)
        guard = memguard.init({"version": 1, "frameworks": {"pycuda": {"share": "50%"}}})
        result["count"] = len(guard.plan.devices)
        """,
        TWO,
        env={**without_cuda, "CUDA_VISIBLE_DEVICES": "1"},
    )
    assert found["count"] == 2
    assert "CUDA_VISIBLE_DEVICES=1" in found["stderr"] and "memguard doctor" in found["stderr"]


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("darwin", "this is macOS (darwin), which has no CUDA\n    fix: run on Linux; or try a budget with"),
        ("win32", "this is Windows (win32)\n    fix: run on Linux, or in WSL 2, which is Linux to memguard; or"),
        ("freebsd14", "this is freebsd14\n    fix: run on Linux; or"),
    ],
)
def test_another_system_than_linux(monkeypatch: pytest.MonkeyPatch, system: str, text: str) -> None:
    from memguard._devices.real import RealHost
    from memguard.errors import DeviceError

    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(DeviceError, match=re.escape(text)) as caught:
        RealHost()
    assert "memguard.init(..., simulate='h200')" in str(caught.value)


# who has used a GPU


def used(run: Run, seen: str, *stamps: int, **more: Any) -> list[Any]:
    """Answers for PID 7, each with the stamp of the call before, or one of `stamps`."""
    code = f"""
        nvml, stamp = Nvml(), 0
        for given in {[*stamps] or [None, None]}:
            answer, stamp = nvml.used_since({UUIDS[0]!r}, 7, stamp if given is None else given)
            result.setdefault("found", []).append([answer, stamp])
    """
    return run(code, utilization0=seen, **more)["found"]  # type: ignore[no-any-return]


def test_what_a_process_has_used_since_the_last_look(run: Run) -> None:
    assert used(run, "7:1000:3,8:1500:90") == [[True, 1500], [False, 1500]]
    assert used(run, "7:1000:0,8:1500:90") == [[False, 1500], [False, 1500]]
    assert used(run, "8:1500:90,7:2000:1", 1500, 2000) == [[True, 2000], [False, 2000]]
    assert used(run, "") == [[False, 0], [False, 0]]


def test_entries_that_hold_anything_are_no_use(run: Run) -> None:
    assert used(run, "7:99999999999:4294967295,7:1000:0") == [[False, 1000], [False, 1000]]


@pytest.mark.parametrize("code", [3, 4])
def test_a_gpu_whose_driver_does_not_say_who_uses_it(run: Run, code: int) -> None:
    assert used(run, "7:1000:3", utilization_code=code) == [[None, 0], [None, 0]]


def test_a_driver_without_that_function_does_not_say_either(run: Run, build: Callable[..., Path]) -> None:
    assert used(run, "7:1000:3", without=("UTILIZATION",)) == [[None, 0], [None, 0]]


def test_a_lost_gpu_is_an_error_of_the_reading(run: Run) -> None:
    code = f"""
        nvml = Nvml()
        nvml.devices()
        scenario(lost="0")
        result["said"] = refused(lambda: nvml.used_since({UUIDS[0]!r}, 7, 0))
        """
    assert "utilization of" in run(code)["said"]


def test_the_utilisation_of_each_process(run: Run) -> None:
    found = run(
        """
        USERS = (41, 80), (42, 3), (41, 90), (43, 4000000)
        nvml = Nvml()
        (device,) = nvml.devices()
        for name, changes in (
            ("some", {"utilization0": ",".join(f"{pid}:{9 * 10**15}:{busy}" for pid, busy in USERS)}),
            ("nobody", {"utilization0": ""}),
            ("denied", {"utilization0": "41:9000000000000000:80", "utilization_code": 4}),
            ("not supported", {"utilization_code": 3}),
        ):
            scenario(**changes)
            said = nvml.utilisation(device.uuid)
            result[name] = said if said is None else sorted(said.items())
        """
    )
    assert found["some"] == [[41, 90], [42, 3]]
    assert found["nobody"] is found["denied"] is found["not supported"] is None
