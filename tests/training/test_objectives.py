"""What a model is trained to predict, and the vocabulary and the positions that it gets."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from training.tiny_runs import SMALL, assert_same_weights, layers, records, result
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import lamina
import lamina.api
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.lab.papers.trials import trial
from lamina.modeling.backbones import resolve_backbone
from lamina.modeling.modeling_lamina import ADAPTERS, LaminaForCausalLM
from lamina.probes.engine.inputs import batches_of
from lamina.training.objective_rows import OwnSettings
from lamina.training.objectives.objective import objective_of
from lamina.training.pretrain import pretrain
from lamina.training.resolve import backbone_config, resolve_run
from lamina.training.setting_groups import PretrainOptimizerSettings
from lamina.training.settings import PretrainSettings

pytest.importorskip("PIL")
TEXT = ("sequence_length",)
FAST = {"precision": "fp32", "compile": "off", "logging_steps": 2, "eval_steps": 4, "save_steps": 2}


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    """Gray images of 8 x 8 in 2 classes: bright above, or below."""
    draw = np.random.default_rng(0)
    rows = draw.integers(0, 100, (80, 65))
    rows[:, -1] = np.arange(80) % 2
    for row in rows:
        half = row[:32] if row[-1] else row[32:64]
        half += 150
    path = tmp_path_factory.mktemp("images") / "squares.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    return path


@pytest.fixture
def of_images(squares, tmp_path):
    """Settings of a tiny run on images."""
    own = {name: value for name, value in SMALL.items() if name not in TEXT}
    sizes = {**own, **FAST, "backbone": "vit-tiny", "image_size": 8, "patch_size": 4, "batch_size": 4, "steps": 8}
    sizes |= {"corpus": str(squares), "learning_rate": 0.01}
    return lambda name="run", **changed: PretrainSettings(**{**sizes, "output": str(tmp_path / name), **changed})


@pytest.fixture
def masked(bert, tiny):
    """Settings of a tiny run of a masked language model."""
    given = {**FAST, "backbone": str(bert), "num_layers": None, "hidden_size": None, "num_heads": None}
    return lambda name="run", **changed: tiny(name, **{**given, **changed})


@pytest.mark.parametrize("model_type", ADAPTERS)
def test_the_backbone_decides_what_is_predicted(model_type):
    class Config:
        pass

    config = Config()
    config.model_type = model_type
    assert objective_of(config).head == ADAPTERS[model_type].heads[0]


def test_settings_that_are_younger_than_trials_leave_their_keys():
    base = PretrainSettings(num_layers=4)
    names = {*OwnSettings.names(), *PretrainOptimizerSettings.names()}
    known = trial.identity("pretrain", base)
    assert not names & set(known["settings"])
    for name, value in (("mixup", 0.8), ("ema_decay", 0.9), ("mask_ratio", 0.15)):
        other = PretrainSettings(num_layers=4, **{name: value})
        assert trial.identity("pretrain", other)["settings"][name] == value


def test_an_image_run_leaves_a_whole_folder_whose_model_has_the_accuracy_and_the_loss(of_images, squares, tmp_path):
    settings = of_images(probe_every=8, eval_blocks=0, eval_fraction=0.3)
    outcome = pretrain(settings, bar=False)
    assert outcome["perplexity"] is None
    assert outcome["bigram_entropy"] is None
    assert outcome["tokens"] == 8 * 4 * 5  # steps, images, and 4 patches with the class token
    assert {"accuracy", "top5_accuracy"} <= set(outcome)
    last = [record for record in records(tmp_path / "run") if "eval_loss" in record][-1]
    assert last["accuracy"] == outcome["accuracy"]
    table = layers(tmp_path / "run")
    assert {"gradient_norm", "hidden_variance", "gain_mean"} <= set(table["metric"])
    assert (tmp_path / "run" / "probes" / "hidden_states").is_dir()
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "0", 1: "1"}
    assert model.config.get_text_config().num_channels == 1
    AutoImageProcessor.from_pretrained(tmp_path / "run" / "model")
    held_out = resolve_run(settings).read()[0].eval
    pixels, labels = (torch.stack([item[name] for item in held_out]) for name in ("pixel_values", "labels"))
    with torch.no_grad():
        logits = model.eval()(pixel_values=pixels).logits
    assert outcome["accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert outcome["top5_accuracy"] == 1.0  # of two classes
    assert outcome["eval_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    (batch,) = batches_of(None, model, None, corpus=str(squares), sequences=80, batch_size=80)
    assert torch.equal(batch["pixel_values"][held_out.numbers], pixels)  # probes see what the model saw


def test_a_stuck_image_run_is_measured_by_the_entropy_of_its_classes(of_images):
    outcome = pretrain(of_images(learning_rate=1e-9, save_steps=0), bar=False)
    assert outcome["status"] == "stuck"
    assert "nats below the entropy of the classes of 0.69" in outcome["reason"]


EVERYTHING = {"crop_scale": 0.5, "flip": 0.5, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "drop_path": 0.3}
EVERYTHING |= {"ema_decay": 0.9, "gradient_accumulation": 2}


def test_a_resumed_image_run_is_the_run_that_was_not_interrupted(of_images, tmp_path):
    pretrain(of_images("whole", **EVERYTHING), bar=False)
    pretrain(of_images("stopped", **EVERYTHING, pause_step=4), bar=False)
    assert result(tmp_path / "stopped")["status"] == "interrupted"
    pretrain({"output": str(tmp_path / "stopped"), "pause_step": None}, resume=True, bar=False)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    for name in ("eval_loss", "accuracy"):
        assert result(tmp_path / "whole")[name] == result(tmp_path / "stopped")[name]
    last = [[r for r in records(tmp_path / name) if r["step"] == 8] for name in ("whole", "stopped")]
    assert last[0] == last[1]


def test_the_saved_weights_are_the_average(of_images, tmp_path, before_step):
    seen = []
    before_step(1, lambda trainer, model: seen.append(trainer))
    pretrain(of_images(ema_decay=0.5, steps=3, save_steps=1, keep=3), bar=False)
    folder = tmp_path / "run" / "checkpoints"
    weights = [load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3)]
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, tensor in saved.items():
        expected = 0.25 * weights[0][name] + 0.25 * weights[1][name] + 0.5 * weights[2][name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)


def test_micro_batches_give_the_loss_of_the_whole_step(of_images, tmp_path):
    pretrain(of_images("one", label_smoothing=0.1, steps=2, batch_size=8, logging_steps=1), bar=False)
    halves = {"batch_size": 4, "gradient_accumulation": 2}
    pretrain(of_images("two", label_smoothing=0.1, steps=2, logging_steps=1, **halves), bar=False)
    first, second = ([r["grad_norm"] for r in records(tmp_path / n) if "grad_norm" in r] for n in ("one", "two"))
    assert first == pytest.approx(second, rel=1e-4)


def test_dropped_branches_leave_the_skip_and_keep_the_mean():
    from lamina.modeling.parts import drop_branches

    model = lamina.build(resolve_backbone("vit-tiny", num_layers=3, hidden_size=16, num_heads=2), "pre_ln")
    drop_branches(model, 0.5)
    blocks = model.model.layers
    assert blocks[0].attention.dropout is None
    assert [float(blocks[i].feed_forward.dropout.drop_prob) for i in (1, 2)] == [0.25, 0.5]
    x = torch.randn(400, 5, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = blocks[2].train().attention(x) - x
        whole = blocks[2].eval().attention(x) - x
    gone = dropped.flatten(1).abs().amax(1) == 0
    assert 0.4 < float(gone.float().mean()) < 0.6
    torch.testing.assert_close(dropped[~gone], 2.0 * whole[~gone], rtol=1e-4, atol=1e-5)


def test_a_masked_language_model_is_trained_as_it_says(masked, tmp_path):
    outcome = pretrain(masked(steps=8, probe_every=8), bar=False)
    assert outcome["bits_per_byte"] is None
    assert outcome["bigram_entropy"] is None
    assert outcome["perplexity"] == pytest.approx(np.exp(outcome["eval_loss"]))
    assert 0.0 <= outcome["accuracy"] <= 1.0
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.get_text_config().vocab_size == 258
    assert load_tokenizer(str(tmp_path / "run" / "model")).mask_token_id == 257


def test_the_loss_of_masked_tokens_does_not_depend_on_the_batches_of_the_evaluation(masked):
    """It is a mean over the masked tokens, of which blocks have different numbers."""
    sizes = {f"by {size}": {"trainer": {"per_device_eval_batch_size": size}} for size in (1, 3, 64)}
    losses = [pretrain(masked(name, steps=1, **changed), bar=False)["eval_loss"] for name, changed in sizes.items()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_classifier_is_trained_on_from_its_checkpoint(of_images, tmp_path, squares):
    pretrain(of_images(save_steps=0), bar=False)
    given = {"from_model": str(tmp_path / "run"), "corpus": str(squares), **FAST, "steps": 2, "batch_size": 4}
    outcome = pretrain({**given, "threads": 1, "output": str(tmp_path / "more")}, bar=False)
    assert outcome["init"] == "checkpoint"
    assert "accuracy" in outcome
    other = tmp_path / "other.csv"
    other.write_text("\n".join(f"{','.join(['9'] * 64)},{number % 3}" for number in range(12)) + "\n")
    with pytest.raises(UserError, match=r"the images have 3 classes .* the checkpoint .* has other classes"):
        pretrain({**given, "corpus": str(other), "output": str(tmp_path / "no")}, bar=False)


def test_augmentation_without_its_library_says_what_to_install(of_images, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "kornia", None)
    monkeypatch.setitem(sys.modules, "kornia.augmentation", None)
    with pytest.raises(UserError, match=r"rand_augment: 0.9 needs the library kornia.*\[vision\]"):
        resolve_run(of_images(rand_augment=0.9))


def completed(config, tokenizer):
    return objective_of(config).complete(config, None, tokenizer, None)


@pytest.mark.parametrize("padding", [0, 128_004])
def test_a_backbone_s_padding_does_not_silence_a_token_of_another_vocabulary(tmp_path, padding):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=200_000, pad_token_id=padding)
    tokenizer = load_tokenizer("bytes")
    fitted = completed(config, tokenizer)
    assert (fitted.pad_token_id, config.pad_token_id) == (None, padding)
    model = lamina.build(fitted, "pre_ln")
    assert bool(model.get_input_embeddings().weight.abs().sum(1).all())
    model.save_pretrained(tmp_path)
    assert LaminaForCausalLM.from_pretrained(tmp_path).get_input_embeddings().padding_idx is None
    tokenizer.pad_token = "a"
    assert completed(config, tokenizer).pad_token_id == ord("a")


@pytest.fixture
def gaps(tmp_path):
    """A folder with a tokenizer of 19 tokens whose largest id is 57."""
    words = "the norm sits before after and between every layer of a deep model whose stream carries what it adds"
    vocabulary = {"[UNK]": 0} | {word: 3 * n + 3 for n, word in enumerate(words.split()[:18])} | {"adds": 57}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "eos_token": "[UNK]", "pad_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "gaps")
    return str(tmp_path / "gaps")


def test_a_tokenizer_whose_ids_have_gaps_trains_a_model(gaps, trained, tmp_path):
    trained(tokenizer=gaps, steps=1)
    model = LaminaForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.get_text_config().vocab_size == 58


def positions(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return json.loads((folder / "config.json").read_text())["backbone_config"]["max_position_embeddings"], (
        tokenizer.model_max_length
    )


def test_a_presets_positions_are_the_ones_trained(trained, tmp_path):
    trained(steps=1)  # sequences of 16 tokens; Llama's default is 2,048
    assert positions(tmp_path / "run" / "model") == (16, 16)
    assert AutoConfig.from_pretrained(tmp_path / "run" / "model").get_text_config().max_position_embeddings == 16


def test_a_folders_positions_are_its_own(tiny, tmp_path):
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=128)
    config.save_pretrained(tmp_path / "backbone")
    settings = tiny(backbone=str(tmp_path / "backbone"))
    assert backbone_config(settings).max_position_embeddings == 128
    longer = tiny(backbone=str(tmp_path / "backbone"), sequence_length=256)
    assert backbone_config(longer).max_position_embeddings == 256
