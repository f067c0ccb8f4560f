from contextlib import ExitStack

import pytest
import torch
from training import tiny_runs
from training.tiny_runs import at_each_pass, at_step, settings
from transformers import ModernBertConfig

from lamina.training import pretrain as pretraining
from lamina.training.monitor import mistakes
from lamina.training.trainer import LaminaTrainer

corpus = tiny_runs.corpus


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A folder with a small ModernBERT's configuration."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ModernBertConfig(**sizes, vocab_size=300, pad_token_id=0, max_position_embeddings=64).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """The page of a run, which takes longer than the tiny run: tests/reports has its tests, and tests that want it
    call ``lamina report``."""
    monkeypatch.setattr("lamina.api.job_functions.write_page", lambda folder: None)


@pytest.fixture
def tiny(corpus, tmp_path):
    """Settings of a tiny run in ``tmp_path / name``."""
    return lambda name="run", **changed: settings(corpus, tmp_path / name, **changed)


@pytest.fixture
def trained(tiny):
    """Run a tiny run; gives its result."""
    return lambda name="run", resume=False, **changed: pretraining.pretrain(
        tiny(name, **changed), resume=resume, bar=False
    )


@pytest.fixture
def trainers(monkeypatch):
    """Every LaminaTrainer that a test's runs make, in their order."""
    made = []

    class Kept(LaminaTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(pretraining, "LaminaTrainer", Kept)
    return made


@pytest.fixture
def before_step():
    """Call ``act(trainer, model)`` right before the forward pass of a step (counted from 1), until the test ends."""
    with ExitStack() as installed:
        yield lambda step, act: installed.enter_context(at_step(step, act))


@pytest.fixture
def before_each_pass():
    """Call ``act(trainer, model, inputs)`` right before each forward pass of a step, until the test ends."""
    with ExitStack() as installed:
        yield lambda act: installed.enter_context(at_each_pass(act))


@pytest.fixture
def first_step(before_step):
    """The weights before the first step, and its gradients, by parameter name."""
    weights, gradients = {}, {}

    def keep(trainer, model):
        weights.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        gradients.update({name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()})
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: gradients[name].copy_(gradient))

    before_step(1, keep)
    return weights, gradients


@pytest.fixture(autouse=True)
def a_check_that_breaks_breaks_the_test(monkeypatch):
    """In a user's training it is a note."""

    def raised(error):
        raise error

    monkeypatch.setattr(mistakes, "one_line", raised)
