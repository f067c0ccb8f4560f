"""`lamina.check` on properties: what must change the outputs and what must not, and what the loss's gradient asks."""

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, RandLoraConfig, VBLoRAConfig, get_peft_model
from torch import nn
from torch.nn import functional
from training.test_check import adamw
from training.test_check_losses import ENTROPY, IDS, Words
from training.watching.loops import VOCAB, NanoGpt, llama
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import lamina

X, Y = IDS[:, :-1] % 50 + 2, IDS[:, 1:] % 50 + 2
PADDED = torch.where(torch.arange(12) < torch.tensor([12, 5, 7, 6, 9, 6])[:, None], IDS % 50 + 2, 1)
SHOWN = (PADDED != 1).long()


def of(model, loss=lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten()), batch=(X, Y), optimizer=None, **options):
    return model, optimizer, {"batch": batch, "loss": lambda m, b: loss(m(b[0]), b[1]), **options}


def likelihood(x, y):
    return x.log_softmax(-1).gather(-1, y[..., None])[..., 0]


class Changed(Words):
    """A model of words, in which ``change`` gets the hidden states before the head."""

    def __init__(self, change=lambda x: x, wrap=lambda layer: layer):
        super().__init__()
        self.layers = nn.ModuleList(map(wrap, [*self.layers, *Words().layers]))
        self.change = change

    def forward(self, x, padding=None):
        hidden = self.change(self.words(x) + self.places(torch.arange(x.shape[1])))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(self.norm(hidden))


class Around(nn.Module):
    """A layer with a second residual connection, or with none."""

    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x, **options):
        return self.layer(x, **options) + self.factor * x


def dropped():
    model = Words()
    model.head = nn.Sequential(model.head, nn.Dropout(0.1))
    return model


class Fixed(Words):
    """Words of 0.02 beside sinusoids of 1."""

    def __init__(self, scale):
        super().__init__()
        angles = torch.arange(32.0)[:, None] / 100 ** (torch.arange(8) / 8)
        self.places = nn.Embedding.from_pretrained(torch.cat([angles.sin(), angles.cos()], 1))
        nn.init.normal_(self.words.weight, std=scale)


class Queries(nn.Module):
    """An encoder's layer whose mask hides keys, or queries."""

    def __init__(self, keys):
        super().__init__()
        self.norm, self.project, self.keys = nn.LayerNorm(16), nn.Linear(16, 48), keys
        self.second, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x, shown):
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / 4).masked_fill(shown[:, None, :] == 0 if self.keys else shown[:, :, None] == 0, -1e4)
        x = x + scores.softmax(-1) @ v
        return x + self.out(self.second(x))


class Encoder(nn.Module):
    def __init__(self, keys=True, mean=False, places=True, p=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = nn.Embedding(VOCAB, 16), nn.Embedding(32, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Queries(keys) for _ in range(2))
        self.mean, self.p, self.placed = mean, p, places
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x, shown=None):
        shown = torch.ones_like(x) if shown is None else shown
        hidden = self.words(x) + (self.places(torch.arange(x.shape[1])) if self.placed else 0)
        hidden = functional.dropout(hidden, self.p, True if self.p == 0.1 else self.training)
        for layer in self.layers:
            hidden = layer(hidden, shown)
        weights = torch.ones_like(shown) if self.mean else shown
        return self.head((hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True))


def masked(**options):
    batch = (PADDED, SHOWN, torch.arange(6) % 3)
    return Encoder(**options), None, {"batch": batch, "loss": lambda m, b: ENTROPY(m(b[0], b[1]), b[2])}


def classes(**options):
    return of(Encoder(**options), ENTROPY, (IDS, torch.arange(6) % 3))


class Tanh(nn.Module):
    """A norm that is a tanh (DyT)."""

    def __init__(self, alpha):
        super().__init__()
        self.alpha, self.weight = nn.Parameter(torch.full((1,), alpha)), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight


def bounded(alpha):
    model = Words()
    for layer in model.layers:
        layer.norm1, layer.norm2 = Tanh(alpha), Tanh(alpha)
    return of(model)


class Bypassing(Changed):
    """A model that calls the parts of its layers, and not the layers."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = self.factor * hidden + layer._sa_block(layer.norm1(hidden), mask, None)
            hidden = self.factor * hidden + layer._ff_block(layer.norm2(hidden))
        return self.head(self.norm(hidden))


def hooked(factor):
    model = Changed()
    for layer in model.layers:
        for parameter in layer.self_attn.parameters():
            parameter.register_hook(lambda gradient: factor * gradient)
    return of(model)


def by_kept(none):
    kept = torch.arange(11) < torch.tensor([7, 0 if none else 5, 7, 6, 9, 6])[:, None]
    loss = lambda x, b: ((x.square().mean(-1) * b).sum(1) / b.sum(1)).mean()  # noqa: E731
    return of(Words(), loss, (X, kept))


class Own(nn.Module):
    """An RMSNorm of an own name, with what a mistake changes."""

    def __init__(self, width, start=1.0, plus=0.0, mean=True):
        super().__init__()
        self.w, self.plus, self.mean = nn.Parameter(torch.full((width,), start)), plus, mean

    def forward(self, x):
        square = x.pow(2)
        square = square.mean(-1, keepdim=True) if self.mean else square.sum(-1, keepdim=True)
        return x * torch.rsqrt(square + 1e-6) * (self.w + self.plus)


def normed(**options):
    model = Words()
    for layer in model.layers:
        layer.norm1, layer.norm2 = Own(16, **options), Own(16, **options)
    return of(model)


def experts(deviation):
    model = Changed()
    for layer in model.layers:
        layer.experts = nn.Parameter(deviation * torch.randn(4, 16, 32))
        layer.register_forward_hook(lambda m, args, x: x + (x @ m.experts[0] @ m.experts[1].mT) * 1e-3)
    return of(model)


def shared(part):
    model = Changed()
    for layer in model.layers:
        setattr(layer, part, getattr(model.layers[0], part))
    return of(model)


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.zeros(()))

    def forward(self, model, batch):
        return ENTROPY(model(batch[0]).flatten(0, 1), batch[1].flatten()) * (-self.size).exp() + self.size


def weighted(trained):
    model, loss = Words(), Weighted()
    optimizer = adamw(model)
    if trained:
        optimizer.add_param_group({"params": loss.parameters(), "weight_decay": 0.0})
    return model, optimizer, {"batch": (X, Y), "loss": loss}


def by_mask(rows):
    shown = (torch.arange(12) > 7).long().repeat(6, 1)
    shown[:rows] = 0

    def loss(model, batch):
        each = -likelihood(model(batch["ids"])[:, :-1], batch["ids"][:, 1:]) * batch["shown"][:, 1:]
        return (each.sum(1) / batch["shown"].sum(1).clamp(min=1)).mean()

    return Words(), None, {"batch": {"ids": IDS % 50 + 2, "shown": shown}, "loss": loss}


def in_float16(model, batch):
    with torch.autocast("cpu", torch.float16):
        logits = model(batch[0])
    return ENTROPY(logits.float().flatten(0, 1), batch[1].flatten())


def with_router(coefficient=0.01, experts_per_token=2):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    router = {"output_router_logits": experts_per_token == 2, "router_aux_loss_coef": coefficient}
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=4, **router, **sizes)
    config.num_experts_per_tok = experts_per_token
    return MixtralForCausalLM(config), None, {"batch": {"input_ids": IDS, "labels": IDS}}


def decaying(model, which):
    groups = [[], []]
    for name, parameter in model.named_parameters():
        groups[which(name, parameter)].append(parameter)
    rows = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0, 0.1), strict=True)]
    return model, torch.optim.AdamW(rows), {}


def mamba(all_of, spares=True):
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4))
    named = list(model.named_parameters())
    plain = {n for n, p in named if (p.ndim < 2 and not (all_of and n.endswith("D"))) or (spares and "A_log" in n)}
    return decaying(model, lambda name, p: name not in plain)


def normed_weights(spare):
    model = NanoGpt()
    for layer in model.h:
        torch.nn.utils.parametrizations.weight_norm(layer.mlp.c_fc if hasattr(layer.mlp, "c_fc") else layer.mlp[0])
    return decaying(model, lambda name, p: p.ndim > 1 and not (spare and "original0" in name))


def with_shares(shape):
    """Return a model with positive factors that decay, of a LayerScale or of RWKV's form."""
    model = Changed()
    for layer in model.layers:
        layer.share = nn.Parameter(torch.linspace(0.1, 0.9, 16).reshape(shape))
        layer.register_forward_hook(lambda m, args, x: args[0] + m.share * (x - args[0]))
    shares = [layer.share for layer in model.layers]
    others = [p for p in model.parameters() if all(p is not share for share in shares)]
    groups = [{"params": shares, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return of(model, optimizer=torch.optim.AdamW(groups, lr=1e-3))


def adapted(learns):
    model = BertForSequenceClassification(
        BertConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name or (learns and "lora" in name))
    return model, adamw(model, lr=1e-3), {"batch": {"input_ids": IDS, "labels": torch.arange(6) % 2}}


def replaced(table):
    model = llama()
    if table:
        model.first = model.model.embed_tokens
        model.forward = lambda input_ids, labels=None, first=model.model.embed_tokens: type(model).forward(
            model, inputs_embeds=first(input_ids), labels=labels
        )
        model.model.embed_tokens = nn.Embedding(VOCAB, model.config.hidden_size)
    return model, None, {"batch": {"input_ids": IDS, "labels": IDS}}


def shift(x, y):
    return ENTROPY(x[:-1].flatten(0, 1), y[1:].flatten())


def padded_targets(ignored):
    ids = torch.where(torch.arange(13) < torch.tensor([13, 5, 7, 6, 9, 6])[:, None], torch.arange(13) * 3 + 2, 0)
    ids = ids + (ids > 0) * torch.arange(6)[:, None]
    index = 0 if ignored else -100
    loss = lambda x, y: ENTROPY(x.flatten(0, 1), y.flatten(), ignore_index=index)  # noqa: E731
    return of(Words(), loss, (ids[:, :-1], ids[:, 1:]))


class Branches(nn.Module):
    """Attention with norms of queries and keys, and a model that adds it to the residual stream."""

    def __init__(self, norm):
        super().__init__()
        self.project, self.norms = nn.Linear(16, 48), nn.ModuleList(norm(16) for _ in range(2))

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return functional.scaled_dot_product_attention(self.norms[0](q), self.norms[1](k), v, is_causal=True)


class Outside(Words):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.layers = nn.ModuleList(Branches(norm) for _ in range(3))
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.before = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))

    def forward(self, x, padding=None):
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        for at, (layer, part) in enumerate(zip(self.layers, self.parts, strict=True)):
            hidden = hidden + layer(self.before[2 * at](hidden))
            hidden = hidden + part(self.before[2 * at + 1](hidden))
        return self.head(self.norm(hidden))


def loud():
    model = Changed()
    torch.manual_seed(9)
    for layer in model.layers:
        layer.norm_first = False
        nn.init.normal_(layer.linear1.weight, std=2.0)
        nn.init.normal_(layer.linear2.weight, std=2.0)
    return of(model)


class Plain(nn.Module):
    """A network of convolutions without norms."""

    def __init__(self, start):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3 if not at else 8, 8, 3, padding=1) for at in range(8)]
        for layer in layers:
            start(layer.weight)
        self.layers, self.head = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU()))), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def faded(weight):
    nn.init.normal_(weight, std=0.01)


def plain(start):
    model = Plain(start)
    batch = (torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5)
    return of(model, ENTROPY, batch, torch.optim.SGD(model.parameters(), lr=1e-4))


class Turned(Words):
    """Words at sinusoids of positions that forward computes."""

    def __init__(self, dtype):
        super().__init__()
        self.places, self.dtype = nn.Identity(), dtype

    def forward(self, x, padding=None):
        rates = 100 ** (-torch.arange(8) / 8)
        angles = torch.arange(x.shape[1], dtype=self.dtype)[:, None].float() * rates
        hidden = self.words(x) + 0.02 * torch.cat([angles.cos(), angles.sin()], -1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(self.norm(hidden))


class Counted(Words):
    """Words whose learned positions are counts of shown tokens."""

    def __init__(self, dtype):
        super().__init__()
        self.places, self.counts, self.dtype = nn.Identity(), nn.Embedding(512, 16), dtype
        nn.init.normal_(self.counts.weight, std=0.02)

    def forward(self, x, padding=None):
        at = torch.ones_like(x).cumsum(1).to(self.dtype).long()
        hidden = self.words(x) + self.counts(at)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(self.norm(hidden))


def long(model):
    ids = torch.randint(2, VOCAB, (2, 321), generator=torch.Generator().manual_seed(0))
    return of(model, batch=(ids[:, :-1], ids[:, 1:]))


def begun(times, where="begin"):
    ids = torch.cat([torch.ones(6, times, dtype=torch.int64), X], 1)
    ids = ids.flip(1) if where == "end" else ids
    return of(Words(), batch=(ids[:, :-1], ids[:, 1:]))


def normalized(**options):
    model = Words()
    model.head = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16, **options), nn.Linear(16, VOCAB))
    return of(model, lambda x, y: ENTROPY(x, y.flatten()))


def added(part):
    model = Words()
    model.more = part
    return of(model)


def adapter(merged, config=IA3Config, **options):
    model = get_peft_model(llama(), config(target_modules=["k_proj", "down_proj"], **options))
    if merged:
        model.merge_adapter()
    return model.train(), adamw(model, decay=0.0), {"batch": {"input_ids": IDS, "labels": IDS}}


def switching():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "num_experts": 4}
    config = SwitchTransformersConfig(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    return SwitchTransformersForConditionalGeneration(config), None, {"batch": {"input_ids": X, "labels": Y}}


FAULTS = {
    "rounded_positions": lambda: long(Turned(torch.bfloat16)),
    "rounded_positions: counts": lambda: long(Counted(torch.bfloat16)),
    "doubled_tokens": lambda: begun(2),
    "doubled_tokens: at the end": lambda: begun(3, "end"),
    "statistics_of_norms": lambda: normalized(momentum=0.99),
    "statistics_of_norms: swapped": lambda: normalized(eps=0.1, momentum=1e-5),
    "no_gradient_to_parts: a norm": lambda: added(nn.LayerNorm(16)),
    "no_gradient_to_parts: a second head": lambda: added(nn.Linear(16, VOCAB)),
    "adapters: IA3 is merged": lambda: adapter(True, feedforward_modules=["down_proj"]),
    "adapters: OFT is merged": lambda: adapter(True, OFTConfig, oft_block_size=4),
    "coefficients": lambda: (m := llama(), adamw(m, betas=(0.1, 0.001)), {}),
    "changed_inputs: keys": lambda: masked(keys=False),
    "changed_inputs: no positions": lambda: classes(places=False),
    "changed_inputs: tags": lambda: (Returning(Words("batch first")), None, {"batch": (X, X * 7 % 5)}),
    "changed_inputs: dropout": lambda: classes(p=0.1),
    "skip_connections: none": lambda: of(Changed(wrap=lambda layer: Around(layer, -1.0))),
    "skip_connections: two": lambda: of(Changed(wrap=lambda layer: Around(layer, 1.0))),
    "skip_connections: none around parts": lambda: of(Bypassing(0.0)),
    "weight_scales: louder than the input": loud,
    "stuck_at_zero: queries and keys": lambda: of(Outside(lambda width: Own(width, start=0.0))),
    "faded_gradients": lambda: plain(faded),
    "decayed_logarithms": lambda: mamba(all_of=False, spares=False),
    "skip_connections: drowned words": lambda: of(Fixed(0.02)),
    "shift_of_labels: log-probabilities": lambda: of(
        Words(), lambda x, y: (likelihood(x, y) * torch.tensor([1, -1, 2, -1, 1, -2.0])[:, None]).mean(), (X, X)
    ),
    "shift_of_labels: rows": lambda: of(Words(), shift, (IDS % 50 + 2, IDS % 50 + 2)),
    "shift_of_labels: of another tokenizer": lambda: of(Words(), batch=(X, X * 7 % 50 + 2)),
    "sign_of_loss": lambda: of(Words(), lambda x, y: likelihood(x, y).mean()),
    "first_loss: of all classes": lambda: of(
        Words(), lambda x, y: -(functional.one_hot(y, VOCAB) * x.log_softmax(-1)).mean()
    ),
    "first_loss: a sum": lambda: of(Words(), lambda x, y: -likelihood(x, y).sum()),
    "first_loss: a row without a mask": lambda: by_kept(none=True),
    "first_loss: a router": lambda: with_router(10.0),
    "first_loss: a row": lambda: of(Changed(lambda x: x.index_fill(0, torch.tensor([2]), float("nan")))),
    "empty_rows": lambda: by_mask(3),
    "labels_of_padding": lambda: padded_targets(ignored=False),
    "loss_inputs: several classes": lambda: of(
        Encoder(), ENTROPY, (IDS, (torch.arange(18).view(6, 3) % 2 + torch.eye(3).repeat(2, 1)).clamp(max=1))
    ),
    "loss_inputs: dropout": lambda: of(dropped()),
    "norm_gains: 1 + 1": lambda: normed(plus=1.0),
    "norm_gains: of a sum": lambda: normed(mean=False),
    "norm_gains: tanh of 0": lambda: bounded(0.0),
    "weight_scales": lambda: experts(1.5),
    "repeated_layer: a part": lambda: shared("linear1"),
    "unregistered: of the loss": lambda: weighted(trained=False),
    "float16_gradients": lambda: (Words(), None, {"batch": (X, Y), "loss": in_float16}),
    "no_gradient_to_parts: routers": lambda: with_router(experts_per_token=1),
    "no_gradient_to_parts: hooks": lambda: hooked(0.0),
    "no_gradient_to_parts: a table": lambda: replaced(table=True),
    "decayed_gains: Mamba": lambda: mamba(all_of=True),
    "decayed_gains: scales": lambda: with_shares((16,)),
    "decayed_gains: weight norm": lambda: normed_weights(spare=False),
    "adapters": lambda: adapted(learns=False),
}


class TimeFirst(Words):
    """A model whose batches are [tokens, rows], as in PyTorch's word_language_model."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, padding=None):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.head(self.norm(self.layers(self.words(x) + self.places(torch.arange(len(x)))[:, None], mask)))


class Returning(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(x)
        return logits, ENTROPY(logits.flatten(0, 1), y.flatten())


class Contrast(Words):
    """A model whose loss compares each row with the other rows, and with as many negatives."""

    def forward(self, x, y, z):
        one, *others = (functional.normalize(super(Contrast, self).forward(ids).mean(1), dim=-1) for ids in (x, y, z))
        return ENTROPY(one @ torch.cat(others).T / 0.02, torch.arange(len(x)))


class Copying(Words):
    """An encoder and a decoder that learn to copy."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.encoder.head = nn.Linear(16, 16)

    def forward(self, x, y):
        hidden = self.words(y) + self.places(torch.arange(y.shape[1])) + self.encoder(x)[:, None]
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(self.norm(hidden))


def copying():
    ids = IDS % 50 + 2
    loss = lambda m, b: ENTROPY(m(b[0], b[0][:, :-1]).flatten(0, 1), b[0][:, 1:].flatten())  # noqa: E731
    return Copying(), None, {"batch": (ids,), "loss": loss}


class Pairs(Words):
    """A model of text pairs, whose logits compare the rows of a batch at a temperature of 14, as CLIP's do."""

    def forward(self, x, padding=None):
        one, other = (functional.normalize(super(Pairs, self).forward(ids).mean(1), dim=-1) for ids in (x, x.flip(1)))
        return 14 * one @ other.T


SOUND = {
    "negatives": lambda: (
        Contrast(),
        None,
        {"batch": (IDS.repeat(2, 1), IDS.repeat(2, 1).flip(1), IDS.repeat(2, 1).roll(3, 1))},
    ),
    "a copy": copying,
    "returns below 0": lambda: of(
        Words(),
        lambda x, y: (likelihood(x, y) * torch.rand(y.shape, generator=torch.Generator().manual_seed(0))).mean(),
    ),
    "VB-LoRA": lambda: adapter(False, VBLoRAConfig, vector_length=8, num_vectors=16, r=2),
    "RandLoRA": lambda: adapter(False, RandLoraConfig, r=4),
    "angles": lambda: long(Turned(torch.float32)),
    "counts": lambda: long(Counted(torch.float32)),
    "a begin": lambda: begun(1),
    "a batch norm": lambda: normalized(momentum=0.01, eps=1e-3),
    "IA3": lambda: adapter(False, feedforward_modules=["down_proj"]),
    "a router of Switch": switching,
    "time first": lambda: of(TimeFirst(), batch=(X.T, Y.T)),
    "time first, with labels": lambda: (Returning(TimeFirst()), None, {"batch": (X.T, Y.T)}),
    "residual connections outside of the layers": lambda: of(Outside()),
    "convolutions": lambda: plain(nn.init.kaiming_normal_),
    "pairs": lambda: of(Pairs(), lambda x, _: ENTROPY(x, torch.arange(len(x))), (IDS.repeat(2, 1), Y)),
    "keys": masked,
    "words and sinusoids alike": lambda: of(Fixed(1.0)),
    "dropout in training": lambda: classes(p=0.2),
    "layers": lambda: of(Changed()),
    "parts of layers": lambda: of(Bypassing(1.0)),
    "hooks that scale": lambda: hooked(0.5),
    "tanh": lambda: bounded(0.5),
    "a mask in each row": lambda: by_kept(none=False),
    "shares that decay": lambda: with_shares((1, 1, 16)),
    "log-probabilities": lambda: of(Words(), lambda x, y: -likelihood(x, y).mean()),
    "a router": with_router,
    "answers": lambda: by_mask(0),
    "hidden padding": lambda: padded_targets(ignored=True),
    "own norms": normed,
    "small experts": lambda: experts(0.2),
    "a loss whose parameter learns": lambda: weighted(trained=True),
    "Mamba": lambda: mamba(all_of=False),
    "weight norm": lambda: normed_weights(spare=True),
    "LoRA": lambda: adapted(learns=True),
    "one table": lambda: replaced(table=False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_property_that_does_not_hold_is_found_by_its_check_alone(fault):
    model, optimizer, options = FAULTS[fault]()
    found = lamina.check(model, optimizer or adamw(model), **options)
    assert {each.name for each in found} == {fault.partition(":")[0]}


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_property_is_no_mistake(case):
    model, optimizer, options = SOUND[case]()
    found = lamina.check(model, optimizer or adamw(model), **options)
    assert (found, found.notes) == ([], [])


def test_padding_in_a_mean_and_decoders_without_positions_are_notes():
    for (model, _, options), says in (
        (masked(mean=True), "mean"),
        (of(NoPlaces()), "two tokens"),
        (of(Unturned()), "two tokens"),
        (added(nn.Linear(16, 1)), "for this batch"),
    ):
        found = lamina.check(model, adamw(model), **options)
        assert found == []
        (note,) = found.notes
        assert says in str(note)


class NoPlaces(Words):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding.from_pretrained(torch.zeros(32, 16))


def test_a_model_in_bfloat16_whose_mask_hides_tokens_is_checked():
    model, _, options = masked()
    assert lamina.check(model.bfloat16(), **options) == []


class Unturned(NoPlaces):
    """A decoder of transformers' kind that computes rotary positions, which its first layer does not use (Flint)."""

    config = SimpleNamespace(layer_types=["full_attention"])

    def forward(self, x):
        torch.arange(x.shape[1]).float().cos()
        return super().forward(x)


def test_states_of_an_encoder_that_the_loss_computes_are_no_mixed_rows():
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    model = BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, d_model=16, **sizes))
    ids = IDS % 50 + 3

    def loss(model, batch):
        return model(encoder_outputs=model.model.encoder(batch[0]), labels=batch[1]).loss

    assert lamina.check(model, adamw(model), batch=(ids, ids.roll(1, 1)), loss=loss) == []
