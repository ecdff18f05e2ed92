"""Tied weights after a merge: the ones that parted stay apart when the model is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def keep_parted_weights_apart(model: Any) -> None:
    """Say in the configuration that a merge has parted tied weights, and leave no other weight to that tie.

    With tie_word_embeddings=True, what loads the saved model may overwrite one of the two by the other. With False,
    weights that are still tied (the bias of BERT's head) would be saved once and come back as random ones, so these
    get copies of their own. A model without parted weights is left as it is.

    Args:
        model: The merged model.
    """
    pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tensor: Callable[[str], Any] = dict(model.named_parameters(remove_duplicate=False)).get
    if all(tensor(tied) is not None and tensor(tied) is tensor(source) for tied, source in pairs.items()):
        return
    seen: set[Tensor | None] = set()
    for name in dict.fromkeys([*pairs.values(), *pairs]):
        value: Tensor | None = tensor(name)
        if value is not None and value in seen:
            module, _, attribute = name.rpartition(".")
            copy = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            setattr(model.get_submodule(module), attribute, copy)
        seen.add(value)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
