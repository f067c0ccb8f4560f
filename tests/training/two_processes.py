"""Run by torchrun, in each of its processes: the runs of a JSON file, one after the other (imports are the cost)."""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from lamina.errors import UserError
from lamina.training import pretrain as pretraining
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

_STEP = LaminaTrainer.training_step


def at_step(step, act, rank):
    """Do something in the forward pass of a step (from 1), in one process only."""

    def training_step(self, model, *args, **kwargs):
        if self.state.global_step + 1 == step and self.processes.rank == rank:
            act(self, model)
        return _STEP(self, model, *args, **kwargs)

    LaminaTrainer.training_step = training_step


def terminate(trainer, model):
    os.kill(os.getpid(), signal.SIGTERM)


def spoil(trainer, model):
    with torch.no_grad():
        weight = model.get_parameter("model.backbone.layers.1.feed_forward.module.up_proj.weight")
        getattr(weight, "_local_tensor", weight).fill_(float("nan"))


def main(path):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    said = []
    for run in json.loads(Path(path).read_text()):
        LaminaTrainer.training_step = _STEP
        if "terminate" in run:
            at_step(run["terminate"], terminate, rank=1)
        if "spoil" in run:
            at_step(run["spoil"], spoil, rank=run.get("spoiled_rank", 1))
        try:
            result = pretraining.pretrain(
                PretrainSettings(**run["settings"]), resume=run.get("resume", False), bar=False
            )
            said.append(result["status"])
        except UserError as error:
            said.append(str(error))
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, said)
    if distributed.get_rank() == 0:
        Path(path).with_suffix(".said").write_text(json.dumps(everyone))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
