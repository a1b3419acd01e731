"""How Sphinx makes the site: `scripts/docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extension"))

import memguard

project = "memguard"
author = "memguard developers"
copyright = "memguard developers, Apache-2.0"  # noqa: A001 (Sphinx's name)
version = release = memguard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "memguard_site"]
exclude_patterns = ["_build", "extension"]
source_suffix = {".md": "markdown"}
nitpicky = True
smartquotes = False  # `--device` in a sentence stays what it is
highlight_language = "text"  # of blocks that name no language
pygments_style, pygments_dark_style = "tango", "monokai"

myst_heading_anchors = 4  # as GitHub has them

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"memguard {release}"
html_static_path = ["extension/static"]
html_css_files = ["memguard.css"]
html_copy_source = False
html_show_sphinx = False
