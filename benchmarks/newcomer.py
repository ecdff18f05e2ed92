"""A new user's path, from clone to merged real checkpoints: `python -m benchmarks.newcomer`.

Clones this repository's last commit into a temporary folder and runs README's commands there, each in a terminal of its
own (a pseudo-terminal, since bars and warnings differ without one), with an empty home: no caches, of pip neither. For
each command it records the seconds, the longest time without a byte of output, every such silence of more than 10
seconds with the line that was on the screen (and whether that was a bar), and every line that speaks of a warning or an
error. What it costs in seconds depends on the network too: the set-up downloads what constraints.txt names.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.speed.record import describe_environment, render_json

ROOT = Path(__file__).parent.parent
LIMIT_S = 10.0
RECIPE = "configs/smollm2_two_cores.yaml"
BASE = ".cache/peft_sel/smollm2-135m-instruct"  # in the home: the demo leaves it there
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Za-z0-9]")
ERASE = re.compile(r"\x1b\[[0-2]?K")
WARNING = re.compile(r"warn|deprecat|error|critical|traceback|exception|failed|could not|cannot", re.IGNORECASE)
BAR = re.compile(r"[█-▏━#]{2}|\[[=#. >-]{5,}\]|\d%\|")
Chunk = tuple[float, bytes]  # seconds since the command's start, and what came then


@dataclass(frozen=True)
class Silence:
    """A time without output: how long, what the last line on the screen was, and whether that was a bar."""

    seconds: float
    screen: str
    is_bar: bool


@dataclass(frozen=True)
class Figures:
    """What a command did."""

    command: str
    status: int
    seconds: float
    longest_silence_s: float
    silences: list[Silence]
    warnings: list[str]
    lines: int


def draw_line(output: str) -> str:
    """Return what a terminal shows of a line that may have been drawn over, or erased, since."""
    shown = ""
    for drawn in output.split("\r"):
        column = 0
        for number, part in enumerate(CONTROL.sub("", part) for part in ERASE.split(drawn)):
            kept = "" if number else shown[column + len(part) :]
            shown, column = shown[:column] + part + kept, column + len(part)
    return shown.rstrip()


def read_screen(output: bytes) -> list[str]:
    """Return the lines that output leaves on a screen, without those that are empty."""
    lines = map(draw_line, output.decode("utf-8", "replace").replace("\r\n", "\n").split("\n"))
    return [line for line in lines if line]


def find_silences(chunks: list[Chunk], seconds: float) -> list[Silence]:
    """Return all times between outputs, and before the first and after the last one; the longest come first."""
    times = [0.0, *(time for time, _ in chunks), seconds]
    gaps = sorted(((after - before, n) for n, (before, after) in enumerate(itertools.pairwise(times))))
    silences = []
    for gap, count in reversed(gaps):
        last = ["", *read_screen(b"".join(part for _, part in chunks[:count]))][-1]
        silences.append(Silence(round(gap, 2), last.strip(), BAR.search(last) is not None))
        if gap <= LIMIT_S:
            break
    return silences


def find_warnings(output: bytes) -> list[str]:
    """Return the lines that speak of a warning or an error, those of redrawn lines too."""
    text = CONTROL.sub("", output.decode("utf-8", "replace"))
    return [line.strip() for line in re.split(r"[\r\n]+", text) if WARNING.search(line)]


def summarise(command: str, status: int, seconds: float, chunks: list[Chunk]) -> Figures:
    """Return the figures of a command from what it wrote, and when."""
    output = b"".join(part for _, part in chunks)
    silences = find_silences(chunks, seconds)
    long = [silence for silence in silences if silence.seconds > LIMIT_S]
    lines = len(read_screen(output))
    return Figures(command, status, round(seconds, 1), silences[0].seconds, long, find_warnings(output), lines)


def run_in_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> Figures:
    """Run a command in a terminal of 120 columns, show what it writes, and return its figures."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    started, chunks = time.perf_counter(), []
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    while True:
        if not select.select([ours], [], [], 0.5)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last process that had the terminal has ended
            break
        if not part:
            break
        chunks.append((time.perf_counter() - started, part))
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    status = process.wait()
    os.close(ours)
    return summarise(shlex.join(command), status, time.perf_counter() - started, chunks)


def walk(folder: Path, overrides: list[str]) -> list[Figures]:
    """Go the path in a folder; a command that fails is the last one."""
    home, clone = folder / "home", folder / "peft_sel"
    home.mkdir()
    dropped = {"XDG_CACHE_HOME", "PIP_CACHE_DIR", "HF_HOME", "VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    config = Path.home() / ".config" / "pip" / "pip.conf"  # says where this machine gets packages from
    if config.is_file():
        environment.setdefault("PIP_CONFIG_FILE", str(config))
    environment |= {"HOME": str(home), "TERM": "xterm-256color"}
    sets = [part for override in overrides for part in ("--set", override)]
    adapter = f"runs/{Path(RECIPE).stem}/adapter"
    commands = [
        ["git", "clone", str(ROOT), str(clone)],
        ["make", "demo"],
        [".venv/bin/peft-sel", "train", RECIPE, *sets],
        [".venv/bin/peft-sel", "merge", str(home / BASE), adapter, "runs/merged"],
    ]
    figures: list[Figures] = []
    for command in commands:
        print(f"$ {shlex.join(command)}", flush=True)
        done = run_in_terminal(command, clone if clone.exists() else folder, environment)
        figures.append(replace(done, command=done.command.replace(str(home), "~").replace(f"{ROOT} {clone}", "URL")))
        if figures[-1].status != 0:
            break
    return figures


def render(figures: list[Figures]) -> str:
    """Return the figures as a table, with what was silent and what was warned of below it."""
    heads = ("seconds", "longest silence", f"silences > {LIMIT_S:.0f} s", "without a bar", "warnings", "lines")
    lines = [f"| command | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for one in figures:
        bare = sum(not silence.is_bar for silence in one.silences)
        cells = (one.seconds, one.longest_silence_s, len(one.silences), bare, len(one.warnings), one.lines)
        lines.append(f"| `{one.command}`{' FAILED' * (one.status != 0)} | {' | '.join(map(str, cells))} |")
    lines += [f"silent for {s.seconds} s after: {s.screen}" for one in figures for s in one.silences]
    return "\n".join(lines + [f"warning: {line}" for one in figures for line in one.warnings])


def make_result(figures: list[Figures], overrides: list[str]) -> dict[str, Any]:
    """Return what is written as JSON."""
    silences = [silence for one in figures for silence in one.silences]
    totals = {
        "commands": len(figures) + 1,  # cd is the other one
        "commands_to_first_merged": 3,  # git clone, cd, make demo
        "seconds": round(sum(one.seconds for one in figures), 1),
        "seconds_to_first_merged": round(sum(one.seconds for one in figures[:2]), 1),
        "silences_over_10_s": len(silences),
        "of_these_without_a_bar": sum(not silence.is_bar for silence in silences),
        "warnings": sum(len(one.warnings) for one in figures),
    }
    return {"overrides": overrides, "totals": totals, "commands": [asdict(one) for one in figures]}


def main(arguments: list[str] | None = None) -> int:
    """Go the path, print the table, write JSON; 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="of the recipe, for a try-out")
    parser.add_argument("--folder", type=Path, help="where to make the clone: 3 GB, 8 GB with torch for a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "newcomer.json")
    args = parser.parse_args(arguments)
    environment = describe_environment()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="newcomer-") as folder:
        figures = walk(Path(folder), args.overrides)
    print(render(figures))
    result = {"environment": environment, **make_result(figures, args.overrides)}
    args.out.write_text(render_json(result, digits=5, inline=r"\[[^][{}\"]*\]"), encoding="utf-8")
    return int(figures[-1].status != 0)


if __name__ == "__main__":
    sys.exit(main())
