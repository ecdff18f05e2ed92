"""The recipes in configs/: each is parsed, built and run, with tiny models and texts in the place of the real ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
import torch
from models import NUM_TARGETS
from tiny import make_documents, save_checkpoint, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_sel.cli import main
from peft_sel.jobs import run_job
from peft_sel.numerics import width_beta
from peft_sel.origins import load_tokenizer
from peft_sel.recipe import Recipe, load_recipe

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "accelerate")
ABLATIONS = sorted((FOLDER / "ablations").glob("*.yaml"))
WIDTHS = {1024: (12, 7.5), 2048: (24, 13.52), 3072: (36, 19.08)}  # depth, beta
TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tokenizer": "bytes",
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def write_chats(file: Path) -> Path:
    texts = make_documents(40)
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in pairwise(texts)]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


def shrink(path: Path, folder: Path, steps: int) -> list[str]:
    """Return the overrides that put tiny things into a recipe's place: a model, a text, a few steps."""
    text, chats = write_documents(folder / "text.jsonl"), write_chats(folder / "chats.jsonl")
    recipe = load_recipe(path, [f"data.files={chats}", "data.dataset=null", "training.use_cpu=true"])
    if recipe.model.config is None:
        family = "qwen3" if "Qwen3" in recipe.model.path else "qwen2"
        base = save_checkpoint(folder / family, family)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(base)
        model = [f"model.path={base}"]
    else:
        model = [f"model.{name}={value}" for name, value in TINY_SIZES.items()]
    data = [f"data.files={text if recipe.data.messages_column is None else chats}", "data.dataset=null"]
    small = ["data.sequence_length=64", f"training.max_steps={steps}", "training.gradient_accumulation_steps=1"]
    batch = [
        "training.per_device_train_batch_size=2",
        "training.warmup_steps=2",
        "training.logging_steps=1",
        "training.use_cpu=true",
    ]
    return [*model, *data, *small, *batch, f"output_dir={folder / 'out'}"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_runs(path: Path, tmp_path: Path) -> None:
    words = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("# ")]
    assert {"purpose", "command", "duration", "expected"} <= set(words)
    report = run_job(load_recipe(path, shrink(path, tmp_path, steps=2)))
    assert report is not None and report.eval_loss is not None and report.merge is not None
    plain = AutoModelForCausalLM.from_pretrained(report.merge.out_dir)
    assert len([name for name, _ in plain.named_parameters() if name.endswith("_proj.weight")]) == NUM_TARGETS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_commands_in_headers_name_their_recipe(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"configs/{path.relative_to(FOLDER)}" in header
    assert max(map(len, path.read_text().splitlines())) <= 120


@pytest.mark.parametrize("width", WIDTHS)
def test_the_main_runs_have_the_papers_widths(width: int, tmp_path: Path) -> None:
    depth, beta = WIDTHS[width]
    path = FOLDER / f"from_scratch_width{width}.yaml"
    recipe = load_recipe(path, [f"output_dir={tmp_path}", "training.use_cpu=true"])
    options = recipe.model.config_options
    assert (options["hidden_size"], options["num_hidden_layers"]) == (width, depth)
    assert options["num_attention_heads"] * options["head_dim"] == width
    assert recipe.sel.beta == "width" and width_beta(width) == pytest.approx(beta, abs=0.01)
    assert (recipe.sel.mode, recipe.sel.init, recipe.sel.init_target) == ("mismatch", "congruent", "xavier_uniform")
    size = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    assert size == 256


def test_each_ablation_changes_what_its_name_says() -> None:
    base = load_recipe(FOLDER / "from_scratch_two_cores.yaml")
    found = {}
    for path in ABLATIONS:
        recipe = load_recipe(path)
        assert (recipe.model.config_options, recipe.data) == (base.model.config_options, base.data)
        assert recipe.training.learning_rate == base.training.learning_rate
        changed = {name for name, value in vars(recipe.sel).items() if value != getattr(base.sel, name)}
        found[path.stem] = changed
    assert found == {
        "congruent": {"mode"},
        "congruent_plain": {"mode", "offset", "r"},
        "exp_only": {"mode"},
        "fixed_multipliers": {"exp_scale", "linear_scale", "inner_multiplier"},
        "fixed_normalizer": {"normalizer"},
        "log_curvature": {"log_curvature"},
        "log_curvature_normalized": {"log_curvature", "normalize_by_inner_mult"},
        "mismatch_plain": {"offset", "r"},
        "normalized": {"normalize_by_inner_mult"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_every_ablation_runs_twenty_steps_through_the_command_line(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [part for override in shrink(path, tmp_path, steps=20) for part in ("--set", override)]
    assert main(["train", str(path), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "of 20  loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    tokens = torch.arange(24)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").eval()
    assert torch.isfinite(merged(tokens).logits).all()


def test_tokenizer_of_bytes_needs_no_file(tmp_path: Path) -> None:
    recipe: Recipe = load_recipe(FOLDER / "from_scratch_two_cores.yaml", [f"output_dir={tmp_path}"])
    tokenizer = load_tokenizer(recipe.model)
    text = "naïve ✓"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == 259 and len(ids) == len(text.encode()) + 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids
