"""Merge, inspect and load damaged checkpoints and adapters: `python tests/fuzz.py --count 10000`.

Every case is made from its number and the seed alone: `python tests/fuzz.py --first 1234 --count 1` repeats one.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import argparse
import contextlib
import io
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from models import make_tiny
from moe import TARGETS as EXPERT_TARGETS
from moe import make_moe
from mutations import Files, mutate
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError

from peft_sel import ScaleConfig, SELConfig, SELError, merge_checkpoint
from peft_sel.checkpoint import inspect_checkpoint, render
from peft_sel.checkpoint.shards import CheckpointReader


def fill_biases(model: Any) -> Any:
    """Give the biases, which are zero at first, values that a conversion can go by."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()))
    return model


SMALL: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
BASES: dict[str, tuple[Callable[[], Any], str]] = {
    "whole": (lambda: make_tiny("qwen2", torch.bfloat16, **SMALL), "1GB"),
    "sharded": (lambda: fill_biases(make_tiny("qwen2", torch.float32, **SMALL, tie_word_embeddings=False)), "4KB"),
    "experts": (lambda: make_moe("qwen3_moe", torch.bfloat16, **SMALL, moe_intermediate_size=8), "1GB"),
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("whole", {"r": 2}),
    "scales": ("whole", {"r": 2, "train_raw": False, "exp_scale": ScaleConfig("lora", rank=2)}),
    "all": ("sharded", {"r": 1, "bias": "sel_only", "modules_to_save": ["norm"], "offset": "row"}),
    "frozen": ("sharded", {"r": 0, "train_raw": False, "target_modules": ["q_proj", "v_proj"]}),
    "head": ("sharded", {"r": 1, "target_modules": ["lm_head", "v_proj"], "bias": "all"}),
    "experts": ("experts", {"r": 1, "target_modules": ["q_proj"], "target_parameters": EXPERT_TARGETS}),
}
CASE_SECONDS = 10
MEMORY_BYTES = 4 << 30  # of address space on top of what the interpreter has when the cases begin


class Hang(BaseException):
    """A case took too long."""


@dataclass
class Outcome:
    """What came of the cases."""

    counts: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class Fuzzer:
    """Valid files, kept in memory, and the cases that are made of them."""

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        self.scratch, self.seed = scratch, seed
        self.bases: dict[str, Files] = {}
        self.adapters: dict[str, Files] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._make_seeds(scratch / "seeds")
        self.models = {name: make() for name, (make, _) in BASES.items()}

    def _make_seeds(self, scratch: Path) -> None:
        for name, (make, shard) in BASES.items():
            folder = scratch / name
            make().save_pretrained(folder, max_shard_size=shard)
            (folder / "LICENSE").write_text("free")
            (folder / "tokenizer_config.json").write_text('{"a": 1}')
            self.bases[name] = read_files(folder)
        for name, (base, options) in ADAPTERS.items():
            folder = scratch / f"{name}.adapter"
            with torch.random.fork_rng():
                torch.manual_seed(0)
                get_peft_model(BASES[base][0](), SELConfig(**options)).save_pretrained(folder)
            self.adapters[name] = read_files(folder)
            del self.adapters[name]["README.md"]

    def run(self, cases: range, outcome: Outcome) -> None:
        """Run cases and add what comes of them."""
        for case in cases:
            started = time.perf_counter()
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                self._run_case(case, outcome)
            outcome.counts["slowest ms"] = max(
                outcome.counts.get("slowest ms", 0), int(1000 * (time.perf_counter() - started))
            )

    def _run_case(self, case: int, outcome: Outcome) -> None:
        rng = Random(f"{self.seed} {case}")
        name = rng.choice(sorted(ADAPTERS))
        base_name = ADAPTERS[name][0]
        base, adapter = dict(self.bases[base_name]), dict(self.adapters[name])
        damaged = rng.choice((base, adapter, adapter))
        done = mutate(rng, damaged)
        folder = self.scratch / f"case {case}"
        write_files(folder / "base", base)
        write_files(folder / "adapter", adapter)
        (folder / "work").mkdir()
        before = snapshot(folder)

        def attempt(what: str, call: Callable[[], Any]) -> None:
            problem, result = watch(call)
            outcome.count(f"{what} {result}")
            after = snapshot(folder)
            if what == "merge" and result == "succeeds":
                problem = problem or watch(lambda: check_complete(folder / "work" / "out", base))[0]
                after = {path: value for path, value in after.items() if path.parts[:2] != ("work", "out")}
            if problem is None and after != before:
                problem = f"changed files: {sorted(map(str, {*before.items()} ^ {*after.items()}))}"
            if problem is not None:
                outcome.findings.append(f"case {case}: {what} of {name} on {base_name} after {done}: {problem}")

        out = folder / "work" / "out"
        options: dict[str, Any] = {"dtype": torch.float16, "max_shard_bytes": 2000} if rng.random() < 0.2 else {}
        attempt("merge", lambda: merge_checkpoint(folder / "base", folder / "adapter", out, progress=False, **options))
        shutil.rmtree(out, ignore_errors=True)
        target = folder / ("base" if damaged is base else "adapter")
        attempt("inspect", lambda: render(inspect_checkpoint(target, progress=False)))
        # A regex that never ends hangs PEFT itself, whatever the tuner.
        if damaged is adapter and rng.random() < 0.3 and b"a*)*)" not in _as_bytes(adapter.get("adapter_config.json")):
            attempt("load", lambda: self._load(base_name, folder / "adapter"))
        shutil.rmtree(folder)

    def _load(self, base_name: str, adapter: Path) -> None:
        model = self.models[base_name]
        try:
            PeftModel.from_pretrained(model, str(adapter))
        except BaseException:
            self.models[base_name] = BASES[base_name][0]()
            raise
        self.models[base_name] = BASES[base_name][0]()


def _as_bytes(content: bytes | str | None) -> bytes:
    return content if isinstance(content, bytes) else b""


def read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_files(folder: Path, files: Files) -> None:
    """Write files, and what there may be in the place of one."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "folder":
            path.mkdir()
        elif content == "fifo":
            os.mkfifo(path)
        elif content == "dangling link":
            path.symlink_to("nowhere")
        elif content == "link to a copy":
            (folder.parent / f"{folder.name} {name}").write_bytes(b"{}")
            path.symlink_to(folder.parent / f"{folder.name} {name}")
        elif content == "huge hole":
            with open(path, "wb") as file:
                file.truncate(1 << (40 if name.endswith((".json", ".safetensors")) else 20))


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of change of everything below a folder."""
    found = {path: path.lstat() for path in folder.rglob("*") if path != folder / "work"}
    return {path.relative_to(folder): (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def watch(call: Callable[[], Any]) -> tuple[str | None, str]:
    """Call with an alarm; return what is wrong with how it ended, if anything, and how it ended."""
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        call()
        return None, "succeeds"
    except SELError as error:
        line = " ".join(str(error).split())
        return (None if line.isprintable() and len(line) < 4000 else f"an unreadable message: {line!r:.300}"), "refused"
    except SafetensorError:
        return None, "refused by safetensors"
    except Hang:
        return "hangs: " + "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), "hangs"
    except Exception as error:
        packages = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        known = [part for file in packages for part in ("/peft_sel/", "/peft/", "/tests/") if part in file]
        if known[-1] == "/peft/":
            return None, "refused by PEFT"
        return f"{type(error).__name__}: {traceback.format_exc()[-1500:]}", "crashes"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_hang(*_: object) -> None:
    raise Hang


def check_complete(out: Path, base: Files) -> None:
    """Raise unless the output of a merge can be read to the last tensor and has the base's other files."""
    try:
        with CheckpointReader(out) as reader:
            for name in reader.entries:
                reader.read(name)
    except SELError as error:
        raise AssertionError(f"CheckpointError: {error}") from error
    names = {path.name for path in out.iterdir()}
    kept = {name for name, content in base.items() if isinstance(content, bytes) and not name.endswith(".safetensors")}
    assert kept - {name for name in kept if name.endswith((".bin", ".pt", "index.json"))} <= names


def _run_batch(fuzzer: Fuzzer, cases: range, report: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    outcome = Outcome()
    for case in cases:
        killed = f"case {case} killed its process, or did not hear the alarm"
        report.write_text(json.dumps([case + 1, outcome.counts, [*outcome.findings, killed]]))
        fuzzer.run(range(case, case + 1), outcome)
    report.write_text(json.dumps([cases.stop, outcome.counts, outcome.findings]))


def run_in_children(fuzzer: Fuzzer, cases: range, batch: int) -> Outcome:
    """Run cases in forked processes with a limit on memory, so that a crash or a deaf native call is a finding."""
    total = Outcome()
    first = cases.start
    while first < cases.stop:
        report = fuzzer.scratch / "report.json"
        child = os.fork()
        if child == 0:
            try:
                _run_batch(fuzzer, range(first, min(first + batch, cases.stop)), report)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.05)
            if report.exists() and time.time() - report.stat().st_mtime > 5 * CASE_SECONDS:
                os.kill(child, signal.SIGKILL)
        first, counts, findings = json.loads(report.read_text())
        report.unlink()
        for name, value in counts.items():
            before = total.counts.get(name, 0)
            total.counts[name] = max(before, value) if "ms" in name else before + value
        total.findings += findings
        for finding in findings:
            print(finding, flush=True)
    return total


@contextlib.contextmanager
def make_fuzzer(seed: int = 0) -> Iterator[Fuzzer]:
    with tempfile.TemporaryDirectory() as scratch:
        yield Fuzzer(Path(scratch), seed)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    started = time.perf_counter()
    with make_fuzzer(args.seed) as fuzzer:
        outcome = run_in_children(fuzzer, range(args.first, args.first + args.count), batch=200)
    print(json.dumps(outcome.counts, indent=1, sort_keys=True))
    print(f"{args.count} cases, {len(outcome.findings)} findings, {time.perf_counter() - started:.0f} s")
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
