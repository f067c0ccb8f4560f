"""Sizes that no memory holds are refused by arithmetic, before anything is allocated."""

import pytest
import torch

import lamina
from lamina.errors import UserError
from lamina.modeling import building
from lamina.training.resolve import resolve_run
from lamina.training.settings import PretrainSettings

TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 16, "batch_size": 2}


@pytest.fixture
def a_gigabyte(monkeypatch):
    monkeypatch.setattr(building, "available_memory", lambda device="cpu": 2**30)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"num_layers": 5000, "hidden_size": 512, "num_heads": 8}, "num_layers"),
        ({"hidden_size": 2**16, "num_heads": 512}, "hidden_size"),
        ({"batch_size": 2**17, "sequence_length": 2**12}, "batch_size"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(a_gigabyte, sizes, field):
    with pytest.raises(UserError, match=field) as error:
        resolve_run(PretrainSettings(**{**TINY, **sizes}))
    assert "this machine has 1.0 GiB free" in str(error.value)


def test_the_states_of_the_optimizer_count(a_gigabyte):
    sizes = {**TINY, "num_layers": 32, "hidden_size": 512, "num_heads": 8}  # 0.4 GB of weights, 1.6 GB with AdamW
    with pytest.raises(UserError, match="hidden_size"):
        resolve_run(PretrainSettings(**sizes))
    resolve_run(PretrainSettings(**sizes, trainer={"optim": "sgd"}))


def test_a_run_that_another_stands_in_for_is_not_measured(a_gigabyte):
    resolve_run(PretrainSettings(**{**TINY, "hidden_size": 2**12, "num_heads": 32}), trained=False)


def test_a_model_that_does_not_fit_is_refused_unless_it_has_no_memory(a_gigabyte):
    with pytest.raises(UserError, match="hidden_size"):
        lamina.build("llama-7b", "keel")
    with torch.device("meta"):
        assert lamina.build("llama-7b", "keel", num_layers=1).device.type == "meta"
