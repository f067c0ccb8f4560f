"""The progress of a study: what it counts."""

from pathlib import Path
from types import SimpleNamespace

from lamina.papers.engine.driver import run_plan
from lamina.studies.running import Progress


def task(steps=9):
    return SimpleNamespace(steps=steps, folder=Path("nowhere"))


def test_the_last_line_counts_the_last_trial(capsys):
    progress = Progress({"a": task(), "b": task()}, done=3, waiting=1, show=True)
    progress.steps |= {"a": 9, "b": 9}  # all steps are done, but no trial has ended
    progress.tick(["a", "b"])
    assert "18/18" not in capsys.readouterr().err
    for name in ("a", "b"):
        progress.ended(name, {"status": "finished", "eval_loss": 2.0})
    assert capsys.readouterr().err.splitlines()[-1] == "step 18/18 (100%)  trials done 5/6"


def test_a_trial_that_only_lacks_a_measure_is_counted_once(monkeypatch):
    """And one that waits for the model of another is counted, too."""
    seen = []
    monkeypatch.setattr("lamina.papers.engine.driver.run_tasks", lambda tasks, **given: seen.append((tasks, given)))
    done = {"status": "finished"}
    first, plain = (SimpleNamespace(key="k", name="k", measures=m, inputs={}) for m in (("end/gains",), ()))
    later = SimpleNamespace(key="later", name="later", measures=(), inputs={"from_model": first})
    store = SimpleNamespace(
        complete=lambda trial: None if trial.measures or trial is later or len(seen) else done,
        result=lambda trial: None if trial is later else done,
        has_model=lambda trial: False,
        task=lambda trial: trial,
    )
    plan = SimpleNamespace(wanted=lambda result: [plain, first, later])
    run_plan(plan, store, workers=1, bar=True)
    ((tasks, given),) = seen
    assert [*tasks] == ["k"]
    assert (given["done"], given["waiting"]) == (0, 1)
