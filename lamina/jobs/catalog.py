"""The jobs, one row each, from which the command, the Python function, the page and the printed text are made.

To add a job, add its settings, its function, its page (``lamina.reports.registry.report_of``) and its row here. Code is
named by "module:name" and imported when needed, so that a row may name code of rooms above this one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import UserError
from lamina.jobs.kinds import Kind, kind_of

if TYPE_CHECKING:
    from lamina.jobs.settings import Settings


def load(name: str) -> Any:
    """Import the object that "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A flag of a job that is not a setting.

    Attributes:
        prints: "module:function" from (folder, result) to the text to print in place of the usual one.
        after: "module:function", called with the folder once the page is written; the Python function has the switch as
            well.
        passed: whether the job's function takes it; the Python function then has it as well.
        fails: "module:function" that decides from the result whether the exit code is 1.
    """

    name: str
    help: str
    prints: str = ""
    after: str = ""
    passed: bool = False
    fails: str = ""


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A job: its command, its Python function and its page.

    Attributes:
        name: the command's name.
        function: the Python function's name, if not the command's with underscores.
        kind: the kind of the job's folder.
        summary: a line for ``lamina --help``.
        about: what the job does, for the command's help; the first paragraph is also the Python function's.
        settings: "module:class" of its settings.
        run: "module:function" from (settings, resume, overwrite, bar) and the passed switches; does the work.
        returns: what the Python function returns, in a sentence or two.
        outcome: the type of the result, a class of ``lamina.api.results``, or "pd.DataFrame".
        prints: "module:function" from (folder, result) to the text to print at the end.
        raises: the errors, for the Python function's documentation.
        resumes: what --resume does, for the help; empty for a job that does not resume.
        positional: the settings without a flag; one that ends in "..." takes any number of words.
        listing: "module:function" of the list that the help and --list print.
        inputs: the settings that name models to start from, the main one first.
        files: the settings that name data or code.
        fails: "module:function" that decides from the result whether the exit code is 1.
        folder: "module:function" from the settings to the output folder, if its default is no constant.
        own_command: whether a module of ``lamina.commands`` holds the command.
    """

    name: str
    function: str = ""
    kind: str
    summary: str
    about: str
    examples: str = ""
    settings: str
    run: str
    returns: str
    outcome: str = "RunResult"
    prints: str = ""
    raises: str = "a corpus that can't be read"
    resumes: str = "continue what is in the output folder"
    positional: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    listing: str = ""
    inputs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    fails: str = ""
    folder: str = ""
    own_command: bool = False

    @property
    def function_name(self) -> str:
        return self.function or self.name.replace("-", "_")

    @property
    def record(self) -> type[Settings]:
        return load(self.settings)

    def folder_of(self, settings: Mapping[str, object]) -> Path | None:
        """Return the output folder for the user's settings; None for a job that writes none."""
        if self.folder:
            return load(self.folder)(settings)
        output = settings.get("output", self.record.default("output"))
        return None if output is None else Path(str(output))


_MODEL = "OUTPUT/model is the model, OUTPUT/report.html the page."
_CHECKPOINT = "resume from the last checkpoint in the output folder"


def _tuning(name: str, summary: str, about: str, examples: str, *inputs: str, files: tuple[str, ...] = ()) -> JobRow:
    """Make the row of a job after pretraining."""
    return JobRow(
        name=name,
        kind=name,
        summary=summary,
        about=about,
        examples=examples,
        settings=f"lamina.lab.posttraining.settings:{name.capitalize()}Settings",
        run=f"lamina.lab.posttraining.{'pairs' if name in ('reward', 'dpo') else name}:{name}",
        returns=f"``data`` may also be a list of rows or a datasets.Dataset. Returns what result.json holds; {_MODEL}",
        prints="lamina.reports.terminal:tuned",
        raises="data or a model that can't be read",
        resumes=_CHECKPOINT,
        inputs=("from_model", *inputs),
        files=("data", "eval_data", "template", *files),
    )


JOBS: dict[str, JobRow] = {
    row.name: row
    for row in (
        JobRow(
            name="compare",
            kind=Kind.COMPARE,
            summary="train placements side by side on your text and write one page about them (the main job)",
            about=(
                "Train placements side by side on your text; OUTPUT/report.html shows which is best, which failed, "
                "and why."
            ),
            examples="""
  lamina compare
  lamina compare --placements pre_ln,peri_ln,keel --num-layers 48 --hidden-size 64 --steps 200
  lamina compare --corpus books/ --tokenizer bpe:4096 --learning-rates 1e-3,3e-3,1e-2 --seeds 0,1,2 --output runs/books
  lamina compare --learning-rates 3e-3,1e-2 --learning-rates-of "keel=1e-2,3e-2; post_ln=1e-4,1e-3"
  lamina compare --placements "mix_ln(alpha=0.5),my_placement.yaml" --init same:normal
  lamina compare --output runs/books --resume
""",
            settings="lamina.studies.settings:CompareSettings",
            run="lamina.studies.compare:compare",
            returns=(
                "Returns the rows of results.csv and the page. ``placements``, ``learning_rates`` and ``seeds`` may "
                "also be lists, ``corpus`` a path, a list of paths or texts, or a datasets.Dataset. The worker "
                "processes do not import the calling script."
            ),
            outcome="Comparison",
            prints="lamina.reports.terminal:compare",
        ),
        JobRow(
            name="preflight",
            kind=Kind.PREFLIGHT,
            summary="before a run: will it train, why not, and what to change",
            about=(
                "Before a run: take its first steps at full depth, measure the layers, and say whether it will "
                'train, why, and what to\nchange. "fine" and "risky" runs learned in these steps; an "undecided" '
                'one did not yet, and its line "change" says\nhow many steps should decide; a "will not train" one '
                "is not expected to learn. The exit code is 0 whatever the\nverdict; with --strict it is 1 if any "
                'verdict is "will not train".'
            ),
            examples="""
  lamina preflight --placement keel --num-layers 48 --learning-rate 5e-3
  lamina preflight --placements post_ln,peri_ln,keel --num-layers 32 --hidden-size 48 --num-heads 2
  lamina preflight --placement fusenorm --init normal --learning-rates 3e-3,2e-2 --warmup 0.3 --output runs/preflight
  lamina preflight --backbone llama-71m --placement my_placement.yaml --corpus books/ --tokenizer bpe:8192 --json
""",
            settings="lamina.preflights.settings:PreflightSettings",
            run="lamina.preflights.planned_runs:preflight",
            returns=(
                "Returns one row per planned run: its verdict, the reason, what to change, and the numbers behind "
                "them (docs/preflight.md). With ``output``, it also writes a folder: preflight.csv, layers.parquet, "
                "preflight.json (from which `lamina report` makes the page) and report.html."
            ),
            outcome="pd.DataFrame",
            prints="lamina.reports.terminal:preflight",
            resumes="",
            switches=(
                Switch(
                    name="json",
                    help="print the table as JSON, with every measured number",
                    prints="lamina.reports.terminal:preflight_json",
                ),
                Switch(
                    name="strict",
                    help='exit with 1 if a verdict is "will not train"',
                    fails="lamina.reports.terminal:will_not_train",
                ),
            ),
        ),
        JobRow(
            name="pretrain",
            kind=Kind.RUN,
            summary="train one model, from scratch or from a checkpoint",
            about="Train one model on text or images; OUTPUT/model loads with transformers' Auto classes.",
            examples="""
  lamina pretrain --placement keel --num-layers 64 --steps 1000 --output runs/keel-64
  lamina pretrain --backbone llama-71m --placement peri_ln --corpus books/ --tokenizer bpe:8192 --save-steps 200
  lamina pretrain --placement keel --trainer.optim adafactor --report-to tensorboard --output runs/keel-af
  lamina pretrain --from runs/keel-64 --corpus web/:0.7,code/:0.3 --learning-rate 1e-3 --output runs/keel-64b
  lamina pretrain --streaming --corpus hf:roneneldan/TinyStories --save-steps 500 --output runs/streamed
  lamina pretrain --backbone vit-tiny --placement mix_ln --corpus photos/ --flip 0.5 --crop-scale 0.3 --output runs/vit
  lamina pretrain --output runs/keel-64 --resume
  torchrun --nproc_per_node 8 --no-python lamina pretrain --parallel fsdp2 --save-steps 500 --rollback 2 --output runs/x
""",
            settings="lamina.training.settings:PretrainSettings",
            run="lamina.training.pretrain:pretrain",
            returns=(
                f"Returns what result.json holds; {_MODEL} ``corpus`` may also be a path, a list of paths or texts, "
                "or a datasets.Dataset."
            ),
            prints="lamina.reports.terminal:pretrained",
            resumes=_CHECKPOINT,
            inputs=("from_model",),
        ),
        _tuning(
            "sft",
            "fine-tune a model on instructions or conversations",
            "Fine-tune a model; OUTPUT/model chats with `lamina generate`.",
            """
  lamina sft --from runs/keel-64 --data instructions.jsonl --output runs/keel-64-sft
  lamina sft --from runs/keel-64 --data chats.jsonl --template chat --packing --sequence-length 512 --epochs 2 \\
      --output runs/keel-64-chat
  lamina sft --from HuggingFaceTB/SmolLM2-135M --data questions.jsonl --lora-rank 16 --learning-rate 2e-4 \\
      --output runs/smollm2-lora
  lamina sft --from runs/keel-64 --preset lima --output runs/keel-64-lima
  lamina sft --output runs/keel-64-sft --resume
""",
        ),
        _tuning(
            "reward",
            "train a reward model on preferences",
            "Train a reward model on preferences (prompt, chosen, rejected), from a fine-tuned model.",
            """
  lamina reward --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-reward
  lamina reward --from runs/keel-64-sft --data hf:trl-lib/ultrafeedback_binarized --batch-size 16 --epochs 1
  lamina reward --output runs/keel-64-reward --resume
""",
        ),
        _tuning(
            "rlhf",
            "train a policy by reinforcement learning: ReMax, RLOO or GRPO",
            "Train a policy by reinforcement learning, with a reward model or a function: ReMax, RLOO or GRPO.",
            """
  lamina rlhf --from runs/keel-64-sft --reward-model runs/keel-64-reward --data prompts.jsonl --output runs/keel-64-rlhf
  lamina rlhf --from runs/keel-64-sft --reward-function sums.py:is_right --data sums.jsonl --algorithm grpo \\
      --num-generations 8
  lamina rlhf --output runs/keel-64-rlhf --resume
""",
            "reward_model",
            files=("reward_function",),
        ),
        _tuning(
            "dpo",
            "train a policy on preferences directly",
            "Train a policy on preferences (prompt, chosen, rejected) directly, without a reward model.",
            """
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --output runs/keel-64-dpo
  lamina dpo --from runs/keel-64-sft --data preferences.jsonl --beta 0.3 --learning-rate 5e-7 --lora-rank 16
  lamina dpo --output runs/keel-64-dpo --resume
""",
        ),
        JobRow(
            name="coord-check",
            kind=Kind.COORD_CHECK,
            summary="check that no module's output grows with the width or depth, before and after a few steps",
            about=(
                "Train several widths, or depths, for a few steps on one batch and see whether any module's output "
                "grows with the size.\nPrints the exponent e of mean |x| ~ size^e: 0 is right; above 0, a wide or deep "
                "model will blow up."
            ),
            examples="""
  lamina coord-check
  lamina coord-check --placement keel --width-scaling none --output runs/keel-plain
  lamina coord-check --backbone llama-71m --num-layers 12 --widths 128,256,512,1024 --width-scaling mup
  lamina coord-check --depths 8,16,32 --depth-scaling completep --output runs/depths
""",
            settings="lamina.studies.settings:CoordCheckSettings",
            run="lamina.studies.coordinates:coord_check",
            returns="Returns the rows of slopes.csv and the page; OUTPUT/result.json has the verdict.",
            outcome="Comparison",
            prints="lamina.reports.terminal:coord_check",
            resumes="skip the sizes and seeds that the folder already holds",
        ),
        JobRow(
            name="transfer",
            kind=Kind.TRANSFER,
            summary="find the learning rates that are stable and best on a narrow proxy, and from them a wide target's",
            about=(
                "Try learning rates on a narrow proxy. Prints those that are stable and best there, and each role's "
                "rates at\nthe target's width. A rate that fails on the proxy fails on the target (FuseNorm Figure "
                "4)."
            ),
            examples="""
  lamina transfer
  lamina transfer --placement fusenorm --backbone llama-5b --untie-embeddings --proxy-width 640 --output runs/ws
  lamina transfer --learning-rates 1e-3,4e-3,1.6e-2,6.4e-2 --verify-rates 4e-3,6.4e-2 --verify-width 256
  lamina transfer --output runs/ws --resume
""",
            settings="lamina.studies.settings:TransferSettings",
            run="lamina.studies.transfer:transfer",
            returns=(
                "Returns the rows of results.csv and the page; OUTPUT/transfer.json holds the interval, the "
                "target's rates and the risk."
            ),
            outcome="Comparison",
            prints="lamina.reports.terminal:transfer",
        ),
        JobRow(
            name="max-lr",
            kind=Kind.MAX_LR,
            summary="find the largest learning rate that each placement tolerates: one warm-up until it fails",
            about=(
                "Find how high a learning rate each placement tolerates. Each placement and seed has one run, with "
                "one linear warm-up\nfrom 0 to --max-learning-rate over all --steps (Keel's protocol). A run ends at "
                "the first of: a loss or gradient that is not\nfinite; a spike, a loss that stays --spike-margin "
                "nats above its low for --spike-patience; a plateau, a loss that does\nnot fall by --plateau-margin "
                'nats while the rate grows by --plateau-factor ("stuck" if it never got below the corpus\'s\nunigram '
                "entropy). Reports the rate just before: the last at which the loss was at its low, or still fell."
            ),
            examples="""
  lamina max-lr
  lamina max-lr --placements post_ln,mix_ln,pre_ln,keel --seeds 0,1,2,3,4 --output runs/limits
  lamina max-lr --backbone llama-71m --corpus books/ --tokenizer bpe:8192 --steps 5000 --max-learning-rate 5e-2
  lamina max-lr --output runs/limits --resume
""",
            settings="lamina.studies.settings:MaxRateStudySettings",
            run="lamina.studies.compare:max_lr",
            returns=(
                "Returns the rows of results.csv (``max_learning_rate``, ``stop_rule`` and ``loss_at_stop`` of "
                "every placement and seed) and the page. ``placements`` and ``seeds`` may also be lists."
            ),
            outcome="Comparison",
            prints="lamina.reports.terminal:max_lr",
        ),
        JobRow(
            name="study",
            kind=Kind.CLAIMS,
            summary="run, list or show studies: each table and figure of the papers, with a verdict on its claim",
            about="Run a study and judge its claims, as `lamina study run` does.",
            settings="lamina.lab.papers.engine.settings:StudySettings",
            run="lamina.lab.papers.engine.study_run:run_study",
            returns="``study`` is a name of the catalog or the YAML file of your own; OUTPUT/report.html is the page.",
            outcome="StudyOutcome",
            raises="a study that can't be read or has changed since it ran",
            switches=(
                Switch(name="record", help="also write tables and verdicts to the records", passed=True),
                Switch(name="dry_run", help="train nothing: parameters, tokens, FLOPs, hours"),
            ),
            positional=("study",),
            folder="lamina.lab.papers.engine.study_run:output_of",
            own_command=True,
        ),
        JobRow(
            name="probe",
            function="probe_folder",
            kind=Kind.PROBING,
            summary="measure what each layer of a checkpoint does, and write one page about it",
            about=(
                "Measure what each layer of a checkpoint does: one table and one figure per probe, and "
                "OUTPUT/report.html.\n\nprobes:"
            ),
            examples="""
  lamina probe runs/keel-64
  lamina probe models/smollm2 --probes hidden_states,angular_distance,layer_drop --output runs/smollm2
  lamina probe models/bert --corpus my_texts/ --sequences 256 --sequence-length 128
  lamina probe models/smollm2 --probes "angular_distance(tokens=all)" --output runs/smollm2 --resume
  lamina probe --list
""",
            settings="lamina.probes.engine.probe_settings:ProbeSettings",
            run="lamina.probes.job.probe_folder:probe_folder",
            returns=(
                "Returns what result.json holds; OUTPUT/NAME.parquet is the table of the probe NAME. "
                "``lamina.probe`` returns only the tables and writes nothing."
            ),
            prints="lamina.reports.terminal:probing",
            raises="a checkpoint or a corpus that can't be read",
            resumes="measure only the probes that are not finished",
            positional=("checkpoint",),
            switches=(
                Switch(
                    name="png",
                    help="also draw each figure as a PNG (needs Chromium or Chrome)",
                    after="lamina.reports.pages.probing:draw",
                ),
            ),
            listing="lamina.probes.engine.registry:listing",
            inputs=("checkpoint",),
            fails="lamina.reports.terminal:refused_probe",
        ),
        JobRow(
            name="eval",
            function="evaluate",
            kind=Kind.EVALUATION,
            summary=(
                "evaluate models: perplexity of a text, tasks of lm-evaluation-harness, tables as the papers print them"
            ),
            about="""\
Evaluate trained models: the perplexity of any text per token, word and byte (--corpus), and the tasks of
lm-evaluation-harness (--tasks). MODEL is a Lamina or transformers checkpoint, a run's folder, or a study's, whose runs
become a mean and a standard deviation over the seeds. OUTPUT/report.html is the page; table.csv, table.md and table.tex
hold the table as the papers print it, results.csv every number, items/ every question.

--tasks takes any task, group or tag of the harness, and these sets:""",
            examples="""
  lamina eval runs/keel-64 --corpus my_text.txt
  lamina eval runs/keel-64 runs/pre-64 --tasks generated --output runs/scores
  lamina eval models/smollm2 --tasks peri_ln --limit 200 --data-dir eval-data
  lamina eval models/smollm2 --tasks arc_easy,hellaswag@5 --output runs/smollm2
  lamina eval runs/compare --tasks peri_ln --data-dir eval-data --output runs/peri --resume=auto
  lamina eval --list
""",
            settings="lamina.evaluation.settings:EvalSettings",
            run="lamina.studies.evaluated:evaluate_runs",
            returns=(
                "``models`` (paths of checkpoints, runs and studies) and ``tasks`` may also be lists. Returns what "
                "result.json holds."
            ),
            prints="lamina.reports.terminal:evaluation",
            raises="an unknown task, data or a checkpoint that can't be read",
            resumes="evaluate only what is not finished",
            positional=("models...",),
            listing="lamina.evaluation.task_sets:listing",
            inputs=("models",),
            files=("tasks",),
        ),
    )
}


def refuse_other_kind(folder: Path, row: JobRow) -> None:
    """Raise UserError if the folder to resume was written by another kind of job.

    If environment.json is damaged, the job's files decide, and it is written again.
    """
    kind = kind_of(folder)
    if kind in (row.kind, None):
        return
    owner = next((other.name for other in JOBS.values() if other.kind == kind), None)
    wrote = f"lamina {owner}" if owner else "lamina convert" if kind == Kind.MODEL else "lamina.watch"
    raise UserError(
        f"output: {str(folder)!r} was written by {wrote}, so lamina {row.name} can't resume it (allowed: the folder of "
        f"a lamina {row.name}, or a new one)"
    )
