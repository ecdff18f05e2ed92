"""Figures of runs: what a comparison of losses may say, which logs of a run count, and what scales are relative to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from models import convert, make_tiny
from test_training import make_arguments, make_data
from transformers import TrainerState

from peft_sel import ScaleConfig, SELTrainer, plots
from peft_sel.cli import main
from peft_sel.errors import SELError
from peft_sel.logs import collect_scale_means


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def notes(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def write_state(folder: Path, step: int, key: str = "loss", **more: Any) -> None:
    """Write a state of a run whose last log says which one it is."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": count, key: 3.0 - 0.01 * count, **more} for count in range(1, step + 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))


def noisy(generator: np.random.Generator) -> list[tuple[int, float]]:
    noise = generator.standard_normal(150)
    return [(step, 2.5 + math.exp(-step / 40) + 0.04 * noise[step - 1]) for step in range(1, 151)]


def test_equal_noisy_arms_are_not_said_to_differ() -> None:
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(24):
        arms = {"base": noisy(generator), "arm": noisy(generator)}
        (text,) = legend(plots.plot_loss_curves(arms, "base"))[1:]
        ratios += [1.0 if text.endswith("not reached") else float(text.rpartition("(")[2].removesuffix("x)"))]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.02) and np.mean(np.array(ratios) > 1.1) < 0.2
    assert "step" not in "".join(legend(plots.plot_loss_curves(arms, "base", "loss")))
    first = [150 / (plots.find_reaching_step(noisy(generator), noisy(generator)[-1][1]) or 150) for _ in range(100)]
    assert np.median(first) > 1.3  # what the first crossing would have said


@pytest.mark.parametrize("offset", [0.0, 4e-4, -4e-4])
def test_what_is_printed_alike_is_reached(offset: float) -> None:
    curve = [(0, 6.0), (10, 5.0), (20, 4.5451)]
    for base in (curve, [*curve, (30, 4.5), (40, 4.5451)]):  # the second rises at its end
        equal = [(step, value + offset) for step, value in base]
        (text,) = legend(plots.plot_loss_curves({"base": base, "arm": equal}, "base"))[1:]
        if text.startswith("arm: 4.545"):
            assert text.endswith(" (1.00x)") and "; step 20" in text
    assert "4.545" in text or offset > 0


def test_lasting_step_is_after_every_dip() -> None:
    curve = [(0, 4.0), (10, 2.0), (20, 3.0), (30, 2.0), (40, 2.5)]
    dense = np.linspace(0, 40, 400_001)
    values = np.interp(dense, *zip(*curve, strict=True))
    for loss in (2.5, 2.8, 3.0, 3.5):
        last = dense[np.flatnonzero(values > loss)[-1]]
        assert plots.find_lasting_step(curve, loss) == pytest.approx(last, abs=2e-4)
    assert plots.find_lasting_step(curve, 2.4) is None and plots.find_lasting_step(curve, 4.0) == 0
    assert plots.find_lasting_step([(0, 4.0), (5, math.nan), (9, 1.0)], 2.0) == 9
    assert plots.find_lasting_step([(0, 4.0), (5, 1.0), (9, math.nan)], 2.0) is None
    assert plots.find_lasting_step([], 2.0) is None


def test_ratio_is_to_the_baselines_own_way_there() -> None:
    bumpy = [(0, 5.0), (10, 3.0), (20, 2.0), (30, 2.0), (40, 3.0)]  # it had its last loss at step 10 already
    arms = {"base": bumpy, "same": bumpy, "twice": [(0, 5.0), (5, 3.0), (40, 2.9)]}
    assert legend(plots.plot_loss_curves(arms, "base"))[1:] == [
        "same: 3.000; step 10 (1.00x)",
        "twice: 2.900; step 5 (2.00x)",
    ]


@pytest.mark.parametrize(
    ("key", "label", "title"),
    [
        (
            "eval_loss",
            "Held-out loss (nats per token)",
            "final loss; step from which on it stays at or below that of a",
        ),
        ("eval_german_loss", "eval_german_loss", "final loss; step from which on"),
        ("loss", "Training loss (nats per token)", "final loss; steps are compared on held-out loss only"),
    ],
)
def test_labels_fit_the_key(key: str, label: str, title: str) -> None:
    curves = {"a": [(0, 4.0), (9, 3.0)], "b": [(0, 4.0), (9, 2.0)]}
    for axes in (
        plots.plot_loss_curves(curves, "a", key).axes[0],
        plots.plot_linear_path([7.5], curves, "a", key).axes[1],
    ):
        assert axes.get_ylabel() == label and axes.get_legend().get_title().get_text().startswith(title)


def test_says_what_is_cut_off() -> None:
    steep, flat = [(0, 9.0), (25, 3.0), (100, 2.5)], [(0, 2.6), (50, 2.7), (100, 2.5)]
    assert notes(plots.plot_loss_curves({"a": steep}).axes[0]) == ["cut off above: up to 9"]
    assert notes(plots.plot_loss_curves({"a": flat}).axes[0]) == []
    figure = plots.plot_loss_curves({"a": flat, "broken": [(25, 3.0), (50, 60.0), (100, math.nan)]})
    assert notes(figure.axes[0]) == ["cut off above: up to 60"]


def test_held_out_losses_are_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        write_state(run, 4, "eval_loss", loss=7.0)
    assert plots.find_loss_key(runs) == "eval_loss"
    svg = tmp_path / "new.svg"
    command = ["plot", "losses", *map(str, runs), "--baseline", str(runs[0]), "--overwrite", "-o", str(svg)]
    assert main(command) == 0 and "Held-out loss" in svg.read_text() and "2.960; step 4 (1.00x)" in svg.read_text()
    write_state(runs[1], 1, "eval_loss", loss=7.0)  # a point is no curve
    assert plots.find_loss_key(runs) == "loss"
    assert main(command) == 0 and "Training loss" in svg.read_text() and "1.00x" not in svg.read_text()
    assert main([*command, "--key", "eval_loss"]) == 0 and "Held-out loss" in svg.read_text()


def last_step(path: Path) -> int:
    return int(plots.read_logs(path)[-1]["step"])


def test_the_state_with_most_steps_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_state(run / "checkpoint-9", 9)
    write_state(run / "checkpoint-20", 20)
    (run / "checkpoint-100x").mkdir()
    assert last_step(run) == 20
    write_state(run, 10)  # of an earlier end, before the run was resumed
    assert last_step(run) == 20 and last_step(run / "checkpoint-9") == 9
    write_state(run, 20, "eval_loss")  # the end, and the last checkpoint
    assert "eval_loss" in plots.read_logs(run)[-1]
    for torn in ("", '{"global_step": 30, "log_hist', "[]", '{"global_step": 30}'):
        (run / "trainer_state.json").write_text(torn)
        assert last_step(run) == 20
    (run / "checkpoint-20" / "trainer_state.json").write_text("{")
    assert last_step(run) == 9
    (run / "checkpoint-9" / "trainer_state.json").unlink()
    with pytest.raises(SELError, match=r"run/trainer_state\.json"):
        plots.read_logs(run)


def test_a_killed_save_of_the_state_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SELTrainer(convert(make_tiny()), make_arguments(tmp_path), train_dataset=make_data())
    trainer.state.log_history = [{"step": 1, "loss": 3.0}]
    trainer.save_state()
    assert plots.read_logs(tmp_path) == trainer.state.log_history

    def die(self: TrainerState, path: str) -> None:
        Path(path).write_text('{"log_hist')
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainerState, "save_to_json", die)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_state()
    assert plots.read_logs(tmp_path) == trainer.state.log_history


SCALES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "symexp": ({"offset": "row", "shift": "row"}, {"linear_scale": 1, "offset": 0, "shift": 0}),
    "damped": ({"family": "damped", "mode": "congruent", "offset": "row"}, {"linear_scale": 1, "offset": 1}),
    "own starts": (
        {"offset": ScaleConfig("row", init=0.2), "linear_scale": ScaleConfig("row", init=0.0)},
        {"linear_scale": 0, "offset": 1},
    ),
}


@pytest.mark.parametrize("kind", SCALES)
def test_late_logs_are_relative_to_the_right_start(kind: str) -> None:
    options, references = SCALES[kind]
    means = collect_scale_means(convert(make_tiny(), **options))
    for moved in (0.45, 0.6):  # a scale that has moved far, and logs that begin there
        late = {key: [(500, value if key.endswith("/start") else moved)] for key, value in means.items()}
        history = [{"step": 500, **{f"sel/scale/{key}": curve[0][1] for key, curve in late.items()}}]
        for logs in (late, history):
            axes = {axes.get_title().split()[0].lower(): axes for axes in plots.plot_scale_trajectories(logs).axes}
            for scale, reference in {"exp_scale": 1, "inner_multiplier": 1, **references}.items():
                panel = axes["exponential" if scale == "exp_scale" else scale.split("_")[0]]
                (level,) = (line for line in panel.lines if line.get_label().startswith("_"))
                assert level.get_ydata()[0] == reference, scale
                assert panel.get_ylabel() == ("Mean / start" if reference else "Mean")
                assert {line.get_label() for line in panel.lines} >= {"q_proj"} and "start" not in panel.lines[
                    0
                ].get_label()
