"""The settings of `lamina study run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lamina.core.json_types import Json
from lamina.core.values import corpus_name, mapping, path, place
from lamina.jobs.setting_groups import OutputSettings, ThreadSettings, WorkerSettings
from lamina.jobs.settings import Settings, at_least, changed, not_below, setting
from lamina.lab.papers.study_catalog import records_folder
from lamina.studies.settings import seed_list

ScaleName = Literal["cpu", "gpu", "paper"]
Engine = Literal["local", "ray"]


class StoreSettings(Settings):
    """The folder of all studies' trials, and the folder of recorded results."""

    store: str = setting(
        "runs/trials", "folder of all studies' trials; Lamina does not train stored trials again", path, decides=False
    )
    records: str | None = setting(
        None,
        "folder with recorded results of earlier studies (default: Lamina's recorded results)",
        path,
        decides=False,
    )

    @property
    def records_folder(self) -> Path:
        return records_folder() if self.records is None else Path(self.records)


class StudySettings(StoreSettings, OutputSettings, WorkerSettings, ThreadSettings):
    """The settings of a study at one scale."""

    command_name = "study run"
    main = (
        *("study", "scale", "seeds", "corpus", "set", "store"),
        *("engine", "workers", "threads", "output"),
    )
    order = ("study", "scale")

    study: str | None = setting(None, "a study's name (see `lamina study list`), or your YAML file", place)
    scale: ScaleName = setting(
        "cpu", "scale of the study: cpu (2 cores, minutes to an hour), gpu (one GPU) or paper (as in the paper)"
    )
    seeds: str | None = setting(None, "comma-separated seeds (default: the study's seeds)", seed_list)
    corpus: str | None = setting(None, "text to train on (default: the study's corpus)", corpus_name)
    set: Json = setting({}, "other settings of the trials, e.g. --set.steps 200", mapping)
    engine: Engine = setting(
        "local",
        "where trials run: local (on this machine) or ray (on a Ray cluster; needs Lamina's extra `ray`)",
        decides=False,
    )
    address: str | None = setting(
        None, "with --engine ray, the cluster's address (default: a new cluster on this machine)", decides=False
    )
    gpus: float = setting(
        0.0, "with --engine ray, number of GPUs for each process of a trial", not_below(0.0), decides=False
    )
    processes: int = setting(
        1,
        "with --engine ray, number of processes per trial, which may run on different hosts",
        at_least(1),
        decides=False,
    )
    threads: int | None = changed(1, help="CPU threads per trial")
    run_code: bool = setting(
        False, "run the code that tasks need: the trials' task files, and programs that a model writes", decides=False
    )

    def check(self) -> None:
        super().check()
        if self.engine != "ray":
            self.refuse_unused("address", "gpus", "processes", allowed="with --engine ray")

    @property
    def changes(self) -> Json:
        """The settings that replace settings of the study's file."""
        return {**self.set, **({} if self.corpus is None else {"corpus": self.corpus})}
