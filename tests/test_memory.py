"""What training holds: benchmarks/memory.py counts it; an optimizer in the backward pass frees gradients at once."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TOKENS, assert_same_bits, clone_state, convert, make_tiny
from torch import Tensor, nn

from peft_sel import create_sel_optimizer, sel_param_groups

FILE = Path(__file__).parent.parent / "benchmarks" / "memory.py"
RANK, LORA_RANK = 8, 32


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("memory", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_counts_are_the_arithmetic(script):
    model = script.load_model("tiny")
    shapes = [model.get_submodule(name).weight.shape for name in script.find_targets(model)]
    assert len(shapes) == 14
    weights = sum(rows * columns for rows, columns in shapes)
    sides = sum(rows + columns for rows, columns in shapes)
    scales = (3 + RANK) * sides / weights  # three pairs of vectors and the residual, per weight
    lora, biggest = LORA_RANK * sides / weights, 256 * 128 / weights

    def expect(
        trained: float, *, base: float = 0.0, cpu: float = 0.0, gradients: float | None = None
    ) -> tuple[Any, ...]:
        return trained * 4, trained * 4 if gradients is None else gradients, trained * 8, base, cpu

    expected = {
        "full fine-tuning, float32 weights": expect(1.0),
        "SEL, `keep`": expect(1 + scales, base=2.0),
        "SEL, `cpu`": expect(1 + scales, cpu=2.0),
        "SEL, `drop`": expect(1 + scales),  # 4 raw, 4 gradient, 8 of Adam, and as much for scales and residual
        "LoRA, rank 32": expect(lora, base=2.0),
    }
    batch = torch.arange(16)[None]
    for method, (trained, gradients, optimizer, base, cpu) in expected.items():
        row = script.measure(script.METHODS[method], script.load_model("tiny"), batch)
        found = (row["trained"], row["gradients"], row["base"], row["cpu"])
        assert found == pytest.approx((trained, gradients, base, cpu), rel=1e-12), method
        assert optimizer <= row["optimizer"] < optimizer + 0.02, method  # a counter of steps beside each parameter's
        parts = ("trained", "gradients", "optimizer", "base", "buffers")
        assert row["device"] == pytest.approx(sum(row[part] for part in parts))
    method = "SEL, `drop`, optimizer in backward"
    row = script.measure(script.METHODS[method], script.load_model("tiny"), batch)
    assert row["trained"] == pytest.approx(4 * (1 + scales))
    assert 4 * biggest <= row["gradients"] < 4 * biggest * (1 + scales)  # those of one layer at a time


def test_the_table_of_the_readme_is_the_measured_one(script):
    measured = json.loads((FILE.parent / "memory.json").read_text())["bytes_per_weight"]
    assert script.make_table(measured) in (FILE.parent.parent / "README.md").read_text(encoding="utf-8")


def test_storages_count_once(script):
    tensor = torch.zeros(6)
    assert script.count_bytes([tensor, tensor[:2], tensor.view(2, 3), torch.zeros(1)]) == 28


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("optimizer_cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_optimizer_in_backward_trains_bit_for_bit_and_frees_each_gradient(optimizer_cls, checkpointing):
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = convert(make_tiny(dtype=torch.bfloat16), base_weight="drop", r=2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    plain = make()
    optimizer = create_sel_optimizer(plain, optimizer_cls, lr=1e-2)
    for _ in range(3):
        plain(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, alive = make(), []

    def step_and_free(parameter: Tensor, *, optimizer: torch.optim.Optimizer) -> None:
        alive.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        parameter.grad = None

    for group in sel_param_groups(model, lr=1e-2):
        for parameter in group["params"]:
            own = optimizer_cls([{**group, "params": [parameter]}], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(partial(step_and_free, optimizer=own))
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), make().parameters(), strict=True))
    assert_same_bits(clone_state(model), clone_state(plain))
    trained = [p for p in plain.parameters() if p.requires_grad]
    assert len(alive) == 3 * len(trained) and max(alive) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
