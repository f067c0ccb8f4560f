"""Run by torchrun, in each of its processes: the jobs of a JSON file, one after the other."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from lamina.errors import UserError
from lamina.lab.posttraining.pairs import dpo, reward
from lamina.lab.posttraining.rlhf import rlhf
from lamina.lab.posttraining.sft import sft

JOBS = {"sft": sft, "reward": reward, "dpo": dpo, "rlhf": rlhf}


def main(path):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    said = []
    for job, given, resume in json.loads(Path(path).read_text()):
        try:
            said.append(JOBS[job](given, resume=resume, bar=False)["status"])
        except UserError as error:
            said.append(str(error))
    if distributed.get_rank() == 0:
        Path(path).with_suffix(".said").write_text(json.dumps(said))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
