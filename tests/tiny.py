"""A tiny checkpoint with a tokenizer, and text for it, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from models import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("raw", "weights", "become", "effective", "weights", "whose", "slope", "grows", "with", "size")
EOS = "<eos>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer: one token per byte, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def save_checkpoint(folder: Path, family: str = "qwen2", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a 2-layer model and its tokenizer."""
    make_tiny(family, dtype, vocab_size=260).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_documents(count: int = 40) -> list[str]:
    """Make documents of about 200 characters, the same every time."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(WORDS), (count, 40), generator=generator).tolist()
    return [" ".join(WORDS[index] for index in row) for row in picks]


def write_documents(file: Path, documents: list[str] | None = None) -> Path:
    """Write documents as JSON lines."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents or make_documents()))
    return file


def write_recipe(folder: Path, **changes: Any) -> Path:
    """Write a recipe: train folder/base on folder/text.jsonl for 4 steps, with changes by section."""
    training = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no"}
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "base")},
        "data": {"files": str(folder / "text.jsonl"), "sequence_length": 64},
        "training": {**training, "learning_rate": 0.001, "seed": 1},
        "output_dir": str(folder / "out"),
    }
    for name, value in changes.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file
