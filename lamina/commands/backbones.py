"""`lamina backbones`: the presets."""

from __future__ import annotations

from lamina.commands.arguments import make_parser


def run(argv: list[str]) -> int:
    """Print the presets with their sizes and parameters."""
    parser = make_parser("backbones", "List the backbones that a placement can be put on.", "  lamina backbones")
    parser.parse_args(argv)
    from lamina.modeling.backbones import PRESETS, count_parameters
    from lamina.modeling.modeling_lamina import ADAPTERS

    print(
        f"{'name':<21} {'type':<11} {'layers':>6} {'width':>6} {'FFN':>6} {'heads':>5} {'vocabulary':>10} "
        f"{'total':>8} {'active':>8}  source"
    )
    for preset in PRESETS.values():
        c = preset.config()
        count = count_parameters(c)
        print(
            f"{preset.name:<21} {preset.model_type:<11} {c.num_hidden_layers:>6} {c.hidden_size:>6} "
            f"{c.intermediate_size:>6} {c.num_attention_heads:>5} {getattr(c, 'vocab_size', '-'):>10} "
            f"{_short(count.total):>8} {_short(count.active):>8}  {preset.source}"
        )
    print(
        "\ntotal: transformers' own model, embeddings and head included; active: the same, counting only the routed "
        "experts of one token.\nAny folder with a transformers config.json is also a backbone. Checked against "
        f"transformers on the same weights: {', '.join(ADAPTERS)}; others work if their layers have self_attn and mlp."
    )
    return 0


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
