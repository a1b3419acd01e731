"""docs/kubernetes: the numbers in the manifests follow from their budgets, and each project takes its own part."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_manifests as manifests
import pytest
import yaml
from kubernetes_manifests import FILES, GPU_CONFIG, HAMI_LIMITS, PLUGIN_CONFIG

from memguard import _budget
from memguard._base.types import DevicePlan, Plan
from memguard._base.units import GIB, MIB
from memguard._budget import mps, policy
from memguard._devices.catalog import CATALOGUE, Model
from memguard._devices.simulated import SimulatedHost
from memguard._node.leases import folders
from memguard.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
H100 = CATALOGUE["h100"]
"""The page's figures are for this GPU."""
NAMES = [path.name for path in FILES]


def planned(name: str, gpu: Model = H100) -> DevicePlan:
    (part,) = plan_of(name, gpu).devices
    return part


def plan_of(name: str, gpu: Model = H100) -> Plan:
    budget = _budget.parse(manifests.files_of(name)["budget.yaml"], name)
    return policy.plan(budget, SimulatedHost([gpu]).devices())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_leads_to_every_manifest(name: str) -> None:
    assert f"](kubernetes/{name})" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_every_budget_fits_and_every_command_is_one(name: str) -> None:
    given = manifests.files_of(name)
    assert planned(name).unallocated >= 0
    volumes = {volume["name"] for volume in manifests.pod_spec(name)["volumes"]}
    for container in manifests.pod_spec(name)["containers"]:
        words = container["command"]
        assert words[:2] == ["memguard", "run"] and words[words.index("-c") + 1].removeprefix("/etc/memguard/") in given
        main.get_command(click.Context(main), "run").make_context("run", words[2:])  # type: ignore[union-attr]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


# HAMi


def hami_limits() -> dict[str, Any]:
    (container,) = manifests.pod_spec("hami.yaml")["containers"]
    found: dict[str, Any] = container["resources"]["limits"]
    return found


def test_in_hami_the_budget_is_within_what_the_pod_asks_for() -> None:
    jsonschema.validate(hami_limits(), HAMI_LIMITS)
    asked = hami_limits()["nvidia.com/gpumem"] * MIB
    # What NVML says there: HAMi's size as the total, and the driver's own reserve of the real GPU.
    inside = Model(H100.name, H100.architecture, asked, H100.reserved)
    limit = planned("hami.yaml", inside).limit
    assert 0 < limit <= asked and limit == asked - H100.reserved
    assert f"{H100.reserved // MIB} MiB on an H100" in PAGE
    assert f"`limit: 100%` is {limit // MIB:,} MiB" in " ".join(PAGE.split())
    whole = _budget.parse("version: 1\ndevice: {limit: 34GiB}\nframeworks: {torch: {share: 80%}}\n", "b")
    with pytest.raises(policy.PlanError, match=r"34\.00 GiB is more than"):
        policy.plan(whole, SimulatedHost([inside]).devices())


# NVIDIA's device plugin


def plugin_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(manifests.files_of("device-plugin.yaml")["mps-2"])
    return found


def test_under_the_device_plugin_the_budget_is_within_its_part() -> None:
    jsonschema.validate(plugin_config(), PLUGIN_CONFIG)
    (resource,) = plugin_config()["sharing"]["mps"]["resources"]
    part = H100.total // resource["replicas"] // MIB  # daemon.go, perDevicePinnedDeviceMemoryLimits
    assert f"{part:,} MiB on an H100 with two" in " ".join(PAGE.split())
    limit = planned("device-plugin.yaml").limit
    assert limit // MIB <= part
    assert resource["replicas"] * limit <= planned("device-plugin.yaml").device.usable


# The DRA driver


def gpu_config() -> dict[str, Any]:
    (template,) = manifests.of_kind("dra.yaml", "ResourceClaimTemplate")
    (config,) = template["spec"]["spec"]["devices"]["config"]
    assert config["opaque"]["driver"] == "gpu.nvidia.com"
    found: dict[str, Any] = config["opaque"]["parameters"]
    return found


def test_the_claims_limit_is_the_budgets() -> None:
    jsonschema.validate(gpu_config(), GPU_CONFIG)
    asked = manifests.bytes_of(gpu_config()["sharing"]["mpsConfig"]["defaultPinnedDeviceMemoryLimit"])
    plan = plan_of("dra.yaml")
    assert mps.limits(plan) == {part.device.uuid: asked // MIB * MIB for part in plan.devices}  # sharing.go, Megabyte
    containers = manifests.pod_spec("dra.yaml")["containers"]
    assert len(containers) * asked <= plan.devices[0].device.usable


def test_the_containers_of_a_claim_share_the_folder_of_their_user() -> None:
    spec = manifests.pod_spec("dra.yaml")
    (template,) = manifests.of_kind("dra.yaml", "ResourceClaimTemplate")
    requests = {request["name"] for request in template["spec"]["spec"]["devices"]["requests"]}
    shared = set()
    for container in spec["containers"]:
        (variable,) = container["env"]
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "leases")
        assert variable["name"] == folders.VARIABLE
        assert Path(variable["value"]).parent == Path(mount["mountPath"])  # the mount itself is root's
        shared.add(variable["value"])
        (claim,) = container["resources"]["claims"]
        assert claim["request"] in requests and claim["name"] == spec["resourceClaims"][0]["name"]
    budget = _budget.parse(manifests.files_of("dra.yaml")["budget.yaml"], "dra.yaml")
    assert budget.device.lease, "nothing would be kept in that folder"
    assert len(shared) == 1 and spec["securityContext"]["runAsUser"] != 0
    assert spec["resourceClaims"][0]["resourceClaimTemplateName"] == template["metadata"]["name"]


# MPS v3


def test_the_page_sets_the_limit_of_a_cgroup_in_mebibytes() -> None:
    soft, hard = re.findall(r"--(?:soft|hard)-limit (\S+)", PAGE)
    assert soft == hard and int(hard) * MIB == planned("dra.yaml").limit
    assert f'`pinned_memory_limit = "{planned("dra.yaml").limit // GIB}G"`' in PAGE


# Metrics


def test_the_agent_scrapes_where_the_budget_serves() -> None:
    given = manifests.files_of("whole-gpu.yaml")
    port = yaml.safe_load(given["budget.yaml"])["metrics"]["prometheus"]
    (scraped,) = yaml.safe_load(given["prometheus.yml"])["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    (agent,) = manifests.pod_spec("whole-gpu.yaml")["initContainers"]
    assert agent["restartPolicy"] == "Always" and "--config.file=/etc/memguard/prometheus.yml" in agent["args"]


# Each check can fail


def changed(given: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    found = copy.deepcopy(given)
    inner: Any = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return found


@pytest.mark.parametrize(
    ("given", "path", "to", "schema"),
    [
        (gpu_config, ("sharing", "mpsConfig", "defaultPinnedDeviceMemoryLimit"), "34 GiB", GPU_CONFIG),
        (gpu_config, ("sharing", "mpsConfig", "pinnedDeviceMemoryLimit"), "34Gi", GPU_CONFIG),
        (gpu_config, ("sharing", "mpsConfig", "defaultActiveThreadPercentage"), 101, GPU_CONFIG),
        (gpu_config, ("sharing", "strategy"), "mps", GPU_CONFIG),
        (gpu_config, ("apiVersion",), "gpu.nvidia.com/v1alpha1", GPU_CONFIG),
        (plugin_config, ("sharing", "mps", "resources", 0, "replicas"), 1, PLUGIN_CONFIG),
        (plugin_config, ("sharing", "mps", "resources", 0, "memory"), "34Gi", PLUGIN_CONFIG),
        (plugin_config, ("sharing", "mps", "resources", 0, "name"), "nvidia.com/mig-1g.10gb", PLUGIN_CONFIG),
        (hami_limits, ("nvidia.com/gpumem",), "34Gi", HAMI_LIMITS),
        (hami_limits, ("nvidia.com/gpumem-percentage",), 40, HAMI_LIMITS),
        (hami_limits, ("nvidia.com/gpu-mem",), 34816, HAMI_LIMITS),
    ],
)
def test_a_wrong_setting_is_found(
    given: Callable[[], dict[str, Any]], path: tuple[Any, ...], to: Any, schema: dict[str, Any]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(given(), *path, to=to), schema)
