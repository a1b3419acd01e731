"""Sphinx's hooks for memguard's documents: what Markdown on GitHub and docstrings leave to the site."""

from __future__ import annotations

import builtins
from pathlib import PurePosixPath
from typing import Any

import site_markup
import site_names

from memguard._base import findings

BELOW = {"doctor/README": "*"}
"""Pages with others below them, which GitHub shows by their links: they get a table of contents on the site."""


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.connect("missing-reference", _missing)
    app.connect("env-check-consistency", _complete)
    app.connect("doctree-read", _builtins)
    app.connect("sphinx-click-process-description", _described)
    app.connect("sphinx-click-process-options", _help)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Any, name: str, source: list[str]) -> None:
    folder = str(PurePosixPath("docs", name).parent)
    if folder == "docs/doctor" and name not in BELOW:
        source[0] = findings.page(PurePosixPath(name).name).text  # with the sentence that the front matter makes
    source[0] = site_markup.page(source[0], folder)
    if name in BELOW:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{BELOW[name]}\n```\n"


def _docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if lines and lines[0].startswith("Alias for field number"):  # what a NamedTuple says of its fields
        lines[:] = []
    lines[:] = site_markup.to_rst(lines)


def _signature(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Nobody makes these objects by hand: memguard returns and raises them."""
    return ("", None) if what in ("class", "exception") and signature else None


def _described(app: Any, context: Any, lines: list[str]) -> None:
    for parameter in context.command.params:
        parameter.get_help_record(context)  # --device writes its help when it is asked for
    _help(app, context, lines)


def _help(app: Any, context: Any, lines: list[str]) -> None:
    lines[:] = [site_markup.prose(line) for line in lines]


def _builtins(app: Any, tree: Any) -> None:
    """`bytes` in an annotation is Python's, and not a field of that name."""
    from docutils.nodes import Text
    from sphinx.addnodes import pending_xref

    for node in list(tree.findall(pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node.get("reftarget", "")):
            node.replace_self(Text(node["reftarget"]))


def _missing(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Annotations name a type by its private home, or one of another package: link to its public entry, or to none."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    domain, last = env.domains["py"], target.rpartition(".")[2]
    homes = [name for name in domain.objects if name.rpartition(".")[2] == last]
    if not _public(target) and (target.startswith("memguard.") or "." not in target) and len(homes) == 1:
        return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], homes[0], node, contnode)
    typed = node.get("reftype") in ("class", "obj", "data", "exc")
    return contnode if typed and not _public(target) else None


def _complete(app: Any, env: Any) -> None:
    """Every public name has an entry; one that is missing is a warning, and so an error of `scripts/docs`."""
    from sphinx.util import logging

    entries = env.domains["py"].objects
    for names in site_names.names():
        if not any(name in entries for name in names):
            logging.getLogger(__name__).warning("%s has no entry in docs/reference", names[0])


def _public(target: str) -> bool:
    """Whether a name must have an entry here."""
    return target.startswith("memguard.") and not any(part.startswith("_") for part in target.split("."))
