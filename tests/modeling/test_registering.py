"""With `import lamina` done, transformers loads a saved model without being told, and without torch before that."""

import os
import subprocess
import sys

import pytest
from tiny import built

LOAD = """
assert "torch" not in sys.modules or order == "transformers first"
{body}
assert type({made}).__module__.startswith("lamina."), type({made})
"""
BODIES = {
    "config": ("c = transformers.AutoConfig.from_pretrained(sys.argv[1])", "c"),
    "model": ("m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])", "m"),
}
ORDERS = {
    "lamina first": "import lamina; assert not {'torch', 'transformers'} & set(sys.modules); import transformers",
    "transformers first": "import transformers; transformers.AutoConfig; import lamina",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    built("keel", 2).save_pretrained(folder)
    return folder


SLOW = [pytest.mark.slow]  # each a process that imports torch


@pytest.mark.parametrize("order", ["lamina first", pytest.param("transformers first", marks=SLOW)])
@pytest.mark.parametrize("body", ["model", pytest.param("config", marks=SLOW)])
def test_a_saved_model_is_loaded_without_asking(saved, order, body):
    text, made = BODIES[body]
    code = f"import sys; order = {order!r}\n{ORDERS[order]}\n{LOAD.format(body=text, made=made)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, env=environment, input=""
    )
    assert done.returncode == 0, done.stderr
    assert "custom code" not in done.stdout
