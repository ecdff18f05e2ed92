"""Folders that appear whole or not at all: locks, leftovers, what may be overwritten, and names that are links."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kill_harness import Fault, run_in_child

from peft_sel.checkpoint import staging
from peft_sel.checkpoint.staging import staged_folder
from peft_sel.errors import CheckpointError, OutputExistsError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks, links and locks")

OLD = {"config.json": "old", "model.safetensors": "old"}
NEW = {"config.json": "new", "model.safetensors": "new", "LICENSE": "new"}


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read_all(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def make(
    out: Path, files: dict[str, str] = NEW, meanwhile: Callable[[], object] = lambda: None, **options: Any
) -> None:
    with staged_folder(out, **options) as folder:
        fill(folder, files)
        meanwhile()


def throw(error: BaseException) -> NoReturn:
    raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["renameat2", "three renames"])
def renaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to rename; on systems without renameat2 they are the same."""
    if request.param == "three renames":
        monkeypatch.setattr(staging, "_rename_with", lambda flag, source, target: False)
    return str(request.param)


@pytest.mark.usefixtures("renaming")
def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with staged_folder(out) as folder:
        fill(folder, NEW)
        assert not out.exists() and folder.parent == out.parent
    assert read_all(out) == NEW and names(out.parent) == ["out"]
    with staged_folder(out, overwrite=True) as folder:
        fill(folder, {**NEW, "config.json": "newer"})
        assert read_all(out) == NEW
    assert read_all(out) == {**NEW, "config.json": "newer"} and names(out.parent) == ["out"]


@pytest.mark.usefixtures("renaming")
def test_an_overwrite_keeps_permissions(tmp_path: Path) -> None:
    templates = "additional_chat_templates"
    out = fill(tmp_path / "out", {**OLD, f"{templates}/a.jinja": "old"})
    modes = {
        "": 0o700,
        "config.json": 0o640,
        "model.safetensors": 0o600,
        templates: 0o750,
        f"{templates}/a.jinja": 0o604,
    }
    for name, mode in modes.items():
        (out / name).chmod(mode)
    with staged_folder(out, overwrite=True) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        fill(folder, {**NEW, f"{templates}/a.jinja": "new"})
        (folder / "LICENSE").chmod(0o644)
    assert {name: (out / name).stat().st_mode & 0o777 for name in modes} == modes
    assert (out / "LICENSE").stat().st_mode & 0o777 == 0o644 and (out / "config.json").read_text() == "new"
    out.chmod(0o755)
    make(out, overwrite=True)
    assert out.stat().st_mode & 0o777 == 0o755
    make(tmp_path / "new")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.fixture
def obeyed_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid removals from folders that are not writable, as the system does, but for root."""
    for function in (os.unlink, os.rmdir):

        def remove(path: Any, *, dir_fd: int | None = None, real: Any = function) -> None:
            folder = os.stat(os.path.dirname(path) if dir_fd is None else dir_fd)
            if not folder.st_mode & 0o200:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            real(path, dir_fd=dir_fd)

        monkeypatch.setattr(os, function.__name__, remove)


@pytest.mark.usefixtures("obeyed_modes", "renaming")
def test_a_read_only_output_is_overwritten_again_and_again(tmp_path: Path) -> None:
    templates = "additional_chat_templates"
    left = fill(tmp_path / ".out.unfinished-01234567", {**OLD, "deep/er/file": ""})
    for folder in (left, left / "deep", left / "deep" / "er"):
        folder.chmod(0o555)
    with pytest.warns(UserWarning, match="left by a killed run"):
        make(tmp_path / "out", {**OLD, f"{templates}/a.jinja": "old"})
    for name in (templates, ""):
        (tmp_path / "out" / name).chmod(0o555)
    for text in "ab":
        files = {**NEW, f"{templates}/a.jinja": text}
        make(tmp_path / "out", files, overwrite=True)
        assert read_all(tmp_path / "out") == files and names(tmp_path) == ["out"]
        assert (tmp_path / "out" / templates).stat().st_mode & 0o777 == 0o555


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, out = fill(tmp_path / ".out.unfinished-01234567", OLD), fill(tmp_path / "out", OLD)
    monkeypatch.setattr("shutil.rmtree", lambda *args: throw(PermissionError(errno.EPERM, "Operation not permitted")))
    with pytest.raises(CheckpointError, match=rf"not permitted\); remove {left}, or name another folder$"):
        make(out, overwrite=True)
    assert read_all(out) == OLD and read_all(left) == OLD


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EIO])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_system_that_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "folder"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    if kind == "folder" and code != errno.EIO:
        make(tmp_path / "deep" / "out")
        make(tmp_path / "deep" / "out", OLD, overwrite=True)
        assert read_all(tmp_path) == {f"deep/out/{name}": text for name, text in OLD.items()}
    else:
        with pytest.raises(CheckpointError, match="nothing was left behind"):
            make(tmp_path / "deep" / "out")
        assert not names(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2")
def test_renameat2_works_here(tmp_path: Path) -> None:
    first, second = fill(tmp_path / "a", OLD), fill(tmp_path / "b", NEW)
    assert staging._rename_with(staging.RENAME_EXCHANGE, first, second)
    assert (read_all(first), read_all(second)) == (NEW, OLD)
    with pytest.raises(FileExistsError, match=r"'.*a' -> '.*b'"):
        staging._rename_with(staging.RENAME_NOREPLACE, first, second)
    with pytest.raises(FileNotFoundError, match="missing"):
        staging._rename_with(staging.RENAME_NOREPLACE, tmp_path / "missing", tmp_path / "c")


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), ValueError()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_everything_as_it_was(tmp_path: Path, error: BaseException, overwrite: bool) -> None:
    out = tmp_path / "deep" / "er" / "out"
    if overwrite:
        fill(out, OLD)
    before = read_all(tmp_path)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        make(out, meanwhile=lambda: throw(error), overwrite=overwrite)
    assert read_all(tmp_path) == before and names(tmp_path) == ["deep"] * overwrite
    assert not overwrite or names(out.parent) == ["out"]


@pytest.mark.parametrize("name", ["in the folder", "as bytes", "elsewhere", "a sibling", "none"])
def test_an_error_of_the_writer_is_ours_only_if_it_is_about_the_folder(tmp_path: Path, name: str) -> None:
    raised: list[OSError] = []

    def write(folder: Path) -> None:
        file = {"elsewhere": tmp_path / "x", "a sibling": folder.with_name(f"{folder.name}-x"), "none": None}
        path = file.get(name, folder / "x")
        raised.append(OSError(errno.EACCES, "Permission denied", os.fsencode(path) if "bytes" in name else path))
        raise raised[0]

    is_ours = name in ("in the folder", "as bytes")
    with pytest.raises(CheckpointError if is_ours else OSError) as caught, staged_folder(tmp_path / "out") as folder:
        write(folder)
    assert caught.value is raised[0] or (is_ours and "out: could not be written" in str(caught.value))
    assert is_ours == isinstance(caught.value, CheckpointError) and not names(tmp_path)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_an_error_between_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    """Rename n fails; or, with KeyboardInterrupt, it is done and the interrupt comes right after it."""
    out, rename, calls = fill(tmp_path / "out", OLD), os.rename, 0

    def fail(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls <= number or isinstance(error, KeyboardInterrupt) or calls > number + 1:
            rename(source, target)
        if calls == number + 1:
            raise error

    monkeypatch.setattr(staging, "_rename_with", lambda flag, source, target: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        make(out, overwrite=True)
    assert calls > number and names(tmp_path) == ["out"]
    assert read_all(out) == (NEW if number + isinstance(error, KeyboardInterrupt) >= 2 else OLD)


def test_an_output_that_appears_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = fill(tmp_path / "out", OLD), os.rename

    def rename_and_appear(source: Path, target: Path) -> None:
        rename(source, target)
        if source == out:
            fill(out, {**OLD, "config.json": "theirs"})

    monkeypatch.setattr(staging, "_rename_with", lambda flag, source, target: False)
    monkeypatch.setattr(os, "rename", rename_and_appear)
    with pytest.raises(CheckpointError, match="Directory not empty"):
        make(out, overwrite=True)
    monkeypatch.setattr(os, "rename", rename)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is an earlier one that a killed run had set aside; remove or rename it"):
            make(out, overwrite=True)
    (aside,) = tmp_path.glob(".out.replaced-*")
    assert read_all(aside) == OLD and read_all(out) == NEW


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_does_not_reach_the_disk_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    out, sync = tmp_path / "out", staging._sync
    if overwrite:
        fill(out, OLD)

    def fail(path: str | Path) -> None:
        if Path(path) == tmp_path:
            assert read_all(out) == NEW
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    monkeypatch.setattr(staging, "_sync", fail)
    with pytest.raises(CheckpointError, match="out: could not be written"):
        make(out, overwrite=overwrite)
    assert read_all(tmp_path) == ({f"out/{name}": text for name, text in OLD.items()} if overwrite else {})
    assert names(tmp_path) == ["out"] * overwrite


@pytest.mark.parametrize("appearing", ["file", "folder", "empty folder", "link"])
@pytest.mark.parametrize("moment", ["before the check", "after the check"])
def test_an_output_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renaming: str, appearing: str, moment: str
) -> None:
    if renaming != "renameat2" and (appearing, moment) in (("empty folder", "after the check"),):
        pytest.skip("os.rename replaces an empty folder")
    out, rename_with, lexists = tmp_path / "out", staging._rename_with, os.path.lexists

    def appear() -> None:
        if appearing == "file":
            out.write_text("theirs")
        elif appearing == "link":
            out.symlink_to("nowhere")
        else:
            fill(out, {"theirs": "theirs"} if appearing == "folder" else {}).mkdir(exist_ok=True)

    def rename_late(*args: Any) -> bool:
        if renaming == "renameat2" and not lexists(out):
            appear()
        return rename_with(*args)

    if moment == "after the check" and renaming == "renameat2":
        monkeypatch.setattr(staging, "_rename_with", rename_late)
    elif moment == "after the check":
        rename = os.rename
        monkeypatch.setattr(os, "rename", lambda *args: (appear(), rename(*args)))
    with pytest.raises((OutputExistsError, CheckpointError), match="out"):
        make(out, meanwhile=appear if moment == "before the check" else lambda: None)
    assert names(tmp_path) == ["out"] and out.is_symlink() == (appearing == "link")
    assert out.is_symlink() or (out.read_text() == "theirs" if out.is_file() else NEW.items() - read_all(out).items())


def test_a_killed_run_is_cleared_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    calls = run_in_child(lambda: make(out)).calls
    (write,) = (number for number, call in enumerate(calls) if "config.json" in call and call.startswith("close"))
    out.rename(tmp_path / "whole")
    assert run_in_child(lambda: make(out), Fault(write, "before")).killed
    assert len(names(tmp_path)) == 3 and not out.exists()  # the lock and the hidden folder are left
    with pytest.warns(UserWarning, match=r"out: removed \.out\.unfinished-\w{8}, left by a killed run; starting anew"):
        make(out)
    assert names(tmp_path) == ["out", "whole"] and read_all(out) == NEW


def start_writer(out: Path) -> int:
    """Start a process that is in the middle of writing out, and return its id."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with staged_folder(out) as folder:
            fill(folder, NEW)
            os.write(write_end, b"!")
            signal.pause()
        os._exit(0)
    assert os.read(read_end, 1) == b"!"
    os.close(read_end)
    os.close(write_end)
    return child


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_living_run_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = start_writer(out)
    try:
        before = names(tmp_path)
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="out: another process is writing it now; wait for its end"):
                make(out, overwrite=overwrite)
        assert names(tmp_path) == before
        make(tmp_path / "other")  # beside it is free
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    with pytest.warns(UserWarning, match="left by a killed run"):
        make(out)
    assert names(tmp_path) == ["other", "out"]


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as folder:
        fill(folder, NEW)
        with pytest.raises(CheckpointError, match="another process"):
            make(tmp_path / "out")
    assert read_all(tmp_path / "out") == NEW and names(tmp_path) == ["out"]


def test_a_lock_that_its_holder_removes_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_at, seen = staging._is_at, []

    def remove_once(descriptor: int, path: Path) -> bool:
        if not seen:
            path.unlink()
        seen.append(is_at(descriptor, path))
        return seen[-1]

    monkeypatch.setattr(staging, "_is_at", remove_once)
    with staged_folder(tmp_path / "out") as folder:
        fill(folder, NEW)
        assert (tmp_path / ".out.lock").exists()
    assert seen == [False, True] and names(tmp_path) == ["out"]


@pytest.mark.parametrize("lacking", ["locks", "inode numbers"])
def test_without_locks_nothing_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    if lacking == "locks":
        monkeypatch.setattr("fcntl.flock", lambda *args: throw(OSError(errno.ENOLCK, "No locks available")))
    else:
        monkeypatch.setattr(staging, "_is_at", lambda descriptor, path: False)
    make(tmp_path / "out")
    left = fill(tmp_path / ".out.unfinished-01234567", OLD)
    with pytest.warns(UserWarning, match=r"earlier runs left .*unfinished-01234567, and without file locks"):
        make(tmp_path / "out", OLD, overwrite=True)
    assert read_all(tmp_path / "out") == OLD and read_all(left) == OLD and names(tmp_path) == [left.name, "out"]


def test_an_output_that_was_set_aside_is_put_back(tmp_path: Path) -> None:
    """The state between the first two of three renames."""
    out = tmp_path / "out"
    for overwrite in (False, True):
        fill(tmp_path / ".out.replaced-01234567", OLD)
        fill(tmp_path / ".out.unfinished-01234567", NEW)
        with warnings.catch_warnings(record=True) as said, suppress(OutputExistsError):
            warnings.simplefilter("always")
            make(out, {**NEW, "config.json": "newer"}, overwrite=overwrite)
        assert [str(warning.message).split(": ")[1].split(",")[0] for warning in said] == [
            "put back",
            "removed .out.unfinished-01234567",
        ]
        assert names(tmp_path) == ["out"]
        assert read_all(out) == ({**NEW, "config.json": "newer"} if overwrite else OLD)
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def test_an_output_that_was_set_aside_and_made_anew(tmp_path: Path) -> None:
    out, aside = fill(tmp_path / "out", NEW), fill(tmp_path / ".out.replaced-01234567", OLD)
    fill(tmp_path / ".out.unfinished-01234567", NEW)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is an earlier one that a killed run had set aside; remove or rename it"):
            make(out, overwrite=True)
        assert read_all(aside) == OLD and read_all(out) == NEW


def test_an_output_that_was_replaced_but_not_removed(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", NEW)
    fill(tmp_path / ".out.replaced-01234567", OLD)
    with pytest.warns(UserWarning, match=r"removed \.out\.unfinished-01234567"):
        make(out, overwrite=True)
    assert read_all(tmp_path) == {f"out/{name}": text for name, text in NEW.items()}


def test_hidden_names_that_are_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = fill(tmp_path / "theirs", OLD)
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    left = out.with_name(".out.unfinished-01234567")
    left.symlink_to(theirs)
    make(out)
    assert read_all(out) == NEW and left.is_symlink() and read_all(theirs) == OLD
    monkeypatch.setattr("secrets.token_hex", lambda size: "01234567")
    with pytest.raises(CheckpointError, match="File exists"):
        make(out, overwrite=True)
    assert read_all(out) == NEW and left.is_symlink() and read_all(theirs) == OLD
    left.unlink()
    out.with_name(".out.lock").symlink_to(theirs / "config.json")
    with pytest.raises(CheckpointError, match="symbolic links"):
        make(out, overwrite=True)
    assert read_all(out) == NEW and read_all(theirs) == OLD


def test_names_that_only_look_like_ours_are_kept(tmp_path: Path) -> None:
    others = (".out.unfinished-0123456", ".out.unfinished-0123456g", ".out2.unfinished-01234567", ".out.lock2", "out.b")
    for name in others:
        fill(tmp_path / name, OLD)
    (tmp_path / ".out.unfinished-76543210").write_text("a file")
    make(tmp_path / "out")
    assert names(tmp_path) == sorted([*others, ".out.unfinished-76543210", "out"])


REPLACEABLE = {
    "by transformers": {"config.json": "", "generation_config.json": "", "model.safetensors": ""},
    "in shards": {
        "config.json": "",
        "model-00001-of-00002.safetensors": "",
        "model-00002-of-00002.safetensors": "",
        "model.safetensors.index.json": "",
    },
    "with a tokenizer": {
        **OLD,
        **dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"), ""),
        **dict.fromkeys(("merges.txt", "chat_template.jinja", "additional_chat_templates/tools.jinja"), ""),
    },
    "with a file that the base has": {**OLD, "figure.png": ""},
    "with licence and code": {**OLD, "LICENSE": "", "README.md": "", ".gitattributes": "", "modeling_x.py": ""},
}


@pytest.mark.parametrize("kind", REPLACEABLE)
def test_a_checkpoint_is_overwritten(tmp_path: Path, kind: str) -> None:
    base = fill(tmp_path / "base", {**OLD, "figure.png": ""})
    out = fill(tmp_path / "out", REPLACEABLE[kind])
    with pytest.raises(OutputExistsError, match="out already exists"):
        make(out, inputs=[base])
    assert read_all(out) == REPLACEABLE[kind]
    make(out, overwrite=True, inputs=[base])
    assert read_all(out) == NEW


FOREIGN = {
    "empty": ({}, "no .safetensors file"),
    "no weights": ({"config.json": ""}, "no .safetensors file"),
    "pickled": ({"config.json": "", "pytorch_model.bin": ""}, "pytorch_model.bin"),
    "an adapter": ({"adapter_config.json": "", "adapter_model.safetensors": ""}, "adapter_config.json"),
    "notes": ({**OLD, "notes.txt": ""}, "notes.txt"),
    "a training": ({**OLD, "optimizer.pt": "", "trainer_state.json": ""}, "holds optimizer.pt"),
    "folders": ({**OLD, "checkpoint-10/model.safetensors": ""}, "checkpoint-10"),
    "hidden": ({**OLD, ".git/HEAD": ""}, r"\.git"),
    "in the templates": ({**OLD, "additional_chat_templates/notes.txt": ""}, "additional_chat_templates/notes.txt"),
    "a file": (None, "not a folder"),
    "a link": (None, "a symbolic link"),
    "a broken link": (None, "a symbolic link"),
    "linked weights": (None, r"it holds model\.safetensors"),
    "linked templates": (None, "it holds additional_chat_templates"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_but_a_checkpoint_is_overwritten(tmp_path: Path, kind: str) -> None:
    files, message = FOREIGN[kind]
    base, out = fill(tmp_path / "base", {**OLD, "optimizer.pt": "", "trainer_state.json": ""}), tmp_path / "out"
    out.mkdir()
    if files is not None:
        fill(out, files)
    elif kind == "linked weights":
        (out / "model.safetensors").symlink_to(base / "model.safetensors")
    elif kind == "linked templates":
        fill(out, OLD)
        (tmp_path / "empty").mkdir()
        (out / "additional_chat_templates").symlink_to(tmp_path / "empty")
    else:
        out.rmdir()
        if kind == "a file":
            out.write_text("")
        else:
            out.symlink_to(base if kind == "a link" else "nowhere")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(CheckpointError, match=rf"out: is .*{message}.*; name another output folder"):
        make(out, overwrite=True, inputs=[base])
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} | {tmp_path: 0} == before | {tmp_path: 0}


@pytest.mark.parametrize("used", ["cwd", "below cwd", "base", "adapter", "adapter inside", "base through a link"])
def test_what_is_in_use_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str) -> None:
    out, base, adapter = (fill(tmp_path / name, OLD) for name in ("out", "base", "adapter"))
    (out / "additional_chat_templates").mkdir()
    inside = out / "additional_chat_templates"
    (tmp_path / "link").symlink_to(out)
    if "cwd" in used:
        monkeypatch.chdir(inside if "below" in used else out)
    inputs = {
        "base": [out, adapter],
        "adapter": [base, out],
        "adapter inside": [base, inside],
        "base through a link": [tmp_path / "link", adapter],
    }
    with pytest.raises(CheckpointError, match=r"out: is or holds .*, which is in use; name another"):
        make(out, overwrite=True, inputs=inputs.get(used, [base, adapter]))
    assert read_all(out) == OLD and {"out", "base", "adapter", "link"} == set(names(tmp_path))


def test_an_output_that_changes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", OLD)
    with pytest.raises(CheckpointError, match=r"it holds notes\.txt"):
        make(out, meanwhile=lambda: fill(out, {"notes.txt": "mine"}), overwrite=True)
    assert read_all(out) == {**OLD, "notes.txt": "mine"} and names(tmp_path) == ["out"]


@pytest.mark.usefixtures("renaming")
def test_a_link_that_was_exchanged_is_removed_and_not_followed(tmp_path: Path) -> None:
    """A check that lets a link through, or one that appears behind the check's back."""
    real, out = fill(tmp_path / "real", OLD), tmp_path / "out"
    out.symlink_to(real)
    make(out, check=lambda path: None)
    assert names(tmp_path) == ["out", "real"] and not out.is_symlink()
    assert read_all(out) == NEW and read_all(real) == OLD
