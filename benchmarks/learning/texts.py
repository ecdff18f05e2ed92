"""Text for the runs, from packages: Debian's manual pages and kernel documentation, Python's help pages."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from peft_sel.data import read_pydoc_topics
from peft_sel.demo.material import cache_folder

VERSION = 2  # of what becomes of a text: rises with every change here that changes a block
HELD_OUT_BLOCKS = 64  # each of a document of its own
CANDIDATES = 3  # documents set aside for each of them
GRAM = 16  # tokens
MOST_SEEN = 0.05  # share of a held-out block's grams that may occur in the training blocks
VOCABULARY = 4096  # of the tokenizer for models from scratch
SEPARATOR = "<|endoftext|>"
MIN_CHARACTERS = 400
ROFF_COMMENT = re.compile(
    r'^[.\']\s*(\\"|TH |\.)|^[.\']\s*$|^[.\'](nr|de|ds|if|ie|el|so|hy|ad|nh|ft|in|ti|ta|sp|ne|na)\b'
)
ROFF_REQUEST = re.compile(r"^[.'][A-Za-z]{1,3}\s*")
ROFF_ESCAPES = (
    (r"\\f(\[[^]]*\]|\(..|.)", ""),
    (r"\\[&/,|^%:]", ""),
    (r"\\-", "-"),
    (r"\\ ", " "),
    (r"\\\(..|\\\[[^]]*\]", " "),
    (r"\\e", r"\\"),
)
TRANSLATORS_NOTE = re.compile(
    r"^\.SH ÜBERSETZUNG.*", re.MULTILINE | re.DOTALL
)  # ends most German pages, in one wording


class Blocks(NamedTuple):
    """A text as tokens.

    Attributes:
        train: Blocks to train on, (blocks, length), int64.
        held_out: Blocks of other documents.
        vocabulary: Number of tokens there are.
        digest: SHA-256 of both.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: int
    digest: str


def read_manpages() -> Iterator[str]:
    """Yield German manual pages (package manpages-de) without their markup."""
    with unpack_debian("manpages-de") as folder:
        for file in _list_files(folder, "usr/share/man/de/*/*.gz"):
            page = gzip.decompress(file.read_bytes()).decode()
            yield strip_roff(TRANSLATORS_NOTE.sub("", page))


def read_kernel() -> Iterator[str]:
    """Yield the Linux kernel's documentation (package linux-doc-6.1)."""
    with unpack_debian("linux-doc-6.1") as folder:
        for file in _list_files(folder, "usr/share/doc/linux-doc-6.1/Documentation/**/*.rst.gz"):
            if "translations" not in file.parts:
                yield gzip.decompress(file.read_bytes()).decode(errors="replace")


def read_prose() -> Iterator[str]:
    """Yield English essays: An Anarchist FAQ (package anarchism), which has long been on many web sites."""
    with unpack_debian("anarchism") as folder:
        for file in _list_files(folder, "usr/share/doc/anarchism/html/*.html"):
            page = PageText()
            page.feed(file.read_text(encoding="utf-8", errors="replace"))
            yield " ".join(page.pieces)


class PageText(HTMLParser):
    """Collects the text of an HTML page, paragraph by paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        """Add a piece of text unless it is a script's or a style's."""
        if self.lasttag not in ("script", "style", "title") and data.strip():
            self.pieces.append(" ".join(data.split()))


def read_pydoc() -> Iterator[str]:
    """Yield the help pages of Python's standard library, which need no network: for tests."""
    yield from (document["text"] for document in read_pydoc_topics())


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "manpages-de": read_manpages,
    "linux-doc": read_kernel,
    "prose": read_prose,
    "pydoc": read_pydoc,
}


@contextlib.contextmanager
def unpack_debian(package: str) -> Iterator[Path]:
    """Yield a temporary folder with the files of a Debian package, fetched with apt-get; nothing is installed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise SystemExit(f"the text {package} is a Debian package: run this where there are apt-get and dpkg-deb")
    with tempfile.TemporaryDirectory(prefix="peft-sel-") as folder:
        subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True, capture_output=True)
        file = next(Path(folder).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", file.name, "files"], cwd=folder, check=True)
        yield Path(folder, "files")


def _list_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.is_file() and not file.is_symlink())


def strip_roff(page: str) -> str:
    """Return the text of a manual page without requests, comments and font changes."""
    lines = [ROFF_REQUEST.sub("", line) for line in page.splitlines() if not ROFF_COMMENT.match(line)]
    text = "\n".join(line for line in lines if line.strip())
    for pattern, replacement in ROFF_ESCAPES:
        text = re.sub(pattern, replacement, text)
    return text


def read_documents(name: str) -> list[str]:
    """Return the documents of a text in an order mixed by a fixed seed, short ones left out."""
    documents = [document for document in SOURCES[name]() if len(document) >= MIN_CHARACTERS]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    return [documents[index] for index in order]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of VOCABULARY tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def load_blocks(name: str, length: int, checkpoint: Path | None) -> Blocks:
    """Return a text as blocks of tokens.

    Training blocks are documents end to end. Each held-out block comes from a document of its own that is in no
    training block, and at most MOST_SEEN of its grams of GRAM tokens occur in them: manual pages share much wording.

    Args:
        name: A name in SOURCES.
        length: Tokens of a block.
        checkpoint: A folder with a tokenizer; None to train one on the text.

    Returns:
        The blocks, from a cache that the first call fills.
    """
    kind = f"own{VOCABULARY}" if checkpoint is None else checkpoint.name
    cache = cache_folder() / "learning" / f"{name}-{kind}-{length}-v{VERSION}.safetensors"
    if not cache.is_file():
        documents = read_documents(name)
        tokenizer = (
            train_tokenizer(documents) if checkpoint is None else Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
        )
        end = tokenizer.token_to_id(SEPARATOR)
        pieces = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(documents)]
        train, held_out = split_documents(pieces, length)
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_suffix(".unfinished")
        vocabulary = torch.tensor(tokenizer.get_vocab_size())
        save_file({"train": train, "held_out": held_out, "vocabulary": vocabulary}, unfinished)
        unfinished.replace(cache)
    tensors = load_file(cache)
    digest = hashlib.sha256(tensors["train"].numpy().tobytes() + tensors["held_out"].numpy().tobytes()).hexdigest()
    return Blocks(tensors["train"].long(), tensors["held_out"].long(), int(tensors["vocabulary"]), digest)


def split_documents(documents: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    """Cut documents into training and held-out blocks.

    Args:
        documents: Token ids of each.
        length: Tokens of a block.

    Returns:
        (training blocks, HELD_OUT_BLOCKS held-out blocks), int32, (blocks, length).
    """
    long_enough = [n for n, document in enumerate(documents) if len(document) > length]
    aside = set(long_enough[: CANDIDATES * HELD_OUT_BLOCKS])
    rest = [token for n, document in enumerate(documents) if n not in aside for token in document]
    whole = len(rest) // length * length
    if not whole:
        raise SystemExit(f"{len(documents)} documents are too few: {len(aside)} are set aside to be held out")
    train = torch.tensor(rest[:whole], dtype=torch.int32).view(-1, length)
    seen = hash_grams(train.view(-1))
    generator = torch.Generator().manual_seed(0)
    held_out: list[Tensor] = []
    for document in (torch.tensor(documents[n], dtype=torch.int32) for n in sorted(aside)):
        first = int(torch.randint(len(document) - length, (1,), generator=generator))
        block = document[first : first + length]
        if torch.isin(hash_grams(block), seen).float().mean() <= MOST_SEEN and len(held_out) < HELD_OUT_BLOCKS:
            held_out.append(block)
    if len(held_out) < HELD_OUT_BLOCKS:
        raise SystemExit(
            f"only {len(held_out)} of {HELD_OUT_BLOCKS} held-out blocks differ enough from the training text"
        )
    return train, torch.stack(held_out)


def hash_grams(tokens: Tensor) -> Tensor:
    """Return a hash of each run of GRAM tokens, int64, (tokens - GRAM + 1,); equal runs have equal hashes."""
    hashes = torch.zeros(len(tokens) - GRAM + 1, dtype=torch.int64)
    for offset in range(GRAM):  # int64 wraps around
        hashes = hashes * 6364136223846793005 + tokens[offset : offset + len(hashes)].long() + 1442695040888963407
    return hashes
