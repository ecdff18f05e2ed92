"""The stored notebooks; `make notebooks` runs them."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MAX_BYTES = 200_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(home|root|tmp|work|usr|opt|Users|var|mnt)/|\b[A-Z]:\\\\")


def load(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=nbformat.NO_CONVERT)


def code_cells(file: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in load(file).cells if cell.cell_type == "code"]


def parse(cell: nbformat.NotebookNode) -> ast.Module:
    return ast.parse("".join(line for line in cell.source.splitlines(keepends=True) if not line.startswith("%")))


def test_there_are_three() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["1_transform", "2_train", "3_merge"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
class TestNotebook:
    def test_is_valid_and_the_same_wherever_it_was_run(self, file: Path) -> None:
        notebook = load(file)
        nbformat.validate(notebook)
        assert notebook.metadata.language_info == {"name": "python"}
        assert all(cell.metadata == {} for cell in notebook.cells)

    def test_ends_with_assertions(self, file: Path) -> None:
        assert any(isinstance(node, ast.Assert) for node in parse(code_cells(file)[-1]).body)
        assert load(file).cells[-1].cell_type == "code"

    def test_outputs_are_stored_small_and_clean(self, file: Path) -> None:
        cells = code_cells(file)
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # one run, start to end
        outputs = [output for cell in cells for output in cell.outputs]
        assert outputs and not [output for output in outputs if output.output_type == "error"]
        assert not [output for output in outputs if output.get("name") == "stderr"]
        assert file.stat().st_size < MAX_BYTES

    def test_names_no_place_on_a_machine(self, file: Path) -> None:
        notebook = load(file)
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                output.get("data", {}).pop("image/png", None)
        assert not ABSOLUTE_PATH.findall(json.dumps(notebook))

    def test_its_imports_exist(self, file: Path) -> None:
        found = 0
        for node in [node for cell in code_cells(file) for node in ast.walk(parse(cell))]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found += bool(importlib.import_module(alias.name))
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
                found += 1
        assert found > 5
