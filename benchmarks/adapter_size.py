"""What lossless encodings make of a dense adapter, in bytes per raw weight: `python benchmarks/adapter_size.py`.

Converts the real checkpoint, trains it on Python's help pages, and encodes the raw weights of every tenth target as
they are, and relative to the raw weights before training (which whoever has the base can compute again, on the same
machine and versions bit for bit): by zlib and lzma, of the plain bytes or of the four byte planes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import lzma
import platform
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_sel import SELConfig, SELLayer, create_sel_optimizer
from peft_sel.demo import prepare_checkpoint
from peft_sel.demo.material import write_text

TOKENS_PER_STEP = 256
EVERY = 10


def read_blocks(folder: Path, count: int) -> Tensor:
    """Return blocks of tokens of the help pages."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as temporary:
        lines = write_text(Path(temporary)).read_text(encoding="utf-8").splitlines()
    tokens: list[int] = []
    for line in lines:
        tokens += tokenizer(json.loads(line)["text"])["input_ids"]
        if len(tokens) >= count * TOKENS_PER_STEP:
            break
    return torch.tensor(tokens[: count * TOKENS_PER_STEP]).reshape(count, TOKENS_PER_STEP)


def copy_raw(model: nn.Module, every: int = EVERY) -> list[np.ndarray]:
    """Copy the raw weights of some target modules, as integers."""
    layers = [module for module in model.modules() if isinstance(module, SELLayer)]
    return [layer.symexplin_raw["default"].detach().numpy().copy().view(np.uint32) for layer in layers[::every]]


def to_planes(numbers: np.ndarray) -> bytes:
    """Return the bytes of integers, first all lowest ones, then the next."""
    return np.ascontiguousarray(numbers.reshape(-1).view(np.uint8).reshape(-1, 4).T).tobytes()


def to_zigzag(numbers: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Return the differences of the bit patterns, small ones of either sign as small numbers."""
    difference = (numbers - base).view(np.int32)
    return ((difference << 1) ^ (difference >> 31)).view(np.uint32)


def measure(raw: list[np.ndarray], base: list[np.ndarray]) -> dict[str, float]:
    """Return bytes per weight by encoding, and how much of the raw weights changed."""
    count = sum(numbers.size for numbers in raw)

    def size(encode: object, values: list[bytes]) -> float:
        return sum(len(encode(value)) for value in values) / count  # type: ignore[operator]

    def pack(data: bytes) -> bytes:
        return lzma.compress(data, preset=1)

    plain = [numbers.tobytes() for numbers in raw]
    planes = [to_planes(numbers) for numbers in raw]
    changed = [to_planes(numbers ^ start) for numbers, start in zip(raw, base, strict=True)]
    moved = [to_planes(to_zigzag(numbers, start)) for numbers, start in zip(raw, base, strict=True)]
    return {
        "as saved": 4.0,
        "zlib": size(zlib.compress, plain),
        "byte planes, zlib": size(zlib.compress, planes),
        "byte planes, lzma": size(pack, planes),
        "xor with the start, byte planes, zlib": size(zlib.compress, changed),
        "xor with the start, byte planes, lzma": size(pack, changed),
        "difference to the start, byte planes, zlib": size(zlib.compress, moved),
        "difference to the start, byte planes, lzma": size(pack, moved),
        "share of weights that changed": sum(int((a != b).sum()) for a, b in zip(raw, base, strict=True)) / count,
        "share of tensors that changed": sum(bool((a != b).any()) for a, b in zip(raw, base, strict=True)) / len(raw),
    }


def main() -> None:
    """Train, measure after each number of steps, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5, 25])
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/adapter_size.json"))
    args = parser.parse_args()
    folder = prepare_checkpoint()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(base, SELConfig(task_type="CAUSAL_LM", base_weight="drop")).train()
    start, results = copy_raw(model), {}
    optimizer = create_sel_optimizer(model, lr=args.learning_rate)
    for step, block in enumerate(read_blocks(folder, max(args.steps)), 1):
        model(input_ids=block[None], labels=block[None]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in args.steps:
            results[str(step)] = measure(copy_raw(model), start)
            print(step, json.dumps(results[str(step)], indent=1), flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "peft-sel")}
    about = {"model": folder.name, "learning_rate": args.learning_rate, "tokens_per_step": TOKENS_PER_STEP}
    about |= {"zlib": zlib.ZLIB_VERSION, "python": platform.python_version()}
    args.out.write_text(
        json.dumps({**about, "versions": versions, "bytes_per_weight_by_step": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
