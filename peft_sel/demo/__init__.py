"""The demo: the whole way from a real checkpoint to a trained, merged and reloaded one."""

from peft_sel.demo.material import prepare_checkpoint, write_text
from peft_sel.demo.stages import DemoReport, Stage, render, run_demo

__all__ = ["DemoReport", "Stage", "prepare_checkpoint", "render", "run_demo", "write_text"]
