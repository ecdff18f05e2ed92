"""ScaleConfig: what a user can choose about one scale; and what a family and the variants make of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from peft_sel.errors import ConfigError
from peft_sel.numerics import FAMILY_SCALES, PATTERNS, check_choice
from peft_sel.untrusted import check_fields

NORMALIZERS = ("folded", "fixed")
SUMS = ("row_col_add", "lora")  # patterns without a logarithm part by part


@dataclass
class ScaleConfig:
    """How one structured scale is built and trained (section 4.4 of the paper).

    SELConfig says what the study and (open) mean.

    Attributes:
        pattern: How one number per weight is made of few: "global" (a single one), "row" (d_out), "column" (d_in),
            "row_col_mult" (a row's times a column's), "row_col_add" (their sum, of which a constant can move from one
            to the other) or "lora" (a single one plus a product of two thin matrices). Default "row_col_mult": the
            paper's for e_w, l_w and m, at d_out + d_in numbers. A scale that starts at 0 has no gradient in it.
        init: Value everywhere at the start, finite: above 0 for exp_scale and inner_multiplier, at least 0 for
            linear_scale, 0 for shift. Default None: the method's own (1/beta, 1/max(beta, 7.5), 1, and 0 for the
            others; in the family damped 1 for linear_scale and 0.5 for offset), for which every weight has an inverse.
        lr_mult: Multiplier k0 on the base learning rate, positive. Default None: 1, or where SELConfig.init_target
            draws the weights, the paper's (50 annealed to 8 for exp_scale, linear_scale; 0.01 to 0.5 for
            inner_multiplier). Study: on pretrained weights 8 throughout, and 50 to 8, read 2.669. From scratch 1 and
            the paper's did not differ in mode mismatch (+0.016 ± 0.159, five seeds).
        lr_mult_end: Multiplier k1 after annealing, positive. Default None: lr_mult throughout, if that is given.
        weight_decay: Whether weight decay applies. Default None: the method's rule, exp_scale and linear_scale only,
            since decay would pull an inner_multiplier away from 1.
        trainable: False fixes the scale at its start. Default True.
        rank: Inner dimension of the lora pattern, at least 1. Default 4: ours, as small as may be worth it (open).
        transform: "exp" trains the logarithm of each part, so that the scale stays positive; not with row_col_add and
            lora. Default None: the part itself, with which e_w can change its sign, as in the paper.

    Raises:
        ConfigError: If a value cannot work.
    """

    pattern: str = "row_col_mult"
    init: float | None = None
    lr_mult: float | None = None
    lr_mult_end: float | None = None
    weight_decay: bool | None = None
    trainable: bool = True
    rank: int = 4
    transform: Literal["exp"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("pattern", self.pattern, PATTERNS)
        for name in ("lr_mult", "lr_mult_end"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "a multiplier must be positive; trainable=False fixes a scale")
        if self.init is not None and not math.isfinite(self.init):
            raise ConfigError("init", self.init, "the start of a scale must be finite")
        if self.transform == "exp" and self.init is not None and self.init <= 0:
            raise ConfigError("init", self.init, "transform='exp' trains a logarithm; start above 0")
        if self.rank < 1:
            raise ConfigError("rank", self.rank, "the lora pattern needs a rank of at least 1")
        if self.transform not in (None, "exp"):
            raise ConfigError("transform", self.transform, "unknown; choose None or 'exp'")
        if self.transform == "exp" and self.pattern in ("row_col_add", "lora"):
            raise ConfigError(
                "transform", self.transform, f"a sum ({self.pattern}) has no logarithm part by part; use row_col_mult"
            )


@dataclass
class ResolvedScale(ScaleConfig):
    """A scale as a family and the variants of the parametrisation complete it.

    Attributes:
        family: Says where the scale starts.
        divisor: What the trained parts are divided by: "beta", "linear_beta" (beta, at least 7.5) or None.
        divides: Whether the transform is divided by this scale, which then may not reach 0.
    """

    family: str = "symexp"
    divisor: Literal["beta", "linear_beta"] | None = None
    divides: bool = False


def parse_scale(name: str, value: Any) -> ScaleConfig | None:
    """Return the ScaleConfig that was chosen for a scale.

    Args:
        name: Name of the scale.
        value: A ScaleConfig, its fields as a dictionary, a pattern name, or None.

    Returns:
        The ScaleConfig; None for None.

    Raises:
        ConfigError: If it is none, or cannot work.
    """
    if value is None or isinstance(value, ScaleConfig):
        return value
    try:
        return ScaleConfig(pattern=value) if isinstance(value, str) else ScaleConfig(**value)
    except TypeError as error:
        raise ConfigError(name, value, f"not a ScaleConfig ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.field}", error.value, error.reason) from error


def resolve_scale(
    name: str, config: ScaleConfig, *, family: str, normalizer: str, log_curvature: bool, normalize_by_inner_mult: bool
) -> ResolvedScale:
    """Complete a scale by what follows from the other fields of a SELConfig.

    Args:
        name: Name of the scale.
        config: What was chosen for it.
        family: As in SELConfig.
        normalizer: As in SELConfig.
        log_curvature: As in SELConfig.
        normalize_by_inner_mult: As in SELConfig.

    Returns:
        The scale; n of the damped family, and m of log_curvature, as logarithms.
    """
    resolved = ResolvedScale(**asdict(config), family=family)
    if name == "inner_multiplier":
        resolved.divides = normalize_by_inner_mult
        if log_curvature:
            resolved.transform, resolved.divisor = "exp", "beta"
    if name == "offset" and family == "damped":
        resolved.transform = "exp"
    if normalizer == "fixed" and name == "exp_scale":
        resolved.divisor = "beta"
    if normalizer == "fixed" and name == "linear_scale" and family == "symexp":
        resolved.divisor = "linear_beta"
    return resolved


def check_family_scales(family: str, scales: dict[str, ScaleConfig | None]) -> None:
    """Check what was chosen for the scales against a family.

    Args:
        family: The family.
        scales: Every scale by name, None where it is fixed or left out.

    Raises:
        ConfigError: If the family lacks a scale, or n of the damped family is not positive.
    """
    for name, config in scales.items():
        if config is not None and name not in FAMILY_SCALES[family]:
            raise ConfigError(
                name,
                config.pattern,
                f"family={family!r} has no such scale, only {', '.join(FAMILY_SCALES[family])}; leave it out",
            )
    offset = scales["offset"]
    if family != "damped" or offset is None:
        return
    if offset.init is not None and offset.init <= 0:
        raise ConfigError(
            "offset", offset.init, "family='damped' needs n above 0: at 0 it has no linear path, below it no inverse"
        )
    if offset.pattern in SUMS:
        raise ConfigError(
            "offset",
            offset.pattern,
            "family='damped' trains the logarithm of n; use global, row, column or row_col_mult",
        )


def check_multiplier(multiplier: ScaleConfig | None, log_curvature: bool, normalize_by_inner_mult: bool) -> None:
    """Check what was chosen for the inner multiplier against the variants of the curvature.

    Args:
        multiplier: What was chosen for m.
        log_curvature: As in SELConfig.
        normalize_by_inner_mult: As in SELConfig.

    Raises:
        ConfigError: If there is no m for a variant, or its pattern has no logarithm.
    """
    for field, chosen in (("log_curvature", log_curvature), ("normalize_by_inner_mult", normalize_by_inner_mult)):
        if chosen and multiplier is None:
            raise ConfigError(field, chosen, "needs an inner_multiplier, which is None; give it a pattern")
    if log_curvature and multiplier is not None and multiplier.pattern in SUMS:
        raise ConfigError(
            "log_curvature",
            log_curvature,
            f"a sum ({multiplier.pattern}) has no logarithm part by part; make inner_multiplier global, row, column or "
            "row_col_mult",
        )


def check_starts(family: str, scales: dict[str, ScaleConfig | None]) -> None:
    """Check that each scale starts where the weights have an inverse and it has a gradient.

    Args:
        family: The family.
        scales: Every scale by name, None where it is fixed or left out.

    Raises:
        ConfigError: If one does not.
    """
    shift = scales["shift"]
    if shift is not None and shift.init:
        raise ConfigError(
            "shift", shift.init, "must start at 0: any other start leaves small weights without a raw one"
        )
    for name, minimum in (
        ("exp_scale", "above 0"),
        ("inner_multiplier", "above 0"),
        ("linear_scale", "at 0 or above"),
    ):
        scale = scales[name]
        if scale is None or scale.init is None:
            continue
        if scale.init < 0 or (scale.init == 0 and minimum == "above 0"):
            raise ConfigError(name, scale.init, f"must start {minimum}")
        if scale.init == 0 and scale.pattern == "row_col_mult":
            raise ConfigError(
                name, scale.init, "a product of rows and columns that starts at 0 gets no gradient; use row"
            )
    for name in ("shift", "offset") if family == "symexp" else ():
        scale = scales[name]
        if scale is not None and scale.transform == "exp" and not scale.init:
            raise ConfigError(name, scale.transform, "a start of 0 has no logarithm; use transform=None")
        if scale is not None and scale.pattern == "row_col_mult" and not scale.init:
            raise ConfigError(
                name,
                scale.pattern,
                "a product of rows and columns that starts at 0 gets no gradient; use global, row, column, "
                "row_col_add or lora",
            )
