"""Memory per rank of Qwen3 models under each strategy: `python benchmarks/ranks.py` computes a page in configs/.

Parameters are counted on the meta device, from the sizes that the models were published with; bytes per parameter are
those that benchmarks/memory.py measured. What each term stands for is said in the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig
from peft_sel.targets import DENSE_TARGETS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "configs" / "accelerate" / "README.md"
GIB = 2**30


def describe(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    """Return what Qwen3Config takes."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 151936}
    return {
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }


MODELS = {
    "Qwen3-0.6B": describe(1024, 3072, 28, 16, tied=True),
    "Qwen3-4B": describe(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": describe(4096, 12288, 36, 32, tied=False),
    "Qwen3-32B": describe(5120, 25600, 64, 64, tied=False),
}
# row of benchmarks/memory.json by the name in the page; what trains; where the base weights are
METHODS: dict[str, tuple[str, str, str]] = {
    "SEL, `keep`": ("SEL, `keep`", "sel", "device"),
    "SEL, `cpu`": ("SEL, `cpu`", "sel", "cpu"),
    "SEL, `drop`": ("SEL, `drop`", "sel", "none"),
    "SEL, `drop`, 8-bit optimizer": ("SEL, `drop`, bitsandbytes AdamW8bit", "sel", "none"),
    "SEL, `train_raw=False`": ("SEL, `train_raw=False`", "beside", "device"),
    "full fine-tuning": ("full fine-tuning, float32 weights", "raw", "none"),
    "LoRA, rank 32": ("LoRA, rank 32", "lora", "device"),
}
EIGHT_BIT, SMALL, ON_CPU = "SEL, `drop`, 8-bit optimizer", "SEL, `train_raw=False`", "SEL, `cpu`"
STRATEGIES = ("one GPU", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3")
NOT_OFFERED = {  # refused, or not tried
    "FSDP2": {EIGHT_BIT, ON_CPU},
    "ZeRO-2": {EIGHT_BIT, ON_CPU},
    "ZeRO-3": {EIGHT_BIT, ON_CPU, SMALL},
}
RANKS = (2, 4, 8)
CARDS = (24, 80, 141)
TOKENS = 4096  # of a micro-batch on each rank
HALF, FLOAT = 2, 4
CONTEXT = 1 * GIB  # CUDA's context and the libraries' workspaces: an estimate
USABLE = 0.9  # of a card; the rest is lost to the allocator: an estimate


@dataclass(frozen=True)
class Counts:
    """Numbers of elements."""

    raw: int  # converted weights: the linear layers of the blocks
    beside: int  # scales and residual of rank 8
    lora: int
    rest: int  # embeddings, head, norms
    largest: int  # of the converted weights
    table: int  # the embeddings, or the head


def build(sizes: dict[str, Any], layers: int) -> nn.Module:
    """Make a model without values."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**{**sizes, "num_hidden_layers": layers}))


def count(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements."""
    return sum(parameter.numel() for parameter in parameters)


def count_layers(sizes: dict[str, Any], layers: int) -> dict[str, int]:
    """Count a model of some blocks."""
    base = build(sizes, layers)
    targets = [module.weight for name, module in base.named_modules() if name.rpartition(".")[2] in DENSE_TARGETS]
    config = SELConfig(target_modules=DENSE_TARGETS, check_base=False)
    adapted = get_peft_model(build(sizes, layers), config, low_cpu_mem_usage=True)
    own = {name: parameter for name, parameter in adapted.named_parameters() if "symexplin_" in name}
    lora = get_peft_model(
        build(sizes, layers), LoraConfig(r=32, target_modules=DENSE_TARGETS), low_cpu_mem_usage=True
    ).named_parameters()
    raw = count(parameter for name, parameter in own.items() if "symexplin_raw" in name)
    assert raw == count(targets)
    return {
        "raw": raw,
        "beside": count(own.values()) - raw,
        "lora": count(parameter for name, parameter in lora if "lora_" in name),
        "rest": count(base.parameters()) - raw,
    }


@cache
def count_model(name: str) -> Counts:
    """Count a model: its blocks are equal, so that two tell of all."""
    sizes = MODELS[name]
    one, two = count_layers(sizes, 1), count_layers(sizes, 2)
    more = sizes["num_hidden_layers"] - 1
    total = {key: one[key] + more * (two[key] - one[key]) for key in one}
    parameters = [parameter.numel() for key, parameter in build(sizes, 1).named_parameters() if "proj" in key]
    return Counts(**total, largest=max(parameters), table=sizes["vocab_size"] * sizes["hidden_size"])


@cache
def read_measured() -> dict[str, dict[str, float]]:
    """Return what benchmarks/memory.py measured, in bytes per converted weight."""
    result: dict[str, dict[str, float]] = json.loads((ROOT / "benchmarks" / "memory.json").read_text())[
        "bytes_per_weight"
    ]
    return result


def read_deepspeed(stage: int) -> dict[str, Any]:
    """Return the ZeRO section of a configuration."""
    config: dict[str, Any] = json.loads((PAGE.parent / f"zero{stage}.json").read_text())["zero_optimization"]
    return config


def count_activations(sizes: dict[str, Any]) -> int:
    """Return elements per token: the input of each block, and what one block's linear layers read and write."""
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    attention, keys = heads * sizes["head_dim"], sizes["num_key_value_heads"] * sizes["head_dim"]
    block = (hidden + attention + 2 * keys) + (attention + hidden) + (hidden + 2 * inner) + (inner + hidden)
    return int(sizes["num_hidden_layers"] * hidden + block)


def compute_terms(model: str, method: str, strategy: str, ranks: int = 1) -> dict[str, float]:
    """Return the bytes on one rank, term by term.

    Args:
        model: Name in MODELS.
        method: Name in METHODS.
        strategy: One of STRATEGIES.
        ranks: Number of processes.
    """
    sizes, counts, measured = MODELS[model], count_model(model), read_measured()
    name, trains, place = METHODS[method]
    row = measured[name]
    kinds = {"sel": counts.raw + counts.beside, "beside": counts.beside, "raw": counts.raw, "lora": counts.lora}
    trained = kinds[trains] * measured["full fine-tuning, float32 weights"]["trained"]
    base_bytes = measured["SEL, `keep`"]["base"] - measured["SEL, `drop`"]["base"]
    split = strategy in ("FSDP2", "ZeRO-3")
    wide = FLOAT / HALF if strategy == "ZeRO-3" else 1  # it reads the base in float32
    terms = {
        "base weights": counts.raw * base_bytes * wide if place == "device" else 0.0,
        "embeddings, head and norms": counts.rest * HALF * wide,
        "trained": trained,
        "gradients": trained * row["gradients"] / row["trained"],
        "optimizer": trained * row["optimizer"] / row["trained"],
    }
    layers = sizes["num_hidden_layers"]
    block = (terms["base weights"] + terms["trained"]) / layers
    whole_rest = terms["embeddings, head and norms"]
    for key in terms:
        if split or (strategy == "ZeRO-2" and key in ("gradients", "optimizer")):
            terms[key] /= ranks
    gathered = copies = 0.0
    if strategy == "DDP":
        copies = terms["gradients"]
    elif strategy == "FSDP2":
        gathered = 2 * block + trained / layers + whole_rest
    elif strategy == "ZeRO-2":
        copies = trained / ranks + read_deepspeed(2)["reduce_bucket_size"] * FLOAT
    elif strategy == "ZeRO-3":
        config = read_deepspeed(3)
        copies = config["reduce_bucket_size"] * FLOAT
        live = config["stage3_max_live_parameters"] + config["stage3_prefetch_bucket_size"]
        gathered = (live + counts.table) * FLOAT
    layer = 0.0 if trains == "lora" else counts.largest * (HALF * wide + 2 * HALF)
    terms["tables"] = counts.raw * row["buffers"] if method == SMALL else 0.0
    terms |= {"copies and buckets": copies, "gathered": gathered, "one layer's weight and its gradient": layer}
    terms["activations"] = TOKENS * count_activations(sizes) * HALF * wide
    terms["logits"] = TOKENS * sizes["vocab_size"] * (HALF + FLOAT + FLOAT)
    terms["context"] = CONTEXT
    return terms


def compute_total(model: str, method: str, strategy: str, ranks: int = 1) -> float | None:
    """Return the bytes on one rank; None for what is refused or was not tried."""
    if method in NOT_OFFERED.get(strategy, ()):
        return None
    return sum(compute_terms(model, method, strategy, ranks).values())


def show(size: float | None) -> str:
    """Write bytes in GiB."""
    return "-" if size is None else f"{size / GIB:.1f}"


def make_table(model: str) -> str:
    """Return the figures of a model."""
    counts = count_model(model)
    columns = ["one GPU", "DDP", *(f"{strategy} x{n}" for strategy in STRATEGIES[2:] for n in RANKS)]
    lines = [
        f"### {model}",
        "",
        f"{counts.raw + counts.rest:,} parameters, of which {counts.raw:,} are converted; scales and residual add\n"
        f"{counts.beside:,}; LoRA of rank 32 has {counts.lora:,}.",
        "",
        f"| GiB per rank | {' | '.join(columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for method in METHODS:
        totals = [compute_total(model, method, strategy) for strategy in STRATEGIES[:2]]
        totals += [compute_total(model, method, strategy, n) for strategy in STRATEGIES[2:] for n in RANKS]
        lines.append(f"| {method} | {' | '.join(map(show, totals))} |")
    return "\n".join(lines)


def find_setting(model: str, method: str, card: int) -> str:
    """Return the simplest setting that fits a card: one GPU, else the fewest ranks."""
    room = card * GIB * USABLE

    def fits(strategy: str, ranks: int) -> bool:
        total = compute_total(model, method, strategy, ranks)
        return total is not None and total <= room

    if fits("one GPU", 1):
        return "1 GPU; more: `ddp.yaml`" if fits("DDP", 2) else "1 GPU"
    for ranks in RANKS:
        for strategy, file in (("FSDP2", "fsdp2"), ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3")):
            if fits(strategy, ranks):
                return f"{ranks} GPUs, `{file}.yaml`"
    return "-"


def make_fits() -> str:
    """Return the table of what fits."""
    lines = [f"| model | method | {' | '.join(f'{card} GiB' for card in CARDS)} |", "| --- | --- |" + " --- |" * 3]
    for model in MODELS:
        for method in METHODS:
            cells = " | ".join(find_setting(model, method, card) for card in CARDS)
            lines.append(f"| {model} | {method} | {cells} |")
    return "\n".join(lines)


def make_example() -> str:
    """Return all terms of some settings."""
    chosen = [("one GPU", 1), ("DDP", 8), ("FSDP2", 8), ("ZeRO-2", 8), ("ZeRO-3", 8)]
    columns = [compute_terms("Qwen3-8B", "SEL, `drop`", *setting) for setting in chosen]
    heads = " | ".join(name if n == 1 else f"{name} x{n}" for name, n in chosen)
    lines = [f"| GiB, Qwen3-8B, SEL, `drop` | {heads} |", "| --- |" + " --- |" * len(chosen)]
    lines += [f"| {term} | {' | '.join(show(column[term]) for column in columns)} |" for term in columns[0]]
    return "\n".join([*lines, f"| **sum** | {' | '.join(show(sum(column.values())) for column in columns)} |"])


def make_page() -> str:
    """Return the page."""
    row = read_measured()["SEL, `drop`, bitsandbytes AdamW8bit"]
    ratio, vocabulary = row["optimizer"] / row["trained"], MODELS["Qwen3-8B"]["vocab_size"]
    bucket, zero3 = read_deepspeed(2)["reduce_bucket_size"], read_deepspeed(3)
    live, ahead = zero3["stage3_max_live_parameters"], zero3["stage3_prefetch_bucket_size"]
    tables = "\n\n".join(map(make_table, MODELS))
    return f"""# From one GPU to many

`benchmarks/ranks.py` computes this page: parameters counted on the meta device, bytes per parameter as
`benchmarks/memory.py` measured them. **No GPU has run it.** Activations, logits, CUDA's context ({CONTEXT // GIB} GiB)
and what the allocator loses (a tenth of the card) are estimates; try before you rent.

## Which configuration

The simplest setting that fits, for {TOKENS:,} tokens per rank and micro-batch with gradient checkpointing; "-" where
none of up to {RANKS[-1]} GPUs does, or where the method is not offered beyond what one GPU holds. Full fine-tuning
trains the same weights, in float32.

{make_fits()}

- One GPU: `peft-sel train RECIPE.yaml`. `ddp.yaml`: the same on several, each with a batch of its own.
- `fsdp2.yaml` splits everything, trained or frozen; `zero2.yaml` and `zero3.yaml` are DeepSpeed's ways, for jobs that
  are built on it. Their headers say what was tested.
- Use `base_weight: drop` unless the run needs the base (`disable_adapter`, DPO's reference): 2 bytes less per weight.

## The arithmetic

Each converted weight has a raw weight of 4 bytes, and scales and a residual of rank 8 beside it, 4 bytes per element.
What trains has a gradient of its size and AdamW's two moments, twice its size; those of 8 bits were measured at
{ratio:.3f} of it. The base weights, and embeddings, head and norms, which do not train, are bf16, 2 bytes; `cpu` holds
those of the base in CPU memory, 2 bytes per weight in every process. `train_raw=False` has tables for its raw weights.
On top of that:

- **DDP**: everything whole, and the buckets that gradients are reduced in, as big as these.
- **FSDP2** divides parameters, gradients and moments by the number of ranks. Gathered are two blocks (one that runs,
  one that comes next), the gradients of one, and embeddings, head and norms.
- **ZeRO-2** divides gradients and moments. DeepSpeed steps on a float32 copy of what trains, divided too, and reduces
  in a bucket of {bucket:,} elements.
- **ZeRO-3** divides all, and needs no such copy, but reads the base, embeddings, head and norms in float32. Gathered
  are up to {live:,} elements that stay for their next use, {ahead:,} that come next, and the embeddings or the
  head. The residual stream is float32 as well, so that activations take twice the bytes. `keep` costs 4 bytes per
  weight, divided.
- **One layer's weight and its gradient**: the largest converted layer as the base has it, in bf16, and its gradient in
  bf16; both passes compute the weight when they need it.
- **Activations**: the input of each block, and what the linear layers of one block read and write, in bf16.
- **Logits**: in bf16, in float32, and their gradient in float32: 10 bytes for each of {vocabulary:,} tokens at each
  position.

The sum is an upper bound: logits are at their largest while there are few gradients yet.

{make_example()}

## All figures

"x4" is on 4 ranks; DDP needs the same on any number. "-" is refused (`cpu` under FSDP2 and ZeRO-3, `train_raw=False`
under ZeRO-3) or was not tried.

{tables}
"""


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
