"""Decay branches: each is the shorter run itself, and the trunk does not notice."""

import pytest
from training.tiny_runs import assert_same_weights, cut_at, records

from lamina.errors import UserError
from lamina.training.settings import PretrainSettings

WSD = {"schedule": "wsd", "warmup": 2, "decay": 0.25, "steps": 16, "init": "small_scaled"}


def without_branches(folder):
    return [record for record in records(folder) if "branch_steps" not in record]


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation": 2, "max_grad_norm": 0.1, "placement": "fusenorm"}])
def test_a_branch_is_the_shorter_run_and_the_trunk_does_not_notice(trained, tmp_path, more):
    trunk = trained("trunk", branches="0.25,8,12", logging_steps=1, eval_steps=5, **WSD, **more)
    assert [row["branch_steps"] for row in trunk["branches"]] == [4, 8, 12]
    for row in trunk["branches"]:
        shorter = trained(f"short-{row['branch_steps']}", **{**WSD, "steps": row["branch_steps"]}, **more)
        assert row["branch_loss"] == shorter["eval_loss"]
        assert row["tokens"] == shorter["tokens"]
        assert row["branch_bigram_entropy"] == shorter["bigram_entropy"]
    plain = trained("plain", logging_steps=1, eval_steps=5, **WSD, **more)
    assert plain["eval_loss"] == trunk["eval_loss"]
    assert "branches" not in plain
    assert without_branches(tmp_path / "plain") == without_branches(tmp_path / "trunk")
    assert_same_weights(tmp_path / "plain", tmp_path / "trunk")


def test_a_resumed_trunk_keeps_its_branches(trained, tmp_path):
    chosen = {"branches": "4,12", "save_steps": 6, **WSD}
    whole = trained("whole", **chosen)
    with cut_at(8):
        trained("cut", **chosen)
    cut = trained("cut", resume=True, **chosen)
    assert cut["branches"] == whole["branches"]
    assert without_branches(tmp_path / "cut") == without_branches(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"branches": "0.5", "schedule": "cosine", "decay": 0.2}, "with schedule = 'cosine'"),
        ({"branches": "0.5", "rollback": 1, "save_steps": 2}, "with rollback = 1"),
        ({"branches": "2"}, "a run of 2 steps would begin to decay after 1"),
        ({"branches": "16"}, "a run of 16 steps"),
        ({"branches": "0.5,-1"}, "branches: "),
        ({"branches": "half"}, "not a comma-separated list of different numbers"),
    ],
    ids=str,
)
def test_a_branch_that_can_not_be_is_refused(changed, words):
    with pytest.raises(UserError, match=words):
        PretrainSettings(**{**WSD, **changed}).check()


def test_a_branch_of_a_model_with_experts_is_refused(trained):
    with pytest.raises(UserError, match="branches: '8' with experts"):
        trained(backbone="deepseek-nano", branches="8", **WSD)
