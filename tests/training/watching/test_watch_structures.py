"""Encoders with decoders, torch's own attention, TRL's trainers: what is recorded, and what is said to miss."""

import json
from itertools import product

import pytest
import torch
from spread import spread
from torch import nn
from torch.nn import functional
from training.tiny_runs import layers, records
from training.watching.loops import VOCAB, NanoGpt, Tokens, found, loop, norm_of
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import lamina
from lamina.training.monitor.alarms import Alarms
from lamina.training.monitor.writers import Row


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, dropout_rate=0.0, **sizes))
    ids = Tokens(items=4).ids
    return model, model.encoder.block, model.decoder.block, {"input_ids": ids, "labels": ids[:, :7].clone()}


def whisper():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 10}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=VOCAB, num_mel_bins=4, max_target_positions=20, dropout=0.0, **sizes, **ends)
    model = WhisperForConditionalGeneration(config)
    batch = {"input_features": torch.randn(4, 4, 20), "labels": Tokens(items=4).ids[:, :7].clone()}
    return model, model.model.encoder.layers, model.model.decoder.layers, batch


def bart():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 32, "dropout": 0.0}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, forced_eos_token_id=None, **sizes, **ends))
    batch = {"input_ids": Tokens(items=4).ids, "labels": Tokens(items=4).ids[:, :7].clone()}
    return model, model.model.encoder.layers, model.model.decoder.layers, batch


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"hidden_size": 24, "intermediate_size": 32, "image_size": 16, "patch_size": 8, **SMALL}


def clip():
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    text |= {**SMALL, **ends}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=12))
    batch = {"input_ids": Tokens(items=4).ids, "pixel_values": torch.randn(4, 3, 16, 16), "return_loss": True}
    return model, model.vision_model.encoder.layers, model.text_model.encoder.layers, batch


def llava():
    torch.manual_seed(0)
    text = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, **SMALL)
    config = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**IMAGES), image_token_id=VOCAB - 1)
    config.vision_feature_layer = -1
    model = LlavaForConditionalGeneration(config)
    ids = Tokens(items=4).ids.clamp(max=VOCAB - 2)
    ids[:, 1:5] = VOCAB - 1  # an image of four patches
    batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(4, 3, 16, 16)}
    return model, model.model.vision_tower.encoder.layers, model.model.language_model.layers, batch


@pytest.mark.parametrize("make", [t5, whisper, bart, clip, llava])
def test_each_layer_of_both_stacks_has_its_own_place(tmp_path, make):
    model, layers, others, batch = make()
    gradients, variances = {}, {}

    def see(module, args, output):
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            variances[module] = float(x.detach().double().var(correction=0))

    for layer in (*layers, *others):
        layer.register_forward_hook(see)

    def keep(step, model):
        gradients.update({id(p): p.grad.clone() for p in model.parameters() if p.grad is not None})

    loop(model, tmp_path / "run", spoil=keep, loss_of=lambda model, batch: model(**batch).loss, batches=[batch])
    about = json.loads((tmp_path / "run" / "watched.json").read_text())
    names = {module: name for name, module in model.named_modules()}
    assert [layer["path"] for layer in about["layers"]] == [names[layer] for layer in (*layers, *others)]
    assert about["notes"][0].startswith("the model has 2 stacks: layers 0 to 1 are ")
    norms = found(tmp_path / "run", "gradient_norm", 1)
    streams = found(tmp_path / "run", "hidden_variance", 1)
    for index, layer in enumerate((*layers, *others)):
        expected = norm_of([gradients[id(p)] for p in layer.parameters() if id(p) in gradients])
        assert norms[index, "block", "all"] == pytest.approx(expected, rel=1e-6), index
        assert norms[index, "attention", "all"] > 0
        assert streams[index, "feed_forward", "all"] == pytest.approx(variances[layer], rel=1e-5), index
    assert (-1, "block", "other") not in norms
    updates = found(tmp_path / "run", "update_norm", 1)
    assert {layer for layer, _, _ in updates} == {-1, *range(len(layers) + len(others))}


@pytest.mark.parametrize("apart", [{}, {"starts": (9,)}, {"kinds": {9: "other", 10: "other"}}])
def test_a_layer_is_compared_with_its_own_stack_and_kind(apart):
    alarms = Alarms(**apart)
    rows = [Row(1, layer, "attention", "all", 0, "weight_norm", 1.0 if layer < 9 else 100.0) for layer in range(11)]
    assert [alarm.layer for alarm in alarms.see(rows)] == ([] if apart else [9, 10])


def test_the_kinds_of_layers_are_their_modules(tmp_path):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    heads |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **experts, first_k_dense_replace=1))
    ids = Tokens(items=4).ids
    monitor = loop(model, tmp_path / "run", loss_of=lambda model, ids: model(ids, labels=ids).loss, batches=[ids])
    first, *others = monitor.monitor.alarms.kinds.values()
    assert "DeepseekV3MLP" in first
    assert set(others) == {first.replace("DeepseekV3MLP", "DeepseekV3MoE")}


class Encoder(nn.Module):
    """torch's own layers; ``weights``: whether they ask attention for its weights."""

    def __init__(self, weights=False):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.wte, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if weights:
            for one in self.layers.layers:
                inner = one.self_attn.forward
                one.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
                    *args, **{**kwargs, "need_weights": True}
                )

    def forward(self, idx, targets=None):
        logits = self.head(self.layers(self.wte(idx)))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def notes_of(model, folder, run=None, steps=2):
    loop(model, folder, steps, loss_of=lambda model, ids: (run or model)(ids[:, :-1], ids[:, 1:])[1], every=1)
    return json.loads((folder / "watched.json").read_text())["notes"]


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_attention_modules_have_their_largest_logit(tmp_path, weights):
    model = Encoder(weights)
    x = model.wte(Tokens(items=2).ids[:, :-1])
    attention = model.layers.layers[0].self_attn
    q, k, _ = functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (t.unflatten(-1, (2, -1)).transpose(1, 2).double() for t in (q, k))
    expected = float((q @ k.transpose(-2, -1)).amax()) / 8**0.5
    fused = functional.scaled_dot_product_attention
    assert notes_of(model, tmp_path / "run") == []
    assert found(tmp_path / "run", "attention_logit", 1)[0, "attention", "all"] == pytest.approx(expected, rel=1e-5)
    assert functional.scaled_dot_product_attention is fused


def test_what_no_hook_has_seen_is_said_once(tmp_path, caplog):
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return v

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient, gradient

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            hidden = torch.is_grad_enabled()  # in the small pass it is what it is elsewhere
            y = Kernel.apply(q, k, v) if hidden else functional.scaled_dot_product_attention(q, k, v)
            return self.out(y)

    model = NanoGpt()
    for layer in model.h:
        layer.attn = Attention()
    (note,) = notes_of(model, tmp_path / "run")
    assert note.startswith("Lamina does not record attention logits")
    assert caplog.text.count("Lamina does not record attention logits") == 1
    assert "hidden_variance" in set(layers(tmp_path / "run")["metric"])


def test_a_compiled_function_hides_the_stream_and_a_line_says_so(tmp_path):
    model = NanoGpt()
    run = torch.compile(lambda *batch: model(*batch), backend="eager")
    (note,) = notes_of(model, tmp_path / "run", run)
    assert note.startswith("Lamina does not record the residual stream, because Lamina saw no forward pass of the mode")
    assert found(tmp_path / "run", "update_norm", 2)[1, "block", "all"] > 0


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
    rows = layers(folder).query("metric == 'step_loss'").set_index("step")["value"].to_dict()
    assert rows.keys() >= logged.keys()
    assert len(logged) > 1
    every = trainer.args.logging_steps
    for step, loss in logged.items():
        mean = sum(rows[number] for number in range(step - every + 1, step + 1)) / every
        assert mean == pytest.approx(loss, rel=1e-4, abs=equal), step
    done = 0
    for record in records(folder):
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
    data = datasets.Dataset.from_dict({"prompt": [f"layer {i}" for i in range(8)]})
    given = {"args": trl.GRPOConfig(**common(folder, **more)), "train_dataset": data}
    given |= {"reward_funcs": lambda completions, **kwargs: [float(len(set(text))) for text in completions]}
    return trl.GRPOTrainer(qwen3(), processing_class=tokenizer(), callbacks=[monitor], **given)


@pytest.mark.parametrize(
    ("make", "logging_steps", "accumulated"),
    spread(product((sft, dpo, reward, grpo), (1, 2), (1, 2)), [(sft, 1, 2), (dpo, 1, 1), (reward, 2, 2)]),
)
def test_the_loss_is_the_one_that_trl_trains(make, logging_steps, accumulated, tmp_path):
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=2)
    more = {"max_steps": 4, "logging_steps": logging_steps, "gradient_accumulation_steps": accumulated}
    trainer = make(tmp_path, monitor, **more)
    trainer.train()
    check_losses(trainer, tmp_path / "run")
    assert "training_step" not in vars(trainer)  # as it was
    about = json.loads((tmp_path / "run" / "watched.json").read_text())
    assert [layer["sublayers"] for layer in about["layers"]] == [["attention", "feed_forward"]] * 2
    assert set(layers(tmp_path / "run").query("metric == 'hidden_abs_max' and step == 2")["layer"]) == {-1, 0, 1}


def test_one_grpo_step_records_the_loss_that_trl_trains(tmp_path):
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=1)
    trainer = grpo(tmp_path, monitor, max_steps=2)
    trainer.train()
    check_losses(trainer, tmp_path / "run")


def test_a_dpo_loss_that_rises_ends_the_run(tmp_path):
    ends = {"on_divergence": "stop", "divergence_margin": 0.5, "divergence_patience": 2}
    monitor = lamina.LayerMonitor(str(tmp_path / "run"), every=2, **ends)
    trainer = dpo(tmp_path, monitor, max_steps=30, learning_rate=0.3, lr_scheduler_type="constant", beta=5.0)
    true = trainer.training_step

    def rising(*args, **kwargs):
        return true(*args, **kwargs) + 0.2 * trainer.state.global_step

    trainer.training_step = rising
    trainer.train()
    assert monitor.diverged is not None
    assert trainer.state.global_step < 30
    assert "above its lowest level" in monitor.diverged.reason
    assert trainer.training_step is rising  # the user's own step stays


class Packed(NanoGpt):
    """A model that needs an object of its own batch's size, such as the block mask of flex attention."""

    def forward(self, idx, targets, mask):
        assert mask.shape == idx.shape
        return super().forward(idx, targets)


def test_a_model_that_needs_an_object_of_the_whole_batch_has_its_layers(tmp_path):
    loop(Packed(), tmp_path / "run", loss_of=lambda model, ids: model(ids[:, :-1], ids[:, 1:], Mask(ids))[1])
    assert set(found(tmp_path / "run", "hidden_variance", 1)) == set(found_in_a_plain_run(tmp_path))


class Mask:
    def __init__(self, ids):
        self.shape = ids[:, :-1].shape


def found_in_a_plain_run(folder):
    loop(NanoGpt(), folder / "plain")
    return found(folder / "plain", "hidden_variance", 1)


class OfOneBatch(NanoGpt):
    def forward(self, batch):
        return super().forward(batch["idx"], batch["targets"])


def test_a_model_that_takes_its_batch_as_one_mapping_has_its_layers_and_tokens(tmp_path):
    batches = [{"idx": ids[:, :-1], "targets": ids[:, 1:]} for ids in Tokens(items=12).ids.split(2)]
    loop(OfOneBatch(), tmp_path / "run", loss_of=lambda model, batch: model(batch)[1], batches=batches)
    assert set(found(tmp_path / "run", "hidden_variance", 1)) == set(found_in_a_plain_run(tmp_path))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["tokens"] == 6 * batches[0]["idx"].numel()
