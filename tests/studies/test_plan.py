"""Which trials a plan asks for, from results that are made up."""

import pytest
from studies.study_files import write_study

from lamina.errors import UserError
from lamina.studies.catalog.study import read_study
from lamina.studies.engine.plan import Plan

AXES = {"placement": ["pre_ln", "keel", "post_ln"], "num_layers": [2, 3]}
BEST = {"pre_ln": 1e-3, "keel": 4e-3, "post_ln": 2e-3}


def plan_of(folder, corpus, **rates):
    learning_rate = {"tune": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3], **rates}
    axes = {**AXES, "learning_rate": learning_rate, "seed": 3}
    return Plan(read_study(write_study(folder, corpus=corpus, axes=axes, claims="")).scale("cpu"))


def known(trial):
    placement, layers = trial.values["placement"], int(trial.values["num_layers"])
    best = BEST[placement] * layers / 2  # each size has its own best rate
    return {"status": "finished", "eval_loss": abs(trial.learning_rate - best)}


def rates_of(plan, **values):
    """The rates at which an arm's last seed is trained: it takes no part in the search."""
    trials = [trial for trial in plan.wanted(known) if {**trial.values, "seed": trial.seed} == {**values, "seed": 2}]
    return sorted(trial.learning_rate for trial in trials)


def test_an_arm_is_trained_at_another_ones_best_rate_with_all_seeds(tmp_path, corpus):
    plan = plan_of(tmp_path, corpus, also={"post_ln": "keel"})
    for layers in ("2", "3"):
        arms = {name: rates_of(plan, placement=name, num_layers=layers) for name in BEST}
        assert len(arms["pre_ln"]) == len(arms["keel"]) == 1
        assert arms["post_ln"] == sorted(
            {*rates_of(plan_of(tmp_path, corpus), placement="post_ln", num_layers=layers), *arms["keel"]}
        )
        assert len(arms["post_ln"]) == 2
    also = [trial for trial in plan.wanted(known) if trial.values["placement"] == "post_ln" and trial.seed == 2]
    assert sum(plan.is_tuned(trial) for trial in also) == 2, "the other rate is not the arm's own"


def test_without_the_other_arms_rate_nothing_more_is_asked_for(tmp_path, corpus):
    plan = plan_of(tmp_path, corpus, also={"post_ln": "keel"})
    wanted = plan.wanted(lambda trial: None if trial.values["placement"] == "keel" else known(trial))
    assert {trial.seed for trial in wanted if trial.values["placement"] == "keel"} == {0}
    post = [trial for trial in wanted if trial.values["placement"] == "post_ln" and trial.seed == 2]
    assert [plan.is_tuned(trial) for trial in post] == [True, True]


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ({"postln": "keel"}, "unknown label in .*also 'postln'"),
        ({"post_ln": "kel"}, "unknown label in .*also: post_ln 'kel'.*keel"),
        ({"post_ln": "2"}, "unknown label in .*also: post_ln '2'"),
        ({"post_ln": "post_ln"}, "unknown label in .*also: post_ln 'post_ln'"),
        (["post_ln"], r"also: \['post_ln'\] \(allowed: a mapping\)"),
    ],
)
def test_labels_that_are_not_two_of_one_axis_are_refused(tmp_path, corpus, also, message):
    with pytest.raises(UserError, match=message):
        plan_of(tmp_path, corpus, also=also)
