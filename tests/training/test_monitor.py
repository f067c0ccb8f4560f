"""What the layer monitor records, against the same numbers computed in the plainest way."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from training.tiny_runs import assert_same_weights, layers, llama_of, records, result, values
from transformers import AutoModelForCausalLM, LlamaForCausalLM, ViTConfig

from lamina import build
from lamina.data.packed import prepare_blocks
from lamina.errors import UserError
from lamina.modeling.wiring_lamina import LaminaNorm
from lamina.probes.engine.spikes import surges
from lamina.training import pretrain as pretraining
from lamina.training.monitor.gain_measures import gain_rows
from lamina.training.monitor.monitor import StepSeries
from lamina.training.monitor.parameter_measures import GradientNorms, Samples, UpdateRatios
from lamina.training.monitor.recorder import MonitoredTrainer
from lamina.training.monitor.stream_measures import hidden_state_rows, largest_magnitudes, magnitudes
from lamina.training.monitor.writers import LOSS, NORM, LayersWriter, spike_columns
from lamina.training.resolve import backbone_config
from lamina.training.trainer import LaminaTrainer


def naive_norms(model) -> dict[tuple[int, str, str], float]:
    """Norms of the gradients that a model holds now, sorted by the parameters' names."""
    groups = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            layer, sublayer = int(parts[parts.index("layers") + 1]), parts[parts.index("layers") + 2]
            groups.setdefault((layer, sublayer, "all"), []).append(parameter.grad)
            groups.setdefault((layer, "block", "all"), []).append(parameter.grad)
        else:
            role = "embedding" if "embed_tokens" in parts else "readout"
            groups.setdefault((-1, "block", role), []).append(parameter.grad)
    return {key: get_total_norm([g.double() for g in gradients]).item() for key, gradients in groups.items()}


@pytest.fixture
def unclipped(monkeypatch):
    """The naive norms by step, taken where the trainer gets the gradients, before it clips them."""
    seen = {}

    def spy(name):
        original = getattr(MonitoredTrainer, name)

        def method(self, model, *args, **kwargs):
            seen.setdefault(self.state.global_step + 1, naive_norms(model))
            return original(self, model, *args, **kwargs)

        monkeypatch.setattr(MonitoredTrainer, name, method)

    spy("_clip_grad_norm")
    spy("_get_grad_norm")
    return seen


@pytest.mark.parametrize(
    ("placement", "clip", "accumulation"),
    [("pre_ln", 1e-3, 1), ("keel", 1e-3, 2), ("keel", 0.0, 1), ("pre_ln", 0.0, 2)],
)
def test_gradient_norms_are_those_before_clipping_and_make_up_the_total(
    trained, tmp_path, unclipped, placement, clip, accumulation
):
    trained(placement=placement, max_grad_norm=clip, gradient_accumulation=accumulation)
    table = layers(tmp_path / "run")
    assert sorted(unclipped) == [1, 2, 3, 4]
    for step, expected in unclipped.items():
        assert values(table, "gradient_norm", step) == pytest.approx(expected, rel=1e-5)
    for record in records(tmp_path / "run"):
        if "loss" in record:
            found = values(table, "gradient_norm", record["step"]).items()
            parts = [v for (layer, sublayer, _), v in found if sublayer != "block" or layer < 0]
            blocks = [v for (layer, sublayer, _), v in found if sublayer == "block" or layer < 0]
            assert math.hypot(*parts) == pytest.approx(record["grad_norm"], rel=1e-5)
            assert math.hypot(*blocks) == pytest.approx(record["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_accumulated_gradients_are_those_of_one_large_batch(tiny, tmp_path, before_each_pass, batch, accumulation):
    seen = []
    before_each_pass(lambda trainer, model, inputs: seen.append(inputs["input_ids"].clone()))
    chosen = tiny(batch_size=batch, gradient_accumulation=accumulation, max_grad_norm=1e-2)
    pretraining.pretrain(chosen, bar=False)
    _, tokenizer = prepare_blocks(chosen.corpus, chosen.tokenizer, chosen.sequence_length, progress=False)
    torch.manual_seed(chosen.seed)
    model = build(backbone_config(chosen, vocab_size=len(tokenizer)), chosen.placement)
    ids = torch.cat(seen[:accumulation])  # the first step's
    assert ids.shape == (4, chosen.sequence_length)
    logits = model(input_ids=ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert values(layers(tmp_path / "run"), "gradient_norm", 1) == pytest.approx(naive_norms(model), rel=1e-4)


def naive_states(folder, chosen) -> dict[tuple[int, str], torch.Tensor]:
    """x^0 and the stream after every sub-layer in double precision, from the model that the run saved."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").double().eval()
    blocks, _ = prepare_blocks(chosen.corpus, chosen.tokenizer, chosen.sequence_length, progress=False)
    wanted = chosen.monitor_blocks
    ids = torch.stack([blocks.eval[i * len(blocks.eval) // wanted]["input_ids"] for i in range(wanted)])
    states = {}
    for index, block in enumerate(model.model.layers):
        for name in ("attention", "feed_forward"):
            half = getattr(block, name)
            half.register_forward_hook(lambda m, args, output, key=(index, name): states.update({key: output}))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: states.update({(-1, "block"): args[0]}))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return states


@pytest.mark.parametrize("placement", ["pre_ln", "peri_ln", "fusenorm"])
def test_state_statistics_are_those_of_a_double_computation(tiny, tmp_path, placement):
    chosen = tiny(placement=placement, monitor_blocks=3)
    pretraining.pretrain(chosen, bar=False)
    table = layers(tmp_path / "run")
    states = naive_states(tmp_path / "run", chosen)
    assert len(states) == 2 * chosen.num_layers + 1
    for metric, statistic in {
        "hidden_variance": lambda x: ((x - x.mean()) ** 2).mean(),
        "hidden_mean": lambda x: x.sum() / x.numel(),
        "hidden_abs_max": lambda x: x.abs().max(),
    }.items():
        expected = {(*key, "all"): statistic(x).item() for key, x in states.items()}
        assert values(table, metric, chosen.steps) == pytest.approx(expected, rel=1e-4, abs=1e-6), metric
    largest = torch.cat([x.abs().flatten() for x in states.values()]).sort(descending=True).values[:100]
    rows = table[(table.metric == "hidden_top_abs") & (table.step == chosen.steps)].sort_values("index")
    assert list(rows["index"]) == list(range(100))
    assert list(rows.value) == pytest.approx(largest.tolist(), rel=1e-4)
    assert sorted(table[table.metric == "hidden_top_abs"].step.unique()) == [0, 1, 2, 3, 4]


def test_fewer_elements_than_100_are_all_of_them_and_nan_comes_first():
    x = torch.arange(12.0).view(1, 3, 4) - 6
    assert largest_magnitudes(magnitudes(x)).tolist() == sorted(x.abs().flatten().tolist(), reverse=True)
    x[0, 1, 2] = math.nan
    assert math.isnan(largest_magnitudes(magnitudes(x))[0])


def test_another_librarys_model_is_refused_with_what_is_needed():
    model = LlamaForCausalLM(llama_of(16))
    ids = torch.ones(1, 2, dtype=torch.long)
    for act in (GradientNorms, lambda m: hidden_state_rows(m, ids, 0), lambda m: gain_rows(m, 0)):
        with pytest.raises(
            UserError, match=r"LlamaForCausalLM is not a Lamina model\. Make a Lamina model with lamina"
        ):
            act(model)


def test_an_image_model_is_monitored_too():
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config.image_size, config.patch_size = 8, 4
    model = build(config, "pre_ln", num_labels=3)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = {(r[1], r[2]): r[6] for r in hidden_state_rows(model, pixels, 0) if r[5] == "hidden_abs_max"}
    with torch.no_grad():
        states = model.eval().model(pixel_values=pixels, output_hidden_states=True).hidden_states
    expected = {(index - 1, "feed_forward" if index else "block"): x.abs().max() for index, x in enumerate(states)}
    assert {key: found[key] for key in expected} == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-6)
    rows = hidden_state_rows(model, {"pixel_values": pixels}, 0)
    assert found == {(r[1], r[2]): r[6] for r in rows if "abs_max" in r[5]}


def test_gains_are_those_of_the_saved_model(trained, tmp_path):
    trained(placement="peri_ln", learning_rate=0.1)
    table = layers(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").model
    expected = {}
    for index, block in enumerate(model.layers):
        for name in ("attention", "feed_forward"):
            for role in ("pre_norm", "out_norm", "post_norm"):
                if isinstance(norm := getattr(getattr(block, name), role), LaminaNorm):
                    expected[index, name, role] = norm.weight
    expected |= {(-1, "block", "embedding_norm"): model.embedding_norm.weight}
    expected |= {(-1, "block", "final_norm"): model.norm.weight}
    means = values(table, "gain_mean", 4)
    assert means == pytest.approx({k: w.mean().item() for k, w in expected.items()}, rel=1e-6)
    assert any(abs(mean - 1) > 1e-3 for mean in means.values())
    largest = {k: w.abs().max().item() for k, w in expected.items()}
    assert values(table, "gain_abs_max", 4) == pytest.approx(largest, rel=1e-6)


def test_the_monitor_changes_nothing_of_the_training(trained, tmp_path):
    """Dropout would draw other numbers if the monitor touched the random generator or the model's mode."""
    for name, every in (("often", 1), ("never", 6)):
        trained(name, logging_steps=every, steps=6, drop_path=0.5)
    assert_same_weights(tmp_path / "often", tmp_path / "never")
    first = [values(layers(tmp_path / name), "hidden_variance", 0) for name in ("often", "never")]
    assert first[0] == first[1]  # before the first step


def ratio(names, before, after):
    """The update of these parameters, in parts of their weights."""
    update = sum(((after[n].double() - before[n].double()) ** 2).sum() for n in names)
    return (update / sum((before[n].double() ** 2).sum() for n in names)).sqrt().item()


def sublayers_of(names, num_layers):
    kinds = {"attention": (".attention.",), "feed_forward": (".feed_forward.",)}
    kinds["block"] = (*kinds["attention"], *kinds["feed_forward"])
    return {
        (layer, kind): [n for n in names if n.partition(f"layers.{layer}")[2].startswith(starts)]
        for layer in range(num_layers)
        for kind, starts in kinds.items()
    }


@pytest.mark.parametrize(
    "changed", [{"placement": "pre_ln"}, {"placement": "keel"}, {"trainer": {"optim": "adafactor"}}], ids=str
)
def test_the_ratios_are_those_of_cloned_weights(tiny, tmp_path, monkeypatch, changed):
    seen, create = {}, LaminaTrainer.create_optimizer

    def watched(self, model=None):
        optimizer = create(self, model)
        inner = optimizer.step

        def step(*args, **kwargs):
            whole = self.bare_model()
            before = {n: p.detach().clone() for n, p in whole.named_parameters()}
            result = inner(*args, **kwargs)
            seen[self.state.global_step + 1] = before, {n: p.detach().clone() for n, p in whole.named_parameters()}
            return result

        optimizer.step = step
        return optimizer

    monkeypatch.setattr(LaminaTrainer, "create_optimizer", watched)
    chosen = tiny(steps=6, logging_steps=3, **changed)
    pretraining.pretrain(chosen, bar=False)
    rows = layers(tmp_path / "run")
    rows = rows[rows["metric"] == "update_ratio"]
    assert sorted(rows["step"].unique()) == [3, 6]  # the first step's rate is 0: it moves nothing
    for step in (3, 6):
        places = sublayers_of(seen[step][0], chosen.num_layers)
        expected = {place: ratio(names, *seen[step]) for place, names in places.items()}
        at = rows[(rows["step"] == step) & rows["layer"].ge(0)]
        found = {(row.layer, row.sublayer): row.value for row in at.itertuples()}
        assert found == pytest.approx(expected, rel=1e-4)
        assert {"embedding"} <= set(rows[(rows["step"] == step) & rows["layer"].lt(0)]["role"])


def test_the_cost_is_paid_at_recorded_steps_only(trained, monkeypatch):
    kept = []
    before = UpdateRatios.before_step

    def counted(self, optimizers=(), *, recorded=True):
        before(self, optimizers, recorded=recorded)
        kept.append(bool(self._before))

    monkeypatch.setattr(UpdateRatios, "before_step", counted)
    trained(steps=6, logging_steps=5)
    assert sum(kept) == 2 < len(kept)


@pytest.mark.parametrize(("limit", "broken"), [(1e-2, False), (1e9, False), (1e-2, True)])
def test_clipping_with_the_norms_of_the_record_is_torchs_to_the_bit(limit, broken):
    models = [build(llama_of(16), "peri_ln") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        torch.manual_seed(0)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = None if index == 1 else torch.randn_like(parameter)
        next(model.parameters()).grad[0] *= math.nan if broken else 1.0
    ours, torchs = map(GradientNorms, models)
    assert ours.clips()
    squares = torchs.squares()
    expected = torch.nn.utils.clip_grad_norm_(models[1].parameters(), limit)
    norm, found = ours.clip(limit)
    assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
    assert bool(norm.isnan()) == broken
    assert torch.equal(found.nan_to_num(), squares.nan_to_num())
    assert bool(found.isnan().any()) == broken
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num())
    ours.parameters[0].grad = None
    ours.parameters[0].data = ours.parameters[0].data.double()
    ours.parameters[0].grad = torch.zeros_like(ours.parameters[0])
    assert not ours.clips()  # torch's norms of two number formats are not stacked


def test_a_weight_that_gets_other_memory_is_still_compared():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = Samples(GradientNorms(model, [((0, "attention", "all"), model.weight)]))
    for doubled in (False, False, True):
        if doubled:
            model.weight.data = 2 * model.weight.data
        samples.before_step([optimizer])
        samples.after_step([optimizer])
    written = [row[-1] for row in samples.rows(3, recorded=True) if row[5] == "written_ratio"]
    assert written == pytest.approx([0.5])


def series(folder, metric) -> dict[int, float]:
    table = layers(folder)
    rows = table[table.metric == metric]
    assert rows.step.is_unique
    return dict(zip(rows.step, rows.value, strict=True))


@pytest.mark.parametrize(("accumulation", "clip"), [(1, 1.0), (2, 0.0)])
def test_each_step_has_its_own_loss_and_norm_before_clipping(trained, tmp_path, monkeypatch, accumulation, clip):
    norms, name = {}, "_clip_grad_norm" if clip else "_get_grad_norm"
    original = getattr(MonitoredTrainer, name)

    def method(self, model, *args, **kwargs):
        norms[self.state.global_step + 1] = get_total_norm([p.grad for p in model.parameters()]).item()
        return original(self, model, *args, **kwargs)

    monkeypatch.setattr(MonitoredTrainer, name, method)
    trained(steps=7, logging_steps=3, gradient_accumulation=accumulation, max_grad_norm=clip)
    assert series(tmp_path / "run", NORM) == pytest.approx(norms, rel=1e-6)
    losses, before = series(tmp_path / "run", LOSS), 0
    assert sorted(losses) == sorted(norms) == [*range(1, 8)]
    for record in records(tmp_path / "run"):
        if "loss" in record:  # a record's loss is the mean since the one before
            steps = range(before + 1, record["step"] + 1)
            assert sum(losses[s] for s in steps) / len(steps) == pytest.approx(record["loss"], rel=1e-6)
            before = record["step"]
    assert before >= 6


def test_a_rare_record_keeps_its_steps_in_order(monkeypatch):
    monkeypatch.setattr("lamina.training.monitor.monitor._CHUNK", 4)
    found = StepSeries()
    for step in range(1, 12):
        found.add_loss(torch.tensor(float(step)))
        found.end_step(step)
    assert [(row[0], row[6]) for row in found.rows()] == [(step, float(step)) for step in range(1, 12)]


def test_spikes_are_counted_over_all_steps(tmp_path):
    writer = LayersWriter(tmp_path)
    values = [1.0 + 0.01 * (step % 3) for step in range(1, 101)]
    values[49], values[79] = 5.0, math.nan
    writer.add((step, -1, "model", "all", 0, LOSS, value) for step, value in enumerate(values[:60], start=1))
    writer.flush()
    writer.add((step, -1, "model", "all", 0, LOSS, value) for step, value in enumerate(values[60:], start=61))
    writer.add((step, -1, "model", "all", 0, NORM, 1.0) for step in range(1, 101))
    writer.add([(1, 0, "attention", "all", 0, "hidden_abs_max", 1e9)])
    writer.flush()
    found = {"loss_spikes": 2, "loss_spike_score": 0.02, "gradient_spikes": 0, "gradient_spike_score": 0.0}
    assert spike_columns(tmp_path) == {**found, "loss_surges": 2, "gradient_surges": 0}


def test_a_surge_is_measured_by_the_twenty_steps_before():
    falling = [100.0 * 0.8**step for step in range(40)]
    falling[15] *= 4
    assert surges(falling).nonzero()[0].tolist() == []  # the median lies ten steps back, where the series was higher
    level = [1.0] * 10 + [3.1, 1.0, 2.9, math.inf]
    assert surges(level).nonzero()[0].tolist() == [10, 13]
    assert not surges([1.0] * 9 + [50.0]).any()  # too few before it


def test_a_run_says_how_often_it_spiked_once_it_is_long_enough(trained, tmp_path, before_step):
    """The loss that ended it is among them."""
    assert trained("short")["loss_spikes"] is None

    def spoil(trainer, model):
        with torch.no_grad():
            model.get_output_embeddings().weight.fill_(math.nan)

    before_step(36, spoil)
    found = trained(steps=40, logging_steps=40)
    assert (found["status"], found["loss_spikes"], found["gradient_spikes"]) == ("diverged", 1, 0)
    assert result(tmp_path / "run")["loss_spike_score"] == found["loss_spike_score"] > 0
    assert math.isnan(series(tmp_path / "run", LOSS)[36])
