"""Dropping layers against really deleting them from the list of layers, and against weights set to zero."""

import copy
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from naive_states import context_of
from probes.tiny import llama
from small_models import MODELS, llama_and_ids, small_inputs, small_model, stir
from spread import spread
from test_gradients import Masks, causal_loss
from transformers import LlamaConfig

import lamina
from lamina.errors import UserError
from lamina.placements import names
from lamina.probes.engine import registry
from lamina.probes.engine.losses import token_losses
from lamina.probes.engine.measure import make_context, measure, probe, run
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.layer_drop import LayerDrop, PassesWithoutLayers, removed

CONFIG = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
CAUSAL = [name for name, (_, kind, _) in MODELS.items() if "CausalLM" in kind or "LMHead" in kind]
MASKED = [name for name, (_, kind, _) in MODELS.items() if "MaskedLM" in kind]


@torch.no_grad()
def built(placement, num_layers=4):
    model = stir(lamina.build(LlamaConfig(**CONFIG), placement, num_layers=num_layers).eval())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.3)
    return model


@torch.no_grad()
def loss_without(model, ids, layers):
    """The loss of a copy whose layers are deleted, nothing else of it touched."""
    model = copy.deepcopy(model)
    holder = model.model.layers
    for index in sorted(layers, reverse=True):
        del holder[index]
    return float(causal_loss(model, ids))


@torch.no_grad()
def loss_of_bare(model, ids, layers):
    """The loss of a copy whose layers' output projections are zero: nothing is added, all else stays."""
    model = copy.deepcopy(model)
    for index in layers:
        for name, parameter in model.model.layers[index].named_parameters():
            if name.split(".")[-2] in ("o_proj", "down_proj"):
                parameter.zero_()
    return float(causal_loss(model, ids))


def table(frame, metric="loss_increase"):
    rows = frame[frame["metric"] == metric]
    return rows.set_index(["layer", "meaning"])["value"].to_dict()


@pytest.mark.parametrize("placement", spread(names()))
def test_each_layer_of_every_placement_against_deleting_it(placement):
    model = built(placement)
    ids = torch.randint(3, 40, (3, 8))
    frame = probe(model, "layer_drop", ids, batch_size=2)["layer_drop"]
    whole = float(causal_loss(model, ids).detach())
    found = table(frame)
    columns = ["layer", "size", "meaning", "metric", "value", "standard_error", "sequences", "tokens"]
    assert list(frame.columns) == columns
    assert table(frame, "loss") == {(-1, ""): pytest.approx(whole, rel=1e-5)}
    for layer in range(4):
        wanted = loss_without(model, ids, [layer]) - whole
        assert found[layer, "remove"] == pytest.approx(wanted, abs=2e-5), layer
        rise = math.exp(wanted + whole) - math.exp(whole)
        assert table(frame, "perplexity_increase")[layer, "remove"] == pytest.approx(rise, abs=1e-2), layer
        wanted = loss_of_bare(model, ids, [layer]) - whole
        assert found[layer, "branch"] == pytest.approx(wanted, abs=2e-5), layer
    assert max(map(abs, found.values())) > 0.01
    norms = [norm for _, _, norm in context_of(model, [{"input_ids": ids}]).structure.norms()]
    scaled = placement in ("doge", "muse_spark")  # a skip that is left when the branch is gone
    assert (scaled or any(norm.role == "post_norm" for norm in norms)) == any(
        found[layer, "remove"] != found[layer, "branch"] for layer in range(4)
    )


@pytest.mark.parametrize("placement", ["layernorm_scaling", "keel"])
def test_runs_of_layers_at_every_start(placement):
    model = built(placement, num_layers=4)
    ids = torch.randint(3, 40, (3, 8))
    frame = probe(model, "layer_drop(block=2)", ids)["layer_drop"]
    found, whole = table(frame), float(causal_loss(model, ids).detach())
    assert set(frame.loc[frame["layer"] >= 0, "size"]) == {2}
    assert {layer for layer, _ in found} == {0, 1, 2}
    for start in range(3):
        gone = range(start, start + 2)
        assert found[start, "remove"] == pytest.approx(loss_without(model, ids, gone) - whole, abs=2e-5)
        assert found[start, "branch"] == pytest.approx(loss_of_bare(model, ids, gone) - whole, abs=2e-5)


def test_albert_loses_one_call_of_its_one_layer():
    model = small_model("albert")
    ids = small_inputs(model)["input_ids"]
    with torch.no_grad():
        before = token_losses(model, {"input_ids": ids}, Masks()).mean()
        frame = run(context_of(model, [{"input_ids": ids}], Masks()), [LayerDrop()])["layer_drop"]
        model.config.num_hidden_layers = 2  # any of the three is as good as another
        after = token_losses(model, {"input_ids": ids}, Masks()).mean()
    found = table(frame)
    for layer in range(3):
        assert found[layer, "remove"] == pytest.approx(float(after - before), abs=1e-6)
    assert len({round(found[layer, "branch"], 6) for layer in range(3)}) == 3  # norms stay, so places differ


@pytest.mark.parametrize(
    "name", spread(CAUSAL + MASKED, ("llama", "gemma2", "qwen3_moe", "bloom", "falcon", "bert", "albert"))
)
def test_suffixes_are_what_whole_passes_without_the_layers_are(name):
    """The layers before the dropped one are not run again; the other way is hooks that leave all of them to run."""
    model = small_model(name)
    inputs = small_inputs(model)
    context = context_of(model, [inputs], Masks())
    state = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def losses():
        return token_losses(model, inputs, Masks()).clone()

    whole = losses()
    for size in (1, 2):
        with PassesWithoutLayers(context, losses) as passes, torch.no_grad():
            assert torch.equal(passes.full(), whole)
            assert passes.chained
            found = []
            for start in range(3 - size + 1):
                plain = passes.without(start, size)
                found.append((plain, passes.without_branches(start, size)))
        for start, (plain, bare) in enumerate(found):
            with removed(context, range(start, start + size)):
                torch.testing.assert_close(plain, losses(), rtol=1e-5, atol=1e-6)
            with removed(context, range(start, start + size), "branch"):
                torch.testing.assert_close(plain if bare is None else bare, losses(), rtol=1e-5, atol=1e-6)
            assert not torch.allclose(plain, whole, atol=1e-7)
    assert torch.equal(losses(), whole)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_that_changes_the_stream_between_layers_is_run_whole():
    model, ids = llama_and_ids()
    context = context_of(model, [{"input_ids": ids}])
    scale = model.model.layers[1].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))
    with PassesWithoutLayers(context, lambda: token_losses(model, {"input_ids": ids})) as passes, torch.no_grad():
        passes.full()
        assert not passes.chained
        found = passes.without(1, 1)
    with removed(context, [1]), torch.no_grad():
        torch.testing.assert_close(found, token_losses(model, {"input_ids": ids}))
    scale.remove()


def test_generation_with_a_cache_without_a_layer_is_that_of_the_deleted_layer():
    for layer in (0, 1):
        model, ids = llama_and_ids(tokens=5)
        context = context_of(model, [{"input_ids": ids}])
        with removed(context, [layer]):
            found = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)
        del model.model.layers[layer]
        for index, rest in enumerate(model.model.layers):
            rest.self_attn.layer_idx = index
        model.config.num_hidden_layers = 2
        assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True))


def test_standard_errors_are_of_the_paired_difference_over_sequences():
    model, ids = llama_and_ids(sequences=6)
    frame = probe(model, "layer_drop(sequences=0)", ids, batch_size=4)["layer_drop"]
    whole = np.array([float(causal_loss(model, row[None]).detach()) for row in ids])
    other = np.array([loss_without(model, row[None], [1]) for row in ids])
    rows = frame.set_index(["layer", "meaning", "metric"])["standard_error"]
    assert rows[1, "remove", "loss_increase"] == pytest.approx((other - whole).std(ddof=1) / 6**0.5, rel=1e-3)
    assert rows[-1, "", "loss"] == pytest.approx(whole.std(ddof=1) / 6**0.5, rel=1e-3)
    # leaving each sequence out in turn (the jackknife) agrees with the error to first order
    keep = [np.delete(np.arange(6), i) for i in range(6)]
    jackknife = np.array([np.exp(other[k].mean()) - np.exp(whole[k].mean()) for k in keep])
    error = math.sqrt(5 / 6 * ((jackknife - jackknife.mean()) ** 2).sum())
    assert rows[1, "remove", "perplexity_increase"] == pytest.approx(error, rel=0.1)


def test_it_stops_when_the_errors_are_small_and_says_after_how_many_sequences():
    model, ids = llama_and_ids(sequences=40)
    context = context_of(model, [{"input_ids": part} for part in ids.split(4)])
    run(context, [LayerDrop(standard_error=0.99, sequences=0)])
    assert "layer_drop: Lamina measured 16 of 40 sequences." in context.notes
    context.notes.clear()
    run(context, [LayerDrop(standard_error=0, sequences=0)])
    assert not any("measured on" in note for note in context.notes)


def test_the_angular_distance_stands_beside():
    model, ids = llama_and_ids(sequences=4)
    both = probe(model, ["layer_drop(block=2)", "angular_distance"], ids, tolerance=0)
    drop, angle = both["layer_drop"], both["angular_distance"]
    angle = angle[(angle["size"] == 2) & (angle["metric"] == "angular_distance")]
    assert table(drop, "angular_distance") == {
        (start, ""): pytest.approx(value, abs=1e-6) for start, value in zip(angle["start"], angle["value"], strict=True)
    }


@pytest.mark.parametrize(("higher", "sign"), [(True, 1), (False, -1)])
def test_a_score_of_ones_own_in_which_harm_is_positive(higher, sign):
    model = built("post_ln", num_layers=3)
    ids = torch.randint(3, 40, (3, 8))
    seen = []

    def score(given):
        assert given is model
        with torch.no_grad():
            seen.append(float(causal_loss(given, ids)))
        return seen[-1]

    made = LayerDrop(score=score, higher_is_better=higher)
    frame = probe(model, [made], ids)["layer_drop"]
    whole = seen[0]
    for layer in range(3):
        wanted = sign * (whole - loss_without(model, ids, [layer]))
        assert table(frame, "score_drop")[layer, "remove"] == pytest.approx(wanted, abs=1e-5)
        wanted = sign * (whole - loss_of_bare(model, ids, [layer]))
        assert table(frame, "score_drop")[layer, "branch"] == pytest.approx(wanted, abs=1e-5)
    assert list(made.sentences(frame))
    assert list(made.figures(frame))


def test_a_score_is_not_taken_twice_where_the_meanings_are_one():
    model, ids = llama_and_ids()
    calls = []
    probe(model, [LayerDrop(score=lambda model: calls.append(1) or 1.0)], ids)
    assert len(calls) == 1 + 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_score_that_fails_leaves_the_model_whole():
    model, ids = llama_and_ids()

    def score(given):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(model, [LayerDrop(score=score)], ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_layers_compiled_in_place_are_dropped_all_the_same():
    model, ids = llama_and_ids()
    plain = probe(model, "layer_drop", ids)["layer_drop"]
    for layer in model.model.layers:
        layer.compile(backend="eager")
    calls = [layer._compiled_call_impl for layer in model.model.layers]
    context = context_of(model, [{"input_ids": ids}])
    pd.testing.assert_frame_equal(run(context, [LayerDrop()])["layer_drop"], plain)
    assert [layer._compiled_call_impl for layer in model.model.layers] == calls


def test_a_task_of_lm_eval_from_a_local_file(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")  # optional: pip install lm-eval
    from lamina.data.tokenizers import load_tokenizer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["red", "blue", "cat", "dog", "sea", "sun"]
    rows = [{"text": f"The {words[i % 6]} is", "choices": [" a", f" {words[i % 5]}"], "gold": i % 2} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "task.yaml").write_text(
        f"""task: lamina_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "data.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
        encoding="utf-8",
    )
    tokenizer = load_tokenizer("bytes")
    model = stir(lamina.build(LlamaConfig(**{**CONFIG, "vocab_size": len(tokenizer)}), "post_ln", num_layers=2).eval())
    made = LayerDrop(task="lamina_local", include_path=str(tmp_path), run_code=True)
    frame = probe(model, [made], ["some text " * 9], tokenizer=tokenizer, sequence_length=32)["layer_drop"]
    whole = frame.loc[frame["metric"] == "accuracy", "value"].iloc[0]
    with torch.no_grad():

        def right(model):
            found = []
            for row in rows:
                prompt = tokenizer(row["text"])["input_ids"]
                scores = []
                for choice in row["choices"]:
                    answer = tokenizer(choice, add_special_tokens=False)["input_ids"]
                    ids = torch.tensor([prompt + answer])
                    chances = model(input_ids=ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
                    scores.append(float(chances.gather(1, torch.tensor(answer)[:, None]).sum()))
                found.append(int(np.argmax(scores)) == row["gold"])
            return np.mean(found)

        assert whole == pytest.approx(right(model))
        for layer in range(2):
            deleted = copy.deepcopy(model)
            del deleted.model.layers[layer]
            wanted = whole - right(deleted)
            assert table(frame, "accuracy_drop")[layer, "remove"] == pytest.approx(wanted)
    assert (frame["standard_error"] > 0).all()
    with pytest.raises(UserError, match=r"task: unknown task 'nothere'.*\*.yaml in include_path"):
        registry.make("layer_drop(task=nothere)")


@pytest.mark.parametrize(
    ("model", "spec", "said"),
    [
        (small_model("llama"), "layer_drop(block=3)", "block: 3 is too large for 3 layers"),
        (small_model("llama").model, "layer_drop", "no head that predicts tokens"),
        (built("pre_ln", num_layers=1), "layer_drop", "the model has a single layer"),
        (small_model("vit"), "layer_drop", "no head that predicts tokens"),
    ],
)
def test_what_a_model_cannot_give_is_refused(model, spec, said):
    (inputs,) = small_inputs(model).values()
    with pytest.raises(UserError, match=said):
        probe(model, spec, inputs)


def test_images_are_scored_by_ones_own_measure():
    model = small_model("vit")
    pixels = small_inputs(model)["pixel_values"]
    with torch.no_grad():
        made = LayerDrop(score=lambda model: float(model(pixels).logits[0, 0].detach()))
        found = table(probe(model, [made], pixels)["layer_drop"], "score_drop")
        whole = float(model(pixels).logits[0, 0])
        del model.base_model.layers[2]
        assert found[2, "remove"] == pytest.approx(whole - float(model(pixels).logits[0, 0]), abs=1e-6)


def _frame(values, meanings=("remove",)):
    rows = [(-1, 0, "", "loss", 3.0, 0.1)]
    for meaning in meanings:
        shift = 0.5 if meaning == "branch" else 0
        rows += [(layer, 1, meaning, "loss_increase", v + shift, 0.001) for layer, v in enumerate(values)]
    rows += [(layer, 1, "", "angular_distance", v / 10, 0.0) for layer, v in enumerate(values)]
    return pd.DataFrame(rows, columns=["layer", "size", "meaning", "metric", "value", "standard_error"])


def test_sentences_name_the_layers_that_could_go():
    said = list(LayerDrop().sentences(_frame([2.0, 0.4, 0.02, 0.01, 0.3])))
    least = "Removing layer 3 harms least (loss increase 0.01 ± 0.001 nats)"
    assert said[0] == f"{least}, and removing layer 0 harms most (2 ± 0.001 nats)."
    assert "You can remove one of the layers 2-3" in said[1]
    rank = "over all layers, angle and measured harm have the Spearman correlation 1.00"
    assert said[2] == f"The angular distance agrees that layer 3 matters least ({rank})."
    frame = _frame([2.0, 0.4, 0.02, 0.01, 0.3])
    turned = frame["metric"].eq("angular_distance") & frame["layer"].eq(1)
    apart = list(LayerDrop().sentences(frame.assign(value=frame["value"].mask(turned, 1e-4))))[2]
    assert apart.startswith("By angular distance, layer 1 matters least, but removing layer 3 harms least (over all la")
    assert apart.endswith("Trust the measured harm, because the angle is only a prediction.")
    every = list(LayerDrop().sentences(_frame([0.01, 0.02, 0.005, 0.0])))[1]
    assert every.startswith("Removing any one layer does little harm")  # and not a list of all layers
    equal = next(LayerDrop().sentences(_frame([0.3] * 4)))
    assert equal == "Removing any one layer harms equally (loss increase 0.3 ± 0.001 nats)."
    both = " ".join(LayerDrop().sentences(_frame([2.0, 0.4, 0.02, 0.01, 0.3], ("remove", "branch"))))
    assert "attention and feed-forward set to zero, but not the norms" in both
    assert "Every layer matters" in both
    frame = _frame([2.0, 0.4, 0.02, 0.01])
    assert "layers 3 to 4" in next(LayerDrop().sentences(frame.assign(size=2)))
    # of one sequence the error is unknown, and excuses no layer
    assert "one of the layers 2-3" in list(LayerDrop().sentences(frame.assign(standard_error=np.inf)))[1]


def test_layers_within_noise_are_not_ranked_and_a_free_layer_is_named():
    noisy = _frame([0.3, 0.006, -0.009, 0.4, 0.2]).assign(tokens=1024)
    noisy.loc[noisy["metric"] == "loss_increase", "standard_error"] = 0.018
    noisy.loc[noisy["metric"] == "loss_increase", "standard_error"] *= [1, 1, 1, 1, 9]  # layer 4 is unknown
    noisy.loc[noisy["metric"].eq("angular_distance") & noisy["layer"].eq(1), "value"] = -1.0
    made = LayerDrop()
    made._remedy = " To measure more text, add --sequences 64."
    said = list(made.sentences(noisy))
    assert said[0].startswith(
        "Layers 1-2, 4 cannot be told apart on 1,024 tokens: removing layer 2 harms least (loss increase -0.009 ± 0.018"
    )
    assert said[0].endswith("add --sequences 64.")
    assert any("layer 1 matters least, and its measured harm is too close to layer 2 to tell" in text for text in said)
    free = noisy.copy()
    rows = free["metric"].eq("loss_increase") & free["layer"].eq(3)
    free.loc[rows, ["value", "standard_error"]] = 0.0
    first = next(made.sentences(free))
    assert first.startswith("Layer 3 is free to remove: no loss changes on 1,024 tokens. In contrast, removing layer 0")
    better = free.copy()  # a layer whose removal lowers the loss, beyond noise
    better.loc[better["metric"].eq("loss_increase") & better["layer"].eq(2), ["value", "standard_error"]] = [-0.2, 0.01]
    assert next(made.sentences(better)).startswith("Removing layer 2 harms least (loss increase -0.2 ± 0.01 nats on 1,")


def test_more_text_is_measured_if_asked_for_and_the_sentence_says_how(tmp_path):
    torch.manual_seed(0)
    llama(vocab_size=300).save_pretrained(tmp_path)
    for settings, sequences in (({}, 4), ({"sequences": 20}, 20), ({"tolerance": 0.0}, 64)):
        assert measured_sequences(tmp_path, LayerDrop(metric="loss"), **settings) == sequences
    made = LayerDrop(metric="loss", sequences=40)
    assert measured_sequences(tmp_path, made) == 40  # none is left out because the errors are small
    assert made._remedy == " To measure more text, add the option sequences=640."


def measured_sequences(folder, made, **settings):
    how = ProbeSettings(tokenizer="bytes", sequence_length=8, **settings)
    (sequences,) = set(measure(make_context(folder, how), [made], how)["layer_drop"]["sequences"])
    return sequences


def test_a_model_that_guesses_is_not_ranked():
    model, ids = llama_and_ids()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    made = LayerDrop()
    said = next(made.sentences(probe(model, [made], ids)["layer_drop"]))
    assert said.startswith("The model is no better than guessing: its loss is 3.69 nats")
