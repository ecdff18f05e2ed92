"""Where a training job starts: the folder of a checkpoint, its tokenizer and model, or a model of random weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from peft_sel.conversion import PREFIX
from peft_sel.errors import CheckpointError, ConfigError, list_names
from peft_sel.recipe import ModelSection, Recipe

CHECKPOINT_PATTERNS = (
    *("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.jinja"),
    *("*.py", "*.md", "LICENSE*", "NOTICE*"),
)
IGNORED_PATTERNS = ("consolidated*", "[!0-9]*/*.safetensors")  # the same weights in other forms; 1_Dense/ is a module
ADAPTER_PATTERNS = ("adapter_config.json", "adapter_model*.safetensors*")
BYTES = "bytes"  # a tokenizer that needs no file


def resolve_checkpoint(path: str, revision: str | None = None, patterns: Sequence[str] = CHECKPOINT_PATTERNS) -> Path:
    """Return the local folder of a checkpoint or an adapter, fetched from the hub if path is an id there.

    Args:
        path: A folder, or an id on the hub.
        revision: Branch, tag or commit on the hub.
        patterns: What to fetch: config, tokenizer and safetensors files by default, ADAPTER_PATTERNS for an adapter;
            never pickled weights, nor IGNORED_PATTERNS.

    Returns:
        The folder.

    Raises:
        CheckpointError: If there is no such folder and no such id.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith(("~", ".", "/")) or folder.exists():
        raise CheckpointError(path, "there is no such folder", "name an existing folder, or an id on the hub")
    try:
        return Path(
            snapshot_download(
                path, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(IGNORED_PATTERNS)
            )
        )
    except Exception as error:  # a connection fails in many ways
        raise CheckpointError(
            path,
            f"is neither a folder nor to be had from the hub ({type(error).__name__})",
            "check the name and the connection",
        ) from error


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a recipe: the checkpoint's, or for random weights the one that it names.

    Args:
        section: Section model of the recipe.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: If it cannot be loaded.
    """
    if section.tokenizer == BYTES:
        return ByT5Tokenizer(extra_ids=0)
    if section.tokenizer is None:
        return read_tokenizer(section.path, resolve_checkpoint(section.path, section.revision))
    return read_tokenizer(section.tokenizer, Path(section.tokenizer).expanduser())


def read_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that knows more than its special tokens: without its files transformers makes up an empty one.

    Args:
        name: What messages call it.
        folder: Folder, or an id on the hub.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: If there is none.
    """
    way_out = f"name a folder or an id with a tokenizer, or for random weights {BYTES}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of whatever its files hold
        raise CheckpointError(name, f"has no tokenizer that can be loaded ({_explain(error)})", way_out) from error
    if len({*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}) < 2:  # T5's empty one has a space
        raise CheckpointError(name, "has a tokenizer without a vocabulary; its files may be missing", way_out)
    return tokenizer


def _explain(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def write_random_model(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a model of random weights, as transformers starts it, and its tokenizer as the checkpoint section.path.

    Args:
        section: Section model of a recipe, with config.
        tokenizer: Gives vocab_size and the special tokens unless config_options do.

    Raises:
        ConfigError: If the tokenizer has more tokens than vocab_size, or no model can be built.
    """
    options = {"vocab_size": len(tokenizer), **section.config_options}
    if options["vocab_size"] < len(tokenizer):
        reason = (
            f"the tokenizer {section.tokenizer} has {len(tokenizer)} tokens; give at least as many, or leave it out"
        )
        raise ConfigError("vocab_size", options["vocab_size"], reason)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        options.setdefault(name, getattr(tokenizer, name))
    dtype = torch.float32 if section.dtype == "auto" else getattr(torch, section.dtype)
    try:
        config = CONFIG_MAPPING[str(section.config)](**options)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # sizes that do not fit fail in many ways
        reason = f"no model can be built with {options} ({_explain(error)})"
        raise ConfigError("config", section.config, reason) from error
    model.save_pretrained(section.path)
    tokenizer.save_pretrained(section.path)


def load_model(recipe: Recipe) -> PeftModel:
    """Load the model that a recipe starts from and convert it.

    Args:
        recipe: Its sections model and sel.

    Returns:
        The converted model.

    Raises:
        SELError: If the model cannot be loaded or converted.
    """
    section = recipe.model
    folder = resolve_checkpoint(section.path, section.revision)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=section.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
            attn_implementation=section.attn_implementation,
            use_safetensors=True,  # nothing is unpickled
        )
    except Exception as error:  # cut files, wrong shapes and wrong configurations fail in many ways
        problem = f"cannot be loaded ({_explain(error)})"
        raise CheckpointError(section.path, problem, "name another checkpoint") from error
    is_folder = Path(section.path).expanduser().is_dir()
    model.name_or_path = str(folder) if is_folder else section.path  # what the adapter remembers as its base
    converted = get_peft_model(model, recipe.sel, revision=section.revision)
    if section.config is not None and (frozen := _list_random_and_frozen(converted)):
        warnings.warn(
            f"{list_names(frozen)} stay at their random values; train them plainly with sel.modules_to_save, as in "
            "[embed_tokens, lm_head, norm] (and tie_word_embeddings: false), or convert them with sel.target_modules",
            stacklevel=2,
        )
    return converted


def _list_random_and_frozen(model: nn.Module) -> list[str]:
    """Return the parameters that neither train nor have an adapter or a copy that does."""
    covered = (".base_layer.", ".original_module.")
    named = model.named_parameters(remove_duplicate=False)  # a head that is tied to an embedding counts for itself
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    return [name for name in frozen if PREFIX not in name and not any(part in name for part in covered)]
