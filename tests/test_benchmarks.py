from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import floor
import gpu
import methods
import pytest
import report
import steps
import throughput
import timing
import torch
from torch import Tensor, nn

from peft_sel.kernels import BACKENDS, compiled

FOLDER = Path(__file__).parent.parent / "benchmarks" / "speed"
TINY = ["--model", "wide", "--hidden", "64", "--layers", "1", "--repeats", "2"]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave functions as they are where they would be compiled, which takes seconds each."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiled, "_functions", {})


def load_main() -> ModuleType:
    """Import benchmarks/speed/__main__.py under another name."""
    spec = importlib.util.spec_from_file_location("speed_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_result(file: Path) -> dict[str, Any]:
    result = json.loads(file.read_text())
    assert result["environment"]["versions"]["torch"] == torch.__version__ and result["environment"]["date"]
    return result


def test_every_method_makes_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps.main([*TINY, "--tokens", "16", "--base", "full", "lora", "--no-memory", "--out", str(tmp_path)])
    result = read_result(tmp_path / "steps-wide-h64-l1-16.json")
    assert list(result["rows"]) == methods.CPU_METHODS
    assert result["settings"]["target_weights"] == 4 * 64 * 48 + 3 * 64 * 192  # keys and values have half the heads
    printed = capsys.readouterr().out
    for name, row in result["rows"].items():
        assert len(row["seconds"]) == 2 and list(row["time_ratio"]) == ["full", "lora"]
        assert f"`{name}`" in printed
    assert result["rows"]["lora"]["time_ratio"]["lora"] == [1.0, 1.0, 1.0]


def test_accumulation_and_growth(tmp_path: Path) -> None:
    names = methods.ACCUMULATION_METHODS
    more = ["--methods", *names, "--no-memory", "--layers", "1", "2", "--accumulate", "2", "--tokens", "8"]
    steps.main([*TINY, *more, "--out", str(tmp_path)])
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "steps-wide-h64-l1-8-x2.json",
        "steps-wide-h64-l2-8-x2.json",
    ]
    assert list(read_result(tmp_path / "steps-wide-h64-l2-8-x2.json")["rows"]) == names


def test_a_step_averages_its_micro_batches() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            self.loss = self.weight * input_ids.float().mean()
            return self

    model = Model()
    step = methods.make_step("full", model, torch.optim.SGD(model.parameters(), lr=1.0))
    step(torch.tensor([[[2, 4]], [[6, 8]]]))
    assert model.weight == -5 and model.weight.grad is None


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("method", ["sel-reference", "sel-compiled"])
def test_a_method_named_after_a_backend_uses_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name, backend in BACKENDS.items():
        fold = backend.fold
        monkeypatch.setattr(backend, "fold", lambda *a, name=name, fold=fold: (used.append(name), fold(*a))[1])
    steps.prepare_step(method, methods.ModelChoice("wide", 64, 1))(methods.make_batches(8))
    assert set(used) == {methods.BACKEND_OF[method]}


def test_a_process_of_its_own_tells_its_memory() -> None:
    memory = steps.measure_memory("sel-drop", steps.Load(methods.ModelChoice("wide", 64, 1), 8))
    assert memory.peak_bytes > 1 << 27 and 0 < memory.rest_bytes < memory.peak_bytes


def test_methods_that_do_not_fit_together_are_refused() -> None:
    load = steps.Load(methods.ModelChoice(), 8192)
    steps.check_memory({"full": steps.Memory(2**20, 2**20)}, load)
    with pytest.raises(SystemExit, match=r"^2 methods at 8192 tokens need 3145728.0 GiB .*--methods$"):
        steps.check_memory({"full": steps.Memory(2**51, 2**50), "lora": steps.Memory(2**50, 2**50)}, load)


def test_ratios_are_within_rounds() -> None:
    seconds = {"base": [1.0, 2.0, 10.0], "other": [2.0, 2.0, 15.0]}
    rows = timing.summarize(seconds, ["base"], {"base": 100, "other": 150})
    assert rows["other"]["time_ratio"]["base"] == [1.25, 1.5, 1.75] and rows["other"]["memory_ratio"]["base"] == 1.5
    assert rows["other"]["median_s"] == 2.0


def test_calls_take_turns_after_their_preparation() -> None:
    log: list[str] = []
    calls = {"a": lambda: log.append("a"), "b": lambda prepared: log.append(prepared)}
    seconds = timing.time_in_turns(calls, 2, warm_up=1, prepare={"b": lambda: log.append("+") or "b"})
    assert "".join(log) == "+ba" + "a+b" + "+ba" and {name: len(times) for name, times in seconds.items()} == {
        "a": 2,
        "b": 2,
    }


def test_the_floor_is_the_larger_of_bytes_and_exponentials() -> None:
    measured = {"fold": 2e-8, "gradients": 3e-8, "fold with residual": 3e-8, "gradients with residual": 5e-8}
    bound = floor.describe_floor(1000, bytes_per_s=1e9, exps_per_s=1e8, measured_s=measured)["operations"]
    assert bound["fold"] == pytest.approx({"bytes": 6, "exps": 1, "floor_ns": 10.0, "measured_over_floor": 2.0})
    bound = floor.describe_floor(1000, bytes_per_s=1e9, exps_per_s=1e12, measured_s=measured)
    floors = [operation["floor_ns"] for operation in bound["operations"].values()]
    assert floors == pytest.approx([6.0, 10.0, 6.0, 10.0])
    assert bound["step"]["floor_s"] == pytest.approx(22e-6) and bound["step"]["measured_s"] == pytest.approx(70e-6)
    assert bound["step"]["measured_with_residual_s"] == pytest.approx(110e-6)
    assert bound["step"]["full_fine_tuning_floor_s"] == pytest.approx(12e-6)


@pytest.mark.usefixtures("uncompiled")
def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    throughput.main([*TINY, "--threads", "1", "--shape", "80", "96", "--out", str(tmp_path)])
    assert torch.get_num_threads() == threads
    matrix, checkpoint = tmp_path / "matrix-80x96-t1.json", tmp_path / "checkpoint-wide-h64-l1-t1.json"
    assert {"inversion, bf16", "inversion, float32", "gradients with residual, compiled"} <= set(
        read_result(matrix)["rows"]
    )
    row = read_result(checkpoint)["rows"]["streaming merge, compiled"]
    assert row["weights_per_s"] * row["ns_per_weight"] == pytest.approx(1e9, rel=1e-4)  # five digits are written
    assert "at least" in capsys.readouterr().out


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's CUDA graphs
def test_the_script_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.CELLS, "small", [("CUDA graphs", "full"), ("CUDA graphs", "sel-drop")])
    monkeypatch.setitem(gpu.CELLS, "large", [("eager", "full"), ("eager", "lora")])
    gpu.main(["--dry-run", "--out", str(tmp_path)])
    kernels = read_result(tmp_path / "gpu-kernels.json")
    assert kernels["settings"]["dry_run"] and kernels["rows"]["agreement, compiled"]["largest_bf16_ulp"] <= 1
    assert "time_ratio" in read_result(tmp_path / "gpu-small.json")["rows"]["sel-drop, CUDA graphs"]
    assert "memory_ratio" in read_result(tmp_path / "gpu-large.json")["rows"]["lora, eager"]
    gpu.main(["--dry-run", "--stages", "large", "--budget-s", "0", "--out", str(tmp_path)])
    assert all("skipped" in row for row in read_result(tmp_path / "gpu-large.json")["rows"].values())
    monkeypatch.setitem(methods.METHODS, "lora", lambda model: 1 / 0)
    with pytest.raises(SystemExit, match=r"large: lora, eager: ZeroDivisionError: division by zero$"):
        gpu.main(["--dry-run", "--stages", "large", "--out", str(tmp_path)])
    assert "time_ratio" in read_result(tmp_path / "gpu-large.json")["rows"]["full, eager"]
    report.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.md")])
    assert "ZeroDivisionError" in (tmp_path / "page.md").read_text()


def test_the_script_for_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^benchmarks/speed/gpu.py needs a GPU"):
        gpu.main([])


@pytest.mark.parametrize("smoke", [True, False])
def test_the_plan_is_understood(smoke: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    main = load_main()
    commands = main.list_commands(list(main.PLAN), smoke, Path("out"))
    scripts = {"steps": steps, "throughput": throughput, "gpu": gpu}
    assert {Path(command[0]).stem for command in commands} == set(scripts)
    for script, *arguments in commands:
        args = scripts[Path(script).stem].make_parser().parse_args(arguments)
        assert args.out == Path("out") and Path(script).is_file()


def test_one_command_runs_scripts_and_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_main()

    def call(command: list[str]) -> int:
        if Path(command[1]).name == "gpu.py":
            return 1
        steps.main([*command[2:], "--no-memory"])
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(SystemExit, match=r"^failed:\n.*gpu\.py --dry-run"):
        main.main(["--smoke", "--parts", "gpu", "accumulation", "--out", str(tmp_path)])
    assert (tmp_path / "README.md").read_text().count("### A step of 2 micro-batches of 8 tokens") == 1
    with pytest.raises(SystemExit):
        main.main(["--smoke"])


def test_the_page_shows_the_results() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == report.render(FOLDER / "results")
