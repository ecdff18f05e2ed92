"""The stored notebooks; `make notebooks` runs them."""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib
import io
import json
import re
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest
import transformers
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 200_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(home|root|tmp|work|usr|opt|Users|var|mnt)/|\b[A-Z]:\\\\")


def load(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=nbformat.NO_CONVERT)


def code_cells(file: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in load(file).cells if cell.cell_type == "code"]


def parse(cell: nbformat.NotebookNode) -> ast.Module:
    return ast.parse("".join(line for line in cell.source.splitlines(keepends=True) if not line.startswith("%")))


def execute(cell: nbformat.NotebookNode, names: dict[str, object]) -> tuple[str, object]:
    """Run a cell; return what it printed and the value of its last line."""
    body = parse(cell).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names) if last else None
    return printed.getvalue(), value


def read_numbers(text: str) -> tuple[str, list[float]]:
    """Return a text without its numbers and spaces, and the numbers."""
    number = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
    return "".join(number.sub("#", text).split()), [float(n.replace(",", "")) for n in number.findall(text)]


def read_pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int)


def test_what_1_transform_stores_is_what_its_quick_cells_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "disable_progress_bar", lambda: None)  # for the tests that follow
    pinned = re.findall(r"^matplotlib==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    same_drawing = matplotlib.__version__ in pinned
    texts = pictures = 0
    names: dict[str, object] = {}
    for cell in code_cells(NOTEBOOKS[0]):
        if "= prepare_checkpoint()" in cell.source:
            break
        printed, value = execute(cell, names)
        stored = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        (words, numbers), (stored_words, stored_numbers) = read_numbers(printed), read_numbers(stored)
        assert words == stored_words
        for number, expected in zip(numbers, stored_numbers, strict=True):  # integers: ulp, of another processor
            assert number == pytest.approx(expected, rel=0.01, abs=2 * expected.is_integer())
        texts += bool(printed)
        if isinstance(value, Figure) and same_drawing:
            png = io.BytesIO()
            value.savefig(png, dpi=value.dpi, bbox_inches="tight")
            drawn = read_pixels(png.getvalue())
            stored_picture = read_pixels(base64.b64decode(cell.outputs[0].data["image/png"]))
            assert drawn.shape == stored_picture.shape
            assert (np.abs(drawn - stored_picture).max(2) > 40).mean() < 0.002  # its palette is small
            pictures += 1
    assert texts == 3
    assert pictures == 2 * same_drawing


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
