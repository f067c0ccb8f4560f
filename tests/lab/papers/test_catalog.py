"""Every study of the catalog, without training: its trials, measures and claims, and what a dry run counts."""

import re
import socket
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lamina.cli import main
from lamina.core import specs
from lamina.core.backbone_presets import PRESETS
from lamina.errors import UserError
from lamina.evaluation.generated import NAMES
from lamina.jobs import columns
from lamina.lab.papers.dry_run import dry_run, table
from lamina.lab.papers.engine.plan import StudyPlan, arms, matches
from lamina.lab.papers.judging import Trials, judge, load_claims
from lamina.lab.papers.judging.findings import IN_WORDS
from lamina.lab.papers.study_catalog import BASES, SCALES, catalog_folder, names, read_study
from lamina.placements import Norm, resolve
from lamina.probes.engine.registry import listed
from lamina.training.settings import PretrainSettings

FILES = sorted(path for path in catalog_folder().glob("*.yaml") if path.name != BASES)
WITHOUT_CLAIMS = {"calibration", "ladder-s2-rates", "ladder-s3"}
SCORES = ("score", "eval_reward", *(f"score_{name.removeprefix('lamina_')}" for name in NAMES))
NUMBERS = {*columns.NUMBERS, "max_learning_rate"} - {"learning_rate", "seed"}


read, resolved = cache(read_study), cache(resolve)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def study(request):
    return read(request.param)


def scales(study):
    return [scale for scale in study.scales.values() if not scale.needs]


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


def test_its_main_claim_is_there_and_its_seeds_are_enough_to_judge_a_difference(study):
    if study.name in WITHOUT_CLAIMS:
        return
    claims = load_claims(study.claims_file, trusted=True)
    assert study.name in [claim.name for claim in claims]
    assert all(claim.says for claim in claims)
    cpu, comparison = study.scales["cpu"], r"\b(lower|higher|ordered|equivalent|no_worse)\("
    if cpu.job == "pretrain" and not cpu.needs and re.search(comparison, study.claims_file.read_text()):
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
                row = {"placement": arm.settings.get("placement", "pre_ln")}
                row |= {**values, "seed": seed, "status": "finished"}
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
        asked = re.search(r"does not measure (.+) (at (init|end)|as a training record)\. Add", error)
        assert asked, error
        assert asked[1] in measured, error


def test_the_list_names_each_verdict_in_the_words_of_the_pages(capsys):
    assert main(["study", "list"]) == 0
    *lines, _, total = capsys.readouterr().out.splitlines()
    words = sorted(set(IN_WORDS.values()), key=len, reverse=True)  # one begins with another
    counts = Counter(next(word for word in words if line.startswith(word)) for line in lines)
    assert total == ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    assert not [line for line in lines if re.search(r" cpu +(holds|excluded|inconclusive|reversed|fails):", line)]


def test_every_claims_file_has_its_study():
    with_studies = {path.stem for path in FILES}
    assert {path.stem for path in Path(catalog_folder()).glob("*.py")} <= with_studies


FOLDER = catalog_folder() / "placements"


@pytest.fixture(autouse=True)
def said_already(monkeypatch):
    monkeypatch.setenv("LAMINA_PYTHON_FILES", "")


@pytest.mark.parametrize(("alpha", "scale"), [("root", 3.0), ("blocks", 9.0), ("sublayers", 18.0)])
def test_the_fused_keel_has_fusenorms_skip_and_keels_norms(alpha, scale):
    first, *rest = resolve(f"{FOLDER}/fused_keel.py(alpha={alpha})", 9).layers
    for layer in rest:
        assert (layer.attention.skip, layer.feed_forward.skip) == ("stream", "block_input")
        for sublayer in (layer.attention, layer.feed_forward):
            assert set(sublayer.norms) == {"pre_norm", "post_norm"}
            assert sublayer.skip_scale == scale
    assert set(first.attention.norms) == {"pre_norm"}
    assert set(first.feed_forward.norms) == {"pre_norm", "post_norm"}
    assert (first.attention.skip_scale, first.feed_forward.skip_scale) == (1.0, 1.0)
    assert first.feed_forward.skip == "block_input"


@pytest.mark.parametrize(("top", "last"), [("keel", "keel(first_layer=keel)"), ("peri_ln", "sandwich_ln")])
def test_the_mixed_ones_are_mix_ln_below_and_another_placement_above(top, last):
    plan, above = resolve(f"{FOLDER}/mixed_top.py(top={top})", 8), resolve(last, 8)
    assert plan.layers[:2] == resolve("mix_ln", 8).layers[:2]
    assert plan.layers[2:] == above.layers[2:]
    assert plan.final_norm == above.final_norm


def test_the_scaled_sandwich_is_a_sandwich_whose_outer_gains_start_small():
    plan, sandwich = resolve(str(FOLDER / "sandwich_depth_scaled.yaml"), 16), resolve("sandwich_ln", 16)
    assert plan.layers[0].attention.out_norm == Norm(initial_gain=0.25)
    assert plan.layers[-1].feed_forward.pre_norm == sandwich.layers[-1].feed_forward.pre_norm
    assert plan.final_norm == sandwich.final_norm


MIX_1B = PretrainSettings(
    backbone="llama-1b", placement="pre_ln", init="normal", corpus="hf:allenai/c4:en", streaming=True,
    tokenizer="t5-base", sequence_length=256, batch_size=64, gradient_accumulation=8, steps=100_000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the dry run must not connect to anything")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_a_model_of_1b_costs_what_arithmetic_says():
    matrices = 24 * (4 * 2048**2 + 3 * 2048 * 5461)
    embedding = 32_100 * 2048
    frame = dry_run({"a": {"trial": MIX_1B}})
    row = frame.iloc[0]
    assert row.vocabulary == 32_100
    assert row.parameters == row.active == matrices + 2 * embedding + (2 * 24 + 1) * 2048 == 1_339_492_352
    tokens = 100_000 * 512 * 256
    assert row.tokens == tokens
    per_token = 6 * (matrices + embedding) + 12 * 24 * 2048 * 256
    assert row.flops == pytest.approx(per_token * tokens)
    assert row.gpu_hours == pytest.approx(per_token * tokens / (989e12 * 0.4) / 3600)


def test_the_trials_of_an_arm_are_one_row_and_its_total():
    arms = {p: {f"seed {n}": replace(MIX_1B, placement=p, seed=n) for n in range(3)} for p in ("keel", "pre_ln")}
    frame = dry_run(arms)
    assert frame["arm"].tolist() == ["keel", "pre_ln"]
    assert frame["trials"].tolist() == [3, 3]
    assert frame["total_gpu_hours"].tolist() == pytest.approx((3 * frame["gpu_hours"]).tolist())
    # Keel has four norms a block where Pre-LN has two; the first block's first one is missing
    norms = (frame["parameters"][0] - frame["parameters"][1]) / 2048
    assert norms in (2 * 24 - 1, 2 * 24 - 2)
    text = table(frame)
    assert "6 trials" in text
    assert "at 40% of a bfloat16 peak of 989 TFLOP/s" in text


def test_experts_count_as_far_as_a_token_uses_them():
    settings = replace(MIX_1B, backbone="16b-a2.4b", tokenizer="unheard-of/tokenizer")
    row = dry_run({"moe": {"trial": settings}}).iloc[0]
    assert row.vocabulary == 102_400  # the backbone's
    assert row.parameters == pytest.approx(15.7e9, rel=0.01)
    assert row.active == pytest.approx(2.66e9, rel=0.01)
    attention = 12 * 27 * 2048 * 256
    assert row.flops / row.tokens == pytest.approx(6 * (row.active - 102_400 * 2048) + attention, rel=0.01)


def test_what_cannot_be_built_is_named():
    with pytest.raises(UserError, match=r"trial-7: .*placement 'kee'"):
        dry_run({"kee": {"trial-7": replace(MIX_1B, placement="kee")}})


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_studys_trials_at_the_papers_scale_all_build(name):
    scale = read_study(name).scales["paper"]
    if scale.job != "pretrain" or not scale.settings:
        pytest.skip("nothing to pretrain")
    trials = StudyPlan(scale).dry()
    arms = dry_run(trials)
    assert arms["trials"].sum() == sum(map(len, trials.values()))
    assert (arms["gpu_hours"] > 0).all()
