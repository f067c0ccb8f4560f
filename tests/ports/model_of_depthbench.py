"""A model of DepthBench's form, from its equations: the names of its weights, several streams, or attention over depth.

Its checkpoints are OLMo-core's. The branch of a hyper-connection has its norm and module under a second name.
"""

import json

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

N, WIDTH, HEADS, INNER, VOCABULARY, EPS = 4, 32, 4, 48, 61, 1e-6


def rms(x, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


class Norm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.empty(WIDTH))

    def forward(self, x):
        return self.weight * rms(x, self.eps)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("w_q", "w_k", "w_v", "w_out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.w_q, self.w_k, self.w_v))
        half = WIDTH // HEADS // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(half) / half)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin for t in (q, k))
        return self.w_out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def doubly_stochastic(logits, eps=0.0):
    """Liger's kernel adds ``eps`` to the first softmax and to every sum; DepthBench's own code has none."""
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(19):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


class Connection(nn.Module):
    """Around a branch: streams [batch, tokens, n, width] to the next ones."""

    def __init__(self, kind, norm, module, name):
        super().__init__()
        self.kind = kind
        self.branch = nn.Module()
        self.branch.norm = norm
        setattr(self.branch, name, module)
        self.run = [norm, module]
        flat, square = N * WIDTH, N * N
        shapes = {
            "hc": {
                "static_alpha": (N, N + 1), "dynamic_alpha_proj": (WIDTH, N + 1), "dynamic_alpha_scale": (),
                "static_beta": (N,), "dynamic_beta_proj": (WIDTH,), "dynamic_beta_scale": (),
            },
            "mhc": {
                "pre_bias": (N,), "post_bias": (N,), "residual_bias": (N, N), "pre_dynamic_proj": (flat, N),
                "post_dynamic_proj": (flat, N), "residual_dynamic_proj": (flat, square),
                "pre_gate": (), "post_gate": (), "residual_gate": (),
            },
            "liger_mhc": {
                "phi": (flat, square + 2 * N), "b": (square + 2 * N,),
                "alpha_pre": (), "alpha_post": (), "alpha_res": (),
            },
        }  # fmt: skip
        for parameter, shape in shapes[kind].items():
            self.register_parameter(parameter, nn.Parameter(torch.empty(shape)))

    def weights(self, streams):
        """What is read [n], what goes on [n, n] from its first to its last index, and what is written [n]."""
        if self.kind == "hc":
            normed = rms(streams, 1e-8)
            alpha = self.static_alpha + self.dynamic_alpha_scale * torch.tanh(normed @ self.dynamic_alpha_proj)
            beta = self.static_beta + self.dynamic_beta_scale * torch.tanh(normed @ self.dynamic_beta_proj)
            return alpha[..., 0], alpha[..., 1:], beta
        flat = streams.flatten(-2)
        if self.kind == "mhc":
            flat = rms(flat, 1e-8)
            read = torch.sigmoid(self.pre_gate * (flat @ self.pre_dynamic_proj) + self.pre_bias)
            write = 2 * torch.sigmoid(self.post_gate * (flat @ self.post_dynamic_proj) + self.post_bias)
            logits = (flat @ self.residual_dynamic_proj).unflatten(-1, (N, N))
            return read, doubly_stochastic(self.residual_gate * logits + self.residual_bias), write
        y = rms(flat, 1e-6) @ self.phi
        pre, post, res = y.split([N, N, N * N], -1)
        b_pre, b_post, b_res = self.b.split([N, N, N * N])
        matrix = doubly_stochastic((self.alpha_res * res + b_res).unflatten(-1, (N, N)), 1e-6)
        post = 2 * torch.sigmoid(self.alpha_post * post + b_post)
        return torch.sigmoid(self.alpha_pre * pre + b_pre), matrix.mT, post  # stored as [out, in]

    def forward(self, streams):
        read, mix, write = self.weights(streams)
        norm, module = self.run
        branch = module(norm(torch.einsum("...s,...sd->...d", read, streams)))
        return torch.einsum("...st,...sd->...td", mix, streams) + write.unsqueeze(-1) * branch.unsqueeze(-2)


class Depth(nn.Module):
    """softmax_i(query . norm(v_i)) v_i."""

    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(WIDTH, 1, bias=False), Norm(1e-5)

    def forward(self, states):
        values = torch.stack(states)
        return (self.proj(self.norm(values)).softmax(0) * values).sum(0)


class Model(nn.Module):
    """``kind``: "hc", "mhc" or "liger_mhc"; or "attnres" with ``size`` sub-layers in a block of depth."""

    def __init__(self, kind, layers, size=1):
        super().__init__()
        self.kind, self.size = kind, size
        self.embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict()
        fused = 1e-5 if kind == "attnres" else EPS
        for index in range(layers):
            block = self.blocks[str(index)] = nn.Module()
            block.attention_norm = Norm(fused if index else EPS)
            block.feed_forward_norm = Norm(fused)
            block.attention, block.feed_forward = Attention(), FeedForward()
            for name in ("attention", "feed_forward") if kind != "attnres" else ():
                norm, module = getattr(block, f"{name}_norm"), getattr(block, name)
                setattr(block, f"{name}_hyper_connection", Connection(kind, norm, module, name))
            for name in ["attn_res"] * (index > 0) + ["mlp_res"] if kind == "attnres" else ():
                depth = Depth()
                setattr(block, f"{name}_proj", depth.proj)
                setattr(block, f"{name}_norm", depth.norm)
        if kind == "attnres":
            depth = Depth()
            self.res_proj, self.res_norm = depth.proj, depth.norm
        self.lm_head = nn.Module()
        self.lm_head.norm = Norm(fused)
        self.lm_head.w_out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4 if parameter.ndim < 2 else 0.3)

    def forward(self, ids):
        x = self.embeddings(ids)
        last = self.by_depth(x) if self.kind == "attnres" else self.by_streams(x)
        return self.lm_head.w_out(last)

    def by_streams(self, x):
        streams = x.unsqueeze(-2).expand(-1, -1, N, -1)
        for block in self.blocks.values():
            streams = block.feed_forward_hyper_connection(block.attention_hyper_connection(streams))
        norm = self.lm_head.norm
        return norm(streams.mean(-2)) if self.kind == "liger_mhc" else norm(streams).sum(-2)

    def by_depth(self, x):
        states, total = [], x  # the sums of the blocks before, and of this one so far
        for index, block in enumerate(self.blocks.values()):
            for half, name in enumerate(("attention", "feed_forward")):
                all_states = [*states, total]
                of = "mlp_res" if half else "attn_res"
                read = x
                if half or index:
                    values = torch.stack(all_states)
                    logits = getattr(block, f"{of}_proj")(getattr(block, f"{of}_norm")(values))
                    read = (logits.softmax(0) * values).sum(0)
                branch = getattr(block, name)(getattr(block, f"{name}_norm")(read))
                if (2 * index + half) % self.size == 0:
                    states, total = all_states, branch
                else:
                    total = total + branch
        values = torch.stack([*states, total])
        return self.lm_head.norm((self.res_proj(self.res_norm(values)).softmax(0) * values).sum(0))

    def config(self, name, more):
        norm = {"name": "rms", "eps": EPS, "bias": False}
        mixer = {"name": "default", "n_heads": HEADS, "bias": False, "rope": {"name": "default", "theta": 10000}}
        block = {"name": name, "sequence_mixer": mixer, "layer_norm": norm, **more}
        block["feed_forward"] = {"hidden_size": INNER, "bias": False}
        sizes = {"d_model": WIDTH, "vocab_size": VOCABULARY, "n_layers": len(self.blocks)}
        return {"model": {**sizes, "block": block, "lm_head": {"layer_norm": norm, "bias": False}}}

    def save(self, folder, name, more):
        save({"model": self.state_dict()}, checkpoint_id=folder / "model_and_optim", no_dist=True)
        (folder / "config.json").write_text(json.dumps(self.config(name, more)), "utf-8")
