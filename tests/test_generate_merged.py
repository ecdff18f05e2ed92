"""The real checkpoint merged file to file: the base's bytes before training, the adapted model's tokens after it."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest
import torch
from models import train_steps
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig, merge_checkpoint

PROMPT = torch.arange(1000, 1016)[None]


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def generate(model: nn.Module, num_tokens: int) -> list[int]:
    """Generate greedily; an end of text does not end it."""
    options = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    tokens = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), pad_token_id=0, **options)
    return tokens[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("num_tokens", [pytest.param(200, marks=pytest.mark.slow), 40])
def test_bytes_before_training_and_tokens_after_it(real_checkpoint: Path, num_tokens: int, tmp_path: Path) -> None:
    model = get_peft_model(load(real_checkpoint), SELConfig(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "untrained")
    merge_checkpoint(real_checkpoint, tmp_path / "untrained", tmp_path / "same")
    for path in real_checkpoint.iterdir():
        assert filecmp.cmp(path, tmp_path / "same" / path.name, shallow=False), path.name
    train_steps(model, 2)
    assert all(bool(p.any()) for name, p in model.named_parameters() if ".symexplin_residual_b." in name)
    model.save_pretrained(tmp_path / "trained")
    report = merge_checkpoint(real_checkpoint, tmp_path / "trained", tmp_path / "merged")
    assert report.tensors_merged == 210
    expected = generate(model.eval(), num_tokens)
    assert len(expected) == num_tokens and len(set(expected)) > 10
    del model
    plain = load(tmp_path / "merged")
    assert type(plain).__module__.startswith("transformers.")
    assert generate(plain, num_tokens) == expected
    with torch.no_grad():
        assert not torch.equal(plain(PROMPT).logits, load(real_checkpoint)(PROMPT).logits)  # training changed something
    shutil.rmtree(tmp_path)  # 1.6 GB
