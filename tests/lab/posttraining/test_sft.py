"""`lamina sft` on a tiny model: it learns, resumes, keeps the best, trains LoRA, packs, and refuses bad input."""

import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from lab.posttraining.tiny import common, sorting, write_model, write_rows
from safetensors.torch import load_file
from training.tiny_runs import records
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lamina.cli import main
from lamina.errors import UserError
from lamina.jobs.folder import in_use
from lamina.jobs.kinds import Kind, kind_of
from lamina.lab.posttraining.settings import SftSettings
from lamina.lab.posttraining.sft import sft
from lamina.lab.posttraining.tuning import split
from lamina.reports import report


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "sorting.jsonl", sorting(24))


@pytest.fixture
def tuned(base, data, tmp_path):
    """Fine-tune the tiny model in ``tmp_path / name``; gives the folder and the result."""

    def run(name="run", resume=False, **changed):
        given = {**common(base, data, tmp_path / name), "template": "plain", "steps": 6, "learning_rate": 1e-2}
        given = {"output": given["output"]} if resume else given
        return tmp_path / name, sft({**given, **changed}, resume=resume, bar=False)

    return run


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def test_the_held_out_loss_falls_and_the_model_answers_in_its_template(tuned):
    folder, result = tuned(steps=20)
    evaluated = [record["eval_loss"] for record in records(folder) if "eval_loss" in record]
    assert result["status"] == "finished"
    assert evaluated[-1] < evaluated[0] - 0.5
    assert result["eval_loss"] == evaluated[-1]
    assert (result["examples"], result["held_out"]) == (18, 6)
    assert kind_of(folder) == Kind.SFT
    turns, template = [{"role": "user", "content": "Sort abc"}], AutoTokenizer.from_pretrained(folder / "model")
    assert "Sort abc\n" in template.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    page = report(folder).read_text()
    assert "held-out loss" in page
    assert "Gradient norm by layer" in page


def test_a_tuned_model_chats(tuned, capsys, monkeypatch, base, refused):
    folder, _ = tuned(steps=1)
    chat = ["generate", str(folder), "--chat", "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*chat, "--prompt", "Sort abc"]) == 0
    alone = capsys.readouterr().out
    said = iter(["Sort abc", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert main(chat) == 0
    assert capsys.readouterr().out == alone
    assert "has no chat template" in refused("generate", str(base), "--chat", "--prompt", "Sort abc")


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"modules_to_save": "out_norm"}])
def test_lora_trains_few_weights_and_leaves_an_adapter_that_peft_reads(tuned, base, lora):
    from peft import PeftModel

    folder, result = tuned(lora_rank=2, lora=lora, steps=2)
    assert result["trained_parameters"] < result["parameters"] / 3
    merged = AutoModelForCausalLM.from_pretrained(folder / "model")
    original = AutoModelForCausalLM.from_pretrained(base)
    assert set(merged.state_dict()) == set(original.state_dict())
    wrapped = PeftModel.from_pretrained(original, folder / "adapter")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(wrapped(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(base)(ids).logits)


def test_packed_examples_do_not_see_one_another(tuned):
    """One packed sequence of all examples has the loss of the same examples apart."""
    apart, _ = tuned("apart", steps=1, batch_size=18)
    _, result = tuned("packed", steps=1, batch_size=1, packing=True, sequence_length=128, gradient_accumulation=4)
    assert result["sequences"] < 18
    tuned("one", steps=1, batch_size=int(result["sequences"]), packing=True, sequence_length=128)
    first = [next(r["loss"] for r in records(f) if "loss" in r) for f in (apart, apart.parent / "one")]
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_the_best_evaluation_is_kept_also_when_the_model_is_made_again(tuned):
    """A lost result.json, as after a kill just before it is written, and a damaged model."""
    every = {"eval_steps": 1, "save_steps": 4}
    folder, result = tuned(best_by="loss", learning_rate=3.0, divergence_margin=0, steps=8, **every)
    evaluated = {r["step"]: r for r in records(folder) if "eval_loss" in r}
    best = min(evaluated, key=lambda step: evaluated[step]["eval_loss"])
    assert 0 <= best < 8
    measured = ("eval_loss", "eval_accuracy")
    assert [result["best_step"], *map(result.get, measured)] == [best, *map(evaluated[best].get, measured)]
    assert not [r for r in evaluated.values() if "mean_token_accuracy" in r], "training's own means"
    assert "epoch" not in result, "Trainer's, which counts another order"
    kept, recorded = weights(folder), records(folder)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in load_file(folder / "best.safetensors").items())
    for damage in (lambda: (folder / "result.json").unlink(), lambda: (folder / "model/model.safetensors").unlink()):
        damage()
        _, again = tuned(resume=True)
        assert [again["best_step"], *map(again.get, measured)] == [best, *map(result.get, measured)]
        assert records(folder) == recorded, "the last evaluation is recorded once"
        assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(folder).items())


def test_best_weights_that_are_missing_are_named(tuned, caplog):
    changed = {"best_by": "loss", "learning_rate": 0.3, "steps": 8, "eval_steps": 1, "save_steps": 4}
    folder, _ = tuned(**changed, pause_step=4)
    (folder / "best.safetensors").unlink()
    _, result = tuned(resume=True, pause_step=None)
    assert result["best_step"] > 4
    assert "the best model up to step 4 is lost" in caplog.text


def test_rows_that_are_not_evaluated_are_trained_on():
    rows = Dataset.from_dict({"row": range(400)})
    some, whole = SftSettings(eval_fraction=0.5, eval_examples=12), SftSettings(eval_fraction=0.5, eval_examples=0)
    train, chosen = (list(part["row"]) for part in split(rows, some, None))
    assert len(chosen) == 12
    assert sorted([*train, *chosen]) == list(range(400))
    assert train == sorted(train), "in the order of the rows"
    assert set(chosen) <= set(split(rows, whole, None)[1]["row"]), "of the share that eval_fraction holds out"
    apart = split(rows, some, rows.select(range(50)))
    assert list(apart[0]["row"]) == list(range(400)), "eval_data are no rows of the training data"
    assert len(apart[1]) == 12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"template": "alpacka"}, r"^unknown template 'alpacka'; did you mean 'alpaca'"),
        ({"sequence_length": 600}, r"^sequence_length: 600 is more than the model's 512"),
        ({"trl": {"eos_token": "<|im_end|>"}}, r"^trl.eos_token: '<\|im_end\|>' is not in the tokenizer"),
        ({"trl": {"eos_token": ["x"]}}, r"^trl.eos_token: \['x'\] is not in the tokenizer"),
        (
            {"trainer": {"use_liger_kernel": True}},
            r"^trainer.use_liger_kernel: Liger has no layers for Lamina's models",
        ),
        ({"trl": {"los_type": "dft"}}, "^unknown trl argument 'los_type'; did you mean 'loss_type'"),
        ({"trl": {"loss_type": "dtf"}}, r"^trl: ValueError: Invalid `loss_type` dtf"),
        ({"lora_rank": 2, "lora_targets": "no_proj"}, "^lora: NoMatchingPeftModuleError: No modules were targeted"),
        ({"lora_rank": 2, "lora_targets": "q_proj,vproj"}, "^lora_targets: the model has no linear layer 'vproj'"),
    ],
)
def test_what_only_the_model_can_refuse_is_one_line_and_leaves_the_folder_free(tuned, changed, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        tuned(**changed)
    assert "\n" not in str(error.value)
    assert not in_use(tmp_path / "run")


def test_a_base_model_can_end_its_turns_by_another_token(tuned, tmp_path):
    """As TRL's own script has Qwen's base model end them, by the token that its template ends a turn with."""
    folder, _ = tuned("ends", steps=1, trl={"eos_token": "!"})
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token == "!"
    assert ord("!") in GenerationConfig.from_pretrained(folder / "model").eos_token_id  # beside the model's own


def test_a_template_that_is_no_jinja_is_named_whatever_the_rows(tuned, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}\n{% for %}")
    with pytest.raises(UserError, match=r"^template: Lamina cannot read '.*t.jinja' in line 2"):
        tuned(template=str(tmp_path / "t.jinja"), skip_bad=True)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tuned, tmp_path):
    folder = write_model(tmp_path / "odd")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        UserError, match=r"tokenizer: the tokenizer has 258 tokens, but the checkpoint .* has a vocabulary of 257"
    ):
        tuned(from_model=str(folder))


def test_a_run_resumes_from_a_model_that_has_moved_and_from_no_other_nor_with_other_data(tuned, tmp_path):
    first, moved = write_model(tmp_path / "first", seed=1), tmp_path / "moved"
    mine = write_rows(tmp_path / "mine.jsonl", sorting(12))
    tuned("part", from_model=str(first), data=str(mine), pause_step=2)
    other = write_model(tmp_path / "other", seed=2)
    with pytest.raises(UserError, match=r"from: .* has changed since"):
        tuned("part", resume=True, from_model=str(other), pause_step=None)
    write_rows(mine, sorting(12, seed=1))
    with pytest.raises(UserError, match=r"data: .* has changed since"):
        tuned("part", resume=True)
    write_rows(mine, sorting(12))
    first.rename(moved)
    _, resumed = tuned("part", resume=True, from_model=str(moved), pause_step=None)
    assert resumed["status"] == "finished"


@pytest.mark.slow
def test_an_adapters_file_does_not_depend_on_the_hash_seed(tmp_path):
    script = tmp_path / "save.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom peft import LoraConfig, PeftModel\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from lamina.lab.posttraining.starting import save_adapter\n"
        "sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))\n"
        "names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj', 'gate_proj']\n"
        "save_adapter(PeftModel(model, LoraConfig(r=2, target_modules=names)), Path(sys.argv[1]))\n"
    )
    written = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, script, tmp_path / seed], env=environment, check=True, capture_output=True)
        written.append((tmp_path / seed / "adapter_config.json").read_text())
    assert written[0] == written[1]
    assert len(json.loads(written[0])["target_modules"]) == 7
