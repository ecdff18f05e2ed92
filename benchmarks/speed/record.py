"""Results as files: one JSON for each configuration, with what it was measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PACKAGES = ("torch", "transformers", "peft", "peft-sel", "triton", "safetensors")


def describe_environment() -> dict[str, Any]:
    """Return versions, hardware, threads, date and commit."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"versions": versions, "machine": machine, "date": date, "commit": _read_commit()}


def write_result(
    file: Path, kind: str, settings: dict[str, Any], rows: dict[str, Any], environment: dict[str, Any]
) -> None:
    """Write one result.

    Args:
        file: The file.
        kind: Which table of the report shows it.
        settings: What was measured.
        rows: The figures, by row of that table.
        environment: What describe_environment returned before the measurement.
    """
    result = {"kind": kind, "settings": settings, "environment": environment, "rows": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render_json(result, digits=5, inline=r"\[[^][{}\"]*\]"), encoding="utf-8")


def render_json(content: dict[str, Any], digits: int, inline: str) -> str:
    """Return JSON text with rounded numbers, indented but for what a pattern matches.

    Args:
        content: What to write, without NaN and infinity.
        digits: Significant digits of floats.
        inline: Regular expression for what stands on one line.

    Returns:
        The text of a file.
    """
    rounded = json.loads(
        json.dumps(content, allow_nan=False), parse_float=lambda text: float(f"{float(text):.{digits}g}")
    )
    return re.sub(inline, lambda found: " ".join(found[0].split()), json.dumps(rounded, indent=1)) + "\n"


def _processor_name() -> str:
    """Return the processor's name, or its architecture where Linux does not tell."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _read_commit() -> str:
    """Return the commit that is checked out, with "-dirty" where files differ from it; "unknown" outside git."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
