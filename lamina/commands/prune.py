"""`lamina prune MODEL`: remove layers from a trained model."""

from __future__ import annotations

from lamina.api.models import prune
from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.core.text import ranges
from lamina.jobs.manifest import how_to_load

EXAMPLES = """
  lamina prune runs/keel-64 --layers 1 --output runs/keel-63
  lamina prune models/smollm2 --by angular_distance --drop 1 --corpus books/ --output runs/smollm2-29
  lamina prune models/smollm2 --by layer_drop --drop 1 --sequences 16 --output runs/smollm2-29b
"""


def parser() -> Parser:
    about = (
        "Remove layers from a trained decoder of Lamina or transformers, and print the loss before and after.\n"
        "The smaller model loads like the original model. To train the smaller model further,\n"
        "run `lamina pretrain --from`."
    )
    flags = Parser("prune", about, EXAMPLES, "MODEL ")
    flags.add_word("model", "a folder with a saved model, or a run's folder")
    flags.add_flag("--output", "a new or empty folder", "pruned", "DIR")
    flags.add_flag("--layers", "layers to remove, counted from 0, as in 3,5-7", metavar="LIST")
    flags.add_flag(
        "--by",
        "remove the layers with the lowest value of this measure: layer_drop, angular_distance, or PROBE.METRIC",
        metavar="MEASURE",
    )
    flags.add_flag("--drop", "with --by, number of layers to remove", kind=int)
    flags.add_text_flags()
    return flags


def run(argv: list[str]) -> int:
    options = {name: value for name, value in vars(parser().parse(argv)).items() if value is not None}
    output = options.pop("output")
    record = prune(options.pop("model"), output, **options)
    show(f"layers removed: {ranges(record['dropped'])}; {record['num_layers']} remain")
    show(f"parameters: {record['parameters_before']:,} -> {record['parameters']:,}")
    text = f"{record['tokens']:,} tokens of {options['corpus']!r}"
    show(f"loss on {text}: {record['loss_before']:.4f} -> {record['loss']:.4f} nats")
    numbers = []
    for layer in map(str, record["dropped"]):
        if (value := record["measured"].get(layer)) is not None:
            error = record["errors"][layer]
            numbers.append(f"layer {layer} has {value:.3g}" + ("" if error is None else f" ± {error:.2g}"))
    if numbers:
        tokens = f" on {record['measured_tokens']:,} tokens" if record["measured_tokens"] else ""
        show(f"{options['by']}{tokens}: {', '.join(numbers)}")
    for note in record["notes"]:
        show(f"note: {note}")
    show(how_to_load(output))
    return 0
