"""Options of transformers.Trainer under SEL: each does what it does for other models, in SELTrainer and a stock one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from models import assert_same_bits, fingerprint
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from test_groups import PAPER, make_base
from test_resume import assert_same, spoil
from test_training import LR, Reporter, make_arguments, make_data, training_logs
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForQuestionAnswering,
    Qwen2ForSequenceClassification,
    Trainer,
    TrainerCallback,
    set_seed,
)

from peft_sel import SELCallback, SELConfig, SELTrainer, create_sel_optimizer, create_sel_scheduler
from peft_sel.errors import ConfigError

EPS = torch.finfo(torch.float32).eps
WARMUP, SAVED, NUM_STEPS = 3, 4, 6  # an epoch has six batches
MICRO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


@pytest.fixture(autouse=True)
def private_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no other test have the precision and the compiler of these."""
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model(dtype: torch.dtype = torch.float32, dropout: float = 0.0, **options: Any) -> PeftModel:
    base = make_base(dtype=dtype, attention_dropout=dropout)
    return get_peft_model(base, SELConfig(task_type="CAUSAL_LM", r=2, anneal_steps=0.8, **PAPER, **options))


def make_trainer(
    cls: type[Trainer], model: PeftModel, folder: Path, callbacks: list[TrainerCallback] | None = None, **options: Any
) -> Trainer:
    """Make a trainer; one that knows nothing of SEL gets our optimizer, scheduler and callback."""
    arguments = make_arguments(folder, **{"warmup_steps": WARMUP, "max_steps": NUM_STEPS, **options})
    given: dict[str, Any] = {"train_dataset": make_data(), "eval_dataset": make_data(6), "callbacks": callbacks}
    if not issubclass(cls, SELTrainer):
        optimizer = create_sel_optimizer(model, lr=LR, fused=arguments.optim == "adamw_torch_fused")
        scheduler = create_sel_scheduler(optimizer, "linear", WARMUP, arguments.max_steps)
        given |= {"optimizers": (optimizer, scheduler), "callbacks": [SELCallback(), *(callbacks or [])]}
    return cls(model, arguments, **given)


class WithScaler(Trainer):
    """fp16=True as on a GPU: Accelerate ignores it on a CPU, though torch has what it takes."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-12)


class SELWithScaler(SELTrainer, WithScaler):
    """SELTrainer with it."""


RESUMED: dict[str, tuple[type[Trainer], torch.dtype, dict[str, Any]]] = {
    "stock": (Trainer, torch.float32, {}),
    "bf16": (SELTrainer, torch.float32, {"bf16": True, **MICRO}),
    "bf16, stock": (Trainer, torch.bfloat16, {"bf16": True, **MICRO}),
    "fp16": (SELWithScaler, torch.float16, {"fp16": True, "optim": "adamw_torch", **MICRO}),
    "fp16, stock": (WithScaler, torch.float32, {"fp16": True, "optim": "adamw_torch"}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resumes_bit_for_bit_with_dropout_in_the_middle_of_an_epoch(case: str, tmp_path: Path) -> None:
    cls, dtype, options = RESUMED[case]
    saving = {"save_strategy": "steps", "save_steps": SAVED, **options}
    straight = make_trainer(cls, make_model(dtype, 0.2), tmp_path, **saving)
    straight.train()
    resumed = make_trainer(cls, spoil(make_model(dtype, 0.2)), tmp_path / "second", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert_same(straight.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")
    assert_same(straight.lr_scheduler.state_dict(), resumed.lr_scheduler.state_dict(), "scheduler")
    logs = training_logs(straight)
    texts = [json.dumps(each, sort_keys=True) for each in (logs, training_logs(resumed))]
    assert texts[0] == texts[1]  # texts, in which NaN, a gradient norm that overflows, is NaN
    ratios = [log["sel/lr/exp_scale"] / log["sel/lr/inner_multiplier"] for log in logs if log["learning_rate"]]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > ratios[-1]
    if "fp16" in case:  # a scale of 2**40 overflows until it is 2**16: two steps are left out, of the annealing too
        assert (tmp_path / f"checkpoint-{SAVED}" / "scaler.pt").is_file()
        assert straight.accelerator.scaler.get_scale() == 2.0**16
        assert straight.lr_scheduler.last_epoch == NUM_STEPS - 2
        assert [log["learning_rate"] for log in logs[:3]] == [0, 0, 0] < [logs[3]["learning_rate"]]


@pytest.mark.parametrize("options", [{"bf16": True}, MICRO], ids=str)
def test_a_stock_trainer_trains_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    trainers = []
    for cls in (SELTrainer, Trainer):  # one after the other: making one sets the seed
        trainer = make_trainer(cls, make_model(dropout=0.2), tmp_path, **options)
        trainer.shares_weights = False  # it sums gradients in another order
        trainer.train()
        trainers.append(trainer)
    ours, stock = trainers
    assert_same_bits(ours.model.state_dict(), stock.model.state_dict())
    assert training_logs(ours) == training_logs(stock)


def test_reporters_get_what_the_log_history_has(tmp_path: Path) -> None:
    for cls in (SELTrainer, Trainer):
        reporter = Reporter()  # behind SELCallback, where callbacks=[SELCallback(), TensorBoardCallback()] has it
        trainer = make_trainer(cls, make_model(), tmp_path, callbacks=[reporter], max_steps=2)
        trainer.train()
        history = [{k: v for k, v in log.items() if k != "step"} for log in trainer.state.log_history]
        assert reporter.logs == history
        assert "sel/lr/exp_scale" in history[0] and "sel/scale/exp_scale/q_proj" in history[0]
        assert history[-1].keys() >= {"train_runtime", "train_loss", "total_flos"}
        assert not any(key.startswith("sel/") for key in history[-1])


@pytest.mark.parametrize("shares", [True, False])
def test_max_grad_norm_is_of_the_whole_step(shares: bool, tmp_path: Path) -> None:
    model = make_model()
    rows = make_data(4)
    plain = copy.deepcopy(model).train()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    plain(**batch).loss.backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm().item()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    options = {"max_steps": 1, "warmup_steps": 0, "max_grad_norm": norm / 8, "optim": "sgd", "weight_decay": 0.0}
    trainer = SELTrainer(model, make_arguments(tmp_path, **options, **MICRO), train_dataset=rows)
    trainer.shares_weights = shares
    trainer.train()
    assert training_logs(trainer)[0]["grad_norm"] == pytest.approx(norm, rel=64 * EPS)  # sums of 14,000 squares
    rates = {id(p): group["initial_lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            step = rates[id(parameter)] * grads[name] / 8
            assert (before[name] - parameter - step).abs().max() <= 1e-4 * step.abs().max() + EPS * before[
                name
            ].abs().max()


class Fussy(SELTrainer):
    """Takes its rows in order, and runs out of memory above four of them."""

    def _get_train_sampler(self, *_: Any) -> None:
        return None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 4:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **kwargs)


class FailOnce(TrainerCallback):
    """Runs out of memory between the first two micro-batches."""

    failed = False

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory.")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_smaller_batch_starts_afresh(steps: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": steps, "max_steps": -1, "num_train_epochs": 1}
    first_try = {"per_device_train_batch_size": 5 if steps == 1 else 4, "auto_find_batch_size": True}
    callbacks: list[TrainerCallback] = [] if steps == 1 else [FailOnce()]
    retried = make_trainer(Fussy, make_model(), tmp_path, callbacks, **options, **first_try)
    retried.train()
    size = retried._train_batch_size
    assert size < first_try["per_device_train_batch_size"]
    straight = make_trainer(Fussy, make_model(), tmp_path, **options, per_device_train_batch_size=size)
    straight.train()
    assert_same_bits(retried.model.state_dict(), straight.model.state_dict())
    assert training_logs(retried) == training_logs(straight)
    assert straight.state.global_step == 24 // (size * steps)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo instantiates it
def test_compiled_it_learns_the_same_and_saves_the_same_names(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": SAVED}
    eager = make_trainer(SELTrainer, make_model(target_modules=["v_proj"]), tmp_path / "eager", **options)
    options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = make_trainer(SELTrainer, make_model(target_modules=["v_proj"]), tmp_path / "compiled", **options)
    for each in (eager, trainer):
        each.train()
    losses = [[log["loss"] for log in training_logs(each)] for each in (eager, trainer)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    name = Path(f"checkpoint-{SAVED}", "adapter_model.safetensors")
    files = [load_file(tmp_path / kind / name) for kind in ("eager", "compiled")]
    assert files[0].keys() == files[1].keys()


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "apollo_adamw", "lomo"])
def test_optimizers_with_groups_of_their_own_are_refused_untouched(optim: str, tmp_path: Path) -> None:
    model = make_model()
    before = fingerprint(model)
    trainer = SELTrainer(model, make_arguments(tmp_path, optim=optim, optim_target_modules="all-linear"))
    with pytest.raises(ConfigError, match=rf"^optim='{optim}': this optimizer chooses its own parameter groups"):
        trainer.create_optimizer()
    assert fingerprint(model) == before
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
ROWS = [{"input_ids": (torch.arange(8) + index) % 96} for index in range(8)]
TASKS: dict[str, tuple[type[PreTrainedModel], list[dict[str, Any]]]] = {
    "SEQ_CLS": (Qwen2ForSequenceClassification, [{**row, "labels": i % 3} for i, row in enumerate(ROWS)]),
    "QUESTION_ANS": (
        Qwen2ForQuestionAnswering,
        [{**row, "start_positions": i % 7, "end_positions": i % 7 + 1} for i, row in enumerate(ROWS)],
    ),
}


@pytest.mark.parametrize(
    ("cls", "task_type"),
    [(SELTrainer, "QUESTION_ANS"), (SELTrainer, None), (Trainer, "QUESTION_ANS"), (Trainer, "SEQ_CLS")],
)
def test_every_task_has_an_eval_loss_and_its_best_checkpoint(
    cls: type[Trainer], task_type: str | None, tmp_path: Path
) -> None:
    model_class, rows = TASKS[task_type or "SEQ_CLS"]
    set_seed(0)
    base = model_class(Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_labels=3))
    model = get_peft_model(base, SELConfig(task_type=task_type, r=2))
    given: dict[str, Any] = {}
    if cls is Trainer:
        optimizer = create_sel_optimizer(model, lr=1e-2)
        given["optimizers"] = (optimizer, create_sel_scheduler(optimizer, "constant"))
    every_step = {
        f"{what}_{unit}": value for what in ("eval", "save") for unit, value in (("strategy", "steps"), ("steps", 1))
    }
    best = {"load_best_model_at_end": True, "greater_is_better": True}  # of losses that fall: the first
    arguments = make_arguments(tmp_path, max_steps=3, warmup_steps=0, **every_step, **best)
    trainer = cls(model, arguments, train_dataset=rows, eval_dataset=rows, **given)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(losses) == 3 and max(losses) == losses[0]
    assert trainer.evaluate()["eval_loss"] == losses[0]
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


def test_evaluation_alone_is_that_of_the_merged_model(tmp_path: Path) -> None:
    model = spoil(make_model())
    trainer = SELTrainer(model, make_arguments(tmp_path))
    ours, loss = trainer.predict(make_data(6)), trainer.evaluate(make_data(6))["eval_loss"]
    plain = Trainer(copy.deepcopy(model).merge_and_unload(), make_arguments(tmp_path)).predict(make_data(6))
    assert ours.metrics["test_loss"] == loss == plain.metrics["test_loss"]
    assert (ours.predictions == plain.predictions).all()


def test_model_init_makes_a_new_model_for_each_training(tmp_path: Path) -> None:
    """As in hyperparameter_search, whose trials are trainings of one trainer."""
    arguments = make_arguments(tmp_path, max_steps=2, warmup_steps=0)
    trainer = SELTrainer(args=arguments, model_init=lambda: make_model(), train_dataset=make_data())
    trainer.train()
    first = training_logs(trainer)
    arguments.learning_rate = 10 * LR
    trainer.train()
    second = training_logs(trainer)
    assert second[0]["loss"] == first[0]["loss"] > 0 and second[1]["loss"] != first[1]["loss"]
    assert [log["sel/lr/exp_scale"] for log in second] == pytest.approx([10 * log["sel/lr/exp_scale"] for log in first])


def test_no_warning_of_pinned_memory_where_nothing_can_be_pinned(tmp_path: Path) -> None:
    """Nor is that written into the user's arguments, which other trainers may share."""
    pinned = {"dataloader_pin_memory": True, "use_cpu": False}  # Trainer itself pins nothing with use_cpu
    arguments = make_arguments(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="epoch", **pinned
    )
    before = arguments.to_dict()
    SELTrainer(make_model(), arguments, train_dataset=make_data(), eval_dataset=make_data(4)).train()
    trainer = SELTrainer(make_model(), arguments, train_dataset=make_data(), eval_dataset=make_data(4))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))  # batches are skipped by a loader of its own
    assert trainer.args is arguments and arguments.to_dict() == before
    stored = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert stored.dataloader_pin_memory is True
