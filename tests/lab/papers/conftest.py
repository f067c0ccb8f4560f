import pytest
from lab.papers.study_files import write_study
from training import tiny_runs

from lamina.api import study

corpus = tiny_runs.corpus


@pytest.fixture(scope="session")
def ended(tmp_path_factory, corpus):
    """A study of two trials that has ended, with its measures, in a store."""
    where = tmp_path_factory.mktemp("ended")
    axes = {"placement": ["pre_ln", "keel"], "learning_rate": [3e-3]}
    measured = {"end": ["gains"], "records": ["layers", "metrics"]}
    file = write_study(where, corpus=corpus, axes=axes, measures=measured)
    places = {"store": str(where / "trials"), "records": str(where / "records"), "output": str(where / "out")}
    study(study=str(file), workers=2, bar=False, **places)
    return where
