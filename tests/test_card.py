"""The model card of an adapter: read by the hub's own parser, its code run, and what a user wrote kept."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from models import TOKENS, clone_state, convert, logits, make_config, make_tiny, train_steps
from peft import PeftModel
from safetensors.torch import load_file
from test_training import make_arguments, make_data
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from peft_sel import SELTrainer, save_adapter
from peft_sel.cli import main
from peft_sel.errors import CheckpointError

HUB_ID = "Qwen/Qwen3-0.6B-Base"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep PEFT from asking the hub for the configuration of a base."""
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: False)


def trainer_saves(model: PeftModel, folder: Path) -> None:
    """Take a step with SELTrainer, whose checkpoint this is."""
    arguments = make_arguments(folder.parent / "run", max_steps=1, save_strategy="steps", save_steps=1)
    SELTrainer(model, arguments, train_dataset=make_data()).train()
    shutil.copytree(folder.parent / "run" / "checkpoint-1", folder)


def replaces(model: PeftModel, folder: Path) -> None:
    save_adapter(model, folder, overwrite=True)


SAVES: dict[str, Callable[[PeftModel, Path], object]] = {
    "PEFT": lambda model, folder: model.save_pretrained(folder),
    "save_adapter": replaces,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"beta": 5.0},
    "scales only": {"train_raw": False, "exp_scale": None, "offset": "column"},
    "no residual": {"r": 0, "target_modules": "all-linear", "bias": "all"},
    "other tensors": {"modules_to_save": ["norm"], "trainable_token_indices": [1, 5]},
}


def read_section(folder: Path) -> dict[str, str]:
    """Return the facts of a card by name, after the checks that hold for every one."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft" and "symexplin" in card.data.tags
    assert text.count("## How to load this adapter") == text.count("<!-- peft_sel end -->") == 1
    assert text.count("### Framework versions") <= 1 == text.count("\n---\n")
    return dict(re.findall(r"^- ([A-Z][\w ]+): (.*)$", card.text.split("<!-- peft_sel end")[0], re.MULTILINE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("save", [*SAVES, "SELTrainer"])
def test_says_what_the_adapter_is(save: str, kind: str, tmp_path: Path) -> None:
    base = make_tiny(dtype=torch.bfloat16, vocab_size=160)
    base.name_or_path = base.config._name_or_path = HUB_ID
    model = convert(base, **KINDS[kind])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    (SAVES | {"SELTrainer": trainer_saves})[save](model, tmp_path / "adapter")
    facts = read_section(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    betas = [float(value) for key, value in tensors.items() if key.endswith("symexplin_beta")]
    low, high = f"{min(betas):.4g}", f"{max(betas):.4g}"
    assert facts["Curvature beta"].startswith(f"{low if low == high else f'{low} to {high}'} over {len(betas)} weights")
    assert facts["Trained"].endswith(f"; {trained:,} parameters")
    assert ("raw weights" in facts["Trained"]) == (kind != "scales only") == ("exp_scale" in facts["Trained"])
    assert ("residual of rank 2" in facts["Trained"]) == (kind != "no residual")
    assert facts["Base"] == f"`{HUB_ID}`" and "mismatch" in facts["Transform"] and "q_proj" in facts["Converted"]
    assert f"of the hashes of {len(betas)} weights" in facts["Fingerprint of the base"]
    data = ModelCard.load(tmp_path / "adapter" / "README.md").data
    assert data.base_model == HUB_ID and data.pipeline_tag == "text-generation"
    assert {f"base_model:adapter:{HUB_ID}", "transformers"} <= {*data.tags}


def make_classifier() -> nn.Module:
    model = AutoModelForSequenceClassification.from_config(make_tiny().config)
    model.config.pad_token_id = 0
    return model.to(torch.bfloat16)


TASKS: dict[str, Callable[[], nn.Module]] = {
    "CAUSAL_LM": lambda: make_tiny(dtype=torch.bfloat16),
    "SEQ_CLS": make_classifier,
    "": lambda: make_tiny("llama", torch.bfloat16),
}


@pytest.mark.parametrize("task", TASKS)
def test_its_code_runs(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TASKS[task]().save_pretrained(tmp_path / "a base")
    kind = AutoModelForSequenceClassification if task == "SEQ_CLS" else AutoModelForCausalLM
    model = convert(kind.from_pretrained(tmp_path / "a base"), task_type=task or None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "residual" in name:
                parameter.add_(0.01)
    save_adapter(model, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path / "adapter")
    text = Path("README.md").read_text(encoding="utf-8")
    loading, merging = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```shell\n(.*)\n```$", text, re.MULTILINE)
    found: dict[str, Any] = {}
    exec(loading, found)
    assert torch.equal(logits(found["model"].eval()), logits(model.eval()))
    exec(merging, {})
    in_python = clone_state(kind.from_pretrained(tmp_path / "merged"))
    shutil.rmtree(tmp_path / "merged")
    program, *arguments = shlex.split(command)
    assert program == "peft-sel" and main(arguments) == 0
    merged = kind.from_pretrained(tmp_path / "merged").eval()
    assert all(torch.equal(in_python[name], tensor) for name, tensor in merged.state_dict().items())
    assert torch.equal(merged(TOKENS).logits, logits(model))


EDITED = """\
---
base_model: mine/elsewhere
license: apache-2.0
tags:
- manuals
datasets:
- mine/manuals
---
# My adapter

Above.
"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("save", SAVES)
def test_keeps_what_a_user_wrote(save: str, line_end: str, tmp_path: Path) -> None:
    model = convert(make_tiny())
    SAVES[save](model, tmp_path)
    file = tmp_path / "README.md"
    ours = file.read_text(encoding="utf-8").split("\n---\n", 1)[1]
    file.write_bytes((EDITED + ours + "\n\nBelow.\n").replace("\n", line_end).encode())
    SAVES[save](model, tmp_path)
    first = file.read_bytes()
    facts, card = read_section(tmp_path), ModelCard.load(file)
    assert card.data.license == "apache-2.0" and card.data.datasets == ["mine/manuals"]
    assert card.data.base_model == "mine/elsewhere" and "manuals" in card.data.tags
    assert card.text.index("Above.") < card.text.index("## How to load") < card.text.index("Below.")
    for name in SAVES:
        SAVES[name](model, tmp_path)
        assert file.read_bytes() == first
    SAVES[save](convert(make_tiny(), beta=9.0, r=0), tmp_path)
    changed = read_section(tmp_path)
    assert changed["Curvature beta"].startswith("9 over") and not facts["Curvature beta"].startswith("9")
    assert "residual" in facts["Trained"] and "residual" not in changed["Trained"]
    assert "Below." in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("save", SAVES)
def test_leaves_a_section_that_a_user_changed(save: str, tmp_path: Path) -> None:
    model = convert(make_tiny())
    SAVES[save](model, tmp_path)
    file = tmp_path / "README.md"
    for old, new in (("- Base: not recorded", "- Base: my own, of 2025"), ("<!-- peft_sel", "<!-- of peft_sel")):
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        SAVES[save](convert(make_tiny(), beta=9.0), tmp_path)
        assert file.read_text(encoding="utf-8") == text.replace(old, new)


@pytest.mark.parametrize("save", SAVES)
def test_front_matter_is_what_the_hub_takes(save: str, tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path / "base")
    model = convert(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    SAVES[save](model, folder)
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model is None and not any(tag.startswith("base_model:") for tag in data.tags)
    assert read_section(folder)["Base"] == f"`{tmp_path / 'base'}`"
    other = make_tiny()
    other.name_or_path = other.config._name_or_path = HUB_ID
    SAVES[save](convert(other), folder)  # another base
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model == HUB_ID and f"base_model:adapter:{HUB_ID}" in data.tags
    other = make_tiny()
    other.name_or_path = other.config._name_or_path = "mine/second"
    SAVES[save](convert(other), folder)
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model == "mine/second"
    assert [tag for tag in data.tags if tag.startswith("base_model:")] == ["base_model:adapter:mine/second"]


def test_a_name_cannot_break_out_of_the_code(tmp_path: Path) -> None:
    make_config(base_model_name_or_path='x"\n```\n<script>').save_pretrained(str(tmp_path))
    assert "<script>" not in ModelCard.load(tmp_path / "README.md").text
    make_config(base_model_name_or_path="a'; ls \"").save_pretrained(str(tmp_path))
    text = ModelCard.load(tmp_path / "README.md").text
    assert re.findall(r"peft-sel merge (.*) \. ", text) == [shlex.quote("a'; ls \"")]
    assert '.from_pretrained("a\'; ls \\"")' in text


BROKEN = {
    "no mapping": b"---\n- a list\n---\ntext\n",
    "no YAML": b"---\na: [\n---\ntext\n",
    "no text": b"\xff\xfe\x00",
    "other types": b"---\nmodel-index: 3\n---\n",
}


REFUSING = {**SAVES, "configuration": lambda model, folder: model.peft_config["default"].save_pretrained(str(folder))}


@pytest.mark.parametrize(
    ("save", "broken"), [*itertools.product(REFUSING, BROKEN), ("PEFT", "a folder"), ("configuration", "a folder")]
)
def test_refuses_what_is_no_card(save: str, broken: str, tmp_path: Path) -> None:
    model = convert(make_tiny())
    SAVES["PEFT"](model, tmp_path)
    file = tmp_path / "README.md"
    file.unlink()
    file.mkdir() if broken == "a folder" else file.write_bytes(BROKEN[broken])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    train_steps(model)
    with pytest.raises(
        CheckpointError, match=r"/README\.md: is no model card \(.*; mend it, or move it away$"
    ) as caught:
        REFUSING[save](model, tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("text", ["", "Just text.\n", "---\n\n---\nText.\n"])
def test_a_readme_without_front_matter_is_a_card(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text(text)
    warned: list[str] = []
    monkeypatch.setattr("huggingface_hub.repocard.logger.warning", lambda message, *_: warned.append(message))
    convert(make_tiny()).save_pretrained(tmp_path)
    read_section(tmp_path)
    assert text.strip("-\n") in ModelCard.load(tmp_path / "README.md").text
    assert not warned  # a user could do nothing about it


def test_trainer_cards_say_how_to_load(tmp_path: Path) -> None:
    trainer = SELTrainer(convert(make_tiny()), make_arguments(tmp_path), train_dataset=make_data())
    trainer.create_model_card()
    assert "How to load" not in (tmp_path / "README.md").read_text(encoding="utf-8")  # no adapter is there yet
    trainer.save_model()
    trainer.create_model_card()
    assert read_section(tmp_path)["Trained"].endswith("parameters")
    assert "## Training procedure" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_each_adapter_of_a_model_has_a_card(tmp_path: Path) -> None:
    model = convert(make_tiny(), beta=5.0)
    model.add_adapter("second", make_config(beta=7.0))
    for _ in range(2):
        model.save_pretrained(tmp_path)
    assert read_section(tmp_path)["Curvature beta"].startswith("5 over")
    assert read_section(tmp_path / "second")["Curvature beta"].startswith("7 over")
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert "symexplin" in ModelCard.load(tmp_path / "one" / "README.md").data.tags  # PEFT's own card, of no adapter
    assert read_section(tmp_path / "one" / "second")["Curvature beta"].startswith("7 over")
