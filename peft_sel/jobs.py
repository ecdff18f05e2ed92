"""Training jobs: run a recipe from the checkpoint, or from random weights, to the adapter and the merged checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets.utils.logging
import huggingface_hub.utils
import transformers.utils.logging
from datasets import Dataset
from torch import nn
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, has_length

from peft_sel.checkpoint import MergeReport, check_mergeable, merge_checkpoint
from peft_sel.data import load_blocks
from peft_sel.errors import CheckpointError, ConfigError, OutputExistsError
from peft_sel.origins import load_model, load_tokenizer, resolve_checkpoint, write_random_model
from peft_sel.recipe import BASE_FOLDER, Recipe
from peft_sel.streams import BlockStream
from peft_sel.training import SELTrainer

MARKS_FILE = "stream_marks.jsonl"  # in output_dir, for resuming a job that streams its text
BASE_SEED = 1_000_003  # keeps the random model's numbers apart from those that the conversion draws
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

    on_train_begin = on_step_end  # the first step may take long

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


class StreamEntry(TrainerCallback):
    """Tells a stream how many blocks Trainer will discard when it resumes.

    Args:
        trainer: The trainer.
        stream: Its training blocks.
    """

    def __init__(self, trainer: SELTrainer, stream: BlockStream) -> None:
        self.trainer, self.stream = trainer, stream

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the blocks of the steps that are done, by the batch size of this run: so does Trainer."""
        blocks = self.trainer.get_total_train_batch_size(args)  # of an optimizer step, of all processes
        if getattr(args.accelerator_config, "split_batches", False):
            blocks = self.trainer._train_batch_size * args.gradient_accumulation_steps
        skips = (
            not args.ignore_data_skip and state.global_step < state.max_steps
        )  # else Trainer starts at the first block
        self.stream.discard(state.global_step * blocks if skips else 0)


def make_trainer(
    recipe: Recipe, model: nn.Module, train: Dataset | BlockStream, held_out: Dataset | None
) -> SELTrainer:
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
    if isinstance(train, BlockStream):
        train.keep_marks(recipe.output_dir / MARKS_FILE, writes=recipe.training.should_save)
        trainer.add_callback(StreamEntry(trainer, train))
    return trainer


def hide_bars_outside_terminals() -> None:
    """Stop the host libraries from drawing progress bars into files and pipes."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
        datasets.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()


def run_job(recipe: Recipe) -> JobReport | None:
    """Train as a recipe says; under `accelerate launch` every process calls this, and returns when all is written.

    Their process group, which load_recipe starts, is left to the caller to destroy, as `peft-sel train` does.

    Args:
        recipe: The job. training.resume_from_checkpoint continues in its output_dir: a checkpoint folder, or true for
            the last one there.

    Returns:
        What was made: output_dir holds checkpoint-<step> folders, adapter, with merge merged, and the model of random
        weights, if it started from one, as base. None on all processes but the first.

    Raises:
        ConfigError: If several processes were launched, and each would do the whole job.
        OutputExistsError: If output_dir exists and the job does not resume.
        SELError: If the model, the text or the configuration cannot work.
    """
    _check_processes(recipe.training.world_size)
    resume: Any = recipe.training.resume_from_checkpoint
    adapter_dir, merged_dir = recipe.output_dir / "adapter", recipe.output_dir / "merged"
    _check_folders(recipe.output_dir, merged_dir if recipe.merge else None, resume)
    hide_bars_outside_terminals()
    tokenizer = load_tokenizer(recipe.model)
    if recipe.merge and recipe.model.config is None:
        check_mergeable(resolve_checkpoint(recipe.model.path, recipe.model.revision))
    with recipe.training.main_process_first(local=False):
        train, held_out = load_blocks(recipe.data, tokenizer)
    with removed_if_empty(recipe.output_dir):
        with recipe.training.main_process_first(local=False):
            if recipe.model.config is not None and not Path(recipe.model.path).is_dir():
                set_seed(recipe.training.seed + BASE_SEED)
                write_random_model(recipe.model, tokenizer)
        set_seed(recipe.training.seed)  # the residual starts at random, and so do targets that are drawn
        model = load_model(recipe)
        trainer = make_trainer(recipe, model, train, held_out)
        trainer.train(resume_from_checkpoint=resume)
    eval_loss = trainer.evaluate()["eval_loss"] if held_out is not None else None
    trainer.save_state()  # the logs, which peft-sel plot reads: without checkpoints they would be in no file
    trainer.save_model(str(adapter_dir))
    merge, is_first = None, trainer.is_world_process_zero()
    with recipe.training.main_process_first(local=False):  # a launcher kills the rest if one ends badly before
        if recipe.merge and is_first:
            base = resolve_checkpoint(recipe.model.path, recipe.model.revision)
            merge = merge_checkpoint(base, adapter_dir, merged_dir)
    return JobReport(adapter_dir, eval_loss, merge) if is_first else None


def _check_processes(world_size: int) -> None:
    """Raise if this is one of several processes that know nothing of each other and would write the same files."""
    launched = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if int(launched) > world_size:
        raise ConfigError(
            "LOCAL_WORLD_SIZE",
            launched,
            f"so many processes were launched, and each would do the whole job in {world_size} process; where there is "
            "no GPU set training.use_cpu: true",
        )


def _check_folders(output_dir: Path, merged_dir: Path | None, resume: Any) -> None:
    """Raise unless the output folder is free, or holds what is to be resumed."""
    if not resume and output_dir.exists():
        raise OutputExistsError(output_dir)
    if resume is True and (not output_dir.is_dir() or get_last_checkpoint(str(output_dir)) is None):
        way_out = f"{'remove the folder or name another, and ' * output_dir.exists()}leave resume_from_checkpoint out"
        raise CheckpointError(output_dir, "holds no checkpoint to resume from", way_out)
    if isinstance(resume, str):
        folder, way_out = Path(resume), "name a checkpoint-<step> folder of an earlier run"
        if not folder.is_dir():
            raise CheckpointError(resume, "there is no such folder", way_out)
        last = get_last_checkpoint(resume)
        is_run = last is not None or (folder / "adapter").is_dir()  # which has a trainer_state.json, too
        if is_run or not (folder / TRAINER_STATE_NAME).is_file():
            raise CheckpointError(resume, "is no checkpoint of a training", f"name {last}" if last else way_out)
    if merged_dir is not None and merged_dir.exists():
        raise OutputExistsError(merged_dir)


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Take a folder away again if the block fails before more than the random model and marks is written into it.

    Args:
        folder: The folder that the block fills.
    """
    try:
        yield
    except BaseException:
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= {BASE_FOLDER, MARKS_FILE}:
            shutil.rmtree(folder / BASE_FOLDER, ignore_errors=True)
            (folder / MARKS_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
