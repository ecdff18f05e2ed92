"""DeepSpeed itself, where it is installed: ZeRO-2 and ZeRO-3 on two gloo processes against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import make_tiny
from safetensors.torch import load_file

FOLDER = Path(__file__).parent
STEPS = 20


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def launch(ranks: int, *arguments: str, **variables: str) -> None:
    """Run the worker on some processes, as `accelerate launch` would with a DeepSpeed file."""
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(FOLDER.parent)}
    environment = {**os.environ, **variables, **(own if ranks > 1 else {"PYTHONPATH": str(FOLDER.parent)})}
    command = [sys.executable, str(FOLDER / "zero_worker.py"), *arguments]
    workers = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        workers.append(subprocess.Popen(command, env={**environment, **place}, **options))
    try:
        outputs = [worker.communicate(timeout=600)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(worker.returncode for worker in workers), "\n".join(output[-3000:] for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_train_what_one_does(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    make_tiny("qwen3", head_dim=8).save_pretrained(tmp_path / "base")
    config = json.loads((FOLDER.parent / "configs" / "accelerate" / f"zero{stage}.json").read_text())
    config["torch_autocast"]["enabled"] = False  # to compare in float32
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # so that all of a tiny model is split
    (tmp_path / "zero.json").write_text(json.dumps(config))
    base, one, two = str(tmp_path / "base"), tmp_path / "one", tmp_path / "two"
    launch(1, base, str(one), str(STEPS))
    settings = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero.json")}
    launch(2, base, str(two), str(STEPS), **settings)
    expected, losses = (json.loads((folder / "losses.json").read_text()) for folder in (one, two))
    assert len(losses) == STEPS + 1 and losses == pytest.approx(expected, rel=1e-4)
    tensors, own = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (one, two))
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert own[name].dtype == tensor.dtype and own[name].shape == tensor.shape, name
    merged, whole = (load_file(folder / "merged" / "model.safetensors") for folder in (two, one))
    for name, tensor in whole.items():
        assert float((merged[name] - tensor).norm()) <= 1e-4 * float(tensor.norm()), name
    launch(2, base, str(two), str(STEPS), "resume", **settings)
    assert json.loads((two / "losses.json").read_text()) == losses
    resumed = load_file(two / "adapter" / "adapter_model.safetensors")
    assert all(resumed[name].equal(tensor) for name, tensor in own.items())
