"""Run PEFT's own, unmodified test modules with SELConfig: `make peft-suite`.

The tests come with the sdist of the installed PEFT release, which is downloaded once into the user's cache folder. What
they are parametrized with is in cases.py, what we skip in skips.py. The exit code is not 0 if a test fails, if
a skipped one would pass, or if an entry of those files fits no test. Arguments go to pytest.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peft_sel"


def fetch_sdist(version: str) -> Path:
    """Return the folder of PEFT's sdist, downloaded at the first call; a broken download leaves nothing."""
    folder = CACHE / f"peft-{version}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            print(f"downloading the sdist of PEFT {version} into {CACHE}", flush=True)
            pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "-d", temporary, f"peft=={version}"], check=True)
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
            unpacked = Path(temporary, folder.name)
            (unpacked / "tests" / "__init__.py").touch()  # the sdist leaves it out, and its modules import relatively
            unpacked.rename(folder)
    return folder


def main() -> int:
    """Run the modules and return pytest's exit code."""
    sdist = fetch_sdist(importlib.metadata.version("peft"))
    with tempfile.TemporaryDirectory() as hub:
        os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE=hub)  # read at import, so before the imports below
        import hub_models
        import plugin
        import pytest
        from cases import CASES

        hub_models.fill(Path(hub))
        os.chdir(sdist)
        modules = [f"tests/{name}.py" for name in CASES]
        options = ["-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--disable-warnings"]
        return int(pytest.main([*options, *sys.argv[1:], *modules], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
