"""Examples in TRL's forms (prompt and completion, messages, chosen and rejected), read and encoded."""

from __future__ import annotations

import glob
import json
import logging
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import eq
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lamina.core.json_types import Json, parsed
from lamina.core.values import home
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import inner_suffix
from lamina.errors import UserError, one_line, unknown
from lamina.evaluation.generated import NAMES, cached
from lamina.jobs.environment import cores
from lamina.jobs.files import disk_full
from lamina.modeling.processes import launched

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fields = Mapping[str, Any]
Message = Mapping[str, Any]
"""A turn: its ``role``, its ``content``, and what else a template reads (``tool_calls``, ``thinking`` ...)."""
Messages = Sequence[Message]
Prompt: TypeAlias = str | Messages
"""A text, or the turns before the answer."""
IGNORED = -100
ROLES = ("system", "user", "assistant", "tool", "developer")  # the last two for templates that know them
_ANY_ROLE = "another-role"
_MARK = "an-answer"
READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATED = "generated:"
ALLOWED_GENERATED = "generated:KIND[:TASK[+TASK...]][@test]"
BATCH = 1000  # rows that a process encodes at a time, in .1 to 1 s
ALONE = 4 * BATCH  # rows up to which starting other processes takes about as long as it saves
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_HERE: list[Callable[..., object]] = []  # another process's: encode, state, whether it began in a state
_FILES = "a .jsonl, .json, .csv or .parquet file, also .gz, .xz or .zst"
ALLOWED = f"{_FILES}, hf:NAME[:CONFIG][@SPLIT], or {ALLOWED_GENERATED}"


def read(
    name: str,
    source: str,
    use: Callable[[Fields], Json],
    fields: Sequence[str],
    *,
    state: Callable[[], object] = lambda: None,
    skip_bad: bool,
) -> tuple[Dataset, int]:
    """Read a source and encode each row by ``use``; also return how many rows were left out.

    The encoded rows are in an unnamed file, mapped into memory: no other run can take it for its file, and nothing is
    left of it when the process ends, however it ends.

    Args:
        name: the setting's name, for the messages.
        source: a file, hf:NAME, or generated:KIND.
        use: encodes a row, or raises ValueError with the reason why it can't be used.
        fields: the fields that ``use`` returns; a field that a row lacks is None.
        state: the decisions of ``use`` at earlier rows that affect later ones.
        skip_bad: whether to leave out unusable rows and count them.

    Raises:
        UserError: for a row that can't be used (with its number), a source that can't be read, or one without a usable
            row.
    """
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable

    types = {"truncated": pa.bool_(), "margin": pa.float64(), "prompt": pa.string(), "row": pa.string()}
    schema = pa.schema([(field, types.get(field, pa.list_(pa.int32()))) for field in fields])
    rows, where = load(name, source), f"{name}: {source!r}"
    encode = partial(_batch, where, rows, use, schema, skip_bad)
    with tempfile.TemporaryFile() as file:
        with pa.ipc.new_stream(file, schema) as stream, closing(_batches(encode, len(rows), state)) as batches:
            try:
                for batch in batches:
                    stream.write_batch(batch)
            except BrokenProcessPool:
                raise UserError(f"{where}: a process that encoded its rows was killed (out of memory?)") from None
        file.flush()
        table = pa.ipc.open_stream(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))).read_all()
    if skipped := len(rows) - len(table):
        logger.warning("%s: %s: %d of %d rows left out", name, source, skipped, len(rows))
    if not len(table):
        raise UserError(f"{where} has no usable row")
    return Dataset(InMemoryTable(table), fingerprint=uuid.uuid4().hex[:16]), skipped


def _batch(
    where: str,
    rows: Dataset | Sequence[Fields],
    use: Callable[[Fields], Json],
    schema: pa.Schema,
    skip_bad: bool,
    start: int,
) -> pa.RecordBatch:
    """Encode the batch of rows that begins at ``start``. Raises UserError for a bad row unless ``skip_bad``."""
    import pyarrow as pa

    places, number, encoded = range(start, min(start + BATCH, len(rows))), start, list[Json]()
    part = [rows[i] for i in places] if isinstance(rows, list) else cast("Dataset", rows).select(places)
    try:
        for number, row in enumerate(cast("Iterator[Fields]", part), start + 1):
            try:  # datasets fills in what a row lacks
                if not isinstance(row, dict):
                    raise ValueError(f"it is {one_line(repr(row))} (allowed: an object)")
                encoded.append(use({field: value for field, value in row.items() if value is not None}))
            except ValueError as error:
                if isinstance(error, UserError):
                    raise
                if not skip_bad:
                    raise UserError(f"{where}, row {number}: {error} (--skip-bad leaves such rows out)") from None
    except UnicodeDecodeError as error:  # a reader may let texts pass that are not UTF-8
        raise UserError(f"{where}, row {number + 1}: {one_line(error)} (allowed: UTF-8)") from None
    return pa.RecordBatch.from_pylist(encoded, schema=schema)


def _batches(encode: Callable[[int], T], count: int, state: Callable[[], object]) -> Generator[T, None, None]:
    """Yield ``encode``'s result for each batch of ``count`` rows, in order; with many rows, from several processes.

    A batch that a worker process can't encode as this one would, because of a bad row or of a decision at one of its
    rows, is encoded here; workers that start afterwards know the decision. Workers are forked, since ``encode`` can't
    be sent to them.
    """
    alone = count <= ALONE or sys.platform != "linux" or multiprocessing.current_process().daemon
    workers, before = 1 if alone else cores() // launched()[3], os.environ.get(_PARALLELISM)
    left = range(0, count, BATCH)
    while left:
        here = 1 if workers > 1 else len(left)  # the first batch decides most
        yield from map(encode, left[:here])
        if not (left := left[here:]):
            return
        os.environ[_PARALLELISM] = "false"  # a forked process lacks the tokenizers' threads
        given = (encode, state, partial(eq, state()))
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_begin, initargs=given)
        try:
            for batch in pool.map(cast("Callable[[int], T | None]", _elsewhere), left):
                if batch is None:
                    break
                yield batch
                left = left[1:]
        finally:
            pool.shutdown(cancel_futures=True)
            os.environ.pop(_PARALLELISM)
            os.environ.update({_PARALLELISM: before} if before is not None else {})


def _begin(*given: Callable[..., object]) -> None:
    """Initialize a worker process: it logs nothing, leaves signals to the first process, and ends with it."""
    _HERE[:] = given
    logging.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = (multiprocessing.parent_process(),)
    threading.Thread(target=lambda first: (first.join(), os._exit(1)), args=parent, daemon=True).start()


def _elsewhere(start: int) -> object:
    """Encode a batch in a worker process; return None for a batch that the first process must encode."""
    encode, state, as_first = _HERE
    try:
        batch = encode(start)
    except UserError:
        return None
    return batch if as_first(state()) else None


def load(name: str, source: str) -> Dataset | Sequence[Fields]:
    """Load the rows of a source with the datasets library. Raises UserError about the setting ``name``."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    if source.startswith(GENERATED):
        return datasets.Dataset.from_list(list(generated_rows(name, source)))
    try:
        if hub_datasets.is_hub(source):
            return hub_datasets.load(hub_datasets.parse(source))
        path = home(name, source)
        if inner_suffix(path) not in READERS:
            raise UserError(f"{name}: {source!r} ends in {inner_suffix(path) or 'nothing'} (allowed: {ALLOWED})")
        if not path.is_file():
            raise UserError(f"{name}: {source!r}: no such file (allowed: {ALLOWED})")
        if not path.stat().st_size:
            raise UserError(f"{name}: {source!r} is empty")
        return _of_file(path)
    except UserError as error:  # the reader of corpora says it of a corpus
        raise UserError(str(error).replace("corpus:", f"{name}:", 1)) from None
    except Exception as error:  # of pyarrow, of pandas, of the library
        if disk_full(error):
            raise
        cause = error.__cause__ or error
        reason = one_line(str(cause) if type(cause) is ValueError else cause)
        reason = "it is cut short" if isinstance(cause, StopIteration | EOFError) else reason
        raise UserError(f"{name}: {source!r} holds no rows ({reason})") from None


def _of_file(path: Path) -> Dataset | Sequence[Fields]:
    """Read a file's rows, keeping texts as they are written."""
    import datasets
    import pandas as pd
    from datasets.exceptions import DatasetGenerationError

    files, reader = glob.escape(str(path.resolve())), READERS[inner_suffix(path)]
    texts: Json = {}
    if reader == "csv":  # else 007 is a number, and NA is missing
        columns = pd.read_csv(path, nrows=0).columns
        texts["features"] = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
        texts["keep_default_na"] = False
    try:
        rows = cast("Dataset", datasets.load_dataset(reader, data_files=files, split="train", **texts))
    except DatasetGenerationError:  # a column's type is that of the file's first 10 MB
        if reader != "json":
            raise
        rows = None
    if rows is None or (reader == "json" and "timestamp" in str(rows.features)):  # pyarrow takes 2024-01-01 for one
        return _lines(files)
    return rows


def _lines(files: str) -> list[Fields]:
    """Read rows of JSON without types for their columns. Raises ValueError that names the line that is none."""
    import datasets

    (document,) = cast("Dataset", datasets.load_dataset("text", data_files=files, split="train", sample_by="document"))
    text = str(cast(Fields, document)["text"])
    with suppress(ValueError):
        known = parsed(text)
        return known if isinstance(known, list) else [known]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [parsed(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is cut short or no JSON: {one_line(error)}") from None
    return rows


def generated_rows(name: str, source: str) -> Iterator[Json]:
    """Generate rows of ``generated:KIND[:TASK[+TASK...]][@test]``, mixed from the named tasks or from all.

    ``answers`` have a prompt and its completion, in the words of an evaluation's questions. ``preferences`` have a
    prompt, the right answer as the chosen one, and as the rejected one another answer or the right answer's words in
    another order. Raises UserError, about the setting ``name``, for an unknown kind, task or part.
    """
    kind, _, rest = source.removeprefix(GENERATED).partition("@")[0].partition(":")
    split = source.partition("@")[2] or "train"
    if kind not in ("answers", "preferences"):
        raise unknown(f"kind of {name}", kind, ("answers", "preferences"))
    if split not in ("train", "test"):
        raise UserError(f"{name}: {source!r} (allowed: {ALLOWED_GENERATED})")
    tasks = [f"lamina_{task}" for task in rest.split("+")] if rest else list(NAMES)
    for task in tasks:
        if task not in NAMES:
            raise unknown(f"task of {name}", task.removeprefix("lamina_"), [one[7:] for one in NAMES])
    texts = [(cached() / task / f"{split}.jsonl").read_text(encoding="utf-8") for task in tasks]
    items: list[Json] = [json.loads(line) for text in texts for line in text.splitlines()]
    draw = random.Random(source)
    draw.shuffle(items)
    for item in items:
        question, right = f"{item['question']}\nAnswer:", item["choices"][item["answer"]]
        if kind == "answers":
            yield {"prompt": question, "completion": f" {right}"}
            continue
        wrong = draw.choice([text for text in item["choices"] if text != right])
        words = right.split()
        if draw.random() < 0.5:
            draw.shuffle(words)
            if len(words) > 2 and words != right.split():  # fewer hardly have another order
                wrong = " ".join(words)
        yield {"prompt": question, "chosen": f" {right}", "rejected": f" {wrong}"}


def trls_form(row: Fields, needed: Sequence[str]) -> Json:
    """Rename a row's fields to TRL's names; in the ``needed`` ones, give turns a ``role`` and a ``content``.

    Alpaca's instruction and output become a prompt and its completion, and ShareGPT's conversations become messages.
    Texts alone, as in LIMA, become alternate turns of the user and the assistant. A ``text`` is a completion without a
    prompt. In a row with several forms, turns come first, then a prompt with its completion, then an instruction with
    its output.

    Raises ValueError for an empty answer or a malformed turn, under the row's name for it.
    """
    named, called = dict(row), {}
    if pictures := next((name for name in ("images", "image") if row.get(name)), None):
        raise ValueError(f"the field {pictures!r} has images, which no model here reads")
    if "conversations" in row and "messages" not in row:
        named["messages"], called["messages"] = named.pop("conversations"), "conversations"
    prompted = "prompt" in row and ("completion" in row or "output" not in row)
    if "instruction" in row and "messages" not in named and not prompted:
        further = row.get("input") or ""
        asked = f"{row['instruction']}\n\n### Input:\n{further}" if str(further).strip() else row["instruction"]
        named["prompt"], called["prompt"] = [{"role": "user", "content": asked}], "instruction"
        if "output" in row:
            named["completion"] = [{"role": "assistant", "content": row["output"]}]
            called["completion"] = "output"
    if "text" in named and not named.keys() & {"messages", "prompt", "completion", "chosen"}:
        named |= {"prompt": "", "completion": named["text"]}
        called["completion"] = "text"
    for name in needed:
        value, theirs = named.get(name), called.get(name, name)
        if theirs in ("instruction", "output"):
            if not isinstance(text := row[theirs], str) or not text.strip():
                raise ValueError(f"the field {theirs!r} {'is empty' if isinstance(text, str) else 'must be a text'}")
        elif isinstance(value, list) and value:
            named[name] = [_turn(theirs, number, turn) for number, turn in enumerate(value)]
        elif name in named and (not isinstance(value, str) or name == "messages"):
            texts = "" if name == "messages" else "a text" if theirs == "text" else "a text or "
            raise ValueError(f"the field {theirs!r} must be {texts}{'' if theirs == 'text' else 'a list of turns'}")
        elif name in named and name != "prompt" and not str(value).strip():
            raise ValueError(f"the field {theirs!r} is empty")
    return named


def _turn(name: str, number: int, turn: object) -> Message:
    if isinstance(turn, str):
        turn = {"role": ROLES[1 + number % 2], "content": turn}
    fields = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, dict) else {}
    sender = fields.get("role", fields.get("from"))
    role = {"human": "user", "gpt": "assistant"}.get(str(sender), sender)  # ShareGPT's names
    content = fields.get("content", fields.get("value", "" if fields.get("tool_calls") else None))
    if isinstance(content, list):  # the parts of OpenAI's form
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        if any(isinstance(part, dict) and "image" in str(part.get("type")) for part in content):
            raise ValueError(f"turn {number + 1} of {name!r} has an image, which no model here reads")
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"turn {number + 1} of {name!r} has no role (allowed: {', '.join(ROLES)}) with a text")
    if role == "assistant" and not content.strip() and not fields.get("tool_calls"):
        raise ValueError(f"turn {number + 1} of {name!r}, the assistant's, is empty")
    further = {key: value for key, value in fields.items() if key not in ("from", "value")}
    return {**further, "role": role, "content": content}


def _up_to(role: str, turns: Messages) -> Messages:
    """Return the turns up to the last one with a role. Raises ValueError if there is none."""
    last = max((index for index, turn in enumerate(turns) if turn["role"] == role), default=-1)
    if last < 0:
        raise ValueError(f"no turn of the {role}'s")
    return turns[: last + 1]


def _answered(turns: Messages) -> Messages:
    """Return the turns unchanged. Raises ValueError if none of them is the assistant's."""
    _up_to("assistant", turns)
    return turns


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def as_turns(text: Prompt, role: str = "user") -> Messages:
    """Wrap a text as a turn; return turns unchanged."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _options(row: Fields) -> Json:
    """Return a row's template options: ``tools``, which may be JSON, and ``chat_template_kwargs``."""
    options, tools = dict(row.get("chat_template_kwargs") or {}), row.get("tools")
    if tools:
        options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
    return {"options": options} if options else {}


def _no_form(row: Fields, forms: str) -> ValueError:
    return ValueError(f"no known fields (needed: {forms}; the row has: {', '.join(map(str, row)) or 'none'})")


def example_of(row: Fields) -> Json:
    """Convert a row to ``prompt`` and ``completion``, texts that are used unchanged, or to ``messages``.

    ``asked`` is the number of messages before a completion, all of which is trained on; without it, the assistant's
    turns are. ``options`` are the template's. Raises ValueError for a row of no known form.
    """
    named = trls_form(row, ("messages", "prompt", "completion"))
    if "messages" in named:
        return {"messages": _answered(named["messages"]), **_options(row)}
    if "prompt" not in named or "completion" not in named:
        raise _no_form(row, "messages, or prompt and completion, or instruction and output, or text")
    prompt, completion = named["prompt"], named["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    asked, answer = as_turns(prompt), _answered(as_turns(completion, "assistant"))
    return {"messages": [*asked, *answer], "asked": len(asked), **_options(row)}


def preference_of(row: Fields) -> Json:
    """Convert a row to a ``prompt`` and two answers, ``chosen`` and ``rejected``. Raises ValueError if it is none."""
    named = trls_form(row, ("prompt", "chosen", "rejected"))
    if not ("chosen" in named and "rejected" in named):
        raise _no_form(row, "chosen and rejected, with or without a prompt")
    better, worse = named["chosen"], named["rejected"]
    if isinstance(better, str) and isinstance(worse, str):
        prompt = prompt_of(named) if "prompt" in named else _beginning(better, worse)
        if "prompt" not in named:
            better, worse = better[len(prompt) :], worse[len(prompt) :]
        return {"prompt": prompt_of({"prompt": prompt}), "chosen": better, "rejected": worse, **_options(row)}
    chosen, rejected = as_turns(better, "assistant"), as_turns(worse, "assistant")
    # whole conversations begin with the user's turn, also where a row has their prompt again
    if "prompt" in named and chosen[0]["role"] == "assistant":
        asked = as_turns(prompt_of(named))
    else:
        asked = chosen[: min(_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)]
        chosen, rejected = chosen[len(asked) :], rejected[len(asked) :]
    if not asked:
        raise ValueError("'chosen' and 'rejected' begin with different turns")
    answers = {"chosen": _answered(chosen), "rejected": _answered(rejected)}
    plain = {n: t[0]["content"] if [{*turn} for turn in t] == [{"role", "content"}] else t for n, t in answers.items()}
    return {"prompt": asked, **plain, **_options(row)}


def _beginning(better: str, worse: str) -> str:
    """Return TRL's implicit prompt: the common beginning of both texts, without its last space."""
    shared, shorter = _shared(better, worse), min(len(better), len(worse))
    start = better[: min(shared, shorter - 1)]
    return start.removesuffix(" ") if shared < shorter else start


def prompt_of(row: Fields) -> Prompt:
    """Return the prompt in a row of any form, without the answer. Raises ValueError for a row without one."""
    named = trls_form(row, ("prompt",))
    prompt = named.get("prompt")
    if prompt is None:
        name = "messages" if "messages" in named else "chosen"
        if not isinstance(named.get(name), list):
            raise _no_form(row, "prompt or messages or instruction")
        return _up_to("user", trls_form(named, (name,))[name])
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the field 'prompt' is empty")
    elif prompt[-1]["role"] == "assistant":
        raise ValueError("the last turn of 'prompt' is the assistant's")
    return prompt


_BREAK = "('\\n\\n' if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '')"


def _template(user: str, assistant: str) -> str:
    """Build a template from two Jinja expressions for the text of a user's and of an assistant's turn."""
    return (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{{ message.content + '\n\n' }}"
        "{%- elif message.role == 'user' -%}{{ " + user + " }}"
        "{%- else -%}{{ " + assistant + " }}{%- endif -%}{%- endfor -%}"
    )


TEMPLATES = {
    "alpaca": _template(  # Taori et al. 2023; LLM-Adapters' as well
        _BREAK + " + 'Below is an instruction that describes a task' + (', paired with an input that provides further "
        "context. ' if '\n\n### Input:\n' in message.content else '. ') + 'Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n' + message.content + '\n\n### Response:\n'",
        "message.content + eos_token",
    ),
    "human": _template(  # Adam-mini
        "' Human: ' + message.content + ' Assistant:'", "' ' + message.content + eos_token"
    ),
    "chat": _template(_BREAK + " + 'User: ' + message.content + '\n\nAssistant:'", "' ' + message.content + eos_token"),
    "plain": _template("message.content + '\n'", "message.content + eos_token"),
}
"""Jinja templates by name. The text up to an answer is the same with the answer and without."""
CHOICES = ("auto", "none", "tokenizer", *TEMPLATES)


def read_template(choice: str, tokenizer: PreTrainedTokenizerBase, *, default: str | None) -> str | None:
    """Return the Jinja template of a choice; None for text that is used unchanged.

    ``default`` names the template that ``auto`` stands for if the tokenizer has none. Raises UserError for an unknown
    name, a file that can't be read, and a tokenizer without a template.
    """
    known: object = tokenizer.chat_template  # of several, one may be the default
    found = known.get("default") if isinstance(known, dict) else known
    own = found if isinstance(found, str) else None
    if choice == "auto":
        return own or TEMPLATES.get(str(default))
    if choice == "tokenizer" and own is None:
        raise UserError(
            f"template: 'tokenizer', but the model's tokenizer has no chat template (allowed: {', '.join(CHOICES)})"
        )
    if choice in CHOICES:
        return {"none": None, "tokenizer": own, **TEMPLATES}[choice]
    path = Path(choice)
    if path.suffix not in (".jinja", ".j2"):
        raise unknown("template", choice, (*CHOICES, "FILE.jinja"))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"template: {choice!r} can't be read ({one_line(error)})") from None


@cache
def _marked(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return a template that marks the answers: this one, or TRL's version of a known one; None if there is none."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(template):
        return template
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # TRL has none
        return None
    finally:
        tokenizer.chat_template = before


@dataclass(kw_only=True)
class ExampleEncoder:
    """Encodes examples for a model.

    Attributes:
        template: the Jinja template for conversations; None for text that is used unchanged.
        longest: the maximum number of tokens in a sequence.
        loss_on_all: whether the prompt's tokens are also labels.
        wraps_texts: whether a text becomes a turn of the template; otherwise it is used unchanged, as in TRL.
        options: the template's options, for prompts without an answer.
        warned: whether a prompt has been seen whose text changes when its answer follows.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    longest: int
    loss_on_all: bool = False
    wraps_texts: bool = False
    options: Fields = field(default_factory=dict)
    warned: bool = False

    def example(self, example: Fields) -> Json:
        """Encode the result of ``example_of`` as ``input_ids`` and ``labels``, cut to ``longest``.

        Raises ValueError if no token is left to train on.
        """
        if self.wraps_texts and "completion" in example:
            turns = as_turns(example["prompt"])
            answer = as_turns(example["completion"], "assistant")
            example = {"messages": [*turns, *answer], "asked": len(turns)}
        ids, inside = self._tokens_and_labels(example)
        labels = [i if answer else IGNORED for i, answer in zip(ids, inside, strict=True)]
        if all(label == IGNORED for label in labels[: self.longest]):
            if True not in inside:
                raise ValueError("the answer has no tokens")
            raise ValueError(
                f"the prompt has {inside.index(True)} tokens, which leaves none of {self.longest} for the answer"
            )
        cut = slice(self.longest)
        return {"input_ids": ids[cut], "labels": labels[cut], "truncated": len(ids) > self.longest}

    def prompt(self, prompt: Prompt, *, room: int = 1) -> list[int]:
        """Encode a prompt. Raises ValueError if it leaves fewer than ``room`` tokens for the answer."""
        plain = isinstance(prompt, str) and not self.wraps_texts
        ids = self._tokens(self.prompt_text(prompt), special=plain)[0]
        if len(ids) + room > self.longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the answer up to {room}, the context {self.longest}"
            )
        return ids

    def prompt_text(self, prompt: Prompt) -> str:
        """Return a prompt as the text that the model continues."""
        if isinstance(prompt, str) and not self.wraps_texts:
            return prompt
        return self.render(as_turns(prompt), answers=True, options=self.options)

    def ends(self) -> list[int]:
        """Return the special token with which the template ends an answer; empty if it has none."""
        turns = [{"role": "user", "content": "0"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self.render(turns, answers=False) if self.template else ""
        except ValueError:  # a template for other conversations
            return []
        after = self._tokens(text.rpartition(_MARK)[2], special=False)[0] if _MARK in text else []
        return [token for token in after if token in self.tokenizer.added_tokens_decoder][:1]

    def preference(self, preference: Fields) -> tuple[Json, Json]:
        """Encode both answers of ``preference_of``, the better first, with the prompt; raises as ``example``."""
        prompt = preference["prompt"]
        both: list[Json] = [{"prompt": prompt, "completion": preference[name]} for name in ("chosen", "rejected")]
        if not isinstance(prompt, str):
            turns, options = as_turns(prompt), preference.get("options", {})
            wholes = ([*turns, *as_turns(one["completion"], "assistant")] for one in both)
            both = [{"messages": whole, "asked": len(turns), "options": options} for whole in wholes]
        better, worse = map(self.example, both)
        if better["input_ids"] == worse["input_ids"]:
            cut = f" in their first {self.longest} tokens" if better["truncated"] else ""
            raise ValueError(f"the two answers are the same{cut}")
        return better, worse

    def render(self, messages: Messages, *, answers: bool, options: Fields = MappingProxyType({})) -> str:
        """Render a conversation; with ``answers``, up to the start of the model's answer.

        Raises ValueError for turns that the template does not accept, and UserError for a template that is no Jinja.
        """
        from jinja2 import TemplateSyntaxError

        if self.template is None:
            raise ValueError("turns need a chat template (allowed: a --template, or prompts and answers as texts)")
        turns, template = [dict(message) for message in messages], self.template
        given = {**options, "chat_template": template, "tokenize": False, "add_generation_prompt": answers}
        lost = ["tools"] if options.get("tools") and "tools" not in template else []
        try:
            for role in (role for role in ROLES[3:] if role not in template):  # it may write any role's name
                renamed = [{**turn, "role": _ANY_ROLE} if turn["role"] == role else turn for turn in turns]
                if renamed != turns and _ANY_ROLE not in str(self.tokenizer.apply_chat_template(renamed, **given)):
                    lost.append(role)
            text = str(self.tokenizer.apply_chat_template(turns, **given))
        except TemplateSyntaxError as error:
            raise UserError(f"template: no Jinja in its line {error.lineno} ({one_line(error)})") from None
        except Exception as error:  # Jinja's own, and whatever a template raises by its raise_exception
            raise ValueError(f"the template does not take it: {one_line(error)}") from None
        for word in lost:
            raise ValueError(f"it has {word!r}, which the template does not take (allowed: a --template that does)")
        return text

    def _tokens_and_labels(self, example: Fields) -> tuple[list[int], list[bool]]:
        """Return an example's tokens, and whether each of them is a label."""
        options, plain = example.get("options", {}), "completion" in example
        if plain:
            end = str(self.tokenizer.eos_token)
            text = example["prompt"] + example["completion"].removesuffix(end) + end
        elif self.loss_on_all or "asked" in example:
            text = self.render(example["messages"], answers=False, options=options)
        else:
            text, spans = self._answers(example["messages"], options)
            ids, places = self._tokens(text, special=False)
            return ids, [any(begin < stop and end > start for start, stop in spans) for begin, end in places]
        ids = self._tokens(text, special=plain)[0]
        if self.loss_on_all:
            return ids, [True] * len(ids)
        asked = example.get("asked")
        prompt = example["prompt"] if plain else self.render(example["messages"][:asked], answers=True, options=options)
        # as in TRL, the completion begins where its tokens are not the prompt's alone
        alone = self._tokens(prompt, special=plain)[0]
        if (first := _shared(alone, ids)) < len(alone) and not self.warned:
            self.warned = True
            end = self.tokenizer.decode(alone[first:])
            logger.warning("a prompt ends in %r only where no answer follows; as in TRL, the answer begins there", end)
        return ids, [place >= first for place in range(len(ids))]

    def _answers(self, messages: Messages, options: Fields) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; also return the first and last character of each assistant's turn.

        Raises ValueError if the text of a turn changes when further turns follow, and no template marks the answers.
        """
        text, spans = self.render(messages, answers=False, options=options), []
        if marked := _marked(self.tokenizer, str(self.template)):
            turns, names = [dict(turn) for turn in messages], self.tokenizer.special_tokens_map
            how: Json = {**names, **options, "chat_template": marked, "return_assistant_tokens_mask": True}
            marks: Any = render_jinja_template([turns], **how)  # by conversation the text, and its answers' spans
            return marks[0][0], marks[1][0]
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                # transformers refuses to render no turns
                before = self.render(messages[:index], answers=True, options=options) if index else ""
                through = self.render(messages[: index + 1], answers=False, options=options)
                if not (through.startswith(before) and text.startswith(through)):
                    raise ValueError(
                        "the template renders the turns before an answer differently without it (another --template)"
                    )
                spans.append((len(before), len(through)))
        return text, spans

    def _tokens(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a text's token ids, and the characters at which each token begins and ends."""
        encoded: Any = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), encoded["offset_mapping"]
