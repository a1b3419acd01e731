"""The manifests of docs/kubernetes are what the API server takes: the schemas of Kubernetes, and promtool.

The package kubernetes-validate has the schemas of each minor version, in which an unknown key is an error. What they do
not know (the settings of HAMi, the device plugin and the DRA driver) is in tests/unit/test_kubernetes.py.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_manifests as manifests
import kubernetes_validate
import pytest

VERSIONS = ["1.34", "1.37"]
"""The oldest with resource.k8s.io/v1, and the newest that the package has."""
DOCUMENTS = [(path.name, number) for path in manifests.FILES for number in range(len(manifests.documents(path.name)))]
PATH = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.prefix) / "prometheus" / "usr" / "bin")])


def check(document: dict[str, Any], version: str) -> None:
    """Raise ValidationError for what this version does not take, SchemaNotFoundError for a kind that it has not."""
    assert kubernetes_validate.validate(document, version, strict=True) == version  # of this version, and no older one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "number"), DOCUMENTS)
def test_kubernetes_takes_every_manifest(name: str, number: int, version: str) -> None:
    check(manifests.documents(name)[number], version)


BREAKS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("hami.yaml", "Pod", ("spec", "containers", 0, "resources", "limit"), {"nvidia.com/gpu": 1}),
    ("hami.yaml", "Pod", ("spec", "containers", 0, "volumeMounts", 0, "mountPath"), None),
    ("whole-gpu.yaml", "Job", ("spec", "template", "spec", "restartPolicies"), "Never"),
    ("whole-gpu.yaml", "Job", ("spec", "backoffLimit"), "none"),
    ("whole-gpu.yaml", "ConfigMap", ("data", "port"), 9477),
    ("device-plugin.yaml", "ConfigMap", ("data", "mps-2"), {"version": "v1"}),
    ("dra.yaml", "ResourceClaimTemplate", ("spec", "spec", "devices", "requests", 0, "deviceClass"), "gpu"),
    ("dra.yaml", "ResourceClaimTemplate", ("spec", "spec", "devices", "config", 0, "opaque", "driver"), None),
    ("dra.yaml", "Pod", ("spec", "resourceClaims", 0, "resourceClaimTemplate"), "shared-gpu"),
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "kind", "path", "to"), BREAKS)
def test_a_broken_manifest_is_found(name: str, kind: str, path: tuple[Any, ...], to: Any, version: str) -> None:
    """`to` is written there; None takes the key away."""
    document = copy.deepcopy(manifests.of_kind(name, kind)[0])
    check(document, version)
    inner: Any = document
    for key in path[:-1]:
        inner = inner[key]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    with pytest.raises(kubernetes_validate.ValidationError):
        check(document, version)


def test_claims_are_of_a_version_that_has_them() -> None:
    (template,) = manifests.of_kind("dra.yaml", "ResourceClaimTemplate")
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check(template, "1.33")


def promtool(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool", path=PATH)
    assert found, "promtool is not there: scripts/test --engines brings it"
    (folder / "prometheus.yml").write_text(text)
    return subprocess.run(
        [found, "check", "config", "--agent", str(folder / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_agent_takes_its_configuration(tmp_path: Path) -> None:
    text = manifests.files_of("whole-gpu.yaml")["prometheus.yml"]
    done = promtool(tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert promtool(tmp_path, text.replace("remote_write", "remote_writes")).returncode != 0
