"""Gaps to Pre-LN at the ladder's first step, of schemes with one stream."""

from lamina.lab.papers.judging import Finding, Trials, claim, lower


@claim(
    says="Pre-LN's loss is lower if every block also gets the embedding, at 0.43M parameters and 20 tokens per "
    "parameter",
)
def ladder_s1_schemes(trials: Trials) -> Finding:
    return lower(trials.tuned(), "pre_ln(wiring=x0)", than="pre_ln")


@claim(says="U-net skips lower Pre-LN's loss at 0.43M parameters and 20 tokens per parameter")
def ladder_s1_schemes__unet(trials: Trials) -> Finding:
    return lower(trials.tuned(), "pre_ln(wiring=unet)", than="pre_ln")


@claim(says="Parallel branches raise Pre-LN's loss at 0.43M parameters and 20 tokens per parameter")
def ladder_s1_schemes__parallel(trials: Trials) -> Finding:
    return lower(trials.tuned(), "pre_ln", than="pre_ln(wiring=parallel)")


@claim(says="LayerScale lowers Pre-LN's loss at 0.43M parameters and 20 tokens per parameter")
def ladder_s1_schemes__layerscale(trials: Trials) -> Finding:
    return lower(trials.tuned(), "layerscale", than="pre_ln")


@claim(says="Muse Spark's gate lowers Pre-LN's loss at 0.43M parameters and 20 tokens per parameter")
def ladder_s1_schemes__muse_spark(trials: Trials) -> Finding:
    return lower(trials.tuned(), "muse_spark", than="pre_ln")
