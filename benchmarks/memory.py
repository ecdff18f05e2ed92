"""Bytes that training holds per trained weight, counted tensor by tensor: `python benchmarks/memory.py`.

Every method trains the same target weights of a bf16 checkpoint for two steps under bf16 autocast. Counted is what
lives from step to step, each storage once, divided by the number of target weights: trained parameters, optimizer
state, frozen weights and buffers of the target modules, and gradients where most of them are alive at once. Not counted
is what no method differs in (embeddings, norms) and what lives within a layer's pass (activations, bf16 copies).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig, SELLayer, create_sel_optimizer, sel_param_groups
from peft_sel.demo import prepare_checkpoint
from peft_sel.targets import DENSE_TARGETS

LEARNING_RATE = 1e-5
Made = tuple[nn.Module, list[Optimizer]]


def load_model(name: str) -> nn.Module:
    """Load the real checkpoint, or make two small layers, in bf16."""
    if name == "real":
        return AutoModelForCausalLM.from_pretrained(prepare_checkpoint(), dtype=torch.bfloat16)
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).bfloat16()


def find_targets(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that every method trains."""
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] in DENSE_TARGETS]


def make_full(model: nn.Module) -> Made:
    """Full fine-tuning with float32 master weights."""
    model.requires_grad_(False)
    for name in find_targets(model):
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(layer.weight.detach().float())
    return model, [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)]


def make_lora(model: nn.Module) -> Made:
    """LoRA of rank 32."""
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=32, target_modules=DENSE_TARGETS))
    return model, [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)]


def convert(model: nn.Module, **options: Any) -> nn.Module:
    """Convert the target weights."""
    return get_peft_model(model, SELConfig(target_modules=DENSE_TARGETS, **options))


def make_sel(optimizer_cls: Any = torch.optim.AdamW, **options: Any) -> Callable[[nn.Module], Made]:
    """SEL with some options and some optimizer."""

    def make(model: nn.Module) -> Made:
        model = convert(model, **options)
        return model, [create_sel_optimizer(model, optimizer_cls, lr=LEARNING_RATE)]

    return make


def step_and_free(parameter: Tensor, *, optimizer: Optimizer) -> None:
    """Update one parameter as soon as its gradient is complete."""
    optimizer.step()
    parameter.grad = None


def make_sel_in_backward(model: nn.Module) -> Made:
    """SEL with the optimizer in the backward pass: one for each parameter."""
    model = convert(model, base_weight="drop")
    optimizers: list[Optimizer] = []
    for group in sel_param_groups(model, LEARNING_RATE):
        for parameter in group["params"]:
            optimizers.append(torch.optim.AdamW([{**group, "params": [parameter]}]))
            parameter.register_post_accumulate_grad_hook(partial(step_and_free, optimizer=optimizers[-1]))
    return model, optimizers


def find_8bit_optimizers() -> dict[str, Any]:
    """Return the 8-bit optimizers that are installed, by package."""
    found: dict[str, Any] = {}
    try:
        import bitsandbytes

        found["bitsandbytes"] = bitsandbytes.optim.AdamW8bit
    except ImportError:
        pass
    try:
        import torchao.optim

        found["torchao"] = torchao.optim.AdamW8bit
    except ImportError:
        pass
    return found


METHODS: dict[str, Callable[[nn.Module], Made]] = {
    "full fine-tuning, float32 weights": make_full,
    "SEL, `keep`": make_sel(),
    "SEL, `cpu`": make_sel(base_weight="cpu"),
    "SEL, `drop`": make_sel(base_weight="drop"),
    "SEL, `drop`, optimizer in backward": make_sel_in_backward,
    **{
        f"SEL, `drop`, {name} AdamW8bit": make_sel(cls, base_weight="drop")
        for name, cls in find_8bit_optimizers().items()
    },
    "SEL, `train_raw=False`": make_sel(train_raw=False),
    "LoRA, rank 32": make_lora,
}


def iter_plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor is made of: a quantised one holds several."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    if not names:
        yield tensor
    for name in names:
        yield from iter_plain(getattr(tensor, name))


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors, those in one storage once."""
    plain = (part for tensor in tensors for part in iter_plain(tensor))
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in plain}.values())


def measure(make: Callable[[nn.Module], Made], model: nn.Module, batch: Tensor) -> dict[str, float]:
    """Train for two steps and count.

    Returns:
        Bytes per target weight: of trained parameters, gradients, optimizer state, frozen base weights, buffers, their
        sum ("device"), and of base weights that are in CPU memory ("cpu").
    """
    names = find_targets(model)
    num_weights = sum(model.get_submodule(name).weight.numel() for name in names)
    model, optimizers = make(model.train())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peak = 0

    def watch(_: Tensor) -> None:
        nonlocal peak
        peak = max(peak, count_bytes(p.grad for p in trained if p.grad is not None))

    for parameter in trained:  # a hook of the method's own, which frees the gradient, came first: count before it
        hooks = parameter._post_accumulate_grad_hooks or {}
        own = list(hooks.values())
        hooks.clear()
        for hook in [watch, *own]:
            parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    prefix = "base_model.model." if hasattr(model, "peft_config") else ""
    targets = [model.get_submodule(prefix + name) for name in names]
    frozen = [p for module in targets for p in module.parameters() if not p.requires_grad]
    away = [m.base_weight for m in targets if isinstance(m, SELLayer) and m.base_is_away]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    counts = {
        "trained": count_bytes(trained),
        "gradients": peak,
        "optimizer": count_bytes(value for value in states if isinstance(value, Tensor)),
        "base": count_bytes(frozen),
        "buffers": count_bytes(buffer for module in targets for buffer in module.buffers()),
    }
    counts |= {"device": sum(counts.values()), "cpu": count_bytes(away)}
    return {name: count / num_weights for name, count in counts.items()}


def make_table(rows: dict[str, dict[str, float]]) -> str:
    """Return the figures as a Markdown table."""
    columns = list(next(iter(rows.values())))
    lines = [f"| bytes per weight | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    lines += [f"| {method} | {' | '.join(f'{row[name]:.2f}' for name in columns)} |" for method, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["real", "tiny"], default="real")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/memory.json"))
    args = parser.parse_args()
    batch = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    rows = {method: measure(make, load_model(args.model), batch) for method, make in METHODS.items()}
    print(make_table(rows))
    packages = ("torch", "transformers", "peft", "peft-sel")
    versions = {name: importlib.metadata.version(name) for name in packages}
    args.out.write_text(
        json.dumps({"model": args.model, "versions": versions, "bytes_per_weight": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
