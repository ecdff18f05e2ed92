"""What lies beside the weights of a base and goes along into what it is merged to, and what may be there already."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from peft_sel.errors import CheckpointError
from peft_sel.untrusted import MAX_JSON_BYTES

# Weights in any format, and what would make transformers load an adapter on top of the merged model.
NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|npz|ot|index\.json|tflite|mlmodel)|\..*\.lock|adapter_config\.json|config\.json"
)
TEMPLATES_FOLDER = "additional_chat_templates"
MODULES_FILE = "modules.json"  # of sentence-transformers: what follows the model, such as 1_Pooling
BLOCK_BYTES = 1 << 20
MAX_SIDE_BYTES = 1 << 30  # of one file beside the weights, so that one with a hole does not fill the disk


def is_copied(name: str) -> bool:
    """Return whether a file of a base goes into what it is merged to."""
    return not NOT_COPIED.fullmatch(name.lower())


def list_copied_folders(base_dir: Path) -> list[str]:
    """Return the folders of a base that go along, whole: chat templates, and those that its modules.json names.

    Args:
        base_dir: The base.

    Returns:
        Names of folders right in base_dir, no links and nothing hidden; what modules.json says beyond that is ignored.
    """
    named = {TEMPLATES_FOLDER, *_read_module_folders(base_dir / MODULES_FILE)}
    paths = [base_dir / name for name in sorted(named.intersection(os.listdir(base_dir))) if not name.startswith(".")]
    return [path.name for path in paths if path.is_dir() and not path.is_symlink()]


def _read_module_folders(path: Path) -> list[str]:
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
            return []
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    found = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [name for name in found if isinstance(name, str)]


def list_copies(base_dir: Path) -> set[str]:
    """Return what copy_side_files makes of a base, as names such as LICENSE and 1_Pooling/config.json."""
    copies = {name for name in os.listdir(base_dir) if is_copied(name)}
    for folder in list_copied_folders(base_dir):
        copies |= {f"{folder}/{name}" for name in os.listdir(base_dir / folder)}
    return copies


def copy_side_files(base_dir: Path, out_dir: Path) -> None:
    """Copy what lies beside the weights: tokenizer, generation config, chat templates, licence, modules around it.

    Args:
        base_dir: The base.
        out_dir: The folder to fill, which holds nothing of these yet.

    Raises:
        CheckpointError: If one is a link to nothing, a pipe or a device, too large, or cannot be read.
    """
    sources = [path for path in base_dir.iterdir() if is_copied(path.name)]
    for folder in list_copied_folders(base_dir):
        (out_dir / folder).mkdir()
        sources.extend((base_dir / folder).iterdir())
    for path in sources:
        if not path.exists() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(path, "is a link to nothing, a pipe or a device", "remove it, or fetch it again")
        if path.is_file():
            if path.stat().st_size > MAX_SIDE_BYTES:
                problem = f"is larger than {MAX_SIDE_BYTES} bytes, and no file of weights"
                raise CheckpointError(path, problem, "move it out of the folder")
            with open(out_dir / path.relative_to(base_dir), "xb") as target:
                for block in _read_blocks(path):
                    target.write(block)


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file of the base."""
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise CheckpointError(path, problem, "make it readable, or move it out of the folder") from error
