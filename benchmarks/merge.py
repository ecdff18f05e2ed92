"""Memory and throughput of a merge of files: `python benchmarks/merge.py`.

For each size it makes a sharded bf16 checkpoint of heavy-tailed weights and a dense float32 adapter of it, twice as
large, and merges them in a fresh process. Memory is the peak of that process's anonymous memory (RssAnon, every 20 ms)
over what it holds before the merge, with everything imported: pages of mapped files are not counted, since the kernel
takes them back. Time stands beside that of copying as many bytes (the same ones read, as many written to the same
folder in files of the same sizes, each brought to the disk), and beside that of the folds alone, on weights in memory.
Before each run the files are put out of the page cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from peft_sel import SELConfig, merge_checkpoint
from peft_sel.checkpoint.shards import (
    ADAPTER_FILE,
    MODEL_FILE,
    TensorEntry,
    plan_shards,
    write_index,
    write_shard,
)
from peft_sel.conversion import invert_at_start, rebuild_weight
from peft_sel.numerics import fingerprint_weight
from peft_sel.shapes import expected_shapes

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STARTS = {"exp_scale": 1 / 15, "linear_scale": 1 / 15, "inner_multiplier": 1.0}
CONFIG = SELConfig(task_type="CAUSAL_LM", target_modules=TARGETS, beta=15.0, r=8)
BLOCK = 1 << 22  # random values, which a large tensor repeats
SHARD_BYTES = 500_000_000
CHUNK_BYTES = 1 << 23
POLL_S = 0.02


@dataclass(frozen=True)
class Pair:
    """A base checkpoint and its adapter, as files."""

    base: Path
    adapter: Path
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_folded(self) -> int:
        """Number of weights that the adapter holds."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if is_target(name))


def is_target(name: str) -> bool:
    """Whether the adapter converts a tensor."""
    return name.split(".")[-2] in TARGETS


def choose_shapes(num_bytes: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama model with as many layers as fit into num_bytes of bf16, at least one."""
    wide, narrow = 11 * hidden // 4, hidden // 8
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (narrow, hidden),
    }
    vocabulary = 16 * hidden
    room = num_bytes // 2 - vocabulary * hidden
    num_layers = max(1, round(room / sum(math.prod(shape) for shape in layer.values())))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def repeat_to(block: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape that holds a block over and over."""
    size = math.prod(shape)
    return block.repeat(math.ceil(size / len(block)))[:size].reshape(shape)


def make_pair(folder: Path, num_bytes: int, hidden: int) -> Pair:
    """Write a checkpoint and an adapter that looks trained: every tensor moved from its start by some percent."""
    generator = torch.Generator().manual_seed(0)
    weights = (0.005 * torch.randn(BLOCK, generator=generator) ** 3).bfloat16()
    raw = invert_at_start(CONFIG, 15.0, weights, "block")[0]
    raw *= 1 + 0.01 * torch.randn(BLOCK, generator=generator)
    shapes = choose_shapes(num_bytes, hidden)
    pair = Pair(folder / "base", folder / "adapter", shapes)
    pair.base.mkdir(parents=True)
    LlamaConfig(
        vocab_size=16 * hidden,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=sum(name.endswith("q_proj.weight") for name in shapes),
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(pair.base)
    entries = plan_shards([TensorEntry(name, shape, torch.bfloat16, "") for name, shape in shapes.items()], SHARD_BYTES)
    for file in sorted({entry.file for entry in entries}):
        members = [entry for entry in entries if entry.file == file]
        write_shard(pair.base / file, members, lambda entry: repeat_to(weights, entry.shape), {"format": "pt"})
    if len({entry.file for entry in entries}) > 1:
        write_index(pair.base / f"{MODEL_FILE}.index.json", entries, {})
    prints = {name: fingerprint_weight(repeat_to(weights, shape)) for name, shape in shapes.items() if is_target(name)}
    dataclasses.replace(CONFIG, base_fingerprint=prints).save_pretrained(str(pair.adapter))
    parts = {
        f"base_model.model.{name.removesuffix('.weight')}.symexplin_{part}": shape
        for name, base_shape in shapes.items()
        if is_target(name)
        for part, shape in expected_shapes(CONFIG, base_shape).items()
    }

    def make_part(entry: TensorEntry) -> Tensor:
        part = entry.name.rpartition("symexplin_")[2]
        if part == "raw":
            return repeat_to(raw, entry.shape)
        noise = torch.randn(entry.shape, generator=generator)
        if part.startswith("residual"):
            return 0.002 * noise
        return torch.tensor(15.0) if part == "beta" else math.sqrt(STARTS[part.split(".")[0]]) * (1 + 0.05 * noise)

    adapter_entries = [TensorEntry(name, shape, torch.float32, "") for name, shape in parts.items()]
    write_shard(pair.adapter / ADAPTER_FILE, adapter_entries, make_part, {"format": "pt"})
    return pair


def forget(folders: Iterable[Path]) -> None:
    """Put files out of the page cache."""
    for path in (path for folder in folders for path in folder.iterdir()):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_anonymous(pid: int) -> int:
    """Return the bytes of anonymous memory that a process has in use, 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def run_merge(pair: Pair, out: Path) -> dict[str, Any]:
    """Merge in a fresh process.

    Returns:
        What its MergeReport says, and idle_bytes and peak_bytes of anonymous memory, before and in the merge.
    """
    command = [sys.executable, __file__, "--merge", str(pair.base), str(pair.adapter), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # everything is imported
        idle = read_anonymous(process.pid)
        forget([pair.base, pair.adapter])
        process.stdin.write("go\n")
        process.stdin.close()
        peak = idle
        while process.poll() is None:
            peak = max(peak, read_anonymous(process.pid))
            time.sleep(POLL_S)
        report = json.loads(process.stdout.read())
    return {**report, "idle_bytes": idle, "peak_bytes": peak}


def merge_when_told(base: str, adapter: str, out: str) -> None:
    """Be that process."""
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(dataclasses.asdict(merge_checkpoint(base, adapter, out)), default=str))


def iter_chunks(paths: list[Path], buffer: memoryview) -> Iterator[int]:
    """Read files into a buffer, over and over, and yield how many bytes came."""
    for path in itertools.cycle(paths):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield count


def copy_bytes(sources: list[Path], num_read: int, sizes: list[int], out: Path) -> float:
    """Read num_read bytes of some files and write files of given sizes, a part of each in turn.

    Returns:
        Seconds.
    """
    forget({path.parent for path in sources})
    out.mkdir()
    buffer, total = memoryview(bytearray(CHUNK_BYTES)), sum(sizes)
    done = written = 0
    started = time.perf_counter()
    chunks = iter_chunks(sources, buffer)
    for number, size in enumerate(sizes):
        with open(out / str(number), "xb", buffering=0) as target:
            end = written + size
            while written < end:
                while done < num_read and done * total <= written * num_read:
                    done += next(chunks)
                written += target.write(buffer[: min(CHUNK_BYTES, end - written)])
            os.fsync(target.fileno())
    return time.perf_counter() - started


def time_fold(shape: tuple[int, ...], repeats: int) -> float:
    """Return the median seconds per weight of a fold whose input is in memory."""
    shapes = expected_shapes(CONFIG, shape)
    parts = {name: 0.02 * torch.randn(part) for name, part in shapes.items()} | {"beta": torch.tensor(15.0)}
    seconds = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        rebuild_weight(CONFIG, parts, dtype=torch.bfloat16)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:]) / math.prod(shape)


def measure(folder: Path, num_bytes: int, hidden: int, repeats: int) -> dict[str, Any]:
    """Make a checkpoint of a size, merge and copy in turns, and return the figures."""
    pair = make_pair(folder, num_bytes, hidden)
    fold_s = time_fold(pair.shapes["model.layers.0.mlp.gate_proj.weight"], 10) * pair.num_folded
    sources = [pair.adapter / ADAPTER_FILE, *sorted(pair.base.glob("*.safetensors"))]
    merges, copies = [], []
    for _ in range(repeats):
        merges.append(run_merge(pair, folder / "out"))
        sizes = [path.stat().st_size for path in sorted((folder / "out").glob("*.safetensors"))]
        shutil.rmtree(folder / "out")
        copies.append(copy_bytes(sources, merges[-1]["bytes_read"], sizes, folder / "copy"))
        shutil.rmtree(folder / "copy")
    merge_s = [report["seconds"] for report in merges]
    return {
        "base_bytes": sum(path.stat().st_size for path in sources[1:]),
        "adapter_bytes": sources[0].stat().st_size,
        "read_bytes": merges[0]["bytes_read"],
        "written_bytes": merges[0]["bytes_written"],
        "idle_bytes": max(report["idle_bytes"] for report in merges),
        "peak_over_idle_bytes": max(report["peak_bytes"] - report["idle_bytes"] for report in merges),
        "merge_s": merge_s,
        "copy_s": copies,
        "fold_s": fold_s,
        "copy_over_merge": statistics.median(copy / merge for copy, merge in zip(copies, merge_s, strict=True)),
        "fold_over_merge": fold_s / statistics.median(merge_s),
    }


def describe(row: dict[str, Any]) -> str:
    """Return a row of figures as a line of text."""
    merge_s, copy_s = statistics.median(row["merge_s"]), statistics.median(row["copy_s"])
    return (
        f"base {row['base_bytes'] / 1e9:.2f} GB, adapter {row['adapter_bytes'] / 1e9:.2f} GB: "
        f"peak {row['peak_over_idle_bytes'] / 1e6:.0f} MB over {row['idle_bytes'] / 1e6:.0f} MB idle; "
        f"merge {merge_s:.1f} s, copy {copy_s:.1f} s ({row['copy_over_merge']:.0%} of its throughput), "
        f"folds alone {row['fold_s']:.1f} s ({row['fold_over_merge']:.0%} of the merge)"
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the arguments, measure each size, print a line for each and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e9, 3e9], metavar="BYTES", help="of the base")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make the files: five times the largest size")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/merge.json"))
    parser.add_argument("--merge", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.merge:
        merge_when_told(*args.merge)
        return
    rows = []
    load = os.getloadavg()[0]
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="merge-") as folder:
            rows.append(measure(Path(folder), int(size), args.hidden, args.repeats))
        print(describe(rows[-1]), flush=True)
    packages = ("torch", "transformers", "peft", "peft-sel", "safetensors")
    result = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_average": load},
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
