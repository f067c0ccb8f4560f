"""Examples as tokens and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lamina.posttraining.examples.formats import Completion, Example, Preference, Prompt
from lamina.posttraining.examples.templates import render

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """An example's tokens.

    Attributes:
        input_ids: of the whole text.
        labels: the ids of the tokens that are trained on, -100 for the others.
        truncated: whether the text was longer.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes examples for one model.

    Args:
        tokenizer: the model's.
        template: Jinja, for conversations; None for text that is used as it is.
        longest: tokens of the longest sequence.
        loss_on_all: whether the prompt's tokens are labels, too.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    longest: int
    loss_on_all: bool = False

    def example(self, example: Example) -> Tokens:
        """An example's tokens, cut to ``longest``. Raises ValueError where no token to train on is left."""
        text, answers = self._spans(example)
        ids, ends = self._tokens(text, special=isinstance(example, Completion))
        # A token that reaches into an answer belongs to it, even if it begins in the prompt.
        inside = [any(start < end <= stop for start, stop in answers) for end in ends]
        labels = [i if self.loss_on_all or answer else IGNORED for i, answer in zip(ids, inside, strict=True)]
        if all(label == IGNORED for label in labels[: self.longest]):
            first = next((place for place, answer in enumerate(inside) if answer), None)
            if first is None:
                raise ValueError("the answer has no tokens")
            raise ValueError(f"the prompt has {first} tokens, which leaves none of {self.longest} for the answer")
        cut = slice(self.longest)
        return Tokens(input_ids=ids[cut], labels=labels[cut], truncated=len(ids) > self.longest)

    def prompt(self, prompt: Prompt, *, room: int = 1) -> list[int]:
        """A prompt's tokens. Raises ValueError if they leave less than ``room`` tokens for the answer."""
        ids = self._tokens(self.prompt_text(prompt), special=self._is_plain(prompt))[0]
        if len(ids) + room > self.longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the answer up to {room}, the context {self.longest}"
            )
        return ids

    def prompt_text(self, prompt: Prompt) -> str:
        """A prompt as the text that the model continues."""
        if self.template is None:
            if isinstance(prompt, str):
                return prompt
            raise ValueError("turns need a chat template (allowed: a --template, or prompts that are texts)")
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return render(self.tokenizer, self.template, turns, answers=True)

    def preference(self, preference: Preference) -> tuple[Tokens, Tokens]:
        """The tokens of the better and of the worse answer, each with the prompt. Raises ValueError."""
        answers = (preference.chosen, preference.rejected)
        better, worse = (self.example(self._answered(preference.prompt, answer)) for answer in answers)
        if better.input_ids == worse.input_ids:
            cut = f" in their first {self.longest} tokens" if better.truncated else ""
            raise ValueError(f"the two answers are the same{cut}")
        return better, worse

    def _answered(self, prompt: Prompt, answer: str) -> Example:
        if self._is_plain(prompt):
            assert isinstance(prompt, str)
            return Completion(prompt=prompt, completion=answer)
        from lamina.posttraining.examples.formats import Dialogue

        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Dialogue(messages=(*turns, {"role": "assistant", "content": answer}))

    def _is_plain(self, prompt: Prompt) -> bool:
        return self.template is None and isinstance(prompt, str)

    def _spans(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """An example's text, and where its answers are in it, from and to which character."""
        if isinstance(example, Completion):
            end = str(self.tokenizer.eos_token)
            completion = example.completion + ("" if example.completion.endswith(end) else end)
            text = example.prompt + completion
            return text, [(len(example.prompt), len(text))]
        if self.template is None:
            raise ValueError("turns need a chat template (allowed: a --template, or prompts and completions)")
        messages = example.messages
        text = render(self.tokenizer, self.template, messages, answers=False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                # transformers refuses to render no turns
                before = render(self.tokenizer, self.template, messages[:index], answers=True) if index else ""
                through = render(self.tokenizer, self.template, messages[: index + 1], answers=False)
                if not (through.startswith(before) and text.startswith(through)):
                    raise ValueError(
                        "the template renders the turns before an answer differently without it (another --template)"
                    )
                spans.append((len(before), len(through)))
        return text, spans

    def _tokens(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """A text's token ids, and the character at which each ends."""
        encoded: Any = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [int(end) for _, end in encoded["offset_mapping"]]
