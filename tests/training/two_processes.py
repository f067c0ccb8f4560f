"""Run by torchrun, in each of its processes: what a JSON file lists, one after the other (imports are the cost).

Runs by their settings, command lines of Lamina's, and placements whose parameters' types are told.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from gathered_types import gathered
from torch import distributed

from lamina.cli import main as lamina
from lamina.errors import UserError
from lamina.training import pretrain as pretraining
from lamina.training.checkpointing.checkpoints import Background
from lamina.training.settings import PretrainSettings
from lamina.training.trainer import LaminaTrainer

_STEP, _BEGIN = LaminaTrainer.training_step, Background.begin
STEP_OF = [0]  # the step that was begun last


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


def written_late(until):
    """Hold checkpoints, but that of the last step, until training is two steps on; ``until``: the last step."""

    def begin_late(self, act):
        saved = STEP_OF[0]

        def later():
            end = time.monotonic() + 60
            while STEP_OF[0] < min(saved + 2, until):
                assert time.monotonic() < end, "training waits for its checkpoint"
                time.sleep(0.01)
            act()

        _BEGIN(self, later)

    def training_step(self, *args, **kwargs):
        STEP_OF[0] = self.state.global_step + 1
        return _STEP(self, *args, **kwargs)

    Background.begin, LaminaTrainer.training_step = begin_late, training_step


def main(path):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    said = []
    for run in json.loads(Path(path).read_text()):
        LaminaTrainer.training_step, Background.begin = _STEP, _BEGIN
        if "argv" in run or "gathered" in run:
            said.append(lamina(run["argv"]) if "argv" in run else gathered(run["gathered"]))
            continue
        if run["settings"]["async_checkpoints"]:
            written_late(run["settings"]["steps"])
        if "terminate" in run:
            at_step(run["terminate"], terminate, rank=1)
        if "spoil" in run:
            at_step(run["spoil"], spoil, rank=run.get("spoiled_rank", 1))
        try:
            settings = PretrainSettings(**run["settings"])
            result = pretraining.pretrain(settings, resume=run.get("resume", False), bar=False)
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
