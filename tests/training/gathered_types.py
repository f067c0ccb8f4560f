"""For two_processes.py: in which type each placement's parameters are gathered for a forward pass sharded in bf16."""

import torch
from torch import distributed

import lamina
from lamina.modeling.processes import Processes
from lamina.training.checkpointing.sharding import shard


def gathered(placement):
    ids = torch.arange(8).reshape(1, 8)
    model = lamina.build("llama-nano", placement, num_layers=2, hidden_size=16, num_heads=2, profile_ids=ids)
    wholes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    processes = Processes(rank=distributed.get_rank(), size=distributed.get_world_size(), parallel="fsdp2")
    shard(model, processes, "cpu", bf16=True)
    types = {}
    for name, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):

            def see(module, *_, own=own, name=name):
                whole = getattr(module, own)
                assert whole.numel() == wholes[f"{name}.{own}"]
                types[f"{name}.{own}"] = str(whole.dtype)

            module.register_forward_pre_hook(see)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids).logits.sum().backward()
    return types
