"""The C++ of the package: built once, kept where only its user can write, and loud where it cannot be built."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_compiled import SHAPE, WITHOUT_LORA, draw

from peft_sel import cpp
from peft_sel.kernels import fold, use_backend

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache, before and after which no library is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp, "COMPILER", (*cpp.COMPILER, "-O0"))  # a third of the time; what is built here never runs
    cpp.load_library.cache_clear()
    yield tmp_path / "peft_sel" / "native"
    cpp.load_library.cache_clear()


def test_it_is_built_once_per_version(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp.load_library() is not None
    (library,) = cache.iterdir()
    stamp = library.stat().st_mtime_ns
    assert cpp._build(cache) == library and library.stat().st_mtime_ns == stamp
    other = Path(shutil.copytree(cpp.SOURCES, tmp_path / "sources"))
    header = next(other.glob("*.h"))
    header.write_bytes(header.read_bytes() + b"\n")
    monkeypatch.setattr(cpp, "SOURCES", other)
    assert cpp._build(cache) != library


def test_a_damaged_library_is_built_anew(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    library = cpp._build(cache)
    library.write_bytes(library.read_bytes()[:100])
    assert cpp.load_library() is not None and library.stat().st_size > 100


def test_a_cache_that_others_can_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    cpp._build(cache).write_bytes(b"anything")
    assert cpp._find_cache_folder() is None and cpp.load_library() is not None


def test_without_a_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    assert cpp.load_library() is not None and not cache.exists()


@pytest.mark.parametrize(("compiler", "advice"), [("no-such-compiler", "installing g\\+\\+ cures this"), ("false", "")])
def test_a_broken_compiler_warns_once_and_changes_nothing(
    compiler: str, advice: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "COMPILER", (compiler,))
    case = draw("mismatch", WITHOUT_LORA, SHAPE, torch.float32)
    with use_backend("reference"):
        want = fold(*case)
    with pytest.warns(UserWarning, match=f"the C\\+\\+ kernels do not compile or load here.*{advice}$"):
        assert torch.equal(fold(*case), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fold(*case), want)
    assert not list(cache.iterdir())
