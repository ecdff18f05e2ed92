"""benchmarks/newcomer.py: what it makes of a command's output, and of a command in a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", exc_type=ImportError)

from benchmarks import newcomer

CHUNKS = [
    (1.0, b"\x1b[1mSetting up\x1b[0m\r\n"),
    (2.0, b"\r  0%|          | 0/5"),
    (15.0, b"\r 20%|##        | 1/5"),
    (16.0, b"\r                    \r"),  # as tqdm takes a bar away
    (17.0, b"[####......] installing"),
    (28.5, b"\r\x1b[K"),  # as we do
    (41.0, b"UserWarning: old\rdone            \r\nmodel.py:3: FutureWarning: `x` is deprecated\r\n"),
    (44.0, b"all is well\r\n"),
]


def test_silences_with_what_was_on_the_screen() -> None:
    figures = newcomer.summarise("make demo", 0, 60.0, CHUNKS)
    found = [(silence.seconds, silence.screen, silence.is_bar) for silence in figures.silences]
    assert found == [
        (16.0, "all is well", False),
        (13.0, "0%|          | 0/5", True),
        (12.5, "Setting up", False),
        (11.5, "[####......] installing", True),
    ]
    assert (figures.longest_silence_s, figures.seconds, figures.lines) == (16.0, 60.0, 4)
    assert newcomer.summarise("true", 0, 9.0, []).silences == []
    assert newcomer.summarise("true", 0, 11.0, []).silences == [newcomer.Silence(11.0, "", False)]


def test_every_line_that_warns_also_one_drawn_over() -> None:
    assert newcomer.find_warnings(b"".join(part for _, part in CHUNKS)) == [
        "UserWarning: old",
        "model.py:3: FutureWarning: `x` is deprecated",
    ]


def test_a_command_has_a_terminal_and_its_figures_are_counted(tmp_path: Path) -> None:
    program = "import os, sys, warnings; warnings.warn('beware'); print(os.isatty(1), os.isatty(2)); sys.exit(3)"
    figures = newcomer.run_in_terminal([sys.executable, "-S", "-c", program], tmp_path, dict(os.environ))
    assert figures.status == 3 and figures.silences == [] and figures.lines == 2
    assert figures.warnings == ["<string>:1: UserWarning: beware"]
    totals = newcomer.make_result([figures, newcomer.summarise("make demo", 0, 60.0, CHUNKS)], ["a=1"])["totals"]
    assert (totals["silences_over_10_s"], totals["of_these_without_a_bar"], totals["warnings"]) == (4, 2, 3)
    table = newcomer.render([figures]).splitlines()
    assert len(table) == 4 and "FAILED | " in table[2] and table[3] == "warning: <string>:1: UserWarning: beware"


def test_the_recipe_and_the_base_are_where_it_looks_for_them() -> None:
    recipe = (newcomer.ROOT / newcomer.RECIPE).read_text(encoding="utf-8")
    assert f"path: ~/{newcomer.BASE}\n" in recipe
