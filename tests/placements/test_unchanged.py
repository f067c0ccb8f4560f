"""Plans that were saved before a field existed: their digests, their trials' keys and their compiled graphs stay."""

import hashlib
from dataclasses import fields
from typing import get_args

import pytest
from naive import llama

import lamina
from lamina.lab.papers.trials import trial
from lamina.modeling.wiring_lamina import YOUNGER as LEFT_OUT
from lamina.placements import Plan, Sublayer, get, resolve
from lamina.placements.plan import YOUNGER
from lamina.training.checkpointing.resuming import plan_digest
from lamina.training.execution.compiling import structure

# Of the plans of `specs` at depths 1 and 5: the digests that checkpoints hold and the part of trial keys that is the
# plan's; and how many graphs 5 blocks need. Written down at the revision before plans had an out_scale.
BEFORE = {
    "admin": ("b59f23b559922900", "2801ca17aed2cf94", 1),
    "b2t": ("d7530a8b176a166f", "2d4ddad5516e8151", 1),
    "deepnorm": ("588a8d8c2bfb46b1", "d7774fde0a92217b", 1),
    "fusenorm": ("85021f76d9585abb", "790cb0d90b69dcb9", 2),
    "group_ln": ("a1b11e5e3aa55c30", "0bf6c27ce1a8f32b", 1),
    "hybridnorm": ("89014c5a3fea3a29", "32ad6bc33c540056", 1),
    "hybridnorm_star": ("61ebeefe7bf32ac0", "657825cc3052c4a3", 2),
    "keel": ("09a281096b09614e", "96a2d91883255232", 2),
    "layernorm_scaling": ("ed3c5c9da82e4f23", "53335e2e7b532e01", 1),
    "mix_ln": ("f2fa823326e31837", "9123a345f8f7c1f0", 2),
    "olmo2": ("bf8348c5dbd41021", "8267fcbca35f55ee", 1),
    "out_ln": ("daa77796beeddf0c", "590927208b6cdc45", 1),
    "peri_ln": ("0a4728c416e5c45c", "261ddb374376ae67", 1),
    "post_ln": ("25a2287083b092f3", "3528f5371713850b", 1),
    "pre_ln": ("a2aad660f649116b", "a75e694789231a1f", 1),
    "pre_post_ln": ("7019dca787314092", "a097adbdcb7a3b0a", 1),
    "sandwich_ln": ("08585b61df8a63f8", "48b0be5965a505b2", 1),
}


LATER = ("scaled", "pre_ln")  # choices of keel's first_layer that came afterwards


def specs(name):
    """The placement with every value of its switches and choices, and with the options that all placements take."""
    found = [name]
    for option in get(name).options:
        choices = [value for value in get_args(option.type) if isinstance(value, str) and value not in LATER]
        choices = ["true", "false"] if isinstance(option.default, bool) else choices
        found += [f"{name}({option.name}={c})" for c in choices]
    return [*found, f"{name}(qk_norm=head,v_norm=full,norm=layer,embedding_scale=2,final_norm=true)"]


def joined(parts):
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", BEFORE)
def test_plans_of_before_have_their_digests_and_keys(name):
    digests, keys, _ = BEFORE[name]
    plans = [(spec, depth) for spec in specs(name) for depth in (1, 5)]
    assert joined(plan_digest(resolve(spec, depth)) for spec, depth in plans) == digests
    assert joined(trial._plan(spec, depth)[0] for spec, depth in plans) == keys


@pytest.mark.parametrize("name", BEFORE)
def test_models_of_before_need_as_many_graphs(name):
    model = lamina.build(llama(5), name)
    assert len({structure(block) for block in model.model.layers}) == BEFORE[name][2]


def test_what_a_record_leaves_out_is_what_the_model_puts_in():
    record = Plan(placement="mine", layers=(lamina.placements.Layer(),)).to_dict()["layers"][0]["attention"]
    defaults = {entry.name: entry.default for entry in fields(Sublayer) if entry.name in YOUNGER}
    assert defaults == LEFT_OUT
    assert not set(record) & set(defaults)
