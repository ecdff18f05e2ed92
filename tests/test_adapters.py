"""Several adapters: any order of calls against a model of the state, what they may train, and bad names and files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from models import (
    TOKENS,
    assert_same_bits,
    clone_state,
    convert,
    logits,
    make_config,
    make_tiny,
    sel_layers,
    train_steps,
)
from peft import (
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from test_layer_types import LAYERS, make_layer
from torch import Tensor, nn

import peft_sel
from peft_sel import SELConfig, SELError, merge_checkpoint

ADAPTERS = {  # other modes, curvatures, scales and modules
    "default": {},
    "few": {"mode": "congruent", "beta": 3.0, "exp_scale": "row", "target_modules": ["q_proj", "up_proj"]},
    "small": {"mode": "oppose", "train_raw": False, "offset": "column", "target_modules": ["k_proj", "q_proj"]},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Trained adapters in files, and the weights of the base with each merged alone."""
    folder, weights = tmp_path_factory.mktemp("adapters"), {}
    for name, options in ADAPTERS.items():
        model = convert(make_tiny(), **options)
        train_steps(model, 2, lr=0.3)
        model.save_pretrained(folder / name)
        weights[name] = clone_state(model.merge_and_unload())
    return folder, weights


class State:
    """What a model with several adapters should be, in the plainest terms."""

    def __init__(self, first: str, weights: dict[str, dict[str, Tensor]]) -> None:
        self.weights, self.base = weights, clone_state(make_tiny())
        self.plain = make_tiny()
        self.known, self.active, self.merged, self.enabled = [first], [first], [], True

    def logits(self) -> Tensor:
        """Of a plain model that holds w_base + the sum of (w_i - w_base) over what is merged or active."""
        names = [*self.merged, *(name for name in self.active if name not in self.merged)] if self.enabled else []
        state = {}
        for key, base in self.base.items():
            changed = [self.weights[name][key] for name in names if not torch.equal(self.weights[name][key], base)]
            state[key] = base + torch.stack([w - base for w in changed]).sum(0) if len(changed) > 1 else base
            state[key] = changed[0] if len(changed) == 1 else state[key]
        self.plain.load_state_dict(state)
        return logits(self.plain)


def take_step(model: PeftModel, state: State, folder: Path, rng: random.Random) -> str:
    """Do one random thing to the model and to its state; return what it was."""
    action = rng.choice(["load", "set", "set", "delete", "merge", "merge", "unmerge", "enable", "disable"])
    names = rng.sample(state.known, rng.randint(1, len(state.known)))
    if action == "load" and (absent := [name for name in ADAPTERS if name not in state.known]):
        model.load_adapter(folder / absent[0], absent[0], is_trainable=True)
        state.known, state.merged = [*state.known, absent[0]], []
    elif action == "set":
        model.base_model.set_adapter(names)
        state.active, state.merged = names, []
    elif action == "delete" and names[0] in state.merged:
        with pytest.raises(ValueError, match="merged"):
            model.delete_adapter(names[0])
    elif action == "delete" and len(state.known) > 1:
        model.delete_adapter(names[0])
        state.known.remove(names[0])
        left = [name for name in state.active if name != names[0]]
        state.active = left or sorted(state.known)[:1]
        model.active_adapter = state.active[0]  # which PEFT leaves at the deleted one if two others are active
    elif action == "merge":
        chosen = None if rng.random() < 0.5 else names
        model.merge_adapter(chosen, safe_merge=rng.random() < 0.5)
        state.merged += [name for name in chosen or state.active if name not in state.merged]
    elif action == "unmerge":
        model.unmerge_adapter()
        state.merged = []
    elif action in ("enable", "disable"):
        state.enabled = action == "enable"
        (model.base_model.enable_adapter_layers if state.enabled else model.base_model.disable_adapter_layers)()
    return f"{action} {names}"


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's on merging, unmerging and deleting
@pytest.mark.parametrize("number", range(12))
def test_any_order_of_calls(number, saved):
    folder, weights = saved
    rng = random.Random(number)
    first = list(ADAPTERS)[number % 3]
    state = State(first, weights)
    model = PeftModel.from_pretrained(make_tiny(), folder / first, first, is_trainable=True).eval()
    history = []
    for _ in range(40):
        history.append(take_step(model, state, folder, rng))
        if rng.random() < 0.6:
            result, expected = logits(model), state.logits()
            if not state.enabled:
                state.merged = []  # the forward pass has unmerged
            if not state.enabled or len({*state.merged, *state.active}) == 1:
                assert torch.equal(result, expected), history
            else:  # sums of float32 deltas in another order
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{history} {m}")
            status = model.get_model_status()
            assert (status.enabled, status.active_adapters) == (state.enabled, state.active), history
            assert sorted(status.available_adapters) == sorted(state.known), history
            assert status.devices == {name: ["cpu"] for name in state.known}
    assert_same_bits(model.unload().state_dict(), state.base)


def test_the_plain_state_moves():
    # the random walk would prove nothing if the adapters hardly differed
    weights = {}
    for name, options in ADAPTERS.items():
        model = convert(make_tiny(), **options)
        train_steps(model, 2, lr=0.3)
        weights[name] = model.merge_and_unload()
    results = [logits(model) for model in (make_tiny(), *weights.values())]
    assert min(float((a - b).abs().max()) for i, a in enumerate(results) for b in results[:i]) > 0.02


def make_two(**options: object) -> PeftModel:
    """A model with the trained adapters default, active, and few."""
    model = convert(make_tiny(**options))
    train_steps(model, 1, lr=0.3)
    model.add_adapter("few", make_config(**ADAPTERS["few"]))
    model.set_adapter("few")
    train_steps(model, 1, lr=0.3)
    model.set_adapter("default")
    return model.eval()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.merge_adapter(["few", "typo"]),
        lambda model: model.merge_adapter(["typo"], safe_merge=True),
        lambda model: model.merge_and_unload(adapter_names=["typo"]),
        lambda model: model.base_model.set_adapter(["default", "typo"]),
        lambda model: model.base_model.set_adapter("typo"),
    ],
)
def test_unknown_names_are_refused_before_anything_happens(call):
    model = make_two()
    expected, status = logits(model), model.get_model_status()
    with pytest.raises(SELError, match="'typo' is not in this model; it has default, few"):
        call(model)
    assert model.get_model_status() == status
    assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:Adapter name '' should not be contained")
@pytest.mark.parametrize("name", ["", "v1.0", "keys", "training"])
def test_names_that_torch_cannot_store(name):
    base = make_tiny()
    with pytest.raises(SELError, match="has a name that torch cannot store; choose one without dots"):
        get_peft_model(base, make_config(), adapter_name=name)
    assert not sel_layers(base) and all(p.requires_grad for p in base.parameters())
    model = convert(base)
    with pytest.raises(SELError, match="has a name that torch cannot store"):
        model.add_adapter(name, make_config())
    assert list(model.peft_config) == ["default"]
    assert torch.equal(logits(model), logits(convert(make_tiny())))


def test_every_layer_takes_the_same_adapter_when_the_active_one_goes():
    model = convert(make_tiny(), target_modules=["q_proj"])
    model.add_adapter("b", make_config(target_modules=["k_proj"]))
    model.add_adapter("c", make_config(target_modules=["k_proj", "q_proj"]))
    with pytest.warns(UserWarning, match="'default' was the active adapter; 'b' is now") as caught:
        model.delete_adapter("default")
    assert len(caught) == 1
    assert model.active_adapter == "b"
    assert {tuple(layer.active_adapters) for layer in sel_layers(model)} == {("b",)}


@pytest.mark.filterwarnings("ignore:(All adapters are already|Already following adapters were) merged")
def test_merging_twice_or_in_parts_is_merging_once():
    model = make_two()
    model.base_model.set_adapter(["default", "few"])
    both = logits(model)
    model.merge_adapter(["default"])
    assert torch.equal(logits(model), both)  # few stays active
    model.merge_adapter(["default"])
    assert torch.equal(logits(model), both)
    model.merge_adapter()
    model.merge_adapter()
    assert torch.equal(logits(model), both)
    assert {tuple(layer.merged_adapters) for layer in sel_layers(model)} == {("default",), ("default", "few")}
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_tiny()))


def test_requires_grad_follows_the_calls():
    def training() -> set[tuple[str, str]]:
        names = [name.split("symexplin_")[1] for name, p in model.named_parameters() if p.requires_grad]
        return {(name.split(".")[0], name.split(".")[1]) for name in names}

    model = convert(make_tiny(), linear_scale=None)
    model.add_adapter("small", make_config(train_raw=False, inner_multiplier=None))
    scales = {"exp_scale", "linear_scale", "inner_multiplier"}
    residual = {"residual_a", "residual_b"}
    default = {(part, "default") for part in {"raw", *residual, *scales - {"linear_scale"}}}  # a fixed one stays fixed
    small = {(part, "small") for part in {*residual, *scales - {"inner_multiplier"}}}
    assert training() == default
    model.set_requires_grad(["small", "default"])
    assert training() == default | small
    model.set_requires_grad("default", False)
    assert training() == small
    model.set_adapter("small", inference_mode=True)
    assert training() == set()
    model.set_adapter("small")
    assert training() == small
    with model.disable_adapter():
        assert training() == set()
    assert training() == small
    assert not any(p.requires_grad for p in convert(make_tiny(), inference_mode=True).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_text_is_that_of_the_merged_model(dtype):
    model = make_two(dtype=dtype)
    options = {"max_new_tokens": 8, "pad_token_id": 0, "output_scores": True, "return_dict_in_generate": True}
    adapted = model.generate(input_ids=TOKENS, do_sample=False, **options)
    merged = model.merge_and_unload().generate(input_ids=TOKENS, do_sample=False, **options)
    assert torch.equal(adapted.sequences, merged.sequences)
    assert torch.equal(torch.stack(adapted.scores), torch.stack(merged.scores))


@pytest.mark.parametrize("by_keys", [True, False])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_injection_into_a_plain_model(low_cpu_mem_usage, by_keys):
    source = convert(make_tiny(), target_modules=["q_proj", "down_proj"], mode="oppose", beta=7.5)
    train_steps(source, 1, lr=0.3)
    saved = {k.removeprefix("base_model.model."): v for k, v in get_peft_model_state_dict(source).items()}
    # with by_keys, the modules are those of the tensors, and what target_modules says does not matter
    targets = ["nothing"] if by_keys else ["q_proj", "down_proj"]
    config = make_config(target_modules=targets, mode="oppose", beta=7.5)
    options = {"low_cpu_mem_usage": low_cpu_mem_usage}
    model = make_tiny()
    if by_keys:
        with pytest.warns(RuntimeWarning, match="state_dict"):
            inject_adapter_in_model(config, model, state_dict=saved, **options)
    else:
        inject_adapter_in_model(config, model, **options)
    assert len(sel_layers(model)) == 4
    set_peft_model_state_dict(model, saved, **options)
    assert torch.equal(logits(model), logits(source.eval()))
    assert_same_bits(get_peft_model_state_dict(model), saved)


VERSION = peft_sel.__version__
NEXT_MINOR = f"{VERSION.split('.')[0]}.{int(VERSION.split('.')[1]) + 1}.0"


@pytest.mark.parametrize("made_by", ["99.0", NEXT_MINOR, "nonsense"])
def test_an_adapter_of_a_newer_version_is_refused(made_by, tmp_path):
    convert(make_tiny()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["peft_sel_version"] == VERSION
    file.write_text(json.dumps({**config, "peft_sel_version": made_by, "mode": "spiral", "family": "unheard of"}))
    match = rf"by peft_sel {made_by} and this is {VERSION}.*pip install -U peft-sel"
    base = make_tiny()
    with pytest.raises(SELError, match="is no version number" if made_by == "nonsense" else match):
        PeftModel.from_pretrained(base, tmp_path)
    assert not sel_layers(base)
    make_tiny().save_pretrained(tmp_path / "base")
    with pytest.raises(SELError, match="is no version number" if made_by == "nonsense" else match):
        merge_checkpoint(tmp_path / "base", tmp_path, tmp_path / "out", progress=False)


@pytest.mark.parametrize("made_by", [f"{VERSION}.post9", "0.0.1", None])
def test_an_adapter_of_the_same_or_an_older_version_loads(made_by, tmp_path):
    convert(make_tiny()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_sel_version": made_by}))
    config = PeftModel.from_pretrained(make_tiny(), tmp_path).peft_config["default"]
    assert config.peft_sel_version == (made_by or VERSION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", *LAYERS])
def test_nothing_but_merging_changes_the_base(kind, dtype, tmp_path):
    if kind == "linear":
        base, inputs = nn.Linear(4, 6).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    else:
        layer, inputs = make_layer(kind, dtype)
        base = layer.get_base_layer()
    original = {name: (p.data_ptr(), p.detach().clone()) for name, p in base.named_parameters()}
    expected = base(inputs)

    def check() -> None:
        for name, (address, value) in original.items():
            parameter = base.get_parameter(name)
            assert parameter.data_ptr() == address
            assert_same_bits({name: parameter}, {name: value})

    model = get_peft_model(nn.Sequential(base), SELConfig(r=2, target_modules=["0"]))
    check()
    optimizer = torch.optim.SGD([{"params": p} for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(inputs).float().square().mean().backward()
        optimizer.step()
    check()
    with model.disable_adapter():
        assert torch.equal(model(inputs), expected)
    model.save_pretrained(tmp_path)
    check()
    adapted = model(inputs)
    assert not torch.equal(adapted, expected)
    plain = model.unload()
    assert plain[0] is base
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    check()
    assert torch.equal(loaded(inputs), adapted)
    with loaded.disable_adapter():
        assert torch.equal(loaded(inputs), expected)
