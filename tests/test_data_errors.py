"""Text that cannot be read: one sentence with file and line, the same whether it is streamed or mapped beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import Dataset, IterableDataset
from pyarrow import parquet
from tiny import make_documents, make_tokenizer, write_documents

from peft_sel.data import DataSection, load_blocks
from peft_sel.errors import ConfigError, DataFileError, SELError
from peft_sel.packing import Content
from peft_sel.streams import BlockStream, DatasetSource, FileSource

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


# ---------------------------------------------------------------------------------------- streamed and beforehand

BROKEN = {  # the contents of a second file, behind a whole one
    "cut.jsonl": (b'{"text": "a"}\n{"text": "cut', r"1\.jsonl, line 2: is not valid JSON \(Unterminated.*; repair"),
    "half.jsonl": (rb'{"text": "abc \ud83d def"}', rf"1\.jsonl, line 1: {HALF}"),
    "latin.jsonl": ('{"text": "é"}'.encode("latin-1"), r"1\.jsonl, line 1: is not valid JSON \('utf-8' codec"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16"), r"1\.jsonl, line 1: is not valid JSON \('utf-8' codec"),
    "latin.txt": (b"na\xefve", r"1\.txt: is not UTF-8 text \(invalid continuation byte\); convert it"),
    "utf16.txt": ("abc".encode("utf-16"), r"1\.txt: is not UTF-8 text \(invalid start byte\); convert it"),
    "bytes.parquet": (b"na\xefve", r"1\.parquet, behind row 0: holds text that is not UTF-8 \('utf-8' codec"),
    "cut.parquet": (None, r"1\.parquet: is not whole parquet \(.*\); write or fetch it again"),
    "zero.parquet": (b"", r"1\.parquet: is not whole parquet \(.*0 bytes.*\); write or fetch it again"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_has_one_sentence_streamed_and_mapped(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    suffix = Path(name).suffix
    write_documents(tmp_path / "0.jsonl")
    (tmp_path / "0.txt").write_text("a " * 50)
    Dataset.from_dict({"text": make_documents()}).to_parquet(tmp_path / "0.parquet")
    whole = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / f"1{suffix}").write_bytes(whole[: len(whole) // 2] if content is None else content)
    if name == "bytes.parquet":
        parquet.write_table(pyarrow.table({"text": pyarrow.array([content]).view("string")}), tmp_path / "1.parquet")
    said = []
    for streaming in (True, False):
        with pytest.raises(DataFileError, match=message) as raised:
            read_blocks(streaming, files=str(tmp_path / f"*{suffix}"))
        said.append(str(raised.value))
    assert said[0] == said[1] and said[0].startswith(f"{tmp_path}/1{suffix}")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_files_without_a_document_fill_no_block(streaming: bool, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"sequence_length=32: the text fills 0 such block\(s\)"):
        read_blocks(streaming, files=str(tmp_path / "a.jsonl"))


def test_what_only_the_map_refuses_names_the_files_and_the_reason(tmp_path: Path) -> None:
    line = json.dumps({"text": "word " * 40})
    (tmp_path / "a.jsonl").write_text(line.replace("}", ', "text": "again"}'))
    (tmp_path / "b.json").write_text(f"[{line}, {line[:-9]}")
    for name, reason in (("a.jsonl", "JSON parse error"), ("b.json", "")):
        with pytest.raises(DataFileError, match=rf"^\S*{name}: cannot be read \({reason}.+\); repair the text"):
            read_blocks(False, files=str(tmp_path / name))


def test_a_dataset_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"dataset='.*set': cannot be read \(.*0 bytes"):
        read_blocks(False, dataset=str(tmp_path / "set"))
    with pytest.raises(ConfigError, match=r"dataset='.*nowhere': cannot be read \(.*nowhere"):
        read_blocks(False, dataset=str(tmp_path / "nowhere"))


def test_a_full_disk_is_not_blamed_on_a_file_that_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("while generating") from OSError(28, "No space left on device")

    (tmp_path / "a.jsonl").write_text('{"text": "cut')
    monkeypatch.setattr("peft_sel.data.load_dataset", fail)
    with pytest.raises(SELError, match=r"a\.jsonl: cannot be read \(.*No space left on device\)"):
        read_blocks(False, files=str(tmp_path / "a.jsonl"))


# ----------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".txt.ZST", ".bz2", ".xz", ".zip", ".csv", ".tsv"])
def test_files_of_a_kind_that_is_not_text_are_refused_by_name(suffix: str, streaming: bool, tmp_path: Path) -> None:
    (tmp_path / f"a{suffix}").write_text("a " * 50)
    reason = (
        "is a table; convert it to JSON lines or parquet" if suffix[1:] in ("csv", "tsv") else "is packed; unpack it"
    )
    with pytest.raises(ConfigError, match=rf"^files='\S*a{suffix}': {reason}"):
        DataSection(files=str(tmp_path / "a*"), streaming=streaming)


@pytest.mark.parametrize("streaming", [True, False])
def test_ndjson_is_json_lines(streaming: bool, tmp_path: Path) -> None:
    text = "word " * 40
    write_documents(tmp_path / "a.ndjson", [text])
    (first, *_) = read_blocks(streaming, files=str(tmp_path / "a.ndjson"))
    assert _decode(first) == text[:LENGTH].encode()


@pytest.mark.parametrize("front", [b"", b"\xef\xbb\xbf", b"\n \n", b"\xef\xbb\xbf\n", b"\n" * 5000])
def test_a_json_array_is_not_streamed_and_the_way_out_works(front: bytes, tmp_path: Path) -> None:
    rows = [{"text": text} for text in make_documents(3)]
    (tmp_path / "a.json").write_bytes(front + json.dumps(rows, indent=1).encode())
    with pytest.raises(DataFileError, match=r"a\.json: is one JSON array; .*set data\.streaming to false"):
        read_blocks(True, files=str(tmp_path / "a.json"))
    if not front.strip():  # not every version of the datasets library reads an array behind a byte order mark
        write_documents(tmp_path / "b.jsonl", make_documents(3))
        assert read_blocks(False, files=str(tmp_path / "a.json")) == read_blocks(True, files=str(tmp_path / "b.jsonl"))


# -------------------------------------------------------------------------------------------------- absent columns


def test_rows_without_the_column_are_empty_documents_streamed_and_mapped(tmp_path: Path) -> None:
    rows = [{"id": 1}, *({"text": text} for text in make_documents(3)), {"id": 2}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file, options = str(tmp_path / "a.jsonl"), {"max_documents": 3}
    write_documents(tmp_path / "b.jsonl", make_documents(3))
    whole = read_blocks(True, files=str(tmp_path / "b.jsonl"))
    assert read_blocks(True, files=file) == read_blocks(False, files=file) == whole
    few = read_blocks(True, files=file, **options)
    assert few == read_blocks(False, files=file, **options) == whole[: len(few)] and len(few) < len(whole)
    source = FileSource([file], "json", Content("text_column", "text", make_tokenizer()))
    places = [place for _, place in source.read(None)]
    assert [len(list(source.read(place))) for place in places] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_column_that_no_row_has_is_refused(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"body": "a"}\n')
    with pytest.raises(ConfigError, match=r"text_column='text': there is no such column; .* has .*body"):
        read_blocks(streaming, files=str(tmp_path / "a.jsonl"))


def test_a_column_is_not_looked_for_in_a_whole_large_file(tmp_path: Path) -> None:
    line = json.dumps({"body": "a" * 2**16})
    (tmp_path / "a.jsonl").write_text("\n".join([line] * 161) + "\n{broken")  # 10 MiB
    with pytest.raises(ConfigError, match=r"a\.jsonl, up to line 160, has body"):
        read_blocks(True, files=str(tmp_path / "a.jsonl"))


# --------------------------------------------------------------------------------------------------- max_documents


def test_no_document_is_read_behind_the_last_one_wanted(tmp_path: Path) -> None:
    texts = make_documents(2)
    write_documents(tmp_path / "a.jsonl", texts)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("{broken\n")
    (tmp_path / "b.jsonl").write_text("[broken")
    content = Content("text_column", "text", make_tokenizer())
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]

    def make_rows() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in texts)
        raise OSError("the connection is lost")

    rows = IterableDataset.from_generator(make_rows)
    sources = FileSource(files, "json", content, 2), DatasetSource(rows, "the set", content, 2)
    for source in sources:
        read = list(source.read(None))
        assert ["".join(piece.text for piece in pieces) for pieces, _ in read] == texts
        assert list(source.read(read[-1][1])) == []
        assert len(list(source.read(read[0][1]))) == 1
