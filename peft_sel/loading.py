"""Loads of adapters: what is added for one waits for its tensors, and is taken out again if the load fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from peft_sel.errors import AdapterStateError


@dataclass
class Load:
    """A load in progress.

    Attributes:
        awaited: Names of the adapters that were added for it.
        loaded: Names of those that have got their tensors.
        undo: Undoes what happened, the last first.
        finish: Does what has to wait until nothing can fail any more.
    """

    awaited: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    undo: ExitStack = field(default_factory=ExitStack)
    finish: list[Callable[[], None]] = field(default_factory=list)


_load: ContextVar[Load | None] = ContextVar("_load", default=None)


def current_load() -> Load | None:
    """Return the load in progress, if there is one."""
    return _load.get()


@contextmanager
def await_tensors() -> Iterator[None]:
    """Let adapters that are added meanwhile wait for the tensors of a load, which must follow: nothing is inverted.

    If it fails, all is as it was before. Within another such block this one changes nothing.

    Raises:
        AdapterStateError: If an adapter was added that no tensors came for.
    """
    if _load.get() is not None:
        yield
        return
    load = Load()
    token = _load.set(load)
    try:
        yield
        for name in load.awaited:
            if name not in load.loaded:
                way_out = "add it outside of from_pretrained and load_adapter"
                raise AdapterStateError(name, "was added while another adapter is loaded, and gets no tensors", way_out)
    except BaseException:
        load.undo.close()
        raise
    finally:
        _load.reset(token)
    for finish in load.finish:
        finish()
