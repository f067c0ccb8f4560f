"""What a trainer logs of a policy: equal rewards, a collapsed entropy, a KL that explodes, cut completions."""

import json
import random
import shutil

import pytest
import torch

import lamina
from lamina.training.monitor.alarms import Alarms
from lamina.training.monitor.policy_signs import CUT, ENTROPY, EQUAL, KL, PolicyCourse, logged
from lamina.training.monitor.writers import Row

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from training.watching.test_watch_structures import common, qwen3, tokenizer  # noqa: E402

BEGINS, STEPS = 21, 48


def trained(kind, folder, *, beta, **more):
    """A run whose rewards are equal from step 21 on; returns its trainer."""
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        return [1.0 if len(calls) >= BEGINS else float(len(set(text))) for text in completions]

    model = str(folder / "model")
    qwen3().save_pretrained(model)
    config, trainer = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    args = common(folder, max_steps=STEPS, num_generations=2, max_completion_length=6, beta=beta, **more)
    data = datasets.Dataset.from_dict({"prompt": [f"layer {i}" for i in range(8)]})
    more = {"processing_class": tokenizer(), "callbacks": [lamina.LayerMonitor(str(folder / "run"), every=4)]}
    trainer = trainer(model, reward_funcs=reward, args=config(**args), train_dataset=data, **more)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "beta", "every"),
    [
        ("grpo", 0.0, 1),
        pytest.param("grpo", 0.1, 4, marks=pytest.mark.slow),
        pytest.param("rloo", 0.0, 4, marks=pytest.mark.slow),
        pytest.param("rloo", 0.05, 1, marks=pytest.mark.slow),  # its KL is a part of the rewards: no group's are equal
    ],
)
def test_a_constant_reward_is_said_and_no_layer_is_blamed(kind, beta, every, tmp_path):
    trainer = trained(kind, tmp_path, beta=beta, logging_steps=every, save_strategy="steps", save_steps=STEPS)
    (alarm,) = map(json.loads, (tmp_path / "run" / "alarms.jsonl").read_text().splitlines())
    assert (alarm["rule"], alarm["metric"], alarm["layer"], alarm["step"]) == ("equal", EQUAL, -1, BEGINS)
    told = lamina.diagnose(tmp_path / "run").sentences
    assert told[0].startswith(f"Cause: equal rewards within each group from step {BEGINS}.")
    steps = f"for {alarm['value']:g} steps, all rewards of each group have been equal"
    assert f"step {BEGINS}, the model: {steps}" in told[2]
    assert not any(word in " ".join(told) for word in ("dead", "do not move", "not trained"))
    # the same from what Trainer itself saves
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == STEPS // every
    shutil.copytree(tmp_path / "trainer", tmp_path / "out")
    assert lamina.diagnose(tmp_path / "out").sentences[0] == told[0]


def seen(metric, values, every=1):
    course = PolicyCourse()
    return [sign.unusual for at, value in enumerate(values, 1) for sign in course.see(every * at, {metric: value})]


@pytest.mark.parametrize(("share", "steps"), [(0.3, 1), (0.6, 1), (0.6, 10), (0.8, 10)])
def test_equal_rewards_that_chance_explains_are_no_alarm(share, steps):
    """A single group of two often has equal rewards."""
    told = 0
    for seed in range(100):
        draw = random.Random(seed)
        means = [sum(draw.random() < share for _ in range(steps)) / steps for _ in range(200)]
        told += any(seen(EQUAL, means, steps))
        constant = [*means[:40], *[1.0] * 60]
        assert any(seen(EQUAL, constant, steps)[40:]), seed
    assert told <= 3


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [
        (ENTROPY, [1.2, 1.1, 1.0, 0.8, 0.7], [0.05, 0.04, 0.03]),
        (KL, [0.01, 0.02, 0.05, 0.04, 0.06, 0.08], [3.0, 40.0, 900.0]),
        (CUT, [0.1, 0.2, 0.1, 0.3, 0.6], [0.96, 1.0, 1.0]),
    ],
)
def test_what_leaves_its_range_for_three_records_is_a_sign(metric, before, after):
    assert seen(metric, [*before, *after]) == [False] * (len(before) + 2) + [True]
    assert not any(seen(metric, [*before, after[0], *before]))
    assert not any(seen(metric, [after[-1]] * 8)), "a run that begins so is as it was set up"


def test_an_entropy_of_a_training_on_texts_is_no_policys():
    assert logged(3, {"loss": 1.0, "entropy": 0.01, "mean_token_accuracy": 0.9}) == []
    rows = logged(3, {"train/entropy": 0.5, "train/reward": 1, "kl": None})
    assert rows == [Row(3, -1, "model", "all", 0, *pair) for pair in ((ENTROPY, 0.5), ("mean_reward", 1.0))]


@pytest.mark.parametrize("every", [1, 10])
def test_gradients_that_are_back_with_the_rewards_are_no_alarm(every):
    """While rewards are equal, what is left of the gradient (a KL's) is not what the later one is compared with."""
    rules, draw = Alarms(), random.Random(0)
    for step in range(1, 161):
        idle, model = 40 < step <= 120, (step, -1, "model", "all", 0)
        size = (0.01 if idle else 1.0) * draw.uniform(0.8, 1.25)
        rows = [Row(*model, "step_gradient_norm", size), Row(*model, "step_loss", 0.0)]
        rules.see([*rows, *(Row(step, 0, part, "all", 0, "gradient_norm", size) for part in ("attention", "block"))])
        if step % every == 0:
            rules.see([Row(*model, EQUAL, float(idle))])
    assert [(alarm.rule, alarm.step) for alarm in rules.told] == [("equal", 41)]
    again = Alarms()
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    assert again.state_dict() == rules.state_dict()


@pytest.mark.parametrize("apart", [1, 10, 100])
def test_rewards_that_are_equal_from_the_start_are_counted_from_it(apart):
    course = PolicyCourse()
    signs = [sign for at in range(1, 41) for sign in course.see(apart * at, {EQUAL: 1.0})]
    assert signs[-1].unusual
    assert (signs[-1].step, signs[-1].value) == (1, 40 * apart)


def test_what_a_trainer_logs_is_judged_with_the_step_that_it_is_of(tmp_path, monkeypatch):
    model = torch.nn.Linear(4, 1)
    judged, see = [], Alarms.see
    monkeypatch.setattr(
        Alarms, "see", lambda self, rows, rate=None: see(self, judged.append([*rows]) or judged[-1], rate)
    )
    with lamina.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), output=tmp_path / "run") as monitor:
        monitor.monitor.take([Row(1, -1, "model", "all", 0, "mean_reward", 0.5)])
        assert judged == []
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        monitor.step(loss)
    assert {"mean_reward", "step_loss"} <= {row[5] for row in judged[0]}
    assert sum(row[5] == "mean_reward" for rows in judged for row in rows) == 1
