from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path

import biased
import matplotlib
import numpy as np
import pytest
import reference
import torch
from matplotlib.figure import Figure
from models import convert, make_tiny
from moe import convert_moe, make_moe, perturb
from PIL import Image
from safetensors.torch import load_file, save_file

from peft_sel import plots
from peft_sel.cli import main
from peft_sel.errors import CheckpointError, ConfigError, MissingPackageError, OtherBaseError, PlotError
from peft_sel.logs import collect_scale_means
from peft_sel.plots import Distribution

FLOAT64_EPS = np.finfo(np.float64).eps
HALF_CELL = 2.0**-12  # of a weight that is rounded to 12 significant bits
Q_PROJ = "model.layers.{}.self_attn.q_proj"
KEY = f"base_model.model.{Q_PROJ}.symexplin_"
SCALES = ("exp_scale", "linear_scale", "inner_multiplier")


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of pyplot, which has global state and picks a backend, an error."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in bfloat16, another one, an adapter with everything moved (dense), one without raw weights (small)."""
    folder = tmp_path_factory.mktemp("plots")
    make_tiny("qwen2", torch.bfloat16).save_pretrained(folder / "base")
    make_tiny("qwen2", torch.bfloat16, vocab_size=97).save_pretrained(folder / "other")
    for name, options in {"dense": {}, "small": {"train_raw": False}, "start": {"init_weights": True}}.items():
        torch.manual_seed(1)
        model = convert(make_tiny("qwen2", torch.bfloat16), **{"init_weights": False, **options})
        model.save_pretrained(folder / name)
    edit(folder / "other", "model.safetensors", lambda tensors: tensors.update(changed_by_half(tensors)))
    return folder


def changed_by_half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 for name, tensor in tensors.items()}


def edit(folder: Path, name: str, change: object) -> None:
    tensors = load_file(folder / name)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / name, {"format": "pt"})


def data(line: object) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.asarray(values, dtype=np.float64) for values in line.get_data())  # type: ignore[attr-defined]


def labels(figure: Figure) -> list[str]:
    """Return the texts of all legends."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def assert_labelled(figure: Figure) -> None:
    assert figure.axes[-1].get_xlabel() and figure.axes[0].get_ylabel()


def start_scales(beta: float) -> tuple[float, float, float]:
    return tuple(reference.start_value(name, beta) for name in SCALES)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("modes", "betas", "offsets"),
    [(reference.MODES, [7.5], [0.0]), (["mismatch"], [7.5, 20.0, 3.0], [0.0]), (["congruent"], [10.0], [0.0, 0.5])],
)
def test_transform_is_the_oracles(modes: list[str], betas: list[float], offsets: list[float]) -> None:
    figure = plots.plot_transform(modes, betas, offsets)
    maps, slopes = figure.axes
    lines = list(zip(maps.lines, slopes.lines, strict=True))
    combinations = list(product(betas, offsets, modes))
    assert len(lines) == len(combinations) + 1 == len(labels(figure))  # and the ordinary weight
    assert [data(line)[1].tolist() for line in lines[-1]] == [data(maps.lines[-1])[0].tolist(), [1, 1]]
    for (line, slope), (beta, offset, mode) in zip(lines[:-1], combinations, strict=True):
        raw, effective = data(line)
        (gap,) = np.flatnonzero(np.isnan(raw))
        assert raw[gap - 1] == 0 and np.signbit(raw[gap - 1]) and not np.signbit(raw[gap + 1])
        assert raw[-1] == -raw[0] == 1.5 / max(betas) and len(raw) > 200
        raw, effective, slope = (np.delete(values, gap) for values in (raw, effective, data(slope)[1]))
        e, l, m = start_scales(beta)  # noqa: E741
        want = reference.effective_weight(raw, e, l, m, offset, 0.0, beta, mode)
        np.testing.assert_allclose(effective, want.astype(float), rtol=8 * FLOAT64_EPS, atol=1e-18)
        want = reference.gradients(1.0, raw, e, l, m, offset, 0.0, beta, mode)["raw"]
        np.testing.assert_allclose(slope, want.astype(float), rtol=1e-8)  # of the oracle's differences
    assert_labelled(figure)


def test_linear_share_is_the_oracles() -> None:
    figure = plots.plot_linear_path([3.0, 7.5, 19.1])
    (axes,) = figure.axes
    for line, beta in zip(axes.lines, [3.0, 7.5, 19.1], strict=True):
        raw, share = data(line)
        e, l, m = start_scales(beta)  # noqa: E741
        want = 100 * l * raw / reference.effective_weight(raw, e, l, m, 0.0, 0.0, beta, "congruent").astype(float)
        np.testing.assert_allclose(share, want, rtol=30 * FLOAT64_EPS)  # exp of 20, rounded
    assert 10 < data(axes.lines[1])[1][0] < 15  # the paper's figure at 7.5
    both = plots.plot_linear_path([7.5], {"with": [(0, 4.0), (9, 3.0)], "without": [(0, 4.0), (9, 3.5)]}, "with")
    assert len(both.axes) == 2 and "without: 3.500; not reached" in labels(both)
    assert_labelled(both)


CURVES = {
    "base": [(0, 5.0), (10, 4.0), (20, 3.5), (40, 3.0)],
    "faster": [(0, 5.1), (10, 3.6), (20, 2.8), (40, 2.6)],
    "slower": [(0, 5.0), (20, 4.0), (40, 3.25)],
    "broken": [(0, 5.0), (10, 60.0), (20, math.nan)],
}


def test_steps_to_baseline() -> None:
    figure = plots.plot_loss_curves(CURVES, "base")
    (axes,) = figure.axes
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    curves = {tuple(zip(*data(line), strict=True)): line for line in axes.lines if len(data(line)[0]) > 2}
    assert {tuple(map(tuple, curve)) for name, curve in CURVES.items() if name != "broken"} < curves.keys()
    (mark,) = (data(line) for line in marks)
    assert mark[0].tolist() == [pytest.approx(17.5, abs=0.01)] and mark[1].tolist() == [3.0]  # 3.6 to 2.8 in 10 steps
    assert labels(figure) == [
        "base: 3.000",
        "faster: 2.600; step 17 (2.29x)",
        "slower: 3.250; not reached",
        "broken: diverged; not reached",
    ]
    low, high = axes.get_ylim()
    assert 2.5 < low < 2.6 and 4.5 < high < 4.6  # where the slower one is at step 10, the broken arm aside
    assert_labelled(figure)
    assert labels(plots.plot_loss_curves(CURVES)) == [
        "base: 3.000",
        "faster: 2.600",
        "slower: 3.250",
        "broken: diverged",
    ]


def test_reaching_step() -> None:
    curve = [(0, 4.0), (10, math.nan), (20, 3.0), (30, 3.5), (40, 2.0)]
    dense = np.linspace(0, 40, 400_001)
    values = np.interp(dense, [0, 20, 30, 40], [4.0, 3.0, 3.5, 2.0])
    for loss in (3.9, 3.0, 2.99, 2.0):
        found = plots.find_reaching_step(curve, loss)
        assert found == pytest.approx(dense[np.argmax(values <= loss)], abs=2e-4)
    assert plots.find_reaching_step(curve, 1.9) is None and plots.find_reaching_step(curve, 4.5) == 0
    assert plots.find_reaching_step([(5, math.nan)], 1.0) is None


def test_scale_trajectories_of_a_log(folder: Path) -> None:
    model = convert(make_tiny("qwen2"), offset="row")
    means = [collect_scale_means(model)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * ("offset" in name)).mul_(1 + 0.3 * ("exp_scale" in name))
    means.append(collect_scale_means(model))
    history = [
        {"step": step, "loss": 3.0, **{f"sel/scale/{key}": value for key, value in found.items()}}
        for step, found in zip((1, 7), means, strict=True)
    ]
    history.insert(1, {"step": 4, "eval_loss": 3.1})
    figure = plots.plot_scale_trajectories([*history, {"step": 8, "train_runtime": 1.0}])
    titles = {"Exponential": "exp_scale", "Linear": "linear_scale", "Inner": "inner_multiplier", "Offset": "offset"}
    found = {titles[axes.get_title().split()[0]]: axes for axes in figure.axes}
    assert found.keys() == set(titles.values())
    roles = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert labels(figure) == roles
    for scale, axes in found.items():
        lines = {line.get_label(): data(line) for line in axes.lines if not line.get_label().startswith("_")}
        assert set(lines) == set(roles)
        for role, (steps, values) in lines.items():
            assert steps.tolist() == [1, 7] and values.tolist() == [found[f"{scale}/{role}"] for found in means]
        (level,) = (line for line in axes.lines if line.get_label().startswith("_"))
        assert level.get_ydata()[0] == (0 if scale == "offset" else 1)
        assert axes.get_ylabel() == ("Mean" if scale == "offset" else "Mean / start")
    assert data(found["exp_scale"].lines[0])[1][1] == pytest.approx(1.69, rel=1e-5)  # rows and columns, 1.3 each
    plain = {key: [(1, means[0][key]), (7, means[1][key])] for key in means[0]}
    again = plots.plot_scale_trajectories(plain)
    assert [data(line)[1].tolist() for axes in again.axes for line in axes.lines] == [
        data(line)[1].tolist() for axes in figure.axes for line in axes.lines
    ]
    assert_labelled(figure)


def write_state(folder: Path, *losses: float, **more: float) -> None:
    history = [{"step": step + 1, "loss": loss, "epoch": 0.5, **more} for step, loss in enumerate(losses)]
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_logs_of_the_last_checkpoint(tmp_path: Path) -> None:
    write_state(tmp_path / "run" / "checkpoint-9", 3.0)
    write_state(tmp_path / "run" / "checkpoint-10", 3.0, 2.0)
    for path in ("run", "run/checkpoint-10", "run/checkpoint-10/trainer_state.json"):
        assert plots.read_losses([tmp_path / path], "loss") == {str(tmp_path / path): [(1, 3.0), (2, 2.0)]}


def density(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(values, edges)[0] / np.diff(edges) / len(values)


def quantile(values: np.ndarray, share: float) -> float:
    return float(np.sort(abs(values))[math.ceil(share * len(values)) - 1])


@pytest.mark.parametrize("spread", [0.3, 1e-4, 0.0], ids=["tails", "inside the bound", "zeros"])
def test_distribution_of_weights(spread: float) -> None:
    weights = {name: (spread * torch.randn(120, 80) ** 3).bfloat16() for name in ("old", "new")}
    figure = plots.plot_weight_distribution(weights)
    (axes,) = figure.axes
    steps = [patch.get_data() for patch in axes.patches]
    bound = math.sqrt(6 / 200)
    assert sorted({line.get_xdata()[0] for line in axes.lines if line.get_marker() == "None"}) == [-bound, bound]
    assert axes.get_yscale() == "log" and (axes.get_xscale() == "symlog") == (spread == 0.3)
    for (label, weight), step in zip(weights.items(), steps, strict=True):
        values = weight.double().flatten().numpy()
        assert step.edges[0] == -step.edges[-1] and abs(values).max() <= step.edges[-1]
        np.testing.assert_allclose(step.values, density(values, step.edges), rtol=4 * FLOAT64_EPS)
        marks = [x for line in axes.lines if line.get_marker() in ("^", "s") for x in line.get_xdata()]
        tails = [quantile(values, share) for share in (0.999, 0.9999)]
        assert {side for tail in tails for side in (-tail, tail) if side in values} <= set(marks)
        farthest = values[abs(values).argmax()]
        (text,) = (text for text in labels(figure) if text.startswith(label))
        assert text.startswith(f"{label}, farthest from 0: {farthest:.3g}\n") and f"{tails[0]:.3g}" in text
    assert_labelled(figure)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_distribution_adds_up(dtype: torch.dtype) -> None:
    parts = [(torch.randn(300, 20) ** 3).to(dtype), torch.randn(7).to(dtype), torch.randn(4, 3, 2).to(dtype)]
    found = Distribution()
    for part in parts:
        found.add(part)
    values = torch.cat([part.double().flatten() for part in parts]).numpy()
    assert found.count == len(values) and found.xavier_bounds == {(6 / 320) ** 0.5}
    assert found.std == pytest.approx(values.std(), rel=1e-6)  # float64 is counted in float32
    for share in (0.5, 0.99, 1.0):
        assert found.quantile(share) == pytest.approx(quantile(values, share), rel=HALF_CELL)


def read_parts(folder: Path, layer: int) -> dict[str, torch.Tensor]:
    prefix = KEY.format(layer)
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def oracle_weight(parts: dict[str, torch.Tensor], raw: np.ndarray) -> np.ndarray:
    scales = [
        reference.expand("row_col_mult", {"row": parts[f"{name}.row"], "column": parts[f"{name}.column"]})
        for name in SCALES
    ]
    weight = reference.effective_weight(raw, *scales, 0.0, 0.0, float(parts["beta"]), "mismatch")
    return weight + reference.wide(parts["residual_b"]) @ reference.wide(parts["residual_a"])


@pytest.mark.parametrize(("tensor", "layers"), [("q_proj", [0, 1]), (f"{Q_PROJ.format(1)}.weight", [1])])
@pytest.mark.parametrize("adapter", ["dense", "small"])
def test_weights_of_files(folder: Path, adapter: str, tensor: str, layers: list[int]) -> None:
    effective, raw = plots.read_weight_distributions(folder / "base", folder / adapter, tensor=tensor)
    base = load_file(folder / "base" / "model.safetensors")
    weights = [base[f"{Q_PROJ.format(layer)}.weight"] for layer in layers]
    parts = [read_parts(folder / adapter, layer) for layer in layers]
    raws = [
        reference.invert(weight, *start_scales(float(part["beta"])), 0.0, float(part["beta"]), "mismatch")
        for weight, part in zip(weights, parts, strict=True)
    ]
    moved = [reference.wide(part["raw"]) if adapter == "dense" else old for part, old in zip(parts, raws, strict=True)]
    want = {
        "effective before": [reference.wide(weight) for weight in weights],
        "effective after": [oracle_weight(part, new) for part, new in zip(parts, moved, strict=True)],
        "raw before": raws,
        "raw after": moved,
    }
    found = {f"effective {time}": member for time, member in effective.items()}
    found |= {f"raw {time}": member for time, member in raw.items()}
    if adapter == "small":
        del want["raw after"]
    assert found.keys() == want.keys()
    for name, member in found.items():
        values = np.concatenate([weight.flatten() for weight in want[name]]).astype(float)
        assert member.count == len(values), name
        assert member.std == pytest.approx(values.std(), rel=1e-5), name
        for share in (0.5, 0.9, 0.999, 1.0):
            assert member.quantile(share) == pytest.approx(quantile(values, share), rel=1.1 * HALF_CELL), name
    edges = np.linspace(-1, 1, 21)
    before = np.concatenate([weight.double().flatten().numpy() for weight in weights])
    got = found["effective before"].histogram(edges)
    np.testing.assert_allclose(got, density(before, edges), rtol=4 * FLOAT64_EPS)


def test_weights_of_a_base_alone(folder: Path) -> None:
    effective, raw = plots.read_weight_distributions(folder / "base", tensor="mlp.*")
    assert effective.keys() == raw.keys() == {"base"} and effective["base"].count == raw["base"].count == 9216
    effective, raw = plots.read_weight_distributions(folder / "base", tensor="q_proj.bias")
    assert effective["base"].count == 64 and raw is None


@pytest.mark.parametrize("adapter", ["dense", "small", "start"])
def test_learned_maps_are_the_oracles(folder: Path, adapter: str) -> None:
    figure = plots.plot_learned_transform(folder / adapter)
    panels = {axes.get_title().split(",")[0]: axes for axes in figure.axes}
    assert list(panels) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    axes = panels["q_proj"]
    exponents, median = data(axes.lines[0])
    keep = np.isfinite(median)
    assert np.isnan(exponents[~keep]).sum() == 1 and set(exponents[~keep][[0, 2]]) == {0.0} and exponents[-1] == 3
    changes = []
    for layer in (0, 1):
        parts = read_parts(folder / adapter, layer)
        beta = float(parts["beta"])
        means = [parts[f"{name}.row"].double().mean() * parts[f"{name}.column"].double().mean() for name in SCALES]
        raw = exponents[keep] / beta
        new = reference.effective_weight(raw, *means, 0.0, 0.0, beta, "mismatch")
        old = reference.effective_weight(raw, *start_scales(beta), 0.0, 0.0, beta, "mismatch")
        changes.append((new / old).astype(float))
    low, middle, high = np.quantile(changes, [0.25, 0.5, 0.75], axis=0)
    rounding = 1e-6  # a float32 mean of 32 numbers
    np.testing.assert_allclose(median[keep], middle, rtol=rounding)
    (band,) = axes.collections
    heights = np.concatenate([path.vertices[:, 1] for path in band.get_paths()])
    for edge in (low, high):
        nearest = abs(heights[:, None] - edge[None, ::20]).min(axis=0)
        assert nearest.max() < rounding
    if adapter == "start":
        np.testing.assert_allclose(middle, 1, rtol=rounding)
        assert axes.get_ylim() == (0.995, 1.005)
    assert_labelled(figure)


def test_experts_and_biases_are_drawn(tmp_path: Path) -> None:
    make_moe(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    model = convert_moe(make_moe(dtype=torch.bfloat16))
    perturb(model)
    model.save_pretrained(tmp_path / "adapter")
    titles = [axes.get_title() for axes in plots.plot_learned_transform(tmp_path / "adapter").axes]
    assert titles == ["down_proj, 8 weights", "gate_up_proj, 8 weights"]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (stack,) = (
        tensor for name, tensor in saved.items() if "layers.1" in name and "down_proj" in name and "raw" in name
    )
    name = "model.layers.1.mlp.experts.2.down_proj.weight"  # on disk an expert for itself
    effective, raw = plots.read_weight_distributions(tmp_path / "base", tmp_path / "adapter", tensor=name)
    values = stack[2].double().flatten().numpy()
    assert raw["after"].count == len(values) and raw["after"].std == pytest.approx(values.std(), rel=1e-6)
    assert effective["after"].count == len(values) and raw["before"].std != raw["after"].std
    biased.convert(biased.make_biased()).save_pretrained(tmp_path / "biased")
    titles = [axes.get_title() for axes in plots.plot_learned_transform(tmp_path / "biased").axes]
    assert titles[-3:] == ["q_proj.bias, 2 weights", "k_proj.bias, 2 weights", "v_proj.bias, 2 weights"]


def test_a_draw_has_no_before(folder: Path, tmp_path: Path) -> None:
    convert(make_tiny("qwen2", torch.bfloat16), init_target="xavier_uniform").save_pretrained(tmp_path / "drawn")
    effective, raw = plots.read_weight_distributions(folder / "base", tmp_path / "drawn", tensor="q_proj")
    assert list(effective) == list(raw) == ["after"]


COMMANDS = (
    "transform --mode mismatch congruent --beta 7.5 15",
    "weights {1}/base {1}/dense --tensor q_proj",
    "scales {0}/a",
    "learned {1}/dense",
    "losses {0}/a {0}/b/ --baseline {0}/b",
    "linear --beta 7.5",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_kind_writes_png_and_svg(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name, last in (("a", 2.0), ("b", 2.5)):
        write_state(tmp_path / name / "checkpoint-3", 3.0, 2.7, last, **{"sel/scale/exp_scale/q_proj": 1.1})
    words = ["plot", *command.format(tmp_path, folder).split(), "-o"]
    png, svg = tmp_path / "new.png", tmp_path / "new.svg"
    for file in (png, svg):
        assert main([*words, str(file)]) == 0
        assert capsys.readouterr().out == f"figure: {file}\n"
    with Image.open(png) as image:
        image.load()
        assert image.format == "PNG" and image.width > 400
    texts = [node.text for node in ElementTree.parse(svg).iter() if node.tag.endswith("}text") and node.text]
    assert len(texts) > 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "new.png", "new.svg"]


def test_same_bytes_whatever_the_users_style(tmp_path: Path) -> None:
    files = [tmp_path / f"{index}{suffix}" for suffix in (".svg", ".png") for index in (0, 1)]
    for index, file in enumerate(files):
        with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"} if index % 2 else {}):
            plots.save_figure(plots.plot_linear_path(), file)
            assert matplotlib.rcParams["font.size"] == (20 if index % 2 else 10)
    contents = [file.read_bytes() for file in files]
    assert contents[0] == contents[1] and contents[2] == contents[3] and b"<dc:date>" not in contents[0]


REFUSED = {
    "transform -o {0}/taken.png": "taken.png already exists; name another output or remove this one first",
    "transform -o {0}/new.pdf": "new.pdf: is neither a .png nor a .svg file",
    "transform -o {0}/missing/new.png": "there is no folder",
    "transform --overwrite -o {0}/folder.png": "folder.png: is a folder; name another output",
    "transform --offset nan": "offset=nan: has a line that no figure can hold",
    "transform --offset 0 -1000": "offset=-1000: has a line that",
    "transform --beta 1e308": "beta=1e+308, offset=0: has a line that",
    "linear --beta 1e-310": "beta=1e-310: has a line that",
    "transform --beta -1": "beta=-1.0: the curvature must be a positive",
    "linear --beta nan": "beta=nan: the curvature must be",
    "scales {0}/missing": "missing: there is no such file; name the output folder",
    "losses {1}/base": "base: holds no trainer_state.json, nor a checkpoint with one",
    "scales {0}/run": "the logs: hold no sel/scale/...; train with SELTrainer",
    "losses {0}/run --key eval_loss": "has no eval_loss in its logs; choose one of: loss",
    "losses {0}/run --baseline {0}": "is the baseline, and no curve of that name",
    "losses {0}/run {0}/run/": "is named twice",
    "learned {1}/base": "base: holds no adapter_config.json",
    "weights {1}/other {1}/dense --tensor q_proj": "dense was made from another base",
    "weights {1}/base --tensor quark_proj": "holds no floating-point tensor that quark_proj matches",
    "weights {1}/base --tensor *": "tensor=*: is no regular expression (nothing to repeat at position 0)",
    "weights {1}/base {1}/dense --tensor layers.0.*norm": "changes none of the 2 tensors that layers.0.*norm matches",
}


def test_command_line_refuses_in_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_state(tmp_path / "run", 3.0)
    (tmp_path / "taken.png").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    out = ["-o", str(tmp_path / "new.png")]
    for command, sentence in REFUSED.items():
        words = command.format(tmp_path, folder).split()
        assert main(["plot", *words, *(out if "-o" not in words else [])]) == 2, command
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert sentence in line and captured.out == "", line
    with pytest.raises(SystemExit) as end:
        main(["plot", "pie", *out])
    assert end.value.code == 2 and "invalid choice: 'pie'" in capsys.readouterr().err
    assert not (tmp_path / "new.png").exists() and (tmp_path / "taken.png").read_text() == "mine"
    pair = [str(folder / "other"), str(folder / "dense")]
    assert main(["plot", "weights", *pair, "--tensor", "q_proj", "--any-base", *out]) == 0


def test_functions_refuse() -> None:
    for call, match in {
        "no mode": (lambda: plots.plot_transform([]), "modes: there is none"),
        "no curve": (lambda: plots.plot_loss_curves({}), "curves: there is none"),
        "no point": (lambda: plots.plot_loss_curves({"a": []}), "a: its curve has no finite loss"),
        "lost": (lambda: plots.plot_loss_curves({"a": [(0, 1.0), (1, math.nan)]}, "a"), "baseline, and diverged"),
        "no curves": (lambda: plots.plot_linear_path([7.5], None, "a"), "curves: there is none"),
        "no scale": (lambda: plots.plot_scale_trajectories({"loss": [(0, 1.0)]}), "loss: is no curve of a scale"),
        "no weight": (lambda: plots.plot_weight_distribution({}), "weights: there is none"),
        "empty": (lambda: plots.plot_weight_distribution(torch.empty(0, 4)), "weights: there is no weight"),
        "nan": (lambda: plots.plot_weight_distribution({"a": torch.tensor([1, math.nan])}), "a: holds NaN or infinite"),
        "ids": (lambda: plots.plot_weight_distribution(torch.arange(3)), "weights: is torch.int64"),
    }.values():
        with pytest.raises(PlotError, match=match):
            call()
    with pytest.raises(ConfigError, match="mode='sideways'"):
        plots.plot_transform(["sideways"])


def test_broken_adapters_are_refused(folder: Path, tmp_path: Path) -> None:
    def save(name: str, change: object) -> Path:
        convert(make_tiny("qwen2")).save_pretrained(tmp_path / name)
        edit(tmp_path / name, "adapter_model.safetensors", change)
        return tmp_path / name

    key = f"{KEY.format(0)}exp_scale.row"
    lacking = save("lacking", lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=r"exp_scale of model\.layers\.0\.self_attn\.q_proj are incomplete"):
        plots.plot_learned_transform(lacking)
    broken = save("broken", lambda tensors: tensors[key].fill_(math.nan))
    with pytest.raises(PlotError, match=r"exp_scale of model\.layers\.0\.self_attn\.q_proj is NaN or infinite"):
        plots.plot_learned_transform(broken)
    with pytest.raises(OtherBaseError):
        plots.read_weight_distributions(folder / "other", folder / "dense", tensor="q_proj")


def test_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r'run pip install "peft-sel\[plots\]"'):
        plots.plot_transform()
    assert main(["plot", "linear", "-o", str(tmp_path / "new.svg")]) == 2
    line = 'peft-sel: this needs the package matplotlib, which is not installed; run pip install "peft-sel[plots]"\n'
    assert capsys.readouterr().err == line and not list(tmp_path.iterdir())
    monkeypatch.setattr(plots, "read_weight_distributions", lambda *_, **__: pytest.fail("read before it was known"))
    command = ["plot", "weights", str(tmp_path), "--tensor", "q_proj", "-o", str(tmp_path / "new.svg")]
    assert main(command) == 2 and capsys.readouterr().err == line


def test_an_error_in_writing_names_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(PlotError) as caught:
        plots.save_figure(plots.plot_linear_path(), tmp_path / "new.png")
    assert str(caught.value) == f"{tmp_path / 'new.png'}: cannot be written (Permission denied); name another output"


def test_linear_path_beside_an_overflow() -> None:
    small, large = plots.plot_linear_path([0.001, 1000.0]).axes[0].lines
    assert all(np.isfinite(data(line)[1]).all() for line in (small, large)) and data(large)[1][-1] == 0


def test_a_negative_tail_is_marked() -> None:
    weight = -(torch.rand(200, 200) ** 8)
    figure = plots.plot_weight_distribution({"negative": weight})
    (axes,) = figure.axes
    values = weight.bfloat16().double().numpy()
    marks = [(x, y) for line in axes.lines if line.get_marker() in ("^", "s") for x, y in zip(*data(line), strict=True)]
    assert len(marks) == 2 and all(x < 0 < y for x, y in marks)
    assert labels(figure)[0].startswith(f"negative, farthest from 0: {values.min():.3g}\n")


def test_xavier_bounds_of_many_shapes(folder: Path) -> None:
    weights = {f"{rows}": torch.randn(rows, 16) for rows in range(8, 20)}
    figure = plots.plot_weight_distribution(weights)
    bounds = [math.sqrt(6 / (16 + rows)) for rows in (19, 8)]
    assert labels(figure)[-1] == f"Xavier bound {bounds[0]:.3g} to {bounds[1]:.3g}"
    (axes,) = figure.axes
    assert sum(len(line.get_xdata()) == 2 and line.get_marker() == "None" for line in axes.lines) == 4
    effective, raw = plots.plot_weight_distribution(
        *plots.read_weight_distributions(folder / "base", folder / "dense", tensor="q_proj")
    ).axes
    named = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (effective, raw)]
    assert named[0][-1].startswith("Xavier bound") and not any("Xavier" in text for text in named[1])
