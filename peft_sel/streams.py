"""Text larger than memory: documents read one by one, as an endless stream of blocks that a resumed run can enter."""

from __future__ import annotations

import json
import random
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import datasets
import fsspec.asyn
import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

from peft_sel import packing
from peft_sel.errors import DataFileError, SELError, WorkerError
from peft_sel.packing import Content, Packer, Piece, cut_pieces

MARK_EVERY = 1000  # blocks: a resumed run tokenises at most these again, and the documents that they share with others
_SEARCHED = 10 * 2**20  # bytes of JSON lines in which one must have the column; so it is for a mapped text
_LOOK = 4096  # bytes in which the first character of a JSON file is looked for
_ROWS = 64  # of a parquet file, decoded at once
Place = dict[str, Any]  # where a source continues; JSON can hold it


class Source(Protocol):
    """Documents in a fixed order."""

    def read(self, place: Place | None) -> Iterator[tuple[list[Piece], Place]]:
        """Yield pieces of the documents behind a place, the first one for None, and the place behind the pieces."""


@dataclass(frozen=True)
class FileSource:
    """Documents of local files, one file after another.

    Attributes:
        files: Their paths.
        kind: "text" (a file is a document), "json" (lines) or "parquet".
        content: What a row holds; not for text.
        max_documents: Documents to read at most; None for all.
    """

    files: list[str]
    kind: str
    content: Content
    max_documents: int | None = None

    def read(self, place: Place | None) -> Iterator[tuple[list[Piece], Place]]:
        """Yield pieces of the documents behind a place.

        Args:
            place: As an earlier call has yielded it, or None for the start.

        Yields:
            Pieces and the place behind them.

        Raises:
            DataFileError: If a file cannot be read.
            ConfigError: If it has no such column.
        """
        first, skip, documents = (place["file"], place["item"], place["documents"]) if place else (0, 0, 0)
        if documents == self.max_documents:
            return
        read = {"text": self._read_text, "json": self._read_json_lines, "parquet": self._read_parquet}[self.kind]
        for index in range(first, len(self.files)):
            try:
                for item, pieces in read(self.files[index], skip):
                    documents += int(pieces[-1].ends)
                    yield pieces, {"file": index, "item": item, "documents": documents}
                    if documents == self.max_documents:
                        return
            except OSError as error:
                path, problem = self.files[index], f"cannot be read ({error})"
                raise DataFileError(path, problem, "see that it is there, whole and readable") from error
            skip = 0

    def _read_text(self, path: str, skip: int) -> Iterator[tuple[int, list[Piece]]]:
        """Yield the pieces of a file that is a document, but the first ones."""
        with open(path, encoding="utf-8") as file:
            try:
                for item, piece in enumerate(cut_pieces(file.read), 1):
                    if item > skip:
                        yield item, [piece]
            except UnicodeDecodeError as error:
                problem = f"is not UTF-8 text ({error.reason})"
                raise DataFileError(path, problem, "convert it, or leave it out of data.files") from error

    def _read_json_lines(self, path: str, skip: int) -> Iterator[tuple[int, list[Piece]]]:
        """Yield the documents of a file, but those in its first lines."""
        if is_json_array(path):
            way_out = "a stream takes JSON lines; set data.streaming to false if it fits into memory"
            raise DataFileError(path, "is one JSON array", way_out)
        with open(path, "rb") as file:
            absent: dict[str, None] | None = {}  # columns of the rows so far, until one has ours
            for number, line in enumerate(file, 1):
                if (absent is None and number <= skip) or not line.strip():
                    continue
                where = f"{path}, line {number}"
                row = _parse_line(line.removeprefix(BOM_UTF8), where)
                if absent is not None:
                    absent = None if self.content.column in row else absent | dict.fromkeys(row)
                if number > skip:
                    yield number, list(self.content.cut(row.get(self.content.column), where))
                if absent is not None and file.tell() > _SEARCHED:
                    break
            if absent:
                self.content.require_in(absent, f"{path}, up to line {number},")

    def _read_parquet(self, path: str, skip: int) -> Iterator[tuple[int, list[Piece]]]:
        """Yield the documents of a file, but those in its first rows."""
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                self.content.require_in(file.schema_arrow.names, path)
                for group in range(file.num_row_groups):
                    size = file.metadata.row_group(group).num_rows
                    if number + size <= skip:
                        number += size
                        continue
                    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[self.content.column]):
                        for value in batch.column(0).to_pylist():
                            number += 1
                            if number > skip:
                                yield number, list(self.content.cut(value, f"{path}, row {number}"))
        except UnicodeDecodeError as error:
            problem = f"holds text that is not UTF-8 ({error})"
            raise DataFileError(f"{path}, behind row {number}", problem, "write the file again") from error
        except Exception as error:  # narrower names are gone when the interpreter ends and closes a generator
            if not isinstance(error, pyarrow.ArrowException):
                raise
            raise DataFileError(path, f"is not whole parquet ({error})", "write or fetch it again") from error


def is_json_array(path: str) -> bool:
    """Return whether a file begins as a JSON array does, behind a byte order mark and blanks if it has them.

    Args:
        path: Of the file.

    Returns:
        Whether it does.
    """
    with open(path, "rb") as file:
        start = file.read(_LOOK).removeprefix(BOM_UTF8)
        while start and not start.strip():
            start = file.read(_LOOK)
    return start.lstrip().startswith(b"[")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    way_out = "repair or remove the line; JSON lines hold one object per line"
    try:
        row = json.loads(line.strip().decode())
    except json.JSONDecodeError as error:
        problem = f"is not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        raise DataFileError(where, problem, way_out) from error
    except (ValueError, RecursionError) as error:
        raise DataFileError(where, f"is not valid JSON ({error})", way_out) from error
    if not isinstance(row, dict):
        raise DataFileError(where, f"holds a {type(row).__name__}, not an object", way_out)
    return row


@dataclass(frozen=True)
class DatasetSource:
    """Documents of a stream of the datasets library.

    Attributes:
        rows: The stream.
        name: How messages call it.
        content: What a row holds.
        max_documents: Documents to read at most; None for all.
    """

    rows: datasets.IterableDataset
    name: str
    content: Content
    max_documents: int | None = None

    def read(self, place: Place | None) -> Iterator[tuple[list[Piece], Place]]:
        """Yield pieces of the documents behind a place.

        Args:
            place: As an earlier call has yielded it, or None for the start.

        Yields:
            Pieces and the place behind them.

        Raises:
            SELError: If the stream fails, or it has no such column.
        """
        rows, documents = self.rows.with_format(None), place["documents"] if place else 0  # a copy without a state
        if place:
            rows.load_state_dict(place["rows"])
        if get_worker_info() is not None:
            fsspec.asyn.reset_lock()  # a forked process would wait for the event loop of its parent
        if documents == self.max_documents:
            return
        try:
            for row in rows.iter(batch_size=1):  # in a worker, plain iteration would leave files to the other workers
                if documents == 0:
                    self.content.require_in(row, self.name)
                documents += 1
                pieces = list(self.content.cut(row[self.content.column][0], f"{self.name}, document {documents}"))
                yield pieces, {"rows": rows.state_dict(), "documents": documents}
                if documents == self.max_documents:
                    return
        except Exception as error:  # a dataset's files and their reading fail in many ways
            if isinstance(error, SELError):
                raise
            problem = f"cannot be read behind document {documents} ({error})"
            raise DataFileError(self.name, problem, "see whether it is whole, and the connection") from error


@dataclass(frozen=True)
class Mark:
    """A point at which a stream can be entered.

    Attributes:
        block: Blocks that the stream has yielded before it.
        number: Passes over the text before this one.
        chunk: Chunks of this pass before this one; see BlockStream.
        place: Where the source continues.
        rest: What the packer holds then.
        last: The same.
        drop: Blocks that come from there and belong before the mark.
    """

    block: int = 0
    number: int = 0
    chunk: int = 0
    place: Place | None = None
    rest: list[int] = field(default_factory=list)
    last: int | None = None
    drop: int = 0


class BlockStream(torch.utils.data.IterableDataset):
    """Blocks of a text, pass after pass without an end, in the same order every time.

    What fills no block at the end of a pass is dropped, so that all passes have the same blocks. In a DataLoader one
    worker reads, whatever their number, and the order stays. Under several processes the first one reads for all, or
    with accelerate's dispatch_batches=False each one for itself: the same blocks either way, each on one process.

    Args:
        source: The documents.
        tokenizer: Of the model.
        sequence_length: Tokens per block.
        identity: Of what the blocks depend on: the section of the recipe, size and time of change of its files, the
            tokenizer and its chat template; a mark with another one is no use. It cannot see that a dataset of the hub
            has changed, or that a template writes the date (strftime_now).
        held_out: Number of blocks at the start of each pass that are left out.
        shuffle: Blocks that are read ahead and put into a random order; 0 for the order of the text.
        seed: Of that order, which differs from one lot of so many blocks to the next, and between passes.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        identity: str,
        held_out: int = 0,
        shuffle: int = 0,
        seed: int = 0,
    ) -> None:
        self.source, self.tokenizer, self.sequence_length = source, tokenizer, sequence_length
        self.held_out, self.chunk_size, self.seed = held_out, max(shuffle, 1), seed
        self.identity, self.discarded = identity, 0
        self.marks_file: Path | None = None
        self.writes_marks = False

    def keep_marks(self, file: Path, *, writes: bool) -> None:
        """Name the file by which a resumed run finds its place in the text without tokenising all that lies before.

        Args:
            file: Lines of JSON; need not exist.
            writes: Whether this process adds to it.
        """
        self.marks_file, self.writes_marks = file, writes

    def discard(self, blocks: int) -> None:
        """Say how many blocks the reader will throw away, as Trainer does when it resumes.

        Args:
            blocks: Their number. Those before the last mark are not made: stand-ins, whose tokens (-1) no model takes.
        """
        self.discarded = blocks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield input_ids and labels, the same int64 tensor of shape (sequence_length,)."""
        worker = get_worker_info()
        if worker is not None and worker.id > 0:
            return
        try:
            yield from self._read()
        except Exception as error:
            if worker is None or not isinstance(error, SELError):
                raise
            raise WorkerError(str(error)) from error

    def _read(self) -> Iterator[dict[str, Tensor]]:
        mark = self._find_mark()
        stand_in = torch.full((self.sequence_length,), -1)
        for _ in range(mark.block):
            yield {"input_ids": stand_in, "labels": stand_in}
        for block in self._continue_from(mark):
            tokens = block.long()
            yield {"input_ids": tokens, "labels": tokens}

    def read_pass(self) -> Iterator[list[int]]:
        """Yield the blocks of one pass as lists of tokens, those that are held out first, in the order of the text."""
        for _, blocks in self._pack_from(Mark()):
            yield from blocks

    def _pack_from(self, mark: Mark) -> Iterator[tuple[Mark, list[list[int]]]]:
        """Yield blocks, some at a time, with place, rest and last from which they come."""
        packer = Packer(self.tokenizer, self.sequence_length)
        packer.rest, packer.last = list(mark.rest), mark.last
        before, gathered, size = mark, [], 0
        for pieces, place in self.source.read(mark.place):
            gathered += pieces
            size += sum(len(piece.text) for piece in pieces)
            if size >= packing.PIECE:
                yield before, packer.pack(gathered)
                before, gathered, size = Mark(place=place, rest=packer.rest, last=packer.last), [], 0
        yield before, packer.pack(gathered)

    def _continue_from(self, mark: Mark) -> Iterator[Tensor]:
        """Yield the blocks behind a mark, for ever."""
        written = mark.block
        while True:
            ready: list[Tensor] = []
            chunk: list[Tensor] = []
            count, number, drop = mark.chunk, mark.block, mark.drop
            for before, blocks in self._pack_from(mark):
                for index, block in enumerate(blocks):
                    if drop > 0:
                        drop -= 1
                        continue
                    if not chunk and number - written >= MARK_EVERY:
                        self._write_mark(
                            Mark(number, mark.number, count, before.place, before.rest, before.last, index)
                        )
                        written = number
                    chunk.append(torch.tensor(block, dtype=torch.int32))
                    number += 1
                    if ready:
                        yield ready.pop()
                    if len(chunk) == self.chunk_size:
                        ready, chunk = self._shuffle(chunk, mark.number, count), []
                        count += 1
            yield from reversed(ready)
            yield from reversed(self._shuffle(chunk, mark.number, count))
            if number == mark.block:
                raise DataFileError("the text", "has no block left", "see whether its files are still what they were")
            mark = Mark(number, mark.number + 1, drop=self.held_out)

    def _shuffle(self, chunk: list[Tensor], number: int, count: int) -> list[Tensor]:
        """Return blocks in the random order of this pass and chunk."""
        order = list(range(len(chunk)))
        random.Random(f"{self.seed} {number} {count}").shuffle(order)
        return [chunk[index] for index in order]

    def _write_mark(self, mark: Mark) -> None:
        if self.marks_file is not None and self.writes_marks:
            self.marks_file.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({"identity": self.identity, **asdict(mark)})
            with open(self.marks_file, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def _find_mark(self) -> Mark:
        """Return the last mark before the blocks that are not discarded."""
        best = Mark(drop=self.held_out)
        if self.marks_file is None or not self.discarded or not self.marks_file.is_file():
            return best
        with open(self.marks_file, encoding="utf-8") as file:
            for line in file:
                try:
                    values = json.loads(line)
                except ValueError:  # a killed run's last one
                    continue
                if values.pop("identity", None) == self.identity and best.block < values["block"] <= self.discarded:
                    best = Mark(**values)
        return best
