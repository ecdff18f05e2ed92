"""Small random models with heavy-tailed weights, and bitwise comparison, for the tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig
from peft_sel.layer import SELLayer

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TOKENS = torch.arange(24).reshape(2, 12)
NUM_TARGETS = 14  # 2 layers x (q, k, v, o, gate, up, down)


def make_heavy_tailed(model: nn.Module, seed: int = 0) -> None:
    """Multiply every weight by a log-normal factor, and plant both zeros in the 2-D ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.exp(torch.randn(parameter.shape, generator=generator)))
            if parameter.dim() == 2:
                parameter[0, :2] = torch.tensor([0.0, -0.0])


def make_tiny(family: str = "qwen2", dtype: torch.dtype = torch.float32, **options: int) -> nn.Module:
    """Make a 2-layer model of width 32, the same one every time."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config_class, model_class = FAMILIES[family]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = model_class(config_class(**{**sizes, **heads, **options}))
    torch.set_rng_state(state)
    make_heavy_tailed(model)
    return model.to(dtype).eval()


def bits(tensor: Tensor) -> Tensor:
    """View a floating-point tensor as integers, so that -0.0 and NaN compare by their bits."""
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equal names, shapes, dtypes and bits."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(bits(actual[name]), bits(tensor)), name


def clone_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return how many float32 numbers lie between two tensors of the same signs."""
    return (bits(actual).long() - bits(expected).long()).abs()


def train_steps(model: nn.Module, steps: int = 1, lr: float = 1e-2) -> None:
    """Take plain SGD steps on a fixed batch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": p} for p in parameters], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def make_config(**options: object) -> SELConfig:
    return SELConfig(**{"task_type": "CAUSAL_LM", "r": 2, **options})


def convert(model: nn.Module, **options: object) -> PeftModel:
    return get_peft_model(model, make_config(**options))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def sel_layers(model: nn.Module) -> list[SELLayer]:
    return [module for module in model.modules() if isinstance(module, SELLayer)]


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Everything that a failed call must leave alone, the bits aside."""
    parameters = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    return [name for name, _ in model.named_modules()], parameters, hasattr(model, "peft_config")
