"""`lamina preflight`: what it prints and writes, and what it refuses."""

import errno
import json
import os
import re
from functools import partial

import pandas as pd
import pytest
from training.tiny_runs import flags

import lamina
from lamina.cli import main
from lamina.core.progress import ProgressLines
from lamina.errors import UserError
from lamina.placements.registry import get
from lamina.preflights.planned_runs import PlanProgress, burn_in_steps
from lamina.preflights.settings import PreflightSettings
from lamina.training.settings import PretrainSettings

TINY = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "sequence_length": 16, "batch_size": 2}
TINY |= {"burn_in": 4, "warmup": 0.02, "sequences": 2, "threads": 1}


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "placement: mine\nequation: ['y = LN(x + A(x))']\nadvice: 'nothing above 1e-3 <b>'\nrules:\n"
        "  - attention: {post_norm: true}\n    feed_forward: {post_norm: true}\n"
    )
    return path


def argv(corpus, **given):
    return ["preflight", *flags(**{"corpus": corpus, **TINY, **given})]


def test_the_table_the_reason_and_the_papers_advice(corpus, capsys):
    assert main(argv(corpus, placements="keel,pre_ln", learning_rates="1e-3,1e-2")) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    heads = ["placement", "learning", "rate", "verdict", "gain", "x0→xN", "context", "FP16", "headroom"]
    assert lines[0].split() == heads
    rows = [line.split()[:2] for line in lines[1:5]]
    assert rows == [["keel", "0.001"], ["keel", "0.01"], ["pre_ln", "0.001"], ["pre_ln", "0.01"]]
    assert out.count("  reason: after ") + out.count("  reason: a verdict needs more steps: after ") == 4
    assert f"  papers: {get('keel').advice[:40]}" in out


def test_placement_and_learning_rate_are_taken_as_pretrain_takes_them(corpus, capsys):
    assert main([*argv(corpus, placement="fusenorm", learning_rate="2e-3"), "--json"]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)  # the progress is elsewhere
    assert "plans done 1/1" in said.err
    assert (row["placement"], row["learning_rate"], row["num_layers"], row["init"]) == ("fusenorm", 2e-3, 3, "scaled")
    assert row["verdict"] in ("fine", "risky", "undecided", "will not train")
    assert row["fp16_headroom"] > 1
    assert row["ffn_variance_share"] > 0


def test_progress_is_a_line_for_each_plan_that_ends_and_lines_with_the_steps(corpus, capsys, monkeypatch):
    """A plan takes more steps than it asked for: it tries other settings, or stays undecided."""
    monkeypatch.setattr("lamina.preflights.planned_runs.ProgressLines", partial(ProgressLines, every=0.0))
    assert main(argv(corpus, placements="keel,pre_ln", learning_rates="1e-3,1e6", steps=40)) == 0
    said = capsys.readouterr()
    told = said.err.splitlines()
    steps = [line for line in told if line.startswith("step ")]
    assert steps[0].endswith("(0%)  plans done 0/4")
    assert not any("100%" in line for line in steps)
    ends = [line.strip() for line in told if line not in steps]
    judged = re.findall(r"^(\w+ at [^:]+): (.+)$", said.out, flags=re.MULTILINE)
    assert ends == [f"{verdict}  {plan}  plans done {number}/4" for number, (plan, verdict) in enumerate(judged, 1)]
    assert len(ends) == 4


def test_a_plan_without_a_verdict_is_expected_to_take_another_burn_in():
    progress = PlanProgress(2, 4, show=False)

    def totals(ticks):
        for _ in range(ticks):
            progress.tick()
            yield progress.lines.total

    assert list(totals(9)) == [8, 8, 8, 8, 12, 12, 12, 12, 16]
    progress.ended(PretrainSettings(), "fine")
    assert list(totals(4)) == [13, 13, 13, 14]
    progress.close()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_folder(corpus, custom, tmp_path, monkeypatch, capsys, refused):
    out = tmp_path / "out"
    assert main(argv(corpus, placements=f"{custom},peri_ln", output=out)) == 0
    assert str(out / "report.html") in capsys.readouterr().out
    table = pd.read_csv(out / "preflight.csv")
    assert list(table["placement"]) == [str(custom), "peri_ln"]
    assert table["advice"][0] == "nothing above 1e-3 <b>"
    layers = pd.read_parquet(out / "layers.parquet")
    gains = layers[(layers["metric"] == "jacobian_gain") & (layers["placement"] == "peri_ln")]
    assert sorted(gains["layer"].unique()) == [-1, 0, 1, 2]
    assert sorted(gains["step"].unique())[:3] == [0, 2, 4]
    page = (out / "report.html").read_text()
    assert "nothing above 1e-3 &lt;b&gt;" in page
    assert "1e-3 <b>" not in page
    assert "lamina preflight --placements" in page
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert "nothing above 1e-3 &lt;b&gt;" in (out / "report.html").read_text()
    capsys.readouterr()
    whole = (out / "preflight.json").read_text()
    for name in ("preflight.json", "preflight.csv", "layers.parquet"):
        kept = (out / name).read_bytes()
        (out / name).write_bytes(kept.replace(b"2", b"3", 1))
        line = refused("report", str(out))
        assert f"{name}': altered since Lamina wrote seal.json, or from another run" in line
        assert "--resume" not in line  # which a preflight has not
        (out / name).write_bytes(kept)
    (out / "seal.json").unlink()  # as an older version left it
    for broken in (whole[: len(whole) // 2], "[]", '{"rows": [], "losses": [], "command": ""}'):
        (out / "preflight.json").write_text(broken)
        assert "the records of the preflight are incomplete" in refused("report", str(out))
    (out / "preflight.json").write_text(whole)
    with monkeypatch.context() as on_a_full_disk:  # a page that can't be written does not blame the records
        on_a_full_disk.setattr("lamina.reports.pages.preflight.write_page", full)
        assert "No space left on device. Finished work is kept" in refused("report", str(out))
    line = refused(*argv(corpus, output=out))
    assert "is not empty. Choose an empty or new folder, or add --overwrite to replace the content." in line
    assert main([*argv(corpus, output=out), "--overwrite"]) == 0


def test_strict_says_by_the_exit_code_what_will_not_train(corpus, capsys):
    assert main(argv(corpus, learning_rate="1e6", steps=40)) == 0
    assert "will not train" in capsys.readouterr().out
    assert main([*argv(corpus, learning_rate="1e6", steps=40), "--strict"]) == 1


def test_an_undecided_run_is_told_how_many_steps_decide_and_these_can_be_taken(corpus, capsys):
    given = {"placement": "pre_ln", "learning_rate": "2e-3", "steps": 200, "burn_in": 8}
    assert main([*argv(corpus, **given), "--json", "--strict"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "undecided"
    assert row["reason"].startswith("a verdict needs more steps: after ")
    assert row["burn_in_steps"] < row["deciding_steps"] <= 200
    if row["deciding_steps"] < 200:
        assert f"--burn-in {row['deciding_steps']}" in row["change"]
    longer = PreflightSettings(**{**TINY, "steps": 200, "burn_in": row["deciding_steps"]})
    assert burn_in_steps(longer, longer.runs()[0])[0] >= row["deciding_steps"]


DEEP = {**TINY, "batch_size": 8, "burn_in": 16, "steps": 60, "sequences": 4, "placements": "post_ln"}


@pytest.mark.parametrize(
    "given",
    [
        {"num_layers": 12, "init": "normal", "learning_rates": 2e-2},
        {"num_layers": 16, "init": "scaled", "learning_rates": 1e-2},
    ],
)
def test_the_advised_settings_train(corpus, given):
    plan = {**DEEP, **given, "corpus": str(corpus)}
    (found,) = lamina.preflight(**plan, bar=False).to_dict("records")
    assert found["verdict"] == "will not train"
    advised = re.findall(r"--(init|learning-rate) ([\w.]+)", found["change"])
    assert advised, found["change"]
    names = {"init": "init", "learning-rate": "learning_rates"}
    (better,) = lamina.preflight(**{**plan, **{names[f]: value for f, value in advised}}, bar=False).to_dict("records")
    assert better["verdict"] == "fine"
    assert found["change"].endswith("(preflight's new verdict: fine)")


def test_a_lower_learning_rate_is_advised_only_if_it_helps(corpus):
    plan = {**TINY, "corpus": str(corpus), "placements": "pre_ln", "steps": 40}
    (far,) = lamina.preflight(**plan, learning_rates=1e30, bar=False).to_dict("records")
    assert "not finite" in far["reason"]
    assert far["change"].startswith("a much lower learning rate")


def test_nothing_is_advised_that_does_not_help(corpus):
    plan = {**DEEP, "corpus": str(corpus), "num_layers": 12, "init": "small_scaled", "learning_rates": 0.3}
    (found,) = lamina.preflight(**plan, bar=False).to_dict("records")
    assert found["change"].startswith(
        "a placement with fewer norms on the residual stream (here, 24 of 24 sub-layers have such a norm)"
    )
    assert "--" not in found["change"]


def test_a_mix_of_corpora(corpus, tmp_path, capsys):
    letters = tmp_path / "letters.txt"
    letters.write_text("a b c d e f g\n" * 800)
    assert main([*argv(f"{corpus}:0.5,{letters}:0.5", placement="pre_ln"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["unigram_loss"] > 1


def test_ctrl_c_ends_it_with_a_line(corpus, tmp_path, monkeypatch, capsys):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.preflights.burn_in.BurningIn.train", stopped)
    assert main(argv(corpus, output=tmp_path / "out")) == 130
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("lamina: ")]
    assert said == ["lamina: interrupted: `lamina preflight` saved nothing"]
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_is_one_line(corpus, refused):
    assert "hidden_size" in refused(*argv(corpus=corpus, hidden_size=17))
    said = refused("preflight", "--backbone", "vit-tiny", "--num-layers", "2")
    assert "trained on image_classification, but lamina preflight measures only causal_lm" in said


def test_from_python(corpus):
    rows = lamina.preflight(corpus=str(corpus), placements="pre_ln,post_ln", bar=False, **TINY)
    assert list(rows["placement"]) == ["pre_ln", "post_ln"]
    again = lamina.preflight(corpus=str(corpus), placements="pre_ln,post_ln", bar=False, **TINY)
    pd.testing.assert_frame_equal(rows, again)
    with pytest.raises(UserError, match="did you mean 'num_layers'"):
        lamina.preflight(num_layer=3)
