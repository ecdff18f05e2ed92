"""Which modules of a model type are converted by default."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import cache
from typing import Any

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

DENSE_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN_TEXT_MODELS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
DENSE_TEXT_MODELS = ("llama", "diffllama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "stablelm")
BERT_TARGETS = ["query", "key", "value", "intermediate.dense", "output.dense"]
T5_TARGETS = ["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]
# The linear projections of every block, under the names of each family.
OTHER_TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "vit": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), BERT_TARGETS),
    **dict.fromkeys(("t5", "mt5"), T5_TARGETS),
}
# Hybrid and multi-modal families: the same projections and those of linear attention, in the language tower only.
LANGUAGE_TOWER_TARGETS = (
    r"(?!.*(visual|vision|audio|talker|token2wav|code2wav))"
    r"(.*\.)?(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
)


def _target_mapping() -> dict[str, Any]:
    towers = {name for name in CONFIG_MAPPING_NAMES if "qwen" in name or "llama" in name} | {"gemma3"}
    dense = dict.fromkeys((*QWEN_TEXT_MODELS, *DENSE_TEXT_MODELS), DENSE_TARGETS)
    families = {**dict.fromkeys(sorted(towers), LANGUAGE_TOWER_TARGETS), **dense, **OTHER_TARGETS}
    return {**TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, **families}


TARGET_MODULES = _target_mapping()


def default_target_modules(model_type: str) -> list[str] | str | None:
    """Return the modules that are converted by default.

    Args:
        model_type: model_type of a transformers config.

    Returns:
        Module names, a regex of whole module names, or None for a model type without a default.
    """
    targets = TARGET_MODULES.get(model_type)
    return list(targets) if isinstance(targets, list) else targets


def restrict_to_layers(targets: str, layers: list[int] | int, pattern: list[str] | str | None) -> str:
    """Make a regex of module names match in some layers only.

    Args:
        targets: Regex of whole module names.
        layers: Indices of the layers; an empty list leaves the regex as it is.
        pattern: Names of the layer list; None for "layers".

    Returns:
        The regex of the names in these layers.
    """
    indices = [layers] if isinstance(layers, int) else layers
    lists = [pattern] if isinstance(pattern, str) else pattern or ["layers"]
    return rf"(?=(.*\.)?({'|'.join(lists)})\.({'|'.join(map(str, indices))})\.){targets}" if indices else targets


@cache
def reads_weight_itself(owner: type, attribute: str) -> bool:
    """Tell from its source whether a class uses the weight of one of its modules past the module, and so past adapters.

    Args:
        owner: Class of the module that holds the target module.
        attribute: Name of the target module in it.

    Returns:
        True for weights that are read and whose module is never called (the conv1d of linear attention, the out_proj of
        torch.nn.MultiheadAttention), and for those that the fused kernels of a Mamba mixer may read.
    """
    source = ""
    for ancestor in owner.__mro__:
        if ancestor not in (nn.Module, object):
            with suppress(OSError, TypeError):  # written at a prompt, or not in Python
                source += inspect.getsource(ancestor)
    reads = re.search(rf"self\.{attribute}\.weight\b(?!\.(dtype|device|shape))", source) is not None
    calls = re.search(rf"self\.{attribute}\(", source) is not None
    return reads and (not calls or "Mamba" in owner.__name__)
