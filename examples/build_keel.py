"""Build Keel on a Llama, and check each block against the paper's equation.

    python examples/build_keel.py [--num-layers 12]

The script computes Keel's block by hand, y = LN(alpha x + A(LN x)) and x' = LN(alpha y + F(LN y)), with the weights of
the model from `lamina.build`. Then the script compares the outputs, and `lamina.emit` writes the block for your own
trainer. The script takes a few seconds, prints a difference of 0 for every block, and writes about a hundred lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig

import lamina


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("runs/keel_block.py"))
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=options.num_layers,
        num_attention_heads=4,
    )  # fmt: skip
    model = lamina.build(config, "keel").eval()

    streams: list[torch.Tensor] = []  # what each block receives
    normed: list[torch.Tensor] = []  # LN x, what its attention receives
    attentions: list[torch.Tensor] = []  # A(LN x)
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
        layer.attention.pre_norm.register_forward_hook(lambda _, __, result: normed.append(result))
        layer.attention.module.register_forward_hook(lambda _, __, result: attentions.append(result[0]))
        layer.register_forward_hook(lambda _, __, result: outputs.append(result))
    with torch.no_grad():
        model(torch.randint(0, 256, (2, 32)))

    alpha = 2 * options.num_layers  # the number of sub-layers
    for index, layer in enumerate(model.model.layers):
        x, attention, feed_forward = streams[index], attentions[index], layer.feed_forward
        root = x.pow(2).mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
        torch.testing.assert_close(normed[index], layer.attention.pre_norm.weight * x / root)
        with torch.no_grad():
            if index == 0:  # Keel Sec 4.3: the first block keeps alpha = 1, and its attention has no outer norm
                y = x + attention
                expected = feed_forward.post_norm(y + feed_forward.module(feed_forward.pre_norm(y)))
            else:
                y = layer.attention.post_norm(alpha * x + attention)
                expected = feed_forward.post_norm(alpha * y + feed_forward.module(feed_forward.pre_norm(y)))
        print(f"block {index}: largest difference {(outputs[index] - expected).abs().max():.1e}")

    lamina.emit("keel", to="pytorch", num_layers=options.num_layers, output=options.output, overwrite=True)
    print(f"the block for your own trainer is {options.output}")


if __name__ == "__main__":
    main()
