"""Which trials a comparison has, and what it refuses before any is started."""

import pytest

from lamina.errors import UserError
from lamina.studies.settings import CompareSettings


def test_a_trial_for_each_placement_rate_and_seed_with_seeds_outermost():
    settings = CompareSettings(placements="pre_ln,keel", learning_rates="1e-3,3e-3", seeds="0,1")
    trials = list(settings.trials().values())
    assert len(trials) == 8
    assert [t.seed for t in trials] == [0] * 4 + [1] * 4
    assert {(t.placement, t.learning_rate) for t in trials[:4]} == {
        (p, r) for p in ("pre_ln", "keel") for r in (1e-3, 3e-3)
    }


def test_commas_in_a_placements_options_do_not_split_it():
    settings = CompareSettings(placements="mix_ln(alpha=0.5, final_norm=true),pre_ln")
    assert [t.placement for t in settings.trials().values()] == ["mix_ln(alpha=0.5, final_norm=true)", "pre_ln"]


def test_ids_are_folder_names_and_differ():
    settings = CompareSettings(placements="mix_ln(alpha=0.5),mix_ln(alpha=-0.5),a/mine.yaml,b/mine.yaml", seeds="0,1")
    ids = list(settings.trials())
    assert len(set(ids)) == 8
    assert all("/" not in i and "(" not in i for i in ids)


def test_learning_rates_that_differ_in_the_seventh_digit_are_different_trials():
    trials = CompareSettings(placements="pre_ln", learning_rates="1.0000001e-3,1.0000002e-3").trials()
    assert len({t.learning_rate for t in trials.values()}) == 2


def test_an_id_depends_on_its_trial_only():
    """Else a resumed study with its placements in another order would take one file's result for another's."""
    first = CompareSettings(placements="a/mine.yaml,b/mine.yaml").trials()
    second = CompareSettings(placements="b/mine.yaml,a/mine.yaml").trials()
    assert {i: t.placement for i, t in first.items()} == {i: t.placement for i, t in second.items()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"placements": ""}, "placements"),
        ({"placements": "pre_ln,pre_ln"}, "placements"),
        ({"learning_rates": ""}, "learning_rates"),
        ({"learning_rates": "1e-3,fast"}, "learning_rates.*'1e-3,fast'"),
        ({"learning_rates": "1e-3,0.001"}, "learning_rates"),
        ({"learning_rates": "-1e-3"}, "learning_rate"),
        ({"learning_rates": "nan"}, "learning_rate"),
        ({"seeds": "0,0"}, "seeds"),
        ({"seeds": "0.5"}, "seeds"),
        ({"seeds": "-1"}, "seed"),
        ({"workers": 0}, "workers"),
        ({"steps": 0}, "steps"),
        ({"eval_fraction": 0.9}, "eval_fraction"),
        ({"warmup": 500, "steps": 100}, "warmup"),
        ({"report_to": "tensorbord"}, "report_to.*tensorboard"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        CompareSettings(**given).trials()
