"""The transform and its gradients as Triton kernels, one pass each over a weight; imported by triton_backend.py only.

Sums and products alone, as in numerics.elementary: without contraction (enable_fp_fusion=False) a GPU computes the bits
that a CPU computes. A kernel's first axis are the rows of a matrix whose columns lie side by side in memory; the caller
swaps rows and columns for one that lies the other way.
"""

import math

import triton
import triton.language as tl

from peft_sel.numerics import elementary

ABSENT, GLOBAL, ROW, COLUMN, ROW_COL_MULT, ROW_COL_ADD = (tl.constexpr(code) for code in range(6))

LOG2_E = tl.constexpr(elementary.LOG2_E)
LN2_HIGH = tl.constexpr(elementary.LN2_HIGH)
LN2_LOW = tl.constexpr(elementary.LN2_LOW)
C2, C3, C4, C5, C6, C7 = (tl.constexpr(1 / math.factorial(power)) for power in range(2, 8))
# Added to a small number and taken away again, it rounds that to an integer, halves to even.
ROUNDER = tl.constexpr(1.5 * 2.0**23)
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _split_exponent(x, LOWEST: tl.constexpr):
    """Return k and expm1(r), where x = k*ln(2) + r: elementary._reduce."""
    x = tl.minimum(tl.maximum(x, LOWEST, propagate_nan=NAN), 1000.0, propagate_nan=NAN)
    k = (x * LOG2_E + ROUNDER) - ROUNDER
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = ((((r * C7 + C6) * r + C5) * r + C4) * r + C3) * r + C2
    return k.to(tl.int32), r + r * r * series


@triton.jit
def expm1(x):
    """Compute exp(x) - 1 in float32: elementary.expm1."""
    k, rest = _split_exponent(x, -50.0)
    scale = ((tl.minimum(k, 128) + 127) << 23).to(tl.float32, bitcast=True)  # 2^k, infinite from 128 on
    inverse = (tl.maximum(127 - k, 0) << 23).to(tl.float32, bitcast=True)
    return scale * (rest + (1.0 - inverse))


@triton.jit
def exp(x):
    """Compute the exponential in float32: elementary.exp."""
    k, rest = _split_exponent(x, -1000.0)
    normal = (tl.minimum(tl.maximum(k, -126), 128) + 127) << 23
    bits = normal >> tl.minimum(tl.maximum(-126 - k, 0), 31)  # subnormal below 2^-126
    return bits.to(tl.float32, bitcast=True) * (1.0 + rest)


@triton.jit
def _load_scale(row, column, rows, columns, row_mask, column_mask, PATTERN: tl.constexpr):
    """Load a scale as what broadcasts to the tile; 1 where it is absent and beyond the edges."""
    value = 1.0
    if PATTERN == GLOBAL:
        value = tl.load(row)
    elif PATTERN == ROW:
        value = tl.load(row + rows, mask=row_mask, other=1.0)[:, None]
    elif PATTERN == COLUMN:
        value = tl.load(column + columns, mask=column_mask, other=1.0)[None, :]
    elif PATTERN != ABSENT:
        row_values = tl.load(row + rows, mask=row_mask, other=1.0)[:, None]
        column_values = tl.load(column + columns, mask=column_mask, other=1.0)[None, :]
        value = row_values * column_values if PATTERN == ROW_COL_MULT else row_values + column_values
    return value


@triton.jit
def _split_sign(raw):
    """Return the sign, -1 for -0.0, and the magnitude."""
    sign = tl.where(raw.to(tl.int32, bitcast=True) < 0, -1.0, 1.0)
    return sign, sign * raw


@triton.jit
def _sign_linear(sign, linear, MODE: tl.constexpr):
    """Return the linear scale with the mode's sign."""
    if MODE == "mismatch":
        linear = sign * linear
    elif MODE == "oppose":
        linear = linear * -1.0
    return linear


@triton.jit
def _grow(magnitude, curvature, offset, shift, FAMILY: tl.constexpr, N: tl.constexpr, S: tl.constexpr):
    """Return what transform._grow returns."""
    exponent = curvature * magnitude
    lacking = 1.0
    if FAMILY == "sinh":
        down = expm1(exponent * -1.0)
        growth = (expm1(exponent) - down) * 0.5
        lacking = down + 1.0
    elif FAMILY == "damped":
        rise = exp((curvature - 1.0) * magnitude - offset)
        growth = rise * (0.0 - expm1(exponent * -1.0))
        lacking = rise - growth
    else:
        if S != ABSENT:
            exponent = exponent + shift
        growth = expm1(exponent)
        if N != ABSENT:
            lacking = exp(offset * -1.0)
            growth = lacking * growth
    return growth, lacking


@triton.jit
def fold_kernel(
    result_ptr, raw_ptr, delta_ptr, beta_ptr, num_rows, num_columns,
    result_row, result_column, raw_row, raw_column, delta_row, delta_column,
    e_rows, e_columns, l_rows, l_columns, m_rows, m_columns, n_rows, n_columns, s_rows, s_columns,
    E: tl.constexpr, L: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    MODE: tl.constexpr, FAMILY: tl.constexpr, NORMALIZE: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of transform.effective_weight plus the residual, rounded once."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row_mask, column_mask = rows < num_rows, columns < num_columns
    mask = row_mask[:, None] & column_mask[None, :]
    exp_scale = _load_scale(e_rows, e_columns, rows, columns, row_mask, column_mask, E)
    offset = _load_scale(n_rows, n_columns, rows, columns, row_mask, column_mask, N)
    shift = _load_scale(s_rows, s_columns, rows, columns, row_mask, column_mask, S)
    multiplier = _load_scale(m_rows, m_columns, rows, columns, row_mask, column_mask, M)
    curvature = tl.load(beta_ptr) * multiplier
    raw = tl.load(raw_ptr + rows[:, None] * raw_row + columns[None, :] * raw_column, mask=mask, other=0.0)
    sign, magnitude = _split_sign(raw.to(tl.float32))
    growth, _ = _grow(magnitude, curvature, offset, shift, FAMILY, N, S)
    inside = exp_scale * growth
    if L != ABSENT and MODE != "exp_only":
        linear = _load_scale(l_rows, l_columns, rows, columns, row_mask, column_mask, L)
        linear = _sign_linear(sign, linear, MODE)
        if FAMILY == "damped":
            linear = linear * (expm1(offset * -1.0 * exp(magnitude)) * -1.0)
        inside = inside + magnitude * linear
    if NORMALIZE:
        inside = tl.div_rn(inside, tl.broadcast_to(multiplier, inside.shape))
    weight = sign * inside
    if RESIDUAL:
        delta = tl.load(delta_ptr + rows[:, None] * delta_row + columns[None, :] * delta_column, mask=mask, other=0.0)
        weight = tl.where(delta == 0.0, weight, weight + delta)  # adding +0 would turn -0.0 into +0.0
    result = result_ptr + rows[:, None] * result_row + columns[None, :] * result_column
    tl.store(result, weight.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pull_back_terms(
    grad, raw, beta, exp_scale, linear_scale, multiplier, offset, shift,
    L: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    MODE: tl.constexpr, FAMILY: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Return the gradients of raw and of the expanded scales: transform.effective_weight_gradients."""
    sign, magnitude = _split_sign(raw)
    curvature = beta * multiplier
    growth, lacking = _grow(magnitude, curvature, offset, shift, FAMILY, N, S)
    rise = growth + lacking
    if NORMALIZE:
        grad = tl.div_rn(grad, tl.broadcast_to(multiplier, grad.shape))
    signed_grad = grad * sign
    slope = exp_scale * curvature * rise
    total = exp_scale * growth
    if MODE == "mismatch":
        linear_terms = grad * magnitude
    elif MODE == "exp_only":
        linear_terms = magnitude * 0.0
    else:
        linear_terms = signed_grad * _sign_linear(sign, magnitude, MODE)
    offset_terms = signed_grad * -1.0 * exp_scale * growth
    if FAMILY == "damped":
        slope = slope - exp_scale * growth
        damping = expm1(offset * -1.0 * exp(magnitude)) * -1.0
        linear_terms = linear_terms * damping
    if L != ABSENT and MODE != "exp_only":
        linear = _sign_linear(sign, linear_scale, MODE)
        if FAMILY == "damped":
            damped_away = linear * magnitude * exp(magnitude - offset * exp(magnitude))
            offset_terms = offset_terms + signed_grad * damped_away
            linear = linear * damping
        slope = slope + linear
        if FAMILY == "damped":
            slope = slope + damped_away * offset
        total = total + magnitude * linear
    multiplier_terms = signed_grad * exp_scale * rise * (beta * magnitude)
    if NORMALIZE:
        lost = tl.div_rn(signed_grad * total, tl.broadcast_to(multiplier, grad.shape))
        multiplier_terms = multiplier_terms - lost
    shift_terms = signed_grad * exp_scale * rise
    return grad * slope, signed_grad * growth, linear_terms, multiplier_terms, offset_terms, shift_terms


@triton.jit
def _reduce(
    sums, terms, mask, rows, columns, row_mask, column_mask, row_factors, column_factors, row_sums,
    PATTERN: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums over its columns, and add what its sums over rows are taken of to the sums."""
    if SUM >= 0:
        terms = tl.where(mask, terms, 0.0)
        row_terms = terms
        if PATTERN == ROW_COL_MULT:
            row_terms = terms * tl.load(column_factors + columns, mask=column_mask, other=0.0)[None, :]
            terms = terms * tl.load(row_factors + rows, mask=row_mask, other=0.0)[:, None]
        if PATTERN != COLUMN:
            tl.store(row_sums, tl.sum(row_terms, 1), mask=row_mask)
        sums += terms
    return sums


@triton.jit
def _store_columns(column_sums, sums, column_mask, PATTERN: tl.constexpr, SUM: tl.constexpr):
    if SUM >= 0 and PATTERN > ROW:
        tl.store(column_sums, tl.sum(sums, 0), mask=column_mask)


@triton.jit
def pull_back_kernel(
    raw_grad_ptr, grad_ptr, raw_ptr, beta_ptr, row_sums_ptr, column_sums_ptr, num_rows, num_columns,
    raw_grad_row, raw_grad_column, grad_row, grad_column, raw_row, raw_column,
    e_rows, e_columns, l_rows, l_columns, m_rows, m_columns, n_rows, n_columns, s_rows, s_columns,
    E: tl.constexpr, L: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    MODE: tl.constexpr, FAMILY: tl.constexpr, NORMALIZE: tl.constexpr, RAW: tl.constexpr,
    E_SUM: tl.constexpr, L_SUM: tl.constexpr, M_SUM: tl.constexpr, N_SUM: tl.constexpr, S_SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of raw, and partial sums of those of the scales, for SEGMENT rows of a block of columns.

    row_sums is (blocks of columns, scales, rows) and column_sums (segments, scales, columns), for the scales whose
    gradients are asked for; X_SUM is the place of scale X among them, or -1.
    """
    SUMS: tl.constexpr = (E_SUM >= 0) + (L_SUM >= 0) + (M_SUM >= 0) + (N_SUM >= 0) + (S_SUM >= 0)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_mask = columns < num_columns
    beta = tl.load(beta_ptr)
    e_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    l_sums, m_sums, n_sums, s_sums = e_sums, e_sums, e_sums, e_sums
    first = tl.program_id(1).to(tl.int64) * SEGMENT
    for start in range(0, SEGMENT, BLOCK_ROWS):
        rows = first + start + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        exp_scale = _load_scale(e_rows, e_columns, rows, columns, row_mask, column_mask, E)
        linear_scale = _load_scale(l_rows, l_columns, rows, columns, row_mask, column_mask, L)
        multiplier = _load_scale(m_rows, m_columns, rows, columns, row_mask, column_mask, M)
        offset = _load_scale(n_rows, n_columns, rows, columns, row_mask, column_mask, N)
        shift = _load_scale(s_rows, s_columns, rows, columns, row_mask, column_mask, S)
        raw = tl.load(raw_ptr + rows[:, None] * raw_row + columns[None, :] * raw_column, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + rows[:, None] * grad_row + columns[None, :] * grad_column, mask=mask, other=0.0)
        raw_grad, e, l, m, n, s = _pull_back_terms(  # noqa: E741
            grad.to(tl.float32), raw.to(tl.float32), beta, exp_scale, linear_scale, multiplier, offset, shift,
            L, N, S, MODE, FAMILY, NORMALIZE,
        )  # fmt: skip
        if RAW:
            raw_grad_ptrs = raw_grad_ptr + rows[:, None] * raw_grad_row + columns[None, :] * raw_grad_column
            tl.store(raw_grad_ptrs, raw_grad, mask=mask)
        at = row_sums_ptr + tl.program_id(0).to(tl.int64) * SUMS * num_rows + rows
        step = num_rows
        e_sums = _reduce(
            e_sums, e, mask, rows, columns, row_mask, column_mask, e_rows, e_columns, at + E_SUM * step, E, E_SUM
        )
        l_sums = _reduce(
            l_sums, l, mask, rows, columns, row_mask, column_mask, l_rows, l_columns, at + L_SUM * step, L, L_SUM
        )
        m_sums = _reduce(
            m_sums, m, mask, rows, columns, row_mask, column_mask, m_rows, m_columns, at + M_SUM * step, M, M_SUM
        )
        n_sums = _reduce(
            n_sums, n, mask, rows, columns, row_mask, column_mask, n_rows, n_columns, at + N_SUM * step, N, N_SUM
        )
        s_sums = _reduce(
            s_sums, s, mask, rows, columns, row_mask, column_mask, s_rows, s_columns, at + S_SUM * step, S, S_SUM
        )
    at = column_sums_ptr + tl.program_id(1).to(tl.int64) * SUMS * num_columns + columns
    _store_columns(at + E_SUM * num_columns, e_sums, column_mask, E, E_SUM)
    _store_columns(at + L_SUM * num_columns, l_sums, column_mask, L, L_SUM)
    _store_columns(at + M_SUM * num_columns, m_sums, column_mask, M, M_SUM)
    _store_columns(at + N_SUM * num_columns, n_sums, column_mask, N, N_SUM)
    _store_columns(at + S_SUM * num_columns, s_sums, column_mask, S, S_SUM)
