"""What a training step costs beside its peers, in time and in memory, measured in one run: `make bench`.

Methods take turns, so that whatever else the machine does meets all of them; times are ratios to full fine-tuning of
the same weights in the same round, and the table gives their median and quartiles. Peak memory is that of a process of
its own for each method. Every method trains the same target modules of the same real checkpoint, under bf16 autocast,
with fused AdamW and the same attention.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig, create_sel_optimizer
from peft_sel.conversion import invert_at_start
from peft_sel.demo import prepare_checkpoint
from peft_sel.kernels import use_backend
from peft_sel.numerics import auto_beta, effective_weight, expand_parts
from peft_sel.structured import StructuredScale
from peft_sel.targets import DENSE_TARGETS

SEQUENCE = 512  # tokens; a step of more tokens has more sequences
LEARNING_RATE = 1e-4
Step = Callable[[Tensor], None]


def load_model(name: str) -> nn.Module:
    """Load the real checkpoint, or make a wide stack of Qwen3 layers with random weights."""
    if name == "real":
        return AutoModelForCausalLM.from_pretrained(prepare_checkpoint(), dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 3}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=16, num_key_value_heads=8)).bfloat16()


def target_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that every method trains."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in DENSE_TARGETS]


def make_full(model: nn.Module) -> tuple[nn.Module, Any]:
    """Full fine-tuning of the target weights, in float32."""
    model.requires_grad_(False)
    for layer in target_layers(model):
        layer.weight = nn.Parameter(layer.weight.detach().float())
    return model, make_adamw(model)


def make_sel(*, keep: bool = False, **options: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """SEL with some options."""

    def make(model: nn.Module) -> tuple[nn.Module, Any]:
        model = get_peft_model(model, SELConfig(target_modules=DENSE_TARGETS, **options))
        model.base_model.keep_effective_weights(training=keep)
        return model, create_sel_optimizer(model, lr=LEARNING_RATE, fused=True)

    return make


def make_peft(config: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    """One of PEFT's own tuners."""

    def make(model: nn.Module) -> tuple[nn.Module, Any]:
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


def make_parametrized(model: nn.Module) -> tuple[nn.Module, Any]:
    """The formula by autograd."""
    model.requires_grad_(False)
    for layer in target_layers(model):
        formula = PlainFormula(layer.weight.detach())
        layer.weight = nn.Parameter(formula.raw)
        del formula.raw
        parametrize.register_parametrization(layer, "weight", formula, unsafe=True)
    return model, make_adamw(model)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of the peers."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


LORA = {"r": 32, "lora_alpha": 32, "target_modules": DENSE_TARGETS}
METHODS: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    "full": make_full,
    "sel-drop": make_sel(base_weight="drop"),
    "sel-keep": make_sel(),
    "sel-drop-kept": make_sel(keep=True, base_weight="drop"),
    "sel-no-residual": make_sel(base_weight="drop", r=0),
    "sel-reference": make_sel(base_weight="drop"),
    "sel-scales": make_sel(train_raw=False),
    "parametrize": make_parametrized,
    "lora": make_peft(LoraConfig(**LORA)),
    "dora": make_peft(LoraConfig(**LORA, use_dora=True)),
    "osf": make_peft(OSFConfig(target_modules=DENSE_TARGETS)),
}


def make_step(method: str, model_name: str) -> Step:
    """Return a function that makes one training step on a batch."""
    model, optimizer = METHODS[method](load_model(model_name))
    model.train()

    def step(batch: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_by_reference(batch: Tensor) -> None:
        with use_backend("reference"):
            step(batch)

    return step_by_reference if method == "sel-reference" else step


def make_batch(tokens: int) -> Tensor:
    """Draw token ids of the first thousand, which every vocabulary here has."""
    return torch.randint(0, 1000, (max(1, tokens // SEQUENCE), min(tokens, SEQUENCE)))


def measure_times(methods: list[str], model_name: str, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Time steps of each method in turn, after two to warm up.

    Returns:
        Seconds per step, one per round.
    """
    batch = make_batch(tokens)
    steps = {method: make_step(method, model_name) for method in methods}
    for step in steps.values():
        step(batch)
        step(batch)
    times: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, step in steps.items():
            start = time.perf_counter()
            step(batch)
            times[method].append(time.perf_counter() - start)
    return times


def measure_peak_bytes(method: str, model_name: str, tokens: int) -> int:
    """Return the peak memory of a process that makes three steps with one method."""
    command = [sys.executable, __file__, "--peak-of", method, "--model", model_name, "--tokens", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_own_peak(method: str, model_name: str, tokens: int) -> None:
    """Make three steps and print this process's peak of resident memory in bytes."""
    step, batch = make_step(method, model_name), make_batch(tokens)
    for _ in range(3):
        step(batch)
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def summarize(times: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return each method's figures, ratios to the first method's."""
    first = next(iter(times))
    rows = {}
    for method, seconds in times.items():
        ratios = [mine / base for mine, base in zip(seconds, times[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[method] = {
            "step_s": statistics.median(seconds),
            "time_ratio": middle,
            "time_ratio_low": low,
            "time_ratio_high": high,
            "peak_gib": peaks[method] / 2**30,
            "memory_ratio": peaks[method] / peaks[first],
        }
    return rows


def main() -> None:
    """Parse the arguments, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["real", "wide"], default="real")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="the first is the base")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/speed.json"))
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print_own_peak(args.peak_of, args.model, args.tokens[0])
        return
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "peft-sel")}
    result: dict[str, Any] = {
        "versions": versions,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "model": args.model,
        "repeats": args.repeats,
        "steps": {},
    }
    for tokens in args.tokens:
        peaks = {method: measure_peak_bytes(method, args.model, tokens) for method in args.methods}
        rows = summarize(measure_times(args.methods, args.model, tokens, args.repeats), peaks)
        result["steps"][str(tokens)] = rows
        print(
            f"\n{tokens} tokens a step {'seconds':>12} {'time ratio (quartiles)':>26} {'GiB':>7} {'memory ratio':>13}"
        )
        for method, row in rows.items():
            quartiles = f"{row['time_ratio']:.3f} ({row['time_ratio_low']:.3f} to {row['time_ratio_high']:.3f})"
            print(
                f"{method:20} {row['step_s']:9.2f} {quartiles:>28} {row['peak_gib']:7.2f} {row['memory_ratio']:11.3f}"
            )
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
