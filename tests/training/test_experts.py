"""Expert balance: what is counted, how the biases move, the auxiliary loss, and all of it in runs."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from training.tiny_experts import CHOSEN, CONFIGS, EXPERTS, config, moe, token_ids, watched
from training.tiny_runs import cut_at, free_port, layers, settings

from lamina.errors import UserError
from lamina.training.monitor.experts import ExpertBalance, balance_loss, find_routers, scores
from lamina.training.resolve import resolve_run


@torch.no_grad()
def router_input(model, ids, layer=1):
    seen = []
    handle = find_routers(model)[layer].register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    model(input_ids=ids)
    handle.remove()
    return seen[0]


def chosen_by_hand(model, ids, layer=1):
    """Each token's experts, worked out again from the router's weights."""
    router = find_routers(model)[layer]
    x, _ = router_input(model, ids, layer)
    logits = x.flatten(0, 1) @ router.weight.T
    bias = getattr(router, "e_score_correction_bias", 0.0)
    return (logits.sigmoid() + bias if torch.is_tensor(bias) else logits).topk(CHOSEN, dim=-1).indices


@pytest.mark.parametrize("version", CONFIGS)
def test_the_routers_are_found_behind_the_dense_layers(version):
    assert list(find_routers(moe(version))) == [1]
    assert list(find_routers(moe(version, first_k_dense_replace=0))) == [0, 1]


@pytest.mark.parametrize("version", CONFIGS)
def test_the_load_is_the_share_of_all_micro_batches_tokens_that_chose_the_expert(version):
    model = moe(version)
    experts = ExpertBalance(model, "none")
    batches = [token_ids(seed=1), token_ids(batch=2, seed=2)]
    chosen = torch.cat([chosen_by_hand(model, ids) for ids in batches])
    expected = [sum(expert in row for row in chosen.tolist()) / len(chosen) for expert in range(EXPERTS)]
    for ids in batches:
        watched(experts, model, ids)
    experts.finish_step()
    assert experts.load[1].tolist() == pytest.approx(expected)
    assert sum(expected) == pytest.approx(CHOSEN)
    rows = experts.rows(7)
    assert rows[3] == (7, 1, "feed_forward", "expert", 3, "expert_load", pytest.approx(expected[3]))
    assert len(rows) == EXPERTS


def test_what_runs_outside_the_watch_is_not_counted():
    model = moe()
    experts = ExpertBalance(model)
    watched(experts, model, token_ids())
    model(input_ids=token_ids(batch=9))
    experts.finish_step()
    first = experts.load[1]
    watched(experts, model, token_ids())
    experts.finish_step()
    assert experts._counts == {}
    assert experts.load[1].sum() == pytest.approx(first.sum())


def test_the_bias_moves_by_the_rate_towards_the_mean_load():
    model = moe()
    experts = ExpertBalance(model, "auto", rate=0.01)
    assert experts.mode == "bias"
    experts._counts, experts._tokens = {1: torch.tensor([8.0, 0, 4, 4, 5, 3, 4, 4])}, 16
    experts.finish_step()
    bias = find_routers(model)[1].e_score_correction_bias
    assert bias.tolist() == pytest.approx([-0.01, 0.01, 0, 0, -0.01, 0.01, 0, 0])
    assert experts.load[1].tolist() == pytest.approx([0.5, 0, 0.25, 0.25, 0.3125, 0.1875, 0.25, 0.25])
    experts.finish_step()  # nothing was counted since
    assert bias[0] == pytest.approx(-0.01)
    assert not bias.requires_grad


def naive_loss(shares, chosen, sequences):
    """DeepSeek-V3 Eq 17-20, loop by loop."""
    length = len(chosen) // sequences
    total = 0.0
    for sequence in range(sequences):
        tokens = range(sequence * length, (sequence + 1) * length)
        for expert in range(EXPERTS):
            picked = sum(1 for t in tokens if expert in chosen[t].tolist())
            f = EXPERTS / (CHOSEN * length) * picked
            p = sum(float(shares[t, expert]) for t in tokens) / length
            total += f * p / sequences
    return total


@pytest.mark.parametrize("version", CONFIGS)
@torch.no_grad()
def test_the_auxiliary_loss_is_the_papers_formula(version):
    model, ids = moe(version), token_ids()
    x, _ = router_input(model, ids)
    logits = (x.flatten(0, 1) @ find_routers(model)[1].weight.T).double()
    shares = logits.softmax(-1) if version == "v2" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    expected = naive_loss(shares, chosen_by_hand(model, ids), len(ids))
    experts = ExpertBalance(model, "loss", rate=0.5)
    watched(experts, model, ids)
    assert float(experts.loss(len(ids))) == pytest.approx(0.5 * expected, rel=1e-5)


def test_the_auxiliary_loss_of_perfect_balance_is_one_and_of_collapse_is_more():
    shares = torch.full((8, EXPERTS), 1 / EXPERTS)
    balanced = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]] * 2)
    assert float(balance_loss(shares, balanced, 2)) == pytest.approx(1.0)
    collapsed = torch.zeros(8, EXPERTS)
    collapsed[:, :2] = 0.5
    assert float(balance_loss(collapsed, torch.tensor([[0, 1]] * 8), 2)) == pytest.approx(EXPERTS / CHOSEN)


def test_the_auxiliary_loss_adds_up_over_the_layers():
    model, ids = moe("v2", first_k_dense_replace=0), token_ids()
    experts = ExpertBalance(model)
    watched(experts, model, ids)
    parts = [router_input(model, ids, layer)[1] for layer in (0, 1)]
    expected = sum(balance_loss(scores(out[0], find_routers(model)[0]), out[-1], len(ids)) for out in parts)
    assert float(experts.loss(len(ids)).detach()) == pytest.approx(1e-3 * float(expected.detach()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_auxiliary_loss_reaches_the_router(checkpointing):
    model, ids = moe("v2").train(), token_ids()
    if checkpointing:
        model.gradient_checkpointing_enable()
    experts = ExpertBalance(model, "loss")
    watched(experts, model, ids)
    experts.loss(len(ids)).backward()
    gradient = find_routers(model)[1].weight.grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0
    experts.finish_step()
    assert experts.load[1].sum() == pytest.approx(CHOSEN)  # recomputed tokens are not counted again


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
    after, run = {}, {"backbone": folder(version), "hidden_size": None, "num_heads": None, "steps": 20, "batch_size": 8}
    run |= {"logging_steps": 1, "init": "normal(std=0.3)", "expert_balance_rate": 0.03 if version == "v3" else 1.0}
    for mode in ("auto", "none"):
        done = trained(f"{version}-{mode}", expert_balance=mode, **run)
        assert done["status"] in ("finished", "short", "stuck")
        table = layers(tmp_path / f"{version}-{mode}")
        after[mode] = sum(imbalance(table, step) for step in range(16, 21)) / 5
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
    torch.multiprocessing.spawn(_count_in_a_process, (free_port(), str(tmp_path)), nprocs=2)
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
