"""Ids are drawn within the table that an own model looks them up in."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.probes.engine.inputs import batches_of
from lamina.probes.structure.token_rows import token_rows


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        h = self.norm_1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Own(nn.Module):
    """A model without a configuration, with positions and types beside its ``rows`` tokens."""

    def __init__(self, rows, how="module"):
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.types = nn.Embedding(64, 16), nn.Embedding(2, 16)
        self.words, self.how = nn.Embedding(rows, 16), how
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, rows)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        table = self.words.weight
        x = {"module": self.words, "indexed": lambda ids: table[ids], "function": self.flat}[self.how](tokens)
        x = x + self.positions(places) + self.types(torch.zeros_like(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def flat(self, ids):
        return functional.embedding(ids.reshape(-1), self.words.weight).unflatten(0, ids.shape)


class OfInputIds(Own):
    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize("how", ["module", "indexed", "function"])
@pytest.mark.parametrize("rows", [7, 97])
def test_the_rows_are_those_of_the_table_that_gets_the_ids(rows, how):
    model = Own(rows, how).train()
    assert token_rows(model) == rows
    assert model.training


def test_of_a_model_that_does_not_run_nothing_is_known():
    assert token_rows(nn.Linear(3, 3)) is None


@pytest.mark.parametrize("rows", [5, 97])
def test_a_table_of_few_rows_is_measured(rows):
    assert lamina.placement_of(OfInputIds(rows)).placement == "pre_ln"


def test_ids_that_an_own_table_lacks_are_refused_by_name():
    with pytest.raises(UserError, match=r"tokens: the id 97 is outside .* of 97\. Give ids from 0 to 96"):
        batches_of(torch.tensor([[1, 97]]), OfInputIds(97), None)
    with pytest.raises(UserError, match="Name the tokenizer that the model was trained with: --tokenizer"):
        batches_of(["To be, or not to be"] * 9, OfInputIds(97), load_tokenizer("bytes"), sequence_length=8)


def test_bytes_need_no_row_for_the_end_of_a_text():
    notes = []
    texts = ["To be, or not to be", "that is the question"]
    (batch,) = batches_of(texts, OfInputIds(256), load_tokenizer("bytes"), sequence_length=13, notes=notes)
    assert batch["input_ids"].tolist() == [list("".join(texts).encode()[n : n + 13]) for n in (0, 13, 26)]
    said = "the model's vocabulary of 256 lacks the end-of-text token 256, so Lamina adds no such token to the text"
    assert said in notes[0]
