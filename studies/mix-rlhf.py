"""Mix-LN Table 3: rewards of sampled answers to held-out prompts, at the end and at equal KL."""

from lamina.lab.papers.judging import (
    Budget,
    Finding,
    Trials,
    at_equal_kl,
    at_other_budgets,
    claim,
    compare_values,
    frontiers,
    higher,
    iso_loss,
    label,
    values_of,
)

MIX, PRE = ({"placement": placement, "budget": "1x"} for placement in ("mix_ln", "pre_ln"))


@claim(
    says="After RLHF, Mix-LN has a higher reward than Pre-LN at equal KL",
    paper="Reward after equally many steps (1B): Mix-LN 1.32, Pre-LN 0.75",
)
def mix_rlhf(trials: Trials) -> Finding:
    return at_equal_kl_and_loss(trials, "rlhf")


@claim(
    says="After equally many steps of RLHF, Mix-LN has a higher reward than Pre-LN",
    paper="Reward (1B): Mix-LN 1.32, Pre-LN 0.75",
)
def mix_rlhf__final(trials: Trials) -> Finding:
    return higher(trials.tuned().where(stage="rlhf"), MIX, than=PRE, column="eval_reward", by=0.02)


@claim(says="If a program computes the reward, Mix-LN also has a higher reward than Pre-LN at equal KL")
def mix_rlhf__verifiable(trials: Trials) -> Finding:
    return at_equal_kl_and_loss(trials, "verifiable")


def at_equal_kl_and_loss(trials: Trials, stage: str) -> Finding:
    """Rewards at the largest KL that all arms of a seed reached; then, where Mix-LN's is higher, at equal loss."""
    tuned = trials.tuned()
    policies, before = tuned.where(stage=stage), tuned.where(stage="pretrain")
    arms = {"mix_ln": MIX, "pre_ln": PRE} | {label(arm): arm for arm in at_other_budgets(trials, PRE)}
    rewards, reached = at_equal_kl({name: frontiers(policies, arm) for name, arm in arms.items()})
    ours, *others = (Budget(losses=values_of(before, arm), values=rewards[name]) for name, arm in arms.items())
    raw = compare_values(ours.values, others[0].values, lower=False, by=0.02, names=("mix_ln", "pre_ln"))
    if reached:
        raw = raw.noted(f"at a KL of {min(reached.values()):.2g} to {max(reached.values()):.2g} nats per answer")
    return iso_loss(raw, ours, others, by=0.02, names=("mix_ln", "pre_ln"))
