"""What PEFT's test modules are parametrized with in our runs: {module: {list in the module, or test: our rows}}."""

from __future__ import annotations

from typing import Any

from peft_sel import SELConfig

LIN0: dict[str, Any] = {"target_modules": ["lin0"]}
BOTH: dict[str, Any] = {"target_modules": ["lin0", "lin1"]}
CHANGED: dict[str, Any] = {"init_weights": False}

MLP_ROWS = {
    "1": {"target_modules": "lin0"},
    "2": LIN0,
    "3": {"target_modules": ["lin1"]},
    "4": BOTH,
    "5": {**LIN0, "modules_to_save": ["lin1"]},
    "6": {**BOTH, "modules_to_save": ["lin1"]},
    "7 regex": {"target_modules": r".*lin\d"},
    "8 exclude": {"target_modules": r".*lin\d", "exclude_modules": ["lin1"]},
    "9 congruent": {**BOTH, "mode": "congruent"},
    "10 oppose": {**BOTH, "mode": "oppose"},
    "11 exp_only": {**BOTH, "mode": "exp_only"},
    "12 frozen raw": {**LIN0, "train_raw": False},
    "13 no residual": {**BOTH, "r": 0},
    "14 frozen raw, no residual": {**BOTH, "train_raw": False, "r": 0},
    "15 all scales": {**BOTH, "exp_scale": "row", "linear_scale": "row_col_add", "shift": "row", "offset": "column"},
    "16 global and lora": {**BOTH, "exp_scale": "lora", "linear_scale": "global", "inner_multiplier": None},
    "17 beta": {**BOTH, "beta": 7.5, "beta_pattern": {"lin1": 2.0}},
}
# PEFT's tests take steps of 1.0 on these models, whose Conv1D starts with weights of 0.02: beta="auto" (about 15 there)
# would make SGD diverge.
GENTLE = {"beta": 1.0}
LAYER_ROWS = [
    # r=0: in three steps on these small outputs, A of a residual with B = 0 moves by less than PEFT's tolerance.
    ("Embedding 1", "EmbConv1D", {"target_modules": ["emb"], "r": 0}),
    ("Conv1D 1", "EmbConv1D", {"target_modules": ["conv1d"], **GENTLE}),
    ("Embedding and Conv1D", "EmbConv1D", {"target_modules": ["emb", "conv1d"], **GENTLE}),
    ("Conv1D, frozen raw", "EmbConv1D", {"target_modules": ["conv1d"], "train_raw": False, **GENTLE}),
    ("Conv1d 1", "Conv1d", {"target_modules": ["conv1d"]}),
    ("Conv2d 1", "Conv2d", {"target_modules": ["conv2d"]}),
    ("Conv2d and Linear", "Conv2d", {"target_modules": ["conv2d", "lin0"]}),
    ("Conv2d groups", "Conv2dGroups", {"target_modules": ["conv2d"]}),
    ("Conv3d 1", "Conv3d", {"target_modules": ["conv3d"]}),
]
MULTIPLE_ROWS = {
    "Same": (LIN0, LIN0),
    "Different": (LIN0, {"target_modules": ["lin1"]}),
    "Same, other options": (BOTH, {**LIN0, "mode": "congruent", "beta": 2.0, "r": 2}),
    "Same, frozen raw": (LIN0, {**LIN0, "train_raw": False}),
}


def make_task_rows(task: str) -> list[tuple[type[SELConfig], dict[str, Any]]]:
    """Make the rows of a transformers task: every weight trained, and a small adapter on frozen raw weights."""
    return [(SELConfig, {"task_type": task}), (SELConfig, {"task_type": task, "train_raw": False, "r": 2})]


def make_parameter_rows(model: str, block: str) -> list[tuple[str, type[SELConfig], dict[str, Any]]]:
    """Make the rows of a mixture of experts: one of its stacks, one in each layer, both, and one beside modules."""
    down, gate_up = f"{block}.experts.down_proj", f"{block}.experts.gate_up_proj"
    chosen: list[dict[str, Any]] = [
        {"target_modules": [], "target_parameters": [down]},
        {"target_modules": [], "target_parameters": [f"0.{gate_up}", f"1.{down}"]},
        {"target_modules": None, "target_parameters": [down, gate_up]},
        {"target_modules": ["q_proj", "v_proj"], "target_parameters": [down]},
    ]
    tasks = [{"task_type": "CAUSAL_LM"}, {"task_type": "CAUSAL_LM", "train_raw": False, "r": 2}]
    return [(model, SELConfig, {**targets, **task}) for targets in chosen for task in tasks]


CLASSES = [SELConfig]
CLASSES_AND_ARGUMENTS: list[tuple[type[SELConfig], dict[str, Any]]] = [(SELConfig, {})]
CASES: dict[str, dict[str, list[Any]]] = {
    "test_custom_models": {
        "TEST_CASES": [
            *((f"Vanilla MLP {name} SEL", "MLP", SELConfig, kwargs) for name, kwargs in MLP_ROWS.items()),
            *((f"{name} SEL", model, SELConfig, kwargs) for name, model, kwargs in LAYER_ROWS),
        ],
        "ALL_PEFT_CONFIG_CLASSES": CLASSES,
        "MULTIPLE_ACTIVE_ADAPTERS_TEST_CASES": [
            (f"SEL {name}", "sel", SELConfig, {**first, **CHANGED}, {**second, **CHANGED})
            for name, (first, second) in MULTIPLE_ROWS.items()
        ],
        "test_multiple_adapters_mixed_modules_to_save": CLASSES,
        "test_multiple_adapters_mixed_modules_to_save_order_switched": CLASSES,
        "test_adapter_name_makes_no_difference": [SELConfig(**LIN0, **CHANGED)],
    },
    "test_config": {
        "ALL_CONFIG_CLASSES": CLASSES_AND_ARGUMENTS,
        "LAYER_INDEXING_CONFIG_CLASSES": CLASSES_AND_ARGUMENTS,
        "test_save_pretrained_with_target_modules": CLASSES,
    },
    "test_decoder_models": {"ALL_CONFIGS": make_task_rows("CAUSAL_LM")},
    "test_encoder_decoder_models": {"ALL_CONFIGS": make_task_rows("SEQ_2_SEQ_LM")},
    "test_feature_extraction_models": {"ALL_CONFIGS": make_task_rows("FEATURE_EXTRACTION")},
    "test_seq_classifier": {"ALL_CONFIGS": make_task_rows("SEQ_CLS")},
    "test_target_parameters": {
        "ALL_CONFIGS": [
            *make_parameter_rows("trl-internal-testing/tiny-Llama4ForCausalLM", "feed_forward"),
            *make_parameter_rows("trl-internal-testing/tiny-GptOssForCausalLM", "mlp"),
        ]
    },
    "test_token_classification_qa": {
        "TOKEN_CLS_CONFIGS": make_task_rows("TOKEN_CLS"),
        "QA_CONFIGS": make_task_rows("QUESTION_ANS"),
    },
    "test_low_level_api": {
        "test_inject_from_state_dict_and_from_config_target_same_layers": [SELConfig(), SELConfig(train_raw=False)],
    },
    "test_other": {
        "test_self_targeting_is_ignored": [(SELConfig, {"target_modules": f"l{index}.*"}) for index in (1, 2)],
    },
    "test_tuners_utils": {},
    "test_vision_models": {
        "test_model_with_batchnorm_reproducibility": [
            SELConfig(target_modules=["convolution"], modules_to_save=["classifier", "normalization"], train_raw=dense)
            for dense in (True, False)
        ],
    },
}
# Generic tests that take LoRA as their example: they run with SELConfig in the place of LoraConfig.
STAND_INS = {
    "test_low_level_api": r"Test(PeftStateDict|GetBaseModelStateDict)::(?!.*(named_like|bias_in_module_name))",
    "test_other": r"TestModulesToSave|TestTargetingAuxiliaryTrainingWrapper::(?!test_targeting_trainable_tokens)",
    "test_tuners_utils": (
        r"Test(Targeted|Excluded)ModuleNames::test_(?!ia3|realistic)|"
        r"TestModelAndLayerStatus::test_(model_)?(?!.*(trainable_tokens|gpu|grad_irregular|grad_model_irregular|automodel))"
        r"(layer_names|enabled|disabled|active|merge|requires|available|devices|with_modules|base_model|num_adapter)"
    ),
}
# Tests that walk through all of PEFT's methods, ours included, without being parametrized.
ALSO = {"test_from_peft_type"}
