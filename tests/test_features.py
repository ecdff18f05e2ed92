"""README's table "What works": every cell is run on a tiny layer, those that refuse included."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, bits
from peft import PeftModel, get_peft_model
from test_readme import README, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.pytorch_utils import Conv1D

from peft_sel import SELConfig, SELError

BATCH = 3
EXPERTS = ["layer.gate_up_proj", "layer.down_proj"]


class Wrapper(nn.Module):
    """A model of one layer, with gradient checkpointing if asked for."""

    checkpointing = False

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def run(self, x: Tensor) -> Tensor:
        if isinstance(x, tuple):
            return self.layer(*x)
        result = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return result[0] if isinstance(result, tuple) else result

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointing else self.run(x)


def make_quantized() -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32))
    torchao.quantize_(model.bfloat16(), torchao.Int8WeightOnlyConfig())
    assert is_quantized(model[0])
    return model[0]


def is_quantized(layer: nn.Module) -> bool:
    return type(layer.state_dict().get("weight", layer)).__module__.startswith("torchao")


def make_experts() -> nn.Module:
    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=2))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def draw(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape, dtype=torch.bfloat16)


# column of the table: its layers, each with its inputs
LAYERS: dict[str, list[tuple[Callable[[], nn.Module], Callable[[], Any]]]] = {
    "`Linear`": [(lambda: nn.Linear(8, 6), draw(8))],
    "`Embedding`": [(lambda: nn.Embedding(7, 5), lambda: torch.tensor([[1, 4], [0, 6], [2, 2]]))],
    "`Conv1D`": [(lambda: Conv1D(6, 8), draw(8))],
    "`Conv1d` to `Conv3d`": [
        (lambda: nn.Conv1d(4, 6, 3), draw(4, 8)),
        (lambda: nn.Conv2d(4, 6, 3), draw(4, 6, 6)),
        (lambda: nn.Conv3d(2, 3, 2), draw(2, 4, 4, 4)),
    ],
    "quantised `Linear`": [(make_quantized, draw(32))],
    "`MultiheadAttention`": [(lambda: nn.MultiheadAttention(8, 2), draw(4, 8))],
    "stacked experts": [(make_experts, lambda: (draw(8)(), torch.zeros(BATCH, 1).long(), draw(1)()))],
}


class Case:
    """One layer: makes equal base models, adapted ones, and runs them on one input."""

    def __init__(self, make: Callable[[], nn.Module], make_inputs: Callable[[], Any]) -> None:
        layer = make()
        self.layer = layer if is_quantized(layer) else layer.bfloat16()
        self.inputs = make_inputs()

    def base(self) -> Wrapper:
        return Wrapper(copy.deepcopy(self.layer)).eval()

    def adapted(self, changed: bool = True, **options: Any) -> Any:
        model = get_peft_model(self.base(), self.config(init_weights=not changed, **options))
        if changed:
            self.change(model, "default")
        return model.eval()

    def config(self, **options: Any) -> SELConfig:
        if isinstance(self.layer, Qwen3MoeExperts):
            return SELConfig(target_modules=[], target_parameters=EXPERTS, **options)
        return SELConfig(target_modules=["layer"], **options)

    @staticmethod
    def change(model: Any, adapter: str) -> None:
        for layer in model.base_model.sel_layers():
            nn.init.normal_(layer.symexplin_residual_b[adapter])

    @torch.no_grad()
    def run(self, model: nn.Module, **options: Any) -> Tensor:
        return model(self.inputs, **options)


def convert(case: Case, _: Path) -> None:
    base, model = case.base(), case.adapted(changed=False)
    state = base.state_dict()
    if is_quantized(base.layer):
        state["layer.weight"] = base.layer.weight.dequantize()
    else:
        assert torch.equal(case.run(model), case.run(base))
    assert_same_bits(model.merge_and_unload().state_dict(), state)


def merge(case: Case, _: Path) -> None:
    model = case.adapted()
    expected, base = case.run(model), case.run(case.base())
    assert not torch.equal(expected, base)
    for _ in range(2):
        model.merge_adapter()
        assert torch.equal(case.run(model), expected)
        model.unmerge_adapter()
        assert torch.equal(case.run(model), expected)
    assert torch.equal(case.run(copy.deepcopy(model).unload()), base)
    assert torch.equal(case.run(model.merge_and_unload()), expected)


def disable(case: Case, _: Path) -> None:
    model = case.adapted()
    expected = case.run(model)
    with model.disable_adapter():
        assert torch.equal(case.run(model), case.run(case.base()))
    assert torch.equal(case.run(model), expected)


def make_two(case: Case) -> tuple[Any, dict[str, Tensor]]:
    """Make a model with two adapters, and its outputs with each and without."""
    model = case.adapted()
    model.add_adapter("other", case.config(mode="congruent", init_weights=False))
    case.change(model, "other")
    outputs = {"__base__": case.run(case.base())}
    for name in ("default", "other"):
        model.set_adapter(name)
        outputs[name] = case.run(model)
    return model.eval(), outputs


def activate_several(case: Case, _: Path) -> None:
    model, outputs = make_two(case)
    model.base_model.set_adapter(["default", "other"])
    both = case.run(model)
    assert not any(torch.equal(both, single) for single in outputs.values())
    assert torch.equal(case.run(model.merge_and_unload()), both)


def mix_rows(case: Case, _: Path) -> None:
    model, outputs = make_two(case)
    names = ["other", "__base__", "default"]
    mixed = case.run(model, adapter_names=names)
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], outputs[name][row])  # one batch is summed in another order than three


def save(case: Case, folder: Path) -> None:
    model = case.adapted()
    model.save_pretrained(folder)
    assert torch.equal(case.run(PeftModel.from_pretrained(case.base(), folder)), case.run(model))


def checkpoint_gradients(case: Case, _: Path) -> None:
    gradients = []
    model = case.adapted()
    for model.base_model.model.checkpointing in (False, True):
        model.zero_grad()
        model(case.inputs).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0] and all(grad.any() for grad in gradients[0].values())
    assert_same_bits(gradients[1], gradients[0])


def freeze_raw(case: Case, folder: Path) -> None:
    model = case.adapted(train_raw=False)
    assert not any("raw" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    save(case, folder)
    expected = case.run(model)
    assert torch.equal(case.run(model.merge_and_unload()), expected)


def move_base(case: Case, _: Path) -> None:
    model = case.adapted(base_weight="cpu")
    assert all(layer.on_cpu for layer in model.base_model.sel_layers())
    expected = case.run(case.base())
    with model.disable_adapter():
        assert torch.equal(bits(case.run(model)), bits(expected))
    assert torch.equal(bits(case.run(model.unload())), bits(expected))


def drop_base(case: Case, _: Path) -> None:
    model = case.adapted(base_weight="drop")
    assert all(layer.base_weight.numel() == 0 for layer in model.base_model.sel_layers())
    expected = case.run(model)
    with pytest.raises(SELError, match="base_weight='drop'"), model.disable_adapter():
        pass
    assert torch.equal(bits(case.run(model.merge_and_unload())), bits(expected))


FEATURES = {
    "conversion without a changed bit": convert,
    "merge, unmerge, unload": merge,
    "`disable_adapter`": disable,
    "several adapters active": activate_several,
    "`adapter_names=` per row": mix_rows,
    "save and load": save,
    "gradient checkpointing": checkpoint_gradients,
    "`train_raw=False`": freeze_raw,
    '`base_weight="cpu"`': move_base,
    '`base_weight="drop"`': drop_base,
}
ROWS = table("What works")
NOTES = dict(re.findall(r"^- \*\*(\w)\*\*: `(.+?)`", README, re.MULTILINE))
HEADER = [cell.strip() for cell in re.search(r"^\| feature \|(.*)\|$", README, re.MULTILINE)[1].split("|")]


def test_table_is_complete():
    assert [row[0] for row in ROWS] == list(FEATURES) and list(LAYERS) == HEADER
    cells = {cell for row in ROWS for cell in row[1:]}
    assert cells - {"yes"} == NOTES.keys()


@pytest.mark.parametrize("column", LAYERS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.filterwarnings("ignore:Already unmerged")
def test_cell(feature, column, tmp_path: Path):
    cell = {name: row[1:] for name, *row in [(row[0], *row) for row in ROWS]}[feature][HEADER.index(column)]
    for index, (make, make_inputs) in enumerate(LAYERS[column]):
        case = Case(make, make_inputs)
        if cell == "yes":
            FEATURES[feature](case, tmp_path / str(index))
        else:
            with pytest.raises(SELError, match=re.escape(NOTES[cell])):
                FEATURES[feature](case, tmp_path / str(index))
