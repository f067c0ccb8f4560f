"""`lamina.check` on what a model computes with its parts: what has no effect, what is read, and what targets ask."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training.test_check import FAULTS as FIRST
from training.test_check import adamw, trained
from training.test_check_losses import IDS, Mean, Words, next_tokens
from training.test_check_properties import FAULTS as PROPERTIES
from training.test_check_properties import faded, masked, plain
from training.test_check_scores import FAULTS as SCORES
from training.watching.loops import VOCAB, NanoGpt, llama
from transformers import (
    BartConfig,
    BartForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
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


class Projected(Words):
    """Adds a projection of the words, which may run without gradients, and a pooler that nobody reads."""

    def __init__(self, detach):
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.pooler, self.detach, self.skipped = nn.Linear(16, 16), detach, 0.0

    def forward(self, x, padding=None):
        with torch.set_grad_enabled(not self.detach):
            image = self.projector(self.words(x)) * float(torch.rand(()) >= self.skipped * self.training)
        self.pooler(image)
        return super().forward(x) + self.head(image)


def projected(detach, skipped=0.0):
    model = Projected(detach)
    model.skipped = skipped
    return words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), model)


class Low(nn.Module):
    """A layer with a low-rank change, scaled by a number."""

    def __init__(self, base, scale):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(16, 2))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def low(scale):
    model = NanoGpt().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    for layer in model.h:
        layer.attn.c_proj = Low(layer.attn.c_proj, scale)
    return model, None, {"batch": {"idx": IDS[:, :-1], "targets": IDS[:, 1:]}}


def one_of_two():
    model = llama()
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda m, args, x: x.detach())
    return model, None, {"batch": {"input_ids": IDS, "labels": IDS}}


class Gate(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.out, self.gate = nn.Linear(16, 16, bias=False), nn.Parameter(torch.full((), start))
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        return x + self.gate * self.out(x)


def gated(start):
    model = Words()
    model.norm = nn.Sequential(model.norm, Gate(start))
    return words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), model)


class Zero(nn.Module):
    """An RMSNorm whose weight is made of zeros, and counts as itself or as 1 + weight."""

    def __init__(self, width, plus=0.0):
        super().__init__()
        self.weight, self.plus = nn.Parameter(torch.zeros(width)), plus

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * (self.weight + self.plus)


def zero_norms(plus):
    model = Words()
    model.norm = Zero(16, plus)
    for layer in model.layers:
        layer.norm1, layer.norm2 = Zero(16, plus), Zero(16, plus)
    return words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), model)


def signs():
    model = Words()
    model.layers.extend(Words().layers)
    for layer in model.layers:
        layer.norm_first = False
        for norm in (layer.norm1, layer.norm2):
            norm.weight = nn.Parameter(0.03 * torch.randn(16).index_fill(0, torch.tensor([0]), 2.0))
    return words(lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), model)


def wide(loss):
    model = Words()
    nn.init.normal_(model.head.weight, std=3.0)
    return words(loss, model)


class Alone(Words):
    """A model that returns only its loss."""

    def forward(self, x, y):
        return ENTROPY(super().forward(x).flatten(0, 1), y.flatten())


def alone():
    model = Alone()
    nn.init.normal_(model.head.weight, std=3.0)
    return model, None, {"batch": (IDS[:, :-1], IDS[:, 1:])}


def preferences(reference, supervised=0.0):
    """A preference loss, whose reference is the model itself, a frozen copy, or the model without its adapter."""
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])) if reference == "base" else llama()
    frozen = copy.deepcopy(model).requires_grad_(False) if reference == "copy" else model

    def margin(of, batch):
        chosen, rejected = (likelihood(of(input_ids=ids).logits[:, :-1], ids[:, 1:]) for ids in batch)
        return chosen - rejected

    def loss(model, batch):
        with torch.no_grad(), model.disable_adapter() if reference == "base" else nullcontext():
            held = margin(frozen, batch)
        return -functional.logsigmoid(margin(model, batch) - held) - supervised * likelihood(
            model(input_ids=batch[0]).logits[:, :-1], batch[0][:, 1:]
        )

    return model, None, {"batch": (IDS, IDS.flip(1)), "loss": loss}


def virtual():
    """A loss of labels beside one of agreement, whose target is the model's own output for other inputs."""

    def loss(model, batch):
        with torch.no_grad():
            held = model(batch[0]).softmax(-1)
        agreement = functional.kl_div(model(batch[0].roll(1, 0)).log_softmax(-1), held, reduction="batchmean")
        return ENTROPY(model(batch[0]).flatten(0, 1), batch[1].flatten()) + agreement / 1e3

    return Words(), None, {"batch": (IDS[:, :-1], IDS[:, 1:]), "loss": loss}


def last_token(padding):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=VOCAB, pad_token_id=padding, num_labels=3, **sizes))
    batch = {"input_ids": PADDED, "attention_mask": (PADDED != 1).long(), "labels": torch.arange(6) % 3}
    return model, None, {"batch": batch}


def two_classes(sign):
    batch = {"x": IDS, "labels": torch.ones(6, dtype=torch.int64)}
    return Mean(2), None, {"batch": batch, "loss": lambda m, b: sign * ENTROPY(m(b["x"]), b["labels"])}


def merged():
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.merge_adapter()
    return model.train(), None, {"batch": {"input_ids": IDS, "labels": IDS}}


FAULTS = {
    "adapters: merged": merged,
    "no_gradient_to_parts: a projector": lambda: projected(detach=True),
    "no_gradient_to_parts: of one layer": one_of_two,
    "no_gradient_to_parts: LoRA scaled by 0": lambda: low(0.0),
    "stuck_at_zero: a gate": lambda: gated(0.0),
    "norm_gains: as made": lambda: zero_norms(plus=0.0),
    "norm_gains: of both signs": signs,
    "first_loss: alone": alone,
    "first_loss: of log-probabilities": lambda: wide(lambda x, y: -likelihood(x, y).mean()),
    "targets: its own reference": lambda: preferences("itself"),
    "targets: its own reference, and a supervised loss": lambda: preferences("itself", supervised=1.0),
    "changed_inputs: padding as a summary": lambda: last_token(padding=0),
    "sign_of_loss: two classes": lambda: two_classes(-1),
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
    assert {fault.partition(":")[0] for fault in {**FIRST, **FAULTS, **PROPERTIES, **SCORES}} == set(CHECKS)


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
    "a pooler that nobody reads": lambda: projected(detach=False),
    "a part that training drops": lambda: projected(detach=False, skipped=1.0),
    "own LoRA": lambda: low(0.5),
    "a gate of 1": lambda: gated(1.0),
    "norms of 1 + 0": lambda: zero_norms(plus=1.0),
    "a frozen reference": lambda: preferences("copy"),
    "a reference without its adapter": lambda: preferences("base"),
    "agreement with itself": virtual,
    "the last token that is no padding": lambda: last_token(padding=1),
    "equal labels of two classes": lambda: two_classes(1),
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


def test_a_finding_names_its_cause_and_what_mends_it():
    autocast, reads = torch.autocast("cpu", torch.float16), {"input_ids": PADDED, "labels": PADDED}
    with autocast:
        for scaler, says in ((None, "without a GradScaler"), (torch.amp.GradScaler("cpu", enabled=False), "disabled")):
            assert says in str(lamina.check(llama(), scaler=scaler))
    model = get_peft_model(NanoGpt(), LoraConfig(target_modules=["c_attn"], modules_to_save=["lm_head"])).train()
    for layer in model.base_model.model.h:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
    found = lamina.check(model, batch={"idx": IDS[:, :-1], "targets": IDS[:, 1:]})
    assert "use_reentrant=False, and" in str(found)
    for start, says in ((faded, "kaiming_normal_"), (nn.init.kaiming_normal_, "Raise the learning rate")):
        model, _, options = plain(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 if start is faded else 1e-9)
        assert says in str(lamina.check(model, optimizer, **options))
    model = NanoGpt()
    optimizer = torch.optim.SGD([*model.parameters(), model.ln_f.weight, model.ln_f.weight], lr=0.1)
    assert "updates these parameters 3 times" in str(lamina.check(model, optimizer))
    model, _, options = started(7)
    assert "decoder_start_token_id, then" in str(lamina.check(model, batch={**reads, "decoder_input_ids": PADDED}))
    for keys, says in ((False, "hides queries"), (True, "is inverted")):
        model, _, options = masked(keys=keys)
        for layer in model.layers if keys else ():
            layer.register_forward_pre_hook(lambda m, args: (args[0], 1 - args[1]))
        assert says in str(lamina.check(model, **options))
