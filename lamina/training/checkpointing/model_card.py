"""The card of a trained model, README.md beside its weights: what it is, what it learned from, how good it is."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel

from lamina.jobs.columns import RESULT_COLUMNS
from lamina.jobs.environment import environment
from lamina.modeling.configuration_lamina import backbone_of
from lamina.modeling.modeling_lamina import HEADS
from lamina.placements import Plan
from lamina.placements.diagram import svg, text, title_of
from lamina.placements.resolution import find

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
    """What a model's card says.

    Attributes:
        head: the name of the model's head in ``HEADS``.
        data: name and value of each fact about the data, in their order.
        result: of the run, as result.json holds it.
        command: the command line that trains the model again; the card leaves out this machine's folders.
        base_model: the model that the training began with, if any: a folder, or a name on the hub.
        measures: the title and the format of each measure to print; None for those of pretraining.
    """

    head: str
    data: Mapping[str, object]
    result: Mapping[str, object]
    command: str
    base_model: str | None = None
    measures: Mapping[str, tuple[str, str]] | None = None

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """Write the card and the placement's diagram into a model's folder."""
        plan = Plan.from_dict(model.config.plan)
        (folder / DIAGRAM).write_text(svg(plan), encoding="utf-8")
        (folder / CARD).write_text(self.text(model, plan), encoding="utf-8")

    def text(self, model: PreTrainedModel, plan: Plan) -> str:
        """The card as Markdown, with the fields in front that the hub reads."""
        backbone = backbone_of(model.config)
        tag = plan.placement if re.fullmatch(r"\w+", plan.placement) else "custom"
        fields = ModelCardData(
            library_name="transformers",
            pipeline_tag=_PIPELINES[self.head],
            tags=["lamina", tag, backbone.model_type],
            base_model=self.base_model if _is_on_hub(self.base_model) else None,
        ).to_yaml()
        auto, size = HEADS[self.head].auto_class, sum(weight.numel() for weight in model.parameters())
        sizes = f"{plan.num_layers} blocks, width {backbone.hidden_size}, {size:,} parameters"
        trained = "Trained with Lamina" + (f", from {_code(_named(self.base_model))}" if self.base_model else "")
        drawn = text(plan).replace("`", "'")
        lines = [
            *("---", fields, "---", ""),
            f"# {_plain(title_of(plan))} on {backbone.model_type}",
            *("", f"A model with the norm placement {_code(plan.placement)}: {sizes}. {trained}."),
            *("", "## Placement", "", f"![Where the norms sit]({DIAGRAM})", "", "```text", drawn, "```"),
            *_source(plan),
            *("", "## Data", "", *_table("data", "", {title: _named(fact) for title, fact in self.data.items()})),
            *("", "## Results", "", *_table("measure", "value", self._results())),
            *("", "## Use", "", "```python", "import lamina  # or trust_remote_code=True below"),
            *(f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("PATH")', "```"),
            *("", "## Training", "", "```bash", _command(self.command), "```", ""),
            "Versions: " + ", ".join(f"{name} {version}" for name, version in _versions().items()),
        ]
        return "\n".join(lines) + "\n"

    def _results(self) -> dict[str, object]:
        """The run's measures in print, by their titles; those that it does not have are left out."""
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
    """Whether a model is named as on the hub, which takes no card whose ``base_model`` is a folder."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return model is not None and not Path(model).exists()


def _source(plan: Plan) -> list[str]:
    try:
        source = find(plan.placement).source
    except ValueError:  # one's own placement, from a file
        return []
    return ["", f"Source: {_plain(source)}"]


def _table(name: str, value: str, rows: Mapping[str, object]) -> list[str]:
    cells = [f"| {key} | {_code(content)} |" for key, content in rows.items()]
    return [f"| {name} | {value} |", "| --- | --- |", *cells]


def _named(value: object) -> str:
    """A value without the folders of this machine: of each absolute path in it, the name."""
    return re.sub(r"(?<![^\s=:,;('\"])/[^:,;()'\"]*", lambda path: PurePath(path[0]).name, str(value))


def _command(line: str) -> str:
    """A command line, the same of each of its words."""
    return " ".join(shlex.quote(" ".join(_named(word).split())) for word in shlex.split(line))


def _plain(value: str) -> str:
    """A text as Markdown that shows it as it is: no HTML, no markup."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(" ".join(value.split()), quote=False))


def _code(value: object) -> str:
    """A value as it is written, whatever characters it has."""
    return "`" + " ".join(str(value).replace("`", "'").replace("|", "\\|").split()) + "`"


def _versions() -> dict[str, str]:
    return {name: str(version) for name, version in environment(0)["versions"].items() if version}
