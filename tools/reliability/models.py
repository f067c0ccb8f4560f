"""Broken models: what every command that reads one says of it. One line and exit code 2, or the model as it is.

python -m tools.reliability.models --count 120 --seed 0 --output docs/reliability/models.json
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lamina
from lamina.cli import main as command_line
from tools.reliability.record import LOST, SILENT, TRACEBACK, WRONG, Case, called, main

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
READERS = ("generate", "probe", "convert", "from", "backbone")


def make_models(root: Path) -> dict[str, Path]:
    """A Llama of transformers, a Lamina model, and the Llama in two shards: each whole, with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 60)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES))
    made = {"transformers": llama, "lamina": lamina.build(LlamaConfig(**SIZES), "hybridnorm"), "sharded": llama}
    for name, model in made.items():
        model.save_pretrained(root / name, **({"max_shard_size": "8KB"} if name == "sharded" else {}))
        tokenizer.save_pretrained(root / name)
    assert (root / "sharded" / INDEX).is_file()
    return {name: root / name for name in made}


Damage = Callable[[Path, random.Random], str]
DAMAGES: dict[str, Damage] = {}


def damage(function: Damage) -> Damage:
    """Register a way to break the model in a folder; it returns what it did, in words."""
    DAMAGES[function.__name__] = function
    return function


def _weight_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(folder.glob("*.safetensors")))


def _edit(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))


def _sizes_of(data: dict[str, Any]) -> dict[str, Any]:
    return data.get("backbone_config", data)


@damage
def weights_missing(folder: Path, draw: random.Random) -> str:
    file = _weight_file(folder, draw)
    file.unlink()
    return f"{file.name} deleted"


@damage
def weights_cut(folder: Path, draw: random.Random) -> str:
    file = _weight_file(folder, draw)
    whole = file.read_bytes()
    keep = draw.choice([0, 3, 8, 40, draw.randrange(len(whole)), len(whole) - 1])
    file.write_bytes(whole[:keep])
    return f"{file.name} cut to {keep} bytes"


@damage
def header_flipped(folder: Path, draw: random.Random) -> str:
    file = _weight_file(folder, draw)
    whole = bytearray(file.read_bytes())
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    told = whole.index(b"}") + 1 if whole[9:].startswith(b'"__metadata__"') else 8  # which no reader needs
    place = draw.choice([*range(8), *range(told, size)])
    whole[place] ^= 1 << draw.randrange(8)
    file.write_bytes(whole)
    return f"{file.name}: a bit of byte {place} (header) flipped"


@damage
def header_too_long(folder: Path, draw: random.Random) -> str:
    file = _weight_file(folder, draw)
    file.write_bytes(struct.pack("<Q", draw.choice([2**63, 2**40, 10**9])) + file.read_bytes()[8:])
    return f"{file.name}: its header claims to be longer than the file"


@damage
def weights_of_text(folder: Path, draw: random.Random) -> str:
    file = _weight_file(folder, draw)
    file.write_text(draw.choice(["", "not weights\n", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"]))
    return f"{file.name} is a text"


def _tensors(folder: Path, draw: random.Random, change: Callable[[dict[str, torch.Tensor], str], object]) -> str:
    file = _weight_file(folder, draw)
    tensors = load_file(file)
    key = draw.choice(sorted(tensors))
    change(tensors, key)
    save_file(tensors, file, metadata={"format": "pt"})
    return key


@damage
def tensor_missing(folder: Path, draw: random.Random) -> str:
    return f"{_tensors(folder, draw, lambda tensors, key: tensors.pop(key))} left out"


@damage
def tensor_of_another_shape(folder: Path, draw: random.Random) -> str:
    def change(tensors: dict[str, torch.Tensor], key: str) -> None:
        tensors[key] = torch.zeros(*(size + 3 for size in tensors[key].shape))

    return f"{_tensors(folder, draw, change)} of another shape"


@damage
def tensor_not_finite(folder: Path, draw: random.Random) -> str:
    value = draw.choice([float("nan"), float("inf"), float("-inf")])

    def change(tensors: dict[str, torch.Tensor], key: str) -> None:
        tensors[key].view(-1)[draw.randrange(tensors[key].numel())] = value

    return f"{_tensors(folder, draw, change)} holds {value}"


@damage
def pickles_only(folder: Path, draw: random.Random) -> str:
    class Trap:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(folder / 'ran')!r}, 'w').close()",))

    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    torch.save({"model.embed_tokens.weight": Trap()}, folder / "pytorch_model.bin")
    return "a pickle that runs code is all there is"


@damage
def index_damaged(folder: Path, draw: random.Random) -> str:
    if not (folder / INDEX).is_file():
        save_file(load_file(folder / WEIGHTS), folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        data = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / INDEX).write_text(json.dumps(data))
    written = draw.choice(
        [
            "{ not json",
            "[]",
            '{"weight_map": []}',
            '{"weight_map": {}}',
            '{"weight_map": {"a": 3}}',
            '{"weight_map": {"a": "../../etc/passwd"}}',
            '{"weight_map": {"a": "/etc/hostname.safetensors"}}',
            '{"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}',
        ]
    )
    (folder / INDEX).write_text(written)
    return f"{INDEX} is {written}"


@damage
def config_malformed(folder: Path, draw: random.Random) -> str:
    whole = (folder / "config.json").read_text()
    written = draw.choice(
        [
            "",
            "{",
            "[]",
            "3",
            "null",
            '"llama"',
            "{}",
            "[" * 100_000,
            whole[: len(whole) // 2],
            "\x00\x1b[31m",
            "{'a': 1}",
        ]
    )
    (folder / "config.json").write_text(written)
    return f"config.json is {written[:20]!r}"


@damage
def config_not_utf8(folder: Path, draw: random.Random) -> str:
    (folder / "config.json").write_bytes(b"\xff\xfe" + (folder / "config.json").read_bytes())
    return "config.json is not UTF-8"


@damage
def config_missing(folder: Path, draw: random.Random) -> str:
    (folder / "config.json").unlink()
    return "no config.json"


@damage
def model_type_unknown(folder: Path, draw: random.Random) -> str:
    value = draw.choice(["lama", "", None, 3, ["llama"], {"a": 1}, "\x1b[2Jx", "../llama"])
    _edit(folder, "config.json", lambda data: data.update(model_type=value))
    return f"model_type {value!r}"


@damage
def size_of_another_type(folder: Path, draw: random.Random) -> str:
    field = draw.choice(["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    value = draw.choice(["16", 1.5, True, None, [16], {"a": 1}, -1, 0, "\x1b[31mred"])
    _edit(folder, "config.json", lambda data: _sizes_of(data).update({field: value}))
    return f"{field} {value!r}"


@damage
def size_huge(folder: Path, draw: random.Random) -> str:
    field = draw.choice(["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
    value = draw.choice([10**6 + 1, 10**9, 10**12, 10**30, 10**400])
    value = max(value, 10**9) if field == "vocab_size" else value  # a million tokens of this width fit into memory
    _edit(folder, "config.json", lambda data: _sizes_of(data).update({field: value}))
    return f"{field} of {len(str(value))} digits"


@damage
def size_of_another_model(folder: Path, draw: random.Random) -> str:
    field, value = draw.choice(
        [
            *(("hidden_size", 32), ("num_hidden_layers", 1), ("num_hidden_layers", 3), ("num_attention_heads", 3)),
            *(("vocab_size", 32), ("vocab_size", 128), ("intermediate_size", 8), ("num_key_value_heads", 3)),
        ]
    )
    _edit(folder, "config.json", lambda data: _sizes_of(data).update({field: value}))
    return f"{field} {value}"


@damage
def field_with_no_meaning(folder: Path, draw: random.Random) -> str:
    field, value = draw.choice(
        [
            *(("hidden_act", "nope"), ("hidden_act", 3), ("rms_norm_eps", "small"), ("attention_dropout", "no")),
            *(("rope_parameters", "x"), ("rope_parameters", {"rope_type": "zzz"}), ("dtype", "float7")),
            *(("head_dim", 7), ("head_dim", -8), ("num_key_value_heads", 0)),
            ("quantization_config", {"quant_method": "zzz"}),
        ]
    )
    _edit(folder, "config.json", lambda data: _sizes_of(data).update({field: value}))
    return f"{field} {value!r}"


@damage
def plan_damaged(folder: Path, draw: random.Random) -> str:
    """Of a transformers model: it says that it is a Lamina one."""

    def change(data: dict[str, Any]) -> None:
        data["model_type"] = "lamina"
        data["plan"] = draw.choice(
            [
                None,
                [],
                "keel",
                {},
                {"layers": []},
                {"placement": "x", "layers": [1, 2]},
                {**(data.get("plan") or {}), "z": 1},
            ]
        )

    _edit(folder, "config.json", change)
    return "the plan is not one"


@damage
def code_asked_for(folder: Path, draw: random.Random) -> str:
    """Code beside the model that leaves a file where it runs."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    maps = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    maps = draw.choice([maps, maps, "evil.Config", ["evil"], {"AutoConfig": 3}])
    _edit(folder, "config.json", lambda data: data.update(model_type="mystery", auto_map=maps))
    return "an unknown model that brings its code"


@damage
def tokenizer_code_asked_for(folder: Path, draw: random.Random) -> str:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    data = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(data))
    return "a tokenizer that brings its code"


@damage
def tokenizer_missing(folder: Path, draw: random.Random) -> str:
    for file in folder.glob("*token*"):
        file.unlink()
    return "no tokenizer"


@damage
def tokenizer_damaged(folder: Path, draw: random.Random) -> str:
    file = folder / "tokenizer.json"
    whole = file.read_text()
    file.write_text(
        draw.choice(["", "[]", "{}", "null", whole[: draw.randrange(len(whole))], '{"model": {"type": "x"}}'])
    )
    return "tokenizer.json damaged"


@damage
def tokenizer_of_another_model(folder: Path, draw: random.Random) -> str:
    def change(data: dict[str, Any]) -> None:
        data["model"]["vocab"] |= {f"more{i}": i for i in range(60, draw.choice([65, 100, 5000]))}

    _edit(folder, "tokenizer.json", change)
    return "a tokenizer with more tokens than the model"


# What a reader need not look at: whatever it does with it is right, as long as it does not fail.
UNREAD = {
    "backbone": ("weights_", "header_", "tensor", "pickles", "index", "tokenizer", "plan_", "size_of_another_model"),
    "probe": ("tokenizer",),  # it is asked for token ids here
    "convert": ("tokenizer",),  # copied as it is
}


def arguments(reader: str, folder: Path, output: Path) -> list[str]:
    """The command that reads a model, doing as little as it can."""
    small = ["--steps", "1", "--sequence-length", "16", "--batch-size", "1", "--eval-blocks", "1", "--threads", "1"]
    return {
        "generate": ["generate", str(folder), "--prompt", "w5 w6", "--max-new-tokens", "2", "--temperature", "0"],
        "probe": ["probe", str(folder), "--probes", "gains", "--output", str(output)],
        "convert": ["convert", str(folder), str(output), "--to", "lamina"],
        "from": ["pretrain", "--from", str(folder), "--output", str(output), *small],
        "backbone": ["pretrain", "--backbone", str(folder), "--output", str(output), "--num-layers", "2", *small],
    }[reader]


def judged(reader: str, name: str, folder: Path, output: Path, what: str, whole: str) -> Case:
    """Run a reader on a broken model, and say how it came out."""
    code, said = called(lambda: command_line(arguments(reader, folder, output)))
    told = [line for line in said.splitlines() if line.startswith("lamina: ")]
    detail = f"{what}; exit code {code}: {' '.join(said.split())[-300:]}"
    group = f"{reader}, {name.replace('_', ' ')}"
    if (folder / "ran").exists():
        return Case(group, what, WRONG, f"code of the checkpoint was run; {detail}")
    if code is None or "Traceback" in said:
        return Case(group, what, TRACEBACK, detail)
    if code == 2:
        one_line = len(told) == 1 and len(told[0]) < 1000 and "\x1b" not in said
        if reader == "convert" and output.exists() and any(output.iterdir()):
            return Case(group, what, LOST, f"half a model was left in the output; {detail}")
        return Case(group, what) if one_line else Case(group, what, WRONG, f"not one line; {detail}")
    if any(name.startswith(begin) for begin in UNREAD.get(reader, ())):
        return Case(group, what)
    if reader == "generate" and code == 0 and said == whole:
        return Case(group, what)  # what was changed means nothing (a space in the header)
    return Case(group, what, SILENT, detail)


def suite(count: int, seed: int) -> Iterable[Case]:
    """``count`` cases: each way to break a model, by each command that reads one, on each kind of model, by turns."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="lamina-models-") as scratch:
        root = Path(scratch)
        (root / "words.txt").write_text("w5 w6 w7 w8 w9\n" * 400)
        models = make_models(root)
        whole = {kind: arguments("generate", path, root / "x") for kind, path in models.items()}
        said = {kind: called(partial(command_line, argv))[1] for kind, argv in whole.items()}
        pairs = [(name, reader) for name in DAMAGES for reader in READERS]
        draw.shuffle(pairs)
        for number in range(count):
            name, reader = pairs[number % len(pairs)]
            kind = draw.choice(["transformers", "sharded"] if reader == "convert" else sorted(models))
            folder, output = root / "broken", root / "output"
            for left in (folder, output):
                shutil.rmtree(left, ignore_errors=True)
            shutil.copytree(models[kind], folder)
            what = f"{kind}: {DAMAGES[name](folder, draw)}"
            yield judged(reader, name, folder, output, what, said[kind])


if __name__ == "__main__":
    sys.exit(main("models", suite, 240))
