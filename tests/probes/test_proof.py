"""Models whose sequences see one another are refused, whichever of the sequences it shows in."""

import pytest
import torch
from torch import nn

import lamina
from lamina.errors import UserError


class Encoder(nn.Module):
    """torch's encoder, which takes [tokens, batch, width] unless it is told otherwise."""

    def __init__(self, mask, batch_first=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(61, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, norm_first=True, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 61)
        self.mask, self.time = mask, 1 if batch_first else 0

    def forward(self, input_ids):
        x = self.words(input_ids)
        mask = self.mask(x.shape[self.time])
        return self.head(self.encoder(x, mask=mask))


def causal(size):
    return nn.Transformer.generate_square_subsequent_mask(size)


def backwards(size):
    return causal(size).T


def none(size):
    return None


@pytest.mark.parametrize("mask", [causal, backwards, none])
def test_an_encoder_fed_batch_for_tokens_is_refused_under_any_mask(mask):
    ids = torch.randint(6, 61, (4, 14), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="depend on the other sequences"):
        lamina.probe(Encoder(mask), "similarity", ids)


@pytest.mark.parametrize("mask", [causal, none])
def test_the_same_encoder_with_the_batch_first_is_measured(mask):
    ids = torch.randint(6, 61, (4, 14), generator=torch.Generator().manual_seed(0))
    assert len(lamina.probe(Encoder(mask, batch_first=True), "similarity", ids)["similarity"])
