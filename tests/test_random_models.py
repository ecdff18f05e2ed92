"""Jobs that start from random weights, recipes that extend others, and the data that comes with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tiny import make_documents, make_tokenizer, save_checkpoint, write_documents, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from peft_sel import ScaleConfig, SELError
from peft_sel.data import DataSection, load_blocks
from peft_sel.demo.material import write_text
from peft_sel.errors import ConfigError, RecipeError
from peft_sel.jobs import run_job
from peft_sel.recipe import load_recipe

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = {"config": "qwen3", "tokenizer": "bytes", **SIZES, "num_key_value_heads": 2, "head_dim": 8}
SEL = {"init_target": "xavier_uniform", "init": "congruent", "modules_to_save": ["embed_tokens", "lm_head", "norm"]}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def write(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a recipe that starts from random weights."""
    write_documents(folder / "text.jsonl")
    file = write_recipe(folder, sel=SEL, **changes)
    tree = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(tree | {"model": MODEL | (model or {})}))
    return file


# ----------------------------------------------------------------------------------------------------------- jobs


def test_a_job_from_random_weights_leaves_a_plain_checkpoint(tmp_path: Path) -> None:
    file = write(tmp_path, training={"max_steps": 12, "learning_rate": 0.003}, merge=True)
    report = run_job(load_recipe(file))
    assert report is not None and report.merge is not None
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    assert isinstance(base, Qwen3ForCausalLM) and base.dtype == torch.float32
    assert base.config.vocab_size == 259 and base.config.eos_token_id == 1 and base.config.head_dim == 8
    merged = AutoModelForCausalLM.from_pretrained(report.merge.out_dir).eval()
    assert report.merge.tensors_merged == report.merge.tensors_total == len(list(merged.parameters()))
    adapted = PeftModel.from_pretrained(base, report.adapter_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(report.merge.out_dir)
    tokens = torch.tensor(tokenizer(make_documents(1)[0])["input_ids"])[None]
    with torch.no_grad():
        assert torch.equal(adapted(tokens).logits, merged(tokens).logits)
        assert merged(tokens, labels=tokens).loss < 5.0 < adapted.unload()(tokens, labels=tokens).loss  # log(259) = 5.6


def test_a_seed_decides_the_start_and_the_run(tmp_path: Path) -> None:
    file = write(tmp_path)
    found = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        run_job(load_recipe(file, [f"output_dir={tmp_path / name}", f"training.seed={seed}"]))
        adapter = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        found.append((load_file(tmp_path / name / "base" / "model.safetensors"), adapter))
    for one, two, three in zip(*found, strict=True):
        assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
        assert not all(torch.equal(tensor, three[key]) for key, tensor in one.items())


def test_a_resumed_job_equals_the_straight_one(tmp_path: Path) -> None:
    file = write(tmp_path, training={"save_strategy": "steps", "save_steps": 2}, merge=True)
    run_job(load_recipe(file, [f"output_dir={tmp_path / 'straight'}"]))
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for name in ("adapter", "merged", "checkpoint-4"):
        shutil.rmtree(tmp_path / "resumed" / name)
    run_job(load_recipe(file, [f"output_dir={tmp_path / 'resumed'}", "training.resume_from_checkpoint=true"]))
    one, two = (load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("straight", "resumed"))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_dtype_and_other_architectures(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": False}
    tree = {"config": "gpt2", "tokenizer": str(save_checkpoint(tmp_path / "other")), "dtype": "bfloat16", **sizes}
    file = write_recipe(tmp_path, data={"files": str(write_documents(tmp_path / "text.jsonl"))}, merge=True)
    content = yaml.safe_load(file.read_text()) | {"model": tree, "sel": {"init_target": "xavier_normal"}}
    content["sel"] |= {"target_modules": ["c_attn", "c_proj", "c_fc"], "bias": "all"}
    content["sel"]["modules_to_save"] = ["wte", "wpe", "ln_1", "ln_2", "ln_f", "lm_head"]
    file.write_text(yaml.safe_dump(content))
    report = run_job(load_recipe(file, ["training.max_steps=1"]))
    assert report is not None and report.merge is not None
    assert AutoModelForCausalLM.from_pretrained(report.merge.out_dir, dtype="auto").dtype == torch.bfloat16


def test_what_stays_random_is_named(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.warns(UserWarning, match=r"embed_tokens.weight, .*lm_head.weight stay at their random values"):
        run_job(load_recipe(file, ["sel.modules_to_save=[norm]", "training.max_steps=1"]))
    tied = ["model.tie_word_embeddings=true", "sel.modules_to_save=[embed_tokens, norm]", "training.max_steps=1"]
    head = r"^base_model.model.lm_head.weight stay at .*tie_word_embeddings: false"
    with pytest.warns(UserWarning, match=head), pytest.warns(UserWarning, match="a tied layer is part of the adapter"):
        run_job(load_recipe(file, [*tied, f"output_dir={tmp_path / 'tied'}"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sel.target_modules=[nothing_like_this]"], "No modules were targeted"),
        (["model.vocab_size=100"], r"vocab_size=100: the tokenizer bytes has 259 tokens"),
        (["model.tokenizer=./nowhere"], r"\./nowhere: has no tokenizer that can be loaded"),
        (["model.hidden_size=-32"], r"config='qwen3': no model can be built with .*-32"),
        (["model.num_attention_heads=0"], r"config='qwen3': no model can be built"),
    ],
)
def test_a_job_that_fails_leaves_nothing(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises((SELError, ValueError), match=message):
        run_job(load_recipe(write(tmp_path), overrides))
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hiden_size": 32}, "model.hiden_size: unknown key; did you mean hidden_size"),
        ({"config": "qwen33"}, "model.config: unknown value 'qwen33'; did you mean qwen3"),
        ({"config": "t5"}, "model.config: unknown value 't5'"),
        ({"config": 3}, "model.config: 3 is not of type str"),
        ({"tokenizer": None}, "model.tokenizer: this key is missing"),
        ({"path": "x"}, "model.path: names trained weights and model.config random ones"),
        ({"revision": "x"}, "model.revision: names trained weights"),
        ({"hidden_size": "wide"}, "model: .*hidden_size.*expected int, got str"),
        ({"dtype": "int8"}, "model: dtype='int8': unknown"),
        ({"config_options": {"hidden_size": 3}}, "model.config_options: unknown key"),
    ],
)
def test_recipe_error_names_file_and_key(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe.yaml: {message}"):
        load_recipe(write(tmp_path, model))


def test_a_checkpoint_brings_its_own_tokenizer(tmp_path: Path) -> None:
    write_documents(tmp_path / "text.jsonl")
    with pytest.raises(RecipeError, match=r"recipe.yaml: model.tokenizer: goes with model.config"):
        load_recipe(write_recipe(tmp_path, model={"tokenizer": "bytes"}))


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ["model.rms_norm_eps=1e-5", "model.initializer_range=1"])
    assert recipe.model.config_options["rms_norm_eps"] == 1e-5
    assert type(recipe.model.config_options["initializer_range"]) is float


def test_a_recipe_lays_itself_over_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path, training={"learning_rate": 0.5})
    above = tmp_path / "deeper" / "above.yaml"
    above.parent.mkdir()
    sel = {"mode": "congruent", "exp_scale": {"pattern": "row", "lr_mult": 3}, "modules_to_save": ["norm"]}
    above.write_text(yaml.safe_dump({"extends": "../recipe.yaml", "sel": sel, "output_dir": None}))
    top = tmp_path / "top.yaml"
    top.write_text("extends: deeper/above.yaml\nsel: {exp_scale: {lr_mult: 4}}\n")
    recipe = load_recipe(top, ["sel.r=3"])
    assert recipe.sel.mode == "congruent" and recipe.sel.r == 3 and recipe.sel.init_target == "xavier_uniform"
    assert recipe.sel.exp_scale == ScaleConfig("row", lr_mult=4.0) and recipe.sel.modules_to_save == ["norm"]
    assert recipe.training.learning_rate == 0.5 and recipe.output_dir == Path("runs/top")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("extends: nowhere.yaml", "nowhere.yaml: not readable: No such file"),
        ("extends: 3", "top.yaml: extends: must be the path of a recipe, not 3"),
        ("extends: top.yaml", "top.yaml: extends: leads back"),
        ("extends: recipe.yaml\nsel: {mdoe: x}", r"top.yaml \(extends recipe.yaml\): sel.mdoe: unknown key"),
    ],
)
def test_a_recipe_that_cannot_extend(tmp_path: Path, content: str, message: str) -> None:
    write(tmp_path)
    (tmp_path / "top.yaml").write_text(content)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "top.yaml")


# ----------------------------------------------------------------------------------------------------------- data


def test_pydoc_topics_are_the_demos_text(tmp_path: Path) -> None:
    options = {"sequence_length": 256, "max_documents": 9}
    embedded, _ = load_blocks(DataSection(dataset="pydoc_topics", **options), make_tokenizer())
    file, _ = load_blocks(DataSection(files=str(write_text(tmp_path)), **options), make_tokenizer())
    assert len(embedded) > 5 and embedded["input_ids"][:] == file["input_ids"][:]


def test_conversations_become_text_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    turns = [[{"role": "user", "content": "a" * 9}, {"role": "assistant", "content": "b" * 20}], []]
    file = tmp_path / "chats.parquet"
    datasets.Dataset.from_dict({"chat": turns}).to_parquet(file)
    section = DataSection(files=str(file), messages_column="chat", sequence_length=16, validation_share=0.0)
    train, _ = load_blocks(section, tokenizer)
    text = f"<user> {'a' * 9}\n<assistant> {'b' * 20}\n"
    flat = [token for block in train["input_ids"] for token in block]
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert flat == whole[: len(whole) // 16 * 16]
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"messages_column='chat': the chat template cannot render it"):
        load_blocks(section, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"messages_column='chat': .*\(roles must alternate\)"):
        load_blocks(section, tokenizer)
    with pytest.raises(ConfigError, match=r"messages_column='talk': there is no such column; the data has chat"):
        load_blocks(DataSection(files=str(file), messages_column="talk"), tokenizer)
