"""The manifests of docs/kubernetes, and what the projects that read them accept of their own parts.

Kubernetes takes the settings of HAMi, of NVIDIA's device plugin and of the DRA driver as they are, so no schema of
Kubernetes knows them. What is here follows what each project reads, at the version that docs/kubernetes.md names. The
rest is checked against the schemas of Kubernetes, in tests/engines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}

MPS_LIMIT = {"type": "string", "pattern": r"^[1-9]\d*(Mi|Gi|M|G)$"}
GPU_CONFIG = {  # api/nvidia.com/resource/v1beta1/{gpuconfig,sharing,validate}.go; its decoder is strict
    "type": "object",
    "properties": {
        "apiVersion": {"const": "resource.nvidia.com/v1beta1"},
        "kind": {"const": "GpuConfig"},
        "sharing": {
            "type": "object",
            "properties": {
                "strategy": {"const": "MPS"},  # its other one, TimeSlicing, limits no memory
                "mpsConfig": {
                    "type": "object",
                    "properties": {
                        "defaultActiveThreadPercentage": {"type": "integer", "minimum": 0, "maximum": 100},
                        "defaultPinnedDeviceMemoryLimit": MPS_LIMIT,
                        "defaultPerDevicePinnedMemoryLimit": {"type": "object", "additionalProperties": MPS_LIMIT},
                        "multiUser": {"type": "boolean"},
                    },
                    "additionalProperties": False,
                },
            },
            "required": ["strategy"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind"],
    "additionalProperties": False,
}
PLUGIN_CONFIG = {  # api/config/v1/{config,sharing,replicas}.go
    "type": "object",
    "properties": {
        "version": {"const": "v1"},
        "sharing": {
            "type": "object",
            "properties": {
                "mps": {
                    "type": "object",
                    "properties": {
                        "renameByDefault": {"type": "boolean"},
                        "failRequestsGreaterThanOne": {"type": "boolean"},
                        "resources": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "type": "object",
                                "properties": {
                                    "name": {"const": "nvidia.com/gpu"},  # under MPS no other is supported
                                    "replicas": {"type": "integer", "minimum": 2},
                                },
                                "required": ["name", "replicas"],
                                "additionalProperties": False,
                            },
                        },
                    },
                    "required": ["resources"],
                    "additionalProperties": False,
                },
            },
            "required": ["mps"],
            "additionalProperties": False,
        },
    },
    "required": ["version", "sharing"],
    "additionalProperties": False,
}
HAMI_LIMITS = {  # pkg/device/nvidia/device.go, GenerateResourceRequests
    "type": "object",
    "properties": {
        "nvidia.com/gpu": {"type": "integer", "minimum": 1},
        "nvidia.com/gpumem": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "nvidia.com/gpumem-percentage": {"type": "integer", "minimum": 1, "maximum": 100},
        "nvidia.com/gpucores": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["nvidia.com/gpu"],
    "not": {"required": ["nvidia.com/gpumem", "nvidia.com/gpumem-percentage"]},
    "additionalProperties": False,
}


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")) if one]


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in documents(name) if one["kind"] == kind]


def pod_spec(name: str) -> dict[str, Any]:
    (one,) = (document for document in documents(name) if document["kind"] in ("Pod", "Job"))
    spec: dict[str, Any] = one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"]
    return spec


def files_of(name: str) -> dict[str, str]:
    """What the ConfigMaps of the manifest hold."""
    return {key: text for one in of_kind(name, "ConfigMap") for key, text in one["data"].items()}


def bytes_of(quantity: str) -> int:
    """A quantity of Kubernetes, in bytes."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", quantity)
    assert found is not None, quantity
    return int(found[1]) * UNITS[found[2]]
