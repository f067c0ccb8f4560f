"""Gradients by layer, sub-layer and role against torch's own, and the spike score against its definition."""

import json
import math

import numpy as np
import pytest
import torch
from naive_states import context_of, layers_of
from small_models import MODELS, llama_and_ids, small_inputs, small_model
from torch import nn
from transformers import LlamaConfig

import lamina
from lamina.errors import UserError
from lamina.modeling.initialization import weights
from lamina.probes.engine.measure import probe, run
from lamina.probes.engine.spikes import spike_scores, spikes
from lamina.probes.gradients import Gradients, places


class Masks:
    """As much of a tokenizer as a masked model's loss asks for."""

    mask_token_id = 3


def causal_loss(model, ids):
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def gradients_of(model, ids):
    model.zero_grad()
    causal_loss(model, ids).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def table(frame, metric="gradient_norm"):
    rows = frame[frame["metric"] == metric]
    return rows.set_index(["layer", "sublayer", "role"])["value"]


def norm(tensors):
    return float(torch.cat([t.flatten() for t in tensors]).double().norm())


def variance(tensors):
    return float(torch.cat([t.flatten() for t in tensors]).double().var(correction=0))


@pytest.fixture
def llama():
    return llama_and_ids(sequences=5)


def test_total_norm_is_torchs_and_parts_are_sums_over_their_parameters(llama):
    model, ids = llama
    frame = probe(model, "gradients", ids, batch_size=2)["gradients"]  # in three batches, the last a smaller one
    found, variances = table(frame), table(frame, "gradient_variance")
    true = gradients_of(model, ids)
    total = nn.utils.get_total_norm(true.values())
    assert found[-1, "model", "all"] == pytest.approx(float(total), rel=1e-5)
    path = "model.layers.1."
    parts = {
        (1, "attention", "query"): [path + "self_attn.q_proj.weight"],
        (1, "attention", "pre_norm"): [path + "input_layernorm.weight"],
        (1, "feed_forward", "feed_forward_out"): [path + "mlp.down_proj.weight"],
        (1, "feed_forward", "pre_norm"): [path + "post_attention_layernorm.weight"],
        (1, "attention", "all"): [n for n in true if path + "self_attn" in n or n == path + "input_layernorm.weight"],
        (1, "block", "all"): [n for n in true if n.startswith(path)],
        (-1, "model", "embedding"): ["model.embed_tokens.weight"],
        (-1, "model", "readout"): ["lm_head.weight"],
        (-1, "model", "final_norm"): ["model.norm.weight"],
        (-1, "model", "all"): list(true),
    }
    for key, names in parts.items():
        assert found[key] == pytest.approx(norm([true[n] for n in names]), rel=1e-5), key
        assert variances[key] == pytest.approx(variance([true[n] for n in names]), rel=1e-5), key


def test_gradients_of_the_states_are_autograds(llama):
    model, ids = llama
    frame = probe(model, "gradients", ids, batch_size=3)["gradients"]
    states = []
    hooks = [layers_of(model)[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda _, args, out: states.append(out)) for layer in layers_of(model)]
    true = torch.autograd.grad(causal_loss(model, ids), states)
    for hook in hooks:
        hook.remove()
    for index, gradient in enumerate(true):
        assert table(frame)[index, "block", "state"] == pytest.approx(norm([gradient]), rel=1e-5)
        found = table(frame, "gradient_variance")[index, "block", "state"]
        assert found == pytest.approx(variance([gradient]), rel=1e-5)


def test_a_training_steps_own_gradients_and_switches_stay(llama):
    model, ids = llama
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: p.grad for name, p in model.named_parameters()}
    frame = probe(model, "gradients", ids)["gradients"]
    assert all(p.grad is before[name] and bool((p.grad == 2).all()) for name, p in model.named_parameters())
    assert not frozen.requires_grad
    assert table(frame)[0, "feed_forward", "feed_forward_in"] > 0
    context = context_of(model, [{"input_ids": ids}])
    model.get_output_embeddings = lambda: None
    with pytest.raises(UserError, match="no head"):
        run(context, [Gradients()])
    assert all(p.grad is before[name] for name, p in model.named_parameters())


def test_texts_of_different_lengths_weigh_by_their_predicted_tokens(llama):
    model, ids = llama
    batches = [{"input_ids": ids[:2, :9]}, {"input_ids": ids[2:3, :4]}]
    found = table(run(context_of(model, batches), [Gradients()])["gradients"])
    model.zero_grad()
    (2 * 8 * causal_loss(model, ids[:2]) / 19 + 3 * causal_loss(model, ids[2:3, :4]) / 19).backward()
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert found[-1, "model", "all"] == pytest.approx(float(total), rel=1e-5)


def test_shared_and_tied_parameters_count_once():
    model = small_model("albert")
    context = context_of(model, [small_inputs(model)], Masks())
    made = Gradients()
    frame = run(context, [made])["gradients"]
    found = table(frame)
    assert [key for key in found.index if key[1:] == ("block", "all")] == [(0, "block", "all")]
    assert sum(key[1:] == ("block", "state") for key in found.index) == 4
    assert any("layers 0-2 share their parameters" in note for note in context.notes)
    assert any("tied" in note for note in context.notes)
    assert "of the layers' shared parameters" in " ".join(made.sentences(frame))
    squares = found[0, "block", "all"] ** 2 + sum(v**2 for k, v in found.items() if k[0] == -1 and k[2] != "all")
    assert squares**0.5 == pytest.approx(found[-1, "model", "all"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name, (_, kind, _) in MODELS.items() if "Image" not in kind])
def test_every_parameter_of_an_architecture_has_a_place(name):
    model = small_model(name)
    context = context_of(model, [small_inputs(model)])
    found = places(model, context.structure)
    assert found.keys() == dict(model.named_parameters()).keys()
    inside = {id(p) for site in context.structure.layers for p in site.module.parameters()}
    for path, parameter in model.named_parameters():
        layer, sublayer, role = found[path]
        assert (layer >= 0) == (id(parameter) in inside), path
        assert (sublayer == "model") == (layer < 0), path
        assert role, path
    within = [place for place in found.values() if place[0] >= 0]
    kinds = {sublayer.kind for site in context.structure.layers for sublayer in site.sublayers}
    assert {sublayer for _, sublayer, _ in within} == kinds  # nothing is left to "block"


@pytest.mark.parametrize("placement", ["pre_ln", "peri_ln", "keel", "fusenorm", "hybridnorm"])
def test_roles_of_ours_are_those_of_the_initializer(placement):
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    model = lamina.build(config, placement, num_layers=3)
    context = context_of(model, [{"input_ids": torch.arange(6)[None]}])
    found = places(model, context.structure)
    norms = ("pre_norm", "out_norm", "post_norm", "inner_norm", "embedding_norm", "final_norm")
    for weight in weights(model):
        layer, sublayer, role = found[weight.name]
        assert layer == weight.layer
        if weight.role == "vector":
            assert role in norms, weight.name
        else:
            assert role == weight.role, weight.name
        if layer >= 0 and role != "post_norm":
            assert sublayer == weight.sublayer, weight.name


def test_the_spike_score_of_the_run_beside_the_checkpoint(llama, tmp_path):
    model, ids = llama
    lines = [json.dumps({"step": s, "loss": 9.0 if s == 90 else 1 + s % 2, "grad_norm": 1.0}) for s in range(100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    context = context_of(model, [{"input_ids": ids}])
    context.state["run"] = tmp_path
    made = Gradients()
    frame = run(context, [made])["gradients"]
    assert table(frame, "spike_score").to_dict() == {(-1, "model", "loss"): 0.01, (-1, "model", "grad_norm"): 0.0}
    assert any("100 values" in note for note in context.notes)
    assert "In the run's training loss, 1.00 %" in " ".join(made.sentences(frame))


def naive(series, window, sigmas, fewest):
    found, before = [], []
    for value in series:
        if not math.isfinite(value):
            found.append(True)
            continue
        last = before[-window:]
        spike = False
        if len(before) >= fewest:
            mean = sum(last) / len(last)
            deviation = math.sqrt(sum((v - mean) ** 2 for v in last) / len(last))
            spike = value - mean >= sigmas * deviation and value > mean
        found.append(spike)
        before.append(value)
    return found


@pytest.mark.parametrize(("window", "sigmas", "fewest"), [(20, 2.0, 5), (1000, 3.0, 32), (7, 1.0, 2)])
def test_a_spike_is_so_many_deviations_above_the_values_before_it(window, sigmas, fewest):
    series = np.random.default_rng(0).normal(3, 1, 300).tolist()
    series[40] = 50.0
    series[90] = math.nan
    series[91] = -50.0
    series[200] = math.inf
    found = spikes(series, window=window, sigmas=sigmas, fewest=fewest)
    wanted = naive(series, window, sigmas, fewest)
    assert found.tolist() == wanted
    assert 2 < sum(wanted) < 100


def test_long_series_are_judged_piece_by_piece_as_in_one():
    series = np.random.default_rng(1).standard_t(2, 5000).tolist()
    assert spikes(series, window=50).tolist() == naive(series, 50, 7.0, 32)
    assert sum(spikes(series, window=50)) > 3


def test_a_constant_series_has_none_and_the_first_values_are_not_judged():
    assert not spikes([0.3] * 100).any()
    assert not spikes([0.1] * 10 + [9.0] + [0.1] * 10).any()
    assert spikes([0.3] * 50 + [0.31])[-1]
    assert not len(spikes([]))


def test_it_is_read_off_a_runs_metrics(tmp_path):
    assert spike_scores(tmp_path) == {}
    records = [{"step": s, "loss": 2.0 + 0.01 * (s % 5), "grad_norm": None} for s in range(99)]
    records += [{"step": 99, "loss": 9.0, "grad_norm": None}, {"step": 99, "eval_loss": 3.0}]
    records += [{"step": 50, "loss": 2.0, "grad_norm": None}]  # logged again by a resumed run
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 100, "lo']), encoding="utf-8")
    assert spike_scores(tmp_path) == {"loss": (0.01, 100)}  # a norm that was never logged is none


def test_a_diverged_steps_null_is_a_spike(tmp_path):
    lines = [json.dumps({"step": s, "loss": None if s == 3 else 1.0, "grad_norm": 0.5}) for s in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert spike_scores(tmp_path) == {"loss": (0.25, 4), "grad_norm": (0.0, 4)}
