"""What a user hands over is measured whole by every probe, and the table says how much that was."""

import numpy as np
import pytest
from probes.tiny import blocks, llama
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.data.tokenizers import load_tokenizer
from lamina.probes.engine.measure import make_context, measure
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import make, names

SEQUENCES, TOKENS = 70, 12  # more than any probe takes of a corpus, and than the corpus' 64 blocks
SEARCHED = {"jacobian": 7, "bounds": 7}  # a search in each sequence
WEIGHTS = {"gains"}
OPTIONS = {"spectra": "spectra(few_tokens=warn)", "jacobian": "jacobian(tolerance=0.0001)"}
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
    "similarity": {"cosine", "cosine_by_distance", "block_influence"},
}
LARGEST = {"attention": "max_logit", "hidden_states": "abs_max", "low_precision": "max_error"}


def table(model, name, ids):
    frame = lamina.probe(model, OPTIONS.get(name, name), ids)[name]
    if name == "bounds":  # neither the worst token nor what is fitted over all sequences is a mean
        return frame[~frame["role"].str.endswith("_token") & (frame["role"] != "fusenorm_eq_9") & (frame["layer"] >= 0)]
    return frame


def values(frame, metric):
    return frame.loc[frame["metric"] == metric, "value"].to_numpy(dtype=float)


def bytes_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes))


@pytest.fixture
def inputs():
    ids = blocks(SEQUENCES, TOKENS)
    return llama(layers=2), ids


@pytest.mark.parametrize("name", names())
def test_all_sequences_of_a_user_are_measured_and_the_table_counts_them(name, inputs):
    model, ids = inputs
    ids = ids[: SEARCHED.get(name, SEQUENCES)]
    frame = table(model, name, ids)
    read = frame[frame["sequences"] > 0]
    assert set(read["sequences"]) == (set() if name in WEIGHTS else {len(ids)})
    tokens = len(ids) if name == "angular_distance" else ids.numel()  # each one's last, by its default
    assert set(read["tokens"]) == (set() if name in WEIGHTS else {tokens})
    if name == "spectra":
        assert set(read["role"]) == {"pre", "post"}


@pytest.mark.parametrize("name", names())
def test_figures_and_sentences_are_made_of_any_result(name, inputs):
    model, ids = inputs
    made = make(OPTIONS.get(name, name))
    frame = lamina.probe(model, [made], ids[:4])[name]
    drawn = list(made.figures(frame))
    assert drawn
    assert all(caption and figure.data for figure, caption in drawn)
    assert "" not in (said := list(made.sentences(frame)))
    assert said


@pytest.mark.parametrize("name", AVERAGED)
def test_what_is_measured_is_the_mean_of_what_single_sequences_give(name, inputs):
    model, ids = inputs
    ids = ids[: SEARCHED.get(name, 20)]
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
    assert f"{make(spec).name}: measured on {sequences} of 16 sequences." in context.notes


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
    assert "layer_drop: measured on 4 of 20 sequences." in context.notes
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
    assert any("the last 40 of 1,000 tokens are fewer than a block" in note for note in context.notes)
    caplog.clear()
    lamina.probe(bytes_model(), "hidden_states", "a" * 100, load_tokenizer("bytes"), sequence_length=64)
    assert caplog.messages == [
        "texts_or_blocks: the last 36 of 100 tokens are fewer than a block and are left out"
    ]  # from Python, where there is no page
