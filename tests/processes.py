"""Run a script in several processes on this machine's CPUs, as `accelerate launch` starts them, for the tests.

Accelerate's own `--cpu --num_processes 2` starts one process unless there is MPI; this starts as many as it says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs" / "accelerate"
TAIL = 6000  # characters of a failed launch that are shown


@dataclass(frozen=True)
class Launched:
    """How a launch ended.

    Attributes:
        returncode: Of the launcher: 0 if every process ended with 0.
        stdout: What all processes wrote there.
        stderr: What all processes and the launcher wrote there.
    """

    returncode: int
    stdout: str
    stderr: str


def launch(
    *command: str | Path,
    config: Path = CONFIGS / "ddp.yaml",
    options: tuple[str, ...] = (),
    num_processes: int = 2,
    timeout_s: float = 240,
    succeeds: bool = True,
    **environment: str,
) -> Launched:
    """Run `accelerate launch ... COMMAND` with gloo on CPUs, one thread in each process, and wait for its end.

    All processes find the package and the modules of tests/. There is no network and no GPU.

    Args:
        *command: A script and its arguments, or "-m", a module and its arguments.
        config: An Accelerate config file.
        options: More options of `accelerate launch`, which go before those of the config.
        num_processes: How many processes.
        timeout_s: Kill them all after this time, and fail.
        succeeds: Whether anything but exit status 0 is a failure.
        **environment: Variables of the environment that differ from what it is else.

    Returns:
        How it ended; a failure shows the end of the output instead.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    counts = [f"--num_processes={num_processes}", "--main_process_port=0"]  # 0: a free one
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # pipes would fill, or outlive the launcher
        words = [*launcher, *counts, *options, *map(str, command)]
        process = subprocess.Popen(words, stdout=out, stderr=err, env={**_make_environment(), **environment})
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        finally:
            is_late = process.poll() is None
            _kill_tree(process)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    launched = Launched(process.returncode, *texts)
    if is_late or (succeeds and launched.returncode != 0):
        end = f"took more than {timeout_s} s" if is_late else f"ended with {launched.returncode}"
        shown = "\n".join(text[-TAIL:] for text in texts)
        raise AssertionError(f"{' '.join(map(str, command))} on {num_processes} processes {end}:\n{shown}")
    return launched


def kill_rank(rank: int) -> None:
    """In a process that was launched: end it by SIGKILL, at once and without a clean-up, if it is this one."""
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _make_environment() -> dict[str, str]:
    """Return this process's environment without an outer launcher's settings."""
    outer = ("ACCELERATE_", "FSDP_", "MASTER_", "TORCHELASTIC_")
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONWARNINGS"}
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(outer)}
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher that still runs, and its processes, each of which leads a session of its own."""
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        family = [*launcher.children(recursive=True), launcher]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family)
        process.wait()
