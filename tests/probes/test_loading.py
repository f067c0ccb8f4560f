"""Checkpoints from paths: what loads; and that what a user hands over is measured whole by every probe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from probes.tiny import blocks, llama
from safetensors.torch import load_file, save_file
from small_models import small_inputs, small_model
from spread import spread
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.jobs.manifest import seal
from lamina.modeling.checkpoint import load
from lamina.probes.engine.measure import make_context, measure
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import make, names


@pytest.fixture
def saved(tmp_path):
    model = small_model("llama")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def test_a_checkpoint_of_transformers(saved):
    folder, model = saved
    again = load(folder)
    assert again.notes == []
    assert again.run is None
    inputs = small_inputs(model)
    with torch.no_grad():
        assert torch.equal(again.model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("name", ["bert", "albert", "vit"])
def test_the_class_that_saved_it_is_the_one_that_loads(tmp_path, name):
    model = small_model(name)
    model.save_pretrained(tmp_path)
    assert type(load(tmp_path).model) is type(model)


def test_a_lamina_checkpoint_and_the_folder_of_its_run(tmp_path):
    model = lamina.build(LlamaConfig(**{**_sizes(), "vocab_size": 40}), "keel")
    model.save_pretrained(tmp_path / "model")
    seal(tmp_path / "model")
    (tmp_path / "result.json").write_text("{}")
    for path in (tmp_path / "model", tmp_path):
        assert torch.equal(load(path).model.lm_head.weight, model.lm_head.weight)
    assert load(tmp_path).run == tmp_path


def test_a_run_without_a_model_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="has no saved model"):
        load(tmp_path)


def test_pickled_weights_are_read_as_tensors_only(tmp_path):
    model = small_model("bert")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(load(tmp_path).model.bert.embeddings.word_embeddings.weight, model.get_input_embeddings().weight)

    class Trap:
        def __reduce__(self):
            return (print, ("this must never run",))

    torch.save({"weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="checkpoint"):
        load(tmp_path)


def test_weights_that_are_not_finite_are_named(saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"'model.layers.1.mlp.up_proj.weight' holds 1 values.*\[3, 5\]"):
        load(folder)


def test_a_missing_layer_is_refused_a_missing_head_noted(saved):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    without_head = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).notes == ["Lamina drew random weights for tensors that the checkpoint lacks: lm_head.weight"]
    del without_head["model.layers.2.mlp.up_proj.weight"]
    save_file(without_head, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing tensor '.*layers\.2\.mlp\.up_proj"):
        load(folder)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="is neither a folder nor a model on the hub"):
        load("no-such/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "config.json")


READING = (
    *("probe {}", "eval {} --corpus embedded", "prune {} --layers 1", "graft {} --placement keel"),
    *("convert {} out", "convert {} out --from torchtitan", "generate {}", "placements --of ./{}", "diagnose {}"),
    *("report {}", "pretrain --from {}", "pretrain --tokenizer ./{}"),
)


@pytest.mark.parametrize("command", READING)
def test_a_missing_folder_is_answered_with_nearby(tmp_path, command, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1000, 200, 30):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    there = "; 'checkpoints' has step-30, step-200, step-1000. "
    assert there in refused(*command.format("checkpoints/step-300").split())
    assert there in refused(*command.format("checkpoints/step-300/model").split())
    assert " has " not in refused(*command.format("step-300/model").split())


def test_a_folder_of_models_is_answered_with_the_last_model(tmp_path, refused):
    for step in (100, 20):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "config.json").write_text("{}")
    assert refused("probe", tmp_path).endswith(f"Give a folder with config.json, such as '{tmp_path / 'step-100'}'.")


def _sizes():
    return {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


SEQUENCES, TOKENS = 70, 12  # more than any probe takes of a corpus, and than the corpus' 64 blocks
SEARCHED = {"jacobian": 7, "bounds": 7}  # a search in each sequence
WEIGHTS = {"gains", "weight_change"}
OPTIONS = {
    "spectra": "spectra(few_tokens=warn)",
    "jacobian": "jacobian(tolerance=0.0001)",
    "layer_use": "layer_use(metric=causal_score)",  # linear maps are measured on half of the sequences
}
# A mean over sequences of one length is the mean of each sequence's own value.
AVERAGED = {
    "angular_distance": {"angular_distance"},
    "attention": {"entropy", "entropy_share", "first_token_share"},
    "bounds": {"left", "right"},
    "hidden_states": {"mean", "abs_mean", "median", "max_to_median", "massive_count"},
    "jacobian": {"norm", "typical", "log10_total"},
    "layer_drop": {"loss", "loss_increase"},
    "logit_lens": {"cross_entropy", "kl_to_final", "top1_agreement"},
    "low_precision": {"relative_error", "token_error", "loss", "loss_increase"},
    "ranks": {"stable_rank", "effective_rank"},
    "similarity": {"cosine", "cosine_by_distance", "block_influence"},
}
LARGEST = {"attention": "max_logit", "hidden_states": "abs_max", "low_precision": "max_error"}


def means(frame, name):
    if name == "bounds":  # neither the worst token nor what is fitted over all sequences is a mean
        return frame[~frame["role"].str.endswith("_token") & (frame["role"] != "fusenorm_eq_9") & (frame["layer"] >= 0)]
    return frame


def table(model, name, ids):
    return means(lamina.probe(model, OPTIONS.get(name, name), ids)[name], name)


def values(frame, metric):
    return frame.loc[frame["metric"] == metric, "value"].to_numpy(dtype=float)


def bytes_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    model = llama(layers=2)
    model.save_pretrained(tmp_path / "initial")
    monkeypatch.setitem(OPTIONS, "weight_change", f"weight_change(reference={tmp_path / 'initial'})")
    return model, blocks(SEQUENCES, TOKENS)


@pytest.mark.parametrize("name", names())
def test_all_sequences_of_a_user_are_measured_counted_in_the_table_and_drawn(name, inputs):
    model, ids = inputs
    ids = ids[: SEARCHED.get(name, SEQUENCES)]
    made = make(OPTIONS.get(name, name))
    frame = lamina.probe(model, [made], ids)[name]
    read = means(frame[frame["sequences"] > 0], name)
    assert set(read["sequences"]) == (set() if name in WEIGHTS else {len(ids)})
    tokens = len(ids) if name == "angular_distance" else ids.numel()  # each one's last, by its default
    assert set(read["tokens"]) == (set() if name in WEIGHTS else {tokens})
    if name == "spectra":
        assert set(read["role"]) == {"pre", "post"}
    drawn = list(made.figures(frame))
    assert drawn
    assert all(caption and figure.data for figure, caption in drawn)
    assert "" not in (said := list(made.sentences(frame)))
    assert said


@pytest.mark.parametrize("name", spread(AVERAGED, ("angular_distance", "hidden_states", "layer_drop", "logit_lens")))
def test_what_is_measured_is_the_mean_of_what_single_sequences_give(name, inputs):
    model, ids = inputs
    ids = ids[: SEARCHED.get(name, 9)]
    whole, first = table(model, name, ids), table(model, name, ids[:4])
    each = [table(model, name, row[None]) for row in ids]
    metrics = AVERAGED[name]
    assert metrics <= set(whole["metric"])
    for metric in metrics:
        wanted = np.mean([values(frame, metric) for frame in each], axis=0)
        assert values(whole, metric) == pytest.approx(wanted, rel=2e-3, abs=2e-6), metric
    assert any(not np.allclose(values(whole, m), values(first, m), rtol=1e-3) for m in metrics)
    if (largest := LARGEST.get(name)) is not None:
        wanted = np.max([values(frame, largest) for frame in each], axis=0)
        assert values(whole, largest) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "sequences"),
    [
        ("layer_drop(sequences=3)", 3),
        ("layer_use(sequences=3)", 3),
        ("gradients(sequences=5)", 5),
        ("attention(sequences=6)", 6),
        ("low_precision(sequences=5)", 8),  # whole batches
        ("logit_lens(tokens=30)", 3),
        ("jacobian(sequences=2,tokens=4)", 2),
        ("bounds(sequences=2)", 2),
    ],
)
def test_an_option_measures_less_and_the_table_says_how_much(spec, sequences, inputs):
    model, ids = inputs
    (frame,) = lamina.probe(model, spec, ids[:16]).values()
    assert set(frame["sequences"]) == {sequences}
    context = make_context(model, ProbeSettings(), ids[:16])
    measure(context, [make(spec)], ProbeSettings())
    assert f"{make(spec).name}: Lamina measured {sequences} of 16 sequences." in context.notes


def test_the_setting_sequences_limits_what_every_probe_sees(inputs):
    model, ids = inputs
    frame = lamina.probe(model, "hidden_states", ids, sequences=8)["hidden_states"]
    assert set(frame["sequences"]) == {8}


def test_a_sample_of_a_corpus_is_what_the_costly_probes_are_limited_to(inputs):
    model, ids = inputs
    settings = ProbeSettings()
    context = make_context(model, settings, ids[:20], sample=True)
    frames = measure(context, [make("layer_drop"), make("gradients")], settings)
    assert set(frames["layer_drop"]["sequences"]) == {4}
    assert set(frames["gradients"]["sequences"]) == {16}
    assert "layer_drop: Lamina measured 4 of 20 sequences." in context.notes
    plain = measure(context, [make("layer_drop")], settings, sampled=False)["layer_drop"]
    assert list(plain) == ["layer", "size", "meaning", "metric", "value", "standard_error"]  # as studies store it


def test_a_corpus_file_is_read_whole_and_what_makes_no_block_is_said(tmp_path, caplog):
    path = tmp_path / "mine.txt"
    path.write_text("a" * 1000, encoding="utf-8")
    settings = ProbeSettings(corpus=str(path), tokenizer="bytes", sequence_length=10)
    context = make_context(bytes_model(), settings)
    assert sum(len(batch["input_ids"]) for batch in context.batches) == 100
    assert context.whole
    assert caplog.messages == []
    longer = ProbeSettings(corpus=str(path), tokenizer="bytes", sequence_length=64)
    context = make_context(bytes_model(), longer)
    assert sum(len(batch["input_ids"]) for batch in context.batches) == 15
    assert any("drops the last 40 of 1,000 tokens" in note for note in context.notes)
    caplog.clear()
    lamina.probe(bytes_model(), "hidden_states", "a" * 100, load_tokenizer("bytes"), sequence_length=64)
    assert caplog.messages == [
        "texts_or_blocks: Lamina drops the last 36 of 100 tokens, which do not fill a block"
    ]  # from Python, where there is no page
