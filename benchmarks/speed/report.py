"""The results as Markdown: `python benchmarks/speed/report.py` writes README.md beside this file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import FOLDER, RESULTS

HEADER = """# Speed and memory

`make bench` measures what this machine can (hours; `python benchmarks/speed --help` tells how to measure less) and
writes this page from the files in `results/`. One measurement: `python benchmarks/speed/steps.py --help`,
`throughput.py --help`, `gpu.py --help`. The page alone: `python benchmarks/speed/report.py`.

- Methods take turns in one process, and ratios are to the base in the same round: median, and quartiles in brackets.
- Every method trains the same layers of the same weights, under bf16 autocast, with fused AdamW. `full` is full
  fine-tuning of these layers in float32. `sel-drop` and `sel-keep` are dense SEL with `base_weight` "drop" and "keep",
  `-kept` keeps effective weights from forward to backward, `-scope` folds once for all micro-batches of a step,
  `-reference` is plain torch instead of compiled code, `sel-scales` is `train_raw=False`. `parametrize` is the same
  formula by autograd, `lora` and `dora` have rank 32.
- Peak memory is the resident memory of a process with that method alone.
"""

Result = dict[str, Any]


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded so that it reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def format_ratio(quartiles: Sequence[float] | None) -> str:
    """Return the median with the quartiles in brackets."""
    return "" if quartiles is None else f"{quartiles[1]:.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})"


def format_gib(num_bytes: float | None) -> str:
    """Return bytes in GiB."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def describe(result: Result) -> str:
    """Return one line on what a result was measured on."""
    machine, versions = result["environment"]["machine"], result["environment"]["versions"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "peft") if name in versions)
    environment = result["environment"]
    return f"{where}; {packages}; commit {environment['commit']}, {environment['date']}."


def render_steps(result: Result) -> str:
    """Render what steps.py measured."""
    settings, rows = result["settings"], result["rows"]
    tokens = f"{settings['tokens']:,} tokens"
    amount = f"{settings['accumulate']} micro-batches of {tokens}" if settings["accumulate"] > 1 else tokens
    bases = settings["bases"]
    columns = ["method", "seconds", "GiB"]
    columns += [column for base in bases for column in (f"time / {base}", f"memory / {base}")]
    table = []
    for method, row in rows.items():
        cells = [f"`{method}`", f"{row['median_s']:.2f}", format_gib(row.get("peak_bytes"))]
        for base in bases:
            memory = row["memory_ratio"].get(base)
            cells += [format_ratio(row["time_ratio"].get(base)), "" if memory is None else f"{memory:.3f}"]
        table.append(cells)
    what = f"A step of {amount}, model {settings['model']}, {settings['target_weights'] / 1e6:.1f}M weights trained"
    return f"### {what}\n\n{describe(result)} {settings['repeats']} rounds.\n\n{make_table(columns, table)}\n"


def render_throughput(result: Result) -> str:
    """Render what throughput.py measured."""
    settings, rows = result["settings"], result["rows"]
    (base,) = settings["bases"]
    columns = ["operation", "ns per weight", "M weights/s", f"time / {base}"]
    table = [
        [
            name,
            f"{row['ns_per_weight']:.3f}",
            f"{row['weights_per_s'] / 1e6:.0f}",
            format_ratio(row["time_ratio"][base]),
        ]
        for name, row in rows.items()
    ]
    what = f"Throughput, {settings['what']}, {settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    text = f"### {what}\n\n{describe(result)} {settings['repeats']} rounds.\n\n{make_table(columns, table)}\n"
    return text + (render_floor(settings["floor"]) if "floor" in settings else "")


def render_floor(floor: dict[str, Any]) -> str:
    """Render how far fold and gradients are from their floor."""
    table = [
        [name, f"{own['bytes']}", f"{own['exps']}", f"{own['floor_ns']:.3f}", f"{own['measured_over_floor']:.2f}"]
        for name, own in floor["operations"].items()
    ]
    step = floor["step"]
    return (
        f"\nThe floor, at {floor['bytes_per_s'] / 1e9:.1f} GB/s (float32 copy, read and written) and "
        f"{floor['exps_per_s'] / 1e6:.0f}M exponentials/s:\n\n"
        f"{make_table(['compiled', 'bytes per weight', 'exps', 'floor, ns', 'measured / floor'], table)}\n\n"
        f"Two folds and the gradients of {step['weights'] / 1e6:.0f}M weights, once a step: at least "
        f"{step['floor_s']:.3f} s, measured {step['measured_s']:.3f} s, with the residual of rank 8 "
        f"{step['measured_with_residual_s']:.3f} s. The two casts that full fine-tuning does in their place take at "
        f"least {step['full_fine_tuning_floor_s']:.3f} s.\n"
    )


def render_kernels(result: Result) -> str:
    """Render the kernels that gpu.py measured."""
    settings = result["settings"]
    times, agreement = [], []
    for name, row in result["rows"].items():
        missing = row.get("skipped") or row.get("error")
        if missing:
            times.append([name, missing, "", ""])
        elif "quartiles_s" in row:
            microseconds = [value * 1e6 for value in row["quartiles_s"]]
            share = f"{row['share_of_copy']:.0%}"
            times.append([name, format_ratio(microseconds), f"{row['bytes_per_s'] / 1e9:.0f}", share])
        else:
            differing = f"{row['differing_share']:.1e}, at most {row['largest_bf16_ulp']}"
            errors = [f"{row['raw_gradient_eps']:.1f}", f"{row['reduced_gradient_error']:.1e}"]
            agreement.append([name.removeprefix("agreement, "), differing, *errors])
    shape = "x".join(map(str, settings["shape"]))
    agreement_columns = [
        "backend",
        "bf16 weights unlike the reference's, ulp",
        "raw gradient, eps",
        "reduced, relative",
    ]
    return (
        f"### Kernels on a GPU, {shape}\n\n{describe(result)} {settings['repeats']} rounds. A float32 copy moves "
        f"{settings['copy_bytes_per_s'] / 1e9:.0f} GB/s.\n\n"
        f"{make_table(['operation', 'microseconds', 'GB/s', 'share of the copy'], times)}\n\n"
        f"Agreement, gradients with float64:\n\n{make_table(agreement_columns, agreement)}\n"
    )


def render_gpu_steps(result: Result) -> str:
    """Render the steps that gpu.py measured."""
    settings, table = result["settings"], []
    for name, row in result["rows"].items():
        missing = row.get("skipped") or row.get("error")
        if missing:
            table.append([name, missing, "", "", ""])
            continue
        memory = f"{row['memory_ratio']:.3f}" if "memory_ratio" in row else ""
        milliseconds = f"{row['quartiles_s'][1] * 1e3:.1f}"
        table.append([name, milliseconds, format_ratio(row.get("time_ratio")), format_gib(row["peak_bytes"]), memory])
    sizes = settings["sizes"]
    what = f"width {sizes['hidden_size']}, depth {sizes['num_hidden_layers']}, {settings['target_weights'] / 1e6:.0f}M"
    columns = ["method", "ms", "time / full", "GiB", "memory / full"]
    return (
        f"### Steps on a GPU: {what} weights trained, {settings['tokens']:,} tokens\n\n{describe(result)} "
        f"{settings['repeats']} steps each.\n\n{make_table(columns, table)}\n"
    )


KINDS: dict[str, Callable[[Result], str]] = {
    "steps": render_steps,
    "throughput": render_throughput,
    "gpu-kernels": render_kernels,
    "gpu-steps": render_gpu_steps,
}


def render_result(file: Path) -> str:
    """Render one result."""
    result = json.loads(file.read_text(encoding="utf-8"))
    return KINDS[result["kind"]](result)


def render(folder: Path) -> str:
    """Render all results in a folder: by kind, and within a kind by model, micro-batches and tokens."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]

    def order(result: Result) -> tuple[int, str, int, int]:
        settings = result["settings"]
        model = settings.get("model", settings.get("what", ""))
        return list(KINDS).index(result["kind"]), model, settings.get("accumulate", 1), settings.get("tokens", 0)

    return "\n".join([HEADER, *(KINDS[result["kind"]](result) for result in sorted(results, key=order))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=FOLDER / "README.md")
    args = parser.parse_args(arguments)
    args.out.write_text(render(args.results), encoding="utf-8")


if __name__ == "__main__":
    main()
