"""Train with SEL in a plain Accelerate loop, alone or with DDP; stop, and go on from a checkpoint bit for bit.

accelerate launch configs/accelerate/plain_loop.py --base Qwen/Qwen3-0.6B-Base --text book.txt --out runs/book
The same command with --resume runs/book/batch_80 goes on, also in the middle of an epoch.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from peft_sel import SELConfig, create_sel_optimizer, create_sel_scheduler, save_adapter
from peft_sel.errors import OutputExistsError


@dataclass
class Options:
    """The command line."""

    base: str
    text: str
    out: str
    resume: str = ""
    epochs: int = 2
    length: int = 512  # tokens of a block
    batch: int = 2  # blocks, on each process
    accumulate: int = 4  # batches to an optimizer step
    save_every: int = 20  # optimizer steps
    lr: float = 2e-5


(args,) = HfArgumentParser(Options).parse_args_into_dataclasses()
for folder in (Path(args.out, "adapter"), Path(args.out, "merged")):
    if folder.exists():
        raise OutputExistsError(folder)
by_epoch = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of the data follows from seed and epoch
# The loop steps the scheduler itself, once per optimizer step: Accelerate would step it once for each process.
accelerator = Accelerator(
    gradient_accumulation_steps=args.accumulate, step_scheduler_with_optimizer=False, dataloader_config=by_epoch
)
set_seed(0)
tokens = torch.tensor(AutoTokenizer.from_pretrained(args.base)(Path(args.text).read_text())["input_ids"])
blocks = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
# With a generator of its own, the loader draws nothing from the one that dropout uses.
data = torch.utils.data.DataLoader(blocks, args.batch, shuffle=True, generator=torch.Generator())
base = AutoModelForCausalLM.from_pretrained(args.base, dtype="auto")
model = get_peft_model(base, SELConfig(task_type="CAUSAL_LM")).train()
optimizer = create_sel_optimizer(model, lr=args.lr)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
steps = args.epochs * ceil(len(data) / args.accumulate)  # an epoch ends with a shorter accumulation
scheduler = accelerator.prepare(create_sel_scheduler(optimizer, "cosine", steps // 20, steps))

done = 0  # batches of each process
if args.resume:
    accelerator.load_state(args.resume)
    done = int(Path(args.resume).name.removeprefix("batch_"))
for epoch in range(done // len(data), args.epochs):
    data.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(data, done - epoch * len(data)):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            optimizer.zero_grad()
        done += 1
        if accelerator.sync_gradients and scheduler.scheduler.last_epoch % args.save_every == 0:
            accelerator.save_state(f"{args.out}/batch_{done}")

if accelerator.is_main_process:
    save_adapter(accelerator.unwrap_model(model), f"{args.out}/adapter")
    accelerator.unwrap_model(model).merge_and_unload().save_pretrained(f"{args.out}/merged")
accelerator.end_training()
