"""`lamina.check` on what a model computes with its parts: what has no effect, what is read, and what targets ask."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from training.test_check import FAULTS as FIRST
from training.test_check import adamw, trained
from training.test_check_losses import IDS, Mean, Words, next_tokens
from training.test_check_properties import FAULTS as PROPERTIES
from training.watching.loops import VOCAB, NanoGpt, llama
from transformers import (
    BartConfig,
    BartForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetForSequenceClassification,
)

import lamina
from lamina.training.monitor.mistakes import CHECKS

ENTROPY = functional.cross_entropy
NUMBERS = torch.randn(len(IDS), 1, generator=torch.Generator().manual_seed(0))
PADDED = torch.where(torch.arange(12) < torch.tensor([12, 5, 7, 3, 9, 6])[:, None], IDS % 50 + 2, 1)


def numbers(loss, outputs=1, targets=NUMBERS):
    return Mean(outputs), None, {"batch": (IDS, targets), "loss": lambda m, b: loss(m(b[0]), b[1])}


def words(loss, model=None):
    options = {"batch": (IDS[:, :-1], IDS[:, 1:]), "loss": lambda m, b: loss(m(b[0]), b[1])}
    return model or Words(), None, options


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Words(), Words()


def taught(sound):
    def loss(model, batch):
        teacher = model.teacher(batch).softmax(-1)
        return functional.kl_div(model.student(batch).log_softmax(-1), teacher, reduction="batchmean")

    model = Taught()
    nn.init.normal_(model.teacher.head.weight)
    model.teacher.requires_grad_(not sound)
    return model, None, {"batch": IDS, "loss": loss}


class Summary(Words):
    """Answers from the last token of a row, or from the last one that is shown."""

    def __init__(self, sound):
        super().__init__()
        self.head, self.sound = nn.Linear(16, 3), sound

    def forward(self, x, shown):
        rows = super().forward(x)
        return rows[torch.arange(len(x)), shown.sum(1) - 1] if self.sound else rows[:, -1]


def summary(sound):
    batch = (PADDED, (PADDED != 1).long(), torch.arange(6) % 3)
    return Summary(sound), None, {"batch": batch, "loss": lambda m, b: ENTROPY(m(b[0], b[1]), b[2])}


class Shown(Words):
    """Adds an image where an image's token stands."""

    def __init__(self, token):
        super().__init__()
        self.image, self.token = nn.Linear(16, 16), token

    def forward(self, x, padding=None):
        image = self.image(torch.ones(16)) * (x == self.token)[..., None]
        return super().forward(x) + self.head(image)


class Inside(Words):
    def forward(self, x, padding=None):
        return super().forward(x) + nn.Linear(16, VOCAB)(self.words(x))


def unused():
    model = NanoGpt(layers=3)
    for layer in model.h:
        layer.attn.second = nn.Linear(16, 16)
    return model, None, {"batch": {"idx": IDS[:, :-1], "targets": IDS[:, 1:]}}


def ended(rate):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, rate, 12)
    trained(model, optimizer)
    for _ in range(12):
        schedule.step()
    return model, optimizer, {}


def started(first):
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=60)
    )
    labels = IDS % 50 + 1
    labels[:, 0] = first
    return model, None, {"batch": {"input_ids": IDS, "labels": labels}}


def root(x, y):
    return (x.square().sum(-1).sqrt() - 1).square().mean()


def at_zero():
    model, optimizer, options = numbers(root)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model, optimizer, options


def likelihood(x, y):
    return x.log_softmax(-1).gather(-1, y[..., None]).mean()


FAULTS = {
    "targets": lambda: numbers(functional.mse_loss, targets=2e5 + NUMBERS),
    "targets: counted from 1": lambda: numbers(
        functional.binary_cross_entropy_with_logits, targets=1.0 + (NUMBERS > 0).float()
    ),
    "targets: of a teacher": lambda: taught(sound=False),
    "changed_inputs: a summary": lambda: summary(sound=False),
    "idle_groups: a schedule": lambda: ended(0.0),
    "sign_of_loss: a log-probability": lambda: words(likelihood),
    "shift_of_labels: a start": lambda: started(60),
    "no_gradient_to_parts: an image": lambda: words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), Shown(VOCAB)),
    "unregistered: in forward": lambda: words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), Inside()),
    "no_gradient_to_parts: never called": unused,
    "not_finite: gradients": at_zero,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_a_part_is_found_by_its_check_alone(fault):
    model, optimizer, options = FAULTS[fault]()
    found = lamina.check(model, optimizer or adamw(model), **options)
    assert {each.name for each in found} == {fault.partition(":")[0]}


def test_every_check_has_a_mistake():
    assert {fault.partition(":")[0] for fault in {**FIRST, **FAULTS, **PROPERTIES}} == set(CHECKS)


def xlnet():
    model = XLNetForSequenceClassification(XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=32))
    return model, None, {"batch": {"input_ids": IDS, "labels": torch.arange(6) % 2}}


def decoder_alone():
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    model = BartForCausalLM(BartConfig(vocab_size=VOCAB, d_model=16, is_decoder=True, **sizes))
    ids = IDS % 50 + 3  # this model does not shift its labels
    return model, None, {"batch": {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}}


def regularized():
    def loss(model, batch):
        return ENTROPY(model(batch[0]).flatten(0, 1), batch[1].flatten()) + 1.5

    model, batch, _ = next_tokens()
    return model, None, {"batch": batch, "loss": loss}


SOUND = {
    "numbers of a usual size": lambda: numbers(functional.mse_loss, targets=20 * NUMBERS),
    "labels of 0 and 1": lambda: numbers(functional.binary_cross_entropy_with_logits, targets=(NUMBERS > 0).float()),
    "a frozen teacher": lambda: taught(sound=True),
    "the last token that is shown": lambda: summary(sound=True),
    "a schedule that goes on": lambda: ended(0.1),
    "a minus": lambda: words(lambda x, y: -likelihood(x, y)),
    "another first label": lambda: started(7),
    "an image in the batch": lambda: words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), Shown(int(IDS[0, 0]))),
    "parts for other arguments": xlnet,
    "a regularizer": regularized,
    "a decoder without its encoder": decoder_alone,
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_part_is_no_mistake(case):
    model, optimizer, options = SOUND[case]()
    assert lamina.check(model, optimizer or adamw(model), **options) == []
