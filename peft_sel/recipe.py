"""Recipes: YAML files that describe a training job, checked key by key before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import inspect
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import type_validator
from peft import PeftConfig
from transformers import CONFIG_MAPPING, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from peft_sel.config import ScaleConfig, SELConfig
from peft_sel.cpp import cache_folder
from peft_sel.data import DataSection
from peft_sel.errors import ConfigError, RecipeError, list_names
from peft_sel.numerics import SCALE_NAMES

DTYPES = ("auto", "bfloat16", "float16", "float32")
BASE_FOLDER = "base"  # in output_dir, for the model of random weights that a job starts from
CACHED, READ_FROM_CACHE = "~/.cache/peft_sel/", {"model.path", "model.tokenizer", "data.files"}
CALLERS_BUSINESS = {"output_dir"}  # TrainingArguments that a recipe sets elsewhere
Section = TypeVar("Section")


@dataclass
class ModelSection:
    """Section `model` of a recipe: a pretrained model by its path, or one of random weights by its configuration.

    Attributes:
        path: Folder of a checkpoint, or an id on the hub; with config output_dir/base, where the job saves the model.
        revision: Branch, tag or commit on the hub.
        dtype: "auto" (as stored, float32 for random weights), "bfloat16", "float16" or "float32"; raw weights are
            float32 in any case.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...; None for transformers' choice.
        config: Instead of path: a model type of transformers, such as "qwen3". All further keys of the section are
            then fields of its configuration; vocab_size and the special tokens come from the tokenizer unless given.
        tokenizer: With config: folder or id of a tokenizer, or "bytes" for one token per byte.
        config_options: Those further keys.

    Raises:
        ConfigError: If the dtype is unknown.
    """

    path: str
    revision: str | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    config: str | None = None
    tokenizer: str | None = None
    config_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"unknown; choose one of {', '.join(DTYPES)}")


@dataclass
class Recipe:
    """A training job.

    Attributes:
        model: The model to start from.
        data: The text.
        sel: How the model is converted.
        training: Arguments of transformers.Trainer.
        output_dir: Folder to create, for checkpoints, adapter and merged model.
        merge: Whether to merge the trained adapter into output_dir/merged.
        source: Where the recipe comes from, for messages.
    """

    model: ModelSection
    data: DataSection
    sel: SELConfig
    training: TrainingArguments
    output_dir: Path
    merge: bool
    source: str


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe.

    Args:
        path: The file; it holds only what differs from the defaults, or from the recipe that its key `extends` names
            (a path as seen from the file).
        overrides: "section.key=value" each, the value in YAML; they win over the file.

    Returns:
        The recipe; its output_dir is runs/<name of the file> by default.

    Raises:
        RecipeError: If the file cannot be read, or a key, type or value is wrong; names the file and the key.
    """
    tree, source = _read_tree(Path(path), ())
    for override in overrides or []:
        key, equals, value = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise RecipeError("--set", override, "write section.key=value, for example training.max_steps=100")
        try:
            _set_in(tree, names, _parse(value))
        except (yaml.YAMLError, TypeError) as error:
            raise RecipeError("--set", override, " ".join(str(error).split())) from error
    return build_recipe(tree, source=source, default_output_dir=Path("runs") / Path(path).stem)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML forbids it, and PyYAML takes the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


def _parse(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_tree(path: Path, followers: tuple[Path, ...]) -> tuple[dict[str, Any], str]:
    """Return the content of a recipe laid over the one that it extends, and how messages call the two."""
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(path, "not readable", str(error.strerror)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(path, "not valid YAML", " ".join(str(error).split())) from error
    tree = _require_mapping(content, "the file", str(path))
    base = tree.pop("extends", None)
    if base is None:
        return tree, str(path)
    if not isinstance(base, str):
        raise RecipeError(path, "extends", f"must be the path of a recipe, not {base!r}")
    if path.resolve() in followers:
        raise RecipeError(path, "extends", "leads back to the recipe that it starts from")
    below, _ = _read_tree(path.parent / base, (*followers, path.resolve()))
    return _lay_over(below, tree), f"{path} (extends {base})"


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return a tree whose values are those of above where it has any; sections merge key by key."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _lay_over(below[name], value) if both else value
    return merged


def _set_in(tree: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise TypeError(f"{name} is a value, not a section")
    tree[names[-1]] = value


def build_recipe(tree: dict[str, Any], *, source: str, default_output_dir: str | Path) -> Recipe:
    """Check a recipe's keys, types and values.

    Args:
        tree: Sections and keys, as in a YAML recipe.
        source: Where it comes from, for messages.
        default_output_dir: Used if the recipe names none.

    Returns:
        The recipe.

    Raises:
        RecipeError: If a key, type or value is wrong.
    """
    hints = {"model": Any, "data": Any, "sel": Any, "training": Any, "output_dir": str, "merge": bool}
    top = _check_values({name: value for name, value in tree.items() if value is not None}, hints, "", source)
    for required in ("model", "data"):
        if required not in top:
            raise RecipeError(source, required, "this section is missing")
    output_dir = Path(top.get("output_dir", default_output_dir)).expanduser()
    sel = dict(_require_mapping(top.get("sel"), "sel", source))
    for name in SCALE_NAMES:
        if isinstance(sel.get(name), dict):
            sel[name] = _build_section(ScaleConfig, sel[name], f"sel.{name}", source)
    own_business = {field.name for field in dataclasses.fields(PeftConfig)}
    config = _build_section(SELConfig, sel, "sel", source, own_business, {"task_type": "CAUSAL_LM"})
    recipe = Recipe(
        model=_build_model(_require_mapping(top["model"], "model", source), output_dir, source),
        data=_build_section(DataSection, top["data"], "data", source),
        sel=config,
        training=_build_section(
            TrainingArguments, top.get("training"), "training", source, CALLERS_BUSINESS, _job_defaults(output_dir)
        ),
        output_dir=output_dir,
        merge=top.get("merge", False),
        source=source,
    )
    _check_together(recipe.training, recipe.data, source)
    return recipe


def _check_together(training: TrainingArguments, data: DataSection, source: str) -> None:
    """Raise if a training argument does not go with the text."""
    if training.eval_strategy != "no" and not data.holds_out:
        field = "validation_blocks" if data.streaming else "validation_share"
        raise RecipeError(source, "training.eval_strategy", f"there is nothing to evaluate on: data.{field} is 0")
    if data.streaming and training.max_steps <= 0:
        problem = "with data.streaming the length of the text is not known; set the number of steps here"
        raise RecipeError(source, "training.max_steps", problem)


def _build_model(values: dict[str, Any], output_dir: Path, source: str) -> ModelSection:
    """Make the section `model`, and check the fields of a configuration by making one."""
    fields = {field.name for field in dataclasses.fields(ModelSection)} - {"config_options"}
    if values.get("config") is None:
        if values.get("tokenizer") is not None:
            raise RecipeError(source, "model.tokenizer", "goes with model.config; a checkpoint brings its own")
        return _build_section(ModelSection, values, "model", source, {"config_options"})
    for name in ("path", "revision"):
        if values.get(name) is not None:
            raise RecipeError(source, f"model.{name}", "names trained weights and model.config random ones; give one")
    if values.get("tokenizer") is None:
        raise RecipeError(source, "model.tokenizer", "this key is missing; name a folder or an id, or write bytes")
    own = {name: value for name, value in values.items() if name in fields}
    section = _build_section(ModelSection, {**own, "path": str(output_dir / BASE_FOLDER)}, "model", source)
    if section.config not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = _suggest(str(section.config), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise RecipeError(source, "model.config", f"unknown value {section.config!r}{near}")
    config_class = CONFIG_MAPPING[str(section.config)]
    parameters = {**inspect.signature(config_class.__init__).parameters}
    known = [name for name in (*parameters, *config_class.attribute_map) if name not in ("self", "kwargs")]
    for name, value in values.items():
        if name in fields:
            continue
        if name not in known:
            raise RecipeError(source, f"model.{name}", f"unknown key{_suggest(str(name), known)}")
        hint = parameters[name].annotation if name in parameters else Any
        section.config_options[name] = _read_as_meant(value, get_args(hint) or (hint,), [])
    try:
        config_class(**section.config_options)
    except Exception as error:  # a configuration's own checks raise many things
        raise RecipeError(source, "model", " ".join(str(error).split())) from error
    return section


def _job_defaults(output_dir: Path) -> dict[str, Any]:
    """Return training arguments that a job gives unless the recipe does."""
    return {"output_dir": str(output_dir), "label_names": ["labels"]}  # PEFT's forward hides them


def _build_section(
    cls: type[Section],
    values: Any,
    section: str,
    source: str,
    hidden: set[str] | frozenset[str] = frozenset(),
    defaults: dict[str, Any] | None = None,
) -> Section:
    """Make a dataclass of a section's values; hidden are the fields that a recipe may not set."""
    known = {field.name for field in dataclasses.fields(cls) if field.init} - hidden  # type: ignore[arg-type]
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name in known}
    checked = _check_values(_require_mapping(values, section, source), hints, f"{section}.", source)
    required = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in checked:
            raise RecipeError(source, f"{section}.{name}", "this key is missing")
    try:
        return cls(**{**(defaults or {}), **checked})
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(source, section, " ".join(str(error).split())) from error


def _require_mapping(values: Any, section: str, source: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecipeError(source, section, f"must hold `key: value` lines, not {values!r}")
    return values


def _check_values(values: dict[str, Any], hints: dict[str, Any], prefix: str, source: str) -> dict[str, Any]:
    """Return the values in their fields' types; raise on an unknown key, a wrong type or an unknown name of an enum."""
    checked = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise RecipeError(source, key, f"unknown key{_suggest(str(name), list(hints))}")
        hint = hints[name] if name != "resume_from_checkpoint" else hints[name] | bool
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
        names = [str(member.value) for kind in enums for member in kind]
        value = _read_as_meant(value, kinds, names)
        checked[name] = value = _follow_cache(value) if key in READ_FROM_CACHE else value
        try:
            type_validator(key, value, hint)
        except TypeError as error:
            wanted = " or ".join("null" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise RecipeError(source, key, f"{value!r} is not of type {wanted}") from error
        if names and isinstance(value, str) and value not in names:
            raise RecipeError(source, key, f"unknown value {value!r}{_suggest(value, names)}")
    return checked


def _read_as_meant(value: Any, kinds: tuple[Any, ...], names: list[str]) -> Any:
    """Undo YAML 1.1's surprises: 1e-4 is text to it and no is False; and take an int where a float is wanted."""
    if value is False and "no" in names:
        return "no"
    wanted = float in kinds and not isinstance(value, bool)
    if wanted and ((isinstance(value, int) and int not in kinds) or (isinstance(value, str) and str not in kinds)):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _follow_cache(value: Any) -> Any:
    """Look for ~/.cache/peft_sel, where the demo leaves model and text, in the folder that XDG_CACHE_HOME names."""
    if isinstance(value, list):
        return [_follow_cache(part) for part in value]
    if os.environ.get("XDG_CACHE_HOME") and isinstance(value, str) and value.startswith(CACHED):
        return str(cache_folder() / value.removeprefix(CACHED))
    return value


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {list_names(sorted(known), 12)}"
