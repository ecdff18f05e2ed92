"""Quantised bases: bitsandbytes and torchao, where they are installed."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits, bits, clone_state, make_heavy_tailed, train_steps
from peft import PeftModel, get_peft_model
from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM, TorchAoConfig

from peft_sel import SELConfig, SELError, SELLayer, quantized, save_as_lora

pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast"),
    pytest.mark.filterwarnings("ignore:Merge lora module to"),
]
TOKENS = torch.arange(12)[None]
KINDS = ["8 bit", "fp4", "nf4 double", "torchao int8", "torchao int8 dynamic"]


def make_config(kind: str) -> Any:
    if kind.startswith("torchao"):
        pytest.importorskip("torchao")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

        dynamic = kind.endswith("dynamic")
        return TorchAoConfig(Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    if kind == "8 bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} if kind == "nf4 double" else {}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)
    model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    make_heavy_tailed(model)
    path = tmp_path_factory.mktemp("base")
    model.save_pretrained(path)
    return path


def load(folder: Path, kind: str) -> nn.Module:
    config = make_config(kind)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16).eval()


def dequantized(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the state after the quantiser's own way back."""
    model = load(folder, kind)
    if not kind.startswith("torchao"):  # transformers has none for it
        return clone_state(model.dequantize(torch.bfloat16))
    state = {name: tensor.dequantize() for name, tensor in model.state_dict().items() if "_proj.weight" in name}
    return {name: state.get(name, tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_is_the_dequantised_weight(kind, folder):
    model = get_peft_model(load(folder, kind), SELConfig())
    layers = {m.module_name: m for m in model.modules() if isinstance(m, SELLayer)}
    expected = dequantized(folder, kind)
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.get_effective_weight("default"), expected[f"{name}.weight"])
    merged = model.merge_and_unload()
    assert_same_bits(merged.state_dict(), expected)
    assert all(type(merged.get_submodule(name)) is nn.Linear for name in layers)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_folds_each_weight_once(kind, folder):
    model = get_peft_model(load(folder, kind), SELConfig()).eval()
    layers = [module for module in model.modules() if isinstance(module, SELLayer)]
    kept = []
    for _ in range(2):
        logits(model)
        kept.append([layer.get_running_weight(["default"]) for layer in layers])
    assert all(first is second for first, second in zip(*kept, strict=True))


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"base_weight": "drop"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_merged_saved_and_loaded(kind, options, folder, tmp_path: Path):
    model = get_peft_model(load(folder, kind), SELConfig(**options))
    train_steps(model)
    model.eval()
    adapted = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(PeftModel.from_pretrained(load(folder, kind), tmp_path / "adapter")), adapted)
    model.merge_adapter()
    assert torch.equal(logits(model), adapted)
    model.unmerge_adapter()
    assert torch.equal(logits(model), adapted)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged), adapted)
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert plain.dtype == torch.bfloat16 and getattr(plain, "hf_quantizer", None) is None
    assert torch.equal(logits(plain), adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_adapter_it_is_the_quantised_model(kind, folder):
    expected = logits(load(folder, kind))
    model = get_peft_model(load(folder, kind), SELConfig())
    train_steps(model)
    model.eval()
    adapted = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), adapted)
    model.add_adapter("other", SELConfig(beta=2.0))  # from the weight as the forward pass has left it
    model.set_adapter("other")
    other = next(layer for layer in model.modules() if isinstance(layer, SELLayer))
    weight = dequantized(folder, kind)[f"{other.module_name}.weight"]
    if kind == "nf4 double":  # on CPUs bitsandbytes quantises the scales again, to 8 bits in steps of up to 1/32
        torch.testing.assert_close(other.get_effective_weight("other"), weight, rtol=2**-5, atol=0.0)
    else:
        assert torch.equal(bits(other.get_effective_weight("other")), bits(weight))
    model.set_adapter("default")
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.unload()), expected)


def test_what_stays_quantised_is_said(folder):
    model = get_peft_model(load(folder, "8 bit"), SELConfig(target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="still quantised"):
        merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    assert type(merged.model.layers[0].self_attn.k_proj) is not nn.Linear


def test_other_quantised_modules_are_refused():
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Embedding(32, 32))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), lambda module, _: isinstance(module, nn.Embedding))
    with pytest.raises(SELError, match=r"module 0 is a Embedding \(quantised by torchao, .* linear layers only"):
        get_peft_model(model, SELConfig(target_modules=["0"]))


class ForwardOnly(nn.Linear):
    """A layer of a quantiser that cannot be dequantised."""


def test_a_weight_that_cannot_be_read_is_refused(monkeypatch):
    backend = ForwardOnlyQuantizationBackend("gptq")
    monkeypatch.setattr(
        quantized, "resolve_quantization_backend", lambda module, **_: backend if type(module) is ForwardOnly else None
    )
    model = nn.Sequential(nn.Linear(4, 4), ForwardOnly(4, 4))
    before = clone_state(model)
    with pytest.raises(SELError, match=r"module 1 is a ForwardOnly \(its gptq weight cannot be dequantised"):
        get_peft_model(model, SELConfig(target_modules=["0", "1"]))
    assert [type(module) for module in model] == [nn.Linear, ForwardOnly]
    assert_same_bits(model.state_dict(), before)


class PackedLinear(nn.Linear):
    """A linear layer whose weight has another shape than its matrix, as in 4 bits."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.weight = nn.Parameter(self.weight.detach().reshape(-1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.view(self.out_features, self.in_features), self.bias)


class PackedBackend:
    backend_name = "packed"

    def get_base_weight(self, module: PackedLinear) -> torch.Tensor:
        return module.weight.detach().view(module.out_features, module.in_features).clone()


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    found = lambda module: PackedBackend() if isinstance(module, PackedLinear) else None  # noqa: E731
    monkeypatch.setattr(quantized, "find_quantization", found)
    torch.manual_seed(0)
    return nn.Sequential(PackedLinear(16, 12))


def test_a_lora_is_as_large_as_the_matrix_of_a_packed_weight(packed: nn.Module, tmp_path: Path) -> None:
    model = get_peft_model(packed, SELConfig(target_modules=["0"]))
    with pytest.raises(SELError, match=r"shape \(12, 16\), too small for rank=13"):
        save_as_lora(tmp_path / "large", model, 13)
    assert save_as_lora(tmp_path / "lora", model, 4).num_modules == 1


def test_a_trained_bias_of_a_quantised_layer_is_merged(packed: nn.Module) -> None:
    nn.init.normal_(packed[0].bias)
    before, x = packed[0].bias.clone(), torch.randn(5, 16)
    model = get_peft_model(packed, SELConfig(target_modules=["0"], bias="sel_only")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
        adapted = model(x)
        model.merge_adapter()
        torch.testing.assert_close(model(x), adapted)
        model.unmerge_adapter()
        assert torch.equal(packed[0].base_layer.bias, before) and isinstance(packed[0].base_layer, PackedLinear)
        torch.testing.assert_close(model(x), adapted)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(x), adapted)
        assert type(merged[0]) is nn.Linear


def test_dropping_a_quantised_weight_frees_it_beside_a_converted_bias(packed: nn.Module) -> None:
    kept = weakref.ref(packed[0])
    model = get_peft_model(packed, SELConfig(target_modules=["0"], bias="sel_only", base_weight="drop"))
    gc.collect()
    assert kept() is None and isinstance(model, PeftModel)
