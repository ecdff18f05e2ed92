"""Random damage to the files of a checkpoint or an adapter, by byte and by meaning, for tests/fuzz.py."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save

# What a file can be instead of bytes; fuzz.py makes it so.
SPECIAL = ("missing", "folder", "fifo", "dangling link", "link to a copy", "huge hole")
Files = dict[str, "bytes | str"]

NAN, HUGE_INT = "\0nan", "\0huge"  # stand-ins for what json.dumps does not write
WEIRD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), HUGE_INT),
    *(0.0, -0.0, 0.5, 2.0, -1.5, 1e-45, 1e308, NAN, float("inf"), float("-inf")),
    *("", "x", "x" * 20_000, "\n", "\x1b[2J", "a\0b", "\ud800", "..", "../../../etc/passwd", "/etc/passwd", "é"),
    *("(", "(?P<a", "a{99999999999}", "(((((a*)*)*)*)*)*b", "[[a]", "auto", "width", "default", "all-linear", "LORA"),
    *([], [[]], [None], ["q_proj"], [1, 2], [0.5], ["x"] * 50, {}, {"": None}, {"a": {"b": {}}}, {"q_proj": 2.0}),
    *({"pattern": "lora", "rank": 10**9}, {"pattern": ["row"]}, {"pattern": "row", "init": "1"}, {"rank": None}),
]
DTYPE_CODES = [
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "F64",
    "I64",
    "U64",
    "C64",
    "F8_E4M3",
]
DTYPE_CODES += ["F8_E5M2", "F8_E8M0", "F4", "f32", "", "torch.float32"]
SIZES = [0, 1, 2, 3, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -1, 1.5, NAN, None, "2", [], True]
NAMES = ["", "a", "__metadata__", "x" * 2000, "a\nb", "\x1b]0;x\x07", "../../a", "a\0b", "model", ".weight", "é" * 50]
NAMES += ["model.layers.0.mlp.experts.00.up_proj.weight", "model.layers.0.mlp.experts.٣.up_proj.weight"]
NAMES += ["a.embed" * 140 + "!.weight", f"model.layers.0.mlp.experts.{'9' * 900}.up_proj.weight"]
SHARDS = [
    "../model-00001-of-00003.safetensors",
    "/etc/passwd.safetensors",
    "a/b.safetensors",
    "",
    "x.safetensors",
    "..",
]
SHARDS += [
    "MODEL-00001-OF-00003.safetensors",
    "a\0.safetensors",
    "a\n.safetensors",
    "x" * 300 + ".safetensors",
    "con",
    "NUL",
]
CHOICES: dict[str, list[Any]] = {
    "mode": ["mismatch", "congruent", "oppose", "exp_only"],
    "family": ["symexp", "sinh", "damped"],
    "bias": ["none", "sel_only", "all"],
    "train_raw": [True, False],
    "r": [0, 1, 2, 3, 64, 65, 10**9],
    "raw_dtype": ["float32", "float64", "bfloat16", "float16"],
    "normalizer": ["fixed", "folded"],
    "init_target": ["pretrained", "xavier_uniform"],
    "log_curvature": [True, False],
    "normalize_by_inner_mult": [True, False],
    "peft_type": ["LORA", "IA3", "SYMEXPLIN", "symexplin", "NOTHING", ["SYMEXPLIN"], None],
    "format_version": [0, 1, 2, 2**70, "1", None],
    "peft_sel_version": ["99.0", "0.0.1", "9" * 5000, "x", 1],
    "auto_mapping": [{"base_model_class": "system", "parent_library": "os"}],
    "base_model_name_or_path": ["../../x", "\n# x", 'a"); import os', 3],
    "task_type": ["CAUSAL_LM", "NOTHING", 3, []],
    "architectures": [["LlamaForCausalLM"], ["\ud800"], "LlamaForCausalLM", ["models"], [["a"]], {}],
    "model_type": ["llama", "qwen3_moe", "mixtral", "t5", "encoder-decoder", "gpt_oss", [], 3],
    "quantization_config": [{}, {"quant_method": "fp8"}, 1],
    "text_config": [[], {}, {"hidden_size": HUGE_INT}, {"model_type": "llama"}, "x"],
    "num_hidden_layers": [10**9, -1, 0],
    "num_labels": [10**9, -1],
    "dtype": ["float32", "int8", [], 3],
    "weight_map": [[], {}, None, {"a": 3}, {"a": ["x"]}],
}


def mutate(rng: Random, files: Files) -> list[str]:
    """Damage one or two files in place; return what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(files))
        content = files[name]
        if isinstance(content, str):
            continue
        if rng.random() < 0.06:
            files[name] = rng.choice(SPECIAL)
            done.append(f"{name}: {files[name]}")
            continue
        table = (
            TENSOR_MUTATIONS if name.endswith(".safetensors") else JSON_MUTATIONS if name.endswith(".json") else BYTES
        )
        change = rng.choice(table)
        try:
            files[name] = change(rng, content)
            done.append(f"{name}: {change.__name__}")
        except Exception:  # an earlier change broke the file
            files[name] = flip_bytes(rng, content)
            done.append(f"{name}: flip_bytes")
    if rng.random() < 0.05:
        name = rng.choice(("adapter_model.bin", "pytorch_model.bin", "model.pt", "extra.safetensors"))
        files[name] = pickle.dumps({"a": 1})
        done.append(f"added {name}")
    return done


def flip_bytes(rng: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(min(len(changed), rng.choice((16, 400, 10**9))))] = rng.choice(
                (0, 255, rng.randrange(256))
            )
    return bytes(changed)


def cut(rng: Random, content: bytes) -> bytes:
    return content[: rng.choice((0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content) + 1)))]


def lengthen(rng: Random, content: bytes) -> bytes:
    return content + rng.choice((b"\0", b" ", b"{}", content))


def dump(value: Any) -> bytes:
    """Write JSON with NaN, infinities and numbers of any length."""
    text = json.dumps(value)
    return text.replace(json.dumps(NAN), "NaN").replace(json.dumps(HUGE_INT), "1" + "0" * 400).encode()


def pack(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else dump(header)
    return len(text).to_bytes(8, "little") + text + data


def unpack(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def pick(rng: Random, header: dict[str, Any]) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


def lie_about_offsets(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    place, other = header[pick(rng, header)], header[pick(rng, header)]
    begin, end = place["data_offsets"]
    wrong: list[Any] = [[end, begin], [begin, len(data) + 8], [begin - 8, end], [begin], [begin, end, end], [], [0, 0]]
    wrong += [other["data_offsets"], [rng.choice(SIZES), end], [begin, rng.choice(SIZES)], None, "0", {}, [end, end]]
    place["data_offsets"] = rng.choice(wrong)
    return pack(header, data)


def lie_about_shape(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    place = header[pick(rng, header)]
    shape = list(place["shape"]) or [1]
    index = rng.randrange(len(shape))
    shapes = [[*shape[:index], rng.choice(SIZES), *shape[index + 1 :]], shape[::-1], [*shape, 1], [1] * 30 + shape]
    place["shape"] = rng.choice(
        [*shapes, [*shape, 0], [rng.choice(SIZES)] * 3, None, "x", {}, [shape], [1] * 300 + shape]
    )
    return pack(header, data)


def lie_about_dtype(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    header[pick(rng, header)]["dtype"] = rng.choice([*DTYPE_CODES, None, 3, []])
    return pack(header, data)


def change_fields(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    name = pick(rng, header)
    action = rng.randrange(4)
    if action == 0:
        del header[name][rng.choice(sorted(header[name]))]
    elif action == 1:
        header[name]["extra"] = rng.choice(WEIRD)
    elif action == 2:
        header[name] = rng.choice(WEIRD)
    else:
        header["__metadata__"] = rng.choice([*WEIRD, {"a": 1}, {"format": rng.choice(WEIRD)}, {"x" * 5000: "y"}])
    return pack(header, data)


def rename_tensor(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    name = pick(rng, header)
    part = rng.choice(("base_layer", "modules_to_save", "original_module", "sel_parameters", "symexplin_raw", "0", ""))
    pieces = name.split(".")
    pieces.insert(rng.randrange(len(pieces) + 1), part)
    shorter = name.split(".")
    shorter.pop(rng.randrange(len(shorter)))
    new = rng.choice(
        [*NAMES, ".".join(pieces), ".".join(pieces), ".".join(shorter), name.replace("0", "1"), name + "é"]
    )
    return pack({new if key == name else key: value for key, value in header.items()}, data)


def repeat_key(rng: Random, content: bytes) -> bytes:
    header, data = unpack(content)
    name = pick(rng, header)
    place = dict(header[name], dtype=rng.choice((header[name]["dtype"], "I32", "I16", "F16")))
    text = dump(header)
    extra = f"{json.dumps(name)}:{json.dumps(place)}".encode()
    changed = text[:-1] + b"," + extra + b"}" if rng.random() < 0.5 else b"{" + extra + b"," + text[1:]
    return pack(changed, data)


def break_length(rng: Random, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    wrong = rng.choice((0, 1, length - 1, length + 1, len(content), 10**8, 10**8 + 1, 2**31, 2**62, 2**64 - 1))
    return wrong.to_bytes(8, "little") + content[8:]


def nest_header(rng: Random, content: bytes) -> bytes:
    depth = rng.choice((60, 200, 5000))
    return pack(b'{"a":' * depth + b"1" + b"}" * depth, b"")


def rewrite(rng: Random, content: bytes) -> bytes:
    """Change a tensor's dtype, shape, values or name, in a file that stays valid."""
    tensors = load(content)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name].clone()
    action = rng.randrange(6)
    if action == 0:
        kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.uint8)
        tensors[name] = tensor.to(rng.choice((*kinds, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint16)))
    elif action == 1 and tensor.is_floating_point() and tensor.numel():
        value = rng.choice(
            (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 1e-30, 1e30, 3e38, -1.0, 65504.0)
        )
        whole = rng.random() < 0.5
        tensor.reshape(-1)[slice(None) if whole else slice(0, 1)] = torch.tensor(value, dtype=torch.float64).to(
            tensor.dtype
        )
        tensors[name] = tensor
    elif action == 2:
        views = [
            tensor.reshape(-1),
            tensor[None],
            tensor.T.contiguous() if tensor.dim() == 2 else tensor,
            tensor.new_zeros(0),
        ]
        views += [tensor.new_zeros(*tensor.shape, 0), tensor.new_zeros(0, *tensor.shape[1:]), tensor.new_zeros(())]
        views += [torch.cat([tensor, tensor]) if tensor.dim() else tensor, tensor[:1] if tensor.dim() else tensor]
        tensors[name] = rng.choice(views).clone()
    elif action == 3 and len(tensors) > 1:
        del tensors[name]
    elif action == 4:
        tensors[rng.choice([*NAMES, name + "x", name.replace("weight", "bias"), f"{name}.base_layer.weight"])] = tensor
    else:
        other = rng.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], tensor
    metadata = unpack(content)[0].get("__metadata__")
    return save(tensors, metadata)


def replace_value(rng: Random, content: bytes) -> bytes:
    value = json.loads(content)
    parent, key = value, rng.choice(sorted(value))
    while isinstance(parent[key], dict) and parent[key] and rng.random() < 0.6:
        parent = parent[key]
        key = rng.choice(sorted(parent))
    known = CHOICES.get(key) or (SHARDS if str(parent[key]).endswith(".safetensors") else None)
    parent[key] = rng.choice(known) if known and rng.random() < 0.7 else rng.choice(WEIRD)
    return dump(value)


def choose_value(rng: Random, content: bytes) -> bytes:
    value = json.loads(content)
    key = rng.choice(
        sorted(CHOICES.keys() & {*value, "format_version", "quantization_config", "text_config", "num_labels"})
    )
    value[key] = rng.choice(CHOICES[key])
    return dump(value)


def edit_keys(rng: Random, content: bytes) -> bytes:
    value = json.loads(content)
    holder = value["weight_map"] if "weight_map" in value and rng.random() < 0.7 else value
    key = rng.choice(sorted(holder))
    action = rng.randrange(3)
    if action == 0:
        del holder[key]
    elif action == 1:
        holder[rng.choice([*NAMES, "self", "cls", "runtime_config", "awaits_load", "unheard_of"])] = holder[key]
    else:
        holder[rng.choice(sorted(holder))] = holder.pop(key)
    return dump(value)


def repeat_json_key(rng: Random, content: bytes) -> bytes:
    value = json.loads(content)
    key = rng.choice(sorted(value))
    return dump(value)[:-1] + b"," + json.dumps(key).encode() + b":" + dump(rng.choice([value[key], *WEIRD])) + b"}"


def replace_document(rng: Random, content: bytes) -> bytes:
    depth = rng.choice((60, 500, 100_000))
    deep = [b"[" * depth + b"]" * depth, content.rstrip()[:-1] + b',"a":' + b"[" * depth + b"]" * depth + b"}"]
    return rng.choice(
        [b"", b"[]", b"3", b'"x"', b"null", b"{}", b"\xff\xfe", b"\xef\xbb\xbf" + content, b"{", b"\0", *deep]
    )


BYTES: list[Callable[[Random, bytes], bytes]] = [flip_bytes, cut, lengthen]
JSON_MUTATIONS = [
    *BYTES,
    *[replace_value] * 6,
    *[choose_value] * 4,
    edit_keys,
    edit_keys,
    repeat_json_key,
    replace_document,
]
TENSOR_MUTATIONS = [*BYTES, lie_about_offsets, lie_about_offsets, lie_about_shape, lie_about_shape, lie_about_dtype]
TENSOR_MUTATIONS += [change_fields, rename_tensor, rename_tensor, repeat_key, break_length, nest_header, *[rewrite] * 6]
