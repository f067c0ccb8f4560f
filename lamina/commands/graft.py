"""`lamina graft MODEL --placement NAME`: put another norm placement on a trained model."""

from __future__ import annotations

import shlex

from lamina.api.models import graft
from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.errors import UserError
from lamina.jobs.manifest import how_to_load

EXAMPLES = """
  lamina graft models/smollm2 --placement peri_ln --output runs/smollm2-peri
  lamina graft runs/pre-ln-64 --placement fusenorm --corpus books/ --output runs/grafted
  lamina pretrain --from runs/grafted --corpus books/ --steps 200 --output runs/healed
"""


def parser() -> Parser:
    about = (
        "Change where the norms of a trained decoder sit. Lamina keeps the weights, and fits the new norms' gains so\n"
        "that each sub-layer's output changes little. Lamina fits the gains on one half of the corpus. On\n"
        "the other half, Lamina measures the loss before and after the change, and prints both losses. To reduce the\n"
        "remaining difference, train with `lamina pretrain --from`."
    )
    flags = Parser("graft", about, EXAMPLES, "MODEL ")
    flags.add_word("model", "the folder of a Lamina model, or of a transformers decoder that `lamina convert` accepts")
    flags.add_flag("--placement", "the new placement: NAME or name(option=value, ...)", metavar="NAME")
    flags.add_flag("--output", "a new or empty folder", "grafted", "DIR")
    flags.add_text_flags()
    return flags


def run(argv: list[str]) -> int:
    options = {name: value for name, value in vars(parser().parse(argv)).items() if value is not None}
    output = options.pop("output")
    if not options.get("placement"):
        command = f"lamina graft {shlex.quote(options['model'])} --placement peri_ln"
        raise UserError(f"--placement: not given. Run: {command}")
    record = graft(options.pop("model"), output, **options)
    show(f"{record['placement_before']} -> {record['placement']}")
    show(f"norms with fitted gains: {len(record['fitted'])}, modules with rescaled weights: {len(record['folded'])}")
    if record["lost"]:
        show(
            "tensors that the new model does not have: "
            f"{', '.join(record['lost'][:4])}{' ...' if len(record['lost']) > 4 else ''}"
        )
    gap = record["loss"] - record["loss_before"]
    losses = f"{record['loss_before']:.4f} -> {record['loss']:.4f}"
    show(f"loss on {record['tokens']:,} held-out tokens: {losses} ({gap:+.4f}) nats")
    show(how_to_load(output))
    return 0
