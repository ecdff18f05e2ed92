"""Training with transformers.Trainer: SEL's groups and annealing, and logs that show them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list
from peft import PeftModel
from peft.utils import CONFIG_NAME
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from peft_sel.accumulation import Accumulation
from peft_sel.adapter_files import replaced_files
from peft_sel.checkpoint.staging import clear_leftovers, require_folder, staged_folder
from peft_sel.conversion import PREFIX
from peft_sel.errors import ConfigError, OtherProcessError
from peft_sel.layer import SELLayer
from peft_sel.logs import SELCallback
from peft_sel.optim import anneal_scheduler, sel_param_groups
from peft_sel.partitioned import copy_frozen
from peft_sel.removal import iter_sel_layers
from peft_sel.sharded import gather_adapters, is_sharded_model, write_from_first
from peft_sel.trl import check_trainer

if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object

_PRINTERS = (PrinterCallback, ProgressCallback)
_OWN_GROUPERS = ("galore", "apollo", "lomo", "adalomo")  # asked for, some leave hooks on the parameters at once
_OWN_GROUPS = ("params", "model", "optimizer_dict")  # keys by which Trainer's optimizers say that they group parameters


def check_deepspeed(plugin: Any) -> None:
    """Raise if DeepSpeed would train in 16 bits, or ZeRO-3 save no adapter.

    Args:
        plugin: Accelerate's DeepSpeedPlugin, or None without DeepSpeed.

    Raises:
        ConfigError: If so, naming the entry of its configuration.
    """
    if plugin is None:
        return
    for name in ("bf16", "fp16"):
        if str(plugin.get_value(f"{name}.enabled", False)).lower() == "true":
            reason = (
                "DeepSpeed's own mixed precision rounds what SEL trains; switch it off (bf16: false for Trainer, "
                "mixed_precision: 'no' for Accelerate) and torch_autocast on, as configs/accelerate/zero2.json does"
            )
            raise ConfigError(f"{name}.enabled", True, reason)
    entry = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if plugin.zero_stage == 3 and plugin.get_value(entry) is not True:
        raise ConfigError(
            entry, plugin.get_value(entry), "no adapter could be saved; set it to true (no dtype changes)"
        )


class SELTrainerMixin(_TrainerBase):
    """Gives a transformers Trainer class SEL's parameter groups, annealed multipliers and logs.

    Put it before the trainer class: `class SELSFTTrainer(SELTrainerMixin, SFTTrainer)`. learning_rate is the base rate,
    weight_decay applies to the roles that decay (Trainer's default is 0, the paper's value 0.01), and optim,
    optim_args, lr_scheduler_type and the warm-up mean what they mean in Trainer. An optimizer or scheduler that is
    passed in is used as it is.

    With gradient accumulation, in one process, dense adapters compute each weight once per optimizer step
    (SELModel.accumulate_gradients), for 2 bytes per weight of bf16; shares_weights = False saves these.

    In DDP, ddp_find_unused_parameters is False unless it is set: True (Trainer's default for PEFT models) is for models
    with a trained module that some batches leave out. It walks the graph in each step and breaks reentrant checkpoints.
    Where raw weights are frozen (train_raw=False), DDP sends its buffers, which hold them, once and not in each pass,
    unless ddp_broadcast_buffers is set; in a plain loop, say `model.broadcast_buffers = False` after prepare.

    On one machine a checkpoint-<step> folder appears when it is complete, and replaces one of that name in one step, so
    that a killed run never resumes from half a checkpoint. So does the folder of save_model, if it was not there.

    TRL's preference trainers use the base model as the reference (disable_adapter), or a frozen copy of an adapter that
    the model came with: 4 bytes more per weight, which merging that adapter before saves.

    Args:
        *args: The trainer's.
        **kwargs: The trainer's.

    Raises:
        DroppedBaseError: If the reference is the base model, and base_weight="drop" freed it.
        AdapterStateError: If TRL cast the adapter to bfloat16, as it does on a base of 4 or 8 bits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_trainer(self)
        self.shares_weights = True
        self._open_step: Accumulation | None = None
        self._unfinished: Path | None = None  # where a checkpoint is being written
        others = [callback for callback in self.callback_handler.callbacks if not isinstance(callback, SELCallback)]
        printers = [callback for callback in others if isinstance(callback, _PRINTERS)]
        reporters = [callback for callback in others if callback not in printers]
        self.callback_handler.callbacks = [*printers, SELCallback(), *reporters]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as Trainer does, except for what the class says of unused parameters."""
        super().create_accelerator_and_postprocess()
        if self.args.ddp_find_unused_parameters is None:
            self.accelerator.ddp_handler.find_unused_parameters = False

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Make a data loader; without an accelerator it pins no memory, as torch would only warn that it cannot."""
        loader = super()._get_dataloader(*args, **kwargs)
        if not torch.accelerator.is_available():
            getattr(loader, "base_dataloader", loader).pin_memory = False  # accelerate's holds the one that is read
        return loader

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer that args.optim names, over sel_param_groups.

        Args:
            model: The model to train; self.model by default.

        Returns:
            The optimizer, also kept as self.optimizer.

        Raises:
            ConfigError: If the optimizer makes its own parameter groups (GaLore, LOMO, ...), or lr is not positive.
            ParameterGroupError: If no SEL parameter is trainable.
        """
        arguments = () if model is None else (model,)
        if self.optimizer is not None:
            return super().create_optimizer(*arguments)
        target: Any = self.model if model is None else model
        given = self.optimizer_cls_and_kwargs
        name = str(getattr(self.args.optim, "value", self.args.optim))
        refusal = ConfigError(
            "optim",
            name,
            "this optimizer chooses its own parameter groups and would ignore the scales' learning rates; use one that "
            "takes groups, such as adamw_torch or adafactor",
        )
        if given is None and name.startswith(_OWN_GROUPERS):
            raise refusal
        optimizer_cls, options = given or self.get_optimizer_cls_and_kwargs(self.args, target)
        is_class = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)
        if not is_class or any(key in options for key in _OWN_GROUPS):
            raise refusal
        groups = sel_param_groups(target, options.get("lr", self.args.learning_rate), self.args.weight_decay)
        # Trainer lets an optimizer's options carry "params", which then replace the groups it would have made itself
        self.optimizer_cls_and_kwargs = (optimizer_cls, {**options, "params": groups})
        try:
            return super().create_optimizer(*arguments)
        finally:
            self.optimizer_cls_and_kwargs = given

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, after clearing away what killed runs left of checkpoints in output_dir; see Trainer.

        Args:
            *args: Trainer's.
            **kwargs: Trainer's.

        Returns:
            Trainer's result.

        Raises:
            ConfigError: If DeepSpeed's configuration would round what trains, or leave it out of checkpoints.
        """
        check_deepspeed(getattr(self.accelerator.state, "deepspeed_plugin", None))
        if self.args.should_save and self._is_on_one_machine():
            clear_leftovers(Path(self.args.output_dir or ""), rf"{re.escape(PREFIX_CHECKPOINT_DIR)}-\d+")
        self.accelerator.wait_for_everyone()  # a checkpoint that was put back is there for all to resume from
        return super().train(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train; auto_find_batch_size calls this again with smaller batches."""
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            if self._open_step is not None:  # it ended in the middle of one
                self._open_step.discard()
                self._open_step = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run one micro-batch, which shares weights with the others of its optimizer step; see shares_weights.

        Args:
            model: Trainer's, and so the others.
            *args: Trainer's.
            **kwargs: Trainer's.

        Returns:
            The loss.
        """
        step, self._open_step = self._open_step, None
        if step is None:
            layers = list(iter_sel_layers(model))
            if isinstance(model, DistributedDataParallel) and self.args.ddp_broadcast_buffers is None:
                model.broadcast_buffers = not any(len(layer.symexplin_raw_frozen) for layer in layers)
            step = Accumulation([layer for layer in layers if self._shares(layer)])
        try:
            loss: Tensor = super().training_step(model, *args, **kwargs)
        except BaseException:
            step.discard()
            raise
        if self.accelerator.sync_gradients:
            step.finish()
        else:
            self._open_step = step
        return loss

    def _shares(self, layer: SELLayer) -> bool:
        """Whether a layer computes its weight once per optimizer step: where that saves time and costs no sum."""
        return (
            self.shares_weights
            and self.args.gradient_accumulation_steps > 1
            and self.args.n_gpu <= 1
            and not self.args.torch_compile
            and self.accelerator.distributed_type == DistributedType.NO
            and any(raw.requires_grad for raw in layer.symexplin_raw.values())
        )

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """Create Trainer's scheduler and let it follow each group's annealed multiplier.

        Args:
            num_training_steps: Optimizer steps of the run.
            optimizer: The optimizer; self.optimizer by default.

        Returns:
            The scheduler, also kept as self.lr_scheduler.

        Raises:
            ConfigError: If a group anneals and args.lr_scheduler_type is not a function of the step.
        """
        passed_in = self.lr_scheduler is not None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        return scheduler if passed_in else anneal_scheduler(scheduler, num_training_steps)

    def _is_on_one_machine(self) -> bool:
        """Whether all processes surely see the folder that the first one makes."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == self.args.world_size

    def _get_output_dir(self, trial: Any) -> str:
        """Return where Trainer puts its checkpoints; while it writes one, the hidden folder instead."""
        return super()._get_output_dir(trial) if self._unfinished is None else str(self._unfinished)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push to the hub, but from a checkpoint that is complete."""
        if self._unfinished is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter; under FSDP2, where all processes have to call it, whatever the state_dict_type.

        Args:
            output_dir: Folder; args.output_dir by default.
            _internal_call: Trainer's.

        Raises:
            OtherProcessError: If the first of several processes fails under FSDP2, and this is another.
        """
        model: Any = self.model
        if not (isinstance(model, PeftModel) and is_sharded_model(model)):
            super().save_model(output_dir, _internal_call)
            return
        state: dict[str, Any] = gather_adapters(model)
        write_from_first({}, lambda _: self._save(output_dir, state))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save model, tokenizer and arguments: a folder that is not there yet appears when it is complete."""
        target: Any = self.model
        frozen = copy_frozen(target, PREFIX)
        state_dict = {**frozen, **state_dict} if frozen and state_dict else state_dict
        folder = Path(output_dir or self.args.output_dir or "")
        staged = self._unfinished is None and self.args.should_save and self._is_on_one_machine()
        if not staged or os.path.lexists(folder):
            super()._save(output_dir, state_dict)
            return
        with staged_folder(folder) as unfinished:
            super()._save(str(unfinished), state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint as Trainer does, but in a hidden folder that gets its name when it is complete."""
        if not self._is_on_one_machine():
            super()._save_checkpoint(model, trial)
            return
        run_dir = self._get_output_dir(trial)
        checkpoint = Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with self._staged_checkpoint(checkpoint) as self._unfinished:
            try:
                super()._save_checkpoint(model, trial)
                written = self._unfinished / checkpoint.name
            finally:
                self._unfinished = None
            best = self.state.best_model_checkpoint
            if best is not None and Path(best) == written:
                self.state.best_model_checkpoint = str(checkpoint)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                for path in written.iterdir():
                    path.rename(written.parent / path.name)
                written.rmdir()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            rotate_checkpoints(run_dir, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def save_state(self) -> None:
        """Save the state as Trainer does, but in one step: a process that dies leaves the old file or the new one."""
        if self.is_world_process_zero():
            with replaced_files(Path(self.args.output_dir or "")) as unfinished:
                self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's card over the one in output_dir, and into it how to load the adapter that is saved there.

        Args:
            *args: Trainer's.
            **kwargs: Trainer's.
        """
        super().create_model_card(*args, **kwargs)
        folder, model = Path(self.args.output_dir or ""), self.accelerator.unwrap_model(self.model)
        if self.is_world_process_zero() and isinstance(model, PeftModel) and (folder / CONFIG_NAME).is_file():
            model.create_or_update_model_card(str(folder))  # as Trainer does itself, and TRL's do not

    @contextmanager
    def _staged_checkpoint(self, checkpoint: Path) -> Iterator[Path]:
        """Yield the hidden folder of a checkpoint, the same one to all processes."""
        with ExitStack() as stack:
            told: list[Any] = [None, None]
            try:
                if self.args.should_save:
                    told[0] = stack.enter_context(staged_folder(checkpoint, check=require_folder))
            except Exception as error:
                broadcast_object_list([None, str(error)])
                raise
            unfinished, message = broadcast_object_list(told)
            if message is not None:
                raise OtherProcessError(0, message)
            yield unfinished
        self.accelerator.wait_for_everyone()


class SELTrainer(SELTrainerMixin, Trainer):
    """transformers.Trainer for SEL models: same arguments, see SELTrainerMixin for what it adds."""
