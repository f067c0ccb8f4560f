"""The dry run counts models that no machine here could train, and needs neither network nor memory."""

import socket
from dataclasses import replace

import pytest

from lamina.errors import UserError
from lamina.papers.engine.plan import StudyPlan
from lamina.papers.study_catalog import names, read_study
from lamina.studies.dry_run import dry_run, table
from lamina.training.settings import PretrainSettings

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
    assert "at 989 TFLOP/s (peak, bfloat16) and 40% of it" in text


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
