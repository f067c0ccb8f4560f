"""The version of the numerics: losses of small runs, which may only change together with ``NUMERICS``."""

import pytest
from training.tiny_runs import settings

from lamina.placements import names as placements
from lamina.studies.trials import identity
from lamina.training.pretrain import pretrain
from lamina.training.settings import PretrainSettings

# Eval losses after 4 steps, of NUMERICS 1. Machines differ in the last digits of a float32 sum.
LOSSES = {
    "pre_ln": 5.464848,
    "keel": 5.46838,
    "fusenorm": 5.474629,
    "peri_ln": 5.436064,
    "deepnorm": 5.475483,
    "admin": 5.460527,
}


@pytest.mark.parametrize("placement", LOSSES)
def test_the_numbers_are_those_of_the_version(corpus, tmp_path, placement):
    run = settings(corpus, tmp_path / "run", placement=placement, init="recommended", precision="fp32", compile="off")
    assert identity.NUMERICS == 1, "new numerics: write their losses here, and raise this number"
    assert pretrain(run, bar=False)["eval_loss"] == pytest.approx(LOSSES[placement], abs=2e-5)


def test_every_setting_is_in_the_identity_or_is_known_not_to_matter():
    first = identity.identity("pretrain", PretrainSettings())["settings"]
    outside, names = {"placement", "num_layers", "corpus"}, set(PretrainSettings.names())
    younger = set(identity.YOUNGER) & names
    assert set(first) | outside | identity.OF_THE_MACHINE | younger == names


@pytest.mark.parametrize("placement", placements())
def test_a_placement_by_another_name_is_the_same_trial(placement):
    key = identity.key(identity.identity("pretrain", PretrainSettings(placement=placement, num_layers=4)))
    again = identity.key(identity.identity("pretrain", PretrainSettings(placement=f"{placement}()", num_layers=4)))
    assert key == again


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"learning_rate": 1e-2},
        {"steps": 7},
        {"init": "scaled"},
        {"placement": "keel(alpha=3)"},
        {"num_layers": 5},
    ],
)
def test_whatever_changes_the_numbers_changes_the_key(change):
    base = {"placement": "keel", "num_layers": 4}
    key = identity.key(identity.identity("pretrain", PretrainSettings(**base)))
    assert identity.key(identity.identity("pretrain", PretrainSettings(**{**base, **change}))) != key


def test_how_a_trial_is_run_does_not_change_its_key():
    base = {"placement": "keel", "num_layers": 4}
    key = identity.key(identity.identity("pretrain", PretrainSettings(**base)))
    other = PretrainSettings(**base, output="elsewhere", threads=3, save_steps=5)
    assert identity.key(identity.identity("pretrain", other)) == key


def test_another_text_is_another_trial(corpus, tmp_path):
    key = identity.key(identity.identity("pretrain", PretrainSettings(num_layers=4, corpus=str(corpus))))
    same = tmp_path / corpus.name
    same.write_bytes(corpus.read_bytes())
    assert identity.key(identity.identity("pretrain", PretrainSettings(num_layers=4, corpus=str(same)))) == key
    same.write_bytes(corpus.read_bytes() + b"more")
    identity.read_again()
    assert identity.key(identity.identity("pretrain", PretrainSettings(num_layers=4, corpus=str(same)))) != key
