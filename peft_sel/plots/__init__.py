"""The paper's figures, from tensors, logs or files: each function returns a matplotlib Figure."""

from peft_sel.plots.figures import check_figure_path, save_figure
from peft_sel.plots.learned import plot_learned_transform
from peft_sel.plots.runs import (
    find_lasting_step,
    find_loss_key,
    find_reaching_step,
    plot_loss_curves,
    plot_scale_trajectories,
    read_logs,
    read_losses,
)
from peft_sel.plots.transform import plot_linear_path, plot_transform
from peft_sel.plots.weights import Distribution, plot_weight_distribution, read_weight_distributions

__all__ = [
    "Distribution",
    "check_figure_path",
    "find_lasting_step",
    "find_loss_key",
    "find_reaching_step",
    "plot_learned_transform",
    "plot_linear_path",
    "plot_loss_curves",
    "plot_scale_trajectories",
    "plot_transform",
    "plot_weight_distribution",
    "read_logs",
    "read_losses",
    "read_weight_distributions",
    "save_figure",
]
