import subprocess
import sys

import pytest

import lamina.data


def test_importing_the_package_and_reading_a_corpus_loads_neither_torch_nor_transformers():
    script = (
        "import sys, lamina.data\n"
        "assert 'lamina.data.corpus' not in sys.modules\n"
        "next(lamina.data.Corpus.parse('embedded').documents()); lamina.data.validate_spec('bpe:300')\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", lamina.data.__all__)
def test_every_public_name_is_there(name):
    assert getattr(lamina.data, name) is not None
    assert name in dir(lamina.data)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        lamina.data.nothing  # noqa: B018
