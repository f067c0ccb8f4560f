"""Which trials a comparison has, and what it refuses before any is started."""

import pytest

from lamina.commands.arguments import Parser
from lamina.errors import UserError
from lamina.studies.settings import CompareSettings
from lamina.training.resolve import resolve_run


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


def first_trial_checked(given):
    resolve_run(next(iter(CompareSettings(**given).trials().values())))


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
        ({"placements": {"pre_ln": 1}}, "placements"),
        ({"seeds": None}, "seeds: None"),
        ({"learning_rates_of": "kel=1e-3"}, "'kel'; did you mean 'keel'"),
        ({"learning_rates_of": "keel"}, "learning_rates_of: 'keel'.*PLACEMENT=RATES"),
        ({"learning_rates_of": "keel=fast"}, "learning_rates_of: 'fast'"),
        ({"learning_rates_of": "keel=1e-3; keel=2e-3"}, "names a placement twice"),
        ({"learning_rates_of": {"keel": [1e-3, 1e-3]}}, "learning_rates_of"),
        ({"learning_rates_of": [1e-3]}, "learning_rates_of"),
        ({"init": "same:scald"}, "'scald'; did you mean 'scaled'"),
        ({"workers": 0}, "workers"),
        ({"steps": 0}, "steps"),
        ({"eval_fraction": 0.9}, "eval_fraction"),
        ({"warmup": 500, "steps": 100}, "warmup"),
        ({"report_to": "tensorbord"}, "report_to.*tensorboard"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        first_trial_checked(given)


def test_lists_are_taken_as_well_as_text():
    listed = CompareSettings(placements=["pre_ln", "mix_ln(alpha=0.5, final_norm=true)"], learning_rates=(1e-3, 3e-3))
    text = CompareSettings(placements="pre_ln,mix_ln(alpha=0.5, final_norm=true)", learning_rates="0.001,0.003")
    assert listed == text
    assert list(CompareSettings(seeds=range(2)).trials()) == list(CompareSettings(seeds="0,1").trials())
    assert CompareSettings(seeds=3, learning_rates=1e-3).seeds == "3"


def test_one_initializer_for_all_is_the_default():
    assert {t.init for t in CompareSettings().trials().values()} == {"small_scaled"}
    assert {t.init for t in CompareSettings(init="recommended").trials().values()} == {"recommended"}


def test_a_placement_may_have_learning_rates_of_its_own():
    own = {"keel": [3e-3, 1e-2], "mix_ln(alpha=0.5)": 1e-4}
    settings = CompareSettings(
        placements=["pre_ln", "keel", "mix_ln(alpha=0.5)"], learning_rates="1e-3", learning_rates_of=own, seeds="0,1"
    )
    found = [(t.placement, t.learning_rate, t.seed) for t in settings.trials().values()]
    expected = [("pre_ln", 1e-3), ("keel", 3e-3), ("mix_ln(alpha=0.5)", 1e-4), ("keel", 1e-2)]
    assert found == [(*pair, seed) for seed in (0, 1) for pair in expected]
    assert settings.learning_rates_of == "keel=0.003,0.01; mix_ln(alpha=0.5)=0.0001"
    assert CompareSettings.from_dict(settings.to_dict()) == settings


def test_the_command_line_and_yaml_say_the_same(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "placements: [pre_ln, keel]\nlearning_rates: [0.001, 1e-2]\nseeds: [0, 1]\n"
        "learning_rates_of: {keel: [3e-3, 1e-2]}\n"
    )
    parser = Parser("compare", "", "")
    parser.add_settings(CompareSettings)
    written, _ = parser.settings_from(["--config", str(tmp_path / "study.yaml")])
    words = "--placements pre_ln,keel --learning-rates 1e-3,1e-2 --seeds 0,1 --learning-rates-of keel=3e-3,1e-2"
    typed, _ = parser.settings_from(words.split())
    assert list(CompareSettings(**written).trials()) == list(CompareSettings(**typed).trials())
