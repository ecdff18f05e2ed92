"""accumulate_gradients: weights computed and gradients pulled back once for several micro-batches."""

from __future__ import annotations

import contextlib
import copy
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from models import TOKENS, convert, logits, make_config, make_tiny, sel_layers
from moe import make_moe
from peft import PeftModel, get_peft_model
from test_layer_types import LAYERS, make_layer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from peft_sel import SELError, SELTrainer
from peft_sel.accumulation import share_weights
from peft_sel.layer import SELLayer

BATCHES = [TOKENS, TOKENS + 24, TOKENS + 48]


def backward(model: nn.Module, scope: bool, batches: list[Tensor] = BATCHES) -> dict[str, Tensor]:
    """Return the gradients of the mean loss of some batches."""
    model.zero_grad()
    if scope:
        with model.base_model.accumulate_gradients():
            for batch in batches:
                (model(batch, labels=batch).loss / len(batches)).backward()
    else:
        for batch in batches:
            (model(batch, labels=batch).loss / len(batches)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_to_rounding(grads: dict[str, Tensor], wants: dict[str, Tensor], eps: float) -> None:
    assert grads.keys() == wants.keys() and grads
    for name, want in wants.items():
        assert grads[name].dtype == want.dtype
        assert (grads[name] - want).norm() <= 16 * eps * want.norm(), name


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers whose effective weight was computed for autograd, in order."""
    names: list[str] = []
    compute = SELLayer._fold_inputs

    def count(layer: SELLayer, *args: Any) -> Any:
        names.append(layer.module_name)
        return compute(layer, *args)

    monkeypatch.setattr(SELLayer, "_fold_inputs", count)
    return names


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"base_weight": "drop"}, {"r": 0}])
def test_gradients_are_those_of_the_plain_way(options: dict[str, Any]) -> None:
    model = convert(make_tiny(), **options).train()
    assert_equal_to_rounding(backward(model, True), backward(model, False), torch.finfo(torch.float32).eps)


def test_gradients_of_a_half_model_are_summed_in_float32() -> None:
    """256 equal batches: a sum of 256 bf16 numbers would stand still on the way."""
    model = convert(make_tiny(dtype=torch.bfloat16), base_weight="drop").train()
    one, many = backward(model, True, [TOKENS]), backward(model, True, [TOKENS] * 256)
    assert_equal_to_rounding(many, one, torch.finfo(torch.bfloat16).eps / 16)


def test_under_autocast() -> None:
    model = convert(make_tiny()).train()
    with torch.autocast("cpu", torch.bfloat16):
        grads, wants = backward(model, True), backward(model, False)
    assert_equal_to_rounding(grads, wants, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_type(kind: str) -> None:
    layer, x = make_layer(kind, torch.float32)
    layer.train()

    def run(scope: bool) -> dict[str, Tensor]:
        layer.zero_grad()
        with share_weights([layer]) if scope else nullcontext():
            for _ in range(3):
                layer(x).pow(2).sum().backward()
        return {name: p.grad.to_dense() for name, p in layer.named_parameters() if p.grad is not None}

    assert_equal_to_rounding(run(True), run(False), torch.finfo(torch.float32).eps)


def test_experts() -> None:
    config = make_config(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    model = get_peft_model(make_moe("qwen3_moe"), config).train()
    batches = [TOKENS, TOKENS + 7]
    assert_equal_to_rounding(
        backward(model, True, batches), backward(model, False, batches), torch.finfo(torch.float32).eps
    )


def test_a_weight_is_computed_once(folds: list[str]) -> None:
    model = convert(make_tiny()).train()
    backward(model, True)
    assert len(folds) == len(set(folds)) == len(sel_layers(model))
    folds.clear()
    backward(model, False)
    assert len(folds) == len(BATCHES) * len(sel_layers(model))


def test_a_second_scope_adds_to_the_first_and_sees_new_values() -> None:
    model = convert(make_tiny()).train()
    once = backward(model, True)
    with model.base_model.accumulate_gradients():
        for batch in BATCHES:
            (model(batch, labels=batch).loss / len(BATCHES)).backward()
    twice = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_to_rounding(twice, once, torch.finfo(torch.float32).eps)
    torch.optim.AdamW([{"params": p} for p in model.parameters() if p.requires_grad], lr=1e-2).step()
    assert_equal_to_rounding(backward(model, True), backward(model, False), torch.finfo(torch.float32).eps)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant: bool) -> None:
    model = convert(make_tiny()).train()
    wants = backward(model, False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal_to_rounding(backward(model, True), wants, torch.finfo(torch.float32).eps)


def test_an_evaluation_inside() -> None:
    model = convert(make_tiny()).train()
    wants, expected = backward(model, False), logits(model.eval())
    model.train().zero_grad()
    with model.base_model.accumulate_gradients():
        for batch in BATCHES:
            (model(batch, labels=batch).loss / len(BATCHES)).backward()
            assert torch.equal(logits(model.eval()), expected)
            model.train()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_to_rounding(grads, wants, torch.finfo(torch.float32).eps)


def step(model: PeftModel) -> None:
    torch.optim.AdamW([{"params": p} for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True).step()


def write(model: PeftModel) -> None:
    """To the last layer: those before it may not have been pulled back."""
    with torch.no_grad():
        sel_layers(model)[-1].symexplin_raw["default"].mul_(2)


def switch(model: PeftModel) -> None:
    """Freezes the adapter."""
    model.add_adapter("other", make_config())
    model.set_adapter("other")


def load(model: PeftModel) -> None:
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("change", [step, write, load])
def test_a_write_before_the_first_backward_pass_is_seen(change: Any) -> None:
    model = convert(make_tiny()).train()
    backward(model, False)  # gradients to step with
    with model.base_model.accumulate_gradients():
        model(TOKENS, labels=TOKENS)
        change(model)
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_to_rounding(grads, backward(model, False, [TOKENS]), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("change", [step, write, load, switch])
@pytest.mark.parametrize("again", [True, False])
def test_a_write_after_a_backward_pass_is_refused(change: Any, again: bool) -> None:
    model = convert(make_tiny()).train()
    backward(model, False)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def train() -> None:
        with model.base_model.accumulate_gradients():
            model(TOKENS, labels=TOKENS).loss.backward()
            change(model)
            if again:
                model(TOKENS, labels=TOKENS)

    with pytest.raises(SELError, match=r"_proj.weight was written to.*inside accumulate_gradients\(\)"):
        train()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in before) and (p.grad is None or torch.equal(p.grad, before[name]))
    model.set_adapter("default")
    assert_equal_to_rounding(backward(model, True), backward(model, False), torch.finfo(torch.float32).eps)


def test_an_exception_discards_what_was_summed() -> None:
    model = convert(make_tiny()).train()

    def train() -> None:
        with model.base_model.accumulate_gradients():
            model(TOKENS, labels=TOKENS).loss.backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert all(p.grad is None for layer in sel_layers(model) for p in layer.parameters())
    assert_equal_to_rounding(backward(model, True), backward(model, False), torch.finfo(torch.float32).eps)


def test_two_active_adapters_of_a_half_model_are_summed_in_float32() -> None:
    model = convert(make_tiny(dtype=torch.bfloat16)).train()
    model.add_adapter("other", make_config())
    model.base_model.set_adapter(["default", "other"])
    one, many = backward(model, True, [TOKENS]), backward(model, True, [TOKENS] * 256)
    assert len(one) == 2 * len(backward(convert(make_tiny(dtype=torch.bfloat16)), True, [TOKENS]))
    assert_equal_to_rounding(many, one, torch.finfo(torch.bfloat16).eps / 16)


def test_a_backward_pass_after_the_end_is_refused() -> None:
    model = convert(make_tiny()).train()
    with model.base_model.accumulate_gradients():
        loss = model(TOKENS, labels=TOKENS).loss
    with pytest.raises(SELError, match="after the weight that its forward pass used was given up"):
        loss.backward()


def test_a_backward_pass_through_a_replaced_weight_is_refused() -> None:
    model = convert(make_tiny()).train()

    def train() -> None:
        with model.base_model.accumulate_gradients():
            loss = model(TOKENS, labels=TOKENS).loss
            write(model)
            model(TOKENS, labels=TOKENS)
            loss.backward()

    with pytest.raises(SELError, match="was given up"):
        train()


def test_zero_grad_of_the_scope() -> None:
    model = convert(make_tiny()).train()
    wants = backward(model, False, [TOKENS])
    model.zero_grad()
    with model.base_model.accumulate_gradients() as scope:
        (model(TOKENS, labels=TOKENS).loss * torch.nan).backward()
        scope.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_to_rounding(grads, wants, torch.finfo(torch.float32).eps)


def test_nothing_of_a_scope_outlives_it() -> None:
    model = convert(make_tiny()).train()
    leaves = []
    with contextlib.suppress(KeyboardInterrupt), model.base_model.accumulate_gradients():
        model(TOKENS, labels=TOKENS).loss.backward()
        leaves = [weakref.ref(s.leaf) for layer in sel_layers(model) for s in layer.shared_weights._weights.values()]
        raise KeyboardInterrupt
    assert len(leaves) == len(sel_layers(model)) and all(leaf() is None for leaf in leaves)


def test_replicas_of_data_parallel_share_nothing() -> None:
    model = convert(make_tiny()).train()
    wants = backward(model, False, [TOKENS])
    model.zero_grad()
    with model.base_model.accumulate_gradients():
        for layer in sel_layers(model):
            layer._is_replica = True
        model(TOKENS, labels=TOKENS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal_to_rounding(grads, wants, torch.finfo(torch.float32).eps)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(SELError, match="this is one of 2"):
        convert(make_tiny()).base_model.accumulate_gradients().__enter__()


def test_inference_inside_leaves_training_possible() -> None:
    model = convert(make_tiny(dtype=torch.bfloat16)).train()
    with model.base_model.accumulate_gradients():
        with torch.inference_mode():
            model(TOKENS)
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_scopes_do_not_nest() -> None:
    model = convert(make_tiny()).train()
    with model.base_model.accumulate_gradients(), pytest.raises(SELError, match="open already"):
        model.base_model.accumulate_gradients().__enter__()


def test_a_copy_made_inside_is_outside() -> None:
    model = convert(make_tiny()).train()
    with model.base_model.accumulate_gradients():
        model(TOKENS, labels=TOKENS).loss.backward()
        copied = copy.deepcopy(model)
    copied.zero_grad()
    assert_equal_to_rounding(backward(copied, False), backward(model, False), torch.finfo(torch.float32).eps)


def make_trainer(folder: Path, model: PeftModel, **options: Any) -> SELTrainer:
    data = Dataset.from_dict({"input_ids": [(TOKENS[0] + i).tolist() for i in range(10)]})
    data = data.map(lambda row: {"labels": row["input_ids"]})
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return SELTrainer(model, arguments, train_dataset=data)


def train(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = convert(make_tiny())
    trainer = make_trainer(folder, model)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_the_trainer_computes_a_weight_once_per_step(
    folds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 batches, 4 to a step: steps of 4, 4 and 2 batches in each epoch."""
    losses, weights = train(tmp_path)
    assert len(losses) == 6 and len(folds) == 6 * len(set(folds))
    folds.clear()
    monkeypatch.setattr(SELTrainer, "_shares", lambda *_: False)
    plain_losses, plain_weights = train(tmp_path)
    assert len(folds) == 20 * len(set(folds))
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, want in plain_weights.items():
        torch.testing.assert_close(weights[name], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"train_raw": False}, {}])
def test_the_trainer_does_not_share_where_that_costs_memory_or_is_not_wanted(
    options: dict[str, Any], folds: list[str], tmp_path: Path
) -> None:
    """A scale-only adapter needs no weight-sized gradient otherwise."""
    trainer = make_trainer(tmp_path, convert(make_tiny(), **options))
    trainer.shares_weights = "train_raw" in options
    trainer.train()
    assert len(folds) == 20 * len(set(folds))


class StopAfterOneBatch(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def test_training_that_ends_in_the_middle_of_a_step_leaves_no_scope_open(tmp_path: Path) -> None:
    model = convert(make_tiny())
    trainer = make_trainer(tmp_path, model, max_steps=3)
    trainer.add_callback(StopAfterOneBatch())
    trainer.train()
    trainer.accelerator.gradient_state._set_sync_gradients(True)  # accelerate's, for the whole process
    model.zero_grad()
    assert_equal_to_rounding(backward(model, True), backward(model, False), torch.finfo(torch.float32).eps)
