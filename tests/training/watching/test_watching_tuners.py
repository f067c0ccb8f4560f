"""The monitor under TRL's trainers, on models that aren't Lamina's."""

import json

import pytest
import torch
from training.watching.loops import rows_of
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

import lamina

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")


def qwen3(kind=Qwen3ForCausalLM, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(Qwen3Config(vocab_size=300, num_hidden_layers=2, head_dim=8, **sizes, **more))


def tokenizer():
    from lamina.data.tokenizers import load_tokenizer

    return load_tokenizer("bytes")


def common(folder, **more):
    given = {"max_steps": 3, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    given |= {"max_grad_norm": 1e9, "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 2}
    return {"output_dir": str(folder / "trainer"), "bf16": False, **given, **more}


def check_losses(trainer, folder, *, equal=1e-6):
    """Every step's loss in the records is the one that Trainer logged, and metrics.jsonl's is their mean."""
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    rows = rows_of(folder).query("metric == 'step_loss'").set_index("step")["value"].to_dict()
    assert rows.keys() >= logged.keys()
    assert len(logged) > 1
    every = trainer.args.logging_steps
    for step, loss in logged.items():
        mean = sum(rows[number] for number in range(step - every + 1, step + 1)) / every
        assert mean == pytest.approx(loss, rel=1e-4, abs=equal), step
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    done = 0
    for record in records:
        mean = sum(rows[step] for step in range(done + 1, record["step"] + 1)) / (record["step"] - done)
        assert record["loss"] == pytest.approx(mean, rel=1e-6, abs=1e-9)
        done = record["step"]


PAIRS = {"prompt": ["layer "] * 8, "chosen": ["one"] * 8, "rejected": ["none at all"] * 8}
TEXTS = {"text": [f"the norm of layer {i} rises" for i in range(8)]}


def sft(folder, monitor, **more):
    args = trl.SFTConfig(**common(folder, **more), max_length=24)
    data = datasets.Dataset.from_dict(TEXTS)
    return trl.SFTTrainer(qwen3(), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[monitor])


def dpo(folder, monitor, **more):
    args = trl.DPOConfig(**common(folder, **more), max_length=24)
    data = datasets.Dataset.from_dict(PAIRS)
    more = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": [monitor]}
    return trl.DPOTrainer(qwen3(), ref_model=qwen3(), args=args, **more)


def reward(folder, monitor, **more):
    model = qwen3(Qwen3ForSequenceClassification, num_labels=1, pad_token_id=0)
    args = trl.RewardConfig(**common(folder, **more), max_length=24)
    data = datasets.Dataset.from_dict(PAIRS)
    return trl.RewardTrainer(model, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[monitor])


def grpo(folder, monitor, **more):
    more = {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0, **more}
    return trl.GRPOTrainer(
        qwen3(),
        reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(**common(folder, **more)),
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"layer {i}" for i in range(8)]}),
        processing_class=tokenizer(),
        callbacks=[monitor],
    )


@pytest.mark.parametrize(("logging_steps", "accumulated"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("make", [sft, dpo, reward, pytest.param(grpo, marks=pytest.mark.slow)])
def test_the_loss_is_the_one_that_trl_trains(make, logging_steps, accumulated, tmp_path):
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=2)
    more = {"max_steps": 4, "logging_steps": logging_steps, "gradient_accumulation_steps": accumulated}
    trainer = make(tmp_path, monitor, **more)
    trainer.train()
    check_losses(trainer, tmp_path / "run")
    assert "training_step" not in vars(trainer)  # as it was
    about = json.loads((tmp_path / "run" / "watched.json").read_text())
    assert [layer["sublayers"] for layer in about["layers"]] == [["attention", "feed_forward"]] * 2
    assert set(rows_of(tmp_path / "run").query("metric == 'hidden_abs_max' and step == 2")["layer"]) == {-1, 0, 1}


def test_one_grpo_step_records_the_loss_that_trl_trains(tmp_path):
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=1)
    trainer = grpo(tmp_path, monitor, max_steps=2)
    trainer.train()
    check_losses(trainer, tmp_path / "run")


def test_a_dpo_loss_that_rises_ends_the_run(tmp_path):
    monitor = lamina.LayerMonitor(
        str(tmp_path / "run"), every=2, on_divergence="stop", divergence_margin=0.5, divergence_patience=2
    )
    trainer = dpo(tmp_path, monitor, max_steps=30, learning_rate=0.3, lr_scheduler_type="constant", beta=5.0)
    true = trainer.training_step

    def rising(*args, **kwargs):
        return true(*args, **kwargs) + 0.2 * trainer.state.global_step

    trainer.training_step = rising
    trainer.train()
    assert monitor.diverged is not None
    assert trainer.state.global_step < 30
    assert "above its best" in monitor.diverged.reason
    assert trainer.training_step is rising  # the user's own step stays
