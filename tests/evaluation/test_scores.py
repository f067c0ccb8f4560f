"""Perplexity against the formula written naively, and the table of scores in its three forms."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest
import torch
from evaluation.conftest import loaded, saved_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from lamina.errors import UserError
from lamina.evaluation.candidates import Candidate
from lamina.evaluation.job import rows
from lamina.evaluation.perplexity import perplexity, windows
from lamina.evaluation.scores import Score, from_rows, number_of, table, to_rows
from lamina.evaluation.task_sets import Wanted
from lamina.jobs.files import write_json

TEXTS = ["the norm sits  before\nthe layer, " * 4, "short", "a öß line of other words " * 5]


def naive_nll(model, text, window, stride):
    """Token by token: what the model reads before each is what the definition says, and nothing else."""
    ids = [256, *text.encode()]
    total = 0.0
    for at in range(1, len(ids)):
        end = min(len(ids) - 1, window if at <= window else window + math.ceil((at - window) / stride) * stride)
        read = ids[max(0, end - window) : at]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([read])).logits[0, -1]
        total -= float(torch.log_softmax(logits.double(), -1)[ids[at]])
    return total


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 16), (17, 5), (200, 100)])
def test_perplexity_is_the_formula(model, window, stride):
    network, tokenizer = loaded(model)
    found = perplexity(network, tokenizer, TEXTS[:2], window=window, stride=stride, batch_size=3)
    expected = sum(naive_nll(network, text, window, stride) for text in TEXTS[:2])
    tokens = sum(len(text.encode()) for text in TEXTS[:2])
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert found.tokens == found.bytes == tokens
    numbers = found.numbers()
    assert numbers["token_perplexity"] == pytest.approx(math.exp(expected / tokens), rel=1e-5)
    assert numbers["word_perplexity"] == pytest.approx(math.exp(expected / (25 + 1)), rel=1e-4)
    assert numbers["bits_per_byte"] == pytest.approx(expected / tokens / math.log(2), rel=1e-5)


def test_disjoint_windows_are_the_harness_s(model):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    network, tokenizer = loaded(model)
    harness = HFLM(pretrained=network, tokenizer=tokenizer, backend="causal", max_length=24, batch_size=2)
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    theirs = sum(harness.loglikelihood_rolling(asked, disable_tqdm=True))
    ours = perplexity(network, tokenizer, TEXTS, window=24, stride=24, batch_size=4)
    assert -ours.nll == pytest.approx(theirs, rel=1e-5)
    assert ours.tokens == ours.bytes > sum(map(len, TEXTS))  # umlauts have two bytes


@given(st.integers(1, 80), st.integers(2, 20), st.integers(1, 20))
def test_each_token_is_scored_once_with_enough_before_it(length, window, stride):
    stride = min(stride, window)
    tokens = list(range(1, length + 1))
    found = list(windows(tokens, 0, window, stride))
    assert [token for _, targets in found for token in targets] == tokens
    for number, (read, targets) in enumerate(found):
        assert read == [0, *tokens][targets[-1] - len(read) : targets[-1]]
        assert len(read) <= window
        if number:
            assert len(read) - len(targets) >= window - stride


def test_a_text_without_tokens_is_refused(model):
    with pytest.raises(UserError, match="no tokens"):
        perplexity(*loaded(model), [""], window=8, stride=4)


def test_without_an_end_of_text_token_the_text_s_first_token_is_not_scored(tmp_path):
    network, tokenizer = loaded(saved_model(tmp_path, vocab_size=256))
    texts = ["the norm<|endoftext|> sits", "é after a layer", "", "x"]
    found = perplexity(network, tokenizer, texts, window=64, stride=64, batch_size=3)
    expected = 0.0
    for ids in (torch.tensor(list(text.encode())) for text in texts[:2]):
        with torch.no_grad():
            chances = network(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        expected -= float(chances.gather(1, ids[1:, None]).sum())
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert found.tokens == found.bytes == sum(len(text.encode()) - 1 for text in texts[:2])
    assert "lacks the end-of-text token 256, so Lamina adds no such token to the text" in found.notes[0]


def test_the_loss_is_that_of_the_same_logits_in_float64(model):
    """At a vocabulary of 50,000 float32 loses 2e-5 nats per token."""
    _, tokenizer = loaded(model)

    class Wide(torch.nn.Module):
        device, config = torch.device("cpu"), LlamaConfig(vocab_size=50_000)

        def forward(self, input_ids, use_cache):
            draw = torch.Generator().manual_seed(int(input_ids.sum()))
            self.logits = torch.randn(*input_ids.shape, 50_000, generator=draw)
            return type("Output", (), {"logits": self.logits})

    wide, text = Wide(), TEXTS[0]
    found = perplexity(wide, tokenizer, [text], window=256, stride=256)
    ids = torch.tensor(list(text.encode()))
    exact = -wide.logits[0].double().log_softmax(-1).gather(1, ids[:, None]).sum()
    assert found.nll == pytest.approx(float(exact), rel=1e-14)


@pytest.mark.parametrize("text", ["one two  three", " one", "one\n", "\n one two \n\n", " "])
def test_words_are_counted_as_the_harness_counts_them(model, text):
    pytest.importorskip("lm_eval")
    from lm_eval.api.task import Task

    network, tokenizer = loaded(model)
    assert perplexity(network, tokenizer, [text], window=24, stride=24).words == Task.count_words(text)


PPL = Wanted(task="wikitext", metric="word_perplexity", heading="Wiki. ppl")
ARC = Wanted(task="arc_easy", heading="ARC-e")
SCIQ = Wanted(task="sciq")


def candidates():
    return [
        *(Candidate(name=f"keel/{seed}", path="-", arm="keel", seed=seed) for seed in (0, 1)),
        Candidate(name="keel/2", path="-", arm="keel", seed=2, status="diverged"),
        Candidate(name="pre", path="-", arm="a_b & <i>", seed=0),
    ]


def numbers():
    values = {"keel/0": (20.0, 0.5, 0.75), "keel/1": (22.0, 0.6, 0.85), "pre": (19.0, 0.4, 0.9)}
    return {
        (name, column): Score(
            task=column.task, metric=column.metric or "acc", value=value, higher_is_better=column is not PPL
        )
        for name, listed in values.items()
        for column, value in zip((PPL, ARC, SCIQ), listed, strict=True)
    }


def test_a_line_is_the_mean_and_the_standard_deviation_over_its_runs():
    found = table([PPL, ARC, SCIQ], candidates(), numbers())
    assert found.headings == ("Wiki. ppl", "ARC-e", "sciq", "Avg.")
    keel, pre = found.lines
    assert list(keel.means) == pytest.approx([21.0, 55.0, 80.0, 67.5])
    assert keel.stds[1] == pytest.approx(50**0.5)
    assert keel.stds[3] == pytest.approx(50**0.5)  # of the runs' own averages, 62.5 and 72.5
    assert list(pre.means) == pytest.approx([19.0, 40.0, 90.0, 65.0])
    assert math.isnan(pre.stds[1])
    assert found.best == ((1,), (0,), (1,), (0,))


def test_the_three_forms_hold_the_same_numbers():
    found = table([PPL, ARC, SCIQ], candidates(), numbers())
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert rows[0]["ARC-e"] == "55"
    assert rows[0]["left_out"] == "1"
    assert rows[1]["ARC-e std"] == ""
    assert "| keel (1 of 3 runs diverged) | 21.00 ± 1.41 | 55.00 ± 7.07 |" in found.markdown()
    assert r"a\_b & \<i\>" in found.markdown()
    latex = found.latex()
    assert r"\textbf{19.00}" in latex
    assert r"55.00 $\pm$ 7.07" in latex
    assert r"a\_b \& <i>" in latex


def test_every_line_with_the_best_number_as_printed_is_bold():
    tied = numbers()
    for name, value in (("keel/0", 0.5), ("keel/1", 0.5), ("pre", 0.50001)):
        tied[name, ARC] = replace(tied[name, ARC], value=value)
    found = table([ARC], candidates(), tied)
    assert found.best == ((0, 1),)
    assert found.latex().count(r"\textbf{50.00") == 2


def test_a_run_without_every_number_has_no_average():
    known = numbers()
    del known["keel/1", SCIQ]
    keel = table([PPL, ARC, SCIQ], candidates(), known).lines[0]
    assert keel.means[3] == pytest.approx(62.5)
    assert math.isnan(keel.stds[3])


def test_a_group_without_a_number_of_its_own_is_the_mean_of_its_tasks():
    scores = [Score(task=f"part{n}", metric="acc", value=n / 4, items=10) for n in (1, 2, 3)]
    found = number_of(Wanted(task="group"), scores)
    assert (found.value, found.items) == (pytest.approx(0.5), 30)
    assert number_of(Wanted(task="group", metric="f1"), scores) is None


def test_infinite_scores_come_back_as_they_were(tmp_path):
    """A text without spaces has an infinite perplexity per word; JSON has no number for it."""
    scores = [Score(task="perplexity", metric="word_perplexity", value=value) for value in (math.inf, math.nan, 2.5)]
    write_json(tmp_path / "scores.json", to_rows(scores))
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert repr(from_rows(stored)) == repr(from_rows(to_rows(scores))) == repr(scores)
    candidate = Candidate(name="m", path="-", arm="m", seed=0)
    tables = [rows([{"model": "m", "scores": each}], [candidate]).to_csv() for each in (to_rows(scores), stored)]
    assert tables[0] == tables[1], "a resumed evaluation writes the same results.csv"
    assert ",inf," in tables[1]
