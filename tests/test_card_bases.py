"""What a card says of its base: id or folder, how to merge it, and whose base_model it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from models import convert, make_tiny
from peft import PeftModel
from test_card import HUB_ID, SAVES, offline, read_section
from test_training import make_arguments, make_data
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from peft_sel import SELTrainer
from peft_sel.cli import main

__all__ = ["offline"]


def make_named(name: str) -> nn.Module:
    base = make_tiny()
    base.name_or_path = base.config._name_or_path = name
    return base


def code(folder: Path) -> str:
    """Return the Python of a card that merges."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("revision", [None, "abc 123"])
def test_merges_with_a_base_on_the_hub(revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_named(HUB_ID).save_pretrained(tmp_path / "cache")
    model = convert(make_named(HUB_ID), revision=revision)
    model.save_pretrained(tmp_path / "adapter")
    asked: list[tuple[str, str | None]] = []

    def fetch(repo: str, revision: str | None = None, **_: Any) -> str:
        asked.append((repo, revision))
        return str(tmp_path / "cache")

    monkeypatch.setattr("peft_sel.origins.snapshot_download", fetch)
    monkeypatch.chdir(tmp_path / "adapter")
    exec(code(Path()), {})
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    (command,) = re.findall(r"^```shell\n(.*)\n```$", Path("README.md").read_text(), re.MULTILINE)
    program, *arguments = shlex.split(command)
    assert program == "peft-sel" and main([*arguments, "--overwrite"]) == 0
    assert asked == [(HUB_ID, revision)] * 2
    assert f'.from_pretrained("{HUB_ID}"{", revision=" * bool(revision)}' in Path("README.md").read_text()


@pytest.mark.parametrize("save", SAVES)
def test_a_relative_folder_is_no_id(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny().save_pretrained(tmp_path / "out" / "base")
    monkeypatch.chdir(tmp_path)
    model = convert(AutoModelForCausalLM.from_pretrained("out/base"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for place in (tmp_path, elsewhere):
        monkeypatch.chdir(place)
        SAVES[save](model, tmp_path / "adapter")
        data = ModelCard.load(tmp_path / "adapter" / "README.md").data
        assert data.base_model is None and not any(tag.startswith("base_model:") for tag in data.tags)
        assert read_section(tmp_path / "adapter")["Base"] == f"`{tmp_path / 'out' / 'base'}`"
    monkeypatch.chdir(tmp_path / "adapter")
    exec(code(Path()), {})
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def change_base(save: Callable[[PeftModel, Path], object], folder: Path, edit: Callable[[str], str]) -> ModelCard:
    """Save an adapter of one base, edit the card, and save one of another base over it."""
    save(convert(make_named("org/first")), folder)
    file = folder / "README.md"
    file.write_text(edit(file.read_text()))
    save(convert(make_named("org/second")), folder)
    return ModelCard.load(file)


MINE = "https://example.org/my-base"


@pytest.mark.parametrize("save", SAVES)
def test_base_model_is_ours_or_the_users(save: str, tmp_path: Path) -> None:
    named = change_base(SAVES[save], tmp_path / "a", lambda text: text + "\nCompare with `org/second`.\n")
    assert named.data.base_model == "org/second"
    tags = [tag for tag in named.data.tags if "base_model" in tag]
    assert tags == ["base_model:adapter:org/second"]
    theirs = change_base(
        SAVES[save], tmp_path / "b", lambda text: text.replace("base_model: org/first", f"base_model: {MINE}")
    )
    assert theirs.data.base_model == MINE and "base_model:adapter:org/second" in theirs.data.tags
    several = change_base(
        SAVES[save],
        tmp_path / "c",
        lambda text: text.replace("base_model: org/first", "base_model: [org/first, org/x]"),
    )
    assert several.data.base_model == ["org/first", "org/x"]
    assert read_section(tmp_path / "b")["Base"] == "`org/second`"


@pytest.mark.parametrize("save", SAVES)
def test_a_deleted_section_stays_away_where_its_marks_stay(save: str, tmp_path: Path) -> None:
    model = convert(make_tiny())
    SAVES[save](model, tmp_path)
    file = tmp_path / "README.md"
    text = file.read_text()
    start, end = text.index("-->\n") + 4, text.index("<!-- peft_sel end -->")
    file.write_text(text[:start] + text[end:])
    SAVES[save](convert(make_tiny(), beta=9.0), tmp_path)
    assert file.read_text() == text[:start] + text[end:]
    file.write_text(text[: text.index("<!-- peft_sel")] + text[end + 21 :])
    SAVES[save](model, tmp_path)
    assert "## How to load" in file.read_text()  # as README says


@pytest.mark.parametrize("kind", [Trainer, SELTrainer])
def test_trainer_cards_keep_the_section(kind: type[Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny().save_pretrained(tmp_path / "out" / "base")
    monkeypatch.chdir(tmp_path)
    model = convert(AutoModelForCausalLM.from_pretrained("out/base"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = kind(model, make_arguments(tmp_path / "run"), train_dataset=make_data())
    trainer.save_model()
    before = read_section(tmp_path / "run")
    for _ in range(2):
        trainer.create_model_card(tags=["mine"])  # as push_to_hub does
        assert read_section(tmp_path / "run") == before and before["Trained"].endswith("parameters")
        text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
        data = ModelCard.load(tmp_path / "run" / "README.md").data
        assert "## Training procedure" in text and data.base_model is None and "mine" in data.tags


def test_no_section_from_what_is_no_sel_adapter(tmp_path: Path) -> None:
    for text in ('{"peft_type": "LORA"}', "{", '{"peft_type": "SYMEXPLIN"}'):
        (tmp_path / "adapter_config.json").write_text(text)
        convert(make_tiny()).create_or_update_model_card(str(tmp_path))
        assert "How to load" not in (tmp_path / "README.md").read_text()
    convert(make_tiny()).save_pretrained(tmp_path)
    read_section(tmp_path)


FACTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "drawn": (
        {"init_target": "xavier_uniform", "init": "congruent"},
        "Started from",
        "drawn, xavier_uniform; init congruent",
    ),
    "layers": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "Converted", "`q_proj`; layers `1`"),
    "a layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "Converted", "`q_proj`; layers `1`"),
    "excluded": (
        {"target_modules": "all-linear", "exclude_modules": ["up_proj", "down_proj"]},
        "Converted",
        "; without `down_proj`, `up_proj`",
    ),
    "pattern": (
        {"beta_pattern": {"q_proj": 3.5, "0.mlp.*": 4}},
        "Curvature beta",
        ", but for `0.mlp.*` 4, `q_proj` 3.5",
    ),
    "variants": (
        {"log_curvature": True, "normalize_by_inner_mult": True, "normalizer": "fixed"},
        "Transform",
        "family symexp, log_curvature, normalize_by_inner_mult, normalizer fixed",
    ),
}


@pytest.mark.filterwarnings("ignore:.*congruent.*")
@pytest.mark.parametrize("kind", FACTS)
def test_says_what_is_out_of_the_ordinary(kind: str, tmp_path: Path) -> None:
    options, name, text = FACTS[kind]
    convert(make_tiny(), **options).save_pretrained(tmp_path / "adapter")
    assert read_section(tmp_path / "adapter")[name].endswith(text)
    convert(make_tiny()).save_pretrained(tmp_path / "plain")
    plain = read_section(tmp_path / "plain")
    assert "Started from" not in plain and not plain.get(name, "").endswith(text)
