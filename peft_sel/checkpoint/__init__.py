"""Checkpoints as files: read and write shards, merge an adapter into a base, export one, inspect either."""

from peft_sel.checkpoint.export import ExportReport, export_weights
from peft_sel.checkpoint.inspect import TensorReport, inspect_checkpoint, render, summarize
from peft_sel.checkpoint.merge import MergeReport, check_mergeable, merge_checkpoint

__all__ = [
    "ExportReport",
    "MergeReport",
    "TensorReport",
    "check_mergeable",
    "export_weights",
    "inspect_checkpoint",
    "merge_checkpoint",
    "render",
    "summarize",
]
