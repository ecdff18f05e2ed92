"""benchmarks/merge.py: what it makes can be merged, and its figures are those of the files."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FILE = Path(__file__).parent.parent / "benchmarks" / "merge.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("merge_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_pair_is_a_checkpoint_and_a_trained_adapter(script: Any, tmp_path: Path) -> None:
    script.SHARD_BYTES = 200_000
    pair = script.make_pair(tmp_path, 1_200_000, 64)
    model = AutoModelForCausalLM.from_pretrained(pair.base)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == pair.shapes
    assert 1e6 < sum(path.stat().st_size for path in pair.base.glob("*.safetensors")) < 1.4e6
    report = script.merge_checkpoint(pair.base, pair.adapter, tmp_path / "out", progress=False)
    assert report.tensors_merged == 7 * model.config.num_hidden_layers
    files = sorted(path.name for path in pair.base.glob("*.safetensors"))
    assert len(files) > 3 and sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == files
    for file in files:
        before, after = load_file(pair.base / file), load_file(tmp_path / "out" / file)
        for name, tensor in before.items():
            moved = ((after[name].float() - tensor.float()).norm() / tensor.float().norm()).item()
            assert (0.02 < moved < 0.5) if script.is_target(name) else moved == 0, name


def test_figures(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merge.json"
    options = ["--sizes", "1.2e6", "--hidden", "64", "--repeats", "1", "--folder", str(tmp_path)]
    script.main([*options, "--out", str(out)])
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert result["versions"]["torch"] == torch.__version__
    shapes = script.choose_shapes(1_200_000, 64)
    weights = {name: math.prod(shape) for name, shape in shapes.items()}
    folded = sum(count for name, count in weights.items() if script.is_target(name))
    assert 0 <= row["base_bytes"] - 2 * sum(weights.values()) < 20_000  # the header
    assert 4 * folded < row["adapter_bytes"] < 6 * folded
    assert row["read_bytes"] >= 4 * folded + 2 * (sum(weights.values()) - folded)
    assert row["written_bytes"] == row["base_bytes"]
    assert 50e6 < row["idle_bytes"] < 2e9 and 0 <= row["peak_over_idle_bytes"] < 500e6
    assert row["copy_over_merge"] == pytest.approx(row["copy_s"][0] / row["merge_s"][0])
    assert "of its throughput" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["merge.json"]
