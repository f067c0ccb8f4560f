"""`lamina compare`: which trials it has, what it refuses before any is started, and a row per trial."""

import math
import os

import pandas as pd
import pytest
import yaml
from training.tiny_runs import SMALL, flags, layers, records, result, settings

from lamina.cli import main
from lamina.commands.arguments import Parser
from lamina.errors import UserError
from lamina.jobs import columns
from lamina.studies.compare import compare
from lamina.studies.settings import CompareSettings
from lamina.training.pretrain import pretrain
from lamina.training.resolve import resolve_run

PLACEMENT = """
import os
from dataclasses import replace

from lamina.placements import placement, resolve

@placement({name!r}, title="Breaks", equation=("y = x",), source="a test")
def make(num_layers):
    if os.getpid() != {driver}:
        {act}
    return replace(resolve("pre_ln", num_layers), placement={name!r})
"""


# The placement is resolved, and the model cannot be built: in the middle of the run.
WHEN_BUILT = """import lamina.training.pretrain
        def broken(*args, **options): raise RuntimeError("this layer cannot be wired")
        lamina.training.pretrain.initial_model = broken"""


@pytest.fixture
def breaking(tmp_path):
    """A Python placement that is fine where the study is checked and breaks in its worker process."""

    def write(name, act):
        path = tmp_path / f"{name}.py"
        path.write_text(PLACEMENT.format(name=name, act=act, driver=os.getpid()), encoding="utf-8")
        return str(path)

    return write


def test_the_results_hold_the_columns_of_the_design_and_a_row_for_each_trial(study, tmp_path):
    table = compare(study(learning_rates="1e-3,3e-3", seeds="0,1"), bar=False)
    written = pd.read_csv(tmp_path / "study" / "results.csv")
    assert list(written.columns) == list(columns.names()) == list(table.columns)
    assert len(written) == len(table) == 8
    wanted = {(p, r, s) for p in ("pre_ln", "keel") for r in (1e-3, 3e-3) for s in (0, 1)}
    assert set(zip(written.placement, written.learning_rate, written.seed, strict=True)) == wanted
    assert set(written.status) <= {"finished", "short", "stuck"}
    assert written.tokens.eq(4 * 2 * 16).all()
    assert written.perplexity.to_numpy() == pytest.approx([math.exp(x) for x in written.eval_loss])
    for trial in written.trial:
        assert (tmp_path / "study" / "trials" / trial / "result.json").is_file()
    stored = yaml.safe_load((tmp_path / "study" / "study.yaml").read_text())
    assert stored["settings"]["learning_rates"] == "1e-3,3e-3"


def test_a_trial_is_what_pretrain_gives_with_the_same_settings(study, corpus, tmp_path):
    compare(study(seeds="3"), bar=False)
    (trial,) = (tmp_path / "study" / "trials").glob("keel*")
    alone = settings(corpus, tmp_path / "alone", placement="keel", seed=3, init="small_scaled")
    pretrain(alone, bar=False)
    assert result(trial)["eval_loss"] == result(tmp_path / "alone")["eval_loss"]
    assert records(trial) == records(tmp_path / "alone")
    pd.testing.assert_frame_equal(layers(trial), layers(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("raise RuntimeError('this layer cannot be wired')", "RuntimeError: this layer cannot be wired"),
        (WHEN_BUILT, "RuntimeError: this layer cannot be wired"),
        ("from lamina.errors import UserError; raise UserError('alpha: too large')", "alpha: too large"),
        ("os._exit(9)", "the worker process ended with exit code 9"),
    ],
    ids=["raises", "raises-when-built", "refuses-its-settings", "dies"],
)
def test_a_trial_that_breaks_is_a_row_and_not_a_crash(study, breaking, tmp_path, act, reason):
    path = breaking("breaks", act)
    table = compare(study(placements=f"{path},pre_ln"), bar=False).set_index("placement")
    assert table.status[path] == "failed"
    assert reason in table.reason[path]
    assert table.trial[path].startswith("breaks")
    assert table.status["pre_ln"] in ("finished", "short", "stuck")
    (log,) = (tmp_path / "study" / "trials").glob("breaks*/log.txt")
    assert ("Traceback" in log.read_text()) == (act != "os._exit(9)")


def test_a_failed_trial_is_tried_again_with_resume(study, breaking, tmp_path):
    marker = tmp_path / "mended"
    path = breaking("flaky", f"assert os.path.exists({str(marker)!r})")
    given = study(placements=path)
    assert list(compare(given, bar=False).status) == ["failed"]
    assert main(["compare", "--resume", "--output", str(given.output)]) == 1
    marker.touch()
    assert compare(given, resume=True, bar=False).status[0] in ("finished", "short", "stuck")


def test_a_trial_that_diverges_is_a_row(study):
    table = compare(study(learning_rates="1e-3,1e30", steps=20, warmup=0.0, placements="pre_ln"), bar=False)
    assert table.status[1] == "diverged"
    assert math.isnan(table.eval_loss[1])
    assert "layer" in table.reason[1]
    assert table.status[0] in ("finished", "short", "stuck")


def stamps(folder) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in folder.glob("trials/*/result.json")}


def test_finished_trials_are_skipped_and_placements_rates_and_seeds_can_be_added(study, tmp_path):
    compare(study(), bar=False)
    before = stamps(tmp_path / "study")
    again = compare(study(), resume=True, bar=False)
    assert stamps(tmp_path / "study") == before
    more = compare(study(placements="pre_ln,keel,peri_ln", seeds="0,1"), resume=True, bar=False)
    after = stamps(tmp_path / "study")
    assert {k: after[k] for k in before} == before
    assert len(more) == 6
    assert list(again.eval_loss) == [more.set_index("trial").eval_loss[t] for t in again.trial]


def test_a_finished_trials_damaged_model_is_named_and_written_again(study, tmp_path, caplog):
    compare(study(), bar=False)
    weights = next(tmp_path.glob("study/trials/pre_ln*/model/model.safetensors"))
    whole = weights.read_bytes()
    weights.rename(weights.with_name("other.safetensors"))
    compare(study(), resume=True, bar=False)
    assert "model.safetensors is missing. Lamina writes the model again" in caplog.text
    assert weights.read_bytes() == whole


def test_a_placement_file_that_changed_is_not_taken_for_the_finished_trial(study, tmp_path):
    path = tmp_path / "mine.yaml"
    rule = {"attention": {"pre_norm": True}, "feed_forward": {"pre_norm": True}}
    path.write_text(yaml.safe_dump({"placement": "mine", "rules": [rule]}))
    first = compare(study(placements=str(path)), bar=False)
    rule["attention"] = {"out_norm": True}
    path.write_text(yaml.safe_dump({"placement": "mine", "rules": [rule]}))
    try:
        second = compare(study(placements=str(path)), resume=True, bar=False)
    except UserError:
        return  # refused is fine, too
    assert second.eval_loss[0] != first.eval_loss[0]


def test_a_changed_setting_is_refused_by_name(study, command, refused):
    compare(study(placements="pre_ln"), bar=False)
    for name, value in {"steps": 5, "hidden_size": 32, "init": "same:normal"}.items():
        line = refused(*command(placements="pre_ln", **{**SMALL, name: value}), "--resume")
        assert line.startswith(f"lamina: {name}:")


@pytest.mark.slow
def test_a_text_that_changed_is_not_mixed_with_the_trials_that_ended(study, corpus, tmp_path):
    own = tmp_path / "own.txt"
    own.write_bytes(corpus.read_bytes())
    compare(study(placements="pre_ln", corpus=str(own)), bar=False)
    own.write_bytes(corpus.read_bytes()[100:])
    with pytest.raises(UserError, match=r"changed since: .*own\.txt"):
        compare(study(placements="pre_ln", corpus=str(own), seeds="0,1"), resume=True, bar=False)


def test_the_stored_study_is_a_configuration(command, tmp_path, corpus, capsys):
    assert main(command(placements="pre_ln")) == 0
    out = capsys.readouterr().out
    assert "report.html" in out
    assert "results.csv" in out
    assert (tmp_path / "study" / "report.html").is_file()
    again = flags(config=tmp_path / "study" / "study.yaml", output=tmp_path / "again")
    assert main(["compare", *again]) == 0
    tables = [pd.read_csv(tmp_path / name / "results.csv") for name in ("study", "again")]
    assert tables[0].eval_loss[0] == tables[1].eval_loss[0]


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
        ({"placements": {"pre_ln": 1}}, "placements"),
        ({"seeds": None}, "seeds: None"),
        ({"learning_rates_of": {"keel": [1e-3, 1e-3]}}, "learning_rates_of"),
        ({"learning_rates_of": [1e-3]}, "learning_rates_of"),
    ],
)
def test_a_value_of_python_without_meaning_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        resolve_run(next(iter(CompareSettings(**given).trials().values())))


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
    arms = ["pre_ln", "keel", "mix_ln(alpha=0.5)"]
    settings = CompareSettings(placements=arms, learning_rates="1e-3", learning_rates_of=own, seeds="0,1")
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
