"""A base and an adapter as files to damage, and the assertion that they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import convert, make_tiny, sel_layers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from peft_sel import SELError, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint

CONFIG, TENSORS, MODEL = "adapter_config.json", "adapter_model.safetensors", "model.safetensors"
RAW = "base_model.model.model.layers.0.self_attn.q_proj.symexplin_raw"
SMALL = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}


def make_folders(folder: Path) -> tuple[Path, Path]:
    """Save a base checkpoint and a dense adapter of it."""
    base, adapter = folder / "files" / "base", folder / "files" / "adapter"
    make_tiny("qwen2", **SMALL).save_pretrained(base)
    convert(make_tiny("qwen2", **SMALL)).save_pretrained(adapter)
    return base, adapter


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_header(file: Path, change: Callable[[bytes], bytes]) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def assert_refused(base: Path, adapter: Path, match: str, *, inspected: Path | None = None, load: bool = False) -> None:
    """Merge, inspect and load; each has to fail with one line, and leave nothing behind."""
    before = sorted(base.parent.rglob("*"))
    calls: list[Callable[[], object]] = [lambda: merge_checkpoint(base, adapter, base.parent / "out", progress=False)]
    if inspected is not None:
        calls.append(lambda: inspect_checkpoint(inspected, progress=False))
    model = make_tiny("qwen2", **SMALL)
    if load:
        calls.append(lambda: PeftModel.from_pretrained(model, adapter))
    for call in calls:
        with pytest.raises(SELError, match=match) as caught:
            call()
        assert str(caught.value).isprintable() and len(str(caught.value)) < 2500
    assert sorted(base.parent.rglob("*")) == before
    assert not sel_layers(model)
