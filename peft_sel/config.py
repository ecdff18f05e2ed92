"""SELConfig: what a user can choose, checked where it is written down."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftConfig, PeftType
from peft.utils import CONFIG_NAME

from peft_sel.adapter_files import check_files, replaced_files
from peft_sel.card import AdapterContents, copy_card, write_card
from peft_sel.errors import CheckpointError, ConfigError, NewerFormatError
from peft_sel.numerics import (
    FAMILY_SCALES,
    INITS,
    SCALE_NAMES,
    check_beta,
    check_choice,
    check_family,
    is_fingerprint,
)
from peft_sel.scale_config import (
    NORMALIZERS,
    ResolvedScale,
    ScaleConfig,
    check_family_scales,
    check_multiplier,
    check_starts,
    parse_scale,
    resolve_scale,
)
from peft_sel.untrusted import check_fields, check_version, read_json

RAW_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BIASES = ("none", "sel_only", "all")
BASE_WEIGHTS = ("keep", "cpu", "drop")
INIT_TARGETS = ("pretrained", "xavier_uniform", "xavier_normal")
DEFAULT = "default"  # of a scale that some families lack
FORMAT_VERSION = 1  # of a saved adapter


@dataclass
class SELConfig(PeftConfig):
    """Configuration of a SymExpLin (SEL) adapter.

    The target weights are trained in a curved raw space and folded back into ordinary weights by merge_and_unload. The
    defaults convert a pretrained model without changing it.

    benchmarks/learning measured what these choices do to the loss. In its study (SmolLM2-135M, German manual pages, 80
    steps of 512 tokens, held-out loss 2.650, one seed) no change of a single field lowered it by more than 0.002 nats,
    and so the defaults stay the paper's or the simplest. From scratch (width 256, 400 steps) AdamW on plain weights was
    ahead of all that was measured. Those marked (open) have not been measured.

    Attributes:
        task_type: PEFT's: "CAUSAL_LM" and so on, which chooses the wrapper. Default None: a plain PeftModel.
        peft_type: Set by itself. Default None, which becomes PeftType.SYMEXPLIN.
        auto_mapping: Set by PEFT when it saves without a task_type. Default None.
        peft_version: Set by itself: the version of PEFT. Default None.
        base_model_name_or_path: Set by get_peft_model: the base. Default None.
        revision: Of the base on the hub. Default None: its newest.
        inference_mode: Whether the adapter is frozen; set by PEFT as it saves and loads. Default False.
        target_modules: Names or a regex of the modules to convert, or "all-linear". Default None: all
            linear projections of the blocks for Llama, Qwen, Gemma, BERT, T5 and their kin, since these hold most of
            the weights; for other model types what PEFT's LoRA takes.
        exclude_modules: Names or a regex of modules to leave out. Default None.
        target_parameters: Names, or their ends after a dot, of parameters to convert that are no module's weight, such
            as ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]: each matrix of a stack (num_experts, d_out, d_in)
            gets its own curvature, scales and residual. Comes on top of target_modules ([] for these alone). Default
            None: most models have none, and a conversion that leaves experts alone says so.
        modules_to_save: Names of modules to train plainly and save whole. Default None.
        trainable_token_indices: Rows of the input embedding to train plainly: a list, or {module name: list}. Default
            None.
        layers_to_transform: Indices of the layers to convert. Default None: all.
        layers_pattern: Name of the layer list, if it is not a common one. Default None.
        init_weights: False perturbs raw and scales by 5 %, which tests use. Default True: exact.
        mode: How the linear path meets the exponential one: "mismatch" (Eq. 7), "congruent" (Eq. 6), "oppose" or
            "exp_only" (no linear path; from scratch it failed in the paper). Default "mismatch": the paper's choice,
            where it beats congruent; its linear path adds a positive mean to every weight, so keep it small. Study:
            congruent and exp_only differ from it by at most 0.001; from scratch congruent was 0.180 ± 0.079 lower.
        family: The curve (10.2): "symexp"; "sinh" (smooth at 0; only mode "congruent", exp_scale and inner_multiplier);
            or "damped" (modes "congruent" and "exp_only"; offset stays positive and starts at 0.5; no shift). Default
            "symexp": what the paper's results are about.
        beta: Curvature: a positive number, "auto" (beta_rms / rms of each tensor) or "width" (from hidden_size, for
            weights drawn from scratch). Saved with the adapter. Default "auto": width says nothing about trained
            weights; those of SmolLM2-135M, 576 wide, are 5 times Xavier's size, with a largest of 9.25.
        beta_pattern: {regex of the module name: positive beta} for single modules; the first match wins. Default {}.
        beta_rms: beta * rms(W) that "auto" aims at, positive. Default 0.3: the paper operates at 0.23 to 0.36. Study:
            0.1 reads 2.648, 1.0 at its better rate 2.655.
        init: "exact" inverts the rule of the mode; "congruent" inverts the congruent rule (the paper's mismatched
            initialisation), which weakens negative weights and warns on a pretrained model. Default "exact": bf16 and
            fp16 models are unchanged to the bit.
        init_target: What is inverted: "pretrained", the base weight, or from scratch a draw in its place,
            "xavier_uniform" (the paper's) or "xavier_normal", from torch's generator on the CPU; an Embedding keeps its
            own values. The base weight stays as it is, and so disable_adapter and unload give the model from before
            the draw. Needs train_raw=True: the saved raw weights then load on any base of the same shapes. Default
            "pretrained": an adapter has a base.
        train_raw: True trains every weight (dense); False freezes raw and trains scales and residual (a small adapter).
            Frozen raw takes next to no memory over a bf16 or fp16 base: a table of some KiB leads from the values of a
            weight to raw weights, in each pass anew. Over a float32, float64 or quantised base, or a base that was cast
            after conversion, it is held in raw_dtype beside the base weight, 4 bytes per weight, and an in-place change
            of that goes unseen: load the base in two bytes to avoid both. Default True: the paper's method, and 4 bytes
            per weight on disk.
        exp_scale: e_w, a ScaleConfig, a pattern name, or None to fix it at its start, 1/beta. Default ScaleConfig():
            one factor per row times one per column, as in the paper.
        linear_scale: l_w, likewise; starts at 1/max(beta, 7.5), in the family damped at 1: the paper's largest share of
            the linear path, and with 1/beta throughout mismatch could not invert weights of a small beta. Default
            "default": ScaleConfig() in families that have it, else None.
        inner_multiplier: m, likewise; starts at 1. Default ScaleConfig(): as the paper.
        log_curvature: Train the logarithm of beta * m, which stays positive ("absorbed beta", Table 6), for m. Default
            False: Eq. 3 as it stands. With the next one it was the paper's best from scratch (open); study: the same
            to 0.001.
        normalize_by_inner_mult: Divide the transform by m, which then changes the curvature and not the gain near 0
            (Table 6). An m that training brings to 0 or below is an error when it is logged, saved or merged;
            log_curvature and transform="exp" rule it out. Default False: for that reason, and as above.
        normalizer: "folded" starts exp_scale and linear_scale at 1/beta and 1/max(beta, 7.5); "fixed" keeps these as
            constant factors and starts them at 1 (in the family damped only exp_scale; linear_scale starts at 1 in
            both): the same function, and other steps under Adam. Default "folded": the paper's equations, where its
            text on learning rates suggests the other. Study: the same to 0.001.
        shift: s, as exp_scale; starts at 0. Default None, which leaves it out: a trained shift makes the map jump at 0.
        offset: n, as exp_scale; starts at 0. Default None, which leaves it out (in the family damped: fixes it at 0.5):
            the fewest moving parts; study: "column" reads 2.649. The recipes from scratch train it.
        r: Rank of the residual added in weight space; 0 for none, at most 1,024 or a matrix's smaller side. Default 8:
            LoRA's default, a small share of the weights. Study: 0 is the same to 0.001; with train_raw=False (open).
        residual_alpha: The residual is scaled by residual_alpha / r, positive. Default None: r, a scaling of 1.
        residual_lr_mult: Multiplier on the residual's learning rate, positive; the rate is further divided by the
            tensor's beta. Default None: 1, or the paper's 0.5 where init_target draws the weights (open).
        bias: "none", "sel_only" to convert the biases of the target modules too, or "all" to train every bias of the
            model plainly. A converted bias has a curvature of its own (named like "q_proj.bias" in beta_pattern), no
            residual, and scales that are global or one number per element: row_col_mult and column become global,
            row_col_add and lora row. Its base is frozen, and kept by base_weight="drop". Default "none": as PEFT's
            tuners; many models have no biases.
        base_weight: "keep"; "cpu" to move the base weights to CPU memory, from where they are copied to the device of
            the model whenever something needs one (disable_adapter, rows for "__base__", several adapters, unload); or
            "drop" to free them: disable_adapter, unmerge and unload then raise. With "cpu" a weight that a module
            outside shares stays where it is, the others are in no state_dict, and of several adapters one that asks
            for it decides. Both need train_raw=True. Default "keep": everything works, for 2 bytes per weight in bf16.
        raw_dtype: "float32" or "float64", whatever PEFT's autocast_adapter_dtype says; or, at a loss, "bfloat16" or
            "float16". Measured on heavy-tailed weights with nothing trained: bfloat16 raw changes 12-14 % of a bf16
            checkpoint's weights, by up to 1.7 % each and 0.27 % of the norm, and steps below 0.2 % of a raw weight
            vanish; float16 raw is off by 0.03 % of the norm, but weights below 1e-6 are lost. Scales and residual stay
            float32. Default "float32": the least that gives every bf16 and fp16 weight back.
        anneal_steps: Steps over which learning-rate multipliers go from lr_mult to lr_mult_end: a positive int, or a
            float fraction of all steps in (0, 1]. Default 0.2: ours, since the paper names no number (open).
        peft_sel_version: Set by itself: the version of peft_sel that made the configuration. Default None.
        format_version: Set by itself: the format of the saved tensors, which rises whenever what they mean changes. A
            field that is not known is PEFT's to warn about and leave out: it cannot change what they mean. Default 1.
        base_fingerprint: Set by itself when the adapter is saved: {weight: hashes of its values in the base}. Default
            {}.
        check_base: False loads the adapter onto another base than it was made from, or over this one; not saved.
            Default True: on another base an adapter computes something else without a sign of it.

    Raises:
        ConfigError: If a value is unknown or cannot work.
        NewerVersionError: If a newer minor version of peft_sel made it.
        NewerFormatError: If its format_version is newer.

    Example:
        >>> SELConfig(r=0, beta=7.5, exp_scale="row").exp_scale.pattern
        'row'
    """

    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    init_weights: bool = True
    mode: str = "mismatch"
    family: str = "symexp"
    beta: float | str = "auto"
    beta_pattern: dict[str, float] = field(default_factory=dict)
    beta_rms: float = 0.3
    init: str = "exact"
    init_target: str = "pretrained"
    train_raw: bool = True
    exp_scale: ScaleConfig | str | None = field(default_factory=ScaleConfig)
    linear_scale: ScaleConfig | str | None = DEFAULT
    inner_multiplier: ScaleConfig | str | None = field(default_factory=ScaleConfig)
    log_curvature: bool = False
    normalize_by_inner_mult: bool = False
    normalizer: str = "folded"
    shift: ScaleConfig | str | None = None
    offset: ScaleConfig | str | None = None
    r: int = 8
    residual_alpha: float | None = None
    residual_lr_mult: float | None = None
    bias: str = "none"
    base_weight: str = "keep"
    raw_dtype: str = "float32"
    anneal_steps: int | float = 0.2
    peft_sel_version: str | None = None
    format_version: int = FORMAT_VERSION
    base_fingerprint: dict[str, str] = field(default_factory=dict, repr=False)
    check_base: bool = field(default=True, compare=False)
    awaits_load: ClassVar[bool] = False  # read from an adapter's folder, whose tensors may turn out not to fit
    contents: ClassVar[AdapterContents | None] = None  # of what was saved last, for the model card
    base_folders: ClassVar[Mapping[str, Path]] = {}  # see find_base

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_sel_version = check_version(self.peft_sel_version)
        if isinstance(self.format_version, int) and self.format_version > FORMAT_VERSION:
            raise NewerFormatError(self.format_version, FORMAT_VERSION)
        if isinstance(self.target_parameters, str):
            raise ConfigError("target_parameters", self.target_parameters, "give a list of names")
        check_fields(self)
        self.peft_type = PeftType("SYMEXPLIN")  # added by registry.py
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))
        for choice, known in (
            ("init", INITS),
            ("init_target", INIT_TARGETS),
            ("normalizer", NORMALIZERS),
            ("bias", BIASES),
            ("base_weight", BASE_WEIGHTS),
            ("raw_dtype", tuple(RAW_DTYPES)),
        ):
            check_choice(choice, getattr(self, choice), known)
        check_family(self.family, self.mode, ())
        if self.linear_scale == DEFAULT:
            self.linear_scale = ScaleConfig() if "linear_scale" in FAMILY_SCALES[self.family] else None
        for name in SCALE_NAMES:
            setattr(self, name, parse_scale(name, getattr(self, name)))
        scales: dict[str, Any] = {name: getattr(self, name) for name in SCALE_NAMES}
        check_family_scales(self.family, scales)
        check_multiplier(scales["inner_multiplier"], self.log_curvature, self.normalize_by_inner_mult)
        self._check_numbers()
        self._check_combinations()
        check_starts(self.family, scales)

    def _check_numbers(self) -> None:
        if isinstance(self.beta, str):
            check_choice("beta", self.beta, ("auto", "width", "a positive number"))
        for value in [] if isinstance(self.beta, str) else [self.beta]:
            check_beta(value)
        self.beta_pattern = self.beta_pattern or {}
        self.base_fingerprint = self.base_fingerprint or {}
        if not isinstance(self.base_fingerprint, dict) or not all(map(is_fingerprint, self.base_fingerprint.values())):
            raise ConfigError("base_fingerprint", self.base_fingerprint, "is no record of a base; leave it to peft_sel")
        for pattern, value in self.beta_pattern.items():
            check_beta(value)
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError("beta_pattern", pattern, f"not a regular expression: {error}") from error
        for name in ("beta_rms", "residual_lr_mult"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "must be a positive, finite number")
        if self.r < 0:
            raise ConfigError("r", self.r, "the residual's rank must be 0 (none) or a positive whole number")
        if self.format_version < 1:
            raise ConfigError("format_version", self.format_version, "there is none below 1; save the adapter again")
        if self.residual_alpha is not None and not (math.isfinite(self.residual_alpha) and self.residual_alpha > 0):
            raise ConfigError("residual_alpha", self.residual_alpha, "must be positive and finite; r=0 for no residual")
        steps, fraction = self.anneal_steps, isinstance(self.anneal_steps, float)
        if not steps > 0 or (fraction and steps > 1):
            raise ConfigError("anneal_steps", steps, "give a positive int (steps) or a float in (0, 1] (of all steps)")

    def _check_combinations(self) -> None:
        for name in ("layers_to_transform", "layers_pattern") if isinstance(self.target_modules, str) else ():
            if getattr(self, name) not in (None, []):
                raise ConfigError(
                    name,
                    getattr(self, name),
                    f"`{name}` cannot be used when `target_modules` is a str; name the modules in a list, or the "
                    "layers in the regex",
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError(
                "layers_pattern", self.layers_pattern, "has no effect without layers_to_transform; set that, too"
            )
        if self.base_weight != "keep" and not self.train_raw:
            reason = "train_raw=False rebuilds raw from the base weights; keep them"
            raise ConfigError("base_weight", self.base_weight, reason)
        if self.draws_targets and not self.train_raw:
            reason = "train_raw=False rebuilds raw from the base weights, and a draw is in no file; use train_raw=True"
            raise ConfigError("init_target", self.init_target, reason)
        if self.target_parameters and self.layers_to_transform is not None:
            raise ConfigError(
                "layers_to_transform",
                self.layers_to_transform,
                "does not reach target_parameters; name the layers there, as in '0.mlp.experts.down_proj'",
            )

    @property
    def residual_scaling(self) -> float:
        """Factor on B @ A: residual_alpha / r, 1 where no alpha is given."""
        return 1.0 if self.residual_alpha is None or self.r == 0 else self.residual_alpha / self.r

    @property
    def draws_targets(self) -> bool:
        """Whether the weights start from a draw, not from the base weights."""
        return self.init_target != "pretrained"

    def scale_configs(self) -> dict[str, ResolvedScale]:
        """Return the scales of the transform by name, those fixed at a value that is not neutral included."""
        scales = {}
        for name in FAMILY_SCALES[self.family]:
            config = getattr(self, name)
            if name == "linear_scale" and self.mode == "exp_only":
                continue
            neutral = name in ("inner_multiplier", "shift") or (name == "offset" and self.family == "symexp")
            if config is None and not neutral:
                config = ScaleConfig("global", trainable=False)
            if config is not None:
                scales[name] = resolve_scale(
                    name,
                    config,
                    family=self.family,
                    normalizer=self.normalizer,
                    log_curvature=self.log_curvature,
                    normalize_by_inner_mult=self.normalize_by_inner_mult,
                )
        return scales

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any) -> Any:
        """Load the configuration of a saved adapter, after a look at its tensors' file: PEFT converts before it reads.

        A local folder with pickled tensors alone is refused: PEFT would unpickle them.

        Args:
            pretrained_model_name_or_path: Folder, or id on the hub.
            subfolder: Folder below it.
            **kwargs: Passed on to PeftConfig.from_pretrained.

        Returns:
            The configuration.

        Raises:
            CheckpointError: If a safetensors file of the folder is truncated, corrupt, missing, or not there beside a
                pickled one.
        """
        check_files(Path(pretrained_model_name_or_path, subfolder or ""))
        config: Any = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        config.awaits_load = True
        return config

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> Any:
        """Read a saved configuration as PEFT does, once it is known to be an object whose keys come once."""
        read_json(path_json_file)
        return super().from_json_file(path_json_file, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary, without check_base: each load checks anew."""
        return {name: value for name, value in super().to_dict().items() if name != "check_base"}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, and say in the folder's model card how to load the adapter.

        Each file is replaced in one step: a process that dies here leaves the old one or the new one.

        Args:
            save_directory: Folder to write to.
            **kwargs: Passed on to PeftConfig.save_pretrained.

        Raises:
            CheckpointError: If save_directory is a file, or the README.md in it no model card.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise CheckpointError(folder, "is a file, not a folder", "name a folder for the adapter")
        with replaced_files(folder) as unfinished:
            super().save_pretrained(str(unfinished), **kwargs)
            copy_card(folder, unfinished)
            settings = read_json(unfinished / CONFIG_NAME)
            write_card(unfinished, settings, self.contents, self.base_folders)
