"""Training with transformers.Trainer: SEL's groups and annealing, and logs that show them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from peft_sel.accumulation import Accumulation
from peft_sel.checkpoint.staging import clear_leftovers, require_folder, staged_folder
from peft_sel.conversion import BIAS, HOLDER_NAME
from peft_sel.errors import ConfigError
from peft_sel.layer import SELLayer
from peft_sel.optim import anneal_scheduler, sel_param_groups
from peft_sel.removal import iter_sel_layers
from peft_sel.sharded import gather, is_sharded_model
from peft_sel.structured import StructuredScale, transform_parts
from peft_sel.trl import check_trainer

if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object

_PRINTERS = (PrinterCallback, ProgressCallback)
_OWN_GROUPERS = ("galore", "apollo", "lomo", "adalomo")  # asked for, some leave hooks on the parameters at once
_OWN_GROUPS = ("params", "model", "optimizer_dict")  # keys by which Trainer's optimizers say that they group parameters


def collect_learning_rates(groups: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the learning rates of optimizer groups by role.

    Args:
        groups: Groups of sel_param_groups, as an optimizer holds them; groups without a role count as "other".

    Returns:
        One entry per role, or smallest and largest under <role>_min and <role>_max: always for the residual (one rate
        per distinct beta), else where the groups of a role differ.
    """
    by_role: dict[str, list[float]] = {}
    for group in groups:
        by_role.setdefault(group.get("role", "other"), []).append(float(group["lr"]))
    rates: dict[str, float] = {}
    for role, values in by_role.items():
        smallest, largest = min(values), max(values)
        if role == "residual" or smallest < largest:
            rates |= {f"{role}_min": smallest, f"{role}_max": largest}
        else:
            rates[role] = smallest
    return rates


@torch.no_grad()
def collect_scale_means(model: nn.Module) -> dict[str, float]:
    """Measure how far the trainable scales of the active adapters have moved; under FSDP2 all processes have to.

    Args:
        model: A model with SEL layers.

    Returns:
        By "<scale>/<role>", such as "exp_scale/q_proj" and, of its bias, "exp_scale/q_proj.bias" (the role is the last
        part of the module's name): the
        scale's mean over the weight, relative to its start (the mean itself where it starts at 0), averaged over the
        layers.

    Raises:
        MultiplierSignError: If normalize_by_inner_mult divides by a multiplier that is not above 0.
    """
    found: dict[str, list[float]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, SELLayer):
            for adapter in layer.active_adapters:
                for name, scale in layer.scales(adapter).items():
                    if any(part.requires_grad for part in scale.parameters()):
                        key = f"{name}/{_name_role(path)}"
                        scale.check_sign(layer.weight_name)
                        mean = _mean_scale(scale, layer.symexplin_beta[adapter])
                        found.setdefault(key, []).append(mean / (scale.start or 1.0))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _name_role(path: str) -> str:
    """Return the last part of a module's or parameter's name; of a bias the last two, as in "q_proj.bias"."""
    owner, _, name = path.rpartition(f".{HOLDER_NAME}.")
    last = path.rpartition(".")[2]
    return f"{owner.rpartition('.')[2]}.{BIAS}" if name == BIAS else last


def _mean_scale(scale: StructuredScale, beta: Tensor) -> float:
    """Return the mean of a scale over the weight, from its parts alone."""
    own = {name: gather(getattr(scale, name)).to(beta.device) for name in scale.part_names}
    parts = transform_parts(scale.config, own, beta)
    if scale.pattern == "lora":
        low_rank = (parts["b"].mean(-2) * parts["a"].mean(-1)).sum(-1, keepdim=True)
        return float((parts["base"] + low_rank).mean())
    means = torch.stack([part.mean(-1) for part in parts.values()])
    return float((means.prod(0) if scale.pattern == "row_col_mult" else means.sum(0)).mean())


class SELCallback(TrainerCallback):
    """Adds scale trajectories and the learning rate of every role to Trainer's logs.

    Each training log gains sel/lr/<role> (the rate of the step just taken, like Trainer's own learning_rate) and
    sel/scale/<scale>/<module role> (see collect_scale_means), in state.log_history and in every callback that comes
    after this one: all share one dict of logs. SELTrainer adds it by itself, ahead of the reporters and behind the
    callbacks that print.

    A stock Trainer takes callbacks=[SELCallback()]; the figures are in state.log_history then, but not in the reporters
    that report_to names, which come before all callbacks. To have them in TensorBoard too, list its callback behind
    this one: report_to="none" and callbacks=[SELCallback(), TensorBoardCallback()], from transformers.integrations.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the learning rates of this step: when Trainer logs, the scheduler has already moved on."""
        self._rates = collect_learning_rates(kwargs["optimizer"].param_groups)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add to the logs of a training step; evaluation results and the final summary get no figures of SEL's."""
        logs: dict[str, float] = kwargs["logs"]
        for key in state.log_history[-1].keys() - {"step"}:  # PrinterCallback takes out what it does not print
            logs.setdefault(key, state.log_history[-1][key])
        if "loss" not in logs:
            return
        added = {f"sel/lr/{role}": rate for role, rate in self._rates.items()}
        added |= {f"sel/scale/{key}": mean for key, mean in collect_scale_means(kwargs["model"]).items()}
        logs.update(added)
        state.log_history[-1].update(added)


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
        """
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
        """
        model: Any = self.model
        if not (isinstance(model, PeftModel) and is_sharded_model(model)):
            super().save_model(output_dir, _internal_call)
            return
        if self.args.should_save:
            self._save(output_dir)
        else:
            model.save_pretrained(output_dir or self.args.output_dir or "")  # gives its shards to the first process
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save model, tokenizer and arguments: a folder that is not there yet appears when it is complete."""
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

    @contextmanager
    def _staged_checkpoint(self, checkpoint: Path) -> Iterator[Path]:
        """Yield the hidden folder of a checkpoint, the same one to all processes."""
        writes = self.args.should_save
        with staged_folder(checkpoint, check=require_folder) if writes else nullcontext() as unfinished:
            shared = broadcast_object_list([unfinished])
            yield shared[0]
        self.accelerator.wait_for_everyone()


class SELTrainer(SELTrainerMixin, Trainer):
    """transformers.Trainer for SEL models: same arguments, see SELTrainerMixin for what it adds."""
