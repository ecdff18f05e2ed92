"""Documents into blocks of one length: tokenised in pieces and joined with end-of-text tokens, none left out."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from peft_sel.errors import ConfigError, DataFileError, list_names

PIECE = 2**18  # characters that are tokenised at once: what bounds the memory of a document of any length
_LAST_LINE = re.compile(r".*\n(?=\S)", re.DOTALL)
_LAST_WORD = re.compile(r".*\S(?=\s)", re.DOTALL)


class Piece(NamedTuple):
    """A part of a document's text, and whether the document starts and ends with it."""

    text: str
    starts: bool
    ends: bool


def cut_pieces(read: Callable[[int], str]) -> Iterator[Piece]:
    """Cut a document into pieces of at most PIECE characters: after a line if there is one, else after a word.

    A tokenizer that never joins a line end to the word behind it, and puts nothing in front of a text, gives the same
    tokens for the pieces as for the whole. Metaspace with prepend_scheme "first" or "always" puts a "▁" in front: one
    more for every piece that begins with a word. Cuts behind a word, or within one, may change others.

    Args:
        read: Returns the next characters of the document, at most as many as asked for, like the method of a text file.

    Yields:
        The pieces, in order.
    """
    window, starts = read(PIECE + 1), True
    while len(window) > PIECE:
        found = _LAST_LINE.match(window) or _LAST_WORD.match(window)
        cut = found.end() if found else PIECE
        yield Piece(window[:cut], starts, ends=False)
        window, starts = window[cut:] + read(cut), False
    yield Piece(window, starts, ends=True)


@dataclass(frozen=True)
class Content:
    """What a column holds: texts, or conversations that the tokenizer's chat template turns into text.

    Attributes:
        option: The field of a recipe that names the column: "text_column" or "messages_column".
        column: Its name.
        tokenizer: Of the model.
    """

    option: str
    column: str
    tokenizer: PreTrainedTokenizerBase

    def require_in(self, columns: Iterable[str], where: str) -> None:
        """Raise unless the column is there.

        Args:
            columns: Names of those that are.
            where: Whose they are, for the message.

        Raises:
            ConfigError: If it is not.
        """
        columns = list(columns)
        if self.column not in columns:
            problem = f"there is no such column; {where} has {list_names(columns)}"
            raise ConfigError(self.option, self.column, problem)

    def cut(self, value: Any, where: str) -> Iterator[Piece]:
        """Cut a document into pieces.

        Args:
            value: What is in the column; None is an empty document.
            where: File and line, for messages.

        Yields:
            The pieces.

        Raises:
            DataFileError: If it is neither text nor a list of messages, or holds half a character.
            ConfigError: If there is no chat template, or it refuses the conversation.
        """
        kind, wanted = (str, "text") if self.option == "text_column" else (list, "a list of messages")
        if not isinstance(value, kind | None):
            problem = f"{self.column} is of type {type(value).__name__}, not {wanted}"
            raise DataFileError(where, problem, f"repair it, or name another column in data.{self.option}")
        text = (self._render(value, where) if isinstance(value, list) else value) or ""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            problem = f"{self.column} holds half a character ({half!r}, a surrogate without its other half)"
            raise DataFileError(where, problem, "repair the text, or leave it out") from error
        yield from cut_pieces(io.StringIO(text).read)

    def _render(self, messages: list[Any], where: str) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False)) if messages else ""
        except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
            reason = " ".join(str(error).split())
            problem = f"the chat template cannot render it ({reason}) in {where}"
            raise ConfigError(self.option, self.column, problem) from error


class Packer:
    """Tokenises pieces, joins the documents end to end and cuts the result into blocks.

    Every document begins with the tokenizer's special tokens and ends with its end-of-text token, none of them doubled;
    one without any token is left out. What does not fill a block stays for the next call.

    Args:
        tokenizer: Of the model.
        sequence_length: Tokens per block.

    Raises:
        ConfigError: If the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("tokenizer", tokenizer.name_or_path, "it has no end-of-text token (eos)")
        self.tokenizer, self.sequence_length = tokenizer, sequence_length
        self.prefix, suffix = _find_special_tokens(tokenizer)
        self.ending = suffix if suffix[-1:] == [tokenizer.eos_token_id] else [*suffix, tokenizer.eos_token_id]
        self.rest: list[int] = []
        self.last: int | None = None  # token of the document that has not ended yet

    def pack(self, pieces: Iterable[Piece]) -> list[list[int]]:
        """Add pieces of documents.

        Args:
            pieces: The next ones, in order.

        Returns:
            The blocks that they fill.
        """
        pieces = list(pieces)
        texts = [piece.text for piece in pieces if piece.text]
        ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
        tokens = [*self.rest]
        for piece in pieces:
            added = next(ids) if piece.text else []
            if added and self.last is None and added[: len(self.prefix)] != self.prefix:
                tokens += self.prefix
            tokens += added
            self.last = added[-1] if added else self.last
            if piece.ends and self.last is not None:
                tokens += self.ending if [self.last] != self.ending else []
                self.last = None
        filled = len(tokens) // self.sequence_length * self.sequence_length
        self.rest = tokens[filled:]
        return [tokens[start : start + self.sequence_length] for start in range(0, filled, self.sequence_length)]


def _find_special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return what a tokenizer puts before and behind a text."""
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
