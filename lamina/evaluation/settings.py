"""The settings of `lamina eval`."""

from __future__ import annotations

import shlex
from typing import Literal

from lamina.core.json_types import Json
from lamina.core.values import (
    Names,
    comma_separated,
    corpus_name,
    entries,
    mapping,
    path,
    place,
    takes,
    text,
    whole_number,
)
from lamina.errors import UserError
from lamina.jobs.setting_groups import DeviceSettings, OutputSettings, SeedSettings, ThreadSettings
from lamina.jobs.settings import Settings, at_least, changed, setting


@takes(Names)
def model_names(name: str, value: object) -> str:
    """Join names of models with commas. Raises UserError if one of several names contains a comma."""
    if isinstance(value, list | tuple) and len(value) > 1:
        for model in value:
            if "," in str(model):
                raise UserError(f"{name}: {model!r} has a comma. Separate several models by spaces.")
    return comma_separated(name, value)


def batch_or_auto(name: str, value: object) -> int | str:
    if value == "auto":
        return "auto"
    try:
        return whole_number(name, int(value) if isinstance(value, str) else value, low=1)
    except ValueError:
        raise UserError(f"{name}: {value!r}. Give a whole number of at least 1, or auto.") from None


class PerplexitySettings(Settings, group="data"):
    """The settings of a text's perplexity."""

    corpus: str | None = setting(
        None,
        "text on which to compute the perplexity: embedded, a .txt/.jsonl file (also .gz/.xz/.zst), a folder, or "
        "hf:NAME",
        corpus_name,
    )
    text_field: str = setting("text", "field of a .jsonl or dataset row that holds the text")
    window: int | None = setting(
        None, "tokens that the model reads at once (default: the model's maximum, at most 2048)", at_least(2)
    )
    stride: int | None = setting(
        None, "tokens by which the window moves; each token is scored once (default: half the window)", at_least(1)
    )


class EvalSettings(PerplexitySettings, DeviceSettings, SeedSettings, ThreadSettings, OutputSettings):
    """The models, tasks and text of an evaluation."""

    command_name = "eval"
    main = (
        *("models", "compare", "tasks", "num_fewshot", "limit", "corpus", "data_dir"),
        *("batch_size", "device", "output"),
    )
    order = (
        *("models", "compare", "tasks", "num_fewshot", "limit", "data_dir"),
        *(*PerplexitySettings.names(), "tokenizer", "batch_size", "dtype", "device"),
    )

    needed = ("models", "tasks")

    models: str = setting(
        "",
        "folders with config.json, runs' or studies' folders, .gguf files, or names on the hub",
        model_names,
        decides=False,
    )
    tasks: str = setting(
        "",
        "comma-separated tasks, groups or tags of lm-evaluation-harness (TASK@5 for five examples), a "
        "paper's set (fusenorm, peri_ln, mix_ln, keel), or generated (Lamina's own tasks, no download)",
        comma_separated,
        decides=False,
    )
    num_fewshot: int | None = setting(
        None, "examples before each question (default: the number that the paper or the task uses)", at_least(0)
    )
    compare: bool = setting(
        False, "compare earlier evaluations item by item (give evaluations' folders as MODEL)", decides=False
    )
    limit: int | None = setting(
        None, "maximum number of items per task, and of documents of the corpus (default: all)", at_least(1)
    )
    data_dir: str | None = setting(
        None,
        "folder from which Lamina reads the tasks' data instead of the hub: DIR/NAME/CONFIG/SPLIT.jsonl (or .arrow, "
        ".parquet), and task files DIR/tasks/*.yaml",
        path,
        decides=False,
    )
    tokenizer: str | None = setting(
        None, "tokenizer: bytes, or a transformers tokenizer's name or folder (default: the checkpoint's)", place
    )
    batch_size: int | str = setting(
        8, "sequences per forward pass, or auto (as many as fit on a GPU, 8 on a CPU)", batch_or_auto
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "float32", "number format of the weights: float32, bfloat16, float16, or auto (the checkpoint's)"
    )
    chat_template: bool = setting(False, "put the questions into the tokenizer's chat template")
    system: str | None = setting(None, "system message before each question (with chat_template)", text)
    generation: Json = setting(
        {},
        "argument of transformers' generate, for tasks in which the model writes text, e.g. "
        "--generation.temperature 0.6",
        mapping,
    )
    run_code: bool = setting(
        False,
        "run the code that tasks need: task files in --data-dir, and programs that a model writes (HumanEval, MBPP)",
        decides=False,
    )
    seed: int = changed(0, help="seed of the few-shot examples")
    output: str = changed("eval")

    def check(self) -> None:
        super().check()
        if not self.chat_template:
            self.refuse_unused("system", allowed="with --chat-template")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise UserError(f"stride: {self.stride} skips tokens. Choose at most {self.window}, the window's length.")

    def check_names(self) -> None:
        super().check_names()
        from lamina.data.corpus import check_corpus
        from lamina.data.tokenizers import validate_spec
        from lamina.evaluation import generated, task_sets
        from lamina.evaluation.task_names import refuse_absent

        if self.corpus is not None:
            check_corpus(self.corpus)
        if self.tokenizer is not None:
            validate_spec(self.tokenizer)
        if self.task_list():
            tasks = [column.task for column in task_sets.columns_of(self.task_list())]
            refuse_absent(tasks, self.data_dir, [*task_sets.SETS, task_sets.GENERATED], generated.NAMES)

    def require(self, *names: str) -> None:
        """Raise UserError if there is no model, or nothing to evaluate."""
        super().require(*names)
        if not self.model_list():
            raise UserError(
                "models: none given. Give a model's folder, a run's or a study's folder, a .gguf file, or a hub name."
            )
        if self.compare and (self.task_list() or self.corpus is not None):
            raise UserError(
                "compare: the tasks and the text come from the earlier evaluations. Leave out --tasks and --corpus."
            )
        if not self.compare and not self.task_list() and self.corpus is None:
            raise UserError("tasks: none given. Give --tasks with tasks or a set, --corpus for a perplexity, or both.")

    def command(self) -> str:
        """Return the command line for these settings, with the models first."""
        words = super().command()
        if self.models:
            words = words.replace(f" --models {shlex.quote(self.models)}", "", 1)
            models = " ".join(shlex.quote(model) for model in self.model_list())
            words = words.replace("lamina eval", f"lamina eval {models}", 1)
        return words

    def model_list(self) -> list[str]:
        return entries(self.models)

    def task_list(self) -> list[str]:
        return entries(self.tasks)
