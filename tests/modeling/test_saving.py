"""What was saved comes back bit for bit, in a fresh process, with the package and without it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from modeling.tiny import SIZES, VOCABULARY, built, llama, token_ids
from spread import KINDS
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

import lamina
from lamina.modeling import LaminaConfig, LaminaForSequenceClassification
from lamina.placements import names, resolve

COMMON = """
import inspect, json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM
HEADS = {"reward": AutoModelForSequenceClassification, "modernbert": AutoModelForMaskedLM}
HEADS["vit"] = AutoModelForImageClassification
root = Path(sys.argv[1])
results = {}
def check(folder, loader, trust):
    model = loader.from_pretrained(folder, trust_remote_code=trust).eval()
    saved = torch.load(folder / "saved.pt", weights_only=True)
    with torch.no_grad():
        output = model(**{"pixel_values" if folder.name == "vit" else "input_ids": saved["ids"]})
    kept = "logits" if "logits" in output else "last_hidden_state"
    results[f"{folder.name} {loader.__name__}"] = {
        "equal": torch.equal(output[kept], saved[kept]),
        "difference": (output[kept] - saved[kept]).abs().max().item(),
        "module": type(model).__module__.split(".")[0],
        "sources": [inspect.getsource(type(m).forward) for m in model.modules() if "NormedL" in type(m).__name__],
    }
"""
WITH_PACKAGE = f"""
import sys, lamina
assert not {{"torch", "transformers"}} & set(sys.modules)
{COMMON}
for folder in sorted(root.iterdir()):
    check(folder, HEADS.get(folder.name, AutoModelForCausalLM), False)
print(json.dumps(results))
"""
WITHOUT_PACKAGE = f"""
import sys
class NoLamina:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lamina":
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, NoLamina())
{COMMON}
for folder in sorted(root.iterdir()):
    check(folder, HEADS.get(folder.name, AutoModelForCausalLM), True)
    if folder.name != "reward":
        check(folder, AutoModel, True)
model = AutoModelForSequenceClassification.from_pretrained(root / "keel", trust_remote_code=True, num_labels=1)
results["fresh head"] = {{"labels": model.score.out_features}}
try:
    AutoModelForCausalLM.from_pretrained(root / "keel", trust_remote_code=False)
    results["without trust"] = {{"refused": False}}
except ValueError:
    results["without trust"] = {{"refused": True}}
results["package"] = {{"loaded": "lamina" in sys.modules}}
print(json.dumps(results))
"""


def fill(folder, model, ids=None):
    ids = token_ids() if ids is None else ids
    with torch.no_grad():
        output = model(**{model.main_input_name: ids})
        base = model.model(**{model.main_input_name: ids}).last_hidden_state
    model.save_pretrained(folder)
    torch.save({"ids": ids, "logits": output.logits, "last_hidden_state": base}, folder / "saved.pt")


@pytest.fixture(scope="module", params=["kinds", pytest.param("all", marks=pytest.mark.slow)])
def saved(tmp_path_factory, request):
    """A folder with a saved model for each placement, or kind of placement, and some more."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    for name in names() if request.param == "all" else KINDS:
        fill(root / name, built(name, 3))
    fill(root / "keel_learned", built("keel", 3, learnable_alpha=True))
    fill(root / "tied", built("fusenorm", 2, config=llama(2, tie_word_embeddings=True), embedding_norm=True))
    fill(root / "streams", built("peri_ln", 3, wiring="mhc"))
    fill(root / "earlier_states", built("pre_ln", 3, wiring="attn_res"))
    fill(root / "normed_heads", built("post_ln", 2, qk_norm="head", v_norm="full", norm="group", groups=4))
    config = LaminaConfig(backbone_config=llama(2, pad_token_id=0), plan=resolve("fusenorm", 2).to_dict(), num_labels=1)
    fill(root / "reward", LaminaForSequenceClassification(config).eval())
    encoder = AutoConfig.for_model("modernbert", vocab_size=VOCABULARY, pad_token_id=0, **SIZES)
    fill(root / "modernbert", built("peri_ln", 2, config=encoder))
    neox = AutoConfig.for_model("gpt_neox", vocab_size=VOCABULARY, pad_token_id=0, **SIZES)
    fill(root / "parallel", built("pre_ln", 2, config=neox, wiring="parallel"))
    vision = AutoConfig.for_model("vit", image_size=16, patch_size=4, num_labels=5, **SIZES)
    fill(root / "vit", built("peri_ln", 2, config=vision), torch.randn(2, 3, 16, 16))
    return root


def fresh_process(code, root, home):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(home)}
    run = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def is_the_same(key, result):
    # A score is one column, a matrix-vector product whose order of sums depends on where in memory the file was mapped.
    return result["difference"] < 1e-6 if "SequenceClassification" in key else result["equal"]


@pytest.mark.slow
def test_a_fresh_process_with_the_package_computes_the_same_logits(saved, tmp_path):
    results = fresh_process(WITH_PACKAGE, saved, tmp_path)
    assert {key.split()[0] for key in results} == {folder.name for folder in saved.iterdir()}
    assert [key for key, result in results.items() if not is_the_same(key, result)] == []
    assert {result["module"] for result in results.values()} == {"lamina"}


def test_a_fresh_process_without_the_package_computes_the_same_logits(saved, tmp_path):
    results = fresh_process(WITHOUT_PACKAGE, saved, tmp_path)
    assert results.pop("package") == {"loaded": False}
    assert results.pop("fresh head") == {"labels": 1}
    assert results.pop("without trust") == {"refused": True}
    assert {key.split()[0] for key in results} == {folder.name for folder in saved.iterdir()}
    assert [key for key, result in results.items() if not is_the_same(key, result)] == []
    assert {result["module"] for result in results.values()} == {"transformers_modules"}
    sources = results["normed_heads AutoModelForCausalLM"]["sources"]
    assert len(sources) == 2
    assert all("self.normed_values(self.v_proj(" in source for source in sources)


def test_a_removed_layer_leaves_the_others_their_plan(tmp_path):
    model = lamina.build(llama(4), "mix_ln", alpha=0.5)
    assert [b.attention.post_norm is not None for b in model.model.layers] == [True, True, False, False]
    plan = model.config.plan
    assert [layer["attention"]["post_norm"] is not None for layer in plan["layers"]] == [True, True, False, False]
    kept = {**plan, "layers": plan["layers"][1:]}
    shorter = LaminaConfig(backbone_config=llama(3), plan=kept)
    shorter.save_pretrained(tmp_path)
    again = LaminaConfig.from_pretrained(tmp_path)
    assert [layer["attention"]["post_norm"] is not None for layer in again.plan["layers"]] == [True, False, False]


def test_a_configuration_whose_plan_is_of_another_depth_is_refused():
    with pytest.raises(ValueError, match=r"plan: the plan has 3 layers, .* num_hidden_layers = 2"):
        LaminaConfig(backbone_config=llama(2), plan=resolve("keel", 3).to_dict())


def test_a_saved_model_comes_back_in_the_precision_it_was_saved_in(tmp_path):
    built("peri_ln", 2, qk_norm="head").bfloat16().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_a_causal_model_gives_its_body_to_a_classifier(saved):
    reward = AutoModelForSequenceClassification.from_pretrained(saved / "keel", num_labels=1, pad_token_id=0)
    causal = AutoModelForCausalLM.from_pretrained(saved / "keel")
    for key, parameter in causal.model.named_parameters():
        assert torch.equal(parameter, reward.model.get_parameter(key)), key


def test_a_plain_llama_beside_it_is_what_it_was():
    torch.manual_seed(0)
    plain = LlamaForCausalLM(llama(3)).eval()
    with torch.no_grad():
        before = plain(input_ids=token_ids(), output_hidden_states=True)
        model = lamina.build(llama(3), "keel").eval()
        assert len(model(input_ids=token_ids(), output_hidden_states=True).hidden_states) == 4
        after = plain(input_ids=token_ids(), output_hidden_states=True)
    assert len(after.hidden_states) == 4
    for one, other in zip(before.hidden_states, after.hidden_states, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain.lm_head(after.hidden_states[-1]), after.logits)  # its own last state is the normed one


def test_a_configuration_of_the_users_is_not_changed():
    config = llama(2, tie_word_embeddings=True)
    before = config.to_dict()
    lamina.build(config, "keel", num_layers=3)
    assert LaminaConfig(backbone_config=config, plan=resolve("keel", 2).to_dict()).tie_word_embeddings
    assert config.to_dict() == before


def test_a_head_that_was_untied_stays_untied(tmp_path):
    model = lamina.build(llama(2, tie_word_embeddings=True), "keel")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.tie_word_embeddings is again.config.backbone_config.tie_word_embeddings is False
    again.tie_weights()
    assert torch.equal(again(token_ids()).logits, model.eval()(token_ids()).logits)


def test_the_classifier_reads_the_same_token_with_labels_and_without():
    """Padding is the end token here, as in many tokenizers: only the mask tells them apart."""
    model = lamina.build(llama(2), "keel", head="sequence_classification", num_labels=3).eval()
    model.config.get_text_config().pad_token_id = 2
    ids = torch.tensor([[5, 6, 2, 2], [5, 6, 7, 8]])
    given = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    labels = torch.tensor([0, 2])
    with torch.no_grad():
        plain, labeled = model(**given), model(**given, labels=labels)
    assert torch.equal(plain.logits, labeled.logits)
    assert labeled.loss == torch.nn.functional.cross_entropy(plain.logits, labels)


@pytest.mark.slow  # a process that imports torch; above, Lamina comes first
@pytest.mark.parametrize("auto", ["AutoConfig", "AutoModelForCausalLM"])
def test_where_transformers_comes_first_a_saved_model_is_loaded_without_asking(auto, tmp_path):
    built("keel", 2).save_pretrained(tmp_path)
    code = "import sys, transformers; transformers.AutoConfig; import lamina\n"
    code += f"print(type(transformers.{auto}.from_pretrained(sys.argv[1])).__module__)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, input="")
    assert done.stdout.startswith("lamina."), done.stdout + done.stderr
