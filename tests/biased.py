"""Small models with large biases, and their adapters, for the tests of bias="sel_only"."""

from __future__ import annotations

from pathlib import Path

import torch
from models import make_tiny
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from peft_sel import SELConfig

TOKENS = torch.arange(24).reshape(2, 12)
OUTLIERS = (200.0, -200.0, 0.0, -0.0, 1e-3)


def plant_biases(model: nn.Module) -> nn.Module:
    """Give biases a standard deviation of 10, outliers of 200 and both zeros, as Qwen2's have."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                values = 10 * torch.randn(parameter.shape, generator=generator)
                values[: len(OUTLIERS)] = torch.tensor(OUTLIERS)[: len(values)]
                parameter.copy_(values)
    return model


def make_biased(family: str = "qwen2", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a 2-layer model whose biases are large: qwen2 (biases on q, k, v) or gpt2 (on all, transformers' Conv1D)."""
    if family == "qwen2":
        return plant_biases(make_tiny("qwen2", dtype))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    return plant_biases(model).to(dtype).eval()


def convert(model: nn.Module, **options: object) -> PeftModel:
    """Convert with biases; gpt2's attention only."""
    gpt2 = isinstance(model, GPT2LMHeadModel)
    targets = {"target_modules": ["c_attn", "c_fc"]} if gpt2 else {}
    return get_peft_model(model, SELConfig(**{"task_type": "CAUSAL_LM", "bias": "sel_only", **targets, **options}))


@torch.no_grad()
def perturb(model: nn.Module, adapter: str = "default", seed: int = 1) -> None:
    """Move every trained tensor of an adapter by some percent, the same way every time."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".symexplin_" in name and f".{adapter}" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter * (1 + 0.05 * noise) + (0.01 * noise if "residual" in name else 0))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def load_base(folder: Path, name: str = "base") -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").eval()


def save_pair(folder: Path, kind: str = "qwen2", dtype: torch.dtype = torch.bfloat16, **options: object) -> PeftModel:
    """Save a base checkpoint and a perturbed adapter of it beside; return the adapted model."""
    make_biased(kind, dtype).save_pretrained(folder / "base")
    model = convert(load_base(folder), **options)  # whose rotary embedding is float32, unlike that of model.to(dtype)
    perturb(model)
    model.save_pretrained(folder / "adapter")
    return model.eval()
