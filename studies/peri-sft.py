"""Peri-LN Tables 1, 13-15."""

from lamina.studies.judging import Finding, Trials, claim, needs_scale


@claim(
    says="After instruction tuning on LIMA Peri-LN's average score is above Pre-LN's, and Pre-LN's is above Post-LN's",
    paper="51.96 > 49.96 > 46.44 (400M), 56.94 > 53.89 > 48.95 (1.5B), 59.02 > 57.08 > 49.33 (3.2B)",
)
def peri_sft(trials: Trials) -> Finding:
    return needs_scale("paper", "a study does not tune on instructions or score tasks yet")
