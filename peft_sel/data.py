"""Text in, training blocks out: which text a recipe names, and its blocks, made beforehand or while training."""

from __future__ import annotations

import glob
import hashlib
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Sequence, Value, load_dataset
from transformers import PreTrainedTokenizerBase

from peft_sel import packing
from peft_sel.errors import ConfigError, DataFileError, SELError, list_names
from peft_sel.packing import Content, Packer
from peft_sel.streams import BlockStream, DatasetSource, FileSource, Source, is_json_array

LOADERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}  # by suffix; others are text
PACKED, TABLES = (".gz", ".zst", ".bz2", ".xz", ".zip"), (".csv", ".tsv")  # suffixes of files that are refused
PYDOC_TOPICS = "pydoc_topics"
BLOCKS = Features({"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int32"))})


@dataclass
class DataSection:
    """Section `data` of a recipe: which text, and how it is cut.

    Attributes:
        files: Paths or glob patterns of JSON-lines (.jsonl, .json, .ndjson), parquet (.parquet) or text files (all
            others); a text file is one document. Packed files and tables (.gz, .csv and the like) are refused.
        dataset: Instead of files: an id for datasets.load_dataset, or "pydoc_topics" for the help pages of Python's
            standard library, which need no network.
        dataset_config: Name of a configuration of that dataset.
        split: Split of the dataset, slices such as "train[:1%]" included.
        text_column: Column of the text in JSON-lines, parquet and datasets.
        messages_column: Instead of text_column: column of conversations, lists of {role, content}, which the
            tokenizer's chat template turns into text. The loss counts every token, the prompts' too.
        sequence_length: Tokens per block.
        validation_share: Share of the blocks, taken from the end, that is held out; 0 for none. By default 0.05, or 0
            for a stream and beside validation_blocks.
        validation_blocks: Instead of a share: how many of the first blocks are held out. Under several processes take
            a multiple of processes x per_device_eval_batch_size: else Accelerate fills the last batch with blocks that
            were counted before, and the held-out loss depends on the number of processes.
        max_documents: Documents to read at most; None for all.
        streaming: Whether to read, tokenise and pack the text while training, for text larger than memory and disk. A
            stream has no known length, so it needs training.max_steps, and begins again when the text ends. Off by
            default: a text that fits is worth its cache of blocks, which Trainer shuffles as a whole.
        shuffle_blocks: For a stream: how many blocks to read ahead and put into a random order; 0 keeps the order of
            the text.
        shuffle_seed: Seed of that order.

    Raises:
        ConfigError: If a value cannot work, or a file does not exist.
    """

    files: str | list[str] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    text_column: str = "text"
    messages_column: str | None = None
    sequence_length: int = 512
    validation_share: float | None = None
    validation_blocks: int | None = None
    max_documents: int | None = None
    streaming: bool = False
    shuffle_blocks: int = 0
    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        if (self.files is None) == (self.dataset is None):
            raise ConfigError("files", self.files, "give either files or dataset")
        if self.dataset == PYDOC_TOPICS and (self.dataset_config is not None or self.split != "train"):
            raise ConfigError("dataset", self.dataset, "has no dataset_config, and no split but train")
        if self.sequence_length < 2:
            raise ConfigError("sequence_length", self.sequence_length, "predicting a next token takes 2 tokens or more")
        if self.validation_share is not None and not 0 <= self.validation_share < 1:
            raise ConfigError("validation_share", self.validation_share, "must be 0 or more and less than 1")
        if self.validation_blocks is not None and self.validation_blocks < 0:
            raise ConfigError("validation_blocks", self.validation_blocks, "must be 0 or more")
        if self.validation_share and self.validation_blocks is not None:
            raise ConfigError("validation_share", self.validation_share, "give it or validation_blocks, not both")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError("max_documents", self.max_documents, "must be at least 1")
        if self.shuffle_blocks < 0:
            raise ConfigError("shuffle_blocks", self.shuffle_blocks, "must be 0 or more")
        self._check_streaming()
        if self.files is not None:
            self.find_files()

    def _check_streaming(self) -> None:
        """Raise if a field does not go with streaming, or not without it."""
        if not self.streaming and self.shuffle_blocks:
            raise ConfigError("shuffle_blocks", self.shuffle_blocks, "goes with streaming; else all are shuffled")
        if self.streaming and self.validation_share:
            reason = "a stream has no known length to take a share of; set validation_blocks instead"
            raise ConfigError("validation_share", self.validation_share, reason)
        if self.streaming and "[" in self.split:
            raise ConfigError("split", self.split, "a stream cannot be sliced; name the whole split, and max_documents")

    @property
    def share_held_out(self) -> float:
        """The share of the blocks that is held out; 0 beside validation_blocks."""
        if self.validation_share is not None:
            return self.validation_share
        return 0.0 if self.streaming or self.validation_blocks is not None else 0.05

    @property
    def holds_out(self) -> bool:
        """Whether there will be blocks to evaluate on."""
        return self.share_held_out > 0 or bool(self.validation_blocks)

    def find_files(self) -> list[str]:
        """Expand files, each pattern in alphabetical order.

        Returns:
            Paths of files that exist, all of one kind.

        Raises:
            ConfigError: If a path or pattern has no file, or the files are packed, tables or of different kinds.
        """
        patterns = [self.files] if isinstance(self.files, str) else self.files or []
        found: list[str] = []
        for pattern in patterns:
            path = Path(pattern).expanduser()
            matches = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
            matches = [match for match in matches if Path(match).is_file()]
            if not matches:
                raise ConfigError("files", pattern, f"there is no such file (the current folder is {Path.cwd()})")
            found += matches
        for file in found:
            suffix = Path(file).suffix.lower()
            if suffix in PACKED:
                raise ConfigError("files", file, "is packed; unpack it, or store it as parquet, which is packed itself")
            if suffix in TABLES:
                raise ConfigError("files", file, "is a table; convert it to JSON lines or parquet")
        kinds = {_kind(path) for path in found}
        if len(kinds) != 1:
            raise ConfigError("files", self.files, f"holds files of different kinds ({list_names(sorted(kinds))})")
        return found


def _kind(path: str) -> str:
    return LOADERS.get(Path(path).suffix.lower(), "text")


def read_pydoc_topics() -> list[dict[str, str]]:
    """Return the help topics of Python's standard library, mixed by a fixed seed.

    Topics repeat each other's paragraphs. Each is kept where it comes first only, so that held-out text is new.

    Returns:
        Documents with the keys topic and text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    names = sorted(topics)
    for index in torch.randperm(len(topics), generator=torch.Generator().manual_seed(0)).tolist():
        fresh = []
        for paragraph in topics[names[index]].split("\n\n"):
            if paragraph.strip() and paragraph.strip() not in seen:
                seen.add(paragraph.strip())
                fresh.append(paragraph)
        documents.append({"topic": names[index], "text": "\n\n".join(fresh)})
    return documents


def load_documents(section: DataSection, content: Content) -> Dataset:
    """Read the documents of a recipe, in the order of the files.

    Args:
        section: Where they are.
        content: Which column they are in.

    Returns:
        A dataset with that column.

    Raises:
        ConfigError: If that column is not there, or the dataset cannot be read.
        DataFileError: If a file cannot be read.
    """
    if section.dataset == PYDOC_TOPICS:
        documents = Dataset.from_list(read_pydoc_topics())
    else:
        try:
            documents = _load(section)
        except Exception as error:  # files and datasets, and their reading, fail in many ways
            raise _explain(section, content, error) from error
    content.require_in(documents.column_names, "the data")
    if section.max_documents is not None:
        documents = documents.select(range(min(section.max_documents, len(documents))))
    return documents


def _load(section: DataSection) -> Dataset:
    if section.dataset is not None:
        return load_dataset(section.dataset, section.dataset_config, split=section.split)
    files = section.find_files()
    options: dict[str, Any] = {"sample_by": "document"} if _kind(files[0]) == "text" else {}
    return load_dataset(_kind(files[0]), data_files=files, split="train", **options)


def _explain(section: DataSection, content: Content, error: Exception) -> SELError:
    """Return what to raise for a text that cannot be read; if a stream finds the file and line, raise what it says."""
    reason: BaseException = error
    while reason.__cause__ is not None:  # the datasets library wraps an error in others
        reason = reason.__cause__
    said = str(reason) or type(reason).__name__
    if section.dataset is not None:
        return ConfigError("dataset", section.dataset, f"cannot be read ({said})")
    files = section.find_files()
    kind = _kind(files[0])
    if not isinstance(reason, OSError) or reason.errno is None:  # else the disk is full, say, and no file to blame
        whole = [file for file in files if kind != "json" or not is_json_array(file)]
        documents = sum(pieces[-1].ends for pieces, _ in FileSource(whole, kind, content).read(None))
        if documents == 0 and len(whole) == len(files):
            _require_blocks(section, 0, 0)
    return DataFileError(list_names(files), f"cannot be read ({said})", "repair the text, or leave the file out")


def open_source(section: DataSection, content: Content) -> Source:
    """Find the documents of a recipe without reading them.

    Args:
        section: Where they are.
        content: What a row holds.

    Returns:
        Documents to stream.

    Raises:
        ConfigError: If there is no such dataset, or a column is named in text files.
    """
    if section.dataset is None:
        files = section.find_files()
        kind = _kind(files[0])
        if kind == "text":
            content.require_in(["text"], "a text file")
        return FileSource(files, kind, content, section.max_documents)
    if section.dataset == PYDOC_TOPICS:
        rows = Dataset.from_list(read_pydoc_topics()).to_iterable_dataset()
    else:
        try:
            rows = load_dataset(section.dataset, section.dataset_config, split=section.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError("dataset", section.dataset, f"cannot be opened as a stream ({error})") from error
    return DatasetSource(rows, section.dataset, content, section.max_documents)


def pack_documents(
    batch: dict[str, list[Any]], indices: list[int], packer: Packer, content: Content
) -> dict[str, list[list[int]]]:
    """Tokenise documents, join them to what the packer has left of those before, and cut the result into blocks.

    Args:
        batch: Columns of documents.
        indices: Their numbers.
        packer: Packs one batch after the other.
        content: What the column holds.

    Returns:
        input_ids and labels, the same blocks.
    """
    values = zip(batch[content.column], indices, strict=True)
    blocks = packer.pack(piece for value, index in values for piece in content.cut(value, f"document {index + 1}"))
    return {"input_ids": blocks, "labels": blocks}


def load_blocks(
    section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset | BlockStream, Dataset | None]:
    """Make training and held-out blocks of a recipe's text; the same every time.

    The documents lie end to end in them, and only what fills no block at the very end is dropped.

    Args:
        section: Which text, and how it is cut.
        tokenizer: Of the model.

    Returns:
        (training blocks, held-out blocks), each with input_ids and labels of shape (sequence_length,); None without
        any to be held out.

    Raises:
        ConfigError: If there is no text column, no end-of-text token, or too little text.
        DataFileError: If a document cannot be read.
    """
    option = "text_column" if section.messages_column is None else "messages_column"
    content = Content(option, getattr(section, option), tokenizer)
    packer = Packer(tokenizer, section.sequence_length)
    if section.streaming:
        return _stream_blocks(section, packer, content)
    documents = load_documents(section, content)
    try:
        blocks = documents.map(
            pack_documents,
            batched=True,
            with_indices=True,
            fn_kwargs={"packer": packer, "content": content},
            remove_columns=documents.column_names,
            features=BLOCKS,
            desc="Tokenising",
        )
    except UnicodeDecodeError as error:  # Arrow takes any bytes for text until they are needed
        raise _explain(section, content, error) from error
    first = section.validation_blocks or 0
    end = len(blocks) - math.ceil(len(blocks) * section.share_held_out)
    _require_blocks(section, len(blocks), first + len(blocks) - end)
    held_out = range(first) if first else range(end, len(blocks))
    return blocks.select(range(first, end)), blocks.select(held_out) if held_out else None


def _stream_blocks(section: DataSection, packer: Packer, content: Content) -> tuple[BlockStream, Dataset | None]:
    """Return the stream of training blocks, which begins behind the held-out ones, and these."""
    number = section.validation_blocks or 0
    source = open_source(section, content)
    stream = BlockStream(
        source,
        packer.tokenizer,
        section.sequence_length,
        _identify(section, source, packer),
        number,
        section.shuffle_blocks,
        section.shuffle_seed,
    )
    blocks = list(islice(stream.read_pass(), number + 1))
    _require_blocks(section, len(blocks), number)
    columns = {"input_ids": blocks[:number], "labels": blocks[:number]}
    return stream, Dataset.from_dict(columns, features=BLOCKS) if number else None


def _identify(section: DataSection, source: Source, packer: Packer) -> str:
    """Hash what the blocks of a stream depend on, as far as it can be seen without reading the text."""
    tokenizer = packer.tokenizer
    states = [(file, Path(file).stat()) for file in source.files] if isinstance(source, FileSource) else []
    files = [(file, state.st_size, state.st_mtime_ns) for file, state in states]
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    rules = (type(tokenizer).__name__, backend, packer.prefix, packer.ending)
    parts = (section, files, rules, getattr(tokenizer, "chat_template", None), packing.PIECE)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _require_blocks(section: DataSection, found: int, held_out: int) -> None:
    """Raise unless the text has blocks beside the held-out ones."""
    if found - held_out < 1:
        raise ConfigError(
            "sequence_length",
            section.sequence_length,
            f"the text fills {found} such block(s), {held_out} of them held out, none left to train on; give more text "
            "or a shorter length",
        )
