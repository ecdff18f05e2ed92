"""The promises of SPEC section 3 on a real pretrained checkpoint: heavy tails, exact zeros, 210 target tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from models import assert_same_bits, bits, train_steps, ulp_distance
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from peft_sel import SELConfig, SELError, SELLayer, create_sel_optimizer
from peft_sel.numerics import SCALE_NAMES, effective_weight, expand_parts

pytestmark = pytest.mark.real
NUM_TARGETS = 210
TOKENS = torch.arange(1000, 1064)[None]


@lru_cache(maxsize=2)
def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.float32:  # a bf16 file holds no float32 numbers proper: give every weight a full mantissa
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module", autouse=True)
def unload() -> Iterator[None]:
    """Give the memory back: later tests fork."""
    yield
    load.cache_clear()


def convert(folder: Path, dtype: torch.dtype, **options: object) -> tuple[PeftModel, dict[str, Tensor]]:
    base = load(folder, dtype)
    return get_peft_model(copy.deepcopy(base), SELConfig(task_type="CAUSAL_LM", **options)), base.state_dict()


def sel_layers(model: PeftModel) -> Iterator[tuple[str, SELLayer]]:
    return ((module.module_name, module) for module in model.modules() if isinstance(module, SELLayer))


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


# test_inversion.py takes every fp16 value, and heavy-tailed float32 ones, through these curvatures.
SLOW = pytest.mark.slow
HALVES = [(torch.bfloat16, "auto"), (torch.bfloat16, 7.5), (torch.bfloat16, 20.0), (torch.float16, "auto")]
SLOW_HALVES = [pytest.param(torch.float16, beta, marks=SLOW) for beta in (7.5, 20.0)]


@pytest.mark.parametrize("mode", ["mismatch", "congruent"])
@pytest.mark.parametrize(("dtype", "beta"), [*HALVES, *SLOW_HALVES])
def test_every_tensor_is_bit_identical_at_zero_steps(real_checkpoint, dtype, mode, beta):
    model, base = convert(real_checkpoint, dtype, mode=mode, beta=beta, base_weight="drop")
    reports = [layer.inversion_report["default"] for _, layer in sel_layers(model)]
    assert len(reports) == NUM_TARGETS
    assert max(report.num_steps for report in reports) <= 5
    assert_same_bits(model.merge_and_unload().state_dict(), base)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "sinh", "mode": "congruent"},
        {"family": "damped", "mode": "congruent"},
        {"log_curvature": True, "normalize_by_inner_mult": True, "normalizer": "fixed"},
    ],
)
def test_every_family_is_bit_identical_at_zero_steps(real_checkpoint, options):
    model, base = convert(real_checkpoint, torch.bfloat16, base_weight="drop", r=0, **options)
    reports = [layer.inversion_report["default"] for _, layer in sel_layers(model)]
    assert len(reports) == NUM_TARGETS
    assert max(report.num_steps for report in reports) <= (12 if "family" in options else 5)
    assert_same_bits(model.merge_and_unload().state_dict(), base)


def test_damped_names_the_tensor_that_its_exponential_path_cannot_reach(real_checkpoint):
    """beta="auto" gives the heaviest tensors a curvature below 1.25."""
    with pytest.raises(SELError, match=r"beta=[01]\.\d+: model\.layers\.\d+\..*weight: .*reaches no large weight"):
        convert(real_checkpoint, torch.bfloat16, family="damped", mode="exp_only", r=0)


@pytest.mark.parametrize("beta", ["auto", pytest.param(7.5, marks=SLOW), 20.0])
@pytest.mark.parametrize("mode", ["mismatch", "congruent"])
def test_float32_is_within_the_bound(real_checkpoint, mode, beta):
    model, base = convert(real_checkpoint, torch.float32, mode=mode, beta=beta)
    exponents = {
        name: layer.symexplin_beta["default"] * layer.symexplin_raw["default"].detach().abs()
        for name, layer in sel_layers(model)
    }
    merged = model.merge_and_unload().state_dict()
    for name, exponent in exponents.items():
        distance = ulp_distance(merged[f"{name}.weight"], base[f"{name}.weight"])
        assert (distance <= 4 + 1.2 * exponent).all(), name  # SPEC section 3, Fidelity


def test_adapter_file_alone_rebuilds_the_checkpoint(real_checkpoint, tmp_path):
    model, base = convert(real_checkpoint, torch.bfloat16)
    model.save_pretrained(tmp_path)
    del model
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    betas = {name for name in tensors if name.endswith("symexplin_beta")}
    assert len(betas) == NUM_TARGETS
    for key in betas:
        path = key.removesuffix("symexplin_beta")
        scales = {
            scale: expand_parts(
                "row_col_mult", {part: tensors[f"{path}symexplin_{scale}.{part}"] for part in ("row", "column")}
            )
            for scale in SCALE_NAMES[:3]
        }
        weight = effective_weight(
            tensors[f"{path}symexplin_raw"], **scales, beta=float(tensors[key]), mode="mismatch"
        ).bfloat16()
        name = f"{path.removeprefix('base_model.model.')}weight"
        assert torch.equal(bits(weight), bits(base[name])), name


def test_oracle_agrees_with_the_converted_weights(real_checkpoint):
    model, base = convert(real_checkpoint, torch.float32)
    name, layer = next(iter(sel_layers(model)))
    config, raw = layer.sel_config["default"], layer.symexplin_raw["default"].detach()
    beta = float(layer.symexplin_beta["default"])
    weight = base[f"{name}.weight"]
    assert beta == pytest.approx(0.3 / float(weight.double().square().mean().sqrt()), rel=1e-7)
    oracle = reference.effective_weight(raw, 1 / beta, 1 / max(beta, 7.5), 1, 0, 0, beta, config.mode)
    scale = np.maximum(abs(reference.wide(weight)), np.finfo(np.float32).tiny)
    # raw inverts the float32 start values, whose products of square roots lie up to 2 ulp from 1/beta and 1/7.5
    assert (abs(oracle - reference.wide(weight)) / scale).max() <= 8 * np.finfo(np.float32).eps


def test_kept_base_is_not_what_is_used(real_checkpoint):
    model, _ = convert(real_checkpoint, torch.bfloat16)
    expected = logits(model)
    assert torch.equal(expected, logits(load(real_checkpoint, torch.bfloat16)))
    for _, layer in sel_layers(model):
        layer.base_weight.data.fill_(float("nan"))
    assert torch.equal(logits(model), expected)


def test_one_edited_raw_weight_changes_one_weight(real_checkpoint):
    model, base = convert(real_checkpoint, torch.bfloat16)
    name, layer = list(sel_layers(model))[100]
    with torch.no_grad():
        layer.symexplin_raw["default"][11, 13] += 0.5
    merged = model.merge_and_unload().state_dict()
    changed = {key: (bits(merged[key]) != bits(tensor)).nonzero().tolist() for key, tensor in base.items()}
    assert {key: where for key, where in changed.items() if where} == {f"{name}.weight": [[11, 13]]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapted_and_merged_logits_are_equal(real_checkpoint, dtype):
    model, _ = convert(real_checkpoint, dtype)
    before = logits(model)
    assert torch.equal(before, logits(copy.deepcopy(model).merge_and_unload()))
    optimizer = create_sel_optimizer(model, lr=5e-4, fused=True)
    model.train()
    losses = []
    for _ in range(4):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    after = logits(model)
    assert losses[-1] < losses[0] / 2
    assert any(bool(layer.symexplin_residual_b["default"].any()) for _, layer in sel_layers(model))
    assert torch.equal(after, logits(model.merge_and_unload(safe_merge=True)))


def test_exact_zeros_get_a_gradient(real_checkpoint):
    model, _ = convert(real_checkpoint, torch.float32, r=0)
    zeros = 0
    model(TOKENS, labels=TOKENS).loss.backward()
    for _, layer in sel_layers(model):
        raw = layer.symexplin_raw["default"]
        at_zero = raw.grad[raw == 0]
        zeros += at_zero.numel()
        assert (at_zero != 0).float().mean() > 0.99 if at_zero.numel() else True
    assert zeros > 1000


def test_reloaded_adapter_equals_the_saved_one(real_checkpoint, tmp_path):
    model, _ = convert(real_checkpoint, torch.bfloat16)
    train_steps(model)
    model.eval()
    model.save_pretrained(tmp_path)
    expected, outputs = dict(sorted(model.state_dict().items())), logits(model)
    for low_cpu_mem_usage in (False, True):
        fresh = copy.deepcopy(load(real_checkpoint, torch.bfloat16))
        loaded = PeftModel.from_pretrained(fresh, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
        assert_same_bits(dict(sorted(loaded.state_dict().items())), expected)
        assert torch.equal(logits(loaded), outputs)
    raw = torch.cat([layer.symexplin_raw["default"].detach().flatten() for _, layer in sel_layers(loaded)])
    assert raw.dtype == torch.float32
    assert (raw != raw.bfloat16().float()).float().mean() > 0.9  # full float32, not values rounded to bf16
