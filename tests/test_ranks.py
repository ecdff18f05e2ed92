"""benchmarks/ranks.py: the page in configs/accelerate/ is what it makes, and its counts those of other arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "ranks.py"
# As the models' files add up to, tied heads counted once.
PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
}


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks"] = module  # dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_makes(ranks: ModuleType) -> None:
    assert ranks.PAGE.read_text(encoding="utf-8") == ranks.make_page()


@pytest.mark.parametrize("model", PUBLISHED)
def test_counts_are_those_of_the_shapes(ranks: ModuleType, model: str) -> None:
    sizes, counts = ranks.MODELS[model], ranks.count_model(model)
    hidden, inner, queries, keys = (
        sizes["hidden_size"],
        sizes["intermediate_size"],
        sizes["num_attention_heads"] * 128,
        1024,
    )
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    layers = sizes["num_hidden_layers"]
    assert counts.raw == layers * sum(rows * columns for rows, columns in shapes)
    assert counts.beside == layers * sum((3 + 8) * (rows + columns) for rows, columns in shapes)
    assert counts.lora == layers * sum(32 * (rows + columns) for rows, columns in shapes)
    assert counts.largest == max(rows * columns for rows, columns in shapes)
    assert counts.raw + counts.rest == PUBLISHED[model]


def test_a_figure_of_the_page(ranks: ModuleType) -> None:
    """Qwen3-8B, `drop`, FSDP2 on 8 ranks, from the shapes alone."""
    hidden, inner, layers, vocabulary, tokens = 4096, 12288, 36, 151936, 4096
    shapes = [(4096, hidden), (1024, hidden), (1024, hidden), (hidden, 4096), *[(inner, hidden)] * 3]
    trained = sum(rows * columns + 11 * (rows + columns) for rows, columns in shapes)
    rest = 2 * vocabulary * hidden + hidden + layers * (2 * hidden + 2 * 128)
    divided = 16 * trained * layers + 2 * rest  # raw, gradient and two moments; bf16
    gathered = (2 + 1) * 4 * trained + 2 * rest
    block = (hidden + 4096 + 2 * 1024) + (4096 + hidden) + (hidden + 2 * inner) + (inner + hidden)
    alone = 2 * tokens * (layers * hidden + block) + 10 * tokens * vocabulary + 6 * inner * hidden + 2**30
    expected = divided / 8 + gathered + alone
    assert ranks.compute_total("Qwen3-8B", "SEL, `drop`", "FSDP2", 8) == pytest.approx(
        expected, rel=1e-5
    )  # step counters
    line = next(line for line in ranks.make_table("Qwen3-8B").splitlines() if line.startswith("| SEL, `drop` |"))
    assert line.split(" | ")[5] == f"{expected / 2**30:.1f}"
