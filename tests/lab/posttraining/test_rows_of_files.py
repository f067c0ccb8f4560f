"""Files of rows whose first rows do not show what the later ones hold, and files that are cut short."""

import gzip
import json

import pytest

import lamina
from lamina.errors import UserError

TUNED = {"steps": 1, "batch_size": 2, "bar": False, "eval_fraction": 0.01}


def rows(count, width=0):
    """Instructions whose input is null, and a text in the last ten."""
    all_rows = [{"instruction": f"Say {i}", "input": None, "output": "a", "note": "-" * width} for i in range(count)]
    return all_rows[:-10] + [{**row, "input": "a text"} for row in all_rows[-10:]]


def lines(all_rows):
    return "".join(json.dumps(row) + "\n" for row in all_rows)


@pytest.mark.slow
def test_a_column_that_begins_with_nulls_may_hold_texts_after_ten_megabytes(base, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(lines(rows(4200, width=2800)))
    assert data.stat().st_size > 11e6
    result = lamina.sft(from_model=base, data=data, output=tmp_path / "run", template="plain", **TUNED)
    assert result["status"] == "finished"


def test_columns_of_mixed_types_are_read(base, tmp_path):
    data = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}]
    mixed = [{"prompt": turns, "completion": "b"}, {"prompt": "c", "completion": "d"}] * 4
    data.write_text(lines(mixed))
    with pytest.raises(UserError) as caught:  # its words are of a row, not of a file without rows
        lamina.sft(from_model=base, data=data, output=tmp_path / "run", template="none", **TUNED)
    assert "holds no rows" not in str(caught.value)


CUT = {
    "rows.jsonl": lambda text: text[:-30].encode(),
    "rows.json": lambda text: json.dumps([json.loads(line) for line in text.splitlines()])[:-30].encode(),
    "rows.jsonl.gz": lambda text: gzip.compress(text.encode())[:-60],
    "one.jsonl": lambda text: text[:20].encode(),
}


@pytest.mark.parametrize("name", CUT)
def test_a_file_that_is_cut_short_is_called_so(name, base, tmp_path):
    data = tmp_path / name
    data.write_bytes(CUT[name](lines(rows(20))))
    with pytest.raises(UserError, match="cut short") as caught:
        lamina.sft(from_model=base, data=data, output=tmp_path / "run", **TUNED)
    assert "StopIteration" not in str(caught.value)
    assert not (tmp_path / "run").exists()
