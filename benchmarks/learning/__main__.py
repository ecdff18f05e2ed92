"""Does SEL learn better? `python -m benchmarks.learning` trains what the plans still miss, and writes the report.

Runs are processes of one thread each. What is finished is in results/, and is not run again: stop and start at will.

Examples:
    python -m benchmarks.learning                          # everything that is missing, two runs at a time
    python -m benchmarks.learning --plans german --list    # what one plan still misses
    python -m benchmarks.learning --run german sel 0.0004 0 --out /tmp/again   # one run once more
    python -m benchmarks.learning --report                 # the report alone
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from .plan import ORDER, RESULTS, Plan, Run, list_missing, load_plans, read_results
from .products import products_in_float32
from .report import write_report
from .trial import load_texts, train, write_result


def start(run: Run, out: Path, threads: int) -> subprocess.Popen[bytes]:
    """Start a run as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.learning", "--out", str(out)]
    command += ["--run", run.plan, run.arm, str(run.rate), str(run.seed)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)})


def list_chosen(plans: dict[str, Plan], chosen: Sequence[str], out: Path) -> list[Run]:
    """Return the runs of some plans that could start now."""
    return [run for run in list_missing(plans, read_results(out)) if run.plan in chosen]


def run_missing(plans: dict[str, Plan], chosen: Sequence[str], out: Path, workers: int) -> None:
    """Run what is missing of some plans; after one that fails no other is started."""
    for name in chosen:
        load_texts(plans[name].setting)  # fills the cache before several processes need it
    running: dict[Run, subprocess.Popen[bytes]] = {}
    while True:
        waiting = [run for run in list_chosen(plans, chosen, out) if run not in running]
        if not waiting and not running:
            return
        for run in waiting[: workers - len(running)]:
            running[run] = start(run, out, max(1, (os.cpu_count() or 1) // workers))
        while all(process.poll() is None for process in running.values()):
            time.sleep(1)
        for run, process in list(running.items()):
            if process.poll() is not None:
                del running[run]
                if process.returncode:
                    for other in running.values():
                        other.wait()
                    sys.exit(f"{run} failed with exit status {process.returncode}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the runs that could start now")
    parser.add_argument(
        "--report", action="store_true", help="write the report from the results there are, run nothing"
    )
    parser.add_argument("--run", nargs=4, metavar=("PLAN", "ARM", "RATE", "SEED"), help="one run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(arguments)
    plans = load_plans()
    if args.run:
        name, arm, rate, seed = args.run
        if name not in plans or arm not in plans[name].arms:
            parser.error(f"--run {name} {arm}: there is no such arm")
        run = Run(name, arm, float(rate), int(seed))
        if (args.out / run.file).exists():
            parser.error(f"{args.out / run.file} exists, and a result stays as it is; name another folder with --out")
        lacks_bf16 = torch.backends.cpu.get_cpu_capability() == "AVX2"
        with products_in_float32() if lacks_bf16 else nullcontext():
            result = train(plans[name], run)
        write_result(args.out / run.file, result)
        print(run.file, result["final"], f"{result['seconds']:.0f} s", flush=True)
        return
    if args.list:
        print(*(run.file for run in list_chosen(plans, args.plans, args.out)), sep="\n")
        return
    if not args.report:
        run_missing(plans, args.plans, args.out, args.workers)
    if args.out == RESULTS:
        write_report(plans, read_results())


if __name__ == "__main__":
    main()
