from __future__ import annotations

import importlib
import re
from pathlib import Path

from peft_sel import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_in(cell: str) -> str:
    (name,) = re.findall(r"`([^`]+)`", cell)
    return name


def test_every_function_and_test_in_the_tables_exists() -> None:
    equations, guarantees = table("From the paper to the code"), table("What is guaranteed")
    assert len(equations) >= 12 and len(guarantees) >= 8
    for _, function, _ in equations:
        module, _, name = code_in(function).rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), function
    for *_, test in equations + guarantees:
        file, name = code_in(test).split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_shape() -> None:
    assert len(README.splitlines()) < 400
    files = README.rstrip().rpartition("## Files")[2]
    assert "\n## " not in files  # the file tree comes last


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ours = re.findall(r"`((?:peft_sel|tests|configs|benchmarks)/[\w./]*)`", text)
    assert len(set(ours)) >= 12 and [name for name in ours if not (ROOT / name).exists()] == []
    functions = re.findall(r"`(extend_\w+)`", text)
    assert len(functions) == 3 and all(hasattr(registry, name) for name in functions)
    asked = re.findall(r"`(test_\w+)`", text.split("| rows in ")[1].split("\n")[0])
    cases = (ROOT / "tests" / "peft_suite" / "cases.py").read_text(encoding="utf-8")
    assert len(asked) == 6 and all(f'"{module}"' in cases for module in asked)
