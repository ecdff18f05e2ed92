""".ci/progress.py: what make's set-up shows while pip works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import progress
import pytest

PIP = """
import sys, time
print("Collecting a==1"); print("  Downloading a-1-py3-none-any.whl.metadata (12 kB)"); print("Collecting b")
time.sleep(0.4)
print("WARNING: who cares", file=sys.stderr)
sys.exit("ERROR: no b" if "fail" in sys.argv else 0)
"""


def test_bars_of_downloads_and_installed_packages(tmp_path: Path) -> None:
    site, scratch = tmp_path / "lib" / "python" / "site-packages", tmp_path / "scratch"
    real = tmp_path / "lib" / "python3.11" / "site-packages"
    (real / "pip-23.dist-info").mkdir(parents=True)
    (scratch / "pip-unpack-x").mkdir(parents=True)
    watched = progress.Progress(site, scratch)
    assert watched.describe() == "working"
    for line in ("Collecting torch==2.13.0", "  Downloading torch-2.13.0.whl.metadata (30 kB)"):
        watched.read(line)
    assert watched.describe() == "packages found: 1"
    watched.read("Downloading torch-2.13.0-cp311.whl (2.0 MB)")
    (scratch / "pip-unpack-x" / "torch-2.13.0-cp311.whl").write_bytes(bytes(500_000))
    assert watched.describe() == f"[{'#' * 6}{'.' * 18}] downloading torch, 0 of 2 MB"
    watched.read("Installing collected packages: mpmath, sympy, torch, jinja2")
    for name in ("mpmath-1", "sympy-1", "torch-2.13.0"):
        (real / f"{name}.dist-info").mkdir()
    assert watched.describe() == f"[{'#' * 18}{'.' * 6}] installing, 3 of 4 packages"


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_gets_few_lines_and_of_a_failure_the_reason(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    status = progress.run([sys.executable, "-S", "-c", PIP, "pip", *["fail"] * fails])
    shown = capfd.readouterr()
    assert status == fails and shown.out == ""
    assert shown.err == ("WARNING: who cares\nERROR: no b\n" if fails else "")


def test_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "DRAW_S", 0.05)
    monkeypatch.setattr(progress, "LOG_S", 0.2)
    progress.run([sys.executable, "-S", "-u", "-c", PIP, "pip"])
    lines = capfd.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 5 and all(line.startswith(progress.INDENT) for line in lines)
    assert lines[-1] == f"{progress.INDENT}packages found: 2, 0 s"


def test_a_command_that_is_not_pip(capfd: pytest.CaptureFixture[str]) -> None:
    file = str(Path(progress.__file__))
    done = subprocess.run([sys.executable, file, sys.executable, "-S", "-c", "print('no ensurepip'); exit(1)"])
    assert done.returncode == 1 and "no ensurepip" in capfd.readouterr().err
