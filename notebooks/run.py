"""Runs the notebooks here from start to end: `make notebooks`. With --write it stores what they show."""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  makes its cache, of which the first notebook would speak
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image
from tqdm import tqdm
from traitlets.config import Config

FOLDER = Path(__file__).parent
TIMEOUT_S = 900  # of one cell, against hangs: a busy machine is no failure
COLOURS = 64  # of a stored picture, which is a quarter of the size then; an octree keeps those of thin lines


def run_notebook(file: Path) -> NotebookNode:
    """Run a notebook in a kernel of its own, which reaches no hub and leaves no history behind."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    num_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=num_cells, desc=file.name, unit="cell", disable=None, leave=False) as bar,
    ):
        os.environ |= {"HF_HUB_OFFLINE": "1", "IPYTHONDIR": scratch, "JUPYTER_RUNTIME_DIR": scratch}
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            config=Config(AsyncKernelManager={"transport": "ipc", "ip": f"{scratch}/kernel"}),  # no ports
            timeout=TIMEOUT_S,
            resources={"metadata": {"path": str(file.parent)}},
            record_timing=False,
            coalesce_streams=True,
            on_cell_executed=lambda **_: bar.update(),
        )
        return client.execute()


def find_warnings(notebook: NotebookNode) -> str:
    """Return what the cells wrote to stderr."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def tidy(notebook: NotebookNode) -> None:
    """Take out what changes from run to run and from machine to machine, and what makes pictures large."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.metadata = nbformat.from_dict({})
                output.data["image/png"] = shrink_picture(output.data["image/png"])


def shrink_picture(png: str) -> str:
    """Return a picture, base64 as in a notebook, with a palette."""
    picture, small = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")), help="default: all")
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    args = parser.parse_args()
    failed = False
    for file in args.files:
        started = time.perf_counter()
        try:
            notebook = run_notebook(file)
        except CellExecutionError as error:
            print(f"{file.name}: {error}")
            failed = True
            continue
        print(f"{file.name}: {time.perf_counter() - started:.0f} s", flush=True)
        if warnings := find_warnings(notebook):
            print(f"{file.name}: its cells wrote to stderr, and a reader should see no warnings:\n{warnings}")
            failed = True
        elif args.write:
            tidy(notebook)
            nbformat.write(notebook, file)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
