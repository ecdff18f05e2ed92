"""How fast weights are inverted, folded, pulled back and merged, beside copies of the same weights in the same run.

One part measures the operations on one matrix and compares them with their floor, the other converts, merges, loads and
merges from file to file a whole checkpoint, in memory (/dev/shm, where there is one).

Examples:
    python benchmarks/speed/throughput.py --threads 1 2
    python benchmarks/speed/throughput.py --parts matrix --shape 4096 4096
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from floor import COPY, describe_floor
from methods import ModelChoice, count_target_weights, load_model, target_layers
from operations import EXPS_PER_ELEMENT, Operation, Sample, exponentials, fold_and_gradients, inversions
from peft import PeftModel, get_peft_model
from record import RESULTS, describe_environment, write_result
from report import render_result
from safetensors.torch import load_file, save_file
from timing import Seconds, summarize, time_in_turns
from torch import Tensor

from peft_sel import SELConfig, merge_checkpoint
from peft_sel.kernels import use_backend
from peft_sel.targets import DENSE_TARGETS

BACKENDS = ("reference", "compiled")
CAST, COPIED = "copy, float32 to bf16", "copy, float32"
COMPILED = ", compiled"  # ends the name of an operation by that backend
REAL_WEIGHTS = 106_168_320  # of SmolLM2-135M, in the linear layers that are trained
FILE = "model.safetensors"


def read_safetensors(file: Path) -> list[Tensor]:
    """Load a file and touch every byte of it, which a mapped file alone would not."""
    return [tensor.clone() for tensor in load_file(file).values()]


def measure_matrix(shape: tuple[int, int], repeats: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the operations on one matrix.

    Returns:
        A row per operation, and how far fold and gradients are from their floor.
    """
    plain, adapted = Sample(shape), Sample(shape, r=8)
    raw = plain.raw.detach()
    target = torch.empty_like(raw)
    save_file({"weight": plain.weight}, folder / FILE)
    calls: dict[str, Operation] = {
        CAST: lambda: raw.to(torch.bfloat16),
        COPIED: lambda: target.copy_(raw),
        "safetensors load, bf16": lambda: read_safetensors(folder / FILE),
        **inversions(plain),
    }
    for sample, backend in ((sample, backend) for sample in (plain, adapted) for backend in BACKENDS):
        calls |= fold_and_gradients(sample, backend)
    calls |= exponentials(shape)
    seconds = time_in_turns(calls, repeats)
    rows = add_rates(seconds, raw.numel())
    speed = {name: row["median_s"] / raw.numel() for name, row in rows.items()}
    floor = describe_floor(
        REAL_WEIGHTS,
        bytes_per_s=COPY.bytes / speed[COPIED],
        exps_per_s=EXPS_PER_ELEMENT / min(speed[name] for name in rows if name.startswith("exp")),
        measured_s={name.removesuffix(COMPILED): speed[name] for name in rows if name.endswith(COMPILED)},
    )
    return rows, floor


def measure_checkpoint(choice: ModelChoice, repeats: int, folder: Path) -> dict[str, Any]:
    """Measure conversion, merge and load of a whole model, and a merge from file to file.

    Merges name their backend: which one is chosen depends on how many weights this process has folded before.

    Returns:
        A row per operation.
    """
    base_dir, adapter_dir, merged_dir = folder / "base", folder / "adapter", folder / "merged"
    base = load_model(choice)
    base.save_pretrained(base_dir, max_shard_size="1TB")
    weights = [layer.weight.detach() for layer in target_layers(base)]
    singles = [weight.float() for weight in weights]
    config = SELConfig(target_modules=DENSE_TARGETS, task_type="CAUSAL_LM")
    converted = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    converted.save_pretrained(adapter_dir)

    def merge_files(_: object) -> object:
        return merge_checkpoint(base_dir, adapter_dir, merged_dir, progress=False)

    def copy_file() -> None:
        shutil.copyfile(base_dir / FILE, folder / FILE)
        with open(folder / FILE, "rb") as file:  # a merge brings its files to the disk
            os.fsync(file.fileno())

    calls: dict[str, Callable[..., object]] = {
        CAST: lambda: [single.to(torch.bfloat16) for single in singles],
        "safetensors load of the base": lambda: read_safetensors(base_dir / FILE),
        "file copy of the base": copy_file,
        "conversion": lambda model: get_peft_model(model, copy.deepcopy(config)),
        "load of an adapter": lambda model: PeftModel.from_pretrained(model, adapter_dir),
    }
    prepare: dict[str, Callable[[], object]] = {
        "conversion": lambda: copy.deepcopy(base),
        "load of an adapter": lambda: copy.deepcopy(base),
    }
    for backend in BACKENDS:
        in_memory, streamed = f"merge in memory, {backend}", f"streaming merge, {backend}"
        calls[in_memory] = use_backend(backend)(lambda model: model.merge_and_unload())
        calls[streamed] = use_backend(backend)(merge_files)
        prepare[in_memory] = lambda: copy.deepcopy(converted)
        prepare[streamed] = lambda: shutil.rmtree(merged_dir, ignore_errors=True)
    seconds = time_in_turns(calls, repeats, warm_up=1, prepare=prepare)
    return add_rates(seconds, count_target_weights(base))


def add_rates(seconds: Seconds, weights: int) -> dict[str, Any]:
    """Return rows that also tell time per weight and weights per second."""
    rows = summarize(seconds, [CAST], {})
    for row in rows.values():
        row |= {"ns_per_weight": row["median_s"] / weights * 1e9, "weights_per_s": weights / row["median_s"]}
    return rows


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", choices=["matrix", "checkpoint"], nargs="+", default=["matrix", "checkpoint"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", type=int, nargs=2, default=[1536, 4608], help="of the matrix")
    parser.add_argument("--model", choices=["real", "wide"], default="real")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts with each number of threads; write JSON and print a table for each."""
    args = make_parser().parse_args(arguments)
    shape, choice = (args.shape[0], args.shape[1]), ModelChoice(args.model, args.hidden, args.layers)
    threads_before = torch.get_num_threads()
    memory_folder = Path("/dev/shm")
    make_folder = functools.partial(tempfile.TemporaryDirectory, dir=memory_folder if memory_folder.is_dir() else None)
    try:
        for threads in args.threads:
            torch.set_num_threads(threads)
            for part in args.parts:
                environment = describe_environment()
                settings: dict[str, Any] = {"threads": threads, "repeats": args.repeats, "bases": [CAST]}
                with make_folder() as folder:
                    if part == "matrix":
                        rows, settings["floor"] = measure_matrix(shape, args.repeats, Path(folder))
                        settings["what"] = label = f"{shape[0]}x{shape[1]}"
                    else:
                        rows = measure_checkpoint(choice, args.repeats, Path(folder))
                        settings["what"] = label = choice.label
                file = args.out / f"{part}-{label}-t{threads}.json"
                write_result(file, "throughput", settings, rows, environment)
                print(render_result(file), flush=True)
    finally:
        torch.set_num_threads(threads_before)


if __name__ == "__main__":
    main()
