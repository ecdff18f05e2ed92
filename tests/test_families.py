"""Every family by its defaults: what is converted, that it acts, trains, merges and reloads in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import assert_same_bits, bits, clone_state, make_heavy_tailed
from peft import PeftModel, get_peft_model
from torch import nn

from peft_sel import SELConfig, SELError, SELLayer, merge_checkpoint

NO_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**NO_TOKENS, **HEADS, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
TEXT |= {"head_dim": 8, "max_position_embeddings": 64}
MOE = {**TEXT, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MOE |= {"shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID = {**LINEAR, "linear_conv_kernel_dim": 2, "layer_types": ["linear_attention", "full_attention"]}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"image_size": 16, "patch_size": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
GPT = {**NO_TOKENS, "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
BERT = {**NO_TOKENS, **HEADS, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
T5 = {**NO_TOKENS, "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SHARED = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"]
NEXT = ["linear_attn.in_proj_qkvz", "linear_attn.out_proj"]
DELTA = ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"]
T5_SELF = [f"layer.0.SelfAttention.{name}" for name in "qkvo"]
T5_CROSS = [f"layer.1.EncDecAttention.{name}" for name in "qkvo"]


def layers(root: str, *names: list[str]) -> list[str]:
    """Write out the names of the modules in the layers below a root."""
    return [f"{root}.{index}.{name}" for index, group in enumerate(names) for name in group]


def twice(root: str, names: list[str]) -> list[str]:
    return layers(root, names, names)


# family: (model, options of its configuration, the modules that are converted by default)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", TEXT, twice("model.layers", ATTENTION + MLP)),
    "mistral": ("MistralForCausalLM", TEXT, twice("model.layers", ATTENTION + MLP)),
    "gemma3_text": ("Gemma3ForCausalLM", TEXT, twice("model.layers", ATTENTION + MLP)),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {**NO_TOKENS, "text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
        twice("model.language_model.layers", ATTENTION + MLP),
    ),
    "qwen2": ("Qwen2ForCausalLM", TEXT, twice("model.layers", ATTENTION + MLP)),
    "qwen3": ("Qwen3ForCausalLM", TEXT, twice("model.layers", ATTENTION + MLP)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", MOE, twice("model.layers", ATTENTION + SHARED)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE, twice("model.layers", ATTENTION)),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**MOE, **HYBRID},
        layers("model.layers", NEXT + SHARED, ATTENTION + SHARED),
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {**TEXT, **HYBRID}, layers("model.layers", DELTA + MLP, ATTENTION + MLP)),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {**NO_TOKENS, "text_config": {**TEXT, **HYBRID}, "vision_config": VISION},
        layers("model.language_model.layers", DELTA + MLP, ATTENTION + MLP),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        {**MOE, **HYBRID},
        layers("model.layers", DELTA + SHARED, ATTENTION + SHARED),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {**NO_TOKENS, "text_config": {**MOE, **HYBRID}, "vision_config": VISION},
        layers("model.language_model.layers", DELTA + SHARED, ATTENTION + SHARED),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {**NO_TOKENS, "text_config": {**TEXT, **ROPE}, "vision_config": VISION},
        twice("model.language_model.layers", ATTENTION + MLP),
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {**NO_TOKENS, "text_config": {**TEXT, **ROPE}, "vision_config": {**VISION, "deepstack_visual_indexes": [0]}},
        twice("model.language_model.layers", ATTENTION + MLP),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        GPT,
        twice("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
    ),
    "gptj": (
        "GPTJForCausalLM",
        {**GPT, "rotary_dim": 4},
        twice("transformer.h", [*(f"attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc_in", "mlp.fc_out"]),
    ),
    "opt": (
        "OPTForCausalLM",
        {**BERT, "ffn_dim": 48, "word_embed_proj_dim": 32},
        twice("model.decoder.layers", [*ATTENTION[:3], "self_attn.out_proj", "fc1", "fc2"]),
    ),
    "bert": (
        "BertForMaskedLM",
        BERT,
        twice(
            "bert.encoder.layer",
            [
                *(f"attention.self.{name}" for name in ("query", "key", "value")),
                *("attention.output.dense", "intermediate.dense", "output.dense"),
            ],
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0},
        twice("encoder.block", [*T5_SELF, "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"])
        + twice("decoder.block", [*T5_SELF, *T5_CROSS, "layer.2.DenseReluDense.wi", "layer.2.DenseReluDense.wo"]),
    ),
    "t5 gated": (
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0, "num_layers": 1, "feed_forward_proj": "gated-gelu"},
        layers("encoder.block", [*T5_SELF, *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo"))])
        + layers(
            "decoder.block",
            [*T5_SELF, *T5_CROSS, *(f"layer.2.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo"))],
        ),
    ),
    "vit": (
        "ViTForImageClassification",
        {**HEADS, "hidden_size": 32, "intermediate_size": 48, "image_size": 8, "patch_size": 4},
        twice("vit.layers", [*(f"attention.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2"]),
    ),
}

RENAMED = ("gemma3", "qwen2_5_vl", "vit")  # their files name tensors otherwise than the modules


def make_model(family: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Make a random model with heavy-tailed weights, the same one every time."""
    name, options, _ = FAMILIES[family]
    model_class = getattr(transformers, name)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    # Not .to(dtype), which would round the rotary frequencies, too: a model loaded in bf16 has them in float32.
    model = model_class._from_config(model_class.config_class(**options), dtype=dtype)
    torch.set_rng_state(state)
    make_heavy_tailed(model)
    return model.eval()


def make_inputs(family: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    if family == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8).to(dtype), "labels": torch.tensor([1])}
    tokens = torch.arange(3, 19).reshape(2, 8)
    return {"input_ids": tokens, "labels": tokens}


@torch.no_grad()
def logits(model: nn.Module, family: str) -> torch.Tensor:
    result = model(**make_inputs(family, next(model.parameters()).dtype)).logits
    assert torch.isfinite(result).all()
    return result


def sel_layers(model: nn.Module) -> dict[str, SELLayer]:
    return {layer.module_name: layer for layer in model.modules() if isinstance(layer, SELLayer)}


def convert(model: nn.Module, family: str, config: SELConfig) -> PeftModel:
    """Convert the default targets; a mixture of experts says that its experts stay as they are."""
    if "moe" not in family and family != "qwen3_next":
        return get_peft_model(model, config)
    with pytest.warns(UserWarning, match=r"the expert parameters .*experts\.gate_up_proj.* stay as they are"):
        return get_peft_model(model, config)


def take_step(model: nn.Module, family: str) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(**make_inputs(family)).loss
    assert torch.isfinite(loss)
    loss.backward()
    torch.optim.AdamW([{"params": p} for p in parameters], lr=0.02).step()


@pytest.mark.parametrize("family", FAMILIES)
def test_default_targets_convert_without_a_changed_bit_and_each_acts(family):
    model = make_model(family)
    expected, state = logits(model, family), clone_state(model)
    model = convert(model, family, SELConfig())
    converted = sel_layers(model)
    assert sorted(converted) == sorted(FAMILIES[family][2])
    assert torch.equal(logits(model, family), expected)
    for name, layer in converted.items():  # some code reads .weight instead of calling the module
        raw = layer.symexplin_raw["default"]
        kept = raw.detach().clone()
        raw.data.mul_(1.5)
        assert not torch.equal(logits(model, family), expected), name
        raw.data.copy_(kept)
    assert_same_bits(model.merge_and_unload().state_dict(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_merged_and_reloaded_by_transformers(family, tmp_path: Path):
    model = make_model(family)
    original, base = logits(model, family), clone_state(model)
    model = convert(model, family, SELConfig())
    take_step(model, family)
    model.eval()
    adapted = logits(model, family)
    assert not torch.equal(adapted, original)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    assert type(merged).__name__ == FAMILIES[family][0] and not sel_layers(merged)
    merged.save_pretrained(tmp_path / "merged")
    reloaded = type(merged).from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).eval()
    assert torch.equal(logits(reloaded, family), adapted)
    changed = {name for name, value in reloaded.state_dict().items() if not torch.equal(bits(value), bits(base[name]))}
    assert changed == {f"{name}.weight" for name in FAMILIES[family][2]}
    assert torch.equal(logits(PeftModel.from_pretrained(make_model(family), tmp_path / "adapter"), family), adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_from_file_to_file(family, tmp_path: Path):
    make_model(family).save_pretrained(tmp_path / "base")
    model = convert(make_model(family), family, SELConfig(train_raw=False))
    take_step(model, family)
    adapted = logits(model.eval(), family)
    model.save_pretrained(tmp_path / "adapter")
    folders = [tmp_path / name for name in ("base", "adapter", "merged")]
    if family in RENAMED:
        with pytest.raises(SELError, match=r"no counterpart in .*base"):
            merge_checkpoint(*folders, progress=False)
    else:
        merge_checkpoint(*folders, progress=False)
        merged = getattr(transformers, FAMILIES[family][0]).from_pretrained(folders[2], dtype=torch.bfloat16).eval()
        assert torch.equal(logits(merged, family), adapted)


@pytest.mark.parametrize("base_weight", ["keep", "drop"])
def test_t5_keeps_its_last_projections_in_float32(base_weight, tmp_path: Path):
    model_class = transformers.T5ForConditionalGeneration
    make_model("t5", torch.float32).save_pretrained(tmp_path)
    plain = model_class.from_pretrained(tmp_path, dtype=torch.float16)
    expected, state = logits(plain, "t5"), clone_state(plain)
    model = get_peft_model(
        model_class.from_pretrained(tmp_path, dtype=torch.float16), SELConfig(base_weight=base_weight)
    )
    wide = {name for name, layer in sel_layers(model).items() if layer.base_weight.dtype == torch.float32}
    assert wide == {name for name in FAMILIES["t5"][2] if name.endswith(".wo")}
    # The float32 weights come back to some ulps, so that activations may round to the next fp16 number: of the four
    # blocks' additions, both ways. (On AVX2 they do; on AVX512 the logits are within 2e-3.)
    tolerance = 2 * 4 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(logits(model, "t5"), expected, rtol=tolerance, atol=tolerance)
    merged = model.merge_and_unload().state_dict()
    halves = {name: value for name, value in state.items() if value.dtype == torch.float16}
    assert_same_bits({name: merged[name] for name in halves}, halves)


@pytest.mark.parametrize(
    ("family", "root"), [("qwen3_5", "model.language_model.layers.1."), ("gpt2", "transformer.h.1.")]
)
def test_layers_to_transform_narrows_the_defaults(family, root, tmp_path: Path):
    model = get_peft_model(make_model(family), SELConfig(layers_to_transform=1))
    expected = {name for name in FAMILIES[family][2] if name.startswith(root)}
    assert set(sel_layers(model)) == expected
    model.save_pretrained(tmp_path)
    assert set(sel_layers(PeftModel.from_pretrained(make_model(family), tmp_path))) == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target_modules": ".*proj", "layers_to_transform": [0]}, "layers_to_transform=.*target_modules` is a str"),
        ({"target_modules": "all-linear", "layers_to_transform": 0}, "layers_to_transform=.*target_modules` is a str"),
        ({"target_modules": ".*proj", "layers_pattern": "layers"}, "layers_pattern=.*target_modules` is a str"),
        ({"target_modules": ["q_proj"], "layers_pattern": "layers"}, "layers_pattern=.*without layers_to_transform"),
    ],
)
def test_layers_that_would_be_ignored_are_refused(options, match):
    with pytest.raises(SELError, match=match):
        SELConfig(**options)


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_a_saved_head_of_several_layers_survives_the_end(end):
    config = transformers.RobertaConfig(**BERT, num_labels=3, max_position_embeddings=32)
    base = transformers.RobertaForSequenceClassification(config).bfloat16().eval()
    model = get_peft_model(base, SELConfig(modules_to_save=["classifier"]))  # dense, dropout and out_proj
    nn.init.normal_(base.classifier.modules_to_save["default"].out_proj.weight)
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        adapted = model(tokens).logits
        assert torch.equal(getattr(model, end)()(tokens).logits, adapted)
    assert type(base.classifier).__name__ == "RobertaClassificationHead" and not sel_layers(base)


class ReadsWeight(nn.Module):
    """A module whose projection is no more than a place for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.passed = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.used(x.to(self.used.weight.dtype)), self.passed.weight)


@pytest.mark.skipif(transformers.__version__.startswith("5.10."), reason="calls the module, which works")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_weights_that_linear_attention_reads_itself_are_refused(family):
    model = make_model(family)
    before = clone_state(model)
    with pytest.raises(SELError, match=r"linear_attn.conv1d is a Conv1d \(Qwen3\w*GatedDeltaNet reads its weight"):
        get_peft_model(model, SELConfig(target_modules=["q_proj", "conv1d"]))
    assert not sel_layers(model)
    assert_same_bits(model.state_dict(), before)


@pytest.mark.parametrize("target", ["conv1d", "dt_proj", "x_proj", "out_proj"])
def test_weights_that_fused_mamba_kernels_read_are_refused(target):
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=4
    )
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(SELError, match=rf"mixer.{target} is a \w+ \(MambaMixer reads its weight"):
        get_peft_model(model, SELConfig(target_modules=[target]))
    assert len(sel_layers(get_peft_model(model, SELConfig(target_modules=["in_proj"])))) == 1


class Inherits(ReadsWeight):
    """The same by inheritance."""


@pytest.mark.parametrize("owner", [ReadsWeight, Inherits])
def test_a_module_that_is_called_is_converted_and_one_that_is_only_read_is_not(owner):
    assert set(sel_layers(get_peft_model(owner(), SELConfig(target_modules=["used"])))) == {"used"}
    with pytest.raises(SELError, match=r"target module passed is a Linear \(\w+ reads its weight"):
        get_peft_model(owner(), SELConfig(target_modules=["passed"]))
