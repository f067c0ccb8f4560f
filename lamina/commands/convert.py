"""`lamina convert SOURCE OUTPUT`: convert a transformers checkpoint to Lamina, or back."""

from __future__ import annotations

from pathlib import Path

from lamina.api.models import convert
from lamina.commands.arguments import Parser
from lamina.core.architectures import TRAINERS, convertible
from lamina.core.terminal import show
from lamina.core.values import DTYPES
from lamina.jobs.manifest import how_to_load

EXAMPLES = """
  lamina convert models/smollm2 runs/smollm2-lamina
  lamina convert runs/pre-ln-64/model models/pre-ln-64 --to transformers
  lamina convert models/gemma-2-2b runs/gemma-lamina --dtype float32
  lamina convert runs/pre-ln-64 models/pre-ln-64-mlx --to mlx
  lamina convert runs/sandwich-64 models/sandwich-64-as-glm4 --to transformers
"""


def parser() -> Parser:
    flags = Parser(
        "convert",
        "Convert a transformers checkpoint to Lamina, or a Lamina model to transformers. The logits stay the\n"
        "same. You can convert a Lamina model if transformers has an architecture with the same placement.\n\n"
        f"Lamina converts these architectures, with their placement in parentheses: {convertible()}.",
        EXAMPLES,
        "SOURCE OUTPUT ",
    )
    flags.add_word("source", "a folder with config.json and safetensors, a run's folder, or a name on the hub")
    flags.add_word("output", "a new or empty folder")
    trainers = ", ".join(TRAINERS)
    flags.add_flag(
        "--to",
        f"format to write: lamina, transformers, {trainers} or mlx (default: transformers for a Lamina model, "
        "otherwise lamina)",
        metavar="WORD",
    )
    flags.add_flag("--from", f"the trainer that wrote SOURCE: {trainers}", metavar="TRAINER")
    flags.add_flag(
        "--placement",
        "with --from, the model's placement, if the checkpoint does not name its placement",
        metavar="NAME",
    )
    flags.add_flag(
        "--tokenizer",
        "with --from, tokenizer to save beside the model: bytes, or a transformers tokenizer's name or folder",
        metavar="TEXT",
    )
    flags.add_flag(
        "--dtype", f"dtype of the weights: {', '.join(DTYPES)} (auto keeps the checkpoint's dtype)", "auto", "WORD"
    )
    flags.add_flag("--overwrite", "first delete the files that Lamina wrote into OUTPUT", False)
    flags.add_flag(
        "--verify",
        "between Lamina and transformers, load the result and compare its logits with SOURCE's logits. For another "
        "trainer, Lamina always checks only the tensors' names and shapes",
        True,
    )
    return flags


def run(argv: list[str]) -> int:
    options = parser().parse(argv)
    given = vars(options)
    given["came_from"] = given.pop("from")
    record = convert(**given)
    written = ", ".join(f"{k}={str(v).lower()}" for k, v in record["placement_options"].items())
    placement = record["placement"] + (f"({written})" if written else "")
    names = (record["model_type"], f"{placement} on {record['backbone']}")
    before, after = names if record["to"] == "lamina" else reversed(names)
    show(f"{before} -> {after}, {record['num_layers']} layers, {record['dtype']}")
    foreign = record["to"] not in ("lamina", "transformers")
    if options.came_from or foreign:
        show("Lamina converted every tensor exactly once, and compared names and shapes, not logits")
    elif record["largest_difference"] is None:
        show("largest difference between the logits: not measured (--no-verify)")
    else:
        show(f"largest difference between the logits on random tokens: {record['largest_difference']:.3g}")
    show(f"the model: {options.output}" if foreign else how_to_load(options.output))
    from lamina.modeling.backbones.loading import TOKENIZER_FILES

    if options.came_from and not any(Path(options.output, name).is_file() for name in TOKENIZER_FILES):
        ignored = " (Lamina does not read meta.pkl)" if any(Path(options.source).glob("meta.pkl")) else ""
        show(
            f"the folder has no tokenizer{ignored}. Add --tokenizer FOLDER to commands that need one, or --tokenizer "
            "bytes for a model of bytes"
        )
    return 0
