"""What is compared: the models, the ways to train them, and one training step.

Every method trains the same target modules of the same weights, under bf16 autocast, with fused AdamW and the same
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig, create_sel_optimizer
from peft_sel.conversion import invert_at_start
from peft_sel.kernels import use_backend
from peft_sel.numerics import auto_beta, effective_weight, expand_parts
from peft_sel.structured import StructuredScale
from peft_sel.targets import DENSE_TARGETS

SEQUENCE = 512  # tokens; a batch of more tokens has more sequences
LEARNING_RATE = 1e-4
SMALL_VOCABULARY = 4096

Trained = tuple[nn.Module, torch.optim.Optimizer]
Step = Callable[[Tensor], None]


class ModelChoice(NamedTuple):
    """Which model to measure.

    Attributes:
        name: "real", the demo's checkpoint, or "wide", random Qwen3 layers with a small vocabulary.
        hidden: Width of the random layers.
        layers: Their number.
    """

    name: str = "real"
    hidden: int = 2048
    layers: int = 3

    @property
    def label(self) -> str:
        """Its name in files and tables."""
        return self.name if self.name == "real" else f"{self.name}-h{self.hidden}-l{self.layers}"


def load_model(choice: ModelChoice) -> nn.Module:
    """Load the real checkpoint, or make random layers, in bf16 on the CPU."""
    if choice.name == "real":
        from peft_sel.demo import prepare_checkpoint  # which needs packages that the random layers don't

        return AutoModelForCausalLM.from_pretrained(prepare_checkpoint(), dtype=torch.bfloat16)
    heads = max(2, choice.hidden // 128)
    return make_qwen3(
        vocab_size=SMALL_VOCABULARY,
        hidden_size=choice.hidden,
        intermediate_size=3 * choice.hidden,
        num_hidden_layers=choice.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=choice.hidden // heads,
    )


def make_qwen3(device: str = "cpu", **sizes: Any) -> nn.Module:
    """Make a Qwen3 model with random weights in bf16."""
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16()


def target_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that every method trains."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in DENSE_TARGETS]


def count_target_weights(model: nn.Module) -> int:
    """Return how many weights they have."""
    return sum(layer.weight.numel() for layer in target_layers(model))


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of the peers."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


def make_full(model: nn.Module) -> Trained:
    """Full fine-tuning of the target weights, in float32."""
    model.requires_grad_(False)
    for layer in target_layers(model):
        layer.weight = nn.Parameter(layer.weight.detach().float())
    return model, make_adamw(model)


def make_sel(*, keep: bool = False, **options: Any) -> Callable[[nn.Module], Trained]:
    """SEL with some options."""

    def make(model: nn.Module) -> Trained:
        model = get_peft_model(model, SELConfig(target_modules=DENSE_TARGETS, **options))
        model.base_model.keep_effective_weights(training=keep)
        return model, create_sel_optimizer(model, lr=LEARNING_RATE, fused=True)

    return make


def make_peft(config: Any) -> Callable[[nn.Module], Trained]:
    """One of PEFT's own tuners."""

    def make(model: nn.Module) -> Trained:
        model = get_peft_model(model, config)
        return model, make_adamw(model)

    return make


class PlainFormula(nn.Module):
    """The same formula by autograd, as a parametrization: what one would write without this package."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        config = SELConfig(beta=auto_beta(weight), r=0)
        self.beta, self.mode = float(torch.tensor(config.beta)), config.mode
        scales = {
            n: StructuredScale(n, s, self.beta, weight.shape, torch.float32) for n, s in config.scale_configs().items()
        }
        self.scales = nn.ModuleDict(scales)
        self.raw, _ = invert_at_start(config, self.beta, weight, "weight")

    def forward(self, raw: Tensor) -> Tensor:
        beta = torch.tensor(self.beta)
        scales = {name: expand_parts(scale.pattern, scale.parts(beta)) for name, scale in self.scales.items()}
        with torch.autocast(raw.device.type, enabled=False):
            return effective_weight(raw, **scales, beta=self.beta, mode=self.mode).bfloat16()


def make_parametrized(model: nn.Module) -> Trained:
    """The formula by autograd."""
    model.requires_grad_(False)
    for layer in target_layers(model):
        formula = PlainFormula(layer.weight.detach())
        layer.weight = nn.Parameter(formula.raw)
        del formula.raw
        parametrize.register_parametrization(layer, "weight", formula, unsafe=True)
    return model, make_adamw(model)


LORA = {"r": 32, "lora_alpha": 32, "target_modules": DENSE_TARGETS}
METHODS: dict[str, Callable[[nn.Module], Trained]] = {
    "full": make_full,
    "sel-drop": make_sel(base_weight="drop"),
    "sel-keep": make_sel(),
    "sel-drop-kept": make_sel(keep=True, base_weight="drop"),
    "sel-no-residual": make_sel(base_weight="drop", r=0),
    "sel-reference": make_sel(base_weight="drop"),
    "sel-compiled": make_sel(base_weight="drop"),
    "sel-triton": make_sel(base_weight="drop"),
    "sel-drop-scope": make_sel(base_weight="drop"),  # inside accumulate_gradients
    "sel-scales": make_sel(train_raw=False),
    "parametrize": make_parametrized,
    "lora": make_peft(LoraConfig(**LORA)),
    "dora": make_peft(LoraConfig(**LORA, use_dora=True)),
    "osf": make_peft(OSFConfig(target_modules=DENSE_TARGETS)),
}
BACKEND_OF = {"sel-reference": "reference", "sel-compiled": "compiled", "sel-triton": "triton"}  # others: chosen
CPU_METHODS = [name for name in METHODS if name not in ("sel-triton", "sel-drop-scope")]  # Triton needs a GPU
ACCUMULATION_METHODS = ["full", "sel-drop", "sel-drop-scope"]


def force_backend(method: str) -> AbstractContextManager[None]:
    """Evaluate with the backend that a method is named after."""
    return use_backend(BACKEND_OF[method]) if method in BACKEND_OF else nullcontext()


def make_step(method: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a function that makes one optimizer step on micro-batches.

    Args:
        method: What the model was made with.
        model: The trained model, or what torch.compile makes of it.
        optimizer: Its optimizer.

    Returns:
        A function of token ids, (micro-batches, sequences, length).
    """
    model.train()
    scope = model.base_model.accumulate_gradients if method == "sel-drop-scope" else nullcontext

    def step(batches: Tensor) -> None:
        with force_backend(method), scope():
            for batch in batches:
                with torch.autocast(batch.device.type, torch.bfloat16):
                    loss = model(input_ids=batch, labels=batch).loss
                (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_batches(tokens: int, accumulate: int = 1, device: str = "cpu") -> Tensor:
    """Draw token ids of the first thousand, which every vocabulary here has: (accumulate, sequences, length)."""
    return torch.randint(0, 1000, (accumulate, max(1, tokens // SEQUENCE), min(tokens, SEQUENCE)), device=device)
