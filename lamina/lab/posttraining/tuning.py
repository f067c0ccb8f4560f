"""Run a training job after pretraining: load the model and the data, add LoRA, train, and keep the best weights."""

from __future__ import annotations

import copy
import hashlib
import heapq
import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel, TrainerCallback, TrainingArguments

from lamina.core.extras import require
from lamina.core.json_types import Json
from lamina.core.terminal import show_line
from lamina.data.blocks import spread
from lamina.data.packed import single_corpus_of, whole_blocks
from lamina.errors import UserError, one_line, renamed_setting, unknown
from lamina.evaluation.scores import is_of, lower_is_better
from lamina.jobs.files import write_json, writing
from lamina.jobs.folder import Resume
from lamina.jobs.job import Job, ResumePolicy
from lamina.jobs.manifest import content_hash
from lamina.jobs.status import Status
from lamina.lab.posttraining.examples import (
    BATCH,
    CHOICES,
    TEMPLATES,
    Fields,
    conform,
    load,
    prepare,
    processes_for,
    read_template,
    template_end,
)
from lamina.lab.posttraining.settings import TuningSettings, with_preset
from lamina.lab.posttraining.starting import (
    PACKED,
    Start,
    add_lora,
    find_start,
    lora_of,
    numel,
    quantize,
    save_adapter,
    set_trained,
    trained_of,
)
from lamina.lab.posttraining.trainer import NoReference, Passed, TunedTrainer, check_trl
from lamina.modeling.processes import Processes, device_of
from lamina.training.arguments import arguments_of, check_arguments
from lamina.training.checkpointing.checkpoints import Checkpoints, RunState
from lamina.training.checkpointing.resuming import DATA, known_of, noted
from lamina.training.checkpointing.saved_model import ModelCard, check_repository
from lamina.training.checkpointing.sharding import is_sharded, shard, whole
from lamina.training.execution.devices import decided
from lamina.training.monitor.followed import follow
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.recorder import RunRecorder
from lamina.training.monitor.scheduled_probes import undisturbed
from lamina.training.monitor.writers import LastEvaluation
from lamina.training.optimization.optimizer import schedule_of
from lamina.training.optimization.order import TrainOrder
from lamina.training.resolve import check_sharded, task_measure
from lamina.training.run import TrainingRun, TrainingStage, train

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=TuningSettings)
POLICY = ResumePolicy(what="run", free=TuningSettings.free(), compared=frozenset(("from_model", "reward_model")))


def tune(
    kind: type[TuningStage[S]],
    settings: S | Mapping[str, object],
    *,
    resume: Resume = False,
    overwrite: bool = False,
    bar: bool = True,
) -> Json:
    """Fine-tune or align a model. The arguments and errors are as in ``lamina.training.run.train``."""
    with warnings.catch_warnings():
        # TRL reads the name of the property before transformers 5.23
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return train(kind(), settings, resume=resume, overwrite=overwrite, bar=bar)


# Names in Trainer's logs. A record has its own fields for the tokens and the learning rate.
_NOT_MEASURED = frozenset(
    ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step", "total_flos", "step_time")
)  # fmt: skip
_TIMES = ("_runtime", "_per_second", "_time")


class TuningRecorder(RunRecorder):
    """Record a run's losses and the metrics of TRL's trainer."""

    last_measured: Mapping[str, object] = MappingProxyType({})

    def has_evaluated(self, step: int) -> bool:
        return super().has_evaluated(step) and bool(self.last_measured)

    def tokens_at(self, step: int) -> int:
        """Return the number of training tokens so far, without padding."""
        assert isinstance(self.trainer, TunedTrainer)
        return self.trainer.tokens_seen

    def measured(self, logs: Json) -> Json:
        """Return the trainer's metrics, with "_" in place of "/" in the names."""
        return _numbers(logs)

    def evaluated(self, metrics: Json, loss: float) -> Json:
        self.last_measured = _numbers(metrics)
        return dict(self.last_measured)

    def state_dict(self) -> Json:
        return {**super().state_dict(), "last_measured": dict(self.last_measured)}

    def load_state_dict(self, state: RunState) -> None:
        super().load_state_dict(state)
        self.last_measured = dict(state.get("last_measured", {}))


def _numbers(logs: Mapping[str, object]) -> Json:
    return {
        name.replace("/", "_"): float(value)
        for name, value in logs.items()
        if (name.startswith("eval_") or name not in _NOT_MEASURED)
        and name != "eval_num_tokens"
        and not name.endswith(_TIMES)
        and not name.startswith("layers/")
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


BEST_WEIGHTS, BEST_NOTE = "best.safetensors", "best.json"


class BestWeights(TrainerCallback):
    """Keep the trained weights of the best evaluation: the lowest held-out loss, or the best score on a task.

    Args:
        by: "loss", or the name of the task.
        resumed: the step from which the run resumes, or -1. Lamina discards best weights that a later step saved.
    """

    trainer: TunedTrainer

    def __init__(self, folder: Path, model: PreTrainedModel, processes: Processes, *, by: str, resumed: int):
        self.folder, self.model, self.processes, self.by = folder, model, processes, by
        best = noted(folder / BEST_NOTE)
        if "loss" not in best or best.get("step", math.inf) > resumed:
            best = {}
        if best and not (path := folder / BEST_WEIGHTS).is_file():
            if processes.first:
                logger.warning("%s is missing, so the best model up to step %d is lost", path, resumed)
            best = {}
        self.step, self.loss = int(best.get("step", -1)), float(best.get("loss", math.inf))
        self.metrics: Json = dict(best.get("metrics", {}))

    def on_evaluate(self, args: Passed, state: Passed, control: Passed, **kwargs: Passed) -> None:
        metrics: Json = kwargs["metrics"]
        loss = self.processes.by_first(lambda: self._loss(metrics))
        if not loss < self.loss:
            return
        self.step, self.loss = state.global_step, loss
        # without Trainer's epoch, which differs from the epoch of Lamina's order
        self.metrics = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        self.metrics |= self.trainer.evaluation.apart()
        tensors = whole(trained_of(self.model))
        self.processes.by_first(lambda: self._write(tensors))

    def _loss(self, metrics: Json) -> float:
        """Return the value to minimize: the held-out loss, or a task's score (negated if higher is better)."""
        if self.by == "loss":
            return metrics["eval_loss"]
        scores = (self.trainer.evaluation.tasks or {}).items()
        name, score = next((pair for pair in scores if is_of(self.by, pair[0])), ("", math.nan))
        return score if lower_is_better(name) else -score

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with writing(self.folder / BEST_WEIGHTS) as temporary:
            save_file(dict(tensors), temporary)
        write_json(self.folder / BEST_NOTE, {"step": self.step, "loss": self.loss, "metrics": self.metrics})

    def restore(self) -> Json:
        """Load the best weights into the model. Returns the best evaluation's metrics for result.json."""
        if self.step < 0:
            return {}
        set_trained(self.model, load_file(self.folder / BEST_WEIGHTS))
        return {**self.metrics, "best_step": self.step}

    def forget(self) -> None:
        """Delete the best weights. Keep the weights if a checkpoint remains, because a resumed run needs them."""
        if not Checkpoints(self.folder / "checkpoints").paths():
            for name in (BEST_NOTE, BEST_WEIGHTS):
                (self.folder / name).unlink(missing_ok=True)


class Watched:
    """Measure the loss on another text and the scores on tasks at every evaluation. A worse value shows forgetting."""

    def __init__(self, settings: TuningSettings, start: Start, processes: Processes):
        self.tokenizer, self.blocks = start.tokenizer, None
        if settings.eval_corpus is not None:
            with renamed_setting("corpus", "eval_corpus"):
                length = min(start.longest, PACKED)
                read = partial(whole_blocks, settings.eval_corpus, start.tokenizer, length, progress=False)
                self.blocks = processes.first_per_host(read)
        self.run, self.tasks = settings.as_run(), None
        processes.by_first(partial(self._find_tasks, getattr(settings, "best_by", "last")))

    def _find_tasks(self, best_by: str) -> None:
        self.tasks = task_measure(self.run)
        scored = () if self.tasks is None else dict.fromkeys(column.unit for column in self.tasks.columns)
        if best_by not in (measures := ("last", "loss", *scored)):
            raise unknown("best_by", best_by, measures)

    def measure(self, trainer: TunedTrainer) -> LastEvaluation:
        """Return the loss on the text in nats per token, and the tasks' scores. All processes must call this method."""
        second, scores = None, None
        if self.blocks is not None:
            chosen, blocks = spread(len(self.blocks), self.run.eval_blocks), self.blocks

            def loss(places: list[int]) -> float:
                ids = torch.stack([blocks[chosen[index]]["input_ids"] for index in places]).to(trainer.args.device)
                return float(trainer.in_precision(input_ids=ids, labels=ids).loss) * len(places)

            second = trainer.processes.mean(sum(trainer.held_out_batches(loss, len(chosen))))
            second *= trainer.processes.size / len(chosen)
        if self.tasks:
            with undisturbed(model := trainer.bare_model()):
                scores = self.tasks.scores(model, self.tokenizer)
        return LastEvaluation(second=second, tasks=scores)


class TuningStage(TrainingStage[S]):
    """A job that trains a pretrained model with a TRL trainer."""

    policy = POLICY
    recorder = TuningRecorder
    evaluates_first = True
    head: ClassVar[str] = "causal_lm"
    # whether to stop the run if the loss rises by ``divergence_margin``. Otherwise, the loss only has to be finite
    guarded: ClassVar[bool] = True
    # the metric that must be finite at the end. Otherwise, the run's status is diverged
    measure: ClassVar[str] = "eval_loss"
    forms: Sequence[tuple[str, ...]]  # the columns of each TRL format that the job accepts
    columns: ClassVar[Sequence[str]]  # the columns of the tokenized data: token ids, and other inputs of the loss
    ordered: Callable[..., TrainOrder] = TrainOrder  # a function that returns the training order
    made_by: Passed  # the class of the trainer
    configured_by: type[TrainingArguments]  # the class of the trainer's arguments
    start: Start
    train: Dataset
    held_out: Dataset
    inputs: torch.Tensor  # token ids for the layer monitor, [sequences, tokens]
    notes: Json  # counts for result.json
    config: Passed
    form: Sequence[str] = ()  # the columns of the training data's TRL format
    text_by: str = "no template"  # the chat template, as the console names it
    templated: bool = False  # whether a chat template turns the examples into text
    watched: Watched
    best: BestWeights
    tuner: Any
    generation: GenerationConfig | None
    processes: Processes

    @abstractmethod
    def by_trl(self, rows: Dataset, form: Sequence[str]) -> Dataset:
        """Tokenize rows with TRL's code, without cutting them to the maximum sequence length."""

    @abstractmethod
    def wrong(self, row: Fields) -> str:
        """Return why a tokenized row is unusable, or "" for a usable row."""

    def token_ids(self, row: Fields) -> list[int]:
        """Return a tokenized row's token ids for the layer monitor."""
        return row[self.columns[0]]

    def dataset(self, rows: Dataset, *, train: bool) -> Dataset:
        """Convert tokenized rows to the format of TRL's trainer."""
        return rows

    def conform(self, rows: Dataset, *, turns: bool) -> tuple[Dataset, tuple[str, ...]]:
        return conform(rows, self.forms, turns=turns)

    def counts(self, train: Dataset, held_out: Dataset) -> Json:
        """Return further counts for result.json. Lamina has not yet cut the rows to the maximum length."""
        return {}

    def rewards(self) -> str:
        """Load the reward models and functions of the job. Returns a hash of all their files, or ""."""
        return ""

    def given(self, settings: S | Mapping[str, Any]) -> Mapping[str, Any]:
        given = settings.to_dict() if isinstance(settings, TuningSettings) else with_preset(dict(settings))
        # a new run computes these two values, and a resumed run keeps them
        return {name: v for name, v in given.items() if v or name not in ("steps", "sequence_length")}

    def check(self, job: Job[S], processes: Processes) -> None:
        self.settings, self.processes = job.settings, processes
        settings = job.settings
        if processes.parallel == "fsdp2":
            check_sharded(settings)
            if settings.quantized:
                raise UserError(
                    f"weights: {settings.weights!r} cannot be sharded. With fsdp2, set weights to fp32 or bf16."
                )
        settings.require(*settings.needed)
        if settings.quantized:
            require(self.kind, "qlora")
        if settings.push_to_hub is not None:
            processes.by_first(lambda: check_repository(str(settings.push_to_hub)))
        check_arguments(settings.trainer, settings.schedule, type(settings))
        self.config = check_trl(settings.trl, self.configured_by, settings.names())
        if settings.lora_rank:
            lora_of(settings)
        if settings.trl.get("activation_offloading") and device_of(settings.device) == "cpu":
            raise UserError(
                "trl.activation_offloading: this setting works only on a GPU. Leave out trl.activation_offloading."
            )

    def read(self, processes: Processes, *, bar: bool) -> None:
        processes.first_per_host(self.read_examples)
        if bar and processes.first:
            counts = f"{self.notes['examples']:,} training and {self.notes['held_out']:,} held-out rows"
            loss = f", loss on {self.notes['loss_on']}" if "loss_on" in self.notes else ""
            show_line(f"{counts} of {' and '.join(self.form)}, {self.text_by} (--template){loss}")
        settings = decided(self.settings)
        per_step = settings.batch_size * settings.gradient_accumulation / settings.trl.get("num_iterations", 1)
        steps = settings.steps or max(1, math.ceil(settings.epochs * len(self.train) / per_step))
        self.settings = replace(settings, steps=steps, sequence_length=self.start.longest)
        self.plan, self.processor = self.start.plan, self.start.tokenizer
        self.watched = Watched(self.settings, self.start, processes)
        if settings.group_by_length:
            columns = [self.train[name] for name in self.columns if name.endswith("_ids")]
            self.ordered = partial(TrainOrder, lengths=[sum(map(len, row)) for row in zip(*columns, strict=True)])

    def read_examples(self) -> None:
        """Find the starting model, then read and tokenize the data. Raises UserError for an unusable model or data."""
        settings = self.settings
        self.start = find_start(settings, self.head)
        rewards = self.rewards()
        rows, skipped = self._prepared("data", str(settings.data))
        apart, others = None, 0
        if settings.eval_data is not None:
            apart, others = self._prepared("eval_data", settings.eval_data)
        train, held_out = split(rows, settings, apart)
        self.train, self.held_out = self.dataset(train, train=True), self.dataset(held_out, train=False)
        self.inputs = monitored([self.token_ids(row) for row in cast("Iterator[Json]", self.held_out)])
        self.notes = {"examples": len(train), **self.counts(train, held_out), "held_out": len(self.held_out)}
        self.notes["skipped"] = skipped + others
        data = fingerprint(train, held_out)
        if settings.eval_corpus is not None:
            with renamed_setting("corpus", "eval_corpus"):
                data += f"+{single_corpus_of(settings.eval_corpus, 'text').fingerprint()}"
        self.identity = TuningIdentity(self, data, content_hash(self.start.path), rewards)

    def _prepared(self, name: str, source: str) -> tuple[Dataset, int]:
        """Load and tokenize a source's rows. Returns the tokenized rows and the number of skipped rows."""
        settings, where = self.settings, f"{name}: {source!r}"
        loaded, turns = load(name, source), settings.template not in ("auto", "none")
        try:
            rows, form = self.conform(loaded, turns=turns)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        self.form = self.form or form
        texts, tokens = type(rows.features[form[-1]]).__name__ == "Value", form[-1].endswith("_ids")
        if not tokens and (turns or not texts):
            self._choose_template(where, loaded)
        self.config.dataset_num_proc = settings.trl.get("dataset_num_proc", processes_for(rows))
        prepared = partial(self.by_trl, form=form)
        template = str(self.start.tokenizer.chat_template or "")
        options: Json = {"template": template, "skip_bad": settings.skip_bad}
        encoded, skipped = prepare(where, rows, form, prepared, self.wrong, **options)
        return encoded.select_columns([name for name in self.columns if name in encoded.column_names]), skipped

    def _choose_template(self, where: str, rows: Dataset) -> None:
        """Set the tokenizer's chat template. With "auto", held-out data get the template of the training data."""
        default = "alpaca" if "instruction" in rows.column_names else "chat"
        default = default if self.settings.command_name == "sft" else None
        template = read_template(self.settings.template, self.start.tokenizer, default=default)
        if template is None:
            raise UserError(
                f"{where}: conversations need a chat template. Give --template, or give plain prompts and answers."
            )
        self.start.tokenizer.chat_template, self.templated = template, True
        named = next((name for name, text in TEMPLATES.items() if text == template), "")
        named = named or (Path(self.settings.template).name if self.settings.template not in CHOICES else "")
        self.text_by = f"template {named}" if named else "the tokenizer's template"

    def reference(self) -> PreTrainedModel | NoReference:
        """Load the initial model as the reference model. If LoRA leaves the weights unchanged, return a placeholder."""
        if self.tuner is not None and not self.settings.changes_base:
            return NoReference(self.start.config)
        return self.shared(self.start.policy().eval().requires_grad_(False))

    def shared(self, model: PreTrainedModel) -> PreTrainedModel:
        """Shard a model over the processes if the run uses FSDP2."""
        settings, processes = self.settings, self.processes
        if processes.parallel == "fsdp2":
            bf16 = settings.precision == "bf16" and settings.weights == "fp32"
            shard(model, processes, device_of(settings.device), bf16=bf16)
        return model

    def new_model(self) -> PreTrainedModel:
        return self.start.policy(template_end(self.start.tokenizer) if self.templated else [])

    def model(self, run: TrainingRun) -> PreTrainedModel:
        torch.manual_seed(self.settings.seed)
        model = self.new_model()
        self.generation = copy.deepcopy(getattr(model, "generation_config", None))  # a reward model has none
        if self.start.plan is None:  # no Lamina model: Lamina finds the layers by following the tensors
            run.followed = follow(model, {"input_ids": self.inputs})
            for note in run.followed.notes if run.processes.first else ():
                logger.warning("layer monitor: %s", note)
        quantize(model, self.settings, self.start.dtype)
        self.tuner = add_lora(model, self.settings)
        if self.tuner is not None and self.settings.gradient_checkpointing:
            model.enable_input_require_grads()  # otherwise, a checkpointed block of frozen weights has no gradient
        return self.shared(model)

    def guard(self) -> DivergenceGuard:
        margin = self.settings.divergence_margin if self.guarded else math.inf
        return DivergenceGuard(margin=margin, patience=self.settings.divergence_patience)

    def order(self, run: TrainingRun) -> TrainOrder:
        settings, processes = self.settings, run.processes
        return self.ordered(
            len(self.train),
            steps=settings.steps,
            batch_size=settings.batch_size,
            gradient_accumulation=settings.gradient_accumulation,
            seed=settings.seed,
            done=run.done,
            rank=processes.rank,
            size=processes.size,
        )

    def monitor_inputs(self) -> torch.Tensor:
        return self.inputs

    def callbacks(self, run: TrainingRun) -> list[TrainerCallback]:
        by, resumed = getattr(self.settings, "best_by", "last"), run.done if run.checkpoint else -1
        self.best = BestWeights(run.folder, run.model, run.processes, by=by, resumed=resumed)
        return [self.best] if by != "last" else []

    def fields(self, run: TrainingRun) -> Json:
        """Return the TRL arguments that the job sets."""
        return {}

    def options(self, arguments: TrainingArguments) -> Json:
        """Return further arguments for the trainer's constructor."""
        return {}

    def trainer(self, run: TrainingRun) -> TunedTrainer:
        settings = self.settings.as_run()
        # TRL turns gradient checkpointing on by default, under its name before transformers 5.23
        checkpointing = {"gradient_checkpointing": self.settings.gradient_checkpointing}
        fields = {**checkpointing, **self.settings.trl, **self.fields(run)}
        arguments = arguments_of(self.configured_by, settings, run.processes.size, **fields)
        try:
            return self.made_by(
                model=run.model,
                args=arguments,
                train_dataset=self.train,
                eval_dataset=self.held_out,
                processing_class=self.start.tokenizer,
                callbacks=run.callbacks,
                run=run,
                schedule=schedule_of(settings),
                **self.options(arguments),
            )
        except (ValueError, TypeError, ImportError) as error:
            if isinstance(error, UserError) or not (self.settings.trl or self.settings.trainer):
                raise
            raise UserError(f"trl: {one_line(error)}") from error

    def verdict(self, run: TrainingRun) -> tuple[Status, str] | Diverged:
        recorder, step = run.recorder, run.trainer.state.global_step
        assert isinstance(recorder, TuningRecorder)
        if not math.isfinite(float(str(recorder.last_measured.get(self.measure, math.nan)))):
            return Diverged(step, f"{self.measure} is not finite at step {step}")
        return Status.FINISHED, ""

    def outcome(self, run: TrainingRun, status: Status, reason: str) -> Json:
        recorder, parameters = run.recorder, list(run.model.parameters())
        assert isinstance(recorder, TuningRecorder)
        seconds, tokens = recorder.training_seconds, run.trainer.tokens_seen - run.trainer.tokens_before
        return {
            "status": str(status),
            **recorder.last_measured,
            "steps": run.trainer.state.global_step,
            "tokens": run.trainer.tokens_seen,
            "tokens_per_second": tokens / seconds if seconds else None,
            "parameters": sum(numel(p) for p in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "from": self.settings.from_model,
            **self.notes,
            **run.trainer.evaluation.apart(),
            "reason": reason,
            **run.guard.outcome(status),
        }

    def trained(self, run: TrainingRun, result: Json) -> tuple[PreTrainedModel, ModelCard]:
        result.update(self.best.restore())
        model, tuner = run.model, self.tuner
        if self.settings.quantized or (tuner is not None and is_sharded(model)):
            # merge the LoRA matrices into weights that are neither quantized nor sharded
            trained, model = whole(trained_of(model)), self.new_model()
            tuner = add_lora(model, replace(self.settings, weights="fp32"))
            set_trained(model, trained)
        if tuner is not None:
            if run.processes.first:
                save_adapter(tuner, run.folder / "adapter")
            model = cast(PreTrainedModel, tuner.merge_and_unload())
        if self.generation is not None:
            model.generation_config = self.generation  # TRL has changed the tokens
        return model, self._card(result)

    def saved(self) -> None:
        self.best.forget()

    def _card(self, result: Json) -> ModelCard:
        settings = self.settings.to_dict()
        facts = {name: settings[name] for name in _FACTS if settings.get(name) is not None}
        counts = {name: f"{result[name]:,}" for name in _COUNTS if name in result}
        from lamina.lab.posttraining.page import MEASURES

        return ModelCard(
            head=self.head,
            data={name.replace("_", " "): fact for name, fact in {**facts, **counts}.items()},
            result=result,
            command=self.settings.command(),
            base_model=self.settings.from_model,
            measures=MEASURES,
        )


_FACTS = ("data", "eval_data", "reward_model", "reward_function", "template")
_COUNTS = ("examples", "held_out", "skipped")


def split(encoded_rows: Dataset, settings: TuningSettings, held_out: Dataset | None) -> tuple[Dataset, Dataset]:
    """Split the rows into training rows and at most ``eval_examples`` held-out rows, in the same way for all seeds."""
    if held_out is not None:
        return encoded_rows, held_out.select(_thinned(range(len(held_out)), settings))
    count = max(1, round(settings.eval_fraction * len(encoded_rows)))
    if len(encoded_rows) < 2:
        raise UserError("data: a single row cannot serve both training and evaluation. Give two rows, or --eval-data.")
    shuffled = torch.randperm(len(encoded_rows), generator=torch.Generator().manual_seed(0)).tolist()
    share = _thinned(sorted(shuffled[:count]), settings)
    rest = sorted(set(range(len(encoded_rows))).difference(share))
    return encoded_rows.select(rest), encoded_rows.select(share)


def _thinned(items: Sequence[int], settings: TuningSettings) -> list[int]:
    return [items[i] for i in spread(len(items), settings.eval_examples or len(items))]


def fingerprint(*parts: Dataset) -> str:
    digest = hashlib.sha256()
    for columns in chain.from_iterable(cast("Iterator[Json]", part.iter(BATCH)) for part in parts):
        for values in zip(*columns.values(), strict=True):
            fields = ((name, value) for name, value in zip(columns, values, strict=True) if value is not None)
            digest.update(repr(sorted(fields)).encode())
    return digest.hexdigest()


def monitored(sequences: Iterable[Sequence[int]]) -> torch.Tensor:
    """Cut the four longest sequences to equal length for the layer monitor. Returns [sequences, tokens]."""
    longest = heapq.nlargest(4, sequences, key=len)
    length = min(map(len, longest))
    return torch.tensor([list(ids[:length]) for ids in longest])


@dataclass(frozen=True)
class TuningIdentity:
    """Hashes that show whether the data, the model or the rewards have changed since the run began."""

    stage: TuningStage[Any]
    data: str
    model: str
    rewards: str = ""

    def state_dict(self) -> Json:
        """Return the settings and the hashes, under the same names as in a pretraining run's checkpoint."""
        return {"settings": self.stage.settings.to_dict(), **self.text}

    def load_state_dict(self, state: RunState) -> None:
        """Do nothing, because ``refuse_changes`` compares the state."""

    @property
    def text(self) -> dict[str, str]:
        """The content of data.json, which Lamina reads if a run has no checkpoint yet."""
        return {"plan": self.model, "text": self.data, "rewards": self.rewards}

    def refuse_changes(self, folder: Path) -> None:
        """Raise UserError if the examples, the model or the rewards have changed since the run began."""
        before = {**noted(folder / DATA), **known_of(folder)}
        settings, rewards = self.stage.settings.to_dict(), "reward_function"
        rewards = rewards if settings.get(rewards) is not None else "reward_model"
        sources = (("text", "data", "data"), ("plan", "from", "from_model"), ("rewards", rewards, rewards))
        for key, name, setting in sources:
            if (earlier := before.get(key, self.text[key])) != self.text[key]:
                if key == "text" and earlier.partition("+")[0] == self.text[key].partition("+")[0]:
                    name = setting = "eval_corpus"
                raise UserError(
                    f"{name}: {settings.get(setting)!r} has changed since the run in {str(folder)!r} began. To "
                    f"resume, restore the original content. To start again, give another --output, or --overwrite."
                )
