"""Pytest plugin: put SELConfig into the parametrization of PEFT's test modules, and count what came of it."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import types
import zlib
from collections import Counter
from dataclasses import fields
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from cases import ALSO, CASES, STAND_INS
from hub_models import ADAPTER, MODELS
from skips import SKIPS

from peft_sel import SELConfig

# Imported by the modules, used by tests that do not concern us.
STUBS: dict[str, dict[str, Any]] = {
    "diffusers": {"StableDiffusionPipeline": type("StableDiffusionPipeline", (), {}), "__version__": "0"},
    "parameterized": {"parameterized": types.SimpleNamespace(expand=lambda *_: lambda test: test)},
}
for name, attributes in STUBS.items():
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)

# The one data set that the modules load when they are imported: a picture.
datasets.load_dataset = lambda *_: {
    "test": {"image": [np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)]}
}

torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for one another

used: set[tuple[str, str]] = set()


def module_of(nodeid: str) -> str:
    """Return the module's name in a test's id."""
    return nodeid.partition(".py::")[0].rpartition("/")[2]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = module_of(metafunc.definition.nodeid)
    marks = metafunc.definition.own_markers
    for index, mark in enumerate(marks):
        for name, rows in CASES[module].items() if mark.name == "parametrize" else ():
            by_name = name == metafunc.function.__name__ and "config" in mark.args[0]
            if by_name or mark.args[1] is getattr(metafunc.module, name, None):
                marks[index] = pytest.mark.parametrize(mark.args[0], rows).mark
                used.add((module, name))


def make_stand_in(**options: Any) -> SELConfig:
    """Make the SELConfig for what a test wants of LoRA: the options that both have."""
    options["init_weights"] = options.pop("init_lora_weights", True)
    return SELConfig(**{field.name: options[field.name] for field in fields(SELConfig) if field.name in options})


def has_stand_in(item: pytest.Item) -> bool:
    """Tell whether a test takes LoRA as its example of a method."""
    return re.search(STAND_INS.get(module_of(item.nodeid), "$^"), item.nodeid) is not None


def concerns_sel(item: pytest.Item) -> bool:
    """Tell whether a test has a SELConfig among its arguments or makes one."""
    if has_stand_in(item):
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.name in ALSO or any(value is SELConfig or isinstance(value, SELConfig) for value in values)


@pytest.hookimpl(tryfirst=True)  # before -k selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not concerns_sel(item)])
    items[:] = [item for item in items if concerns_sel(item)]
    unused = [name for module, names in CASES.items() for name in names if (module, name) not in used]
    for skip in SKIPS:
        matches = [item for item in items if re.search(skip.pattern, item.nodeid)]
        for item in matches:
            item.add_marker(pytest.mark.xfail(raises=skip.error, reason=skip.reason, strict=True))
        unused += [] if matches else [skip.pattern]
    if unused:
        raise pytest.UsageError(f"entries of cases.py or skips.py that fit nothing in this PEFT: {unused}")
    # PEFT goes online for the first use of a model, unless it has seen it.
    sys.modules["tests.testing_utils"]._HUB_MODEL_ACCESSES.update(dict.fromkeys([*MODELS, ADAPTER], 1))


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Seed every generator from the test's name, and let SELConfig stand in for LoRA where a test is listed for it."""
    if has_stand_in(item):
        item.module.LoraConfig = make_stand_in
    value = zlib.crc32(item.name.encode())
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of each module and the reason of each skip."""
    stats = terminalreporter.stats
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for column, kinds in {
        "passed": ["passed"],
        "skipped": ["skipped", "xfailed"],
        "failed": ["failed", "error"],
    }.items():
        for report in (report for kind in kinds for report in stats.get(kind, [])):
            counts[module_of(report.nodeid), column] += 1
            if column == "skipped":
                by_peft = isinstance(report.longrepr, tuple)
                reason = report.longrepr[2].removeprefix("Skipped: ") if by_peft else report.wasxfail
                reasons["PEFT" if by_peft else "us", reason] += 1
    terminalreporter.section("PEFT's tests with SELConfig")
    columns = ("passed", "skipped", "failed")
    terminalreporter.line(f"{'':36}" + "".join(f"{column:>8}" for column in columns))
    for module in CASES:
        terminalreporter.line(f"{module:36}" + "".join(f"{counts[module, column]:8}" for column in columns))
    for (who, reason), count in sorted(reasons.items()):
        terminalreporter.line(f"{count} skipped by {who}: {reason}")
