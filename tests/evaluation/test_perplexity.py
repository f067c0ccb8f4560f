"""Perplexity against the formula written naively, and against lm-evaluation-harness's rolling log-likelihood."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina.errors import UserError
from lamina.evaluation.perplexity import perplexity, windows

TEXTS = ["the norm sits  before\nthe layer, " * 4, "short", "a öß line of other words " * 5]


def loaded(model):
    return AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


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
    assert [token for one in found for token in one.targets] == tokens
    for number, one in enumerate(found):
        assert one.inputs == [0, *tokens][one.targets[-1] - len(one.inputs) : one.targets[-1]]
        assert len(one.inputs) <= window
        if number:
            assert len(one.inputs) - len(one.targets) >= window - stride


def test_a_text_without_tokens_is_refused(model):
    with pytest.raises(UserError, match="no tokens"):
        perplexity(*loaded(model), [""], window=8, stride=4)


def test_the_loss_is_that_of_the_same_logits_in_float64(model):
    """At a vocabulary of 50,000 float32 loses 2e-5 nats per token."""
    _, tokenizer = loaded(model)

    class Wide(torch.nn.Module):
        device = torch.device("cpu")

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
