"""Text that cannot be read: one sentence with file and line, the same whether it is streamed or mapped beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import IterableDataset
from tiny import make_documents, make_tokenizer

from peft_sel.data import DataSection, load_blocks
from peft_sel.errors import DataFileError
from peft_sel.packing import Content
from peft_sel.streams import BlockStream, DatasetSource

LENGTH = 32
HALF = r"text holds half a character \('\\ud83d', a surrogate without its other half\); repair the text"


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def read_blocks(streaming: bool, tokenizer: Any = None, **options: Any) -> list[list[int]]:
    """Return all blocks of one pass over a text."""
    held_out = {} if streaming else {"validation_share": 0.0}
    section = DataSection(**{"sequence_length": LENGTH, "streaming": streaming, **held_out, **options})
    train, _ = load_blocks(section, tokenizer or make_tokenizer())
    return list(train.read_pass()) if isinstance(train, BlockStream) else train["input_ids"][:]


# --------------------------------------------------------------------------------------------- half a character


def test_half_a_character_is_named_in_a_stream_and_in_a_rendered_conversation(tmp_path: Path) -> None:
    good = [json.dumps({"text": text}) for text in make_documents(3)]
    (tmp_path / "a.jsonl").write_text("\n".join([*good, r'{"text": "abc \ud83d def"}', *good]))
    with pytest.raises(DataFileError, match=rf"a\.jsonl, line 4: {HALF}"):
        read_blocks(True, files=str(tmp_path / "a.jsonl"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "b.jsonl").write_text(r'{"text": [{"role": "user", "content": "abc \ud83d def"}]}')
    with pytest.raises(DataFileError, match=rf"b\.jsonl, line 1: {HALF}"):
        read_blocks(True, tokenizer, files=str(tmp_path / "b.jsonl"), messages_column="text")
    (tmp_path / "c.jsonl").write_text(r'{"text": "' + r"\ud83d\ude00" * LENGTH + '"}')  # a whole one
    assert bytes.fromhex("f09f9880") * 8 == _decode(read_blocks(True, files=str(tmp_path / "c.jsonl"))[0])


def _decode(tokens: list[int]) -> bytes:
    return str(make_tokenizer().decode(tokens)).encode()


def test_half_a_character_is_named_in_a_dataset() -> None:
    rows = IterableDataset.from_generator(lambda: iter([{"text": "good"}, {"text": "abc \ud83d def"}]))
    source = DatasetSource(rows, "the set", Content("text_column", "text", make_tokenizer()))
    with pytest.raises(DataFileError, match=rf"the set, document 2: {HALF}"):
        list(source.read(None))
