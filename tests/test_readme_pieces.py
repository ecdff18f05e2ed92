"""Code within README's sentences, piece by piece: RUN_BY says which test runs it, the last one checks the rest.

It reads a command's arguments with the program's own parser (of a script, and of make's targets, only whether they are
there), loads a recipe with an override, and makes a SELConfig of a field. A runner "file::test" checks what the piece
says; here only that there is such a test.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import yaml
from documents import DOCUMENTS, README, ROOT, find_pieces, has_test, read_document
from models import NUM_TARGETS, TOKENS, convert, logits, make_tiny, sel_layers, train_steps
from peft import PeftModel, get_peft_model
from test_training import Reporter, make_arguments, make_data
from tiny import make_documents, make_tokenizer, save_checkpoint, write_documents, write_recipe
from transformers import AutoTokenizer, Trainer

import peft_sel
from peft_sel import (
    SELCallback,
    SELConfig,
    create_sel_optimizer,
    create_sel_scheduler,
    merge_checkpoint,
    sel_param_groups,
)
from peft_sel.cli import make_parser
from peft_sel.errors import OutputExistsError
from peft_sel.layer import SELLayer
from peft_sel.recipe import load_recipe

RUN_BY = {  # the beginning of the piece
    "SELConfig(init_target=": "test_from_scratch_everything_trains",
    "SELConfig(train_raw=False)": "test_the_small_adapter_is_small",
    "help(SELConfig)": "test_help_names_every_field",  # of each what it does and its default: test_config.py
    "class SELSFTTrainer(": "test_the_mixin_goes_before_a_trainer_of_trl",
    "peft_config=SELConfig(...)": "test_the_mixin_goes_before_a_trainer_of_trl",
    "python configs/trl_sft.py": "test_the_script_for_chats_runs",
    "optimizers=(": "test_a_stock_trainer_takes_optimizer_scheduler_and_callback",
    'report_to="none", callbacks=[': "test_a_stock_trainer_takes_optimizer_scheduler_and_callback",
    "model.base_model.accumulate_gradients()": "test_calls_of_a_model",
    "model.base_model.keep_effective_weights(False)": "test_calls_of_a_model",
    "model.eval()": "test_calls_of_a_model",
    "train()": "test_calls_of_a_model",
    "adapter_names=": "test_calls_of_a_model",
    "peft_sel.save_adapter(model, folder)": "test_an_adapter_is_saved_and_exchanged",
    "overwrite=True": "test_an_adapter_is_saved_and_exchanged",
    "check_base=False": "test_another_base_is_taken_on_demand",
    "create_sel_optimizer(model, bitsandbytes": "test_an_optimizer_of_8_bits_takes_the_groups",
    "ScaleConfig(lr_mult=1.0)": "test_scales_take_a_multiplier",
    "lr_scale=": "test_a_factor_of_ones_own_is_on_each_rate",
    "data: {streaming: true}": "test_a_recipe_streams",
    "import peft_sel": "test_model.py::test_loading_without_the_import_names_the_type",
    "KeyError: 'SYMEXPLIN'": "test_model.py::test_loading_without_the_import_names_the_type",
    "torch.nn.MultiheadAttention reads": "test_features.py::test_cell",
    "does not run row by row": "test_features.py::test_cell",
    "a quantised weight stays": "test_features.py::test_cell",
    "w_base + sum(": "test_adapters.py::test_any_order_of_calls",
}
CODE = re.compile(r"[(=: ]")
PIECES = [piece for piece in find_pieces(read_document(README)) if CODE.search(piece) and "::" not in piece]
COMMANDS = re.compile(r"(make|python|peft-sel) ")
OURS = [read_document(path).split("\n## Upstream")[0] for path in DOCUMENTS[1:]]  # what is behind it is PEFT's
ELSEWHERE = [piece for text in OURS for piece in find_pieces(text) if COMMANDS.match(piece)]
LR = 1e-3


def find_runner(piece: str) -> str | None:
    """Return the test that runs a piece, if one does."""
    runners = {test for beginning, test in RUN_BY.items() if piece.startswith(beginning)}
    assert len(runners) <= 1, piece
    return runners.pop() if runners else None


REST = dict.fromkeys(piece for piece in (*PIECES, *ELSEWHERE) if find_runner(piece) is None)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def pieces(request: pytest.FixtureRequest) -> list[str]:
    """The pieces that a test has to run."""
    return [piece for piece in PIECES if find_runner(piece) == request.function.__name__]


def test_every_claim_is_of_a_piece_and_of_a_test() -> None:
    gone = [beginning for beginning in RUN_BY if not any(piece.startswith(beginning) for piece in PIECES)]
    assert gone == []
    for test in RUN_BY.values():
        assert has_test(test) if "::" in test else "pieces" in inspect.signature(globals()[test]).parameters, test


# ------------------------------------------------------------------------------------------------- configurations


def test_from_scratch_everything_trains(pieces: list[str]) -> None:
    (piece,) = pieces
    base = make_tiny("qwen3", tie_word_embeddings=False, head_dim=8)
    names = [name for name, _ in base.named_parameters()]
    model = get_peft_model(base, eval(piece, {"SELConfig": SELConfig}))
    converted = {layer.module_name + ".weight" for layer in sel_layers(model)}
    trained = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert len(converted) == NUM_TARGETS and set(names) - converted <= trained
    loss = model(TOKENS, labels=TOKENS).loss.item()
    train_steps(model, 3)
    assert model(TOKENS, labels=TOKENS).loss.item() < loss


def test_the_small_adapter_is_small(pieces: list[str]) -> None:
    (piece,) = pieces
    model = get_peft_model(make_tiny(hidden_size=128, intermediate_size=192), eval(piece, {"SELConfig": SELConfig}))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not any("symexplin_raw" in name for name in trained) and any("residual" in name for name in trained)
    few, many = model.get_nb_trainable_parameters()
    assert few < many / 4  # at a width of 128, where the rank of 8 is much


def test_help_names_every_field(pieces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (piece,) = pieces
    eval(piece, {"help": help, "SELConfig": SELConfig})
    said = capsys.readouterr().out
    own = {field.name for field in dataclasses.fields(SELConfig)} - {
        field.name for field in dataclasses.fields(SELConfig.__mro__[1])
    }
    told = re.findall(r"^[ |]+(\w+): ", said, re.MULTILINE)
    assert len(own) > 15 and own <= set(told)


# ------------------------------------------------------------------------------------------------------- trainers


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
def test_the_mixin_goes_before_a_trainer_of_trl(pieces: list[str], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra trl")
    head, keyword = pieces
    names: dict[str, Any] = {"SELTrainerMixin": peft_sel.SELTrainerMixin, "SFTTrainer": trl.SFTTrainer}
    exec(f"{head}: ...", names)
    given = eval(f"dict({keyword})", {"SELConfig": lambda _: SELConfig(task_type="CAUSAL_LM", r=2)})
    options = {"max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    trainer = names["SELSFTTrainer"](
        make_tiny("qwen2", torch.bfloat16, vocab_size=260),
        args=trl.SFTConfig(str(tmp_path), max_length=64, **options, **quiet),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in make_documents(2)]),
        processing_class=make_tokenizer(),
        **given,
    )
    trainer.train()
    assert {group["role"] for group in trainer.optimizer.param_groups} >= {"raw", "exp_scale", "residual"}
    text = " ".join(README.read_text(encoding="utf-8").split())
    others = re.findall(r"[A-Z]\w+", text.split(f"`{keyword}`, and so ")[1].split(".")[0])
    assert len(others) == 5
    for name in others:  # that each trains is in test_trl.py
        other = type(f"SEL{name}Trainer", (peft_sel.SELTrainerMixin, getattr(trl, f"{name}Trainer")), {})
        assert issubclass(other, Trainer)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it
def test_the_script_for_chats_runs(pieces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    (piece,) = pieces
    monkeypatch.chdir(tmp_path)
    base = save_checkpoint(Path("MODEL"), "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(base)
    texts = make_documents(4)
    chats = [[{"role": "user", "content": t[:20]}, {"role": "assistant", "content": t[20:50]}] for t in texts]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    python, script, *words = shlex.split(piece)
    assert python == "python" and (ROOT / script).is_file()
    options = {"max_steps": 1, "max_length": 64, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    options |= {"gradient_checkpointing": False, "save_strategy": "no", "dataloader_pin_memory": False}
    monkeypatch.syspath_prepend((ROOT / script).parent)
    importlib.import_module(Path(script).stem).main([*words, *(f"--{name}={value}" for name, value in options.items())])
    assert {path.name for path in Path("runs/chat").iterdir()} >= {"adapter", "merged"}


def test_a_stock_trainer_takes_optimizer_scheduler_and_callback(pieces: list[str], tmp_path: Path) -> None:
    first, second = pieces
    model = convert(make_tiny())
    optimizer = create_sel_optimizer(model, lr=LR)
    schedule = {"num_warmup_steps": 1, "num_training_steps": 3}
    filled = {
        "create_sel_optimizer": lambda _: optimizer,
        "create_sel_scheduler": lambda _: create_sel_scheduler(optimizer, "linear", **schedule),
    }
    reporter = Reporter()  # as TensorBoardCallback needs a package that is no requirement
    given = eval(f"dict({first})", filled)
    more = eval(f"dict({second})", {"SELCallback": SELCallback, "TensorBoardCallback": lambda: reporter})
    arguments = make_arguments(tmp_path, max_steps=3, report_to=more.pop("report_to"))
    trainer = Trainer(model, arguments, train_dataset=make_data(), **given, **more)
    trainer.train()
    assert trainer.optimizer is optimizer or trainer.optimizer.optimizer is optimizer
    assert sum("sel/scale/exp_scale/q_proj" in log for log in reporter.logs) == 3


# --------------------------------------------------------------------------------------------------- calls


def count_folds(model: PeftModel) -> int:
    """Return how often two passes, backward too if there are gradients, compute the weight of each layer."""
    folds, compute = [], SELLayer._fold_inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SELLayer, "_fold_inputs", lambda layer, *a: folds.append(layer) or compute(layer, *a))
        for _ in range(2):
            loss = model(TOKENS, labels=TOKENS).loss
            if loss.requires_grad:
                loss.backward()
    assert set(folds) == set(sel_layers(model))
    return len(folds) // len(set(folds))


def test_calls_of_a_model(pieces: list[str]) -> None:
    model = convert(make_tiny())
    model.train()
    names = {"model": model, "train": model.train}
    calls = dict.fromkeys(pieces)
    for piece in [piece for piece in calls if piece.startswith("model.")]:
        calls[piece] = eval(piece, names)
    assert not model.training
    assert eval("train()", names) is model and model.training
    with calls["model.base_model.accumulate_gradients()"]:
        assert count_folds(model) == 1
    assert count_folds(model) == 2
    model.eval()
    with torch.no_grad():
        assert count_folds(model) == 2  # as keep_effective_weights(False) says
        model.base_model.keep_effective_weights()
        assert count_folds(model) == 1
    rows = {"adapter_names": ["default", "__base__"]}
    (keyword,) = set(pieces) - {"train()"} - {piece for piece in pieces if piece.startswith("model.")}
    with torch.no_grad():
        mixed = eval(f"model(tokens, {keyword}rows)", {**names, "tokens": TOKENS, "rows": rows["adapter_names"]})
        with model.disable_adapter():
            assert torch.equal(mixed.logits[1], model(TOKENS[1:]).logits[0])


def test_an_adapter_is_saved_and_exchanged(pieces: list[str], tmp_path: Path) -> None:
    call, keyword = sorted(pieces, key=len, reverse=True)
    model = convert(make_tiny())
    names = {"peft_sel": peft_sel, "model": model, "folder": tmp_path / "adapter"}
    eval(call, names)
    with pytest.raises(OutputExistsError):
        eval(call, names)
    train_steps(model)
    eval(call.replace(")", f", {keyword})"), names)
    loaded = PeftModel.from_pretrained(make_tiny(), tmp_path / "adapter")
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))


def test_another_base_is_taken_on_demand(pieces: list[str], tmp_path: Path) -> None:
    (keyword,) = pieces
    other = make_tiny()
    other.save_pretrained(tmp_path / "other")
    base = make_tiny()
    with torch.no_grad():
        base.get_submodule("model.layers.1.mlp.up_proj").weight[0, 5] = 0.25
    convert(base).save_pretrained(tmp_path / "adapter")
    names = {"load": PeftModel.from_pretrained, "merge": merge_checkpoint, "base": other, "folder": tmp_path}
    for call in ("load(base, folder / 'adapter'", "merge(folder / 'other', folder / 'adapter', folder / 'merged'"):
        with pytest.raises(peft_sel.SELError, match=r"layers\.1\.mlp\.up_proj"):
            eval(f"{call})", names)
        eval(f"{call}, {keyword})", {**names, "base": make_tiny()})
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_an_optimizer_of_8_bits_takes_the_groups(pieces: list[str]) -> None:
    (piece,) = pieces
    model, optimizer = (
        convert(make_tiny()),
        SimpleNamespace(AdamW8bit=torch.optim.AdamW),
    )  # test_low_bit.py has the real
    names = {"bitsandbytes": SimpleNamespace(optim=optimizer), "create_sel_optimizer": create_sel_optimizer}
    made = eval(piece.replace("...", str(LR)), {**names, "model": model})
    assert isinstance(made, torch.optim.AdamW) and len(made.param_groups) > 3


def test_a_factor_of_ones_own_is_on_each_rate(pieces: list[str]) -> None:
    (keyword,) = pieces
    model = convert(make_tiny())
    names = {"groups": sel_param_groups, "model": model, "double": lambda name, parameter: 2.0}
    plain, doubled = (eval(f"groups(model, 0.5{end})", names) for end in ("", f", {keyword}double"))
    assert [group["lr"] for group in doubled] == [2 * group["lr"] for group in plain]


def test_scales_take_a_multiplier(pieces: list[str]) -> None:
    (piece,) = pieces
    scales = {name: eval(piece, vars(peft_sel)) for name in ("exp_scale", "linear_scale", "inner_multiplier")}
    model = convert(make_tiny("qwen3"), init_target="xavier_uniform", mode="congruent", **scales)
    rates = {group["role"]: (group["lr"], group["lr_mult_end"]) for group in sel_param_groups(model, LR)}
    assert [rates[name] for name in scales] == [(LR, 1.0)] * 3


def test_a_recipe_streams(pieces: list[str], tmp_path: Path) -> None:
    (piece,) = pieces
    write_documents(tmp_path / "text.jsonl")
    recipe = load_recipe(write_recipe(tmp_path, **yaml.safe_load(piece)))
    assert recipe.data.streaming  # test_streaming.py trains with it


# ------------------------------------------------------------------------------------------------------- the rest


def check_command(words: list[str], tmp_path: Path) -> None:
    """Check a command: its file or target is there, its arguments are what the program takes."""
    program, *rest = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = [word for word in rest if "=" not in word]
        assert targets and all(f"\n{target}:" in makefile for target in targets)
        assert all(re.search(rf"^{word.split('=')[0]} \?=", makefile, re.MULTILINE) for word in rest if "=" in word)
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
    elif rest == ["COMMAND", "--help"] or len(rest) == 1:
        for command in ("train", "merge", "export", "inspect", "plot", "demo") if len(rest) == 2 else rest:
            with pytest.raises(SystemExit) as end:
                make_parser().parse_args([command, "--help"])
            assert end.value.code == 0
    else:
        assert make_parser().parse_args(rest)
        assert all((ROOT / word).is_file() for word in rest if word.startswith("configs/"))


@pytest.mark.parametrize("piece", REST)
def test_the_rest_is_right(piece: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if COMMANDS.match(piece):
        check_command(shlex.split(piece), tmp_path)
    elif piece.startswith("--set "):
        override = make_parser().parse_args(["train", "CONFIG.yaml", *shlex.split(piece)]).overrides
        write_documents(tmp_path / "text.jsonl")
        if "section.key" not in piece:
            load_recipe(write_recipe(tmp_path), override)
    elif re.match(r"\w+=", piece):
        name, _, value = piece.partition("=")  # a field of SELConfig; what else takes a keyword gets a test above
        options = {"mode": "exp_only"} if name == "family" else {}  # README names damped with it
        assert getattr(SELConfig(**{**options, name: ast.literal_eval(value)}), name) == ast.literal_eval(value)
    else:
        pytest.fail("nothing runs this; write a test and name it in RUN_BY, or put it into other words")
