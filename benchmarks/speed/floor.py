"""The least time that the arithmetic of SEL can take: bytes moved at a copy's speed, exponentials at their best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """What an operation cannot do without, per weight; vectors of rows and columns don't count.

    Attributes:
        bytes: Read and written, each tensor once.
        exps: Exponentials.
    """

    bytes: int
    exps: int

    def floor_s(self, bytes_per_s: float, exps_per_s: float) -> float:
        """Return the seconds per weight where moving and computing overlap wholly."""
        return max(self.bytes / bytes_per_s, self.exps / exps_per_s)


FOLD = Cost(4 + 2, 1)  # raw float32 in, effective weight bf16 out
GRADIENTS = Cost(4 + 2 + 4, 1)  # raw float32 and a bf16 gradient in, gradient of raw float32 out
# What full fine-tuning does in their place: one cast of the weight, which autocast keeps, and one of the gradient.
CAST_WEIGHT = Cost(4 + 2, 0)
CAST_GRADIENT = Cost(2 + 4, 0)
COPY = Cost(4 + 4, 0)  # of float32, whose speed is taken for the memory's


def describe_floor(
    weights: int, bytes_per_s: float, exps_per_s: float, measured_s: Mapping[str, float]
) -> dict[str, Any]:
    """Compare measured times of one weight with their floors, and add both up over a step.

    A step of SEL folds twice, forward and backward, and pulls gradients back once. The floor leaves out the
    matrix products of a residual.

    Args:
        weights: Number of trained weights of a model.
        bytes_per_s: Measured bandwidth of a copy, bytes read plus bytes written.
        exps_per_s: Measured exponentials per second.
        measured_s: Seconds per weight of "fold", "gradients", "fold with residual" and "gradients with residual".

    Returns:
        Floors in ns per weight, measured times over them, and seconds per step.
    """
    costs = {name: FOLD if name.startswith("fold") else GRADIENTS for name in measured_s}
    floors = {name: cost.floor_s(bytes_per_s, exps_per_s) for name, cost in costs.items()}
    operations = {
        name: {
            "bytes": cost.bytes,
            "exps": cost.exps,
            "floor_ns": floors[name] * 1e9,
            "measured_over_floor": measured_s[name] / floors[name],
        }
        for name, cost in costs.items()
    }

    def add_up(times: Mapping[str, float], residual: str = "") -> float:
        return weights * (2 * times["fold" + residual] + times["gradients" + residual])

    full = sum(cost.floor_s(bytes_per_s, exps_per_s) for cost in (CAST_WEIGHT, CAST_GRADIENT))
    step = {
        "weights": weights,
        "floor_s": add_up(floors),
        "measured_s": add_up(measured_s),
        "measured_with_residual_s": add_up(measured_s, " with residual"),
        "full_fine_tuning_floor_s": weights * full,
    }
    return {"bytes_per_s": bytes_per_s, "exps_per_s": exps_per_s, "operations": operations, "step": step}
