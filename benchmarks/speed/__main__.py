"""All measurements that this machine can make, one process after another, and their page: `make bench`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import report
import torch
from record import FOLDER, RESULTS

# 8,192 tokens take 14 GiB in a step, and every method besides holds its weights and its optimizer's state.
LONG_METHODS = ["full", "sel-drop", "sel-keep", "lora", "sel-scales"]
WIDE_METHODS = ["full", "sel-drop", "sel-scales", "lora"]
GROWTH = ["--model", "wide", "--tokens", "512", "--methods", "full", "sel-drop"]
BASES = ["--base", "full", "lora"]
PLAN = {
    "throughput": [["throughput.py", "--threads", "1", "2"]],
    "steps": [
        ["steps.py", "--tokens", "512", "2048", *BASES],
        ["steps.py", "--tokens", "8192", "--methods", *LONG_METHODS, *BASES],
    ],
    "accumulation": [["steps.py", "--tokens", "1024", "--accumulate", "8"]],
    "wide": [["steps.py", "--model", "wide", "--tokens", "512", "2048", "--methods", *WIDE_METHODS, *BASES]],
    "growth": [
        ["steps.py", *GROWTH, "--hidden", "512", "1024"],
        ["steps.py", *GROWTH, "--hidden", "512", "--layers", "6", "12"],
    ],
    "gpu": [["gpu.py"]],
}
SMOKE = {  # the same scripts, in a minute or two, for tests
    "throughput": [["throughput.py", "--threads", "1", "--shape", "80", "96", "--model", "wide"]],
    "steps": [["steps.py", "--model", "wide", "--tokens", "32", "--methods", "full", "sel-drop"]],
    "accumulation": [["steps.py", "--model", "wide", "--tokens", "8", "--accumulate", "2", "--methods", "full"]],
    "gpu": [["gpu.py", "--dry-run", "--stages", "kernels"]],
}
SMOKE_SIZES = ["--hidden", "64", "--layers", "1", "--repeats", "2"]


def list_commands(parts: Sequence[str], smoke: bool, out: Path) -> list[list[str]]:
    """Return the command lines of some parts, each without the interpreter.

    Args:
        parts: Names in PLAN.
        smoke: Whether tiny sizes are enough.
        out: Folder of the results.

    Returns:
        Script and arguments; those of a GPU only where there is one, or in a smoke run.
    """
    plan = SMOKE if smoke else PLAN
    commands = [
        command
        for part in parts
        for command in plan.get(part, [])
        if smoke or part != "gpu" or torch.cuda.is_available()
    ]
    sizes = {command[0]: SMOKE_SIZES if smoke and command[0] != "gpu.py" else [] for command in commands}
    return [[str(FOLDER / command[0]), *command[1:], *sizes[command[0]], "--out", str(out)] for command in commands]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the commands; the page is written from whatever results there are, also if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PLAN, default=list(PLAN))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    args = parser.parse_args(arguments)
    if args.smoke and args.out == RESULTS:
        parser.error("--smoke would write its figures over the real ones: name a folder with --out")
    failed = []
    for command in list_commands(args.parts, args.smoke, args.out):
        print("$ python", *command, flush=True)
        if subprocess.call([sys.executable, *command]):
            failed.append(" ".join(command))
    page = args.out / "README.md" if args.smoke else FOLDER / "README.md"
    report.main(["--results", str(args.out), "--out", str(page)])
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
