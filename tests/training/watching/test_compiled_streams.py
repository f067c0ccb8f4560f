"""The residual stream of compiled models: the values of the eager run, without a graph break or another loss."""

import copy
import gc
import json
import weakref

import pytest
import torch
from spread import spread
from torch.utils.checkpoint import checkpoint
from training.tiny_runs import layers, llama_of
from training.watching.loops import NanoGpt, Tokens, llama
from transformers import Trainer, TrainingArguments

import lamina

STREAM = ("hidden_variance", "hidden_mean", "hidden_abs_mean", "hidden_abs_max")
LEARNS = ("step_loss", "step_gradient_norm", "gradient_norm", "update_norm")
BACKEND = "aot_eager"  # graphs as inductor gets them, without a compiler's seconds


def keel():
    torch.manual_seed(0)
    return lamina.build(llama_of(16), "keel")


def of_call(model, batch):
    return model(input_ids=batch, labels=batch).loss


def of_targets(model, batch):
    return model(batch[:, :-1], batch[:, 1:])[1]


class Recomputed(NanoGpt):
    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.lm_head(self.ln_f(x))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def forward_alone(model, **options):
    model.forward = torch.compile(model.forward, **options)
    return model


def blocks(model, **options):
    for block in getattr(model, "h", None) or model.model.layers:
        block.compile(**options)
    return model


def wrapped_blocks(model, **options):
    for place, layer in enumerate(model.h):
        model.h[place] = torch.compile(layer, **options)
    return model


OFTEN = (in_place, forward_alone, wrapped_blocks)  # Keel's blocks are compiled below, and checkpointed layers whole


def train(model, loss_of, folder=None, steps=4, watched=None, **options):
    """Train, watched if there is a folder; the losses, and the monitor's notes."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    notes = []
    context = lamina.watch(watched or model, optimizer, output=str(folder), every=2, **options) if folder else None
    if context:
        context.__enter__()
    for batch in Tokens(items=2 * steps).ids.split(2):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if context:
            context.step(loss)
    if context:
        context.__exit__(None, None, None)
        notes = context.monitor.instruments.followed.notes
    return losses, notes


def rows_of(folder, metrics):
    rows = layers(folder)
    rows = rows[rows["metric"].isin(metrics)]
    return rows.set_index(["step", "layer", "sublayer", "role", "index", "metric"])["value"].sort_index()


def assert_same_streams(folder, other, rel=1e-5):
    """What passes through the layers, and what they learn from it."""
    for metrics in (STREAM, LEARNS):
        seen, expected = rows_of(folder, metrics), rows_of(other, metrics)
        assert len(expected) > 20
        assert seen.index.tolist() == expected.index.tolist()
        assert seen.to_numpy() == pytest.approx(expected.to_numpy(), rel=rel, abs=1e-6)


def compare(tmp_path, model, loss_of, compiled):
    """Train eager, compiled and compiled without the monitor; the same streams, no break, the same bits of the loss."""
    train(model(), loss_of, tmp_path / "eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch._dynamo.reset()
    bare, _ = train(compiled(model(), backend=BACKEND, fullgraph=True), loss_of)
    graphs = counters["stats"]["unique_graphs"]
    counters.clear()
    torch._dynamo.reset()
    losses, notes = train(compiled(model(), backend=BACKEND, fullgraph=True), loss_of, tmp_path / "compiled")
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert notes == ["Lamina does not record attention logits and the experts' loads, because the model is compiled"]
    assert_same_streams(tmp_path / "compiled", tmp_path / "eager")
    assert torch.stack(losses).equal(torch.stack(bare))


@pytest.mark.parametrize("compiled", spread([whole, in_place, forward_alone, blocks, wrapped_blocks], OFTEN))
def test_a_gpt_has_the_streams_of_its_eager_run(tmp_path, compiled):
    compare(tmp_path, NanoGpt, of_targets, compiled)


WAYS = [(model, compiled) for model in (llama, keel) for compiled in (whole, in_place, blocks)]


@pytest.mark.parametrize(("model", "compiled"), spread(WAYS, [(keel, blocks)]))
def test_a_llama_and_lamina_have_the_streams_of_their_eager_run(tmp_path, model, compiled):
    compare(tmp_path, model, of_call, compiled)


def test_checkpointed_layers_are_seen_once(tmp_path):
    compare(tmp_path, Recomputed, of_targets, whole)


def test_a_model_that_others_compile_is_seen(tmp_path):
    """Trainer and accelerate hand over the model without the wrapper that they call."""
    train(llama(), of_call, tmp_path / "eager")
    model = llama()
    train(torch.compile(model, backend=BACKEND), of_call, tmp_path / "compiled", watched=model)
    assert_same_streams(tmp_path / "compiled", tmp_path / "eager")


def test_a_trainer_that_compiles(tmp_path):
    for name, compiled in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": BACKEND})):
        arguments = TrainingArguments(str(tmp_path / "out"), max_steps=2, report_to="none", seed=1, **compiled)
        monitor = lamina.LayerMonitor(str(tmp_path / name), every=2)
        Trainer(llama(), arguments, train_dataset=Tokens(), callbacks=[monitor]).train()
    assert_same_streams(tmp_path / "compiled", tmp_path / "eager")


@pytest.mark.parametrize("compiled", [whole, blocks])
def test_graphs_made_before_or_for_another_model_are_not_used(tmp_path, compiled):
    """Two models of a class in turn, each compiled before one of them is watched; then the old graphs serve again."""
    torch._dynamo.reset()
    train(NanoGpt(), of_targets, tmp_path / "eager")
    model, other = (compiled(NanoGpt(), backend=BACKEND) for _ in range(2))
    before = [state.clone() for state in model.parameters()]
    train(model, of_targets)
    train(other, of_targets)
    for parameter, state in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(state)

    def in_turn(model, batch):
        of_targets(other, batch)
        return of_targets(model, batch)

    train(model, in_turn, tmp_path / "run")
    assert_same_streams(tmp_path / "run", tmp_path / "eager")
    torch._dynamo.utils.counters.clear()
    train(model, of_targets)
    assert not torch._dynamo.utils.counters["stats"]


def test_nothing_stays_on_the_modules(tmp_path):
    model = wrapped_blocks(NanoGpt(), backend=BACKEND)
    train(torch.compile(model, backend=BACKEND), of_targets, tmp_path / "run")
    assert {type(layer) for layer in model.modules()} == {type(layer) for layer in wrapped_blocks(NanoGpt()).modules()}
    assert not [name for module in model.modules() for name in vars(module) if "lamina" in name]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_of_a_watched_model_is_not_watched(tmp_path, compiled):
    """A moving average of the weights is a deep copy, and a copy has the model's hooks."""
    model = NanoGpt()
    copies = []

    def average(watched, batch):
        loss = of_targets(watched, batch)
        copies.append(copies[0] if copies else copy.deepcopy(model))
        of_targets(copies[0], batch * 0)
        return loss

    train(NanoGpt(), of_targets, tmp_path / "alone")
    train(torch.compile(model, backend=BACKEND) if compiled else model, average, tmp_path / "run")
    assert_same_streams(tmp_path / "run", tmp_path / "alone")
    tokens = [json.loads((tmp_path / name / "result.json").read_text())["tokens"] for name in ("run", "alone")]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("wrap", spread([None, whole, in_place, blocks], [None, whole, blocks]))
def test_a_copy_keeps_no_monitor_alive_and_both_can_be_pickled_whole(tmp_path, wrap):
    model = NanoGpt()
    compiled = model if wrap is None else wrap(model, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = Tokens(items=2).ids
    with lamina.watch(compiled, optimizer, output=tmp_path / "run") as monitor:
        for _ in range(2):
            of_targets(compiled, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        copied, instruments = copy.deepcopy(model), weakref.ref(monitor.monitor.instruments)
        made = [model, copied]
        for each in (model, copied):
            torch.save(each, tmp_path / "whole.pt")
            made.append(torch.load(tmp_path / "whole.pt", weights_only=False))
    del monitor, compiled
    gc.collect()
    assert wrap is None or instruments() is None
    assert {type(module) for each in made for module in each.modules()} == {type(m) for m in NanoGpt().modules()}
    losses = [of_targets(each, batch).item() for each in made]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_one_line_before_a_loop_ends_the_steps_of_a_compiled_model(tmp_path):
    model = torch.compile(NanoGpt(), backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = lamina.watch(model, optimizer, output=str(tmp_path / "run"), every=2).start()
    losses = []
    for batch in Tokens(items=8).ids.split(2):
        loss = of_targets(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    context._at_exit()
    assert layers(tmp_path / "run").query("metric == 'step_loss'")["value"].tolist() == pytest.approx(losses)
    assert set(rows_of(tmp_path / "run", STREAM).reset_index()["step"]) == {1, 2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [whole, blocks])
def test_inductor_computes_the_same_bits(tmp_path, compiled):
    train(NanoGpt(), of_targets, tmp_path / "eager")
    torch._dynamo.reset()
    bare, _ = train(compiled(NanoGpt()), of_targets)
    torch._dynamo.reset()
    losses, _ = train(compiled(NanoGpt()), of_targets, tmp_path / "compiled")
    assert torch.stack(losses).equal(torch.stack(bare))
    assert_same_streams(tmp_path / "compiled", tmp_path / "eager", rel=1e-4)
