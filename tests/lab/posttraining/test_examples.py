"""Files and rows of every kind become TRL's forms; those of no use are named or left out."""

import gzip
import json
from types import SimpleNamespace

import pytest
import yaml
from lab.posttraining.tiny import common, preferences, sorting, write_rows

from lamina.data.sources import hub_datasets
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.evaluation import generated as tasks
from lamina.lab.posttraining import examples
from lamina.lab.posttraining.examples import (
    IGNORED,
    PAIR_FORMS,
    SFT_FORMS,
    TEMPLATES,
    conform,
    generated_rows,
    load,
    prompts,
    training_template,
)
from lamina.lab.posttraining.pairs import DirectPreferences
from lamina.lab.posttraining.sft import SupervisedFineTuning
from lamina.modeling.parts import patched
from lamina.modeling.processes import Processes

datasets = pytest.importorskip("datasets")

TURNS = [{"role": "system", "content": "Be brief."}]
TURNS += [{"role": "user", "content": "Hällo?"}, {"role": "assistant", "content": "Yes."}]
TURNS += [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye!"}]
ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def made_of(rows, forms=SFT_FORMS, turns=False):
    data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    conformed, form = conform(data, forms, turns=turns)
    return [{name: row[name] for name in form} for row in conformed]


def stage_of(base, rows, folder, kind=SupervisedFineTuning, **changed):
    data = rows if isinstance(rows, str) else str(write_rows(folder / "rows.jsonl", rows))
    stage = kind()
    settings = kind.record.from_dict({**common(base, data, folder / "run"), **changed})
    stage.check(SimpleNamespace(settings=settings), Processes())
    stage.read_examples()
    return stage


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", LINES),
        ("data [1].json", json.dumps(ROWS).encode()),
        ("data.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("data.csv", b"prompt,completion\na,b\nc,d\n"),
    ],
)
def test_files_of_each_kind_and_folders_are_read(tmp_path, name, content):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / name).write_bytes(content)
    assert list(load("data", str(tmp_path / "rows" / name))) == ROWS
    assert list(load("data", str(tmp_path / "rows"))) == ROWS


@pytest.mark.parametrize("source", ["trl-lib/Capybara", "hf:trl-lib/Capybara"])
def test_a_name_of_the_hub_is_written_as_trls_users_write_it(source, monkeypatch):
    monkeypatch.setattr(hub_datasets, "load", lambda parsed: [parsed.field, parsed.name])
    assert load("data", source) == ["data", "trl-lib/Capybara"]


def test_texts_of_a_csv_file_that_look_like_numbers_or_nothing_stay_texts(tmp_path):
    rows = [{"prompt": "How many?", "completion": answer} for answer in ("007", "NA", "True", "null")]
    (tmp_path / "numbers.csv").write_text("prompt,completion\n" + "".join(f"{','.join(r.values())}\n" for r in rows))
    assert list(load("data", str(tmp_path / "numbers.csv"))) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", r"the name ends in .txt\. Give a .jsonl, .json"),
        ("a.jsonl", b"", "Lamina cannot read .*: the source has no rows"),
        ("a.jsonl", b"\n\n", "Lamina cannot read"),
        ("a.jsonl", b"\xff\xfe\x00", "Lamina cannot read .*the file is binary or not UTF-8"),
        ("a.jsonl", LINES + b'{"prompt": "cut', "Lamina cannot read .*line 3 is not JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(LINES, mtime=0)[:-20],
            r"Lamina cannot read .*the file is damaged \(Compressed file ended before",
        ),
        ("a.jsonl.gz", LINES, r"Lamina cannot read .*the file ends in \.gz but is not gzip"),
        ("a.parquet", LINES, "Lamina cannot read"),
    ],
)
def test_a_file_that_holds_no_rows_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        load("data", str(tmp_path / name))
    assert str(raised.value).startswith("data: ")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_column_that_begins_with_nulls_may_hold_texts_after_ten_megabytes(tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": "-" * 2800, "note": None} for i in range(4200)]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, *({**row, "note": "a text"} for row in rows[:10])])
    assert data.stat().st_size > 11e6
    assert load("data", str(data))[4205]["note"] == "a text"


ASKED = {"prompt": [user("q")], "completion": [assistant("a")]}


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": ["q", "a"]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": [user("q")], "completion": "a"},
        {"prompt": "q", "completion": [assistant("a")]},
        ASKED,
    ],
)
def test_a_question_with_its_answer_is_one_form(row):
    assert made_of([row, row]) == [ASKED] * 2


def test_other_forms_become_trls():
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert made_of([{"conversations": talk}]) == [{"messages": [user("q"), assistant("a")]}]
    further = {"instruction": "q", "input": "b a", "output": "a b"}
    assert made_of([further])[0]["prompt"] == [user("q\n\n### Input:\nb a")]
    assert made_of([{"conversations": ["q", "a", "r", "b", "s"]}]) == [
        {"prompt": [user("q"), assistant("a"), user("r")], "completion": [assistant("b")]}
    ]
    assert made_of([{"prompt": "q", "completion": "a"}]) == [{"prompt": "q", "completion": "a"}]
    assert made_of([{"prompt": "q", "completion": "a"}], turns=True) == [ASKED]
    mixed = [{"prompt": "q", "completion": "a"}, {"prompt": [user("q")], "completion": "a"}]
    assert made_of(mixed) == [ASKED] * 2


def test_of_columns_of_several_forms_a_prompt_with_its_completion_counts_then_messages_then_texts():
    row = {"prompt": "p", "instruction": "q", "output": "a"}
    row |= {"text": "t", "messages": TURNS, "conversations": ["x", "y"]}
    assert made_of([{**row, "completion": "b"}]) == [{"prompt": "p", "completion": "b"}]
    assert made_of([row]) == [{"messages": TURNS}]
    assert made_of([{"text": "t", "instruction": "q", "output": "a"}]) == [{"text": "t"}]
    assert made_of([{"prompt": "p", "instruction": "q", "output": "a"}])[0]["prompt"] == [user("q")]


PAIR = {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]}


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": "q", "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": [user("q")], "chosen": "good", "rejected": "bad"},
        {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {"prompt": "q", "chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {"instruction": "q", "chosen": "good", "rejected": "bad"},
    ],
)
def test_a_pair_of_turns_is_one_form(row):
    assert made_of([row, row], PAIR_FORMS) == [PAIR] * 2


@pytest.mark.parametrize(
    "row",
    [
        ASKED,
        {"prompt": [user("q")]},
        {"messages": [user("q"), assistant("a")]},
        {"conversations": ["q", "a"]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "output": "a"},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
    ],
)
def test_a_prompt_is_found_in_every_form_with_its_whole_row(row):
    (found,) = prompts(datasets.Dataset.from_list([row], on_mixed_types="use_json"), turns=False)
    assert found["prompt"] == [user("q")]
    assert json.loads(found["row"]) == row


def test_a_prompt_that_is_a_text_stays_one_unless_asked():
    rows = datasets.Dataset.from_list([{"prompt": "q", "completion": "a"}])
    assert [next(iter(prompts(rows, turns=turns)))["prompt"] for turns in (False, True)] == ["q", [user("q")]]


GOOD = [{"prompt": f"q{n}", "completion": " a"} for n in range(4)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "a", "completion": ""}, "row 5: the field 'completion' is ''"),
        ({"prompt": "a"}, "row 5: the field 'completion' is missing"),
        ({"prompt": "a", "completion": 3}, r"row 5: the field 'completion', turn 1 is {.*'content': 3"),
        ({"prompt": "x" * 600, "completion": "a"}, "row 5: the first 512 tokens contain no token to train on"),
        (
            {"prompt": [user("q")], "completion": [assistant("")]},
            r"row 5: the field 'completion', turn 1 \(assistant\) has an empty content",
        ),
        (
            {"prompt": [user("q")], "completion": [{"content": "a"}]},
            "row 5: the field 'completion', turn 1 is {'content",
        ),
        (
            {"prompt": [user("q")], "completion": [user("a")]},
            "row 5: the field 'completion' has no turn with the role 'assistant'",
        ),
        (
            {"prompt": [user("q")], "completion": [assistant("a"), {"role": "asistant", "content": "a"}]},
            "row 5: the field 'completion', turn 2: unknown role 'asistant'; did you mean 'assistant'",
        ),
        ({"prompt": [], "completion": "a"}, "row 5: the field 'prompt' is missing"),
        (
            {"prompt": [{"role": "user", "content": 5}], "completion": "a"},
            r"row 5: the field 'prompt', turn 1 is {.*: 5",
        ),
        (
            {"prompt": "q", "completion": "a", "tools": "[{"},
            r"row 5: TRL cannot prepare this row \(JSONDecodeError: Expecting",
        ),
    ],
)
def test_a_row_of_no_use_is_numbered_or_left_out(bad, message, base, tmp_path):
    rows = [*GOOD, bad, *GOOD[:2]]
    with pytest.raises(UserError, match=f"^data: .*{message}.*add --skip-bad to skip such rows"):
        stage_of(base, rows, tmp_path)
    stage = stage_of(base, rows, tmp_path, skip_bad=True)
    assert stage.notes["skipped"] == 1
    assert stage.notes["examples"] + stage.notes["held_out"] == 6


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x"}], r"the rows have no form that Lamina knows \(found: body\)\. .*conversations, or instruction"),
        (
            [{"instruction": "x", "input": "", "response": "y"}],
            r"\(found: input, instruction, response; 'instruction' needs 'output'\)",
        ),
        ([{"prompt": "x", "answer": "y"}], r"\(found: answer, prompt; 'prompt' needs 'completion'\)"),
        ([{"messages": [user("q")]}] * 2, "row 1: the field 'messages' has no turn with the role 'assistant'"),
        ([{"messages": TURNS, "images": ["a.png"]}], "the column 'images' has images"),
        ([{"text": ""}] * 2, "row 1: the field 'text' is ''"),
        ([{"prompt": "When?", "completion": "2024-01-01"}] * 2, "row 1: the field 'completion' is datetime"),
    ],
)
def test_rows_that_are_no_examples_say_why(rows, message, base, tmp_path):
    with pytest.raises(UserError, match=f"^data: .*{message}") as raised:
        stage_of(base, rows, tmp_path)
    assert "\n" not in str(raised.value)
    if "row 1" in message:
        with pytest.raises(UserError, match="has no usable row"):
            stage_of(base, rows, tmp_path, skip_bad=True)


def test_a_role_that_the_template_names_is_known(base, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ 'B: ' if m.role == 'bot' else '' }}{{ m.content }}{% endfor %}"
    )
    rows = [{"messages": [user("q"), {"role": "bot", "content": "a"}]}] * 3
    assert stage_of(base, rows, tmp_path, template=str(tmp_path / "own.jinja")).notes["skipped"] == 0
    with pytest.raises(UserError, match="row 1: the field 'messages', turn 2: unknown role 'bot'"):
        stage_of(base, rows, tmp_path)


def test_tokens_of_the_loss_are_counted_by_their_kind(base, tmp_path):
    talk = [{"messages": TURNS}] * 3
    every = stage_of(base, talk, tmp_path).notes
    assert (every["loss_on"], every["loss_tokens"]) == (
        "all tokens",
        sum(map(len, stage_of(base, talk, tmp_path).train["input_ids"])),
    )
    marked = stage_of(base, talk, tmp_path, template="chat", trl={"assistant_only_loss": True}).notes
    assert marked["loss_on"] == "the assistant's turns"
    assert marked["loss_tokens"] < every["loss_tokens"]
    assert stage_of(base, GOOD, tmp_path).notes["loss_on"] == "the completions"
    whole = stage_of(base, GOOD, tmp_path, trl={"completion_only_loss": False}).notes
    assert whole["loss_on"] == "all tokens"


def test_a_template_without_marks_is_no_fault_of_a_row(base, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    more = {"template": str(tmp_path / "own.jinja"), "trl": {"assistant_only_loss": True}}
    with pytest.raises(UserError, match=r"^trl\.assistant_only_loss: the chat template does not mark") as raised:
        stage_of(base, [{"messages": TURNS}] * 3, tmp_path, **more)
    assert "skip-bad" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("rows.jsonl", '{"text": "a"}\n\n{"text": "b"}\n{"text": "c\n', 4),
        ("rows.json", '[{"text": "a"},\n{"text": "b"},\n{"text": }]', 3),
    ],
)
def test_a_line_that_is_not_json_is_named_as_an_editor_counts(name, text, line, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"rows.*: line {line} is not JSON .*, column [0-9]+"):
        load("data", str(tmp_path / name))


def test_answers_that_are_the_same_are_no_pair(base, tmp_path):
    rows = [*preferences(4), {"prompt": "a", "chosen": " b", "rejected": " b"}]
    with pytest.raises(UserError, match="row 5: the two answers are equal"):
        stage_of(base, rows, tmp_path, DirectPreferences)


def test_several_processes_prepare_the_same_rows(base, tmp_path):
    rows = sorting(40)
    alone = stage_of(base, rows, tmp_path)
    several = stage_of(base, rows, tmp_path, trl={"dataset_num_proc": 2})
    assert list(several.train) == list(alone.train)
    assert several.identity.data == alone.identity.data


def test_what_is_too_long_is_cut_and_counted(base, tmp_path):
    stage = stage_of(base, [{"prompt": "abc", "completion": "defgh"}] * 4, tmp_path, sequence_length=6)
    assert stage.train[0]["labels"] == [IGNORED] * 3 + [ord(c) for c in "def"]
    assert stage.notes["truncated"] == 4


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packs_that_split_long_rows_still_cut_the_held_out_rows(base, tmp_path, strategy):
    rows = [{"prompt": "abc", "completion": "defgh"}] * 4
    stage = stage_of(base, rows, tmp_path, sequence_length=6, packing=True, trl={"packing_strategy": strategy})
    assert len(stage.held_out[0]["input_ids"]) == 6
    assert stage.notes["truncated"] == stage.notes["held_out"] == 1


def test_the_first_rows_with_turns_decide_the_template(base, tmp_path):
    assert stage_of(base, sorting(4), tmp_path).start.tokenizer.chat_template == TEMPLATES["alpaca"]
    assert stage_of(base, [ASKED] * 4, tmp_path).start.tokenizer.chat_template == TEMPLATES["chat"]
    assert stage_of(base, GOOD, tmp_path).start.tokenizer.chat_template is None
    with pytest.raises(UserError, match="conversations need a chat template"):
        stage_of(base, [PAIR] * 4, tmp_path, DirectPreferences)


@pytest.mark.parametrize("turns", [TURNS, TURNS[1:]], ids=["system", "usual"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_of_a_conversation_is_a_label_with_its_end_if_trl_is_told_so(name, turns, base, tmp_path):
    stage = stage_of(base, [{"messages": turns}] * 2, tmp_path, template=name, trl={"assistant_only_loss": True})
    tokenizer, row = stage.start.tokenizer, stage.train[0]
    learned = tokenizer.decode([label for label in row["labels"] if label != IGNORED])
    assert [part.strip() for part in learned.split(tokenizer.eos_token)] == ["Yes.", "Bye!", ""]
    assert tokenizer.chat_template == TEMPLATES[name], "without marks, for other programs"
    assert row["input_ids"] == tokenizer.apply_chat_template(turns)["input_ids"]
    assert "{% generation %}" in training_template(tokenizer)


def test_alpacas_template_is_the_published_one():
    """As in LLM-Adapters' generate_prompt, written out."""
    tokenizer = load_tokenizer("bytes")
    (row,) = made_of([{"instruction": "Sort.", "input": "b a", "output": "a b"}])
    turns = [*row["prompt"], *row["completion"]]
    text = tokenizer.apply_chat_template(turns, chat_template=TEMPLATES["alpaca"], tokenize=False)
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSort.\n\n### Input:\nb a\n\n"
        "### Response:\na b<|endoftext|>"
    )


def test_adam_minis_template_is_its_own():
    text = load_tokenizer("bytes").apply_chat_template([user("Hi")], chat_template=TEMPLATES["human"], tokenize=False)
    assert text == " Human: Hi Assistant:"


def test_a_preset_keeps_its_options_beside_the_users():
    given = {"preset": "commonsense170k", "data": "a.jsonl", "trl": {"loss_type": "dft"}}
    record = SupervisedFineTuning.record.from_dict(given)
    assert record.trl == {"completion_only_loss": False, "loss_type": "dft"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The generated tasks, a few items of each."""
    folder = tmp_path_factory.mktemp("tasks")
    tasks.write(folder, train=8, test=4)
    with patched(examples, cached=lambda: folder):
        yield folder


def rows_of(source):
    return list(generated_rows("data", source))


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
        ("generated:answer", "data: unknown kind 'answer'.*answers"),
        ("generated:answers:sort", "data: unknown task 'sort'.*sorting"),
        ("generated:answers@dev", r"data: 'generated:answers@dev'\. Write generated:KIND"),
    ],
)
def test_a_generated_source_that_does_not_exist_is_named(source, message):
    with pytest.raises(UserError, match=message):
        rows_of(source)
