"""peft_sel.training: groups, schedules and logs through transformers.Trainer and through a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from test_groups import PAPER, make_base, make_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from peft_sel import (
    ScaleConfig,
    SELCallback,
    SELConfig,
    SELTrainer,
    SELTrainerMixin,
    create_sel_optimizer,
    create_sel_scheduler,
)
from peft_sel.errors import ConfigError, ParameterGroupError
from peft_sel.optim import anneal_multiplier
from peft_sel.training import collect_learning_rates, collect_scale_means

LR, NUM_STEPS = 2e-3, 10
EPS = torch.finfo(torch.float32).eps
KNOWS_NEW_NAME = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if KNOWS_NEW_NAME else "gradient_checkpointing"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_data(num_examples: int = 24, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows of counting numbers: easy to learn, none alike."""
    rows = [(torch.arange(length) * (1 + index % 3) + index) % 96 for index in range(num_examples)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


class Reporter(TrainerCallback):
    """Stands for TensorBoard and its kind: keeps what on_log shows it."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


def train(
    trainer_class: type[Trainer], model: PeftModel, folder: Path, *, callbacks: Any = None, **options: Any
) -> Trainer:
    trainer = trainer_class(
        model,
        make_arguments(folder, **options),
        train_dataset=make_data(),
        eval_dataset=make_data(6),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def training_logs(trainer: Trainer) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def expected_rate(step: int, k0: float, k1: float, anneal_steps: float) -> float:
    schedule = step / 2 if step < 2 else (NUM_STEPS - step) / (NUM_STEPS - 2)
    return LR * schedule * anneal_multiplier(step, k0, k1, anneal_steps)


def test_trainer_learns_with_the_documented_rates_and_logs_them(tmp_path: Path) -> None:
    model = make_model(r=2, anneal_steps=0.6, **PAPER)
    betas = [b.item() for name, b in model.named_buffers() if name.endswith("symexplin_beta.default")]
    reporter = Reporter()
    trainer = train(SELTrainer, model, tmp_path, callbacks=[reporter])
    logs = training_logs(trainer)
    assert len(logs) == NUM_STEPS
    assert sum(log["loss"] for log in logs[-3:]) < sum(log["loss"] for log in logs[:3]) - 0.1
    for step, log in enumerate(logs):
        expected = {
            "raw": expected_rate(step, 1, 1, 6),
            "exp_scale": expected_rate(step, 50, 8, 6),
            "linear_scale": expected_rate(step, 50, 8, 6),
            "inner_multiplier": expected_rate(step, 0.01, 0.5, 6),
            "residual_min": expected_rate(step, 0.5, 0.5, 6) / max(betas),
            "residual_max": expected_rate(step, 0.5, 0.5, 6) / min(betas),
        }
        rates = {key.removeprefix("sel/lr/"): value for key, value in log.items() if key.startswith("sel/lr/")}
        assert rates == pytest.approx(expected, rel=1e-13)  # a dozen float64 operations
        assert rates["raw"] == log["learning_rate"]
    assert [log for log in reporter.logs if "loss" in log] == [
        {key: value for key, value in log.items() if key != "step"} for log in logs
    ]


def test_logs_hold_the_trajectory_of_every_scale(tmp_path: Path) -> None:
    model = make_model(r=0, offset="column", linear_scale=None, exp_scale=PAPER["exp_scale"])
    trainer = train(SELTrainer, model, tmp_path)
    logs = training_logs(trainer)
    trained = ("exp_scale", "inner_multiplier", "offset")
    keys = {f"sel/scale/{scale}/{module}" for scale in trained for module in MODULES}
    assert {key for key in logs[-1] if key.startswith("sel/scale/")} == keys
    assert logs[0]["sel/scale/exp_scale/q_proj"] == pytest.approx(1, rel=4 * EPS)  # the first rate of a warm-up is 0
    assert logs[0]["sel/scale/offset/down_proj"] == 0
    for key in keys:
        module = key.rpartition("/")[2]
        layers = [layer for name, layer in model.named_modules() if name.endswith(f".{module}")]
        scales = [layer.scales("default")[key.split("/")[2]] for layer in layers]
        starts = [1 / layer.symexplin_beta["default"].item() if "exp_scale" in key else 1.0 for layer in layers]
        with torch.no_grad():
            means = [
                (torch.outer(s.row, s.column) if s.pattern == "row_col_mult" else s.column).double().mean()
                for s in scales
            ]
        expected = sum((mean / start).item() for mean, start in zip(means, starts, strict=True)) / len(layers)
        assert logs[-1][key] == pytest.approx(expected, rel=16 * EPS, abs=1e-9)
        assert logs[-1][key] != logs[0][key]
    assert abs(logs[-1]["sel/scale/exp_scale/q_proj"] - 1) > 0.01  # 50 times the base rate


@pytest.mark.parametrize(
    ("pattern", "transform"),
    [(pattern, None) for pattern in ("global", "row", "column", "row_col_mult", "row_col_add", "lora")]
    + [(pattern, "exp") for pattern in ("global", "row", "column", "row_col_mult")],
)
def test_scale_means_are_the_means_over_the_weight(pattern: str, transform: str | None) -> None:
    model = make_model(
        r=0, target_modules=["v_proj"], init_weights=False, inner_multiplier=ScaleConfig(pattern, transform=transform)
    )
    torch.manual_seed(3)
    expected = []
    for name, layer in model.named_modules():
        if name.endswith(".v_proj"):
            with torch.no_grad():
                for part in layer.scales("default")["inner_multiplier"].parameters():
                    part.add_(0.3 * torch.randn_like(part))
                parts = {n: p.double() for n, p in layer.scales("default")["inner_multiplier"].named_parameters()}
            parts = {n: p.exp() for n, p in parts.items()} if transform else parts
            zero, one = torch.zeros(16, 32, dtype=torch.float64), torch.ones(16, 32, dtype=torch.float64)
            row, column = parts.get("row", one[:, 0])[:, None], parts.get("column", one[0])[None]
            full = {
                "global": lambda p, z, r, c: z + p["value"],
                "row": lambda p, z, r, c: z + r,
                "column": lambda p, z, r, c: z + c,
                "row_col_mult": lambda p, z, r, c: r * c,
                "row_col_add": lambda p, z, r, c: r + c,
                "lora": lambda p, z, r, c: p["base"] + p["b"] @ p["a"],
            }[pattern](parts, zero, row, column)
            expected.append(full.mean().item())
    measured = collect_scale_means(model)["inner_multiplier/v_proj"]
    assert measured == pytest.approx(sum(expected) / 2, rel=32 * EPS)


def test_learning_rates_of_a_role_with_several_rates_are_a_range() -> None:
    groups = [
        {"role": "raw", "lr": 1.0},
        {"role": "exp_scale", "lr": 3.0},
        {"role": "exp_scale", "lr": 2.0},
        {"lr": 5.0},
    ]
    assert collect_learning_rates([*groups, {"role": "residual", "lr": 7.0}]) == {
        "raw": 1.0,
        "exp_scale_min": 2.0,
        "exp_scale_max": 3.0,
        "other": 5.0,
        "residual_min": 7.0,
        "residual_max": 7.0,
    }


def test_stock_trainer_with_our_optimizer_and_callback_is_the_same_training(tmp_path: Path) -> None:
    options = {"r": 2, "anneal_steps": 6, **PAPER}
    expected = train(SELTrainer, make_model(**options), tmp_path / "ours")
    model, reporter = make_model(**options), Reporter()
    fused = make_arguments(tmp_path / "stock").optim == "adamw_torch_fused"  # Trainer's default from torch 2.8 on
    optimizer = create_sel_optimizer(model, lr=LR, fused=fused)
    trainer = Trainer(
        model,
        make_arguments(tmp_path / "stock"),
        train_dataset=make_data(),
        callbacks=[SELCallback(), reporter],
        optimizers=(optimizer, create_sel_scheduler(optimizer, "linear", 2, NUM_STEPS)),
    )
    trainer.train()
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name
    assert training_logs(trainer) == training_logs(expected)
    assert [log["sel/lr/exp_scale"] for log in reporter.logs if "loss" in log] == [
        log["sel/lr/exp_scale"] for log in training_logs(expected)
    ]


class Recorder(TrainerCallback):
    """Counts the events that it sees."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("train_begin")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("train_end")


def test_callback_does_not_disturb_the_others(tmp_path: Path) -> None:
    before, after = type("Before", (Recorder,), {})(), type("After", (Recorder,), {})()
    callbacks = [before, SELCallback(), after]
    trainer = train(SELTrainer, make_model(r=0), tmp_path, callbacks=callbacks, max_steps=1)
    trainer.train()
    assert before.events == after.events == ["train_begin", "train_end"] * 2
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(SELCallback) == 1
    assert kinds.index(SELCallback) < min(kinds.index(type(before)), kinds.index(type(after)))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_printed_lines_stay_short(disable_tqdm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(SELTrainer, make_model(r=0), tmp_path, max_steps=2, disable_tqdm=disable_tqdm)
    printed = "".join(capsys.readouterr())
    assert printed.count("'loss'") == 2
    assert "sel/" not in printed


def test_plain_torch_loop_learns_at_the_same_rates() -> None:
    model = make_model(r=2, anneal_steps=6, **PAPER).train()
    optimizer = create_sel_optimizer(model, lr=LR)
    scheduler = create_sel_scheduler(optimizer, "linear", 2, NUM_STEPS)
    batch = {key: torch.stack([row[key] for row in make_data(8)]) for key in ("input_ids", "labels")}
    losses = []
    for step in range(NUM_STEPS):
        rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
        assert rates["exp_scale"] == pytest.approx(expected_rate(step, 50, 8, 6), rel=1e-13)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = get_peft_model(make_base(dtype=dtype), SELConfig(task_type="CAUSAL_LM", r=2))
    trainer = train(SELTrainer, model, tmp_path, max_steps=2)
    states = trainer.optimizer.state
    assert len(states) == sum(parameter.requires_grad for parameter in model.parameters())
    for parameter, state in states.items():
        assert {parameter.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_trainer_evaluates_and_keeps_the_best(task_type: str | None, tmp_path: Path) -> None:
    model = get_peft_model(make_base(), SELConfig(task_type=task_type, r=2))
    trainer = train(
        SELTrainer,
        model,
        tmp_path,
        max_steps=4,
        warmup_steps=0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        greater_is_better=True,  # the loss falls, so the "best" is the first and not simply the last state
    )
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert losses == sorted(losses, reverse=True)
    assert trainer.evaluate()["eval_loss"] == losses[0] > losses[-1]
    assert not any(key.startswith("sel/") for log in trainer.state.log_history if "eval_loss" in log for key in log)
    saved = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert saved >= {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    batch = {key: value[None] for key, value in make_data(1)[0].items()}
    grads = []
    for checkpointing in (False, True):
        model = make_model(r=2, init_weights=False).train()
        if checkpointing:
            model.enable_input_require_grads()
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
        model(**batch).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_trainer_checkpoints_activations(tmp_path: Path) -> None:
    plain = train(SELTrainer, make_model(r=2), tmp_path / "plain", max_steps=3)
    saving = train(SELTrainer, make_model(r=2), tmp_path / "saving", max_steps=3, **{CHECKPOINTING: True})
    assert [log["loss"] for log in training_logs(saving)] == [log["loss"] for log in training_logs(plain)]


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad"])
def test_optim_chooses_the_optimizer_over_our_groups(optim: str, tmp_path: Path) -> None:
    options = {"optim": optim, "max_steps": 3, "learning_rate": 1e-3, "weight_decay": 0.2}
    trainer = train(SELTrainer, make_model(r=2, beta=7.5, **PAPER), tmp_path, **options)
    groups = trainer.optimizer.param_groups
    assert [group["role"] for group in groups] == ["raw", "exp_scale", "linear_scale", "inner_multiplier", "residual"]
    assert [group["initial_lr"] for group in groups] == [1e-3 * k for k in (1.0, 50.0, 50.0, 0.01, 0.5 / 7.5)]
    assert [group["weight_decay"] for group in groups] == [0.2, 0.2, 0.2, 0.0, 0.2]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_optimizers_that_group_by_themselves_are_refused(tmp_path: Path) -> None:
    class Layerwise(SELTrainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.SGD, {"lr": args.learning_rate, "params": list(model.parameters())}

    class Factory(SELTrainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return object, {}

    for trainer_class in (Layerwise, Factory):
        arguments = make_arguments(tmp_path, optim="adamw_torch")
        trainer = trainer_class(make_model(r=0), arguments, train_dataset=make_data())
        with pytest.raises(ConfigError, match=r"^optim='adamw_torch': .*own parameter groups"):
            trainer.train()


def test_optimizers_and_schedulers_passed_in_are_used_as_they_are(tmp_path: Path) -> None:
    model = make_model(r=0, anneal_steps=2, **PAPER)
    own = create_sel_optimizer(model, torch.optim.SGD, lr=0.1)
    stock = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5)
    arguments = make_arguments(tmp_path, max_steps=3, lr_scheduler_type="constant")
    trainer = SELTrainer(model, arguments, train_dataset=make_data(), optimizers=(own, stock))
    trainer.train()
    rates = {log["sel/lr/exp_scale"] for log in training_logs(trainer)}
    assert rates == {0.1 * 50 * 0.5}  # a stock scheduler doesn't anneal

    given = (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})
    by_class = SELTrainer(make_model(r=0), arguments, train_dataset=make_data(), optimizer_cls_and_kwargs=given)
    by_class.train()
    assert {group["momentum"] for group in by_class.optimizer.param_groups} == {0.9}
    assert training_logs(by_class)[0]["sel/lr/raw"] == 0.3
    assert by_class.optimizer_cls_and_kwargs is given
    assert given[1] == {"lr": 0.3, "momentum": 0.9}


def test_schedule_arguments_reach_the_schedule(tmp_path: Path) -> None:
    trainer = train(
        SELTrainer,
        make_model(r=0, anneal_steps=6, exp_scale=PAPER["exp_scale"]),
        tmp_path,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.5},
    )
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == pytest.approx([LR * 0.5, LR * 0.5 * 8, LR * 0.5, LR * 0.5], rel=1e-13)


def test_plateau_schedule_needs_fixed_multipliers(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    train(SELTrainer, make_model(r=0), tmp_path, **options)
    with pytest.raises(ConfigError, match="lr_scheduler_type="):
        train(SELTrainer, make_model(r=0, exp_scale=PAPER["exp_scale"]), tmp_path, **options)


def test_trainer_refuses_a_model_that_was_not_converted(tmp_path: Path) -> None:
    with pytest.raises(ParameterGroupError, match="convert it with get_peft_model"):
        train(SELTrainer, make_base(), tmp_path)


def test_mixin_works_on_other_trainers(tmp_path: Path) -> None:
    class Halved(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) / 2

    class SELHalved(SELTrainerMixin, Halved):
        pass

    log, *_ = training_logs(train(SELHalved, make_model(r=0, **PAPER), tmp_path, max_steps=1, warmup_steps=0))
    assert log["loss"] < 0.6 * torch.tensor(96.0).log()
    assert log["sel/lr/exp_scale"] == 50 * LR
