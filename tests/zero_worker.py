"""Trains a tiny model with SELTrainer, in one process or under DeepSpeed: run by test_zero_launch.py."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from peft_sel import SELConfig, SELTrainer, merge_checkpoint
from peft_sel.scale_config import ScaleConfig

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def choose_gloo() -> None:
    """Let accelerate name a backend without a GPU, for which it runs DeepSpeed in one process only."""
    choose: Any = PartialState._prepare_backend

    def prepare_backend(
        self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        return choose(self, cpu, sagemaker_dp, backend or "gloo")

    PartialState._prepare_backend = prepare_backend


def main(base: str, out: str, steps: int, resume: bool) -> None:
    """Train, save and merge; resuming goes on from the checkpoint in the middle."""
    args = TrainingArguments(
        out,
        max_steps=steps,
        save_steps=steps // 2,
        logging_steps=1,
        learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.01,
        per_device_train_batch_size=4 // PROCESSES,
        report_to=[],
        disable_tqdm=True,
        label_names=["labels"],
        use_cpu=PROCESSES == 1,  # else accelerate would leave DeepSpeed out
    )
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        SELConfig(task_type="CAUSAL_LM", r=2, exp_scale=ScaleConfig(trainable=False)),
    )
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 96, (80, 16), generator=generator)
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = SELTrainer(model, args, train_dataset=data, eval_dataset=data[:8])
    checkpoint = Path(out, f"checkpoint-{steps // 2}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if resume else None)
    final = trainer.evaluate()["eval_loss"]
    adapter, merged = Path(out, "adapter"), Path(out, "merged")
    if resume and trainer.is_world_process_zero():
        shutil.rmtree(adapter)
        shutil.rmtree(merged)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(adapter))
    if trainer.is_world_process_zero():
        merge_checkpoint(base, adapter, merged, progress=False)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(out, "losses.json").write_text(json.dumps([*losses, final]))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if PROCESSES > 1:
        choose_gloo()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "resume" in sys.argv[4:])
