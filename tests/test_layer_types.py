"""Every supported layer type: conversion, gradients, merge, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import assert_same_bits, bits, clone_state, make_heavy_tailed, train_steps
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from peft_sel import SELConfig, SELError, merge_checkpoint
from peft_sel.modules import SELModule
from peft_sel.numerics import effective_weight, expand_parts
from peft_sel.shapes import to_matrix


class ScaledEmbedding(nn.Embedding):
    """An embedding with a factor of its own, as Gemma has."""

    embed_scale = 3.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale


def ids() -> torch.Tensor:
    return torch.tensor([[1, 4, 4], [0, 6, 2]])


LAYERS = {
    "embedding": (lambda: nn.Embedding(7, 5, padding_idx=2), ids),
    "sparse embedding": (lambda: nn.Embedding(7, 5, sparse=True), ids),
    "scaled embedding": (lambda: ScaledEmbedding(7, 5), ids),
    "Conv1D": (lambda: Conv1D(6, 4), lambda: torch.randn(2, 3, 4)),
    "square Conv1D": (lambda: Conv1D(4, 4), lambda: torch.randn(2, 3, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), lambda: torch.randn(2, 4, 8)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), lambda: torch.randn(2, 4, 8, 8)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: torch.randn(1, 2, 4, 4, 4)),
}


def make_layer(kind: str, dtype: torch.dtype, **options: object) -> tuple[SELModule, torch.Tensor]:
    make, make_input = LAYERS[kind]
    base = make().to(dtype)
    make_heavy_tailed(base)
    inputs = make_input()
    inputs = inputs if inputs.dtype == torch.long else inputs.to(dtype)
    return SELModule(base, "default", SELConfig(r=2, **options), name="block.module"), inputs


@pytest.mark.parametrize("mode", ["mismatch", "congruent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LAYERS)
def test_conversion_changes_no_bit_and_merge_comes_undone(kind, dtype, mode):
    layer, inputs = make_layer(kind, dtype, mode=mode)
    weight = layer.get_base_layer().weight
    original = weight.detach().clone()
    expected = layer.base_layer(inputs)
    assert torch.equal(layer(inputs), expected)
    for _ in range(100):
        layer.merge()
        assert torch.equal(bits(layer.get_base_layer().weight), bits(original))
        assert layer.get_base_layer().weight.is_contiguous()
        layer.unmerge()
    assert layer.get_base_layer().weight is weight
    assert torch.equal(bits(weight), bits(original))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_adapted_equals_merged(kind, dtype):
    layer, inputs = make_layer(kind, dtype, init_weights=False)
    nn.init.normal_(layer.symexplin_residual_b["default"])
    adapted = layer(inputs)
    assert not torch.equal(adapted, layer.base_layer(inputs))
    layer.merge()
    assert torch.equal(layer(inputs), adapted)


@pytest.mark.parametrize("mode", ["mismatch", "oppose"])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_the_weight_pulled_back(kind, mode):
    layer, inputs = make_layer(kind, torch.float64, raw_dtype="float64", mode=mode, init_weights=False)
    outputs = layer(inputs)
    direction = torch.randn_like(outputs)
    (outputs * direction).sum().backward()
    # the same by plain autograd: raw and parts as a matrix whose rows are outputs
    raw = layer.symexplin_raw["default"].detach().requires_grad_()
    scales = layer.scales("default")
    parts = {n: {k: p.detach().requires_grad_() for k, p in s.named_parameters()} for n, s in scales.items()}
    expanded = {name: expand_parts(scales[name].pattern, parts[name]) for name in parts}
    a, b = (layer.symexplin_residual_a["default"].detach(), layer.symexplin_residual_b["default"].detach())
    b.requires_grad_()
    beta = float(layer.symexplin_beta["default"])
    matrix = effective_weight(to_matrix(raw, layer.transposed), **expanded, beta=beta, mode=mode) + b @ a
    weight = matrix.T if layer.transposed else matrix.reshape(raw.shape)
    base = layer.get_base_layer()
    if isinstance(base, nn.Embedding):
        base.sparse = False
    (functional_call(base, {"weight": weight}, (inputs,)) * direction).sum().backward()
    tolerance = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums of up to 100 terms
    torch.testing.assert_close(layer.symexplin_raw["default"].grad, raw.grad, **tolerance)
    torch.testing.assert_close(layer.symexplin_residual_b["default"].grad, b.grad, **tolerance)
    for name, group in parts.items():
        for part, tensor in group.items():
            torch.testing.assert_close(getattr(scales[name], part).grad, tensor.grad, **tolerance)


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [("embedding", 7, 5), ("Conv1D", 6, 4), ("Conv2d", 6, 18), ("Conv3d", 3, 16)],
)
def test_rows_are_outputs(kind, rows, columns):
    layer, _ = make_layer(kind, torch.float32)
    scale = layer.scales("default")["exp_scale"]
    assert (scale.row.shape, scale.column.shape) == ((rows,), (columns,))
    assert layer.symexplin_raw["default"].shape == layer.get_base_layer().weight.shape


def make_gpt2(dtype: torch.dtype = torch.bfloat16) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=32)
    model = GPT2LMHeadModel(config)
    make_heavy_tailed(model)
    return model.to(dtype).eval()


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"base_weight": "drop"}])
def test_gpt2_from_conversion_to_files(options, tmp_path: Path):
    targets = ["c_attn", "c_proj", "c_fc", "wpe"]  # attention's c_proj and, with n_inner 32, the MLP's are square
    make_gpt2().save_pretrained(tmp_path / "base")
    state = clone_state(make_gpt2())
    config = {"task_type": "CAUSAL_LM", "target_modules": targets, **options}
    untrained = get_peft_model(make_gpt2(), SELConfig(**config)).merge_and_unload()
    assert_same_bits(untrained.state_dict(), state)
    model = get_peft_model(make_gpt2(), SELConfig(**config))
    train_steps(model)
    model.eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        adapted = model(tokens).logits
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_gpt2(), tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", progress=False)
    model.merge_and_unload().save_pretrained(tmp_path / "in_memory")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, adapted)
        assert torch.equal(GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()(tokens).logits, adapted)
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "in_memory")]
    assert_same_bits(dict(sorted(files[0].items())), dict(sorted(files[1].items())))


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`", "ignore:Input and output embeddings")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_tied_embedding_alone_leaves_the_head(tmp_path: Path):
    make_gpt2().save_pretrained(tmp_path / "base")
    head = make_gpt2().lm_head.weight.detach().clone()
    model = get_peft_model(make_gpt2(), SELConfig(task_type="CAUSAL_LM", target_modules=["wte"]))
    train_steps(model)
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    assert torch.equal(merged.lm_head.weight, head)
    assert not torch.equal(merged.transformer.wte.weight, head)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", progress=False)
    reloaded = GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    assert torch.equal(reloaded.lm_head.weight, head)
    assert torch.equal(reloaded.transformer.wte.weight, merged.transformer.wte.weight)


class UnknownEmbedding(nn.Embedding):
    """An embedding that does something of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1.0


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.Embedding(4, 3, max_norm=1.0), "is a Embedding .*max_norm"),
        (UnknownEmbedding(4, 3), "is a UnknownEmbedding"),
        (nn.ConvTranspose1d(4, 3, 2), "is a ConvTranspose1d"),
        (nn.MultiheadAttention(4, 2), "is a MultiheadAttention .*reads weights without calling modules"),
        (nn.MultiheadAttention(4, 2).out_proj, "is a NonDynamicallyQuantizableLinear .*without calling modules"),
    ],
)
def test_other_modules_are_refused(module, match):
    with pytest.raises(SELError, match=match):
        get_peft_model(nn.Sequential(module), SELConfig(target_modules=["0"]))
