"""Prompts as examples, and the order in which a policy answers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.posttraining.examples import rows
from lamina.posttraining.examples.encoding import Encoder
from lamina.posttraining.examples.formats import question_of
from lamina.posttraining.preferences import preference_encoder
from lamina.posttraining.settings import RlhfSettings
from lamina.posttraining.stage import Examples, fingerprint, monitored, split
from lamina.posttraining.starting import Start
from lamina.posttraining.trainer import Passed
from lamina.training.optimization.order import TrainOrder


def read_prompts(settings: RlhfSettings, start: Start) -> Examples:
    """The prompts of the settings' data: their text, their token ids, and their rows as JSON. Raises UserError."""
    import json

    from datasets import Dataset

    encoder: Encoder = preference_encoder(settings, start)
    if encoder.template is not None:
        start.tokenizer.chat_template = encoder.template

    if settings.max_answer >= start.longest:
        raise UserError(
            f"max_answer: {settings.max_answer} leaves no room for a prompt in the context of {start.longest} tokens "
            "(allowed: less)"
        )

    def use(row: rows.Fields) -> Json:
        prompt = question_of(row).prompt
        ids = encoder.prompt(prompt, room=settings.max_answer)
        try:
            whole = json.dumps(dict(row))
        except TypeError as error:
            raise ValueError(f"not JSON ({error})") from None
        return {"prompt": encoder.prompt_text(prompt), "prompt_ids": ids, "row": whole}

    found = rows.read("data", str(settings.data), use, skip_bad=settings.skip_bad)
    own = settings.eval_data
    held_out = None if own is None else rows.read("eval_data", own, use, skip_bad=settings.skip_bad)
    train, chosen = split(found.items, settings, None if held_out is None else held_out.items)
    return Examples(
        train=Dataset.from_list(list(map(dict, train))),
        held_out=Dataset.from_list(list(map(dict, chosen))),
        monitored=monitored([row["prompt_ids"] for row in chosen]),
        fingerprint=fingerprint(train, chosen),
        notes={
            "examples": len(train),
            "held_out": len(chosen),
            "skipped": found.skipped + (0 if held_out is None else held_out.skipped),
        },
    )


class PromptOrder(TrainOrder):
    """The training order of prompts for TRL's online trainers, each prompt ``copies`` times in a row.

    TRL answers all prompts of a step at its first micro-batch and ignores what it is given at the others.
    """

    def __init__(self, prompts: int, *, copies: int, **options: Passed):
        super().__init__(prompts, **options)
        self.copies = copies

    def __iter__(self) -> Iterator[list[int]]:
        parts = range(self.gradient_accumulation)
        for step in range(self.done + 1, self.steps + 1):
            mine = [index for part in parts for index in self.micro_batch(step, part)[self.share]]
            for _ in parts:
                yield repeated(mine, self.copies)


def repeated(indices: Sequence[int], copies: int) -> list[int]:
    """Each index ``copies`` times in a row."""
    return [index for index in indices for _ in range(copies)]
