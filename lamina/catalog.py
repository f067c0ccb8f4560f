"""The lists of all jobs and commands. ROWS has a row for each job. GROUPS has a help text for each command."""

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

GROUPS: dict[str, dict[str, str]] = {
    "watch and diagnose": {
        "diagnose": "find out why a run went wrong: the likely cause, the step, the layer, and what to change",
        "report": "write the report page of an output folder again",
    },
    "look inside": {
        "probe": JOBS["probe"].summary,
        "placements": "list the placements, or show one placement's equation, diagram, options and source",
        "eval": JOBS["eval"].summary,
        "generate": "continue a text with a trained model",
        "prune": "remove layers from a trained model: layers that you name, or the layers that the model needs least",
        "graft": "move the norms of a trained model, and fit the new norms' gains so that the loss changes little",
        "convert": "convert a transformers checkpoint to Lamina with the same logits, or back",
    },
    "compare and train": {
        **{name: JOBS[name].summary for name in ("compare", "preflight", "pretrain")},
        **{name: JOBS[name].summary for name in ("coord-check", "transfer", "max-lr")},
        "emit": "write the code of a placement (where the norms sit) as one file for your own trainer",
        "backbones": "list the backbones: model families to build with a placement",
    },
    "after pretraining": {name: JOBS[name].summary for name in ("sft", "reward", "dpo", "rlhf")},
    "the papers": {"study": JOBS["study"].summary},
}
"""The groups of commands in `lamina --help`, with a help text for each command."""
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}
