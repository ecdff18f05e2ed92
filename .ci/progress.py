"""Runs a command of the set-up behind one line that says how far it is: `.ci/progress.py COMMAND ...`, for make.

pip's own output would be hundreds of lines, and its quiet mode is silent for minutes. On a terminal the line is drawn
anew twice a second; elsewhere one is written every LOG_S seconds. What the command has to say is shown if it fails, and
an error of a pip that goes on in any case.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

INDENT = " " * 12
BAR = 24  # characters
DRAW_S, LOG_S = 0.5, 15.0
NUM_LAST_LINES = 50  # of its output, shown after a failure
UNITS = {"B": 1, "bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?([^/\s]+) \((\d+(?:\.\d+)?) (bytes|B|kB|MB|GB)\)")
INSTALL = "Installing collected packages: "


class Progress:
    """How far pip is, by the lines that it writes and the files that appear.

    Args:
        site: Pattern of the folders that packages are installed into.
        scratch: Its folder for temporary files, which holds what is being downloaded.
    """

    def __init__(self, site: Path, scratch: Path) -> None:
        self.site, self.scratch = site, scratch
        self.before = self._list_installed()
        self.num_found = self.num_installing = 0
        self.file, self.file_bytes = "", 0.0

    def _list_installed(self) -> set[Path]:
        return set(self.site.parent.parent.glob(f"*/{self.site.name}/*.dist-info"))

    def read(self, line: str) -> None:
        """Take a line of pip's into account."""
        if line.startswith(("Collecting ", "Processing ", "Obtaining ")):
            self.num_found, self.file = self.num_found + 1, ""
        elif found := DOWNLOAD.match(line):
            self.file, self.file_bytes = found[1], float(found[2]) * UNITS[found[3]]
        elif line.startswith(INSTALL):
            self.num_installing = len(line.removeprefix(INSTALL).split(","))

    def describe(self) -> str:
        """Return a few words, with a bar where the end is known."""
        if self.num_installing:
            done = min(len(self._list_installed() - self.before), self.num_installing)
            return f"{draw_bar(done / self.num_installing)} installing, {done} of {self.num_installing} packages"
        if self.file and self.file_bytes >= 1e6:
            sizes = [path.stat().st_size for path in self.scratch.glob(f"pip-*/{self.file}")]
            name = self.file.split("-")[0]
            share = min(max(sizes, default=0) / self.file_bytes, 1.0)
            return f"{draw_bar(share)} downloading {name}, {share * self.file_bytes / 1e6:.0f} of " + (
                f"{self.file_bytes / 1e6:.0f} MB"
            )
        return f"packages found: {self.num_found}" if self.num_found else "working"


def draw_bar(share: float) -> str:
    """Return a bar of characters that every terminal has."""
    filled = round(share * BAR)
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"


def watch(process: subprocess.Popen[bytes], output: TextIO, progress: Progress) -> None:
    """Show how far a process is until it ends."""
    started = shown = time.monotonic()
    draws, unfinished = sys.stdout.isatty(), ""
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DRAW_S)
        *lines, unfinished = (unfinished + output.read()).split("\n")
        for line in lines:
            progress.read(line)
        now = time.monotonic()
        text = f"{INDENT}{progress.describe()}, {now - started:.0f} s"
        if draws:
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif now - shown >= LOG_S:
            print(text, flush=True)
            shown = now
    if draws:
        print("\r\033[K", end="", flush=True)


def run(command: list[str]) -> int:
    """Run a command, show how far it is, and return its exit status, below zero for the signal that ended it."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="peft-sel-setup-", ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(folder))
        # Files, not pipes: nothing waits for who reads them, nor for a process that the command has left behind.
        output, errors = (stack.enter_context((scratch / name).open("w+b")) for name in ("output", "errors"))
        shown = stack.enter_context((scratch / "output").open(errors="backslashreplace"))
        environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
        progress = Progress(Path(command[0]).parent.parent / "lib" / "python" / "site-packages", scratch)
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: process.terminate()))
        try:
            watch(process, shown, progress)
        except KeyboardInterrupt:  # the command has it too, and puts its house in order
            process.wait()
            raise
        said = (scratch / "errors").read_text(errors="backslashreplace")
        if process.returncode != 0:
            lines = (scratch / "output").read_text(errors="backslashreplace").splitlines(keepends=True)
            sys.stderr.write("".join(lines[-NUM_LAST_LINES:]) + said)
        elif error := re.search("^ERROR", said, re.MULTILINE):
            sys.stderr.write(said[error.start() :])
        if process.returncode < 0:
            number = -process.returncode
            sys.stderr.write(f"{command[0]} was ended by signal {number}: {signal.strsignal(number)}\n")
    return process.returncode


if __name__ == "__main__":
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = -signal.SIGINT
    if status in (-signal.SIGINT, -signal.SIGTERM):  # an exit would tell a shell that this was dealt with
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)
