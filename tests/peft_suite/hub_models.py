"""Small random models under the hub ids that PEFT's tests name, in the layout of the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
BERT = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
LAYERS = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}
BART = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in LAYERS.items()}
BART |= {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64}
EXPERTS = {**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": (
        "Gemma3ForCausalLM",
        {**LLAMA, "head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2ForCausalLM", LLAMA),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", BART),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": ("BertForSequenceClassification", BERT),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", BERT),
    "peft-internal-testing/tiny-random-DebertaModel": ("DebertaModel", BERT),
    "peft-internal-testing/tiny-random-DebertaV2Model": ("DebertaV2Model", BERT),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "peft-internal-testing/tiny-random-OPTForCausalLM": (
        "OPTForCausalLM",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": ("RobertaForSequenceClassification", BERT),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", BERT),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": ("T5ForConditionalGeneration", T5),
    "peft-internal-testing/tiny-random-ResNetForImageClassification": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "trl-internal-testing/tiny-Llama4ForCausalLM": ("Llama4ForCausalLM", {**EXPERTS, "intermediate_size_mlp": 48}),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        {**LLAMA, "num_labels": 1},
    ),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", LLAMA),
}
# The tests feed tokens 1 and 2. The padding token is another, since its embedding is 0 and would hide every adapter.
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 4, "decoder_start_token_id": 0}
IMAGES = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}}
ADAPTER, ADAPTER_REVISION = "peft-internal-testing/tiny-opt-lora-revision", "test"


def make_snapshot(cache: Path, hub_id: str, revision: str = "main") -> Path:
    """Return the folder, not yet made, where the cache keeps the revision of a model."""
    repository, commit = cache / f"models--{hub_id.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text(commit)
    return repository / "snapshots" / commit


def fill(cache: Path) -> None:
    """Save the models, and one LoRA adapter's configuration, into the cache folder."""
    transformers.logging.disable_progress_bar()
    for hub_id, (name, sizes) in MODELS.items():
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**sizes, **SPECIAL_TOKENS))
        folder = make_snapshot(cache, hub_id)
        model.save_pretrained(folder)
        if "Image" in name:
            (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    LoraConfig(task_type="CAUSAL_LM").save_pretrained(str(make_snapshot(cache, ADAPTER, ADAPTER_REVISION)))
