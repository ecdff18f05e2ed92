from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import datasets
import pytest
from tiny import EOS, make_tokenizer, save_checkpoint, write_documents
from transformers import AutoModelForCausalLM

from peft_sel import registry
from peft_sel.cli import make_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table under a heading."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_in(cell: str) -> str:
    (name,) = re.findall(r"`([^`]+)`", cell)
    return name


def test_every_function_and_test_in_the_tables_exists() -> None:
    equations, guarantees = table("From the paper to the code"), table("What is guaranteed")
    assert len(equations) >= 12 and len(guarantees) >= 8
    for _, function, _ in equations:
        module, _, name = code_in(function).rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), function
    for *_, test in equations + guarantees:
        file, name = code_in(test).split("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_python_blocks_compile() -> None:
    assert len(PYTHON) >= 2
    for code in PYTHON:
        compile(code, "README.md", "exec")


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    save_checkpoint(tmp_path / "base", "qwen3")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(tmp_path / "base")
    write_documents(tmp_path / "notes.jsonl")
    training, loading = PYTHON[:2]
    assert 15 <= len(training.strip().splitlines()) <= 25
    training = training.replace('"Qwen/Qwen3-0.6B-Base"', '"base"').replace("max_length=512", "max_length=64")
    exec(training.replace("learning_rate=", "max_steps=1, learning_rate="), {})
    assert type(AutoModelForCausalLM.from_pretrained("runs/notes/merged")).__name__ == "Qwen3ForCausalLM"
    exec(loading, {})


def test_commands_exist() -> None:
    (shell,) = (code for _, code in BLOCKS if "peft-sel demo" in code)
    commands = [re.split(r"  +", line)[0] for line in shell.splitlines()]
    for command in commands:
        words = shlex.split(command.replace("accelerate launch -m peft_sel.cli", "peft-sel"))
        assert words[0] == "peft-sel" and make_parser().parse_args(words[1:])
        assert all((ROOT / word).is_file() for word in words if word.startswith("configs/"))


def test_shape() -> None:
    assert len(README.splitlines()) < 350
    files = README.rstrip().rpartition("## Files")[2]
    assert "\n## " not in files  # the file tree comes last
    listed = re.findall(r"^  (\S+)", files.split("configs/")[0], re.MULTILINE)
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "peft_sel").iterdir() if not path.name.startswith("_")}
    assert set(listed) == there - {"errors.py", "py.typed"}
    make_targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert make_targets and all(f"\n{target}:" in makefile for target in make_targets)


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ours = re.findall(r"`((?:peft_sel|tests|configs|benchmarks)/[\w./]*)`", text)
    assert len(set(ours)) >= 12 and [name for name in ours if not (ROOT / name).exists()] == []
    functions = re.findall(r"`(extend_\w+)`", text)
    assert len(functions) == 3 and all(hasattr(registry, name) for name in functions)
    asked = re.findall(r"`(test_\w+)`", text.split("| rows in ")[1].split("\n")[0])
    cases = (ROOT / "tests" / "peft_suite" / "cases.py").read_text(encoding="utf-8")
    assert len(asked) == 6 and all(f'"{module}"' in cases for module in asked)
