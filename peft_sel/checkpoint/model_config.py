"""What a model's config.json says that matters for its files: the model's class, and whether it ties its embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from peft_sel.errors import CheckpointError


def find_model_class(config: dict[str, Any]) -> type[PreTrainedModel] | None:
    """Return the transformers class that a checkpoint was saved from, None if it is not one of transformers' own.

    Args:
        config: Content of config.json.

    Returns:
        The class.
    """
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        return None
    try:
        model_class = getattr(transformers, names[0], None)
    except Exception:  # it is imported only now, and may need a library that is not there
        return None
    return model_class if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel) else None


def ties_embeddings(config: dict[str, Any], path: Path) -> bool:
    """Return whether the model ties its head to its embedding, by its configuration or by its type's default.

    Args:
        config: Content of config.json.
        path: The file.

    Returns:
        Whether it does; False for a type that transformers does not know.

    Raises:
        CheckpointError: If transformers accepts no such configuration.
    """
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return False
    try:
        return bool(getattr(CONFIG_MAPPING[model_type].from_dict(_select_tying(config)), "tie_word_embeddings", False))
    except Exception as error:  # its checks raise many things
        problem = f"is not a configuration that transformers accepts ({error})"
        raise CheckpointError(path, problem, "fetch the checkpoint again") from error


def _select_tying(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration says about tying: among its numbers, one of 10**9 layers would fill the memory."""
    nested = {name: _select_tying(part) for name, part in config.items() if isinstance(part, dict)}
    chosen = {name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}
    return {name: part for name, part in nested.items() if part} | chosen
