"""`lamina backbones`: the presets."""

from __future__ import annotations

from lamina.commands.arguments import make_parser


def run(argv: list[str]) -> int:
    """Print the presets with their sizes."""
    parser = make_parser("backbones", "List the backbones that a placement can be put on.", "  lamina backbones")
    parser.parse_args(argv)
    from lamina.modeling.backbones import PRESETS

    print(f"{'name':<18} {'type':<8} {'layers':>6} {'width':>6} {'FFN':>6} {'heads':>5} {'vocabulary':>10}  source")
    for preset in PRESETS.values():
        c = preset.config()
        print(
            f"{preset.name:<18} {preset.model_type:<8} {c.num_hidden_layers:>6} {c.hidden_size:>6} "
            f"{c.intermediate_size:>6} {c.num_attention_heads:>5} {c.vocab_size:>10}  {preset.source}"
        )
    print("\nAny folder with a transformers config.json whose layers have self_attn and mlp is a backbone, too.")
    return 0
