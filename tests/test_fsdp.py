"""SEL under FSDP2: two gloo processes through accelerate's own code against one process; see fsdp_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_worker
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from fsdp_worker import BASES, BATCHES, CASES, LOADED, LR
from models import assert_same_bits, convert, make_tiny
from peft import PeftModel
from processes import CONFIGS, ROOT, launch
from safetensors.torch import load_file
from tiny import save_checkpoint, write_documents, write_recipe
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM

from peft_sel import create_sel_optimizer, merge_checkpoint
from peft_sel.errors import ParameterGroupError
from peft_sel.jobs import run_job
from peft_sel.logs import collect_scale_means
from peft_sel.recipe import load_recipe

pytestmark = [
    pytest.mark.skipif(not hasattr(Accelerator, "is_fsdp2"), reason="this accelerate has no FSDP2"),
    pytest.mark.filterwarnings("ignore:.* is all zeros, so beta='auto'"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]
BENCHMARK = ROOT / "benchmarks" / "sharded_memory.py"
TOLERANCE = 1e-4  # of issue F; measured: 2.1e-7 for losses, 8e-7 for weights, 8e-5 for biases that start at 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base models and all that two processes made of them."""
    folder = tmp_path_factory.mktemp("fsdp")
    for name, make in BASES.items():
        make().save_pretrained(folder / name)
    launch(Path(fsdp_worker.__file__), "cases", folder, config=CONFIGS / "fsdp2.yaml")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Any]:
    """What each process says."""
    return [json.loads((folder / f"results_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def dense(folder: Path) -> Any:
    """The dense adapter that two processes trained, in one process."""
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen2")
    return PeftModel.from_pretrained(base, folder / "adapters" / "dense").eval()


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_does(folder: Path, results: list[Any], name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = fsdp_worker.convert_case(AutoModelForCausalLM.from_pretrained(folder / case.base), case, seed=0)
    optimizer, scheduler = fsdp_worker.make_optimizer(model)
    groups = fsdp_worker.describe_groups(model, optimizer)
    losses = fsdp_worker.train_case(model, case, optimizer, scheduler)
    merged = []
    model.save_pretrained(tmp_path / "one")
    for adapter in (folder / "adapters" / name, tmp_path / "one"):
        merge_checkpoint(folder / case.base, adapter, tmp_path / "merged" / adapter.name, progress=False)
        merged.append(load_file(tmp_path / "merged" / adapter.name / "model.safetensors"))
    # In bf16 a product's sums may depend on its number of rows (1.4e-4 on AVX2), and results round to the next number.
    loss_tolerance = max(TOLERANCE, torch.finfo(model.dtype).eps)
    for result in results:
        assert result[name]["groups"] == groups
        assert result[name]["losses"] == pytest.approx(losses, rel=loss_tolerance)
    assert losses[-1] < losses[0]
    for key, expected in merged[1].items():  # some bf16 weights round to the next number
        tolerance = max(TOLERANCE, torch.finfo(expected.dtype).eps)
        assert (merged[0][key] - expected).norm() <= tolerance * expected.norm(), key


def test_saved_adapter_is_what_the_processes_hold(folder: Path) -> None:
    trained = {key.replace(".default", ""): value for key, value in load_file(folder / "trained.safetensors").items()}
    saved = load_file(folder / "adapters" / "dense" / "adapter_model.safetensors")
    assert {key.rpartition(".")[2] for key in saved.keys() - trained.keys()} == {"symexplin_beta"}
    assert_same_bits({key: saved[key] for key in sorted(trained)}, dict(sorted(trained.items())))
    for name in ("pretrained", "gathered"):
        assert_same_bits(load_file(folder / name / "adapter_model.safetensors"), saved)
    configs = [(folder / name / "adapter_config.json").read_text() for name in ("adapters/dense", "pretrained")]
    assert configs[0] == configs[1] and json.loads(configs[0])["base_fingerprint"]


def test_state_resumes_exactly(results: list[Any]) -> None:
    for result in results:
        assert result["dense"]["again"] == result["dense"]["losses"]
        assert result["dense"]["resumes_with_equal_bits"]


def test_trainer_resumes_exactly_and_saves(folder: Path, results: list[Any]) -> None:
    for result in results:
        assert result["trainer"]["again"] == result["trainer"]["losses"] and len(result["trainer"]["losses"]) == 8
        assert result["trainer"]["resumes_with_equal_bits"]
    final, last = (load_file(folder / name / "adapter_model.safetensors") for name in ("final", "run/checkpoint-8"))
    assert_same_bits(final, last)
    assert "pytorch_model_fsdp_0" in {path.name for path in (folder / "run" / "checkpoint-8").iterdir()}


@pytest.mark.slow
def test_run_whose_second_process_is_killed_goes_on_from_its_last_checkpoint(folder: Path, results: list[Any]) -> None:
    arguments = (Path(fsdp_worker.__file__), "killed", folder)
    assert launch(*arguments, config=CONFIGS / "fsdp2.yaml", succeeds=False).returncode != 0
    assert not (folder / "killed_0.json").exists() and (folder / "killed" / "checkpoint-3").exists()
    launch(*arguments, config=CONFIGS / "fsdp2.yaml")
    for rank, result in enumerate(results):
        assert json.loads((folder / f"killed_{rank}.json").read_text()) == result["trainer"]["losses"]


@pytest.mark.slow
def test_recipe_runs_in_two_processes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl")
    write_recipe(tmp_path, merge=True)
    launch(Path(fsdp_worker.__file__), "job", tmp_path, config=CONFIGS / "fsdp2.yaml")
    whole = {"per_device_train_batch_size": 4}
    run_job(load_recipe(write_recipe(tmp_path, output_dir=str(tmp_path / "one"), merge=True, training=whole)))
    merged, expected = (load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("out", "one"))
    for key, tensor in expected.items():
        assert (merged[key] - tensor).norm() <= torch.finfo(tensor.dtype).eps * tensor.norm(), key


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many threads as the processes have: the order of sums depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_evaluation_runs_on_what_is_there(folder: Path, results: list[Any], dense: Any) -> None:
    logits = load_file(folder / "logits.safetensors")
    with torch.no_grad():
        expected = {"adapted": dense(input_ids=BATCHES[0]).logits}
        with dense.disable_adapter():
            expected["base"] = dense(input_ids=BATCHES[0]).logits
    assert_same_bits({name: logits[name] for name in expected}, expected)
    assert not torch.allclose(logits["written"], logits["adapted"], rtol=0.1)
    assert [result["dense"]["num_kept"] for result in results] == [0, 0]
    assert [result["dense"]["num_asked"] for result in results] == [14, 14]


def test_logged_scales_are_those_of_one_process(results: list[Any], dense: Any) -> None:
    for scale in (part for name, part in dense.named_parameters() if "_scale." in name or "_multiplier." in name):
        scale.requires_grad_(True)
    for result in results:
        assert result["dense"]["scales"] == pytest.approx(collect_scale_means(dense), rel=1e-5)


def test_loads_an_adapter_where_one_process_has_the_base(results: list[Any]) -> None:
    assert [result["loads"] for result in results] == [[True, True, True], [True, True, True]]


@pytest.mark.usefixtures("results", "one_thread")
@pytest.mark.parametrize("name", LOADED)
def test_a_loaded_adapter_computes_in_each_process_what_it_does_in_one(folder: Path, name: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / CASES[name].base)
    model = PeftModel.from_pretrained(base, folder / "adapters" / name).eval()
    with torch.no_grad():
        expected = {"logits": model(input_ids=BATCHES[0]).logits}
    for rank in (0, 1):
        assert_same_bits(load_file(folder / f"loaded_{name}_{rank}.safetensors"), expected)


def test_what_needs_whole_weights_is_refused(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        messages = result["dense"]["refusals"]
        for name in ("merge_and_unload", "merge_adapter", "unload", "get_delta_weight", "delete_adapter"):
            assert "is sharded by FSDP2" in messages[name] and "use merge_checkpoint" in messages[name]
        assert "sharded: convert before that" in messages["add_adapter"]
        assert "already exists" in messages["save_adapter"]
        assert "this is one of 2" in messages["accumulate_gradients"]
        assert messages["save_adapter"].startswith("process 0 failed") == (rank == 1)


def test_all_processes_stop_where_one_sees_a_broken_base(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        assert "model.layers.1.mlp.up_proj.weight holds 1 NaN" in result["broken_base"]
        assert result["broken_base"].startswith("process 0 failed") == (rank == 1)


def test_all_processes_stop_where_one_loads_on_a_wrong_base(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        other, broken = result["other_bases"]
        assert "model.layers.1.mlp.up_proj.weight" in other and "check_base=False" in other
        assert "model.layers.1.mlp.up_proj.weight holds" in broken and "NaN" in broken
        assert all(message.startswith("process 0 failed") == (rank == 1) for message in (other, broken))


def test_all_processes_fail_to_save_where_the_first_cannot(folder: Path, results: list[Any]) -> None:
    for rank, result in enumerate(results):
        assert len(result["trainer"]["failed_saves"]) == 3
        for message in result["trainer"]["failed_saves"]:
            assert str(folder / "file") in message
            assert message.startswith("process 0 failed") == (rank == 1)


def test_mixed_precision_that_rounds_is_refused(results: list[Any]) -> None:
    for result in results:
        assert "was cast to bfloat16, which rounds away what training adds to float32" in result["mixed_precision"]
        assert "load the model in bfloat16" in result["mixed_precision"]


def check_peaks(path: Path) -> None:
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["keep", "drop"]
    for row in rows.values():
        peaks = [max(process["peaks_mib"].values()) for process in (row["one_process"], *row["ranks"])]
        assert peaks[0] > 1000 and len(peaks) == 3 and max(peaks[1:]) <= 0.6 * peaks[0]


def test_recorded_peaks_are_below_six_tenths_of_one_process() -> None:
    check_peaks(BENCHMARK.with_suffix(".json"))


@pytest.mark.slow
def test_peaks_are_below_six_tenths_of_one_process(tmp_path: Path) -> None:
    """At the benchmark's own size: smaller ones show what does not grow with it, 0.607 at 512 x 16 layers."""
    command = [sys.executable, str(BENCHMARK), "--out", str(tmp_path / "result.json")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    check_peaks(tmp_path / "result.json")


def test_fsdp1_is_refused() -> None:
    model = convert(make_tiny())
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its own needs processes
    nn.Module.__init__(wrapper)
    model.add_module("wrapper", wrapper)
    with pytest.raises(ParameterGroupError, match=r"FSDP1 wraps the model.*fsdp_version: 2"):
        create_sel_optimizer(model, lr=LR)


def test_config_is_accelerates() -> None:
    config = load_config_from_file(str(CONFIGS / "fsdp2.yaml"))
    assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
    assert config.mixed_precision == "no" and config.fsdp_config["fsdp_cpu_ram_efficient_loading"]
