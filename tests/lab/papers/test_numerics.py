"""The version of the numerics: losses of small runs, which may only change together with ``NUMERICS``."""

import pytest
from training.tiny_runs import settings

from lamina.lab.papers.trials import trial
from lamina.placements import names as placements
from lamina.training.pretrain import pretrain
from lamina.training.settings import PretrainSettings

# Eval losses after 4 steps, of NUMERICS 1. Machines differ in the last digits of a float32 sum.
LOSSES = {"pre_ln": 5.464848, "keel": 5.46838, "fusenorm": 5.474629}
LOSSES |= {"peri_ln": 5.436064, "deepnorm": 5.475483, "admin": 5.460527}


@pytest.mark.parametrize("placement", LOSSES)
def test_the_numbers_are_those_of_the_version(corpus, tmp_path, placement):
    run = settings(corpus, tmp_path / "run", placement=placement, init="recommended", precision="fp32", compile="off")
    assert trial.NUMERICS == 1, "new numerics: write their losses here, and raise this number"
    assert pretrain(run, bar=False)["eval_loss"] == pytest.approx(LOSSES[placement], abs=2e-5)


def test_every_setting_is_in_the_identity_or_is_known_not_to_matter():
    first = trial.identity("pretrain", PretrainSettings())["settings"]
    outside, names = {"placement", "num_layers", "corpus"}, set(PretrainSettings.names())
    younger = set(trial.YOUNGER) & names
    assert set(first) | outside | PretrainSettings.free() | younger == names


def key_of(**settings):
    trial.read_again()
    return trial.key(trial.identity("pretrain", PretrainSettings(**{"num_layers": 4, **settings})))


@pytest.mark.parametrize("placement", placements())
def test_a_placement_by_another_name_is_the_same_trial(placement):
    assert key_of(placement=placement) == key_of(placement=f"{placement}()")


CHANGES = [("seed", 1), ("learning_rate", 1e-2), ("steps", 7), ("init", "scaled"), ("num_layers", 5)]
CHANGES += [("eval_tasks", "quiz"), ("placement", "keel(alpha=3)")]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_whatever_changes_the_numbers_changes_the_key(name, value):
    assert key_of(**{"placement": "keel", name: value}) != key_of(placement="keel")


def test_how_a_trial_is_run_does_not_change_its_key():
    assert key_of(output="elsewhere", threads=3, save_steps=5) == key_of()


def test_another_text_is_another_trial(corpus, tmp_path):
    same = tmp_path / corpus.name
    same.write_bytes(corpus.read_bytes())
    assert key_of(corpus=str(same)) == key_of(corpus=str(corpus))
    same.write_bytes(corpus.read_bytes() + b"more")
    assert key_of(corpus=str(same)) != key_of(corpus=str(corpus))


def test_another_share_of_a_mix_is_another_trial(corpus, tmp_path):
    second = tmp_path / "second.txt"
    second.write_bytes(corpus.read_bytes()[::-1])
    keys = {shares: key_of(corpus=f"{corpus}:{shares[0]},{second}:{shares[1]}") for shares in ((9, 1), (1, 9), (18, 2))}
    assert keys[9, 1] != keys[1, 9]
    assert keys[9, 1] == keys[18, 2]


def test_what_a_folder_holds_decides_the_key(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    named = ("backbone", "tokenizer", "from_model")
    before = {name: key_of(**{name: str(folder)}) for name in named}
    changed = {}
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_text((folder / file).read_text() + " ")
        now = {name: key_of(**{name: str(folder)}) for name in named}
        changed[file] = {name for name in named if now[name] != before[name]}
        before = now
    assert changed["config.json"] >= {"backbone", "from_model"}
    assert changed["tokenizer.json"] == {"tokenizer", "from_model"}
    assert changed["model.safetensors"] == {"from_model"}


def test_what_a_rollback_does_decides_the_key_where_one_may_happen():
    assert key_of() == key_of(save_steps=7, keep=9)
    changes = ({}, {"rollback_factor": 0.1}, {"save_steps": 7}, {"keep": 9})
    keys = [key_of(**{"rollback": 2, "save_steps": 5, **change}) for change in changes]
    assert len({*keys, key_of()}) == 5
