"""What every test gets: no network, its own seed, few threads; and the real checkpoint for those that ask for it."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before anything that imports it
# In this process: a pool of its own imports torch in each of its processes, and what is compiled here is small.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read when inductor is imported

import gc
import random
import shutil
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

MAX_THREADS = 2  # the tensors here are small: more threads only wait for one another


def pytest_configure() -> None:
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_checkpoint" in getattr(item, "fixturenames", ()):
            item.add_marker("real")


def pytest_collection_finish() -> None:
    """Take what the imports made out of garbage collections: each Trainer asks for one, 0.25 s for nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def backend() -> Iterator[None]:
    """Without a C++ compiler, run on the reference backend and invert in torch rather than warn in every test."""
    from peft_sel.kernels import use_backend
    from peft_sel.numerics import newton

    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("g++") is None:
            patch.setattr(newton, "load_library", lambda: None)
        with nullcontext() if shutil.which("g++") else use_backend("reference"):
            yield


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed every generator from the test's name: the same draws in any order of tests, others in each test."""
    value = zlib.crc32(request.node.name.encode())
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """Folder of SmolLM2-135M as Qwen2 in bf16, made once and kept in the user's cache."""
    from peft_sel.demo import prepare_checkpoint

    return prepare_checkpoint()
