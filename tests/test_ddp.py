"""Two processes of DistributedDataParallel train as one does; see ddp_worker.py for the runs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ddp_worker import LOOPS, MODELS, STEPS, TRAINERS, Run, list_variants, make_trainer, run_loop, run_trainer
from processes import Launched, launch
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "ddp_worker.py"
MATCH = 1e-4  # relative; some 2e-5 is measured, since Adam turns rounding in small gradients into steps


@dataclass(frozen=True)
class Two:
    """The runs of two processes, and what they wrote beside."""

    runs: dict[str, Run]
    launched: Launched
    folder: Path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("ddp")
    launched = launch(WORKER, "compare", folder)
    report = json.loads((folder / "report.json").read_text())
    runs = {name: Run(**{**run, "merged": load_file(folder / f"{name}.safetensors")}) for name, run in report.items()}
    return Two(runs, launched, folder)


def assert_matches(actual: Run, expected: Run) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=MATCH)
    assert actual.merged.keys() == expected.merged.keys()
    for name, weight in expected.merged.items():
        assert (actual.merged[name] - weight).norm() <= MATCH * weight.norm(), name


@pytest.mark.parametrize("name", LOOPS)
def test_loop_matches_one_process(name: str, two: Two) -> None:
    one = run_loop(MODELS[name])
    assert len(one.losses) == STEPS and sum(one.losses[-3:]) < sum(one.losses[:3])
    assert_matches(two.runs[name], one)
    assert two.runs[name].rates == one.rates
    ratios = [rates["exp_scale"] / rates["inner_multiplier"] for rates in one.rates[1:]]
    assert 20 / 0.01 > ratios[4] > ratios[8] > ratios[11] == pytest.approx(4 / 0.5)  # annealed


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_matches_one_process(name: str, two: Two, tmp_path: Path) -> None:
    model, options = TRAINERS[name]
    one = run_trainer(MODELS[model], tmp_path, **options)
    assert_matches(two.runs[name], one)
    assert two.runs[name].rates == one.rates


def test_accelerate_may_step_the_scheduler(two: Two) -> None:
    run, expected = two.runs["scheduler of Accelerate"], two.runs["dense"]
    assert len(run.rates) == len(expected.rates) == STEPS
    for rates, plain in zip(run.rates, expected.rates, strict=True):
        assert rates == pytest.approx(plain, rel=1e-13)  # a dozen float64 operations


def test_no_variant_changes_a_bit(two: Two) -> None:
    for reference, names in list_variants(two.folder).items():
        for name in names:
            assert two.runs[name].losses == two.runs[reference].losses, name
            for key, weight in two.runs[reference].merged.items():
                assert torch.equal(two.runs[name].merged[key], weight), (name, key)


def test_autocast_rounds_the_losses_to_bfloat16_at_most(two: Two) -> None:
    eps = torch.finfo(torch.bfloat16).eps  # a logit is rounded to it once
    run, plain = two.runs["bf16"], two.runs["plain"]
    assert run.losses == pytest.approx(plain.losses, rel=eps) and run.losses != plain.losses


def test_all_processes_hold_the_same_bits(two: Two) -> None:
    for name, run in two.runs.items():
        converted, *later = run.differing.values()
        # Each process drew its own A; raw, curvature and all else come from the same weights by the same arithmetic.
        assert converted and all(".symexplin_residual_a." in tensor for tensor in converted), name
        assert later and not any(later), name


def test_frozen_raw_weights_are_sent_once(two: Two) -> None:
    assert {name: two.runs[name].broadcasts for name in TRAINERS} == {
        name: model != "scales only" for name, (model, _) in TRAINERS.items()
    }


@pytest.mark.parametrize(("given", "found"), [(None, False), (True, True), (False, False)])
def test_unused_parameters_are_looked_for_on_demand(given: bool | None, found: bool, tmp_path: Path) -> None:
    trainer = make_trainer(MODELS["dense"], tmp_path, ddp_find_unused_parameters=given)
    assert trainer.accelerator.ddp_handler.find_unused_parameters is found


def test_nobody_warns(two: Two) -> None:
    assert "Warning" not in two.launched.stderr  # those of torch's C++; in Python they are errors there


@pytest.mark.parametrize("moment", ["step", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(moment: str, two: Two, tmp_path: Path) -> None:
    killed = launch(WORKER, "killed", tmp_path, moment, succeeds=False)
    assert killed.returncode == 1 and "SIGKILL" in killed.stderr and not (tmp_path / "killed.json").exists()
    run = tmp_path / "killed"
    last = {"step": "checkpoint-4", "checkpoint": "checkpoint-6"}[moment]
    assert max(run.glob("checkpoint-*")).name == last
    assert len(list(run.glob(".checkpoint-8.unfinished-*"))) == (moment == "checkpoint")

    resumed = launch(WORKER, "killed", tmp_path, "never")
    assert resumed.stdout.count(f"starts from {last}") == 2
    assert ("left by a killed run" in resumed.stderr) == (moment == "checkpoint")
    assert json.loads((tmp_path / "killed.json").read_text()) == two.runs["straight"].losses
    weights = load_file(tmp_path / "killed.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in two.runs["straight"].merged.items())

    straight = two.folder / "straight"
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (straight, run)]
    assert files[0] == files[1]
    states = [json.loads((folder / "checkpoint-10" / "trainer_state.json").read_text()) for folder in (straight, run)]
    assert len({Path(state["best_model_checkpoint"]).name for state in states}) == 1
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(os.listdir(run / "checkpoint-10"))
