"""Damaged checkpoints and adapters: each is merged and inspected, or refused in one line; nothing else may happen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import Fuzzer, Outcome

from peft_sel import SELError


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_damaged_files(fuzzer: Fuzzer) -> None:
    outcome = Outcome()
    fuzzer.run(range(250), outcome)
    assert not outcome.findings, "\n".join(outcome.findings)
    ways = ("merge succeeds", "merge refused", "inspect succeeds", "inspect refused", "load succeeds", "load refused")
    assert all(outcome.counts.get(way, 0) >= 3 for way in ways), outcome.counts


def crash(out: Path) -> None:
    raise KeyError("raw")


def stray(out: Path) -> None:
    (out.parents[1] / "stray").touch()
    raise SELError("refused")


def leave_something(out: Path) -> None:
    (out.parent / ".out.unfinished").mkdir()
    raise SELError("refused")


def write_half(out: Path) -> None:
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"")


def write_nothing(out: Path) -> None:
    pass


def sleep(out: Path) -> None:
    time.sleep(60)


class Rude(SELError):
    def __str__(self) -> str:
        return "\x1b[2J"


def speak_in_codes(out: Path) -> None:
    raise Rude("")


@pytest.mark.parametrize(
    ("behaviour", "match"),
    [
        (crash, "KeyError"),
        (stray, "changed files.*stray"),
        (leave_something, "changed files.*unfinished"),
        (write_half, "CheckpointError"),
        (write_nothing, "CheckpointError"),
        (sleep, "hangs"),
        (speak_in_codes, "unreadable message"),
    ],
)
def test_the_watch_sees_it(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, behaviour: Callable[[Path], None], match: str
) -> None:
    monkeypatch.setattr("fuzz.merge_checkpoint", lambda base, adapter, out, **_: behaviour(out))
    monkeypatch.setattr("fuzz.CASE_SECONDS", 1.0)
    monkeypatch.setattr("fuzz.inspect_checkpoint", lambda *_, **__: [])
    outcome = Outcome()
    fuzzer.run(range(1), outcome)
    assert outcome.findings and re.search(match, outcome.findings[0], re.DOTALL)


@pytest.mark.slow
def test_ten_thousand_damaged_files_in_processes_of_their_own(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz.py")
    path = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", script, "--count", "10000"]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "10000 cases, 0 findings" in run.stdout
