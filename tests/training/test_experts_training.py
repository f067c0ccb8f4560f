"""Expert balance in runs: it helps, it resumes, it leaves dense models alone, and bad settings are refused."""

import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file
from training.tiny_experts import CONFIGS, EXPERTS, config, moe, token_ids, watched
from training.tiny_runs import cut_at, layers, settings

from lamina.errors import UserError
from lamina.training.monitor.experts import ExpertBalance, find_routers
from lamina.training.resolve import resolve_run


@pytest.fixture
def folder(tmp_path):
    def write(version):
        config(version).save_pretrained(tmp_path / version)
        return str(tmp_path / version)

    return write


def imbalance(table, step):
    """The largest load over the mean load (the DeepSeek papers' MaxVio, plus 1)."""
    load = table[(table.metric == "expert_load") & (table.step == step)]
    assert sorted(load["index"]) == list(range(EXPERTS))
    assert set(load.layer) == {1}
    assert set(load.sublayer) == {"feed_forward"}
    assert set(load.role) == {"expert"}
    return load.value.max() / load.value.mean()


@pytest.mark.parametrize("version", CONFIGS)
def test_training_balances_the_experts_better_than_nothing_does(version, folder, trained, tmp_path):
    after = {}
    for mode in ("auto", "none"):
        done = trained(
            f"{version}-{mode}",
            backbone=folder(version),
            hidden_size=None,
            num_heads=None,
            steps=30,
            batch_size=8,
            logging_steps=1,
            init="normal(std=0.3)",
            expert_balance=mode,
            expert_balance_rate=0.03 if version == "v3" else 1.0,
        )
        assert done["status"] in ("finished", "short", "stuck")
        table = layers(tmp_path / f"{version}-{mode}")
        after[mode] = sum(imbalance(table, step) for step in range(26, 31)) / 5
    assert after["auto"] < 0.8 * after["none"]


def test_the_auxiliary_loss_does_not_depend_on_the_micro_batches(folder, trained, trainers):
    for name, size, micro in (("one", 4, 1), ("four", 1, 4)):
        run = {"backbone": folder("v2"), "hidden_size": None, "num_heads": None, "steps": 2, "expert_balance_rate": 1.0}
        trained(name, batch_size=size, gradient_accumulation=micro, max_grad_norm=0.0, **run)
    one, four = (dict(t.model.named_parameters()) for t in trainers)
    assert all(torch.allclose(one[name], four[name], atol=1e-4) for name in one)


def test_a_dense_model_trains_as_ever(trained, tmp_path, trainers):
    for mode in ("auto", "none"):
        trained(mode, expert_balance=mode)
        assert "expert_load" not in set(layers(tmp_path / mode).metric)
    one, other = (dict(t.model.named_parameters()) for t in trainers)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"expert_balance": "biased"}, r"expert_balance: 'biased'; did you mean 'bias'\? \(allowed: auto, none, bias"),
        ({"expert_balance_rate": -1.0}, "expert_balance_rate: -1.0"),
    ],
)
def test_a_bad_setting_is_refused_by_name(changed, message, corpus, tmp_path):
    with pytest.raises(UserError, match=message):
        settings(corpus, tmp_path, **changed)


def test_a_balance_that_the_backbone_cannot_have_is_refused_before_anything_runs(folder, corpus, tmp_path):
    with pytest.raises(UserError, match="expert_balance: 'loss' needs a backbone with experts"):
        resolve_run(settings(corpus, tmp_path, expert_balance="loss"))
    sizes = {"backbone": folder("v2"), "hidden_size": None, "num_heads": None}
    with pytest.raises(UserError, match="expert_balance: 'bias' needs routers with a correction bias"):
        resolve_run(settings(corpus, tmp_path, expert_balance="bias", **sizes))
    resolve_run(settings(corpus, tmp_path, expert_balance="loss", **sizes))


def test_a_resumed_run_goes_on_with_the_same_biases(folder, trained, trainers):
    sizes = {"backbone": folder("v3"), "hidden_size": None, "num_heads": None, "steps": 6, "save_steps": 3}
    trained("whole", **sizes)
    with cut_at(5):
        trained("stopped", **sizes)
    trained("stopped", resume=True, **sizes)
    whole, resumed = (find_routers(trainers[index].model)[1].e_score_correction_bias for index in (0, 2))
    assert whole.abs().max() > 0
    assert torch.equal(whole, resumed)


def _count_in_a_process(rank, port, out):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = moe()
    experts = ExpertBalance(model)
    watched(experts, model, token_ids(seed=rank))
    experts.finish_step()
    torch.save((experts.load[1], find_routers(model)[1].e_score_correction_bias), f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_their_loads_and_move_their_biases_alike(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_count_in_a_process, (port, str(tmp_path)), nprocs=2)
    torch.manual_seed(0)
    model = moe()
    experts = ExpertBalance(model)
    for seed in (0, 1):
        watched(experts, model, token_ids(seed=seed))
    experts.finish_step()
    for rank in (0, 1):
        load, bias = torch.load(tmp_path / f"{rank}.pt")
        assert torch.allclose(load, experts.load[1])
        assert torch.equal(bias, find_routers(model)[1].e_score_correction_bias)


def test_a_model_that_is_written_again_has_the_experts_bias(folder, trained, tmp_path):
    """The bias is a buffer: the average of the weights leaves it out, and the model must not."""
    given = {"backbone": folder("v3"), "hidden_size": None, "num_heads": None, "expert_balance": "bias"}
    given |= {"expert_balance_rate": 0.03, "ema_decay": 0.5, "steps": 4, "save_steps": 2}
    trained("run", **given)
    path = tmp_path / "run" / "model" / "model.safetensors"
    before = load_file(path)
    shutil.rmtree(tmp_path / "run" / "model")
    trained("run", resume=True, **given)
    after = load_file(path)
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert any(before[name].abs().max() > 0 for name in biases)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
