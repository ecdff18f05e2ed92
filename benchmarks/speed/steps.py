"""What a training step costs beside its peers, in time and in memory.

Methods take turns, so that whatever else the machine does meets all of them; times are ratios to a base method in the
same round. Peak memory is that of a process of its own for each method.

Examples:
    python benchmarks/speed/steps.py --tokens 512 2048
    python benchmarks/speed/steps.py --tokens 8192 --methods full sel-drop lora sel-scales --base full lora
    python benchmarks/speed/steps.py --tokens 1024 --accumulate 8
    python benchmarks/speed/steps.py --model wide --hidden 512 1024 2048 --methods full sel-drop
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from methods import (
    ACCUMULATION_METHODS,
    CPU_METHODS,
    METHODS,
    ModelChoice,
    Step,
    count_target_weights,
    load_model,
    make_batches,
    make_step,
)
from record import RESULTS, describe_environment, write_result
from report import render_result
from timing import summarize, time_in_turns


class Load(NamedTuple):
    """What every method is given.

    Attributes:
        model: The model.
        tokens: Tokens in a micro-batch.
        accumulate: Micro-batches in an optimizer step.
    """

    model: ModelChoice
    tokens: int
    accumulate: int = 1

    @property
    def label(self) -> str:
        """Its name in files."""
        micro = f"-x{self.accumulate}" if self.accumulate > 1 else ""
        return f"steps-{self.model.label}-{self.tokens}{micro}"

    @property
    def arguments(self) -> list[str]:
        """The command line that describes it."""
        name, hidden, layers = map(str, self.model)
        sizes = ["--tokens", str(self.tokens), "--accumulate", str(self.accumulate)]
        return ["--model", name, "--hidden", hidden, "--layers", layers, *sizes]


class Memory(NamedTuple):
    """Resident memory of a process that trains with one method.

    Attributes:
        peak_bytes: At most.
        rest_bytes: Between steps, what it had before the model was loaded not counted.
    """

    peak_bytes: int
    rest_bytes: int


def prepare_step(method: str, choice: ModelChoice) -> Step:
    """Load the model, prepare it for a method and return its step."""
    model, optimizer = METHODS[method](load_model(choice))
    return make_step(method, model, optimizer)


def print_own_memory(method: str, load: Load) -> None:
    """Make two steps, the second with the optimizer's state in memory, and print this process's memory as JSON."""
    before = read_own_bytes("VmRSS")
    step, batches = prepare_step(method, load.model), make_batches(load.tokens, load.accumulate)
    step(batches)
    step(batches)
    gc.collect()
    print(json.dumps(Memory(read_own_bytes("VmHWM"), read_own_bytes("VmRSS") - before)._asdict()))


def read_own_bytes(field: str) -> int:
    """Return a size that Linux tells of this process."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def measure_memory(method: str, load: Load) -> Memory:
    """Let a process of its own make two steps with one method."""
    command = [sys.executable, __file__, "--memory-of", method, *load.arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Memory(**json.loads(output.splitlines()[-1]))


def check_memory(memory: dict[str, Memory], load: Load) -> None:
    """Refuse to time methods in one process whose models don't fit in it together."""
    rest = [own.rest_bytes for own in memory.values()]
    needed = max(own.peak_bytes - own.rest_bytes for own in memory.values()) + sum(rest)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # which also counts what the page cache gives back
        available = int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    if needed > available:
        raise SystemExit(
            f"{len(memory)} methods at {load.tokens} tokens need {needed / 2**30:.1f} GiB in one process and "
            f"{available / 2**30:.1f} GiB are free: name fewer in --methods"
        )


def measure(
    methods: Sequence[str], bases: Sequence[str], load: Load, repeats: int, with_memory: bool
) -> dict[str, Any]:
    """Measure methods side by side.

    Args:
        methods: Names in METHODS.
        bases: Those that the others are compared with.
        load: What they are given.
        repeats: Timed steps of each.
        with_memory: Whether peaks are measured too.

    Returns:
        A row per method.
    """
    memory = {method: measure_memory(method, load) for method in methods} if with_memory else {}
    if memory:
        check_memory(memory, load)
    batches = make_batches(load.tokens, load.accumulate)
    steps = {method: prepare_step(method, load.model) for method in methods}
    seconds = time_in_turns({method: lambda step=step: step(batches) for method, step in steps.items()}, repeats)
    return summarize(seconds, bases, {method: own.peak_bytes for method, own in memory.items()})


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["real", "wide"], default="real")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048], help="widths of the wide model")
    parser.add_argument("--layers", type=int, nargs="+", default=[3], help="depths of the wide model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in an optimizer step")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all, or those for --accumulate")
    parser.add_argument("--base", nargs="+", help="methods that the others are compared with; default: the first")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--memory-of", choices=METHODS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every combination of width, depth and tokens; write JSON and print a table for each."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    choices = [ModelChoice(args.model, hidden, layers) for hidden, layers in product(args.hidden, args.layers)]
    if args.memory_of:
        print_own_memory(args.memory_of, Load(choices[0], args.tokens[0], args.accumulate))
        return
    methods = args.methods or (ACCUMULATION_METHODS if args.accumulate > 1 else CPU_METHODS)
    bases = args.base or methods[:1]
    if not set(bases) <= set(methods):
        parser.error(f"--base {' '.join(bases)}: name it in --methods too")
    for choice, tokens in product(choices if args.model == "wide" else choices[:1], args.tokens):
        load = Load(choice, tokens, args.accumulate)
        environment = describe_environment()
        rows = measure(methods, bases, load, args.repeats, not args.no_memory)
        settings = {
            "model": choice.label,
            "target_weights": count_target_weights(load_model(choice)),
            "tokens": tokens,
            "accumulate": args.accumulate,
            "repeats": args.repeats,
            "bases": list(bases),
        }
        file = args.out / f"{load.label}.json"
        write_result(file, "steps", settings, rows, environment)
        print(render_result(file), flush=True)


if __name__ == "__main__":
    main()
