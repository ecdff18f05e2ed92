"""Everything that needs a GPU, as one script for a quarter of an hour: kernels first, then whole training steps.

Stages: "kernels" gives each backend's share of the bandwidth of a copy and its agreement with the reference and with
float64; "small" and "large" give step time and peak memory on random models of the size of Qwen3-0.6B and Qwen3-4B,
eager, compiled and with CUDA graphs. The JSON is written after every measurement, those that the budget leaves no time
for are named as skipped, and one that fails is named with its error, as is the exit status 1. It needs a torch with
Triton, transformers and peft in the versions of setup.cfg, and peft_sel installed (pip install --no-deps -e .).

Examples:
    python benchmarks/speed/gpu.py --stages kernels small --budget-s 540
    python benchmarks/speed/gpu.py --stages large --budget-s 300
    python benchmarks/speed/gpu.py --dry-run
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from floor import COPY, FOLD, GRADIENTS
from methods import METHODS, count_target_weights, make_batches, make_qwen3, make_step
from operations import Sample, fold_and_gradients
from record import RESULTS, describe_environment, write_result
from report import render_result
from timing import quartiles

from peft_sel.kernels import BACKENDS, use_backend

QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
SMALL = {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
TINY = {**SMALL, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 4}
STAGES = {"small": SMALL, "large": LARGE}
# What matters most first: the budget may leave no time for the rest.
CELLS = {
    "small": [
        ("eager", "full"),
        ("eager", "sel-drop"),
        ("eager", "lora"),
        ("compiled", "full"),
        ("compiled", "sel-drop"),
        ("CUDA graphs", "full"),
        ("CUDA graphs", "sel-drop"),
        ("compiled", "lora"),
        ("eager", "sel-scales"),
    ],
    "large": [
        ("eager", "full"),
        ("eager", "sel-drop"),
        ("compiled", "full"),
        ("compiled", "sel-drop"),
        ("eager", "lora"),
    ],
}
COMPILE_MODES = {"compiled": "default", "CUDA graphs": "reduce-overhead"}
CELL_S = {"small": 40, "large": 60}  # not begun with less time left: a cell builds, compiles, warms up and measures
SLEEP_CYCLES = 400_000_000  # keeps the device busy until the host has queued what is timed


class Run:
    """One run of the script: device, sizes, deadline and results.

    Attributes:
        args: The command line.
        device: "cuda", or "cpu" in a dry run.
        failures: What failed, one line each.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, "cpu" if args.dry_run else "cuda"
        self.deadline = time.monotonic() + args.budget_s
        self.failures: list[str] = []
        self.environment = describe_environment()

    def attempt(self, label: str, needed_s: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a measurement's row, or one that says why there is none."""
        left = self.deadline - time.monotonic()
        if left < needed_s:
            return {"skipped": f"{left:.0f} s of the budget were left"}
        try:
            row = measure()
        except Exception as error:  # one that fails leaves the others their time
            row = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"}
            self.failures.append(f"{label}: {row['error']}")
        print(f"[{time.monotonic() - self.deadline + self.args.budget_s:5.0f} s] {label}: {row}", flush=True)
        return row

    def time_calls(self, call: Callable[[], object], repeats: int, queue_first: bool) -> list[float]:
        """Time calls by the device's own clock, after two that are not timed.

        Args:
            call: What to time.
            repeats: How often.
            queue_first: Whether the device waits until the host has queued every call, so that the host's own time
                does not count.

        Returns:
            Seconds of each.
        """
        call()
        call()
        if self.device == "cpu":
            marks = [time.perf_counter()]
            for _ in range(repeats):
                call()
                marks.append(time.perf_counter())
            return [end - start for start, end in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        if queue_first:
            torch.cuda._sleep(SLEEP_CYCLES)
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]

    def write(self, stage: str, kind: str, settings: dict[str, Any], rows: dict[str, Any]) -> Path:
        """Write a stage's rows so far."""
        file: Path = self.args.out / f"gpu-{stage}.json"
        settings = {"stage": stage, "dry_run": self.args.dry_run, **settings}
        write_result(file, kind, settings, rows, self.environment)
        return file


def measure_agreement(sample: Sample, backend: str) -> dict[str, float]:
    """Compare a backend's results with the reference backend's on the same device, and its gradients with float64."""
    with use_backend(backend):
        weight = sample.fold()
        raw_grad, *grads = sample.pull_back(weight)
    with use_backend("reference"):
        expected = sample.fold()
        double = sample.to_double()
        exact_raw_grad, *exact_grads = double.pull_back(double.fold())
    steps = (weight.view(torch.int16).int() - expected.view(torch.int16).int()).abs()  # equal signs
    error = (raw_grad.double() - exact_raw_grad).abs() / exact_raw_grad.abs().clamp_min(torch.finfo(torch.float32).tiny)
    reduced = [
        float((mine - exact).abs().max() / exact.abs().max()) for mine, exact in zip(grads, exact_grads, strict=True)
    ]
    return {
        "differing_share": float((steps > 0).double().mean()),
        "largest_bf16_ulp": int(steps.max()),
        "raw_gradient_eps": float(error.max()) / torch.finfo(torch.float32).eps,
        "reduced_gradient_error": max(reduced),
    }


def run_kernels(run: Run) -> Path:
    """Measure fold and gradients of one matrix by each backend."""
    shape = (96, 160) if run.args.dry_run else (4096, 12288)
    plain, adapted = Sample(shape, device=run.device), Sample(shape, r=8, device=run.device)
    raw = plain.raw.detach()
    target = torch.empty_like(raw)
    copy_s = statistics.median(run.time_calls(lambda: target.copy_(raw), run.args.repeats, True))
    bytes_per_s = COPY.bytes * raw.numel() / copy_s
    settings = {"shape": list(shape), "copy_bytes_per_s": bytes_per_s, "repeats": run.args.repeats}
    rows: dict[str, Any] = {}
    for backend in BACKENDS:

        def measure(call: Callable[[], object], operation: str) -> dict[str, Any]:
            seconds = run.time_calls(call, run.args.repeats, True)
            cost = FOLD if operation.startswith("fold") else GRADIENTS
            rate = cost.bytes * raw.numel() / statistics.median(seconds)
            return {"quartiles_s": quartiles(seconds), "bytes_per_s": rate, "share_of_copy": rate / bytes_per_s}

        calls = fold_and_gradients(plain, backend) | fold_and_gradients(adapted, backend)
        for label, call in calls.items():
            rows[label] = run.attempt(label, 20, lambda call=call, label=label: measure(call, label))
        label = f"agreement, {backend}"
        rows[label] = run.attempt(label, 20, lambda backend=backend: measure_agreement(plain, backend))
        file = run.write("kernels", "gpu-kernels", settings, rows)
    return file


def measure_cell(run: Run, sizes: dict[str, Any], mode: str, method: str) -> dict[str, Any]:
    """Measure steps of one method in one mode, with the device to itself."""
    gc.collect()
    torch.compiler.reset()
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    model, optimizer = METHODS[method](make_qwen3(run.device, **sizes))
    if mode in COMPILE_MODES:
        options = {"backend": "aot_eager"} if run.args.dry_run else {"mode": COMPILE_MODES[mode]}
        model = torch.compile(model, **options)
    step, batches = make_step(method, model, optimizer), make_batches(run.args.tokens, device=run.device)

    def call() -> None:
        if mode == "CUDA graphs":
            torch.compiler.cudagraph_mark_step_begin()
        step(batches)

    call()  # compiles
    ready_s = time.monotonic() - started
    seconds = run.time_calls(call, run.args.repeats, False)
    own_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = torch.cuda.max_memory_allocated() if run.device == "cuda" else own_kib * 1024
    return {"quartiles_s": quartiles(seconds), "peak_bytes": peak_bytes, "ready_s": ready_s}


def run_steps(run: Run, stage: str) -> Path:
    """Measure every cell of a stage, and its ratio to full fine-tuning in the same mode."""
    sizes = TINY if run.args.dry_run else STAGES[stage]
    weights = count_target_weights(make_qwen3("meta", **sizes))
    settings = {"sizes": sizes, "target_weights": weights, "tokens": run.args.tokens, "repeats": run.args.repeats}
    rows: dict[str, Any] = {}
    for mode, method in CELLS[stage]:
        label = f"{method}, {mode}"
        row = run.attempt(
            f"{stage}: {label}", CELL_S[stage], lambda mode=mode, method=method: measure_cell(run, sizes, mode, method)
        )
        base = rows.get(f"full, {mode}", row)
        if "quartiles_s" in row and "quartiles_s" in base:
            row["time_ratio"] = [value / base["quartiles_s"][1] for value in row["quartiles_s"]]
            row["memory_ratio"] = row["peak_bytes"] / base["peak_bytes"]
        rows[label] = row
        file = run.write(stage, "gpu-steps", settings, rows)
    return file


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=["kernels", *STAGES], default=["kernels", *STAGES])
    parser.add_argument("--budget-s", type=float, default=840.0, help="seconds for everything")
    parser.add_argument("--tokens", type=int, default=4096, help="in a step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder of the JSON files; default: $OUT, else results/")
    parser.add_argument(
        "--dry-run", action="store_true", help="the same on a CPU, with tiny sizes and into a new folder"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages; exit with 1 if a measurement failed."""
    args = make_parser().parse_args(arguments)
    if not (args.dry_run or torch.cuda.is_available()):
        sys.exit("benchmarks/speed/gpu.py needs a GPU that torch can use; --dry-run tries the same code on a CPU")
    if args.dry_run:
        args.tokens, args.repeats = 16, 2
    args.out = args.out or Path(tempfile.mkdtemp() if args.dry_run else os.environ.get("OUT", RESULTS))
    run = Run(args)
    for stage in args.stages:
        file = run_kernels(run) if stage == "kernels" else run_steps(run, stage)
        print(render_result(file), flush=True)
    if run.failures:
        sys.exit("\n".join(["failed:", *run.failures]))


if __name__ == "__main__":
    main()
