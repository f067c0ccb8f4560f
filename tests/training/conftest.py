import pytest
from training.tiny_runs import settings, write_corpus

from lamina.training import pretrain as pretraining
from lamina.training.trainer import LaminaTrainer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.txt")


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lamina-cache")


@pytest.fixture(autouse=True)
def shared_cache(session_cache, monkeypatch):
    """The blocks are packed once for all the tests here."""
    monkeypatch.setenv("LAMINA_CACHE", str(session_cache))


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
    """Run a tiny run; gives its folder's path and its result."""

    def run(name="run", resume=False, **changed):
        chosen = tiny(name, **changed)
        return pretraining.pretrain(chosen, resume=resume, bar=False)

    return run


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
def before_step(monkeypatch):
    """Call ``act(trainer, model)`` right before the forward pass of a step (counted from 1)."""

    def install(step, act):
        original = LaminaTrainer.training_step

        def training_step(self, model, *args, **kwargs):
            if self.state.global_step + 1 == step:
                act(self, model)
            return original(self, model, *args, **kwargs)

        monkeypatch.setattr(LaminaTrainer, "training_step", training_step)

    return install
