"""What other tools recorded is placed in layers, judged by the same rules, and says what it could not use."""

import csv
import importlib.util
import json
import math

import pytest
import torch
from training.watching.loops import NanoGpt, Tokens, loop

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.reports.diagnosis import gather
from lamina.reports.histories import import_history, read_history
from lamina.reports.histories.owners import places_of
from lamina.reports.histories.sources import _records_of
from lamina.training.monitor.writers import read_rows

LAST, BREAKS = 40, 31


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A watched run whose second feed-forward's gradient grows at step 31, and what a user logged in it."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    model, lines, norms = NanoGpt(layers=3), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def spoil(step, model):
        if step >= BREAKS:
            for parameter in model.h[1].mlp.parameters():
                parameter.grad.mul_(1000.0)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        norms.append({name: gradient.norm().item() for name, gradient in gradients.items()})
        lines.append({name: gradient.clone() for name, gradient in gradients.items()})

    loop(model, folder, optimizer=optimizer, spoil=spoil, batches=[Tokens(items=4).ids] * LAST, every=1)
    losses = {row[0]: row[6] for row in read_rows(folder, ["step_loss"])}
    return folder, lines, [{"loss": losses[step], **each} for step, each in enumerate(norms, start=1)]


def tensorboard(path, run, *, histograms):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    _, gradients, lines = run
    with SummaryWriter(str(path)) as writer:
        writer.add_text("args", "a text, as Trainer's callback writes it")
        for step, (tensors, numbers) in enumerate(zip(gradients, lines, strict=True), start=1):
            writer.add_scalar("train/loss", numbers["loss"], step)
            writer.add_scalar("eval/loss", 9.0, step)
            for name, tensor in tensors.items():
                if histograms:
                    writer.add_histogram(f"gradients/{name}", tensor, step)
                else:
                    writer.add_scalar(f"grad_2.0_norm/{name}", tensor.norm(), step)
    return path


def wandb_export(path, run):
    """W&B's export of a panel: the run's name before each, and columns of extremes."""
    lines = [
        {"Step": step, **{f"brave-sun-1 - grad_norm/{name}": value for name, value in line.items() if name != "loss"}}
        | {"brave-sun-1 - train/loss": line["loss"], "brave-sun-1 - train/loss__MIN": 0.0}
        for step, line in enumerate(run[2], start=1)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def json_history(path, run):
    lines = [
        {"_step": step, "_runtime": 1.5}
        | {name if name == "loss" else f"{name}/grad_norm": value for name, value in line.items()}
        for step, line in enumerate(run[2], start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def state(path, run):
    lines = [
        {"step": step} | {f"gradients/{name}" if "." in name else name: value for name, value in line.items()}
        for step, line in enumerate(run[2], start=1)
    ]
    path.write_text(json.dumps({"log_history": lines}))
    return path


WRITE = {
    "scalars": lambda folder, run: tensorboard(folder / "tb", run, histograms=False),
    "histograms": lambda folder, run: tensorboard(folder / "tb", run, histograms=True),
    "csv": lambda folder, run: wandb_export(folder / "history.csv", run),
    "jsonl": lambda folder, run: json_history(folder / "history.jsonl", run),
    "json": lambda folder, run: state(folder / "trainer_state.json", run),
}


@pytest.mark.parametrize("kind", WRITE)
def test_the_norms_are_those_of_the_layer_monitor(tmp_path, run, kind):
    history = read_history(WRITE[kind](tmp_path, run))
    own = {row[:6]: row[6] for row in read_rows(run[0], ["gradient_norm", "step_gradient_norm", "step_loss"])}
    read = {row[:6]: row[6] for row in history.rows}
    assert read.keys() == own.keys()
    assert max(abs(read[key] / own[key] - 1) for key in own if own[key]) < 1e-5
    assert history.notes == [
        "not recorded: learning rate",
        "Lamina computed the model's gradient norm from the recorded gradient norms of its parameters",
    ]


@pytest.mark.parametrize("kind", ["scalars", "csv"])
def test_it_is_judged_by_the_same_rules(tmp_path, run, kind, capsys):
    path = WRITE[kind](tmp_path, run)
    found = lamina.diagnose(path)
    folder = tmp_path / f"{path.name}-lamina"
    first, own = gather(folder).first, gather(run[0]).first
    assert (first.layer, first.sublayer, first.metric) == (1, "feed_forward", "gradient_norm")
    assert first.step == BREAKS
    assert own.layer == 1
    assert found.sentences[-1].startswith(f"Lamina read {path}: ")
    assert "40 records from step 1 to 40" in found.sentences[-1]
    assert "gradient norms of 41 parameters in 3 layers" in found.sentences[-1]
    assert found.page.parent == folder
    assert lamina.report(folder).is_file()
    assert main(["diagnose", str(path)]) == 0  # once more: the earlier import is replaced
    assert "layer 1 (feed-forward)" in capsys.readouterr().out


def test_where_a_history_has_gaps_the_rules_count_its_records(tmp_path, run):
    path = tmp_path / "history.jsonl"
    lines = [
        {"step": 50 * step, **{f"gradients/{name}": value for name, value in line.items() if name != "loss"}}
        for step, line in enumerate(run[2], start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    import_history(path, tmp_path / "read")
    first = gather(tmp_path / "read").first
    assert (first.step, first.layer, first.sublayer) == (50 * BREAKS, 1, "feed_forward")


def test_wandbs_histograms_are_nearly_the_norm(tmp_path):
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    counts, edges = torch.histogram(values, 64)
    whole = {"_type": "histogram", "values": counts.tolist(), "bins": edges.tolist()}
    size = (edges[1] - edges[0]).item()
    packed = {"values": counts.tolist(), "packedBins": {"min": edges[0].item(), "size": size, "count": 64}}
    for histogram in (whole, packed):
        path = tmp_path / "history.jsonl"
        path.write_text(json.dumps({"_step": 3, "gradients/transformer.h.0.mlp.c_fc.weight": histogram}))
        (row,) = (row for row in read_history(path).rows if row[2] == "feed_forward")
        assert row[6] == pytest.approx(values.norm().item(), rel=2e-3)


@pytest.mark.parametrize(
    "broken", [{"min": "low"}, {"min": 0.0, "size": 1.0}, {"min": 0.0, "size": 1.0, "count": 1e18}]
)
def test_bins_that_are_none_are_left_out(tmp_path, broken):
    line = {"_step": 3, "grad_norm": 2.0, "gradients/h.0.mlp.weight": {"values": [1, 2], "packedBins": broken}}
    (tmp_path / "history.jsonl").write_text(json.dumps(line))
    assert [row[5:] for row in read_history(tmp_path / "history.jsonl").rows] == [("step_gradient_norm", 2.0)]


def test_an_offline_run_of_wandb(tmp_path, run, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked = wandb.init(project="any", dir=str(tmp_path))
    for step, line in enumerate(run[2], start=1):
        named = {f"grad_norm/{name}" if "." in name else f"train/{name}": value for name, value in line.items()}
        tracked.log(named, step=step)
    tracked.finish()
    wandb.teardown()  # its own process writes the last records
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    found = lamina.diagnose(folder)
    assert "gradient norms of 41 parameters in 3 layers" in found.sentences[-1]
    first = gather(folder.with_name(f"{folder.name}-lamina")).first
    assert (first.step, first.layer, first.sublayer) == (BREAKS, 1, "feed_forward")


OWNERS = {
    "transformer.h.3.attn.c_attn.weight": (3, "attention", "all"),
    "_orig_mod.module.model.layers.11.mlp.experts.4.up_proj.weight": (11, "feed_forward", "all"),
    "model/layers/2/post_attention_layernorm/weight": (2, "feed_forward", "all"),
    "gpt_neox.layers.0.mlp.dense_h_to_4h.bias": (0, "feed_forward", "all"),
    "backbone.layers.7.mixer.in_proj.weight": (7, "attention", "all"),
    "model.layers.1.something.weight": (1, "block", "other"),
    "transformer.wte.weight": (-1, "block", "embedding"),
    "lm_head.weight": (-1, "block", "readout"),
    "model.norm.weight": (-1, "block", "readout"),
    "['params']['h']['2']['mlp']['c_fc']['kernel']": (2, "feed_forward", "all"),
    "params/decoder/layers_5/self_attention/out/kernel": (5, "attention", "all"),
    "params/decoder/decoder_norm/scale": (-1, "block", "readout"),
    "transformer.layers.stacked.mlp.up_proj.weight": (-1, "block", "other"),
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_parameters_place_is_read_from_its_name(name):
    assert places_of([name]).owners[name] == OWNERS[name]


FAMILIES = ("llama", "gpt2", "t5", "bert", "swin", "mixtral", "switch_transformers", "vit", "xlm", "opt", "falcon")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_sublayers_of_a_family_are_those_of_its_modules(family):
    from transformers import AutoConfig, AutoModel

    few = {"num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "n_layer": 2, "n_layers": 2}
    config = AutoConfig.for_model(family, **({"depths": [1, 2]} if family == "swin" else few))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    places = places_of([name for name, _ in model.named_parameters()])
    assert len(places.layers) == {"t5": 4, "swin": 3, "switch_transformers": 4}.get(family, 2)
    for path, module in model.named_modules():
        kind = type(module).__name__
        means = "attention" if kind.endswith("Attention") else "feed_forward" if kind.endswith(("MLP", "FF")) else None
        for name, _ in module.named_parameters() if means else ():
            layer, sublayer, _ = places.owners[f"{path}.{name}"]
            assert sublayer == means, f"{path}.{name}"
            assert path.startswith((places.layers[layer], "attentions", "ffns"))


def test_what_is_not_used_is_said(tmp_path):
    stacks = ("encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.1.layer.0.SelfAttention.q.weight")
    line = {f"gradients/{name}": 1.0 for name in (*stacks, "decoder.block.0.layer.0.SelfAttention.q.weight")}
    line |= {"train/loss": 2.0, "train/accuracy": 0.5, "note": "text", "lr": 0.1, "epoch": 0.1}
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in (1, 2)))
    history = read_history(path)
    assert "not used: 1 series (train/accuracy)" in history.notes
    assert history.layers == {0: "encoder.block.0", 1: "encoder.block.1", 2: "decoder.block.0"}
    places = {row[1:4] for row in history.rows if row[5] == "gradient_norm"}
    assert places == {(layer, kind, "all") for layer in (0, 1, 2) for kind in ("attention", "block")}
    assert math.isclose(next(row[6] for row in history.rows if row[5] == "step_gradient_norm"), 3**0.5)


def test_what_is_no_history_is_one_line(tmp_path, refused):
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "cut.json").write_text('{"log_history": [')
    (tmp_path / "accuracy.csv").write_text("Step,train/accuracy\n1,2.0\n")
    parameters = [f"gradients/model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")]
    (tmp_path / "apart.jsonl").write_text("".join(f'{{"{name}": 1.0}}\n' for name in parameters))  # a line is a step
    (tmp_path / "number.json").write_text("3")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "far.jsonl").write_text(f'{{"step": {10**22}, "{parameters[0]}": 1.0}}')  # no Parquet file holds it
    (tmp_path / "empty.wandb").write_bytes(b"")
    for name in ("empty.csv", "empty.jsonl", "events.out.tfevents.1"):
        (tmp_path / name).write_bytes(b"")
    cases = dict.fromkeys(("notes.txt", "number.json", "empty.csv", "empty.jsonl"), "Lamina finds no JSON, no table")
    cases |= {"cut.json": "is not readable", "deep.json": "is not readable", "far.jsonl": "is too large"}
    cases |= {"accuracy.csv": "no loss and no gradient norm", "apart.jsonl": "(with all parameters at the same steps)"}
    if importlib.util.find_spec("tensorboard"):
        cases["events.out.tfevents.1"] = "no loss and no gradient norm"
    if importlib.util.find_spec("wandb"):
        cases["empty.wandb"] = "is not readable"
    for name, said in cases.items():
        assert said in refused("diagnose", tmp_path / name)
        assert not (tmp_path / f"{name}-lamina").exists()
    with pytest.raises(UserError, match="does not exist"):
        lamina.diagnose(tmp_path / "missing")


@pytest.mark.parametrize("has_loss", [True, False])
def test_only_the_models_norm_is_judged_where_no_other_is_there(tmp_path, has_loss):
    log = [{"step": step, "loss": 4.0 - 0.01 * step, "grad_norm": 1.0 + 0.01 * (step % 3)} for step in range(1, 41)]
    for line in log[30:]:
        line |= {"grad_norm": 900.0, "loss": 9.0}
    for line in [] if has_loss else log:
        del line["loss"]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": log}))
    found = lamina.diagnose(path)
    assert "the record has no values by layer, so Lamina checks only the whole model" in found.sentences[-1]
    assert gather(tmp_path / "trainer_state.json-lamina").first.step == 31
    assert gather(tmp_path / "trainer_state.json-lamina").rose == (31 if has_loss else None)


def test_the_current_folder_has_a_name(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tensorboard(tmp_path / "tb", run, histograms=False))
    assert lamina.diagnose(".").page == tmp_path / "tb-lamina" / "diagnosis.html"


def test_several_runs_are_refused(tmp_path, run):
    for name in ("one", "two"):
        tensorboard(tmp_path / "logs" / name, run, histograms=False)
    with pytest.raises(UserError, match=r"holds 2 runs\. Give one of .*one, .*two"):
        read_history(tmp_path / "logs")


def test_what_wandb_has_not_written_whole_is_left_out():
    def part(kind, data):
        return bytes(4) + len(data).to_bytes(2, "little") + bytes([kind]) + data

    head, block = b":W&B\xe1\xbe\x00", 32_768
    first = part(1, b"whole")
    rest = block - len(head) - len(first) - 7
    file = head + first + part(2, b"a" * rest) + part(3, b"b" * (block - 7)) + part(4, b"c" * 5)
    assert list(_records_of(file)) == [b"whole", b"a" * rest + b"b" * (block - 7) + b"c" * 5]
    assert list(_records_of(file[:-1])) == [b"whole"]
    padded = head + part(1, b"x" * (block - len(head) - 7 - 3)) + bytes(3) + part(1, b"next block")
    assert list(_records_of(padded))[1] == b"next block"
