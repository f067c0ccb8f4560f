"""Expert balance: what is counted, how the biases move, and the auxiliary loss."""

import pytest
import torch
from training.tiny_experts import CHOSEN, CONFIGS, EXPERTS, moe, token_ids, watched

from lamina.training.monitor.experts import ExpertBalance, balance_loss, find_routers, scores


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


def test_the_bias_is_saved_with_the_model(tmp_path):
    model = moe()
    find_routers(model)[1].e_score_correction_bias.fill_(0.25)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(find_routers(again)[1].e_score_correction_bias, torch.full((EXPERTS,), 0.25))


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
