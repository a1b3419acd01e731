"""The doctor's probe for JAX."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from memguard._frameworks.optional_modules import ProbeReport


def probe(report: ProbeReport) -> None:
    """Import JAX, list its devices and compute.

    The step `devices` fails if environment variables conflict, as two memory fractions do, and reports the error.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    with report.stage("import"):
        import jax

        report.put(path=jax.__file__)
        import jax.numpy as jnp

        report.put(version=jax.__version__, gpu=_plugin(), **_versions(report))
    with report.stage("devices"):
        found = [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
        asked = os.environ.get("JAX_PLATFORMS", "")
        if not found and _plugin() and (not asked or "cuda" in asked or "gpu" in asked):
            found = jax.devices("cuda")  # raises an error with the reason if there is no GPU
        report.put(gpus=len(found), multiprocessors=[d.core_count for d in found if hasattr(d, "core_count")])
    if not found:
        return
    with report.stage("compute"):
        x = jnp.ones((64, 64))
        float((x @ x).sum())
        jax.lax.conv(jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3)), (1, 1), "SAME").block_until_ready()
    report.loaded()


def _plugin() -> bool:
    """True if a CUDA plugin is installed. Loads no plugin."""
    import importlib.metadata
    import importlib.util

    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if os.path.isdir(folder) and any(name.startswith("xla_cuda") for name in os.listdir(folder)):
            return True
    return any(
        (d.metadata["Name"] or "").lower().replace("_", "-").startswith("jax-cuda")
        for d in importlib.metadata.distributions()
    )


def _versions(report: ProbeReport) -> dict[str, str]:
    """The versions of CUDA and cuDNN that JAX was built with, which its plugin compares with the loaded libraries.

    Omits a version if JAX's private module `cuda_versions` lacks the function that returns the version.
    """
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return {}
    found = {}
    for name, call in (("cuda", "cuda_runtime_build_version"), ("cudnn", "cudnn_build_version")):
        try:
            number = int(getattr(cuda_versions, call)())
        except Exception:  # raised if no plugin is installed
            continue
        found[name] = report.cuda_version(number) if name == "cuda" else report.cudnn_version(number)
    return found
