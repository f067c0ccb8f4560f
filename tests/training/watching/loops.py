"""Tiny models and loops, and what a naive computation says of them."""

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from training.tiny_runs import layers, values
from transformers import LlamaConfig, LlamaForCausalLM

import lamina

VOCAB = 61


def llama(layers=2, **changed):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, **{**sizes, **changed}))


class Tokens(Dataset):
    def __init__(self, items=24, length=12):
        self.ids = torch.randint(0, VOCAB, (items, length), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Attention(nn.Module):
    """nanoGPT's attention, with a softmax that is written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        hidden = torch.ones(tokens, tokens).tril() == 0
        y = functional.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """A GPT in a few lines whose forward pass takes ``idx`` and ``targets``, as nanoGPT's does."""

    def __init__(self, layers=2, width=16, heads=2, length=32):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) if targets is not None else None
        return logits, loss


def loop(
    model, folder, steps=6, optimizer=None, spoil=None, loss_of=None, after=None, batches=None, says=True, **options
):
    """Train with plain PyTorch, watched if there is a folder; returns the monitor.

    Args:
        optimizer: one, or several that step together.
        spoil: called with the step (from 1) and the model once the gradients are there.
        loss_of: the loss of the model for a batch.
        after: called with the step behind the optimizers' steps.
        batches: of all steps; default: two new sequences each.
        says: whether the loop calls the monitor's ``step`` with the loss.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    batches = batches or Tokens(items=2 * steps).ids.split(2)
    context = lamina.watch(model, optimizer, output=str(folder), **options) if folder else nullcontext()
    with context as monitor:
        for step, batch in enumerate(batches, 1):
            loss = model(batch[:, :-1], batch[:, 1:])[1] if loss_of is None else loss_of(model, batch)
            loss.backward()
            if spoil:
                spoil(step, model)
            for each in optimizers:
                each.step()
            if after:
                after(step)
            for each in optimizers:
                each.zero_grad()
            if folder and says:
                monitor.step(loss)
    return monitor


def found(folder, metric, step):
    """{(layer, sublayer, role): value} of one metric at one step."""
    return values(layers(folder), metric, step)


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors))


class Naive:
    """By hand, and by the parameters' names, what the monitor should find at each step of a training."""

    def __init__(self, model, parts):
        self.model, self.parts = model, parts  # {(layer, sublayer, role): names' beginnings}
        self.names = {place: self._matching(starts) for place, starts in parts.items()}
        self.before = {}

    def _matching(self, starts):
        return [name for name, _ in self.model.named_parameters() if name.startswith(starts)]

    def keep(self):
        parameters = dict(self.model.named_parameters())
        self.gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        self.before = {n: p.detach().clone() for n, p in parameters.items()}

    def norms(self, what):
        return {place: norm_of([what[n] for n in names if n in what]) for place, names in self.names.items()}

    def updates(self):
        moved = {n: p.detach() - self.before[n] for n, p in self.model.named_parameters()}
        return self.norms(moved)

    def moments(self, optimizer, key):
        states = {n: optimizer.state[p][key] for n, p in self.model.named_parameters() if p in optimizer.state}
        states = {n: s.clamp(min=0).sqrt() for n, s in states.items()} if key == "exp_avg_sq" else states
        return self.norms(states)


def llama_parts(layers=2, prefix="model."):
    outside = (f"{prefix}embed_tokens",), (f"{prefix}norm", "lm_")
    inside = ("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")
    return _parts(layers, *outside, f"{prefix}layers.", *inside)


def nano_parts(layers=2):
    return _parts(layers, ("wte", "wpe"), ("ln_f", "lm_head"), "h.", ("attn", "ln_1"), ("mlp", "ln_2"))


def _parts(layers, embedding, readout, path, attention, feed_forward):
    parts = {(-1, "block", "embedding"): embedding, (-1, "block", "readout"): readout}
    for layer in range(layers):
        for sublayer, names in {"attention": attention, "feed_forward": feed_forward, "block": ("",)}.items():
            parts[layer, sublayer, "all"] = tuple(f"{path}{layer}.{name}" for name in names)
    return parts
