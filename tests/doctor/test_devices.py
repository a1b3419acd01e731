"""Checks of the GPUs: what CUDA_VISIBLE_DEVICES comes to, whose code runs where, and who fills the card."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, findings, load, of

from memguard._base.units import GIB, MIB
from memguard._tools.doctor import derived
from memguard._tools.doctor.checks import devices
from memguard._tools.doctor.derived import runs_on
from memguard._tools.doctor.facts import Facts, Process, Stage
from memguard._tools.doctor.finding import Finding, Severity
from memguard._tools.doctor.visible_devices import parse

A, B = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be", "GPU-1c2f6a64-8d3b-4a9e-b7f0-6a41d9c0e5b2"


def one(facts: str | Facts, name: str) -> Finding:
    every = findings(facts) if isinstance(facts, str) else of(facts, devices)
    found = [finding for finding in every if finding.name == name]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("value", "entries", "stopped_at", "why"),
    [
        ("0", ("0",), "", ""),
        ("1,0", ("1", "0"), "", ""),
        (" 0 , 1 ", ("0", "1"), "", ""),
        ("1gpu", ("1gpu",), "", ""),
        ("", (), "", "empty"),
        ("0,,1", ("0",), "", "empty"),
        ("-1", (), "-1", "negative"),
        ("0,-1,1", ("0",), "-1", "negative"),
        ("none", (), "none", "word"),
        ("0,0", (), "0", "repeated"),
        ("2", (), "2", "absent"),
        ("0,2,1", ("0",), "2", "absent"),
        (A, (A,), "", ""),
        (A.upper().replace("GPU-", "GPU-"), (A.upper(),), "", ""),
        ("GPU-5e9,GPU-1c2", ("GPU-5e9", "GPU-1c2"), "", ""),
        ("GPU-5e9,GPU-5e9d", (), "GPU-5e9d", "repeated"),
        ("GPU-", (), "GPU-", "ambiguous"),
        ("GPU-00", (), "GPU-00", "absent"),
        ("0,GPU-1c2", ("0",), "GPU-1c2", "mixed"),
        ("GPU-1c2,0", ("GPU-1c2",), "0", "mixed"),
        ("MIG-1,MIG-2", ("MIG-1", "MIG-2"), "", ""),
        ("MIG-1,0", ("MIG-1",), "0", "mixed"),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str, entries: tuple[str, ...], stopped_at: str, why: str) -> None:
    found = parse(value, 2, [A, B])
    assert (found.entries, found.stopped_at, found.why) == (entries, stopped_at, why)


def test_nobody_knows_what_is_here_where_nvml_is_silent() -> None:
    assert parse("7", None, None).entries == ("7",)
    assert parse("GPU-00", None, None).entries == ("GPU-00",)
    assert parse("7", 4, None).why == "absent"


def test_device_files_say_how_many_gpus_there_are_where_nvml_does_not() -> None:
    facts = edited("visible-devices-absent.json", {"driver": {"nvml": {"error": "NVMLError_Unknown", "devices": None}}})
    assert derived.blocked_by(facts) == "visible-devices-unknown"
    assert "export CUDA_VISIBLE_DEVICES=0" in one(facts, "visible-devices-unknown").remedy


def test_what_hides_the_gpus_is_quoted_with_what_is_there() -> None:
    found = one("visible-devices-absent.json", "visible-devices-unknown")
    assert "names 7, which does not exist here" in found.cause and "no framework sees a GPU" in found.cause
    assert "CUDA_VISIBLE_DEVICES=7 (environment)" in found.evidence
    assert any(A in line for line in found.evidence)
    assert "export CUDA_VISIBLE_DEVICES=0" in found.remedy
    assert one("visible-devices-empty.json", "visible-devices-none").remedy == "unset CUDA_VISIBLE_DEVICES"
    assert one("visible-devices-minus-one.json", "visible-devices-none").remedy == "unset CUDA_VISIBLE_DEVICES"
    assert "twice" in one("visible-devices-twice.json", "visible-devices-none").cause
    assert "more than one UUID" in one("visible-devices-ambiguous.json", "visible-devices-unknown").cause


def test_a_list_that_ends_early_says_where() -> None:
    assert "names 2, which" in one("visible-devices-cut-short.json", "visible-devices-unknown").cause
    assert f"CUDA stops at {B}" in one("visible-devices-mixed.json", "visible-devices-mixed").cause
    assert one("visible-devices-mixed.json", "visible-devices-mixed").severity is Severity.WARNING


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("0,", False),
        ("0,,", False),
        ("0,-1", False),
        ("0, -1 ,", False),
        ("0,-1,1", True),
        ("0,,1", True),
        ("0,x", True),
    ],
)
def test_a_list_that_is_ended_and_names_nothing_more_is_as_it_was_meant(value: str, told: bool) -> None:
    facts = edited("visible-devices-cut-short.json", {"environment": {"CUDA_VISIBLE_DEVICES": value}})
    assert bool(list(devices.hidden(facts))) is told


def test_in_a_schedulers_job_cuda_counts_the_gpus_that_it_was_given() -> None:
    found = one("visible-devices-of-the-machine-in-a-job.json", "visible-devices-unknown")
    assert "names 2, which does not exist here" in found.cause and found.remedy.endswith(
        "export CUDA_VISIBLE_DEVICES=0"
    )
    assert f"the GPUs here are 2 ({A})" in found.evidence


def test_an_order_in_a_schedulers_job_is_nobodys_doing() -> None:
    assert list(devices.device_order(load("scheduler-job-of-the-last-gpu.json"))) == []


def test_where_cuda_shows_more_than_the_list_leaves_the_list_is_not_to_blame() -> None:
    facts = edited("two-gpus.json", {"environment": {"CUDA_VISIBLE_DEVICES": f"0,{B}"}})
    assert list(devices.hidden(facts)) == []


def test_a_gpu_that_is_absent_for_another_reason_is_not_laid_on_the_variable() -> None:
    facts = edited("init-unknown-error.json", {"environment": {"CUDA_VISIBLE_DEVICES": ""}})
    assert list(devices.hidden(facts)) == []


def test_an_order_is_told_by_uuid() -> None:
    found = one("device-order.json", "device-order")
    assert "cuda:0 is GPU 1 of nvidia-smi and not GPU 0" in found.cause
    assert found.remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID" and "CUDA_DEVICE_ORDER is not set" in found.evidence
    assert "cuda:0 is GPU 1" in one("device-order-one-of-them.json", "device-order").cause
    assert one("device-order-reversed.json", "device-order").severity is Severity.INFO


def test_an_order_by_uuids_is_what_was_asked_for() -> None:
    facts = edited("device-order.json", {"environment": {"CUDA_VISIBLE_DEVICES": f"{B},{A}"}})
    assert one(facts, "device-order").severity is Severity.INFO


def test_an_order_of_gpus_that_nvml_does_not_show_is_not_guessed() -> None:
    facts = edited("device-order.json", {"driver": {"nvml": {"devices": []}}})
    assert list(devices.device_order(facts)) == []


def test_an_order_that_nobody_can_explain_is_not_told() -> None:
    facts = edited("device-order.json", {"environment": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}})
    assert list(devices.device_order(facts)) == []
    unknown = [{**device.model_dump(mode="json"), "uuid": "GPU-3"} for device in facts.driver.cuda.devices]
    assert list(devices.device_order(edited("device-order.json", {"driver": {"cuda": {"devices": unknown}}}))) == []
    first = facts.driver.cuda.devices[0].model_dump(mode="json")
    assert list(devices.device_order(edited("device-order.json", {"driver": {"cuda": {"devices": [first]}}}))) == []


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_80",), (12, 0), True),
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a", "compute_90a"), (10, 0), False),
        (("sm_100f",), (10, 3), True),
        (("sm_100f",), (12, 0), False),
        (("compute_100f",), (10, 3), True),
        (("compute_100f",), (12, 0), False),
        (("sm_75", "sm_120"), (12, 1), True),
        (("sm_75", "sm_80", "sm_90"), (7, 0), False),
        (("gfx90a",), (9, 0), False),
    ],
)
def test_where_code_runs(architectures: tuple[str, ...], capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(architectures, capability) is runs


def test_code_that_is_missing_says_which_way_to_go() -> None:
    old, new = one("capability-too-old.json", "compute-capability"), findings("capability-too-new.json")
    assert "Tesla P100-PCIE-16GB" in old.cause and "6.0" in old.cause and "an older release" in old.remedy
    assert any("sm_75, sm_80" in line for line in old.evidence)
    torch, cupy = (finding for finding in new if finding.name == "compute-capability")
    assert "usually a newer release" in torch.remedy
    assert cupy.subject == "cupy" and any("CUDA_ERROR_NO_BINARY_FOR_GPU" in line for line in cupy.evidence)
    assert derived.explained(load("capability-too-old.json"), "torch")


def test_what_was_computed_counts_for_more_than_a_list() -> None:
    facts = edited("healthy-h200.json", {"frameworks": {"torch": {"architectures": ["sm_50"]}}})
    assert list(devices.compute_capability(facts)) == []


def test_a_build_for_other_gpus_than_nvidias_has_no_code_to_look_for() -> None:
    torch = {"gpu": False, "architectures": ["gfx90a"], "gpus": None, "probe": None}
    assert list(devices.compute_capability(edited("healthy-h200.json", {"frameworks": {"torch": torch}}))) == []


def test_the_gpu_that_a_build_has_no_code_for_can_be_left_out() -> None:
    found = one("capability-of-the-second-gpu.json", "compute-capability")
    assert f"CUDA_VISIBLE_DEVICES={A}" in found.remedy
    assert not derived.explained(load("capability-of-the-second-gpu.json"), "torch")


def test_mig_says_how_to_have_an_instance_and_how_to_be_rid_of_it() -> None:
    assert "-mig 0" in one(edited("mig.json", {"system": {"container": None}}), "mig").remedy
    assert "-cgi" in one("mig-without-instance.json", "mig").remedy


def test_an_instance_that_works_is_an_error_only_where_a_budget_is_to_be_applied() -> None:
    assert one("mig.json", "mig").severity is Severity.INFO
    found = one("mig-under-a-budget.json", "mig")
    assert found.severity is Severity.ERROR and "memguard.init refuses it" in found.cause
    assert "whole GPU" in found.remedy


@pytest.mark.parametrize("name", ["mig.json", "mig-without-instance.json"])
def test_mig_is_not_switched_off_where_others_may_be_on_the_gpu(name: str) -> None:
    for kind in ("docker", "kubernetes", "podman", "apptainer", "lxc"):
        assert "-mig 0" not in one(edited(name, {"system": {"container": kind}}), "mig").remedy
    card = {**load(name).driver.nvml.devices[0].model_dump(mode="json"), "processes": {"17575": None}}
    shared = edited(name, {"system": {"container": None}, "driver": {"nvml": {"devices": [card]}}})
    assert "-mig 0" not in one(shared, "mig").remedy
    assert "-mig 0" in one(edited(name, {"system": {"container": None}}), "mig").remedy


def test_an_instance_that_is_gone_is_laid_on_the_variable_that_names_it() -> None:
    found = one("visible-devices-mig-gone.json", "visible-devices-unknown")
    assert "names MIG-3a8a2f2e-1b6c-5d1e-9a55-0c7f2c1f7e11, and CUDA shows no such instance" in found.cause
    assert "CUDA_VISIBLE_DEVICES=MIG-3a8a2f2e-1b6c-5d1e-9a55-0c7f2c1f7e11 (environment)" in found.evidence
    assert "nvidia-smi -L" in found.remedy
    whole = load("two-gpus.json").driver.nvml.devices[1].model_dump(mode="json")
    cards = [load("mig.json").driver.nvml.devices[0].model_dump(mode="json"), whole]
    facts = edited("visible-devices-mig-gone.json", {"driver": {"nvml": {"devices": cards}}})
    assert one(facts, "visible-devices-unknown").severity is Severity.ERROR, "beside a whole GPU"
    twice = edited("visible-devices-mig-gone.json", {"environment": {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-1"}})
    assert "twice" in one(twice, "visible-devices-none").cause
    unknown = edited("visible-devices-mig-gone.json", {"driver": {"cuda": {"init": "CUDA_ERROR_UNKNOWN"}}})
    assert derived.blocked_by(unknown) == "cuda-init-failed"


def test_a_divided_gpu_beside_a_whole_one_that_cuda_shows_is_no_finding() -> None:
    cards = [card.model_dump(mode="json") for card in load("two-gpus.json").driver.nvml.devices]
    shown = load("two-gpus.json").driver.cuda.devices[0].model_dump(mode="json")
    cards[1]["mig"] = True
    facts = edited("two-gpus.json", {"driver": {"cuda": {"devices": [shown]}, "nvml": {"devices": cards}}})
    assert list(devices.mig(facts)) == []


def test_the_memory_of_a_divided_gpu_says_nothing_of_its_instances() -> None:
    card = load("card-filled.json").driver.nvml.devices[0].model_dump(mode="json")
    facts = edited("card-filled.json", {"driver": {"nvml": {"devices": [{**card, "mig": True}]}}})
    assert list(devices.card_filled_by_others(facts)) == []


def test_who_has_an_exclusive_gpu_is_named() -> None:
    found = one("compute-mode-taken.json", "compute-mode")
    assert "process 17575 uses it" in found.cause and "-c DEFAULT" in found.remedy
    assert all(derived.explained(load("compute-mode-taken.json"), name) for name in ("torch", "cupy", "jax"))
    assert not derived.explained(load("compute-mode-exclusive.json"), "torch")


def test_a_full_card_names_who_holds_it_and_who_found_no_room() -> None:
    found = one("card-filled.json", "card-filled")
    assert "process 17575 (117.19 GiB) and process 18001 (21.48 GiB) hold it" in found.cause
    assert "156.0 MiB of 140.40 GiB" in found.cause
    on_the_host = one(edited("card-filled.json", {"system": {"container": None}}), "card-filled")
    assert "end process 17575" in on_the_host.remedy
    assert all(name in found.cause for name in ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba"))
    assert all(derived.explained(load("card-filled.json"), name) for name in load("card-filled.json").frameworks)


def test_holders_that_cannot_be_seen_are_not_made_up() -> None:
    card = load("card-nearly-filled.json").driver.nvml.devices[0].model_dump(mode="json")
    facts = edited("card-nearly-filled.json", {"driver": {"nvml": {"devices": [{**card, "processes": {}}]}}})
    assert "not visible here" in one(facts, "card-filled").cause
    facts = edited("card-nearly-filled.json", {"driver": {"nvml": {"devices": [{**card, "processes": {"1": None}}]}}})
    assert "process 1 (unknown)" in one(facts, "card-filled").cause


@pytest.mark.parametrize("kind", ["docker", "podman", "kubernetes", "apptainer", "lxc"])
def test_in_a_container_nobody_is_told_to_end_a_process_of_another_numbering(kind: str) -> None:
    remedy = one(edited("card-filled.json", {"system": {"container": kind}}), "card-filled").remedy
    assert "end process" not in remedy and "nvidia-smi on the host" in remedy


@pytest.mark.parametrize("own", [None, 139984896000])
def test_what_the_calling_process_holds_is_not_laid_on_others(own: int | None) -> None:
    # In JSON's merge patch a null takes an entry away: None has to come in otherwise.
    facts = load("card-filled-by-oneself.json").model_copy(update={"process": Process(contexts={A: own})})
    assert derived.held_by_others(facts, facts.driver.nvml.devices[0]) == (None if own is None else 524288000)
    assert list(devices.card_filled_by_others(facts)) == [] and list(devices.card_filled_by_caller(facts)) == []


def test_where_it_cannot_be_said_whose_memory_it_is_nobody_is_named() -> None:
    facts = load("card-filled-and-whose-is-unknown.json")
    found = one(facts, "card-filled")
    assert found.severity is Severity.WARNING and "this process is on GPU 0" in found.cause
    assert "others" not in found.cause and not any("others" in line for line in found.evidence)
    assert "end process" not in found.remedy
    assert derived.explained(facts, "torch")


def test_probes_that_found_no_room_beside_the_process_itself_are_not_told_as_failures() -> None:
    facts = load("card-filled-by-oneself-no-room.json")
    found = one(facts, "card-filled")
    assert "this process holds 130.37 GiB of GPU 0" in found.cause and "ran out of memory in the probe" in found.cause
    assert "`memguard doctor` in a shell" in found.remedy
    assert all(derived.explained(facts, name) for name in ("torch", "cupy"))
    assert not derived.filled_by_others(facts)


def test_a_process_that_is_not_on_the_gpu_has_no_part_in_what_fills_it() -> None:
    facts = edited("card-filled.json", {"process": {"modules": ["torch"]}})
    assert "other processes have filled" in one(facts, "card-filled").cause


def test_an_exclusive_gpu_that_the_calling_process_has_is_no_failure_of_the_frameworks() -> None:
    found = one("compute-mode-taken-by-oneself.json", "compute-mode")
    assert found.severity is Severity.WARNING and "this process uses GPU 0" in found.cause
    assert "`memguard doctor` in a shell" in found.remedy and "-c DEFAULT" not in found.remedy
    facts = edited("compute-mode-exclusive.json", {"process": {"contexts": {A: 629145600}}})
    assert one(facts, "compute-mode").severity is Severity.INFO


def _with(free: int, used: int, ran_out: bool) -> Facts:
    card: dict[str, Any] = load("healthy-h200.json").driver.nvml.devices[0].model_dump(mode="json")
    changes: dict[str, Any] = {
        "driver": {"nvml": {"devices": [{**card, "total": 16 * GIB, "free": free, "used": used}]}}
    }
    if ran_out:
        stages = [{"name": "compute", "seconds": 1.0, "kind": "torch.OutOfMemoryError", "error": "CUDA out of memory."}]
        changes["frameworks"] = {"torch": {"probe": {"stages": stages}}}
    return edited("healthy-h200.json", changes)


@pytest.mark.parametrize(
    ("free", "used", "ran_out", "severities"),
    [
        (8 * GIB, 8 * GIB, False, []),
        (1700 * MIB, 14 * GIB, False, []),
        (1700 * MIB, 14 * GIB, True, ["error"]),
        (1600 * MIB, 14 * GIB, False, ["warning"]),
        (8 * GIB, 8 * GIB, True, []),
        (1 * GIB, 1 * GIB, False, []),
    ],
)
def test_how_full_is_full(free: int, used: int, ran_out: bool, severities: list[str]) -> None:
    facts = _with(free, used, ran_out)
    assert [str(finding.severity) for finding in devices.card_filled_by_others(facts)] == severities
    assert derived.explained(facts, "torch") is (severities == ["error"])


def test_of_two_full_cards_the_probes_ran_out_of_the_first() -> None:
    card = load("card-filled.json").driver.nvml.devices[0].model_dump(mode="json")
    cards = [card, {**card, "index": 1, "uuid": B}]
    shown = [device.model_dump(mode="json") for device in load("two-gpus.json").driver.cuda.devices]
    facts = edited("card-filled.json", {"driver": {"cuda": {"devices": shown}, "nvml": {"devices": cards}}})
    assert [(str(found.severity), found.subject) for found in devices.card_filled_by_others(facts)] == [
        ("error", A),
        ("warning", B),
    ]
    facts = edited("card-filled.json", {"driver": {"cuda": {"devices": shown}, "nvml": {"devices": [cards[1]]}}})
    assert [(str(found.severity), found.subject) for found in devices.card_filled_by_others(facts)] == [("error", B)]


def test_running_out_of_other_memory_is_not_a_full_card() -> None:
    assert not derived.out_of_memory(Stage(name="import", seconds=0.1, kind="builtins.MemoryError", error=""))
    assert not derived.out_of_memory(Stage(name="compute", seconds=0.1))
    assert not derived.out_of_memory(None)


def test_peers_are_told_by_pair() -> None:
    assert "no two GPUs can" in one("peer-access.json", "peer-access").cause
    third = {
        **load("two-gpus.json").driver.cuda.devices[0].model_dump(mode="json"),
        "ordinal": 2,
        "uuid": "GPU-3",
        "peers": [],
    }
    shown = [device.model_dump(mode="json") for device in load("two-gpus.json").driver.cuda.devices]
    found = one(edited("two-gpus.json", {"driver": {"cuda": {"devices": [*shown, third]}}}), "peer-access")
    assert "2 of 3 pairs" in found.cause and "cuda:0 and cuda:2" in found.evidence[0]


def test_uuids_are_the_same_with_and_without_their_prefix() -> None:
    assert (
        derived.same_gpu(A, A.removeprefix("GPU-")) and derived.same_gpu(A.upper(), A) and not derived.same_gpu("", "")
    )
