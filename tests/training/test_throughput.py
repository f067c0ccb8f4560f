"""The speed of a run: its clock, and the share of the card's peak that it uses."""

import json
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training.tiny_runs import SMALL, llama_of, result
from transformers import MixtralConfig, masking_utils

import lamina
from lamina.modeling.parts import one_sequence_each
from lamina.placements import resolve
from lamina.training import pretrain as pretraining
from lamina.training.execution.devices import peak_flops
from lamina.training.monitor import recorder as recording
from lamina.training.monitor.gain_measures import GainSeries
from lamina.training.monitor.monitor import StepSeries
from lamina.training.monitor.recorder import RunRecorder
from lamina.training.resolve import training_flops
from lamina.training.trainer import LaminaTrainer

PEAKS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989}
PEAKS |= {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA B200": 2250, "NVIDIA L40S": 362, "NVIDIA GeForce RTX 4090": 165.2}
PEAKS |= {"AMD Instinct MI300X": 1307.4}


@pytest.mark.parametrize("card", PEAKS)
def test_the_peak_is_found_by_the_cards_name(card):
    assert peak_flops(card) == PEAKS[card] * 1e12


@pytest.mark.parametrize(
    "card", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-SXM2-16GB", "H1000"]
)
def test_a_card_that_is_not_in_the_table_has_no_peak(card):
    assert peak_flops(card) is None


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_that_count_are_those_of_matrix_products_with_the_head(tied):
    model = lamina.build(llama_of(16, tie_word_embeddings=tied), "keel")
    # 2 layers: 4 projections of the attention, 3 of the feed-forward; the head, which a tied embedding is, too
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 32) + 61 * 16
    assert training_flops(model, resolve("keel", 2), 10) == 6 * weights + 12 * 2 * 16 * 10


def test_of_the_experts_those_count_that_a_token_uses():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=61, tie_word_embeddings=False, **sizes, **experts)
    model = lamina.build(config, "pre_ln")
    attention = 2 * 16 * 16 + 2 * 16 * 8  # of two heads, keys and values have one
    weights = 2 * (attention + 4 * 16 + 2 * 3 * 16 * 24) + 61 * 16  # and the router
    assert training_flops(model, resolve("pre_ln", 2), 10) == 6 * weights + 12 * 2 * 16 * 10


def test_the_share_of_the_peak_is_recorded_shown_and_absent_without_a_peak(tiny, tmp_path, monkeypatch, capfd):
    assert "mfu" not in pretraining.pretrain(tiny("cpu"), bar=False)
    monkeypatch.setattr(pretraining, "peak_of", lambda device: 1e12)
    found = pretraining.pretrain(tiny("card"), bar=True)
    config = json.loads((tmp_path / "card" / "model" / "config.json").read_text())
    inner = config["backbone_config"]["intermediate_size"]
    width, layers, tokens = SMALL["hidden_size"], SMALL["num_layers"], SMALL["sequence_length"]
    a_token = 6 * (layers * (4 * width**2 + 3 * width * inner) + 257 * width) + 12 * layers * width * tokens
    assert found["mfu"] == pytest.approx(found["tokens_per_second"] * a_token / 1e12)
    lines = [json.loads(line) for line in (tmp_path / "card" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert logged
    for line in logged:
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * a_token / 1e12)
    assert f"{logged[-1]['tokens_per_second']:,.0f} tokens/s, MFU {logged[-1]['mfu']:.1%}" in capfd.readouterr().err
    page = lamina.report(tmp_path / "card").read_text()
    assert ">MFU<" in page
    assert f"{found['mfu']:.1%}" in page
    assert ">MFU<" not in lamina.report(tmp_path / "cpu").read_text()
    assert result(tmp_path / "card")["mfu"] == found["mfu"]


def clock_of(device, monkeypatch, waits=()):
    """A recorder whose trainer is on ``device``, at a time that the test sets."""
    now, waited = [0.0], []
    monkeypatch.setattr("lamina.training.monitor.recorder.time.monotonic", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(now[0]))
    recorder = RunRecorder.__new__(RunRecorder)
    recorder.training_seconds, recorder.training_steps, recorder._since = 0.0, 0, None
    recorder.bar = recorder.interrupted = recorder.pause_step = None
    recorder.processes, recorder.series, recorder.gains = SimpleNamespace(anyone=bool), StepSeries(), GainSeries()
    args = SimpleNamespace(device=torch.device(device))
    recorder.trainer = SimpleNamespace(count_overflow=lambda: False, args=args)
    return recorder, args, now, waited


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 6.0), ("cpu", 3.0)])
def test_on_a_gpu_the_clock_goes_on_between_steps_and_waits_only_where_it_stops(device, seconds, monkeypatch):
    recorder, args, now, waited = clock_of(device, monkeypatch)
    state = SimpleNamespace(global_step=1, max_steps=9)
    for step in (1, 2, 3):
        control = SimpleNamespace(should_log=step == 3, should_evaluate=False, should_save=False)
        recorder.on_step_begin(args, state, control)
        now[0] += 1.0
        recorder.on_step_end(args, state, control)
        now[0] += 1.5 if step < 3 else 100.0  # the next batch is read; the record is written
    recorder.on_step_begin(args, state, control)
    assert recorder.training_seconds == seconds
    assert waited == ([6.0] if device == "cuda" else [])


class Waits(TorchDispatchMode):
    """Notes what would make the host wait for a GPU: numbers that are read, and sizes that depend on values."""

    def __init__(self):
        super().__init__()
        self.counting, self.found = False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.counting and str(func).split(".")[1] in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
            self.found.append("".join(traceback.format_stack(limit=12)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("placement", "more"),
    [
        ("pre_ln", {"gradient_accumulation": 2}),
        ("keel", {"precision": "bf16"}),
        ("pre_ln(wiring=mhc)", {"max_grad_norm": 0.0}),
        pytest.param("pre_ln(wiring=attn_res,size=1)", {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_recorded_never_waits_for_a_gpu(trained, monkeypatch, placement, more):
    monkeypatch.setattr(recording, "reading_waits", lambda tensor: True)
    waits, step = Waits(), LaminaTrainer.training_step

    def counted(self, *args):
        waits.counting = 2 <= self.state.global_step + 1 <= 6  # from the first micro-batch of step 2 to that of step 7
        return step(self, *args)

    monkeypatch.setattr(LaminaTrainer, "training_step", counted)
    with waits:
        trained(steps=10, logging_steps=10, eval_steps=10, placement=placement, **more)
    assert not waits.found, waits.found[0]


def test_rows_of_one_sequence_each_give_the_same_loss_without_a_look_at_the_positions(monkeypatch):
    model, ids = lamina.build(llama_of(16), "keel"), torch.arange(24).view(2, 12)
    looked, look = [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: looked.append(ids) or look(ids))
    loss = model(input_ids=ids, labels=ids).loss
    assert len(looked) == 1
    with one_sequence_each():
        assert torch.equal(model(input_ids=ids, labels=ids).loss, loss)
    assert len(looked) == 1
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    assert not torch.equal(model(input_ids=ids, labels=ids, position_ids=packed).loss, loss)


def test_a_pinned_batch_is_sent_without_waiting(monkeypatch):
    """No GPU here: what the trainer asks of the tensors."""
    sent = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where, **how: sent.append((self, where, how)) or self)
    trainer = LaminaTrainer.__new__(LaminaTrainer)
    usual = {"world_size": 1, "n_gpu": 1, "average_tokens_across_devices": True}
    trainer.args = SimpleNamespace(device=torch.device("cuda"), **usual)
    trainer.is_deepspeed_enabled, trainer.model_accepts_loss_kwargs, trainer._loss_shifts_labels = False, True, True
    trainer.get_tp_size = trainer.get_cp_size = trainer.get_sp_size = lambda: 1
    ids = torch.arange(8).view(2, 4)
    batch = trainer._prepare_input({"input_ids": ids, "labels": ids})
    assert set(batch) == {"input_ids", "labels"}
    items = trainer._get_num_items_in_batch([batch, batch], trainer.args.device)
    assert items == 2 * 2 * 3
    to_the_gpu = [how for _, where, how in sent if where == (torch.device("cuda"),)]
    assert to_the_gpu == [{"non_blocking": True}] * 3
