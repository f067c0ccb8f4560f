"""Image classifiers and masked language models as trials of a study: trained, measured, and judged."""

import numpy as np
import pytest
from studies.study_files import run_here, write_study
from training.tiny_runs import SMALL
from transformers import ModernBertConfig

from lamina.papers.engine.driver import run_plan
from lamina.papers.engine.plan import StudyPlan
from lamina.papers.engine.study_run import results_table
from lamina.papers.study_catalog import read_study
from lamina.papers.trials.store import Records, Store
from lamina.papers.trials.trial import read_again

PLAIN = {"init": "normal", "precision": "fp32", "compile": "off"}


@pytest.fixture
def run(tmp_path):
    """Runs a study of two placements on other data, in this process; gives its rows, its store and its plan."""

    def call(corpus, settings):
        axes = {"placement": ["pre_ln", "mix_ln(alpha=0.5)"], "seed": 1}
        measures = {"end": ["hidden_states"]}
        file = write_study(
            tmp_path, claims="", corpus=corpus, settings={**PLAIN, **settings, "corpus": str(corpus)}, axes=axes,
            measures=measures,
        )  # fmt: skip
        plan = StudyPlan(read_study(file).scale("cpu"))
        store = Store(tmp_path / "trials", Records(tmp_path / "records"))
        run_plan(plan, store, workers=1, bar=False, execute=run_here)
        return results_table(plan, store), store, plan

    return call


def measured(rows, store):
    return all(store.table(key, "end/hidden_states") is not None for key in rows["key"])


def test_image_classifiers_are_trials(run, tmp_path):
    pytest.importorskip("PIL")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 100, (40, 65))
    pixels[:, -1] = np.arange(40) % 2
    pixels[1::2, :32] += 150
    path = tmp_path / "squares.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in pixels) + "\n")
    sizes = {name: value for name, value in SMALL.items() if name not in ("sequence_length", "threads")}
    rows, store, plan = run(path, {**sizes, "backbone": "vit-tiny", "image_size": 8, "patch_size": 4, "batch_size": 4})
    assert rows["accuracy"].between(0, 1).all()
    assert measured(rows, store)
    path.write_text(path.read_text() + ",".join(["7"] * 64 + ["1"]) + "\n")
    read_again()
    keys = {trial.key for trial in plan.wanted(store.result)}
    assert keys == set(rows["key"])  # as it was planned
    again = {trial.key for trial in StudyPlan(plan.scale).wanted(store.result)}
    assert not again & keys  # other images: another trial


def test_masked_language_models_are_trials(run, corpus, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ModernBertConfig(**sizes, vocab_size=300, pad_token_id=0, max_position_embeddings=64).save_pretrained(
        tmp_path / "bert"
    )
    own = {
        name: value
        for name, value in SMALL.items()
        if name not in ("num_layers", "hidden_size", "num_heads", "threads")
    }
    rows, store, _ = run(corpus, {**own, "backbone": str(tmp_path / "bert"), "mask_ratio": 0.2})
    assert rows["accuracy"].between(0, 1).all()
    assert measured(rows, store)
