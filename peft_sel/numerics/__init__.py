"""The method in plain torch: pure functions of tensors and numbers."""

from peft_sel.numerics.curvature import auto_beta, width_beta
from peft_sel.numerics.inversion import INITS, InversionReport, invert_weight
from peft_sel.numerics.scales import (
    PATTERNS,
    SCALE_NAMES,
    broadcast_parts,
    combine_factors,
    expand_parts,
    init_parts,
    reduce_gradient,
    slice_parts,
    start_value,
)
from peft_sel.numerics.transform import (
    FAMILIES,
    MODES,
    check_beta,
    check_choice,
    compute_dtype,
    effective_weight,
    effective_weight_gradients,
)

__all__ = [
    "FAMILIES",
    "INITS",
    "MODES",
    "PATTERNS",
    "SCALE_NAMES",
    "InversionReport",
    "auto_beta",
    "broadcast_parts",
    "check_beta",
    "check_choice",
    "combine_factors",
    "compute_dtype",
    "effective_weight",
    "effective_weight_gradients",
    "expand_parts",
    "init_parts",
    "invert_weight",
    "reduce_gradient",
    "slice_parts",
    "start_value",
    "width_beta",
]
