"""TRL's trainers as they are, on models fresh from `lamina.build`."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig

import lamina
from lamina.data.tokenizers import load_tokenizer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

WORDS = ["norm", "layer", "stream", "skip"]


def fresh(placement="keel"):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return lamina.build(LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=64), placement)


def arguments(kind, folder, **more):
    usual = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    usual |= {"logging_steps": 1, "disable_tqdm": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    return kind(output_dir=str(folder), **usual, **more)


def trained(trainer):
    """Train; give the losses, all of them numbers."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert any(not torch.equal(p.detach(), before[n]) for n, p in trainer.model.named_parameters() if n in before)
    return losses


@pytest.mark.slow
def test_sft(tmp_path):
    texts = datasets.Dataset.from_dict({"text": [f"the {word} is level" for word in WORDS]})
    args = arguments(trl.SFTConfig, tmp_path, max_length=24)
    trained(trl.SFTTrainer(fresh("fusenorm"), args, train_dataset=texts, processing_class=load_tokenizer("bytes")))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_dpo(adapter, tmp_path):
    """TRL loads a reference model by the model's name, which a fresh one does not have; an adapter needs none."""
    model = fresh()
    given = {"peft_config": peft.LoraConfig(r=2)} if adapter else {"ref_model": copy.deepcopy(model)}
    args = arguments(trl.DPOConfig, tmp_path, max_length=32)
    pairs = [{"prompt": f"{word} ", "chosen": "is level", "rejected": "grows"} for word in WORDS]
    given |= {"train_dataset": datasets.Dataset.from_list(pairs), "processing_class": load_tokenizer("bytes")}
    trainer = trl.DPOTrainer(model, args=args, **given)
    assert trained(trainer)[0] == pytest.approx(math.log(2), abs=1e-3)  # the two are equal at the first step


@pytest.mark.slow
def test_grpo(tmp_path):
    args = arguments(trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=8, temperature=1.0)

    def reward(completions, **kwargs):
        return [float(len(set(text))) for text in completions]

    prompts = datasets.Dataset.from_dict({"prompt": WORDS})
    more = {"train_dataset": prompts, "processing_class": load_tokenizer("bytes")}
    trainer = trl.GRPOTrainer(fresh("peri_ln"), reward, args=args, **more)
    trained(trainer)
