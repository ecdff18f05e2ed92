"""One adapter of one weight: its scales, its conversion from a base weight and its way back, for layers and files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import reduce
from operator import attrgetter

import torch
from torch import Tensor, nn

from peft_sel.config import RAW_DTYPES, SELConfig
from peft_sel.errors import (
    AdapterMismatchError,
    ConfigError,
    ConvergenceError,
    OffloadedError,
    PartitionedError,
    RoundedError,
    UnsupportedModuleError,
)
from peft_sel.kernels import Scales, WeightSpec, fold
from peft_sel.numerics import (
    INFINITIES,
    InversionReport,
    auto_beta,
    expand_parts,
    find_magnitudes,
    invert_weight,
    make_table,
    stack_tables,
    width_beta,
)
from peft_sel.partitioned import is_away, is_split
from peft_sel.shapes import expected_shapes, from_matrix, to_matrix, vector_config
from peft_sel.sharded import check_whole, is_sharded
from peft_sel.structured import PREFIX, StructuredScale, check_sign, transform_parts

HOLDER_NAME = "sel_parameters"  # in saved keys, before the name of a parameter that target_parameters named
BIAS = "bias"  # the parameter that bias="sel_only" converts beside a target module's weight
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32_TINY = torch.finfo(torch.float32).tiny
_is_meta, _get_dtype = attrgetter("is_meta"), attrgetter("dtype")  # for map, in each pass of each layer


def matches_end(pattern: str, name: str) -> bool:
    """Whether a regex matches a module name, or its end after a dot."""
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None


def check_readable(name: str, base_layer: nn.Module, weight: Tensor, convert: bool) -> None:
    """Raise unless the weight's values are, or without conversion will be, in memory as floating-point numbers."""
    hook = getattr(base_layer, "_hf_hook", None)
    if is_sharded(weight):
        raise UnsupportedModuleError(name, type(base_layer).__name__, "its weight is sharded: convert before that")
    if getattr(hook, "offload", False) or (convert and weight.is_meta):
        raise UnsupportedModuleError(name, type(base_layer).__name__, "its weight is offloaded or on the meta device")
    if weight.dtype not in FLOAT_DTYPES:
        raise UnsupportedModuleError(name, type(base_layer).__name__, f"its weight has dtype {weight.dtype}")


def makes_meta_parameters() -> bool:
    """Whether new parameters land on the meta device, as in the context of PEFT's low_cpu_mem_usage."""
    probe = nn.Module()
    probe.parameter = nn.Parameter(torch.empty(0))
    return probe.parameter.device.type == "meta"


def check_usable(
    name: str,
    adapter: str,
    config: SELConfig,
    raw: Tensor,
    residual: tuple[Tensor, Tensor] | None,
    scales: Scales,
) -> None:
    """Raise unless what a weight is computed from is in memory, whole, and as wide as the configuration says.

    Args:
        name: Module name.
        adapter: Name of the adapter.
        config: Its configuration.
        raw: Raw weight; the base weight, where a table leads from it to raw.
        residual: (A, B), or None.
        scales: Parts of each scale.

    Raises:
        OffloadedError: If a tensor is on the meta device.
        ShardedError: If FSDP2 has left this process a part of one.
        PartitionedError: If ZeRO-3 has split one among processes, and it is not gathered.
        RoundedError: If something has cast what trains.
    """
    beside = [*(residual or ()), *(part for parts in scales.values() for part in parts.values())]
    if torch.compiler.is_compiling():
        if raw.is_meta or any(tensor.is_meta for tensor in beside):
            raise OffloadedError(name, f"adapter {adapter!r}")
        return
    if raw.is_meta or any(map(_is_meta, beside)):
        raise OffloadedError(name, f"adapter {adapter!r}")
    check_whole(name, [raw, *beside])
    if is_split(raw) and (is_away(raw) or any(tensor.numel() == 0 for tensor in beside)):
        way_out = (
            "train and evaluate through the prepared model, and merge the saved adapter with merge_checkpoint "
            "(peft-sel merge), or in a process without DeepSpeed"
        )
        raise PartitionedError(f"adapter {adapter!r} of {name}", "computing its effective weight", way_out)
    wide, raw_dtype = wide_dtype(config), RAW_DTYPES[config.raw_dtype] if config.train_raw else raw.dtype
    if raw.dtype == raw_dtype and {*map(_get_dtype, beside)} <= {wide}:
        return
    found, wanted = next((t.dtype, d) for t, d in [(raw, raw_dtype), *((t, wide) for t in beside)] if t.dtype != d)
    raise RoundedError(name, adapter, found, wanted)


def resolve_beta(
    config: SELConfig, name: str, weight: Tensor, hidden_size: int | None, tensor_name: str | None = None
) -> float:
    """Choose the curvature of a target weight, as the float32 number that the adapter saves.

    Args:
        config: Its beta_pattern (first match of the whole name or its end), else its beta.
        name: Module name.
        weight: Base weight.
        hidden_size: Width of the model; None takes the smaller side of weight.
        tensor_name: How errors call the weight; None for the module's name with ".weight".

    Returns:
        beta, exactly representable in float32.

    Raises:
        ConfigError: If float32 has no positive, finite number for it.
    """
    beta: float | str = config.beta
    for pattern, value in config.beta_pattern.items():
        if matches_end(pattern, name):
            beta = value
            break
    if beta == "auto":
        beta = auto_beta(weight, config.beta_rms, tensor_name or f"{name}.weight", hidden_size)
    elif beta == "width":
        beta = width_beta(hidden_size or min(weight.shape[:2]))
    rounded = float(torch.tensor(float(beta), dtype=torch.float32))
    if not FLOAT32_TINY <= rounded <= 1 / FLOAT32_TINY:
        raise ConfigError(
            "beta",
            beta,
            f"{tensor_name or name} needs a curvature whose inverse float32 can hold; set it in beta_pattern",
        )
    return rounded


def draw_target(config: SELConfig, weight: Tensor, stacked: bool = False) -> Tensor:
    """Return what a conversion inverts in the place of a weight: the weight itself, or a Xavier draw from scratch.

    The draw comes from torch's generator on the CPU, in float32 (float64 for a float64 weight), whatever the device:
    one seed gives one start. Of a convolution, fan in and fan out count the kernel; of a stack, each matrix is drawn
    for itself. A vector has no fans and stays as it is.

    Args:
        config: Its init_target.
        weight: Base weight.
        stacked: Whether it is a stack of matrices along its first dimension.

    Returns:
        A tensor of the weight's shape, on its device.
    """
    if config.init_target == "pretrained" or weight.dim() < 2:
        return weight
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    target = torch.empty(weight.shape, dtype=dtype)
    fill = nn.init.xavier_uniform_ if config.init_target == "xavier_uniform" else nn.init.xavier_normal_
    for matrix in target.unbind() if stacked else [target]:
        fill(matrix)
    return target.to(weight.device)


def invert_at_start(
    config: SELConfig, beta: float | Tensor, weight: Tensor, name: str
) -> tuple[Tensor, InversionReport]:
    """Invert a base weight with the starting values of the configured scales (every pattern starts uniform).

    Args:
        config: Mode, family, init and scales.
        beta: Curvature, exactly representable in float32; a vector for a stack of matrices, one each.
        weight: Base weight.
        name: How errors call the tensor.

    Returns:
        (raw, report) of invert_weight, raw in the configured raw_dtype; the report of a stack is that of its worst.
    """
    if isinstance(beta, Tensor) and beta.dim() > 0:
        pairs = enumerate(zip(beta.tolist(), weight.unbind(), strict=True))
        raws, reports = zip(
            *(invert_at_start(config, value, matrix, f"{name}[{index}]") for index, (value, matrix) in pairs),
            strict=True,
        )
        steps, residuals, converged = zip(*reports, strict=True)
        return torch.stack(raws), InversionReport(max(steps), max(residuals), all(converged))
    beta = float(beta)
    raw_dtype = RAW_DTYPES[config.raw_dtype]
    dtype = torch.float64 if raw_dtype == torch.float64 else torch.float32
    starts = {}
    for scale, scale_config in config.scale_configs().items():
        structured = StructuredScale(scale, scale_config, beta, (1, 1), dtype)
        parts = structured.parts(torch.tensor(beta))
        starts[scale] = expand_parts(structured.pattern, parts).detach().reshape(()).to(weight.device)
    raw, report = invert_weight(
        weight.to(dtype) if torch.float64 in (dtype, weight.dtype) else weight,
        **starts,
        beta=beta,
        mode=config.mode,
        init=config.init,
        family=config.family,
        normalize_by_inner_mult=config.normalize_by_inner_mult,
        name=name,
    )
    return raw.to(raw_dtype), report


def tabulate_at_start(
    config: SELConfig, beta: Tensor, weight: Tensor, name: str
) -> tuple[Tensor, InversionReport] | None:
    """Tabulate the raw weight of each value of a base weight, as invert_at_start finds it.

    Args:
        config: Mode, family, init and scales.
        beta: Curvature, 0-d; a vector for a stack of matrices, one each.
        weight: Base weight.
        name: How errors call the tensor.

    Returns:
        The table that kernels.fold takes beside the weight (a stack of them for a stack), and the report of its worst;
        None where only invert_at_start will do: for a wider dtype than two bytes, a vector, or a weight or a value
        between its smallest and largest that cannot be inverted.
    """
    if weight.dtype not in INFINITIES or weight.dim() < 2:
        return None
    if beta.dim() > 0:
        pairs = enumerate(zip(beta.unbind(), weight.unbind(), strict=True))
        members = [tabulate_at_start(config, value, matrix, f"{name}[{index}]") for index, (value, matrix) in pairs]
        found = [member for member in members if member is not None]
        if len(found) < len(members):
            return None
        steps, residuals, _ = zip(*(report for _, report in found), strict=True)
        return stack_tables([table for table, _ in found]), InversionReport(max(steps), max(residuals), True)
    magnitudes = find_magnitudes(weight)
    if magnitudes.stop > INFINITIES[weight.dtype]:
        return None
    try:
        return make_table(
            magnitudes, weight.dtype, weight.device, lambda values: invert_at_start(config, beta, values, name)
        )
    except ConvergenceError:
        return None


def init_residual(
    rank: int, shape: tuple[int, int], stack: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Create the residual of a weight, which starts at zero (4.4).

    Args:
        rank: Its rank.
        shape: (d_out, d_in) of the matrix.
        stack: (num_experts,) for a stack of them.
        dtype: Of both.
        device: Of both.

    Returns:
        A, uniform as in nn.Linear and LoRA, and B, zero.
    """
    bound = 1 / math.sqrt(max(shape[1], 1))
    a = torch.empty(*stack, rank, shape[1], dtype=dtype, device=device).uniform_(-bound, bound)
    return a, torch.zeros(*stack, shape[0], rank, dtype=dtype, device=device)


def wide_dtype(config: SELConfig) -> torch.dtype:
    """Return the dtype in which an adapter's weight is computed, before it is cast to that of the base."""
    return torch.float64 if config.raw_dtype == "float64" else torch.float32


def make_spec(config: SELConfig, patterns: tuple[tuple[str, str], ...], dtype: torch.dtype) -> WeightSpec:
    """Return what is fixed about a weight, from its adapter's configuration, the scales it has and its dtype."""
    return WeightSpec(
        config.mode, patterns, config.residual_scaling, dtype, config.family, config.normalize_by_inner_mult
    )


def fold_weight(
    spec: WeightSpec,
    raw: Tensor,
    beta: Tensor,
    scales: Scales,
    residual: tuple[Tensor, Tensor] | None,
    table: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Compute the effective weight of one matrix, or of each in a stack where beta is a vector, by the kernel.

    Args:
        spec: The weight's constants.
        raw: Raw weight in its module's layout; a stack of experts has them in its first dimension.
        beta: Curvature, 0-d, or (num_experts,).
        scales: Parts of each scale, stacked like raw.
        residual: (A, B), stacked like raw, or None.
        table: None, or where raw is a base weight, its table of tabulate_at_start.
        transposed: Whether the layout is (d_in, d_out).

    Returns:
        w_eff in the module's layout.
    """
    if beta.dim() == 0:
        matrix = fold(spec, to_matrix(raw, transposed), beta, scales, residual, table)
        return from_matrix(matrix, tuple(raw.shape), transposed).contiguous()
    # unbind and not [index]: its gradient is one stack, where each index would fill a whole tensor with zeros.
    parts = {(scale, part): tensor.unbind() for scale, values in scales.items() for part, tensor in values.items()}
    pairs = zip(residual[0].unbind(), residual[1].unbind(), strict=True) if residual is not None else None
    weights = []
    for index, (matrix, value) in enumerate(zip(raw.unbind(), beta.unbind(), strict=True)):
        members: Scales = {scale: {} for scale in scales}
        for (scale, part), tensors in parts.items():
            members[scale][part] = tensors[index]
        member_table = None if table is None else table[index]
        member_residual = next(pairs) if pairs else None
        weights.append(fold_weight(spec, matrix, value, members, member_residual, member_table, transposed))
    return torch.stack(weights)


def add_differences(base_weight: Tensor, differences: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a base weight with several adapters applied: w_base + sum(w_eff - w_base), cast once.

    Args:
        base_weight: Base weight.
        differences: w_eff - w_base of each adapter, in the adapter's wide_dtype; added in their order.
        dtype: Dtype of the result.

    Returns:
        The weight, the same bits for a whole as for its parts.
    """
    return (base_weight + reduce(torch.add, differences)).to(dtype)


def rebuild_weight(
    config: SELConfig,
    tensors: dict[str, Tensor],
    *,
    dtype: torch.dtype,
    base_weight: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """Compute the effective weight from the saved tensors of an adapter, by the same kernel as the layer.

    Args:
        config: The adapter's configuration.
        tensors: Saved tensors of one target weight by their name after the prefix: "raw", "beta", "exp_scale.row", ...
        dtype: Dtype of the result.
        base_weight: The base weight; needed where train_raw=False left raw out.
        name: How errors call the tensor.

    Returns:
        Effective weight in its module's layout, bit for bit the layer's own.

    Raises:
        AdapterMismatchError: If a tensor is missing, unexpected or of another shape.
        MultiplierSignError: If the transform is divided by an inner multiplier that is not above 0.
    """
    reference = tensors.get("raw", base_weight)
    shape = tuple(reference.shape) if reference is not None else ()
    transposed, stacked = "transposed" in tensors, "beta" in tensors and tensors["beta"].dim() > 0
    if len(shape) < (3 if stacked else 1) or (base_weight is not None and tuple(base_weight.shape) != shape):
        raise AdapterMismatchError(name, [], [], [f"{PREFIX}raw {shape}"])
    config = vector_config(config) if len(shape) == 1 else config
    expected = expected_shapes(config, shape, transposed, stacked)
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [key for key in expected if key in tensors and tuple(tensors[key].shape) != expected[key]]
    if missing or unexpected or wrong:
        raise AdapterMismatchError(name, missing, unexpected, wrong)
    beta = tensors["beta"]
    table = None
    if config.train_raw:
        raw = tensors["raw"]
    else:
        assert base_weight is not None
        found = tabulate_at_start(config, beta, base_weight, name)
        if found is None:
            raw, _ = invert_at_start(config, beta, base_weight, name)
        else:
            raw, table = base_weight, found[0]
    scales, patterns = {}, []
    for scale, scale_config in config.scale_configs().items():
        parts = {key.split(".")[1]: value for key, value in tensors.items() if key.startswith(f"{scale}.")}
        check_sign(scale_config, parts, name)
        scales[scale] = transform_parts(scale_config, parts, beta)
        patterns.append((scale, scale_config.pattern))
    spec = make_spec(config, tuple(patterns), dtype)
    residual = (tensors["residual_a"], tensors["residual_b"]) if config.r > 0 else None
    with torch.no_grad():
        return fold_weight(spec, raw, beta, scales, residual, table, transposed)
