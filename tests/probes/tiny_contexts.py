"""Small models of many architectures as probes are given them, and what a layer does written out with hooks."""

import torch
import transformers
from probes import tiny
from transformers import LlamaConfig

import lamina
from lamina.probes.engine.measure import make_context, run
from lamina.probes.engine.probe_settings import ProbeSettings

VOCABULARY = 61


def llama(num_layers=2, **changes):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(num_hidden_layers=num_layers, **{**sizes, **heads, **changes})


@torch.no_grad()
def shake(model, scale=0.3):
    """Weights large enough and gains different enough that no mistake is too small to see."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, scale)
        else:
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter)).add_(0.05 * torch.randn_like(parameter))
    return model


def lamina_model(placement, num_layers=2, scale=0.3, **changes):
    return shake(lamina.build(llama(num_layers, **changes), placement).eval(), scale)


def transformers_model(name, **changes):
    """A two-layer model of transformers' own class, by its name: BertForMaskedLM, GPT2LMHeadModel, ..."""
    cls = getattr(transformers, name)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    if cls.config_class.model_type == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return shake(cls(cls.config_class(**{**sizes, "pad_token_id": 0, **changes})).eval())


def context_of(model, sequences=2, tokens=5, seed=1, **settings):
    ids = torch.randint(3, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))
    return make_context(model, ProbeSettings(**settings), ids)


def measured(probe, context, strict=True):
    """The frame of one probe."""
    return run(context, [probe], strict=strict)[probe.name]


def value(frame, metric, role, layer=-1, **more):
    """The one value of a row."""
    return float(tiny.value(frame, metric, role=role, layer=layer, **more))


def state_to_state(context, ids, first, last):
    """x^first of one sequence of ids [1, tokens], and the function from it to x^last: the model run with hooks."""
    layers = context.structure.layers
    state = []

    def keep(module, args, kwargs):
        state.append(args[0] if args else kwargs["hidden_states"])

    hook = layers[first].module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        context.base(input_ids=ids)
    hook.remove()
    start = state[layers[first].call]

    def function(x):
        calls, found = [], []

        def replace(module, args, kwargs):
            calls.append(1)
            if len(calls) - 1 == layers[first].call:
                return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
            return None

        one = layers[first].module.register_forward_pre_hook(replace, with_kwargs=True)
        two = layers[last - 1].module.register_forward_hook(lambda module, args, output: found.append(output))
        context.base(input_ids=ids)
        one.remove()
        two.remove()
        output = found[layers[last - 1].call]
        return output[0] if isinstance(output, tuple) else output

    return start, function


def jacobian_matrix(function, x):
    """The whole matrix, as torch.autograd.functional has it."""
    matrix = torch.autograd.functional.jacobian(function, x, vectorize=True)
    return matrix.reshape(-1, x.numel()).double()


def spectral(matrix):
    """The largest singular value of the whole matrix."""
    return float(torch.linalg.matrix_norm(matrix, ord=2))
