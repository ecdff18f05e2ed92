"""The paper's figures, from tensors, logs or files: each function returns a matplotlib Figure."""

from peft_sel.plots.figures import check_figure_path, save_figure
from peft_sel.plots.runs import find_reaching_step, plot_loss_curves, plot_scale_trajectories, read_logs, read_losses

__all__ = [
    "check_figure_path",
    "find_reaching_step",
    "plot_loss_curves",
    "plot_scale_trajectories",
    "read_logs",
    "read_losses",
    "save_figure",
]
