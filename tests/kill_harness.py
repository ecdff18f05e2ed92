"""Run a function in a forked child that dies, or meets a full disk, at a chosen file-system call.

The calls are counted, so a fault is as repeatable as the function: run once without a fault to list the calls, then
once for each. A fork with torch imported takes some 30 ms. fsync is counted and not done: a kill loses nothing that was
written, and most of the time would go there.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

CALLS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink", "link", "symlink", "ftruncate")
WRITES = ("write", "close")  # of files opened for writing by open()


@dataclass(frozen=True)
class Fault:
    """What happens at a call.

    Attributes:
        at: Which call, counted from 0.
        kind: "before" and "after" kill beside the call, "half" kills within it (a write of half the bytes), "full" lets
            it fail with ENOSPC, after half the bytes if it is a write, as it does each later write, fsync and mkdir.
    """

    at: int
    kind: str


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        calls: The calls that were begun, in order, such as "fsync out/model.safetensors" or "write 4096".
        killed: Whether SIGKILL (or, with max_file_bytes, SIGXFSZ) ended it.
        error: Type and text of the exception that ended it, None for none.
    """

    calls: list[str]
    killed: bool
    error: str | None


def _path_of(descriptor: int) -> str:
    """Return the path of an open file, where the system tells."""
    link = f"/proc/self/fd/{descriptor}"
    return os.readlink(link) if os.path.lexists(link) else str(descriptor)


class _Calls:
    """Counts calls, reports each through a pipe before it is made, and brings in the fault."""

    def __init__(self, pipe: int, fault: Fault | None) -> None:
        self.pipe, self.fault = pipe, fault
        self.count = 0
        self.full = False
        self.report = os.write

    def make(self, name: str, call: Callable[[Any], Any], data: Any = None) -> Any:
        """Make one call; call(None) makes it whole, call(part) with the first half of a write's data."""
        number, self.count = self.count, self.count + 1
        self.report(self.pipe, f"{name}\n".encode())
        kind = self.fault.kind if self.fault and self.fault.at == number else None
        if kind in ("half", "full") and data is not None:
            call(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
        if kind in ("before", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.full = self.full or kind == "full"
        if kind == "full" or (self.full and name.split()[0] in ("write", "fsync", "mkdir")):
            if name.startswith("close"):
                call(None)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        result = call(None)
        if kind == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def wrap(self, owner: Any, name: str) -> None:
        """Count the calls of a function of a module or class."""
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            shown = [_path_of(arg) if name == "fsync" else str(arg) for arg in args]
            return self.make(" ".join([name, *shown]), lambda _: original(*args, **kwargs))

        setattr(owner, name, counted)

    def wrap_open(self) -> None:
        """Count the writes of files that open() opens for writing, in the sizes that reach the system."""
        calls, original = self, io.open

        class CountedFile(io.FileIO):
            def write(self, data: Any) -> int:
                write, size = super().write, memoryview(data).nbytes
                return int(calls.make(f"write {size}", lambda part: write(data if part is None else part), data))

            def close(self) -> None:
                close = super().close
                if not self.closed:
                    calls.make(f"close {self.name}", lambda _: close())

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wxa") or "+" in mode:
                return original(file, mode, *args, **kwargs)
            raw = CountedFile(os.fspath(file), mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=kwargs.get("encoding"))

        io.open = builtins.open = opened  # type: ignore[assignment]


def run_in_child(
    function: Callable[[], object],
    fault: Fault | None = None,
    *,
    also: Sequence[tuple[Any, str]] = (),
    max_file_bytes: int | None = None,
) -> Outcome:
    """Call a function in a fork of this process, with one fault or none.

    Args:
        function: What to run; what it returns is dropped.
        fault: None to list the calls.
        also: More functions whose calls count: the owner and the name of each.
        max_file_bytes: Kill, without a count, in the write with which a file outgrows this size: for writers that do
            not go through Python, such as safetensors' own.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks: the child needs none
        child = os.fork()
    if child == 0:
        os.close(read_end)
        _run(function, write_end, fault, also, max_file_bytes)
    os.close(write_end)
    with open(read_end, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    *calls, last = text.split("\n")
    error = last.removeprefix("\0").replace("\1", "\n") if last.startswith("\0") else None
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)
    assert killed or os.WIFEXITED(status), f"the child ended with status {status}"
    return Outcome(calls, killed, error)


def _run(
    function: Callable[[], object],
    pipe: int,
    fault: Fault | None,
    also: Sequence[tuple[Any, str]],
    max_file_bytes: int | None,
) -> NoReturn:
    """Be the child."""
    report = os.write
    try:
        torch.set_num_threads(1)  # the parent's worker threads are not in the fork
        os.fsync = lambda descriptor: None
        calls = _Calls(pipe, fault)
        calls.wrap_open()
        for name in CALLS:
            calls.wrap(os, name)
        for owner, name in also:
            calls.wrap(owner, name)
        if max_file_bytes is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        function()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".replace("\n", "\1")
        report(pipe, b"\0" + text.encode())
    finally:
        os._exit(0)


@contextmanager
def small_disk(folder: os.PathLike[str], num_bytes: int) -> Iterator[None]:
    """Mount a disk of a size over a folder, seen by this process alone: for use inside run_in_child.

    Raises:
        PermissionError: If the system allows no mounts.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: Any) -> None:
        if getattr(libc, name)(*args):
            raise PermissionError(ctypes.get_errno(), f"{name} is not permitted")

    new_mounts, new_user, private = 0x20000, 0x10000000, 0x44000  # of <sched.h> and <sys/mount.h>
    user, group = os.getuid(), os.getgid()
    call("unshare", new_mounts | (new_user if user else 0))
    if user:
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    call("mount", None, b"/", None, private, None)
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode())
    try:
        yield
    finally:
        call("umount2", os.fsencode(folder), 0)
