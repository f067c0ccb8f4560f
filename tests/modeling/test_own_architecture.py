"""A user's own architecture, whose modules have other names, is wired without an edit of the package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from modeling.tiny import OF_TEXT, shake, streams, token_ids
from talking import NAMES, Model, TalkConfig, Turn
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lamina
from lamina.errors import UserError
from lamina.modeling.backbones import count_parameters
from lamina.modeling.initialization import weights
from lamina.modeling.modeling_lamina import ADAPTERS
from tools.reliability.tiny_families import MORE, tiny_model

AS_LLAMA = {"backbone.tower.turns": "layers", "backbone.words": "embed_tokens", "backbone.last": "norm"}
AS_LLAMA |= {"attention.pre_norm": "input_layernorm", "feed_forward.pre_norm": "post_attention_layernorm"}
AS_LLAMA |= {"attention.module": "self_attn", "feed_forward.module.gate": "mlp.gate_proj"}
AS_LLAMA |= {"feed_forward.module.wide": "mlp.up_proj", "feed_forward.module.narrow": "mlp.down_proj"}


def talking(placement="pre_ln", **changes):
    torch.manual_seed(0)
    return lamina.build(TalkConfig(**OF_TEXT), placement, adapter={**NAMES, **changes})


def test_in_pre_ln_it_is_the_llama_with_the_same_weights():
    model = talking().eval()
    shake(model)
    llama = LlamaForCausalLM(LlamaConfig(**OF_TEXT)).eval()
    renamed = {re.sub("|".join(AS_LLAMA), lambda m: AS_LLAMA[m[0]], k): v for k, v in model.state_dict().items()}
    llama.load_state_dict(renamed)
    ids = token_ids()
    torch.testing.assert_close(model(input_ids=ids).logits, llama(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_it_trains_and_comes_back_with_its_names_from_the_checkpoint(tmp_path):
    model = talking("keel", roles=NAMES["roles"])
    optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-2), token_ids(4)
    losses = []
    for _ in range(3):
        losses.append(float((loss := model(input_ids=ids, labels=ids).loss).detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    model.eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["backbone_config"]["lamina_adapter"] == NAMES
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_tied_embeddings_are_tied_under_their_own_name():
    model = lamina.build(TalkConfig(**OF_TEXT, tie_word_embeddings=True), "keel", adapter=NAMES)
    assert model.lm_head.weight is model.model.backbone.words.weight


def test_the_weights_have_the_roles_that_it_gives():
    roles = {weight.name.rpartition(".module.")[2]: weight.role for weight in weights(talking())}
    assert {"hidden", "router"}.isdisjoint(roles.values())
    assert roles["gate.weight"] == "gate"
    assert roles["narrow.weight"] == "feed_forward_out"


def test_the_configuration_may_name_its_modules_itself(tmp_path):
    config = TalkConfig(**OF_TEXT, lamina_adapter=NAMES)
    assert lamina.build(config, "keel", num_layers=3, hidden_size=16).model.layers[2].attention.module
    config.save_pretrained(tmp_path / "talk")
    assert lamina.build(tmp_path / "talk", "keel").model.layers[1].feed_forward.module.narrow
    assert count_parameters(config).total == sum(p.numel() for p in Model(config).parameters())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": "tlak"}, r"'talk': attention: there is no module 'tower.turns.0.tlak' \('tower.turns.0' has: "),
        ({"layers": "turns"}, r"'talk': layers: there is no module 'turns' \(it has: words, tower, last, rotary\)"),
        ({"layers": "words"}, r"layers: 'words' is a Embedding\. Name a ModuleList\."),
        ({"norm": "ln_f"}, r"norm: there is no module 'ln_f' \(it has: words, tower, last, rotary\)"),
        ({"dropout": "p"}, "dropout: the configuration has no field 'p'"),
        ({"atention": "talk"}, r"adapter: unknown field 'atention' \(allowed: layers, attention, "),
        ({"arguments": {"x": 1}}, "adapter: unknown field 'arguments'"),
        ({"norm": 3}, r"adapter: norm: 3 does not fit\. Give a name\."),
        ({"is_decoder": "no"}, r"adapter: is_decoder: 'no' does not fit\. Give true or false\."),
        ({"heads": ["tail"]}, r"adapter: heads: \['tail'\] does not fit\. Give a list of causal_lm, "),
        ({"roles": {"wide": "feed_forward"}}, "adapter: roles: wide: unknown role 'feed_forward'"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line_with_what_there_is(changes, says):
    with pytest.raises(UserError, match=says) as caught:
        talking(**changes)
    assert "\n" not in str(caught.value)


def test_what_wiring_a_layer_again_leaves_out_is_named(monkeypatch, caplog):
    begin = Turn.__init__

    def with_more(self, config, index):
        begin(self, config, index)
        self.dropout, self.twist, self.pair = nn.Dropout(), nn.Conv1d(4, 4, 1), nn.ModuleList()

    monkeypatch.setattr(Turn, "__init__", with_more)
    talking()
    assert "norms and additions. Lamina leaves out these modules of the layers: twist" in caplog.text
    assert "not tested with this model type, but with llama and others (`lamina backbones` lists all)." in caplog.text
    monkeypatch.setitem(ADAPTERS, near := f"{TalkConfig.model_type}s", ADAPTERS["llama"])
    talking()
    assert f"not tested with this model type, but with {near} and others" in caplog.text
    with pytest.raises(UserError, match=r"attention: 'pair' is a ModuleList\. Give the name of one module\."):
        talking(attention="pair")


def test_an_adapter_that_is_none_is_refused_by_a_command_in_one_line(tmp_path, refused):
    TalkConfig(**OF_TEXT, lamina_adapter=["talk"]).save_pretrained(tmp_path / "talk")
    backbone = ["--backbone", str(tmp_path / "talk"), "--output", str(tmp_path / "out")]
    assert "adapter: ['talk'] is not a mapping. Give a mapping" in refused("pretrain", *backbone, "--steps", "2")


@pytest.mark.slow
def test_an_installed_package_registers_its_model_type_and_its_checkpoints_are_read(tmp_path):
    """In a process where nobody has imported it, nor named its modules: it is found by its entry point."""
    (tmp_path / "talk-1.0.dist-info").mkdir()
    (tmp_path / "talk-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: talk\nVersion: 1.0\n")
    (tmp_path / "talk-1.0.dist-info" / "entry_points.txt").write_text("[lamina.backbones]\ntalk = talking\n")
    TalkConfig(**OF_TEXT, lamina_adapter=NAMES).save_pretrained(tmp_path / "small")
    talking("keel", roles=NAMES["roles"]).save_pretrained(tmp_path / "model")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parent)!r}]; import lamina\n"
    code += f"print(type(lamina.build({str(tmp_path / 'small')!r}, 'keel').model.layers[0].feed_forward.module))\n"
    code += "from transformers import AutoModelForCausalLM\n"
    code += f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'model')!r})\n"
    code += "print(type(model.model.layers[1].attention.module).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["<class", "'talking.Think'>", "LlamaAttention"], done.stderr


PAGE = (Path(__file__).parents[2] / "docs/own.md").read_text("utf-8")
OF_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 61}
OF_GPT2 |= {"bos_token_id": 1, "eos_token_id": 1}
AS_GPT2 = {"model.backbone": "transformer", "attention.pre_norm": "ln_1"}
AS_GPT2 |= {"feed_forward.pre_norm": "ln_2", "attention.module": "attn", "feed_forward.module": "mlp"}


def test_the_pages_adapter_wires_gpt2_as_transformers_does(tmp_path, monkeypatch):
    """Its layers take the mask by position, its positions are added to the embeddings, its matrices are [in, out]."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(from transformers import AutoModelForCausalLM.*?)^```$", PAGE, re.M | re.S)
    exec(code, names := {"lamina": lamina})
    assert torch.equal(*(names[one].eval()(input_ids=token_ids()).logits for one in ("model", "again")))
    config = GPT2Config(**OF_GPT2)
    model = lamina.build(config, "pre_ln", adapter=names["adapter"]).eval()
    shake(model)
    peer = GPT2LMHeadModel(config).eval()
    renamed = {re.sub("|".join(AS_GPT2), lambda m: AS_GPT2[m[0]], k): v for k, v in model.state_dict().items()}
    peer.load_state_dict(renamed)
    ids, mask = token_ids(), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        ours, theirs = (one(**given).logits[:, 3:] for one in (model, peer))
        assert torch.equal(ours, theirs)
    how = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **how), peer.generate(ids, **how))
    sizes = [(w.role, w.fan_in, w.fan_out) for w in weights(model) if w.layer == 0 and w.parameter.ndim == 2]
    assert sizes[:3] == [("query_key_value", 32, 96), ("attention_out", 32, 32), ("feed_forward_in", 32, 128)]


def test_gpt2_may_have_another_width():
    names = {"layers": "h", "attention": "attn", "norm": "ln_f"}
    for inner, wide in ((None, 256), (48, 96)):
        model = lamina.build(GPT2Config(**OF_GPT2, n_inner=inner), "keel", hidden_size=64, adapter=names)
        assert model.model.layers[0].feed_forward.module.c_fc.weight.shape == (64, wide)


def test_gpt2s_embedding_is_normed_with_its_positions():
    config = GPT2Config(**OF_GPT2)
    names = {"layers": "h", "attention": "attn", "norm": "ln_f", "embeddings": "drop"}
    model = lamina.build(config, "peri_ln", adapter=names, embedding_scale=2.0).eval()
    seen, _ = streams(model, token_ids())
    wte, wpe = (getattr(model.model.backbone, name).weight for name in ("wte", "wpe"))
    x = 2.0 * (wte[token_ids()] + wpe[:9])
    torch.testing.assert_close(seen[0], torch.nn.functional.layer_norm(x, (32,)))


HYBRIDS = {
    "qwen3_next": ({}, {}, 1),  # its stored gain w means 1 + w
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, {"norm": "final_layernorm"}, 0),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, {"norm": "embedding_norm"}, 0),
}


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_a_hybrid_is_wired_as_transformers_wires_it(family, monkeypatch, tmp_path):
    """Its layers mix tokens by attention or by a recurrence, under names of their own; so is the cache's there."""
    changes, names, offset = HYBRIDS[family]
    monkeypatch.setitem(MORE, family, {**MORE.get(family, {}), **changes})
    theirs = tiny_model(family)
    ours = lamina.build(theirs.config, "pre_ln", adapter=names or None).eval()
    layers, ids = ours.model.layers, token_ids()
    assert len({type(block.attention.module) for block in layers}) == 2
    body, backbone = theirs.base_model, ours.model.backbone
    for name in ("embed_tokens", names.get("norm", "norm")):
        backbone.get_submodule(name).weight.copy_(body.get_submodule(name).weight + offset * (name != "embed_tokens"))
    ours.lm_head.load_state_dict(theirs.lm_head.state_dict())
    for layer, block in zip(body.layers, layers, strict=True):
        parts = [part for name, part in layer.named_children() if "norm" not in name]
        before = [part for name, part in layer.named_children() if "norm" in name]
        mixer, feed_forward = sorted(parts, key=lambda part: type(part) is not type(block.attention.module))
        halves = (block.attention, block.feed_forward)
        for half, module, norm in zip(halves, (mixer, feed_forward), before, strict=True):
            half.module.load_state_dict(module.state_dict())
            half.pre_norm.weight.copy_(norm.weight + offset)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        assert torch.equal(*(one(**given).logits[mask == 1] for one in (ours, theirs)))
    how = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **how), theirs.generate(ids, **how))
    ours.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, ours(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("placement", ["keel(wiring=mhc)", "fusenorm(wiring=x0)", "mix_ln(wiring=attn_res)"])
def test_a_hybrid_takes_any_placement(placement):
    model = lamina.build(tiny_model("qwen3_next").config, placement).train()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if "experts" not in name)
    with pytest.raises(UserError, match="this wiring needs 'q_proj', but Qwen3NextGatedDeltaNet has none"):
        lamina.build(tiny_model("qwen3_next").config, "pre_ln", wiring="mudd")
