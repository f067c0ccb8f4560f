"""Serving engines as their sources have them, without their kernels: vLLM 0.33's and SGLang 0.5.23's rules.

Both build the base model on the meta device, replace modules, and load weights by name, cast to one dtype. vLLM merges
projections by rewriting the source of the forward, and replaces norms by class as the first instance of it computes;
SGLang replaces every module whose class is called ...RMSNorm.
"""

import ast
import inspect
import re
import textwrap
import types

import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# SGLang raises an error for any other; the second line's are replicated there.
STYLES = {"colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate", "packed_colwise", "packed_rowwise"}
STYLES |= {"embedding_rowwise", "replicated_with_grad_allreduce", "moe_tp_experts"}


class Linear(nn.Module):
    """In place of an engine's linear layers, which are none of torch's: of one matrix or of several, stacked."""

    def __init__(self, *replaced, tp_size=1):
        super().__init__()
        self.tp_size, self.output_sizes = tp_size, [one.out_features for one in replaced]
        self.weight = nn.Parameter(torch.empty(sum(self.output_sizes), replaced[0].in_features, device="meta"))
        bias = torch.empty(sum(self.output_sizes), device="meta")
        self.bias = None if replaced[0].bias is None else nn.Parameter(bias)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """In place of an engine's norm: x over its root mean square, times the weight or 1 + the weight."""

    def __init__(self, size, eps, *, zero_centered=False):
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(size, device="meta")) if size else None

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return y.to(x.dtype)
        return (1 + self.weight) * y.to(x.dtype) if self.zero_centered else self.weight * y.to(x.dtype)


class Attention:
    """In place of an engine's: one per layer, that the attention function finds by ``module.layer_idx``."""

    def __init__(self):
        self.calls = 0


def attention(module, query, key, value, attention_mask, *, attention_instances=None, **kwargs):
    """The attention function as engines register it; here over whole sequences, as a causal mask would have it."""
    assert attention_mask is None  # the engine knows which tokens belong together
    attention_instances[module.layer_idx].calls += 1
    return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})


def source_of(module):
    """The syntax tree of a module's forward as ``inspect`` gives it, and the function."""
    function = inspect.unwrap(type(module).forward)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    tree.decorator_list, tree.returns = [], None
    return tree, function


def calls_of(tree, name):
    """The calls self.name(argument); ValueError unless there is one, and nothing else of the name."""
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == name]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and any(n.func is use for use in uses)]
    if not len(uses) == len(calls) == 1 or len(calls[0].args) != 1:
        raise ValueError(f"{name} is not called exactly once")
    return calls[0]


class Replaced(ast.NodeTransformer):
    def __init__(self, nodes):
        self.nodes = nodes

    def visit(self, node):
        return next((new for old, new in self.nodes if old is node), None) or self.generic_visit(node)


def merge(module, names, merged):
    """Compute the projections by one product, and split it: in the source, where they read one input."""
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
        return {}
    tree, function = source_of(module)
    try:
        calls = [calls_of(tree, name) for name in names]
    except ValueError:
        return {}
    if len({ast.dump(call.args[0]) for call in calls}) > 1:
        return {}
    places = [i for i, part in enumerate(tree.body) if any(node is call for call in calls for node in ast.walk(part))]
    targets = [f"_merged_{index}" for index in range(len(names))]
    line = (
        f"{', '.join(targets)} = self.{merged}({ast.unparse(calls[0].args[0])}).split(self.{merged}.output_sizes, -1)"
    )
    pairs = [(call, ast.Name(id=name, ctx=ast.Load())) for call, name in zip(calls, targets, strict=True)]
    tree = Replaced(pairs).visit(tree)
    tree.body.insert(places[0], ast.parse(line).body[0])
    names_of: dict = {}
    exec(compile(ast.unparse(tree), "<merged>", "exec"), function.__globals__, names_of)
    setattr(module, merged, Linear(*(getattr(module, name) for name in names)))
    for name in names:
        delattr(module, name)
    module.forward = types.MethodType(names_of["forward"], module)
    return {name: (merged, index) for index, name in enumerate(names)}


def epsilon(norm):
    return getattr(norm, "eps", getattr(norm, "variance_epsilon", None))


def formula(module):
    """What a leaf module computes: None, or whether it is an RMSNorm with a weight of 1 + w; by its numbers."""
    if next(module.children(), None) is not None or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight, eps = getattr(module, "weight", None), epsilon(module)
    if eps is None or not isinstance(weight, nn.Parameter | None):
        return None
    if any(p is not weight for p in module.parameters()):
        return None
    if not (size := getattr(module, "hidden_size", 0) if weight is None else len(weight)):
        return None
    own = type(module).__new__(type(module))
    own.__dict__.update(module.__dict__, _parameters={}, _buffers={})
    gain = torch.linspace(0.5, 2, size)
    own._parameters["weight"] = None if weight is None else nn.Parameter(gain)
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)) + 0.5
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for zero_centered, expected in ((False, y if weight is None else gain * y), (True, (1 + gain) * y)):
        if torch.allclose(own(x), expected, rtol=1e-5, atol=1e-6):
            return zero_centered
    return None


class Engine:
    """A checkpoint's base model as an engine serves it. ``rules`` are "vllm" or "sglang"."""

    def __init__(self, folder, rules, dtype=torch.float32, tp_size=1):
        config = AutoConfig.from_pretrained(folder)
        assert config == config.get_text_config(), "it would be taken for a multimodal model"
        config._attn_implementation, config.dtype = rules, dtype
        with torch.device("meta"):
            model = AutoModel.from_config(config, dtype=dtype)
        assert type(model)._supports_attention_backend
        self.config, self.model, self.dtype = config, model, dtype
        self.merged: dict[str, tuple[str, int]] = {}
        self.replace(rules, {f"model.{key}": style for key, style in model.tp_plan.items()}, tp_size)
        if type(model.get_input_embeddings()) is nn.Embedding:  # both keep the factor of a subclass
            model.set_input_embeddings(nn.Embedding(config.vocab_size, config.hidden_size, device="meta"))
        self.instances = {index: Attention() for index in range(config.num_hidden_layers)}

    def replace(self, rules, plan, tp_size):
        modules, first = dict(self.model.named_modules()), {}
        for name, module in modules.items():
            if rules == "vllm" and "forward" not in vars(module):
                first.setdefault(type(module), formula(module))
                merged = merge(module, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
                merged = merged or merge(module, ("gate_proj", "up_proj"), "gate_up_proj")
                self.merged |= {f"{name}.{one}": (f"{name}.{to}", index) for one, (to, index) in merged.items()}
        for name, module in dict(self.model.named_modules()).items():
            if isinstance(module, nn.Linear):
                style = next((plan[key] for key in plan if re.match(key, f"model.{name}")), "replicate")
                assert style in STYLES or rules == "vllm", (name, style)
                self.model.set_submodule(name, Linear(module, tp_size=tp_size))
            elif rules == "vllm" and first.get(type(module)) is not None:
                size = 0 if module.weight is None else len(module.weight)
                self.model.set_submodule(name, RMSNorm(size, epsilon(module), zero_centered=first[type(module)]))
            elif rules == "sglang" and type(module).__name__.endswith("RMSNorm"):
                size = self.config.hidden_size if module.weight is None else len(module.weight)
                self.model.set_submodule(name, RMSNorm(size, epsilon(module)))

    def load(self, model):
        """Load the weights of a model, cast to the engine's dtype; buffers that are not saved stay as they are."""
        weights, stacked = {}, {}
        for name, value in model.model.state_dict().items():
            module, _, own = name.rpartition(".")
            value = value.to(self.dtype)
            if module in self.merged:
                into, index = self.merged[module]
                stacked.setdefault(f"{into}.{own}", {})[index] = value
            else:
                weights[name] = value
        weights |= {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in stacked.items()}
        missing, unexpected = self.model.load_state_dict(weights, assign=True, strict=False)
        assert not unexpected
        kept = dict(model.model.named_buffers())  # engines build none on the meta device
        assert set(missing) <= set(kept)
        for name in kept.keys() - weights.keys():
            parent, _, own = name.rpartition(".")
            self.model.get_submodule(parent).register_buffer(own, kept[name], persistent=False)
        self.head = model.lm_head
        return self

    @torch.no_grad()
    def logits(self, ids):
        """The logits [1, tokens, vocabulary] as the engine has them from the last states."""
        given = {"position_ids": torch.arange(ids.shape[1])[None], "attention_instances": self.instances}
        output = self.model.eval()(input_ids=ids, inputs_embeds=None, use_cache=False, return_dict=False, **given)
        assert [one.calls for one in self.instances.values()] == [1] * self.config.num_hidden_layers
        logits, cap = self.head(output[0]), getattr(self.config, "final_logit_softcapping", None)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits * getattr(self.config, "logit_scale", 1.0)
