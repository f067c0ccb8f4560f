"""Continue a text with a saved model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from lamina.errors import UserError, one_line
from lamina.jobs.manifest import model_folder
from lamina.modeling.backbones.loading import (
    check_vocabulary,
    load_tokenizer,
    load_weights,
    read_config,
    refuse_scores,
)


class Teller(TextStreamer):
    """Pass an answer to ``tell`` piece by piece during the generation.

    A Teller holds back white space, and a possible beginning of a stop text, until more text follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], tell: Callable[[str], object]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stop, self.tell, self.text, self.told = stop, tell, "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        end = until(self.text, self.stop)
        if end == len(self.text) and not stream_end:
            begun = (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
            end -= max(begun, default=0)
        said = self.text[:end].strip()
        if len(said) > self.told:
            self.tell(said[self.told :])
            self.told = len(said)


def until(text: str, stops: Sequence[str], begin: int = 0) -> int:
    """Return the position of the first stop text after ``begin``, or the text's length if there is none."""
    return min((end for stop in stops if (end := text.find(stop, begin)) >= 0), default=len(text))


class Speaker:
    """A saved model that continues a text, or answers a user with its chat template (see ``lamina.generate``).

    Raises UserError if the folder has no model that continues texts, or if a text fills the model's context.
    """

    def __init__(
        self,
        path: str,
        max_new_tokens: int,
        temperature: float,
        *,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        folder = model_folder(path)
        self.path, self.max_new_tokens = path, max_new_tokens
        code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        config = read_config(folder, "model", **code)
        refuse_scores(config, f"model: {path!r}")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
            raise UserError(
                f"model: {path!r} is a {config.model_type}, which cannot continue a text. Choose a causal language "
                "model."
            )
        self.model: Any = load_weights(folder, config, AutoModelForCausalLM, "model", **code)[0]  # has generate
        if tokenizer is None:
            tokenizer = load_tokenizer(folder, config, "model", **code)
        else:
            check_vocabulary(tokenizer, config, "tokenizer: the tokenizer")
        self.tokenizer = tokenizer
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.longest = longest if isinstance(longest, int) else None
        self.stop = tuple(stop)
        self.sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            self.sampling |= {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p})
        if stop:
            self.sampling |= {"stop_strings": [*stop], "tokenizer": self.tokenizer}

    def continuation(self, prompt: str) -> str:
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        if not inputs["input_ids"].numel():
            raise UserError(f"prompt: {prompt!r} has no tokens. Give a text to continue.")
        return self._text(self._generated(dict(inputs))[0], inputs["input_ids"].shape[1])

    def check_chat(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"chat: the tokenizer of {self.path!r} has no chat template. Choose a model with a template, "
                "such as a chat model trained with `lamina sft`, or leave out --chat."
            )

    def answer(self, turns: list[dict[str, str]], tell: Callable[[str], object] | None = None) -> str:
        """Answer a conversation that ends with a user's message. ``tell`` receives the answer piece by piece."""
        self.check_chat()
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template can raise any error
            raise UserError(
                f"chat: the model's chat template rejects these messages ({one_line(error)}). Change the messages, "
                "or leave out --chat."
            ) from None
        inputs = self.tokenizer(str(text), return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
        teller = None if tell is None else Teller(self.tokenizer, self.stop, tell)
        ids = self._generated(dict(inputs), teller)[0, inputs["input_ids"].shape[1] :]
        text = self._text(ids).strip()
        if teller is not None and len(text) > teller.told:
            teller.tell(text[teller.told :])
        return text

    def _text(self, ids: torch.Tensor, begin: int = 0) -> str:
        text, before = (str(self.tokenizer.decode(part, skip_special_tokens=True)) for part in (ids, ids[:begin]))
        return text[: until(text, self.stop, len(before))]

    def _generated(self, inputs: dict[str, torch.Tensor], teller: Teller | None = None) -> torch.Tensor:
        tokens = inputs["input_ids"].shape[1]
        if self.longest is not None and tokens >= self.longest:
            raise UserError(
                f"prompt: the prompt's {tokens} tokens fill the model's context of {self.longest}. "
                f"Give at most {self.longest - 1} tokens."
            )
        pad, room = self.tokenizer.pad_token_id, self.max_new_tokens
        options = self.sampling if teller is None else {**self.sampling, "streamer": teller}
        pad = self.tokenizer.eos_token_id if pad is None else pad
        if self.longest is not None and self._has_a_last_position(self.longest):
            room = min(room, self.longest - tokens)
        try:
            return self.model.generate(**inputs, max_new_tokens=room, pad_token_id=pad, **options)
        except Exception as error:  # the files can cause any error
            raise UserError(
                f"model {self.path!r}: the model loads, but does not run ({one_line(error)}). Choose another model."
            ) from error

    def _has_a_last_position(self, longest: int) -> bool:
        """Return whether the model has an embedding for each position. (OPT has two extra embeddings.)"""
        tables = (m for m in self.model.modules() if isinstance(m, torch.nn.Embedding))
        words = self.model.get_input_embeddings()
        return any(longest <= table.num_embeddings <= longest + 2 for table in tables if table is not words)
