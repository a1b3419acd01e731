"""Print the licences of the packages in Plotly's bundle: `_plotly_notices.py BUNDLE NODE_MODULES`.

BUNDLE is the unminified bundle, whose comments name the packages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""


def licence(folder: Path, about: dict[str, object]) -> str:
    """The package's licence file; without one, an MIT package's author and the MIT text."""
    for file in sorted(folder.iterdir()):
        if re.match("licen[cs]e", file.name, re.IGNORECASE):
            return file.read_text(encoding="utf-8").strip()
    if about.get("license") != "MIT":
        raise SystemExit(f"{folder.name}: no licence file, and {about.get('license')!r} is not MIT: add it by hand")
    author = about["author"]
    name = author.get("name") if isinstance(author, dict) else str(author).partition(" <")[0]
    return f"MIT License\n\nCopyright (c) {name}\n\n{MIT}"


def main(bundle: str, modules: str) -> None:
    source = Path(bundle).read_text(encoding="utf-8")
    version = re.search(r"plotly\.js \(basic\) v(\S+)", source)
    assert version is not None
    print(f"Plotly {version[1]}, its basic bundle, contains code of these packages. The licence of each follows.")
    for name in sorted(set(re.findall(r'node_modules/((?:@[^/\s"]+/)?[^/\s"]+)/', source))):
        about = json.loads((Path(modules) / name / "package.json").read_text(encoding="utf-8"))
        text = "\n".join(line.rstrip() for line in licence(Path(modules) / name, about).splitlines())
        print(f"\n{'=' * 100}\n{name} ({about['license']})\n\n{text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
