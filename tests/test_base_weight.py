"""base_weight="cpu" and "drop": where base weights are, what frees them, and that nothing else differs from "keep".

No accelerator is needed: values are compared on the CPU, and devices by torch's fake tensors on a second device, which
refuse operations across devices. A real GPU has not run these tests.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from models import (
    TOKENS,
    assert_same_bits,
    bits,
    clone_state,
    convert,
    fingerprint,
    logits,
    make_config,
    make_tiny,
    sel_layers,
    train_steps,
)
from moe import make_moe
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from peft_sel import SELConfig, SELError, base, create_sel_optimizer
from peft_sel.experts import SELParameter

DEVICE = "lazy"  # an accelerator for fake tensors, which every build of torch knows
pytestmark = [
    pytest.mark.filterwarnings("ignore:Adapter cannot be set|Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:.* is all zeros, so beta"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`"),
]


def make_pair(**options: object) -> tuple[PeftModel, PeftModel]:
    """Make two trained models of two adapters, with their bases kept and in CPU memory."""
    models = []
    for base_weight in ("keep", "cpu"):
        torch.manual_seed(0)
        model = convert(make_tiny(dtype=torch.bfloat16), base_weight=base_weight, **options)
        model.add_adapter("other", make_config(base_weight=base_weight, beta=2.0, init_weights=False))
        train_steps(model)
        models.append(model.eval())
    return models[0], models[1]


def activate_both(model: PeftModel) -> Tensor:
    model.base_model.set_adapter(["default", "other"])
    return logits(model)


def merge_both(model: PeftModel) -> Tensor:
    model.base_model.set_adapter(["default", "other"])
    model.merge_adapter()
    merged = logits(model)
    model.unmerge_adapter()
    with model.disable_adapter():
        return torch.stack([merged, logits(model)])


def disable(model: PeftModel) -> Tensor:
    with model.disable_adapter():
        return logits(model)


def mix(model: PeftModel) -> Tensor:
    with torch.no_grad():
        return model(TOKENS, adapter_names=["__base__", "other"]).logits


def merge_then_unload(model: PeftModel) -> Tensor:
    model.merge_adapter()
    return logits(model.unload())


def cast(model: PeftModel) -> Tensor:
    model.merge_adapter()
    model.double()
    model.unmerge_adapter()
    with model.disable_adapter():
        return logits(model)


ACTIONS: dict[str, Callable[[PeftModel], Tensor]] = {
    "forward": logits,
    "disabled": disable,
    "several": activate_both,
    "merged and unmerged": merge_both,
    "rows": mix,
    "unload": lambda model: logits(model.unload()),
    "unload while merged": merge_then_unload,
    "merge and unload": lambda model: logits(model.merge_and_unload()),
    "merge one": lambda model: logits(model.merge_and_unload(adapter_names=["other"])),
    "merge none": lambda model: logits(model.merge_and_unload(adapter_names=[])),
    "cast": cast,
    "copy": lambda model: disable(copy.deepcopy(model)),
    "pickle": lambda model: disable(pickle.loads(pickle.dumps(model))),
}


@pytest.mark.parametrize("bias", ["none", "sel_only"])
@pytest.mark.parametrize("action", ACTIONS)
def test_cpu_gives_the_bits_of_keep(action, bias):
    kept, moved = make_pair(bias=bias)
    expected, actual = ACTIONS[action](kept), ACTIONS[action](moved)
    assert actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))
    if "unload" in action or action in ("merge one", "merge none"):
        assert_same_bits(moved.base_model.model.state_dict(), kept.base_model.model.state_dict())


def test_cpu_leaves_the_base_parameters_themselves(tmp_path):
    model = make_tiny()
    before, state = {name: id(p) for name, p in model.named_parameters()}, clone_state(model)
    adapted = convert(model, base_weight="cpu", target_modules=["q_proj", "lm_head", "embed_tokens"])
    assert all(layer.on_cpu and layer.get_base_layer().weight.numel() == 0 for layer in sel_layers(adapted))
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_tiny(), tmp_path)
    assert all(layer.on_cpu for layer in sel_layers(loaded)) and torch.equal(logits(loaded), logits(adapted))
    plain = adapted.unload()
    assert {name: id(p) for name, p in plain.named_parameters()} == before  # the order and the tie, too
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert_same_bits(plain.state_dict(), state)


def test_a_weight_that_another_module_shares_stays():
    model = convert(make_tiny(), base_weight="cpu", target_modules=["q_proj", "lm_head"])
    layers = {layer.module_name: layer for layer in sel_layers(model)}
    assert not layers.pop("lm_head").on_cpu
    assert all(layer.on_cpu for layer in layers.values())


@pytest.mark.parametrize("first", ["keep", "cpu"])
def test_one_adapter_that_asks_for_it_decides(first):
    second = {"keep": "cpu", "cpu": "keep"}[first]
    model = convert(make_tiny(), base_weight=first)
    assert all(layer.on_cpu == (first == "cpu") for layer in sel_layers(model))
    if first == "keep":
        model.merge_adapter()  # what is set aside moves too
    model.add_adapter("other", make_config(base_weight=second, beta=2.0))
    assert all(layer.on_cpu for layer in sel_layers(model))
    if first == "keep":
        model.unmerge_adapter()
    model.delete_adapter("other")
    assert torch.equal(disable(model), logits(make_tiny()))
    assert_same_bits(model.unload().state_dict(), make_tiny().state_dict())


@pytest.mark.parametrize("first", ["default", "other"])
def test_frozen_raw_weights_need_the_base_in_its_place(first):
    with pytest.raises(SELError, match=r"base_weight='cpu'.*train_raw=False rebuilds raw from the base weights"):
        make_config(base_weight="cpu", train_raw=False)
    options = [{"base_weight": "cpu"}, {"train_raw": False}]
    one, two = options if first == "default" else options[::-1]
    model = convert(make_tiny(), **one)
    before, expected = fingerprint(model), logits(model)
    with pytest.raises(SELError, match=r"train_raw=False and computes from the base weights in every step"):
        model.add_adapter("other", make_config(**two))
    assert fingerprint(model) == before and torch.equal(logits(model), expected)


def test_a_failed_load_puts_the_base_back(tmp_path):
    convert(make_tiny(), base_weight="cpu").save_pretrained(tmp_path)
    model = make_tiny("qwen2", hidden_size=64)
    before, state = fingerprint(model), clone_state(model)
    with pytest.raises(SELError, match="do not fit this model"):
        PeftModel.from_pretrained(model, tmp_path)
    assert fingerprint(model) == before
    assert_same_bits(model.state_dict(), state)


def put_on_device(model: nn.Module) -> FakeTensorMode:
    """Put fake tensors on a second device in the place of all that .to(device) would move there."""
    mode = FakeTensorMode()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, getattr(module, "_unmerged", {})):
            device = DEVICE if tensors is module._parameters or tensors is module._buffers else "cpu"
            for name, tensor in tensors.items():
                if tensor is not None:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                        trained = isinstance(tensor, nn.Parameter)
                        tensors[name] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
    return mode


class Various(nn.Module):
    """A module of every kind of layer, without transformers' own code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.conv = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1)
        self.transposed, self.stack = Conv1D(8, 8), Stack()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transposed(self.linear(self.embedding(tokens)))
        return self.stack(self.conv(x.mT).mT)


class Stack(nn.Module):
    """Two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[0] + x @ self.weight[1]


def make_various(base_weight: str) -> PeftModel:
    targets = ["embedding", "linear", "conv", "transposed"]
    options = {"target_modules": targets, "target_parameters": ["stack.weight"], "base_weight": base_weight}
    model = get_peft_model(Various(), SELConfig(**options))
    model.add_adapter("other", SELConfig(**{**options, "beta": 2.0}))
    return model.eval()


def test_everything_runs_on_the_device_and_the_base_stays_on_the_cpu(monkeypatch):
    model = make_various("cpu")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # neither knows the device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    layers = sel_layers(model)
    mode = put_on_device(model)

    def check(*, merged: bool = False) -> None:
        assert len(layers) == 5 and {layer.base_weight.device.type for layer in layers} == {"cpu"}
        held = {layer.get_base_layer()._parameters.get(layer.parameter_name) is not None for layer in layers}
        assert held == {merged}
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {DEVICE}

    with mode:
        tokens = torch.zeros(2, 4, dtype=torch.long, device=DEVICE)
        check()
        with torch.no_grad():
            assert model(tokens).device.type == DEVICE
            with model.disable_adapter():
                assert model(tokens).device.type == DEVICE
        model(tokens).sum().backward()
        for names in (["default"], ["default", "other"]):
            model.base_model.set_adapter(names)
            model(tokens)
            model.merge_adapter()
            check(merged=True)
            model(tokens)
            model.unmerge_adapter()
            check()
        for layer in layers:
            assert layer.get_delta_weight("other").device.type == layer.fetch_base_weight().device.type == DEVICE
            if not isinstance(layer, SELParameter):
                ids = isinstance(layer.get_base_layer(), nn.Embedding)
                x = tokens if ids else torch.zeros(2, 8, 8, device=DEVICE)
                assert layer(x, adapter_names=["__base__", "other"]).device.type == DEVICE


@pytest.mark.parametrize("base_weight", ["keep", "cpu"])
def test_moves_take_along_all_but_the_base_weights(base_weight):
    model = convert(make_tiny(), base_weight=base_weight)
    own = [layer.base_weight for layer in sel_layers(model)]
    values = [weight.clone() for weight in own]
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        assert all(
            layer.base_weight.dtype == layer.get_base_layer().weight.dtype == dtype for layer in sel_layers(model)
        )
    model.to("meta")  # as an accelerator: what lands there has no values, and what does not, has
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    for layer, weight, value in zip(sel_layers(model), own, values, strict=True):
        assert layer.base_weight.is_meta == (base_weight == "keep")
        if base_weight == "cpu":
            assert layer.base_weight is weight and torch.equal(weight, value)
            assert layer.fetch_base_weight().is_meta


def test_conversion_moves_each_weight_from_the_device_once(monkeypatch):
    model = make_various("keep")
    mode = put_on_device(model)
    moved: list[tuple[int, str]] = []
    monkeypatch.setattr(base, "_replace_values", lambda weight, values: moved.append((id(weight), values.device.type)))
    with mode:
        weights = [layer.base_weight for layer in sel_layers(model)]
        assert {weight.device.type for weight in weights} == {DEVICE}
        for layer in sel_layers(model):
            layer.sel_config["default"] = dataclasses.replace(layer.sel_config["default"], base_weight="cpu")
        base.place_base_weights(model, sel_layers(model), awaits_load=False)
        assert moved == [(id(weight), "cpu") for weight in weights]
        assert all(
            layer.get_base_layer()._buffers[layer.parameter_name].device.type == DEVICE for layer in sel_layers(model)
        )
        moved.clear()
        for layer in sel_layers(model):
            layer.put_base_back()
    assert moved == [(id(weight), DEVICE) for weight in weights]


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "linear": (make_tiny, {"bias": "sel_only", "beta": 2.0}),
    "tied": (make_tiny, {"target_modules": ["lm_head", "embed_tokens"]}),
    "experts": (make_moe, EXPERTS),
}


def convert_and_watch(kind: str, base_weight: str) -> tuple[PeftModel, list[weakref.ref[Tensor]]]:
    """Convert a model, and return it with a reference to the storage of each base weight before."""
    make, options = MODELS[kind]
    targets = {(layer.module_name, layer.parameter_name) for layer in sel_layers(convert(make(), **options))}
    model = make()
    weights = [p for name, p in model.named_parameters() if any(part in name for part, _ in targets) and p.dim() > 1]
    watched = [weakref.ref(weight.untyped_storage()) for weight in weights]
    del weights
    return convert(model, base_weight=base_weight, **options), watched


@pytest.mark.parametrize("kind", MODELS)
def test_a_dropped_base_is_held_by_nothing(kind):
    _kept, watched = convert_and_watch(kind, "keep")
    gc.collect()
    assert watched and not any(storage() is None for storage in watched)
    model, watched = convert_and_watch(kind, "drop")
    optimizer = create_sel_optimizer(model, lr=1e-3)
    gc.collect()
    assert all(storage() is None for storage in watched)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    layers = sel_layers(model)
    model.eval().merge_adapter()
    places = [(layer.get_base_layer(), layer.parameter_name) for layer in layers if layer.base_weight.numel() == 0]
    watched = [weakref.ref(getattr(*place).untyped_storage()) for place in places]
    logits(model)
    model.unmerge_adapter()
    gc.collect()
    assert watched and all(storage() is None for storage in watched)


def test_merging_nothing_over_a_dropped_base_is_refused():
    model = convert(make_tiny(), base_weight="drop")
    expected = logits(model)
    with pytest.raises(SELError, match="base_weight='drop'"):
        model.merge_and_unload(adapter_names=[])
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("bias", ["none", "sel_only"])
def test_the_base_comes_back_when_no_adapter_asks_for_the_cpu(bias, tmp_path):
    model = convert(make_tiny(), bias=bias)
    before, names = logits(model), {name for name, _ in model.named_parameters()}
    model.add_adapter("other", make_config(bias=bias, base_weight="cpu"))
    assert any(layer.on_cpu for layer in sel_layers(model))
    model.save_pretrained(tmp_path, selected_adapters=["other"])
    model.delete_adapter("other")
    assert not any(layer.on_cpu for layer in sel_layers(model))
    file = tmp_path / "other" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.flatten()[:1] for name, tensor in tensors.items()}, file)
    with pytest.raises(SELError):
        model.load_adapter(tmp_path / "other", "other")
    assert not any(layer.on_cpu for layer in sel_layers(model))
    assert {name for name, _ in model.named_parameters()} == names and torch.equal(logits(model), before)
