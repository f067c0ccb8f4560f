"""The commands `lamina compare`, `max-lr`, `coord-check` and `transfer` in Lamina's catalog of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from lamina.core.frames import Frame
from lamina.jobs.kinds import Kind
from lamina.jobs.row import Given, JobRow, Modes

if TYPE_CHECKING:
    from types import ModuleType


def every_settings() -> ModuleType:
    from lamina.studies import settings

    return settings


def compare(settings: Given, **modes: Unpack[Modes]) -> Frame:
    from lamina.studies.compare import compare

    return compare(settings, **modes)


COMPARE = JobRow(
    name="compare",
    kind=Kind.COMPARE,
    summary="train one model with several placements of the norms on your text, and rank them (the main command)",
    about=(
        "Train models that differ only in where their norms sit, all on your text.\n"
        "OUTPUT/report.html shows which placement is best, which placements failed, and why."
    ),
    examples="""
  lamina compare
  lamina compare --placements pre_ln,peri_ln,keel --num-layers 48 --hidden-size 64 --steps 200 --output runs/deep
  lamina compare --corpus books/ --tokenizer bpe:4096 --learning-rates 1e-3,3e-3,1e-2 --seeds 0,1,2 --output runs/books
  lamina compare --learning-rates 3e-3,1e-2 --learning-rates-of "keel=1e-2,3e-2; post_ln=1e-4,1e-3" --output runs/rates
  lamina compare --placements "mix_ln(alpha=0.5),my_placement.yaml" --init same:normal --output runs/own
  lamina compare --output runs/books --resume
""",
    settings=lambda: every_settings().CompareSettings,
    run=compare,
    returns=(
        "Returns the rows of results.csv and the report page. ``placements``, ``learning_rates`` and ``seeds`` may "
        "also be lists. ``corpus`` may be a path, a list of paths or texts, or a datasets.Dataset. The worker "
        "processes do not import your script."
    ),
    outcome="Comparison",
)


def coord_check(settings: Given, **modes: Unpack[Modes]) -> Frame:
    from lamina.studies.coordinates import coord_check

    return coord_check(settings, **modes)


COORD_CHECK = JobRow(
    name="coord-check",
    kind=Kind.COORD_CHECK,
    summary="check that no module's output grows with the model's width or depth, before and after a few steps",
    about=(
        "Check whether a module's output grows with the model's width or depth. Lamina trains several sizes for a few\n"
        "steps on one batch and prints the exponent e of mean |x| ~ size^e for each output x. If e is 0, the\n"
        "output keeps its size. If e is above 0, the output of a large model will blow up."
    ),
    examples="""
  lamina coord-check
  lamina coord-check --placement keel --width-scaling none --output runs/keel-plain
  lamina coord-check --backbone llama-71m --num-layers 12 --widths 128,256,512,1024 --width-scaling mup \\
                     --output runs/mup
  lamina coord-check --depths 8,16,32 --depth-scaling completep --output runs/depths
""",
    settings=lambda: every_settings().CoordCheckSettings,
    run=coord_check,
    returns="Returns the rows of slopes.csv and the report page; OUTPUT/result.json has the verdict.",
    outcome="Comparison",
    resumes="measure only the sizes and seeds that the folder lacks",
)


def transfer(settings: Given, **modes: Unpack[Modes]) -> Frame:
    from lamina.studies.transfer import transfer

    return transfer(settings, **modes)


TRANSFER = JobRow(
    name="transfer",
    kind=Kind.TRANSFER,
    summary="find good learning rates on a narrow model, and convert them for a wide model",
    about=(
        "Find learning rates for a wide model by training a narrow proxy model. Lamina prints the stable and the best\n"
        "learning rates on the proxy. For each kind of weight, Lamina also prints the learning rate at the target's\n"
        "width. A learning rate that fails on the proxy also fails on the target (FuseNorm Figure 4)."
    ),
    examples="""
  lamina transfer
  lamina transfer --placement fusenorm --backbone llama-5b --untie-embeddings --proxy-width 640 --output runs/ws
  lamina transfer --learning-rates 1e-3,4e-3,1.6e-2,6.4e-2 --verify-rates 4e-3,6.4e-2 --verify-width 256 \\
                  --output runs/verified
  lamina transfer --output runs/ws --resume
""",
    settings=lambda: every_settings().TransferSettings,
    run=transfer,
    returns=(
        "Returns the rows of results.csv and the report page; OUTPUT/transfer.json holds the interval of "
        "stable learning rates, the target's learning rates, and the risk of failure."
    ),
    outcome="Comparison",
)


def max_lr(settings: Given, **modes: Unpack[Modes]) -> Frame:
    from lamina.studies.compare import max_lr

    return max_lr(settings, **modes)


MAX_LR = JobRow(
    name="max-lr",
    kind=Kind.MAX_LR,
    summary="find the largest learning rate that each placement tolerates, in a run whose learning rate rises",
    about=(
        "Find the largest learning rate that each placement tolerates. Each placement and seed has one run, whose\n"
        "learning rate rises from 0 to --max-learning-rate in --steps steps (Keel's protocol). A run ends if\n\n"
        "  not finite   a loss or a gradient is NaN or infinite\n"
        "  spike        the loss stays --spike-margin nats above its minimum for --spike-patience\n"
        "  plateau      the loss falls by less than --plateau-margin nats while the learning rate grows by a factor\n"
        "               of --plateau-factor (stuck: the loss never fell clearly below the corpus's unigram entropy)\n\n"
        "Lamina reports the last learning rate at which the loss still fell or stayed at its minimum."
    ),
    examples="""
  lamina max-lr
  lamina max-lr --placements post_ln,mix_ln,pre_ln,keel --seeds 0,1,2,3,4 --output runs/limits
  lamina max-lr --backbone llama-71m --corpus books/ --tokenizer bpe:8192 --steps 5000 --max-learning-rate 5e-2 \\
                --output runs/books-limit
  lamina max-lr --output runs/limits --resume
""",
    settings=lambda: every_settings().MaxRateStudySettings,
    run=max_lr,
    returns=(
        "Returns the rows of results.csv (``max_learning_rate``, ``stop_rule`` and ``loss_at_stop`` of "
        "every placement and seed) and the report page. ``placements`` and ``seeds`` may also be lists."
    ),
    outcome="Comparison",
)
