"""DeepSpeed ZeRO-3: conversion, saving and loading of split weights, which a stand-in splits and gathers."""

from __future__ import annotations

import enum
import importlib.machinery
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from models import NUM_TARGETS, assert_same_bits, convert, fingerprint, logits, make_config, make_tiny, sel_layers
from moe import make_moe
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from peft_sel import SELConfig, save_adapter
from peft_sel.errors import ConfigError, PartitionedError, RoundedError, SELError
from peft_sel.logs import collect_scale_means
from peft_sel.partitioned import copy_frozen
from peft_sel.scale_config import ScaleConfig
from peft_sel.training import check_deepspeed

ACCELERATE = Path(__file__).parent.parent / "configs" / "accelerate"


class Status(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


class FakeZero:
    """Splits parameters as DeepSpeed does: values go elsewhere, .data is empty, and a context brings them back."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.log: list[list[Tensor]] = []  # what each context gathered
        self._open: set[int] = set()
        self._ids = itertools.count()

    def split(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if not hasattr(parameter, "ds_id"):
                parameter.ds_id, parameter.ds_shape = next(self._ids), parameter.shape
                parameter.convert_to_zero_parameters = lambda param_list: self.split(param_list)
                self.values[parameter.ds_id] = parameter.data.clone()
                self._free(parameter)

    def _free(self, parameter: Any) -> None:
        parameter.ds_status = Status.NOT_AVAILABLE
        parameter.data = parameter.data.new_empty(0)

    def gather(self, parameters: Iterable[Any]) -> Any:
        zero = self
        asked: list[Any] = list(parameters)

        class Context:
            def __enter__(self) -> None:
                assert asked and all(parameter.ds_status is Status.NOT_AVAILABLE for parameter in asked)
                assert not zero._open, "a context inside another holds the weights of two modules"
                zero.log.append(asked)
                for parameter in asked:
                    zero._open.add(parameter.ds_id)
                    parameter.data, parameter.ds_status = zero.values[parameter.ds_id].clone(), Status.AVAILABLE

            def __exit__(self, *_: object) -> None:
                for parameter in asked:
                    written = not torch.equal(parameter.data.nan_to_num(), zero.values[parameter.ds_id].nan_to_num())
                    assert not written, "a write that is not kept"
                    zero._open.remove(parameter.ds_id)
                    zero._free(parameter)

        return Context()

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """What accelerator.get_state_dict gives: everything, whole."""
        parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        return {
            name: self.values[parameters[name].ds_id] if hasattr(parameters.get(name), "ds_id") else tensor
            for name, tensor in model.state_dict().items()
        }


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeZero]:
    fake = FakeZero()
    module: Any = ModuleType("deepspeed")
    module.__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)
    module.zero = ModuleType("deepspeed.zero")
    module.zero.GatheredParameters = fake.gather
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    yield fake
    assert not fake._open


def make_split(zero: FakeZero, **options: Any) -> Any:
    model = make_tiny(**options)
    zero.split(model.parameters())
    return model


def split_converted(zero: FakeZero, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    return convert(make_split(zero), **options)


def whole_converted(**options: Any) -> PeftModel:
    torch.manual_seed(1)
    return convert(make_tiny(), **options)


@pytest.mark.parametrize("bias", ["none", "sel_only"])
@pytest.mark.parametrize("base_weight", ["keep", "drop"])
def test_conversion_gathers_one_module_at_a_time(zero: FakeZero, bias: str, base_weight: str) -> None:
    options = {"bias": bias, "base_weight": base_weight, "beta": 4.0}  # the biases are 0, from which no beta follows
    model, expected = split_converted(zero, **options), whole_converted(**options)
    own = [[id(p) for p in layer.get_base_layer().parameters(recurse=False)] for layer in sel_layers(model)]
    assert len(zero.log) == NUM_TARGETS
    if base_weight == "keep":
        assert all(any({*map(id, asked)} == {*ids} for ids in own) for asked in zero.log)
    assert all(len(asked) <= 2 for asked in zero.log)  # a weight, and its bias
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())  # raw weights too, from now on
    assert_same_bits(zero.state(model), expected.state_dict())
    split, whole = sel_layers(model), sel_layers(expected)
    assert [layer.base_fingerprint for layer in split] == [layer.base_fingerprint for layer in whole]
    assert [layer.base_dropped for layer in split] == [layer.base_dropped for layer in whole]
    flags = [(name, parameter.requires_grad) for name, parameter in expected.named_parameters()]
    assert [(name, parameter.requires_grad) for name, parameter in model.named_parameters()] == flags


def test_a_failed_conversion_leaves_the_model_split(zero: FakeZero) -> None:
    model = make_split(zero)
    last = model.model.layers[1].mlp.down_proj.weight
    zero.values[last.ds_id][0, 0] = float("nan")
    before, values = fingerprint(model), {key: value.clone() for key, value in zero.values.items()}
    with pytest.raises(SELError, match="down_proj"):
        convert(model)
    assert fingerprint(model) == before
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    assert all(torch.equal(zero.values[key].nan_to_num(), value.nan_to_num()) for key, value in values.items())


def test_a_second_adapter(zero: FakeZero) -> None:
    model, expected = split_converted(zero), whole_converted()
    for each in (model, expected):
        torch.manual_seed(2)
        each.add_adapter("other", SELConfig(task_type="CAUSAL_LM", r=2))
    assert all(len(asked) <= 2 for asked in zero.log)
    assert_same_bits(zero.state(model), expected.state_dict())


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("base_weight='cpu'", {"base_weight": "cpu"}),
        ("train_raw=False", {"train_raw": False}),
        ("target_parameters=", {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}),
    ],
)
def test_what_cannot_run_on_split_weights(zero: FakeZero, field: str, options: dict[str, Any]) -> None:
    model = make_moe() if "target_parameters" in options else make_tiny()
    zero.split(model.parameters())
    before = fingerprint(model)
    with pytest.raises(ConfigError, match="ZeRO-3") as caught:
        convert(model, **options)
    assert str(caught.value).startswith(field)
    assert fingerprint(model) == before and not zero.log


def test_a_pass_outside_the_engine_says_so(zero: FakeZero) -> None:
    layer: Any = sel_layers(split_converted(zero))[0]
    with pytest.raises(PartitionedError, match=r"q_proj.*prepared model"):
        layer(torch.ones(1, 32))


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_in_memory_says_so(zero: FakeZero, call: str) -> None:
    model = split_converted(zero)
    before = fingerprint(model)
    with pytest.raises(PartitionedError, match="peft-sel merge"):
        getattr(model, call)() if call == "merge_and_unload" else model.base_model.merge_adapter()
    assert fingerprint(model) == before
    assert not any(layer.merged for layer in sel_layers(model))


def test_saving_needs_gathered_tensors(zero: FakeZero, tmp_path: Path) -> None:
    model, expected = split_converted(zero), whole_converted()
    state = zero.state(model)
    partial = {key: value for key, value in state.items() if "symexplin_exp_scale" not in key}
    for wrong in (None, {}, partial):
        with pytest.raises(PartitionedError, match=r"accelerator\.get_state_dict"):
            model.save_pretrained(tmp_path / "wrong", state_dict=wrong)
    assert not list(tmp_path.glob("**/*.safetensors"))
    with pytest.raises(PartitionedError):
        save_adapter(model, tmp_path / "wrong_too")
    assert not (tmp_path / "wrong_too").exists()
    model.save_pretrained(tmp_path / "split", state_dict=state)
    expected.save_pretrained(tmp_path / "whole")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "split" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_adapter_loads_before_its_own_tensors_are_split(zero: FakeZero, tmp_path: Path) -> None:
    saved = whole_converted(init_weights=False)
    saved.save_pretrained(tmp_path)
    expected = get_peft_model_state_dict(saved)
    for low_cpu_mem_usage in (False, True):
        model = PeftModel.from_pretrained(make_split(zero), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
        assert_same_bits(get_peft_model_state_dict(model), expected)
    model = split_converted(zero)
    with pytest.raises(PartitionedError, match="loading an adapter"):
        set_peft_model_state_dict(model, expected)


def test_what_is_split_depends_on_whether_a_load_follows(zero: FakeZero, tmp_path: Path) -> None:
    saved = whole_converted(init_weights=False)
    saved.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(make_split(zero), tmp_path, config=make_config())
    assert_same_bits(get_peft_model_state_dict(model), get_peft_model_state_dict(saved))
    model = get_peft_model(make_split(zero), SELConfig.from_pretrained(tmp_path))
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())


def test_logged_scales_are_those_of_a_whole_model(zero: FakeZero) -> None:
    means = collect_scale_means(whole_converted(init_weights=False))
    zero.log.clear()
    model = split_converted(zero, init_weights=False)
    zero.log.clear()
    assert collect_scale_means(model) == means
    assert len(zero.log) == 1 and not any(parameter.dim() > 1 for asked in zero.log for parameter in asked)


def test_frozen_tensors_are_copied_one_at_a_time(zero: FakeZero) -> None:
    model = split_converted(zero, exp_scale=ScaleConfig(trainable=False))
    zero.log.clear()
    copies = copy_frozen(model, "symexplin_")
    expected = {name: tensor for name, tensor in zero.state(model).items() if "exp_scale" in name}
    assert len(expected) == len(zero.log) == 2 * NUM_TARGETS and {len(asked) for asked in zero.log} == {1}
    assert_same_bits(copies, {name: expected[name] for name in copies})


def test_effective_weights_of_split_tensors_are_not_kept(zero: FakeZero) -> None:
    model, expected = split_converted(zero).eval(), whole_converted().eval()
    with zero.gather(list(model.parameters())):
        assert torch.equal(logits(model), logits(expected))
    assert not any(len(layer.kept_weights) for layer in sel_layers(model))
    assert all(len(layer.kept_weights) for layer in sel_layers(expected))


@pytest.mark.parametrize("part", ["raw", "residual", "scale"])
def test_a_cast_of_what_trains_is_an_error(part: str) -> None:
    model = whole_converted()
    layer = sel_layers(model)[0]
    tensors = {
        "raw": layer.symexplin_raw["default"],
        "residual": layer.symexplin_residual_a["default"],
        "scale": layer.symexplin_exp_scale["default"].row,
    }
    tensors[part].data = tensors[part].data.bfloat16()  # as DeepSpeed's bf16 does, past .to()
    with pytest.raises(RoundedError, match=r"q_proj was cast to bfloat16.*torch_autocast"):
        logits(model)


@pytest.mark.parametrize("raw_dtype", ["bfloat16", "float16", "float32"])
def test_a_cast_to_more_bits_is_an_error_of_its_own(raw_dtype: str) -> None:
    model = whole_converted(raw_dtype=raw_dtype)
    raw = sel_layers(model)[0].symexplin_raw["default"]
    wide = torch.float64 if raw_dtype == "float32" else torch.float32
    raw.data = raw.data.to(wide)
    name = str(wide).removeprefix("torch.")
    said = rf"q_proj was cast to {name}, which takes more memory than the {raw_dtype} .*or choose raw_dtype='{name}'"
    with pytest.raises(RoundedError, match=said) as caught:
        logits(model)
    assert "rounds away" not in str(caught.value)


@pytest.mark.parametrize(("raw_dtype", "found"), [("bfloat16", torch.float16), ("float64", torch.float32)])
def test_a_cast_to_as_many_bits_or_fewer_rounds(raw_dtype: str, found: torch.dtype) -> None:
    model = whole_converted(raw_dtype=raw_dtype)
    raw = sel_layers(model)[0].symexplin_raw["default"]
    raw.data = raw.data.to(found)
    with pytest.raises(RoundedError, match=f"rounds away what training adds to {raw_dtype}"):
        logits(model)


def test_a_chosen_raw_dtype_is_no_cast() -> None:
    assert logits(whole_converted(raw_dtype="bfloat16")).isfinite().all()


@pytest.mark.parametrize("stage", [2, 3])
def test_shipped_configs(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ACCELERATE / f"zero{stage}.yaml"
    config: Any = load_config_from_file(str(path))
    assert config.distributed_type == "DEEPSPEED" and "mixed_precision" not in yaml.safe_load(path.read_text())
    monkeypatch.chdir(ACCELERATE.parent.parent)
    plugin = DeepSpeedPlugin(hf_ds_config=config.deepspeed_config["deepspeed_config_file"])
    plugin.set_mixed_precision("no")
    assert plugin.zero_stage == stage and plugin.get_value("torch_autocast.dtype") == "bfloat16"
    check_deepspeed(plugin)


def test_deepspeed_configs_that_would_lose_something() -> None:
    check_deepspeed(None)
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    for name in ("bf16", "fp16"):
        plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, name: {"enabled": True}})
        with pytest.raises(ConfigError, match=rf"^{name}\.enabled=True: .*torch_autocast"):
            check_deepspeed(plugin)
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match="stage3_gather_16bit_weights_on_model_save"):
        check_deepspeed(plugin)
    check_deepspeed(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}))
