"""The layer monitor's metrics, and how a page draws and explains each metric."""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = {
    "Gradients": "Gradient norm by layer",
    "Variances": "Hidden variance by layer",
    "Updates": "Update-to-weight ratio by layer",
    "Magnitudes": "Magnitudes of the residual stream",
    "Attention": "Largest attention logit",
    "Norm gains": "Norms' gains by layer",
    "Experts": "Load of the experts",
    "Policy": "The policy and its rewards",
    "Every step": "Loss and gradient norm of every step",
}
"""The titles of the sections that draw the metrics."""
OVER_STEPS = "The map shows this quantity at every record. The layers go upward, and the steps go to the right."


@dataclass(frozen=True)
class Metric:
    """How a page draws and explains one metric of layers/*.parquet."""

    name: str  # the name in the table's column ``metric``
    section: str  # the section of the page that draws the metric, a key of ``SECTIONS``
    title: str  # the title above the charts
    quantity: str  # the label of the charts' axes
    caption: str  # how to read the charts
    over_steps: str = OVER_STEPS  # how to read the maps over the steps
    log: bool = True
    folded: bool = False  # whether the charts start folded, without charts of whole blocks
    # whether each expert has a value. The charts then show the layer's largest value divided by its mean
    by_index: bool = False
    limit: tuple[float, str] | None = None  # a level to mark in the chart, with a name


METRICS = {
    metric.name: metric
    for metric in (
        Metric("gradient_norm", "Gradients", "Gradient norm by layer", "gradient norm", caption=(
            "Norm of the gradient of each block's parameters, before clipping. In a healthy run the lines are level, "
            "because every layer learns at a similar pace. If a line falls toward the first or the last "
            "layer, the layers at this end hardly train."
        ), over_steps=(
            "The layers go upward, and the steps go to the right. In a healthy run, the color is even from bottom to "
            "top. Dark areas show the layers and the steps at which the gradient vanishes."
        )),
        Metric("hidden_variance", "Variances", "Hidden variance by layer", "hidden variance", caption=(
            "Variance of the residual stream after each block. If the variance grows with depth, the branches of deep "
            "blocks are small relative to the residual stream, so deep layers matter less. If a norm rescales the "
            "residual stream, the variance stays level."
        ), over_steps=(
            "The map shows the variance at every record. If the map becomes brighter upward, the variance grows with "
            "depth. If the map becomes brighter to the right, the variance grows during training."
        )),
        Metric("update_ratio", "Updates", "Update-to-weight ratio by layer", "|update| / |weights|", caption=(
            "Norm of the optimizer's change to each block's weights, divided by the norm of these weights. The ratio "
            "shows how fast a layer's weights change. Clipping, the learning rate and weight decay affect the ratio. "
            "A ratio around 10⁻³ is usual. In some large runs, this ratio rose before the gradient norm and the loss, "
            "and the rise began in the lower layers."
        ), over_steps=(
            "The layers go upward, and the steps go to the right. The ratio follows the learning rate. If only some "
            "layers become brighter, training becomes unstable in these layers."
        )),
        Metric("update_norm", "Updates", "Update norms", "|update|", folded=True, caption=(
            "Norm of the optimizer's change to each sub-layer's weights. The first record is light, and the last "
            "record is dark. The norm follows the learning rate."
        )),
        Metric("weight_norm", "Updates", "Weight norms", "|weights|", folded=True, caption=(
            "Norm of each sub-layer's weights. The first record is light, and the last record is dark."
        )),
        Metric("first_moment", "Updates", "First moments", "|m|", folded=True, caption=(
            "Norm of Adam's first moment, the running mean of the gradient. If this norm rises and the second "
            "moment does not, the gradients of successive steps point in the same direction. In a 32B run, this norm "
            "rose before the loss spiked."
        )),
        Metric("second_moment", "Updates", "Second moments", "|sqrt(v)|", folded=True, caption=(
            "Norm of the square root of Adam's second moment. This square root estimates the usual size of a gradient. "
            "The second moment adapts slowly, so large gradients after a calm phase cause large updates."
        )),
        Metric("hidden_top_abs", "Magnitudes", "The 100 largest magnitudes against FP16's limit", "the 100 largest |x|",
               limit=(65504, "FP16's limit, 65,504"), caption=(
            "The 100 largest |x| among the embedded tokens and the residual stream after each sub-layer (Peri-LN, "
            "Figure 11). Lamina measures the states in float32 on held-out text. The line is the largest value, and "
            "the band reaches down to the 100th largest value. A value above the dashed line would be infinite in "
            "FP16, but not in BF16."
        )),
        Metric("hidden_abs_max", "Magnitudes", "Largest |x| by layer", "largest |x|", caption=(
            "Largest magnitude of the residual stream after each block. If the magnitude jumps at one layer and "
            "stays high in all later layers, this layer creates a massive activation."
        )),
        Metric("hidden_abs_mean", "Magnitudes", "Mean |x| by layer", "mean |x|", caption=(

            "Mean magnitude of the residual stream after each block. If this mean is far below the largest "
            "magnitude, a few channels dominate the residual stream."

        )),
        Metric("hidden_mean", "Magnitudes", "Mean of all elements", "mean", folded=True, log=False, caption=(
            "Mean of all elements of the residual stream after the sub-layer. The first record is light, and the last "
            "record is dark. LayerNorm subtracts each token's mean, but RMSNorm does not. So the two norms give "
            "different results if this mean is large relative to the mean |x|."
        )),
        Metric("stream_rms", "Magnitudes", "Root mean square of each stream", "root mean square", folded=True, caption=(
            "Root mean square of each residual stream after the sub-layer. The first record is light, and the last "
            "record is dark. If one stream is far above the others, the model uses only this stream."
        )),
        Metric("stream_cosine", "Magnitudes", "Similarity of the streams", "cosine", folded=True, log=False, caption=(
            "Mean cosine between two residual streams of the same token after the sub-layer. If the cosine is 1, all "
            "streams are equal up to a factor."
        )),
        Metric("attention_logit", "Attention", "Largest attention logit", "largest logit", caption=(
            "Largest input of attention's softmax in each layer. Masked keys do not count. Above about 50, attention "
            "attends to single tokens, and the softmax's gradient vanishes (Dehghani et al. 2023)."
        )),
        Metric("rate_ratio", "Updates", "Learning rates of the groups", "rate / usual rate", folded=True, caption=(
            "Largest learning rate of a sub-layer's parameters, divided by the learning rate of most parameters."
        )),
        Metric("written_ratio", "Updates", "Outside changes", "change / weights", folded=True, log=False, caption=(
            "Change of a sample of the weights between one optimizer step and the next (norm of the change, divided by "
            "the norm of the sample). The change should be 0, because only the optimizer should change weights."
        )),
        Metric("forgotten_share", "Updates", "Lost moments", "change / moments", folded=True, log=False, caption=(

            "Largest change of a sample of the optimizer's moments between two steps, divided by the sample's norm. A "
            "value of 1 means that the moments were lost."

        )),
        Metric("gain_mean", "Norm gains", "Norms' gains by layer", "mean gain", log=False, caption=(
            "Mean gain of each norm, and mean of each learned scale (skip scale, pre scale), by layer (Peri-LN, Figure "
            "9). The first record is light, and the last record is dark. A norm without a gain has no line."
        )),
        Metric("gain_abs_max", "Norm gains", "Largest gains", "largest |gain|", folded=True, log=False, caption=(
            "Largest magnitude of each norm's gain. If this magnitude is far above the mean gain, the norm amplifies "
            "only a few channels."
        )),
        Metric("row_norm_abs_max", "Norm gains", "Longest rows", "largest row norm", folded=True, log=False, caption=(
            "Largest norm of a token's vector in the embedding, and in the output head if the head has separate "
            "weights. This value rises even if only one token's vector grows."
        )),
        Metric("expert_load", "Experts", "Load of the experts", "busiest expert's load / balanced load", caption=(
            "Load of each layer's busiest expert, divided by a balanced load. A value of 1 means perfect balance. If "
            "the router always chooses the same experts, the value is the number of experts divided by the number of "
            "experts per token."
        ), log=False, by_index=True),
        Metric("mean_reward", "Policy", "Mean reward", "reward", log=False, caption=(
            "Mean reward of the completions, as the trainer logs it."
        )),
        Metric("reward_spread", "Policy", "Spread of the rewards", "spread", folded=True, log=False, caption=(
            "Standard deviation of a step's rewards, as the trainer logs it."
        )),
        Metric("equal_rewards", "Policy", "Groups with equal rewards", "fraction of groups", log=False, caption=(
            "Fraction of the groups in which all completions have the same reward. These groups give the policy no "
            "gradient."
        )),
        Metric("policy_entropy", "Policy", "Entropy of the policy", "nats per token", log=False, caption=(
            "Entropy of the policy's next token. At an entropy near 0, all completions of a prompt are nearly equal."
        )),
        Metric("policy_kl", "Policy", "KL from the reference", "nats per token", log=False, caption=(
            "KL divergence of the policy from the reference model."
        )),
        Metric("completion_length", "Policy", "Length of the completions", "tokens", log=False, caption=(
            "Mean length of the completions."
        )),
        Metric("cut_completions", "Policy", "Completions at the length limit", "fraction", log=False, caption=(
            "Fraction of the completions that the length limit cuts off."
        )),
        Metric("step_loss", "Every step", "Loss of every step", "loss (nats per token)", caption=(
            "Training loss of every step, including the steps between records. With several seeds, a band reaches from "
            "the lowest to the highest loss. If a run has too many steps to draw, each point is the highest loss of a "
            "few steps."
        ), folded=True, log=False),
        Metric("step_gradient_norm", "Every step", "Gradient norm of every step", "gradient norm", caption=(
            "Norm of the whole model's gradient at every step, before clipping. The tables count spikes of this norm."
        ), folded=True),
        Metric("learning_rate", "Every step", "Learning rate", "learning rate", folded=True, caption=(
            "Learning rate at each record. If the optimizer's groups have several learning rates, the chart shows "
            "the largest one."
        )),
    )
}  # fmt: skip
