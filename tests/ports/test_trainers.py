"""Emitted files in the trainers themselves, from the folder that LAMINA_TRAINERS names; skipped without it.

    pip install --no-deps --target FOLDER ai2-olmo-core==3.0.0 cached-path dataclass-extensions bettermap \
        importlib_resources boto3 botocore s3transfer jmespath einops google-cloud-storage \
        megatron-core==0.16.1 mlx==0.32.4 mlx-cpu mlx-lm==0.32.2
    LAMINA_TRAINERS=FOLDER pytest -m slow tests/ports
"""

import importlib
import os
import sys

import pytest
import torch
from peers import LAYERS, SINGLE_STREAM, VOCABULARY, WIDTH, llama, module_of, ours
from test_emit import check

from lamina.ports import emit

FOLDER = os.environ.get("LAMINA_TRAINERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="LAMINA_TRAINERS names no folder with the trainers' packages"),
]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


def needs(package):
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.skip(f"{package} is not in LAMINA_TRAINERS: {error}")


def on_olmo(spec, num_layers=LAYERS, tied=False):
    """OLMo-core's own model with an emitted block, and the configuration of the same Llama."""
    needs("olmo_core")
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
    from olmo_core.nn.transformer import TransformerConfig

    emitted = emit(spec, "olmo-core", num_layers)
    module = module_of(emitted.code)
    config = TransformerConfig.llama_like(
        d_model=WIDTH, vocab_size=VOCABULARY, n_layers=num_layers, n_heads=4, n_kv_heads=2, rope_theta=10000,
        layer_norm_eps=1e-5, hidden_size_multiplier=1.5,
    )  # fmt: skip
    config.tie_word_embeddings = tied
    model = getattr(module, emitted.plan.placement)(config).build(init_device="meta")
    if hasattr(module, "replace_norms"):
        module.replace_norms(model)
    model.init_weights(device=torch.device("cpu"), max_seq_len=16)
    module.init_weights(model)
    inner = model.blocks["0"].feed_forward.hidden_size
    return module, model, llama(num_layers, intermediate_size=inner, rms_norm_eps=1e-5, tie_word_embeddings=tied)


@pytest.mark.parametrize("spec", SINGLE_STREAM)
def test_on_olmo_core(spec):
    _, model, config = on_olmo(spec)
    check(ours(spec, config), model, "olmo-core", close=2e-6)  # float32 rounds elsewhere there
