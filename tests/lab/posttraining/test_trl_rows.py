"""A hundred rows and more, of every form in TRL's documentation: our data are those that TRL's own trainer prepares."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from lab.posttraining.tiny import common, write_foreign, write_reward, write_rows
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import chat_template_utils

from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.lab.posttraining.pairs import DirectPreferences, RewardModeling
from lamina.lab.posttraining.rlhf import PolicyOptimization
from lamina.lab.posttraining.sft import SupervisedFineTuning
from lamina.modeling.processes import Processes

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

STAGES = {"SFT": SupervisedFineTuning, "DPO": DirectPreferences, "Reward": RewardModeling, "RLOO": PolicyOptimization}
WORDS = ["norm", "Schicht ä", "流", "skip 🙂", "a\nb", "depth  2", "<|endoftext|>", "xy", "007", "2024-01-01", "ö" * 30]
TAKES = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": TAKES}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def called(number):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}
    return [turn("assistant", "", tool_calls=[call]), turn("tool", str(number + 1), name="add")]


def rows_of(form, count=8):
    """Rows of a form, drawn from its name."""
    draw, rows = random.Random(form), []
    for number in range(count):
        asked, other, better, worse = draw.sample(WORDS, 4)
        system = [turn("system", f"Be {other}.")] * draw.randrange(2)
        before = [*system, *[turn("user", other), turn("assistant", asked)] * draw.randrange(3)]
        question, answer, no = turn("user", f"{asked}?"), turn("assistant", better), turn("assistant", worse)
        prompt, options = [*before, question], {"enable_thinking": bool(draw.randrange(2))}
        use, thought = [question, *called(number), answer], {**answer, "reasoning_content": worse}
        ids = [*better.encode()]
        said = [{"from": one["role"], "value": one["content"]} for one in [*prompt, answer]]
        pair = {"prompt": f"{asked} is", "chosen": f" {better}", "rejected": f" {worse}"}
        turns = {"prompt": prompt, "chosen": [answer], "rejected": [no]}
        rows.append({
            "text": {"text": f"{asked} is {better}"},
            "tokens": {"input_ids": ids, "completion_mask": [0, *[1] * (len(ids) - 1)]},
            "tokens of a pair": {"chosen_ids": [*f"{better}1".encode()], "rejected_ids": [*f"{better}2".encode()]},
            "text in another column": {"body": f"{asked} is {better}"},
            "ended text": {"text": f"{better}<|endoftext|>"},
            "prompt and completion": {"prompt": f"{asked} is", "completion": f" {better}"},
            "with a label": {"prompt": f"{asked} is", "completion": f" {better}", "label": bool(number % 2)},
            "messages": {"messages": [*prompt, answer]},
            "thinking": {"messages": [question, thought], "chat_template_kwargs": options},
            "from and value": {"conversations": said},
            "turns": {"prompt": prompt, "completion": [answer, *[question, no] * draw.randrange(2)]},
            "options": {"prompt": prompt, "completion": [answer], "chat_template_kwargs": options},
            "tools": {"messages": use, "tools": TOOLS},
            "tools as JSON": {"prompt": use[:-1], "completion": use[-1:], "tools": json.dumps(TOOLS)},
            "pair": pair,
            "pair of whole texts": {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")},
            "margins": {**pair, "margin": number / 4},
            "turns of a pair": turns,
            "whole turns of a pair": {name: [*prompt, *turns[name]] for name in ("chosen", "rejected")},
            "tools of a pair": {"prompt": use[:-1], "chosen": [answer], "rejected": [no], "tools": TOOLS},
            "prompt": {"prompt": f"{asked} is", "other": number},
            "turns of a prompt": {"prompt": prompt},
        }[form])  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    return write_foreign(tmp_path_factory.mktemp("start"), tokenizer=tokenizer, max_position_embeddings=2048)


def ours(job, start, data, folder, trl_options, **changed):
    """The stage with its data, and its trainer's collator."""
    stage = STAGES[job]()
    given = {**common(start, data, folder), "eval_data": str(data), "eval_examples": 0, "trl": trl_options, **changed}
    stage.check(SimpleNamespace(settings=stage.record(**given)), Processes())
    stage.read_examples()
    return stage


def theirs(job, start, rows, options):
    """The trainer that TRL makes of the same rows."""
    kind = {"Reward": LlamaForSequenceClassification}.get(job, LlamaForCausalLM)
    model = kind.from_pretrained(start, **({"num_labels": 1} if job == "Reward" else {}))
    tokenizer = load_tokenizer(str(start))
    usual = {"output_dir": "none", "use_cpu": True, "bf16": False, "report_to": "none", "max_length": 2048, **options}
    arguments = getattr(trl, f"{job}Config")(**usual)
    data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    return getattr(trl, f"{job}Trainer")(model, args=arguments, train_dataset=data, processing_class=tokenizer)


ASSISTANT, ALL = {"assistant_only_loss": True}, {"completion_only_loss": False}
TABLE = [
    *(("SFT", form, {}) for form in ("text", "ended text", "prompt and completion", "with a label", "messages")),
    *(("SFT", form, {}) for form in ("thinking", "from and value", "turns", "options", "tools", "tools as JSON")),
    ("SFT", "text in another column", {"dataset_text_field": "body"}),
    ("SFT", "messages", ASSISTANT),
    ("SFT", "tools", ASSISTANT),
    ("SFT", "turns", ALL),
    ("SFT", "tokens", {}),
    ("SFT", "tokens", {"completion_only_loss": True}),
    ("Reward", "tokens of a pair", {}),
    ("SFT", "prompt and completion", ALL),
    ("SFT", "prompt and completion", {"max_length": 20}),
    *(("DPO", form, {}) for form in ("pair", "pair of whole texts", "turns of a pair", "whole turns of a pair")),
    ("DPO", "tools of a pair", {}),
    *(("Reward", form, {}) for form in ("pair", "pair of whole texts", "turns of a pair", "whole turns of a pair")),
    ("Reward", "tools of a pair", {}),
    ("Reward", "margins", {}),
    ("DPO", "turns of a pair", {"max_length": 60, "truncation_mode": "keep_end"}),
]


@pytest.mark.parametrize(("job", "form", "options"), TABLE)
def test_rows_are_prepared_and_batched_as_trl_does(job, form, options, start, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", rows_of(form))
    length = {"sequence_length": options["max_length"]} if "max_length" in options else {}
    own = {name: value for name, value in options.items() if name != "max_length"}
    stage, trainer = ours(job, start, data, tmp_path / "run", own, **length), theirs(job, start, rows_of(form), options)
    assert len(stage.train) == len(stage.held_out) == len(trainer.train_dataset) == len(rows_of(form))
    batches = [trainer.data_collator(list(rows)) for rows in (stage.train, stage.held_out, trainer.train_dataset)]
    for batch in batches[:2]:
        assert batch.keys() == batches[2].keys()
        assert all(torch.equal(batch[name], batches[2][name]) for name in batch)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packs_that_split_long_rows_lose_none_of_them(strategy, start, tmp_path):
    rows = rows_of("turns")  # of many, the first tokens are all the question's
    data, held_out = (write_rows(tmp_path / f"{name}.jsonl", rows_of(name)) for name in ("turns", "text"))
    options = {"packing_strategy": strategy}
    given = {"packing": True, "sequence_length": 64, "eval_data": str(held_out)}
    stage = ours("SFT", start, data, tmp_path / "run", options, **given)
    trainer = theirs("SFT", start, rows, {**options, "packing": True, "max_length": 64})
    assert sum(map(len, stage.train["input_ids"])) > len(rows) * 64
    assert list(stage.train["input_ids"]) == list(trainer.train_dataset["input_ids"])
    assert list(stage.train["labels"]) == list(trainer.train_dataset["labels"])
    tokenizer, texts = load_tokenizer(str(start)), [f"{row['text']}<|endoftext|>" for row in rows_of("text")]
    over = sum(len(tokenizer(text)["input_ids"]) > 64 for text in texts)  # held-out rows are cut, not packed
    assert (stage.notes["truncated"], stage.notes["skipped"]) == (over, 0)
    with pytest.raises(UserError, match="8 of 8 held-out examples have no token to train on in the first 16 tokens"):
        ours("SFT", start, data, tmp_path / "run", options, packing=True, sequence_length=16)


@pytest.mark.parametrize("form", ["prompt", "turns of a prompt", "messages", "pair"])
def test_prompts_are_tokenized_as_trl_does(form, start, tmp_path):
    rows, options = rows_of(form), {"chat_template_kwargs": {"enable_thinking": False}}
    data, rewards = write_rows(tmp_path / "rows.jsonl", rows), write_reward(tmp_path, "0")
    stage = ours("RLOO", start, data, tmp_path / "run", options, reward_function=rewards, max_answer=4)
    prompts = [row.get("prompt") or row["messages"][:-1] for row in rows]
    tokenizer = load_tokenizer(str(start))
    whole = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **options["chat_template_kwargs"]}
    expected = [
        (tokenizer(p) if isinstance(p, str) else tokenizer.apply_chat_template(p, **whole))["input_ids"]
        for p in prompts
    ]
    assert list(stage.train["prompt_ids"]) == expected
    assert list(stage.train["prompt"]) == prompts
    assert [json.loads(row) for row in stage.train["row"]] == rows
