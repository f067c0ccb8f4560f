"""`lamina.check` on own loops: what the loss compares, what the model reads, and what its optimizer holds."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from training.watching.loops import VOCAB, NanoGpt, Tokens, llama
from transformers import T5Config, T5ForConditionalGeneration

import lamina

IDS = Tokens(items=6).ids
ENTROPY = functional.cross_entropy


def spared(model):
    return [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == large], "weight_decay": 0.1 * large}
        for large in (True, False)
    ]


class Words(nn.Module):
    """A causal model of torch's layers, in which one thing may be wrong."""

    def __init__(self, wrong=""):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(32, 16)
        options = {"dropout": 0.0, "batch_first": wrong != "batch first", "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **options) for _ in range(2))
        self.norm, self.head, self.wrong = nn.LayerNorm(16), nn.Linear(16, VOCAB), wrong
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x, padding=None):
        count = torch.arange(x.shape[0 if self.wrong == "positions" else 1])
        places = self.places(count)
        hidden = self.words(x) + (places[:, None] if self.wrong == "positions" else places)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0 if self.wrong == "batch first" else 1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, src_key_padding_mask=padding)
        if self.wrong == "view":
            hidden = hidden.view(len(x), 2, -1, 8).transpose(1, 2).reshape(hidden.shape)
        if self.wrong == "means":
            hidden = hidden - hidden.mean(1, keepdim=True)
        return self.head(self.norm(hidden))


class Mean(Words):
    def __init__(self, outputs=1):
        super().__init__()
        self.head = nn.Linear(16, outputs)

    def forward(self, x, padding=None):
        return super().forward(x, padding).mean(1)


def next_tokens(wrong="", inputs=slice(0, -1), labels=slice(1, None), loss=None):
    loss = loss or (lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()))
    return Words(wrong), (IDS[:, inputs], IDS[:, labels]), lambda m, b: loss(m(b[0]), b[1])


def of_numbers(loss):
    return Mean(), (IDS, torch.randn(len(IDS))), lambda m, b: loss(m(b[0]), b[1])


def distilled(student, teacher):
    def loss(model, batch):
        logits = model(batch)
        return functional.kl_div(student(logits), teacher(torch.roll(logits.detach(), 1, 0)), reduction="batchmean")

    return Words(), IDS, loss


def hidden(shown):
    ids = IDS.clone()
    ids[ids == 0], ids[:, -3:] = 1, 0
    return Mean(5), (ids, torch.arange(6) % 5), lambda m, b: ENTROPY(m(b[0], (b[0] == 0) != shown), b[1])


def in_float16(model, batch):
    with torch.autocast("cpu", torch.float16):
        return ENTROPY(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def log_softmax(x):
    return x.log_softmax(-1)


FAULTS = {
    "shift_of_labels": lambda: next_tokens(labels=slice(0, -1)),
    "shift_of_labels: twice": lambda: next_tokens(inputs=slice(0, -2), labels=slice(2, None)),
    "shift_of_labels: backward": lambda: next_tokens(inputs=slice(1, None), labels=slice(0, -1)),
    "sees_next_token: a view": lambda: next_tokens("view"),
    "sees_next_token: a mean over tokens": lambda: next_tokens("means"),
    "changed_inputs": lambda: next_tokens("batch first"),
    "changed_inputs: positions": lambda: next_tokens("positions"),
    "loss_inputs: viewed": lambda: next_tokens(loss=lambda x, y: ENTROPY(x.view(len(x), x.shape[2], -1), y)),
    "loss_inputs: of shapes": lambda: of_numbers(functional.mse_loss),
    "loss_inputs: of shapes, in an own loss": lambda: of_numbers(lambda x, y: (y - x).square().mean()),
    "loss_inputs: no logarithm": lambda: distilled(lambda x: x.softmax(-1), lambda x: x.softmax(-1)),
    "loss_inputs: a teacher that is not normalized": lambda: distilled(log_softmax, lambda x: x.exp()),
    "mask_and_labels": lambda: hidden(shown=True),
    "first_loss": lambda: next_tokens(loss=lambda x, y: ENTROPY(30 * x.flatten(0, 1), y.flatten(), reduction="sum")),
    "float16_gradients": lambda: (*next_tokens()[:2], in_float16),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_an_own_loop_is_found_by_its_check_alone(fault):
    model, batch, loss = FAULTS[fault]()
    optimizer = torch.optim.AdamW(spared(model), lr=1e-3)
    found = lamina.check(model, optimizer, batch=batch, loss=loss)
    assert {each.name for each in found} == {fault.partition(":")[0]}


class OnlyLoss(nn.Module):
    """A module that returns only its loss, or whose loss calls only a part of the module."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch):
        return self.loss(self.model, batch)

    def forward(self, *batch):
        return self.training_step(batch)


@pytest.mark.parametrize("step", [None, lambda m, b: m.training_step(b)], ids=["forward", "training_step"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "loss_inputs: viewed"])
def test_a_mistake_is_found_in_a_model_that_returns_only_its_loss(fault, step):
    model, batch, loss = FAULTS[fault]()
    model = OnlyLoss(model, loss if isinstance(batch, tuple) or step else lambda m, b: loss(m, b[0]))
    found = lamina.check(model, torch.optim.AdamW(spared(model), lr=1e-3), batch=batch, loss=step)
    assert {each.name for each in found} == {fault.partition(":")[0]}


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: ENTROPY(input=x.transpose(1, 2), target=y),
        lambda x, y: (x.logsumexp(-1) - x.gather(-1, y[..., None])[..., 0]).mean(),
        lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None]).mean(),
    ],
    ids=["by name", "logsumexp", "log_softmax"],
)
def test_targets_are_read_from_any_cross_entropy(loss):
    for labels, finds in ((slice(1, None), []), (slice(0, -1), ["shift_of_labels"])):
        model = OnlyLoss(*next_tokens(labels=labels, loss=loss)[::2])
        found = lamina.check(model, batch=(IDS[:, :-1], IDS[:, labels]))
        assert [each.name for each in found] == finds


def test_the_model_of_transformers_inside_a_module_is_known():
    model, ids = llama(pad_token_id=0), torch.cat([IDS % 50 + 1, torch.zeros_like(IDS[:, :4])], 1)
    model = OnlyLoss(model, lambda m, b: m(input_ids=b[0], labels=b[0]).loss)
    assert [each.name for each in lamina.check(model, batch=(ids[:1],))] == ["labels_of_padding"]


SOUND = {
    "next tokens": next_tokens,
    "transposed logits": lambda: next_tokens(loss=lambda x, y: ENTROPY(x.transpose(1, 2), y)),
    "numbers": lambda: of_numbers(lambda x, y: functional.mse_loss(x.squeeze(-1), y)),
    "numbers in an own loss": lambda: of_numbers(lambda x, y: (y - x.squeeze(-1)).square().mean()),
    "numbers by quantiles": lambda: of_numbers(lambda x, y: (y[None] - x).abs().mean()),
    "a teacher": lambda: distilled(log_softmax, lambda x: x.softmax(-1)),
    "hidden padding": lambda: hidden(shown=False),
    "three losses": lambda: next_tokens(loss=lambda x, y: sum(ENTROPY(x.flatten(0, 1), y.flatten()) for _ in "123")),
}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_own_loop_has_no_mistake(case):
    model, batch, loss = SOUND[case]()
    assert lamina.check(model, torch.optim.AdamW(spared(model), lr=1e-3), batch=batch, loss=loss) == []


def test_random_masks_of_rows_and_modes_of_modules_are_no_mistake_and_stay():
    class Drawn(Words):
        def forward(self, x, padding=None):
            return super().forward(torch.where(torch.rand(x.shape) < 0.2, 0, x))

    model = Drawn()
    model.layers[0].eval()
    batch = (IDS[:, :-1], IDS[:, 1:])
    found = lamina.check(model, batch=batch, loss=lambda m, b: ENTROPY(m(b[0]).flatten(0, 1), b[1].flatten()))
    assert "changed_inputs" not in {each.name for each in found}
    assert (model.training, model.layers[0].training, model.layers[1].training) == (True, False, True)


def test_rows_as_classes_and_masks_among_a_batch_are_no_mistake():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Mean(16), Mean(16)

        def forward(self, x, y):
            return self.first(x), self.second(y)

    def contrast(model, batch):
        first, second = (functional.normalize(x, dim=-1) for x in model(*batch[:2]))
        return ENTROPY(60 * first @ second.T, torch.arange(len(first)))

    ids = Tokens(items=24).ids
    batch = (ids[:12], ids[12:], torch.zeros(12))
    assert lamina.check(Towers(), batch=batch, loss=contrast) == []
    model, (x, labels), _ = hidden(shown=False)
    batch = (x, x == 0, labels)
    assert lamina.check(model, batch=batch, loss=lambda m, b: ENTROPY(m(b[0], b[1]), b[2])) == []


def test_padding_among_the_labels_of_a_decoder_whose_encoder_is_masked():
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    labels = torch.where(torch.arange(12) < 8, IDS % 50 + 1, 0)
    batch = {"input_ids": IDS, "attention_mask": (torch.arange(12) < 9).long().expand(6, -1), "labels": labels}
    assert [each.name for each in lamina.check(model, batch=batch)] == ["labels_of_padding"]
    batch["labels"] = labels.masked_fill(labels == 0, -100)
    assert lamina.check(model, batch=batch) == []


def test_a_compiled_model_is_checked_as_an_eager_one():
    model, batch, loss = next_tokens("means")
    model.compile(backend="eager")
    assert [each.name for each in lamina.check(model, batch=batch, loss=loss)] == ["sees_next_token"]


def test_masters_in_float32_stand_for_the_weights():
    model = llama().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    assert lamina.check(model, torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0)) == []
    (found,) = lamina.check(model, torch.optim.AdamW(masters[:-1], lr=1e-4, weight_decay=0.0))
    assert found.name == "in_no_optimizer"


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.scale


class LoRALinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_lora(train):
    model = NanoGpt().requires_grad_(False)
    for layer in model.h:
        layer.attn.c_attn = LoRALinear(layer.attn.c_attn.requires_grad_(train))
    return model


def of(model, **options):
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **{"weight_decay": 0.0, **options}
    )
    return [each.name for each in lamina.check(model, optimizer)]


def test_optimizers_of_adapters_gains_and_swapped_numbers():
    assert of(with_lora(train=True)) == ["adapters"]
    assert of(with_lora(train=False)) == []
    model = NanoGpt()
    model.ln_f = RMS(16)
    assert of(model, weight_decay=0.1) == ["decayed_gains"]
    groups = [{"params": [*model.parameters()], "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
    with_empty = torch.optim.AdamW(groups)
    assert [each.name for each in lamina.check(model, with_empty)] == ["decayed_gains"]
    assert of(model, weight_decay=0.01) == []
    assert of(NanoGpt(), lr=1e-8, eps=1e-4) == ["large_epsilon"]


def test_a_rate_of_sgd_that_replaces_the_weights():
    model, batch, loss = next_tokens()
    found = lamina.check(model, torch.optim.SGD(model.parameters(), lr=1e4), batch=batch, loss=loss)
    assert [each.name for each in found] == ["rate_of_adam"]
    assert lamina.check(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, loss=loss) == []


def test_a_product_of_a_parameter_is_no_parameter():
    model = NanoGpt()
    model.scale = nn.Parameter(torch.ones(16)) * 0.5
    model.last = model.lm_head.weight * 2
    (found,) = lamina.check(model)
    assert found.name == "unregistered"
    assert found.what.startswith("scale hold")


def test_new_tokens_of_a_frozen_table_and_an_end_that_is_padding():
    model = llama()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[IDS[0, 0]] = table.mean(0)
    batch = {"input_ids": IDS, "labels": IDS}
    assert lamina.check(model, batch=batch) == []
    table.requires_grad_(False)
    assert [each.name for each in lamina.check(model, batch=batch)] == ["untrained_rows"]
    ids, there = IDS % 50 + 2, torch.ones_like(IDS)
    ids[:, -4:], there[:, -3:] = 1, 0
    batch = {"input_ids": ids, "attention_mask": there, "labels": ids.masked_fill(ids == 1, -100)}
    assert [each.name for each in lamina.check(llama(pad_token_id=1), batch=batch)] == ["mask_and_labels"]
    batch["labels"] = ids.masked_fill(there == 0, -100)
    assert lamina.check(llama(pad_token_id=1), batch=batch) == []


def test_a_router_without_a_gradient_and_rows_of_masked_words():
    class Choice(NanoGpt):
        def __init__(self):
            super().__init__(layers=3)
            for layer in self.h:
                layer.router = nn.Linear(16, 2)
                layer.register_forward_hook(lambda m, args, x: x * (1 + m.router(x).argmax(-1)[..., None]))

    assert [x.name for x in lamina.check(Choice(), batch={"idx": IDS[:, :-1], "targets": IDS[:, 1:]})] == [
        "no_gradient_to_parts"
    ]
    labels = torch.where(torch.arange(12) % 4 == 0, IDS, -100)
    labels[1] = -100
    assert "empty_rows" not in [x.name for x in lamina.check(llama(), batch={"input_ids": IDS, "labels": labels})]
    labels = torch.where(torch.arange(12) > 7, IDS, -100)
    labels[1] = -100
    assert "empty_rows" in [x.name for x in lamina.check(llama(), batch={"input_ids": IDS, "labels": labels})]
