"""A folder that appears whole or not at all, whatever kills its writer.

Everything is written to a hidden folder beside the output, `.OUT.unfinished-XXXXXXXX`, brought to the disk, and renamed
in one step. Whoever does so holds a lock on `.OUT.lock`, which the system releases when the process dies, however it
dies: under the lock every hidden folder of this output is a dead process's, and is cleared away. SIGTERM, unless the
program handles it, kills like SIGKILL, and the next run clears up after both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from peft_sel.checkpoint.side_files import TEMPLATES_FOLDER, list_copied_folders, list_copies
from peft_sel.errors import CheckpointError, OutputExistsError, list_names

# What save_pretrained of models, tokenizers and processors, and merge_checkpoint, write or copy.
CHECKPOINT_FILES = re.compile(
    r"(?!adapter_).*\.safetensors(\.index\.json)?|((generation|tokenizer|(video_)?(pre)?processor)_)?config\.json"
    r"|tokenizer\.(json|model)|.*\.(spm|tiktoken)|spiece\.model|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template\.(json|jinja)"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
    r"|(license|notice|readme|use_policy)(\.\w+)?|\.gitattributes"
)
TEMPLATES = re.compile(rf"{TEMPLATES_FOLDER}/.*\.jinja")
LOCK_TRIES = 20
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}  # which only a write can meet
NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP}  # such as shared folders of virtual machines
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2  # of <fcntl.h> and <linux/fs.h>


def check_output(out_dir: Path, overwrite: bool = False, inputs: Sequence[Path] = (), option: str = "") -> None:
    """Raise unless an output folder may be made.

    Args:
        out_dir: The folder.
        overwrite: Whether it may be there, as a folder with a checkpoint and nothing else.
        inputs: Folders that it may neither be nor hold. What a merge copies from the first may be in a checkpoint.
        option: What the caller can be told to replace out_dir, if anything.

    Raises:
        OutputExistsError: If it exists and overwrite is False.
        CheckpointError: If it exists and is nothing that overwrite may replace.
    """
    if not os.path.lexists(out_dir):
        return
    if not overwrite:
        raise OutputExistsError(out_dir, option)
    if out_dir.is_symlink() or not out_dir.is_dir():
        raise _not_replaceable(out_dir, "a symbolic link" if out_dir.is_symlink() else "not a folder")
    for used in (Path.cwd(), *(Path(os.path.realpath(folder)) for folder in inputs)):
        if any(parent.exists() and parent.samefile(out_dir) for parent in (used, *used.parents)):
            raise CheckpointError(out_dir, f"is or holds {used}, which is in use", "name another output folder")
    bases = [folder for folder in inputs[:1] if folder.is_dir()]
    copies = {name for folder in bases for name in list_copies(folder)}
    folders = {TEMPLATES_FOLDER, *(name for folder in bases for name in list_copied_folders(folder))}

    def is_known(path: Path) -> bool:
        name = path.relative_to(out_dir).as_posix()
        pattern = TEMPLATES if "/" in name else CHECKPOINT_FILES
        return not path.is_symlink() and path.is_file() and (name in copies or bool(pattern.fullmatch(name.lower())))

    foreign, has_weights = [], False
    for path in sorted(out_dir.iterdir()):
        if path.name in folders and path.is_dir() and not path.is_symlink():
            foreign += [child for child in path.iterdir() if not is_known(child)]
        elif not is_known(path):
            foreign.append(path)
        has_weights |= path.suffix == ".safetensors"
    if foreign or not has_weights:
        names = list_names(path.relative_to(out_dir) for path in foreign)
        raise _not_replaceable(out_dir, f"not a checkpoint alone (it holds {names or 'no .safetensors file'})")


def _not_replaceable(out_dir: Path, what: str) -> CheckpointError:
    return CheckpointError(
        out_dir, f"is {what}, and only a folder with a checkpoint is ever overwritten", "name another output folder"
    )


def _rename_with(flag: int, source: Path, target: Path) -> bool:
    """Rename with a flag of Linux's renameat2; return False where the system or the file system lacks it."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


def _sync(path: str | Path) -> None:
    """Bring a file, or the names in a folder, to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_FOLDER_SYNC or not os.path.isdir(path):
                raise
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring everything in a folder to the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for file in files:
            _sync(os.path.join(parent, file))
        _sync(parent)


def _remove_tree(folder: Path, ignore_errors: bool = False) -> None:
    """Remove a folder, also one whose permissions forbid it: what was exchanged for a read-only output's successor."""
    with suppress(OSError):  # rmtree raises it anew
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, 0o700)
    shutil.rmtree(folder, ignore_errors)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_of_output(error: OSError, folder: Path) -> bool:
    """Return whether an error of the code that fills a folder is about the folder, as far as it tells."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, os.PathLike))]
    return error.errno in OUTPUT_ERRORS or any(Path(os.fsdecode(name)).is_relative_to(folder) for name in names)


class _Output:
    """An output folder and the hidden names beside it.

    Args:
        out_dir: The output folder.

    Attributes:
        path: The same, absolute.
        has_locks: Whether its file system has locks; without, only what this object made is cleared away.
    """

    def __init__(self, out_dir: Path) -> None:
        self.path = out_dir.absolute()
        self.has_locks = False
        token = secrets.token_hex(4)
        self.staging, self.aside = self._hidden("unfinished", token), self._hidden("replaced", token)

    def _hidden(self, kind: str, token: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{kind}-{token}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the output, or raise if a living process does."""
        path = self.path.with_name(f".{self.path.name}.lock")
        descriptor = self._open_locked(path)
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)
            os.close(descriptor)

    def _open_locked(self, path: Path) -> int:
        """Return an open file that is locked and has this name, or that cannot be locked."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        for _ in range(LOCK_TRIES):
            descriptor = os.open(path, flags, 0o666)
            try:
                self.has_locks = self._try_lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if not self.has_locks or _is_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # its holder was done, and removed it, after it was opened here
        self.has_locks = False  # a file system without lasting inode numbers
        return os.open(path, flags, 0o666)

    def _try_lock(self, descriptor: int) -> bool:
        """Lock the file; return whether it can be locked at all."""
        if sys.platform == "win32":
            return False
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                self.path, "another process is writing it now", "wait for its end, or name another folder"
            ) from error
        except OSError:  # such as NFS without its lock service
            return False
        return True

    def clear(self) -> None:
        """Put back or remove what dead processes left, and say so; without locks, leave it and say that."""
        unfinished = {path.name[-8:]: path for path in self._list_left("unfinished")}
        aside = {path.name[-8:]: path for path in self._list_left("replaced")}
        left = [*unfinished.values(), *aside.values()]
        if not left:
            return
        if not self.has_locks:
            warnings.warn(
                f"{self.path}: earlier runs left {list_names(left)}, and without file locks nobody can tell whether "
                "one still writes; remove what none does",
                stacklevel=2,
            )
            return
        for token, path in aside.items():
            if not os.path.lexists(self.path):
                os.rename(path, self.path)
                warnings.warn(f"{self.path}: put back, a killed run had set it aside", stacklevel=2)
            elif token in unfinished:  # someone made the output anew after the kill
                warnings.warn(
                    f"{self.path}: {path} is an earlier one that a killed run had set aside; remove or rename it",
                    stacklevel=2,
                )
                del unfinished[token]
            else:  # the run was killed with the new one in place
                unfinished[token] = self._hidden("unfinished", token)
                os.rename(path, unfinished[token])
        for path in unfinished.values():
            _remove_tree(path)
        if unfinished:
            removed = list_names(path.name for path in unfinished.values())
            warnings.warn(f"{self.path}: removed {removed}, left by a killed run; starting anew", stacklevel=2)

    def _list_left(self, kind: str) -> list[Path]:
        name = re.compile(rf"\.{re.escape(self.path.name)}\.{kind}-[0-9a-f]{{8}}")
        paths = self.path.parent.iterdir()
        return [path for path in paths if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]

    def make_error(self, out_dir: Path, error: OSError) -> CheckpointError:
        """Return the error for an output that could not be written."""
        left: list[Path] = []
        with suppress(OSError):  # of a parent that is not there
            left = self._list_left("unfinished") if self.has_locks else [self.staging] * self.staging.is_dir()
        fate = f"remove {list_names(left)}," if left else "nothing was left behind; free space"
        return CheckpointError(out_dir, f"could not be written ({error})", f"{fate} or name another folder")

    def keep_modes(self) -> None:
        """Give the staged folder, and the files in it that replace others, the permissions of what they replace."""
        for path in [self.staging, *self.staging.rglob("*")] if self.path.is_dir() else []:
            old = self.path / path.relative_to(self.staging)
            if not path.is_symlink() and not old.is_symlink() and path.is_dir() == old.is_dir() and old.exists():
                shutil.copymode(old, path)

    def commit(self, replace: bool, parents: Sequence[Path]) -> None:
        """Give the staged folder the output's name, for good; an old output takes the name of the staged folder."""
        if replace:
            self._exchange()
        else:
            self._rename()
        try:
            for parent in parents:
                _sync(parent)
        except OSError:
            if replace:
                self._exchange()
            else:
                os.rename(self.path, self.staging)
            raise

    def _rename(self) -> None:
        try:
            if not _rename_with(RENAME_NOREPLACE, self.staging, self.path):
                check_output(self.path)  # what appears after this is refused as well, unless it is an empty folder
                os.rename(self.staging, self.path)
        except FileExistsError as error:
            raise OutputExistsError(self.path) from error

    def _exchange(self) -> None:
        if not _rename_with(RENAME_EXCHANGE, self.staging, self.path):
            os.rename(self.path, self.aside)
            os.rename(self.staging, self.path)
            os.rename(self.aside, self.staging)

    def clean_up(self) -> None:
        """Remove the staged folder, or what was exchanged for it."""
        if self.aside.exists():  # interrupted between two renames
            if not os.path.lexists(self.path):
                os.rename(self.aside, self.path)
            elif not self.staging.exists():
                os.rename(self.aside, self.staging)
            else:  # someone made the output between the two: the next run tells of the old one
                return
        if self.staging.is_symlink():  # which had the output's name for a moment
            self.staging.unlink()
        _remove_tree(self.staging, ignore_errors=True)


def require_folder(out_dir: Path) -> None:
    """Raise unless what is to be replaced, whatever is in it, is a folder.

    Args:
        out_dir: It exists.

    Raises:
        CheckpointError: If it is a file or a link.
    """
    if out_dir.is_symlink() or not out_dir.is_dir():
        raise CheckpointError(out_dir, "is a link or a file, and only a folder is ever replaced", "name another one")


def clear_leftovers(folder: Path, pattern: str) -> None:
    """Put back or remove what dead processes left of outputs in a folder, and say so; living ones keep theirs.

    Args:
        folder: The folder; it need not be there.
        pattern: Regular expression of the outputs' names.
    """
    hidden = re.compile(rf"\.({pattern})\.((unfinished|replaced)-[0-9a-f]{{8}}|lock)")
    matches = map(hidden.fullmatch, os.listdir(folder) if folder.is_dir() else [])
    for name in sorted({match[1] for match in matches if match}):
        output = _Output(folder / name)
        with suppress(CheckpointError, OSError), output.lock():
            output.clear()


@contextmanager
def staged_folder(
    out_dir: Path,
    *,
    overwrite: bool = False,
    inputs: Sequence[Path] = (),
    check: Callable[[Path], object] | None = None,
) -> Iterator[Path]:
    """Yield a hidden folder beside out_dir that becomes out_dir at the end, or disappears on any error.

    A kill at any moment leaves out_dir as it was or complete. Where Linux's renameat2 cannot exchange two folders,
    replacing takes three renames, and a kill between them leaves no out_dir; the next run then puts the old one back.

    Args:
        out_dir: The folder to make; missing parents are made too.
        overwrite: Replace a checkpoint that is there, once the new one is complete.
        inputs: As for check_output.
        check: Raises unless an out_dir that exists may be replaced, instead of overwrite's rule; None for that rule.

    Yields:
        The hidden folder, empty.

    Raises:
        OutputExistsError: If out_dir exists, or appears meanwhile, and overwrite is False.
        CheckpointError: If another process is writing out_dir now, if it is nothing that overwrite may replace, or if
            it cannot be written. Other errors of the code that fills it, such as a lost connection, pass as they are.
    """
    output, is_filling = _Output(out_dir), False

    def check_existing() -> None:
        if check is None:
            check_output(out_dir, overwrite, inputs)
        elif os.path.lexists(out_dir):
            check(out_dir)

    parents = [parent for parent in output.path.parents if not parent.exists()]
    try:
        output.path.parent.mkdir(parents=True, exist_ok=True)
        with output.lock():
            output.clear()
            check_existing()
            os.mkdir(output.staging, 0o700 if os.path.lexists(out_dir) else 0o777)
            try:
                is_filling = True
                yield output.staging
                is_filling = False
                output.keep_modes()
                sync_tree(output.staging)
                check_existing()
                output.commit(os.path.lexists(out_dir), [output.path.parent, *(made.parent for made in parents)])
            finally:
                output.clean_up()
    except BaseException as error:
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError) and (not is_filling or _is_of_output(error, output.staging)):
            raise output.make_error(out_dir, error) from error
        raise
