""".ci/progress.py: what make's set-up shows while pip works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
    said = "Collecting a==1\n  Downloading a-1-py3-none-any.whl.metadata (12 kB)\nCollecting b\n"
    assert shown.err == (f"{said}WARNING: who cares\nERROR: no b\n" if fails else "")


def run_script(code: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start progress.py with a command of Python."""
    command = [sys.executable, "-S", progress.__file__, sys.executable, "-S", "-c", code, "pip"]
    return subprocess.Popen(command, **options)


def test_of_a_long_output_the_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert progress.run([sys.executable, "-S", "-c", "for i in range(99): print(i)\nraise SystemExit(3)"]) == 3
    assert capfd.readouterr().err.split() == [str(number) for number in range(49, 99)]


def test_an_error_of_a_command_that_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; sys.stderr.write('WARNING: no\\nERROR: conflicts.\\na requires b<2, but you have b 2\\n')"
    assert progress.run([sys.executable, "-S", "-c", code]) == 0
    assert capfd.readouterr().err == "ERROR: conflicts.\na requires b<2, but you have b 2\n"


def test_no_output_stops_a_command() -> None:
    """Bytes of no encoding, more than a pipe holds, a size that is no number, a process that is left behind."""
    code = """if True:
        import subprocess, sys
        sys.stdout.buffer.write(b"Processing /home/m\\xfc\\n" + 200_000 * b"x\\n")
        print("Downloading a-1.whl (1.2.3 MB)")
        sys.stderr.buffer.write(b"m\\xfc\\n")
        subprocess.Popen(["cat"])
        sys.exit(7)"""
    with run_script(code, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:  # stdin is open: cat goes on
        assert process.wait(60) == 7


def test_a_command_that_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with run_script("import os; os.kill(os.getpid(), 9)") as process:
        assert process.wait(60) == 128 + 9
    assert "was ended by signal 9: Killed" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_then_progress_by_the_same(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""if True:
        import os, pathlib, time
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(folder / "started")
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.3)
            (folder / "tidy").touch()
            raise SystemExit(1)"""
    (tmp_path / "scratch").mkdir()
    variables = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with run_script(code, env=variables, start_new_session=True) as process:
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(60) == -number
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)
    assert (tmp_path / "tidy").exists() is (number == signal.SIGINT)


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
    done = subprocess.run(
        [sys.executable, file, sys.executable, "-S", "-c", "print('no ensurepip'); raise SystemExit(1)"]
    )
    assert done.returncode == 1 and "no ensurepip" in capfd.readouterr().err
