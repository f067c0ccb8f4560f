"""`lamina convert SOURCE OUTPUT`: a transformers checkpoint into Lamina, and back."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import ActionYesNo

from lamina.commands.arguments import make_parser
from lamina.core.architectures import convertible
from lamina.core.values import path
from lamina.errors import UserError, unknown
from lamina.jobs.environment import environment
from lamina.jobs.files import write_json

EXAMPLES = """
  lamina convert models/smollm2 runs/smollm2-lamina
  lamina convert runs/pre-ln-64/model models/pre-ln-64 --to transformers
  lamina convert models/gemma-2-2b runs/gemma-lamina --dtype float32
"""

TARGETS = ("lamina", "transformers")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
# Logits that differ by more than this part of the largest are another model's; a correct conversion gives 0.0.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1


def run(argv: list[str]) -> int:
    """Convert, compare the two models' logits, then put the result in its place."""
    parser = make_parser(
        "convert",
        "Turn a transformers checkpoint whose placement is known into a Lamina one with the same logits, or back.\n"
        f"Known: {convertible()}.",
        EXAMPLES,
        "SOURCE OUTPUT ",
    )
    parser.add_argument(
        "source", help="a folder with config.json and safetensors, a run's folder, or a name on the hub"
    )
    parser.add_argument("output", help="a new or empty folder")
    parser.add_argument("--to", type=str, default=None, help="lamina or transformers (default: the one SOURCE is not)")
    parser.add_argument("--dtype", type=str, default="auto", help=f"{', '.join(DTYPES)} (auto: the checkpoint's)")
    parser.add_argument("--overwrite", action="store_true", help="delete what Lamina wrote into OUTPUT before")
    parser.add_argument(
        "--verify",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="load what was written and compare its logits with SOURCE's",
    )
    options = parser.parse_args(argv)
    for name in ("source", "output"):
        path(name, options[name])
    if options.to is not None and options.to not in TARGETS:
        raise unknown("--to", options.to, TARGETS)
    if options.dtype not in DTYPES:
        raise unknown("--dtype", options.dtype, DTYPES)
    from lamina.data.sources.network import local_when_unreachable
    from lamina.jobs.files import disk_full

    try:
        with local_when_unreachable():
            convert(
                options.source,
                Path(options.output),
                to=options.to,
                dtype=options.dtype,
                overwrite=options.overwrite,
                verify=options.verify,
            )
    except Exception as error:
        if disk_full(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), options.output) from error
        raise
    return 0


def convert(source: str, output: Path, *, to: str | None, dtype: str, overwrite: bool, verify: bool) -> None:
    """Write the converted model into ``output``; raises UserError, having changed nothing there, where it can't."""
    from lamina.jobs import folder as run_folder

    run_folder.refuse(output, resume=False, overwrite=overwrite)
    from lamina.modeling.backbones.loading import folder_of_run

    source = str(folder_of_run(source))
    if Path(source).exists() and output.resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise UserError(f"output: {str(output)!r} holds the source {source!r} (allowed: another folder)")

    from transformers.utils import logging

    from lamina.modeling.backbones import conversion
    from lamina.modeling.configuration_lamina import LaminaConfig

    logging.disable_progress_bar()
    config = conversion.read_config(source)
    is_lamina = isinstance(config, LaminaConfig)
    to = to or ("transformers" if is_lamina else "lamina")
    if (to == "lamina") == is_lamina:
        raise UserError(f"--to: {source!r} is a {to} checkpoint already (allowed: {TARGETS[TARGETS.index(to) - 1]})")
    if isinstance(config, LaminaConfig):
        conversion.check_plan(config)  # before gigabytes are read

    model: Any = conversion.load(source, dtype=dtype)
    converted: Any = conversion.from_transformers(model) if to == "lamina" else conversion.to_transformers(model)
    lamina_config = (converted if to == "lamina" else model).config
    record: dict[str, Any] = {
        "source": source,
        "to": to,
        "model_type": lamina_config.get_text_config().model_type,
        "placement": lamina_config.plan["placement"],
        "placement_options": lamina_config.plan["options"],
        "num_layers": len(lamina_config.plan["layers"]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "largest_difference": None,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        converted.save_pretrained(draft)
        del converted  # never more than two copies of the weights
        _copy_tokenizer(source, draft)
        if verify:
            record["largest_difference"] = _verify(model, draft, conversion.CONVERSIONS[record["model_type"]])
        write_json(draft / "conversion.json", record)
        write_json(draft / "environment.json", environment(seed=0))
        with run_folder.lock(output):
            run_folder.claim(output, resume=False, overwrite=overwrite)
            for path in sorted(draft.iterdir()):
                path.rename(output / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _say(record, output)


def _verify(model: Any, written: Path, architecture: Any) -> float:
    """The largest difference between the logits of the source and of what was written. Raises UserError if large."""
    from lamina.modeling.backbones import conversion

    again = conversion.load(written)
    difference, largest = conversion.largest_difference(model, again)
    if math.isnan(difference):
        raise UserError(
            "verify: the logits are not finite, so they cannot be compared (--no-verify converts unchecked)"
        )
    half = model.dtype.itemsize < 4 and architecture.gain_in_float32
    if difference > largest * (HALF_TOLERANCE if half else TOLERANCE):
        raise UserError(
            f"verify: the logits differ by up to {difference:.3g} (the largest is {largest:.3g}); nothing was written "
            "(--no-verify converts unchecked)"
        )
    return difference


def _copy_tokenizer(source: str, target: Path) -> None:
    """The tokenizer's files as they are, from a folder or the hub's cache."""
    from transformers.utils.hub import cached_file

    for name in TOKENIZER_FILES:
        try:
            found = cached_file(
                source,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:
            found = None
        if found is not None:
            shutil.copyfile(found, target / name)


def _say(record: dict[str, Any], output: Path) -> None:
    written = ", ".join(f"{k}={str(v).lower()}" for k, v in record["placement_options"].items())
    placement = record["placement"] + (f"({written})" if written else "")
    names = (record["model_type"], f"{placement} on {record['model_type']}")
    before, after = names if record["to"] == "lamina" else reversed(names)
    print(f"{before} -> {after}, {record['num_layers']} layers, {record['dtype']}")
    if record["largest_difference"] is None:
        print("largest difference of the logits: not measured (--no-verify)")
    else:
        print(f"largest difference of the logits on random tokens: {record['largest_difference']:.3g}")
    print(f"the model: {output}")
