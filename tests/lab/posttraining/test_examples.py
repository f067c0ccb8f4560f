"""Rows of every format become the tokens and labels that TRL itself would make of them."""

import gzip
import json
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset
from trl import chat_template_utils, data_utils

from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.evaluation import generated as tasks
from lamina.lab.posttraining import examples
from lamina.lab.posttraining.examples import (
    IGNORED,
    TEMPLATES,
    ExampleEncoder,
    example_of,
    preference_of,
    prompt_of,
    read,
)
from lamina.lab.posttraining.pairs import PairStage

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hällo?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bytes")


def encoder(tokenizer, template=None, **options):
    return ExampleEncoder(tokenizer=tokenizer, template=template, longest=options.pop("longest", 512), **options)


def trl_labels(tokenizer, row, template=None, assistant_only=False):
    """What SFTTrainer prepares from a row."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir="none", max_length=None, assistant_only_loss=assistant_only, use_cpu=True, bf16=False
    )
    tokenizer.chat_template = template
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=True)
    data = SFTTrainer._prepare_dataset(trainer, Dataset.from_list([row]), tokenizer, arguments, False, None, "train")
    return data[0]["input_ids"], data[0]["labels"]


@pytest.mark.parametrize(
    "row", [{"prompt": "Sum of 1 and 2 is", "completion": " 3"}, {"prompt": "ä", "completion": "ö"}]
)
def test_a_prompt_with_its_completion_is_encoded_as_trl_does(tokenizer, row):
    ours = encoder(tokenizer).example(example_of(row))
    assert (ours["input_ids"], ours["labels"]) == trl_labels(tokenizer, row)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_encoded_as_trl_does(tokenizer, name):
    """TRL finds an answer by the template's own generation marks; here they are put around the assistant's texts."""
    template = TEMPLATES[name]
    row = {"prompt": TURNS[:2], "completion": [TURNS[2]]}
    ours = encoder(tokenizer, template).example(example_of(row))
    assert (ours["input_ids"], ours["labels"]) == trl_labels(tokenizer, row, template)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [user("q"), assistant("") | {"tool_calls": [CALL]}, {"role": "tool", "name": "add", "content": "4"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize(
    ("family", "loss"),
    [("qwen3", "all"), ("qwen3", "assistant"), ("llama3", "all"), ("llama3", "assistant"), ("gptoss", "all")],
)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS[1:]},
        {"messages": [*CALLED, assistant("a")], "tools": TOOLS},
        {"messages": [*CALLED, assistant("a")], "tools": json.dumps(TOOLS)},
        {"messages": [user("q"), assistant("a") | {"reasoning_content": "hm", "thinking": "hm"}]},
        {"prompt": TURNS[:4], "completion": TURNS[4:]},
        {"prompt": TURNS[:2], "completion": TURNS[2:]},
        {"prompt": TURNS[:2], "completion": TURNS[2:3], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": TURNS[1:3], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": TURNS[1:4]},
        {"prompt": TURNS[:2], "completion": TURNS[2:4]},
        {"prompt": [user("q"), assistant("The sky")], "completion": [assistant(" is blue.")]},
        {
            "prompt": [user("q")],
            "completion": [assistant("a") | {"reasoning_content": "hm"}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
)
def test_what_a_family_s_own_template_reads_is_encoded_as_trl_does(tokenizer, row, family, loss):
    """Qwen3's leaves the thoughts out of all turns but the last, for which TRL has another form of it."""
    template = getattr(chat_template_utils, f"{family}_chat_template")
    if family == "llama3" and "tools" in row:
        with pytest.raises(ValueError, match="it has 'tools', which the template does not take"):
            encoder(tokenizer, template).example(example_of(row))
        return
    ours = encoder(tokenizer, template, longest=4096, loss_on_all=loss == "all").example(example_of(row))
    marked = loss == "assistant" and "messages" in row
    tokenizer.chat_template = template
    form = chat_template_utils.get_training_chat_template(tokenizer) if marked else template
    ids, labels = trl_labels(tokenizer, row, form, marked)
    assert (ours["input_ids"], ours["labels"]) == (ids, ids if loss == "all" else labels)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("role", ["tool", "developer"])
def test_a_template_that_writes_any_role_takes_those_that_it_does_not_name(tokenizer, role):
    row = {"messages": [user("q"), {"role": role, "content": f"the {role} says"}, assistant("a")]}
    ours = encoder(tokenizer, CHATML, longest=4096, loss_on_all=True).example(example_of(row))
    assert ours["input_ids"] == trl_labels(tokenizer, row, CHATML, False)[0]
    with pytest.raises(ValueError, match=f"it has '{role}', which the template does not take"):
        encoder(tokenizer, TEMPLATES["chat"]).example(example_of(row))


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gptoss"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},  # texts stay texts
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"prompt": TURNS[:2], "chosen": TURNS[2:3], "rejected": [assistant("No.")]},
        {"chosen": TURNS, "rejected": [*TURNS[:4], assistant("Hm.")]},
        {"prompt": TURNS[:2], "chosen": TURNS[2:], "rejected": [*TURNS[2:4], assistant("Hm.")]},
        {"prompt": TURNS[:2], "chosen": TURNS[2:], "rejected": [assistant("No.")]},
        {"chosen": TURNS, "rejected": [*TURNS[:2], assistant("No."), *TURNS[3:]]},
        {"prompt": TURNS[:2], "chosen": TURNS[2:3], "rejected": [assistant("No.")], "tools": TOOLS},
    ],
)
def test_a_pair_is_encoded_as_trl_does(tokenizer, row, family):
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    template = getattr(chat_template_utils, f"{family}_chat_template")
    ours = SimpleNamespace(encoder=encoder(tokenizer, template, longest=4096))
    if family == "llama3" and "tools" in row:
        with pytest.raises(ValueError, match="it has 'tools', which the template does not take"):
            PairStage.encoded(ours, row)
        return
    ours = PairStage.encoded(ours, row)
    tokenizer.chat_template = template
    given = {"output_dir": "none", "max_length": None, "use_cpu": True, "bf16": False}
    data, trainer = Dataset.from_list([row]), SimpleNamespace(_tokenizer=tokenizer)
    (pair,) = DPOTrainer._prepare_dataset(trainer, data, tokenizer, DPOConfig(**given), "train")
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert {name: ours[name] for name in names} == {name: pair[name] for name in names}
    (whole,) = RewardTrainer._prepare_dataset(trainer, data, tokenizer, RewardConfig(**given), "train")
    assert (ours["chosen_whole"], ours["rejected_whole"]) == (whole["chosen_ids"], whole["rejected_ids"])


def test_a_prompt_that_reads_otherwise_before_its_answer_is_told_once(tokenizer, caplog):
    row = {"prompt": [user("q")], "completion": [assistant("a") | {"reasoning_content": "hm"}]}
    row["chat_template_kwargs"] = {"enable_thinking": False}
    thinks = encoder(tokenizer, chat_template_utils.qwen3_chat_template)
    thinks.example(example_of({**row, "completion": [assistant("a")]}))
    assert not caplog.records
    for _ in range(2):
        thinks.example(example_of(row))
    assert [record.message.partition(" ends in ")[0] for record in caplog.records] == ["a prompt"]


@pytest.mark.parametrize("turns", [TURNS, [assistant("Yes."), *TURNS[3:]]], ids=["usual", "the assistant begins"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_of_a_conversation_is_a_label_with_its_end(tokenizer, name, turns):
    tokens = encoder(tokenizer, TEMPLATES[name]).example(example_of({"messages": turns}))
    learned = tokenizer.decode([label for label in tokens["labels"] if label != IGNORED])
    assert [part.strip() for part in learned.split(tokenizer.eos_token)] == ["Yes.", "Bye!", ""]


def test_alpacas_template_is_the_published_one(tokenizer):
    """As in LLM-Adapters' generate_prompt, written out."""
    row = {"instruction": "Sort.", "input": "b a", "output": "a b"}
    text = encoder(tokenizer, TEMPLATES["alpaca"]).render(example_of(row)["messages"], answers=False)
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSort.\n\n### Input:\nb a\n\n"
        "### Response:\na b<|endoftext|>"
    )


def test_adam_minis_template_is_its_own(tokenizer):
    text = encoder(tokenizer, TEMPLATES["human"]).render([user("Hi")], answers=True)
    assert text == " Human: Hi Assistant:"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q"), assistant("a")]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": ["q", "a"]},
        {"instruction": "q", "output": "a"},
        {"prompt": [user("q")], "completion": [assistant("a")]},
    ],
)
def test_formats_of_the_same_conversation_are_the_same(row):
    example = example_of(row)
    assert example.pop("asked", 1) == 1
    assert example == {"messages": [user("q"), assistant("a")]}
    assert prompt_of(row) == [user("q")]


def test_of_a_row_with_several_forms_the_complete_one_counts():
    both = {"prompt": "p", "instruction": "q", "output": "a"}
    assert example_of(both) == {"messages": [user("q"), assistant("a")], "asked": 1}
    assert prompt_of(both) == [user("q")]
    assert example_of({**both, "completion": "b"}) == {"prompt": "p", "completion": "b"}
    assert prompt_of({"prompt": "p", "instruction": "q"}) == "p"
    turns = {"messages": [user("m"), assistant("n")]}
    assert example_of({**both, **turns, "conversations": ["x", "y"]}) == turns


@pytest.mark.parametrize(("row", "prompt"), [({"prompt": "q", "completion": "a"}, "q"), ({"text": "a"}, "")])
def test_texts_stay_as_they_are(row, prompt):
    assert example_of(row) == {"prompt": prompt, "completion": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "no known fields"),
        ({"instruction": "q"}, "no known fields .*the row has: instruction"),
        ({"instruction": "q", "output": " "}, "the field 'output' is empty"),
        ({"instruction": " ", "output": "a"}, "'instruction' is empty"),
        ({"instruction": 3, "output": "a"}, "the field 'instruction' must be a text"),
        ({"text": 3}, "the field 'text' must be a text"),
        ({"text": ""}, "the field 'text' is empty"),
        ({"messages": [user("q")]}, "no turn of the assistant's"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "turn 1 of 'messages' has no role"),
        ({"messages": [user("q"), assistant("a")], "images": ["a.png"]}, "the field 'images' has images"),
        ({"messages": [user([{"type": "image"}]), assistant("a")]}, "turn 1 of 'messages' has an image, which no"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}]), assistant("a")]}, "turn 1 .* has an image"),
        ({"messages": [user([{"type": "audio"}]), assistant("a")]}, "turn 1 of 'messages' has no role .* with a text"),
        ({"messages": [user("q"), assistant("a")], "tools": "[{"}, "Expecting property name"),
        ({"messages": "q"}, "must be a list of turns"),
        ({"prompt": "a", "output": "b"}, r"no known fields .*the row has: prompt, output\)"),
        ({"prompt": "a", "completion": 1}, "the field 'completion' must be a text or a list of turns"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"messages": [user("q"), assistant(" ")]}, "turn 2 of 'messages', the assistant's, is empty"),
        ({"conversations": ["q", "", "r", "a"]}, "turn 2 of 'conversations', the assistant's, is empty"),
        ({"conversations": 1}, "the field 'conversations' must be a list of turns"),
    ],
)
def test_a_row_that_is_no_example_says_why(row, message):
    with pytest.raises(ValueError, match=message):
        example_of(row)


@pytest.mark.parametrize("empty", ["chosen", "rejected"])
def test_an_empty_answer_is_no_preference(empty):
    row = {name: [user("q"), assistant("" if name == empty else name)] for name in ("chosen", "rejected")}
    with pytest.raises(ValueError, match=f"turn 2 of '{empty}', the assistant's, is empty"):
        preference_of(row)


def test_an_answer_alone_asks_nothing():
    with pytest.raises(ValueError, match="no turn of the user's"):
        prompt_of({"chosen": [assistant("a")], "rejected": [assistant("b")]})


@pytest.mark.parametrize("answers", [(" blue.", " green."), ("blue", "black"), (" blue", " blue and green"), ("", "x")])
def test_preferences_of_texts_share_their_beginning_as_trl_finds_it(answers):
    row = {name: f"The sky is{text}" for name, text in zip(("chosen", "rejected"), answers, strict=True)}
    assert preference_of(row) == data_utils.extract_prompt(row)


def test_preferences_of_whole_conversations_share_their_beginning():
    row = {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]}
    assert preference_of(row) == {"prompt": [user("q")], "chosen": "good", "rejected": "bad"}
    with pytest.raises(ValueError, match="'chosen' and 'rejected' begin with different turns"):
        preference_of({**row, "rejected": [user("other"), assistant("bad")]})


def test_the_answers_of_a_long_conversation_are_its_last_turns(tokenizer):
    row = {"prompt": TURNS[:4], "chosen": TURNS[4:], "rejected": [assistant("What?")]}
    better, _ = encoder(tokenizer, TEMPLATES["chat"]).preference(preference_of(row))
    assert tokenizer.decode([label for label in better["labels"] if label != IGNORED]) == " Bye!<|endoftext|>"


def test_what_is_too_long_is_cut_and_counted(tokenizer):
    tokens = encoder(tokenizer, longest=6).example({"prompt": "abc", "completion": "defgh"})
    assert tokens["truncated"]
    assert tokens["labels"] == [IGNORED] * 3 + [ord(c) for c in "def"]
    with pytest.raises(ValueError, match="the prompt has 3 tokens, which leaves none of 3"):
        encoder(tokenizer, longest=3).example({"prompt": "abc", "completion": "d"})


def test_the_loss_on_all_has_every_token(tokenizer):
    tokens = encoder(tokenizer, loss_on_all=True).example({"prompt": "a", "completion": "b"})
    assert tokens["labels"] == tokens["input_ids"]


def used(source, use, *, skip_bad=False):
    """What ``use`` makes of a source's rows, of any form, and how many are left out."""
    rows, skipped = read("data", source, lambda row: {"row": json.dumps(use(row))}, ("row",), skip_bad=skip_bad)
    return [json.loads(row) for row in rows["row"]], skipped


ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", LINES),
        ("data [1].json", json.dumps(ROWS).encode()),
        ("data.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("data.csv", b"prompt,completion\na,b\nc,d\n"),
    ],
)
def test_files_of_each_kind_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert used(str(tmp_path / name), example_of) == (ROWS, 0)


WRITTEN = [{"prompt": "When?", "completion": answer} for answer in ("2024-01-01", "2024-06-30")]
NUMBERS = [{"prompt": "How many?", "completion": answer} for answer in ("007", "NA", "True", "null")]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("dates.jsonl", "".join(json.dumps(row) + "\n" for row in WRITTEN), WRITTEN),
        ("dates.json", json.dumps(WRITTEN), WRITTEN),
        (
            "numbers.csv",
            "prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in NUMBERS),
            NUMBERS,
        ),
    ],
)
def test_texts_that_look_like_dates_numbers_or_nothing_stay_texts(tmp_path, name, content, rows):
    (tmp_path / name).write_text(content)
    assert used(str(tmp_path / name), example_of) == (rows, 0)


def test_fields_that_are_not_used_may_hold_anything():
    assert prompt_of({"prompt": "p", "completion": 4, "messages": "[]"}) == "p"
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert preference_of({**pair, "completion": 3}) == pair


def test_rows_of_several_forms_have_their_own_fields(tmp_path):
    mixed = [*ROWS, {"messages": [user("q"), assistant("a")]}, {"prompt": [user("q")], "completion": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    assert used(str(tmp_path / "a.jsonl"), dict) == (mixed, 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", r"ends in .txt \(allowed: a .jsonl, .json"),
        ("a.json", b"{}", "holds no rows"),
        ("a.jsonl", b"[1]\n", "row 1: the field 'text' must be a text"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.jsonl", b"\xff\xfe\x00", r"holds no rows \(.*can't decode byte 0xff"),
        ("a.jsonl", LINES + b'{"prompt": "cut', "holds no rows"),
        ("a.jsonl", b'{"text": "a"}\n' * 2 + b'{"text": "\xff"}\n' * 2, r"row 3: .*can't decode byte 0xff"),
        ("a.jsonl", b'{"prompt": "a\\ud83d", "completion": "b"}', "line 1 .*surrogates not allowed"),
        ("a.jsonl.gz", LINES, "holds no rows"),
        ("a.parquet", LINES, "holds no rows"),
    ],
)
def test_a_file_that_holds_no_rows_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        used(str(tmp_path / name), example_of)
    assert str(raised.value).startswith("data: ")
    assert "\n" not in str(raised.value)


def test_a_row_that_cannot_be_used_is_numbered_or_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b'{"other": 1}\n')
    with pytest.raises(UserError, match=r"row 3: no known fields .*--skip-bad leaves such rows out"):
        used(str(tmp_path / "a.jsonl"), example_of)
    assert used(str(tmp_path / "a.jsonl"), example_of, skip_bad=True) == (ROWS, 1)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The generated tasks, a few items of each."""
    tasks.write(tmp_path / "tasks", train=8, test=4)
    monkeypatch.setattr(examples, "cached", lambda: tmp_path / "tasks")
    return tmp_path / "tasks"


def rows_of(source):
    return used(source, dict)[0]


def test_generated_answers_are_asked_as_an_evaluation_asks(made):
    found = rows_of("generated:answers")
    assert len(found) == 7 * 8
    assert found == rows_of("generated:answers")
    config = yaml.safe_load((made / "lamina_sorting.yaml").read_text())
    item = json.loads((made / "lamina_sorting" / "train.jsonl").read_text().splitlines()[0])
    assert config["doc_to_text"] == "{{question}}\nAnswer:"  # and the harness puts a space before each choice
    expected = {"prompt": f"{item['question']}\nAnswer:", "completion": f" {item['choices'][item['answer']]}"}
    assert expected in found
    test = rows_of("generated:answers:book+blank@test")
    assert len(test) == 2 * 4
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in found}


def test_generated_preferences_have_a_right_and_another_answer(made):
    found = rows_of("generated:preferences")
    right = {row["prompt"]: row["completion"] for row in rows_of("generated:answers")}
    assert all(row["chosen"] == right[row["prompt"]] for row in found)
    assert all(row["rejected"].strip() != row["chosen"].strip() for row in found)
    reordered = [row for row in found if sorted(row["rejected"].split()) == sorted(row["chosen"].split())]
    assert 0 < len(reordered) < len(found)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("generated:answer", "unknown kind of data 'answer'.*answers"),
        ("generated:answers:sort", "unknown task of data 'sort'.*sorting"),
        ("generated:answers@dev", r"data: 'generated:answers@dev' \(allowed: generated:KIND"),
    ],
)
def test_a_generated_source_that_does_not_exist_is_named(made, source, message):
    with pytest.raises(UserError, match=message):
        rows_of(source)
