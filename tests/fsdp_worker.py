"""What each of two processes does in tests/test_fsdp.py, under `accelerate launch` with configs/accelerate/fsdp2.yaml.

accelerate 1.15 knows FSDP on accelerators only: on CPUs it chooses MULTI_CPU, which never becomes FSDP. So this answers
MULTI_GPU to its question for the backend, with gloo, and cpu to that for the device. All the rest is accelerate's own
code: loading in one process, sharding, the switch of the optimizer's parameters, clipping, checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType
from datasets import Dataset
from models import make_config, make_tiny
from moe import TARGETS, make_moe
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from processes import kill_rank
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from peft_sel import SELError, SELTrainer, cli, create_sel_optimizer, create_sel_scheduler, save_adapter
from peft_sel.layer import SELLayer
from peft_sel.logs import collect_scale_means

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
    checkpoints: bool = False  # accelerate's fsdp_activation_checkpointing, which wraps the decoder layers
    is_empty_elsewhere: bool = True  # whether the base is on the meta device in all processes but the first


CASES = {
    "dense": Case(),
    "drop": Case(options={"base_weight": "drop", "bias": "sel_only"}),
    "frozen": Case(steps=8, is_empty_elsewhere=False, options={"train_raw": False}),
    "tabulated": Case(base="bf16", steps=4, options={"train_raw": False}),
    "saved": Case("untied", {"modules_to_save": ["lm_head"], "bias": "all"}, steps=8, broadcasts=False),
    "checkpointed": Case(steps=4, checkpoints=True, options={"normalize_by_inner_mult": True, "r": 1}),
    "head": Case("untied", {"target_modules": ["lm_head", "v_proj", "embed_tokens"]}, steps=8),
    "experts": Case(base="qwen3_moe", options={"target_parameters": TARGETS}),
}
LOADED = ("dense", "tabulated", "drop")  # adapters that are loaded on a base of the first process
BASES: dict[str, Callable[[], Any]] = {
    "qwen2": make_tiny,
    "bf16": lambda: make_tiny(dtype=torch.bfloat16),
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


def start_accelerator(case: Case) -> Accelerator:
    """Make a new Accelerator, from the launcher's environment."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(case.broadcasts).lower()
    os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = str(case.checkpoints).lower()
    accelerate_state.AcceleratorState._reset_state()
    if torch.distributed.is_initialized():  # where the last Accelerator wrote FSDP
        accelerate_state.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2
    return accelerator


def load_base(folder: Path, case: Case, accelerator: Accelerator) -> Any:
    """Load a base model: in all processes, or in the first only."""
    if accelerator.is_main_process or not (case.broadcasts and case.is_empty_elsewhere):
        return AutoModelForCausalLM.from_pretrained(folder / case.base)
    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / case.base))
    base.tie_weights()  # init_empty_weights parts what is tied
    assert all(parameter.is_meta for parameter in base.parameters())
    return base


def prepare_case(folder: Path, case: Case) -> tuple[Accelerator, Any, Any, Any]:
    """Load, convert, make optimizer and scheduler, and shard."""
    accelerator = start_accelerator(case)
    base = load_base(folder, case, accelerator)
    model = convert_case(base, case, seed=accelerator.process_index if case.broadcasts else 0)
    optimizer, scheduler = make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, scheduler


def gather_trained(model: Any) -> dict[str, Tensor]:
    """Return the whole of every trained parameter, by torch alone."""
    return {name: p.full_tensor().clone() for name, p in model.named_parameters() if p.requires_grad}


def describe_groups(model: Any, optimizer: Any) -> list[Any]:
    """Return role, rate and parameter names of every group."""
    names = {id(p): name.replace("_checkpoint_wrapped_module.", "") for name, p in model.named_parameters()}
    return [[group["role"], group["lr"], [names[id(p)] for p in group["params"]]] for group in optimizer.param_groups]


def get_message(call: Callable[[], object]) -> str:
    """Return the message of the error that a call raises: one of ours, or of a file."""
    try:
        call()
    except (SELError, OSError) as error:
        return str(error)
    return "no error"


def check_resuming(
    folder: Path, accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """Train to the middle, save, train to the end, and once more from what was saved."""
    middle = NUM_STEPS // 2
    state = folder / "state"
    accelerator.register_for_checkpointing(scheduler)
    losses = train_case(model, Case(steps=middle), optimizer, scheduler, accelerator)
    accelerator.save_state(str(state))
    rest = train_case(model, Case(), optimizer, scheduler, accelerator, first=middle)
    end = gather_trained(model)
    accelerator.load_state(str(state))
    again = train_case(model, Case(), optimizer, scheduler, accelerator, first=middle)
    same = all(torch.equal(tensor, end[name]) for name, tensor in gather_trained(model).items())
    return {"losses": losses + rest, "again": losses + again, "resumes_with_equal_bits": same}


def check_evaluation(folder: Path, model: Any) -> dict[str, Any]:
    """Evaluate, with a write into a shard in between, and without the adapter."""
    layer = next(module for module in model.modules() if isinstance(module, SELLayer))
    raw = layer.symexplin_raw["default"]
    logits = {}
    model.eval()
    with torch.no_grad():
        logits["adapted"] = model(input_ids=BATCHES[0]).logits
        raw.to_local().mul_(2)
        logits["written"] = model(input_ids=BATCHES[0]).logits
        raw.to_local().mul_(0.5)
        with model.disable_adapter():
            logits["base"] = model(input_ids=BATCHES[0]).logits
        num_kept = sum(len(module.kept_weights) for module in model.modules() if isinstance(module, SELLayer))
        model.base_model.keep_effective_weights()
        model(input_ids=BATCHES[0])
        num_asked = sum(len(module.kept_weights) for module in model.modules() if isinstance(module, SELLayer))
        model.base_model.keep_effective_weights(evaluation=False)
    if torch.distributed.get_rank() == 0:
        save_file(logits, folder / "logits.safetensors")
    return {"num_kept": num_kept, "num_asked": num_asked}


def check_refusals(folder: Path, model: Any) -> dict[str, str]:
    """Return what each request that a sharded model refuses says."""
    layer = next(module for module in model.modules() if isinstance(module, SELLayer))
    requests = {
        "merge_and_unload": model.merge_and_unload,
        "merge_adapter": model.merge_adapter,
        "unload": model.unload,
        "get_delta_weight": lambda: layer.get_delta_weight("default"),
        "delete_adapter": lambda: model.delete_adapter("default"),
        "add_adapter": lambda: model.add_adapter("other", make_config()),
        "save_adapter": lambda: save_adapter(model, folder / "adapters" / "dense"),
        "accumulate_gradients": lambda: model.base_model.accumulate_gradients().__enter__(),
    }
    names = list(dict(model.named_modules()))
    messages = {name: get_message(call) for name, call in requests.items()}
    assert list(dict(model.named_modules())) == names and list(model.peft_config) == ["default"]
    return messages


def check_dense(folder: Path) -> dict[str, Any]:
    """Train, resume, save, evaluate and refuse."""
    accelerator, model, optimizer, scheduler = prepare_case(folder, CASES["dense"])
    result = {"groups": describe_groups(model, optimizer)}
    result |= check_resuming(folder, accelerator, model, optimizer, scheduler)
    save_adapter(model, folder / "adapters" / "dense")
    model.save_pretrained(str(folder / "pretrained"))
    state = accelerator.get_state_dict(model)
    model.save_pretrained(str(folder / "gathered"), state_dict=state, is_main_process=accelerator.is_main_process)
    trained = gather_trained(model)
    if accelerator.is_main_process:
        save_file(trained, folder / "trained.safetensors")
    result["scales"] = collect_scale_means(model)
    result["refusals"] = check_refusals(folder, model)
    return result | check_evaluation(folder, model)


def check_broken_base(folder: Path) -> str:
    """Return what each process says of a base that only the first one can see to be broken."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen2")
    if torch.distributed.get_rank() == 0:
        base.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    return get_message(lambda: convert_case(base, CASES["dense"], seed=0))


def check_other_bases(folder: Path) -> list[str]:
    """Return what each process says, loading, of bases that only the first one can see to be the wrong ones."""
    messages = []
    for name, factor in {"dense": 1.5, "tabulated": torch.nan}.items():
        base = load_base(folder, CASES[name], start_accelerator(CASES[name]))
        names = list(dict(base.named_modules()))
        if torch.distributed.get_rank() == 0:
            base.model.layers[1].mlp.up_proj.weight.data.mul_(factor)
        messages.append(get_message(partial(PeftModel.from_pretrained, base, folder / "adapters" / name)))
        assert list(dict(base.named_modules())) == names
    return messages


def check_mixed_precision(folder: Path) -> str:
    """Return what a pass says where accelerate would round the parameters."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    _, model, _, _ = prepare_case(folder, CASES["dense"])
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return get_message(lambda: model(input_ids=BATCHES[0]))


def check_loading(folder: Path, name: str) -> bool:
    """Load an adapter on a base that one process holds, to train it on; say whether it is there, and save its logits.

    The parameters come from the first process, so that only a pass shows what the others have of the rest.
    """
    case = CASES[name]
    accelerator = start_accelerator(case)
    model = PeftModel.from_pretrained(
        load_base(folder, case, accelerator), folder / "adapters" / name, is_trainable=True
    )
    optimizer, _ = make_optimizer(model)
    model, _ = accelerator.prepare(model, optimizer)
    saved = load_file(folder / "adapters" / name / "adapter_model.safetensors")
    loaded = gather_trained(model)
    logits = model(input_ids=BATCHES[0]).logits.detach()
    save_file({"logits": logits}, folder / f"loaded_{name}_{accelerator.process_index}.safetensors")
    for parameter in model.parameters():
        parameter.data.mul_(2)
    set_peft_model_state_dict(model, saved)  # over what is sharded
    again = gather_trained(model)
    assert loaded and all(torch.equal(tensor, again[key]) for key, tensor in loaded.items())
    return all(torch.equal(tensor, saved[key.replace(".default", "")]) for key, tensor in loaded.items())


def run_case(folder: Path, name: str) -> dict[str, Any]:
    """Train a case and save its adapter."""
    accelerator, model, optimizer, scheduler = prepare_case(folder, CASES[name])
    groups = describe_groups(model, optimizer)
    losses = train_case(model, CASES[name], optimizer, scheduler, accelerator)
    save_adapter(model, folder / "adapters" / name)
    return {"groups": groups, "losses": losses}


class _Killer(TrainerCallback):
    """Ends the second process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            kill_rank(1)


def run_trainer(folder: Path, output: Path, kills_at: int | None = None) -> SELTrainer:
    """Train with SELTrainer, from the last checkpoint in output if there is one."""
    start_accelerator(CASES["dense"])
    model = convert_case(AutoModelForCausalLM.from_pretrained(folder / "qwen2"), CASES["dense"], seed=0)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for batch in BATCHES for row in batch]
    options = {"per_device_train_batch_size": 2, "max_steps": 8, "save_steps": 3, "logging_steps": 1, "warmup_steps": 2}
    args = TrainingArguments(str(output), **options, learning_rate=LR, report_to=[], disable_tqdm=True)
    callbacks = [] if kills_at is None else [_Killer(kills_at)]
    trainer = SELTrainer(model, args, train_dataset=Dataset.from_list(rows), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)
    return trainer


def get_losses(trainer: SELTrainer) -> list[float]:
    """Return the loss of every step."""
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def check_trainer(folder: Path) -> dict[str, Any]:
    """Train with SELTrainer, and once more from a checkpoint in the middle; save the model."""
    trainer = run_trainer(folder, folder / "run")
    if trainer.args.should_save:
        shutil.copytree(folder / "run" / "checkpoint-3", folder / "resumed" / "checkpoint-3")
    trainer.accelerator.wait_for_everyone()
    end = gather_trained(trainer.model)
    resumed = run_trainer(folder, folder / "resumed")
    again = gather_trained(resumed.model)
    resumed.save_model(str(folder / "final"))
    (folder / "file").touch()
    resumed.args.output_dir = str(folder / "file" / "run")
    saves = [partial(save, str(folder / "file" / "it")) for save in (resumed.model.save_pretrained, resumed.save_model)]
    saves.append(partial(resumed._save_checkpoint, resumed.model, None))
    return {
        "failed_saves": [get_message(save) for save in saves],
        "losses": get_losses(trainer),
        "again": get_losses(resumed),
        "resumes_with_equal_bits": all(torch.equal(tensor, end[name]) for name, tensor in again.items()),
    }


def run_until_killed(folder: Path) -> None:
    """Run SELTrainer, which the second process does not survive unless it resumes."""
    output = folder / "killed"
    trainer = run_trainer(folder, output, kills_at=None if output.exists() else 5)
    (folder / f"killed_{torch.distributed.get_rank()}.json").write_text(json.dumps(get_losses(trainer)))


def run_recipe(folder: Path) -> None:
    """Run the recipe in a folder, as `peft-sel train` does."""
    assert cli.main(["train", str(folder / "recipe.yaml")]) == 0
    assert not torch.distributed.is_initialized()


def run_cases(folder: Path) -> None:
    """Do everything else, and write what came out: one JSON file for each process."""
    results: dict[str, Any] = {"dense": check_dense(folder)}
    results |= {name: run_case(folder, name) for name in CASES if name != "dense"}
    results["loads"] = [check_loading(folder, name) for name in LOADED]
    results["trainer"] = check_trainer(folder)
    results["other_bases"] = check_other_bases(folder)
    results["broken_base"] = check_broken_base(folder)
    results["mixed_precision"] = check_mixed_precision(folder)
    rank = torch.distributed.get_rank()
    (folder / f"results_{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    fake_accelerators()
    {"cases": run_cases, "killed": run_until_killed, "job": run_recipe}[sys.argv[1]](Path(sys.argv[2]))
    if sys.argv[1] != "job":
        torch.distributed.destroy_process_group()
