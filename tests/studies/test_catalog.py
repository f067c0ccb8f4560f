"""Every study of the catalog, without training: its trials, its measures, and its claims on results made up here."""

import re
from functools import cache, lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lamina.core import specs
from lamina.core.backbone_presets import PRESETS
from lamina.errors import UserError
from lamina.evaluation.generated import NAMES
from lamina.jobs import columns
from lamina.papers.engine.plan import arms, matches
from lamina.papers.judging import Trials, judge, load_claims
from lamina.papers.study_catalog import BASES, SCALES, catalog_folder, read_study
from lamina.placements import resolve
from lamina.probes.engine.registry import listed

FILES = sorted(path for path in catalog_folder().glob("*.yaml") if path.name != BASES)
WITHOUT_CLAIMS = {"calibration"}
SCORES = ("score", "eval_reward", *(f"score_{name.removeprefix('lamina_')}" for name in NAMES))
NUMBERS = {*columns.NUMBERS, "max_learning_rate"} - {"learning_rate", "seed"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def study(request):
    return read(request.param)


@cache
def read(path):
    return read_study(path)


def scales(study):
    return [scale for scale in study.scales.values() if not scale.needs]


@lru_cache(maxsize=4096)
def resolved(placement, depth):
    return resolve(placement, depth)


def test_a_study_has_all_scales_and_says_why_it_cannot_use_one(study):
    assert set(study.scales) == set(SCALES)
    for scale in study.scales.values():
        if scale.name != "paper" and scale.needs:
            assert re.search(r"\b(cpu|gpu|paper)\b", scale.needs), "says which scale can decide it"


def test_its_trials_have_settings_and_placements_that_exist(study, monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")
    for scale in scales(study):
        for stage in scale.stages:
            assert stage.trial(seed=0).to_dict()["seed"] == 0
        sweep = scale.rates or (scale.tuning.rates if scale.tuning else (None,))
        for arm in arms(scale):
            settings = arm.trial(scale, sweep[0], scale.seeds[0])
            assert settings.init != "recommended", "one initializer for all arms"
            preset = PRESETS[settings.backbone]
            depth = settings.num_layers or preset.fields["num_hidden_layers"]
            assert resolved(str(settings.placement), min(depth, 64)).layers


def test_its_seeds_are_enough_to_judge_a_difference(study):
    cpu = study.scales["cpu"]
    if study.name in WITHOUT_CLAIMS or cpu.job != "pretrain" or cpu.needs:
        return
    if re.search(r"\b(lower|higher|ordered|equivalent|no_worse)\(", study.claims_file.read_text()):
        assert len(cpu.seeds) >= 5


def test_its_measures_are_probes(study):
    for scale in study.scales.values():
        for time in ("init", "end"):
            for measure in scale.measures.get(time, ()):
                name, options = specs.parse(measure, "probe")
                assert name in listed()
                assert set(options) <= set(listed()[name].options)


def made_up(study, scale):
    """A result for each trial that the scale may ask for, all of them finished."""
    random = np.random.default_rng(0)
    rates = scale.rates or (scale.tuning.rates if scale.tuning else (None,))
    rows = []
    for arm in arms(scale):
        values = {axis: scale.axes[axis][label].get(axis, label) for axis, label in arm.values.items()}
        for rate in rates:
            stages = [scale.job, *(stage.name for stage in scale.stages if not excluded(stage, arm))]
            for seed, stage in product(scale.seeds, stages):
                row = {
                    "placement": arm.settings.get("placement", "pre_ln"),
                    **values,
                    "seed": seed,
                    "status": "finished",
                }
                row |= {"learning_rate": rate or arm.settings.get("learning_rate", 3e-3)}
                row |= {"stage": stage} if scale.stages else {}
                row |= {"tuned": scale.tuning is None or rate == rates[0], "key": str(len(rows))}
                rows.append({column: 1.0 + random.random() for column in (*NUMBERS, *SCORES)} | row)
    return Trials(pd.DataFrame(rows), axes=list(scale.axis_names), scale=scale.name, measures=lambda *args: None)


def excluded(stage, arm):
    """Whether a stage has no trial of an arm."""
    shared = any(arm.values[axis] != label for axis, label in stage.of.items())
    return shared or any(matches(arm.values, pattern) for pattern in stage.skip)


def missing(claim, trials):
    """What a claim asks for and the trials do not have; an empty text if it has all."""
    try:
        (judged,) = judge([claim], trials)
    except UserError as error:
        return str(error)
    return "" if judged.ours else f"claim {claim.name!r} has no numbers"


@pytest.mark.parametrize(
    "name", ["cpu", pytest.param("gpu", marks=pytest.mark.slow), pytest.param("paper", marks=pytest.mark.slow)]
)
def test_its_claims_ask_for_what_its_trials_measure(study, name):
    """Only the tables of probes and records are missing here; a claim may ask for those that the scale measures."""
    scale = study.scales[name]
    if study.name in WITHOUT_CLAIMS or scale.needs:
        return
    trials = made_up(study, scale)
    measured = {one for listed in scale.all_measures.values() for one in listed}
    measured |= {specs.parse(one, "probe")[0] for one in measured}
    for error in filter(None, (missing(claim, trials) for claim in load_claims(study.claims_file, trusted=True))):
        asked = re.search(r"does not measure (.+) (at (init|end)|as a training record) \(", error)
        assert asked, error
        assert asked[1] in measured, error


def test_its_main_claim_is_there(study):
    if study.name not in WITHOUT_CLAIMS:
        claims = load_claims(study.claims_file, trusted=True)
        assert study.name in [claim.name for claim in claims]
        assert all(claim.says for claim in claims)


def test_every_claims_file_has_its_study():
    with_studies = {path.stem for path in FILES}
    assert {path.stem for path in Path(catalog_folder()).glob("*.py")} <= with_studies
