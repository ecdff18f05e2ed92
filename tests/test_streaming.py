"""Text that is streamed: the same blocks as a plain loop makes, in the same order however read, entered anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import processes
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import EOS, make_documents, make_tokenizer, save_checkpoint, write_documents, write_recipe
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from peft_sel import packing, streams
from peft_sel.data import DataSection, load_blocks
from peft_sel.errors import ConfigError, DataFileError, RecipeError, SELError
from peft_sel.jobs import MARKS_FILE, run_job
from peft_sel.packing import Packer, Piece
from peft_sel.recipe import load_recipe
from peft_sel.streams import BlockStream

LENGTH = 32


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of make_documents, about 240 characters, are tokenised in pieces, and packed a few at a time."""
    monkeypatch.setattr(packing, "PIECE", 100)


def open_stream(tokenizer: PreTrainedTokenizerBase | None = None, **options: Any) -> tuple[BlockStream, Dataset | None]:
    section = DataSection(**{"sequence_length": LENGTH, "streaming": True, **options})
    stream, held_out = load_blocks(section, tokenizer or make_tokenizer())
    assert isinstance(stream, BlockStream)
    return stream, held_out


def take(stream: BlockStream, count: int) -> list[list[int]]:
    return [block["input_ids"].tolist() for block in islice(stream, count)]


def expected_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase | None = None) -> list[list[int]]:
    """The blocks by their definition: each document tokenised as a whole, all joined, cut, the rest dropped."""
    tokenizer = tokenizer or make_tokenizer()
    tokens: list[int] = []
    for text in filter(None, documents):
        ids = tokenizer(text)["input_ids"]
        tokens += ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
    return [tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH + 1, LENGTH)]


def write_every_kind(folder: Path, documents: list[str]) -> dict[str, dict[str, Any]]:
    """Write documents to files of each kind, several of each, and return the options that name them."""
    half = len(documents) // 2
    (folder / "set").mkdir()
    for part, some in enumerate((documents[:half], documents[half:])):
        write_documents(folder / f"{part}.jsonl", some)
        Dataset.from_dict({"other": some, "text": some}).to_parquet(folder / f"{part}.parquet", batch_size=7)
        shutil.copy(folder / f"{part}.parquet", folder / "set" / f"train-{part}.parquet")
    for index, text in enumerate(documents):
        (folder / f"{index:03}.txt").write_text(text)
    files = {kind: {"files": str(folder / f"*.{kind}")} for kind in ("jsonl", "parquet", "txt")}
    return {**files, "dataset": {"dataset": str(folder / "set")}}


# -------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.usefixtures("small_pieces")
def test_every_kind_streams_the_documents_end_to_end(tmp_path: Path) -> None:
    documents = [text.replace("slope ", "slope\n\n  ") for text in make_documents(30)]
    documents[3:3] = ["", "x"]
    blocks = expected_blocks(documents)
    for name, options in write_every_kind(tmp_path, documents).items():
        stream, held_out = open_stream(**options)
        assert held_out is None
        assert take(stream, 2 * len(blocks) + 5) == [*blocks, *blocks, *blocks[:5]], name  # pass after pass


def test_no_token_is_lost_between_a_thousand_documents(tmp_path: Path) -> None:
    documents = [f"{number:04}" for number in range(2500)]
    file = str(write_documents(tmp_path / "a.jsonl", documents))
    blocks = expected_blocks(documents)
    assert take(open_stream(files=file)[0], len(blocks)) == blocks
    mapped, _ = load_blocks(DataSection(files=file, sequence_length=LENGTH, validation_share=0.0), make_tokenizer())
    assert mapped["input_ids"][:] == blocks


def with_start_and_end() -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    pair = [("<bos>", tokenizer.bos_token_id), (EOS, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=pair)
    return tokenizer


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", [with_start_and_end, lambda: ByT5Tokenizer(extra_ids=0)], ids=["start", "bytes"])
def test_special_tokens_stand_at_the_ends_of_documents_alone(make: Any, tmp_path: Path) -> None:
    tokenizer, documents = make(), make_documents(8)
    blocks = expected_blocks(documents, tokenizer)
    stream, _ = open_stream(tokenizer, files=str(write_documents(tmp_path / "a.jsonl", documents)))
    assert take(stream, len(blocks)) == blocks


def test_special_tokens_that_the_text_has_are_not_doubled() -> None:
    tokenizer = with_start_and_end()
    packer = Packer(tokenizer, 4)
    assert packer.pack([Piece("<bos>ab<eos>", True, True), Piece("", True, True)]) == [
        [tokenizer.bos_token_id, *tokenizer("ab", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]
    assert packer.rest == [] and packer.pack([Piece("", True, False), Piece("", False, True)]) == []


@pytest.mark.parametrize("text", ["a b\n\nc " * 60, "word " * 90, "x" * 1001, "", "\n" * 300])
def test_pieces_are_the_text_cut_where_a_line_or_word_ends(text: str, tmp_path: Path, small_pieces: None) -> None:
    (tmp_path / "a.txt").write_text(text)
    with open(tmp_path / "a.txt", encoding="utf-8") as file:
        pieces = list(packing.cut_pieces(file.read))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= 100 for piece in pieces) or text == ""
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for piece, following in pairwise(pieces):
        if "c" in text:
            assert piece.text.endswith("\n") and not following.text[0].isspace()
        elif "w" in text:
            assert piece.text.endswith("d") and following.text.startswith(" ")


def test_conversations_stream_as_their_chat_template_says(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    chats = [[{"role": "user", "content": text}, {"role": "model", "content": "so"}] for text in make_documents(6)]
    lines = [json.dumps({"chat": chat, "id": index}) for index, chat in enumerate([*chats, None, []])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    Dataset.from_dict({"chat": chats}).to_parquet(tmp_path / "a.parquet")
    blocks = expected_blocks([f"<user> {chat[0]['content']}\n<model> so\n" for chat in chats])
    for name in ("a.jsonl", "a.parquet"):
        stream, _ = open_stream(tokenizer, files=str(tmp_path / name), messages_column="chat")
        assert take(stream, len(blocks)) == blocks


@pytest.mark.usefixtures("small_pieces")
def test_max_documents_counts_documents_not_pieces(tmp_path: Path) -> None:
    documents = make_documents(9)
    blocks = expected_blocks(documents[:4])
    for name, options in write_every_kind(tmp_path, documents).items():
        stream, _ = open_stream(**options, max_documents=4)
        assert take(stream, len(blocks) + 1) == [*blocks, blocks[0]], name


@pytest.mark.parametrize("streaming", [True, False])
def test_held_out_blocks_are_the_first_ones_and_never_trained_on(streaming: bool, tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl"))
    blocks = expected_blocks(make_documents())
    section = DataSection(files=file, sequence_length=LENGTH, streaming=streaming, validation_blocks=7)
    train, held_out = load_blocks(section, make_tokenizer())
    assert held_out is not None and held_out["input_ids"][:] == blocks[:7] == held_out["labels"][:]
    if isinstance(train, BlockStream):
        number = len(blocks) - 7
        assert take(train, number + 9) == [*blocks[7:], *blocks[7:16]]
    else:
        assert train["input_ids"][:] == blocks[7:]


def test_streamed_help_pages_are_those_of_the_map(tmp_path: Path) -> None:
    mapped, _ = load_blocks(
        DataSection(dataset="pydoc_topics", max_documents=5, validation_share=0.0), make_tokenizer()
    )
    stream, _ = open_stream(dataset="pydoc_topics", max_documents=5, sequence_length=512)
    assert take(stream, len(mapped)) == mapped["input_ids"][:]


# --------------------------------------------------------------------------------------------------------- order


def test_shuffled_blocks_are_those_of_each_lot_in_another_order(tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl"))
    blocks = expected_blocks(make_documents())
    orders = []
    for seed in (0, 0, 1):
        stream, _ = open_stream(files=file, shuffle_blocks=50, shuffle_seed=seed)
        orders.append(take(stream, 2 * len(blocks)))
    first, second = orders[0][: len(blocks)], orders[0][len(blocks) :]
    for read in (first, second):
        for start in range(0, len(blocks), 50):
            assert sorted(read[start : start + 50]) == sorted(blocks[start : start + 50])
        assert read[:50] != blocks[:50]
        places = [[blocks.index(block) - start for block in read[start : start + 50]] for start in (0, 50)]
        assert places[0] != places[1]
    assert first != second and orders[0] == orders[1] != orders[2]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")  # on few cores
@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
def test_order_does_not_depend_on_the_number_of_workers(kind: str, tmp_path: Path) -> None:
    documents = make_documents(12)
    options = write_every_kind(tmp_path, documents)[kind]
    blocks = expected_blocks(documents)
    for workers in (0, 1, 3):
        loader = DataLoader(open_stream(**options)[0], batch_size=4, num_workers=workers)
        batches = list(islice(loader, len(blocks) // 4))
        assert torch.cat([batch["input_ids"] for batch in batches]).tolist() == blocks[: len(blocks) // 4 * 4]


# -------------------------------------------------------------------------------------------------------- resume


@pytest.fixture
def close_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MARK_EVERY", 10)


@pytest.mark.usefixtures("small_pieces", "close_marks")
@pytest.mark.parametrize("shuffle", [0, 7])
def test_a_stream_can_be_entered_anywhere(shuffle: int, tmp_path: Path) -> None:
    documents = make_documents(30)
    for kind, options in write_every_kind(tmp_path, documents).items():
        number = len(expected_blocks(documents)) - 3
        options = {**options, "shuffle_blocks": shuffle, "validation_blocks": 3}
        straight, _ = open_stream(**options)
        straight.keep_marks(tmp_path / kind / MARKS_FILE, writes=True)
        blocks = take(straight, 2 * number + 40)
        marks = [json.loads(line) for line in (tmp_path / kind / MARKS_FILE).read_text().splitlines()]
        assert len(marks) > 2 * number // 20 and {mark["number"] for mark in marks} == {0, 1, 2}
        for start in (1, 9, 10, 55, number - 1, number, number + 1, 2 * number + 20):
            entered, _ = open_stream(**options)
            entered.keep_marks(tmp_path / kind / MARKS_FILE, writes=False)
            entered.discard(start)
            found = take(entered, len(blocks))
            assert found[start:] == blocks[start:], (kind, start)
            stand_ins = sum(block == [-1] * LENGTH for block in found)
            assert start - 10 - 2 * max(shuffle, 1) - 8 < stand_ins <= start, (kind, start)  # a batch fills up to 8


@pytest.mark.usefixtures("close_marks")
def test_marks_of_another_text_or_half_a_line_are_not_used(tmp_path: Path) -> None:
    file, marks = write_documents(tmp_path / "a.jsonl"), tmp_path / MARKS_FILE
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    stream, _ = open_stream(files=str(file))
    stream.keep_marks(marks, writes=True)
    take(stream, 60)
    lines = marks.read_text().splitlines(keepends=True)
    marks.write_text("".join(lines[:3]) + lines[3][:20])
    write_documents(file, [*make_documents(), "more"])
    changed, _ = open_stream(files=str(file))
    changed.keep_marks(marks, writes=False)
    changed.discard(50)
    assert take(changed, 60) == expected_blocks([*make_documents(), "more"])[:60]
    write_documents(file)
    os.utime(file, ns=times)
    again, _ = open_stream(files=str(file))
    again.keep_marks(marks, writes=False)
    again.discard(60)
    assert sum(block == [-1] * LENGTH for block in take(again, 70)) == json.loads(lines[2])["block"]


def other_vocabulary() -> PreTrainedTokenizerBase:
    """Make a tokenizer of the same class and length, in which two tokens have each other's numbers."""
    saved = json.loads(make_tokenizer().backend_tokenizer.to_str())
    words = saved["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved)), eos_token=EOS)


def other_end() -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "!"
    return tokenizer


def test_identity_sees_an_edit_that_keeps_the_size_and_another_tokenizer(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a.jsonl")
    first, same = (open_stream(files=str(file))[0].identity for _ in range(2))
    others = [open_stream(make(), files=str(file))[0].identity for make in (other_vocabulary, other_end)]
    file.write_text(file.read_text().replace("raw", "war"))
    state = file.stat()
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1000))  # clocks of some file systems tick slowly
    edited = open_stream(files=str(file))[0].identity
    assert first == same and len({first, *others, edited}) == 4


def read_losses(folder: Path) -> list[float]:
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.usefixtures("close_marks")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_resumed_job_equals_the_straight_one(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl", make_documents(8))  # 60 blocks: the job goes over them twice
    training = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 3}
    options = {"streaming": True, "validation_blocks": 2, "shuffle_blocks": 4, "sequence_length": LENGTH}
    file = write_recipe(tmp_path, training={**training, "dataloader_num_workers": workers}, data=options)
    batch = ["training.per_device_train_batch_size=4", "training.eval_strategy=steps", "training.eval_steps=3"]
    report = run_job(load_recipe(file, [*batch, f"output_dir={tmp_path / 'straight'}"]))
    assert report is not None and report.eval_loss is not None
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "adapter")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-8")
    discarded = []
    monkeypatch.setattr(BlockStream, "discard", lambda self, blocks: discarded.append(blocks) or discard(self, blocks))
    run_job(load_recipe(file, [*batch, f"output_dir={tmp_path / 'resumed'}", "training.resume_from_checkpoint=true"]))
    assert discarded == [5 * 3 * 4]
    assert len(read_losses(tmp_path / "straight")) == 8
    assert read_losses(tmp_path / "resumed") == read_losses(tmp_path / "straight")
    again = [f"output_dir={tmp_path / 'again'}", f"training.resume_from_checkpoint={tmp_path / 'resumed/checkpoint-5'}"]
    run_job(load_recipe(file, [*again, "training.max_steps=6", "training.per_device_train_batch_size=1"]))
    finished = [*again, f"training.resume_from_checkpoint={tmp_path / 'straight/checkpoint-8'}"]
    run_job(load_recipe(file, [*batch, *finished, f"output_dir={tmp_path / 'finished'}"]))
    assert discarded == [5 * 3 * 4, 5 * 3 * 1, 0]  # what the Trainer of each run skips, no block more
    one, two = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("straight", "resumed"))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())


discard = BlockStream.discard


# ----------------------------------------------------------------------------------------------------- processes


def test_two_processes_share_the_blocks_of_one(tmp_path: Path) -> None:
    documents = make_documents(12)
    write_documents(tmp_path / "text.jsonl", documents)
    processes.launch(Path(__file__).parent / "stream_worker.py", tmp_path)
    number = len(expected_blocks(documents))
    for found in json.loads((tmp_path / "found.json").read_text()):
        one, two = found["ranks"]
        assert len(one) == len(two) == found["batches"] and 4 * len(one) > number + 10  # into the second pass
        stream, _ = open_stream(files=str(tmp_path / "text.jsonl"), shuffle_blocks=5)
        together = [block for both in zip(one, two, strict=True) for batch in both for block in batch]
        assert together == take(stream, 4 * found["first"] + len(together))[4 * found["first"] :]


@pytest.mark.slow
@pytest.mark.usefixtures("close_marks")
def test_two_processes_resume_as_one_trains(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base")
    write_documents(tmp_path / "text.jsonl", make_documents(8))
    training = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "use_cpu": True}
    file = write_recipe(tmp_path, training=training, data={"streaming": True, "sequence_length": LENGTH})
    run_job(load_recipe(file, [f"output_dir={tmp_path / 'one'}", "training.per_device_train_batch_size=4"]))
    command = ["-m", "peft_sel.cli", "train", str(file), "--set"]
    processes.launch(*command, f"output_dir={tmp_path / 'two'}")
    shutil.copytree(tmp_path / "two", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "adapter")
    shutil.rmtree(tmp_path / "again" / "checkpoint-8")
    processes.launch(*command, f"output_dir={tmp_path / 'again'}", "--set", "training.resume_from_checkpoint=true")
    one, two, again = (read_losses(tmp_path / name) for name in ("one", "two", "again"))
    assert two == again and two == pytest.approx(one, rel=1e-4)


# -------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["text", "json"])
def test_reading_holds_a_piece_and_not_the_file(kind: str, tmp_path: Path) -> None:
    line = "raw weights become effective weights\n"
    if kind == "text":
        (tmp_path / "a.txt").write_text(line * 400_000)  # 15 MB, one document
    else:
        write_documents(tmp_path / "a.jsonl", [line * 100] * 4_000)
    content = packing.Content("text_column", "text", make_tokenizer())
    source = streams.FileSource([str(next(tmp_path.glob("a.*")))], kind, content)
    tracemalloc.start()
    try:
        length = sum(len(piece.text) for pieces, _ in source.read(None) for piece in pieces)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert length == 400_000 * len(line) and peak < 8 * packing.PIECE


# -------------------------------------------------------------------------------------------------------- errors


def damage(folder: Path, kind: str) -> None:
    """Write a file that a stream cannot read to its end, behind a first one that it can."""
    write_documents(folder / "0.jsonl")
    good = [json.dumps({"text": text}) for text in make_documents()]
    lines: dict[str, list[Any]] = {
        "broken": [*good, '{"text": "cut', *good],
        "list": [*good, '["text"]'],
        "number": [*good, '{"text": 5}'],
        "bytes": [*good, '{"text": "\udcff"}'],
        "column": ['{"body": "text"}'],
    }
    if kind in lines:
        (folder / "1.jsonl").write_text("\n".join(lines[kind]) + "\n", errors="surrogateescape")
    elif kind == "array":
        (folder / "1.jsonl").write_text(f"[{','.join(good)}]")
    elif kind == "parquet":
        Dataset.from_dict({"text": make_documents()}).to_parquet(folder / "0.parquet")
        whole = (folder / "0.parquet").read_bytes()
        (folder / "1.parquet").write_bytes(whole[: len(whole) // 2])
    elif kind == "latin":
        (folder / "0.txt").write_text("a " * 50)
        (folder / "1.txt").write_bytes(b"na\xefve " * 50)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "broken",
            r"1\.jsonl, line 41: is not valid JSON \(Unterminated string.* at column 10\); repair",
        ),
        ("list", r"1\.jsonl, line 41: holds a list, not an object"),
        ("number", r"1\.jsonl, line 41: text is of type int, not text; .*data\.text_column"),
        ("bytes", r"1\.jsonl, line 41: is not valid JSON \('utf-8' codec can't decode"),
        ("column", r"text_column='text': there is no such column; .*1\.jsonl, up to line 1, has body"),
        ("array", r"1\.jsonl: is one JSON array; a stream takes JSON lines; set data\.streaming"),
        ("parquet", r"1\.parquet: is not whole parquet \(.*\); write or fetch it again"),
        ("latin", r"1\.txt: is not UTF-8 text \(invalid continuation byte\); convert it"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_when_it_is_reached(kind: str, message: str, tmp_path: Path) -> None:
    damage(tmp_path, kind)
    suffix = {"parquet": "parquet", "latin": "txt"}.get(kind, "jsonl")
    stream, _ = open_stream(files=str(tmp_path / f"*.{suffix}"))
    with pytest.raises((DataFileError, ConfigError), match=message):
        take(stream, 100_000)
    for workers in (0, 1) if kind == "column" else (0,):
        loader = DataLoader(stream, batch_size=2, num_workers=workers)
        with pytest.raises(SELError, match=rf"^({re.escape(str(tmp_path))}/)?{message}"):
            list(islice(loader, 50_000))


@pytest.mark.usefixtures("small_pieces")
def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset='.*nowhere': cannot be opened as a stream"):
        open_stream(dataset=str(tmp_path / "nowhere"))
    (tmp_path / "set").mkdir()
    Dataset.from_dict({"text": make_documents()}).to_parquet(tmp_path / "set" / "train-0.parquet")
    whole = (tmp_path / "set" / "train-0.parquet").read_bytes()
    (tmp_path / "set" / "train-1.parquet").write_bytes(whole[: len(whole) // 2])
    stream, _ = open_stream(dataset=str(tmp_path / "set"))
    with pytest.raises(DataFileError, match=r"set: cannot be read behind document 40 \("):
        take(stream, 100_000)
    with pytest.raises(ConfigError, match=r"text_column='body': there is no such column; .*set has text"):
        open_stream(dataset=str(tmp_path / "set"), text_column="body")


def test_a_text_file_has_no_other_column(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a " * 50)
    with pytest.raises(ConfigError, match=r"messages_column='chat': there is no such column; a text file has text"):
        open_stream(files=str(tmp_path / "a.txt"), messages_column="chat")


@pytest.mark.parametrize("documents", [[], [""], ["short"]])
def test_a_text_that_fills_no_block_says_so(documents: list[str], tmp_path: Path) -> None:
    file = str(write_documents(tmp_path / "a.jsonl", documents) if documents else tmp_path / "a.jsonl")
    Path(file).touch()
    with pytest.raises(ConfigError, match=r"sequence_length=32: the text fills 0 such block\(s\)"):
        open_stream(files=file)
    write_documents(Path(file), make_documents(1))
    with pytest.raises(ConfigError, match=r"fills 8 such block\(s\), 8 of them held out"):
        open_stream(files=file, validation_blocks=8)


def test_a_text_that_vanishes_while_training_ends_it(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a.jsonl", make_documents(2))
    stream, _ = open_stream(files=str(file))
    blocks: Iterator[Any] = iter(stream)
    next(blocks)
    write_documents(file, ["short"])
    with pytest.raises(DataFileError, match="no block left"):
        list(islice(blocks, 100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"validation_share": 0.1},
            "validation_share=0.1: a stream has no known length .*set validation_blocks instead",
        ),
        ({"split": "train[:1%]"}, "split='train.*: a stream cannot be sliced; .*max_documents"),
        ({"validation_blocks": -1}, "validation_blocks=-1"),
        ({"shuffle_blocks": -1}, "shuffle_blocks=-1"),
        ({"streaming": False, "shuffle_blocks": 5}, "shuffle_blocks=5: goes with streaming"),
        ({"streaming": False, "validation_share": 0.1, "validation_blocks": 5}, "not both"),
    ],
)
def test_section_refuses_what_a_stream_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSection(**{"dataset": "x", "streaming": True, **options})


def test_recipe_refuses_a_stream_before_it_loads_anything(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, data={"files": None, "dataset": "no/such", "streaming": True})
    with pytest.raises(RecipeError, match=r"recipe.yaml: training.max_steps: with data.streaming the length"):
        load_recipe(file, ["training.max_steps=-1"])
    with pytest.raises(RecipeError, match=r"training.eval_strategy: .*data.validation_blocks is 0"):
        load_recipe(file, ["training.eval_strategy=steps"])
