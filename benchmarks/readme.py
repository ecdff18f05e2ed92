"""The tables of README's "Results", made from the JSON files here: `python -m benchmarks.readme` writes them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .learning.analysis import Summary, read_losses, summarize
from .learning.plan import load_plans, read_results
from .learning.report import render_interval, render_ratios, render_table

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
SPEED_TOKENS = (512, 2048)  # of a step
PRETRAINED = {  # arm of the plan german: what it is in words, and its name in speed/, if measured there
    "full": ("full fine-tuning of the same layers", "full"),
    "full-all": ("full fine-tuning of everything", None),
    "sel": ("SEL", "sel-keep"),
    "sel-small": ("SEL, `train_raw=False`", "sel-scales"),
    "sel-scales": ("SEL, `train_raw=False, r=0`", None),
    "relative": ("Adam, steps affine in abs(w)", None),
    "power": ("Powerpropagation", None),
    "lora": ("LoRA, r=32", "lora"),
    "rslora": ("rsLoRA, r=64", None),
    "dora": ("DoRA, r=32", None),
    "hira": ("HiRA, r=32", None),
    "osf": ("OSF", None),
}
SCRATCH = {  # arm of the plan scratch256: what it is in words
    "adamw": "AdamW on plain weights",
    "paper": "SEL as in the paper",
    "paper-5": "the paper's, multipliers 5 → 0.8",
    "paper-1": "the paper's, multipliers 1",
    "gentle": "the paper's, multipliers 1, beta 15, no offset",
    "width-rule": "the paper's, beta by the width",
    "fixed-multipliers": "the paper's, multipliers not annealed",
    "table6": "the paper's, its Table 6's best",
    "congruent": "SEL, congruent",
    "congruent-1": "SEL, congruent, multipliers 1, no offset",
    "exp-only": "SEL, exp_only",
    "relative": "Adam, steps affine in abs(w)",
    "power": "Powerpropagation",
}


def render_pretrained(summaries: Sequence[Summary], speed: Sequence[dict[str, Any]]) -> str:
    """Return the table of methods on the real checkpoint.

    Args:
        summaries: Of the plan german, the best first.
        speed: Rows of speed/results by method, one mapping for each of SPEED_TOKENS.
    """
    header = ["", "trained", "rate", "loss", "minus full", "step ratio", "English text", "time", "memory"]
    rows = []
    for found in summaries:
        words, measured = PRETRAINED[found.arm]
        trained = next(iter(found.runs.values()))["trained_parameters"]
        row = [words, f"{trained / 1e6:.1f}M", *_render_losses(found), f"{_average(found, 'known'):.3f}", "", ""]
        if measured is not None:
            row[-2] = ", ".join(f"{rows_of[measured]['time_ratio']['full'][1]:.2f}" for rows_of in speed)
            row[-1] = ", ".join(f"{rows_of[measured]['memory_ratio']['full']:.2f}" for rows_of in speed)
        rows.append(row)
    return render_table(header, rows)


def render_scratch(summaries: Sequence[Summary]) -> str:
    """Return the table of methods from scratch.

    Args:
        summaries: Of the plan scratch256, the best first.
    """
    header = ["", "rate", "loss", "minus AdamW", "step ratio"]
    return render_table(header, [[SCRATCH[found.arm], *_render_losses(found)] for found in summaries])


def _render_losses(found: Summary) -> list[str]:
    """Return rate, loss, and difference and step ratio to the baseline of an arm."""
    cells = [f"{found.rate:.1g}", f"{_average(found, 'text'):.3f}"]
    if found.is_baseline:
        return [*cells, "", ""]
    ratios = [ratio for _, ratio in sorted(found.find_step_ratios().items())]
    return [*cells, render_interval(found.compare()), render_ratios(ratios)]


def _average(found: Summary, text: str) -> float:
    losses = read_losses(found.runs, text)
    return statistics.fmean(losses[seed] for seed in found.runs.keys() & found.base.keys())


def make_tables() -> dict[str, str]:
    """Return README's tables by the name of their mark."""
    plans, results = load_plans(), read_results()
    files = [FOLDER / "speed" / "results" / f"steps-real-{tokens}.json" for tokens in SPEED_TOKENS]
    speed = [json.loads(file.read_text(encoding="utf-8"))["rows"] for file in files]
    return {
        "pretrained": render_pretrained(summarize(plans, results, plans["german"]), speed),
        "scratch": render_scratch(summarize(plans, results, plans["scratch256"])),
    }


def fill_in(text: str, tables: dict[str, str]) -> str:
    """Return a text with each table below its mark, a comment that names it, in place of the one there."""
    for name, table in tables.items():
        before, mark, after = text.partition(f"<!-- results: {name} -->\n\n")
        if not mark:
            raise ValueError(f"{README} has no line <!-- results: {name} --> with an empty line after it")
        text = before + mark + table + "\n\n" + re.sub(r"\A(\|.*\n)*", "", after).lstrip("\n")
    return text


def main() -> None:
    """Write the tables into README."""
    README.write_text(fill_in(README.read_text(encoding="utf-8"), make_tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
