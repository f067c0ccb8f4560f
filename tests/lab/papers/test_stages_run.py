"""Studies with stages, and of other data, trained for real: images, masked text, from pretraining to a policy."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from lab.papers.study_files import chain, plan_of, run_here, store_of, write_study
from lab.posttraining.tiny import preferences, write_rows
from training.tiny_runs import SMALL
from transformers import ModernBertConfig

from lamina.lab.papers.engine.plan import StudyPlan
from lamina.lab.papers.engine.study_run import measured_table, results_table, run_plan
from lamina.lab.papers.judging import Trials, at_equal_kl, frontiers
from lamina.lab.papers.trials import store as stores
from lamina.lab.papers.trials.store import Store
from lamina.lab.papers.trials.trial import read_again

LENGTH = 32


@pytest.fixture
def data(tmp_path):
    rows = [{**row, "completion": row["chosen"]} for row in preferences(24)]
    return str(write_rows(tmp_path / "rows.jsonl", rows))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "UNTRAINED", ("diverged",))  # four steps teach nothing
    return store_of(tmp_path)


@pytest.fixture
def plan(tmp_path, corpus):
    def make(then, seeds=1, **changed):
        axes = {"placement": ["pre_ln", "keel"], "learning_rate": [3e-3], "seed": seeds}
        settings = {"sequence_length": LENGTH, **changed}
        file = write_study(tmp_path / "files", claims="", corpus=corpus, changed=settings, axes=axes, then=then)
        return plan_of(file)

    return make


def run(plan, store):
    outcome = run_plan(plan, store, workers=1, bar=False, execute=run_here)
    assert {result["status"] for result in outcome.values()} <= {"finished", "short", "stuck"}, outcome
    return results_table(plan, store)


def test_a_chain_of_four_jobs_gives_rewards_at_equal_kl(plan, store, data):
    pytest.importorskip("trl")
    common = {"data": data, "steps": 2, "batch_size": 4, "eval_examples": 3, "learning_rate": 1e-2}
    made = plan(chain(common, **common, max_answer=4, eval_steps=1))
    rows = run(made, store)
    policies = rows[rows["stage"] == "policy"].set_index("placement")
    assert policies["eval_reward"].notna().all()
    assert rows[rows["stage"] == "sft"]["eval_loss"].notna().all()
    table = measured_table(rows, store, "records/held_out")
    assert sorted(table["step"].unique()) == [0, 1, 2]
    assert set(table["key"]) == set(policies["key"])
    trials = Trials(
        rows, axes=[*made.scale.axis_names], measures=lambda key, name, at: store.table(key, f"{at}/{name}")
    ).where(stage="policy")
    rewards, reached = at_equal_kl({name: frontiers(trials, name) for name in ("pre_ln", "keel")})
    assert set(reached) == {0}
    assert all(isinstance(by_seed[0], float) for by_seed in rewards.values())
    folder = store.folder / policies.loc["keel", "key"]
    identity = json.loads((folder / "trial.json").read_text())
    assert identity["inputs"]["reward_model"] == rows[rows["stage"] == "judge"]["key"].item()
    before = {path: path.stat().st_mtime_ns for path in store.folder.glob("*/result.json")}
    run(made, Store(store.folder, store.records))
    assert before == {path: path.stat().st_mtime_ns for path in store.folder.glob("*/result.json")}


@pytest.mark.slow
def test_a_fine_tuned_model_is_scored_on_the_generated_tasks(plan, store):
    for library in ("trl", "lm_eval"):
        pytest.importorskip(library)
    then = {
        "sft": {"settings": {"data": "generated:answers:sorting", "steps": 2, "eval_examples": 2}},
        "tasks": {"job": "eval", "from": "sft", "settings": {"tasks": "generated", "limit": 4}},
    }
    rows = run(plan(then, sequence_length=256), store)
    scores = rows[rows["stage"] == "tasks"].set_index("placement")
    assert scores["score"].between(0, 100).all()
    columns = [name for name in scores if str(name).startswith("score_")]
    assert len(columns) == 7
    pd.testing.assert_series_equal(scores[columns].mean(axis=1), scores["score"], check_names=False)


@pytest.mark.slow
def test_an_interrupted_stage_goes_on_and_ends_as_an_uninterrupted_one(plan, store, data, tmp_path):
    pytest.importorskip("trl")
    made = plan({"sft": {"settings": {"data": data, "steps": 4, "batch_size": 4, "eval_examples": 3}}})
    whole = run(made, store)
    other = store_of(tmp_path, "others")

    def paused(trials, **given):
        later = {name: replace(t, settings=replace(t.settings, pause_step=2)) for name, t in trials.items()}
        run_here(later if all(t.job.__name__ == "sft" for t in trials.values()) else trials, **given)

    first = run_plan(made, other, workers=1, bar=False, execute=paused)
    assert sum(result["status"] == "interrupted" for result in first.values()) == 2
    again = run(made, Store(other.folder, other.records))
    pd.testing.assert_series_equal(whole.set_index("key")["eval_loss"], again.set_index("key")["eval_loss"])


PLAIN = {"init": "normal", "precision": "fp32", "compile": "off"}


@pytest.fixture
def trained(tmp_path):
    """Runs a study of two placements on other data, in this process; gives its rows, its store and its plan."""

    def call(corpus, settings):
        axes = {"placement": ["pre_ln", "mix_ln(alpha=0.5)"], "seed": 1}
        measures = {"end": ["hidden_states"]}
        file = write_study(
            tmp_path, claims="", corpus=corpus, settings={**PLAIN, **settings, "corpus": str(corpus)}, axes=axes,
            measures=measures,
        )  # fmt: skip
        plan = plan_of(file)
        store = store_of(tmp_path)
        run_plan(plan, store, workers=1, bar=False, execute=run_here)
        return results_table(plan, store), store, plan

    return call


def measured(rows, store):
    return all(store.table(key, "end/hidden_states") is not None for key in rows["key"])


def test_image_classifiers_are_trials(trained, tmp_path):
    pytest.importorskip("PIL")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 100, (40, 65))
    pixels[:, -1] = np.arange(40) % 2
    pixels[1::2, :32] += 150
    path = tmp_path / "squares.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in pixels) + "\n")
    sizes = {name: value for name, value in SMALL.items() if name not in ("sequence_length", "threads")}
    rows, store, plan = trained(
        path, {**sizes, "backbone": "vit-tiny", "image_size": 8, "patch_size": 4, "batch_size": 4}
    )
    assert rows["accuracy"].between(0, 1).all()
    assert measured(rows, store)
    path.write_text(path.read_text() + ",".join(["7"] * 64 + ["1"]) + "\n")
    read_again()
    keys = {trial.key for trial in plan.wanted(store.result)}
    assert keys == set(rows["key"])  # as it was planned
    again = {trial.key for trial in StudyPlan(plan.scale).wanted(store.result)}
    assert not again & keys  # other images: another trial


def test_masked_language_models_are_trials(trained, corpus, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ModernBertConfig(**sizes, vocab_size=300, pad_token_id=0, max_position_embeddings=64).save_pretrained(
        tmp_path / "bert"
    )
    own = {name: v for name, v in SMALL.items() if name not in ("num_layers", "hidden_size", "num_heads", "threads")}
    rows, store, _ = trained(corpus, {**own, "backbone": str(tmp_path / "bert"), "mask_ratio": 0.2})
    assert rows["accuracy"].between(0, 1).all()
    assert measured(rows, store)
