"""train_raw=False on bf16 and fp16 bases: a small table stands for raw, and gives what a raw weight gives."""

from __future__ import annotations

import copy

import pytest
import torch
from models import TOKENS, assert_same_bits, bits, clone_state, convert, logits, make_tiny, sel_layers, train_steps
from moe import TARGETS, convert_moe, make_moe
from peft import PeftModel
from test_layer_types import LAYERS, make_layer
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from peft_sel import SELConfig, conversion
from peft_sel.errors import ConvergenceError, SELError
from peft_sel.kernels import reference, use_backend
from peft_sel.modules import SELLinear

DTYPES = [torch.bfloat16, torch.float16]
LARGEST_TABLE = 2 * 0x7C00 + 2  # elements, both signs of fp16


def freeze(model: nn.Module) -> nn.Module:
    """Turn a dense adapter into one that trains what train_raw=False trains; raw is a parameter all the same."""
    for name, parameter in model.named_parameters():
        if "symexplin_raw" in name:
            parameter.requires_grad_(False)
    return model


def make_pair(dtype: torch.dtype, **options: object) -> tuple[PeftModel, PeftModel]:
    """The same adapter with a table and with raw weights."""
    pair = []
    for train_raw in (False, True):
        torch.manual_seed(5)
        pair.append(convert(make_tiny(dtype=dtype), train_raw=train_raw, **options))
    return pair[0], freeze(pair[1])


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "oppose", "offset": "column", "exp_scale": "lora"},
        {"family": "sinh", "mode": "congruent"},
        {"family": "damped", "mode": "congruent", "r": 0},
        {"raw_dtype": "float64"},
        {"raw_dtype": "bfloat16"},
        {"init": "congruent"},
        {"normalizer": "fixed", "normalize_by_inner_mult": True, "log_curvature": True},
        {"target_modules": ["embed_tokens", "q_proj"], "bias": "sel_only"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*is all zeros", "ignore:init='congruent'", "ignore:.*tie_word_embeddings")
def test_trains_as_a_raw_weight_does(dtype: torch.dtype, options: dict) -> None:
    lean, dense = make_pair(dtype, **options)
    for steps in (0, 3):
        train_steps(lean, steps)
        train_steps(dense, steps)
        assert torch.equal(logits(lean), logits(dense))
        assert_same_bits(trained(lean), trained(dense))
    assert_same_bits(lean.merge_and_unload().state_dict(), dense.merge_and_unload().state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_types(kind: str, dtype: torch.dtype) -> None:
    results = []
    for train_raw in (False, True):
        torch.manual_seed(5)
        layer, inputs = make_layer(kind, dtype, train_raw=train_raw)
        nn.init.normal_(layer.symexplin_residual_b["default"])
        output = freeze(layer)(inputs)
        output.float().square().sum().backward()
        results.append([output, *(p.grad for n, p in trained(layer).items() if "symexplin" in n)])
    assert len(results[0]) > 5
    assert all(torch.equal(lean, dense) for lean, dense in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype) -> None:
    """Tables of one stack differ in length."""
    results = []
    for train_raw in (False, True):
        base = make_moe("gpt_oss", dtype)
        with torch.no_grad():
            base.model.layers[0].mlp.experts.down_proj[1].mul_(4)
        torch.manual_seed(5)
        model = freeze(convert_moe(base, train_raw=train_raw, target_parameters=TARGETS))
        train_steps(model, 2)
        results.append([logits(model), *trained(model).values()])
    assert all(torch.equal(lean, dense) for lean, dense in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_holds_nothing_weight_sized_but_the_base(dtype: torch.dtype) -> None:
    model = convert(make_tiny(dtype=dtype, hidden_size=256, intermediate_size=512), train_raw=False)
    base = {p.untyped_storage().data_ptr() for name, p in model.named_parameters() if "symexplin" not in name}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.untyped_storage().data_ptr() not in base:
            assert tensor.numel() <= LARGEST_TABLE, name
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    layer = next(layer for layer in sel_layers(model) if layer.module_name.endswith("gate_proj"))
    inputs = torch.randn(3, 256, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(inputs).sum().backward()
    assert any(tensor.numel() == 256 * 512 for tensor in saved)
    assert all(t.numel() <= LARGEST_TABLE or t.untyped_storage().data_ptr() in base for t in saved)


def test_conversion_solves_for_tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, invert = [], conversion.invert_weight

    def count(weight: torch.Tensor, **options: object) -> object:
        numbers.append(weight.numel())
        return invert(weight, **options)

    monkeypatch.setattr(conversion, "invert_weight", count)
    model = convert(make_tiny(dtype=torch.bfloat16, hidden_size=256, intermediate_size=512), train_raw=False)
    assert len(numbers) == len(sel_layers(model)) and max(numbers) < 20_000 < 256 * 256


@pytest.mark.parametrize("before", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cast", ["float", "bfloat16", "half", "double"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_cast_base_is_converted_as_it_is(before: torch.dtype, cast: str, merged: bool) -> None:
    """After any cast the adapter, with nothing trained, is the cast base."""
    base = make_tiny(dtype=before)
    model = convert(copy.deepcopy(base), train_raw=False)
    logits(model)
    if merged:
        model.merge_adapter()
    getattr(model, cast)()
    if merged:
        model.unmerge_adapter()
    getattr(base, cast)()
    for layer in sel_layers(model):
        weight = layer.get_effective_weight("default").detach()
        target = base.get_submodule(layer.module_name).weight.detach()
        assert weight.dtype == target.dtype
        if weight.dtype in DTYPES:
            assert torch.equal(bits(weight), bits(target))
        else:  # float32 raw: SPEC's 4 + 1.2 * z ulp, z below 8
            torch.testing.assert_close(weight, target, rtol=14 * torch.finfo(torch.float32).eps, atol=0)
    assert torch.isfinite(logits(model)).all()


def test_a_cast_that_overflows_names_the_weight_where_it_runs() -> None:
    base = make_tiny(dtype=torch.bfloat16)
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    model = convert(base, train_raw=False, beta=7.5)
    model.half()
    with pytest.raises(SELError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1"):
        logits(model)
    with model.disable_adapter():
        logits(model)
    model.get_base_model().model.layers[1].mlp.up_proj.get_base_layer().weight.data[3, 4] = 1.0
    assert torch.isfinite(logits(model)).all()


def test_a_table_that_does_not_converge_leaves_raw_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fail at a value that the weight lacks."""
    want = logits(convert(make_tiny(dtype=torch.bfloat16), train_raw=False))
    invert = conversion.invert_weight

    def fail(weight: torch.Tensor, **options: object) -> object:
        if weight.dim() == 1:
            raise ConvergenceError("weight", 16, 1.0)
        return invert(weight, **options)

    monkeypatch.setattr(conversion, "invert_weight", fail)
    model = convert(make_tiny(dtype=torch.bfloat16), train_raw=False)
    layer = sel_layers(model)[0]
    assert layer.symexplin_raw_frozen["default"].shape == layer.base_weight.shape
    assert torch.equal(logits(model), want)


def test_a_changed_base_is_never_silently_wrong() -> None:
    """A value that the table lacks comes out as NaN, one that it holds as that value."""
    model = convert(make_tiny(dtype=torch.bfloat16), train_raw=False)
    layer = sel_layers(model)[0]
    with torch.no_grad():
        layer.base_weight[3, 4] = layer.base_weight[5, 6]
        layer.base_weight[7, 8] = 1000.0
    weight = layer.get_effective_weight("default")
    assert weight[3, 4] == layer.base_weight[5, 6] and torch.isnan(weight[7, 8])
    assert int(torch.isnan(weight).sum()) == 1


def test_loading_a_state_follows_the_loaded_base() -> None:
    model = convert(make_tiny(dtype=torch.bfloat16), train_raw=False)
    state = clone_state(model)
    for name in state:
        if name.endswith("base_layer.weight"):
            state[name] = state[name] * 100
    model.load_state_dict(state)
    for layer in sel_layers(model):
        assert torch.equal(bits(layer.get_effective_weight("default")), bits(layer.base_weight))


def test_kept_weights_follow_the_base_and_the_table() -> None:
    model = convert(make_tiny(dtype=torch.bfloat16), train_raw=False).eval()
    before = logits(model)
    assert all(len(layer.kept_weights) for layer in sel_layers(model)) and torch.equal(logits(model), before)
    with torch.no_grad():
        sel_layers(model)[0].base_weight.neg_()
    after = logits(model)
    assert not torch.equal(after, before)
    model.train()
    model.eval()
    assert torch.equal(logits(model), after)


def test_backends_never_see_inference_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile would compile anew for them."""
    seen, fold = [], reference.fold

    def look(spec: object, raw: torch.Tensor, *args: object) -> torch.Tensor:
        seen.append((raw.dtype, raw.is_inference()))
        return fold(spec, raw, *args)

    monkeypatch.setattr(reference, "fold", look)
    model = convert(make_tiny(dtype=torch.bfloat16), train_raw=False)
    with use_backend("reference"), torch.inference_mode():
        model(TOKENS)
    assert set(seen) == {(torch.float32, False)}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_whole_layer_compile() -> None:
    torch._dynamo.reset()
    base = nn.Linear(24, 40, dtype=torch.bfloat16).requires_grad_(False)
    layer = SELLinear(base, "default", SELConfig(r=2, train_raw=False), name="up_proj")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(3):
        inputs = torch.randn(3, 24, dtype=torch.bfloat16)
        for want, got in zip(gradients(layer, layer(inputs)), gradients(layer, compiled(inputs)), strict=True):
            assert (want - got).norm() <= 1e-6 * want.norm()  # fused sums have another order
    assert counter.frame_count == 1


def gradients(layer: nn.Module, output: torch.Tensor) -> list[torch.Tensor]:
    return [output, *torch.autograd.grad(output.float().square().sum(), list(trained(layer).values()))]
