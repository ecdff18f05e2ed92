"""Training jobs that cannot work say so before they train, and in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny import save_checkpoint, write_documents, write_recipe
from transformers import AutoTokenizer

from peft_sel import SELError
from peft_sel.cli import main
from peft_sel.demo.stages import make_out_dir
from peft_sel.errors import CheckpointError, RecipeError
from peft_sel.jobs import run_job
from peft_sel.origins import CHECKPOINT_PATTERNS, IGNORED_PATTERNS, load_model, read_tokenizer, resolve_checkpoint
from peft_sel.recipe import load_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl")
    return tmp_path


def change_config(base: Path, **changes: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(base: Path) -> None:
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def misshape(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: torch.zeros(3, 5)}, base / "model.safetensors", {"format": "pt"})


def pickle(base: Path) -> None:
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()


BROKEN = {
    "cut": cut,
    "shapes": misshape,
    "layer_types": lambda base: change_config(base, num_hidden_layers=3, layer_types=["full_attention"] * 2),
    "pickles": pickle,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_base_is_one_error(how: str, folder: Path) -> None:
    BROKEN[how](folder / "base")
    recipe = load_recipe(write_recipe(folder))
    with pytest.raises(CheckpointError, match=re.escape(str(folder / "base"))):
        load_model(recipe)
    with pytest.raises(SELError):
        run_job(recipe)
    assert not (folder / "out").exists()


def test_what_cannot_be_merged_is_not_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_config(folder / "base", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    monkeypatch.setattr("peft_sel.jobs.load_model", lambda *_: pytest.fail("was loaded"))
    with pytest.raises(CheckpointError, match="quantized"):
        run_job(load_recipe(write_recipe(folder, merge=True)))
    monkeypatch.setattr("peft_sel.demo.stages.load_model", lambda *_: pytest.fail("was loaded"))
    assert main(["demo", "--model", str(folder / "base"), "--out", str(folder / "demo")]) == 2
    assert not (folder / "demo").exists()


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "gemma2", "t5", "llama", "mistral"])
def test_a_folder_without_tokenizer_files_has_no_tokenizer(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=r"has (no|a) tokenizer"):
        read_tokenizer("some/model", tmp_path)


def test_a_tokenizer_with_a_vocabulary_is_read(folder: Path) -> None:
    expected = AutoTokenizer.from_pretrained(folder / "base")("text")["input_ids"]
    assert read_tokenizer("some/model", folder / "base")("text")["input_ids"] == expected


def test_resuming_from_a_run_names_its_checkpoint(folder: Path) -> None:
    file = write_recipe(folder, training={"save_strategy": "steps", "save_steps": 2}, merge=False)
    run_job(load_recipe(file))
    other = ["output_dir=" + str(folder / "again")]
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a training; name \S*checkpoint-4"):
        run_job(load_recipe(file, [*other, f"training.resume_from_checkpoint={folder / 'out'}"]))
    for wrong in (folder / "out" / "adapter", folder / "base"):
        with pytest.raises(CheckpointError, match="is no checkpoint of a training; name a checkpoint-<step> folder"):
            run_job(load_recipe(file, [*other, f"training.resume_from_checkpoint={wrong}"]))
    assert not (folder / "again").exists()
    assert run_job(load_recipe(file, [*other, f"training.resume_from_checkpoint={folder / 'out' / 'checkpoint-2'}"]))


def test_a_key_that_is_there_twice_is_refused(folder: Path) -> None:
    file = write_recipe(folder)
    text = file.read_text()
    file.write_text(text + "training:\n  max_steps: 2\n")
    with pytest.raises(RecipeError, match="training is there twice"):
        load_recipe(file)
    file.write_text(text.replace("  max_steps: 4\n", "  max_steps: 4\n  max_steps: 5\n"))
    with pytest.raises(RecipeError, match="max_steps is there twice"):
        load_recipe(file)
    file.write_text(text)
    with pytest.raises(RecipeError, match="r is there twice"):
        load_recipe(file, ["sel={r: 2, r: 3}"])
    lines = "x: &x {r: 2, beta: 3.0}\nsel: {<<: *x, r: 4}\n"  # a key over one that is merged in is YAML's way
    file.write_text(lines)
    with pytest.raises(RecipeError, match="x: unknown key"):  # and no key twice
        load_recipe(file)
    file.write_text(text + "sel:\n  <<: {r: 2, beta: 3.0}\n  r: 4\n")
    assert (load_recipe(file).sel.r, load_recipe(file).sel.beta) == (4, 3.0)


def test_the_demo_does_not_search_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"runs: is no folder, or a link to nothing; .*--out"):
        make_out_dir(None)


def test_a_job_whose_reader_went_away_has_not_succeeded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_pipe(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("peft_sel.cli.os.dup2", lambda *_: None)
    monkeypatch.setattr("peft_sel.jobs.run_job", break_pipe)
    assert main(["train", str(write_recipe(folder))]) == 141
    monkeypatch.setattr("peft_sel.checkpoint.inspect_checkpoint", break_pipe)
    assert main(["inspect", str(folder / "base")]) == 0


def test_what_is_fetched_is_what_a_merge_copies() -> None:
    files = ["model.safetensors", "LICENSE", "NOTICE.txt", "modeling_x.py", "README.md", "vocab.tiktoken"]
    files += ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "training_args.pt"]
    patterns = {"allow_patterns": CHECKPOINT_PATTERNS, "ignore_patterns": IGNORED_PATTERNS}
    assert list(filter_repo_objects([*files, *others], **patterns)) == files


def test_any_failure_of_the_hub_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadError(Exception):
        pass

    def fetch(*_: Any, **__: Any) -> None:
        raise ReadError

    monkeypatch.setattr("peft_sel.origins.snapshot_download", fetch)
    with pytest.raises(CheckpointError, match=r"some/model: .*ReadError"):
        resolve_checkpoint("some/model")
