"""The states of models whose list of layers is known, taken by plain hooks, in float64."""

import torch
from transformers import AlbertForMaskedLM, BertForMaskedLM, LlamaForCausalLM

from lamina.probes.engine.context import Context
from lamina.probes.engine.measure import structure_of
from lamina.probes.structure.hooks import base_of


def layers_of(model):
    if isinstance(model, BertForMaskedLM):
        return list(model.bert.encoder.layer)
    if isinstance(model, AlbertForMaskedLM):
        return [model.albert.encoder.albert_layer_groups[0].albert_layers[0]]
    if isinstance(model, LlamaForCausalLM):
        return list(model.model.layers)
    return list(model.base_model.layers)


@torch.no_grad()
def states(model, inputs):
    """[N + 1, batch, tokens, channels] float64, the last before any final norm."""
    found = []

    def before(module, args, kwargs):
        if not found:
            found.append((args[0] if args else kwargs["hidden_states"]).double())

    def after(module, args, output):
        found.append((output if isinstance(output, torch.Tensor) else output[0]).double())

    layers = layers_of(model)
    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def context_of(model, batches, tokenizer=None):
    """A context over batches that need not be of one length."""
    inputs = {k: v for k, v in batches[0].items() if k != "attention_mask"}
    structure = structure_of(model, inputs)
    base = base_of(model, structure, inputs)
    return Context(model=model, base=base, structure=structure, batches=batches, tokenizer=tokenizer)
