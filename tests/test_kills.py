"""Merges that are killed, or meet a full disk, at every call that changes the file system: all or nothing each time."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kill_harness import Fault, Outcome, run_in_child, small_disk
from models import make_tiny
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from peft_sel import SELConfig, merge_checkpoint
from peft_sel.checkpoint import staging
from peft_sel.errors import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")

INDEX = "model.safetensors.index.json"
Contents = dict[str, bytes]


def read_all(folder: Path) -> Contents:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Made:
    """A base in many files, an adapter, its merge (new), and the base in other files (old): what OUT may hold."""

    base: Path
    adapter: Path
    old: Path
    new: Path

    def merge(self, out: Path, overwrite: bool = False) -> None:
        merge_checkpoint(self.base, self.adapter, out, overwrite=overwrite, progress=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    made = Made(*(folder / name for name in ("base", "adapter", "old", "new")))
    model = make_tiny(dtype=torch.bfloat16, vocab_size=48)
    model.save_pretrained(made.base, max_shard_size="4KB")
    model.save_pretrained(made.old, max_shard_size="20KB")
    (made.base / "LICENSE").write_text("of the model")
    options = {"target_modules": ["q_proj", "down_proj"], "r": 2, "init_weights": False}
    get_peft_model(model, SELConfig(**options)).save_pretrained(made.adapter)
    made.merge(made.new)
    loaded = AutoModelForCausalLM.from_pretrained(made.new)
    assert not torch.equal(
        loaded.model.layers[1].mlp.down_proj.weight,
        AutoModelForCausalLM.from_pretrained(made.old).model.layers[1].mlp.down_proj.weight,
    )
    assert len(list(made.new.glob("*.safetensors"))) >= 10 and (made.new / INDEX).exists()
    return made


def faults_of(calls: list[str], every: int) -> list[Fault]:
    """Kill before each call, within each write, and after the last: every nth time until the shards are written."""
    last_shard = max(number for number, call in enumerate(calls) if re.match(r"close .*\.safetensors$", call))
    faults = [Fault(number, "before") for number in range(len(calls))]
    faults += [Fault(number, "half") for number, call in enumerate(calls) if call.startswith("write")]
    faults = [fault for number, fault in enumerate(faults) if number % every == 0 or fault.at >= last_shard]
    return [*faults, Fault(len(calls) - 1, "after")]


def fill(folder: Path, files: Contents) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def check_order(calls: list[str], files: Contents) -> None:
    """The index is written last, and every file and its folder are on the disk before the rename."""
    closed = [call for call in calls if call.startswith("close")]
    assert closed[-1].endswith(INDEX) and len(closed) == len(files)
    (renamed,) = [number for number, call in enumerate(calls) if call.startswith("_rename_with")]
    synced = [call for call in calls[:renamed] if call.startswith("fsync")]
    for name in ("", *files):
        assert any(
            re.search(rf"/\.out\.unfinished-[0-9a-f]{{8}}{re.escape('/' * bool(name) + name)}$", c) for c in synced
        )
    assert calls[renamed + 1].startswith("fsync")  # before the old one is removed


def check_killed(out: Path, old: Contents | None, new: Contents, can_exchange: bool) -> None:
    """OUT is the old or the new one; no hidden folder that loads is anything else."""
    if out.exists():
        assert read_all(out) in (old, new)
    elif old is not None:
        (aside,) = out.parent.glob(".out.replaced-*")
        assert not can_exchange and read_all(aside) == old
    for folder in out.parent.glob(".out.unfinished-*"):
        found = read_all(folder)
        index = found.get(INDEX, b"")
        if index == new[INDEX]:
            assert found == new
        elif not new[INDEX].startswith(index):  # else it is half written, or not there, and nothing loads
            assert old is not None and found.items() <= old.items() and read_all(out) == new


EVERY = [pytest.param(1, marks=pytest.mark.slow), 5]  # of the calls before the end: 338 kills, or 162
CASES = ["new", "new, over leftovers", "overwrite", "overwrite without renameat2"]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_a_kill_leaves_all_or_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, every: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    old, new = read_all(made.old) if "overwrite" in case else None, read_all(made.new)
    can_exchange = "without" not in case
    place = tmp_path / "place"
    out = place / "out"

    def run() -> None:
        if not can_exchange:
            staging._rename_with = lambda flag, source, target: False
        warnings.filterwarnings("ignore", ".*left by a killed run", UserWarning)
        made.merge(out, overwrite=old is not None)

    def run_child(fault: Fault | None) -> Outcome:
        shutil.rmtree(place, ignore_errors=True)
        fill(out, old or {}) if old else place.mkdir()
        if "leftovers" in case:
            fill(place / ".out.unfinished-01234567", dict(list(new.items())[:3]))
        return run_in_child(run, fault, also=[(staging, "_rename_with")] if can_exchange else [])

    whole = run_child(None)
    assert (whole.killed, whole.error) == (False, None)
    assert read_all(place) == {f"out/{name}": data for name, data in new.items()}
    if can_exchange:
        check_order(whole.calls, new)
    faults = faults_of(whole.calls, every)
    assert len(faults) >= (80 if every == 1 else 25)
    for fault in faults:
        assert run_child(fault).killed
        check_killed(out, old, new, can_exchange)
        has_left = any(path.is_dir() and path != out for path in place.iterdir())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made.merge(out, overwrite=True)
        assert read_all(place) == {f"out/{name}": data for name, data in new.items()}, fault
        assert [path.name for path in place.iterdir()] == ["out"]
        assert bool(said) == has_left and len(said) <= 2


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(made: Made, tmp_path: Path, overwrite: bool, every: int) -> None:
    out = tmp_path / "out"
    if overwrite:
        fill(out, read_all(made.old))
    before = read_all(tmp_path)
    calls = run_in_child(lambda: made.merge(tmp_path / "whole")).calls
    shutil.rmtree(tmp_path / "whole")
    numbers = [number for number, call in enumerate(calls) if call.split()[0] in ("write", "fsync", "close", "mkdir")]
    assert len(numbers) >= 50
    for number in [*numbers[: -4 : 2 * every], *numbers[-4:]]:
        outcome = run_in_child(lambda: made.merge(out, overwrite), Fault(number, "full"))
        assert not outcome.killed and outcome.error is not None
        assert re.match(
            r"CheckpointError: .*out: could not be written \(.*No space left on device.*\); ", outcome.error
        )
        assert read_all(tmp_path) == before and not list(tmp_path.glob(".*")), (number, calls[number])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_is_too_small(made: Made, tmp_path: Path, overwrite: bool) -> None:
    old = read_all(made.old)
    blocks = [sum(len(data) // 4096 + 1 for data in read_all(folder).values()) for folder in (made.old, made.new)]

    def run() -> None:
        with small_disk(tmp_path, 4096 * (blocks[0] * overwrite + blocks[1] // 2)):
            if overwrite:
                fill(tmp_path / "out", old)
            with pytest.raises(CheckpointError, match=r"out: could not be written .*No space left on device"):
                made.merge(tmp_path / "out", overwrite)
            assert read_all(tmp_path) == {f"out/{name}": data for name, data in old.items() if overwrite}
            assert [path.name for path in tmp_path.iterdir()] == ["out"] * overwrite

    outcome = run_in_child(run)
    if outcome.error is not None and outcome.error.startswith("PermissionError"):
        pytest.skip("no small disk can be mounted here")
    assert (outcome.killed, outcome.error) == (False, None)


def test_a_kill_in_a_writer_that_is_not_python(tmp_path: Path) -> None:
    """The harness itself: safetensors writes without calls that can be counted."""
    file, tensors = tmp_path / "x.safetensors", {"x": torch.randn(10000)}

    def save() -> None:
        save_file(tensors, file)

    assert run_in_child(save) == Outcome([], False, None)
    whole = file.read_bytes()
    assert run_in_child(save, max_file_bytes=len(whole)) == Outcome([], False, None)
    file.unlink()
    assert run_in_child(save, max_file_bytes=len(whole) - 1).killed
    assert all(path.stat().st_size < len(whole) for path in tmp_path.iterdir())
