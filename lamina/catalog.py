"""The list of all jobs: a row more here, and `lamina` has another command, function and page."""

from __future__ import annotations

from lamina.jobs.row import JOBS
from lamina.lab.papers.study_row import STUDY
from lamina.lab.posttraining.tuning_rows import DPO, REWARD, RLHF, SFT
from lamina.preflights.preflight_row import PREFLIGHT
from lamina.probes.job.probe_row import PROBE
from lamina.studies.compare_rows import COMPARE, COORD_CHECK, MAX_LR, TRANSFER
from lamina.studies.eval_row import EVAL
from lamina.training.pretrain_row import PRETRAIN

ROWS = (
    *(COMPARE, PREFLIGHT, PRETRAIN),
    *(SFT, REWARD, RLHF, DPO),
    *(COORD_CHECK, TRANSFER, MAX_LR),
    *(STUDY, PROBE, EVAL),
)
JOBS.update({row.name: row for row in ROWS})
