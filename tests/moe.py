"""Small random mixtures of experts with heavy-tailed weights, as transformers 5 lays them out, for the tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from models import make_heavy_tailed
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

from peft_sel import SELConfig
from peft_sel.experts import SELParameter

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 24, "norm_topk_prob": True}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SHARED),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", SHARED | LINEAR_ATTENTION),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", SHARED | LINEAR_ATTENTION),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]}),
}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = torch.arange(24).reshape(2, 12)


def make_moe(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Make a 2-layer mixture of 4 experts, the same one every time, with both zeros among its experts' weights."""
    config_name, model_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**SIZES, **HEADS, **EXPERTS, **own, **options})
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config)
    torch.set_rng_state(state)
    make_heavy_tailed(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter[:, 0, :2] = torch.tensor([0.0, -0.0])
    return model.to(dtype).eval()


def convert_moe(model: nn.Module, adapter: str = "default", **options: Any) -> PeftModel:
    """Convert the experts alone, with the same residual of rank 2 every time."""
    torch.manual_seed(0)
    return get_peft_model(model, make_config(**options), adapter_name=adapter)


def make_config(**options: Any) -> SELConfig:
    return SELConfig(**{"target_modules": [], "target_parameters": TARGETS, "r": 2, **options})


def parameter_layers(model: nn.Module) -> list[SELParameter]:
    return [module for module in model.modules() if isinstance(module, SELParameter)]


def first_experts(model: nn.Module) -> Any:
    """Return the module that holds the first layer's experts, or what took its place."""
    return next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.experts"))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits


@torch.no_grad()
def perturb(model: nn.Module, adapter: str = "default", seed: int = 1) -> None:
    """Move every trainable tensor of an adapter, as training would, by 3 % and its zeros a little."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".symexplin_" in name and adapter in name.split("."):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.03 * parameter.abs() + 1e-3))
