"""Text in, training blocks out: read, tokenise, join with end-of-text tokens, cut into blocks of one length."""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Sequence, Value, load_dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from peft_sel.errors import ConfigError, list_names

LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # by the end of the file name; all others are text
PYDOC_TOPICS = "pydoc_topics"
BLOCKS = Features({"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int32"))})


@dataclass
class DataSection:
    """Section `data` of a recipe: which text, and how it is cut.

    Attributes:
        files: Paths or glob patterns of text, JSON-lines or parquet files; a text file is one document.
        dataset: Instead of files: an id for datasets.load_dataset, or "pydoc_topics" for the help pages of Python's
            standard library, which need no network.
        dataset_config: Name of a configuration of that dataset.
        split: Split of the dataset, slices such as "train[:1%]" included.
        text_column: Column of the text in JSON-lines, parquet and datasets.
        messages_column: Instead of text_column: column of conversations, lists of {role, content}, which the
            tokenizer's chat template turns into text. The loss counts every token, the prompts' too.
        sequence_length: Tokens per block.
        validation_share: Share of the blocks, taken from the end, that is held out; 0 for none.
        max_documents: Documents to read at most; None for all.

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
    validation_share: float = 0.05
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if (self.files is None) == (self.dataset is None):
            raise ConfigError("files", self.files, "give either files or dataset")
        if self.dataset == PYDOC_TOPICS and (self.dataset_config is not None or self.split != "train"):
            raise ConfigError("dataset", self.dataset, "has no dataset_config, and no split but train")
        if self.sequence_length < 2:
            raise ConfigError("sequence_length", self.sequence_length, "predicting a next token takes 2 tokens or more")
        if not 0 <= self.validation_share < 1:
            raise ConfigError("validation_share", self.validation_share, "must be 0 or more and less than 1")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError("max_documents", self.max_documents, "must be at least 1")
        if self.files is not None:
            self.find_files()

    def find_files(self) -> list[str]:
        """Expand files, each pattern in alphabetical order.

        Returns:
            Paths of files that exist, all of one kind.

        Raises:
            ConfigError: If a path or pattern has no file, or the files are of different kinds.
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


def load_documents(section: DataSection) -> Dataset:
    """Read the documents of a recipe, in the order of the files.

    Args:
        section: Where they are.

    Returns:
        A dataset with the column of texts or conversations.

    Raises:
        ConfigError: If that column is not there.
    """
    if section.dataset == PYDOC_TOPICS:
        documents = Dataset.from_list(read_pydoc_topics())
    elif section.dataset is not None:
        documents = load_dataset(section.dataset, section.dataset_config, split=section.split)
    else:
        files = section.find_files()
        options: dict[str, Any] = {"sample_by": "document"} if _kind(files[0]) == "text" else {}
        documents = load_dataset(_kind(files[0]), data_files=files, split="train", **options)
    field = "text_column" if section.messages_column is None else "messages_column"
    column = getattr(section, field)
    if column not in documents.column_names:
        columns = list_names(documents.column_names)
        raise ConfigError(field, column, f"there is no such column; the data has {columns}")
    if section.max_documents is not None:
        documents = documents.select(range(min(section.max_documents, len(documents))))
    return documents


def render_conversations(conversations: list[Any], tokenizer: PreTrainedTokenizerBase, column: str) -> list[str]:
    """Turn conversations into texts by the tokenizer's chat template.

    Args:
        conversations: Lists of {role, content}.
        tokenizer: Of the model.
        column: Where they come from, for messages.

    Returns:
        The texts.

    Raises:
        ConfigError: If there is no template, or it refuses a conversation.
    """
    try:
        return [str(tokenizer.apply_chat_template(messages, tokenize=False)) for messages in conversations if messages]
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("messages_column", column, f"the chat template cannot render it ({reason})") from error


def pack_texts(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, section: DataSection
) -> dict[str, list[list[int]]]:
    """Tokenise documents, end each with the end-of-text token, join them and cut the result into blocks.

    Args:
        batch: Columns of documents.
        tokenizer: Has an end-of-text token (eos).
        section: Its text_column or messages_column, whose empty entries are skipped, and sequence_length: what is left
            at the end and fills no block is dropped.

    Returns:
        input_ids and labels, the same blocks.
    """
    sequence_length = section.sequence_length
    if section.messages_column is None:
        texts = [text for text in batch[section.text_column] if text]
    else:
        column = section.messages_column
        texts = render_conversations(batch[column], tokenizer, column)
    eos = tokenizer.eos_token_id
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    tokens = list(chain.from_iterable(ids if ids[-1:] == [eos] else [*ids, eos] for ids in documents))
    starts = range(0, len(tokens) - sequence_length + 1, sequence_length)
    blocks = [tokens[start : start + sequence_length] for start in starts]
    return {"input_ids": blocks, "labels": blocks}


def load_blocks(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """Make training and held-out blocks of a recipe's text; the same every time.

    Documents are packed a thousand at a time, and what fills no block at the end of each thousand is dropped.

    Args:
        section: Which text, and how it is cut.
        tokenizer: Of the model.

    Returns:
        (training blocks, held-out blocks), each with input_ids and labels of shape (sequence_length,); None without
        validation_share.

    Raises:
        ConfigError: If there is no text column, no end-of-text token, or too little text.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("tokenizer", tokenizer.name_or_path, "it has no end-of-text token (eos)")
    documents = load_documents(section)
    blocks = documents.map(
        pack_texts,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "section": section},
        remove_columns=documents.column_names,
        features=BLOCKS,
        desc="Tokenising",
    )
    held_out = math.ceil(len(blocks) * section.validation_share)
    if len(blocks) - held_out < 1:
        raise ConfigError(
            "sequence_length",
            section.sequence_length,
            f"the text fills {len(blocks)} such block(s), {held_out} of them held out, none left to train on; give "
            "more text or a shorter length",
        )
    train = blocks.select(range(len(blocks) - held_out))
    return train, blocks.select(range(len(blocks) - held_out, len(blocks))) if held_out else None
