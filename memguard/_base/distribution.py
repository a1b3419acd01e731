"""The `pip install` argument that reinstalls this copy of memguard.

On PyPI `memguard` is an unrelated project, so no message may recommend that name.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "memguard-gpu"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def requirement() -> str:
    """The argument, quoted for a shell: the path of a folder or wheel, a URL, or else `memguard-gpu`.

    The path or URL comes from `direct_url.json` (PEP 610) of the installed distribution. For a checkout that is not
    installed, the argument is the checkout's root folder.
    """
    for found in metadata.distributions(name=NAME, path=[_ROOT, *sys.path]):
        try:
            origin = json.loads(found.read_text("direct_url.json") or "{}")
            if _is_this_copy(found, origin):
                return _argument(origin)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged metadata: try the next one
            continue
    return shlex.quote(_ROOT) if os.path.isfile(os.path.join(_ROOT, "pyproject.toml")) else NAME


def _is_this_copy(found: metadata.Distribution, origin: dict[str, Any]) -> bool:
    """True if `found` describes the running copy of memguard; False for example if PYTHONPATH selects another copy."""
    places = [str(found.locate_file(""))]
    if "dir_info" in origin:  # an editable installation runs from its source folder
        places.append(_path(origin["url"]) or "")
    return os.path.realpath(_ROOT) in map(os.path.realpath, places)


def _argument(origin: dict[str, Any]) -> str:
    if "url" not in origin:
        return NAME
    url = origin["url"]
    path = _path(url)
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        folder = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
        return shlex.quote(f"{NAME} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{folder}")
    if path is None:
        return shlex.quote(f"{NAME} @ {url}")
    if not os.path.exists(path):  # the folder or wheel was deleted after the installation
        return NAME
    return ("-e " if origin.get("dir_info", {}).get("editable") else "") + shlex.quote(path)


def _path(url: str) -> str | None:
    """The path of a `file:` URL; None for other URLs."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else None
