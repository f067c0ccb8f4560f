"""Which trials a plan asks for, from results that are made up."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from lab.papers.study_files import write_study

from lamina.core.yaml_files import read_mapping
from lamina.errors import UserError
from lamina.lab.papers.engine.describe_study import description, dry_run_text
from lamina.lab.papers.engine.plan import Best, StudyPlan, _rank, best_rate
from lamina.lab.papers.engine.settings import StudySettings
from lamina.lab.papers.engine.study_run import _refuse_edited, results_table, run_study, study_plan
from lamina.lab.papers.judging import Trials
from lamina.lab.papers.study_catalog import read_study

AXES = {"placement": ["pre_ln", "keel", "post_ln"], "num_layers": [2, 3]}
BEST = {"pre_ln": 1e-3, "keel": 4e-3, "post_ln": 2e-3}


def tuned_by(**rates):
    """A scale whose rates are tuned in this way."""
    return {"axes": {**AXES, "learning_rate": {"tune": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3], **rates}, "seed": 3}}


def plan_of(folder, corpus, **rates):
    return StudyPlan(read_study(write_study(folder, corpus=corpus, claims="", **tuned_by(**rates))).scale("cpu"))


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


def test_two_arms_that_are_one_computation_have_their_rows_each(tmp_path, corpus):
    arms = {"plain": {"placement": "pre_ln"}, "zero": {"placement": "mix_ln(alpha=0)"}, "keel": {"placement": "keel"}}
    for rates in ([1e-3], {"tune": [5e-4, 1e-3, 2e-3]}):
        axes = {"arm": arms, "learning_rate": rates, "seed": 2}
        plan = StudyPlan(read_study(write_study(tmp_path, corpus=corpus, axes=axes, claims="")).scale("cpu"))
        store = SimpleNamespace(result=lambda trial: {"status": "finished", "eval_loss": trial.learning_rate})
        rows = results_table(plan, store)
        assert rows.groupby("arm")["seed"].nunique().to_dict() == {"plain": 2, "zero": 2, "keel": 2}
        assert rows[rows["arm"] == "plain"]["key"].tolist() == rows[rows["arm"] == "zero"]["key"].tolist()


def test_a_rate_at_which_nothing_ended_is_not_widened(tmp_path, corpus):
    plan = plan_of(tmp_path, corpus)
    rates = {trial.learning_rate for trial in plan.wanted(lambda trial: {"status": "failed"})}
    assert rates == {5e-4, 1e-3, 2e-3, 4e-3, 8e-3}


def test_rates_are_ranked_by_the_trials_that_ended_the_share_lost_first():
    """A trial that failed says nothing; of rates that each lost a seed, the other seeds decide."""

    def results(*losses):
        known = {None: "diverged", "failed": "failed"}
        return [{"status": known.get(x, "finished"), "eval_loss": None if x in known else x} for x in losses]

    ranks = [_rank(results(*losses)) for losses in ((2.0, "failed"), (2.0, 2.2), (2.4, None), (3.0, None), ("failed",))]
    assert ranks[0] == (0.0, 2.0)
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5


def sweep(**losses):
    """Results of a sweep: per rate (its name in a millionth), the losses of its seeds; None for a stuck one."""

    def trial(loss):
        return {"status": "stuck" if loss is None else "finished", "eval_loss": loss or 3.2}

    return {int(rate[1:]) * 1e-6: [*map(trial, seeds)] for rate, seeds in losses.items()}


@pytest.mark.parametrize(
    ("losses", "best", "chosen"),
    [
        # the best's standard error is 0.2 / sqrt(3) = 0.115
        ({"_500": [2.9] * 3, "_1000": [2.58] * 3, "_2000": [2.3, 2.5, 2.7]}, 2e-3, 1e-3),
        ({"_500": [2.9] * 3, "_1000": [2.63] * 3, "_2000": [2.3, 2.5, 2.7]}, 2e-3, 2e-3),
        # a rate that loses more seeds is out, however good the others are; a higher one is never taken
        ({"_500": [2.4, 2.4, None], "_1000": [2.58] * 3, "_2000": [2.3, 2.5, 2.7]}, 2e-3, 1e-3),
        ({"_1000": [2.3, 2.5, 2.7], "_2000": [2.55] * 3}, 1e-3, 1e-3),
        # where each rate loses a seed, the stuck one's loss is in no mean and no error
        ({"_1000": [2.9, 2.9, None], "_2000": [2.4, 2.5, None]}, 2e-3, 2e-3),
        # one seed that learned has no standard error
        ({"_1000": [2.5, None], "_2000": [2.4, None]}, 2e-3, 2e-3),
        ({"_1000": [None, None], "_2000": [None, None]}, 1e-3, 1e-3),
    ],
)
def test_the_lowest_rate_within_one_standard_error_is_chosen_among_those_that_lose_fewest(losses, best, chosen):
    found = best_rate(sweep(**losses), "one-se")
    assert (found.lowest, found.chosen) == (pytest.approx(best), pytest.approx(chosen))
    assert best_rate(sweep(_1000=[2.58] * 3, _2000=[2.3, 2.5, 2.7]), "best") == Best(lowest=2e-3, chosen=2e-3)


def test_tuning_seeds_of_their_own_choose_the_rate_and_no_claim_sees_them(tmp_path, corpus):
    plan = plan_of(tmp_path, corpus, seeds=[100, 101, 102])

    def misleading(trial):  # the study's own seeds would choose another rate
        return known(trial) if trial.seed >= 100 else {"status": "finished", "eval_loss": -trial.learning_rate}

    rows = results_table(plan, SimpleNamespace(result=misleading))
    assert set(rows["seed"]) == {0, 1, 2, 100, 101, 102}
    tuned = Trials(rows, axes=list(plan.scale.axis_names)).tuned()
    assert tuned.seeds == [0, 1, 2]
    assert {
        arm["placement"]: tuned.where(**arm).values("learning_rate") for arm in tuned.where(num_layers=2).arms()
    } == {name: [rate] for name, rate in BEST.items()}
    assert not tuned.at_edge
    dry = [name for trials in plan.dry().values() for name in trials]
    assert {"2, pre_ln, lr 0.008, seed 100", "2, pre_ln, lr 0.0005, seed 2"} <= {*dry}
    assert "2, pre_ln, lr 0.008, seed 2" not in dry


def test_a_sweep_with_fixed_edges_stays_and_says_that_its_best_rate_is_at_one(tmp_path, corpus):
    for widen, tried, at_edge in ((0, 2, True), (2, 4, False)):
        plan = plan_of(tmp_path, corpus, tune=[1e-3, 2e-3], widen=widen, seeds=[7])
        rows = results_table(plan, SimpleNamespace(result=known))
        keel = rows[(rows["placement"] == "keel") & (rows["num_layers"] == 2)]
        assert keel["learning_rate"].nunique() == tried
        trials = Trials(rows, axes=list(plan.scale.axis_names)).tuned().where(num_layers=2)
        assert trials.arm("keel").at_edge is at_edge


def test_the_tuning_seeds_trials_can_be_shorter(tmp_path, corpus):
    plan = plan_of(tmp_path, corpus, seeds=[100, 101], settings={"steps": 7})
    wanted = plan.wanted(known)
    assert {(trial.seed >= 100, trial.settings.steps == 7) for trial in wanted} == {(True, True), (False, False)}
    assert {plan.arms[number].values["placement"]: rate for number, rate in plan.chosen.items()} == BEST
    settings = StudySettings(study=str(plan.scale.folder / "mine.yaml"))
    steps = {name.endswith(", sweep"): {one.steps for one in arm.values()} for name, arm in plan.dry().items()}
    assert steps == {True: {7}, False: {plan.scale.settings["steps"]}}
    assert "tuned with 2 seeds that the claims do not use (100, 101) at steps 7" in description(settings)


def test_seeds_of_the_command_line_that_tune_are_refused(tmp_path, corpus):
    axes = {**AXES, "learning_rate": {"tune": [1e-3, 2e-3], "seeds": [100, 101]}, "seed": 3}
    file = write_study(tmp_path, corpus=corpus, axes=axes, claims="")
    with pytest.raises(UserError, match="seeds: seed 101 tunes the learning rates"):
        study_plan(read_study(file), StudySettings(study=str(file), seeds="7,101"))
    plan = study_plan(read_study(file), StudySettings(study=str(file), seeds="7"))
    assert {trial.seed for trial in plan.wanted(known)} == {7, 100, 101}


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"seed": 7}, "--seeds"),
        ({"learning_rate": 1.0}, "a copy of the study with other learning rates"),
        ({"placement": "post_ln"}, "a copy of the study with another axis"),
    ],
)
def test_a_change_of_what_the_trials_say_themselves_is_refused(tmp_path, corpus, changes, allowed):
    file = write_study(tmp_path, corpus=corpus, claims="")
    with pytest.raises(UserError, match=rf"set.{next(iter(changes))}: this setting has no effect.*Use {allowed}\."):
        study_plan(read_study(file), StudySettings(study=str(file), set=changes))
    study_plan(read_study(file), StudySettings(study=str(file), set={"weight_decay": 0.2}))


def test_a_study_is_not_recorded_with_changed_seeds(tmp_path, corpus):
    file = write_study(tmp_path, corpus=corpus, claims="")
    for changed in ({"seeds": "5"}, {"set": {"steps": 2}}, {"corpus": "b.txt"}):
        with pytest.raises(UserError, match=r"record: .*Give your own folder with --records"):
            run_study({"study": str(file), "output": str(tmp_path / "out"), **changed}, record=True)
    assert not (tmp_path / "out").exists()


def test_an_emptied_store_is_no_edited_study_and_an_edited_one_is(tmp_path, corpus):
    file = write_study(tmp_path, corpus=corpus, axes={**AXES, "learning_rate": {"tune": [5e-4, 1e-3, 2e-3]}, "seed": 3})
    plan, definition = StudyPlan(read_study(file).scale("cpu")), read_mapping(file)
    stored = {"trials": [trial.key for trial in plan.wanted(known)], "definition": definition}
    full, empty = (SimpleNamespace(result=found, outcome=lambda _: None) for found in (known, lambda _: None))
    for store in (full, empty):
        _refuse_edited(stored, definition, plan, store)
    edited = read_mapping(file)
    edited["scales"]["cpu"]["settings"]["steps"] = 9
    file.write_text(yaml.safe_dump(edited))
    for store in (full, empty):
        with pytest.raises(UserError, match="the study has changed since its last run here"):
            _refuse_edited(stored, edited, StudyPlan(read_study(file).scale("cpu")), store)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"skip": 5}, r"skip: 5 does not fit. Give a list of mappings"),
        ({"skip": {"placement": "keel"}}, "Give a list of mappings"),
        ({"skip": ["keel"]}, "Give a list of mappings"),
        ({"skip": [{"placement": "kel"}]}, "did you mean 'keel'"),
        ({"skip": [{"depth": 2}]}, "'depth' is not an axis"),
        ({"figures": 5}, "figures: 5"),
        ({"figures": {"kind": "sweep"}}, "Give a list of mappings"),
        *(({"looks": n}, "cpu: looks: .* Give a whole number of at least 1") for n in (0, True, 1.5, "twice")),
        ({"job": "train"}, r"unknown job 'train'"),
        ({"job": "sft"}, r"mine.yaml: cpu: unknown job 'sft' \(allowed: init, max-lr, pretrain\)"),
        ({"base": "smal"}, r"unknown base .*did you mean 'small'"),
        ({"axs": {}}, r"unknown field .*'axs'; did you mean 'axes'"),
        # its axes
        ({"axes": {"placment": ["keel"]}}, r"unknown axis .*'placment'; did you mean 'placement'"),
        ({"axes": {"placement": ["keel"], "seed": [[1], [2]]}}, r"seed: \[1\]"),
        ({"axes": {"placement": ["keel"], "seed": [0, 0]}}, "a list of different seeds"),
        *(
            ({"axes": {"placement": ["keel"], "seed": n}}, "seed: .* Give the number of seeds, at most 1000, or a list")
            for n in (30_000_000, 0, "5", True)
        ),
        *(
            ({"axes": {n: {"1x": {}, "2x": {"steps": 9}}}}, f"{n}: Lamina's tables already have this column")
            for n in ("key", "tokens", "layer")
        ),
        ({"axes": {"arm": {"a": {}, "b": {"seed": 7}}}}, "arm: b: seed: the study or its engine sets this value"),
        ({"axes": {"arm": {"a": {}, "b": {"learning_rate": 0.5}}, "learning_rate": [1e-3]}}, "arm: b: learning_rate"),
        # the way to tune
        ({"axes": {"learning_rate": {"tune": []}}}, r"learning_rate: \[\]"),
        (tuned_by(also={"postln": "keel"}), "also: unknown label 'postln'"),
        (tuned_by(also={"post_ln": "kel"}), "also: post_ln: unknown label 'kel'.*keel"),
        (tuned_by(also={"post_ln": "2"}), "also: post_ln: unknown label '2'"),
        (tuned_by(also={"post_ln": "post_ln"}), "also: post_ln: unknown label 'post_ln'"),
        (tuned_by(also=["post_ln"]), r"also: \['post_ln'\] does not fit. Give a mapping"),
        (tuned_by(seeds=[100, 2]), r"seed 2 tunes the learning rates. Give seeds outside \[100, 2\]"),
        (tuned_by(seeds=[100, 100]), "a list of different seeds"),
        (tuned_by(seeds=4), "at most 3, the number of seeds"),
        (tuned_by(seeds=0), "learning_rate: seeds: 0 .*at least 1"),
        (tuned_by(seeds=[100], rule="one-se"), "'one-se' needs at least two tuning seeds"),
        (tuned_by(rule="one_se"), "unknown rule 'one_se'.*one-se"),
        (tuned_by(widen=-1), "widen: -1 .*at least 0"),
        (tuned_by(settings={"steps": 7}), "learning_rate: settings: .*with a list of tuning seeds"),
        (tuned_by(seeds=[100], settings={"step": 7}), "learning_rate: settings: unknown setting 'step'.*steps"),
        (tuned_by(seeds=[100], settings={"seed": 7}), "learning_rate: settings: seed: the study or its engine"),
        # what it measures
        ({"measures": {"end": ["gain"]}}, "mine.yaml: cpu: measures: end: unknown probe 'gain'; did you mean 'gains'"),
        ({"measures": {"init": ["angular_distance(token=all)"]}}, "option .*'token'; did you mean 'tokens'"),
        ({"measures": {"end": ["all"]}}, "measures: end: unknown probe 'all'"),
        ({"measures": {"records": ["metric"]}}, "unknown record .*'metric'; did you mean 'metrics'"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_be_is_refused_by_name(tmp_path, corpus, scale, message):
    file = write_study(tmp_path, corpus=corpus, **scale)
    with pytest.raises(UserError, match=message):
        study_plan(read_study(file), StudySettings(study=str(file)))


@pytest.mark.parametrize(
    ("name", "value"), [("output", "x"), ("threads", 2), ("push_to_hub", "me/x"), ("pause_step", 2), ("seed", 5)]
)
def test_a_setting_that_the_engine_decides_is_refused_wherever_it_is_said(tmp_path, corpus, name, value):
    with pytest.raises(UserError, match=rf"cpu: settings: {name}: the study or its engine sets this value. Use "):
        read_study(write_study(tmp_path, corpus=corpus, changed={name: value}))
    axes = {"arm": {"a": {}, "b": {name: value}}}
    with pytest.raises(UserError, match=f"cpu: arm: b: {name}: the study or its engine sets this value"):
        read_study(write_study(tmp_path, corpus=corpus, axes=axes))
    file = write_study(tmp_path, corpus=corpus)
    with pytest.raises(UserError, match=f"set.{name}: this setting has no effect"):
        study_plan(read_study(file), StudySettings(study=str(file), set={name: value}))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"job": "sft", "settings": {"data": "nope.jsonl"}}, "then: later: data: 'nope.jsonl': no such file"),
        ({"job": "sft", "settings": {"data": "generated:answers", "eval_data": "./no.json"}}, "eval_data: .*no such"),
        (
            {"job": "rlhf", "settings": {"data": "generated:answers", "reward_function": "f.py:score"}},
            "'f.py': no such",
        ),
    ],
)
def test_data_of_a_stage_that_is_missing_is_found_before_anything_is_trained(tmp_path, corpus, stage, message):
    stage["settings"]["steps"] = 2
    file = write_study(tmp_path, corpus=corpus, then={"later": stage})
    with pytest.raises(UserError, match=message):
        study_plan(read_study(file), StudySettings(study=str(file)))


def test_a_dry_run_lists_arms_by_their_labels_and_says_the_minutes_here(tmp_path, corpus):
    slow, fast = ({"placement": "pre_ln", "learning_rate": rate} for rate in (1e-3, 0.1))
    arms = {"slow": slow, "fast": fast}
    file = write_study(tmp_path, corpus=corpus, axes={"arm": arms, "num_layers": [2, 3], "seed": 2}, claims="")
    text = dry_run_text(StudySettings(study=str(file), workers=2))
    for arm in ("slow, num_layers=2", "fast, num_layers=3"):
        (line,) = (line for line in text.splitlines() if line.startswith(arm))
        assert line.split()[2] == "2", "trials of the arm"
    said = r"About [\d,.]+(e-\d+)? minutes on this machine with 2 workers\. Lamina timed two steps of fast, 2, seed 0"
    assert re.search(said, text)


def test_a_dry_run_names_the_stages_and_counts_their_trials(tmp_path, corpus):
    preferences = {"data": "generated:preferences", "steps": 2}
    then = {
        "sft": {"settings": {"data": "generated:answers", "steps": 5, "batch_size": 4}},
        "judge": {"job": "reward", "from": "sft", "of": {"placement": "keel"}, "settings": preferences},
        "tasks": {"job": "eval", "from": "sft", "skip": [{"placement": "keel"}], "settings": {"tasks": "generated"}},
    }
    file = write_study(tmp_path, corpus=corpus, then=then, claims="")
    settings = StudySettings(study=str(file), workers=2)
    plan = study_plan(read_study(file), settings)
    wanted = Counter(trial.values["stage"] for trial in plan.wanted(lambda trial: None))
    assert plan.stages() == {"sft": 4, "judge": 2, "tasks": 2} == {name: wanted[name] for name in then}
    assert "then sft (sft from pretrain): 4 trials, each 5 steps of 4 rows" in dry_run_text(settings)


def test_a_store_that_is_a_file_leaves_nothing_in_the_output(tmp_path, corpus):
    (tmp_path / "file").write_text("mine")
    file = write_study(tmp_path / "files", corpus=corpus, claims="")
    with pytest.raises(UserError, match=r"store: .* is a file"):
        run_study({"study": str(file), "output": str(tmp_path / "out"), "store": str(tmp_path / "file")})
    assert not (tmp_path / "out").exists()
