"""Load training examples, convert the examples to TRL's formats, and tokenize them with TRL's code."""

from __future__ import annotations

import glob
import json
import logging
import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from lamina.core.json_types import Json
from lamina.core.values import home
from lamina.data.sources import hub_datasets
from lamina.data.sources.file_documents import NotTextError, inner_suffix, open_text
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
"""The turns of a conversation. Each turn has a role, a content, and other fields that chat templates read."""
Passed: TypeAlias = Any
Prepare: TypeAlias = "Callable[[Dataset], Dataset]"
_MARK = "an-answer"
IGNORED = -100
READERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATED = "generated:"
ALLOWED_GENERATED = "generated:KIND[:TASK[+TASK...]][@test]"
ALLOWED = (
    "a .jsonl, .json, .csv or .parquet file (also as .gz, .xz or .zst), a folder, a name on the hub such as "
    f"trl-lib/Capybara, hf:NAME[:CONFIG][@SPLIT], or {ALLOWED_GENERATED}"
)
BATCH = 1000
ALONE = 4 * BATCH  # with fewer rows, other processes save no time
LARGEST = 256 << 20  # bytes of a .jsonl file from which datasets infers the columns' types (default: 10 MB)
# Columns by which TRL recognizes a row's format, and columns that Lamina converts.
_FORMS = {"prompt", "completion", "messages", "conversations", "text", "chosen", "rejected", "instruction"}
SFT_FORMS = (("input_ids",), ("prompt", "completion"), ("messages",), ("text",))
PAIR_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
ROLES = ("system", "developer", "user", "tool", "function", "ipython", "environment", "observation", "document")
ANSWERS = "assistant"
"""The roles of a conversation's turns in common chat templates: for prompts and tools (``ROLES``), and for answers."""
REWARD_FORMS = (("chosen_ids", "rejected_ids"), *PAIR_FORMS)


def load(name: str, source: str) -> Dataset:
    """Load the rows of a data source with the datasets library. Raises UserError if the source has no readable rows."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # datasets also raises what it logs
    if source.startswith(GENERATED):
        return datasets.Dataset.from_list(list(generated_rows(name, source)))
    path = home(name, source)
    reader, hub = READERS.get(inner_suffix(path)), hub_datasets.is_hub(source)
    why = "the source has no rows"
    if hub or of_hub(source) or path.is_dir():
        rows = hub_datasets.load(hub_datasets.parse(source if hub else f"hf:{source}", name))
    elif reader is None or not path.is_file():
        why = "no such file" if reader else f"the name ends in {inner_suffix(path) or 'nothing'}"
        raise UserError(f"{name}: {source!r}: {why}. Give {ALLOWED}.")
    else:
        files = glob.escape(str(path.resolve()))
        try:
            loaded = datasets.load_dataset(reader, data_files=files, split="train", **_options(reader, path))
            rows = cast("Dataset", loaded)
        except Exception as error:  # from pyarrow, pandas or datasets
            if disk_full(error):
                raise
            cause = error.__cause__ or error
            told = re.sub(r" in row \d+", "", one_line(cause))  # pyarrow counts the rows of its block from 0
            if not isinstance(cause, StopIteration):
                why = (reader == "json" and _not_json(path)) or told
            rows = ()
    if not rows:
        raise UserError(f"{name}: Lamina cannot read {source!r}: {why}. Give another source.")
    return rows


def _not_json(path: Path) -> str:
    """Return the first line of a JSON file that is not JSON, and the reason, or "" if Lamina finds no such line."""
    try:
        with open_text(path) as file:
            head = file.readline()
            texts = [head + file.read()] if head.startswith("[") else chain([head], file)
            for number, text in enumerate(texts):
                try:
                    json.loads(text.strip() or "null")
                except json.JSONDecodeError as error:
                    why = error.msg.removesuffix(" starting at")
                    return f"line {number + error.lineno} is not JSON ({why}, column {error.colno})"
    except NotTextError as error:
        return f"the file {error}"
    return ""


def _options(reader: str, path: Path) -> Json:
    import datasets
    import pandas as pd

    if reader == "csv":  # otherwise, 007 is a number and NA is missing
        columns = pd.read_csv(path, nrows=0).columns
        types = {name: datasets.Value("float64" if name == "margin" else "string") for name in columns}
        return {"features": datasets.Features(types), "keep_default_na": False}
    return {"chunksize": LARGEST} if reader == "json" else {}


def generated_rows(name: str, source: str) -> Iterator[Json]:
    """Yield the examples of a source such as "generated:answers:sorting". Without task names, Lamina uses all tasks.

    An example of the kind "answers" has a prompt and a completion, worded as in Lamina's evaluations. An example of the
    kind "preferences" has a prompt, a right answer (chosen) and a wrong answer (rejected). Some wrong answers have the
    words of the right answer in another order. Raises UserError if the kind, a task or the split is unknown.
    """
    kind, _, rest = source.removeprefix(GENERATED).partition("@")[0].partition(":")
    split = source.partition("@")[2] or "train"
    if kind not in ("answers", "preferences"):
        raise unknown("kind", kind, ("answers", "preferences"), name)
    if split not in ("train", "test"):
        raise UserError(f"{name}: {source!r}. Write {ALLOWED_GENERATED}.")
    tasks = [f"lamina_{task}" for task in rest.split("+")] if rest else list(NAMES)
    for task in tasks:
        if task not in NAMES:
            raise unknown("task", task.removeprefix("lamina_"), [one[7:] for one in NAMES], name)
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
            if len(words) > 2 and words != right.split():  # shorter answers have few other orders
                wrong = " ".join(words)
        yield {"prompt": question, "chosen": f" {right}", "rejected": f" {wrong}"}


def conform(rows: Dataset, forms: Sequence[tuple[str, ...]], *, turns: bool) -> tuple[Dataset, tuple[str, ...]]:
    """Convert rows to one of TRL's formats. Returns the converted rows and the names of the format's columns.

    The rows may have a TRL format, or the format of Alpaca, ShareGPT or LIMA. If a row has both plain texts and chat
    turns, Lamina converts the plain texts to chat turns. Raises UserError for any other format, and for images.

    Args:
        forms: the columns of each allowed format, with the preferred formats first.
        turns: whether to convert plain prompts and answers to chat turns.
    """
    columns = set(rows.column_names)
    if pictures := columns & {"image", "images"}:
        raise UserError(f"the column {min(pictures)!r} has images, which these models cannot read. Give rows of text.")
    if "conversations" in columns and "messages" not in columns:
        texts = isinstance(next(iter(rows[0]["conversations"] or ()), None), str)
        rows = _turned(rows, _of_conversation, "messages")
        if texts and SFT_FORMS[1] in forms:
            rows = _turned(rows, _of_lima, *SFT_FORMS[1])
    elif "instruction" in columns and not any(columns.issuperset(form) for form in forms if form != PAIR_FORMS[1]):
        answered = ["completion"] if "output" in columns and "chosen" not in columns else []
        rows = _turned(rows, _of_alpaca, "prompt", *answered)
    form = next((form for form in forms if set(form) <= set(rows.column_names)), None)
    if form is None:
        raise _no_form(sorted(columns), forms)
    if form == PAIR_FORMS[1] or ("chosen" in form and len(_kinds(rows, form)) > 1):
        texts, form = _kinds(rows, form) == {"Value"}, PAIR_FORMS[0]
        rows = rows.map(_of_pair) if texts else _turned(rows, _of_pair, *form)
    rows = rows.remove_columns([name for name in rows.column_names if name in _FORMS - {*form}])
    kinds = _kinds(rows, form)
    if len(form) > 1 and (kinds & {"Json"} or len(kinds) > 1 or (turns and kinds == {"Value"})):
        rows = _turned(rows, partial(_as_turns, form), *form)
    return rows, form


def _no_form(columns: Sequence[str], forms: Sequence[tuple[str, ...]]) -> UserError:
    """Return the error for rows without a known form. The message names the form from which few columns are missing."""
    alpaca = ("instruction", "output") if SFT_FORMS[1] in forms else ("instruction",)
    known = (*forms, ("conversations",), alpaca) if ("messages",) in forms else forms
    near = max(known, key=lambda form: len({*form} & {*columns}) / len(form))
    beside, missing = ([repr(one) for one in near if (one in columns) is there] for there in (True, False))
    why = f"; {' and '.join(beside)} needs {' and '.join(missing)}" if beside else ""
    needed = ", or ".join(" and ".join(form) for form in known)
    return UserError(f"the rows have no form that Lamina knows (found: {', '.join(columns)}{why}). Give {needed}.")


def _turned(rows: Dataset, function: Callable[[Json], Json], *names: str) -> Dataset:
    """Convert all rows with a function that returns columns of chat turns."""
    import datasets

    types = datasets.Features({**rows.features, **dict.fromkeys(names, datasets.List(datasets.Json()))})
    return rows.map(function, features=types)


def _kinds(rows: Dataset, form: Sequence[str]) -> set[str]:
    """Return the types of some columns: "Value" for plain texts, "List" for chat turns, and "Json" for a mix."""
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


def _of_conversation(row: Json) -> Json:
    from trl.data_utils import maybe_convert_to_chatml

    said = row["conversations"] or ()
    if said and isinstance(said[0], str):
        return {"messages": [_turn(("user", "assistant")[at % 2], text) for at, text in enumerate(said)]}
    turns = maybe_convert_to_chatml({"messages": [dict(turn) for turn in said]})["messages"]
    names = {"human": "user", "gpt": "assistant"}
    return {"messages": [{**turn, "role": names.get(turn.get("role"), turn.get("role"))} for turn in turns]}


def _of_lima(row: Json) -> Json:
    """Split a conversation into its last answer and all turns before this answer."""
    turns = row["messages"]
    turns = turns[: len(turns) // 2 * 2]
    return {"prompt": turns[:-1], "completion": turns[-1:]}


def _of_pair(row: Json) -> Json:
    """Return a prompt and two answers. Without a prompt, the common beginning of the answers becomes the prompt."""
    from trl.data_utils import maybe_extract_prompt

    pair = {name: row[name] for name in PAIR_FORMS[0] if row.get(name) is not None}
    chosen = pair.get("chosen")
    whole = isinstance(chosen, list) and chosen and chosen[0].get("role") != "assistant"
    if "prompt" not in pair or (isinstance(pair["prompt"], str) and whole):
        return cast(Json, maybe_extract_prompt(pair))
    return _as_turns(PAIR_FORMS[0], row)


def prompts(rows: Dataset, *, turns: bool) -> Dataset:
    """Return the prompts of rows without their answers. The new column "row" holds each original row as JSON."""
    fields = ({name: value for name, value in row.items() if value is not None} for row in _each(rows))
    whole: Passed = [json.dumps(row, default=str) for row in fields]
    asked, form = conform(rows, (("prompt",), ("messages",), PAIR_FORMS[1]), turns=turns)
    if form == ("messages",):

        def up_to_the_last(row: Json) -> Json:
            ends = [at for at, turn in enumerate(row["messages"] or (), 1) if turn["role"] == "user"]
            return {"prompt": row["messages"][: max(ends, default=0)]}

        asked = _turned(asked, up_to_the_last, "prompt")
    elif turns and _kinds(asked, ["prompt"]) == {"Value"}:
        asked = _turned(asked, partial(_as_turns, ["prompt"]), "prompt")
    return asked.select_columns(["prompt"]).add_column("row", whole)


def unfit(row: Fields, form: Sequence[str], roles: Collection[str] = ()) -> str:
    """Return the reason why Lamina cannot train on a row, or "" for a usable row.

    Args:
        roles: the roles of turns that the chat template names, besides ``ROLES``.
    """
    for name in form:
        value = row[name]
        if isinstance(value, list) and value and not name.endswith("_ids"):
            if why := _unfit_turns(value, {*ROLES, ANSWERS, *roles}, answered=name != "prompt"):
                return f"the field {name!r}{why}"
            continue
        if isinstance(value, str):
            fits = bool(value.strip()) or (name == "prompt" and len(form) > 1)
        else:  # token ids
            fits = name.endswith("_ids") and isinstance(value, list) and all(isinstance(one, int) for one in value)
        if not fits:
            given = "missing" if value in (None, []) else one_line(repr(value))[:60]
            return f"the field {name!r} is {given}, but must be a text, or chat turns with a role and a content"
    return ""


def _unfit_turns(turns: Sequence[Passed], roles: Collection[str], *, answered: bool) -> str:
    """Return why Lamina cannot train on chat turns, or "". With ``answered``, the turns need an answer."""
    for number, turn in enumerate(turns, 1):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else ("", 0)
        if not role or not isinstance(content, str | list | None):
            given = one_line(repr(turn))[:60]
            return f", turn {number} is {given}, but a turn must have a role, and a text as content"
        if role not in roles:
            return f", turn {number}: {unknown('role', str(role), (*ROLES, ANSWERS))}"
        if role == ANSWERS and not (content or turn.get("tool_calls")):
            return f", turn {number} ({role}) has an empty content"
    if answered and all(turn["role"] in ROLES for turn in turns):
        return f" has no turn with the role {ANSWERS!r}"
    return ""


def prepare(
    where: str,
    rows: Dataset,
    form: Sequence[str],
    by_trl: Prepare,
    wrong: Callable[[Json], str],
    *,
    template: str,
    skip_bad: bool,
) -> tuple[Dataset, int]:
    """Tokenize rows with TRL's code. Returns the tokenized rows and the number of skipped rows.

    Args:
        where: the names of the setting and the data source, for error messages.
        form: the columns that every row needs.
        by_trl: a function that tokenizes rows.
        wrong: a function that returns why a tokenized row is unusable, or "" for a usable row.
        template: the chat template, or "". A turn may have any role that the template names.
        skip_bad: whether to skip an unusable row instead of raising UserError. At least one row must be usable.
    """
    reasons: dict[int, str] = {}

    def without(more: Iterator[tuple[int, str]]) -> list[int]:
        for row, why in more:
            if not skip_bad:
                raise UserError(f"{where}, row {row + 1}: {why}. Fix the row, or add --skip-bad to skip such rows.")
            reasons[row] = why
        if len(reasons) == len(rows):
            raise UserError(f"{where} has no usable row (row 1: {reasons[0]}). Give other rows.")
        return [row for row in range(len(rows)) if row not in reasons]

    roles = re.findall(r"""['"](\w+)['"]""", template)
    kept = without((at, why) for at, row in enumerate(_each(rows)) if (why := unfit(row, form, roles)))
    try:
        encoded = by_trl(rows.select(kept))
    except Exception as error:
        if isinstance(error, UserError) or disk_full(error):
            raise
        kept = without(_refused(rows, kept, by_trl))
        encoded = by_trl(rows.select(kept))
    without((kept[at], why) for at, row in enumerate(_each(encoded)) if (why := wrong(row)))
    if reasons:
        logger.warning("%s: Lamina left out %d of %d rows", where, len(reasons), len(rows))
    return encoded.select([at for at, row in enumerate(kept) if row not in reasons]), len(reasons)


def _each(rows: Dataset) -> Iterator[Json]:
    return cast("Iterator[Json]", iter(rows))


def _refused(rows: Dataset, places: Sequence[int], by_trl: Prepare) -> Iterator[tuple[int, str]]:
    """Yield the index of each row that TRL cannot tokenize, and the reason."""
    try:
        by_trl(rows.select(places))
    except Exception as error:
        if len(places) == 1:
            yield places[0], f"TRL cannot prepare this row ({one_line(error)})"
            return
        for half in (places[: len(places) // 2], places[len(places) // 2 :]):
            yield from _refused(rows, half, by_trl)


def processes_for(rows: Dataset) -> int | None:
    """Return the number of processes that tokenize the rows, or None to use only the current process."""
    alone = len(rows) <= ALONE or multiprocessing.current_process().daemon
    return None if alone or (count := cores() // launched()[3]) < 2 else count


def by_trl(
    trainer: Passed, rows: Dataset, config: Passed, tokenizer: PreTrainedTokenizerBase, *more: object, **own: object
) -> Dataset:
    """Call the ``_prepare_dataset`` method of a TRL trainer's class without making a trainer."""
    stand_in = SimpleNamespace(_tokenizer=tokenizer, **own)
    # Lamina already runs its first process before the others
    with patched(sys.modules[trainer.__module__], global_then_local_main_first=nullcontext):
        return trainer._prepare_dataset(stand_in, rows, tokenizer, config, *more)


_BREAK = "('\\n\\n' if not loop.first and messages[loop.index0 - 1].role == 'assistant' else '')"


def _template(user: str, assistant: str) -> str:
    """Build a Jinja chat template from the expressions for a user's turn and for an assistant's turn."""
    return (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{{ message.content + '\n\n' }}"
        "{%- elif message.role == 'user' -%}{{ " + user + " }}"
        "{%- else -%}{{ " + assistant + " }}{%- endif -%}{%- endfor -%}"
    )


TEMPLATES = {
    "alpaca": _template(  # Taori et al. 2023, also in LLM-Adapters
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
"""Chat templates by name, in Jinja. The text before an answer never depends on the answer."""
CHOICES = ("auto", "none", "tokenizer", *TEMPLATES)


def read_template(choice: str, tokenizer: PreTrainedTokenizerBase, *, default: str | None) -> str | None:
    """Return a Jinja chat template, or None for no template. Raises UserError for a missing or unreadable template.

    Args:
        choice: "auto", "none", "tokenizer", the name of a template, a Jinja file, or a tokenizer's folder.
        default: the name of the template that "auto" uses if the tokenizer has no template.
    """
    path = Path(choice)
    if choice == "none" or choice in TEMPLATES:
        return TEMPLATES.get(choice)
    if choice in ("auto", "tokenizer") or path.is_dir():  # a folder, as in TRL's chat_template_path
        try:
            return (load_tokenizer(choice) if path.is_dir() else tokenizer).get_chat_template()
        except ValueError:
            if choice == "auto":
                return TEMPLATES.get(str(default))
            raise UserError(
                f"template: {choice!r}, but the tokenizer has no chat template. Choose one of {', '.join(TEMPLATES)}."
            ) from None
    if path.suffix not in (".jinja", ".j2"):
        raise unknown("template", choice, (*CHOICES, "FILE.jinja"))
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer.apply_chat_template([_turn("user", "0")], chat_template=text, tokenize=False)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"template: Lamina cannot read {choice!r}{line} ({one_line(error)}). Fix the file.") from None
    except Exception as error:  # the template may need other conversations
        logger.debug("template: %s", error)
    return text


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a chat template that marks the answers' tokens, or None if the tokenizer's template marks them."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = str(tokenizer.chat_template)
    if template in TEMPLATES.values():
        marked = template.replace("{%- else -%}", "{%- else -%}{% generation %}")
        return marked.replace("{%- endif -%}{%- endfor", "{% endgeneration %}{%- endif -%}{%- endfor")
    if has_generation_markers(template):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        raise UserError(
            "trl.assistant_only_loss: the chat template does not mark the assistant's tokens, and TRL has no marked "
            "version of the template. Put {% generation %} and {% endgeneration %} around the tokens in --template "
            f"FILE.jinja, or choose a template of Lamina ({', '.join(TEMPLATES)})."
        ) from None


def template_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a list with the special token that ends an answer in the chat template, or an empty list."""
    if not tokenizer.chat_template:
        return []
    try:
        text = str(tokenizer.apply_chat_template([_turn("user", "0"), _turn("assistant", _MARK)], tokenize=False))
    except Exception:  # the template may need other conversations
        return []
    after = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"] if _MARK in text else []
    return [token for token in cast("list[int]", after) if token in tokenizer.added_tokens_decoder][:1]
