"""Every study of the catalog is whole: valid settings, claims of its own, and papers' sizes that build."""

import pytest

from lamina.studies.catalog.places import names
from lamina.studies.catalog.study import read_study
from lamina.studies.dry_run import dry_run
from lamina.studies.engine.plan import Plan
from lamina.studies.judging import load_claims
from lamina.training.settings import PretrainSettings


@pytest.mark.parametrize("name", names())
def test_a_study_is_whole(name):
    study = read_study(name)
    assert study.source
    assert study.title != name
    assert "cpu" in study.scales
    for scale in study.scales.values():
        if scale.needs:
            continue
        trials = Plan(scale).dry()
        assert trials
        if scale.name == "cpu" and scale.job == "pretrain":
            assert all(settings.corpus == "embedded" for settings in trials.values())
    claims = load_claims(study.claims_file, trusted=True)
    assert name in [claim.name for claim in claims], "a study's main claim has its name"
    assert all((claim.says and claim.paper) or study.paper == "field" for claim in claims)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_papers_own_sizes_build(name):
    study = read_study(name)
    scale = study.scales.get("paper")
    if scale is None or scale.job != "pretrain" or not scale.settings:
        pytest.skip("nothing to train at the papers' scale")
    trials = {name: settings for name, settings in Plan(scale).dry().items() if isinstance(settings, PretrainSettings)}
    arms = dry_run(trials)
    assert arms["trials"].sum() == len(trials)
    assert (arms["gpu_hours"] > 0).all()
