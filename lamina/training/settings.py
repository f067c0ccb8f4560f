"""The settings of training runs. Lamina derives the flags and config.yaml from these classes."""

from __future__ import annotations

import os
from typing import Literal

from lamina.core.specs import split
from lamina.core.values import Names, Numbers, comma_separated, numbers, place, steps_or_share, takes
from lamina.errors import UserError, shortened
from lamina.jobs.setting_groups import DeviceSettings, OutputSettings, ProbesSettings, SeedSettings, ThreadSettings
from lamina.jobs.settings import Settings, at_least, between, changed, setting
from lamina.training.objective_rows import OwnSettings
from lamina.training.setting_groups import (
    BlockSettings,
    ExpertSettings,
    GuardSettings,
    LearningRateSettings,
    ModelSettings,
    OptimizerSettings,
    PackingSettings,
    PlacementSettings,
    PretrainOptimizerSettings,
    RecordSettings,
    ScalingSettings,
    ScheduleSettings,
    SpeedSettings,
    StreamSettings,
    TrainerSettings,
    in_steps,
)


class RunSettings(
    ModelSettings,
    BlockSettings,
    PackingSettings,
    OwnSettings,
    ScheduleSettings,
    OptimizerSettings,
    ScalingSettings,
    PretrainOptimizerSettings,
    RecordSettings,
    ProbesSettings,
    GuardSettings,
    ExpertSettings,
    SpeedSettings,
    ThreadSettings,
    TrainerSettings,
):
    """The settings that all runs of a study share."""

    probes: str = changed(
        "hidden_states,angular_distance,gradients",
        help="names (see `lamina probe --list`), name(option=value, ...), all, or a Python file, which Lamina executes",
    )

    def check_names(self) -> None:
        super().check_names()
        from lamina.probes.engine.registry import check_probes

        check_probes(self.probes)


class SourceSettings(Settings, group="model"):
    """The model from which a run starts."""

    from_model: str | None = setting(
        None,
        "start from this model's weights, placement, sizes and tokenizer: a run's folder, a checkpoint of "
        "Lamina, or a transformers checkpoint that lamina convert accepts",
        place,
    )


class ParallelSettings(DeviceSettings, group="machine"):
    """The device of a run, and how several processes share the work."""

    order = ("parallel", "tensor_parallel")

    parallel: Literal["auto", "ddp", "fsdp2"] = setting(
        "auto",
        "how several processes share the model: ddp (a copy per process), fsdp2 (a part per process), or auto "
        "(accelerate's configuration, otherwise ddp)",
        decides=False,
    )
    tensor_parallel: int = setting(
        1,
        "with fsdp2, the number of processes that share each layer's matrices and the same part of the batch "
        "(tensor parallelism)",
        at_least(1),
        decides=False,
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = changed("auto", help="device to train on: auto, cpu, cuda or mps")


class RollbackSettings(Settings, group="divergence"):
    """The rollbacks after a divergence."""

    rollback: int = setting(
        0,
        "maximum number of returns to the last good checkpoint after a divergence (0: a divergence ends the run)",
        at_least(0),
    )
    rollback_factor: float = setting(
        0.5,
        "factor that multiplies the learning rate at each rollback",
        between(0.0, 1.0, open_low=True),
        decides=False,
    )
    rollback_skip: int | None = setting(
        None,
        "number of steps of data that a rollback skips (default: all data from the checkpoint to the divergence)",
        at_least(0),
        decides=False,
    )


def shares_or_steps(name: str, value: object) -> str | None:
    """Check a comma-separated list of lengths. A length below 1 is a fraction of all steps."""
    if value is None:
        return None
    listed = rate_list(name, value)
    for span in numbers(name, listed, float):
        steps_or_share(name, span)
    return listed


class BranchSettings(Settings, group="steps and learning rate"):
    """Shorter runs that share the beginning of this run."""

    branches: str | float | tuple[float, ...] | None = setting(
        None,
        "with wsd, comma-separated lengths of shorter runs that also start from this run's stable phase, in steps "
        "(1 or more) or as fractions of all steps",
        shares_or_steps,
    )


class EndSettings(Settings, group="output"):
    """The step at which a run pauses, and the Hub repository for its model."""

    pause_step: int | None = setting(
        None,
        "evaluate, save a checkpoint and stop after this step; continue later with --resume",
        at_least(1),
        decides=False,
    )

    push_to_hub: str | None = setting(
        None,
        "upload the model to this private repository of the Hugging Face hub, OWNER/NAME (default: never)",
        place,
        decides=False,
    )


class PretrainSettings(
    RunSettings,
    PlacementSettings,
    SourceSettings,
    OutputSettings,
    LearningRateSettings,
    SeedSettings,
    ParallelSettings,
    StreamSettings,
    BranchSettings,
    EndSettings,
    RollbackSettings,
):
    """The settings of a pretraining run."""

    command_name = "pretrain"
    main = (
        *("placement", "from_model", "corpus", "tokenizer", "backbone", "num_layers"),
        *("steps", "batch_size", "learning_rate", "output"),
    )

    output: str = changed("runs/pretrain")
    seed: int = changed(0, help="seed of the weights, the data's order and all other random numbers")

    def check(self) -> None:
        super().check()
        if self.streaming and (workers := self.trainer.get("dataloader_num_workers")):
            raise UserError(
                f"trainer.dataloader_num_workers: {workers!r} does not work with streaming, because another "
                "thread already reads the next blocks. Set the number to 0."
            )
        self._check_branches()
        if self.rollback and not self.save_steps:
            raise UserError(
                f"rollback: {self.rollback} needs checkpoints to roll back to. Add --save-steps, or set rollback to 0."
            )
        if self.pause_step is not None and self.pause_step > self.steps:
            raise UserError(
                f"pause_step: {self.pause_step} is after the last step, {self.steps}. Give at most {self.steps}."
            )
        if self.eval_tasks is None:
            self.refuse_unused("eval_data_dir", "run_code", allowed="with --eval-tasks")
        if not self.rollback:
            self.refuse_unused("rollback_factor", "rollback_skip", allowed="with --rollback")
        for name in ("streaming", "branches", "cuda_graphs") if self.packing == "off" else ():
            if getattr(self, name) != self.default(name):
                raise UserError(
                    f"packing: 'off' does not work with {name} = {getattr(self, name)!r}. Change one of "
                    "the two settings."
                )
        if self.cuda_graphs:
            self._check_graphs()

    def _check_graphs(self) -> None:
        ruled_out = {
            "compile": self.compile == "on",
            "precision": self.precision == "float8",
            "gradient_checkpointing": self.gradient_checkpointing,
            "gradient_accumulation": self.gradient_accumulation > 1,
            "drop_path": self.drop_path > 0,
        }
        for name in (name for name, out in ruled_out.items() if out):
            raise UserError(
                f"cuda_graphs: true does not work with {name} = {getattr(self, name)!r}. Change one of "
                "the two settings."
            )

    def branch_steps(self) -> list[int]:
        """Return the lengths of the decay branches in steps, shortest first."""
        spans = [] if self.branches is None else numbers("branches", str(self.branches), float)
        return sorted({in_steps(span, self.steps) for span in spans})

    def _check_branches(self) -> None:
        if self.branches is None:
            return
        ruled_out = {
            "schedule": self.schedule != "wsd",
            "streaming": self.streaming,
            "ema_decay": bool(self.ema_decay),
            "rollback": bool(self.rollback),
            "precision": self.precision == "fp16",
        }
        for name in (name for name, out in ruled_out.items() if out):
            raise UserError(
                f"branches: {self.branches!r} does not work with {name} = {getattr(self, name)!r}. "
                f"{'Set schedule to wsd' if name == 'schedule' else f'Change {name}'}, or leave branches out."
            )
        earliest, latest = in_steps(self.warmup, self.steps), self.steps - in_steps(self.decay, self.steps)
        for steps in self.branch_steps():
            begins = steps - in_steps(self.decay, steps)
            if not max(1, earliest) <= begins < steps or steps >= self.steps or begins > latest:
                raise UserError(
                    f"branches: a run of {steps} steps would begin to decay after step {begins}. Choose lengths below "
                    f"steps = {self.steps}, so that the decay begins between step {earliest} (the warm-up's end) "
                    f"and step {latest}."
                )


@takes(Names)
def placement_list(name: str, value: object) -> str:
    """Check a comma-separated list of placements: at least one, and none twice."""
    for entry in value if isinstance(value, list | tuple) else ():
        if not isinstance(entry, str | os.PathLike):
            raise UserError(
                f"{name}: {type(entry).__name__} {shortened(str(entry), 60)!r}. Give names, or YAML or Python files. "
                "For a Plan, call lamina.build."
            )
    listed = comma_separated(name, value)
    specs = split(listed, "placement")
    if not specs:
        raise UserError(f"{name}: none given. Give names from `lamina placements`.")
    if len(set(specs)) < len(specs):
        raise UserError(f"{name}: {listed!r} names a placement twice. Name each placement once.")
    return listed


class PlacementsSettings(Settings, group="model"):
    """The placements to try."""

    placements: str | tuple[str, ...] = setting(
        "pre_ln",
        "comma-separated placements: names (see `lamina placements`), name(option=value, ...), YAML files or Python "
        "files (Lamina executes them)",
        placement_list,
        decides=False,
    )

    @property
    def specs(self) -> list[str]:
        return split(str(self.placements), "placement")


@takes(Numbers)
def rate_list(name: str, value: object) -> str:
    """Check a comma-separated list of learning rates: at least one, and none twice."""
    listed = comma_separated(name, value)
    for rate in numbers(name, listed, float):
        if rate <= 0:
            raise UserError(f"{name}: {rate:g}. Give numbers above 0.")
    return listed


class RatesSettings(Settings, group="steps and learning rate"):
    """The learning rates to try."""

    learning_rates: str | float | tuple[float | str, ...] = setting(
        "5e-3", "comma-separated peak learning rates", rate_list, decides=False
    )
