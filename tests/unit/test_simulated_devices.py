"""The simulated host: NVML's sum holds, memory runs out, and everything is marked as simulated."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.units import GIB, MIB
from memguard._devices import catalog
from memguard._devices.catalog import CATALOGUE, Model, model
from memguard._devices.host import Host
from memguard._devices.simulated import CONTEXT, PID, SimulatedHost, SimulatedOutOfMemory
from memguard.errors import ConfigError, DeviceError


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


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("a100", "'a100-40gb', 'a100-80gb'"),
        ("A100-80", "'a100-80gb'"),
        ("NVIDIA A100", "'a100-40gb', 'a100-80gb'"),
        ("v100", "'v100-16gb', 'v100-32gb'"),
        ("NVIDIA RTX 4090", "'rtx4090'"),
        ("4090", "'rtx4090'"),
        ("GeForce RTX-5090", "'rtx5090'"),
        ("RTX A6000", "'a6000'"),
        ("h100-80gb", "'h100'"),
        ("a100-1g.10gb", "'a100-40gb-1g.10gb', 'a100-80gb-1g.10gb'"),
        ("MIG 1g.18gb", "'h200-1g.18gb'"),
        ("24", "'24GiB'"),
    ],
)
def test_an_unknown_name_is_told_what_it_may_stand_for(name: str, hints: str) -> None:
    with pytest.raises(DeviceError) as caught:
        SimulatedHost([name])
    assert str(caught.value).splitlines()[0].endswith(f"; did you mean {hints}?")
    assert caught.value.exit_code == 2
    assert all(key in str(caught.value) for key in CATALOGUE)


OTHERS = [
    "a10g", "a16", "a2", "a30", "a40", "a5000", "b100", "b300", "gh200", "h20", "h2000", "h800", "h100 nvl",
    "h100-94gb", "h100-96gb", "l20", "l40", "l4000", "p100", "rtx4080", "rtx 4090 d", "rtx4090ti", "rtx 6000 ada",
    "rtx5080", "t4g", "t40", "titan v", "v100s", "a100x", "a100-60gb", "a6000 ada", "h100-1g.12gb", "h200-9g", "gpu",
    "", " ", "nvidia", "\x1b[31m", "x" * 100_000, "80", "GiB", "0x10", "1e3GiB", "-1GiB", "\u0662\u0664GiB",
    "0", "00",
]  # fmt: skip


@pytest.mark.parametrize("name", OTHERS, ids=lambda name: ascii(name[:20]))
def test_no_other_card_is_ever_suggested(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        SimulatedHost([name])
    first = str(caught.value).splitlines()[0]
    assert "did you mean" not in first or (name == "80" and "'80GiB'" in first)
    assert caught.value.exit_code == 2 and len(first) < 120 and first.isprintable()


@given(st.text(max_size=30) | st.from_regex(r"[a-z]{0,3}[0-9]{1,5}[a-z]{0,2}(-[0-9]{1,3}gb)?", fullmatch=True))
def test_a_suggestion_has_every_word_that_was_written(name: str) -> None:
    for key in catalog.suggested(name):
        card = {**CATALOGUE, **catalog.SLICES}[key]
        text = f"{key} {card.name}".lower()
        words = [
            word for word in re.findall("[a-z0-9]+", name.lower()) if word not in ("nvidia", "geforce", "tesla", "gpu")
        ]
        assert all(word in text for word in words)
        numbers = {n for word in words for n in re.findall("[0-9]+", word)}
        assert numbers <= set(re.findall("[0-9]+", text))


@pytest.mark.parametrize(
    "name", ["a10", "A6000", "b200", "v100-16gb", "V100-32GB", "rtx4090", "RTX5090", "h100-1g.10gb"]
)
def test_the_usual_cards_are_known(name: str) -> None:
    (gpu,) = SimulatedHost([name]).devices()
    assert gpu.simulated and gpu.usable > 4 * GIB


def test_a_slice_has_the_part_of_its_card_that_its_name_says() -> None:
    assert len(catalog.SLICES) == 24
    for key, part in catalog.SLICES.items():
        card = CATALOGUE[key.rpartition("-")[0]]
        slices, gigabytes = re.fullmatch(r"(\d)g\.(\d+)gb", key.rpartition("-")[2]).groups()  # type: ignore[union-attr]
        assert part.name == f"{card.name} MIG {slices}g.{gigabytes}gb" and part.architecture == card.architecture
        assert 0.85 * int(gigabytes) < part.total / 1e9 < 1.1 * int(gigabytes) and part.total < card.total
        assert part.multiprocessors is not None and part.multiprocessors <= (card.multiprocessors or 0)
        assert model(key) is part is model(part.name)
    assert model("a100-3g.40gb") is model("a100-80gb-3g.40gb"), "only the card with 80 GB has it"


def test_the_source_of_each_figure_is_in_the_data() -> None:
    assert {card.source for card in CATALOGUE.values()} <= {"measured", "nvidia-smi", "cudaMemGetInfo", "typical"}
    assert CATALOGUE["h200"].source == "measured"
    assert all(part.source for part in catalog.SLICES.values())


@pytest.mark.parametrize(
    ("written", "size"),
    [("24GiB", 24 * GIB), ("1.5gib", 1536 * MIB), ("25769803776", 24 * GIB), (" 256 MiB ", 256 * MIB)],
)
def test_a_size_is_a_gpu(written: str, size: int) -> None:
    (gpu,) = SimulatedHost([written]).devices()
    assert gpu.usable == gpu.total == size and gpu.architecture == "unknown"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("24GB", "write '24GiB'"), ("24G", "write '24GiB'"), ("24", "did you mean '24GiB'"),
        ("1KiB", "smaller than any GPU"), ("9999TiB", "larger than any GPU"), ("0GiB", "above 0"),
        ("1.GiB", "is not a size"), ("255MiB", "smaller than any GPU"),
    ],
)  # fmt: skip
def test_a_size_that_is_none(written: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said) as caught:
        SimulatedHost([written])
    assert caught.value.exit_code == 2


def test_a_file_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "Gpus.yaml"
    path.write_text(
        "version: 1\ndevices:\n"
        "  - {name: Lab card, total: 48GiB, driver_reserve: 512MiB, architecture: ada,\n"
        "     multiprocessors: 142, count: 2}\n"
        "  - {name: Small, total: 8589934592}\n"
    )
    host = SimulatedHost([str(path), "h200"])
    found = [(gpu.name, gpu.total, gpu.reserved, gpu.architecture) for gpu in host.devices()]
    lab = ("Lab card", 48 * GIB, 512 * MIB, "ada")
    assert found == [lab, lab, ("Small", 8 * GIB, 0, "unknown"), ("NVIDIA H200", 143_771 * MIB, 615 * MIB, "hopper")]
    assert len({gpu.uuid for gpu in host.devices()}) == 4
    assert host.multiprocessors(host.devices()[0].uuid) == 142
    assert host.names == (str(path), "h200"), "the path as it is, for it may have capitals"
    path.write_text("devices: {big: {total: 80GiB}, small: {name: Other, total: 1GiB}}\n")
    assert [gpu.name for gpu in SimulatedHost([str(path)]).devices()] == ["big", "Other"]


WRONG_FILES = {
    "": "it does not describe GPUs",
    "3": "it does not describe GPUs",
    "frameworks: {torch: {share: 50%}}": "it does not describe GPUs",
    "devices:": "devices: found None",
    "devices: 3": "devices: found 3",
    "devices: []": "it has no GPU",
    "devices: {}": "it has no GPU",
    "devices: [3]": "devices.0: found 3",
    "devices: {a: 3}": "devices.a: found 3",
    "devices: [{total: 1GiB}]": "devices.0.name: is missing",
    "devices: [{name: a}]": "devices.0.total: is missing",
    "devices: [{name: 3, total: 1GiB}]": "devices.0.name: found 3",
    "devices: [{name: '', total: 1GiB}]": "devices.0.name: found ''",
    "devices: [{name: a, total: 48GB}]": "write '48GiB'",
    "devices: [{name: a, total: -1}]": "above 0",
    "devices: [{name: a, total: 1KiB}]": "smaller than any GPU",
    "devices: [{name: a, total: 90%}]": "is not a size",
    "devices: [{name: a, total: [1]}]": "is not a size",
    "devices: [{name: a, total: 1GiB, driver_reserve: 1GiB}]": "1.00 GiB of 1.00 GiB",
    "devices: [{name: a, total: 1GiB, driver_reserve: x}]": "driver_reserve: 'x' is not a size",
    "devices: [{name: a, total: 1GiB, reserve: 1MiB}]": "unknown key 'reserve'",
    "devices: [{name: a, total: 1GiB, totl: 1MiB}]": "did you mean 'total'",
    "devices: [{name: a, total: 1GiB, architecture: hoper}]": "architecture: found 'hoper'",
    "devices: [{name: a, total: 1GiB, architecture: [a]}]": "architecture: found ['a']",
    "devices: [{name: a, total: 1GiB, count: 0}]": "count: found 0",
    "devices: [{name: a, total: 1GiB, count: true}]": "count: found True",
    "devices: [{name: a, total: 1GiB, count: 65}]": "count: found 65",
    "devices: [{name: a, total: 1GiB, count: 64}, {name: b, total: 1GiB}]": "at most 64",
    "devices: [{name: a, total: 1GiB, multiprocessors: 1.5}]": "multiprocessors: found",
    "devices: [{name: a, total: 1GiB}]\nextra: 1": "unknown key 'extra'",
    "devices: [{name: a, name: b, total: 1GiB}]": "name",
    "devices: !!python/object/apply:os.system [true]": "tag",
    "devices: [": "bracket",
    "devices: &a [*a]": "itself",
    "a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ndevices: [*d,*d,*d,*d]": "more than 10,000 values",
    "{" * 5000: "nested deeper",
}


@pytest.mark.parametrize("text", WRONG_FILES, ids=lambda text: text[:60])
def test_a_wrong_file_of_devices_says_where_and_what_to_do(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SimulatedHost([str(path)])
    assert WRONG_FILES[text] in str(caught.value) and "\n    fix: " in str(caught.value)
    assert caught.value.exit_code == 2 and str(caught.value).startswith(f"{path}:")


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: f"devices: {text}".encode("utf-8", "replace")))
def test_any_file_is_gpus_or_a_clear_error(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpus.yaml"
        path.write_bytes(raw)
        try:
            assert SimulatedHost([str(path)]).devices()
        except ConfigError as error:
            assert error.problems


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with open(tmp_path / "huge.yaml", "wb") as file:
        file.truncate(1 << 34)
    for name, said in {
        "fifo.yaml": "not a regular file", "folder.yaml": "irectory|not a regular file",
        "huge.yaml": "larger than 1 MiB", "absent.yaml": "No such file",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            SimulatedHost([str(tmp_path / name)])
    for name in ("/dev/zero", "/dev/stdin\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            SimulatedHost([name])


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
