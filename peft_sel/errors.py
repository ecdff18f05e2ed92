"""The package's errors: each constructor takes the facts and writes one sentence: what, where and the way out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxset, _short.maxtuple = 3, 8, 8, 8, 8
_short.maxstring = _short.maxother = 200


def show_value(value: object) -> str:
    """Write a value for a message, in one line however long or deep it is."""
    return _short.repr(value)


def make_line(text: str) -> str:
    """Write a text, which may quote a file or another library, as one line of at most 2,000 printable characters."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))
    return line if len(line) <= 2000 else f"{line[:1000]}...{line[-997:]}"


def show_name(name: str) -> str:
    """Write a name for a message: as it is, unless it is too long or would break the line."""
    return name if len(name) <= 200 and name.isprintable() else show_value(name)


def list_names(names: Iterable[object], limit: int = 6) -> str:
    """Join names for a message, cutting long lists."""
    items = [show_name(str(name)) for name in names]
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


class SELError(ValueError):
    """Base of every error this package raises on purpose; its message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(make_line(message))


class ConfigError(SELError):
    """An option has a value that cannot work."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={show_value(value)}: {reason}")
        self.field, self.value, self.reason = field, value, reason


class NonFiniteWeightError(SELError):
    """A weight to be inverted holds NaN or infinity."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(
            f"{name} holds {count} NaN or infinite value(s), which have no raw weight; repair the checkpoint, or leave "
            "the module out with exclude_modules"
        )


class SlopeError(SELError):
    """The map that a branch inverts is too flat near zero."""

    def __init__(self, name: str, mode: str, slope: float, linear: float) -> None:
        super().__init__(
            f"{name}: mode={mode!r} subtracts the linear path on one branch and needs a starting slope "
            "exp_scale*exp(-offset)*beta*inner_multiplier of at least 1.25*linear_scale to be invertible in float32, "
            f"but the slope is {slope:.6g} and linear_scale {linear:.6g}; start linear_scale at {slope / 1.25:.6g} or "
            "less, raise exp_scale, or use mode='congruent'"
        )


class ShiftStartError(SELError):
    """A non-zero starting shift leaves small weights without a raw weight."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: the shift must start at 0, because any other start makes the map jump at zero and small weights "
            "have no raw weight; set the start of shift to 0 and let it train from there"
        )


class ConvergenceError(SELError):
    """Newton's method did not reach the weight."""

    def __init__(self, name: str, num_steps: int, residual: float) -> None:
        super().__init__(
            f"{name}: the inversion stopped after {num_steps} Newton steps at a relative residual of {residual:.3g}; "
            "lower its beta (beta_pattern), start its scales nearer to their defaults, or exclude it"
        )


class MultiplierSignError(SELError):
    """Training brought a multiplier that the transform is divided by to 0 or below."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__(
            f"{name}: training brought its inner multiplier to {value:.4g}, and normalize_by_inner_mult divides by it; "
            "go back to an earlier checkpoint and lower its lr_mult, or keep it positive with log_curvature=True or "
            "ScaleConfig(transform='exp')"
        )


class UnsupportedModuleError(SELError):
    """A target module is of a type that cannot be converted."""

    def __init__(self, name: str, kind: str, reason: str = "") -> None:
        detail = f" ({reason})" if reason else ""
        super().__init__(
            f"target module {name} is a {kind}{detail}; supported, with a floating-point weight in memory: "
            "torch.nn.Linear, Embedding, Conv1d, Conv2d, Conv3d and transformers' Conv1D. Narrow target_modules or "
            "list it in exclude_modules"
        )


class UnsupportedParameterError(SELError):
    """A parameter that target_parameters names cannot be converted."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"target parameter {name} {reason}; take it out of target_parameters")


class DroppedBaseError(SELError):
    """Something needs the base weights that base_weight='drop' freed."""

    def __init__(self, action: str, adapter: str) -> None:
        super().__init__(
            f"{action} needs the base weights, which adapter {adapter!r} freed with base_weight='drop'; convert with "
            "base_weight='keep', or reload the base model"
        )


class AdapterMismatchError(SELError):
    """Saved adapter tensors do not fit the model."""

    def __init__(
        self, adapter: str, missing: list[str], unexpected: list[str], mismatched: list[str], hint: str = ""
    ) -> None:
        problems = [
            f"{what}: {list_names(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
            if names
        ]
        super().__init__(
            f"the saved tensors of adapter {adapter!r} do not fit this model ({'; '.join(problems)}); load it on the "
            f"base model it was made from{hint}"
        )


class AdapterStateError(SELError):
    """An adapter is not in a state that allows the request."""

    def __init__(self, adapter: str, problem: str, way_out: str) -> None:
        super().__init__(f"adapter {adapter!r} {problem}; {way_out}")


class OtherBaseError(SELError):
    """An adapter meets a base that it was not made from."""

    def __init__(self, adapter: str, name: str, made_from: str | None, train_raw: bool, way_out: str) -> None:
        why = (
            "its target weights come from the adapter, but the rest of this base, such as embeddings and norms, is not "
            "what they were trained with"
            if train_raw
            else "it holds no raw weights, and those recomputed from this base would make its target weights wrong"
        )
        origin = f" ({made_from})" if made_from else ""
        super().__init__(
            f"adapter {adapter} was made from another base{origin}, as the values of {name} show: {why}; use the base "
            f"that it was made from, or {way_out}"
        )


class ChangedWeightError(SELError):
    """A tensor of an adapter changed between a backward pass and the pull back of its gradients."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the adapter of {name} was written to, frozen or unfrozen inside accumulate_gradients(), after a backward "
            "pass that its old state belongs to; leave the scope before optimizer.step(), load_state_dict(), "
            "set_adapter() and the like"
        )


class AccumulationError(SELError):
    """accumulate_gradients() cannot do what it is used for."""

    def __init__(self, problem: str, way_out: str) -> None:
        super().__init__(f"{problem}; {way_out}")


class BrokenMergeError(SELError):
    """A merged or exported weight would hold NaN or infinity."""

    def __init__(self, name: str, adapters: Iterable[str]) -> None:
        super().__init__(
            f"NaNs detected in the merged weights. The adapter {list_names(adapters)} seems to be broken: {name} would "
            "hold NaN or infinite values. Nothing was merged; go back to an earlier checkpoint of the adapter"
        )


class CheckpointError(SELError):
    """A checkpoint or adapter file cannot be used."""

    def __init__(self, path: str | Path, problem: str, way_out: str) -> None:
        super().__init__(f"{path}: {problem}; {way_out}")


class DataFileError(SELError):
    """A text to train on cannot be read."""

    def __init__(self, where: str | Path, problem: str, way_out: str) -> None:
        super().__init__(f"{where}: {problem}; {way_out}")


class WorkerError(SELError):
    """Another error of this package, raised in a worker of a DataLoader."""

    def __init__(self, text: str) -> None:
        # torch raises it anew in the main process, with the worker's whole traceback for a text
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2])


class OutputExistsError(SELError):
    """The output folder or file is already there."""

    def __init__(self, path: str | Path, option: str = "") -> None:
        replacing = f"; {option} replaces it" if option else ""
        super().__init__(f"{path} already exists; name another output or remove this one first{replacing}")


class RecipeError(SELError):
    """A YAML recipe or an override holds a key or value that is not known."""

    def __init__(self, source: str | Path, key: str, problem: str) -> None:
        super().__init__(f"{source}: {key}: {problem}")


class ParameterGroupError(SELError):
    """A model's trainable parameters do not fit into optimizer groups."""

    def __init__(self, problem: str, way_out: str) -> None:
        super().__init__(f"{problem}; {way_out}")


class MixedBatchError(SELError):
    """adapter_names= of a call cannot be followed."""

    def __init__(self, names: Iterable[str], problem: str, way_out: str) -> None:
        super().__init__(f"adapter_names={list_names(dict.fromkeys(names))!r} {problem}; {way_out}")


class LoraConversionError(SELError):
    """An adapter cannot be written as a LoRA."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}; merge the adapter instead (merge_checkpoint, merge_and_unload)")


class OffloadedError(SELError):
    """Tensors of a converted module are not in memory."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"{name} has its {what} on the meta device: offloaded, or never loaded. SEL needs weights in memory; "
            "load the model without cpu or disk in its device_map, or merge_and_unload it first"
        )


class ShardedError(SELError):
    """A converted module that FSDP2 shards cannot do what was asked for."""

    def __init__(self, name: str, action: str, way_out: str) -> None:
        super().__init__(f"{name} is sharded by FSDP2, and {action}; {way_out}")


class OtherProcessError(SELError):
    """Another process could not do its part of what all processes do together."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"process {rank} failed, so that this one stops as well: {message}")


class PartitionedError(SELError):
    """Something needs a weight whole that DeepSpeed ZeRO-3 has split among processes."""

    def __init__(self, name: str, action: str, way_out: str) -> None:
        super().__init__(f"{action} needs {name} whole, and DeepSpeed ZeRO-3 has split it among processes; {way_out}")


class RoundedError(SELError):
    """Something has cast trained tensors, against raw_dtype."""

    def __init__(self, name: str, adapter: str, found_dtype: torch.dtype, raw_dtype: torch.dtype) -> None:
        found, wanted = (str(dtype).removeprefix("torch.") for dtype in (found_dtype, raw_dtype))
        problem = f"which rounds away what training adds to {wanted}"
        way_out = (
            "under FSDP set mixed_precision to 'no' (bf16=False in TrainingArguments) and load the model in bfloat16, "
            "under DeepSpeed switch bf16 and fp16 off and torch_autocast on, as configs/accelerate/zero2.json does, "
            "elsewhere use autocast, or choose raw_dtype yourself"
        )
        if found_dtype.itemsize > raw_dtype.itemsize:
            problem = f"which takes more memory than the {wanted} of its configuration and rounds its steps otherwise"
            way_out = (
                "under FSDP set mixed_precision to 'no' (bf16=False in TrainingArguments), since others make float32 "
                f"of what trains, elsewhere leave out the cast, or choose raw_dtype={found!r}"
            )
        super().__init__(f"adapter {adapter!r} of {name} was cast to {found}, {problem}; {way_out}")


class NewerVersionError(SELError):
    """An adapter was made by a newer peft_sel, whose options this one may not know."""

    def __init__(self, made_by: str, installed: str) -> None:
        super().__init__(
            f"the adapter was made by peft_sel {made_by} and this is {installed}, which may not know all its options; "
            "run pip install -U peft-sel"
        )


class NewerFormatError(SELError):
    """An adapter's files have a format that this peft_sel does not know."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the adapter has format_version {found}, and this peft_sel knows formats up to {known}; "
            "run pip install -U peft-sel"
        )


class MissingPackageError(SELError):
    """A package that one of the extras brings is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f'this needs the package {package}, which is not installed; run pip install "peft-sel[{extra}]"'
        )


class PlotError(SELError):
    """A figure cannot be drawn from what it is given, or not be written where it should."""

    def __init__(self, what: str | Path, problem: str, way_out: str) -> None:
        super().__init__(f"{what}: {problem}; {way_out}")
