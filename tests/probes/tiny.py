"""Models small enough for a test, and their states caught by hooks of the test's own."""

import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**SIZES, "max_position_embeddings": 64}


def llama(layers=3, width=32, **more):
    sizes = {**TEXT, "hidden_size": width, "num_hidden_layers": layers, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, **more)).eval()


def bert(layers=2, **more):
    return BertForMaskedLM(BertConfig(**TEXT, num_hidden_layers=layers, initializer_range=0.2, **more)).eval()


def albert(**more):
    return AlbertForMaskedLM(AlbertConfig(**TEXT, embedding_size=16, num_hidden_layers=3, **more)).eval()


def gemma2(**more):
    return Gemma2ForCausalLM(
        Gemma2Config(**SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, **more)
    ).eval()


def vit(cls=ViTModel):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return cls(ViTConfig(**sizes, num_hidden_layers=2, image_size=16, patch_size=4)).eval()


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
    return [found[number] for number in range(len(modules))]


def states(model, ids):
    """x^0 ... x^N before the final norm, float64."""
    layers = model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
    found = outputs(model, ids, list(layers))
    return [found[0][0], *(output for _, output in found)]


def value(frame, metric, column="value", **where):
    """The one value of a metric at a place."""
    chosen = frame[frame["metric"] == metric]
    for name, wanted in where.items():
        chosen = chosen[chosen[name] == wanted]
    assert len(chosen) == 1, chosen
    return chosen[column].iloc[0]
