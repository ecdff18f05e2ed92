"""One run: load, train, and measure what was learned, what was forgotten and how the weights changed."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.speed.record import describe_environment, render_json
from peft_sel.demo import prepare_checkpoint
from peft_sel.logs import collect_scale_means

from .arms import METHODS, Task, Trained, draw_targets, list_targets, read_weight
from .plan import Arm, Plan, Run, Setting
from .texts import Blocks, load_blocks

SMOLLM2 = "smollm2"
DEVICE = torch.accelerator.current_accelerator() or torch.device("cpu")
BINS = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)  # of |w| / rms, for the size of changes


def load_texts(setting: Setting) -> tuple[Blocks, Blocks | None]:
    """Return the text to train on and the known one, if any."""
    checkpoint = prepare_checkpoint() if setting.model == SMOLLM2 else None
    text = load_blocks(setting.text, setting.length, checkpoint)
    return text, load_blocks(setting.known, setting.length, checkpoint) if setting.known else None


def make_model(setting: Setting, vocabulary: int, seed: int) -> nn.Module:
    """Load the checkpoint, or draw a model, in float32: in bf16 the residual stream would be bf16 too.

    From scratch every arm gets the same weights: those that SEL draws with this seed.
    """
    torch.manual_seed(seed)
    if setting.model == SMOLLM2:
        return AutoModelForCausalLM.from_pretrained(prepare_checkpoint(), dtype=torch.float32).to(DEVICE)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=False, **setting.model))
    torch.manual_seed(seed)
    return draw_targets(model).to(DEVICE)


def draw_batches(blocks: Tensor, steps: int, sequences: int, seed: int) -> Tensor:
    """Return (steps, sequences, length) of a text in an order that the seed decides, the same for every arm."""
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
    chosen = order.repeat(math.ceil(steps * sequences / len(blocks)))[: steps * sequences]
    return blocks[chosen].view(steps, sequences, -1)


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss per token of a batch under bf16 autocast."""
    batch = batch.to(DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@torch.no_grad()
def measure_losses(model: nn.Module, blocks: Tensor) -> list[float]:
    """Return the loss of each block, in nats per token."""
    model.eval()
    losses = [compute_loss(model, block[None]).item() for block in blocks]
    model.train()
    return losses


@torch.no_grad()
def describe_weights(weights: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Describe weights by role, averaged over the layers.

    Args:
        weights: By module name.

    Returns:
        By role: std; mean over std; spectral norm over std * (sqrt(d_out) + sqrt(d_in)), about 1 for noise; the
        largest size over rms; the 0.999 quantile of sizes over rms.
    """
    found: dict[str, list[list[float]]] = {}
    for name, weight in weights.items():
        value = weight.float()
        spread, rms = value.std().item(), value.square().mean().sqrt().item()
        expected = spread * (value.shape[0] ** 0.5 + value.shape[1] ** 0.5)
        sizes = value.abs().flatten()
        tail = sizes.kthvalue(math.ceil(0.999 * sizes.numel())).values.item()
        figures = [spread, value.mean().item() / spread, torch.linalg.matrix_norm(value, 2).item() / expected]
        found.setdefault(name.rpartition(".")[2], []).append([*figures, sizes.max().item() / rms, tail / rms])
    names = ("std", "mean_over_std", "spectral", "max_over_rms", "q999_over_rms")
    columns = {role: [fmean(list(column)) for column in zip(*rows, strict=True)] for role, rows in found.items()}
    return {role: dict(zip(names, values, strict=True)) for role, values in columns.items()}


@torch.no_grad()
def describe_change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float | None]]:
    """Return, by role and for each bin of |w| / rms, the rms of the change over the rms of the tensor.

    Args:
        before: Weights by module name.
        after: The same after training.

    Returns:
        A list for each role, one figure per bin of BINS, averaged over the layers; None for a bin without weights.
    """
    found: dict[str, list[list[float | None]]] = {}
    for name, old in before.items():
        rms = old.float().square().mean().sqrt()
        sizes, change = old.float().abs() / rms, (after[name].float() - old.float()) / rms
        bins = [(sizes >= low) & (sizes < high) for low, high in pairwise(BINS)]
        row = [change[chosen].square().mean().sqrt().item() if chosen.any() else None for chosen in bins]
        found.setdefault(name.rpartition(".")[2], []).append(row)
    return {role: [average_known(column) for column in zip(*rows, strict=True)] for role, rows in found.items()}


def average_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


@torch.no_grad()
def measure_scale_spread(model: nn.Module) -> dict[str, float]:
    """Return how far single factors of the scales are from where they started, which their means hide.

    Returns:
        By "<scale>/<role>": the standard deviation of the rows' or columns' factors, the larger of the two, averaged
        over the layers; divided by their mean where the scale does not start at 0.
    """
    found: dict[str, list[float]] = {}
    for path, layer in list_targets(model).items():
        for name, scale in layer.scales("default").items():
            factors = [p for p in scale.parameters() if p.numel() > 1]
            spreads = [(p.std() / (p.mean().abs() if scale.start else 1.0)).item() for p in factors]
            if spreads:
                found.setdefault(f"{name}/{path.rpartition('.')[2]}", []).append(max(spreads))
    return {key: fmean(values) for key, values in found.items()}


def read_weights(model: nn.Module, whole: bool) -> dict[str, Tensor]:
    """Copy the effective weights of the targets by name; of a large model those of the first, middle and last layer."""
    layers = list_targets(model)
    if not whole:
        numbers = sorted({int(re.findall(r"\.(\d+)\.", name)[0]) for name in layers})
        chosen = {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
        layers = {n: layer for n, layer in layers.items() if int(re.findall(r"\.(\d+)\.", n)[0]) in chosen}
    return {name: read_weight(layer).detach().clone() for name, layer in layers.items()}


def merge(model: nn.Module) -> nn.Module:
    """Return the trained model as a plain one."""
    if hasattr(model, "merge_and_unload"):
        merged: nn.Module = model.merge_and_unload()
        return merged
    for layer in list_targets(model).values():
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    return model


class Curve:
    """Held-out loss along a run, and beside it what of the weights is cheap to measure."""

    def __init__(self, setting: Setting, arm: Arm, blocks: Tensor) -> None:
        self.setting, self.arm, self.blocks = setting, arm, blocks
        self.points: list[dict[str, Any]] = []

    def add(self, step: int, trained: Trained, train_loss: float | None) -> float:
        """Measure a point and return its loss; one that is not finite, which JSON cannot hold, becomes no point."""
        loss = fmean(measure_losses(trained.model, self.blocks))
        if not math.isfinite(loss):
            return loss
        point: dict[str, Any] = {"step": step, "loss": loss}
        if train_loss is not None:
            point["train_loss"] = train_loss
        if self.arm.method == "sel":
            point["scales"] = collect_scale_means(trained.model)
            point["scale_spread"] = measure_scale_spread(trained.model)
        if self.setting.model != SMOLLM2 and self.arm.method in ("full", "sel"):
            weights = describe_weights(read_weights(trained.model, whole=True))
            keys = ("mean_over_std", "spectral")
            point["weights"] = {key: fmean([figures[key] for figures in weights.values()]) for key in keys}
        self.points.append(point)
        return loss


def train(plan: Plan, run: Run) -> dict[str, Any]:
    """Do one run.

    Args:
        plan: Its plan.
        run: Which.

    Returns:
        The result: curve, losses before and after, description and change of weights; "final" is None if the loss
        became infinite or NaN.
    """
    setting, arm = plan.setting, plan.arms[run.arm]
    steps, scratch = arm.steps or setting.steps, setting.model != SMOLLM2
    environment, started = describe_environment(), time.perf_counter()
    text, known = load_texts(setting)
    model = make_model(setting, text.vocabulary, run.seed)
    before = read_weights(model, whole=scratch)
    task = Task(run.rate, steps, max(1, round(setting.warmup_share * steps)), scratch)
    torch.manual_seed(run.seed)
    trained = METHODS[arm.method](model, task, **arm.options)
    if scratch:
        before = read_weights(trained.model, whole=True)
    tested = setting.validation_blocks + setting.test_blocks
    held_out = {
        "validation": text.held_out[: setting.validation_blocks],
        "text": text.held_out[setting.validation_blocks : tested],
    }
    if known is not None:
        held_out["known"] = known.held_out[: setting.known_blocks]
    curve = Curve(setting, arm, text.held_out[: setting.eval_blocks])
    result: dict[str, Any] = {**asdict(run), "method": arm.method, "options": arm.options, "steps": steps}
    result |= {"tokens": steps * setting.sequences * setting.length, "start": None, "final": None}
    result["texts"] = [blocks.digest for blocks in (text, known) if blocks is not None]
    result["trained_parameters"] = sum(p.numel() for p in trained.model.parameters() if p.requires_grad)
    if run.arm == plan.baseline:  # the same for every arm on the checkpoint
        result["start"] = {name: fmean(measure_losses(trained.model, blocks)) for name, blocks in held_out.items()}
    batches = draw_batches(text.train, steps, setting.sequences, run.seed)
    healthy = train_steps(trained, batches, curve, max(1, round(setting.eval_every * steps / setting.steps)))
    result["curve"] = curve.points
    if healthy:
        losses = {name: measure_losses(trained.model, blocks) for name, blocks in held_out.items()}
        result |= {"final": {name: fmean(values) for name, values in losses.items()}, "final_blocks": losses}
        after = read_weights(merge(trained.model), whole=scratch)
        result["weights"] = {"start": describe_weights(before), "end": describe_weights(after)}
        result["change"] = describe_change(before, after)
    return {**result, "seconds": time.perf_counter() - started, "environment": environment}


def train_steps(trained: Trained, batches: Tensor, curve: Curve, every: int) -> bool:
    """Train, adding points to the curve; return whether every loss of it was finite."""
    if not math.isfinite(curve.add(0, trained, None)):
        return False
    trained.model.train()
    recent: list[float] = []
    for step, batch in enumerate(batches, 1):
        loss = compute_loss(trained.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_((p for p in trained.model.parameters() if p.requires_grad), 1.0)
        trained.optimizer.step()
        trained.scheduler.step()
        trained.optimizer.zero_grad()
        recent.append(loss.item())
        if step % every == 0 or step == len(batches):
            if not math.isfinite(curve.add(step, trained, fmean(recent))):
                return False
            recent = []
    return True


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Write a result, complete or not at all, with six digits."""
    text = render_json(result, digits=6, inline=r"[\[{][^][{}]*[\]}]")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
