"""`lamina max-lr`: the largest learning rate that each placement tolerates."""

from __future__ import annotations

from pathlib import Path

from lamina.api import max_lr
from lamina.commands.arguments import Parser
from lamina.commands.compare import failed
from lamina.errors import TrialsFailed
from lamina.studies.max_rate_settings import MaxRateStudySettings

EXAMPLES = """
  lamina max-lr
  lamina max-lr --placements post_ln,mix_ln,pre_ln,keel --seeds 0,1,2,3,4 --output runs/limits
  lamina max-lr --backbone llama-71m --corpus books/ --tokenizer bpe:8192 --steps 5000 --max-learning-rate 5e-2
  lamina max-lr --output runs/limits --resume
"""
DESCRIPTION = """\
How high a learning rate does each placement tolerate? One run per placement and seed, with one linear warm-up from 0 to
--max-learning-rate over all --steps (Keel's protocol). A run ends at the first of: a loss or gradient that is not
finite; a spike, a loss that stays --spike-margin nats above its low for --spike-patience; a plateau, a loss that does
not fall by --plateau-margin nats while the rate grows by --plateau-factor ("stuck" if it never got below the corpus's
unigram entropy). Reports the rate just before: the last at which the loss was at its low, or still fell."""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser("max-lr", DESCRIPTION, EXAMPLES)
    flags.add_settings(MaxRateStudySettings)
    flags.add_output_modes("continue the study in the output folder")
    return flags


def run(argv: list[str]) -> int:
    """Parse, train, write the page, print the table and the page's path."""
    typed, others = parser().settings_from(argv)
    folder = Path(typed.get("output", MaxRateStudySettings.output))
    try:
        results, failure = max_lr(**typed, resume=others.resume, overwrite=others.overwrite).results, None
    except TrialsFailed as error:
        results, failure = error.results, error
    from lamina.reports import terminal

    print(terminal.max_lr(folder, results))
    return 0 if failure is None else failed(failure)
