"""The trained parameters of structured scales, and how they become the parts that numerics knows (4.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peft_sel.errors import MultiplierSignError
from peft_sel.numerics import MIN_LINEAR_BETA, init_parts, smallest_value, start_value
from peft_sel.scale_config import ResolvedScale
from peft_sel.sharded import gather

PREFIX = "symexplin_"  # of every saved key


class StructuredScale(nn.Module):
    """The parameters of one structured scale of one adapter, named by part (4.4); stacked where beta is a vector."""

    def __init__(
        self,
        name: str,
        config: ResolvedScale,
        beta: float | Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.name, self.pattern, self.config = name, config.pattern, config
        starts = self.reset_start(beta)
        betas = beta.reshape(-1) if isinstance(beta, Tensor) else torch.tensor([beta])
        if config.divisor is not None:
            starts = [start * float(_divisor(config, value)) for start, value in zip(starts, betas, strict=True)]
        members = [init_parts(config.pattern, s, shape, rank=config.rank, dtype=dtype, device=device) for s in starts]
        stacked = isinstance(beta, Tensor) and beta.dim() > 0
        self.part_names = tuple(members[0])
        for part in self.part_names:
            tensor = torch.stack([member[part] for member in members]) if stacked else members[0][part]
            value = tensor.log() if config.transform == "exp" else tensor
            self.register_parameter(part, nn.Parameter(value, requires_grad=config.trainable))

    def reset_start(self, beta: float | Tensor) -> list[float]:
        """Set start, the value that the scale starts at for a curvature (its mean over a stack); return all starts."""
        betas = beta.reshape(-1).tolist() if isinstance(beta, Tensor) else [beta]
        init, family = self.config.init, self.config.family
        starts = [start_value(self.name, value, family) if init is None else init for value in betas]
        self.start = starts[0] if len(starts) == 1 else sum(starts) / len(starts)
        return starts

    def parts(self, beta: Tensor) -> dict[str, Tensor]:
        """Return the parts as expand_parts takes them, after the positive transform and the division by a constant.

        Args:
            beta: Curvature of the weight, 0-d, or (num_experts,) for a stack.

        Returns:
            Parts by name.
        """
        # By name: on a replica of DataParallel the parameters are plain attributes.
        return transform_parts(self.config, {name: getattr(self, name) for name in self.part_names}, beta)

    @torch.no_grad()
    def check_sign(self, name: str) -> None:
        """Raise if this is a multiplier that the transform is divided by, and it has reached 0.

        Args:
            name: How the error calls the weight.

        Raises:
            MultiplierSignError: If it has.
        """
        check_sign(self.config, {part: gather(getattr(self, part)) for part in self.part_names}, name)


def _divisor(config: ResolvedScale, beta: Tensor) -> Tensor:
    return beta if config.divisor == "beta" else beta.clamp_min(MIN_LINEAR_BETA)


def transform_parts(config: ResolvedScale, parts: dict[str, Tensor], beta: Tensor) -> dict[str, Tensor]:
    """Return the parts of a scale as expand_parts takes them, from the trained ones.

    Args:
        config: The scale.
        parts: What is trained, and saved.
        beta: Curvature, 0-d, or (num_experts,) for stacked parts.

    Returns:
        Parts by name, whose scale is the trained one divided by config.divisor.
    """
    if config.transform == "exp":
        parts = {name: part.exp() for name, part in parts.items()}
    if config.divisor is None:
        return parts
    divisor = _divisor(config, beta)
    divided = ("row",) if config.pattern == "row_col_mult" else ("value", "row", "column", "base", "b")
    return {
        name: part / divisor.reshape(*beta.shape, *[1] * (part.dim() - beta.dim())) if name in divided else part
        for name, part in parts.items()
    }


def check_sign(config: ResolvedScale, parts: dict[str, Tensor], name: str) -> None:
    """Raise if the transform is divided by a scale that has reached 0; a constant divisor does not matter.

    Called where weights leave training (logs, saving, merging), so that a training step pays nothing for it.

    Args:
        config: The scale.
        parts: What is trained, stacked for experts.
        name: How the error calls the weight.

    Raises:
        MultiplierSignError: If its smallest value is not above 0.
    """
    if not config.divides or config.transform == "exp" or any(p.is_meta or p.numel() == 0 for p in parts.values()):
        return
    stacked = any(part.dim() > (2 if key in ("a", "b") else 1) for key, part in parts.items())
    members = [dict(zip(parts, m, strict=True)) for m in zip(*parts.values(), strict=True)] if stacked else [parts]
    smallest = min(smallest_value(config.pattern, member) for member in members)
    if smallest <= 0:
        raise MultiplierSignError(name, smallest)
