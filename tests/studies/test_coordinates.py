"""The coordinate check: its slopes, its verdict, and that width or depth scaling is what makes it flat."""

import json

import numpy as np
import pandas as pd
import pytest
from spread import spread
from training.tiny_runs import flags

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.seals import write_with_seal
from lamina.reports import report, terminal
from lamina.reports.records import read_table
from lamina.studies.coordinates import STREAMS, coord_check, shares, slopes, verdict
from lamina.studies.settings import CoordCheckSettings

TINY = {"num_layers": 2, "batch_size": 4, "sequence_length": 32, "threads": 1}


def settings(corpus, output, **changed):
    return CoordCheckSettings(corpus=str(corpus), output=str(output), **{**TINY, "seeds": "0,1", **changed})


def of_size(found):
    return found[found["metric"] == "size"].set_index(["module", "step"])


@pytest.mark.parametrize("placement", spread(["pre_ln", "fusenorm", "keel"], ["fusenorm"]))
def test_full_alignment_is_flat_where_no_scaling_is_not(corpus, tmp_path, placement):
    given = {"placement": placement, "widths": "32,64,128", "learning_rate": 3e-3}
    right = coord_check(settings(corpus, tmp_path / "right", **given), bar=False)
    plain = coord_check(settings(corpus, tmp_path / "plain", width_scaling="none", **given), bar=False)
    assert set(of_size(right).verdict) == {"flat"}
    for folder, expected in (("right", "flat"), ("plain", "grows")):
        assert json.loads((tmp_path / folder / "result.json").read_text())["verdict"] == expected
    # A fixed standard deviation of 0.02: a sum over n channels grows as n^(1/2), from the first step on.
    plain = of_size(plain)
    assert plain.slope["lm_head", 0] == pytest.approx(0.5, abs=0.1)
    assert plain.slope["attention.module.q_proj", 0] == pytest.approx(0.5, abs=0.1)
    assert (plain.verdict["feed_forward.module", 3], plain.verdict["lm_head", 3]) == ("grows", "grows")


@pytest.mark.parametrize("placement", spread(["pre_ln", "peri_ln"], ["peri_ln"]))
def test_over_depth_completep_is_flat_where_no_scaling_is_not(corpus, tmp_path, placement):
    over = {"num_layers": CoordCheckSettings.num_layers, "depths": "4,8,16"}
    over |= {"hidden_size": 32, "init": "small", "seeds": "0"}
    given = {"placement": placement, "learning_rate": 3e-3, **over}
    right = of_size(coord_check(settings(corpus, tmp_path / "right", depth_scaling="completep", **given), bar=False))
    plain = of_size(coord_check(settings(corpus, tmp_path / "plain", **given), bar=False))
    assert json.loads((tmp_path / "right" / "result.json").read_text())["verdict"] == "flat"
    # at the start L random branches over L, beside an embedding that stays
    assert right.slope["block", 0] == pytest.approx(-0.4, abs=0.15)
    assert set(right.drop(list(STREAMS), level="module").verdict) == {"flat"}
    stored = pd.read_parquet(tmp_path / "plain" / "coordinates.parquet")
    assert stored.columns[0] == "depth"
    assert stored.groupby("depth")["layer"].max().to_dict() == {4: 3, 8: 7, 16: 15}
    # L branches of one size add up as L^(1/2) at the start, and in step with each other after an update
    assert plain.verdict["block", 0] == plain.verdict["block", 3] == "grows"
    assert plain.slope["block", 0] == pytest.approx(0.5, abs=0.15)
    assert plain.slope["block", 3] > plain.slope["block", 0]
    page = report(tmp_path / "right").read_text()
    assert "Exponents of the depth" in page
    assert "that you tune on a shallow model should hold for a deep model" in page


def test_the_blocks_that_end_a_share_of_the_depth_are_compared():
    rows = [(depth, layer, float(layer)) for depth in (2, 3, 4) for layer in range(-1, depth)]
    kept = shares(pd.DataFrame(rows, columns=["depth", "layer", "value"]))
    found = {(depth, layer): value for depth, layer, value in kept.itertuples(index=False)}
    # of 3 blocks the first share ends with the second, half of which it is
    ends = {(2, 0): 0, (2, 1): 1, (3, 0): 1, (3, 1): 2, (4, 0): 1, (4, 1): 3}
    assert found == {**{(depth, -1): -1.0 for depth in (2, 3, 4)}, **ends}


def test_under_mup_the_readout_starts_with_the_root_of_the_width_below_and_that_is_no_fault(corpus, tmp_path):
    frame = coord_check(settings(corpus, tmp_path / "mup", widths="32,64,128", width_scaling="mup"), bar=False)
    found = of_size(frame)
    assert found.slope["lm_head", 0] == pytest.approx(-0.5, abs=0.1)
    assert json.loads((tmp_path / "mup" / "result.json").read_text())["verdict"] == "flat"
    assert "As the scheme expects, these outputs shrink: lm_head" in terminal.coord_check(tmp_path / "mup", frame)


def made_up(exponents, widths=(10, 20, 40), seeds=(0, 1)):
    rows = []
    for seed in seeds:
        for (module, layer, step), e in exponents.items():
            # the seeds' constants differ; their logarithms are averaged, so that the slope does not move
            rows += [(w, seed, step, layer, module, "size", (seed + 1) * 3.0 * float(w) ** e) for w in widths]
    return pd.DataFrame(rows, columns=["width", "seed", "step", "layer", "module", "metric", "value"])


def test_the_slope_is_the_exponent_and_layers_are_averaged():
    found = of_size(slopes(made_up({("q", 0, 0): 0.5, ("q", 1, 0): 0.1, ("head", -1, 0): -1.0}), 0.3))
    row = found.loc["q", 0]
    assert (row.slope, row.low, row.high) == pytest.approx((0.3, 0.1, 0.5))
    assert row.layers == 2
    assert found.slope["head", 0] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("exponent", "expected"), [(0.0, "flat"), (0.29, "flat"), (0.31, "grows"), (-0.31, "shrinks"), (-0.29, "flat")]
)
def test_the_verdict_is_by_the_tolerance(exponent, expected):
    chosen = CoordCheckSettings(tolerance=0.3)
    found = slopes(made_up({("q", 0, 0): 0.0, ("q", 0, 1): exponent}), 0.3)
    result = verdict(found, chosen)
    assert result["verdict"] == expected
    assert result["modules"] == ([] if expected == "flat" else ["q"])


def test_a_value_that_is_not_finite_is_broken_and_not_flat():
    table = made_up({("q", 0, 0): 0.0, ("r", 0, 0): 0.0})
    table.loc[(table.module == "q") & (table.width == 40), "value"] = np.nan
    found = slopes(table, 0.3)
    assert of_size(found).verdict["q", 0] == "broken"
    result = verdict(found, CoordCheckSettings())
    assert (result["verdict"], result["modules"]) == ("broken", ["q"])


def test_a_width_that_diverges_has_a_row_for_every_step_and_is_broken(corpus, tmp_path):
    folder = tmp_path / "check"
    found = of_size(coord_check(settings(corpus, folder, widths="16,32", learning_rate=1e30, seeds="0"), bar=False))
    assert set(found.index.get_level_values("step")) == {0, 1, 2, 3}
    assert found.verdict["lm_head", 0] != "broken"
    assert found.verdict["lm_head", 3] == "broken"
    assert json.loads((folder / "result.json").read_text())["verdict"] == "broken"


def test_the_folder_the_page_and_going_on(corpus, tmp_path, capsys, refused):
    folder = tmp_path / "check"
    argv = ["coord-check", *flags(**TINY, corpus=corpus, output=folder, widths="16,32", steps=1)]
    assert main([*argv, "--seeds", "0"]) == 0
    out = capsys.readouterr().out
    assert "attention.module.q_proj" in out
    assert str(folder / "report.html") in out
    assert {p.name for p in folder.iterdir()} >= {"coordinates.parquet", "slopes.csv", "result.json", "study.yaml"}
    page = (folder / "report.html").read_text()
    assert "Exponents of the width" in page
    assert "plotly-graph-div" in page
    (folder / "report.html").unlink()
    assert report(folder).is_file()
    result = (folder / "result.json").read_text()
    (folder / "result.json").write_text("3")
    with pytest.raises(UserError, match="the records of the coordinate check are incomplete"):
        report(folder)
    (folder / "result.json").write_text(result)
    (folder / "seal.json").unlink()  # with the digests, Lamina rejects every change of a table
    write_with_seal(folder, "result.json", json.loads(result), ())
    for name in ("coordinates.parquet", "slopes.csv"):
        content, table = (folder / name).read_bytes(), read_table(folder / name)
        for column in [column for column in table if column not in ("seed", "layer")]:  # not on the page
            renamed = table.rename(columns={column: "renamed"})
            renamed.to_csv(folder / name) if name.endswith("csv") else renamed.to_parquet(folder / name)
            with pytest.raises(UserError, match=rf"are incomplete \(ValueError: {name} has no column {column}\)"):
                report(folder)
        (folder / name).write_bytes(content)
    (folder / "result.json").write_text(result)

    before = pd.read_parquet(folder / "coordinates.parquet")
    assert set(before.columns) == {"width", "seed", "step", "layer", "module", "metric", "value"}
    assert "is not empty" in refused(*argv)
    assert main([*argv, "--seeds", "0,1", "--resume"]) == 0  # seeds may be added
    after = pd.read_parquet(folder / "coordinates.parquet")
    assert after[after.seed == 0].reset_index(drop=True).equals(before)
    assert len(after) == 2 * len(before)
    assert main([*argv, "--seeds", "1", "--resume"]) == 0
    assert pd.read_parquet(folder / "coordinates.parquet").equals(after), "a seed that is left out is not forgotten"
    assert "steps: 2 differs from the check's 1" in refused(*argv, "--steps", "2", "--resume")
