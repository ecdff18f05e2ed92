"""SEL inside the machinery of training and deployment: offloading, checkpointing, compilation, copies, casts."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from models import make_tiny, train_steps
from peft import PeftModel, get_peft_model
from torch import nn

from peft_sel import SELConfig, SELError

TOKENS = torch.arange(24).reshape(2, 12)
CPU = torch.device("cpu")


def make_config(**options: object) -> SELConfig:
    return SELConfig(**{"task_type": "CAUSAL_LM", "r": 2, **options})


def make_trained(config: SELConfig | None = None, **options: object) -> PeftModel:
    model = get_peft_model(make_tiny(**options), config or make_config())
    train_steps(model, 1, lr=0.3)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


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
