"""Instruction tuning with TRL: a chat template, packed data, and the loss on the answers only.

purpose   fine-tune a chat model on your own conversations (JSON lines with a list of {role, content} under "messages")
command   python configs/trl_sft.py --model MODEL --chats chats.jsonl --output_dir runs/chat
          and any option of trl.SFTConfig; each chat is cut behind its last answer, which the loss counts, or left out
          if that answers no user; --assistant_only_loss True counts every answer, for chat templates that TRL knows
          (such as Qwen's, not SmolLM2's)
duration  20 steps of 128 tokens took SmolLM2-135M two minutes on a busy CPU core; no GPU has run it
expected  in those, five epochs of four conversations (tests/test_trl.py), the loss fell from 3.5 to 1.1
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from peft_sel import SELConfig, SELTrainerMixin, merge_checkpoint
from peft_sel.errors import OutputExistsError
from peft_sel.origins import resolve_checkpoint


@dataclass
class Job:
    """What to train on what: a folder or an id of the hub, and a file."""

    model: str
    chats: str


class SELSFTTrainer(SELTrainerMixin, SFTTrainer):
    """SFTTrainer with SEL's parameter groups, annealing, logs and checkpoints."""


def find_answer(row: dict[str, Any]) -> int:
    """Return where the last answer of a conversation is, or 0 if there is none that a user's turn comes before."""
    roles = [message["role"] for message in row["messages"] or []]
    last = max((place for place, role in enumerate(roles) if role == "assistant"), default=0)
    return last if "user" in roles[:last] else 0


def split_chat(row: dict[str, Any]) -> dict[str, Any]:
    """Part the last answer from what it answers, so that TRL counts it alone, whatever the chat template."""
    place = find_answer(row)
    return {"prompt": row["messages"][:place], "completion": row["messages"][place : place + 1]}


def load_chats(file: str) -> Dataset:
    """Read conversations, without those that have no answer."""
    chats = load_dataset("json", data_files=file, split="train")
    answered = chats.filter(lambda row: find_answer(row) > 0)
    if len(answered) < len(chats):
        print(f"{file}: left out {len(chats) - len(answered)} of {len(chats)} chats, which hold no answer to a user")
    if not answered:
        raise SystemExit(f"{file} holds no answer to a user; give messages of the roles user and assistant")
    return answered


def main(arguments: list[str] | None = None) -> SELSFTTrainer:
    """Train, save the adapter and merge it, into the folders adapter and merged of output_dir."""
    parser = HfArgumentParser((Job, SFTConfig))
    parser.set_defaults(packing=True, learning_rate=2e-5, weight_decay=0.01, warmup_steps=0.03)
    job, args = parser.parse_args_into_dataclasses(arguments)
    adapter, merged = Path(args.output_dir, "adapter"), Path(args.output_dir, "merged")
    for folder in (adapter, merged):
        if folder.exists():
            raise OutputExistsError(folder)
    base = resolve_checkpoint(job.model)
    chats = load_chats(job.chats)
    if not args.assistant_only_loss:
        chats = chats.map(split_chat, remove_columns="messages")
    trainer = SELSFTTrainer(
        AutoModelForCausalLM.from_pretrained(job.model, dtype="auto", use_safetensors=True),
        args=args,
        train_dataset=chats,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=SELConfig(task_type="CAUSAL_LM"),
    )
    resume = args.resume_from_checkpoint  # a folder, or True for the last one in output_dir
    trainer.train(resume_from_checkpoint=True if resume == "True" else resume)
    trainer.save_model(str(adapter))
    with args.main_process_first(local=False):
        if trainer.is_world_process_zero():
            merge_checkpoint(base, adapter, merged)
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
