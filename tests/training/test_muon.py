"""Muon for the matrices of the blocks, AdamW for all else."""

import math

import pytest
import torch
from training.tiny_runs import SMALL, flags, llama_of

import lamina
from lamina.cli import main
from lamina.errors import UserError
from lamina.modeling.scaling import Scaling
from lamina.training.optimization.optimizer import MuonAdamW, parameter_groups, step_factors
from lamina.training.resolve import check_sharded
from lamina.training.settings import PretrainSettings

RATE, DECAY = 1e-2, 0.1
MUON = {"placement": "peri_ln", "optimizer": "muon"}


def orthogonalized(gradient):
    """Jordan's five Newton-Schulz steps."""
    x = gradient.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if gradient.shape[0] > gradient.shape[1] else x).float()


def in_a_block(name, parameter):
    return ".layers." in name and parameter.ndim == 2


def test_one_step_is_the_naive_one_of_each_kind(trained, trainers, first_step):
    before, grads = first_step
    trained(**MUON, steps=1, warmup=0, max_grad_norm=0, learning_rate=RATE)
    for name, parameter in trainers[0].model.named_parameters():
        start, gradient = before[name], grads[name]
        decayed = start * (1 - RATE * (DECAY if start.ndim >= 2 else 0.0))
        moved = (decayed - parameter.detach()) / RATE
        if in_a_block(name, start):
            update = 0.2 * math.sqrt(max(start.shape)) * orthogonalized(gradient)
            assert (moved - update).norm() < 0.1 * update.norm(), name  # the steps round to bfloat16
        else:
            torch.testing.assert_close(moved, gradient / (gradient.abs() + 1e-8), atol=1e-3, rtol=0.0)
        assert (parameter != start).any()


def test_steps_are_those_of_pytorchs_two_optimizers(tmp_path):
    torch.manual_seed(0)
    ours, theirs = (lamina.build(llama_of(16), "fusenorm", init="normal") for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(ours, step_factors(ours, Scaling(), "muon"), learning_rate=RATE, weight_decay=0.0)
    one = MuonAdamW(groups, betas=(0.9, 0.95))
    named = list(theirs.named_parameters())
    two = [
        torch.optim.Muon([p for n, p in named if in_a_block(n, p)], RATE, 0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for n, p in named if not in_a_block(n, p)], RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step in range(4):
        if step == 2:  # goes on from what is stored
            torch.save(one.state_dict(), tmp_path / "state.pt")
            groups = parameter_groups(ours, step_factors(ours, Scaling(), "muon"), learning_rate=9.0, weight_decay=0.0)
            one = MuonAdamW(groups, betas=(0.9, 0.95))
            one.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        one.step()
        for optimizer in two:
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("scheme", ["standard", "mup", "standard-no-alignment", "none"])
def test_updates_have_the_spectral_norm_of_the_base_width(scheme):
    """sqrt(out/in) times the base's, Condition 1 of arXiv 2310.17813, from gradients of any kind."""
    norms = {}
    for width in (32, 128):
        torch.manual_seed(0)
        model = lamina.build(llama_of(width), "pre_ln", init="normal")
        factors = step_factors(model, Scaling(width=scheme, base_width=32), "muon")
        optimizer = MuonAdamW(parameter_groups(model, factors, learning_rate=RATE, weight_decay=0.0))
        before = {name: p.detach().clone() for name, p in model.named_parameters() if in_a_block(name, p)}
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        after = dict(model.named_parameters())
        norms[width] = [
            torch.linalg.matrix_norm(after[n].detach() - p, ord=2).item() / math.sqrt(p.shape[0] / p.shape[1])
            for n, p in before.items()
        ]
    ratios = torch.tensor(norms[128]) / torch.tensor(norms[32])
    assert ratios.median() == pytest.approx(2.0 if scheme == "none" else 1.0, rel=0.1)
    assert ratios.max() / ratios.min() < 1.3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trainer.optim": "adafactor"}, ("optimizer", "'muon'", "adafactor")),
        ({"optimizer": "mun"}, ("optimizer", "'mun'", "adamw")),
    ],
)
def test_what_muon_does_not_go_with_is_one_line(tmp_path, corpus, capsys, given, words):
    tiny = {**SMALL, "corpus": corpus, "output": tmp_path / "run"}
    assert main(["pretrain", *flags(**{**tiny, **MUON, **given})]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_parts_of_weights_are_refused():
    with pytest.raises(UserError, match=r"optimizer: 'muon' .*--parallel ddp"):
        check_sharded(PretrainSettings(optimizer="muon", parallel="fsdp2"))
