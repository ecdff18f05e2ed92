"""Adapters and Trainer checkpoints whose writer is killed, or meets a full disk, at every call: all or nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_harness import Fault, run_in_child
from models import assert_same_bits, clone_state, convert, make_tiny, train_steps
from peft import PeftModel
from test_resume import make_model, spoil
from test_training import make_arguments, make_data
from transformers.trainer_utils import get_last_checkpoint

from peft_sel import SELTrainer, save_adapter
from peft_sel.checkpoint import staging

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")

INDEX = "adapter_model.safetensors.index.json"
VERBS = r"(save|mkdir|write|close|fsync|rename|replace|rmdir|unlink|_rename_with) \S"
Contents = dict[str, bytes]


def read_all(folder: Path) -> Contents:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, contents: Contents) -> None:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_faults(calls: list[str]) -> Iterator[Fault]:
    """Kill before each call, within each write, and after the last."""
    for number, call in enumerate(calls):
        yield Fault(number, "before")
        if call.startswith("write"):
            yield Fault(number, "half")
    yield Fault(len(calls) - 1, "after")


def make_two() -> tuple[PeftModel, PeftModel]:
    """An adapter, and a later one of another configuration: half of each would load, and be wrong."""
    options: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 0}
    first = convert(make_tiny(dtype=torch.bfloat16), mode="mismatch", **options)
    second = convert(make_tiny(dtype=torch.bfloat16), mode="congruent", **options)
    train_steps(second)
    return first.eval(), second.eval()


@pytest.mark.parametrize(("overwrite", "max_shard_bytes"), [(False, 10**9), (True, 12_000)])
def test_a_killed_save_leaves_an_adapter_whole(overwrite: bool, max_shard_bytes: int, tmp_path: Path) -> None:
    first, second = make_two()
    save_adapter(first, tmp_path / "first")
    save_adapter(second, tmp_path / "second", max_shard_bytes=max_shard_bytes)
    new = read_all(tmp_path / "second")
    old = {**read_all(tmp_path / "first"), "notes.txt": b"mine"} if overwrite else {}
    new |= {"notes.txt": b"mine"} if overwrite else {}
    place = tmp_path / "place"
    out = place / "out"

    def save() -> None:
        warnings.filterwarnings("ignore", ".*left by a killed run", UserWarning)
        save_adapter(second, out, max_shard_bytes=max_shard_bytes, overwrite=True)

    def run_child(fault: Fault | None) -> Any:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        fill(out, old)
        return run_in_child(save, fault, also=[(staging, "_rename_with")])

    whole = run_child(None)
    assert (whole.killed, whole.error) == (False, None)
    assert read_all(place) == {f"out/{name}": data for name, data in new.items()}
    faults = list(make_faults(whole.calls))
    assert len(faults) >= 25
    for number, fault in enumerate(faults):
        assert run_child(fault).killed
        assert (read_all(out) if out.exists() else {}) in (old, new), fault
        if number % 7:
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*left by a killed run", UserWarning)
            save()
        assert read_all(place) == {f"out/{name}": data for name, data in new.items()}, fault
    renamed = [call.split()[0] for call in whole.calls].index("_rename_with")
    for number, call in list(enumerate(whole.calls[:renamed]))[:: 2 if overwrite else 5]:
        if call.split()[0] in ("write", "fsync", "mkdir"):
            outcome = run_child(Fault(number, "full"))
            assert re.match(r"CheckpointError: .*out: could not be written", outcome.error or ""), (number, call)
            assert (read_all(out) if out.exists() else {}) == old
            assert [path for path in place.iterdir() if path != out] == []


def test_pefts_own_save_replaces_the_configuration_in_one_step(tmp_path: Path) -> None:
    first, second = make_two()
    first.save_pretrained(tmp_path / "first")
    second.save_pretrained(tmp_path / "second")
    allowed = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("first", "second")]
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "first", out)
    calls = run_in_child(lambda: second.save_pretrained(out)).calls
    for fault in make_faults(calls):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "first", out)
        assert run_in_child(lambda: second.save_pretrained(out), fault).killed
        assert json.loads((out / "adapter_config.json").read_text()) in allowed


def start(folder: Path, **options: Any) -> SELTrainer:
    """A run with a checkpoint at steps 2 and 4, the last one."""
    arguments = make_arguments(folder, max_steps=4, save_strategy="steps", save_steps=2, **options)
    return SELTrainer(make_model(), arguments, train_dataset=make_data())


@pytest.mark.filterwarnings("ignore:.*left by a killed run:UserWarning")
@pytest.mark.parametrize("present", [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]])
def test_a_killed_run_resumes_from_a_whole_checkpoint(present: list[str], tmp_path: Path) -> None:
    straight = start(tmp_path / "straight")
    straight.train()
    expected = clone_state(straight.model)
    checkpoints = {name: read_all(tmp_path / "straight" / name) for name in ("checkpoint-2", "checkpoint-4")}
    run, also = tmp_path / "run", [(staging, "_rename_with"), (torch, "save")]
    straight.args.output_dir = str(run)

    def save_again(fault: Fault | None) -> Any:
        """Save the last checkpoint again, perhaps over the earlier one of its name."""
        shutil.rmtree(run, ignore_errors=True)
        for name in present:
            fill(run / name, checkpoints[name])
        return run_in_child(lambda: straight._save_checkpoint(straight.model, None), fault, also=also)

    whole = save_again(None)
    assert (whole.killed, whole.error) == (False, None)
    calls = [call for call in whole.calls if re.match(VERBS, call)]  # not the lines of what save() is given
    assert sum(call.startswith("save") for call in calls) >= 4  # optimizer, scheduler, RNG, arguments
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    new = read_all(run / "checkpoint-4")
    assert new.keys() == checkpoints["checkpoint-4"].keys()
    for number, fault in enumerate(list(make_faults(calls))[::4]):
        assert save_again(fault).killed
        last = Path(str(get_last_checkpoint(str(run))))
        assert read_all(run / "checkpoint-2") == checkpoints["checkpoint-2"]
        assert read_all(last).keys() == new.keys() and last.name in ("checkpoint-2", "checkpoint-4")
        assert is_same(last, tmp_path / "straight" / last.name)
        if number % 20 == 0:
            resumed = start(run)
            spoil(resumed.model)
            resumed.train(resume_from_checkpoint=True)
            assert_same_bits(clone_state(resumed.model), expected)


def is_same(left: Path, right: Path) -> bool:
    """Whether two checkpoints hold the same adapter at the same step; torch.save is not the same bytes twice."""
    names = ("adapter_model.safetensors", "adapter_config.json")
    steps = [json.loads((folder / "trainer_state.json").read_text())["global_step"] for folder in (left, right)]
    return steps[0] == steps[1] and all((left / name).read_bytes() == (right / name).read_bytes() for name in names)
