"""Functions for saved models and job folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from lamina.api.results import Diagnosis
from lamina.core.architectures import TRAINERS, Target
from lamina.core.extras import require
from lamina.core.hub_access import refuse_missing_model
from lamina.core.values import (
    DTYPES,
    folder_beside,
    nearby,
    number,
    one_of,
    path,
    real_path,
    seed_number,
    switch,
    text,
    whole_number,
)
from lamina.errors import UserError, shortened
from lamina.jobs.folder import refuse, source_beside
from lamina.jobs.run_folder import trainings
from lamina.placements.resolution import check_spec

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn
    from transformers import PreTrainedConfig

    from lamina.modeling.backbones.conversion import ConversionRecord
    from lamina.modeling.generation import Speaker
    from lamina.probes.census.census import Census
    from lamina.surgery.graft import Grafting
    from lamina.surgery.prune import Pruning

logger = logging.getLogger(__name__)


def generate(
    model: str | PathLike[str],
    prompt: str | Sequence[Mapping[str, str]] = "The",
    *,
    chat: bool = False,
    system: str | None = None,
    max_new_tokens: int = 120,
    temperature: float = 0.8,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    tokenizer: str | PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Continue a text with a trained model, as `lamina generate` does.

    Args:
        model: a folder with a saved model, or a run's folder.
        prompt: the text to continue, or a list of messages to answer (mappings with ``role`` and ``content``).
        chat: whether to answer a text prompt as a user message, instead of continuing the text.
        system: the system message, if ``chat`` is true.
        max_new_tokens: the maximum number of new tokens. A model with learned positions may stop earlier, at its last
            position.
        temperature: the sampling temperature. 0 always takes the likeliest token.
        top_p: the total probability of the likeliest tokens to sample from, above 0 and at most 1 (None: the model's
            default).
        stop: texts that end the answer. The result does not contain the text that ended the answer.
        seed: the seed of the sampling.
        tokenizer: bytes, or a transformers tokenizer's name or folder (None: the model's).
        trust_remote_code: whether to run the model's own Python code, if the model has any.

    Raises:
        UserError: (a ValueError) for an invalid value, a folder without a model, or a prompt that fills the model's
            context.
    """
    if not isinstance(prompt, str | list | tuple):
        raise UserError(f"prompt: {shortened(repr(prompt), 80)}. Give a text, or a list of messages.")
    if switch("chat", chat) and isinstance(prompt, str):
        first = [] if system is None else [{"role": "system", "content": text("system", system)}]
        prompt = [*first, {"role": "user", "content": prompt}]
    elif system is not None:
        raise UserError(
            f"system: {system!r} has no effect here. Set chat=True and give 'prompt' as a text, or leave 'system' out."
        )
    sampling = {"temperature": temperature, "top_p": top_p, "stop": stop, "tokenizer": tokenizer}
    speaker = speaker_of(model, max_new_tokens, seed=seed, trust_remote_code=trust_remote_code, **sampling)
    return speaker.continuation(prompt) if isinstance(prompt, str) else speaker.answer([dict(turn) for turn in prompt])


def speaker_of(
    model: str | PathLike[str],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float | None,
    stop: Sequence[str],
    seed: int,
    tokenizer: str | PathLike[str] | None,
    trust_remote_code: bool,
) -> Speaker:
    """Load a model to continue texts, and seed torch. Raises the same errors as ``generate``."""
    source = path("model", model)
    whole_number("max_new_tokens", max_new_tokens)
    number("temperature", temperature, 0.0)
    seed_number("seed", seed)
    if top_p is not None:
        number("top_p", top_p, 0.0, 1.0, open_low=True)
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise UserError(f"stop: {stop!r}. Give a list of non-empty texts.")
    if not Path(source).exists():
        raise UserError(f"model: {source!r} does not exist{nearby(source)}. Give a folder with config.json.")
    import torch

    from lamina.data.tokenizers import load_tokenizer, not_bytes
    from lamina.modeling.generation import Speaker

    tokenizer = None if tokenizer is None else path("tokenizer", tokenizer)
    own = None if tokenizer is None else load_tokenizer(tokenizer)
    more = {"top_p": top_p, "stop": stop, "trust_remote_code": trust_remote_code, "tokenizer": own}
    speaker = Speaker(source, max_new_tokens, temperature, **more)
    if warning := not_bytes(tokenizer, speaker.model.get_input_embeddings().weight.shape[0]):
        logger.warning(warning)
    torch.manual_seed(seed)
    return speaker


def convert(
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    to: str | None = None,
    came_from: str | None = None,
    placement: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
    verify: bool = True,
) -> ConversionRecord:
    """Convert a transformers checkpoint to a Lamina checkpoint with the same logits, or back, as `lamina convert` does.

    Args:
        source: a folder with config.json and safetensors, a run's folder, or a name on the hub.
        output: a new or empty folder.
        to: the format to write: "lamina", "transformers", or a trainer ("megatron", "mlx", "nanogpt", "olmo-core" or
            "torchtitan"). The default is "transformers" for a Lamina checkpoint, and otherwise "lamina".
        came_from: the trainer (other than Lamina and transformers) that wrote the source.
        placement: the norm placement to use if the trainer's checkpoint does not name its placement.
        tokenizer: with ``came_from``, the tokenizer to save with the model: bytes, or a tokenizer's name or folder.
        dtype: the dtype of the weights: auto (the checkpoint's), float32, bfloat16 or float16.
        overwrite: whether to first delete the files that Lamina wrote into ``output``.
        verify: whether to load the result and compare its logits with the source's logits.

    Raises:
        UserError: (a ValueError) for a model that can't be read or converted, or an output folder with files.
    """
    model, folder = path("source", source), Path(path("output", output))
    one_of("dtype", dtype, DTYPES)
    if to is not None:
        one_of("to", to, (*get_args(Target), *TRAINERS, "mlx"))
    if came_from is None:
        for flag, value in (("placement", placement), ("tokenizer", tokenizer)):
            if value is not None:
                raise UserError(f"--{flag}: {value!r} has no effect without --from. Name the trainer with --from.")
        model = source_beside("source", model, folder, overwrite=overwrite)
    else:
        one_of("from", came_from, TRAINERS)
        if to is not None and to != "lamina":
            raise UserError(
                f"--to: Lamina does not convert from {came_from} to {to!r} in one step. Convert to 'lamina' first."
            )
        if placement is not None:
            check_spec(placement)
        if not Path(model).exists():
            raise UserError(f"source: {model!r} does not exist{nearby(model)}. Give a folder that {came_from} wrote.")
        refuse(folder, resume=False, overwrite=overwrite, resumes=False)
    if came_from is not None or (to is not None and to not in get_args(Target)):
        from lamina.ports import checkpoints

        reads, trainer = came_from is not None, str(came_from or to)
        own = None if tokenizer is None else path("tokenizer", tokenizer)
        return checkpoints.convert(model, folder, trainer, placement, own, reads=reads, overwrite=overwrite)
    from lamina.core.hub_access import local_when_unreachable
    from lamina.modeling.backbones.conversion import convert as run

    with local_when_unreachable():
        return run(model, folder, to=cast("Target | None", to), dtype=dtype, overwrite=overwrite, verify=verify)


def emit(
    placement: str,
    to: str,
    *,
    num_layers: int,
    init: str = "recommended",
    output: str | PathLike[str] | None = None,
    with_test: bool = False,
    overwrite: bool = False,
) -> str:
    """Write a norm placement as one file for another trainer, as `lamina emit` does, and return the file's text.

    Args:
        placement: a norm placement with its options, or a YAML or Python file.
        to: the trainer, one of ``lamina.ports.TARGETS``.
        num_layers: the number of blocks, which decides the constants in the file.
        init: the initializer in the file, as in ``lamina.build``.
        output: the file to write, or None to return only the text.
        with_test: whether to write a test beside ``output``. The test imports the trainer, and
            compares logits and gradients with Lamina's model.
        overwrite: whether to replace existing files.

    Raises:
        UserError: (a ValueError) for an unknown placement or trainer, a placement that the trainer can't express, or a
            file that exists.
    """
    spec, target = text("placement", placement), text("to", to)
    whole_number("num_layers", num_layers)
    if with_test and output is None:
        raise UserError(
            "with_test: Lamina writes the test beside the output file, but output is not given. Add --output NAME.py."
        )
    from lamina.ports import emit as run

    file = None if output is None else Path(path("output", output))
    if file is not None and (file.suffix != ".py" or not file.stem.isidentifier() or file.is_dir()):
        raise UserError(
            f"output: {str(output)!r} cannot be imported. Choose a file NAME.py, with only letters, digits and _ "
            "in NAME."
        )
    if file is not None and (iskeyword(file.stem) or file.stem == "torch"):
        raise UserError(f"output: Python or torch reserves the name {file.name!r}. Choose another name.")
    emitted = run(spec, target, num_layers, init=text("init", init), module=file.stem if file else "")
    if file is not None:
        written = {file: emitted.code} | ({file.with_name(f"test_{file.name}"): emitted.test} if with_test else {})
        for each in written:
            if each.exists() and not overwrite:
                raise UserError(f"output: {str(each)!r} exists. Add --overwrite, or choose another name")
        file.parent.mkdir(parents=True, exist_ok=True)
        for each, code in written.items():
            each.write_text(code, encoding="utf-8")
    return emitted.code


def prune(
    model: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: str | Sequence[int] = (),
    by: str | None = None,
    drop: int | None = None,
    overwrite: bool = False,
    **text_settings: object,
) -> Pruning:
    """Remove layers from a trained decoder, as `lamina prune` does, and measure the loss before and after.

    Args:
        model: a folder with a saved model of Lamina or transformers, or a run's folder.
        output: a new or empty folder.
        layers: the layers to remove, counted from 0: a list, or a text such as "3,5-7".
        by: the measure that decides which layers to remove, if you do not give ``layers``:

            - "angular_distance": the contiguous block of layers that changes the direction of the hidden states least
              (Gromov et al. 2024)
            - "layer_drop": the layers that increase the loss least when Lamina removes each layer alone
            - PROBE.METRIC: the layers with the lowest values of any other metric
        drop: the number of layers to remove, with ``by``.
        overwrite: whether to first delete the files that Lamina wrote into ``output``.
        text_settings: settings of `lamina probe`: corpus, tokenizer, sequences, sequence_length, batch_size, device.

    Raises:
        UserError: (a ValueError) for a model or a text that can't be read, layers that the model does not have, or an
            output folder with files.
    """
    source, folder = path("model", model), Path(path("output", output))
    if by is None and not layers:
        raise UserError("layers: none given. Add --layers LIST, or --by MEASURE and --drop N.")
    if by is not None and layers:
        raise UserError("layers: you gave layers and a measure. Give --layers LIST, or --by MEASURE and --drop N.")
    if by is not None and drop is None:
        raise UserError(f"drop: the number of layers to remove by {by!r} is missing. Add --drop N.")
    if by is None and drop is not None:
        raise UserError(f"drop: {drop} has no effect without a measure. Add --by MEASURE, or leave out --drop.")
    from lamina.surgery.layer_lists import layers_of, measure_of

    if by is not None:
        whole_number("drop", drop)
        measure_of(text("by", by))
    if not isinstance(layers, str | list | tuple):
        raise UserError(f"layers: {layers!r}. Give a list of layer numbers, or a text such as '3,5-7'.")
    numbers = layers_of(layers) if isinstance(layers, str) else [whole_number("layers", layer, 0) for layer in layers]
    from lamina.probes.engine.probe_settings import ProbeSettings

    settings = ProbeSettings.from_dict(text_settings)
    settings.check_names()
    source = source_beside("model", source, folder, overwrite=overwrite)
    from lamina.surgery.prune import prune as run

    return run(source, folder, settings, layers=numbers, by=by, drop=drop or 0, overwrite=overwrite)


def graft(
    model: str | PathLike[str],
    output: str | PathLike[str],
    *,
    placement: str,
    overwrite: bool = False,
    **text_settings: object,
) -> Grafting:
    """Change the norm placement of a trained decoder, as `lamina graft` does.

    Lamina keeps the weights, and fits the new norms' gains on one half of a text so that each sub-layer's output
    changes little. On the other half, Lamina measures the loss before and after the change. To reduce the remaining
    difference, train with `lamina pretrain --from`.

    Args:
        model: a folder with a Lamina model, or with a decoder that `lamina convert` accepts.
        output: a new or empty folder.
        placement: the new norm placement, with its options.
        overwrite: whether to first delete the files that Lamina wrote into ``output``.
        text_settings: settings of `lamina probe`: corpus, tokenizer, sequences, sequence_length, batch_size, device.

    Raises:
        UserError: (a ValueError) for a model, a placement or a text that can't be read, a module whose weights Lamina
            can't rescale, or an output folder with files.
    """
    folder, source = Path(path("output", output)), path("model", model)
    check_spec(placement)
    from lamina.probes.engine.probe_settings import ProbeSettings

    settings = ProbeSettings.from_dict(text_settings)
    settings.check_names()
    source = source_beside("model", source, folder, overwrite=overwrite)
    from lamina.surgery.graft import graft as run

    return run(source, folder, settings, placement=placement, overwrite=overwrite)


def placement_of(model: nn.Module | PreTrainedConfig | str | PathLike[str], *, layers: str | None = None) -> Census:
    """Identify a model's norm placement by measuring it, as `lamina placements --of MODEL` does.

    Args:
        model: a transformers or Lamina model, a run's folder, or a folder with config.json. You can also give a
            configuration, a model type of transformers or a name on the hub. Lamina then builds a model with random
            weights. Lamina downloads only config.json, and runs no code from a checkpoint's folder.
        layers: the module path of the list of layers, such as ``model.layers`` (default: Lamina finds the list).

    Returns: The placement and the evidence for it.

        - ``placement``: a name with options for ``lamina.placements.resolve``
        - ``match``: the differences between the model and this placement
        - ``unknown``: the reason, if Lamina found no placement
        - ``text()``: the command's output

    Raises:
        UserError: (a ValueError) for a path that holds no model, or a configuration from which no model can be built.
    """
    if layers is not None:
        text("layers", layers)
    built = hasattr(model, "named_parameters") or hasattr(model, "model_type")
    given = cast("nn.Module | PreTrainedConfig", model) if built else path("model", model)
    if isinstance(given, str) and "/" in given:
        refuse_missing_model("model", given)
    from lamina.probes.census.census import census

    return census(given, layers=layers)


def diagnose(run: str | PathLike[str], against: str | PathLike[str] | None = None, *, which: str = "") -> Diagnosis:
    """Find out why a run failed: the likely cause, its step and layer, and what to change. Write the answer to a page.

    If the records come from another tool, Lamina writes the converted records and the page into the folder NAME-lamina
    beside the originals. If packages for the page are missing, the last returned sentence names these packages.

    Args:
        run: the folder of a run, a folder with a subfolder for each pipeline stage, or another tool's history (a file,
            a folder, or "-" for a pipe).
        against: another run, to find the first step and layer at which the two runs differ by more than noise.
        which: the name of the run, if the file or folder has several runs.

    Raises:
        UserError: (a ValueError) for unreadable records, for records without a loss and a gradient norm, for several
            runs without ``which``, or for two runs without a common step.
    """
    if against is not None:
        return _compared(Path(path("run", run)), Path(path("against", against)))
    from lamina.reports.diagnosis import answer, gather
    from lamina.reports.histories import import_history, is_history
    from lamina.reports.stages import joined, notes_of_stages

    folder = joined(Path(path("run", run)))
    read = notes_of_stages(folder)
    if is_history(folder):
        source, folder = folder, folder_beside("pipe" if str(folder) == "-" else folder)
        read = [f"Lamina read {source}: {import_history(source, folder, which)}."]
    elif which:
        raise UserError(
            f"which: {which!r} has no effect, because {str(folder)!r} holds only one run. Leave 'which' out."
        )
    if (last := trainings(folder)[-1:]) not in ([], [folder]):
        read.append(f"The last training with this output wrote to {last[0]}.")
    evidence = gather(folder)
    texts = [*answer(evidence).sentences, *read]
    try:
        require("the page", "report")
    except UserError as error:
        return Diagnosis(sentences=[*texts, str(error)], page=None)
    from lamina.reports.pages.diagnosis import PAGE, write_diagnosis

    return Diagnosis(sentences=texts, page=write_diagnosis(folder / PAGE, evidence, folder))


def _compared(run: Path, against: Path) -> Diagnosis:
    from lamina.reports.histories import is_history
    from lamina.reports.side_by_side import side_by_side
    from lamina.reports.stages import joined

    run, against = joined(run), joined(against)
    compared = side_by_side(run, against)
    texts = compared.sentences()
    try:
        require("the page", "report")
    except UserError as error:
        return Diagnosis(sentences=[*texts, str(error)], page=None)
    from lamina.reports.pages.diagnosis import write_comparison

    folder = folder_beside(run) if is_history(run) else real_path(run)
    folder.mkdir(exist_ok=True)
    name = f"against-{real_path(against).name}.html"
    return Diagnosis(sentences=texts, page=write_comparison(folder / name, compared))


def report(folder: str | PathLike[str]) -> Path:
    """Rewrite the page of a job's folder, as `lamina report` does, and return the page's path.

    >>> import lamina
    >>> lamina.report("no/such/folder")
    Traceback (most recent call last):
    ...
    lamina.errors.UserError: folder: 'no/such/folder' does not exist. Give a job's folder. To read ...

    Raises:
        UserError: (a ValueError) if no job wrote the folder, or if the records are damaged.
    """
    folder = path("folder", folder)
    require("report", "report")
    from lamina.reports import report as write

    return write(Path(folder))


def backbones() -> pd.DataFrame:
    """List the presets of backbones, with sizes and parameter counts, as `lamina backbones` does."""
    import pandas as pd

    from lamina.modeling.backbones import PRESETS, count_parameters, preset_config

    rows = []
    for preset in PRESETS.values():
        config = preset_config(preset.name)
        count = count_parameters(config)
        rows.append(
            {
                "name": preset.name,
                "type": preset.model_type,
                "layers": config.num_hidden_layers,
                "width": config.hidden_size,
                "FFN": config.intermediate_size,
                "heads": config.num_attention_heads,
                "vocabulary": getattr(config, "vocab_size", None),
                "total": count.total,
                "active": count.active,
                "source": preset.source,
            }
        )
    return pd.DataFrame(rows)
