"""Keel, Section 5.6."""

from lamina.studies.judging import Finding, Trials, claim, needs_scale


@claim(
    says="After two stages of pretraining and fine-tuning, Keel solves more of GSM-8K than Pre-LN",
    paper="58.6 vs 49.8 at 1,024 layers, 43.8 vs 38.1 at 512; Math & Code +16.5 %",
)
def keel_tasks(trials: Trials) -> Finding:
    return needs_scale("paper", "the models that this scale trains must be fine-tuned and run on GSM-8K")
