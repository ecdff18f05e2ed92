"""`peft-sel train` in launched processes, for tests/test_jobs.py: the command, and what each process did at its end.

    launch("tests/job_worker.py", FOLDER, FAILS, "train", RECIPE)   # writes FOLDER/end_RANK.json

The merge takes a second here, unless it finds another process gone. FAILS is "merge" (of process 0), "load" (process 1
does not get its model), or "never".
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from peft_sel import jobs


def fail() -> None:
    """Fail as a full disk does."""
    raise OSError("no space")


def main(folder: Path, fails: str) -> None:
    """Run the command line that follows the two, and write down how it ended."""
    merge, load = jobs.merge_checkpoint, jobs.load_model
    end: dict[str, Any] = {"others_left_in_merge": []}

    def merge_slowly(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and not list(folder.glob("end_*.json")):
            time.sleep(0.05)
        end["others_left_in_merge"] = sorted(path.name for path in folder.glob("end_*.json"))
        return merge(*args, **kwargs) if fails != "merge" else fail()

    def load_in_one(*args: Any) -> Any:
        return load(*args) if fails != "load" or os.environ["RANK"] == "0" else fail()

    jobs.merge_checkpoint, jobs.load_model = merge_slowly, load_in_one
    sys.argv = ["peft-sel", *sys.argv[3:]]
    try:
        runpy.run_module("peft_sel.cli", run_name="__main__")
    finally:
        end["has_group"] = torch.distributed.is_initialized()
        (folder / f"end_{os.environ['RANK']}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
