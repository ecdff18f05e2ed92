"""Ten steps equal five, a checkpoint and five more, bit for bit: through Trainer and a plain Accelerate loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel, get_peft_model
from test_groups import PAPER, make_base
from test_training import NUM_STEPS, make_arguments, make_data, training_logs

from peft_sel import SELConfig, SELTrainer, create_sel_optimizer, create_sel_scheduler

HALF = NUM_STEPS // 2
OPTIONS = {
    "plain": {},
    "dropped base": {"base_weight": "drop"},
    "everything": {"bias": "all", "modules_to_save": ["lm_head", "norm"], "shift": "row", "offset": "column"},
    "scales only": {"train_raw": False},
}


def make_model(dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    config = SELConfig(task_type="CAUSAL_LM", r=2, anneal_steps=0.8, **PAPER, **options)  # annealing at the checkpoint
    return get_peft_model(make_base(dtype=dtype), config)


def spoil(model: PeftModel) -> PeftModel:
    """Change every trainable parameter, so that only a checkpoint can bring it back."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.37)
    return model


def make_trainer(model: PeftModel, folder: Path, **options: Any) -> SELTrainer:
    arguments = make_arguments(folder, save_strategy="steps", save_steps=HALF, warmup_steps=3, **options)
    return SELTrainer(model, arguments, train_dataset=make_data())  # 6 batches: the checkpoint is inside an epoch


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Compare nested dicts and lists of tensors and numbers bit for bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert left == right, where


@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.float32), *((name, torch.bfloat16) for name in OPTIONS)])
def test_trainer_resumes_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    options = OPTIONS[name]
    straight = make_trainer(make_model(dtype, **options), tmp_path)
    straight.train()
    resumed = make_trainer(spoil(make_model(dtype, **options)), tmp_path / "second")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))

    assert_same(straight.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")
    assert_same(straight.lr_scheduler.state_dict(), resumed.lr_scheduler.state_dict(), "scheduler")
    logs = training_logs(straight)
    assert_same(logs, training_logs(resumed), "logs")
    ratios = [log["sel/lr/exp_scale"] / log["sel/lr/inner_multiplier"] for log in logs[1:]]
    assert 50 / 0.01 > ratios[HALF - 2] > ratios[HALF - 1] > ratios[HALF] > 8 / 0.5  # the annealing was in flight
    assert resumed.state.global_step == NUM_STEPS


def test_trainer_resumes_with_gradient_accumulation(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    straight = make_trainer(make_model(), tmp_path, **options)
    straight.train()
    resumed = make_trainer(spoil(make_model()), tmp_path / "second", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_same(straight.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")


def test_trainer_continues_in_the_same_object(tmp_path: Path) -> None:
    straight = make_trainer(make_model(), tmp_path)
    straight.train()
    expected = copy.deepcopy(straight.model.state_dict())
    straight.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_same(expected, straight.model.state_dict(), "model")


class Loop:
    """The plain Accelerate loop of the README: accumulate, clip, step."""

    def __init__(self, model: PeftModel) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = create_sel_optimizer(model, lr=2e-3)
        scheduler = create_sel_scheduler(optimizer, "cosine", 3, NUM_STEPS)
        data = torch.utils.data.DataLoader(make_data(4 * NUM_STEPS), batch_size=2)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, data)
        self.model, self.optimizer, self.scheduler, self.data = prepared

    def run(self, first: int, last: int) -> None:
        """Take the optimizer steps first..last."""
        self.model.train()
        batches = self.accelerator.skip_first_batches(self.data, 2 * first)
        for _, batch in zip(range(2 * (last - first)), batches, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIONS)
def test_accelerate_loop_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    options = OPTIONS[name]
    straight = Loop(make_model(torch.bfloat16, **options))
    straight.run(0, HALF)
    straight.accelerator.save_state(str(tmp_path))
    straight.run(HALF, NUM_STEPS)

    resumed = Loop(spoil(make_model(torch.bfloat16, **options)))
    resumed.accelerator.load_state(str(tmp_path))
    halfway = {group["role"]: group["lr"] for group in resumed.optimizer.param_groups}
    assert 50 / 0.01 > halfway["exp_scale"] / halfway["inner_multiplier"] > 8 / 0.5
    resumed.run(HALF, NUM_STEPS)
    assert_same(straight.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")
    assert_same(straight.scheduler.state_dict(), resumed.scheduler.state_dict(), "scheduler")
    assert [group["lr"] for group in straight.optimizer.param_groups] == straight.scheduler.get_last_lr()
