"""Which weights of a loaded model its checkpoint does not have."""

from __future__ import annotations

from torch import nn

from lamina.errors import UserError
from lamina.probes.structure.sites import Structure

_READ = "_is_hf_initialized"  # transformers marks the weights that it read, so as not to initialize them


def newly_initialized(model: nn.Module) -> list[str]:
    """The names of the parameters for which ``from_pretrained`` found no values; empty for other models."""
    parameters = dict(model.named_parameters())
    marked = {name for name, parameter in parameters.items() if getattr(parameter, _READ, False)}
    return [name for name in parameters if name not in marked] if marked else []


def new_head(model: nn.Module, structure: Structure) -> list[str]:
    """The new weights outside the base model: those of a head that the checkpoint does not have.

    Raises UserError if the embedding is among them: then no state is the model's own.
    """
    new = newly_initialized(model)
    named = dict(model.named_parameters())
    embedding = set() if structure.embedding is None else {id(p) for p in structure.embedding.parameters()}
    for name in new:
        if id(named[name]) in embedding:
            raise UserError(
                f"checkpoint: the embedding {name!r} is not in it (allowed: a checkpoint with all its layers)"
            )
    base = getattr(model, "base_model", model)
    inside = (
        {id(p) for p in base.parameters()}
        if isinstance(base, nn.Module) and base is not model
        else set(map(id, named.values()))
    )
    return [name for name in new if id(named[name]) not in inside]
