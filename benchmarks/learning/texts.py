"""Text for the runs, from packages: Debian's manual pages and kernel documentation, Python's help pages."""

from __future__ import annotations

import contextlib
import gzip
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from peft_sel.data import read_pydoc_topics
from peft_sel.demo.material import cache_folder

HELD_OUT_BLOCKS = 64
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


class Blocks(NamedTuple):
    """A text as tokens.

    Attributes:
        train: Blocks to train on, (blocks, length), int64.
        held_out: Blocks of other documents.
        vocabulary: Number of tokens there are.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: int


def read_manpages() -> Iterator[str]:
    """Yield German manual pages (package manpages-de) without their markup."""
    with unpack_debian("manpages-de") as folder:
        for file in _list_files(folder, "usr/share/man/de/*/*.gz"):
            yield strip_roff(gzip.decompress(file.read_bytes()).decode())


def read_kernel() -> Iterator[str]:
    """Yield the Linux kernel's documentation (package linux-doc-6.1)."""
    with unpack_debian("linux-doc-6.1") as folder:
        for file in _list_files(folder, "usr/share/doc/linux-doc-6.1/Documentation/**/*.rst.gz"):
            if "translations" not in file.parts:
                yield gzip.decompress(file.read_bytes()).decode(errors="replace")


def read_pydoc() -> Iterator[str]:
    """Yield the help pages of Python's standard library."""
    yield from (document["text"] for document in read_pydoc_topics())


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "manpages-de": read_manpages,
    "linux-doc": read_kernel,
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
    """Return a text as blocks of tokens: the documents end to end, those of the held-out blocks apart.

    Args:
        name: A name in SOURCES.
        length: Tokens of a block.
        checkpoint: A folder with a tokenizer; None to train one on the text.

    Returns:
        The blocks, from a cache that the first call fills.
    """
    kind = "own" if checkpoint is None else checkpoint.name
    cache = cache_folder() / "learning" / f"{name}-{kind}-{length}.safetensors"
    if not cache.is_file():
        documents = read_documents(name)
        tokenizer = (
            train_tokenizer(documents) if checkpoint is None else Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
        )
        end = tokenizer.token_to_id(SEPARATOR)
        pieces = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(documents)]
        held_out, used = [], 0
        while len(held_out) < HELD_OUT_BLOCKS * length:
            held_out += pieces[used]
            used += 1
        train = [token for piece in pieces[used:] for token in piece]
        cache.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "train": _cut(train, length),
            "held_out": _cut(held_out, length)[:HELD_OUT_BLOCKS],
            "vocabulary": torch.tensor(tokenizer.get_vocab_size()),
        }
        unfinished = cache.with_suffix(".unfinished")
        save_file(tensors, unfinished)
        unfinished.replace(cache)
    tensors = load_file(cache)
    return Blocks(tensors["train"].long(), tensors["held_out"].long(), int(tensors["vocabulary"]))


def _cut(tokens: list[int], length: int) -> Tensor:
    whole = len(tokens) // length * length
    return torch.tensor(tokens[:whole], dtype=torch.int32).view(-1, length)
