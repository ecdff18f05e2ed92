"""Effective weights kept during an evaluation: computed once, never stale, gone with train()."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from models import make_tiny
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

from peft_sel import SELConfig
from peft_sel import layer as layer_module

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of folds so far, in a list of one."""
    count, fold_weight = [0], layer_module.fold_weight

    def count_fold(*args: object) -> Tensor:
        count[0] += 1
        return fold_weight(*args)

    monkeypatch.setattr(layer_module, "fold_weight", count_fold)
    return count


def make_model(**options: object) -> PeftModel:
    return get_peft_model(make_tiny(), SELConfig(init_weights=False, **options)).eval()


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    return model(TOKENS).logits


def run_anew(model: PeftModel) -> Tensor:
    model.base_model.keep_effective_weights(False)
    result = run(model)
    model.base_model.keep_effective_weights(True)
    return result


def count_layers(model: PeftModel) -> int:
    return sum(1 for _ in model.base_model.sel_layers())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_folds_each_weight_once(mode, folds):
    model = make_model()
    with mode():
        outputs = [model(TOKENS).logits for _ in range(3)]
    assert folds[0] == count_layers(model)
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[0], run_anew(model))


def test_training_and_gradients_keep_nothing():
    model = make_model()
    for state in (model.train(), model.eval()):
        state(TOKENS, labels=TOKENS).loss.backward()
        assert not any(layer.kept_weights for layer in model.base_model.sel_layers())
    run(model)
    assert all(layer.kept_weights for layer in model.base_model.sel_layers())
    model.train()
    assert not any(layer.kept_weights for layer in model.base_model.sel_layers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_keeping_for_backward_changes_memory_and_no_gradient(autocast, dtype):
    """The same products, whose sums may run in another order: a hundred roundings of the dtype at most."""
    results = []
    for keep in (False, True):
        torch.manual_seed(0)
        model, saved = make_model().train(), []
        model.base_model.model.to(dtype)
        model.base_model.keep_effective_weights(training=keep)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        owned = {parameter.data_ptr() for parameter in model.parameters()}
        shapes = {tuple(layer.base_weight.shape) for layer in model.base_model.sel_layers()}
        shapes |= {shape[::-1] for shape in shapes}
        weights = [t for t in saved if tuple(t.shape) in shapes and t.data_ptr() not in owned]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append((loss.detach(), len(weights), gradients))
    (loss, count, gradients), (kept_loss, kept_count, kept_gradients) = results
    assert torch.equal(loss, kept_loss)
    assert count == 0 < kept_count
    eps = torch.finfo(torch.bfloat16 if autocast else dtype).eps
    for name, gradient in gradients.items():
        assert (gradient - kept_gradients[name]).norm() <= 100 * eps * gradient.norm(), name


def step(model: PeftModel) -> None:
    optimizer = torch.optim.AdamW([{"params": p} for p in model.parameters() if p.requires_grad], lr=0.01)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


@torch.no_grad()
def write_in_place(model: PeftModel) -> None:
    next(model.base_model.sel_layers()).symexplin_raw["default"].mul_(1.5)


def replace_parameter(model: PeftModel) -> None:
    container = next(model.base_model.sel_layers()).symexplin_raw
    container["default"] = nn.Parameter(1.5 * container["default"].detach())


def load(model: PeftModel) -> None:
    model.load_state_dict(
        {key: value * 1.25 for key, value in model.state_dict().items() if "symexplin_raw" in key}, strict=False
    )


def write_data(model: PeftModel) -> None:
    next(model.base_model.sel_layers()).symexplin_raw["default"].data.mul_(1.5)
    model.train().eval()


def fused_step(model: PeftModel) -> None:
    """One that writes without counting it, between evaluations that see the gradients."""
    optimizer = torch.optim.AdamW([{"params": p} for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    model(TOKENS, labels=TOKENS).loss.backward()
    run(model)
    optimizer.step()


def assign_data(model: PeftModel) -> None:
    """As torch.nn.utils.vector_to_parameters and averages of weights do."""
    raw = next(model.base_model.sel_layers()).symexplin_raw["default"]
    raw.data = 1.5 * raw.data


def write_beta(model: PeftModel) -> None:
    next(model.base_model.sel_layers()).symexplin_beta["default"].mul_(1.5)


def add_and_set(model: PeftModel) -> None:
    model.add_adapter("other", SELConfig(init_weights=False, mode="congruent"))
    model.set_adapter("other")


def activate_both(model: PeftModel) -> None:
    model.add_adapter("other", SELConfig(init_weights=False, mode="congruent"))
    model.base_model.set_adapter(["default", "other"])


WRITES = [step, fused_step, write_in_place, replace_parameter, load, write_data, assign_data, write_beta]
CHANGES = [*WRITES, add_and_set, activate_both]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = make_model()
    before = run(model)
    change(model)
    after = run(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, run_anew(model))
    assert torch.equal(run(copy.deepcopy(model).merge_and_unload()), after)


def test_scale_only_adapters_follow_a_loaded_beta():
    model = make_model(train_raw=False)
    run(model)
    model.load_state_dict(
        {key: value * 1.25 for key, value in model.state_dict().items() if key.endswith("beta.default")}, strict=False
    )
    assert torch.equal(run(model), run_anew(model))


def test_copies_and_files_hold_no_kept_weights(tmp_path):
    model = make_model()
    expected = run(model)
    duplicate = copy.deepcopy(model)
    assert all(layer.kept_weights for layer in model.base_model.sel_layers())
    assert not any(layer.kept_weights for layer in duplicate.base_model.sel_layers())
    assert torch.equal(run(duplicate), expected)
    model.to(torch.float64)
    assert not any(layer.kept_weights for layer in model.base_model.sel_layers())


@pytest.mark.filterwarnings("ignore:'default' was the active adapter")
def test_a_deleted_adapter_is_freed():
    model = make_model()
    model.add_adapter("other", SELConfig(init_weights=False))
    run(model)
    model.set_adapter("other")
    before = run(model)
    raw = weakref.ref(next(model.base_model.sel_layers()).symexplin_raw["default"])
    model.delete_adapter("default")
    gc.collect()
    assert raw() is None and torch.equal(run(model), before)
