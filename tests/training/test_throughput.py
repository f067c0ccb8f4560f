"""The speed of a run: its clock, and the share of the card's peak that it uses."""

import json
from types import SimpleNamespace

import pytest
import torch
from training.tiny_runs import SMALL, llama_of, result
from transformers import MixtralConfig

import lamina
from lamina.placements import resolve
from lamina.training import pretrain as pretraining
from lamina.training.execution.devices import peak_flops
from lamina.training.monitor.recorder import RunRecorder
from lamina.training.resolve import training_flops


@pytest.mark.parametrize(
    ("card", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_peak_is_found_by_the_cards_name(card, teraflops):
    assert peak_flops(card) == teraflops * 1e12


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
    config = MixtralConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
                           num_experts_per_tok=2, tie_word_embeddings=False)  # fmt: skip
    model = lamina.build(config, "pre_ln")
    attention = 2 * 16 * 16 + 2 * 16 * 8  # of two heads, keys and values have one
    weights = 2 * (attention + 4 * 16 + 2 * 3 * 16 * 24) + 61 * 16  # and the router
    assert training_flops(model, resolve("pre_ln", 2), 10) == 6 * weights + 12 * 2 * 16 * 10


def test_the_share_of_the_peak_is_recorded_shown_and_absent_without_a_peak(tiny, tmp_path, monkeypatch, capfd):
    assert "mfu" not in pretraining.pretrain(tiny("cpu"), bar=False)
    monkeypatch.setattr(pretraining, "peak_of", lambda device: 1e12)
    found = pretraining.pretrain(tiny("card"), bar=True)
    inner = json.loads((tmp_path / "card" / "model" / "config.json").read_text())["backbone_config"][
        "intermediate_size"
    ]
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
    recorder.processes = SimpleNamespace(anyone=bool)
    args = SimpleNamespace(device=torch.device(device))
    recorder.trainer = SimpleNamespace(count_overflow=lambda: None, args=args)
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
