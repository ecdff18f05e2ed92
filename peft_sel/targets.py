"""Which modules of a model type are converted by default."""

from __future__ import annotations

from typing import Any

from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

DENSE_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DENSE_TEXT_MODELS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "diffllama")
# Hybrid and multi-modal families: the same projections and those of linear attention, in the language tower only.
LANGUAGE_TOWER_TARGETS = (
    r"(?!.*(visual|vision|audio|talker|token2wav|code2wav))"
    r"(.*\.)?(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)"
)


def _target_mapping() -> dict[str, Any]:
    families = {name: LANGUAGE_TOWER_TARGETS for name in CONFIG_MAPPING_NAMES if "qwen" in name or "llama" in name}
    dense = dict.fromkeys(DENSE_TEXT_MODELS, DENSE_TARGETS)
    return {**TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, **families, **dense}


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
