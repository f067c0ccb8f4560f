"""Mix-LN Table 3: the column ``reward`` is the mean score of sampled answers at the end, one row per seed."""

from lamina.studies.judging import Finding, Trials, claim, higher


@claim(says="After RLHF, Mix-LN's final reward is above Pre-LN's", paper="1.32 against 0.75 (1B)")
def mix_rlhf(trials: Trials) -> Finding:
    return higher(trials, "mix_ln", than="pre_ln", column="reward")
