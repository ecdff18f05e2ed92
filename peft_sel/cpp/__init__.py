"""The C++ of this package: compiled once for the CPU at hand, and kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
COMPILER = ("g++", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-O3", "-march=native")
# Bits first: no contraction into fused multiply-adds. The other two let rounding and comparisons run on vectors.
EXACTNESS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
WIDE_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()


@functools.cache
def load_library() -> Any:
    """Return the sources as a library, compiled if they were not before.

    Returns:
        The library; None where there is none for the platform, and, with a warning, where the compiler fails.
    """
    if sys.platform != "linux":
        return None
    try:
        return _load()
    except (OSError, subprocess.CalledProcessError) as error:
        cause = " ".join((getattr(error, "stderr", None) or str(error)).split())[:300]
        cure = "; installing g++ cures this" if isinstance(error, FileNotFoundError) else ""
        warnings.warn(
            f"the C++ kernels do not compile or load here ({cause}); SEL goes on without it, at several times the "
            f"time per weight{cure}",
            stacklevel=2,
        )
        return None


def _load() -> ctypes.CDLL:
    if (folder := _find_cache_folder()) is not None:
        for _ in range(2):
            library = _build(folder)
            try:
                return ctypes.CDLL(str(library))
            except OSError:  # half of a file, after a power failure; or nothing may be executed from this folder
                library.unlink()
    with tempfile.TemporaryDirectory() as scratch:  # what is loaded may be deleted
        return ctypes.CDLL(str(_build(Path(scratch))))


def cache_folder() -> Path:
    """Return the user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peft_sel"


def _find_cache_folder() -> Path | None:
    """Return the folder for libraries in the cache folder; None without one that this user alone can write to."""
    try:
        folder = cache_folder() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return None
    status = folder.stat()
    own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None


def _build(folder: Path) -> Path:
    """Return the file of the library for the sources, compiler line and processor, in a folder of this user's."""
    command = (*COMPILER, *EXACTNESS, *WIDE_VECTORS)
    information = Path("/proc/cpuinfo").read_text().splitlines()
    processor = [line for line in information if line.startswith(("flags", "Features"))][:1] or information
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    ingredients = ([source.read_bytes() for source in sources], command, processor)
    library = folder / f"native-{hashlib.sha256(repr(ingredients).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, library.name)
            compiled = [str(source) for source in sources if source.suffix == ".cpp"]
            subprocess.run([*command, *compiled, "-o", str(made)], check=True, capture_output=True, text=True)
            made.replace(library)
    return library
