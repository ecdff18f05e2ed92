"""What a model's config.json says that matters for its files: the model's class, and whether it ties its embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from peft_sel.errors import CheckpointError

# Of these, a model is built around the first of its own type, and around any of each nested configuration's type.
INNER_MAPPINGS = (
    modeling_auto.MODEL_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


def list_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those nested in it, at any depth."""
    yield config
    for part in config.values():
        if isinstance(part, dict):
            yield from list_parts(part)


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
    return _find_class(names[0])


def _find_class(name: str) -> type[PreTrainedModel] | None:
    try:
        model_class = getattr(transformers, name, None)
    except Exception:  # it is imported only now, and may need a library that is not there
        return None
    return model_class if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel) else None


def ties_embeddings(config: dict[str, Any], path: Path) -> bool:
    """Return whether the model ties its head to its embedding, by its configuration or by its type's default.

    Args:
        config: Content of config.json.
        path: The file.

    Returns:
        Whether it does; for a type that transformers does not know, whether the file says so anywhere.

    Raises:
        CheckpointError: If transformers accepts no such configuration.
    """
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return any(bool(part.get("tie_word_embeddings")) for part in list_parts(config))
    try:
        return bool(getattr(CONFIG_MAPPING[model_type].from_dict(_select_tying(config)), "tie_word_embeddings", False))
    except Exception as error:  # its checks raise many things
        problem = f"is not a configuration that transformers accepts ({error})"
        raise CheckpointError(path, problem, "fetch the checkpoint again") from error


def list_tied_pairs(model_class: type[PreTrainedModel] | None) -> list[tuple[str, str]]:
    """Return what a class ties, such as (lm_head.weight, model.embed_tokens.weight); some names are patterns."""
    pairs = getattr(model_class, "_tied_weights_keys", None)
    return list(pairs.items()) if isinstance(pairs, dict) else []


def find_inner_pairs(config: dict[str, Any], path: Path, keys: Iterable[str]) -> set[tuple[str, str]]:
    """Find what the models inside a model tie: BART's without its head, the language model of a BLIP-2.

    Args:
        config: Content of config.json.
        path: The file.
        keys: Names of the checkpoint's tensors.

    Returns:
        As list_tied_pairs, with the names of the whole model.

    Raises:
        CheckpointError: If transformers accepts no such configuration.
    """
    names = list(keys)
    pairs = set()
    for part in list_parts(config):
        mappings = INNER_MAPPINGS[:1] if part is config else INNER_MAPPINGS
        classes = [mapping.get(str(part.get("model_type"))) for mapping in mappings]
        inner = {pair for name in classes if isinstance(name, str) for pair in list_tied_pairs(_find_class(name))}
        if inner and ties_embeddings(part, path):
            for pair in inner:
                prefixes = {key.removesuffix(member) for member in pair for key in names if key.endswith(f".{member}")}
                pairs |= {(prefix + pair[0], prefix + pair[1]) for prefix in prefixes}
    return pairs


def _select_tying(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a configuration says about tying: among its numbers, one of 10**9 layers would fill the memory."""
    nested = {name: _select_tying(part) for name, part in config.items() if isinstance(part, dict)}
    chosen = {name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}
    return {name: part for name, part in nested.items() if part} | chosen
