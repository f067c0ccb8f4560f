"""The metrics of the layer monitor: one row per metric, with its drawing and its explanation."""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = {
    "Gradients": "Gradient norm by layer",
    "Variances": "Hidden variance by layer",
    "Updates": "Update-to-weight ratio by layer",
    "Magnitudes": "Magnitudes of the stream",
    "Attention": "Largest attention logit",
    "Norm gains": "Norms' gains by layer",
    "Experts": "Load of the experts",
    "Policy": "The policy and its rewards",
    "Every step": "Loss and gradient norm of every step",
}
"""The titles of the sections that draw the metrics."""
OVER_STEPS = "The same at every record: layers upward, steps to the right."


@dataclass(frozen=True)
class Metric:
    """A metric of layers/*.parquet.

    Attributes:
        name: in the table's column ``metric``.
        section: the section of the page that draws it, a key of ``SECTIONS``.
        title: above its charts.
        quantity: on their axes.
        caption: how to read them.
        over_steps: how to read its maps over the steps.
        folded: whether its charts start folded; then those of whole blocks are left out.
        by_index: whether it is recorded for every expert: the charts show each layer's largest value over the mean.
        limit: a level that its chart marks, with the level's name.
    """

    name: str
    section: str
    title: str
    quantity: str
    caption: str
    over_steps: str = OVER_STEPS
    log: bool = True
    folded: bool = False
    by_index: bool = False
    limit: tuple[float, str] | None = None


METRICS = {
    metric.name: metric
    for metric in (
        Metric("gradient_norm", "Gradients", "Gradient norm by layer", "gradient norm", caption=(
            "Norm of the gradient of each block's parameters, before clipping. Level lines are healthy: every layer "
            "learns at a similar pace. A line that falls toward either end leaves the layers there almost untrained."
        ), over_steps=(
            "Layers upward, steps to the right, one color scale for all. An even color from bottom to top is healthy; "
            "a map that turns dark from one edge shows where, and when, the gradient vanishes."
        )),
        Metric("hidden_variance", "Variances", "Hidden variance by layer", "hidden variance", caption=(
            "Variance of the stream after each block. Where it climbs through depth, each further block changes the "
            "stream by a smaller share and deep layers matter less; where a norm stands on the stream it stays level."
        ), over_steps=(
            "As above, for the variance: a map that brightens upward grows through depth, one that brightens to the "
            "right grows in training."
        )),
        Metric("update_ratio", "Updates", "Update-to-weight ratio by layer", "|update| / |weights|", caption=(
            "Norm of what the optimizer's step changed in each block's weights, over the norm of these weights: how "
            "fast a layer moves, clipping, learning rate and decay included. Around 10⁻³ is usual. In large runs it "
            "has risen before the gradient and the loss did, in the lower layers first."
        ), over_steps=(
            "Layers upward, steps to the right. It follows the learning rate; a band of layers that brightens on its "
            "own is where a run becomes unstable."
        )),
        Metric("update_norm", "Updates", "Update norms", "|update|", folded=True, caption=(
            "Norm of what the optimizer's step changed in each sub-layer's weights, from the first record (light) to "
            "the last (dark). It follows the learning rate."
        )),
        Metric("weight_norm", "Updates", "Weight norms", "|weights|", folded=True, caption=(
            "Norm of each sub-layer's weights, from the first record (light) to the last (dark)."
        )),
        Metric("first_moment", "Updates", "First moments", "|m|", folded=True, caption=(
            "Norm of Adam's first moment, the running mean of the gradient. Where it rises and the second moment does "
            "not, gradients of successive steps point the same way: in a 32B run it rose before its loss spiked."
        )),
        Metric("second_moment", "Updates", "Second moments", "|sqrt(v)|", folded=True, caption=(
            "Norm of the root of Adam's second moment, the usual size of a gradient. It forgets slowly: after a calm "
            "time, a burst of gradients makes large updates."
        )),
        Metric("hidden_top_abs", "Magnitudes", "The 100 largest magnitudes against FP16's limit", "the 100 largest |x|",
               limit=(65504, "FP16's limit, 65,504"), caption=(
            "The 100 largest |x| among all elements of the embedded tokens and of the streams after every sub-layer "
            "together, for the monitor's held-out blocks (Peri-LN, Figure 11): the line is the largest, the band "
            "reaches down to the 100th. Measured in float32, so that a value above the dashed line is seen; in FP16 "
            "it would be infinite, in BF16 it still has a number."
        )),
        Metric("hidden_abs_max", "Magnitudes", "Largest |x| by layer", "largest |x|", caption=(
            "Largest magnitude of the stream after each block. A step up at one layer that all later layers keep is a "
            "massive activation: it came from that layer."
        )),
        Metric("hidden_abs_mean", "Magnitudes", "Mean |x| by layer", "mean |x|", caption=(
            "Mean magnitude of the stream after each block. Far below the largest one, few channels hold the stream."
        )),
        Metric("hidden_mean", "Magnitudes", "Mean of all elements", "mean", folded=True, log=False, caption=(
            "Mean of all elements of the stream after the sub-layer, from the first record (light) to the last "
            "(dark). LayerNorm takes each token's mean away and RMSNorm leaves it; far from zero against the mean "
            "|x|, the two differ."
        )),
        Metric("stream_rms", "Magnitudes", "Root mean square of each stream", "root mean square", folded=True, caption=(
            "Of a model with several streams, each one after the sub-layer, from the first record (light) to the last "
            "(dark). One that is far above the others carries the model alone."
        )),
        Metric("stream_cosine", "Magnitudes", "How alike the streams are", "cosine", folded=True, log=False, caption=(
            "Mean cosine of two streams of a token after the sub-layer: at 1 they have collapsed into one."
        )),
        Metric("attention_logit", "Attention", "Largest attention logit", "largest logit", caption=(
            "Largest value that goes into attention's softmax, by layer, over the keys that a query may see. Above "
            "about 50 attention looks at single tokens and its gradient vanishes (Dehghani et al. 2023)."
        )),
        Metric("rate_ratio", "Updates", "Learning rates of the groups", "rate / usual rate", folded=True, caption=(
            "Largest learning rate of a sub-layer's parameters over that of most parameters."
        )),
        Metric("written_ratio", "Updates", "Written weights", "change / weights", folded=True, log=False, caption=(
            "Norm of what changed in a sample of the weights between two steps, where nothing but an optimizer should "
            "write, over the sample's norm."
        )),
        Metric("forgotten_share", "Updates", "Lost moments", "change / moments", folded=True, log=False, caption=(
            "Largest change of a sample of the optimizer's moments between two steps, over their norm: 1 is lost."
        )),
        Metric("gain_mean", "Norm gains", "Norms' gains by layer", "mean gain", log=False, caption=(
            "Mean gain of each norm and mean of each learned scale (skip scale, pre scale) against the depth, from "
            "the first record (light) to the last (dark), as in Peri-LN's Figure 9. A norm without a gain has no "
            "line."
        )),
        Metric("gain_abs_max", "Norm gains", "Largest gains", "largest |gain|", folded=True, log=False, caption=(
            "Largest magnitude of each norm's gain: far above the mean, the norm blows up few channels."
        )),
        Metric("row_norm_abs_max", "Norm gains", "Longest rows", "largest row norm", folded=True, log=False, caption=(
            "Norm of the longest row of the embedding, and of the readout where it is not tied: a token's vector that "
            "grows alone."
        )),
        Metric("expert_load", "Experts", "Load of the experts", "busiest expert's load / balanced load", caption=(
            "Load of each layer's busiest expert over that of a balanced one: 1 is perfect balance, the number of "
            "experts over those chosen is a router that always takes the same ones."
        ), log=False, by_index=True),
        Metric("mean_reward", "Policy", "Mean reward", "reward", log=False, caption=(
            "Mean reward of the completions, as the trainer logs it."
        )),
        Metric("reward_spread", "Policy", "Spread of the rewards", "spread", folded=True, log=False, caption=(
            "Standard deviation of a step's rewards, as the trainer logs it."
        )),
        Metric("equal_rewards", "Policy", "Groups with equal rewards", "share of groups", log=False, caption=(
            "Share of groups in which all completions have the same reward: they give the policy no gradient."
        )),
        Metric("policy_entropy", "Policy", "Entropy of the policy", "nats per token", log=False, caption=(
            "Entropy of the policy's next token. Near 0, all completions of a prompt are alike."
        )),
        Metric("policy_kl", "Policy", "KL from the reference", "nats per token", log=False, caption=(
            "How far the policy's tokens are from those of its reference."
        )),
        Metric("completion_length", "Policy", "Length of the completions", "tokens", log=False, caption=(
            "Mean length of the completions."
        )),
        Metric("cut_completions", "Policy", "Completions at the length limit", "share", log=False, caption=(
            "Share of completions that the length limit cuts."
        )),
        Metric("step_loss", "Every step", "Loss of every step", "loss (nats per token)", caption=(
            "Training loss of every step, recorded or not; with several seeds, from the lowest to the highest. If "
            "there are too many steps to draw, the line is the largest of each few."
        ), folded=True, log=False),
        Metric("step_gradient_norm", "Every step", "Gradient norm of every step", "gradient norm", caption=(
            "Norm of the gradient of all parameters together, before clipping, at every step. Its spikes are those "
            "that the tables count."
        ), folded=True),
        Metric("learning_rate", "Every step", "Learning rate", "learning rate", folded=True, caption=(
            "Learning rate at each record, the largest of the optimizer's groups."
        )),
    )
}  # fmt: skip
