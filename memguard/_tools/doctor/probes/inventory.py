"""The packages of the examined interpreter, and the files that `import` would load. Imports no framework."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from memguard._tools.doctor.probes.main import ProbeReport

_PACKAGES = re.compile(
    r"^(torch|pytorch|tensorflow|tf-nightly|tf-keras|keras|jax|cupy|pycuda|numba|numpy|triton|nvidia-|cuda-|rmm|librmm"
    r"|cudnn|cupti|onnxruntime|memguard)"
)


def probe(report: ProbeReport) -> None:
    with report.stage("inventory"):
        report.put(executable=sys.executable, python=".".join(str(part) for part in sys.version_info[:3]))
        distributions = list(_distributions())  # in the order of sys.path: `import` takes the first of a name
        report.put(packages={name: d.version for name, d in reversed(distributions) if _PACKAGES.match(name)})
        for framework, module in report.modules.items():
            pattern = report.distributions[framework]
            ours = [(name, d) for name, d in distributions if re.match(pattern, name) and _installs(d, module, name)]
            # Distributions further down sys.path are hidden.
            ours = [(name, d) for name, d in ours if _place(d) == _place(ours[0][1])]
            path = _found(module)
            folder = _folder(ours[0][1], module, path) if ours else None
            shadow = _shadow(module, report.beside) if path is not None else None
            versions = {n: d.version for n, d in ours}
            report.framework(framework, distributions=versions, folder=folder, path=shadow or path, shadow=shadow)
        _namesakes(report, distributions)


def _namesakes(report: ProbeReport, distributions: Any) -> None:
    """Report other distributions that install a package memguard. PyPI's `memguard` is another project."""
    ours = "memguard-gpu"
    found = {n: d for n, d in reversed(distributions) if n == ours or ("memguard" in n and _installs(d, "memguard", n))}
    if not set(found) - {ours}:
        return
    path = _found("memguard")
    own = path is not None and _is_ours(path, found.get(ours), [d for name, d in found.items() if name != ours])
    versions = {name: distribution.version for name, distribution in sorted(found.items())}
    report.put(namesakes={"distributions": versions, "path": path, "own": own, "origin": _url(found.get(ours))})


def _is_ours(path: str, own: Any, others: Any) -> bool:
    """Whether the memguard/__init__.py at `path` is this project's. Another distribution may have overwritten it.

    The hashes that the distributions recorded decide. Editable installations and checkouts record none: then the file
    must name one of this project's modules.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return False
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    if own is not None and _recorded(own, path) == digest:
        return True
    return all(_recorded(other, path) != digest for other in others) and b"memguard._oom.hooks" in content


def _recorded(distribution: Any, path: str) -> str | None:
    """The SHA-256 in the distribution's RECORD for its memguard/__init__.py, if that is the file at `path`."""
    if os.path.realpath(path) != os.path.join(_place(distribution), "memguard", "__init__.py"):
        return None
    found = re.search(r"^memguard/__init__\.py,sha256=([^,\s]+)", distribution.read_text("RECORD") or "", re.MULTILINE)
    return found.group(1).rstrip("=") if found else None


def _url(distribution: Any) -> Any:
    """The source of a distribution that came from no index (PEP 610): a URL, or the path of a `file:` URL."""
    url = _origin(distribution).get("url")
    return re.sub("^file://", "", url) if isinstance(url, str) else None


def _origin(distribution: Any) -> dict[str, Any]:
    """What the distribution's direct_url.json says (PEP 610); empty if there is none, or it is damaged."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(distribution.read_text("direct_url.json") or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _distributions() -> Any:
    seen = set()
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        place = (name, _place(distribution))
        # sys.path may have a folder twice. Damaged metadata has invalid names.
        if re.fullmatch(r"[a-z0-9_][a-z0-9_.+-]{0,199}", name) and place not in seen:
            seen.add(place)
            yield name, distribution


def _place(distribution: Any) -> str:
    return os.path.realpath(str(distribution.locate_file("")))


def _installs(distribution: Any, module: str, name: str) -> bool:
    record = distribution.read_text("RECORD") or distribution.read_text("installed-files.txt")
    if record:
        return bool(re.search(rf"^(\.\./)*{module}/__init__\.py(,|$)", record, re.MULTILINE)) or name == module
    top = distribution.read_text("top_level.txt")
    return module in top.split() if top else name == module


def _folder(distribution: Any, module: str, path: str | None) -> str | None:
    """The folder with the distribution's modules, spelled as in `path`; None for an editable installation."""
    with contextlib.suppress(AttributeError):
        if _origin(distribution).get("dir_info", {}).get("editable"):
            return None
    folder = os.path.normpath(str(distribution.locate_file("")))
    with contextlib.suppress(OSError):  # one folder by two names: lib and lib64, or uv's links
        if path is not None and os.path.samefile(os.path.join(folder, module), os.path.dirname(path)):
            return os.path.dirname(os.path.dirname(path))
    return folder


def _shadow(module: str, folder: str | None) -> str | None:
    """The file in `folder` that a program there would import instead. Does not import it."""
    if folder is None or os.path.realpath(folder) in map(os.path.realpath, sys.path):
        return None
    with contextlib.suppress(ImportError, ValueError, OSError):
        found = importlib.machinery.PathFinder.find_spec(module, [folder])
        return (
            found.origin if found is not None else None
        )  # None for a namespace package, which has the lowest priority
    return None


def _found(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)
