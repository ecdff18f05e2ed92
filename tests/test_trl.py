"""SEL under TRL's trainers: groups, annealing, checkpoints, the recipe, and the reference of preference training."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from models import NUM_TARGETS, assert_same_bits, logits, make_tiny, sel_layers
from peft import PeftModel, get_peft_model
from test_groups import PAPER, TABLE, groups_by_name
from test_resume import assert_same, spoil
from test_training import CHECKPOINTING, training_logs
from tiny import make_documents, make_tokenizer, save_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_sel import SELConfig, SELTrainerMixin
from peft_sel.errors import AdapterStateError, DroppedBaseError, OutputExistsError
from peft_sel.layer import SELLayer

trl = pytest.importorskip("trl", reason="needs the extra trl")
add_fused_lm_head = importlib.import_module("trl.trainer.utils").add_fused_lm_head

CONFIGS = Path(__file__).parent.parent / "configs"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DEFAULTS = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
LR, DECAY = 2e-3, 0.01
NUM_STEPS, HALF = 6, 3
NAMES = ("DPOTrainer", "KTOTrainer", "RLOOTrainer", "GRPOTrainer")
TEXTS = make_documents(12)
PAIRS = [{"prompt": t[:20], "chosen": t[20:50], "rejected": t[60:85]} for t in TEXTS]
ANSWERS = [{"prompt": t[:20], "completion": t[20:50], "label": len(t) % 2 == 0} for t in TEXTS]
ROWS = {"SFTTrainer": [{"text": t} for t in TEXTS], "DPOTrainer": PAIRS, "KTOTrainer": ANSWERS}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def load_base(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return make_tiny("qwen2", dtype, vocab_size=260)


def make_config(**options: Any) -> SELConfig:
    return SELConfig(task_type="CAUSAL_LM", r=2, **options)


def make_adapted(dtype: torch.dtype = torch.bfloat16, **options: Any) -> PeftModel:
    return get_peft_model(load_base(dtype), make_config(**options))


def make_trainer(
    name: str, model: nn.Module, folder: Path, config: SELConfig | None = None, *, mixed: bool = True, **options: Any
) -> Any:
    """Make TRL's trainer of a name, with the mixin or stock."""
    defaults = {
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        CHECKPOINTING: True,
    }
    stock = getattr(trl, name)
    trainer_class = type(f"SEL{name}", (SELTrainerMixin, stock), {}) if mixed else stock
    more = {} if name in ROWS else {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    rollouts = {} if name in ROWS else {"num_generations": 2, "max_completion_length": 4}
    arguments = getattr(trl, name.replace("Trainer", "Config"))
    return trainer_class(
        model,
        args=arguments(str(folder), **{**defaults, **rollouts, **options}),
        train_dataset=datasets.Dataset.from_list(ROWS.get(name, PAIRS)),
        processing_class=make_tokenizer(),
        peft_config=config,
        **more,
    )


def train(trainer: Any) -> None:
    """Train; a stock trainer puts all parameters into one or two groups, and is warned of that."""
    mixed = isinstance(trainer, SELTrainerMixin)
    with contextlib.nullcontext() if mixed else pytest.warns(UserWarning, match="in one parameter group"):
        trainer.train()


def reference_of(trainer: Any) -> tuple[Any, Tensor]:
    """Return a batch, and the log-probabilities that the trainer's reference gives its answers."""
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    return batch, torch.cat(trainer.compute_ref_log_probs(trainer.model, batch))


def score(trainer: Any, model: nn.Module, batch: Any) -> Tensor:
    """Return the log-probabilities of a model that PEFT knows nothing of, by TRL's own kernel."""
    add_fused_lm_head(model)
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad(), trainer.accelerator.autocast():
        return model(**inputs, use_cache=False, labels=labels, fused_lm_head=True).log_probs.sum(1)


def assert_documented_groups(trainer: Any, table: dict[str, tuple[float, float, bool]], lr: float = LR) -> None:
    """Compare the optimizer's groups with the table in the docstring of sel_param_groups."""
    betas = {layer.module_name: layer.symexplin_beta["default"].item() for layer in sel_layers(trainer.model)}
    found = groups_by_name(trainer.model, trainer.optimizer.param_groups)
    roles = set()
    for name, group in found.items():
        module, _, rest = name.removeprefix("base_model.model.").partition(".symexplin_")
        role = next(role for role in table if rest.startswith(role))
        multiplier, _, decays = table[role]
        multiplier /= betas[module] if role == "residual" else 1.0
        assert group["role"] == role, name
        assert group["initial_lr"] == pytest.approx(lr * multiplier, rel=1e-6), name  # beta is float32
        assert group["weight_decay"] == (DECAY if decays else 0.0), name
        roles.add(role)
    assert roles == {"raw", "exp_scale", "linear_scale", "inner_multiplier", "residual"}


def test_sft_trains_packed_text_in_the_documented_groups(tmp_path: Path) -> None:
    config = make_config(anneal_steps=4, **PAPER)
    trainer = make_trainer("SFTTrainer", load_base(), tmp_path, config, packing=True, max_length=256, max_steps=20)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    trainer.train()
    assert_documented_groups(trainer, TABLE)
    logs = training_logs(trainer)
    assert sum(log["loss"] for log in logs[-3:]) < sum(log["loss"] for log in logs[:3]) - 1
    for step, log in enumerate(logs):
        annealed = math.exp(math.log(50) + math.log(8 / 50) / 2 * (1 - math.cos(math.pi * min(step / 4, 1))))
        assert log["sel/lr/exp_scale"] == pytest.approx(annealed * log["sel/lr/raw"], rel=1e-12)
        assert log["sel/scale/exp_scale/q_proj"] > 0 and log["mean_token_accuracy"] >= 0


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer"])
def test_training_resumes_bit_for_bit_from_whole_checkpoints(name: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": HALF, "gradient_accumulation_steps": 2}
    config = {"anneal_steps": 0.8, **PAPER}
    straight = make_trainer(name, load_base(), tmp_path / "one", make_config(**config), **options)
    straight.train()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["README.md", "checkpoint-3", "checkpoint-6"]
    resumed = make_trainer(name, load_base(), tmp_path / "two", make_config(**config), **options)
    spoil(resumed.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / f"checkpoint-{HALF}"))
    assert_same(straight.model.state_dict(), resumed.model.state_dict(), "model")
    assert_same(straight.optimizer.state_dict(), resumed.optimizer.state_dict(), "optimizer")
    assert_same(straight.lr_scheduler.state_dict(), resumed.lr_scheduler.state_dict(), "scheduler")


@pytest.mark.parametrize("mixed", [False, True], ids=["stock", "mixed"])
@pytest.mark.parametrize("options", [{}, {"base_weight": "cpu"}, {"train_raw": False}], ids=["keep", "cpu", "frozen"])
def test_the_reference_is_the_base_model_bit_for_bit(options: dict[str, Any], mixed: bool, tmp_path: Path) -> None:
    config = make_config(**options)
    trainer = make_trainer("DPOTrainer", load_base(), tmp_path, config, mixed=mixed, max_steps=2)
    train(trainer)
    first, second = (log["loss"] for log in training_logs(trainer))
    assert first == pytest.approx(math.log(2), abs=1e-6) and abs(second - first) > 1e-3  # the policy left its reference
    batch, log_probs = reference_of(trainer)
    assert torch.equal(log_probs, score(trainer, load_base(), batch))
    trained = score(trainer, trainer.model.merge_and_unload(), batch)
    assert not torch.equal(log_probs, trained)


@pytest.mark.parametrize("mixed", [False, True], ids=["stock", "mixed"])
def test_precomputed_references_change_no_loss(mixed: bool, tmp_path: Path) -> None:
    losses, few = [], {"max_steps": 3}
    for precompute in (False, True):
        trainer = make_trainer(
            "DPOTrainer", load_base(), tmp_path, make_config(), mixed=mixed, precompute_ref_log_probs=precompute, **few
        )
        train(trainer)
        losses.append([log["loss"] for log in training_logs(trainer)])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_micro_batches_share_weights_in_preference_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, computed = SELLayer.get_effective_weight, []
    monkeypatch.setattr(SELLayer, "get_effective_weight", lambda *args: computed.append(1) or compute(*args))
    options = {"gradient_accumulation_steps": 2, "bf16": False, "max_steps": 3}
    losses, counts = [], []
    for shares in (False, True):
        computed.clear()
        trainer = make_trainer("DPOTrainer", load_base(torch.float32), tmp_path, make_config(), **options)
        trainer.shares_weights = shares
        trainer.train()
        counts.append(len(computed))
        losses.append(torch.tensor([log["loss"] for log in training_logs(trainer)], dtype=torch.float64))
    # Once per step: not per micro-batch, nor again in the backward pass. Without sharing, layers fold as they multiply.
    assert counts == [0, 3 * NUM_TARGETS]
    assert torch.equal(losses[0][:1], losses[1][:1])
    # Adam makes whole steps of gradients that round to another sign, so single weights part by a few lr in all.
    assert torch.allclose(losses[0], losses[1], rtol=1e-3)


OPTIONS = {
    "dense": {},
    "frozen": {"train_raw": False},
    "drawn": {"init_target": "xavier_uniform"},
    "biases": {"bias": "sel_only", "offset": "column", "beta_pattern": {"bias": 5.0}},
    "plain modules": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_trained_adapter_is_its_own_reference(name: str, tmp_path: Path) -> None:
    spoil(make_adapted(**OPTIONS[name])).save_pretrained(tmp_path / "adapter")
    base = load_base()
    if name == "dense":  # its curvatures, too, are the adapter's own
        for parameter in base.parameters():
            parameter.data.mul_(1.5)
    original = copy.deepcopy(base)
    options = {"is_trainable": True, "check_base": False}
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", **options)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    trainer = make_trainer("DPOTrainer", model, tmp_path, mixed=False, max_steps=1)
    batch, log_probs = reference_of(trainer)
    assert_same_bits({key: trainer.model.state_dict()[key] for key in expected}, expected)
    trained = PeftModel.from_pretrained(copy.deepcopy(original), tmp_path / "adapter", **options).merge_and_unload()
    assert torch.equal(log_probs, score(trainer, trained, batch))
    assert not torch.equal(log_probs, score(trainer, original, batch))
    train(trainer)
    assert training_logs(trainer)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert torch.equal(log_probs, torch.cat(trainer.compute_ref_log_probs(trainer.model, batch)))
    assert all(torch.equal(trainer.model.state_dict()[k], expected[k]) for k in expected if "base_layer" in k)


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_without_base_weights_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DroppedBaseError, match=f"^SEL{name}, whose reference is the base model, needs the base weights"
    ):
        make_trainer(name, load_base(), tmp_path, make_config(base_weight="drop"), beta=0.1)
    make_trainer("SFTTrainer", load_base(), tmp_path, make_config(base_weight="drop"))
    if name == "GRPOTrainer":
        make_trainer(name, load_base(), tmp_path, make_config(base_weight="drop"), beta=0.0)  # has no reference


@pytest.mark.parametrize("options", [{}, {"train_raw": False}, {"raw_dtype": "bfloat16"}], ids=str)
def test_an_adapter_that_was_cast_to_two_bytes_is_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer.validate_quantization_for_training", lambda *_: None)
    base = load_base()
    base.is_loaded_in_4bit = True  # what TRL asks before it casts
    with pytest.raises(AdapterStateError, match=r"^adapter 'default' was cast to bfloat16, .*SELTrainer on token ids$"):
        make_trainer("SFTTrainer", base, tmp_path, make_config(**options))
    make_trainer("SFTTrainer", load_base(), tmp_path, make_config(**options))


def run_recipe(monkeypatch: pytest.MonkeyPatch, folder: Path, base: Path, chats: list[Any], **options: Any) -> Any:
    """Run configs/trl_sft.py for 20 steps on a file of conversations."""
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    paths = {"model": base, "chats": folder / "chats.jsonl", "output_dir": folder / "out"}
    training = {"max_steps": 20, "per_device_train_batch_size": 1, "weight_decay": DECAY, "logging_steps": 1}
    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, CHECKPOINTING: False}
    options = {**paths, **training, **quiet, **options}
    monkeypatch.syspath_prepend(CONFIGS)
    recipe = importlib.import_module("trl_sft")
    return recipe.main([part for name, value in options.items() for part in (f"--{name}", str(value))])


def make_chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def assert_recipe_learnt(trainer: Any, base: Path, out: Path, lr: float) -> None:
    """Check the run: loss, groups, and a merged model that is the adapted one, bit for bit."""
    losses = [log["loss"] for log in training_logs(trainer)]
    assert len(losses) == 20 and sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.5
    assert_documented_groups(trainer, {role: (1.0, 1.0, decays) for role, (_, _, decays) in TABLE.items()}, lr)
    merged, plain = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (out / "merged", base))
    assert torch.equal(logits(merged.eval()), logits(PeftModel.from_pretrained(plain, out / "adapter").eval()))


def save_chat_model(folder: Path) -> Path:
    base = save_checkpoint(folder, "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(base)
    return base


def read_counted(trainer: Any) -> list[str]:
    """Return the lines of text that the loss counts, sorted."""
    rows = trainer.train_dataset
    counted = [[i for i, n in zip(row["input_ids"], row["labels"], strict=True) if n != -100] for row in rows]
    text = "".join(map(trainer.processing_class.decode, counted))
    return sorted(filter(None, text.split("\n")))


@DEFAULTS
def test_the_recipe_trains_on_the_answers_and_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_chat_model(tmp_path / "base")
    chats = [make_chat(text[:20], text[20:70]) for text in TEXTS]
    trainer = run_recipe(monkeypatch, tmp_path, base, chats, max_length=256, learning_rate=LR)
    assert any(len(row["seq_lengths"]) > 1 for row in trainer.train_dataset)
    assert len(trainer.train_dataset) < len(chats)
    assert read_counted(trainer) == sorted(chat[1]["content"] for chat in chats)
    assert_recipe_learnt(trainer, base, tmp_path / "out", lr=LR)


@DEFAULTS
@pytest.mark.parametrize("every", [False, True])
def test_the_recipe_counts_the_last_answer_or_every_one(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_chat_model(tmp_path / "base")
    chats = [[*make_chat("One?", text[:15]), *make_chat("Two?", text[20:50])] for text in TEXTS]
    trainer = run_recipe(monkeypatch, tmp_path, base, chats, max_steps=1, max_length=256, assistant_only_loss=every)
    answers = [message["content"] for chat in chats for message in chat[1 if every else 3 :: 2]]
    assert read_counted(trainer) == sorted(answers)


@DEFAULTS
def test_the_recipe_ends_chats_with_an_answer_to_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_chat_model(tmp_path / "base")
    thanks, greeting = {"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Hello."}
    chats = [[*make_chat("One?", text[:15]), *make_chat("Two?", text[20:50]), thanks] for text in TEXTS]
    unanswered = [[thanks], [greeting], [greeting, thanks], []]
    trainer = run_recipe(monkeypatch, tmp_path, base, [*chats, *unanswered], max_steps=1, max_length=256)
    assert read_counted(trainer) == sorted(chat[3]["content"] for chat in chats)
    assert "chats.jsonl: left out 4 of 16 chats" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"chats\.jsonl holds no answer to a user"):
        run_recipe(monkeypatch, tmp_path, base, unanswered, output_dir=tmp_path / "none")


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_the_recipe_finds_a_taken_folder_before_it_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(OutputExistsError, match=f"out/{name} already exists"):
        run_recipe(monkeypatch, tmp_path, tmp_path / "nowhere", [make_chat("One?", "One.")])


@pytest.mark.slow
@DEFAULTS
def test_the_recipe_on_the_real_checkpoint(
    real_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydoc_data.topics import topics

    names = ("assert", "pass", "global", "return")  # five epochs of four rows
    chats = [make_chat(f"What does Python's {name} statement do?", topics[name].strip()[:400]) for name in names]
    trainer = run_recipe(monkeypatch, tmp_path, real_checkpoint, chats, max_length=128, learning_rate=5e-5)
    assert_recipe_learnt(trainer, real_checkpoint, tmp_path / "out", lr=5e-5)
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M; m = M.from_pretrained(sys.argv[1]);"
        "t = m.generate(m.dummy_inputs['input_ids'], max_new_tokens=2); assert 'peft_sel' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out" / "merged")], check=True)
