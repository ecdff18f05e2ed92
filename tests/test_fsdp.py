"""SEL under FSDP2: two gloo processes through accelerate's own code against one process; see fsdp_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp_worker
import pytest
from fsdp_worker import BASES, CASES
from processes import CONFIGS, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peft_sel import merge_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base models and all that the two processes wrote."""
    folder = tmp_path_factory.mktemp("fsdp")
    for name, make in BASES.items():
        make().save_pretrained(folder / name)
    launched = launch(Path(fsdp_worker.__file__), folder, config=CONFIGS / "fsdp2.yaml")
    print(launched.stdout)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Any]:
    return [json.loads((folder / f"results_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_does(folder: Path, results: list[Any], name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = fsdp_worker.convert_case(AutoModelForCausalLM.from_pretrained(folder / case.base), case, seed=0)
    optimizer, scheduler = fsdp_worker.make_optimizer(model)
    groups = fsdp_worker.describe_groups(model, optimizer)
    losses = fsdp_worker.train_case(model, case, optimizer, scheduler)
    assert groups == results[0][name]["groups"] == results[1][name]["groups"]
    relative = [abs(a - b) / b for a, b in zip(results[0][name]["losses"], losses, strict=True)]
    print(max(relative), losses[0], losses[-1])
    merge_checkpoint(folder / case.base, folder / "adapters" / name, tmp_path / "merged", progress=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    if case.options.get("base_weight") != "drop":
        expected = model.merge_and_unload().state_dict()
    else:
        model.save_pretrained(tmp_path / "own")
        merge_checkpoint(folder / case.base, tmp_path / "own", tmp_path / "expected", progress=False)
        expected = load_file(tmp_path / "expected" / "model.safetensors")
    distances = {key: ((merged[key] - expected[key]).norm() / expected[key].norm()).item() for key in merged}
    print(max(distances.values()))
    assert max(relative) < 1e-4
    assert max(distances.values()) < 1e-4
