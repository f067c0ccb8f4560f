"""Write a trained model and its card into the run's folder, and upload both to the Hugging Face Hub."""

from __future__ import annotations

import html
import logging
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.errors import UserError, one_line
from lamina.jobs.columns import RESULT_COLUMNS
from lamina.jobs.environment import environment
from lamina.jobs.manifest import seal
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import HEADS
from lamina.modeling.processes import Processes
from lamina.placements import Plan
from lamina.placements.diagram import svg, text, title_of
from lamina.placements.resolution import find
from lamina.training.checkpointing.sharding import full_state, is_sharded, own_class
from lamina.training.objectives.objective import Processor

logger = logging.getLogger(__name__)

CARD, DIAGRAM = "README.md", "placement.svg"
_PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "image_classification": "image-classification",
    "sequence_classification": "text-classification",
}
_RESULTS = ("status", "steps", "tokens", "parameters", "eval_loss", "eval_corpus_loss", "perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The content of a model's card."""

    head: str  # the name of the model's head in ``HEADS``
    data: Mapping[str, object]  # facts about the data, by name
    result: Mapping[str, object]  # the content of result.json
    command: str  # the command line that trains the model again
    base_model: str | None = None  # the folder or Hub name of the starting model, or None for a new model
    # the title and format of each metric to print (default: pretraining's metrics)
    measures: Mapping[str, tuple[str, str]] | None = None

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """Write the model's card and a diagram of its norm placement into the model's folder."""
        plan = Plan.from_dict(model.config.plan) if getattr(model.config, "plan", None) else None
        if plan is not None:
            (folder / DIAGRAM).write_text(svg(plan), encoding="utf-8")
        (folder / CARD).write_text(self.text(model, plan), encoding="utf-8")

    def text(self, model: PreTrainedModel, plan: Plan | None) -> str:
        """Return the card as YAML fields and Markdown. ``plan`` is None for a model with a transformers class."""
        backbone = backbone_of(model.config)
        tags, about = ["lamina", backbone.model_type], [f"# {_plain(backbone.model_type)}", "", "A model"]
        placed, used = [], []
        if plan is not None:
            tags.insert(1, plan.placement if re.fullmatch(r"\w+", plan.placement) else "custom")
            about[0] = f"# {_plain(title_of(plan))} on {backbone.model_type}"
            about[2] += f" with the norm placement {_code(plan.placement)}: {plan.num_layers} blocks"
            drawn = text(plan).replace("`", "'")
            placed = ["", "## Placement", "", f"![Where the norms sit]({DIAGRAM})", "", "```text", drawn, "```"]
            placed += _source(plan)
            used = ["import lamina  # or trust_remote_code=True below"]
        else:
            about[2] += f" of transformers: {getattr(backbone, 'num_hidden_layers', '?')} blocks"
        fields = ModelCardData(
            library_name="transformers",
            pipeline_tag=_PIPELINES.get(self.head),
            tags=tags,
            base_model=self.base_model if _is_on_hub(self.base_model) else None,
        ).to_yaml()
        auto, size = HEADS[self.head].auto_class, sum(weight.numel() for weight in model.parameters())
        about[2] += f", width {backbone.hidden_size}, {size:,} parameters."
        trained = "Trained with Lamina" + (f", from {_code(_named(self.base_model))}" if self.base_model else "")
        versions = environment(0)["versions"]
        command = " ".join(shlex.quote(" ".join(_named(word).split())) for word in shlex.split(self.command))
        lines = [
            *("---", fields, "---", ""),
            *about[:2],
            f"{about[2]} {trained}.",
            *placed,
            *("", "## Data", "", *_table("data", "", {title: _named(fact) for title, fact in self.data.items()})),
            *("", "## Results", "", *_table("measure", "value", self._results())),
            *("", "## Use", "", "```python", *used),
            *(f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("PATH")', "```"),
            *("", "## Training", "", "```bash", command, "```", ""),
            "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        ]
        return "\n".join(lines) + "\n"

    def _results(self) -> dict[str, object]:
        shown: dict[str, object] = {}
        for name, (title, form) in (_MEASURES if self.measures is None else self.measures).items():
            value = self.result.get(name)
            if value is not None and value == value:
                shown[title] = f"{value:{form}}"
        return shown


_MEASURES = {
    column.name: (column.title, column.format or "")
    for column in RESULT_COLUMNS
    if column.name in _RESULTS or "accuracy" in column.name
}


def _is_on_hub(model: str | None) -> bool:
    """Return whether a base model is the name of a Hub repository. The Hub rejects cards that name a folder."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return model is not None and not Path(model).exists()


def _source(plan: Plan) -> list[str]:
    try:
        source = find(plan.placement).source
    except ValueError:  # the user's placement from a file has no source
        return []
    return ["", f"Source: {_plain(source)}"]


def _table(name: str, value: str, rows: Mapping[str, object]) -> list[str]:
    cells = [f"| {key} | {_code(content)} |" for key, content in rows.items()]
    return [f"| {name} | {value} |", "| --- | --- |", *cells]


def _named(value: object) -> str:
    """Return a value as text. Replace absolute paths by their last part, to hide this machine's folders."""
    return re.sub(r"(?<![^\s=:,;('\"])/[^:,;()'\"]*", lambda path: PurePath(path[0]).name, str(value))


def _plain(value: str) -> str:
    """Escape a text so that Markdown shows it literally."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(" ".join(value.split()), quote=False))


def _code(value: object) -> str:
    return "`" + " ".join(str(value).replace("`", "'").replace("|", "\\|").split()) + "`"


def check_repository(name: str) -> None:
    """Raise UserError for a malformed repository name or a missing Hub token. Call this before training."""
    from huggingface_hub import get_token

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = f"is not a repository's name ({one_line(error)}). Write OWNER/NAME."
        raise UserError(f"push_to_hub: {name!r} {reason}") from None
    if get_token() is None:
        reason = "needs a token of the Hugging Face hub. Run `hf auth login`, or set HF_TOKEN."
        raise UserError(f"push_to_hub: {name!r} {reason}")


def push(folder: Path, name: str) -> bool:
    """Upload a model's folder to a Hub repository (if new, a private one). Return whether the upload worked."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, commit_message="Trained with Lamina")
    # the hub's client raises dozens of exception types, but the finished training must not be lost
    except Exception as error:
        logger.warning(
            "push_to_hub: %s failed (%s). To upload later, run: hf upload %s %s", name, one_line(error), name, folder
        )
        return False
    logger.info("pushed to %s", getattr(commit, "repo_url", name))
    return True


def save_model(
    model: PreTrainedModel, processor: Processor, folder: Path, processes: Processes, card: ModelCard | None = None
) -> None:
    """Write a model with its tokenizer or image processor, completely or not at all. All processes must call this."""
    state = full_state(model) if is_sharded(model) else None

    def write() -> None:
        draft = folder.with_name(".model-draft")
        shutil.rmtree(draft, ignore_errors=True)
        with own_class(model):
            model.save_pretrained(draft, state_dict=state)
        longest = getattr(backbone_of(model.config), "max_position_embeddings", None)
        if isinstance(processor, PreTrainedTokenizerBase) and longest is not None:
            processor.model_max_length = longest
        processor.save_pretrained(draft)
        if card is not None:
            card.write(model, draft)
        seal(draft)
        previous = folder.with_name(".gone-model")
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            os.replace(folder, previous)
        os.replace(draft, folder)
        shutil.rmtree(previous, ignore_errors=True)

    processes.by_first(write)
