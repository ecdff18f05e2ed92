"""Launched by test_streaming.py in two processes: what each of them gets from a stream through Trainer's loader."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from accelerate import skip_first_batches
from accelerate.utils import gather_object
from tiny import make_tokenizer
from torch import distributed, nn
from transformers import Trainer, TrainingArguments, default_data_collator

from peft_sel.data import DataSection, load_blocks

BATCHES = 30


def main(folder: Path) -> None:
    found = []
    for dispatch, workers, first in ((None, 0, 0), (None, 1, 7), (False, 0, 7)):
        section = DataSection(files=str(folder / "text.jsonl"), sequence_length=32, streaming=True, shuffle_blocks=5)
        stream, _ = load_blocks(section, make_tokenizer())
        args = TrainingArguments(
            str(folder),
            max_steps=99,
            per_device_train_batch_size=2,
            dataloader_num_workers=workers,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            accelerator_config={"dispatch_batches": dispatch},
            use_cpu=True,
        )
        trainer = Trainer(nn.Linear(1, 1), args, default_data_collator, train_dataset=stream)
        loader = skip_first_batches(trainer.get_train_dataloader(), first)
        mine = [batch["input_ids"].tolist() for batch in islice(loader, BATCHES)]
        found.append({"first": first, "batches": BATCHES, "ranks": gather_object([mine])})
    if trainer.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    distributed.destroy_process_group()
