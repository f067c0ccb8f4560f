"""Encoded rows are those of a plain loop, by however many processes, and do not lie in memory."""

import hashlib
import os
import signal
import tracemalloc

import pytest
from lab.posttraining.tiny import common, preferences, sorting, write_model, write_rows

from lamina.errors import UserError
from lamina.lab.posttraining import examples
from lamina.lab.posttraining.examples import TEMPLATES, read
from lamina.lab.posttraining.pairs import DirectPreferences, RewardModeling
from lamina.lab.posttraining.sft import SupervisedFineTuning
from lamina.lab.posttraining.tuning import fingerprint


def turns(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


TEXTS = [{"text": f"No turns {n}"} for n in range(5)]
TURNS = [{"messages": turns(f"q{n}", "a", "r", "b")} for n in range(6)]
MORE = [{"prompt": turns(f"q{n}"), "completion": turns("", "a")[1:]} for n in range(5)]
PAIRS = preferences(7)
WHOLE = [{"chosen": turns(f"q{n}", "a"), "rejected": turns(f"q{n}", "b")} for n in range(6)]
MARGINS = [{**pair, "margin": n / 4} for n, pair in enumerate(preferences(4, seed=1))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base") / "model", positions=512)


@pytest.fixture
def several(monkeypatch):
    """Three processes, and batches of two rows."""
    monkeypatch.setattr(examples, "cores", lambda: 3)
    monkeypatch.setattr(examples, "BATCH", 2)
    monkeypatch.setattr(examples, "ALONE", 4)


def stage_of(kind, base, data, folder, **changed):
    stage = kind()
    stage.settings = kind.record(**{**common(base, data, folder), **changed})
    stage.read_examples()
    return stage


def hashed(*parts):
    """The fingerprint as runs have it in their checkpoints since before rows were kept in Arrow."""
    digest = hashlib.sha256()
    for row in (row for part in parts for row in part):
        digest.update(repr(sorted(row.items())).encode())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (SupervisedFineTuning, [*TEXTS, *sorting(6), *TURNS, *MORE]),
        (DirectPreferences, [*PAIRS, *WHOLE]),
        (RewardModeling, [*PAIRS, *MARGINS, *WHOLE]),
    ],
)
def test_rows_are_encoded_as_a_plain_loop_does(kind, rows, base, tmp_path, several, monkeypatch):
    """Their template is the one that the first row which needs one decides, also in another process."""
    data, template = write_rows(tmp_path / "rows.jsonl", rows), {} if kind.kind == "sft" else {"template": "chat"}
    loop = stage_of(kind, base, write_rows(tmp_path / "few.jsonl", rows[:4]), tmp_path, **template)
    naive = [loop.encoded(row) for row in rows]
    parts = []
    monkeypatch.setattr("lamina.lab.posttraining.tuning.fingerprint", lambda *given: parts.extend(given) or "")
    stage = stage_of(kind, base, data, tmp_path, **template)
    train, held_out = ([{n: v for n, v in row.items() if v is not None} for row in part] for part in parts)
    assert loop.encoder.template == stage.encoder.template == TEMPLATES["alpaca" if kind.kind == "sft" else "chat"]
    assert [row for row in naive if row in train] == train
    assert [row for row in naive if row in held_out] == held_out
    assert len(train) + len(held_out) == len(rows)
    assert fingerprint(*parts) == hashed(train, held_out)
    assert stage.notes["examples"] == len(train)
    assert stage.inputs.tolist()[0] == max((row[kind.monitored] for row in held_out), key=len)[: stage.inputs.shape[1]]
    if kind.kind == "reward":
        margins = [row.get("margin", 0.0) for row in train]
        assert list(stage.train["margin"]) == margins
        assert any(margins)


def test_a_run_that_began_before_rows_were_in_arrow_has_the_same_hash(base, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [*MARGINS, *PAIRS])
    assert (
        stage_of(RewardModeling, base, data, tmp_path).identity.data
        == "bfc1d9dfe9a56f6ecffc49fb4c16fb1942da2dc51de627c59779a35fe94c2432"
    )


def numbered(row):
    if row["n"] in (8, 9, 13):
        raise ValueError("bad")
    return {"row": f"{row['n']} {os.getpid()}"}


def test_the_first_bad_row_is_named_whichever_process_meets_one_first(tmp_path, several, monkeypatch, caplog):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    data = str(write_rows(tmp_path / "rows.jsonl", [{"n": n} for n in range(1, 24)]))
    with pytest.raises(UserError, match="row 8: bad"):
        read("data", data, numbered, ("row",), skip_bad=False)
    rows, skipped = read("data", data, numbered, ("row",), skip_bad=True)
    found = [row.split() for row in rows["row"]]
    assert [int(number) for number, _ in found] == [n for n in range(1, 24) if n not in (8, 9, 13)]
    assert skipped == 3
    assert "3 of 23 rows left out" in caplog.text
    assert 1 < len({process for _, process in found}) <= 4, "this process and up to three others"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_text_that_is_not_utf_8_is_named_by_several_processes(tmp_path, several):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' * 10 + b'{"text": "\xff"}\n' * 2)
    with pytest.raises(UserError, match=r"row 11: .*can't decode byte 0xff.*allowed: UTF-8"):
        read("data", str(tmp_path / "a.jsonl"), lambda row: {"row": row["text"]}, ("row",), skip_bad=True)


def test_what_a_prompt_is_warned_of_is_logged_once(base, tmp_path, several, caplog):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    data = write_rows(tmp_path / "rows.jsonl", [*TEXTS, *MORE])
    stage_of(SupervisedFineTuning, base, data, tmp_path, template=str(tmp_path / "t.jinja"))
    assert caplog.text.count("only where no answer follows") == 1


def test_a_process_that_is_killed_ends_the_job_in_one_line(tmp_path, several):
    here = os.getpid()

    def killed(row):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"row": ""}

    with pytest.raises(UserError, match=r"^data: .*rows.jsonl': a process that encoded its rows was killed"):
        read("data", str(write_rows(tmp_path / "rows.jsonl", PAIRS)), killed, ("row",), skip_bad=False)


def test_encoded_rows_do_not_lie_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "cores", lambda: 1)  # else other processes have a part of it
    rows = [{"n": n} for n in range(8000)]
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    peaks = []

    def use(row):
        return {"input_ids": list(range(row["n"], row["n"] + 60))}

    for encode in (
        lambda: read("data", data, use, ("input_ids",), skip_bad=False),
        lambda: [use(row) for row in rows],
    ):
        kept = [encode()]  # what is imported and cached stays
        kept.clear()
        tracemalloc.start()
        kept.append(encode())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < peaks[1] / 5
