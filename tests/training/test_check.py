"""`lamina.check`: each mistake is found by its own check, and what is done on purpose is none."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from training.watching.loops import VOCAB, NanoGpt, Tokens, llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
)
from transformers import T5ForConditionalGeneration as T5

import lamina
from lamina.errors import UserError, one_line
from lamina.training.monitor import mistakes

IDS = Tokens(items=2).ids
BATCH = {"input_ids": IDS, "labels": IDS}


def adamw(model, decay=0.1, kind=torch.optim.AdamW, **options):
    """AdamW whose decay leaves gains and biases out."""
    groups = ([p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == large] for large in (True, False))
    groups = [{"params": p, "weight_decay": decay * (not n)} for n, p in enumerate(groups)]
    return kind(groups, **{"lr": 1e-3, **options})


def names(model, optimizer=None, **options):
    return [finding.name for finding in lamina.check(model, optimizer or adamw(model), **options)]


def nano_batch(shift=True):
    return {"idx": IDS[:, :-1], "targets": IDS[:, 1:] if shift else IDS[:, :-1]}


def lora(model, **options):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


def changed(model, act):
    with torch.no_grad():
        act(model)
    return model


def reentrant(hooked):
    model = lora(llama(layers=3), modules_to_save=["lm_head"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if not hooked:
        model.disable_input_require_grads()
    return model.train()


class Detached(NanoGpt):
    def forward(self, idx, targets=None):
        layer = self.h[2]
        layer.register_forward_pre_hook(lambda m, args: (args[0].detach(),)) if not layer._forward_pre_hooks else None
        return super().forward(idx, targets)


def detached(path):
    model = llama(layers=4)
    model.get_submodule(path).register_forward_hook(lambda m, args, output: output.detach())
    return model


class Bidirectional(NanoGpt):
    """A GPT whose causal mask was forgotten."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))


def steps_of(rate, part=""):
    """AdamW with a rate of its own for the parameters whose names hold a part."""

    def optimizer(model):
        named = list(model.named_parameters())
        groups = [{"params": [p for n, p in named if part in n], "lr": rate}]
        groups += [{"params": [p for n, p in named if part not in n]}] if part else []
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)

    return optimizer


def padded(mask=None, labels=None):
    """Rows that end in padding, which neither the mask nor the labels count."""
    ids, there = IDS.clone(), torch.ones_like(IDS)
    ids[ids == 0], ids[:, -5:], there[:, -5:] = 1, 0, 0
    return {
        "input_ids": ids,
        "attention_mask": there if mask is None else mask(there),
        "labels": torch.where(there == 1, ids, -100) if labels is None else ids,
    }


class Plain(nn.Module):
    """A wrapper whose loss does not shift."""

    def __init__(self):
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids, labels):
        logits = self.inner(input_ids).logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def without(model, *parts):
    return torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith(parts)], weight_decay=0.0)


def stale(model):
    optimizer = adamw(model)
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    return optimizer


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def trained(model, optimizer, steps=12):
    for _ in range(steps):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()
    return model, optimizer


def falling(model):
    """Rates that halve from layer to layer, where they should double."""
    rates = {f"layers.{at}.": 1e-3 * 0.5**at for at in range(3)}
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if part in n], "lr": rate} for part, rate in rates.items()]
    rest = [p for n, p in named if "layers." not in n]
    return torch.optim.AdamW([*groups, {"params": rest}], weight_decay=0.0)


def loaded(lacks):
    """A trained model, of which what holds a part of a name was not loaded."""
    made, _ = trained(*(lambda m: (m, adamw(m, lr=0.02)))(llama(layers=4)))
    state = {name: value for name, value in made.state_dict().items() if not any(part in name for part in lacks)}
    model = llama(layers=4)
    model.load_state_dict(state, strict=False)
    return model


class Listed(nn.Module):
    """A model whose layers stand in a plain list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layers, self.head = nn.Embedding(VOCAB, 16), [nn.Linear(16, 16)], nn.Linear(16, VOCAB)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, idx, targets):
        hidden = self.words(idx)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def set_all(model, name, value):
    for parameter in model.model.parameters():
        setattr(parameter, name, value)
    return model


def repeated():
    model = NanoGpt()
    model.h = nn.ModuleList([model.h[0]] * 3)
    return model


def tied_by_data():
    model = llama()
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    return model


def classes(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32, num_labels=3, **options)).train()


def disabled():
    model = lora(llama())
    model.disable_adapter_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


class Classifier(nn.Module):
    """An own classifier of sequences, whose outputs go through a last function."""

    def __init__(self, last=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.last = nn.Embedding(VOCAB, 16), nn.Linear(16, 5), last or nn.Identity()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, **options) for _ in range(2))
        self.places = nn.Parameter(torch.randn(12, 16) * 0.02)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x, mask=None):
        hidden = self.words(x) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.last(self.head(hidden.mean(1)))


ROWS = (Tokens(items=16).ids, torch.arange(16) % 5)
ENTROPY = functional.cross_entropy


def by(loss, last=None, batch=ROWS, **options):
    """An own classifier that a loss of its outputs and the labels trains."""
    model = Classifier(last, **{"batch_first": True, **options})
    return model, None, {"batch": batch, "loss": lambda m, b: loss(m(b[0]), b[1])}


def masked_floats(square):
    model = Classifier(batch_first=True)
    return model, None, {"batch": ROWS, "loss": lambda m, b: ENTROPY(m(b[0], square), b[1])}


def batch_of(model=None, **values):
    return model or llama(), None, {"batch": {**BATCH, **values}}


def tail(of=0, rows=1):
    """Rows whose ends are one token."""
    ids = IDS.clone()
    ids[ids == of], ids[:rows, -5:] = 1, of
    return ids


def images(values):
    torch.manual_seed(0)
    return Images(), None, {"batch": {"x": values, "targets": torch.arange(8)}}


def two(model):
    head = torch.optim.SGD([model.lm_head.weight], lr=0.1)
    return [adamw(model), head]


def masked(**zero):
    batch = {**BATCH, "attention_mask": torch.ones_like(IDS), "labels": IDS.clone()}
    for name, value in zero.items():
        batch[name][1] = value
    return batch


def scaled(part, factor):
    return lambda model: [p.mul_(factor) for n, p in model.named_parameters() if part in n]


def norms(value, part="norm"):
    return lambda model: [p.fill_(value) for n, p in model.named_parameters() if part in n]


def grown(zeros=False):
    """A model with new tokens, whose table is frozen if their rows are not 0."""
    model = llama()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[IDS[0, 0]] = torch.zeros(()) if zeros else table.mean(0)
    table.requires_grad_(zeros)
    return model, None, {"batch": BATCH}


COPIES = IDS[:1].expand(3, -1).contiguous()
FEW = torch.full_like(IDS, 3).index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(4))
FAULTS = {
    "in_no_optimizer": lambda: (m := llama(), without(m, "model.layers.1.mlp"), {}),
    "in_no_optimizer: the head": lambda: (m := llama(), without(m, "lm_head"), {}),
    "in_no_optimizer: a layer that was replaced": lambda: (m := llama(), stale(m), {}),
    "in_two_optimizers": lambda: (m := llama(), two(m), {}),
    "decayed_gains": lambda: (m := llama(), torch.optim.AdamW(m.parameters(), weight_decay=0.1), {}),
    "no_gradient_to_blocks": lambda: (reentrant(hooked=False), None, {"batch": BATCH}),
    "no_gradient_to_blocks: unseen": lambda: (reentrant(hooked=False), None, {}),
    "no_gradient_to_blocks: detached": lambda: (Detached(layers=4), None, {"batch": nano_batch()}),
    "no_gradient_to_parts": lambda: (detached("model.layers.2.self_attn.k_proj"), None, {"batch": BATCH}),
    "no_gradient_to_parts: a sub-layer": lambda: (detached("model.layers.1.mlp"), None, {"batch": BATCH}),
    "untied": lambda: (
        m := llama(tie_word_embeddings=True),
        setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.detach().clone())),
        {},
    ),
    "untied: an own model": lambda: (changed(NanoGpt(), lambda m: m.lm_head.weight.copy_(m.wte.weight)), None, {}),
    "empty_rows": lambda: (llama(), None, {"batch": masked(attention_mask=0)}),
    "empty_rows: labels": lambda: (llama(), None, {"batch": masked(labels=-100)}),
    "shift_of_labels: twice": lambda: (llama(), None, {"batch": {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}}),
    "shift_of_labels: never": lambda: (NanoGpt(), None, {"batch": nano_batch(shift=False)}),
    "shift_of_labels: an own loss": lambda: (Plain(), None, {"batch": BATCH}),
    "first_loss": lambda: (changed(llama(), scaled("lm_head", 60.0)), None, {"batch": BATCH}),
    "first_loss: a sum": lambda: (llama(), None, {"batch": BATCH, "loss": lambda m, b: 22 * m(**b).loss}),
    "norm_gains: off": lambda: (changed(llama(), norms(0.0)), None, {}),
    "norm_gains: a few off": lambda: (changed(llama(), norms(0.0, "1.input_layernorm")), None, {}),
    "norm_gains: double": lambda: (changed(llama(), norms(2.0)), None, {}),
    "weight_scales: wide": lambda: (changed(llama(), scaled("mlp", 60.0)), None, {}),
    "weight_scales: narrow": lambda: (changed(llama(), scaled("_proj", 0.02)), None, {}),
    "weight_scales: one layer": lambda: (changed(llama(layers=6), scaled("layers.3.", 12.0)), None, {}),
    "float16_gradients": lambda: (llama().half(), None, {}),
    "idle_groups": lambda: (m := llama(), steps_of(0.0, "layers.1.")(m), {}),
    "idle_groups: all": lambda: (m := llama(), steps_of(0.0)(m), {}),
    "rate_of_adam": lambda: (m := llama(), steps_of(0.5)(m), {}),
    "sign_of_loss: maximize": lambda: (m := llama(), adamw(m, maximize=True), {"batch": BATCH}),
    "sign_of_loss: maximize, unseen": lambda: (m := llama(), sgd(m, maximize=True), {}),
    "coefficients": lambda: (m := llama(), adamw(m, betas=(0.999, 0.9)), {}),
    "large_epsilon": lambda: (m := llama(), adamw(m, eps=0.1), {"batch": BATCH}),
    "large_epsilon: unseen": lambda: (m := llama(), adamw(m, eps=0.1), {}),
    "strong_decay": lambda: (m := llama(), adamw(m, decay=10.0, lr=1e-5), {}),
    "strong_decay: of SGD": lambda: (m := llama(), adamw(m, 0.1, torch.optim.SGD, lr=0.1), {}),
    "strong_decay: of Adam": lambda: (m := llama(), adamw(m, 0.1, torch.optim.Adam), {}),
    "rounded_updates": lambda: (m := llama().bfloat16(), adamw(m, lr=1e-7), {}),
    "rounded_updates: of float32": lambda: (m := llama(), sgd(m, lr=1e-9), {"batch": BATCH}),
    "no_gradient": lambda: (m := llama().requires_grad_(False), torch.optim.AdamW(m.parameters()), {}),
    "no_gradient: detached": lambda: (llama(), None, {"batch": BATCH, "loss": lambda m, b: m(**b).loss.detach()}),
    "no_gradient: adapters": lambda: (disabled(), None, {"batch": BATCH}),
    "no_gradient: scaled by 0": lambda: (lora(llama(), lora_alpha=0), None, {"batch": BATCH}),
    "no_gradient_to_parts: a table": lambda: (detached("model.embed_tokens"), None, {"batch": BATCH}),
    "unregistered": lambda: (Listed(), None, {"batch": nano_batch()}),
    "unregistered: unseen": lambda: (Listed(), None, {}),
    "repeated_layer": lambda: (repeated(), None, {}),
    "shared_memory": lambda: (tied_by_data(), None, {"batch": BATCH}),
    "not_finite": lambda: (changed(llama(), lambda m: m.lm_head.weight[1].fill_(float("nan"))), None, {}),
    "equal_units": lambda: (changed(llama(), lambda m: m.lm_head.weight.fill_(0.02)), None, {}),
    "high_dropout": lambda: (classes(hidden_dropout_prob=0.9), None, {}),
    "high_dropout: of attention": lambda: (llama(attention_dropout=1.0), None, {}),
    "freezing_without_effect": lambda: (m := llama(), setattr(m.model, "requires_grad", False), {}),
    "freezing_without_effect: a misspelling": lambda: (set_all(llama(), "require_grad", False), None, {}),
    "partly_loaded": lambda: (loaded(["layers.2.", "layers.3."]), None, {"batch": BATCH}),
    "partly_loaded: the head": lambda: (loaded(["lm_head"]), None, {}),
    "frozen_head": lambda: (get_peft_model(classes(), LoraConfig(r=2, target_modules=["query"])), None, {}),
    "loss_inputs: probabilities": lambda: by(ENTROPY, nn.Softmax(-1)),
    "loss_inputs: behind ReLU": lambda: by(ENTROPY, nn.ReLU()),
    "loss_inputs: of a sigmoid": lambda: by(
        lambda x, y: functional.binary_cross_entropy_with_logits(x, functional.one_hot(y, 5).float()), nn.Sigmoid()
    ),
    "loss_inputs: no logarithm": lambda: by(functional.nll_loss),
    "sign_of_loss": lambda: by(lambda x, y: -ENTROPY(x, y)),
    "additive_mask": lambda: masked_floats(torch.ones(12, 12).tril()),
    "changed_inputs: mixed rows": lambda: by(ENTROPY, batch_first=False),
    "equal_inputs": lambda: (llama(), None, {"batch": {"input_ids": COPIES, "labels": COPIES}}),
    "equal_inputs: images": lambda: images(torch.rand(1, 3, 8, 8).expand(8, -1, -1, -1)),
    "equal_inputs: one token": lambda: (classes(), None, {"batch": {"input_ids": FEW, "labels": torch.arange(2)}}),
    "changed_inputs: order": lambda: batch_of(position_ids=torch.zeros_like(IDS)),
    "beyond_tables": lambda: batch_of(input_ids=IDS + 20, labels=IDS + 20),
    "beyond_tables: labels": lambda: (classes(), None, {"batch": {"input_ids": ROWS[0], "labels": ROWS[1]}}),
    "beyond_tables: positions": lambda: batch_of(llama(max_position_embeddings=8)),
    "image_values": lambda: images(torch.rand(8, 3, 8, 8) * 255),
    "image_values: twice": lambda: images(torch.rand(8, 3, 8, 8) / 255),
    "shift_of_labels: of a decoder": lambda: batch_of(t5(), decoder_input_ids=IDS),
    "reads_padding": lambda: (classes(), None, {"batch": {"input_ids": tail(), "labels": torch.arange(2)}}),
    "labels_of_padding": lambda: (llama(pad_token_id=0), None, {"batch": {"input_ids": tail(), "labels": tail()}}),
    "shift_of_labels: other rows": lambda: batch_of(labels=IDS.flip(0)),
    "rates_by_depth": lambda: (m := llama(layers=3), falling(m), {}),
    "mask_and_labels": lambda: (llama(), None, {"batch": padded(labels="all")}),
    "mask_and_labels: inverted": lambda: (llama(pad_token_id=0), None, {"batch": padded(mask=lambda m: 1 - m)}),
    "sees_next_token": lambda: (Bidirectional(), None, {"batch": nano_batch()}),
    "sees_next_token: none is masked": lambda: (masked_words(), None, {"batch": BATCH}),
    "untrained_rows": lambda: grown(zeros=True),
    "adapters": lambda: (lora(llama(), lora_alpha=4096), None, {}),
    "stuck_at_zero": lambda: (changed(lora(llama()), scaled("lora_A", 0.0)), None, {"batch": BATCH}),
    "stuck_at_zero: gated": lambda: (
        changed(llama(), lambda m: [f(m) for f in (scaled("up_proj", 0.0), scaled("down_proj", 0.0))]),
        None,
        {"batch": BATCH},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_by_its_check_alone_and_says_what_to_do(fault):
    model, optimizer, options = FAULTS[fault]()
    found = lamina.check(model, optimizer or adamw(model), **options)
    name = fault.partition(":")[0]
    follows = {"no_gradient_to_parts"} if fault == "mask_and_labels: inverted" else set()  # to queries of equal tokens
    assert {finding.name for finding in found} - {"in_no_optimizer"} <= {name, "weight_scales"} | follows
    (first, *_) = (finding for finding in found if finding.name == name)
    assert all((first.what, first.why, first.do))
    assert str(first) in str(found)


def test_what_many_do_on_purpose_is_a_note():
    model = llama().bfloat16()
    found = lamina.check(model, adamw(model, lr=1e-5))
    assert found == []
    assert [each.name for each in found.notes] == ["rounded_updates"]
    assert "(note: " in str(found)


def family(name, **changes):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    own = {"num_key_value_heads": 2, "intermediate_size": 48, "n_layer": 3, "n_head": 4, "n_embd": 32, "ffn_dim": 48}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**sizes, **own, "word_embed_proj_dim": 32, "head_dim": 8, **changes})
    return AutoModelForCausalLM.from_config(config)


def frozen(model, part):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


def depth_scaled(model):
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.mul_((2 * at + 2) ** -0.5)
        layer.mlp.down_proj.weight.mul_((2 * at + 2) ** -0.5)


class Residuals(nn.Module):
    """An own model with a learned scale of 0 on each branch (ReZero) and norms without gains (adaLN-zero)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(3))
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.words(x)
        for scale, layer in zip(self.scales, self.layers, strict=True):
            hidden = hidden + scale * layer(hidden, src_mask=mask)
        logits = self.head(self.norm(hidden))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def masked_words():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=32))


class Images(nn.Module):
    """A convolution whose norm keeps statistics, and takes images alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x, targets):
        logits = self.head(self.norm(self.conv(x)).mean((2, 3)))
        return logits, functional.cross_entropy(logits, targets)


def t5():
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5(T5Config(**sizes, decoder_start_token_id=0))


SOUND = {
    **{
        name: lambda name=name: (family(name), BATCH)
        for name in ("qwen3", "gpt2", "gemma2", "opt", "olmo2", "nemotron")
    },
    "tied": lambda: (llama(tie_word_embeddings=True), BATCH),
    "lora": lambda: (lora(llama()), BATCH),
    "lora under checkpoints": lambda: (reentrant(hooked=True), BATCH),
    "frozen but the head": lambda: (frozen(llama(), "lm_head"), BATCH),
    "frozen but a layer": lambda: (frozen(llama(layers=4), "layers.3."), BATCH),
    "depth-scaled": lambda: (changed(llama(layers=12), depth_scaled), BATCH),
    "zero output projections": lambda: (changed(llama(), scaled("o_proj", 0.0)), BATCH),
    "a zero head": lambda: (changed(llama(), scaled("lm_head", 0.0)), BATCH),
    "a zero head and zero branches": lambda: (
        changed(llama(), lambda m: [scaled(part, 0.0)(m) for part in ("lm_head", "o_proj", "down_proj")]),
        BATCH,
    ),
    "zero queries": lambda: (changed(llama(), scaled("q_proj", 0.0)), BATCH),
    "padding that does not count": lambda: (llama(pad_token_id=0), padded()),
    "learned zero scales": lambda: (Residuals(), {"x": IDS[:, :-1], "targets": IDS[:, 1:]}),
    "an own loop": lambda: (NanoGpt(), nano_batch()),
    "bidirectional": lambda: (masked_words(), {"input_ids": IDS % 7, "labels": torch.where(IDS > 6, IDS, -100)}),
    "an encoder and a decoder": lambda: (t5(), BATCH),
    "a batch norm": lambda: (Images(), {"x": torch.rand(8, 3, 8, 8), "targets": torch.arange(8)}),
}


@pytest.mark.parametrize("setup", SOUND)
def test_what_is_sound_or_done_on_purpose_is_none(setup):
    model, batch = SOUND[setup]()
    model.train()
    assert names(model, batch=batch) == []
    assert names(model) == []


def test_a_placement_whose_branches_end_in_a_norm_may_start_it_at_zero():
    model = changed(lamina.build(llama().config, "peri_ln"), norms(0.0, "out_norm"))
    assert names(model, batch=BATCH) == []


def test_a_small_decay_a_head_alone_and_a_scaled_loss_are_no_mistakes():
    model = llama()
    assert names(model, torch.optim.AdamW(model.parameters())) == []
    wide = llama(hidden_size=64, intermediate_size=256, layers=4)
    assert names(wide, torch.optim.AdamW(wide.lm_head.parameters(), weight_decay=0.0)) == []
    with torch.autocast("cpu", torch.float16):
        assert names(model, scaler=torch.amp.GradScaler("cpu")) == []
        assert names(model) == ["float16_gradients"]


def test_a_schedule_that_starts_at_zero_is_no_mistake():
    model = llama()
    optimizer = adamw(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    assert names(model, optimizer) == []
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-3})
    assert names(model, optimizer) == []


def test_gradients_that_are_switched_off_are_a_mistake():
    model = llama()
    with torch.no_grad():
        assert names(model) == names(model, batch=BATCH) == ["no_gradient"]


HEALTHY_MODELS = {
    "a new head on trained layers": lambda: get_peft_model(classes(), LoraConfig(task_type="SEQ_CLS")),
    "a frozen part": lambda: frozen(llama(layers=4), "layers.3."),
    "a trained model": lambda: loaded([]),
    "a frozen teacher in a list": lambda: (m := NanoGpt(), setattr(m, "teacher", [NanoGpt().requires_grad_(False)]))[0],
    "a dropout of a half": lambda: classes(hidden_dropout_prob=0.5),
    "a method that freezes": lambda: (m := llama(), m.model.embed_tokens.requires_grad_(False))[0],
    "a zero layer": lambda: changed(llama(), lambda m: m.lm_head.weight.zero_()),
}


@pytest.mark.parametrize("case", HEALTHY_MODELS)
def test_a_model_that_was_put_together_on_purpose_is_no_mistake(case):
    assert names(HEALTHY_MODELS[case]()) == []


HEALTHY_LOSSES = {
    "own logits": lambda: by(ENTROPY),
    "log-probabilities": lambda: by(functional.nll_loss, nn.LogSoftmax(-1)),
    "log-probabilities to cross_entropy": lambda: by(ENTROPY, nn.LogSoftmax(-1)),
    "a usual smoothing": lambda: by(lambda x, y: ENTROPY(x, y, label_smoothing=0.1)),
    "a part that is maximized": lambda: by(lambda x, y: ENTROPY(x, y) - 0.1 * ENTROPY(x, x.softmax(-1))),
    "an added mask": lambda: masked_floats(torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1) == 1, -1e9)),
    "images of both signs": lambda: images(torch.randn(8, 3, 8, 8)),
    "two views of each row": lambda: (
        llama(),
        None,
        {"batch": {"input_ids": IDS.repeat(2, 1), "labels": IDS.repeat(2, 1)}},
    ),
    "an end of text": lambda: (llama(pad_token_id=0), None, {"batch": {"input_ids": IDS, "labels": IDS}}),
    "packed positions": lambda: batch_of(position_ids=(torch.arange(12) % 6)[None].expand(2, -1)),
    "hidden padding": lambda: (
        classes(),
        None,
        {"batch": {"input_ids": tail(), "attention_mask": (tail() != 0).long(), "labels": torch.arange(2)}},
    ),
    "an own decoder": lambda: (
        NanoGpt(),
        None,
        {"batch": (IDS[:, :-1], IDS[:, 1:]), "loss": lambda m, b: ENTROPY(m(b[0])[0].transpose(1, 2), b[1])},
    ),
}


@pytest.mark.parametrize("case", HEALTHY_LOSSES)
def test_a_usual_batch_and_loss_are_no_mistake(case):
    model, _, options = HEALTHY_LOSSES[case]()
    assert names(model, **options) == []


def test_a_model_in_eval_mode_is_said_and_no_mistake():
    model = classes().eval()
    found = lamina.check(model, adamw(model), batch={"input_ids": ROWS[0], "labels": ROWS[1] % 3})
    assert found == []
    assert "Call model.train() before you train" in str(found)
    assert "eval mode" not in str(lamina.check(model.train(), batch={"input_ids": ROWS[0], "labels": ROWS[1] % 3}))


class Prodigy(torch.optim.Optimizer):
    """An optimizer that finds its own rate, in factors of ``d``."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6, "weight_decay": 0.01})


class Adan(torch.optim.Optimizer):
    """An optimizer of three betas, and a decay that its small rates make weak, as Lion's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.98, 0.92, 0.99), "weight_decay": 10.0})


def gentle(model):
    """A schedule of torch whose first rate is 10,000 times below its highest."""
    optimizer = adamw(model, lr=3e-4)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-4)
    return optimizer


HEALTHY_OPTIMIZERS = {
    "a rate of its own": (llama, lambda m: Prodigy([p for p in m.parameters() if p.ndim > 1])),
    "three betas": (llama, lambda m: Adan([p for p in m.parameters() if p.ndim > 1])),
    "a reward": (llama, lambda m: adamw(m, maximize=True)),
    "equal betas": (llama, lambda m: adamw(m, betas=(0.95, 0.95))),
    "an epsilon of 1e-5": (llama, lambda m: adamw(m, eps=1e-5)),
    "a small decay of Adam": (llama, lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.01)),
    "a low rate in bfloat16": (lambda: llama().bfloat16(), lambda m: adamw(m, lr=1e-4)),
    "a schedule from near 0 in bfloat16": (lambda: llama().bfloat16(), gentle),
    "a rate of 1e-7 in float32": (llama, lambda m: adamw(m, lr=1e-7)),
    "layer-wise decay": (lambda: llama(layers=3), lambda m: steps_of(1e-4, "layers.0.")(m)),
    "Muon": (llama, lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02, weight_decay=0.1)),
    "none that restarts": (llama, lambda m: trained(m, adamw(m))[1]),
}


@pytest.mark.parametrize("case", HEALTHY_OPTIMIZERS)
def test_an_unusual_optimizer_is_no_mistake(case):
    make, optimizer = HEALTHY_OPTIMIZERS[case]
    model = make()
    loss = (lambda m, b: -m(**b).loss) if case == "a reward" else None
    assert names(model, optimizer(model), batch=BATCH, loss=loss) in ([], ["in_no_optimizer"])


def test_zeros_are_zeros_again_after_the_passes():
    model = changed(llama(), lambda m: [scaled(part, 0.0)(m) for part in ("lm_head", "o_proj", "down_proj")])
    before = copy.deepcopy(model.state_dict())
    assert names(model, batch=BATCH) == []
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_stays_as_it_is_and_so_do_the_random_states():
    model = NanoGpt()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lamina.check(model, adamw(model), batch=nano_batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert float(model.lm_head.weight.grad.mean()) == 1.0
    assert model.wte.weight.grad is None
    assert model.training


def test_a_check_that_breaks_stops_no_training_and_is_said(monkeypatch, tmp_path):
    def broken(setup):
        raise IndexError("index 33 is out of bounds")
        yield

    monkeypatch.setattr(mistakes, "one_line", one_line)
    monkeypatch.setitem(mistakes.CHECKS, "norm_gains", broken)
    model = llama()
    found = lamina.check(model, torch.optim.AdamW(model.model.parameters()))
    assert "in_no_optimizer" in [each.name for each in found]
    said = "norm_gains: IndexError: index 33 is out of bounds"
    assert said in found.unchecked
    optimizer = adamw(model)
    with lamina.watch(model, optimizer, output=tmp_path / "run") as monitor:
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        monitor.step()
    assert f"not checked: {said}" in (tmp_path / "run" / "watched.json").read_text()


def test_what_cannot_be_checked_is_said_and_bad_input_is_one_line():
    assert "Pass batch=" in str(lamina.check(NanoGpt()))
    assert "no loss. Pass loss=" in str(lamina.check(NanoGpt(), batch={"idx": IDS}))
    for arguments, says in ((("model",), "model: a str"), ((NanoGpt(), "adam"), "optimizer: a str")):
        with pytest.raises(UserError, match=says):
            lamina.check(*arguments)
    with pytest.raises(UserError, match="batch: NanoGpt does not run on this batch"):
        lamina.check(NanoGpt(), batch={"idx": IDS, "nothing": 3})
