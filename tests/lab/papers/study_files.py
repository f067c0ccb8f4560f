"""Tiny studies as files: a YAML and its claims."""

import os
import time
from pathlib import Path

import yaml
from training.tiny_runs import SMALL

from lamina.jobs.environment import environment
from lamina.jobs.files import write_json
from lamina.jobs.kinds import Kind
from lamina.lab.papers.engine.plan import StudyPlan
from lamina.lab.papers.study_catalog import read_study
from lamina.lab.papers.trials.store import Records, Store

CLAIMS = """
from lamina.lab.papers.judging import Finding, Verdict, claim


@claim(says="the loss of {a} is a number", paper="2.0", exact=True)
def {name}(trials):
    losses = trials.tuned().where(placement="{a}").table["eval_loss"]
    verdict = Verdict.HOLDS if losses.notna().all() else Verdict.FAILS
    return Finding(verdict=verdict, ours=f"{{losses.mean():.3f}}", seeds=len(losses))
"""


def write_study(
    folder: Path, name: str = "mine", *, claims: str | None = None, corpus: Path, changed=(), **scale
) -> Path:
    """A study of two placements and two seeds; ``scale`` replaces parts of its cpu scale, ``changed`` settings."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in SMALL.items() if key != "threads"}
    cpu = {
        "settings": {**settings, "corpus": str(corpus), "init": "normal", "precision": "fp32", "compile": "off"},
        "axes": {"placement": ["pre_ln", "keel"], "learning_rate": [3e-3], "seed": 2},
        **scale,
    }
    cpu["settings"].update(changed)
    file = folder / f"{name}.yaml"
    study = {"study": name, "title": "A tiny study", "scales": {"cpu": cpu}}
    file.write_text(yaml.safe_dump(study, sort_keys="then" not in scale), encoding="utf-8")
    text = CLAIMS.format(a="keel", name=name.replace("-", "_")) if claims is None else claims
    file.with_suffix(".py").write_text(text, encoding="utf-8")
    return file


def plan_of(file: Path) -> StudyPlan:
    return StudyPlan(read_study(file).scale("cpu"))


def store_of(where: Path, name: str = "trials", **given) -> Store:
    return Store(where / name, Records(where / "records"), **given)


def exchange(one: Path, other: Path) -> None:
    """Exchange two files or folders."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def run_here(trials, *, workers, ended, tick):
    """An executor that runs its trials in this process."""
    for name, task in trials.items():
        with task.claim():
            task.folder.mkdir(parents=True, exist_ok=True)
            write_json(task.folder / "environment.json", environment(0, Kind.RUN))  # as a worker does
            ended(name, task.run())


def note_the_gpu(settings, *, resume, bar):
    """A job that notes which GPU its process sees, and stays for a while."""
    time.sleep(0.5)
    result = {"status": "finished", "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    write_json(Path(settings.output) / "result.json", result)
    return result


def chain(settings, **policy):
    """A model that is tuned, one that judges it, and a policy that begins with the one and asks the other."""
    judge = {"job": "reward", "from": "sft", "of": {"placement": "pre_ln"}, "settings": settings}
    begins = {"from_model": "sft", "reward_model": "judge"}
    last = {"job": "rlhf", "from": begins, "settings": policy, "records": ["held_out"]}
    return {"sft": {"settings": settings}, "judge": judge, "policy": last}
