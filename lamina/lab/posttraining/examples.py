"""Rows in TRL's forms: loaded by the datasets library, prepared by TRL."""

from __future__ import annotations

import glob
import json
import logging
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.core.values import home
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import inner_suffix
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError, one_line, unknown
from lamina.evaluation.generated import NAMES, cached
from lamina.jobs.environment import cores
from lamina.jobs.files import disk_full
from lamina.lab.posttraining.settings import of_hub
from lamina.modeling.parts import patched
from lamina.modeling.processes import launched

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
"""Turns: each has a ``role``, a ``content``, and what else a template reads (``tool_calls``, ``thinking`` ...)."""
Passed: TypeAlias = Any
Prepare: TypeAlias = "Callable[[Dataset], Dataset]"
_MARK = "an-answer"
IGNORED = -100
READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATED = "generated:"
ALLOWED_GENERATED = "generated:KIND[:TASK[+TASK...]][@test]"
ALLOWED = (
    "a .jsonl, .json, .csv or .parquet file, also .gz, .xz or .zst, a folder, a name of the hub such as "
    f"trl-lib/Capybara, hf:NAME[:CONFIG][@SPLIT], or {ALLOWED_GENERATED}"
)
BATCH = 1000
ALONE = 4 * BATCH  # rows up to which starting other processes takes about as long as it saves
LARGEST = 256 << 20  # bytes of a .jsonl file that decide its columns' types; datasets' own are 10 MB
# Columns by which TRL recognizes a row's form, and others that stand for them.
_FORMS = {"prompt", "completion", "messages", "conversations", "text", "chosen", "rejected", "instruction"}
SFT_FORMS = (("input_ids",), ("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
REWARD_FORMS = (("chosen_ids", "rejected_ids"), *PAIR_FORMS)


def load(name: str, source: str) -> Dataset:
    """Load the rows of a source with the datasets library. Raises UserError about the setting ``name``."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    if source.startswith(GENERATED):
        return datasets.Dataset.from_list(list(generated_rows(name, source)))
    try:
        if hub_datasets.is_hub(source):
            return _some(hub_datasets.load(hub_datasets.parse(source)))
        path = home(name, source)
        if path.is_dir() or of_hub(source):
            return _some(hub_datasets.load(hub_datasets.parse(f"hf:{source}")))
        if inner_suffix(path) not in READERS:
            raise UserError(f"{name}: {source!r} ends in {inner_suffix(path) or 'nothing'} (allowed: {ALLOWED})")
        if not path.is_file():
            raise UserError(f"{name}: {source!r}: no such file (allowed: {ALLOWED})")
        if not path.stat().st_size:
            raise UserError(f"{name}: {source!r} is empty")
        return _some(_of_file(path))
    except UserError as error:  # the reader of corpora says it of a corpus
        raise UserError(str(error).replace("corpus:", f"{name}:", 1)) from None
    except Exception as error:  # of pyarrow, of pandas, of the library
        if disk_full(error):
            raise
        cause = error.__cause__ or error
        reason = "it is cut short" if isinstance(cause, StopIteration | EOFError) else one_line(cause)
        raise UserError(f"{name}: {source!r} can't be read: {reason}") from None


def _some(rows: Dataset) -> Dataset:
    if not len(rows):
        raise ValueError("it has no rows")
    return rows


def _of_file(path: Path) -> Dataset:
    """Read a file's rows, keeping texts as they are written."""
    import datasets
    import pandas as pd

    reader = READERS[inner_suffix(path)]
    options: dict[str, Any] = {}
    if reader == "csv":  # else 007 is a number, and NA is missing
        columns = pd.read_csv(path, nrows=0).columns
        types = {name: datasets.Value("float64" if name == "margin" else "string") for name in columns}
        options = {"features": datasets.Features(types), "keep_default_na": False}
    elif reader == "json":
        options = {"chunksize": LARGEST}
    files = glob.escape(str(path.resolve()))
    rows = cast("Dataset", datasets.load_dataset(reader, data_files=files, split="train", **options))
    if reader == "json" and "timestamp" in str(rows.features):  # a text such as 2024-01-01 is no time
        (whole,) = cast("Dataset", datasets.load_dataset("text", data_files=files, split="train", sample_by="document"))
        text = cast(Json, whole)["text"]
        listed = (
            json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(str.strip, text.splitlines()))
        )
        rows = datasets.Dataset.from_list(
            [{**dict.fromkeys(rows.column_names), **row} for row in listed], on_mixed_types="use_json"
        )
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


def conform(rows: Dataset, forms: Sequence[tuple[str, ...]], *, turns: bool) -> tuple[Dataset, tuple[str, ...]]:
    """Bring other libraries' rows into TRL's forms, and mixed texts and turns into turns; TRL's own stay unchanged.

    Alpaca's instruction and output become a prompt and its completion; ShareGPT's conversations become messages, and
    LIMA's, texts alone, a prompt and the last answer. ``turns``: texts with an answer become turns, too.

    Raises:
        UserError: for columns without a form among ``forms``; otherwise the first form counts, and is returned.
    """
    import datasets

    def mapped(function: Callable[[Json], Json], *names: str) -> Dataset:
        types = datasets.Features({**rows.features, **dict.fromkeys(names, datasets.List(datasets.Json()))})
        return rows.map(function, features=types)

    columns = set(rows.column_names)
    if pictures := columns & {"image", "images"}:
        raise UserError(f"the column {min(pictures)!r} has images, which no model here reads")
    if "conversations" in columns and "messages" not in columns:
        texts = isinstance(next(iter(rows[0]["conversations"] or ()), None), str)
        rows = mapped(_of_lima, "prompt", "completion") if texts else mapped(_of_sharegpt, "messages")
    elif "instruction" in columns and not any(columns.issuperset(form) for form in forms if form != PAIR_FORMS[1]):
        answered = ["completion"] if "output" in columns and "chosen" not in columns else []
        rows = mapped(_of_alpaca, "prompt", *answered)
    form = next((form for form in forms if set(form) <= set(rows.column_names)), None)
    if form is None:
        needed = ", or ".join(" and ".join(form) for form in forms)
        raise UserError(f"no known fields (needed: {needed}; the rows have: {', '.join(columns)})")
    if form == PAIR_FORMS[1] or ("chosen" in form and len(_kinds(rows, form)) > 1):
        only_texts, form = _kinds(rows, form) == {"Value"}, PAIR_FORMS[0]
        texts = datasets.Features({**rows.features, "prompt": datasets.Value("string")})
        rows = rows.map(_of_pair, features=texts) if only_texts else mapped(_of_pair, *form)
    rows = rows.remove_columns([name for name in rows.column_names if name in _FORMS - {*form}])
    kinds = _kinds(rows, form)
    if len(form) > 1 and (kinds & {"Json"} or len(kinds) > 1 or (turns and kinds == {"Value"})):
        rows = mapped(partial(_as_turns, form), *form)
    return rows, form


def _kinds(rows: Dataset, form: Sequence[str]) -> set[str]:
    """Return what columns hold: texts (Value), turns (List), or both (Json)."""
    return {type(rows.features[name]).__name__ for name in form}


def _turn(role: str, text: object) -> Json:
    return {"role": role, "content": text}


def _as_turns(form: Sequence[str], row: Json) -> Json:
    roles = {name: "user" if name == "prompt" else "assistant" for name in form}
    given = {name: row[name] or [] for name in form}
    return {name: value if isinstance(value, list) else [_turn(roles[name], value)] for name, value in given.items()}


def _of_alpaca(row: Json) -> Json:
    text, further = row["instruction"], str(row.get("input") or "")
    asked = f"{text}\n\n### Input:\n{further}" if further.strip() else text
    answer = [] if row.get("output") is None else [_turn("assistant", row["output"])]
    return {"prompt": [_turn("user", asked)], **({"completion": answer} if "output" in row else {})}


def _alternate(texts: Sequence[object]) -> list[Json]:
    return [_turn(("user", "assistant")[at % 2], text) for at, text in enumerate(texts)]


def _of_lima(row: Json) -> Json:
    """Return the turns up to the last answer, and that answer."""
    turns = _alternate(row["conversations"] or ())
    answered = len(turns) // 2 * 2
    return {"prompt": turns[: max(0, answered - 1)], "completion": turns[max(0, answered - 1) : answered]}


def _of_sharegpt(row: Json) -> Json:
    from trl.data_utils import maybe_convert_to_chatml

    turns = maybe_convert_to_chatml({"conversations": [dict(turn) for turn in row["conversations"] or ()]})["messages"]
    names = {"human": "user", "gpt": "assistant"}
    return {"messages": [{**turn, "role": names.get(turn.get("role"), turn.get("role"))} for turn in turns]}


def _of_pair(row: Json) -> Json:
    """Find the prompt that both answers begin with, as TRL does, or make turns of texts beside turns."""
    from trl.data_utils import maybe_extract_prompt

    pair = {name: row[name] for name in PAIR_FORMS[0] if row.get(name) is not None}
    chosen = pair.get("chosen")
    whole = isinstance(chosen, list) and chosen and chosen[0].get("role") != "assistant"
    if "prompt" not in pair or (isinstance(pair["prompt"], str) and whole):
        return cast(Json, maybe_extract_prompt(pair))
    return _as_turns(PAIR_FORMS[0], row)


def prompts(rows: Dataset, *, turns: bool) -> Dataset:
    """Return the prompts in rows of any form, without the answers, and each whole row as JSON."""
    import datasets

    text = not turns and isinstance(rows.features.get("prompt"), datasets.Value)

    def prompted(row: Json) -> Json:
        fields = {name: value for name, value in row.items() if value is not None}
        prompt = _prompt_of(fields)
        prompt = [_turn("user", prompt)] if isinstance(prompt, str) and not text else prompt
        return {"prompt": prompt, "row": json.dumps(fields, default=str)}

    kind = datasets.Value("string") if text else datasets.List(datasets.Json())
    types = datasets.Features({"prompt": kind, "row": datasets.Value("string")})
    return rows.map(prompted, features=types, remove_columns=rows.column_names)


def _prompt_of(row: Json) -> object:
    if row.get("prompt"):
        return row["prompt"]
    if "instruction" in row and "messages" not in row:
        return _of_alpaca(row)["prompt"]
    if "conversations" in row:
        said = row["conversations"]
        row = {"messages": _alternate(said)} if isinstance(said[0], str) else _of_sharegpt(row)
    turns: Messages = row.get("messages") or row.get("chosen") or ()
    last = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    return turns[: last + 1] if last >= 0 else None


def unfit(row: Fields, form: Sequence[str]) -> str:
    """Say why a row in TRL's form has nothing to train on; empty if it has."""
    for name in form:
        value, turns = row[name], row[name] if isinstance(row[name], list) else []
        if name.endswith("_ids") and all(isinstance(token, int) for token in turns):  # tokens already
            continue
        if not isinstance(value, str) and not (turns and all(isinstance(t, dict) and t.get("role") for t in turns)):
            given = "missing" if value in (None, []) else f"{one_line(repr(value))[:60]}"
            return f"the field {name!r} is {given} (needed: a text, or turns with a role and a content)"
        for at, turn in enumerate(turns):
            if not isinstance(turn.get("content"), str | list | None):
                return f"turn {at + 1} of {name!r} has no text"
            if not (turn.get("content") or turn.get("tool_calls")) and turn["role"] == "assistant":
                return f"turn {at + 1} of {name!r}, the assistant's, is empty"
        if isinstance(value, str) and not value.strip() and (name != "prompt" or form == ("prompt",)):
            return f"the field {name!r} is empty"
    return ""


def prepare(
    where: str, rows: Dataset, form: Sequence[str], by_trl: Prepare, wrong: Callable[[Json], str], *, skip_bad: bool
) -> tuple[Dataset, int]:
    """Prepare rows ``by_trl``; also return how many of no use were left out.

    Args:
        where: the setting and the source, for the messages.
        form: the columns that every row needs.
        wrong: says why a prepared row is of no use; empty if it is.

    Raises:
        UserError: for a row of no use, with its number, unless ``skip_bad``; and if no other is left.
    """
    kept, reasons = list(range(len(rows))), dict[int, str]()

    def leave_out(more: Iterator[tuple[int, str]]) -> None:
        for row, why in more:
            if not skip_bad:
                raise UserError(f"{where}, row {row + 1}: {why} (--skip-bad leaves such rows out)")
            reasons[row] = why
        kept[:] = [row for row in kept if row not in reasons]
        if not kept:
            raise UserError(f"{where} has no usable row (row {min(reasons) + 1}: {reasons[min(reasons)]})")

    leave_out((at, why) for at, row in enumerate(_each(rows)) if (why := unfit(row, form)))
    try:
        encoded = by_trl(rows.select(kept))
    except Exception as error:
        if isinstance(error, UserError) or disk_full(error):
            raise
        leave_out(_refused(rows, kept, by_trl))
        encoded = by_trl(rows.select(kept))
    places = list(kept)
    leave_out((places[at], why) for at, row in enumerate(_each(encoded)) if (why := wrong(row)))
    if reasons:
        logger.warning("%s: %d of %d rows left out", where, len(reasons), len(rows))
    return encoded.select([at for at, place in enumerate(places) if place not in reasons]), len(reasons)


def _each(rows: Dataset) -> Iterator[Json]:
    return cast("Iterator[Json]", iter(rows))


def _refused(rows: Dataset, places: Sequence[int], by_trl: Prepare) -> Iterator[tuple[int, str]]:
    """Find the rows that TRL can't prepare, by halves."""
    try:
        by_trl(rows.select(places))
    except Exception as error:
        if len(places) == 1:
            yield places[0], f"TRL can't prepare it: {one_line(error)}"
            return
        for half in (places[: len(places) // 2], places[len(places) // 2 :]):
            yield from _refused(rows, half, by_trl)


def processes_for(rows: Dataset) -> int | None:
    """Return by how many processes ``Dataset.map`` should prepare rows; None for this one alone."""
    alone = len(rows) <= ALONE or multiprocessing.current_process().daemon
    return None if alone or (count := cores() // launched()[3]) < 2 else count


def by_trl(
    trainer: Passed, rows: Dataset, config: Passed, tokenizer: PreTrainedTokenizerBase, *more: object, **own: object
) -> Dataset:
    """Prepare rows by the code of a trainer of TRL's, which would do it only when it has its model."""
    stand_in = SimpleNamespace(_tokenizer=tokenizer, **own)
    # Lamina's first process is here before the others
    with patched(sys.modules[trainer.__module__], global_then_local_main_first=nullcontext):
        return trainer._prepare_dataset(stand_in, rows, tokenizer, config, *more)


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
    templates: object = tokenizer.chat_template  # of several, one may be the default
    template_text = templates.get("default") if isinstance(templates, dict) else templates
    template = template_text if isinstance(template_text, str) else None
    if choice == "auto":
        return template or TEMPLATES.get(str(default))
    if choice == "tokenizer" and template is None:
        raise UserError(
            f"template: 'tokenizer', but the model's tokenizer has no chat template (allowed: {', '.join(CHOICES)})"
        )
    if choice in CHOICES:
        return {"none": None, "tokenizer": template, **TEMPLATES}[choice]
    path = Path(choice)
    if path.is_dir():  # as TRL's chat_template_path
        return read_template("tokenizer", load_tokenizer(choice), default=None)
    if path.suffix not in (".jinja", ".j2"):
        raise unknown("template", choice, (*CHOICES, "FILE.jinja"))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"template: {choice!r} can't be read ({one_line(error)})") from None
    try:
        tokenizer.apply_chat_template([_turn("user", "0")], chat_template=text, tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(f"template: no Jinja in its line {error.lineno} ({one_line(error)})") from None
    except Exception as error:  # of a template for other conversations
        logger.debug("template: %s", error)
    return text


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a chat template that marks the answers: of Lamina's own, or TRL's of another; None if it marks them."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = str(tokenizer.chat_template)
    if template in TEMPLATES.values():
        marked = template.replace("{%- else -%}", "{%- else -%}{% generation %}")
        return marked.replace("{%- endif -%}{%- endfor", "{% endgeneration %}{%- endif -%}{%- endfor")
    return None if has_generation_markers(template) else get_training_chat_template(tokenizer)


def template_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special token with which the tokenizer's template ends an answer; empty if it has none."""
    if not tokenizer.chat_template:
        return []
    try:
        text = str(tokenizer.apply_chat_template([_turn("user", "0"), _turn("assistant", _MARK)], tokenize=False))
    except Exception:  # of a template for other conversations
        return []
    after = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"] if _MARK in text else []
    return [token for token in cast("list[int]", after) if token in tokenizer.added_tokens_decoder][:1]
