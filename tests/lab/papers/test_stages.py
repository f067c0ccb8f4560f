"""Stages: trials that start from the models of other trials, under keys that say which."""

import json

import pytest
from lab.papers.study_files import chain, plan_of, store_of, write_study

from lamina.errors import UserError
from lamina.jobs.columns import RESULT_COLUMNS
from lamina.lab.papers.engine.study_run import _refuse_edited, results_table, run_plan
from lamina.lab.papers.trials.jobs import TRIAL_JOBS, columns_of
from lamina.lab.papers.trials.measures import measure, missing
from lamina.lab.papers.trials.store import Records, Store, write_results

ROWS = [{"prompt": f"{i}?", "completion": f" {i}"} for i in range(12)]
SHORT = {"steps": 2, "batch_size": 2, "eval_fraction": 0.25}

NAMES = {job.run: name for name, job in TRIAL_JOBS.items()}


@pytest.fixture
def stages(tmp_path):
    """Three stages: fine-tuning, one reward model for all arms, a policy."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({**row, "chosen": " a", "rejected": " b"}) + "\n" for row in ROWS))
    common = {**SHORT, "data": str(data)}
    return chain(common, **common, max_answer=4)


@pytest.fixture
def plan(tmp_path, corpus):
    def make(then, changed=(), **scale):
        axes = {"placement": ["pre_ln", "keel"], "learning_rate": [3e-3], "seed": 2}
        given = {"axes": axes, **scale}
        file = write_study(tmp_path / "files", claims="", corpus=corpus, changed=changed, then=then, **given)
        return plan_of(file)

    return make


@pytest.fixture
def store(tmp_path):
    return store_of(tmp_path)


def by_place(plan, store):
    return {(t.values["stage"], t.values["placement"], t.seed): t for t in plan.wanted(store.result)}


def finish(task, **result):
    """What a trial's process leaves; a model unless it diverged or failed."""
    folder = task.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trial.json").write_text(json.dumps(task.identity))
    result = {"status": "finished", "eval_loss": 1.0, **result}
    if result["status"] == "finished":
        (folder / "model").mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    return result


def executor(ran, **results):
    """Runs nothing; notes what it was asked for, in rounds, and leaves ``results`` by the job's name."""

    def execute(trials, *, workers, ended, tick):
        ran.append(sorted({NAMES[task.job] for task in trials.values()}))
        for name, task in trials.items():
            ended(name, finish(task, **results.get(NAMES[task.job], {})))

    return execute


def test_each_arm_has_a_chain_and_all_arms_one_judge(plan, store, stages):
    found = by_place(plan(stages), store)
    assert {stage for stage, _, _ in found} == {"pretrain", "sft", "judge", "policy"}
    assert len(found) == 4 + 4 + 2 + 4
    assert ("judge", "keel", 0) not in found
    policy = found["policy", "keel", 1]
    assert policy.inputs["from_model"] is found["sft", "keel", 1]
    assert policy.inputs["reward_model"] is found["judge", "pre_ln", 1]
    assert policy.inputs["reward_model"].inputs["from_model"].placement == "pre_ln"
    assert (policy.placement, policy.seed, policy.learning_rate) == ("keel", 1, 3e-3)
    assert policy.settings.seed == 1  # paired: the same order of the prompts for every arm
    assert policy.measures == ("records/held_out",)
    assert len({trial.key for trial in found.values()}) == len(found)


def test_the_command_lets_the_trials_that_score_tasks_run_code_and_no_others(plan, store, stages):
    stages["sft"]["settings"] = {**stages["sft"]["settings"], "eval_tasks": "generated"}
    stages["scores"] = {"job": "eval", "from": "sft", "settings": {"tasks": "generated"}}
    free = Store(store.folder, store.records, run_code=True)
    found = by_place(plan(stages), store)
    allowed = {place[0] for place, trial in found.items() if free.task(trial).settings.to_dict().get("run_code")}
    assert allowed == {"sft", "scores"}
    assert not any(store.task(trial).settings.to_dict().get("run_code") for trial in found.values())
    stages["scores"]["settings"]["run_code"] = True
    with pytest.raises(UserError, match=r"scores: unknown setting 'run_code'"):
        plan(stages)


def test_a_key_says_what_a_trial_starts_from_and_reads_and_not_where_it_is(plan, store, stages, tmp_path):
    before = by_place(plan(stages), store)
    keys = {place: trial.key for place, trial in before.items()}
    assert keys == {place: t.key for place, t in by_place(plan(stages), store_of(tmp_path, "b")).items()}
    longer = {place: t.key for place, t in by_place(plan(stages, changed={"steps": 5}), store).items()}
    assert not set(longer.values()) & set(keys.values())  # another first trial: all the chain is another one
    stages["policy"]["settings"]["beta"] = 0.3
    other = {place: t.key for place, t in by_place(plan(stages), store).items()}
    assert {stage for (stage, _, _), key in other.items() if key not in keys.values()} == {"policy"}
    data = tmp_path / "rows.jsonl"
    moved = tmp_path / "moved.jsonl"
    moved.write_text(data.read_text())
    for stage in stages.values():
        stage["settings"]["data"] = str(moved)
    assert {p: t.key for p, t in by_place(plan(stages), store).items()} == other  # the same rows in another file
    moved.write_text(data.read_text().replace(" a", " c"))
    changed = {p: t.key for p, t in by_place(plan(stages), store).items()}
    assert {p[0] for p, key in changed.items() if key != other[p]} == {"sft", "judge", "policy"}


def test_stages_change_no_key_of_the_first_trials(plan, store, stages):
    staged = {t.key for t in plan(stages).wanted(store.result) if t.root is None}
    assert staged == {t.key for t in plan({}).wanted(store.result)}


def test_a_stage_may_be_left_out_for_some_arms_and_so_are_those_after_it(plan, store, stages):
    stages["sft"]["skip"] = [{"placement": "keel"}]
    assert {place[:2] for place in by_place(plan(stages), store)} == {
        ("pretrain", "pre_ln"), ("pretrain", "keel"), ("sft", "pre_ln"), ("judge", "pre_ln"), ("policy", "pre_ln"),
    }  # fmt: skip


def test_trials_wait_for_the_models_that_they_start_from(plan, store, stages):
    ran = []
    outcome = run_plan(plan(stages), store, workers=1, bar=False, execute=executor(ran))
    assert ran == [["pretrain"], ["sft"], ["reward"], ["rlhf"]]
    assert {result["status"] for result in outcome.values()} == {"finished"}
    task = store.task(by_place(plan(stages), store)["policy", "keel", 0])
    assert task.settings.reward_model == str(store.folder / by_place(plan(stages), store)["judge", "pre_ln", 0].key)


def test_stages_start_from_a_trial_of_which_only_a_measurement_failed(plan, store, stages):
    """Otherwise every stage after it would be called failed, though the model is there."""
    ran = []
    measured = plan(stages, measures={"end": ["hidden_states"]})
    outcome = run_plan(measured, store, workers=1, bar=False, execute=executor(ran))
    assert ran == [["pretrain"], ["sft"], ["reward"], ["rlhf"]]
    assert {result["status"] for result in outcome.values()} == {"finished"}


def test_records_of_metrics_that_a_job_does_not_write_are_noted(tmp_path):
    (tmp_path / "trial").mkdir()
    measure(tmp_path / "trial", None, ["records/metrics"])
    assert missing(tmp_path / "trial", ["records/metrics"]) == []


def test_one_failed_trial_of_a_sweep_hides_no_other(plan, store):
    """And the recorded failure is no result: the trial may run again, here or elsewhere."""
    tuned = plan({}, axes={"placement": ["keel"], "learning_rate": {"tune": [1e-3, 3e-3, 1e-2], "seeds": 1}, "seed": 3})

    def execute(trials, *, workers, ended, tick):
        for name, task in trials.items():
            rate = task.settings.learning_rate
            if rate == 1e-3:
                ended(name, finish(task, status="failed", reason="out of memory"))
            else:
                ended(name, finish(task, eval_loss=rate))

    outcome = run_plan(tuned, store, workers=1, bar=False, execute=execute)
    failed = {key: result for key, result in outcome.items() if result["status"] == "failed"}
    rows = results_table(tuned, store, failed)
    assert len(rows) == 5
    assert set(rows[rows["tuned"]]["seed"]) == {0, 1, 2}
    _refuse_edited({"trials": sorted(outcome)}, {}, tuned, store)
    write_results(store.records.folder / "mine-cpu", rows)
    assert set(Records(store.records.folder).rows) == set(outcome) - set(failed)


def test_what_does_not_train_is_not_tuned_and_its_rows_say_so(plan, store, stages):
    made, ran = plan(stages), []
    finish(store.task(by_place(made, store)["pretrain", "keel", 0]), status="diverged", reason="loss 9")
    run_plan(made, store, workers=1, bar=False, execute=executor(ran))
    rows = results_table(made, store)
    lost = rows[(rows["placement"] == "keel") & (rows["seed"] == 0)].set_index("stage")
    assert dict(lost["status"]) == dict.fromkeys(("pretrain", "sft", "policy"), "diverged")
    assert "starts from a model whose status is diverged" in lost.loc["policy", "reason"]
    assert (rows["status"] == "finished").sum() == len(rows) - 3


def test_a_failed_trial_fails_what_waits_for_it_and_is_not_tried_for_ever(plan, store, stages):
    ran = []
    outcome = run_plan(plan(stages), store, workers=1, bar=False, execute=executor(ran, sft={"status": "failed"}))
    assert ran == [["pretrain"], ["sft"]]
    assert sum(result["status"] == "failed" for result in outcome.values()) == 4 + 2 + 4


def test_recorded_trials_run_again_only_where_a_model_is_needed(plan, store, stages, tmp_path):
    made = plan(stages)
    run_plan(made, store, workers=1, bar=False, execute=executor([]))
    stages["policy"].pop("records")
    write_results(tmp_path / "records" / "mine-cpu", results_table(made, store))
    again = store_of(tmp_path, "elsewhere")
    ran = []
    run_plan(plan(stages), again, workers=1, bar=False, execute=executor(ran))
    assert ran == []
    stages["policy"]["settings"]["beta"] = 0.3
    changed = plan(stages)
    run_plan(changed, again, workers=1, bar=False, execute=executor(ran, pretrain={"eval_loss": 2.0}))
    assert ran == [["pretrain"], ["sft"], ["reward"], ["rlhf"]]
    losses = results_table(changed, again).set_index("stage")["eval_loss"]
    assert set(losses["pretrain"]) == {2.0}, "of the models that the stages started from, not of the recorded ones"


def test_tuned_rates_are_known_before_a_chain_begins(plan, store, stages):
    rates = {"tune": [1e-3, 2e-3, 4e-3]}
    tuned = plan(stages, axes={"placement": ["pre_ln", "keel"], "learning_rate": rates, "seed": 2})
    assert {trial.values["stage"] for trial in tuned.wanted(store.result)} == {"pretrain"}

    def execute(trials, *, workers, ended, tick):
        for name, task in trials.items():
            rate = task.settings.learning_rate
            ended(name, finish(task, eval_loss=abs(rate - 2e-3) if NAMES[task.job] == "pretrain" else 1.0))

    run_plan(tuned, store, workers=1, bar=False, execute=execute)
    rows = results_table(tuned, store)
    assert set(rows[rows["stage"] != "pretrain"]["learning_rate"]) == {2e-3}
    assert rows[rows["stage"] != "pretrain"]["tuned"].all()
    assert rows["tuned"].sum() == len(rows) - 4  # the sweep's other rates


def test_an_evaluation_is_a_row_with_a_column_per_task():
    table = {"headings": ["Book", "Blank", "Average"], "shares": [True] * 3, "lines": [{"mean": [30.0, 40.0, 35.0]}]}
    row = columns_of({"status": "finished", "command": "lamina eval /somewhere", "table": table, "seconds": 1.0})
    assert row == {"status": "finished", "seconds": 1.0, "score": 35.0, "score_book": 30.0, "score_blank": 40.0}
    single = {"headings": ["Wiki. ppl", "PIQA"], "shares": [False, True], "lines": [{"mean": [12.0, 60.0]}]}
    assert columns_of({"status": "finished", "table": single}) == {
        "status": "finished", "score": 60.0, "score_wiki_ppl": 12.0, "score_piqa": 60.0,
    }  # fmt: skip
    assert columns_of(row) == row
    assert not {"score"} & {column.name for column in RESULT_COLUMNS}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"job": "stf"}, "unknown job .*'stf'.*'sft'"),
        ({"settings": {"beta": 1}}, "unknown setting .*'beta'"),
        ({"settings": {"seed": 1}}, "unknown setting .*'seed'"),
        ({"from": "policy"}, "unknown stage .*'policy'.*allowed: pretrain"),
        ({"of": {"placement": "post_ln"}}, "of: placement: 'post_ln' is not a value of this axis"),
        ({"records": ["heldout"]}, "unknown record .*'heldout'"),
        ({"form": "sft"}, "unknown field .*'form'.*'from'"),
        ({"settings": {"epochs": -1}}, "epochs: -1"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_name(plan, stage, message):
    with pytest.raises(UserError, match=message):
        plan({"sft": stage})
