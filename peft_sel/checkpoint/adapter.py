"""A saved adapter as a file: its tensors sorted by what they are for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from peft_sel.checkpoint.shards import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CheckpointReader
from peft_sel.config import RAW_DTYPES, SELConfig
from peft_sel.conversion import BIAS, HOLDER_NAME
from peft_sel.errors import CheckpointError, list_names, show_value
from peft_sel.shapes import expected_shapes, vector_config
from peft_sel.untrusted import read_json

KEY_PREFIX = "base_model.model."
SEL_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.symexplin_(?P<part>[a-z_]+(\.[a-z_]+)?)")


def weight_key(module: str) -> str:
    """Return the name in the base of the tensor that a key of Adapter.modules converts."""
    key = module.replace(f".{HOLDER_NAME}.", ".") if is_parameter(module) else f"{module}.weight"
    return key.replace(".base_layer.", ".")


def is_parameter(module: str) -> bool:
    """Whether a key of Adapter.modules is a parameter that target_parameters named, or a bias."""
    return f".{HOLDER_NAME}." in module


class Adapter:
    """A saved adapter, its tensors sorted by what they are for and read one at a time.

    Args:
        folder: The folder that save_pretrained wrote.

    Attributes:
        config: The adapter's configuration.
        reader: Its file.
        modules: path of a module, of a parameter that target_parameters named, or of a bias -> {part: key}; a part is
            "raw", "beta", "exp_scale.row", "residual_a", ...
        replacements: parameter path -> key, for modules_to_save and trained biases.
        base_copies: parameter path -> key, for base tensors that PEFT saved along (targeted heads).

    Raises:
        CheckpointError: If the folder holds no SEL adapter, or one that is pickled, corrupt or incomplete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = _load_config(self.folder)
        self.reader = CheckpointReader(self.folder, ADAPTER_FILE)
        self.modules: dict[str, dict[str, str]] = {}
        self.replacements: dict[str, str] = {}
        self.base_copies: dict[str, str] = {}
        try:
            for key in self.reader.entries:
                self._sort_key(key)
            if not self.modules:
                raise CheckpointError(self.folder / ADAPTER_FILE, "holds no tensor of a SEL adapter", "save it again")
        except BaseException:
            self.reader.close()
            raise

    def _sort_key(self, key: str) -> None:
        """Enter a saved tensor into modules, replacements or base_copies."""
        match = SEL_KEY.fullmatch(key)
        if match:
            self.modules.setdefault(match["module"], {})[match["part"]] = key
            return
        path = key.removeprefix(KEY_PREFIX)
        if path == key or "symexplin_" in path:
            raise CheckpointError(
                self.folder / ADAPTER_FILE,
                f"holds a tensor {key} that no SEL adapter has",
                "save the adapter with PeftModel.save_pretrained, and load it with the peft_sel that wrote it",
            )
        copies = (".base_layer.weight", *([".base_layer.bias"] if self.config.bias != "all" else []))
        if ".original_module." in path or path.endswith(copies):
            group, name = self.base_copies, re.sub(r"\.(original_module|base_layer)\.", ".", path)
        else:
            group, name = self.replacements, re.sub(r"\.(modules_to_save|base_layer)\.", ".", path)
        # With bias="all" PEFT saves the bias of a saved module twice; the trained one is the module's own.
        pair = sorted((key, group.get(name, key)), key=lambda member: ".modules_to_save." in member)
        if name in group and ".modules_to_save." not in pair[1]:
            raise CheckpointError(
                self.folder / ADAPTER_FILE, f"holds {name} twice, as {pair[0]} and as {pair[1]}", "save it again"
            )
        group[name] = pair[1]

    def find_config(self, module: str) -> SELConfig:
        """Return the configuration of a key of modules, which for a converted bias differs from the adapter's."""
        raw = self.modules[module].get("raw")
        may_be_bias = self.config.bias == "sel_only" and module.endswith(f".{HOLDER_NAME}.{BIAS}")
        is_bias = may_be_bias if raw is None else len(self.reader.entries[raw].shape) == 1
        return vector_config(self.config) if is_bias else self.config

    def check_parts(self, module: str, shape: tuple[int, ...]) -> None:
        """Check that the saved tensors of a module are those that the configuration asks for, and beta a curvature.

        Args:
            module: Module path, a key of modules.
            shape: Shape of the base weight.

        Raises:
            CheckpointError: If one is missing, not expected, or of another shape or kind.
            ConfigError: If the configuration asks for a rank that the weight cannot use.
        """
        parts = self.modules[module]
        file = self.folder / ADAPTER_FILE
        stacked = is_parameter(module) and len(shape) > 2
        if "transposed" in parts and len(shape) - stacked != 2:
            raise CheckpointError(file, f"holds {parts['transposed']} for a weight of shape {shape}", "save it again")
        expected = expected_shapes(self.config, shape, "transposed" in parts, stacked) if shape else {}
        for part, key in sorted(parts.items(), key=lambda item: item[0] != "raw"):  # raw shows best what is wrong
            found = self.reader.entries[key].shape
            if expected and part not in expected:
                raise CheckpointError(file, f"holds {key}, which its configuration does not mention", "save it again")
            if found != expected.get(part):
                raise shape_error(self.folder, key, found, weight_key(module), shape)
            dtype, wide = self.reader.entries[key].dtype, self.config.raw_dtype == "float64"
            own = torch.float64 if wide and part != "beta" else torch.float32
            if part != "transposed" and dtype != (RAW_DTYPES[self.config.raw_dtype] if part == "raw" else own):
                raise CheckpointError(file, f"holds {key} as {dtype}, unlike any SEL adapter", "save it again")
        missing = sorted(expected.keys() - parts.keys())
        if missing:
            raise CheckpointError(file, f"lacks {list_names(missing)} of {module}", "save the adapter again")
        self.check_beta(module)

    def check_beta(self, module: str) -> None:
        """Check that the saved curvature of a module is one.

        Args:
            module: Module path, a key of modules.

        Raises:
            CheckpointError: If it is missing, or not positive and finite.
        """
        key = self.modules[module].get("beta")
        beta = None if key is None else self.reader.read(key)
        if beta is None or not bool(((beta > 0) & torch.isfinite(beta)).all()):
            found = "no beta" if beta is None else f"a beta that is not positive and finite ({key})"
            raise CheckpointError(self.folder / ADAPTER_FILE, f"holds {found} for {module}", "save the adapter again")

    def read_parts(self, module: str) -> dict[str, Tensor]:
        """Return the tensors of a module by part."""
        return {part: self.reader.read(key) for part, key in self.modules[module].items()}

    def read_expert(self, module: str, expert: int) -> dict[str, Tensor]:
        """Return the tensors of one expert of a stack by part."""
        return {part: self.reader.read(key, expert) for part, key in self.modules[module].items()}

    def __enter__(self) -> Adapter:
        """Return the adapter itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the adapter's file."""
        self.reader.close()


def _load_config(folder: Path) -> SELConfig:
    """Return the configuration of a SEL adapter folder."""
    path = folder / ADAPTER_CONFIG_FILE
    if not os.path.isfile(path):
        problem = f"holds no {ADAPTER_CONFIG_FILE}" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(folder, problem, "name the folder of a saved SEL adapter")
    kind = read_json(path).get("peft_type")
    if kind != "SYMEXPLIN":
        problem = f"describes an adapter of type {show_value(kind)}, not SYMEXPLIN"
        raise CheckpointError(path, problem, "use its own library")
    try:
        config: SELConfig = SELConfig.from_pretrained(str(folder))
        return config
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a SELError is a ValueError
        raise CheckpointError(path, f"cannot be used: {error}", "save the adapter again") from error


def shape_error(
    folder: Path, key: str, found: tuple[int, ...], base_key: str, shape: tuple[int, ...]
) -> CheckpointError:
    """Return the error for an adapter tensor that does not fit its base tensor."""
    return CheckpointError(
        folder,
        f"tensor {key} has shape {found}, which does not fit {base_key} of shape {shape} in the base",
        "use the base checkpoint that the adapter was made from",
    )
