"""Layers taken out of a trained model, and another placement put on one."""

import json

import pytest
import torch
from probes.small_models import stir
from probes.tiny import gemma2, llama
from spread import spread
from transformers import AutoModelForCausalLM

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.manifest import how_to_load
from lamina.modeling.backbones.conversion import from_transformers, to_transformers
from lamina.modeling.modeling_lamina import LaminaForCausalLM
from lamina.placements import resolve
from lamina.probes.engine.measure import make_context
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.surgery.graft import grafted
from lamina.surgery.layer_lists import layers_of
from lamina.surgery.prune import mean_loss
from tools.reliability.tiny_families import SIZES, tiny_model

TEXT = {"sequence_length": 32, "sequences": 12, "batch_size": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a Pre-LN model on the embedded corpus, far from its start."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    sizes = {"num_layers": 4, "hidden_size": 32, "num_heads": 2, "steps": 80, "batch_size": 8, "sequence_length": 32}
    result = lamina.pretrain(placement="pre_ln", output=folder, learning_rate=1e-2, bar=False, **sizes)
    assert result["eval_loss"] < 3.5  # from 5.5
    return folder


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("placement", ["pre_ln", "peri_ln", "post_ln", "keel", "fusenorm", "b2t", "hybridnorm"])
def test_a_graft_onto_the_same_placement_changes_nothing(placement):
    torch.manual_seed(0)
    old = stir(lamina.build(llama(layers=3).config, placement, init="normal"))
    ids = torch.randint(0, 61, (4, 16))
    new, told = grafted(old, resolve(placement, 3), ids)
    assert torch.equal(logits(old, ids), logits(new, ids))
    assert told == {"fitted": [], "folded": [], "lost": []}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("pre_ln", new) for new in ("layernorm_scaling", "minicpm", "layerscale", "doge")),
        *(("pre_ln", f"{new})") for new in ("granite(multiplier=0.22", "pre_ln(embedding_scale=4.0")),
        ("layernorm_scaling", "pre_ln"),
        ("granite", "layerscale"),
        ("post_ln", "admin(omega=sqrt)"),
        ("post_ln", "deepnorm"),
        ("keel(first_layer=keel)", "keel(first_layer=keel, alpha=11)"),
        ("sandwich_ln", "gemma2(embedding_scale=1.0)"),
    ],
)
def test_where_the_formulas_agree_the_logits_do(old, new):
    torch.manual_seed(0)
    model = stir(lamina.build(llama(layers=3).config, old, init="normal"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(50)  # far above the norms' epsilon
    ids = torch.randint(0, 61, (4, 16))
    changed, _ = grafted(model, resolve(new, 3), ids)
    expected = logits(model, ids)
    assert (logits(changed, ids) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_a_fitted_gain_is_the_least_squares_one():
    """Of Sandwich-LN's first output norm, on the old branch, against numpy's solution by channel."""
    torch.manual_seed(0)
    old = stir(lamina.build(llama(layers=2).config, "pre_ln", init="normal"))
    ids = torch.randint(0, 61, (4, 16))
    seen = []
    old.model.layers[0].attention.module.register_forward_hook(lambda m, a, y: seen.append(y[0].double()))
    logits(old, ids)
    branch = seen[0].flatten(0, 1)
    normed = branch / (branch.pow(2).mean(-1, keepdim=True) + old.config.backbone_config.rms_norm_eps).sqrt()
    lines = [torch.linalg.lstsq(normed[:, [i]], branch[:, [i]]).solution[0, 0] for i in range(branch.shape[1])]
    expected = torch.stack(lines)
    new, _ = grafted(old, resolve("sandwich_ln", 2), ids)
    assert torch.allclose(new.model.layers[0].attention.out_norm.weight.double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "placement", spread(["post_ln", "sandwich_ln", "peri_ln", "keel", "out_ln", "mix_ln"], ["peri_ln", "keel"])
)
def test_a_trained_models_loss_is_close_where_gains_of_one_are_far(trained, tmp_path, placement):
    record = lamina.graft(trained, tmp_path / "grafted", placement=placement, **TEXT)
    gap = record["loss"] - record["loss_before"]
    assert -0.05 < gap < 0.6
    assert gap < 0.5 * (unfitted(trained, placement) - record["loss_before"])
    assert record["tokens"] == 6 * 31


def unfitted(folder, placement):
    """The loss of the same weights under the placement with its new norms as they start."""
    old = AutoModelForCausalLM.from_pretrained(folder / "model")
    new = lamina.build(old.config.backbone_config, placement, init="normal")
    new.load_state_dict(old.state_dict(), strict=False)
    return loss_of(new, folder)


def loss_of(model, folder):
    """A model's loss on the half of the text that no gain was fitted on."""
    context = make_context(str(folder), ProbeSettings(**TEXT))
    context.model = context.base = model.eval()
    context.batches = [{"input_ids": torch.cat([batch["input_ids"] for batch in context.batches])[6:]}]
    return mean_loss(context)[0]


def test_a_grafted_model_is_trained_further(trained, tmp_path, capsys):
    words = ["graft", str(trained), "--placement", "fusenorm", "--output", str(tmp_path / "grafted")]
    assert main([*words, "--sequence-length", "32", "--sequences", "12"]) == 0
    said = capsys.readouterr().out
    assert "pre_ln -> fusenorm" in said
    assert said.endswith(f"{how_to_load(tmp_path / 'grafted')}\n")
    record = json.loads((tmp_path / "grafted" / "grafting.json").read_text())
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "grafted")
    assert loss_of(written, trained) == pytest.approx(record["loss"], abs=1e-5)
    sizes = {"steps": 40, "batch_size": 8, "sequence_length": 32, "learning_rate": 1e-2}
    lamina.pretrain(from_model=tmp_path / "grafted", output=tmp_path / "healed", bar=False, **sizes)
    healed = AutoModelForCausalLM.from_pretrained(tmp_path / "healed" / "model")
    assert loss_of(healed, trained) < record["loss"] - 0.05


def test_a_transformers_checkpoint_is_grafted_as_its_conversion_is(tmp_path):
    torch.manual_seed(0)
    model = stir(llama())
    ids = torch.randint(0, 61, (4, 16))
    ours = from_transformers(model)
    new, _ = grafted(ours, resolve("pre_ln", 3), ids)
    assert torch.equal(logits(to_transformers(new), ids), logits(model, ids))


@pytest.mark.parametrize("make", [llama, lambda **sizes: lamina.build(llama(**sizes).config, "keel"), gemma2])
def test_a_pruned_model_is_the_whole_one_that_skips_the_layers(make, tmp_path, capsys):
    torch.manual_seed(0)
    model = make(vocab_size=300).eval()
    model.save_pretrained(tmp_path / "model")
    words = ["prune", tmp_path / "model", "--layers", "1", "--output", tmp_path / "out", "--corpus", write(tmp_path)]
    words += ["--tokenizer", "bytes", "--sequences", "2", "--sequence-length", "16"]
    assert main([*map(str, words)]) == 0
    said, record = capsys.readouterr().out, json.loads((tmp_path / "out" / "pruning.json").read_text())
    ids = torch.randint(6, 61, (2, 8))
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    layers[1].forward = lambda x, *args, **kwargs: x
    serve = f"to serve the model without Lamina (not tested): vllm serve {tmp_path / 'out'}\n"
    serve = "" if isinstance(model, LaminaForCausalLM) else serve
    assert f"the model: {tmp_path / 'out'} ({type(model).__name__})\n{serve}to load it: import " in said
    assert ("import lamina, " in said) == isinstance(model, LaminaForCausalLM)
    exec(said.partition("to load it: ")[2], values := {})
    written = values["model"]
    assert torch.allclose(logits(written, ids), logits(model, ids), atol=1e-6)
    assert written.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 11)
    assert record["num_layers"] == len(layers) - 1


def test_a_refusal_names_the_field_that_counts_layers(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "vocab_size", 300)
    model = tiny_model("deepseek_v3").eval()  # its first layer has no experts
    model.save_pretrained(tmp_path / "model")
    text = {"corpus": write(tmp_path), "tokenizer": "bytes", "sequences": 2, "sequence_length": 16}
    with pytest.raises(
        UserError, match=r"layers: the model does not load without 0: .*by their index .*first_k_dense_replace: 1"
    ) as error:
        lamina.prune(tmp_path / "model", tmp_path / "out", layers=[0], **text)
    assert ".out." not in str(error.value)
    assert not (tmp_path / "out").exists()


def write(folder):
    path = folder / "text.txt"
    path.write_text("To be, or not to be, that is the question. " * 20)
    return str(path)


OPTIONS = "layer_drop(meaning=remove, metric=loss).loss_increase"


@pytest.mark.parametrize("by", ["angular_distance", "layer_drop", OPTIONS, "hidden_states.variance"])
def test_a_measure_chooses_the_layers(trained, tmp_path, by):
    record = lamina.prune(trained, tmp_path / "out", by=by, drop=2, **TEXT)
    values = record["measured"]
    if by != "angular_distance":
        chosen = sorted(sorted(range(4), key=lambda layer: values[str(layer)])[:2])
    else:
        start = min(range(3), key=lambda layer: values[str(layer)])
        chosen = [start, start + 1]
    assert record["dropped"] == chosen
    assert record["loss_before"] < record["loss"] < 6
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers) == 2


def test_a_free_layer_goes_first_and_layers_within_noise_are_named(tmp_path, capsys):
    torch.manual_seed(0)
    model = llama(layers=4, vocab_size=300)
    with torch.no_grad():
        for layer in model.model.layers:  # small next to the noise of 16 tokens
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path / "model")
    words = ["prune", tmp_path / "model", "--by", "layer_drop", "--corpus", write(tmp_path), "--tokenizer", "bytes"]
    words = [*map(str, words), "--sequences", "4", "--sequence-length", "16"]
    assert main([*words, "--drop", "1", "--output", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "one" / "pruning.json").read_text())
    assert record["dropped"] == [2]
    assert "layer_drop on 64 tokens: layer 2 has 0 ± 0\nnote: " in said
    assert "Without layer 2, no loss changes, so the removal is free." in said
    assert record["undecided"] == []
    assert (record["errors"]["2"], record["measured_tokens"]) == (0.0, 64)
    assert main([*words, "--drop", "2", "--output", str(tmp_path / "two")]) == 0
    record = json.loads((tmp_path / "two" / "pruning.json").read_text())
    assert 2 in record["dropped"]
    assert record["undecided"]
    assert "cannot be told apart on 64 tokens. To measure more text, add --sequences 64, or" in capsys.readouterr().out


def test_a_long_measurement_tells_how_long_it_takes_and_what_shortens_it(trained, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lamina.surgery.prune._LONG", 0.0)
    lamina.prune(trained, tmp_path / "out", by="layer_drop", drop=1, **TEXT)
    assert "layer_drop takes about " in caplog.text
    assert "add a smaller --sequences" in caplog.text


def test_the_number_of_sequences_is_what_the_choice_is_measured_on(trained, tmp_path):
    record = lamina.prune(trained, tmp_path / "out", by="layer_drop", drop=1, sequences=9, sequence_length=16)
    assert record["measured_tokens"] == 9 * 16


@pytest.mark.parametrize("placement", ["pre_ln(qk_norm=head)", "pre_ln(wiring=mhc)", "pre_ln(wiring=x0)"])
def test_a_placement_that_a_model_cannot_take_is_refused(placement, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "vocab_size", 300)
    torch.manual_seed(0)
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    text = {**TEXT, "tokenizer": "bytes", "corpus": write(tmp_path)}
    with pytest.raises(UserError, match="placement: "):
        lamina.graft(tmp_path / "model", tmp_path / "out", placement=placement, **text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wiring", "jobs"), [("mhc", ("graft",)), ("x0", ("graft", "prune")), ("attn_res", ("graft", "prune"))]
)
def test_a_model_that_hands_on_more_than_a_stream_is_refused(wiring, jobs, tmp_path):
    torch.manual_seed(0)
    lamina.build(llama(vocab_size=300).config, "pre_ln", wiring=wiring).save_pretrained(tmp_path / "model")
    text = {"tokenizer": "bytes", "corpus": write(tmp_path), "output": tmp_path / "out"}
    for job in jobs:
        act = {"graft": {"placement": "peri_ln"}, "prune": {"layers": [1]}}[job]
        why = "several residual streams" if wiring == "mhc" else "earlier states" if job == "graft" else ""
        with pytest.raises(UserError, match=f"model: .*{why}"):
            getattr(lamina, job)(tmp_path / "model", **act, **TEXT, **text)
    assert not (tmp_path / "out").exists()


def test_a_mistyped_measure_is_refused_before_the_model_is_read(tmp_path):
    with pytest.raises(UserError, match="did you mean 'layer_drop'"):
        lamina.prune(tmp_path / "gone", tmp_path / "out", by="layerdrop", drop=1)


def test_the_loss_names_its_text(trained, tmp_path, capsys):
    assert main(["prune", str(trained), "--layers", "1", "--output", str(tmp_path / "out"), "--sequences", "4"]) == 0
    assert " tokens of 'embedded': " in capsys.readouterr().out


def test_layers_are_read_as_they_are_typed():
    assert layers_of("3,5-7") == [3, 5, 6, 7]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune", "{run}"], "layers: none given. Add --layers LIST, or --by MEASURE and --drop N."),
        (
            ["prune", "{run}", "--by", "layer_drop"],
            "drop: the number of layers to remove by 'layer_drop' is missing. Add",
        ),
        (
            ["prune", "{run}", "--layers", "1", "--drop", "1"],
            "drop: 1 has no effect without a measure. Add --by MEASURE",
        ),
        (["prune", "{run}", "--by", "layer_drop", "--drop", "1", "--layers", "1"], "layers: you gave layers and a"),
        (
            ["prune", "{run}", "--by", "low_precision", "--drop", "1"],
            "by: 'low_precision' names a probe without a metric. Give layer_drop, angular_distance, or PROBE.METRIC",
        ),
        (["prune", "{run}", "--by", "layer_drop(standard_error=0.05)", "--drop", "1"], "a probe without a metric"),
        (["prune", "{run}", "--layers", "9"], "layers: the model has no layer 9. Choose layers from 0 to 3."),
        (
            ["prune", "{run}", "--layers", "0-3"],
            "layers: you chose 4 layers of 4. Choose at least one layer, and fewer than all.",
        ),
        (["prune", "{run}", "--by", "similarity.block_influence", "--drop", "2"], "one value for each of 4 layers"),
        (["prune", "{run}", "--by", "angle", "--drop", "1"], "unknown probe 'angle'"),
        (["prune", "{run}", "--by", "all", "--drop", "1"], "by: 'all' names more than one probe"),
        (
            ["prune", "{run}", "--by", "layer_drop", "--drop", "4"],
            "drop: 4 does not fit a model of 4 layers. Give a number from 1 to 3.",
        ),
        (["graft", "{run}", "--placement", "perry_ln"], "unknown placement 'perry_ln'"),
        (["graft", "{run}", "--placement", "muse_spark", "--sequences", "1"], "sequences: 1 block of text"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(trained, tmp_path, capsys, words, message):
    output = tmp_path / "out"
    words = [word.format(run=trained) for word in words]
    assert main([*words, "--output", str(output), "--sequence-length", "32"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()
