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
    "full": ("full fine-tuning", "full"),
    "full-all": ("full fine-tuning, embeddings and norms too", None),
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
    "gentle": "SEL, mismatch, beta 15, multipliers 1",
    "paper": "SEL, mismatch, multipliers 50 → 8",
    "paper-1": "SEL, mismatch, multipliers 1",
    "congruent": "SEL, congruent, multipliers 50 → 8",
    "congruent-1": "SEL, congruent, multipliers 1",
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
    times = [f"{tokens:,}" for tokens in SPEED_TOKENS]
    header = ["", "trained", "loss", "minus full", "English text", "time, " + " and ".join(times), "memory"]
    rows = []
    for found in summaries:
        words, measured = PRETRAINED[found.arm]
        trained = next(iter(found.runs.values()))["trained_parameters"]
        ratios = [[rows_of[measured][key] for rows_of in speed] for key in ("time_ratio", "memory_ratio") if measured]
        rows.append(
            [
                words,
                f"{trained / 1e6:.1f}M",
                _average(found, "text"),
                "" if found.is_baseline else render_interval(found.compare()),
                _average(found, "known"),
                *([" and ".join(f"{median['full'][1]:.2f}" for median in ratios[0])] if measured else [""]),
                *([" and ".join(f"{ratio['full']:.2f}" for ratio in ratios[1])] if measured else [""]),
            ]
        )
    return render_table(header, rows)


def render_scratch(summaries: Sequence[Summary]) -> str:
    """Return the table of methods from scratch.

    Args:
        summaries: Of the plan scratch256, the best first.
    """
    header = ["", "loss", "minus AdamW", "said of it", "step ratio"]
    rows = []
    for found in summaries:
        difference = found.compare()
        if found.arm in SCRATCH and difference is not None:
            rows.append(
                [
                    SCRATCH[found.arm],
                    _average(found, "text"),
                    "" if found.is_baseline else render_interval(difference),
                    "baseline" if found.is_baseline else difference.verdict,
                    render_ratios([ratio for _, ratio in sorted(found.find_step_ratios().items())]),
                ]
            )
    return render_table(header, rows)


def _average(found: Summary, text: str) -> str:
    return f"{statistics.fmean(read_losses(found.runs, text).values()):.3f}"


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
