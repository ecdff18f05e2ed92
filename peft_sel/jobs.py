"""Training jobs: run a recipe from the pretrained checkpoint to the adapter and the merged checkpoint."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets.utils.logging
import huggingface_hub.utils
import torch
import transformers.utils.logging
from datasets import Dataset
from huggingface_hub import snapshot_download
from peft import PeftModel, get_peft_model
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint, has_length

from peft_sel.checkpoint import MergeReport, merge_checkpoint
from peft_sel.data import load_blocks
from peft_sel.errors import CheckpointError, OutputExistsError
from peft_sel.recipe import Recipe
from peft_sel.training import SELTrainer

CHECKPOINT_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
LOGGED = {"loss": "loss", "eval_loss": "held-out loss", "learning_rate": "learning rate", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class JobReport:
    """What a training job left behind.

    Attributes:
        adapter_dir: The saved adapter.
        eval_loss: Mean loss on the held-out blocks after training; None without any.
        merge: The merge; None if the recipe has none.
    """

    adapter_dir: Path
    eval_loss: float | None
    merge: MergeReport | None


def resolve_checkpoint(path: str, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, fetched from the hub if path is an id there.

    Args:
        path: A folder, or an id on the hub.
        revision: Branch, tag or commit on the hub.

    Returns:
        A folder with config, tokenizer and safetensors files.

    Raises:
        CheckpointError: If there is no such folder and no such id.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("~", ".", "/")) or folder.exists():
        raise CheckpointError(path, "there is no such folder", "name the folder of a checkpoint, or an id on the hub")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=CHECKPOINT_PATTERNS))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            path,
            f"is neither a folder nor to be had from the hub ({type(error).__name__})",
            "check the name and the connection",
        ) from error


def load_model(recipe: Recipe) -> PeftModel:
    """Load the pretrained model of a recipe and convert it.

    Args:
        recipe: Its sections model and sel.

    Returns:
        The converted model.

    Raises:
        SELError: If the model cannot be loaded or converted.
    """
    section = recipe.model
    folder = resolve_checkpoint(section.path, section.revision)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=section.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
            attn_implementation=section.attn_implementation,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(section.path, f"cannot be loaded ({reason})", "name another checkpoint") from error
    is_folder = Path(section.path).expanduser().is_dir()
    model.name_or_path = str(folder) if is_folder else section.path  # what the adapter remembers as its base
    with warnings.catch_warnings():
        # PEFT reads the old name of a property that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, recipe.sel, revision=section.revision)


class JobProgress(TrainerCallback):
    """Draws bars on a terminal and writes a short line per log; SEL's many figures stay in trainer_state.json."""

    def __init__(self) -> None:
        self.bars: dict[str, Any] = {}

    def _advance(self, name: str, total: int, step: int | None = None) -> None:
        if name not in self.bars:
            leave = name == "Training"
            self.bars[name] = tqdm(total=total, desc=name, disable=None, dynamic_ncols=True, leave=leave)
        self.bars[name].update(1 if step is None else step - self.bars[name].n)

    def _close(self, name: str) -> None:
        if name in self.bars:
            self.bars.pop(name).close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar of the training."""
        if state.is_world_process_zero:
            self._advance("Training", state.max_steps, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar of the training."""
        self._close("Training")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the bar of the evaluation."""
        loader = kwargs.get("eval_dataloader")
        if state.is_world_process_zero and has_length(loader):
            self._advance("Evaluating", len(loader))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation."""
        self._close("Evaluating")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write step, losses and base learning rate."""
        logs = kwargs["logs"]
        shown = [(name, logs[key]) for key, name in LOGGED.items() if key in logs]
        if state.is_world_process_zero and shown:
            figures = "  ".join(f"{name} {float(value):.4g}" for name, value in shown)
            step = f"step {state.global_step} of {state.max_steps}  " if state.max_steps else ""
            tqdm.write(f"   {step}{figures}")


def make_trainer(recipe: Recipe, model: nn.Module, train: Dataset, held_out: Dataset | None) -> SELTrainer:
    """Build the trainer of a recipe, with short logs.

    Args:
        recipe: Its section training.
        model: The converted model.
        train: Training blocks.
        held_out: Blocks for evaluation.

    Returns:
        The trainer.
    """
    trainer = SELTrainer(
        model=model,
        args=recipe.training,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        callbacks=[JobProgress()],
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


def hide_bars_outside_terminals() -> None:
    """Stop the host libraries from drawing progress bars into files and pipes."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        datasets.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


def run_job(recipe: Recipe) -> JobReport | None:
    """Train as a recipe says; under `accelerate launch` every process calls this.

    Args:
        recipe: The job. training.resume_from_checkpoint continues in its output_dir: a checkpoint folder, or true for
            the last one there.

    Returns:
        What was made: output_dir holds checkpoint-<step> folders, adapter and, with merge, merged. None on all
        processes but the first.

    Raises:
        OutputExistsError: If output_dir exists and the job does not resume.
        SELError: If the model, the text or the configuration cannot work.
    """
    resume: Any = recipe.training.resume_from_checkpoint
    adapter_dir, merged_dir = recipe.output_dir / "adapter", recipe.output_dir / "merged"
    _check_folders(recipe.output_dir, merged_dir if recipe.merge else None, resume)
    hide_bars_outside_terminals()
    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint(recipe.model.path, recipe.model.revision))
    with recipe.training.main_process_first(local=False):
        train, held_out = load_blocks(recipe.data, tokenizer)
    set_seed(recipe.training.seed)  # the residual starts at random
    model = load_model(recipe)
    with removed_if_empty(recipe.output_dir):
        trainer = make_trainer(recipe, model, train, held_out)
        trainer.train(resume_from_checkpoint=resume)
    eval_loss = trainer.evaluate()["eval_loss"] if held_out is not None else None
    trainer.save_model(str(adapter_dir))
    if not trainer.is_world_process_zero():
        return None
    merge = None
    if recipe.merge:
        base = resolve_checkpoint(recipe.model.path, recipe.model.revision)
        merge = merge_checkpoint(base, adapter_dir, merged_dir)
    return JobReport(adapter_dir, eval_loss, merge)


def _check_folders(output_dir: Path, merged_dir: Path | None, resume: Any) -> None:
    """Raise unless the output folder is free, or holds what is to be resumed."""
    if not resume and output_dir.exists():
        raise OutputExistsError(output_dir)
    if resume is True and (not output_dir.is_dir() or get_last_checkpoint(str(output_dir)) is None):
        raise CheckpointError(output_dir, "holds no checkpoint to resume from", "leave resume_from_checkpoint out")
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise CheckpointError(resume, "there is no such folder", "name a checkpoint-<step> folder of an earlier run")
    if merged_dir is not None and merged_dir.exists():
        raise OutputExistsError(merged_dir)


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Take a folder away again if the block fails before anything is written into it.

    Args:
        folder: The folder that the block fills.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
