"""A job after pretraining that is given epochs, or nothing, rather than steps: as documented, and as studies say it."""

import math

import pytest
from lab.posttraining.tiny import preferences, same_weights, sorting, write_reward, write_rows
from lab.posttraining.two_stages import JOBS
from transformers import ViTConfig

import lamina
from lamina.errors import UserError
from lamina.lab.posttraining.settings import PRESETS
from lamina.lab.posttraining.sft import sft


@pytest.fixture
def given(base, tmp_path):
    """The settings without which a job can't begin, and few tokens per answer."""
    rewards = write_reward(tmp_path, "len(answer)")

    def settings(job, **changed):
        rows = sorting(24) if job == "sft" else preferences(24)
        data = write_rows(tmp_path / "rows.jsonl", rows)
        own = {"reward_function": rewards, "max_answer": 4} if job == "rlhf" else {}
        return {"from_model": str(base), "data": str(data), "output": str(tmp_path / "run"), **own, **changed}

    return settings


@pytest.mark.parametrize("job", JOBS)
def test_a_job_by_epochs_takes_the_steps_of_its_examples(given, job):
    result = JOBS[job](given(job, epochs=0.4), bar=False)
    assert result["status"] == "finished"
    assert result["steps"] == math.ceil(0.4 * result["examples"] / 8)


@pytest.mark.parametrize(("job", "steps"), [(job, 9 if job == "sft" else 3) for job in JOBS])
def test_without_epochs_sft_makes_three_passes_and_the_other_jobs_one(given, job, steps, tmp_path):
    with pytest.raises(UserError, match=rf"pause_step: 50 is after the last step, {steps}\."):
        JOBS[job](given(job, pause_step=50), bar=False)
    with pytest.raises(UserError, match=rf"warmup: 40 steps are more than steps = {steps}"):
        JOBS[job](given(job, warmup=40), bar=False)
    assert not (tmp_path / "run").exists(), "checked before the folder is touched"


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name != "lima")) for name in PRESETS]
)
def test_a_published_recipe_trains(given, tmp_path, preset):
    """Its data are ours; nothing else is."""
    recipe = PRESETS[preset]
    data = write_rows(tmp_path / "sorting.jsonl", sorting(600 if "warmup" in recipe else 24))
    result = sft({"preset": preset, **given("sft", data=str(data))}, bar=False)
    step = recipe["batch_size"] * recipe.get("gradient_accumulation", 1)
    assert result["status"] == "finished"
    assert result["steps"] == max(1, math.ceil(recipe["epochs"] * result["sequences"] / step))


def test_a_run_by_epochs_resumes_with_the_same_words(given, tmp_path):
    words = given("sft", epochs=0.6, batch_size=4, learning_rate=1e-2)
    whole = sft({**words, "output": str(tmp_path / "whole")}, bar=False)
    part = sft({**words, "pause_step": 2}, bar=False)
    assert (part["status"], part["steps"]) == ("interrupted", 2)
    resumed = sft({**words, "steps": 0, "sequence_length": None, "pause_step": None}, resume=True, bar=False)
    assert (resumed["status"], resumed["steps"]) == ("finished", whole["steps"])
    assert same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_model_of_images_is_no_start_and_that_is_the_reason(given, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    picture = ViTConfig(**sizes, image_size=8, patch_size=4)
    lamina.build(picture, "pre_ln", head="image_classification").save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match=r"^from: '.*vit' is a LaminaForImageClassification, which returns scores"):
        sft(given("sft", from_model=str(tmp_path / "vit")), bar=False)
