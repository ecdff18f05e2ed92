"""What each of two processes does in tests/test_fsdp.py, under `accelerate launch` with configs/accelerate/fsdp2.yaml.

accelerate 1.15 knows FSDP on accelerators only: on CPUs it chooses MULTI_CPU, which never becomes FSDP. So this answers
MULTI_GPU to its question for the backend, with gloo, and cpu to that for the device. All the rest is accelerate's own
code: loading in one process, sharding, the switch of the optimizer's parameters, clipping, checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType
from models import make_config, make_tiny
from moe import TARGETS, make_moe
from peft import get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from peft_sel import SELError, create_sel_optimizer, create_sel_scheduler, save_adapter

LR = 2e-3
NUM_STEPS = 20
BATCHES = torch.randint(0, 96, (NUM_STEPS, 4, 12), generator=torch.Generator().manual_seed(5))  # 4 rows in all


@dataclass(frozen=True)
class Case:
    """A way to adapt a base."""

    base: str = "qwen2"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = NUM_STEPS
    broadcasts: bool = True  # accelerate's cpu_ram_efficient_loading
    is_empty_elsewhere: bool = True  # whether the base is on the meta device in all processes but the first


CASES = {
    "dense": Case(),
    "drop": Case(is_empty_elsewhere=False, options={"base_weight": "drop", "bias": "sel_only"}),
    "frozen": Case(options={"train_raw": False}),
    "saved": Case("untied", {"modules_to_save": ["lm_head"], "bias": "all"}, broadcasts=False),
    "head": Case("untied", {"target_modules": ["lm_head", "v_proj", "embed_tokens"]}),
    "experts": Case(base="qwen3_moe", options={"target_parameters": TARGETS}),
}
BASES: dict[str, Callable[[], Any]] = {
    "qwen2": make_tiny,
    "untied": lambda: make_tiny(tie_word_embeddings=False),
    "qwen3_moe": make_moe,
}


def convert_case(base: Any, case: Case, seed: int) -> Any:
    """Convert a base in its case's way, after seeding what residual A is drawn from."""
    torch.manual_seed(seed)
    return get_peft_model(base, make_config(**case.options)).train()


def train_case(
    model: Any, case: Case, optimizer: Any, scheduler: Any, accelerator: Accelerator | None = None, first: int = 0
) -> list[float]:
    """Train on the global batches, each process on its own rows; return their losses."""
    losses = []
    for batch in BATCHES[first : case.steps]:
        rows = batch if accelerator is None else batch.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=rows, labels=rows).loss
        if accelerator is None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            loss = accelerator.reduce(loss.detach(), "mean")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_optimizer(model: Any) -> tuple[Any, Any]:
    """Make optimizer and scheduler as the README does."""
    optimizer = create_sel_optimizer(model, lr=LR)
    return optimizer, create_sel_scheduler(optimizer, "linear", 2, NUM_STEPS)


def fake_accelerators() -> None:
    """Let accelerate take two CPU processes for two with an accelerator each."""
    os.environ["ACCELERATE_USE_CPU"] = "false"
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    accelerate_state.PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def prepare_case(folder: Path, case: Case) -> tuple[Accelerator, Any, Any, Any]:
    """Load as users do, convert, make optimizer and scheduler, and shard."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(case.broadcasts).lower()
    accelerate_state.AcceleratorState._reset_state()
    accelerate_state.PartialState._shared_state.pop("distributed_type", None)
    if torch.distributed.is_initialized():
        accelerate_state.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2
    if case.broadcasts and case.is_empty_elsewhere and not accelerator.is_main_process:
        with init_empty_weights():
            base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / case.base))
        base.tie_weights()  # init_empty_weights parts what is tied
        assert all(parameter.is_meta for parameter in base.parameters())
    else:
        base = AutoModelForCausalLM.from_pretrained(folder / case.base)
    model = convert_case(base, case, seed=accelerator.process_index if case.broadcasts else 0)
    optimizer, scheduler = make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, scheduler


def gather_trained(model: Any) -> dict[str, Tensor]:
    """Return the whole of every trained parameter, by torch alone."""
    return {name: p.full_tensor().clone() for name, p in model.named_parameters() if p.requires_grad}


def describe_groups(model: Any, optimizer: Any) -> list[Any]:
    """Return role, rate and parameter names of every group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[group["role"], group["lr"], [names[id(p)] for p in group["params"]]] for group in optimizer.param_groups]


def get_message(call: Callable[[], object]) -> str:
    """Return the message of the SELError that a call raises."""
    try:
        call()
    except SELError as error:
        return str(error)
    return "no error"


def run_case(folder: Path, name: str) -> dict[str, Any]:
    """Train a case and save its adapter."""
    accelerator, model, optimizer, scheduler = prepare_case(folder, CASES[name])
    groups = describe_groups(model, optimizer)
    losses = train_case(model, CASES[name], optimizer, scheduler, accelerator)
    save_adapter(model, folder / "adapters" / name)
    return {"groups": groups, "losses": losses}


def main(folder: Path) -> None:
    """Do everything, and write what came out: one JSON file for each process."""
    fake_accelerators()
    results = {}
    for name in CASES:
        t = time.time()
        results[name] = run_case(folder, name)
        print(name, time.time() - t)
    rank = torch.distributed.get_rank()
    (folder / f"results_{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
