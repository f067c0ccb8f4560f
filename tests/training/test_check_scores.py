"""`lamina.check` on the scores that a loss compares: bounded outputs, cosines, CTC, policies and drawn inputs."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from training.test_check_losses import ENTROPY, IDS
from transformers import BertConfig, BertForMaskedLM

import lamina


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y, PIXELS = drawn(12, 16), torch.arange(12) % 6, torch.arange(12 * 49).view(12, 7, 7) % 6


def mlp(*last, outputs=6, layers=1, start=None):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16 if not at else 32, 32), nn.ReLU()) for at in range(layers)]
    model = nn.Sequential(*parts, nn.Linear(32, outputs), *last)
    for module in model.modules() if start is not None else ():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=start)
            nn.init.zeros_(module.bias)
    return model


def of(model, loss=ENTROPY, batch=(X, Y)):
    return model, {"batch": batch, "loss": lambda m, b: loss(m(b[0]), *b[1:])}


def images(reshape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1))
    flat = lambda x, y: ENTROPY(reshape(x), y.flatten())  # noqa: E731
    return of(model, flat, (drawn(12, 3, 7, 7), PIXELS))


def pairs(scale=1.0, normal=True, apart=0.1, size=1.0):
    """InfoNCE of two views of each row. ``size`` multiplies the numbers that the model reads."""

    def loss(model, batch):
        one, other = (model(size * x) for x in batch)
        if normal:
            one, other = functional.normalize(one, dim=-1), functional.normalize(other, dim=-1)
        return ENTROPY(scale * one @ other.T, torch.arange(len(one)))

    return mlp(outputs=64), {"batch": (X, X + apart * drawn(12, 16, seed=1)), "loss": loss}


def views(hides):
    """SimCLR's loss, in which the first half of the rows are views of the second half."""

    def loss(model, batch):
        rows = functional.normalize(model(batch), dim=-1)
        scores = rows @ rows.T / 0.1
        scores = scores.masked_fill(torch.eye(len(rows)) == 1, -1e9) if hides else scores
        return ENTROPY(scores, torch.arange(12).roll(6))

    return mlp(outputs=64), {"batch": X, "loss": loss}


class Angular(nn.Module):
    """ArcFace's classifier: cosines times a constant."""

    def __init__(self, scale, similarity=None):
        super().__init__()
        self.features, self.classes = mlp(outputs=24), nn.Parameter(drawn(6, 24))
        self.scale, self.similarity = scale, similarity

    def forward(self, x):
        if self.similarity is not None:
            return self.scale * self.similarity(self.features(x)[:, None], self.classes[None], dim=-1)
        return self.scale * functional.linear(*(functional.normalize(x) for x in (self.features(x), self.classes)))


def spoken(log=True, first=1, labels=5, same=False):
    torch.manual_seed(0)
    model, sizes = nn.GRU(16, 20, batch_first=True), [torch.full((4,), size) for size in (8, labels)]
    targets = torch.full((4, labels), 3) if same else torch.arange(4 * labels).view(4, -1) % 7 + first

    def loss(model, batch):
        scores = model(batch[0])[0]
        return functional.ctc_loss(
            (scores.log_softmax(-1) if log else scores).transpose(0, 1), batch[1], *sizes, zero_infinity=True
        )

    return model, {"batch": (drawn(4, 8, 16), targets), "loss": loss}


def taught(**options):
    with torch.no_grad():
        target = mlp()(2 * X).softmax(-1)
    return of(mlp(), lambda x, y: functional.kl_div(x.log_softmax(-1), y, **options), (X, target))


def masked(everywhere):
    torch.manual_seed(0)
    ids = IDS % 50 + 3
    hidden = torch.arange(ids.numel()).view(ids.shape) % 5 == 0
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=61, **sizes)).train()
    return model, {"batch": {"input_ids": ids.masked_fill(hidden, 2), "labels": ids.where(hidden | everywhere, -100)}}


def policy(returns, *, keys=False):
    actions = torch.arange(12) % 5

    def loss(model, batch):
        states, chosen, factors = batch.values() if keys else batch
        return -(torch.distributions.Categorical(logits=model(states)).log_prob(chosen) * factors).mean()

    batch = {"states": X, "actions": actions, "returns": returns}
    return mlp(outputs=5), {"batch": batch if keys else tuple(batch.values()), "loss": loss}


class Last(nn.Module):
    """A recurrent model that reads a row's last token. Without ``batch_first``, this is the batch's last row."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(61, 16), nn.Linear(16, 6)
        self.steps = nn.GRU(16, 16, batch_first=batch_first)

    def forward(self, x):
        return self.head(self.steps(self.words(x))[0][:, -1])


def hiding():
    """A denoising loss that draws which numbers it hides."""
    loss = lambda model, batch: (model(batch * (torch.rand(batch.shape) > 0.5)) - batch).square().mean()  # noqa: E731
    return mlp(outputs=16), {"batch": X, "loss": loss}


def distance(x, y):
    return functional.mse_loss(x, y)


FAULTS = {
    "unreachable_targets": lambda: of(mlp(nn.Sigmoid(), outputs=16), distance, (X, X)),
    "unreachable_targets: below 0": lambda: of(mlp(nn.ReLU(), outputs=16), functional.l1_loss, (X, X)),
    "unreachable_targets: pixels": lambda: of(mlp(nn.Sigmoid(), outputs=16), distance, (X, 255 * X.sigmoid())),
    "bounded_logits: tanh": lambda: of(mlp(nn.Tanh())),
    "bounded_logits: sigmoid": lambda: of(mlp(nn.Sigmoid())),
    "bounded_logits: two classes": lambda: of(
        mlp(nn.Tanh(), outputs=4), functional.binary_cross_entropy_with_logits, (X, (drawn(12, 4) > 0).float())
    ),
    "bounded_logits: cosines": lambda: pairs(),
    "bounded_logits: classes": lambda: of(Angular(1.0)),
    "bounded_logits: torch's cosines": lambda: of(Angular(1.0, functional.cosine_similarity)),
    "own_similarity": lambda: views(hides=False),
    "first_loss: lengths": lambda: pairs(normal=False, apart=2.0, size=20.0),
    "first_loss: lengths, and certain": lambda: pairs(normal=False, apart=0.0, size=100.0),
    "ctc_inputs": lambda: spoken(log=False),
    "ctc_inputs: the blank": lambda: spoken(first=0),
    "ctc_inputs: too many labels": lambda: spoken(labels=8, same=True),
    "mean_of_kl": taught,
    "much_smoothing": lambda: of(mlp(), lambda x, y: ENTROPY(x, y, label_smoothing=0.9)),
    "labels_of_shown_tokens": lambda: masked(everywhere=True),
    "loss_inputs: pixels": lambda: images(lambda x: x.reshape(-1, 6)),
    "faded_gradients: std 0.02": lambda: of(mlp(layers=8, start=0.02)),
    "changed_inputs: a recurrent model": lambda: of(Last(False), batch=(IDS, torch.arange(len(IDS)))),
}
SOUND = {
    "pixels": lambda: of(mlp(nn.Sigmoid(), outputs=16), distance, (X, X.sigmoid())),
    "a few outliers": lambda: of(mlp(nn.Tanh(), outputs=16), distance, (X, 0.4 * X)),
    "a temperature": lambda: pairs(14.0),
    "products of short vectors": lambda: pairs(1.0, normal=False),
    "views": lambda: views(hides=True),
    "angles": lambda: of(Angular(30.0)),
    "torch's angles": lambda: of(Angular(30.0, functional.cosine_similarity)),
    "speech": spoken,
    "a teacher": lambda: taught(reduction="batchmean"),
    "smoothing": lambda: of(mlp(), lambda x, y: ENTROPY(x, y, label_smoothing=0.1)),
    "words": lambda: masked(everywhere=False),
    "pixels of classes": lambda: images(lambda x: x.movedim(1, -1).flatten(0, -2)),
    "a deviation of 0.02 in few layers": lambda: of(mlp(start=0.02)),
    "many layers": lambda: of(mlp(layers=4)),
    "a recurrent model": lambda: of(Last(True), batch=(IDS, torch.arange(len(IDS)))),
    "returns of -1": lambda: policy(-torch.ones(12)),
    "returns of -1, by name": lambda: policy(-torch.ones(12), keys=True),
    "hidden numbers": hiding,
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_scores_is_found_by_its_check_alone(fault):
    model, options = FAULTS[fault]()
    found = lamina.check(model, adamw(model), **options)
    assert {each.name for each in found} == {fault.partition(":")[0]}


@pytest.mark.parametrize("case", SOUND)
def test_sound_scores_are_no_mistake(case):
    model, options = SOUND[case]()
    found = lamina.check(model, adamw(model), **options)
    assert (found, found.notes) == ([], [])


def test_the_lowest_loss_of_cosines_is_printed():
    model, options = pairs()
    assert f"{math.log1p(11 * math.exp(-2)):.2g} or more" in str(lamina.check(model, **options))


def test_returns_of_another_sign_do_not_excuse_a_wrong_sign():
    model, options = policy(torch.ones(12))
    (found,) = lamina.check(model, batch=options["batch"], loss=lambda m, b: -options["loss"](m, b))
    assert found.name == "sign_of_loss"


def test_a_batch_whose_margins_are_met_is_a_note():
    loss = lambda model, batch: functional.triplet_margin_loss(*(model(x) for x in batch))  # noqa: E731
    found = lamina.check(mlp(outputs=64), batch=(X, X, X + 100), loss=loss)
    assert found == []
    (note,) = found.notes
    assert note.name == "no_gradient"
