"""What comes from files that others wrote, checked before anything acts on it: JSON objects, typed fields, pickles."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Collection, Iterable
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union

from safetensors import SafetensorError, safe_open

from peft_sel.errors import CheckpointError, ConfigError, list_names, show_value

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_JSON_BYTES = 100_000_000  # the index of a checkpoint with 100,000 tensors has 10
MAX_JSON_DEPTH = 50
MAX_TEXT = 10_000


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object, in which every key comes once and nothing nests deeper than MAX_JSON_DEPTH.

    Args:
        text: The JSON.

    Returns:
        The object; NaN and Infinity are let through, since transformers writes them.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        content = json.loads(text, object_pairs_hook=_collect_pairs)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__}, not a JSON object")
    level: list[Any] = [content]
    for _ in range(MAX_JSON_DEPTH):
        members = [member for item in level for member in (item.values() if isinstance(item, dict) else item)]
        level = [member for member in members if isinstance(member, dict | list)]
    if level:
        raise ValueError("too deeply nested")
    return content


def _collect_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of pairs, none of which would hide another."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {show_value(twice)} comes twice")
    return result


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        CheckpointError: If the file is missing or not a regular one (a pipe would wait for ever), is too large, or is
            not an object in JSON whose keys come once.
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise ValueError("not a regular file, or a link to nothing")
        if os.path.getsize(path) > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"is not readable JSON ({error})", "fetch or save it again") from error


def check_adapter_file(file: Path, pickled: Path) -> None:
    """Raise if an adapter's file of tensors is broken, or if there is a pickled one alone; neither may be here yet.

    Args:
        file: The safetensors file.
        pickled: The file that PEFT would unpickle where the other one is missing.

    Raises:
        CheckpointError: If so.
    """
    if not os.path.lexists(file) and os.path.lexists(pickled):
        raise pickled_error(file.parent, [pickled.name])
    if os.path.isfile(file):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError, MemoryError) as error:
            raise CheckpointError(file, f"is truncated or corrupt ({error})", "save the adapter again") from error
    elif os.path.lexists(file):
        raise CheckpointError(file, "is not a regular file, or a link to nothing", "save the adapter again")


def find_pickles(names: Iterable[str]) -> list[str]:
    """Return the names of pickled weights among names of files."""
    return sorted(name for name in names if name.lower().endswith(PICKLE_SUFFIXES))


def pickled_error(folder: Path, names: Iterable[str]) -> CheckpointError:
    """Return the error for a folder that holds only pickled weights."""
    return CheckpointError(
        folder,
        f"holds only pickled weights ({list_names(names)}), which can run code when loaded and are never opened",
        "if you trust them, load them once with the library that wrote them and save_pretrained() as safetensors",
    )


def check_fields(settings: Any) -> None:
    """Raise unless each field of a dataclass holds a value of the type that it is annotated with.

    Integers must fit into 64 bits, texts into MAX_TEXT characters; any collection stands for a list, and a dictionary
    for a dataclass that is still to be made.

    Args:
        settings: An instance of a dataclass.

    Raises:
        ConfigError: If a field does not.
    """
    hints = _get_hints(settings.__class__)
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        if not _fits(value, hint):
            expected = "True or False" if hint is bool else f"{field.type}, in 64 bits and {MAX_TEXT} characters"
            raise ConfigError(field.name, value, f"must be {expected}")


@cache
def _get_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is Literal:
        return isinstance(value, type(arguments[0]))  # which one is checked where it can be told better
    if origin is list:
        is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | dict)
        return is_list and all(_fits(member, arguments[0]) for member in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(member, kind) for pair in value.items() for member, kind in zip(pair, arguments, strict=True)
        )
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, Real) and _is_representable(value)
    if hint is int:
        return isinstance(value, Integral) and -(2**63) <= int(value) < 2**63
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        return True
    return isinstance(value, hint) and not (isinstance(value, str) and len(value) > MAX_TEXT)


def _is_representable(value: Any) -> bool:
    try:
        math.isfinite(value)
    except OverflowError:
        return False
    return True
