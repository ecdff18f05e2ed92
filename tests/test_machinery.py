"""SEL inside the machinery of training and deployment: offloading, checkpointing, compilation, copies, casts."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from models import TOKENS, assert_same_bits, clone_state, logits, make_config, make_tiny, train_steps
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig, SELError, SELLayer
from peft_sel.kernels import use_backend
from peft_sel.numerics import SCALE_NAMES

CPU = torch.device("cpu")


def make_trained(config: SELConfig | None = None, **options: object) -> PeftModel:
    model = get_peft_model(make_tiny(**options), config or make_config())
    train_steps(model, 1, lr=0.3)
    return model.eval()


def make_two(config: SELConfig | None = None, **options: int) -> PeftModel:
    """A model with the trained adapters default, active, and other, of other modules and another mode."""
    model = make_trained(config, **options)
    model.add_adapter("other", make_config(mode="congruent", target_modules=["q_proj", "up_proj"]))
    model.set_adapter("other")
    train_steps(model, 1, lr=0.3)
    model.set_adapter("default")
    return model.eval()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a training step on the fixed batch."""
    model.zero_grad()
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def offload(model: nn.Module, how: str, folder: str) -> None:
    if how == "cpu":
        cpu_offload(model, CPU)
    elif how == "disk":
        disk_offload(model, folder, CPU)
    else:
        inner = "base_model.model."
        names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
        places = {inner + name: "cpu" for name in names}
        dispatch_model(model, {**places, inner + "model.layers.1": "disk"}, CPU, offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("how", ["cpu", "disk", "some"])
@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
def test_offloading_a_converted_model_is_refused_until_merged(how, options, tmp_path):
    untouched = logits(make_tiny(tie_word_embeddings=False))
    model = make_trained(make_config(**options), tie_word_embeddings=False)
    expected = logits(model)
    offload(model, how, tmp_path / "offloaded")
    with pytest.raises(SELError, match=r"has its adapter 'default' on the meta device: offloaded"):
        logits(model)
    with pytest.raises(SELError, match="on the meta device"):
        model.save_pretrained(tmp_path / "adapter")
    with model.disable_adapter():
        assert torch.equal(logits(model), untouched)
    assert torch.equal(logits(model.merge_and_unload()), expected)


def test_offloading_while_merged():
    model = make_trained()
    expected = logits(model)
    model.merge_adapter()
    cpu_offload(model, CPU)
    assert torch.equal(logits(model), expected)
    with model.disable_adapter(), pytest.raises(SELError, match="has its merged weight on the meta device"):
        logits(model)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_tiny()))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_loading_on_an_offloaded_base_is_refused(low_cpu_mem_usage, tmp_path):
    make_trained().save_pretrained(tmp_path)
    base = make_tiny()
    cpu_offload(base, CPU)
    with pytest.raises(SELError, match="offloaded or on the meta device"):
        PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(base), logits(make_tiny()))


# transformers 5.24 renames the call; the lowest version that we support knows the old name only
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", ["checkpointing", "wrapping"])
@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
def test_gradient_checkpointing_gives_the_same_gradients(first, reentrant, options):
    source = make_trained(make_config(**options))
    expected = gradients(source)
    base = make_tiny()
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if first == "checkpointing":
        base.gradient_checkpointing_enable(**settings)
    model = get_peft_model(base, make_config(**options))
    if first == "wrapping":
        model.gradient_checkpointing_enable(**settings)
    model.enable_input_require_grads()
    model.load_state_dict(source.state_dict())
    assert base.is_gradient_checkpointing
    assert_same_bits(gradients(model), expected)


# one layer with two targets: tracing takes a second per target
SMALL: dict[str, int] = {"num_hidden_layers": 1}


def make_few() -> SELConfig:
    return make_config(target_modules=["q_proj", "up_proj"])


# Dynamo instantiates the autograd.Function that it traces
INSTANTIATED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(scope="module")
def whole_graph() -> None:
    """Skip where the base model alone is no single graph: torch 2.7 with transformers 5.10."""
    torch._dynamo.reset()
    try:
        torch.compile(make_tiny(**SMALL), backend="eager", fullgraph=True)(TOKENS)
    except torch._dynamo.exc.Unsupported:
        pytest.skip("transformers' own forward pass breaks the graph")


def eager_logits(model: nn.Module) -> Tensor:
    """The logits by plain torch, which a compiled model is traced from; C++ sums a residual in another order."""
    with use_backend("reference"):
        return logits(model)


@INSTANTIATED
@pytest.mark.usefixtures("whole_graph")
def test_compilation_is_bounded():
    torch._dynamo.reset()
    model, counter = make_two(make_few(), **SMALL), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(3):
        for adapter in ("default", "other"):
            model.set_adapter(adapter)
            for training in (False, True):
                model.train(training)
                assert torch.equal(logits(compiled), eager_logits(model))
        if step == 0:
            compilations = counter.frame_count
    assert counter.frame_count == compilations <= 4  # one per adapter and mode


@INSTANTIATED
@pytest.mark.usefixtures("whole_graph")
def test_states_are_not_frozen_into_a_compiled_model():
    torch._dynamo.reset()
    model, counter = make_two(make_few(), **SMALL), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(3):
        assert torch.equal(logits(compiled), eager_logits(model))
        with model.disable_adapter():
            assert torch.equal(logits(compiled), logits(make_tiny(**SMALL)))
        model.merge_adapter()
        assert torch.equal(logits(compiled), eager_logits(model))
        model.unmerge_adapter()
        if step == 0:
            compilations = counter.frame_count
    assert counter.frame_count == compilations <= 3


@INSTANTIATED
@pytest.mark.usefixtures("whole_graph")
def test_compiled_training_compiles_once_and_has_the_eager_gradients():
    torch._dynamo.reset()
    model, counter = make_trained(make_few(), **SMALL), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.train(), backend=counter, fullgraph=True)
    train_steps(compiled, 4)
    with use_backend("reference"):
        expected = gradients(model)
    for name, grad in gradients(compiled).items():
        want = expected[name.removeprefix("_orig_mod.")]
        if any(scale in name for scale in SCALE_NAMES):  # fused sums have another order
            assert (grad - want).norm() <= 1e-6 * want.norm(), name
        else:
            assert torch.equal(grad, want), name
    assert counter.frame_count == 1


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(_buffer(model), weights_only=False),
}


def _buffer(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("copier", COPIERS)
def test_copies_of_a_model_with_two_adapters(copier, merged):
    model = make_two()
    expected = logits(model)
    if merged:
        model.merge_adapter()
    duplicate = COPIERS[copier](model)
    with torch.no_grad():
        for parameter in model.parameters():  # the copy shares nothing
            parameter.zero_()
    assert torch.equal(logits(duplicate), expected)
    duplicate.unmerge_adapter()
    with duplicate.disable_adapter():
        assert torch.equal(logits(duplicate), logits(make_tiny()))
    assert torch.equal(logits(duplicate.merge_and_unload()), expected)


def test_state_dict_without_pickle():
    model, other = make_two(), make_two()
    other.load_state_dict(torch.load(_buffer(model.state_dict()), weights_only=True))
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
def test_replicas_of_data_parallel(options, monkeypatch):
    # torch.nn.DataParallel's own replication, but for the copies to other devices
    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.detach() * 1 if detach else tensor * 1 for tensor in tensors] for _ in devices]

    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    model = make_trained(make_config(**options))
    for replica in module.replicate(model, [0, 1]):
        assert torch.equal(logits(replica), logits(model))
    expected = gradients(model)
    model.zero_grad()
    module.replicate(model, [0, 1])[1](TOKENS, labels=TOKENS).loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_are_float32_both_ways(dtype, autocast_adapter_dtype, tmp_path):
    expected = logits(make_tiny(dtype=dtype))
    options = {"autocast_adapter_dtype": autocast_adapter_dtype}
    model = get_peft_model(make_tiny(dtype=dtype), make_config(), **options)
    if dtype != torch.float32:
        assert torch.equal(logits(model), expected)
    train_steps(model, 2, lr=0.3)
    model.add_adapter("other", make_config(), **options)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_tiny(dtype=dtype), tmp_path, torch_device="cpu", **options)
    loaded.load_adapter(tmp_path / "other", "other", torch_device="cpu", **options)
    for one in (model, loaded):
        assert {p.dtype for name, p in one.named_parameters() if "symexplin_" in name} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model.eval()))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_bfloat16_raw_on_request_loses_what_its_documentation_says(low_cpu_mem_usage, tmp_path):
    base = make_tiny(dtype=torch.bfloat16, hidden_size=64)
    config = make_config(raw_dtype="bfloat16", target_modules=["up_proj"])
    model = get_peft_model(base, config)
    layers = [layer for layer in model.modules() if isinstance(layer, SELLayer)]
    before = torch.cat([layer.base_weight.flatten() for layer in layers]).double()
    after = torch.cat([layer.get_effective_weight("default").flatten() for layer in layers]).detach().double()
    assert 0.10 < (before != after).double().mean() < 0.16
    assert ((after - before).abs() <= 0.017 * before.abs()).all()
    assert (after - before).norm() < 0.0035 * before.norm()
    train_steps(model, 1, lr=0.3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        make_tiny(dtype=torch.bfloat16, hidden_size=64), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage
    )
    own = {name.split("symexplin_")[1]: p for name, p in loaded.named_parameters() if "symexplin_" in name}
    dtypes = {name.split(".")[0]: p.dtype for name, p in own.items()}
    assert dtypes.pop("raw") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert torch.equal(logits(loaded), logits(model.eval()))


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.float16])
def test_grad_scaler_with_autocast(base_dtype):
    model = get_peft_model(make_tiny(dtype=base_dtype), make_config())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": p} for p in parameters], lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(TOKENS, labels=TOKENS).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert torch.isfinite(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_effective_weight_as_a_plain_one(dtype):
    model = make_trained()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        adapted = model(TOKENS).logits
        merged = model.merge_and_unload()(TOKENS).logits
    assert torch.equal(adapted, merged)


def test_a_frozen_base_for_kbit_training():
    model = get_peft_model(prepare_model_for_kbit_training(make_tiny(dtype=torch.bfloat16)), make_config())
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    expected = logits(model.eval())
    model.train()
    train_steps(model, 2, lr=0.3)
    assert not torch.equal(logits(model.eval()), expected)
    assert_same_bits({name: p for name, p in model.named_parameters() if name in before}, before)


@pytest.mark.parametrize("options", [{}, {"train_raw": False}])
def test_a_base_on_meta(options, tmp_path):
    source = make_trained(make_config(**options))
    source.save_pretrained(tmp_path / "adapter")
    make_tiny().save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(make_tiny().config)
    with pytest.raises(SELError, match="offloaded or on the meta device"):
        get_peft_model(base, make_config(**options))
    assert not any(isinstance(module, SELLayer) for module in base.modules())
    # from files, both the base and the adapter without a first filling
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", low_cpu_mem_usage=True)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter", low_cpu_mem_usage=True)
    assert torch.equal(logits(loaded), logits(source))
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert_same_bits(clone_state(loaded.unload()), clone_state(make_tiny()))
