"""The method in plain torch: pure functions of tensors and numbers."""

from peft_sel.numerics.curvature import auto_beta, width_beta
from peft_sel.numerics.inversion import INITS, InversionReport, invert_weight
from peft_sel.numerics.lookup import INFINITIES, find_magnitudes, look_up, make_table, stack_tables
from peft_sel.numerics.scales import (
    MIN_LINEAR_BETA,
    PATTERNS,
    broadcast_parts,
    combine_factors,
    expand_parts,
    init_parts,
    reduce_gradient,
    slice_parts,
    smallest_value,
    start_value,
)
from peft_sel.numerics.transform import (
    FAMILIES,
    FAMILY_SCALES,
    MODES,
    SCALE_NAMES,
    check_beta,
    check_choice,
    check_family,
    compute_dtype,
    effective_weight,
    effective_weight_gradients,
)

__all__ = [
    "FAMILIES",
    "FAMILY_SCALES",
    "INFINITIES",
    "INITS",
    "MIN_LINEAR_BETA",
    "MODES",
    "PATTERNS",
    "SCALE_NAMES",
    "InversionReport",
    "auto_beta",
    "broadcast_parts",
    "check_beta",
    "check_choice",
    "check_family",
    "combine_factors",
    "compute_dtype",
    "effective_weight",
    "effective_weight_gradients",
    "expand_parts",
    "find_magnitudes",
    "init_parts",
    "invert_weight",
    "look_up",
    "make_table",
    "reduce_gradient",
    "slice_parts",
    "smallest_value",
    "stack_tables",
    "start_value",
    "width_beta",
]
