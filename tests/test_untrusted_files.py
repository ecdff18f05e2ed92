"""What lies in a folder of someone else's: pipes, links, holes, files that change, and pickles never to be opened."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from models import make_tiny, sel_layers
from peft import PeftModel
from refusals import (
    MODEL,
    SMALL,
    TENSORS,
    assert_refused,
    make_folders,
)
from safetensors.torch import save_file

import peft_sel
from peft_sel import SELError, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint
from peft_sel.checkpoint.shards import CheckpointReader
from peft_sel.cli import main
from peft_sel.errors import CheckpointError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return make_folders(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "dangling", "folder"])
@pytest.mark.parametrize("file", [f"adapter/{TENSORS}", f"base/{MODEL}", "base/model-1.safetensors", "base/LICENSE"])
def test_what_is_no_file(folders: tuple[Path, Path], file: str, kind: str) -> None:
    base, adapter = folders
    path = base.parent / file
    if "model-1" in file:
        (base / MODEL).unlink()
        index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
        (base / f"{MODEL}.index.json").write_text(json.dumps(index))
    else:
        path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    if file == "base/LICENSE" and kind == "folder":
        merge_checkpoint(base, adapter, base.parent / "out", progress=False)
        return
    match = "link to nothing, a pipe" if "LICENSE" in file else "neither|not there|not a regular file"
    inspected = {"adapter": adapter, "base": base}[file.split("/")[0]] if "LICENSE" not in file else None
    assert_refused(base, adapter, match, inspected=inspected, load=file.startswith("adapter"))


def test_the_command_line_says_it_in_one_line(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders
    (adapter / TENSORS).unlink()
    os.mkfifo(adapter / TENSORS)
    capsys.readouterr()
    for arguments in (["merge", str(base), str(adapter), str(base.parent / "out")], ["inspect", str(adapter)]):
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("peft-sel: ") and shown.err.count("\n") == 1


def test_a_hole_beside_the_weights(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    with open(base / "tokenizer.json", "wb") as hole:
        hole.truncate(1 << 40)
    assert_refused(base, adapter, r"tokenizer\.json: is larger than")


def test_links_to_files_are_followed_as_in_the_hub_cache(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (base.parent / "blob").write_text("free")
    (base / "LICENSE").symlink_to("../blob")
    merge_checkpoint(base, adapter, base.parent / "out", progress=False)
    assert (base.parent / "out" / "LICENSE").read_text() == "free"
    assert not (base.parent / "out" / "LICENSE").is_symlink()


def test_an_output_that_is_a_link_is_not_followed(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (base.parent / "elsewhere").mkdir()
    for target in ("elsewhere", "nowhere"):
        (base.parent / "out").symlink_to(target)
        with pytest.raises(SELError, match="already exists"):
            merge_checkpoint(base, adapter, base.parent / "out", progress=False)
        (base.parent / "out").unlink()
    assert not list((base.parent / "elsewhere").iterdir())


def test_an_index_with_names_that_no_system_has(folders: tuple[Path, Path]) -> None:
    base, adapter = folders
    (base / MODEL).unlink()
    for file in ("x" * 300 + ".safetensors", "a\nb.safetensors", "a\0.safetensors", "\x1b[2J.safetensors"):
        (base / f"{MODEL}.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        assert_refused(base, adapter, "not there|is not the name of", inspected=base)


def test_a_file_that_is_exchanged_after_the_checkpoint_was_opened(tmp_path: Path) -> None:
    for number in range(2):
        save_file({f"t{number}": torch.zeros(2)}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {f"t{number}": f"model-{number}.safetensors" for number in range(2)}}
    (tmp_path / f"{MODEL}.index.json").write_text(json.dumps(index))
    with CheckpointReader(tmp_path) as reader:
        reader.read("t1")
        save_file({"t0": torch.zeros(3)}, tmp_path / "model-0.safetensors")
        with pytest.raises(CheckpointError, match="t0 is not what it was"):
            reader.read("t0")


class Bomb:
    """What leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("instead", [True, False])
def test_pickled_adapters_are_never_opened(folders: tuple[Path, Path], instead: bool) -> None:
    base, adapter = folders
    trace = base.parent.parent / "exploded"
    for name in ("adapter_model.bin", "training_args.bin"):
        (adapter / name).write_bytes(pickle.dumps(Bomb(trace)))
    if instead:
        (adapter / TENSORS).unlink()
        assert_refused(base, adapter, r"adapter_model\.bin.*never opened.*safetensors", inspected=adapter, load=True)
    else:
        merge_checkpoint(base, adapter, base.parent / "out", progress=False)
        assert inspect_checkpoint(adapter, progress=False)
        assert sel_layers(PeftModel.from_pretrained(make_tiny("qwen2", **SMALL), adapter))
        assert not list((base.parent / "out").glob("*.bin"))
    assert not trace.exists()
    pickle.loads((adapter / "adapter_model.bin").read_bytes())
    assert trace.exists()  # the bomb works: the test could fail


def test_nothing_of_ours_can_unpickle() -> None:
    loaders = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    seen = 0
    for file in Path(peft_sel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            seen += 1
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
                assert not {str(name).split(".")[0] for name in names} & loaders, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "np.load", "numpy.load", "yaml.load", "torch.jit.load"), (
                    file,
                    called,
                )
    assert seen > 10_000
