"""Run by torchrun: a GPT as two pipeline stages, each watched, and what one process computes by hand.

Each stage has its own folder; the first process also trains the whole model on the same batches. In four processes,
FSDP2 shards each stage over two.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from training.watching.loops import Naive, NanoGpt, Tokens

import lamina
from lamina.errors import UserError

STEPS, LAYERS, CUT, MICRO = 3, 4, 2, 2


class Stage(nn.Module):
    """A part of a GPT: its layers keep their numbers as torchtitan's do, and what the part lacks is None."""

    def __init__(self, whole, numbers):
        super().__init__()
        first, last = 0 in numbers, LAYERS - 1 in numbers
        self.wte, self.wpe = (whole.wte, whole.wpe) if first else (None, None)
        self.layers = nn.ModuleDict({str(number): whole.h[number] for number in numbers})
        self.ln_f, self.lm_head = (whole.ln_f, whole.lm_head) if last else (None, None)

    def forward(self, x):
        x = x if self.wte is None else self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.ln_f(x))


def loss_of(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step):
    ids = Tokens(items=4 * STEPS).ids[4 * step :][:4]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def parts(layers=range(LAYERS)):
    halves = ("attention", "ln_1", "attn"), ("feed_forward", "ln_2", "mlp")
    by_layer = {(n, kind, "all"): (f"h.{n}.{norm}.", f"h.{n}.{part}.") for n in layers for kind, norm, part in halves}
    return {(-1, "block", "embedding"): ("wte.", "wpe."), (-1, "block", "readout"): ("ln_f.", "lm_head."), **by_layer}


def by_hand():
    """One process with the whole batch: losses, and the gradients of the last step."""
    model, losses = NanoGpt(layers=LAYERS), []
    naive, optimizer = Naive(model, parts()), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(*batch_of(step))[1]
        loss.backward()
        losses.append(float(loss.detach()))
        naive.keep()
        optimizer.step()
        optimizer.zero_grad()
    norm = float(sum(g.double().pow(2).sum() for g in naive.gradients.values())) ** 0.5
    return losses, naive.norms(naive.gradients), norm


def main(kind, folder):
    distributed.init_process_group("gloo")
    copies = distributed.get_world_size() // 2  # processes over which FSDP2 shards each stage
    rank, copy = divmod(distributed.get_rank(), copies)
    model = Stage(NanoGpt(layers=LAYERS), range(CUT) if rank == 0 else range(CUT, LAYERS))
    group = None
    if copies > 1:
        mesh = init_device_mesh("cpu", (2, copies), mesh_dim_names=("stages", "copies"))
        group = mesh["stages"].get_group()
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh["copies"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
    schedule = (Schedule1F1B if kind == "1f1b" else ScheduleGPipe)(stage, n_microbatches=MICRO, loss_fn=loss_of)
    try:
        lamina.watch(model, optimizer, output=str(folder / "one")).start()
        raise AssertionError("stages that write into one folder")
    except UserError as error:
        refused = str(error)
    watch = lamina.watch(model, optimizer, output=str(folder / f"stage-{rank}"), every=1)
    with watch if kind != "1f1b" else nullcontext(watch.start()) as monitor:
        for step in range(STEPS):
            inputs, targets = (part.chunk(copies)[copy] for part in batch_of(step))
            losses = []
            schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if kind != "1f1b":
                monitor.step(torch.stack(losses).mean() if losses else None)
    if distributed.get_rank() == 0:
        losses, gradients, norm = by_hand()
        told = {"refused": refused, "losses": losses, "norm": norm}
        told |= {"gradients": [[*place, value] for place, value in gradients.items()]}
        (folder / "by_hand.json").write_text(json.dumps(told))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
