import subprocess
import sys


def test_reading_a_corpus_and_checking_names_load_neither_torch_nor_transformers():
    script = (
        "import sys\n"
        "from lamina.data.corpus import Corpus\n"
        "from lamina.data.tokenizers import validate_spec\n"
        "next(Corpus.parse('embedded').documents()); validate_spec('bpe:300')\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
