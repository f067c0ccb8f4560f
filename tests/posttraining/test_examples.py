"""Rows of every format become the tokens and labels that TRL itself would make of them."""

import json
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset

from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.evaluation import generated as tasks
from lamina.posttraining import rows
from lamina.posttraining.examples import (
    IGNORED,
    TEMPLATES,
    ExampleEncoder,
    example_of,
    preference_of,
    prompt_of,
    render,
)

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


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_of_a_conversation_is_a_label_with_its_end(tokenizer, name):
    tokens = encoder(tokenizer, TEMPLATES[name]).example({"messages": TURNS})
    learned = tokenizer.decode([label for label in tokens["labels"] if label != IGNORED])
    end = tokenizer.eos_token
    assert [part.strip() for part in learned.split(end)] == ["Yes.", "Bye!", ""]


def test_alpacas_template_is_the_published_one(tokenizer):
    """As in LLM-Adapters' generate_prompt, written out."""
    row = {"instruction": "Sort.", "input": "b a", "output": "a b"}
    text = render(tokenizer, TEMPLATES["alpaca"], example_of(row)["messages"], answers=False)
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSort.\n\n### Input:\nb a\n\n"
        "### Response:\na b<|endoftext|>"
    )


def test_adam_minis_template_is_its_own(tokenizer):
    text = render(tokenizer, TEMPLATES["human"], [{"role": "user", "content": "Hi"}], answers=True)
    assert text == " Human: Hi Assistant:"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": ["q", "a"]},
        {"instruction": "q", "output": "a"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    ],
)
def test_formats_of_the_same_conversation_are_the_same(row):
    expected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert [dict(turn) for turn in example_of(row)["messages"]] == expected
    assert [dict(turn) for turn in prompt_of(row)] == expected[:1]


def test_texts_stay_as_they_are():
    assert example_of({"prompt": "q", "completion": "a"}) == {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no known fields"),
        ({"instruction": "q"}, "no field 'output'"),
        ({"instruction": "q", "output": " "}, "'output' is empty"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no turn of the assistant's"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "turn 1 of 'messages' has no role"),
        ({"messages": "q"}, "must be a list of turns"),
        ({"prompt": "a"}, r"no field 'completion' \(the row has: prompt\)"),
        ({"prompt": "a", "output": "b"}, r"no field 'completion' \(the row has: prompt, output\)"),
        ({"prompt": "a", "completion": 1}, "the field 'completion' must be a text"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"messages": [user("q"), assistant(" ")]}, "turn 2 of 'messages', the assistant's, is empty"),
        ({"conversations": ["q", "", "r", "a"]}, "turn 2 of 'conversations', the assistant's, is empty"),
        (
            {"prompt": [user("q")], "completion": [assistant("")]},
            r"turn 2 of 'prompt \+ completion', the assistant's, is empty",
        ),
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


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_may_begin_with_the_assistant(tokenizer, name):
    turns = [assistant("Welcome."), user("Bye"), assistant("Bye!")]
    tokens = encoder(tokenizer, TEMPLATES[name]).example(example_of({"messages": turns}))
    learned = tokenizer.decode([label for label in tokens["labels"] if label != IGNORED])
    assert [part.strip() for part in learned.split(tokenizer.eos_token)] == ["Welcome.", "Bye!", ""]


def test_an_answer_alone_asks_nothing():
    with pytest.raises(ValueError, match="no turn of 'chosen' before its answer"):
        prompt_of({"chosen": [assistant("a")], "rejected": [assistant("b")]})


def test_preferences_of_whole_conversations_share_their_beginning():
    question = {"role": "user", "content": "q"}
    answers = [{"role": "assistant", "content": text} for text in ("good", "bad")]
    preference = preference_of({"chosen": [question, answers[0]], "rejected": [question, answers[1]]})
    assert preference == {"prompt": [question], "chosen": "good", "rejected": "bad"}
    other = [{"role": "user", "content": "other"}, answers[1]]
    with pytest.raises(ValueError, match="differ before their last turn"):
        preference_of({"chosen": [question, answers[0]], "rejected": other})


def test_what_is_too_long_is_cut_and_counted(tokenizer):
    tokens = encoder(tokenizer, longest=6).example({"prompt": "abc", "completion": "defgh"})
    assert tokens["truncated"]
    assert tokens["labels"] == [IGNORED] * 3 + [ord(c) for c in "def"]
    with pytest.raises(ValueError, match="the prompt has 3 tokens, which leaves none of 3"):
        encoder(tokenizer, longest=3).example({"prompt": "abc", "completion": "d"})


def test_the_loss_on_all_has_every_token(tokenizer):
    tokens = encoder(tokenizer, loss_on_all=True).example({"prompt": "a", "completion": "b"})
    assert tokens["labels"] == tokens["input_ids"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_files_of_each_kind_are_read(tmp_path, suffix):
    import gzip

    written = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    text = json.dumps(written) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in written)
    path = tmp_path / f"data{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    assert rows.read("data", str(path), example_of, skip_bad=False).items == [example_of(row) for row in written]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    """JSON can hold one, as where a text was cut inside an emoji; no tokenizer takes it."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\\ud83d", "completion": "b\\ud83d", "n\\ud83d": 1}\n')
    use = rows.read("data", str(tmp_path / "a.jsonl"), example_of, skip_bad=False)
    assert use.items == [{"prompt": "a\ufffd", "completion": "b\ufffd"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", r"ends in .txt \(allowed: a .jsonl or .json file"),
        ("a.json", b"{}", "holds no list of rows"),
        ("a.jsonl", b"[1]\n", "line 1: not a JSON object"),
        ("a.jsonl", b"\n\n", "has no usable row"),
        ("a.jsonl", b"\xff\xfe\x00", "is binary or not UTF-8"),
    ],
)
def test_a_file_that_holds_no_rows_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows.read("data", str(tmp_path / name), example_of, skip_bad=False)


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("bad", ["9" * 5000, DEEP])
def test_a_row_that_python_cannot_hold_is_numbered_or_skipped(tmp_path, bad):
    good = json.dumps({"prompt": "a", "completion": "b"})
    lines = [good, '{"prompt": "a", "completion": "b", "n": ' + bad + "}"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"line 2: not JSON.*--skip-bad leaves such lines out"):
        rows.read("data", str(path), example_of, skip_bad=False)
    found = rows.read("data", str(path), example_of, skip_bad=True)
    assert (len(found.items), found.skipped) == (1, 1)


def test_a_file_too_deep_for_python_is_one_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "a", "completion": "b", "n": ' + DEEP + "}]")
    with pytest.raises(UserError, match="not JSON"):  # how deep is too deep, the caller's own depth decides
        rows.read("data", str(tmp_path / "a.json"), example_of, skip_bad=False)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The generated tasks, a few items of each."""
    tasks.write(tmp_path / "tasks", train=8, test=4)
    monkeypatch.setattr(rows, "cached", lambda: tmp_path / "tasks")
    return tmp_path / "tasks"


def test_generated_answers_are_asked_as_an_evaluation_asks(made, tokenizer):
    found = rows.read("data", "generated:answers", dict, skip_bad=False).items
    assert len(found) == 7 * 8
    assert found == rows.read("data", "generated:answers", dict, skip_bad=False).items
    config = yaml.safe_load((made / "lamina_sorting.yaml").read_text())
    (right,) = {row["completion"] for row in found if row["prompt"].startswith("Sort the letters: ")} & {
        f" {item['choices'][item['answer']]}" for item in rows._items(made / "lamina_sorting" / "train.jsonl")[:1]
    }
    assert sorted(right.split()) == right.split()
    assert config["doc_to_text"] == "{{question}}\nAnswer:"  # and the harness puts a space before each choice
    assert all(row["prompt"].endswith("\nAnswer:") and row["completion"].startswith(" ") for row in found)
    assert example_of(found[0]) == found[0]
    test = rows.read("data", "generated:answers:book+blank@test", dict, skip_bad=False).items
    assert len(test) == 2 * 4
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in found}


def test_generated_preferences_have_a_right_and_another_answer(made):
    found = rows.read("data", "generated:preferences", dict, skip_bad=False).items
    right = {
        row["prompt"]: row["completion"] for row in rows.read("d", "generated:answers", dict, skip_bad=False).items
    }
    assert all(row["chosen"] == right[row["prompt"]] for row in found)
    assert all(row["rejected"].strip() != row["chosen"].strip() for row in found)
    reordered = [row for row in found if sorted(row["rejected"].split()) == sorted(row["chosen"].split())]
    assert 0 < len(reordered) < len(found)
    assert all(preference_of(row) for row in found)


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
        rows.read("data", source, dict, skip_bad=False)
