"""The documents that users read, and the code in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "configs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
FENCE = re.compile(r"[\s>*+-]*(`{3,}|~{3,})(.*)")
INDENTED = re.compile(r" {4,}\S|\t+\S")


def read_document(path: Path) -> str:
    """Return the Markdown of a document; of a notebook, that of its cells of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def find_blocks(text: str) -> list[str]:
    """Return the blocks of code in Markdown: between fences, and, on lines of their own, indented or in <pre>."""
    blocks: list[str] = []
    fence, before = None, ""
    for line in text.splitlines(keepends=True):
        match = FENCE.match(line)
        if fence is not None:
            if match and match[1].startswith(fence) and not match[2].strip():
                fence = None
            else:
                blocks[-1] += line
        elif match:
            fence = match[1]
            blocks.append("")
        elif "<pre" in line or (INDENTED.match(line) and not before.strip()):
            blocks.append(line)
        before = line
    assert fence is None, "a fence without an end"
    return blocks


def find_pieces(text: str) -> list[str]:
    """Return what stands in backticks in the lines of Markdown, once each, and with one space for a line's end."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", outside)))


def has_test(path: str) -> bool:
    """Return whether there is a test of a name such as test_model.py::test_values."""
    file, name = path.split("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8") if (ROOT / "tests" / file).is_file() else ""
    return f"\ndef {name}(" in text
