"""The monitor under TRL's trainers, on models that aren't Lamina's."""

import json

import pytest
import torch
from training.watching.loops import Naive, found, llama_parts, rows_of
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import lamina

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

EXACT = {"rel": 1e-6, "abs": 1e-12}


def qwen3():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_hidden_layers=2, head_dim=8, **sizes))


def tokenizer():
    from lamina.data.tokenizers import load_tokenizer

    return load_tokenizer("bytes")


class Naively(TrainerCallback):
    def __init__(self, model, step):
        self.naive, self.step = Naive(model, llama_parts()), step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.naive.keep()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.updates, self.first = self.naive.updates(), self.naive.moments(optimizer.optimizer, "exp_avg")
            self.gradients = self.naive.norms(self.naive.gradients)


def common(folder, **more):
    given = {"max_steps": 3, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    given |= {"max_grad_norm": 1e9, "learning_rate": 1e-3, "disable_tqdm": True, "per_device_train_batch_size": 2}
    return {"output_dir": str(folder / "trainer"), "bf16": False, **given, **more}


def check(folder, naive, step):
    assert found(folder, "update_norm", step) == pytest.approx(naive.updates, **EXACT)
    assert found(folder, "first_moment", step) == pytest.approx(naive.first, **EXACT)
    assert found(folder, "gradient_norm", step) == pytest.approx(naive.gradients, **EXACT)
    about = json.loads((folder / "watched.json").read_text())
    assert [layer["sublayers"] for layer in about["layers"]] == [["attention", "feed_forward"]] * 2
    stream = rows_of(folder).query("metric == 'hidden_abs_max' and step == @step")
    assert set(stream["layer"]) == {-1, 0, 1}


def test_a_qwen3_under_trls_sft_is_measured_as_by_hand(tmp_path):
    model = qwen3()
    texts = datasets.Dataset.from_dict({"text": [f"the norm of layer {i} rises" for i in range(8)]})
    naive = Naively(model, step=2)
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=2)
    args = trl.SFTConfig(**common(tmp_path), max_length=24)
    trainer = trl.SFTTrainer(
        model, args=args, train_dataset=texts, processing_class=tokenizer(), callbacks=[monitor, naive]
    )
    trainer.train()
    check(tmp_path / "run", naive, step=2)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    series = rows_of(tmp_path / "run").query("metric == 'step_loss'").sort_values("step")["value"].tolist()
    assert series == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_qwen3_under_trls_grpo_is_measured_as_by_hand(tmp_path):
    model = qwen3()
    prompts = datasets.Dataset.from_dict({"prompt": [f"layer {i}" for i in range(8)]})
    naive = Naively(model, step=2)
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=2)
    more = {"num_generations": 2, "max_completion_length": 8, "temperature": 1.0}
    args = trl.GRPOConfig(**common(tmp_path), **more)

    def reward(completions, **kwargs):
        return [float(len(set(text))) for text in completions]

    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=tokenizer(),
        callbacks=[monitor, naive],
    )
    trainer.train()
    check(tmp_path / "run", naive, step=2)
