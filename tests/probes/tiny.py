"""Models small enough for a test, and their states caught by hooks of the test's own."""

import torch
import transformers
from probes import naive_states

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**SIZES, "max_position_embeddings": 64}


def made(name, sizes, **more):
    """A model of transformers' own class, by its name."""
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**sizes, **more})).eval()


def llama(layers=3, width=32, **more):
    sizes = {**TEXT, "hidden_size": width, "num_hidden_layers": layers, "num_key_value_heads": 2}
    return made("LlamaForCausalLM", sizes, initializer_range=0.2, **more)


def bert(layers=2, **more):
    return made("BertForMaskedLM", TEXT, num_hidden_layers=layers, initializer_range=0.2, **more)


def albert(**more):
    return made("AlbertForMaskedLM", TEXT, embedding_size=16, num_hidden_layers=3, **more)


def gemma2(**more):
    return made("Gemma2ForCausalLM", SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, **more)


def vit(name="ViTModel"):
    sizes = {size: number for size, number in SIZES.items() if size != "vocab_size"}
    return made(name, sizes, num_hidden_layers=2, image_size=16, patch_size=4)


def blocks(sequences=6, tokens=16, vocabulary=61):
    return torch.randint(0, vocabulary, (sequences, tokens))


@torch.no_grad()
def outputs(model, ids, modules):
    """What goes into and comes out of each module, float64: [(input, output)] in the order given."""
    found = {}
    handles = []
    for number, module in enumerate(modules):

        def hook(module, args, kwargs, output, number=number):
            given = args[0] if args else kwargs["hidden_states"]
            made = output[0] if isinstance(output, tuple) else output
            found[number] = (given.clone().double(), made.clone().double())

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return [found[number] for number in sorted(found)]


def states(model, ids):
    """x^0 ... x^N before the final norm, float64."""
    return list(naive_states.states(model, {"input_ids": ids}))


def value(frame, metric, column="value", **where):
    """The one value of a metric at a place."""
    chosen = frame[frame["metric"] == metric]
    for name, wanted in where.items():
        chosen = chosen[chosen[name] == wanted]
    assert len(chosen) == 1, chosen
    return chosen[column].iloc[0]
