"""configs/accelerate/plain_loop.py: what it promises, by running it."""

from __future__ import annotations

import json
import math
import os
import runpy
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from models import assert_same_bits
from safetensors.torch import load_file
from test_groups import PAPER
from test_resume import assert_same
from tiny import make_documents, save_checkpoint
from transformers import AutoModelForCausalLM

import peft_sel
from peft_sel import merge_checkpoint
from peft_sel.errors import OutputExistsError
from peft_sel.optim import anneal_multiplier

SCRIPT = Path(__file__).parent.parent / "configs" / "accelerate" / "plain_loop.py"
LR, STEPS = 1e-3, 6  # two epochs of ten batches, four to a step: 4, 4 and 2
OPTIONS = {"length": 32, "batch": 2, "save_every": 2, "lr": LR}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that drops out, and a text of twenty blocks."""
    path = tmp_path_factory.mktemp("plain_loop")
    config = save_checkpoint(path / "base", dtype=torch.float32) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.2}))
    (path / "text").write_text(" ".join(make_documents())[: 32 * 20 + 5])
    return path


def list_words(folder: Path, out: Path, **options: Any) -> list[str]:
    values = {"base": folder / "base", "text": folder / "text", "out": out, **OPTIONS, **options}
    return [str(SCRIPT), *(f"--{name}={value}" for name, value in values.items())]


def run_script(words: list[str]) -> None:
    """Run the script, with multipliers that anneal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(peft_sel, "SELConfig", partial(peft_sel.SELConfig, anneal_steps=0.9, **PAPER))
        runpy.run_path(words[0], run_name="__main__")


def run(folder: Path, out: Path, **options: Any) -> None:
    run_script(list_words(folder, out, **options))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def expected_rate(step: int, k0: float, k1: float) -> float:
    return LR * (1 + math.cos(math.pi * step / STEPS)) / 2 * anneal_multiplier(step, k0, k1, 0.9 * STEPS)


def check_rates(checkpoint: Path, step: int) -> None:
    groups = torch.load(checkpoint / "optimizer.bin", weights_only=True)["param_groups"]
    rates = {group["role"]: group["lr"] for group in groups}
    assert rates["raw"] == pytest.approx(expected_rate(step, 1, 1))
    assert rates["exp_scale"] == pytest.approx(expected_rate(step, 50, 8))
    assert rates["inner_multiplier"] == pytest.approx(expected_rate(step, 0.01, 0.5))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_resumes_bit_for_bit_in_the_middle_of_either_epoch(
    precision: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)  # as accelerate launch --mixed_precision does
    straight = tmp_path / "straight"
    run(folder, straight)
    assert {path.name for path in straight.iterdir()} == {"batch_8", "batch_14", "batch_20", "adapter", "merged"}
    for step, name in ((2, "batch_8"), (4, "batch_14")):
        check_rates(straight / name, step)
        resumed = tmp_path / name
        run(folder, resumed, resume=straight / name)
        for file in ("adapter/adapter_model.safetensors", "batch_20/model.safetensors", "merged/model.safetensors"):
            assert_same_bits(load_file(resumed / file), load_file(straight / file))
        for file in ("optimizer.bin", "scheduler.bin"):
            states = [torch.load(run / "batch_20" / file, weights_only=True) for run in (straight, resumed)]
            assert_same(*states)
    merge_checkpoint(folder / "base", straight / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(straight / "merged").state_dict()
    assert_same_bits(merged, AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict())
    base = AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert len(changed) == 14 and all("_proj.weight" in name for name in changed)


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_finds_a_taken_folder_before_it_loads(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OutputExistsError, match=f"{name} already exists"):
        run(folder, tmp_path, base=tmp_path / "nowhere")


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(folder: Path, tmp_path: Path) -> None:
    config = folder / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.0}))
    run(folder, tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = list_words(folder, tmp_path / "two", batch=1)
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_plain_loop as here\n"
    start += f"here.run_script({words!r})"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", start], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for step, name in ((2, "batch_8"), (4, "batch_14"), (6, "batch_20")):
        check_rates(tmp_path / "two" / name, step)
    one, two = (load_file(tmp_path / run / "merged" / "model.safetensors") for run in ("one", "two"))
    for name, weight in one.items():
        difference = (weight.double() - two[name].double()).norm()
        assert difference <= 1e-4 * weight.double().norm(), name  # sums in another order, which Adam may amplify
