from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.utils
import pytest
import torch
import transformers.utils.logging
from datasets import Dataset
from peft import PeftConfig, PeftModel
from processes import launch
from safetensors.torch import load_file
from tiny import make_documents, make_tokenizer, save_checkpoint, write_documents, write_recipe
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

from peft_sel import ScaleConfig, SELConfig, SELError
from peft_sel.data import DataSection, load_blocks
from peft_sel.errors import CheckpointError, ConfigError, OutputExistsError, RecipeError
from peft_sel.jobs import MARKS_FILE, JobProgress, hide_bars_outside_terminals, run_job
from peft_sel.origins import resolve_checkpoint
from peft_sel.plots import read_logs
from peft_sel.recipe import BASE_FOLDER, ModelSection, build_recipe, load_recipe

JOB_WORKER = Path(__file__).parent / "job_worker.py"


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint (base) and text (text.jsonl)."""
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl")
    return tmp_path


def section(**options: Any) -> DataSection:
    return DataSection(**{"sequence_length": 64, "validation_share": 0.0, **options})


# ---------------------------------------------------------------------------------------------------------- text


def test_blocks_are_the_documents_end_to_end(tmp_path: Path) -> None:
    tokenizer, documents = make_tokenizer(), make_documents(5)
    train, held_out = load_blocks(section(files=str(write_documents(tmp_path / "a.jsonl", documents))), tokenizer)
    assert held_out is None
    stream = [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    flat = [token for block in train["input_ids"] for token in block]
    assert flat == stream[: len(stream) // 64 * 64] and len(stream) - len(flat) < 64
    assert train["labels"][:] == train["input_ids"][:]  # the end-of-text token is a label like any other


def test_every_kind_of_file_gives_the_same_blocks(tmp_path: Path) -> None:
    tokenizer, documents = make_tokenizer(), [text.replace("slope ", "slope\n\n") for text in make_documents(6)]
    write_documents(tmp_path / "a.jsonl", documents)
    Dataset.from_dict({"text": documents}).to_parquet(tmp_path / "a.parquet")
    for index, text in enumerate(documents):
        (tmp_path / f"{index}.txt").write_text(text)
    sources = ["a.jsonl", "a.parquet", "*.txt"]
    blocks = [load_blocks(section(files=str(tmp_path / name)), tokenizer)[0]["input_ids"][:] for name in sources]
    assert blocks[0] and blocks[0] == blocks[1] == blocks[2]


def test_held_out_blocks_are_the_last_ones(tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl"))
    whole, _ = load_blocks(section(files=file), make_tokenizer())
    train, held_out = load_blocks(section(files=file, validation_share=0.1), make_tokenizer())
    assert held_out is not None and len(held_out) == -(-len(whole) // 10)
    assert train["input_ids"][:] + held_out["input_ids"][:] == whole["input_ids"][:]


def test_an_end_of_text_token_is_not_doubled(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a.jsonl", ["x" * 31 + "<eos>", "", "y" * 31])
    (block,) = load_blocks(section(files=str(file)), make_tokenizer())[0]["input_ids"]
    assert [index for index, token in enumerate(block) if token == make_tokenizer().eos_token_id] == [31, 63]


def test_max_documents_reads_the_first_ones(tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl"))
    few, _ = load_blocks(section(files=file, max_documents=3), make_tokenizer())
    whole, _ = load_blocks(section(files=file), make_tokenizer())
    assert 0 < len(few) < len(whole) and few["input_ids"][:] == whole["input_ids"][: len(few)]


def test_text_that_cannot_work_says_why(tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl", ["short"]))
    with pytest.raises(ConfigError, match=r"sequence_length=64: .* fills 0 such"):
        load_blocks(section(files=file), make_tokenizer())
    with pytest.raises(ConfigError, match=r"text_column='body': there is no such column; the data has text"):
        load_blocks(section(files=file, text_column="body"), make_tokenizer())
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_blocks(section(files=file), tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either files or dataset"),
        ({"files": "no/such/*.txt"}, "files='no/such/.*no such file"),
        ({"dataset": "x", "sequence_length": 1}, "sequence_length=1"),
        ({"dataset": "pydoc_topics", "split": "test"}, "dataset='pydoc_topics': has no"),
        ({"dataset": "x", "validation_share": 1.0}, "validation_share=1.0"),
        ({"dataset": "x", "max_documents": 0}, "max_documents=0"),
        ({"files": ["test_jobs.py", "*.jsonl"]}, "different kinds"),
    ],
)
def test_data_section_refuses(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_jobs.py").touch()
    (tmp_path / "a.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DataSection(**options)


# ------------------------------------------------------------------------------------------------------- recipes


def test_recipe_and_overrides(folder: Path) -> None:
    file = write_recipe(folder, sel={"r": 4, "exp_scale": {"pattern": "row", "lr_mult": 5}, "offset": "column"})
    overrides = [
        "training.learning_rate=1e-4",
        "training.save_strategy=no",
        "sel.mode=congruent",
        "sel.exp_scale.lr_mult=7",
        "merge=true",
    ]
    recipe = load_recipe(file, overrides)
    assert recipe.training.learning_rate == 1e-4 and recipe.training.save_strategy == "no"  # text and False to YAML 1.1
    assert recipe.training.max_steps == 4 and recipe.training.output_dir == str(folder / "out") and recipe.merge
    assert (recipe.sel.r, recipe.sel.mode, recipe.sel.task_type) == (4, "congruent", "CAUSAL_LM")
    assert recipe.sel.exp_scale == ScaleConfig("row", lr_mult=7.0) and recipe.sel.offset == ScaleConfig("column")


@pytest.mark.parametrize("cache", [None, "", "/elsewhere"])
def test_the_cache_folder_is_where_the_demo_puts_it(cache: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(DataSection, "find_files", lambda self: [])
    folder = "/elsewhere/peft_sel" if cache else "~/.cache/peft_sel"
    paths = ["~/.cache/peft_sel/a.jsonl", "~/.cache/other/b.jsonl"]
    training = {"run_name": "~/.cache/peft_sel/run"}
    tree = {"model": {"path": "~/.cache/peft_sel/x"}, "data": {"files": paths}, "training": training}
    recipe = build_recipe({**tree, "output_dir": "~/.cache/peft_sel/out"}, source="test", default_output_dir="runs/out")
    assert recipe.model.path == f"{folder}/x" and recipe.data.files == [f"{folder}/a.jsonl", paths[1]]
    assert recipe.output_dir == Path.home() / ".cache/peft_sel/out"  # what is written goes where the recipe says
    assert recipe.training.run_name == training["run_name"]
    one_file = build_recipe({**tree, "data": {"files": paths[0]}}, source="test", default_output_dir="runs/out")
    assert one_file.data.files == f"{folder}/a.jsonl"


def test_an_empty_recipe_section_means_the_defaults(folder: Path) -> None:
    tree = {"model": {"path": "x"}, "data": {"dataset": "y"}, "sel": None}
    recipe = build_recipe(tree, source="test", default_output_dir=folder / "out")
    expected = dataclasses.replace(SELConfig(), task_type="CAUSAL_LM")
    assert recipe.sel == expected and recipe.data == DataSection(dataset="y") and not recipe.merge
    assert recipe.output_dir == folder / "out" and recipe.training.learning_rate == 5e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": {}}, "modle: unknown key; did you mean model"),
        ({"sel": {"mod": "mismatch"}}, "sel.mod: unknown key; did you mean mode"),
        ({"sel": {"peft_type": "LORA"}}, "sel.peft_type: unknown key"),
        ({"sel": {"exp_scale": {"patern": "row"}}}, "sel.exp_scale.patern: unknown key; did you mean pattern"),
        ({"sel": {"exp_scale": {"pattern": "diagonal"}}}, "sel.exp_scale: pattern='diagonal': unknown"),
        ({"sel": {"mode": "sideways"}}, "sel: mode='sideways': unknown"),
        ({"sel": {"beta": -1.0}}, "sel: beta=-1.0"),
        ({"sel": {"train_raw": "maybe"}}, "sel.train_raw: 'maybe' is not of type bool"),
        ({"sel": "mismatch"}, "sel: must hold"),
        ({"training": {"learning_rat": 1}}, "training.learning_rat: unknown key; did you mean learning_rate"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate: 'fast' is not of type float"),
        ({"training": {"max_steps": 2.5}}, "training.max_steps: 2.5 is not of type int"),
        ({"training": {"max_steps": True}}, "training.max_steps: True is not of type int"),
        ({"training": {"lr_scheduler_type": "linaer"}}, "training.lr_scheduler_type: .*'linaer'; did you mean linear"),
        ({"training": {"output_dir": "x"}}, "training.output_dir: unknown key"),
        (
            {"training": {"eval_strategy": "steps"}, "data": {"validation_share": 0}},
            "training.eval_strategy: there is nothing to evaluate on",
        ),
        ({"data": {"files": "nothing.txt"}}, "data: files='nothing.txt': there is no such file"),
        ({"model": {"dtype": "int8"}}, "model: dtype='int8': unknown"),
        ({"merge": "perhaps"}, "merge: 'perhaps' is not of type bool"),
    ],
)
def test_recipe_error_names_file_and_key(folder: Path, changes: dict[str, Any], message: str) -> None:
    file = write_recipe(folder, **changes)
    with pytest.raises(RecipeError, match=f"recipe.yaml: {message}"):
        load_recipe(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: {dataset: x}", "model: this section is missing"),
        ("model: {dtype: auto}\ndata: {dataset: x}", "model.path: this key is missing"),
        ("- a list", "the file: must hold `key: value` lines"),
        ("model: [unclosed", "not valid YAML"),
    ],
)
def test_recipe_that_is_no_recipe(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=f"recipe.yaml: {message}"):
        load_recipe(file)
    with pytest.raises(RecipeError, match=r"absent.yaml: .*No such file"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_steps", "--set: training.max_steps: write section.key=value"),
        (".max_steps=1", "write section.key=value"),
        ("output_dir.x=1", "output_dir is a value, not a section"),
        ("training.max_steps=[1", "--set: "),
        ("training.max_stps=1", "training.max_stps: unknown key; did you mean max_steps"),
    ],
)
def test_bad_override(folder: Path, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(write_recipe(folder), [override])


def test_every_default_may_be_written_down(tmp_path: Path) -> None:
    sections = {"model": ModelSection, "data": DataSection, "sel": SELConfig, "training": TrainingArguments}
    elsewhere = {"output_dir", *(field.name for field in dataclasses.fields(PeftConfig))}
    tree: dict[str, Any] = {
        name: {
            field.name: getattr(field.default, "value", field.default)
            for field in dataclasses.fields(cls)
            if field.name not in elsewhere and field.default is not dataclasses.MISSING
        }
        for name, cls in sections.items()
    }
    tree["model"]["path"], tree["data"]["dataset"] = "x", "y"
    written = build_recipe(tree, source="test", default_output_dir=tmp_path / "out")
    del tree["sel"], tree["training"]
    default = build_recipe(tree, source="test", default_output_dir=tmp_path / "out")
    assert written.sel == default.sel
    same = dataclasses.replace(written.training, label_names=["labels"])
    assert same.to_dict() == default.training.to_dict()


# ---------------------------------------------------------------------------------------------------------- jobs


def test_job_trains_saves_and_merges(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_job(load_recipe(write_recipe(folder, training={"max_steps": 12, "learning_rate": 0.003}, merge=True)))
    assert report is not None and report.merge is not None and report.eval_loss is not None
    lines = [line for line in capsys.readouterr().out.splitlines() if "of 12  loss" in line]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    logs = read_logs(report.adapter_dir.parent)
    assert [round(entry["loss"], 3) for entry in logs if "loss" in entry] == pytest.approx(losses, abs=1e-3)
    assert logs[-1]["eval_loss"] == report.eval_loss
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    assert PeftConfig.from_pretrained(str(report.adapter_dir)).base_model_name_or_path == str(folder / "base")
    adapted = PeftModel.from_pretrained(base, report.adapter_dir).eval()
    merged = AutoModelForCausalLM.from_pretrained(report.merge.out_dir, dtype="auto").eval()
    tokens = torch.tensor(make_tokenizer()(make_documents(1)[0])["input_ids"])[None]
    with torch.no_grad():
        assert torch.equal(adapted(tokens).logits, merged(tokens).logits)


def test_job_is_the_same_every_time(folder: Path) -> None:
    adapters = []
    for name in ("one", "two"):
        run_job(load_recipe(write_recipe(folder), [f"output_dir={folder / name}"]))
        adapters.append(load_file(folder / name / "adapter" / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, adapters[1][key]) for key, tensor in adapters[0].items())


def test_resumed_job_equals_the_straight_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recipe(folder, training={"save_strategy": "steps", "save_steps": 2})
    run_job(load_recipe(file, [f"output_dir={folder / 'straight'}"]))
    shutil.copytree(folder / "straight", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "adapter")
    shutil.rmtree(folder / "resumed" / "checkpoint-4")
    capsys.readouterr()
    run_job(load_recipe(file, [f"output_dir={folder / 'resumed'}", "training.resume_from_checkpoint=true"]))
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines() if " of 4  loss" in line]
    assert steps == ["3", "4"]
    one, two = (load_file(folder / name / "adapter" / "adapter_model.safetensors") for name in ("straight", "resumed"))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_job_refuses_a_taken_folder(folder: Path) -> None:
    (folder / "out").mkdir()
    with pytest.raises(OutputExistsError, match="out already exists"):
        run_job(load_recipe(write_recipe(folder)))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run_job(load_recipe(write_recipe(folder), ["training.resume_from_checkpoint=true"]))
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        run_job(load_recipe(write_recipe(folder), ["training.resume_from_checkpoint=nowhere"]))
    assert not list((folder / "out").iterdir())


def test_advice_on_a_folder_without_a_checkpoint_leads_on(folder: Path) -> None:
    file, resumes = write_recipe(folder, training={"max_steps": 1}), ["training.resume_from_checkpoint=true"]
    with pytest.raises(CheckpointError, match=r"resume from; leave resume_from_checkpoint out$"):
        run_job(load_recipe(file, resumes))
    (folder / "out" / BASE_FOLDER).mkdir(parents=True)  # what a job that was killed early leaves
    (folder / "out" / MARKS_FILE).touch()
    with pytest.raises(
        CheckpointError, match=r"resume from; remove the folder or name another, and leave resume_from_checkpoint out$"
    ):
        run_job(load_recipe(file, resumes))
    shutil.rmtree(folder / "out")
    assert run_job(load_recipe(file)) is not None


@pytest.mark.parametrize(
    "overrides",
    [
        ["sel.target_modules=[nothing_like_this]"],
        ["sel.linear_scale={pattern: global, init: 5.0}"],
        ["training.optim=adalomo"],
        ["model.path=./nowhere"],
        ["data.sequence_length=100000"],
    ],
)
def test_job_that_fails_leaves_nothing(folder: Path, overrides: list[str]) -> None:
    with pytest.raises((SELError, ValueError, ImportError)):
        run_job(load_recipe(write_recipe(folder), overrides))
    assert not (folder / "out").exists()


def test_resolve_checkpoint(folder: Path) -> None:
    assert resolve_checkpoint(str(folder / "base")) == folder / "base"
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        resolve_checkpoint(str(folder / "nowhere"))
    with pytest.raises(CheckpointError, match=r"some/model: is neither a folder nor .* \(LocalEntryNotFoundError\)"):
        resolve_checkpoint("some/model")


@pytest.mark.filterwarnings("ignore:Could not find a config file in some/model:UserWarning")  # PEFT's, when offline
def test_adapter_remembers_the_id_of_its_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft_sel.origins.snapshot_download", lambda path, **_: folder / "base")  # as if fetched
    run_job(load_recipe(write_recipe(folder, model={"path": "some/model", "revision": "v1"})))
    config = PeftConfig.from_pretrained(str(folder / "out" / "adapter"))
    assert (config.base_model_name_or_path, config.revision) == ("some/model", "v1")


def test_the_bar_of_a_training_is_there_before_its_first_step() -> None:
    progress = JobProgress()
    progress.on_train_begin(TrainingArguments(), TrainerState(max_steps=3), TrainerControl())
    assert progress.bars["Training"].total == 3


def test_bars_are_for_terminals() -> None:
    hide_bars_outside_terminals()
    assert huggingface_hub.utils.are_progress_bars_disabled() and datasets.utils.are_progress_bars_disabled()
    assert not transformers.utils.logging.is_progress_bar_enabled()


def test_accelerate_launch_on_two_processes(folder: Path) -> None:
    save_checkpoint(folder / "base", dtype=torch.float32)
    training = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    file = write_recipe(folder, training=training, merge=True)
    run_job(load_recipe(file, [f"output_dir={folder / 'one'}"]))
    halved = ["--set", "training.per_device_train_batch_size=1"]
    done = launch(JOB_WORKER, folder, "never", "train", file, *halved)
    ends = [json.loads((folder / f"end_{rank}.json").read_text()) for rank in (0, 1)]
    assert ends == [{"others_left_in_merge": [], "has_group": False}] * 2
    lines = done.stdout.splitlines()
    starts = [f"step {step} of 4  loss" for step in (1, 2, 3, 4)] + ["adapter: ", "held-out loss: ", "merged: "]
    assert [sum(line.strip().startswith(start) for line in lines) for start in starts] == [1] * len(starts)
    assert "Warning" not in done.stderr and "Error" not in done.stderr
    assert len(list((folder / "out" / "checkpoint-4").glob("rng_state_*.pth"))) == 2
    one, two = (load_file(folder / name / "merged" / "model.safetensors") for name in ("one", "out"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert (two[name] - weight).norm() <= 1e-4 * weight.norm(), name  # as in test_ddp.py


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "rank"), [("merge", 0), ("load", 1)])
def test_job_of_two_processes_ends_if_one_fails(fails: str, rank: int, folder: Path) -> None:
    file = write_recipe(folder, merge=True)
    failed = launch(JOB_WORKER, folder, fails, "train", file, succeeds=False, timeout_s=120)
    assert failed.returncode == 1 and "peft-sel: no space" in failed.stderr
    assert not json.loads((folder / f"end_{rank}.json").read_text())["has_group"]
    assert "terminate called" not in failed.stderr


def test_processes_that_would_each_train_alone_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(write_recipe(folder))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE='2': .* in 1 process; .*set training.use_cpu: true"):
        run_job(recipe)
    assert not (folder / "out").exists()
