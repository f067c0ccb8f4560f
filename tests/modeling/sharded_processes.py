"""Run by torchrun: each checkpoint of a folder, sharded over the processes, against what one process computed."""

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lamina  # noqa: F401  registers its models

distributed.init_process_group("gloo")
for folder in sorted(Path(sys.argv[1]).iterdir()):
    config = DistributedConfig(tp_plan="auto", tp_size=distributed.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    expected = torch.load(folder / "expected.pt")
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    model(expected["ids"], labels=expected["ids"]).loss.backward()
    weight = model.model.layers[1].feed_forward.module.up_proj.weight
    gradient = weight.grad.full_tensor().norm()  # asks all processes
    if distributed.get_rank() == 0:
        sharded = isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel()
        off = {
            "sharded": sharded,
            "logits": float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()),
            "gradient": float((gradient / expected["gradient"] - 1).abs()),
        }
        torch.save(off, folder / "off.pt")
distributed.destroy_process_group()
