"""The model card of an adapter: the README.md of its folder, of which one section is ours and all else the user's."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from peft.utils import CONFIG_NAME
from torch import Tensor

from peft_sel.adapter_files import replaced_files
from peft_sel.errors import CheckpointError, list_names
from peft_sel.numerics import SCALE_NAMES
from peft_sel.untrusted import read_json

CARD_FILE = "README.md"
TAG = "symexplin"
BASE_TAG = "base_model:adapter:"  # PEFT writes it
HEADING = "## How to load this adapter"
SECTION = re.compile(
    r"<!-- peft_sel writes this section .*? \((?P<digest>[0-9a-f]{16})\) -->\r?\n"
    r"(?P<text>.*?)<!-- peft_sel end -->",
    re.DOTALL,
)
SECTION_FORM = """\
<!-- peft_sel writes this section anew at each save, unless you change it; all else is yours ({digest}) -->
{text}
<!-- peft_sel end -->"""
AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
UNKNOWN_BASE = "BASE_MODEL"
SELECTING = {"layers_to_transform": "layers", "layers_pattern": "of", "exclude_modules": "without"}
UNTRAINED = ("beta", "transposed")  # parts of a saved weight


@dataclass(frozen=True)
class AdapterContents:
    """What a card says of the tensors of an adapter.

    Attributes:
        num_trained: How many numbers of it were trained.
        betas: Smallest and largest curvature; None if there is none.
        num_betas: How many curvatures there are: one for each converted weight or expert.
    """

    num_trained: int
    betas: tuple[float, float] | None
    num_betas: int


def summarize_tensors(tensors: Mapping[str, Tensor], prefix: str, fixed: Iterable[str]) -> AdapterContents:
    """Sum up the tensors of an adapter for its card.

    Args:
        tensors: The tensors by key.
        prefix: What stands before the name of a part in the keys of converted weights.
        fixed: Scales that are not trained.

    Returns:
        The summary.
    """
    untrained = {*UNTRAINED, *fixed}
    parts = {key: key.rpartition(prefix)[2].partition(".")[0] if prefix in key else "" for key in tensors}
    betas = [value for key, part in parts.items() if part == "beta" for value in tensors[key].reshape(-1).tolist()]
    trained = sum(tensor.numel() for key, tensor in tensors.items() if parts[key] not in untrained)
    return AdapterContents(trained, (min(betas), max(betas)) if betas else None, len(betas))


def write_card(
    folder: Path, settings: Mapping[str, Any], contents: AdapterContents | None, folders: Mapping[str, Path]
) -> None:
    """Write our section and tags into the card of an adapter, and leave the rest, and a section that a user changed.

    Args:
        folder: Folder with the card, if there is one.
        settings: The adapter's configuration.
        contents: What to say of its tensors, if known.
        folders: The folder of each base that was found to be one, see find_base.

    Raises:
        CheckpointError: If there is something that is no card.
    """
    path = folder / CARD_FILE
    card = read_card(path) if path.exists() else ModelCard.from_template(ModelCardData())
    base = settings.get("base_model_name_or_path")
    data: Any = card.data
    data.library_name = "peft"
    data.base_model = data.base_model or (base if _is_hub_id(base, folders) else None)
    data.tags = sorted(_read_tags(data) | {TAG})
    text = _make_section(settings, contents, folders)
    section = SECTION_FORM.format(digest=_digest(text), text=text)
    found = SECTION.search(card.text)
    if found is None and HEADING not in card.text:
        card.text = f"\n{section}\n\n{card.text.lstrip()}"
    elif found is not None and _digest(found["text"]) == found["digest"]:
        card.text = card.text[: found.start()] + section + card.text[found.end() :]
    card.save(path)


def update_card(
    folder: Path, update: Callable[[Path], None], contents: AdapterContents | None, folders: Mapping[str, Path]
) -> None:
    """Let PEFT update a card, in one step and without losing a user's tags and base_model, which it writes over.

    What PEFT or we wrote of another base goes. Where the folder holds a SEL adapter already, and the card lost our
    section (Trainer writes a card of its own over it), that comes back.

    Args:
        folder: Folder of the card, made if it is not there.
        update: PEFT's function; takes the folder to do it in.
        contents: What to say of the tensors of the adapter, if known.
        folders: The folder of each base that was found to be one, see find_base.

    Raises:
        CheckpointError: If there is something that is no card.
    """
    with replaced_files(folder) as unfinished:
        before = copy_card(folder, unfinished)
        update(unfinished)
        card = read_card(unfinished / CARD_FILE)
        data: Any = card.data
        tags, written = _read_tags(data), {data.base_model}
        local = {tag for tag in tags if tag.startswith(BASE_TAG) and not _is_hub_id(tag[len(BASE_TAG) :], folders)}
        if not _is_hub_id(data.base_model, folders):
            data.base_model = None
        if before is not None:
            old = _read_tags(before.data)
            kept = {tag for tag in old if not tag.startswith(BASE_TAG)}
            written |= {_read_base(before.text), *(tag[len(BASE_TAG) :] for tag in old - kept)}
            tags |= kept
            theirs = before.data.to_dict().get("base_model")
            if theirs and theirs not in [*written]:
                data.base_model = theirs
        data.tags = sorted(tags - local | {TAG})
        card.save(unfinished / CARD_FILE)
        if SECTION.search(card.text) is None and (folder / CONFIG_NAME).is_file():
            with suppress(CheckpointError, LookupError):  # of another program, and about to be replaced
                settings = read_json(folder / CONFIG_NAME)
                if settings["peft_type"] == TAG.upper():
                    write_card(unfinished, settings, contents, folders)


def _read_tags(data: Any) -> set[str]:
    return {*map(str, data.tags or [])}


def find_base(name: str | None) -> dict[str, Path]:
    """Return the folder that a base was loaded from, by the name that it bears: of a relative path only now known.

    Args:
        name: Name or path of the base, as the model has it.

    Returns:
        One entry; none if there is no such folder, as for an id on the hub.
    """
    return {name: Path(name).resolve()} if name and Path(name).is_dir() else {}


def _read_base(text: str) -> str | None:
    """Return the base that our section of a card names."""
    section = SECTION.search(text)
    found = section and re.search(r"^- Base: `([^`\n]+)`$", section["text"].replace("\r", ""), re.MULTILINE)
    return found[1] if found else None


def copy_card(folder: Path, target: Path) -> ModelCard | None:
    """Copy a card into another folder, with an empty front matter if it has none.

    Args:
        folder: Folder of the card.
        target: The other folder.

    Returns:
        The card; None if there is none.

    Raises:
        CheckpointError: If there is something that is no card.
    """
    path = folder / CARD_FILE
    if not path.exists():
        return None
    card = read_card(path)
    shutil.copyfile(path, target / CARD_FILE)
    if not card.data.to_dict():
        card.save(target / CARD_FILE)
    return card


def read_card(path: Path) -> ModelCard:
    """Read a card; without front matter, of which the hub's library would warn, it gets an empty one.

    Args:
        path: The file.

    Returns:
        The card.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        if not path.is_file():
            raise ValueError("not a file")
        text = path.read_bytes().decode("utf-8-sig")
        return ModelCard(text if REGEX_YAML_BLOCK.search(text) else f"---\n{{}}\n---\n{text}")
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise CheckpointError(path, f"is no model card ({error})", "mend it, or move it away") from error


def _is_hub_id(name: Any, folders: Mapping[str, Path]) -> bool:
    """Whether a base's name is an id on the hub, as far as this machine knows."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str) and name not in folders and not Path(name).exists()


def _digest(text: str) -> str:
    return hashlib.sha256("\n".join(text.splitlines()).encode()).hexdigest()[:16]


def _quote(value: object) -> str:
    """Write a value as code in Markdown."""
    return f"`{value}`"


def _make_section(settings: Mapping[str, Any], contents: AdapterContents | None, folders: Mapping[str, Path]) -> str:
    base = settings.get("base_model_name_or_path") or UNKNOWN_BASE
    base = str(folders.get(base, base))
    if not base.isprintable() or "`" in base:  # it would end the code that it stands in
        base = UNKNOWN_BASE
    place, merged, options = json.dumps(base, ensure_ascii=False), [shlex.quote(base), ".", "../merged"], ""
    if (revision := settings.get("revision")) and str(revision).isprintable() and "`" not in revision:
        options = f", revision={json.dumps(revision)}"
        merged.append(f"--revision={shlex.quote(revision)}")
    imported, load = _make_loading(settings, f"{place}{options}")
    facts = "\n".join(f"- {name}: {text}" for name, text in _list_facts(settings, contents, base).items())
    return f"""{HEADING}

This is a SymExpLin (SEL) adapter. PEFT knows it after `import peft_sel` (without it: `KeyError: 'SYMEXPLIN'`):

```python
import peft_sel  # registers SEL with PEFT; needed before any from_pretrained
from peft import PeftModel
{imported}
adapter = "."  # this folder, or its id on the hub
{load}
model = PeftModel.from_pretrained(base, adapter)
```

To merge it into an ordinary model, which needs neither peft_sel nor more time to run: `model.merge_and_unload()`, or
file to file, one weight in memory at a time:

```python
from peft_sel import merge_checkpoint
from peft_sel.jobs import resolve_checkpoint

base = resolve_checkpoint({place}{options})  # its folder, fetched if it is an id on the hub
merge_checkpoint(base, ".", "../merged")
```

```shell
peft-sel merge {" ".join(merged)}
```

### What it is

{facts}"""


def _make_loading(settings: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the lines of Python that import the base's class, and that load the base."""
    mapping = settings.get("auto_mapping") or {}
    name, library = str(mapping.get("base_model_class")), str(mapping.get("parent_library"))
    kind = AUTO_CLASSES.get(str(settings.get("task_type")))
    if kind is None and not mapping:
        kind = AUTO_CLASSES["CAUSAL_LM"]
    elif kind is None and library.startswith("transformers.") and name.isidentifier():
        kind = name
    if kind is None:
        return "", f"base = ...  # the model that it was made from: {name} of {library}".replace("\n", " ")
    return f"from transformers import {kind}\n", f"base = {kind}.from_pretrained({where})"


def _list_facts(settings: Mapping[str, Any], contents: AdapterContents | None, base: str) -> dict[str, str]:
    """Return what a reader wants to know of an adapter: name -> Markdown."""
    chosen = settings["beta"]
    beta = {"auto": f"{settings['beta_rms']:g} / rms of each weight", "width": "by the model's width"}.get(
        chosen, chosen
    )
    if contents is not None and contents.betas is not None:
        low, high = (f"{value:.4g}" for value in contents.betas)
        spread = low if low == high else f"{low} to {high}"
        beta = f"{spread} over {contents.num_betas} weights ({beta})"
    scales = {name: settings[name] for name in SCALE_NAMES if isinstance(settings[name], dict)}
    trained = ["raw weights"] if settings["train_raw"] else []
    trained += [f"{name} ({scale['pattern']})" for name, scale in scales.items() if scale["trainable"]]
    trained += [f"a residual of rank {settings['r']}"] if settings["r"] else []
    trained += {"none": [], "sel_only": ["converted biases"], "all": ["biases"]}[settings["bias"]]
    trained += [f"{name}" for name in ("modules_to_save", "trainable_token_indices") if settings[name]]
    count = "" if contents is None else f"; {contents.num_trained:,} parameters"
    targets = [name for field in ("target_modules", "target_parameters") for name in _as_list(settings[field])]
    variants = [name for name in ("log_curvature", "normalize_by_inner_mult") if settings[name]]
    variants += [f"normalizer {settings['normalizer']}"] * (settings["normalizer"] != "folded")
    pattern = [f"{_quote(name)} {value:g}" for name, value in settings["beta_pattern"].items()]
    converted = [list_names(map(_quote, targets), limit=20) if targets else "the model type's default"]
    for field, word in SELECTING.items():
        if settings[field] not in (None, []):
            converted.append(f"{word} {list_names(map(_quote, _as_list(settings[field])), limit=20)}")
    facts = {
        "Base": _quote(base) if base != UNKNOWN_BASE else "not recorded",
        "Transform": ", ".join([f"mode {settings['mode']}, family {settings['family']}", *variants]),
        "Curvature beta": f"{beta}, but for {list_names(pattern, limit=20)}" if pattern else str(beta),
        "Trained": f"{', '.join(trained)}{count}",
        "Converted": "; ".join(converted),
    }
    if (settings["init_target"], settings["init"]) != ("pretrained", "exact"):
        start = {"pretrained": "the base's weights"}.get(settings["init_target"], f"drawn, {settings['init_target']}")
        facts["Started from"] = f"{start}; init {settings['init']}"
    if record := settings["base_fingerprint"]:
        digits = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        facts["Fingerprint of the base"] = (
            f"`{digits}`, of the hashes of {len(record)} weights in {CONFIG_NAME}, which loading and merging compare"
        )
    facts["Made with"] = f"peft_sel {settings['peft_sel_version']}, PEFT {settings['peft_version']}"
    return facts


def _as_list(names: Any) -> list[str]:
    return [str(names)] if isinstance(names, str | int) else sorted(names or [])
