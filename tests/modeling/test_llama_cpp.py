"""llama.cpp itself, out of the xllamacpp package, on the GGUF files: the log-probabilities are the checkpoint's.

Each file is opened in a process of its own: what goes wrong in llama.cpp ends the process.
"""

import json
import subprocess
import sys

import pytest
import torch
from tiny import built, llama
from transformers import Gemma2Config, Qwen2Config

from lamina.data.corpus import Corpus
from lamina.data.tokenizers import load_tokenizer
from lamina.modeling.backbones import gguf_file
from lamina.modeling.backbones.equivalent import equivalent

pytestmark = pytest.mark.slow
pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 300, "max_position_embeddings": 128}
LLAMA = llama(4, **SIZES)
TIED = llama(4, **SIZES, tie_word_embeddings=True)
GEMMA = Gemma2Config(num_hidden_layers=4, **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8)
# float32, its cache, too: sums in another order. But llama.cpp looks Gemma's GELU up in a table of half precision.
CASES = {
    "pre_ln": ("pre_ln", LLAMA, {}, 1e-4),
    "pre_ln, tied": ("pre_ln", TIED, {}, 1e-4),
    "layernorm_scaling": ("layernorm_scaling", LLAMA, {}, 1e-4),
    "olmo2": ("olmo2", LLAMA, {}, 1e-4),
    "olmo2, tied": ("olmo2", TIED, {}, 1e-4),
    "sandwich_ln": ("sandwich_ln", LLAMA, {}, 1e-4),
    "peri_ln": ("peri_ln", LLAMA, {}, 1e-4),
    "peri_ln, tied": ("peri_ln", TIED, {}, 1e-4),
    "qwen3": ("pre_ln", LLAMA, {"qk_norm": "head"}, 1e-4),
    "exaone4": ("out_ln", LLAMA, {"qk_norm": "head"}, 1e-4),
    "qwen2": ("pre_ln", Qwen2Config(num_hidden_layers=4, **SIZES), {}, 1e-4),
    "gemma2": ("peri_ln", GEMMA, {"embedding_norm": False}, 1e-2),
}
TEXT = "the norms of the streams are level"
SCRIPT = """
import json, sys
import xllamacpp as cpp

params = cpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel = 128, 1
params.cache_type_k = params.cache_type_v = cpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
prompt = sys.argv[2] if sys.argv[2].startswith("the") else json.loads(sys.argv[2])
# The bias has a whole character come next; the probabilities are those before it.
asked = {"prompt": prompt, "max_tokens": 1, "n_probs": 300, "temperature": 0, "logit_bias": [[70, 1000.0]]}
answer = cpp.Server(params).handle_completions(asked)
answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("FOUND", json.dumps({entry["id"]: entry["logprob"] for entry in top}))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text("the norms of the layers are the norms of the streams\n" * 200)
    made = load_tokenizer("bpe:280", corpus=Corpus.parse(str(folder / "text.txt")))
    made.save_pretrained(folder)
    return made, folder


def log_probabilities(file, prompt):
    """What llama.cpp says of the next token, by id."""
    words = [sys.executable, "-c", SCRIPT, str(file), prompt]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stderr[-2000:]
    return {int(token): value for token, value in json.loads(found[0].removeprefix("FOUND ")).items()}


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_what_the_checkpoint_does(case, tokenizer, tmp_path):
    placement, config, options, tolerance = CASES[case]
    model = built(placement, config=config, **options)
    assert gguf_file.write(equivalent(model), tmp_path / gguf_file.FILE, tokenizer[1])
    ids = torch.randint(3, 280, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits[0, -1].log_softmax(-1)
    found = log_probabilities(tmp_path / gguf_file.FILE, json.dumps(ids[0].tolist()))
    assert len(found) == 300
    assert max(abs(float(expected[token]) - value) for token, value in found.items()) < tolerance


def test_it_splits_a_text_as_the_tokenizer_in_the_file_does(tokenizer, tmp_path):
    model = built("pre_ln", config=LLAMA)
    gguf_file.write(equivalent(model), tmp_path / gguf_file.FILE, tokenizer[1])
    ids = torch.tensor([tokenizer[0](TEXT)["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits[0, -1].log_softmax(-1)
    found = log_probabilities(tmp_path / gguf_file.FILE, TEXT)
    assert max(abs(float(expected[token]) - value) for token, value in found.items()) < 1e-4
