"""Low-bit optimizers of torchao and bitsandbytes over SEL's groups, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import TOKENS, convert, make_tiny
from peft import PeftModel
from torch import Tensor
from transformers import TrainingArguments

from peft_sel import ScaleConfig, SELTrainer, create_sel_optimizer, create_sel_scheduler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
# torchao's 8-bit codes round small second moments to 0 (in full fine-tuning too), so that eps alone limits the step.
KINDS: dict[str, dict[str, Any]] = {
    "bitsandbytes.optim AdamW8bit": {},
    "torchao.optim AdamW4bit": {},
    "torchao.optim AdamW8bit": {"eps": 1e-4},
    "torchao.optim AdamWFp8": {"eps": 1e-4},
}
LR, STEPS = 1e-3, 8
MULTIPLIERS = {"exp_scale": ScaleConfig(lr_mult=4.0, lr_mult_end=1.0), "anneal_steps": 5}


def find_class(kind: str) -> Any:
    module, name = kind.split()
    return getattr(pytest.importorskip(module), name)


def make_model() -> PeftModel:
    torch.manual_seed(0)  # torchao and bitsandbytes leave tensors below 4,096 elements in float32
    return convert(make_tiny(hidden_size=64, intermediate_size=64), base_weight="drop", **MULTIPLIERS).train()


def train(model: PeftModel, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_both(model: PeftModel, optimizer_cls: Any, **options: Any) -> tuple[Any, Any]:
    optimizer = create_sel_optimizer(model, optimizer_cls, lr=LR, **options)
    return optimizer, create_sel_scheduler(optimizer, "linear", 2, 4 * STEPS)


def stored_bytes(tensor: Tensor) -> int:
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return sum(stored_bytes(getattr(tensor, part)) for part in parts) or tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", KINDS)
def test_trains_at_the_rates_of_the_groups_and_resumes(kind, tmp_path: Path):
    optimizer_cls = find_class(kind)
    reference = make_both(make_model(), torch.optim.AdamW)
    model = make_model()
    optimizer, scheduler = make_both(model, optimizer_cls, **KINDS[kind])
    losses = []
    for _ in range(STEPS):
        for group, expected in zip(optimizer.param_groups, reference[0].param_groups, strict=True):
            assert group["role"] == expected["role"] and group["weight_decay"] == expected["weight_decay"]
            # torchao keeps rates in float32, and the scheduler rounds a product once more
            assert float(group["lr"]) == pytest.approx(expected["lr"], rel=2 * torch.finfo(torch.float32).eps)
        losses += train(model, optimizer, scheduler, 1)
        reference[0].step()
        reference[1].step()
    assert losses[-1] < 0.7 * losses[0]
    raw = optimizer.param_groups[0]["params"][0]
    moments = [value for value in optimizer.state[raw].values() if isinstance(value, Tensor)]
    bound = 1.3 if kind.endswith("4bit") else 2.6  # bytes: two moments, and beside them two code books of up to 1 KiB
    assert sum(map(stored_bytes, moments)) < bound * raw.numel()
    torch.save([optimizer.state_dict(), scheduler.state_dict(), model.state_dict()], tmp_path / "state.pt")
    straight = train(model, optimizer, scheduler, 3)
    resumed = make_model()
    optimizer, scheduler = make_both(resumed, optimizer_cls, **KINDS[kind])
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    for target, state in zip((optimizer, scheduler, resumed), states, strict=True):
        target.load_state_dict(state)
    assert train(resumed, optimizer, scheduler, 3) == straight


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"])
def test_trainer(optim, tmp_path: Path):
    pytest.importorskip("bitsandbytes" if "bnb" in optim else "torchao.optim")
    args = TrainingArguments(
        str(tmp_path), optim=optim, max_steps=4, learning_rate=LR, logging_steps=1, save_strategy="no", report_to=[]
    )
    args.adam_epsilon = 1e-4
    data = [{"input_ids": row, "labels": row} for row in TOKENS for _ in range(8)]
    trainer = SELTrainer(make_model(), args, train_dataset=data)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[-1]["loss"] < 0.9 * logs[0]["loss"]
    assert logs[0]["sel/lr/exp_scale"] == pytest.approx(4 * logs[0]["sel/lr/raw"])
