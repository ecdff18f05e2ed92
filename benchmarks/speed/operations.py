"""The operations on one weight matrix, as the package's own callers use them, and what the hardware does at best."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from peft_sel import SELConfig
from peft_sel.conversion import invert_at_start, make_spec, resolve_beta
from peft_sel.kernels import WeightSpec, fold, use_backend
from peft_sel.numerics.elementary import expm1
from peft_sel.structured import StructuredScale

EXPS_PER_ELEMENT = 16  # of measure_exps: so many that moving its bytes does not count

Operation = Callable[[], Any]


class Sample:
    """A heavy-tailed bf16 weight, converted: what its fold and its gradients need.

    Attributes:
        config: The adapter's configuration.
        weight: The base weight, bf16.
        raw: Its raw weight, float32, which is trained.
        grad: dLoss/dw_eff, bf16, as a product under autocast gives it.
    """

    def __init__(self, shape: tuple[int, int], r: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(0)
        # The cube of a normal variable has the tails of a trained weight; the standard deviation is SmolLM2's.
        self.weight = (torch.randn(shape, generator=generator, device=device) ** 3 * (0.19 / math.sqrt(15))).bfloat16()
        self.grad = torch.randn(shape, generator=generator, device=device).mul_(1e-3).bfloat16()
        self.config = SELConfig(r=r)
        self.beta = resolve_beta(self.config, "weight", self.weight, None)
        self.raw = invert_at_start(self.config, self.beta, self.weight, "weight")[0].requires_grad_()
        self._beta = torch.tensor(self.beta, device=device)
        self.scales = nn.ModuleDict(
            {
                name: StructuredScale(name, config, self.beta, shape, torch.float32, device)
                for name, config in self.config.scale_configs().items()
            }
        )
        residual = [torch.randn(r, shape[1], device=device), torch.randn(shape[0], r, device=device) * 1e-3]
        self.residual = tuple(part.requires_grad_() for part in residual) if r else None

    @property
    def inputs(self) -> list[Tensor]:
        """Everything trained: raw, parts of the scales, and A and B of the residual."""
        return [self.raw, *self.scales.parameters(), *(self.residual or ())]

    @property
    def spec(self) -> WeightSpec:
        """The weight's constants."""
        patterns = tuple((name, scale.pattern) for name, scale in self.scales.items())
        return make_spec(self.config, patterns, torch.bfloat16)

    def to_double(self) -> Sample:
        """Return the same weight with everything trained in float64."""
        double = copy.copy(self)
        double.raw = self.raw.detach().double().requires_grad_()
        double.scales = copy.deepcopy(self.scales).double()
        double.residual = self.residual and tuple(part.detach().double().requires_grad_() for part in self.residual)
        return double

    def fold(self) -> Tensor:
        """Compute the effective weight."""
        parts = {name: scale.parts(self._beta) for name, scale in self.scales.items()}
        return fold(self.spec, self.raw, self._beta, parts, self.residual)

    def invert(self, weight: Tensor) -> Tensor:
        """Compute the raw weight of a weight."""
        return invert_at_start(self.config, self.beta, weight, "weight")[0]

    def pull_back(self, effective: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of everything trained, from what fold returned."""
        return torch.autograd.grad(effective, self.inputs, self.grad, retain_graph=True)


def fold_and_gradients(sample: Sample, backend: str) -> dict[str, Operation]:
    """Return fold and pull back of a sample by one backend."""

    def run_fold() -> Tensor:
        with use_backend(backend):
            return sample.fold().detach()

    effective = sample.fold()

    def run_gradients() -> tuple[Tensor, ...]:
        with use_backend(backend):
            return sample.pull_back(effective)

    with_residual = " with residual" if sample.residual else ""
    return {f"fold{with_residual}, {backend}": run_fold, f"gradients{with_residual}, {backend}": run_gradients}


def inversions(sample: Sample) -> dict[str, Operation]:
    """Return inversions of a sample, from bf16 and from float32."""
    single = sample.weight.float() * (1 + 2**-10)  # not representable in bf16
    return {
        "inversion, bf16": lambda: sample.invert(sample.weight),
        "inversion, float32": lambda: sample.invert(single),
    }


def exponentials(shape: tuple[int, int]) -> dict[str, Operation]:
    """Return compiled functions that compute EXPS_PER_ELEMENT exponentials per element, and little else."""
    x = torch.rand(shape)

    def compiled(function: Callable[[Tensor], Tensor]) -> Operation:
        def add_up(x: Tensor) -> Tensor:
            return sum((function(x * (k / EXPS_PER_ELEMENT)) for k in range(1, EXPS_PER_ELEMENT)), function(x))

        call = torch.compile(add_up, dynamic=False)
        return lambda: call(x)

    return {"exp, torch": compiled(torch.exp), "expm1, peft_sel": compiled(expm1)}
