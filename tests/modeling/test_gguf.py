"""GGUF: placements that equal an architecture of llama.cpp, which test_llama_cpp.py runs itself.

Its equation is that of transformers' model of the same name, on which the logits are compared; the file is read back by
transformers' own loader where it knows the architecture, and tensor by tensor elsewhere.
"""

import json
from dataclasses import replace

import pytest
import torch
from tiny import VOCABULARY, built, llama, token_ids
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen2Config

import lamina
from lamina.cli import main
from lamina.data.corpus import Corpus
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.modeling.backbones import gguf_file
from lamina.modeling.backbones.equivalent import equivalent, in_pairs
from lamina.placements import Norm, names, resolve

gguf = pytest.importorskip("gguf")

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


def without_gains(placement):
    """The plan with norms of a constant gain before each sub-layer."""
    norm = Norm(learnable_gain=False, initial_gain=0.5)
    return replace(
        plan := resolve(placement, 4),
        layers=tuple(
            replace(
                layer,
                attention=replace(layer.attention, pre_norm=norm),
                feed_forward=replace(layer.feed_forward, pre_norm=norm),
            )
            for layer in plan.layers
        ),
    )


# Every placement on a Llama, at its defaults: the architecture of llama.cpp that computes it.
ON_A_LLAMA = {
    "pre_ln": "llama",
    "layernorm_scaling": "llama",
    "olmo2": "olmo2",
    "sandwich_ln": "glm4",
    "peri_ln": "glm4",
}
CASES = {
    **{name: (name, llama(4), {}) for name in ON_A_LLAMA},
    "mix_ln without Post-LN layers": ("mix_ln", llama(4), {"num_post_layers": 0}),
    "norms without learned gains": (without_gains("sandwich_ln"), llama(4), {}),
    "an embedding that is scaled": ("pre_ln", llama(4, tie_word_embeddings=True), {"embedding_scale": 3.0}),
    "heads of another width": ("pre_ln", llama(4, head_dim=16), {}),
    "tied": ("pre_ln", llama(4, tie_word_embeddings=True), {}),
    "olmo2, tied": ("olmo2", llama(4, tie_word_embeddings=True), {}),
    "peri_ln, tied": ("peri_ln", llama(4, tie_word_embeddings=True), {}),
    "qwen3": ("pre_ln", llama(4, head_dim=128), {"qk_norm": "head"}),
    "exaone4": ("out_ln", llama(4), {"qk_norm": "head"}),
    "qwen2": ("pre_ln", Qwen2Config(**SIZES), {}),
    "mistral": ("pre_ln", MistralConfig(**SIZES, sliding_window=None), {}),
    "gemma2": ("peri_ln", Gemma2Config(**SIZES, head_dim=256, sliding_window=8), {"embedding_norm": False}),
}
READ_BY_TRANSFORMERS = {"llama", "qwen2", "qwen3", "gemma2"}
# A factor that goes into a gain is rounded once more; Glm4 and Gemma 2 order their sums in another way.
TOLERANCE = 2e-5


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=token_ids(length=17)).logits


def difference(one, other):
    return float((logits(one) - logits(other)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_what_llama_cpp_can_express_is_written_and_read_back(case, tmp_path):
    placement, config, options = CASES[case]
    model = built(placement, config=config, **options)
    same = equivalent(model)
    assert difference(same, model) < TOLERANCE
    assert gguf_file.write(same, tmp_path / gguf_file.FILE, None) is False
    reader = gguf.GGUFReader(tmp_path / gguf_file.FILE)
    architecture = reader.get_field("general.architecture").contents()
    expected = ON_A_LLAMA.get(case) or (case if case in gguf_file.FORMATS else architecture)
    assert architecture == ("llama" if expected == "mistral" else expected)
    assert difference(gguf_file.read(tmp_path / gguf_file.FILE, same.config), same) == 0.0
    stored = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    assert ("output.weight" in stored) is (not same.config.tie_word_embeddings or architecture == "olmo2")
    if architecture in READ_BY_TRANSFORMERS:
        again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf_file.FILE)
        assert difference(again, model) < TOLERANCE


@pytest.mark.parametrize("placement", sorted(set(names()) - set(ON_A_LLAMA)))
def test_a_placement_that_no_architecture_has_is_refused_in_one_line(placement):
    with pytest.raises(UserError, match="no architecture computes the placement") as refusal:
        equivalent(built(placement, 4))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (llama(4), {"norm": "layer"}, "no architecture computes"),
        (llama(4), {"final_norm": False}, "no architecture computes"),
        (llama(4), {"v_norm": "head"}, "no architecture computes"),
        (llama(4), {"qk_norm": "full"}, "no architecture computes"),
        (llama(4, hidden_act="gelu"), {"qk_norm": "head"}, "another activation"),
        (llama(4, mlp_bias=True), {"qk_norm": "head"}, "biases outside"),
        (Gemma2Config(**SIZES, head_dim=8), {}, "on the backbone 'gemma2'"),
        (MistralConfig(**SIZES, sliding_window=8), {"qk_norm": "head"}, "its sliding window of 8"),
    ],
)
def test_so_is_another_equation_under_the_name_of_pre_ln(config, options, message):
    with pytest.raises(UserError, match=message):
        equivalent(lamina.build(config, "pre_ln", **options))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (llama(4, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "'linear' scaling"),
        (MistralConfig(**SIZES, sliding_window=8), "sliding_window: 8"),
    ],
)
def test_a_setting_that_llama_cpp_would_not_compute_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        gguf_file.check(equivalent(built("pre_ln", config=config)).config)


def test_pairs_are_what_the_other_rotary_embedding_turns():
    """Channels i and i + width/2 of a head, as Llama turns them, become neighbors."""
    rows = torch.arange(2 * 6)[:, None]
    assert in_pairs(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.fixture
def saved(tmp_path):
    config = llama(2, vocab_size=300)
    built("sandwich_ln", config=config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_writes_one_file_and_verifies_it(saved, tmp_path, capsys):
    load_tokenizer("bytes").save_pretrained(saved)
    assert main(["convert", str(saved), str(tmp_path / "out"), "--to", "gguf"]) == 0
    out = capsys.readouterr().out
    assert "sandwich_ln on llama -> GGUF, 2 layers, float32" in out
    assert "the tokenizer: left out" in out
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["largest_difference"] < TOLERANCE
    assert (tmp_path / "out" / "model.gguf").is_file()
    assert (
        main(["convert", str(saved), str(tmp_path / "out"), "--to", "gguf", "--overwrite", "--dtype", "bfloat16"]) == 0
    )


def test_a_byte_level_bpe_goes_into_the_file(saved, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the norms of the layers are the norms of the streams\n" * 200)
    tokenizer = load_tokenizer("bpe:280", corpus=Corpus.parse(str(tmp_path / "text.txt")))
    tokenizer.save_pretrained(saved)
    assert main(["convert", str(saved), str(tmp_path / "out"), "--to", "gguf", "--no-verify"]) == 0
    assert "left out" not in capsys.readouterr().out
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == 300
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(reader.get_field("tokenizer.ggml.merges").contents()) == len(tokenizer) - 257 > 10
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == tokenizer.eos_token_id


def test_the_wrong_source_or_placement_is_refused(tmp_path, capsys):
    built("keel").save_pretrained(tmp_path / "keel")
    assert main(["convert", str(tmp_path / "keel"), str(tmp_path / "out"), "--to", "gguf"]) == 2
    assert "no architecture computes the placement 'keel'" in capsys.readouterr().err
    equivalent(built("pre_ln")).save_pretrained(tmp_path / "llama")
    assert main(["convert", str(tmp_path / "llama"), str(tmp_path / "out"), "--to", "gguf"]) == 2
    assert "convert_hf_to_gguf.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
