"""Run by torchrun in two processes: a GPT as two pipeline stages, each watched, and what one process computes by hand.

Each process writes its own folder; the first one also trains the whole model on the same batches.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed, nn
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
    by_layer = {
        (n, kind, "all"): (f"h.{n}.{norm}.", f"h.{n}.{part}.")
        for n in layers
        for kind, norm, part in (("attention", "ln_1", "attn"), ("feed_forward", "ln_2", "mlp"))
    }
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
    return (
        losses,
        naive.norms(naive.gradients),
        float(sum(g.double().pow(2).sum() for g in naive.gradients.values())) ** 0.5,
    )


def main(kind, folder):
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = Stage(NanoGpt(layers=LAYERS), range(CUT) if rank == 0 else range(CUT, LAYERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = (ScheduleGPipe if kind == "gpipe" else Schedule1F1B)(stage, n_microbatches=MICRO, loss_fn=loss_of)
    try:
        lamina.watch(model, optimizer, output=str(folder / "one")).start()
        raise AssertionError("stages that write into one folder")
    except UserError as error:
        refused = str(error)
    watch = lamina.watch(model, optimizer, output=str(folder / f"stage-{rank}"), every=1)
    with watch if kind == "gpipe" else nullcontext(watch.start()) as monitor:
        for step in range(STEPS):
            inputs, targets = batch_of(step)
            losses = []
            schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if kind == "gpipe":
                monitor.step(torch.stack(losses).mean() if losses else None)
    if rank == 0:
        losses, gradients, norm = by_hand()
        told = {
            "refused": refused,
            "losses": losses,
            "norm": norm,
            "gradients": [[*place, value] for place, value in gradients.items()],
        }
        (folder / "by_hand.json").write_text(json.dumps(told))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
