"""Preferences as examples: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from lamina.core.json_types import Json
from lamina.posttraining.examples import rows
from lamina.posttraining.examples.encoding import IGNORED, Encoder
from lamina.posttraining.examples.formats import Preference, preference_of
from lamina.posttraining.examples.templates import read_template
from lamina.posttraining.settings import TuningSettings
from lamina.posttraining.stage import Examples, Row, fingerprint, monitored, split
from lamina.posttraining.starting import Start

if TYPE_CHECKING:
    from datasets import Dataset

S = TypeVar("S", bound=TuningSettings)


def preference_encoder(settings: TuningSettings, start: Start) -> Encoder:
    """The encoder of prompts and answers: with the model's chat template, unless the settings name another."""
    template = read_template(settings.template, start.tokenizer, default=None)
    return Encoder(tokenizer=start.tokenizer, template=template, longest=start.longest)


def read_preferences(settings: TuningSettings, start: Start, columns: Sequence[str]) -> Examples:
    """The preferences of the settings' data, with these columns of ``encoded``. Raises UserError."""
    encoder = preference_encoder(settings, start)
    if encoder.template is not None:
        start.tokenizer.chat_template = encoder.template

    def use(row: rows.Fields) -> Json:
        return encoded(encoder, preference_of(row))

    found = rows.read("data", str(settings.data), use, skip_bad=settings.skip_bad)
    own = settings.eval_data
    held_out = None if own is None else rows.read("eval_data", own, use, skip_bad=settings.skip_bad)
    train, chosen = split(found.items, settings, None if held_out is None else held_out.items)
    return Examples(
        train=_dataset(train, columns),
        held_out=_dataset(chosen, columns),
        monitored=monitored([row["chosen_whole"] for row in chosen]),
        fingerprint=fingerprint(train, chosen),
        notes={
            "examples": len(train),
            "held_out": len(chosen),
            "skipped": found.skipped + (0 if held_out is None else held_out.skipped),
            "truncated": sum(row["truncated"] for row in (*found.items, *(held_out.items if held_out else ()))),
        },
    )


def encoded(encoder: Encoder, preference: Preference) -> Json:
    """A preference's token ids: whole texts, and the prompt (what both begin with) and the answers apart."""
    better, worse = encoder.preference(preference)
    first = min(next(i for i, label in enumerate(t.labels) if label != IGNORED) for t in (better, worse))
    first = next((i for i in range(first) if better.input_ids[i] != worse.input_ids[i]), first)
    return {
        "chosen_whole": better.input_ids,
        "rejected_whole": worse.input_ids,
        "prompt_ids": better.input_ids[:first],
        "chosen_ids": better.input_ids[first:],
        "rejected_ids": worse.input_ids[first:],
        "truncated": better.truncated or worse.truncated,
    }


def _dataset(encoded_rows: Sequence[Row], columns: Sequence[str]) -> Dataset:
    from datasets import Dataset

    renamed = {"chosen_whole": "chosen_ids", "rejected_whole": "rejected_ids"}
    return Dataset.from_dict({renamed.get(name, name): [row[name] for row in encoded_rows] for name in columns})
