"""Run by torchrun, in each of its processes: the jobs of a JSON file, one after the other."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from lamina.posttraining import pairs


def main(path):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    for job, given in json.loads(Path(path).read_text()):
        getattr(pairs, job)(given, bar=False)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
