# ruff: noqa: E501  (files in a line each)
"""Steps and losses are read as people write them: with separators of thousands, decimal commas, suffixes, and not at
all where a comma may be either.
"""

import gzip
import json
import math
import random
import warnings

import pandas as pd
import pytest

import lamina
from lamina.errors import UserError
from lamina.reports.diagnosis import gather
from lamina.reports.histories import import_history, read_history
from lamina.reports.histories.numbers import with_commas
from lamina.reports.records import read_table
from lamina.training.monitor.writers import LOSS

WHOLE = (-1, "model", "all")


def losses(path):
    steps, values = read_history(path).series[WHOLE, LOSS]
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def course(records=40):
    draw = random.Random(0)
    return {step: 2 + 3 * math.exp(-step / 10) + draw.gauss(0, 0.02) for step in range(1, records + 1)}


@pytest.mark.parametrize(
    ("written", "step"),
    [
        ("1.0e+02", 100),
        ("100.0", 100),
        ("1,000", 1000),
        ("12k", 12_000),
        ("1.5k", 1500),
        ("100/2000", 100),
        ("0100", 100),
    ],
)
def test_a_step_is_read_whole(tmp_path, written, step):
    path = tmp_path / "train.log"
    path.write_text(f"step {written}: loss 2.31, lr 3e-4\nstep {written}: loss 2.30, lr 3e-4\nstep 99,999: loss 2.25\n")
    assert losses(path) == {step: 2.3, 99_999: 2.25}


def decimal(number, digits=4):
    return f"{number:.{digits}f}".replace(".", ",")


FILES = {
    "a log": lambda: "".join(f"step {step} loss: {decimal(loss, 2)}\n" for step, loss in course().items()),
    "a log with 3 digits": lambda: "step 0 loss: 0,931\n" + "".join(f"step {step} loss: {decimal(loss, 3)}\n" for step, loss in course().items()),
    "semicolons": lambda: "step;loss;note\n" + "".join(f"{step};{decimal(loss)};x\n" for step, loss in course().items()),
    "quotes": lambda: "step,loss\n" + "".join(f'{step},"{decimal(loss)}"\n' for step, loss in course().items()),
    "tabs": lambda: "step\tloss\n" + "".join(f"{step}\t{decimal(loss)}\n" for step, loss in course().items()),
    "JSON lines": lambda: "".join(json.dumps({"step": step, "loss": decimal(loss)}) + "\n" for step, loss in course().items()),
}  # fmt: skip


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_a_decimal_comma_is_read(tmp_path, monkeypatch, kind, large):
    if large:
        pytest.importorskip("pandas")
        monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    path = tmp_path / ("h.log" if "log" in kind or "JSON" in kind else "h.csv")
    path.write_text(FILES[kind]())
    read = losses(path)
    assert {step: read[step] for step in course()} == pytest.approx(course(), abs=6e-3)


def test_a_comma_that_may_be_either_is_rejected(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {step} loss: {2.31 - step / 1000:.3f}\n".replace(".", ",") for step in range(1, 40)))
    with pytest.raises(UserError, match=r"loss: '2,309' may mean 2309 or 2\.309, and no other number shows which"):
        read_history(path)
    path.write_text(path.read_text().replace("loss", "lr 1.0 loss"))  # a decimal point tells
    assert losses(path)[1] == 2309


def test_other_columns_tell_what_a_comma_is():
    texts = {"loss": ["2,310", "2,305"], "norm": ["0,51"]}
    assert with_commas(texts, whole=(), points=False) == {"loss": [2.31, 2.305], "norm": [0.51]}
    assert with_commas({"loss": ["2,310"], "step": ["1,000"]}, whole=["step"], points=False) == {
        "loss": None,
        "step": [1000.0],
    }
    assert with_commas({"loss": ["1.234,56", "12,310"]}, whole=(), points=True) == {"loss": [1234.56, 12.31]}


def test_a_csv_whose_cells_decimal_commas_split_says_so(tmp_path):
    path = tmp_path / "h.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{decimal(loss)}\n" for step, loss in course().items()))
    with pytest.raises(
        UserError,
        match=r"the first row has 3 cells, but the header has 2 cells\. If the row's numbers have decimal commas",
    ):
        read_history(path)


def rows():
    return [{"step": step, "loss": loss} for step, loss in course().items()]


def csv_text(end="\n"):
    return end.join(["step,loss", *(f"{row['step']},{row['loss']}" for row in rows())]) + end


ODD = {
    "CRLF": lambda: csv_text("\r\n").encode(),
    "BOM": lambda: b"\xef\xbb\xbf" + csv_text().encode(),
    "UTF-16": lambda: csv_text("\r\n").encode("utf-16"),
    "gzip": lambda: gzip.compress(csv_text().encode()),
    "no UTF-8": lambda: csv_text().replace("loss", "loss,name").replace("\n", ",caf\xe9\n").encode("latin-1").replace(b"loss,name,caf\xe9", b"loss,name", 1),
    "nested": lambda: "".join(json.dumps({"step": row["step"], "train": {"loss": row["loss"]}}) + "\n" for row in rows()).encode(),
    "nulls": lambda: "".join(json.dumps({**row, "grad_norm": None, "eval": {}, "tags": ["a"]}) + "\n" for row in rows()).encode(),
    "a second loss": lambda: csv_text().replace("step,loss", "step,loss,loss").replace("\n", ",9.0\n").replace("loss,loss,9.0", "loss,loss", 1).encode(),
    "dates": lambda: csv_text().replace("step,loss", "date,step,loss").replace("\n", "\n2026-01-01 10:00:00,").replace("00,date", "date").removesuffix("2026-01-01 10:00:00,").encode(),
}  # fmt: skip


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_is_read(tmp_path, monkeypatch, kind, large):
    if large:
        pytest.importorskip("pandas")
        monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    path = tmp_path / "h.csv"
    path.write_bytes(ODD[kind]())
    assert losses(path) == pytest.approx(course())


def test_a_progress_bar_redrawn_in_colors_is_read(tmp_path):
    path = tmp_path / "train.log"
    bars = (f"\r\x1b[32m{s}%\x1b[0m|##  | {s}/40 [00:10<00:01,  9.9it/s, loss={v:.6f}]" for s, v in course().items())
    path.write_text("".join(bar for bar in bars for _ in range(3)))
    assert losses(path) == pytest.approx(course(), abs=1e-6)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("loss", ["true", "2026-01-01", "[2.3]", "high"])
def test_a_loss_that_is_no_number_is_named(tmp_path, monkeypatch, loss, large):
    if large:
        pytest.importorskip("pandas")
        monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    path = tmp_path / "h.csv"
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step in range(1, 40)))
    with pytest.raises(
        UserError, match=r"(?i)loss: '\[?\w.*' in .*h.csv' is not a number\. The column holds no numbers"
    ):
        read_history(path)


def test_steps_that_are_texts_are_named(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps({"step": f"epoch-{row['step']}", "loss": row["loss"]}) + "\n" for row in rows()))
    assert "'step' holds no numbers ('epoch-1'), so Lamina does not read steps from this column" in str(
        read_history(path)
    )


def test_a_long_preamble_does_not_hide_the_form(tmp_path):
    path = tmp_path / "train.log"
    noise = "".join(f"  layer_norm_epsilon_{n} ......... 1e-05\ncompiling kernel {n}\n" for n in range(900))
    path.write_text(noise * 3 + "".join(f"iter {s}: loss {v:.4f}, time 1.0ms\n" for s, v in course().items()))
    assert read_history(path).form == "lines with a step"


def test_a_loss_that_is_nan_is_a_record(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"epoch: {s} loss: {v if s < 30 else math.nan}\n" for s, v in course().items()))
    import_history(path, tmp_path / "read")
    assert gather(tmp_path / "read").rose == 30


def test_the_loss_of_an_evaluation_is_not_the_loss(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "".join(f"Train: epoch 0 step {s} loss {v}\nTest: epoch 0 step {s} loss 9.5\n" for s, v in course().items())
    )
    assert losses(path) == pytest.approx(course())


@pytest.mark.parametrize("name", ["grad_scale", "weight_decay", "grad_accum_steps"])
def test_a_setting_is_no_parameter(tmp_path, name):
    path = tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps({**row, name: 1.0}) + "\n" for row in rows()))
    assert "parameters" not in str(read_history(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("loss", math.inf), ("loss", -math.inf), ("loss", 1e308), ("grad_norm", 1e308), ("learning_rate", math.inf)),
        ("gradients/h.1.mlp.up_proj.weight", math.inf),
    ],
)
def test_an_infinite_value_is_drawn_without_a_warning(tmp_path, name, value):
    path, draw = tmp_path / "h.jsonl", random.Random(0)
    names = [f"gradients/h.{layer}.{part}.weight" for layer in range(4) for part in ("attn.q_proj", "mlp.up_proj")]
    lines = [
        {**row, "learning_rate": 1e-3, **{n: draw.uniform(0.9, 1.1) for n in ("grad_norm", *names)}} for row in rows()
    ]
    path.write_text("".join(json.dumps(line | ({name: value} if line["step"] >= 30 else {})) + "\n" for line in lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lamina.diagnose(path)
        lamina.report(tmp_path / "h.jsonl-lamina")


def test_large_json_lines_are_read_one_after_another(tmp_path, monkeypatch):
    path = tmp_path / "h.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: pytest.fail("reads the whole file"))
    assert losses(path) == pytest.approx(course())


def test_a_table_without_a_column_is_named(tmp_path):
    """As layers.parquet of a preflight, in which one damaged byte renames a column."""
    pd.DataFrame({"step": [1], "netric": ["loss"]}).to_parquet(tmp_path / "layers.parquet")
    with pytest.raises(ValueError, match=r"layers\.parquet has no column metric"):
        read_table(tmp_path / "layers.parquet", ["step", "metric"])
