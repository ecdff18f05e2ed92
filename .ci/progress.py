"""Runs a command of the set-up behind one line that says how far it is: `.ci/progress.py COMMAND ...`, for make.

pip's own output would be hundreds of lines, and its quiet mode is silent for minutes. On a terminal the line is drawn
anew twice a second; elsewhere one is written every LOG_S seconds. What the command has to say is shown if it fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

INDENT = " " * 12
BAR = 24  # characters
DRAW_S, LOG_S = 0.5, 15.0
UNITS = {"B": 1, "bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?([^/\s]+) \(([\d.]+) (bytes|B|kB|MB|GB)\)")
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


def follow(lines: Iterable[str], progress: Progress) -> None:
    """Read pip's lines as they come."""
    for line in lines:
        progress.read(line)


def run(command: list[str]) -> int:
    """Run a command, show how far it is, and return its exit status."""
    started = shown = time.monotonic()
    draws = sys.stdout.isatty()
    with tempfile.TemporaryDirectory(prefix="peft-sel-setup-") as scratch, tempfile.TemporaryFile("w+") as errors:
        site = Path(command[0]).parent.parent / "lib" / "python" / "site-packages"
        progress = Progress(site, Path(scratch))
        environment = {**os.environ, "TMPDIR": scratch, "PYTHONUNBUFFERED": "1"}
        output = subprocess.PIPE if "pip" in command else errors
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True, env=environment)
        reader = threading.Thread(target=follow, args=(process.stdout or (), progress), daemon=True)
        reader.start()
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DRAW_S)
            now = time.monotonic()
            text = f"{INDENT}{progress.describe()}, {now - started:.0f} s"
            if draws:
                print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            elif now - shown >= LOG_S:
                print(text, flush=True)
                shown = now
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
        if draws:
            print("\r\033[K", end="", flush=True)
        if process.returncode != 0:
            errors.seek(0)
            sys.stderr.write(errors.read())
    return process.returncode


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # the command has it too
        sys.exit(130)
