"""What comes from files that others wrote, checked before anything acts on it: JSON, fields, pickles, versions."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union

from packaging.version import Version
from safetensors import SafetensorError, safe_open

from peft_sel.errors import CheckpointError, ConfigError, NewerVersionError, list_names, show_value

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
    for a dataclass that is still to be made. Numbers and collections of other libraries become Python's own, which can
    be saved as JSON. Fields whose annotation is of another kind than this package's are left alone.

    Args:
        settings: An instance of a dataclass.

    Raises:
        ConfigError: If a field does not.
    """
    hints = _get_hints(settings.__class__)
    for field in dataclasses.fields(settings):
        value, hint = getattr(settings, field.name), hints[field.name]
        try:
            normalized = _normalize(value, hint)
        except ValueError as error:
            expected = "True or False" if hint is bool else f"{field.type}, in 64 bits and {MAX_TEXT} characters"
            raise ConfigError(field.name, value, f"must be {expected}") from error
        if normalized is not value:
            setattr(settings, field.name, normalized)


@cache
def _get_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _normalize(value: Any, hint: Any) -> Any:
    """Return a value of an annotated type as Python's own; raise ValueError if it is none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            with suppress(ValueError):
                return _normalize(value, choice)
        raise ValueError
    if origin is list:
        if not isinstance(value, Collection) or isinstance(value, str | bytes | dict):
            raise ValueError
        members = [_normalize(member, arguments[0]) for member in value]
        same = all(new is old for new, old in zip(members, value, strict=True))
        return value if same and isinstance(value, list | tuple | set) else members
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError
        pairs = {_normalize(key, arguments[0]): _normalize(member, arguments[1]) for key, member in value.items()}
        return value if all(value[key] is member for key, member in pairs.items()) else pairs
    if hint is float or hint is int:
        return _normalize_number(value, hint)
    if isinstance(value, dict) and dataclasses.is_dataclass(hint):
        return value
    kind = type(arguments[0]) if origin is Literal else hint  # which one is checked where it can be told better
    if isinstance(kind, type) and kind is not Any and not typing.get_args(kind):
        is_bool_for_another = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or is_bool_for_another or (isinstance(value, str) and len(value) > MAX_TEXT):
            raise ValueError
    return value


def _normalize_number(value: Any, kind: Any) -> Any:
    accepted: Any = Integral if kind is int else Real
    if isinstance(value, bool) or not isinstance(value, accepted) or not _is_representable(value):
        raise ValueError
    number = value if type(value) in (int, float) else kind(value)
    if kind is int and not -(2**63) <= number < 2**63:
        raise ValueError
    return number


def _is_representable(value: Any) -> bool:
    try:
        math.isfinite(value)
    except OverflowError:
        return False
    return True


def check_version(made_by: str | None) -> str:
    """Check the version of peft_sel that made a configuration.

    Args:
        made_by: What the configuration says; None for a new one.

    Returns:
        The version; the installed one for a new configuration.

    Raises:
        ConfigError: If it is no version number.
        NewerVersionError: If it is newer than the installed one in more than the last place.
    """
    installed = version("peft_sel")
    if made_by is None:
        return installed
    try:
        newer = Version(made_by).release[:2] > Version(installed).release[:2]
    except (ValueError, TypeError) as error:  # InvalidVersion, or a number of too many digits
        raise ConfigError("peft_sel_version", made_by, "is no version number; leave it to peft_sel") from error
    if newer:
        raise NewerVersionError(made_by, installed)
    return made_by
