"""logit_lens against the final norm and the head applied by hand, in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from probes.tiny import albert, bert, blocks, gemma2, llama, states, value, vit

import lamina
from lamina.errors import UserError
from lamina.probes import logit_lens
from lamina.probes.engine.losses import masked_positions
from lamina.probes.engine.measure import make_context, probe
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.logit_lens import LogitLens

TOKENIZER = SimpleNamespace(mask_token_id=4)


def measure(model, ids, spec="logit_lens", **settings):
    return probe(model, [spec], ids, tolerance=0.0, batch_size=2, **settings)["logit_lens"]


def naive(logits, final, targets):
    """[sequences, tokens, vocabulary] in float64, [sequences, tokens]."""
    p, q = final.softmax(-1), logits.softmax(-1)
    return {
        "cross_entropy": -q.gather(-1, targets.unsqueeze(-1)).squeeze(-1).log(),
        "kl_to_final": (p * (p / q).log()).sum(-1),
        "top1_agreement": (logits.argmax(-1) == final.argmax(-1)).double(),
    }


def expect(frame, all_logits, targets):
    for layer, logits in enumerate(all_logits):
        for metric, x in naive(logits, all_logits[-1], targets).items():
            place = {"layer": layer, "role": "state"}
            assert value(frame, metric, **place) == pytest.approx(float(x.mean()), rel=1e-4, abs=2e-6), (layer, metric)
            error = x.mean(1).std(correction=1) / math.sqrt(len(x))
            assert value(frame, metric, "standard_error", **place) == pytest.approx(float(error), rel=1e-3, abs=2e-6)


@torch.no_grad()
def test_a_causal_model_predicts_the_next_token_from_each_state():
    model, ids = llama(), blocks()
    model.model.norm.weight.normal_(1.0, 0.3)
    frame = measure(model, ids)
    norm, head = model.model.norm.weight.double(), model.lm_head.weight.double()
    logits = []
    for x in states(model, ids):
        normed = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * norm
        logits.append((normed @ head.T)[:, :-1])
    expect(frame, logits, ids[:, 1:])
    loss = float(model(input_ids=ids, labels=ids).loss)
    assert value(frame, "cross_entropy", layer=3) == pytest.approx(loss, rel=1e-5)
    assert value(frame, "kl_to_final", layer=3) == 0.0
    assert value(frame, "top1_agreement", layer=3) == 1.0
    assert value(frame, "uniform_cross_entropy", layer=-1) == pytest.approx(math.log(61))
    assert float(model(input_ids=ids, labels=ids).loss) == loss  # the layers are back


@torch.no_grad()
def test_logits_of_few_tokens_at_a_time_give_the_same_and_never_stand_whole(monkeypatch):
    model, ids = llama(), blocks()
    whole = measure(model, ids)
    context = make_context(model, ProbeSettings(), ids)
    monkeypatch.setattr(logit_lens, "_LOGITS", 61 * 4)
    instance, sizes = LogitLens(), []
    instance.begin(context)
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[:-1].numel()))
    parts = instance.finish(context)
    assert max(sizes) == 4
    torch.testing.assert_close(torch.tensor(parts["value"]), torch.tensor(whole["value"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "head"),
    [(bert, "cls"), (lambda: albert(initializer_range=0.3), "predictions")],
    ids=["bert", "albert, whose one layer runs once a state"],
)
@torch.no_grad()
def test_a_masked_model_predicts_what_is_behind_its_mask(make, head):
    model, ids = make(), blocks()
    frame = finished(make_context(model, ProbeSettings(batch_size=2), ids, TOKENIZER))
    chosen = masked_positions(16)
    hidden = ids.clone()
    hidden[:, chosen] = TOKENIZER.mask_token_id
    found = model(input_ids=hidden, output_hidden_states=True).hidden_states
    read = model.get_submodule(head)  # with its transform
    expect(frame, [read(x).double()[:, chosen] for x in found], ids[:, chosen])


@torch.no_grad()
def test_a_model_without_a_final_norm_is_read_by_its_head_alone():
    model = lamina.build(llama().config, "keel", num_layers=3).eval()
    ids = blocks()
    frame = measure(model, ids)
    head = model.lm_head.weight.double()
    expect(frame, [(x @ head.T)[:, :-1] for x in states(model, ids)], ids[:, 1:])


@torch.no_grad()
def test_a_soft_cap_of_the_logits_counts():
    model = gemma2(initializer_range=1.0, final_logit_softcapping=3.0)
    ids = blocks()
    frame = measure(model, ids)
    logits = []
    for x in states(model, ids):
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + model.model.norm.weight.double())
        logits.append(3 * torch.tanh(normed @ model.lm_head.weight.double().T / 3)[:, :-1])
    expect(frame, logits, ids[:, 1:])


@torch.no_grad()
def test_shared_layers_and_padding():
    model = llama()
    ids = blocks(sequences=2, tokens=10)
    mask = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    context = make_context(model, ProbeSettings(batch_size=2), ids)
    context.batches = [{"input_ids": ids, "attention_mask": mask}]
    frame = finished(context)
    context.batches = [{"input_ids": ids[:1]}, {"input_ids": ids[1:, :6]}]
    wanted = finished(context)
    torch.testing.assert_close(torch.tensor(frame["value"]), torch.tensor(wanted["value"]), rtol=1e-4, atol=1e-5)


def finished(context):
    instance = LogitLens()
    instance.begin(context)
    return instance.finish(context)


def test_models_without_a_vocabulary_are_refused_in_one_line():
    with pytest.raises(UserError, match="logit_lens: LlamaModel has no language-model head"):
        measure(llama().model, blocks())
    with pytest.raises(UserError, match="logit_lens"):
        probe(vit(), ["logit_lens"], torch.randn(2, 3, 16, 16), tolerance=0.0)
    with pytest.raises(UserError, match="mask token"):
        measure(bert(), blocks())


def test_a_head_that_reads_more_than_the_last_layer_is_refused():
    model = llama()
    context = make_context(model, ProbeSettings(), blocks())
    early = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: early.append(output))

    def add(module, args, output):
        output.last_hidden_state = output.last_hidden_state + early[-1]

    model.model.register_forward_hook(add)
    with pytest.raises(UserError, match="depend on more than the last state"):
        LogitLens().begin(context)


def test_logits_that_are_not_finite_end_this_probe_alone():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.inf
    with pytest.raises(UserError, match="logits are not finite"):
        LogitLens().begin(make_context(model, ProbeSettings(), blocks()))
