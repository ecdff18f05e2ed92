"""Peak memory of each process under FSDP2 against one process: `python benchmarks/sharded_memory.py`.

Both train the same random bf16 Qwen3 of 100 million target weights, densely, with AdamW and the same global batch, on
CPUs: one process by a plain loop, two by accelerate's FSDP2 code over gloo, with the base in the first one only until
it is sharded (cpu_ram_efficient_loading). Counted is the resident memory of a process, sampled every 2 ms, above what
it holds after its imports: weights, gradients, optimizer state, activations and temporary copies, by phase. glibc is
told to give freed blocks back at once, as an accelerator's pool would use them again; by itself it keeps most of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peft_sel import SELConfig, create_sel_optimizer

NUM_RANKS = 2
NUM_STEPS = 3
NUM_TOKENS = 32
SAMPLE_S = 0.002
MIB = 1 << 20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


class Sampler:
    """Samples the memory of this process, and keeps the largest value of each phase."""

    def __init__(self) -> None:
        self.start = self.phase_peak = read_resident_bytes()
        self.peaks_mib: dict[str, float] = {}
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.phase_peak = max(self.phase_peak, read_resident_bytes())
            time.sleep(SAMPLE_S)

    def end_phase(self, name: str) -> None:
        """Name what was done since the last phase."""
        self.peaks_mib[name] = round((self.phase_peak - self.start) / MIB, 1)
        self.phase_peak = read_resident_bytes()


def read_resident_bytes() -> int:
    """Return the memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def make_base(folder: Path, hidden: int, layers: int) -> None:
    """Save a random base with few tokens, so that its decoder layers are nearly all of it."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 8 // 3, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    config = Qwen3Config(vocab_size=1024, max_position_embeddings=NUM_TOKENS, **sizes, **heads)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def work(folder: Path, base_weight: str, rank: int | None) -> dict[str, Any]:
    """Convert and train in this process, alone or as one rank, and measure it."""
    torch.manual_seed(0)
    accelerator = None if rank is None else accelerate.Accelerator()
    sampler = Sampler()
    if rank is None or rank == 0:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.tie_weights()
    sampler.end_phase("loading")
    config = SELConfig(target_modules="all-linear", base_weight=base_weight)
    model = get_peft_model(model, config).train()
    optimizer: Any = create_sel_optimizer(model, lr=1e-5)
    sampler.end_phase("conversion")
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    sampler.end_phase("sharding")
    tokens = torch.randint(0, 1024, (NUM_RANKS, NUM_TOKENS))
    rows = tokens if rank is None else tokens[rank : rank + 1]
    for _ in range(NUM_STEPS):
        loss = model(input_ids=rows, labels=rows).loss
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    sampler.end_phase("training")
    return {"peaks_mib": sampler.peaks_mib, "peak_mib": max(sampler.peaks_mib.values())}


def run(folder: Path, base_weight: str, num_ranks: int | None) -> list[dict[str, Any]]:
    """Start the processes of a measurement, and return what each says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(num_ranks or 1):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **MALLOC,
        }
        if num_ranks is not None:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **ranks}
            environment |= FSDP | {name: str(value) for name, value in places.items()}
        out = folder / f"{base_weight}-{num_ranks}-{rank}.json"
        command = [sys.executable, __file__, "--work", str(folder), base_weight, str(out)]
        processes.append((subprocess.Popen(command, env=environment), out))
    for process, _ in processes:
        if process.wait() != 0:
            raise SystemExit("a process failed")
    return [json.loads(out.read_text()) for _, out in processes]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        folder, base_weight, out = args.work
        rank = None
        if "RANK" in os.environ:
            rank = int(os.environ["RANK"])
            # accelerate knows FSDP on accelerators only; all but this answer is its own code (see tests/fsdp_worker.py)
            accelerate.PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        Path(out).write_text(json.dumps(work(Path(folder), base_weight, rank)))
        if rank is not None:
            torch.distributed.destroy_process_group()
        return
    packages = ("torch", "transformers", "accelerate", "peft", "peft-sel")
    result: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "settings": {"hidden": args.hidden, "layers": args.layers, "ranks": NUM_RANKS, "tokens": NUM_TOKENS},
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as name:
        make_base(Path(name), args.hidden, args.layers)
        for base_weight in ("keep", "drop"):
            alone = run(Path(name), base_weight, None)[0]
            ranks = run(Path(name), base_weight, NUM_RANKS)
            ratios = [round(rank["peak_mib"] / alone["peak_mib"], 3) for rank in ranks]
            result["rows"][base_weight] = {"one_process": alone, "ranks": ranks, "peak_ratios": ratios}
            print(f"{base_weight}: one process {alone['peaks_mib']}")
            for rank, ratio in zip(ranks, ratios, strict=True):
                print(f"    rank of two {rank['peaks_mib']}, {ratio} of that")
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
