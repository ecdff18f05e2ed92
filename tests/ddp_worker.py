"""Training runs for tests/test_ddp.py: in one process when it calls them, in two when it launches this file.

    launch("tests/ddp_worker.py", "compare", FOLDER)   # every run; process 0 writes report.json and the merged weights
    launch("tests/ddp_worker.py", "killed", FOLDER, MOMENT, succeeds=False)   # the run "straight", killed or resumed

A run sees the same global batches in any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from models import make_tiny
from peft import PeftModel, get_peft_model
from processes import kill_rank
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from peft_sel import ScaleConfig, SELConfig, SELTrainer, create_sel_optimizer, create_sel_scheduler

STEPS, FEW_STEPS, KILLED_STEPS = 20, 5, 10
ROWS, MICRO_BATCHES = 4, 2  # rows of a micro-batch in all processes together
LR, WARMUP = 2e-3, 3
OPTIONS: dict[str, Any] = {
    "exp_scale": ScaleConfig(lr_mult=20.0, lr_mult_end=4.0),
    "inner_multiplier": ScaleConfig(lr_mult=0.01, lr_mult_end=0.5),
    "anneal_steps": 12,
    "r": 2,
}
KNOWS_NEW_NAME = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if KNOWS_NEW_NAME else "gradient_checkpointing"


def make_dense(**options: Any) -> PeftModel:
    return get_peft_model(make_tiny(), SELConfig(task_type="CAUSAL_LM", **{**OPTIONS, **options}))


def make_biased(**options: Any) -> PeftModel:
    base = make_tiny()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):  # 0 so far; large ones would saturate the attention, whose gradients are then noise
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return get_peft_model(base, SELConfig(task_type="CAUSAL_LM", bias="sel_only", **OPTIONS, **options))


MODELS: dict[str, Callable[[], PeftModel]] = {
    "dense": make_dense,
    "scales only": lambda: make_dense(train_raw=False),
    "dropped base": lambda: make_dense(base_weight="drop"),
    "biases": make_biased,
    "biases, dropped base": lambda: make_biased(base_weight="drop"),
    "experts": lambda: get_peft_model(moe.make_moe(), moe.make_config(**OPTIONS)),
}


LOOPS = ("dense", "scales only", "dropped base", "biases", "experts")


@dataclass(frozen=True)
class Variant:
    """How a loop runs; most change nothing at all."""

    ddp: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = MICRO_BATCHES
    reentrant: bool | None = None  # gradient checkpointing
    precision: str = "no"
    steps_scheduler: bool = True  # or Accelerate does
    reloads: Path | None = None  # where a state is saved after the second step, and loaded again


@dataclass
class Run:
    """What a run gave.

    Attributes:
        losses: Per step, over all processes.
        rates: Learning rates by role, per step.
        differing: Tensors that were not the same bits in all processes, by moment.
        merged: The merged weights.
        broadcasts: Whether DDP sends the buffers in each pass.
    """

    losses: list[float]
    rates: list[dict[str, float]]
    differing: dict[str, list[str]]
    merged: dict[str, Tensor]
    broadcasts: bool = False


def make_rows(count: int, length: int = 12) -> list[dict[str, Tensor]]:
    """Make rows that can be learned, none like another."""
    generator = torch.Generator().manual_seed(7)
    picks = torch.randint(96, (count, 2), generator=generator)
    rows = [(first + (1 + slope % 5) * torch.arange(length)) % 96 for first, slope in picks]
    return [{"input_ids": row, "labels": row} for row in rows]


def digest(model: nn.Module) -> dict[str, str]:
    """Return a hash of the bits of every parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for name, tensor in named
    }


def list_differing(model: nn.Module) -> list[str]:
    """Return which tensors are not the same bits in all processes."""
    first, *others = gather_object([digest(model)])
    return sorted({name for other in others for name in first if first[name] != other[name]})


def merge(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a merged model, each in memory of its own."""
    return {name: tensor.clone().contiguous() for name, tensor in model.merge_and_unload().state_dict().items()}


def run_loop(make: Callable[[], PeftModel], steps: int = STEPS, variant: Variant | None = None) -> Run:
    """Train in a plain Accelerate loop."""
    variant = variant or Variant()
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=variant.micro_batches,
        mixed_precision=variant.precision,
        kwargs_handlers=[DistributedDataParallelKwargs(**variant.ddp)],
        step_scheduler_with_optimizer=not variant.steps_scheduler,
    )
    torch.manual_seed(accelerator.process_index)  # the residuals start apart: wrapping has to make them equal
    model = make()
    differing = {"converted": list_differing(model)}
    if variant.reentrant is not None:
        model.enable_input_require_grads()
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": variant.reentrant})
    optimizer = create_sel_optimizer(model, lr=LR)
    factor = 1 if variant.steps_scheduler else accelerator.num_processes
    scheduler = create_sel_scheduler(optimizer, "cosine", WARMUP * factor, steps * factor)
    rows = make_rows(steps * variant.micro_batches * ROWS)
    loader = DataLoader(rows, batch_size=ROWS // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    bare = accelerator.unwrap_model(model)
    differing["wrapped"] = list_differing(bare)
    model.train()
    losses: list[list[float]] = [[]]
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                rates.append({group["role"]: group["lr"] for group in optimizer.param_groups})
            optimizer.step()
            if accelerator.sync_gradients or not variant.steps_scheduler:
                scheduler.step()
            optimizer.zero_grad()
        losses[-1].append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            if variant.reloads is not None and len(losses) == 2:
                reload(accelerator, bare, variant.reloads)
            losses.append([])
    differing["trained"] = list_differing(bare)
    return Run([sum(step) / len(step) for step in losses[:-1]], rates, differing, merge(bare))


def reload(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Save the state, spoil the parameters, and load the state."""
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()  # process 0 writes what all of them read
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.37)
    accelerator.load_state(str(folder))


def make_trainer(make: Callable[[], PeftModel], folder: Path, steps: int = STEPS, **options: Any) -> SELTrainer:
    """Make a SELTrainer whose processes start with other residuals."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = make()
    arguments = {
        "max_steps": steps,
        "per_device_train_batch_size": ROWS // accelerator.num_processes,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "learning_rate": LR,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    rows = make_rows(STEPS * MICRO_BATCHES * ROWS)
    trainer = SELTrainer(
        model, TrainingArguments(str(folder), **{**arguments, **options}), train_dataset=rows, eval_dataset=rows[:4]
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_trainer(make: Callable[[], PeftModel], folder: Path, steps: int = STEPS, **options: Any) -> Run:
    """Train with SELTrainer."""
    trainer = make_trainer(make, folder, steps, **options)
    model = trainer.model
    differing = {"converted": list_differing(model)}
    trainer.train()
    differing["trained"] = list_differing(model)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    rates = [{key: rate for key, rate in log.items() if key.startswith("sel/lr/")} for log in logs]
    wrapped: Any = trainer.model_wrapped
    broadcasts = isinstance(wrapped, DistributedDataParallel) and wrapped.will_sync_module_buffers()
    return Run([log["loss"] for log in logs], rates, differing, merge(model), broadcasts)


def list_variants(folder: Path) -> dict[str, dict[str, Variant]]:
    """Return variants of the dense loop, by the name of the one that the others have to match bit for bit."""
    views = {"gradient_as_bucket_view": True}
    return {
        "plain": {
            "plain": Variant(),
            "bucket views": Variant({**views, "bucket_cap_mb": 0.01}),  # many buckets
            "reentrant": Variant(reentrant=True),
            "not reentrant": Variant(views, reentrant=False),
            "reloaded": Variant(reloads=folder / "state"),
        },
        "one micro-batch": {  # torch has no static graph with no_sync
            "one micro-batch": Variant(micro_batches=1),
            "static graph": Variant({"static_graph": True}, micro_batches=1),
            "static, reentrant": Variant({"static_graph": True, **views}, micro_batches=1, reentrant=True),
        },
        "bf16": {"bf16": Variant(precision="bf16")},
    }


TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SELTrainer": ("dense", {}),
    "SELTrainer, scales only": ("scales only", {}),
    "SELTrainer, biases, dropped base": ("biases, dropped base", {}),
    "SELTrainer, experts": ("experts", {}),
    "SELTrainer, reentrant": (
        "dense",
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}, "steps": FEW_STEPS},
    ),
}
SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "save_total_limit": 2,
}


def compare(folder: Path) -> None:
    """Do every run, and write down what each gave."""
    runs = {name: run_loop(MODELS[name]) for name in LOOPS}
    runs["scheduler of Accelerate"] = run_loop(
        lambda: make_dense(anneal_steps=12 / STEPS), variant=Variant(steps_scheduler=False)
    )
    for variants in list_variants(folder).values():
        runs |= {name: run_loop(make_dense, FEW_STEPS, variant) for name, variant in variants.items()}
    for name, (model, options) in TRAINERS.items():
        runs[name] = run_trainer(MODELS[model], folder / "unused", **options)
    runs["straight"] = run_trainer(make_dense, folder / "straight", KILLED_STEPS, **SAVING)
    if int(os.environ["RANK"]) == 0:
        for name, run in runs.items():
            save_file(run.merged, folder / f"{name}.safetensors")
        report = {name: {**vars(run), "merged": None} for name, run in runs.items()}
        (folder / "report.json").write_text(json.dumps(report))


class Killer(TrainerCallback):
    """Kills process 1 in the middle of step 6, or process 0 in the middle of a file of checkpoint-8."""

    def __init__(self, moment: str) -> None:
        self.moment, self.save = moment, torch.save
        torch.save = self.write

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.moment == "step" and state.global_step == 5:
            kill_rank(1)

    def write(self, value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Stand for torch.save."""
        if self.moment == "checkpoint" and ".checkpoint-8." in str(file):
            Path(file).write_bytes(b"half")
            kill_rank(0)
        self.save(value, file, *args, **kwargs)


def train_killed(folder: Path, moment: str) -> None:
    """Train as the run "straight" of compare does, from the last checkpoint that is there; be killed at a moment."""
    run = folder / "killed"
    run.mkdir(exist_ok=True)
    last = get_last_checkpoint(str(run))
    trainer = make_trainer(make_dense, run, KILLED_STEPS, **SAVING)
    trainer.add_callback(Killer(moment))
    print(f"process {os.environ['RANK']} starts from {last and Path(last).name}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    merged = merge(trainer.model)
    if int(os.environ["RANK"]) == 0:
        save_file(merged, folder / "killed.safetensors")
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        (folder / "killed.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    warnings.simplefilter("error" if sys.argv[1] == "compare" else "default")  # a resumed run says what it removes
    {"compare": compare, "killed": train_killed}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    torch.distributed.destroy_process_group()  # threads of one that is still there can abort a process that ends
