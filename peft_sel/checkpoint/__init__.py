"""Checkpoints as files: read and write shards, merge an adapter into a base, inspect either."""

from peft_sel.checkpoint.inspect import TensorReport, inspect_checkpoint, render, summarize
from peft_sel.checkpoint.merge import MergeReport, merge_checkpoint

__all__ = ["MergeReport", "TensorReport", "inspect_checkpoint", "merge_checkpoint", "render", "summarize"]
