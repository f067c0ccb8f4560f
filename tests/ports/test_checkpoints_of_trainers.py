"""`lamina convert --from` and `--to` of a trainer: every weight goes over unchanged, both ways."""

import argparse
import json
import logging
import os
import pickle
import re

import pytest
import torch
from peers import LAYERS, VOCABULARY, gpt2, llama, on_nanogpt, ours, shaken
from spread import rotated
from test_emit import IDS, logits_of, off
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import AutoModelForCausalLM

import lamina
from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.modeling import modeling_lamina
from lamina.ports.foreign import distributed
from lamina.ports.weights import weights_for


def written(model, trainer, folder):
    """Save a model as Lamina does, in ``ours``, and for a trainer, in ``theirs``."""
    model.save_pretrained(folder / "ours")
    assert main(["convert", str(folder / "ours"), str(folder / "theirs"), "--to", trainer]) == 0


def converted(source, output, *words):
    assert main(["convert", str(source), str(output), *words]) == 0
    return AutoModelForCausalLM.from_pretrained(output)


PLACEMENTS = ["keel", "deepnorm(final_norm=true)", "pre_ln", "layernorm_scaling", "peri_ln", "olmo2", "fusenorm"]


@pytest.mark.parametrize(("spec", "tied"), rotated(PLACEMENTS, (False, True), every=2))
def test_to_olmo_core_and_back(spec, tied, tmp_path):
    """Grouped heads, an odd depth, tied and untied embeddings; its own block types need no --placement."""
    model = ours(spec, llama(tie_word_embeddings=tied))
    written(model, "olmo-core", tmp_path)
    known = spec != "fusenorm"
    words = [] if known else ["--placement", spec]
    again = converted(tmp_path / "theirs", tmp_path / "again", "--from", "olmo-core", *words)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied
    record = json.loads((tmp_path / "again" / "conversion.json").read_text("utf-8"))
    assert record["num_layers"] == LAYERS


OPTIONS = rotated(("keel", "olmo2", "peri_ln(embedding_norm=true)"), (False, True), every=2)


@pytest.mark.parametrize(("spec", "tied"), OPTIONS)
@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_to_a_trainer_and_back(trainer, spec, tied, tmp_path):
    """tests/ports/test_trainers.py has the trainers' own readers and writers."""
    model = ours(spec, llama(tie_word_embeddings=tied))
    written(model, trainer, tmp_path)
    again = converted(tmp_path / "theirs", tmp_path / "again", "--from", trainer, "--placement", spec)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied


def test_torchtitans_folder_needs_the_sizes(tmp_path, refused):
    written(ours("pre_ln", llama()), "torchtitan", tmp_path)
    config = tmp_path / "theirs" / "config.json"
    folders = [str(tmp_path / name) for name in ("theirs", "again")]
    words = ["convert", *folders, "--from", "torchtitan", "--placement", "pre_ln"]
    config.write_text(json.dumps({**json.loads(config.read_text("utf-8")), "model_type": "gpt2"}), "utf-8")
    assert "config.json: model_type is 'gpt2'. Replace the file with the config.json of a 'llama' model." in refused(
        *words
    )
    config.unlink()
    assert "torchtitan does not save the model's sizes. Add the config.json" in refused(*words)


def test_equal_layers_in_one_tensor_are_read(tmp_path):
    """As Megatron saves layers that are alike, unless it is told not to."""
    model = ours("pre_ln", llama())
    stored = weights_for(model, "megatron")
    names = {name.replace("layers.0.", "layers.") for name in stored if "layers.0." in name}
    layers = {
        name: torch.stack([stored[name.replace("layers.", f"layers.{layer}.")] for layer in range(LAYERS)])
        for name in names
    }
    written(model, "megatron", tmp_path)
    others = {name: tensor for name, tensor in stored.items() if "layers." not in name}
    save_distributed({**others, **layers}, checkpoint_id=tmp_path / "theirs" / "release", no_dist=True)
    again = converted(tmp_path / "theirs", tmp_path / "again", "--from", "megatron", "--placement", "pre_ln")
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_megatrons_arguments_are_read_without_their_code_and_held_against_what_a_llama_is(tmp_path, refused):
    written(ours("pre_ln", llama()), "megatron", tmp_path)
    file, ran = tmp_path / "theirs" / "release" / "common.pt", tmp_path / "ran"
    args = torch.load(file, weights_only=False)["args"]

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {ran}",)

    folders = [str(tmp_path / name) for name in ("theirs", "again")]
    words = ["convert", *folders, "--from", "megatron", "--placement", "pre_ln"]
    torch.save({"args": argparse.Namespace(**vars(args), evil=Evil(), params_dtype=torch.bfloat16)}, file)
    assert main([*words, "--overwrite"]) == 0
    assert not ran.exists()
    for name, value in (("normalization", "LayerNorm"), ("num_experts", 8), ("rotary_percent", 0.5)):
        torch.save({"args": argparse.Namespace(**{**vars(args), name: value})}, file)
        assert f"args have {name} = {value!r}, but Lamina reads only " in refused(*words, "--overwrite")
    torch.save({"iteration": 1}, file)
    assert "has no 'args'" in refused(*words, "--overwrite")
    file.write_bytes(b"PK")
    assert "cannot be read" in refused(*words, "--overwrite")


def test_to_nanogpt_and_back(tmp_path):
    model = ours("keel", gpt2())
    written(model, "nanogpt", tmp_path)
    saved = torch.load(tmp_path / "theirs" / "ckpt.pt", weights_only=True)
    _, theirs = on_nanogpt("keel", gpt2())
    theirs.load_state_dict(saved["model"])
    assert off(model(input_ids=IDS).logits, logits_of(theirs.eval(), IDS)) < 1e-6
    saved["model"] = {f"_orig_mod.{name}": tensor for name, tensor in saved["model"].items()}  # a compiled model's
    torch.save(saved, tmp_path / "theirs" / "ckpt.pt")
    again = converted(tmp_path / "theirs", tmp_path / "again", "--from", "nanogpt", "--placement", "keel")
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_convert_says_what_it_verified_and_which_backbone_it_cannot_write(tmp_path, refused, capsys):
    written(ours("pre_ln", gpt2()), "nanogpt", tmp_path)
    assert "compared names and shapes, not logits" in capsys.readouterr().out
    line = refused("convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "transformers")
    assert "Lamina cannot write 'pre_ln' on the backbone 'gpt2' for transformers" in line


def test_a_converted_model_gets_the_tokenizer_that_is_named(tmp_path, refused, capsys):
    written(ours("keel", gpt2()), "nanogpt", tmp_path)
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "again"), "--from", "nanogpt", "--placement", "keel"]
    (tmp_path / "theirs" / "meta.pkl").write_bytes(b"")
    capsys.readouterr()
    assert main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("the folder has no tokenizer (Lamina does not read meta.pkl). Add --tokenizer FOLDER")
    load_tokenizer("bytes").save_pretrained(tmp_path / "bytes")
    line = refused(*words, "--overwrite", "--tokenizer", str(tmp_path / "bytes"))  # 97 tokens
    assert "tokenizer: the tokenizer has 257 tokens, but the model has only" in line
    written(ours("keel", gpt2(vocab_size=256)), "nanogpt", tmp_path / "of-bytes")
    words[1] = str(tmp_path / "of-bytes" / "theirs")
    assert main([*words, "--overwrite", "--tokenizer", "bytes"]) == 0
    assert "tokenizer" not in capsys.readouterr().out
    assert lamina.generate(tmp_path / "again", "Keel", max_new_tokens=5).startswith("Keel")
    line = refused("convert", str(tmp_path / "again"), str(tmp_path / "back"), "--tokenizer", "bytes")
    assert "--tokenizer: 'bytes' has no effect without --from." in line


@pytest.mark.parametrize("spec", ["keel", "peri_ln", "rezero"])
def test_a_nanogpt_model_without_biases_has_biases_of_0(spec, tmp_path, refused):
    """Without biases is the default of nanoGPT's train.py."""
    _, theirs = on_nanogpt(spec, gpt2(), bias=False)
    shaken(theirs).eval()
    sizes = {"n_layer": 5, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": VOCABULARY, "bias": False}
    saved = {"model": theirs.state_dict(), "model_args": sizes}
    torch.save(saved, tmp_path / "ckpt.pt")
    words = ("--from", "nanogpt")
    assert spec in refused("convert", str(tmp_path), str(tmp_path / "ours"), *words)  # the fitting placements
    again = converted(tmp_path, tmp_path / "ours", *words, "--placement", spec)
    assert off(again(input_ids=IDS).logits, logits_of(theirs, IDS)) < 1e-6
    del saved["model"]["transformer.h.0.attn.c_attn.weight"]
    torch.save(saved, tmp_path / "ckpt.pt")
    assert "missing" in refused("convert", str(tmp_path), str(tmp_path / "more"), *words, "--placement", spec)


def test_a_file_is_not_looked_up_on_the_hub_and_its_type_is_tested(tmp_path, monkeypatch, caplog):
    written(ours("keel", gpt2()), "nanogpt", tmp_path)
    asked, told = [], modeling_lamina.logger.warning_once
    told.cache_clear()
    monkeypatch.setattr("lamina.modeling.backbones.conversion.cached_file", lambda *words, **more: asked.append(words))
    monkeypatch.setattr(logging.getLogger("lamina"), "propagate", True)
    caplog.clear()
    words = [str(tmp_path / "again"), "--from", "nanogpt", "--placement", "keel"]
    assert main(["convert", str(tmp_path / "theirs" / "ckpt.pt"), *words]) == 0
    assert not asked
    told.cache_clear()
    lamina.placement_of(tmp_path / "again")
    assert "not tested" not in caplog.text


def test_what_a_checkpoint_does_not_say_is_asked_for(tmp_path, refused):
    written(ours("fusenorm", llama()), "olmo-core", tmp_path)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text("utf-8"))
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "again"), "--from", "olmo-core"]
    line = refused(*words)
    fitting = re.search(r"placements have exactly the checkpoint's tensors: ([\w, ]+)\.", line)[1].split(", ")
    assert "the olmo-core checkpoint names no placement." in line
    assert line.endswith("Run the command again with --placement NAME.")
    assert "fusenorm" in fitting
    assert "keel" not in fitting
    line = refused(*words, "--placement", "keel")
    assert "placement: 'keel' does not fit the checkpoint (missing tensor" in line
    assert f"Models with these placements have exactly the checkpoint's tensors: {', '.join(fitting)}." in line
    assert not (tmp_path / "again").exists()
    assert "holds no ckpt.pt" in refused("convert", str(tmp_path), str(tmp_path / "again"), "--from", "nanogpt")
    line = refused("convert", str(tmp_path / "gone"), str(tmp_path / "again"), "--from", "torchtitan")
    assert f"gone' does not exist; '{tmp_path}' has " in line
    assert "theirs. Give a folder that torchtitan wrote." in line
    with pytest.raises(UserError, match=r"from.*'olmo'"):
        lamina.convert(str(tmp_path / "theirs"), str(tmp_path / "x"), came_from="olmo")
    config["model"]["lm_head"]["bias"] = True
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config), "utf-8")
    line = refused(*words, "--placement", "fusenorm")
    assert "config.json: model.lm_head.bias is True. Choose a checkpoint with False." in line


def test_a_folder_for_mlx_has_code_configuration_and_weights(tmp_path):
    written(ours("keel", llama()), "mlx", tmp_path)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text("utf-8"))
    assert config["model_file"] == "keel_model.py"
    assert "10.0 if layer > 0 else 1.0" in (tmp_path / "theirs" / "keel_model.py").read_text("utf-8")
    assert (tmp_path / "theirs" / "model.safetensors").is_file()


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"the index \.metadata names posix.system"):
        distributed(tmp_path)


@pytest.mark.parametrize("trainer", ["nanogpt", "olmo-core", "megatron", "torchtitan"])
@pytest.mark.parametrize(
    "files",
    [
        {"ckpt.pt": b"hello", "config.json": b"{", "latest_checkpointed_iteration.txt": b"one"},
        {"ckpt.pt": b"\x80\x04", "config.json": b'{"model_type": "llama"}', ".metadata": b"x", "common.pt": b"x"},
        {"ckpt.pt": {"model": {}}, "config.json": b"[]", "common.pt": {"args": 3}},
        {"ckpt.pt": [1], "config.json": b'{"model": {"block": 3}}', "common.pt": [1]},
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_answered_in_one_line(trainer, files, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / "in" / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / "in" / name)
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--from", trainer, "--placement", "pre_ln"]
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
