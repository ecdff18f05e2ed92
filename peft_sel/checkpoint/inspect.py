"""Look into checkpoints and adapters without building a model: what is in them, and what a conversion would do."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor
from tqdm import tqdm

from peft_sel.checkpoint.adapter import Adapter
from peft_sel.checkpoint.experts import find_split_stacks
from peft_sel.checkpoint.shards import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    MODEL_FILE,
    CheckpointReader,
)
from peft_sel.config import SELConfig
from peft_sel.conversion import BIAS, FLOAT_DTYPES, invert_at_start, rebuild_weight, resolve_beta
from peft_sel.errors import SELError, list_names, make_line
from peft_sel.numerics import compute_dtype, mean_value
from peft_sel.shapes import to_matrix, vector_config
from peft_sel.structured import StructuredScale, transform_parts
from peft_sel.targets import default_target_modules
from peft_sel.untrusted import read_json

# Tables that are looked up, and output heads: targets only where someone asks for them.
EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe|lm_head|shared)")
BLOCK_ROWS = 1024


@dataclass
class TensorReport:
    """What inspect_checkpoint found out about one tensor; fields that do not apply are None.

    Attributes:
        name: Key in the checkpoint, or module path in an adapter.
        shape: Shape of the weight, () where a small adapter does not tell.
        dtype: Dtype on disk, without "torch.".
        std: Standard deviation, of the raw weight in an adapter.
        max_over_std: Largest magnitude divided by std.
        beta: Curvature that a conversion would choose, or that the adapter saved (the mean of a stack of experts).
        newton_steps: Steps of the inversion.
        num_differing: Elements whose bits differ after conversion and merge.
        max_ulp: Largest difference then, in units in the last place of dtype.
        scale_means: Mean of each trained scale, relative to its start (the mean itself where that is 0).
        residual_norm: Frobenius norm of the residual.
        error: Why the tensor cannot be converted or read.
        note: What a conversion would warn about.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    std: float | None = None
    max_over_std: float | None = None
    beta: float | None = None
    newton_steps: int | None = None
    num_differing: int | None = None
    max_ulp: int | None = None
    scale_means: dict[str, float] = field(default_factory=dict)
    residual_norm: float | None = None
    error: str | None = None
    note: str | None = None

    @property
    def round_trip(self) -> str:
        """The outcome of converting and merging, in words; empty where it was not tried."""
        if self.error is not None:
            return "refused"
        if self.num_differing is None:
            return ""
        return "identical" if self.num_differing == 0 else f"{self.num_differing} differ, max {self.max_ulp} ulp"


@torch.no_grad()
def inspect_checkpoint(
    path: str | Path, *, config: SELConfig | None = None, progress: bool = True
) -> list[TensorReport]:
    """Report on each target weight of a model checkpoint or each module of an adapter, one tensor in memory at a time.

    For a model checkpoint this is a rehearsal: every weight that would be converted is inverted and folded back by the
    code that does it for real. A weight that would be refused is reported, not raised.

    Args:
        path: Folder of a model or an adapter, in safetensors.
        config: How a model would be converted; None for SELConfig(). Ignored for an adapter, which has its own.
        progress: Show a progress bar when standard error is a terminal.

    Returns:
        One report per tensor, in the order of the files.

    Raises:
        CheckpointError: If the folder or a file cannot be used.
    """
    path = Path(path)
    is_model = any(os.path.isfile(path / name) for name in (MODEL_FILE, f"{MODEL_FILE}.index.json"))
    disable = None if progress else True
    if os.path.isfile(path / ADAPTER_CONFIG_FILE) and not is_model:
        with Adapter(path) as adapter:
            modules = [_inspect_module(adapter, module) for module in tqdm(adapter.modules, "inspect", disable=disable)]
            return modules + [_describe(name, adapter.reader.read(key)) for name, key in adapter.replacements.items()]
    with CheckpointReader(path) as reader:
        model_config = read_json(path / CONFIG_FILE) if os.path.lexists(path / CONFIG_FILE) else {}
        config = config or SELConfig()
        is_target = _target_rule(config, str(model_config.get("model_type")))
        text_config = model_config.get("text_config") or model_config
        width = text_config.get("hidden_size") if isinstance(text_config, dict) else None
        width = width if type(width) is int and 0 < width < 2**31 else None
        targets = _list_targets(reader, is_target, config.target_parameters or [], config.bias == "sel_only")
        return [
            _inspect_weight(read(), title, path, config, width)
            for path, title, read in tqdm(targets, "inspect", disable=disable)
        ]


def _target_rule(config: SELConfig, model_type: str) -> Callable[[str], bool]:
    """Return the test that says whether a module would be converted."""
    if config.target_modules is None:
        config = dataclasses.replace(config, target_modules=default_target_modules(model_type) or "all-linear")
    if config.target_modules == "all-linear":
        return lambda module: not EMBEDDING.fullmatch(module)
    return lambda module: bool(check_target_module_exists(config, module))


def _list_targets(
    reader: CheckpointReader, is_target: Callable[[str], bool], target_parameters: Sequence[str], with_biases: bool
) -> list[tuple[str, str, Callable[[], Tensor]]]:
    """Return (path of the module or parameter, title, how to read it) of each tensor that would be converted."""
    entries, stacks = reader.entries, find_split_stacks(reader.entries)
    split = {key for stack in stacks.values() for group in stack.keys for key in group}
    targets: list[tuple[str, str, Callable[[], Tensor]]] = []
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        is_matrix = module != name and len(entry.shape) == 2 and entry.dtype in FLOAT_DTYPES and name not in split
        if not is_matrix or not is_target(module):
            continue
        targets.append((module, name, partial(reader.read, name)))
        bias = entries.get(f"{module}.{BIAS}") if with_biases else None
        if bias is not None and len(bias.shape) == 1 and bias.dtype in FLOAT_DTYPES:
            targets.append((bias.name, bias.name, partial(reader.read, bias.name)))
    for name in [name for name in (*stacks, *entries) if any(f".{name}".endswith(f".{t}") for t in target_parameters)]:
        stack, entry = stacks.get(name), stacks[name].entry if name in stacks else entries[name]
        if entry.dtype not in FLOAT_DTYPES or len(entry.shape) not in (2, 3):
            continue
        if len(entry.shape) == 2:
            targets.append((name, name, partial(reader.read, name)))
        for expert in range(entry.shape[0] if len(entry.shape) == 3 else 0):
            read = (
                partial(reader.read, name, expert) if stack is None else partial(_read_rows, reader, stack.keys[expert])
            )
            targets.append((name, f"{name}[{expert}]", read))
    return targets


def _read_rows(reader: CheckpointReader, names: Sequence[str]) -> Tensor:
    """Return tensors that are parts of one matrix, one below the other."""
    return torch.cat([reader.read(name) for name in names])


def _inspect_weight(weight: Tensor, name: str, path: str, config: SELConfig, hidden_size: int | None) -> TensorReport:
    """Convert one weight, fold it back and compare."""
    report = _describe(name, weight)
    config = vector_config(config) if weight.dim() == 1 else config
    rows, columns = to_matrix(weight, transposed=False).shape
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            beta = resolve_beta(config, path, weight, hidden_size, name)
            raw, inversion = invert_at_start(config, beta, weight, name)
        except SELError as error:
            report.error = str(error)
            return report
    report.note = "; ".join(str(warning.message) for warning in caught) or None
    report.beta, report.newton_steps = beta, inversion.num_steps
    # The residual is zero at the start, and the raw weight is at hand: neither has to be made up here.
    config = dataclasses.replace(config, r=0, train_raw=True)
    tensors = {"raw": raw, "beta": torch.tensor(beta)}
    for scale_name, scale_config in config.scale_configs().items():
        scale = StructuredScale(scale_name, scale_config, beta, (rows, columns), compute_dtype(raw))
        tensors |= {f"{scale_name}.{part}": value.detach() for part, value in scale.named_parameters()}
    folded = rebuild_weight(config, tensors, dtype=weight.dtype, name=name)
    blocks = zip(weight.split(BLOCK_ROWS), folded.split(BLOCK_ROWS), strict=True)
    compared = [_compare_bits(before, after) for before, after in blocks]
    report.num_differing = sum(differing for differing, _ in compared)
    report.max_ulp = max((ulp for _, ulp in compared), default=0)
    return report


def _compare_bits(before: Tensor, after: Tensor) -> tuple[int, int]:
    """Return (elements that differ in any bit, largest distance in units in the last place)."""
    as_integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[before.dtype.itemsize]
    bits = [tensor.contiguous().view(as_integer).to(torch.int64) for tensor in (before, after)]
    differing = int((bits[0] != bits[1]).sum())
    if not differing:
        return 0, 0
    # Floats order like their bits read as sign and magnitude.
    magnitude = torch.iinfo(as_integer).max
    ordered = [torch.where(value < 0, -(value & magnitude), value) for value in bits]
    return differing, int((ordered[0] - ordered[1]).abs().max())


def _describe(name: str, weight: Tensor) -> TensorReport:
    """Report shape, dtype, std and max/std of a tensor."""
    values = weight.to(compute_dtype(weight))
    std = float(values.std(correction=0)) if values.numel() else 0.0
    largest = float(values.abs().max()) if values.numel() else 0.0
    ratio = largest / std if std else (math.inf if largest else 0.0)
    return TensorReport(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), std, ratio)


def _inspect_module(adapter: Adapter, module: str) -> TensorReport:
    """Report on a converted module of an adapter."""
    keys, config = adapter.modules[module], adapter.find_config(module)
    shape = _module_shape(adapter, module)
    stacked = "beta" in keys and len(adapter.reader.entries[keys["beta"]].shape) > 0
    dtype = str(adapter.reader.entries[next(iter(keys.values()))].dtype).removeprefix("torch.")
    report = TensorReport(module, shape, dtype)
    try:
        if shape and len(shape) <= (3 if stacked else 2):
            adapter.check_parts(module, shape)
        adapter.check_beta(module)
        parts = adapter.read_parts(module)
        if "raw" in parts:
            report = _describe(module, parts["raw"])
        report.beta = float(parts["beta"].mean())
        for name, scale_config in config.scale_configs().items():
            if scale_config.trainable:
                scale = StructuredScale(name, scale_config, parts["beta"], (1, 1), torch.float32)
                values = {part.partition(".")[2]: value for part, value in parts.items() if part.startswith(f"{name}.")}
                values = transform_parts(scale_config, values, parts["beta"])
                report.scale_means[name] = mean_value(scale.pattern, values) / (scale.start or 1.0)
        if config.r:
            residual = parts["residual_b"] @ parts["residual_a"]
            report.residual_norm = float(torch.linalg.vector_norm(residual)) * abs(config.residual_scaling)
        if broken := [part for part, value in parts.items() if not bool(torch.isfinite(value).all())]:
            report.error = f"NaN or infinite values in {list_names(broken)}"
    except (ValueError, LookupError, RuntimeError) as error:  # a SELError is a ValueError
        report.error = f"incomplete or inconsistent ({make_line(str(error))})"
    return report


def _module_shape(adapter: Adapter, module: str) -> tuple[int, ...]:
    """Return the shape of a module's weight as far as its saved tensors tell."""
    shapes = {part: adapter.reader.entries[key].shape for part, key in adapter.modules[module].items()}
    if "raw" in shapes:
        return shapes["raw"]
    rows = [shape[-1] for part, shape in shapes.items() if part.endswith(".row") and shape]
    rows += [shape[-2] for part, shape in shapes.items() if part.endswith((".b", "residual_b")) and len(shape) > 1]
    columns = [shape[-1] for part, shape in shapes.items() if part.endswith((".column", ".a", "residual_a")) and shape]
    return (*shapes.get("beta", ()), rows[0], columns[0]) if rows and columns else ()


def render(reports: Sequence[TensorReport]) -> str:
    """Lay reports out as a table of text columns, with the problems and a summary line below.

    Args:
        reports: What inspect_checkpoint returned.

    Returns:
        The table; columns that no report fills are left out.
    """
    columns: list[tuple[str, Callable[[TensorReport], str]]] = [
        ("tensor", lambda report: report.name),
        ("shape", lambda report: "x".join(map(str, report.shape))),
        ("dtype", lambda report: report.dtype),
        ("std", lambda report: _number(report.std)),
        ("max/std", lambda report: _number(report.max_over_std)),
        ("beta", lambda report: _number(report.beta)),
        ("steps", lambda report: "" if report.newton_steps is None else str(report.newton_steps)),
        ("round trip", lambda report: report.round_trip),
        ("residual", lambda report: _number(report.residual_norm)),
    ]
    cells = [[title, *(value(report) for report in reports)] for title, value in columns]
    for name in dict.fromkeys(name for report in reports for name in report.scale_means):
        cells.append([name, *(_number(report.scale_means.get(name)) for report in reports)])
    cells = [column for column in cells if any(column[1:])] or cells[:1]
    widths = [max(map(len, column)) for column in cells]
    cells = [[cell.rjust(width) for cell in column] for column, width in zip(cells, widths, strict=True)]
    cells[0] = [cell.strip().ljust(widths[0]) for cell in cells[0]]
    lines = ["  ".join(row).rstrip() for row in zip(*cells, strict=True)]
    lines.insert(1, "-" * len(lines[0]))
    for report in reports:
        lines += [f"{report.name}: {problem}" for problem in (report.error, report.note) if problem]
    return "\n".join([*lines, summarize(reports)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def summarize(reports: Sequence[TensorReport]) -> str:
    """Sum reports up in one line.

    Args:
        reports: What inspect_checkpoint returned.

    Returns:
        How many tensors and weights there are, the range of beta, and how the round trip went.
    """
    num_weights = sum(math.prod(report.shape) for report in reports if report.shape)
    parts = [f"{len(reports)} tensors", f"{num_weights:,} weights"]
    if betas := [report.beta for report in reports if report.beta is not None]:
        parts.append(f"beta {min(betas):.4g} to {max(betas):.4g}")
    if tried := [report for report in reports if report.num_differing is not None]:
        worst = max(report.max_ulp or 0 for report in tried)
        identical = sum(report.num_differing == 0 for report in tried)
        parts.append(f"{max(report.newton_steps or 0 for report in tried)} Newton steps at most")
        parts.append(f"{identical} identical after the round trip" + (f", worst {worst} ulp" if worst else ""))
    if refused := sum(report.error is not None for report in reports):
        parts.append(f"{refused} with errors")
    return "; ".join(parts)
