from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from models import NUM_TARGETS
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny import save_checkpoint, write_documents, write_recipe
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig, __version__, merge_checkpoint
from peft_sel.cli import main, make_parser
from peft_sel.origins import ADAPTER_PATTERNS

COMMANDS = ("train", "merge", "export", "inspect", "plot", "demo")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint (base), an untrained adapter of it (adapter) and text (text.jsonl)."""
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    get_peft_model(base, SELConfig(task_type="CAUSAL_LM")).save_pretrained(str(tmp_path / "adapter"))
    return tmp_path


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail like one a user can mend: status 2 and one line on standard error."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and line.startswith("peft-sel: ")
    return line


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: peft-sel {command}".rstrip() in text
    examples = [line.split() for line in text.splitlines() if line.startswith("  peft-sel ")]
    if command:
        (example,) = examples
        assert example[1] == command and make_parser().parse_args(example[1:])
    else:
        assert all(f"\n  {name} " in text for name in COMMANDS)
    assert max(map(len, text.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"peft-sel {__version__}\n"


def test_merge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = str(folder / "base"), str(folder / "adapter")
    assert main(["merge", base, adapter, str(folder / "merged")]) == 0
    assert f"{NUM_TARGETS} of 26 tensors from the adapter" in capsys.readouterr().out
    before = load_file(folder / "base" / "model.safetensors")
    after = load_file(folder / "merged" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert main(["merge", base, adapter, str(folder / "wide"), "--dtype", "float32", "--max-shard-size", "30000"]) == 0
    shards = sorted((folder / "wide").glob("model-*.safetensors"))
    assert len(shards) > 1 and all(tensor.dtype == torch.float32 for tensor in load_file(shards[0]).values())


def test_merge_several(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    config = SELConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_weights=False)
    get_peft_model(base, config).save_pretrained(str(folder / "second"))
    names = [str(folder / name) for name in ("base", "adapter", "second", "merged")]
    assert main(["merge", *names]) == 0
    merge_checkpoint(names[0], names[1:3], folder / "expected")
    after, expected = (load_file(folder / name / "model.safetensors") for name in ("merged", "expected"))
    before = load_file(folder / "base" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())
    changed = {name.split(".")[-2] for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {"q_proj"}
    adapter = {path.name: path.read_bytes() for path in (folder / "second").iterdir()}
    assert "second: is not a checkpoint" in failure(["merge", *names[:3], "--overwrite"], capsys)  # OUT was forgotten
    assert {path.name: path.read_bytes() for path in (folder / "second").iterdir()} == adapter


def test_merge_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A hub that holds the base and the adapter of the fixture, with pickles beside them."""
    (folder / "adapter" / "adapter_model.bin").write_bytes(b"pickled")
    (folder / "adapter" / "training_args.bin").write_bytes(b"pickled")
    fetched: dict[str, list[str]] = {}

    def fetch(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        source = folder / name.removeprefix("some/")
        files = [path.name for path in source.iterdir()]
        fetched[name] = sorted(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        (folder / "cache").mkdir(exist_ok=True)
        (folder / "cache" / source.name).mkdir()
        for file in fetched[name]:
            (folder / "cache" / source.name / file).symlink_to(source / file)
        return str(folder / "cache" / source.name)

    monkeypatch.setattr("peft_sel.origins.snapshot_download", fetch)
    assert main(["merge", "some/base", "some/adapter", str(folder / "merged")]) == 0
    assert fetched["some/adapter"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(fetched["some/base"])
    before, after = (load_file(folder / name / "model.safetensors") for name in ("base", "merged"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any((folder / "merged" / name).is_symlink() for name in os.listdir(folder / "merged"))
    capsys.readouterr()
    monkeypatch.undo()
    line = failure(["merge", str(folder / "base"), "some/adapter", str(folder / "out")], capsys)
    assert "some/adapter: is neither a folder nor to be had from the hub" in line
    sharded = ["adapter_model.safetensors.index.json", "adapter_model-00001-of-00002.safetensors", "adapter_model.pt"]
    assert list(filter_repo_objects(sharded, allow_patterns=list(ADAPTER_PATTERNS))) == sharded[:2]


def test_export_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fetched: dict[str, list[str]] = {}

    def fetch(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        fetched[name] = allow_patterns
        return str(folder / name.removeprefix("some/"))

    monkeypatch.setattr("peft_sel.origins.snapshot_download", fetch)
    command = ["export", "some/adapter", str(folder / "exported"), "--base", "some/base"]
    assert main(command) == 0
    assert fetched.keys() == {"some/adapter", "some/base"} and fetched["some/adapter"] == list(ADAPTER_PATTERNS)
    assert (folder / "exported" / "model.safetensors").is_file()
    capsys.readouterr()
    monkeypatch.undo()
    line = failure(["export", "some/adapter", str(folder / "second")], capsys)
    assert "some/adapter: is neither a folder nor to be had from the hub" in line


@pytest.mark.filterwarnings("default:.*left by a killed run")
def test_merge_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["merge", str(folder / "base"), str(folder / "adapter"), str(folder / "merged")]
    left = folder / ".merged.unfinished-01234567"
    left.mkdir()
    assert main([*command, "--max-shard-size", "30000"]) == 0
    captured = capsys.readouterr()
    said = f"peft-sel: {folder / 'merged'}: removed {left.name}, left by a killed run; starting anew\n"
    assert captured.err == said and captured.out.startswith("merged: ") and not left.exists()
    assert "merged already exists" in failure(command, capsys)
    assert main([*command, "--overwrite"]) == 0
    assert (folder / "merged" / "model.safetensors").is_file() and not list((folder / "merged").glob("*index.json"))
    (folder / "merged" / "notes.txt").write_text("")
    assert "merged: is not a checkpoint alone (it holds notes.txt), and" in failure([*command, "--overwrite"], capsys)


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "base")]) == 0
    table = capsys.readouterr().out
    assert table.count("identical") >= NUM_TARGETS and "model.layers.0.self_attn.q_proj.weight" in table
    for path in ("base", "adapter"):
        assert main(["inspect", str(folder / path), "--json"]) == 0
        reports = json.loads(capsys.readouterr().out)
        assert len(reports) == NUM_TARGETS and all(report["beta"] > 0 for report in reports)


def test_inspect_writes_standard_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(folder / "base" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(0.5)  # a spread of 0: max/std is infinite
    save_file(weights, folder / "base" / "model.safetensors", {"format": "pt"})
    assert main(["inspect", str(folder / "base"), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [report["max_over_std"] for report in reports].count(None) == 1


def test_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_recipe(folder, merge=True)), "--set", "training.max_steps=1"]) == 0
    out = capsys.readouterr().out
    assert f"adapter: {folder / 'out' / 'adapter'}" in out and "held-out loss: " in out and "merged: " in out
    assert (folder / "out" / "merged" / "model.safetensors").is_file()


def test_errors_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, base, adapter = str(write_recipe(folder)), str(folder / "base"), str(folder / "adapter")
    missing = str(folder / "missing")
    assert "missing: not readable: No such file" in failure(["train", missing], capsys)
    assert "recipe.yaml: sel.mdoe: unknown key; did you mean mode?" in failure(
        ["train", recipe, "--set", "sel.mdoe=mismatch"], capsys
    )
    assert "--set: training" in failure(["train", recipe, "--set", "training"], capsys)
    assert "base already exists" in failure(["train", recipe, "--set", f"output_dir={base}"], capsys)
    assert "adapter already exists" in failure(["merge", base, adapter, adapter], capsys)
    assert "missing: there is no such folder" in failure(["merge", missing, adapter, str(folder / "out")], capsys)
    assert "missing: there is no such folder" in failure(["inspect", missing], capsys)
    assert "base already exists" in failure(["demo", "--model", base, "--out", base], capsys)
    assert "steps=0: " in failure(["demo", "--steps", "0"], capsys)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"cut off")
    assert "adapter_model.safetensors" in failure(["merge", base, adapter, str(folder / "out")], capsys)
    assert not (folder / "out").exists()


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peft_sel.checkpoint.inspect_checkpoint", interrupt)
    assert main(["inspect", "."]) == 130
    assert capsys.readouterr().err.splitlines() == ["peft-sel: interrupted"]


def test_module_runs_and_survives_a_closed_pipe(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-W", "error", "-m", "peft_sel.cli", "inspect", str(folder / "base")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
