"""What all figures share: the import of matplotlib, the style, and how a figure becomes a file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from peft_sel.errors import MissingPackageError, OutputExistsError, PlotError
from peft_sel.targets import DENSE_TARGETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow, too pale for lines on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2)))
REFERENCE = "#767676"  # lines that are no data
SUFFIXES = (".png", ".svg")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.8,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "peft_sel",
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib's parameters to its defaults and ours, whatever the user's own are, and back at the end.

    Yields:
        Nothing.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def check_matplotlib() -> None:
    """Raise a MissingPackageError unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("matplotlib", "plots") from error


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that draws run in figure_style."""

    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> R:
        with figure_style():
            return function(*args, **kwargs)

    return draw


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, whose parts make room for one another; pyplot knows nothing of it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line_look(index: int) -> dict[str, Any]:
    """Return colour and dashes of the line of a number, so that neither alone has to tell neighbours apart."""
    return {"color": PALETTE[index % len(PALETTE)], "linestyle": DASHES[index % len(DASHES)]}


def sort_roles(roles: Iterable[str]) -> list[str]:
    """Return module roles, each once: those of a transformer block in the order of the block, others, then biases."""

    def rank(role: str) -> tuple[bool, int]:
        name = role.partition(".")[0]
        return "." in role, DENSE_TARGETS.index(name) if name in DENSE_TARGETS else len(DENSE_TARGETS)

    return sorted(dict.fromkeys(roles), key=rank)


def list_roles(figure: Figure, roles: Sequence[str]) -> None:
    """Put the legend of module roles, whose lines look by their places in the list, to the right of the panels."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=role, **line_look(index)) for index, role in enumerate(roles)]
    figure.legend(handles=handles, loc="outside right upper", title="Module role", alignment="left")


def label_steps(axes: Axes) -> None:
    """Name the horizontal axis of a training, and number whole steps only."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("Optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def mark_level(axes: Axes, level: float) -> None:
    """Draw a thin horizontal line across a panel."""
    axes.axhline(level, color=REFERENCE, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1.5)


def check_figure_path(path: str | Path, overwrite: bool = False) -> None:
    """Raise unless a figure can be written to a path: the command line asks before it draws.

    Args:
        path: The file.
        overwrite: Whether it may be there already.

    Raises:
        PlotError: If its suffix is neither .png nor .svg, its folder is missing, or it is a folder or another thing
            that is no file.
        OutputExistsError: If it exists and overwrite is False.
        MissingPackageError: If matplotlib is not installed.
    """
    check_matplotlib()
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(path, "is neither a .png nor a .svg file", "give the output one of these suffixes")
    if not path.parent.is_dir():
        raise PlotError(path, f"there is no folder {path.parent}", "make it first")
    if os.path.lexists(path) and not path.is_file():
        raise PlotError(path, "is a folder" if path.is_dir() else "is there and no file", "name another output")
    if path.is_file() and not overwrite:
        raise OutputExistsError(path, "overwrite=True (--overwrite)")


def save_figure(figure: Figure, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a figure as PNG, or as SVG whose text stays text; the same figure gives the same bytes.

    Args:
        figure: What a function of this package returned.
        path: File to create, ending in .png or .svg; it appears only when it is complete.
        overwrite: Replace the file if there is one.

    Raises:
        PlotError: If the suffix is another, the folder is missing, or the file cannot be written.
        OutputExistsError: If the file exists and overwrite is False.
        MissingPackageError: If matplotlib is not installed.
    """
    path = Path(path)
    check_figure_path(path, overwrite)
    content = io.BytesIO()
    kind = path.suffix.lower()[1:]
    with figure_style():
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content.getvalue())
        os.replace(unfinished, path)
    except OSError as error:
        raise PlotError(path, f"cannot be written ({error.strerror})", "name another output") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
