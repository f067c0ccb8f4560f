"""What lies in the folder where the lines of a page are typed: tiny data and models at the paths that they name."""

import json
import re
from pathlib import Path

import torch
import transformers
import yaml
from documented import ROOT, blocks
from lab.posttraining.tiny import preferences, sorting, write_model, write_rows
from PIL import Image
from transformers import LlamaForCausalLM, TrainingArguments

import lamina
from lamina.core.backbone_presets import PRESETS
from lamina.data.tokenizers import load_tokenizer
from lamina.jobs.settings import Settings
from lamina.lab.posttraining.examples import TEMPLATES

POSITIONS = 512  # the longest sequence of any example, which a model must take
MOST = {"steps": 6, "batch_size": 2, "sequence_length": 256, "eval_blocks": 8, "save_steps": 3, "probe_every": 3}
LIMITS = {"sequences": 4, "eval_task_limit": 2}  # of what is measured, where a line asks for it
LEFT_TO_A_PRESET = {"num_layers": 4, "hidden_size": 128}
ROWS = [f"The norm of layer {i % 97} sits before, after and between {i * i % 1009} others." for i in range(900)]


def shorten(monkeypatch):
    """Let every line be parsed and checked as printed, then train for a few steps on a little data.

    Sizes that a line leaves to a preset become tiny; those that it shows stay.
    """
    check = Settings.__post_init__

    def check_and_shorten(self):
        check(self)
        offered = set(self.names())
        for name in offered & MOST.keys():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, min(value, MOST[name]))
        for name in offered & LIMITS.keys():
            if getattr(self, name) != self.default(name):
                object.__setattr__(self, name, min(getattr(self, name), LIMITS[name]))
        if "limit" in offered:
            object.__setattr__(self, "limit", 2)
        if getattr(self, "backbone", None) in PRESETS and getattr(self, "from_model", None) is None:
            left = offered & LEFT_TO_A_PRESET.keys()
            for name in left - {"hidden_size"} if "proxy_width" in offered else left:  # that target is not trained
                if getattr(self, name) is None:
                    object.__setattr__(self, name, LEFT_TO_A_PRESET[name])

    monkeypatch.setattr(Settings, "__post_init__", check_and_shorten)


def text(path):
    """A text, or a folder with two."""
    if path.suffix:
        path.write_text("\n".join(ROWS), encoding="utf-8")
    else:
        path.mkdir(parents=True)
        for number in range(2):
            (path / f"{number}.txt").write_text("\n".join(ROWS[number::2]), encoding="utf-8")


def data_set(path):
    """A data set of the hub, by its name, as `datasets` finds it in the current folder before it asks the hub."""
    path.mkdir(parents=True)
    write_rows(path / "train.jsonl", [{"text": row} for row in ROWS])
    configs = [{"config_name": name, "data_files": "train.jsonl"} for name in ("default", "en", "sample-100BT")]
    (path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", "utf-8")


def benchmarks(path):
    """The data of the set peri_ln, as `make eval-data` names them."""
    answers = {"answerA": "warm", "answerB": "cold", "answerC": "wet"}
    choices = {"label": ["A", "B"], "text": ["warm", "cold"]}
    hellaswag = {"ctx_a": "Fire burns.", "ctx_b": "it", "activity_label": "fire"}
    hellaswag |= {"endings": ["warms"] * 4, "label": "0"}
    rows = {
        "allenai/ai2_arc/ARC-Easy/test": {"question": "Fire is", "choices": choices, "answerKey": "A"},
        "Rowan/hellaswag/default/validation": hellaswag,
        "baber/piqa/default/validation": {"goal": "To warm it", "sol1": "light a fire", "sol2": "wait", "label": 0},
        "lighteval/siqa/default/validation": {"context": "Fire", "question": "is?", **answers, "label": "1"},
    }
    options = {"option1": "warmer", "option2": "colder", "answer": "1"}
    rows |= {"allenai/winogrande/winogrande_xl/validation": {"sentence": "Fire is _ than ice.", **options}}
    for name, row in rows.items():
        (path / name).parent.mkdir(parents=True)
        write_rows(path / f"{name}.jsonl", [row] * 6)


def recipes(path):
    """The recipes, with what mix-130m.yaml takes from the hub."""
    path.symlink_to(ROOT / "recipes")
    data_set(Path("allenai/c4"))
    load_tokenizer("bytes").save_pretrained("t5-base")


def photos(path):
    for number in range(24):
        (path / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (10 * number, 99, 99)).save(path / "ab"[number % 2] / f"{number}.png")


def model(kind):
    """A tiny model of transformers, with a tokenizer of bytes."""

    def write(path):
        tokenizer = load_tokenizer("bytes")
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
        sizes |= {} if "Bert" in kind else {"num_key_value_heads": 2, "head_dim": 8}
        ends = dict.fromkeys([f"{end}_token_id" for end in ("pad", "bos", "eos", "cls", "sep")], 256)
        config = getattr(transformers, f"{kind}Config")(**sizes, **ends)
        getattr(transformers, f"{kind}For{'MaskedLM' if 'Bert' in kind else 'CausalLM'}")(config).save_pretrained(path)
        tokenizer.save_pretrained(path)

    return write


def placed(placement):
    """A tiny model with a placement."""
    return lambda path: write_model(path, placement, positions=POSITIONS)


SIZE = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 256, "batch_size": 2, "eval_blocks": 4}


def run(placement):
    """The folder of a run that has ended."""
    return lambda path: lamina.pretrain(placement=placement, **SIZE, steps=4, output=str(path), bar=False)


def study(path):
    """The folder of a comparison."""
    rest = {"learning_rates": 1e-2, "workers": 1, "output": str(path), "bar": False}
    lamina.compare(placements=["pre_ln", "keel"], **SIZE, steps=40, **rest)


def watched(path):
    """What lamina.watch leaves."""
    (code,) = (code for page, code in blocks("python") if page == "watch.md" and "lamina.watch" in code)
    exec(code.replace("runs/own-loop", str(path)), loop())


def log(path):
    """What a trainer prints."""
    path.write_text("".join(f"iter {step}: loss {3 - step / 90:.3f}, time 9.0ms\n" for step in range(99)), "utf-8")


def checkpoint(path):
    """A checkpoint of Trainer's."""
    path.mkdir()
    history = [{"step": step, "loss": 3 - step / 90, "grad_norm": 1.0} for step in range(10, 210, 10)]
    (path / "trainer_state.json").write_text(json.dumps({"log_history": history}), "utf-8")


def loop():
    """What the pages' Python about other loops takes for granted."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **sizes))
    return {
        "model": model,
        "torch": torch,
        "data": [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (8, 8))],
        "args": TrainingArguments("trainer", max_steps=2, per_device_train_batch_size=4, report_to="none"),
        "batches": [{"input_ids": rows, "labels": rows} for rows in torch.randint(0, 61, (3, 4, 8))],
        "optimizer": torch.optim.AdamW(model.parameters()),
    }


def block_of(page, start):
    """A file whose content is on a page."""
    code = next(code for name, code in blocks("yaml", "python") if name == page and code.startswith(start))
    return lambda path: path.write_text(code, "utf-8")


LYING = {  # a path that lines name: what makes it, where no line has written it
    **dict.fromkeys(("my_texts/", "books/", "web/", "code/", "math/", "my_texts", "my_text.txt"), text),
    **dict.fromkeys(("roneneldan/TinyStories", "HuggingFaceFW/fineweb"), data_set),
    "photos/": photos,
    "eval-data": benchmarks,
    "recipes": recipes,
    "mine.yaml": block_of("own.md", "placement: mine"),
    "my_placement.yaml": block_of("own.md", "placement: mine"),
    "mine.py": block_of("own.md", "from lamina.placements"),
    "small_values.py": block_of("own.md", "import pandas"),
    **dict.fromkeys(("models/smollm2", "models/mine", "HuggingFaceTB/SmolLM2-135M"), model("Llama")),
    "models/gemma-2-2b": model("Gemma2"),
    "models/bert": model("Bert"),
    "models/modernbert": model("ModernBert"),
    **dict.fromkeys(("runs/pre-ln-64/model", "runs/pre-ln-64"), placed("pre_ln")),
    "runs/sandwich-64": placed("sandwich_ln"),
    **dict.fromkeys(("runs/keel-64", "runs/first", "runs/base"), run("keel")),
    "runs/pre-64": run("pre_ln"),
    "runs/keel-64-sft": lambda path: write_model(path, template=TEMPLATES["alpaca"], positions=POSITIONS),
    "runs/compare": study,
    "runs/mine": watched,
    **dict.fromkeys(("runs/port", "runs/original"), watched),
    "train.log": log,
    "out/checkpoint-200": checkpoint,
}


def written_by(parts):
    """The folders that lines and Python write."""
    return {name for _, s in parts for name in re.findall(r"(?:--output |output=\"|LayerMonitor\(\")([^\s\"]+)", s)}


def lay(parts):
    """Make what the lines and the Python of a page name, but what they write themselves."""
    written = written_by(parts)
    named = " ".join(line for _, line in parts)
    for name, make in LYING.items():
        path = Path(name)
        if re.search(rf"(?<![\w/-]){re.escape(name)}(?![\w-])", named) and name not in written and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)


def after_pretraining(parts):
    """Models, data and a reward function for the jobs after pretraining."""
    models = dict.fromkeys(("runs/keel-64", "runs/keel-64-sft", "HuggingFaceTB/SmolLM2-135M"), "causal_lm")
    models["runs/keel-64-reward"] = "sequence_classification"
    for name in models.keys() - written_by(parts):
        template = TEMPLATES["alpaca"] if name == "runs/keel-64-sft" else None  # as fine-tuning leaves it
        write_model(Path(name), head=models[name], template=template, positions=POSITIONS)
    conversations = [[row["instruction"], row["output"]] for row in sorting(12)]
    turns = [[{"role": ("user", "assistant")[i], "content": t} for i, t in enumerate(two)] for two in conversations]
    pairs = [{"chosen": good, "rejected": [good[0], {"role": "assistant", "content": "no"}]} for good in turns]
    files = {
        "instructions.jsonl": sorting(12),
        "questions.jsonl": sorting(12),
        "chats.jsonl": [{"messages": messages} for messages in turns],
        "preferences.jsonl": preferences(12),
        "prompts.jsonl": [{"prompt": f"Sort {row['instruction']}"} for row in sorting(9)],
        "sums.jsonl": [{"prompt": f"{a} + 1 =", "sum": a + 1} for a in range(9)],
        "GAIR/lima/train.jsonl": [{"conversations": two, "source": "a list"} for two in conversations],
        "trl-lib/ultrafeedback_binarized/train.jsonl": pairs,
    }
    for name, rows in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(Path(name), rows)
    Path("sums.py").write_text("def is_right(prompt, answer, row):\n    return float(str(row['sum']) in answer)\n")
