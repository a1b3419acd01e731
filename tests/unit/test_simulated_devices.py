"""The simulated host: NVML's sum holds, memory runs out, and everything is marked as simulated."""

from __future__ import annotations

import re
import threading

import pytest

from memguard._devices.host import Host
from memguard._devices.simulated import CATALOGUE, CONTEXT, PID, Model, SimulatedHost, SimulatedOutOfMemory, model
from memguard._units import GIB, MIB
from memguard.errors import DeviceError


def balanced(host: SimulatedHost) -> bool:
    return all((m := host.memory(d)).total == (m.reserved or 0) + m.used + m.free for d in host.devices())


def test_the_h200_is_as_measured() -> None:
    host: Host = SimulatedHost()
    (gpu,) = host.devices()
    memory = host.memory(gpu)
    assert (gpu.name, gpu.architecture, gpu.simulated, host.simulated) == ("NVIDIA H200", "hopper", True, True)
    assert (memory.total, memory.reserved, memory.used) == (143_771 * MIB, 615 * MIB, 0)
    assert gpu.usable == 143_156 * MIB == memory.free
    assert host.processes(gpu) == {} and host.context_active(gpu) is False


def test_every_model_can_be_named_by_key_and_by_nvml_name() -> None:
    for key, entry in CATALOGUE.items():
        assert model(key.upper()) is entry is model(entry.name)
        assert (entry.reserved == 0) if entry.unified else (0 < entry.reserved < entry.total // 20)


def test_several_devices_are_told_apart() -> None:
    host = SimulatedHost(("h200", "l4", "h200"))
    devices = host.devices()
    assert [d.ordinal for d in devices] == [d.index for d in devices] == [0, 1, 2]
    assert len({d.uuid for d in devices}) == 3
    assert all(re.fullmatch(r"GPU-00000000-0000-4000-8000-[0-9a-f]{12}", d.uuid) for d in devices)
    assert devices == SimulatedHost(("h200", "l4", "h200")).devices()
    assert host.names == ("h200", "l4", "h200")
    host.take(devices[1], GIB)
    assert [host.memory(d).used for d in devices] == [0, GIB, 0]
    assert [host.multiprocessors(d.uuid) for d in devices] == [132, 58, 132]


@pytest.mark.parametrize(("name", "hint"), [("h20", "h200"), ("A100-80", "a100-80gb"), ("NVIDIA RTX 4090", "rtx4090")])
def test_an_unknown_model_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(DeviceError, match=f"did you mean '{hint}'") as caught:
        SimulatedHost([name])
    assert all(key in str(caught.value) for key in CATALOGUE)


def test_a_host_without_devices_or_with_a_stranger_is_refused() -> None:
    with pytest.raises(DeviceError, match="at least one"):
        SimulatedHost(())
    stranger = SimulatedHost(("h200", "h200")).devices()[1]
    with pytest.raises(DeviceError, match="no simulated GPU"):
        SimulatedHost().memory(stranger)


def test_take_and_give() -> None:
    host = SimulatedHost([Model("Tiny", "none", 100, 10)])
    (gpu,) = host.devices()
    host.take(gpu, 60)
    assert balanced(host) and host.memory(gpu).free == 30
    with pytest.raises(SimulatedOutOfMemory, match="simulated Tiny") as caught:
        host.take(gpu, 31)
    assert (caught.value.requested, caught.value.free) == (31, 30)
    assert host.memory(gpu).free == 30
    host.take(gpu, 30)
    host.give(gpu, 90)
    assert balanced(host) and host.memory(gpu).used == 0 and host.peak(gpu) == 90
    for wrong in (1, -1):
        with pytest.raises(ValueError, match="giving back"):
            host.give(gpu, wrong)
    with pytest.raises(ValueError, match="not a size"):
        host.take(gpu, -1)


def test_the_context_is_opened_once() -> None:
    host = SimulatedHost()
    (gpu,) = host.devices()
    assert host.open_context(gpu) is True
    assert host.open_context(gpu) is False
    assert host.context_active(gpu) is True
    assert host.processes(gpu) == {PID: CONTEXT} == {host.pid: 518 * MIB}
    with pytest.raises(ValueError, match="giving back"):
        host.give(gpu, 1)  # the context is not for giving back


def test_other_processes_take_room() -> None:
    host = SimulatedHost()
    (gpu,) = host.devices()
    host.occupy(gpu, 7, 140 * GIB - 1000 * MIB)
    assert balanced(host)
    with pytest.raises(SimulatedOutOfMemory):
        host.occupy(gpu, 7, 200 * GIB)
    assert host.processes(gpu) == {7: 140 * GIB - 1000 * MIB}
    with pytest.raises(SimulatedOutOfMemory):
        host.take(gpu, 10 * GIB)
    host.occupy(gpu, 7, 0)
    assert host.processes(gpu) == {}
    host.take(gpu, 10 * GIB)
    with pytest.raises(ValueError, match="other processes"):
        host.occupy(gpu, PID, 1)


def test_threads_lose_no_bytes() -> None:
    host = SimulatedHost()
    (gpu,) = host.devices()

    def work() -> None:
        for _ in range(300):
            host.take(gpu, 3)
            assert balanced(host)
            host.give(gpu, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.memory(gpu).used == 4 * 300
