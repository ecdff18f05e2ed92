"""Streaming merge against merge_and_unload, bit for bit, and every way it must refuse or clean up."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import NUM_TARGETS, assert_same_bits, make_tiny
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PhiConfig, T5Config

from peft_sel import ScaleConfig, SELConfig, merge_checkpoint
from peft_sel.checkpoint import plan
from peft_sel.errors import CheckpointError, ConfigError, OutputExistsError

INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
INPUT = torch.arange(24).reshape(2, 12)


def save_base(folder: Path, dtype: torch.dtype = torch.bfloat16, family: str = "qwen2", **options: Any) -> Path:
    """Save a tiny model in several files, or in one with one_file=True; tied unless told otherwise."""
    shard = "1GB" if options.pop("one_file", False) else "12KB"
    make_tiny(family, dtype, **options).save_pretrained(folder, max_shard_size=shard)
    return folder


@dataclass
class Adapted:
    """An adapted model in eval mode, its saved adapter and its logits."""

    model: PeftModel
    folder: Path
    logits: torch.Tensor


def make_adapter(base: Path, folder: Path, steps: int = 3, auto: Any = AutoModelForCausalLM, **options: Any) -> Adapted:
    """Convert, take a few plain SGD steps, save."""
    model = get_peft_model(auto.from_pretrained(base), SELConfig(**options))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(steps):
        model(INPUT)[0].float().square().mean().backward()
        with torch.no_grad():
            for parameter in trainable:
                if bool(parameter.grad.any()):  # else it is the residual's A, in the first step
                    parameter -= 0.05 * parameter.grad / parameter.grad.norm()
                parameter.grad = None
    model.save_pretrained(folder)
    return Adapted(model, folder, logits_of(model))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(INPUT)[0]


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return dict(sorted(tensors.items()))


def layout(folder: Path) -> dict[str, Any]:
    """Everything about a checkpoint's weights but the values."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            tensors = {name: (view.get_shape(), view.get_dtype()) for name, view in views.items()}
            result[path.name] = (file.metadata(), tensors)
    if (folder / INDEX).exists():
        result[INDEX] = json.loads((folder / INDEX).read_text())
    return result


RICH_SCALES = {
    "exp_scale": ScaleConfig("lora", rank=2),
    "linear_scale": None,
    "inner_multiplier": ScaleConfig("row", transform="exp"),
    "offset": "column",
    "shift": "global",
    "r": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "rich scales, base dropped": {**RICH_SCALES, "base_weight": "drop"},
    "scales and residual only": {"train_raw": False, "r": 3, "residual_alpha": 7.0},
    "biases and saved modules": {"bias": "all", "modules_to_save": ["norm"], "mode": "congruent", "beta": 7.5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("family", "dtype", "tied", "one_file"),
    [
        ("qwen2", torch.bfloat16, True, False),
        ("qwen3", torch.float32, False, True),
        ("llama", torch.float16, False, False),
    ],
)
def test_equals_merge_and_unload_bit_for_bit(
    tmp_path: Path, family: str, dtype: torch.dtype, tied: bool, one_file: bool, variant: str
) -> None:
    base = save_base(tmp_path / "base", dtype, family, tie_word_embeddings=tied, one_file=one_file)
    adapted = make_adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    report = merge_checkpoint(base, adapted.folder, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(base)  # names, shapes, dtypes, files, metadata and index
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(merged).__module__.startswith("transformers.")
    assert torch.equal(logits_of(merged), adapted.logits)
    adapted.model.merge_and_unload().save_pretrained(tmp_path / "reference")
    out, original = load_all(tmp_path / "out"), load_all(base)
    assert_same_bits(out, load_all(tmp_path / "reference"))
    changed = {name for name in out if not torch.equal(out[name], original[name])}
    assert report.tensors_merged >= len(changed) >= NUM_TARGETS
    assert report.tensors_total == len(original)
    files = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert report.bytes_written == sum(files)
    assert report.bytes_read >= sum(tensor.nbytes for name, tensor in original.items() if name not in changed)
    assert (report.out_dir, report.seconds > 0) == (tmp_path / "out", True)


@pytest.mark.parametrize(
    ("dtype", "train_raw"), [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize(
    ("mode", "beta"), [("mismatch", "auto"), ("congruent", 20.0), ("oppose", 7.5), ("exp_only", "auto")]
)
def test_zero_steps_give_the_bytes_of_the_base(
    tmp_path: Path, dtype: torch.dtype, mode: str, beta: float | str, train_raw: bool
) -> None:
    base = save_base(tmp_path / "base", dtype)
    adapter = make_adapter(base, tmp_path / "adapter", steps=0, mode=mode, beta=beta, train_raw=train_raw).folder
    merge_checkpoint(base, adapter, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}
    for path in base.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_dense_merge_takes_nothing_from_the_base_weights(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapted = make_adapter(base, tmp_path / "adapter")
    merge_checkpoint(base, adapted.folder, tmp_path / "out")
    keys = {key.split(".symexplin_")[0][len("base_model.model.") :] for key in load_file(adapted.folder / ADAPTER_FILE)}
    for path in base.glob("*.safetensors"):
        poisoned = {
            name: torch.full_like(tensor, torch.nan) if name.removesuffix(".weight") in keys else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(poisoned, path, metadata={"format": "pt"})
    merge_checkpoint(base, adapted.folder, tmp_path / "poisoned", check_base=False)
    assert_same_bits(load_all(tmp_path / "poisoned"), load_all(tmp_path / "out"))


def test_one_changed_element_changes_one_weight(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", steps=0, r=0).folder
    tensors = load_file(adapter / ADAPTER_FILE)
    tensors["base_model.model.model.layers.1.mlp.up_proj.symexplin_raw"][3, 5] += 1.0
    save_file(tensors, adapter / ADAPTER_FILE, metadata={"format": "pt"})
    merge_checkpoint(base, adapter, tmp_path / "out")
    out, original = load_all(tmp_path / "out"), load_all(base)
    different = {name: (out[name] != original[name]).nonzero().tolist() for name in original}
    assert {name: places for name, places in different.items() if places} == {
        "model.layers.1.mlp.up_proj.weight": [[3, 5]]
    }


def test_side_files_are_copied_and_other_weights_are_not(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", one_file=True)
    copied = ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE", "vocab.json", "modeling_x.py"]
    left = ["pytorch_model.bin", "model.gguf", "optimizer.pt", "consolidated.safetensors", INDEX, "adapter_config.json"]
    for name in (*copied, *left):
        (base / name).write_text(name)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (base / "original").mkdir()
    (base / "original" / "params.json").write_text("{}")
    adapter = make_adapter(save_base(tmp_path / "clean"), tmp_path / "adapter", steps=0).folder
    merge_checkpoint(base, adapter, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    expected = {*copied, "config.json", "generation_config.json", "model.safetensors"}
    assert found == expected | {"additional_chat_templates/tools.jinja"}
    assert (tmp_path / "out" / "LICENSE").read_text() == "LICENSE"


def test_modules_around_the_model_are_copied(made: tuple[Path, Path], tmp_path: Path) -> None:
    base, secret = Path(shutil.copytree(made[0], tmp_path / "base")), tmp_path / "secret"
    files = {"1_Pooling/config.json": "{}", "2_Dense/model.safetensors": "dense", "2_Dense/pytorch_model.bin": "bin"}
    for folder in (base / "1_Pooling", base / "2_Dense", base / "3_Normalize", base / "unnamed", base / ".git", secret):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    for name, text in files.items():
        (base / name).write_text(text)
    (base / "3_Normalize" / "config.json").unlink()
    (base / "linked").symlink_to(secret)
    paths = [
        "",
        "1_Pooling",
        "2_Dense",
        "3_Normalize",
        "missing",
        "linked",
        ".git",
        ".",
        "..",
        "../secret",
        str(secret),
        7,
    ]
    modules = json.dumps([*({"idx": number, "path": path} for number, path in enumerate(paths)), {}, "unnamed", None])
    (base / "modules.json").write_text(modules)
    for _ in range(2):
        merge_checkpoint(base, made[1], tmp_path / "out", overwrite=True)
        found = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
        assert found == {"1_Pooling", "2_Dense", "3_Normalize"}
        assert all((tmp_path / "out" / name).read_text() == text for name, text in files.items())
        assert (tmp_path / "out" / "modules.json").read_text() == modules
    (tmp_path / "out" / "2_Dense" / "notes.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match=r"it holds 2_Dense/notes\.safetensors"):
        merge_checkpoint(base, made[1], tmp_path / "out", overwrite=True)
    for number, text in enumerate(('{"path": "1_Pooling"}', "[", '[{"path": "1_Pooling"}], "a": 1', "7")):
        (base / "modules.json").write_text(text)
        merge_checkpoint(base, made[1], tmp_path / str(number))
        assert not [path for path in (tmp_path / str(number)).iterdir() if path.is_dir()]


@pytest.mark.parametrize(("source", "target"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_other_dtype(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    base = save_base(tmp_path / "base", source)
    adapted = make_adapter(base, tmp_path / "adapter")
    merge_checkpoint(base, adapted.folder, tmp_path / "out", dtype=target)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=target), adapted.folder)
    loaded.merge_and_unload().save_pretrained(tmp_path / "reference")
    assert_same_bits(load_all(tmp_path / "out"), load_all(tmp_path / "reference"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(target).removeprefix("torch.")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in load_all(tmp_path / "out").values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == target


def test_other_dtype_in_every_part_of_the_configuration(made: tuple[Path, Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(made[0], tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    field = config.pop("dtype")
    nested = {"thinker_config": {"dtype": field, "text_config": {"torch_dtype": field}, "vision_config": {"depth": 2}}}
    for number, top in enumerate(({}, {"torch_dtype": field})):
        (base / "config.json").write_text(json.dumps({**config, **nested, **top}))
        merge_checkpoint(base, made[1], tmp_path / f"out{number}", dtype=torch.float64)
        written = json.loads((tmp_path / f"out{number}" / "config.json").read_text())
        assert written["torch_dtype" if top else "dtype"] == "float64" and ("dtype" in written) == (not top)
        text = {"torch_dtype": "float64"}
        assert written["thinker_config"] == {"dtype": "float64", "text_config": text, "vision_config": {"depth": 2}}


def test_other_shard_size(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapted = make_adapter(base, tmp_path / "adapter")
    merge_checkpoint(base, adapted.folder, tmp_path / "kept")
    for name, limit in (("small", 9000), ("tiny", 1), ("one", 10**9)):
        merge_checkpoint(base, adapted.folder, tmp_path / name, max_shard_bytes=limit)
        assert_same_bits(load_all(tmp_path / name), load_all(tmp_path / "kept"))
        for path in (tmp_path / name).glob("*.safetensors"):
            tensors = load_file(path)
            assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / name)), adapted.logits)
    assert (tmp_path / "one" / "model.safetensors").exists()
    assert not (tmp_path / "one" / INDEX).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "train_raw": False},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
def test_tied_tensor_that_is_adapted_is_untied(tmp_path: Path, options: dict[str, Any]) -> None:
    base = save_base(tmp_path / "base")
    adapted = make_adapter(base, tmp_path / "adapter", **options)
    report = merge_checkpoint(base, adapted.folder, tmp_path / "out")
    out, original = load_all(tmp_path / "out"), load_all(base)
    assert out.keys() - original.keys() == {"lm_head.weight"}
    assert report.tensors_total == len(out)
    if "embed_tokens" not in options.get("modules_to_save", []):
        assert torch.equal(out["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    elif options["modules_to_save"] == ["embed_tokens"]:
        assert torch.equal(out["lm_head.weight"], original["model.embed_tokens.weight"])
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert weight_map["lm_head.weight"] == weight_map["model.embed_tokens.weight"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.config.tie_word_embeddings is False
    assert torch.equal(logits_of(merged), adapted.logits)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_tensors_that_cannot_be_untied(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    make_tiny().model.save_pretrained(bare)
    adapter = make_adapter(bare, tmp_path / "adapter", modules_to_save=["embed_tokens"]).folder
    with pytest.raises(CheckpointError, match="cannot be untied"):
        merge_checkpoint(bare, adapter, tmp_path / "out")
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    t5 = transformers.AutoModelForSeq2SeqLM.from_config(T5Config(**sizes, decoder_start_token_id=0))
    t5.save_pretrained(tmp_path / "t5")
    model = get_peft_model(t5, SELConfig(target_modules=["q"], modules_to_save=["lm_head"]))
    model.save_pretrained(tmp_path / "t5_adapter")
    with pytest.raises(CheckpointError, match="cannot be untied"):
        merge_checkpoint(tmp_path / "t5", tmp_path / "t5_adapter", tmp_path / "out")


@pytest.mark.parametrize(("saved_as", "adapted_as"), [("CausalLM", "bare"), ("bare", "CausalLM")])
def test_base_model_prefix_on_one_side_only(tmp_path: Path, saved_as: str, adapted_as: str) -> None:
    autos = {"CausalLM": AutoModelForCausalLM, "bare": AutoModel}
    base, model = tmp_path / "base", make_tiny(dtype=torch.bfloat16)
    (model if saved_as == "CausalLM" else model.model).save_pretrained(base, max_shard_size="12KB")
    adapted = make_adapter(base, tmp_path / "adapter", auto=autos[adapted_as], modules_to_save=["norm"])
    merge_checkpoint(base, adapted.folder, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(base)
    merged = autos[adapted_as].from_pretrained(tmp_path / "out")
    assert torch.equal(logits_of(merged), adapted.logits)


def test_biases_of_saved_modules(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(PhiConfig(**sizes, num_attention_heads=4)).save_pretrained(base)
    options = {"bias": "all", "modules_to_save": ["lm_head"], "target_modules": ["q_proj", "fc1"]}
    adapted = make_adapter(base, tmp_path / "adapter", **options)
    merge_checkpoint(base, adapted.folder, tmp_path / "out")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), adapted.logits)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    return save_base(folder / "base"), make_adapter(folder / "base", folder / "adapter", steps=0).folder


def test_existing_output_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for out in ("out", "link"):
        with pytest.raises(OutputExistsError, match=rf"{out} already .*; overwrite=True \(--overwrite\) replaces it$"):
            merge_checkpoint(tmp_path / "no base", tmp_path / "no adapter", tmp_path / out)


@pytest.mark.parametrize("option", [{"dtype": torch.int8}, {"max_shard_bytes": 0}], ids=str)
def test_options_are_checked(made: tuple[Path, Path], tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        merge_checkpoint(*made, tmp_path / "out", **option)
    assert not list(tmp_path.iterdir())


def test_quantized_base_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(made[0], base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quantized"):
        merge_checkpoint(base, made[1], tmp_path / "out")
    (base / "config.json").write_text(json.dumps(config))
    for path in base.glob("*.safetensors"):
        tensors = {name: t.to(torch.float8_e4m3fn) if "q_proj" in name else t for name, t in load_file(path).items()}
        save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is stored as torch\.float8_e4m3fn"):
        merge_checkpoint(base, made[1], tmp_path / "out")


@pytest.mark.parametrize("target", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_values_beyond_the_range_of_the_new_dtype(tmp_path: Path, target: str) -> None:
    base = save_base(tmp_path / "base", torch.float32, one_file=True)
    tensors = load_file(base / "model.safetensors")
    tensors[target].view(-1)[0] = 1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter", steps=0, beta=7.5).folder
    with pytest.raises(CheckpointError, match=rf"{target} has values beyond the range of torch\.float16"):
        merge_checkpoint(base, adapter, tmp_path / "out", dtype=torch.float16)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


class Stop(Exception):
    """An error that the package does not know."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), Stop(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["first tensor", "later tensor", "index", "rename"])
def test_interrupted_merge_leaves_nothing(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
) -> None:
    name = {"index": "merge.write_index", "rename": "staging._rename_with"}.get(place, "plan.rebuild_weight")
    original = plan.rebuild_weight
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if place == "later tensor" and calls < 9:
            return original(*args, **kwargs)
        raise error

    monkeypatch.setattr(f"peft_sel.checkpoint.{name}", fail)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="out: could not be written.*No space" if expected is CheckpointError else None):
        merge_checkpoint(*made, tmp_path / "out")
    assert calls == (9 if place == "later tensor" else 1)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    merge_checkpoint(*made, tmp_path / "out")  # and nothing is in the way of a second try
    assert layout(tmp_path / "out") == layout(made[0])


def test_output_that_appears_meanwhile_is_kept(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = plan.rebuild_weight

    def rebuild_and_create(*args: Any, **kwargs: Any) -> torch.Tensor:
        (tmp_path / "out").mkdir(exist_ok=True)
        return original(*args, **kwargs)

    monkeypatch.setattr("peft_sel.checkpoint.plan.rebuild_weight", rebuild_and_create)
    with pytest.raises(OutputExistsError):
        merge_checkpoint(*made, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.skipif(sys.platform != "linux", reason="a file that opens and cannot be read")
def test_a_side_file_that_cannot_be_read_is_named(made: tuple[Path, Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(made[0], tmp_path / "base"))
    (base / "LICENSE").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"base/LICENSE: cannot be read \(Input/output error\); make it readable"):
        merge_checkpoint(base, made[1], tmp_path / "out")
    assert list(tmp_path.iterdir()) == [base]


def test_output_inside_the_base(made: tuple[Path, Path], tmp_path: Path) -> None:
    base = shutil.copytree(made[0], tmp_path / "base")
    merge_checkpoint(base, made[1], base / "merged")
    assert layout(base / "merged") == layout(base)
    assert {path.name for path in (base / "merged").iterdir()} == {path.name for path in made[0].iterdir()}


@pytest.mark.parametrize("used", ["base", "adapter", "parent"])
def test_overwrite(made: tuple[Path, Path], tmp_path: Path, used: str) -> None:
    base, adapter = shutil.copytree(made[0], tmp_path / "base"), shutil.copytree(made[1], tmp_path / "adapter")
    (base / "extra.png").write_text("")
    merge_checkpoint(base, adapter, tmp_path / "out", max_shard_bytes=9000)
    merge_checkpoint(base, adapter, tmp_path / "out", overwrite=True)
    assert layout(tmp_path / "out") == layout(base)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="which is in use"):
        merge_checkpoint(base, adapter, tmp_path if used == "parent" else tmp_path / used, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_output_in_a_new_place_and_quiet_when_asked(
    made: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    merge_checkpoint(*made, tmp_path / "deep" / "er", progress=False)
    assert (tmp_path / "deep" / "er" / "config.json").exists()
    assert capfd.readouterr() == ("", "")
