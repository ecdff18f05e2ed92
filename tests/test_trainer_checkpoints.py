"""The folders that SELTrainer writes are those of a stock Trainer, only that they appear whole."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same_bits
from safetensors.torch import load_file
from test_resume import make_model
from test_training import make_arguments, make_data
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from peft_sel import SELTrainer
from peft_sel.checkpoint.staging import staged_folder
from peft_sel.errors import CheckpointError


class Plain(SELTrainer):
    """SELTrainer with a stock Trainer's way of saving."""

    _save_checkpoint = Trainer._save_checkpoint
    _save = Trainer._save


def run(cls: type[SELTrainer], folder: Path, **options: Any) -> SELTrainer:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **options}
    data = make_data()
    trainer = cls(make_model(), make_arguments(folder, **arguments), train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    return trainer


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
CASES: dict[str, dict[str, Any]] = {
    "every checkpoint": {},
    "the last one": {"save_total_limit": 1},
    "the best ones": {**BEST, "save_total_limit": 2, "greater_is_better": True},  # the worst: the first
    "the best and the last": {**BEST, "save_total_limit": 1},
    "no optimizer": {"save_only_model": True},
}


@pytest.mark.parametrize("case", CASES)
def test_writes_what_a_stock_trainer_writes(case: str, tmp_path: Path) -> None:
    ours = run(SELTrainer, tmp_path / "ours", **CASES[case])
    stock = run(Plain, tmp_path / "stock", **CASES[case])
    assert list_files(tmp_path / "ours") == list_files(tmp_path / "stock")
    checkpoints = sorted((tmp_path / "stock").glob("checkpoint-*"))
    assert checkpoints
    for checkpoint in checkpoints:
        name = checkpoint.name
        states = [
            json.loads((tmp_path / who / name / "trainer_state.json").read_text().replace(f"/{who}/", "/run/"))
            for who in ("ours", "stock")
        ]
        for log in [log for state in states for log in state["log_history"]]:
            for key in [key for key in log if "runtime" in key or "per_second" in key]:
                del log[key]
        assert states[0] == states[1]
        files = [load_file(tmp_path / who / name / "adapter_model.safetensors") for who in ("ours", "stock")]
        assert_same_bits(*files)
    best = stock.state.best_model_checkpoint
    assert ours.state.best_model_checkpoint == (best and best.replace("/stock/", "/ours/"))
    assert bool(best) == ("best" in case)
    assert_same_bits(ours.model.state_dict(), stock.model.state_dict())


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            CheckpointError,
            r"{}: could not be written \(.*No space left on device\); nothing was left behind; free space",
        ),
        (ConnectionError("the hub is gone"), ConnectionError, "^the hub is gone$"),
        (PermissionError(errno.EACCES, "Permission denied", "/other/file"), PermissionError, "/other/file"),
    ],
)
def test_a_save_that_fails_leaves_no_checkpoint(
    error: OSError, expected: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run(SELTrainer, tmp_path, max_steps=2)
    before = list_files(tmp_path)
    trainer.state.global_step = 4

    written: list[str] = []

    def fail(*args: Any) -> None:
        written.extend(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("adapter_model.safetensors"))
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(expected, match=message.format("checkpoint-4")):
        trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(expected, match=message.format("adapter")):
        trainer.save_model(str(tmp_path / "adapter"))
    assert any(".checkpoint-4.unfinished-" in path for path in written)
    assert any(".adapter.unfinished-" in path for path in written)
    assert list_files(tmp_path) == before
    monkeypatch.undo()
    trainer._save_checkpoint(trainer.model, None)
    trainer.save_model(str(tmp_path / "adapter"))
    trainer.save_model(str(tmp_path / "adapter"))  # into a folder that is there, as ever
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", "adapter"}
    assert (tmp_path / "adapter" / "training_args.bin").is_file()


@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_only_a_folder_is_replaced(kind: str, tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    trainer = run(SELTrainer, run_dir, max_steps=1, save_steps=1)
    checkpoint = run_dir / "checkpoint-1"
    checkpoint.rename(other)
    if kind == "file":
        checkpoint.write_text("mine")
    else:
        checkpoint.symlink_to(other if kind == "link" else "nowhere")
    before, files = list_files(tmp_path), {path: path.stat().st_mtime_ns for path in other.iterdir()}
    with pytest.raises(CheckpointError, match="checkpoint-1: is a link or a file, and only a folder is ever replaced"):
        trainer._save_checkpoint(trainer.model, None)
    assert list_files(tmp_path) == before and {path: path.stat().st_mtime_ns for path in other.iterdir()} == files
    checkpoint.unlink()
    trainer._save_checkpoint(trainer.model, None)
    checkpoint.chmod(0o700)
    trainer._save_checkpoint(trainer.model, None)
    assert checkpoint.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in run_dir.iterdir()] == ["checkpoint-1"] and checkpoint.is_dir()


def test_a_start_clears_what_killed_runs_left(tmp_path: Path) -> None:
    for name in (".checkpoint-3.unfinished-01234567", ".checkpoint-8.unfinished-01234567", "checkpoint-9"):
        (tmp_path / name / "half").mkdir(parents=True)
    others = [".checkpoint-8.unfinished-0123", ".checkpoint-x.unfinished-01234567", ".other.unfinished-01234567"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".checkpoint-5.lock").touch()
    (tmp_path / ".checkpoint-7.replaced-01234567").mkdir()
    with staged_folder(tmp_path / "checkpoint-4") as alive, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = run(SELTrainer, tmp_path, max_steps=1, save_strategy="no")
        assert trainer.state.global_step == 1 and alive.is_dir() and (tmp_path / ".checkpoint-4.lock").exists()
    texts = [text for warning in said if "checkpoint-" in (text := str(warning.message))]
    for text, step, message in zip(texts, (3, 7, 8), ("removed .checkpoint-3.", "put back", "removed"), strict=True):
        assert f"checkpoint-{step}: {message}" in text
    assert {path.name for path in tmp_path.iterdir()} == {*others, "checkpoint-4", "checkpoint-7", "checkpoint-9"}


def test_callbacks_and_pushes_see_the_finished_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(sorted(os.listdir(tmp_path / f"checkpoint-{state.global_step}")))

    pushed: list[str] = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(folder))
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    arguments = make_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer = SELTrainer(make_model(), arguments, train_dataset=make_data(), callbacks=[Watch()])
    arguments.push_to_hub = True
    trainer.train()
    assert pushed == [str(tmp_path / f"checkpoint-{step}") for step in (1, 2)]
    assert len(seen) == 2 and all({"adapter_model.safetensors", "trainer_state.json"} <= set(names) for names in seen)
