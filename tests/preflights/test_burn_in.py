"""The burn-in and what it measures, against plain loops and a model that stands in for one too large."""

import math

import pytest
import torch
from spread import spread
from torch import nn
from training import tiny_experts
from training.tiny_runs import SMALL, records

import lamina
from lamina.preflights.burn_in import BurningIn, build_model, choose, rates_until, take_snapshot, unigram_losses
from lamina.preflights.planned_runs import burn_in_steps, ffn_share
from lamina.preflights.settings import PreflightSettings
from lamina.preflights.verdict import features
from lamina.training.objectives.text import read_text
from lamina.training.optimization.optimizer import planned_shares, with_shorter_warmup
from lamina.training.pretrain import pretrain
from lamina.training.settings import PretrainSettings


def planned(corpus, **changed):
    return PretrainSettings(**{**SMALL, "corpus": str(corpus), "steps": 20, "placement": "peri_ln", **changed})


def burning(corpus, blocks, **changed):
    proxy = choose(planned(corpus, **changed), blocks.stats.vocab_size, 8, 1e12)
    return BurningIn(proxy, blocks, sequences=4, longest_warmup=4)


def test_it_takes_the_steps_of_adamw_on_the_runs_own_batches(corpus, blocks):
    made = burning(corpus, blocks, max_grad_norm=0.3, weight_decay=0.2, learning_rate=0.02)
    made.train(iter([5]))
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": blocks.stats.vocab_size}
    model = lamina.build("llama-nano", "peri_ln", **sizes)
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    order = torch.randperm(len(blocks.train), generator=torch.Generator().manual_seed(0))
    losses, norms = [], []
    for step in range(5):
        ids = torch.stack([blocks.train[int(i)]["input_ids"] for i in order[2 * step : 2 * step + 2]])
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.3 / float(norm))
        for group in optimizer.param_groups:
            # two steps of warm-up in 20, then a cosine down to a tenth
            done = (step - 2) / 18
            group["lr"] = 0.02 * (step / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    seen = made.record()
    # the fused optimiser and clipping round a little differently in float32
    assert seen.losses == pytest.approx(losses, rel=1e-4)
    assert seen.gradient_norms == pytest.approx(norms, rel=1e-3)
    assert [shot.step for shot in seen.snapshots] == [0, 5]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"corpus": "{corpus}:0.75,{letters}:0.25", "gradient_accumulation": 2},
        {"corpus": "{corpus}:0.75,{letters}:0.25", "streaming": True, "shuffle_buffer": 32, "precision": "bf16"},
        {"backbone": "{experts}", "expert_balance": "loss", "hidden_size": None, "num_heads": None},
    ],
    ids=["plain", "mix", "streaming", "experts"],
)
def test_it_is_the_beginning_of_the_run_itself(corpus, tmp_path, monkeypatch, changed):
    """The same seed, weights, batches, rates: what `lamina pretrain` logs for its first steps."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))
    letters = tmp_path / "letters.txt"
    letters.write_text("a b c d e f g\n" * 800)
    if "backbone" in changed:
        tiny_experts.config("v3").save_pretrained(tmp_path / "experts")
    told = {"corpus": corpus, "letters": letters, "experts": tmp_path / "experts"}
    changed = {k: v.format(**told) if isinstance(v, str) else v for k, v in changed.items()}
    given = {"corpus": corpus, "steps": 8, "logging_steps": 1, "learning_rate": 0.02, "seed": 3, **changed}
    settings = planned(**given, output=str(tmp_path / "run"))
    pretrain(settings, bar=False)
    logged = [r for r in records(tmp_path / "run") if r.get("loss") is not None]
    own, _ = read_text(settings, False)
    made = BurningIn(choose(settings, own.stats.vocab_size, 8, 1e12), own, sequences=2, longest_warmup=4)
    made.train(iter([4, 8]))
    seen = made.record()
    # the Trainer logs a step's loss in float32
    assert seen.losses == pytest.approx([r["loss"] for r in logged], rel=2e-7)
    assert seen.gradient_norms == [r["grad_norm"] for r in logged]
    assert seen.learning_rates == [r["learning_rate"] for r in logged]


def test_a_shorter_warmup_leaves_the_rest_of_the_schedule_as_it_is(corpus):
    settings = planned(corpus, warmup=10, steps=20)
    shares = planned_shares(settings)
    shorter = [with_shorter_warmup(shares, done, warmup=4, planned_warmup=10) for done in range(14)]
    assert shorter[:4] == [0.0, 0.25, 0.5, 0.75]
    assert shorter[4:] == [shares(done) for done in range(10, 20)]


@pytest.mark.parametrize(("warmup", "steps"), [(3, 20), (0.25, 7), (5, 5), (0, 1)])
def test_the_rates_summed(corpus, warmup, steps):
    settings = planned(corpus, warmup=warmup, steps=steps)
    rates = [planned_shares(settings)(step) for step in range(steps)]
    for step in range(steps + 1):
        assert rates_until(settings, step) == pytest.approx(sum(rates[:step]), abs=1e-9)


def test_what_share_of_the_run_was_spent_and_the_step_of_a_share(corpus, blocks):
    made = burning(corpus, blocks, warmup=2, steps=20)
    made.train(iter([8]))
    seen = made.record()
    settings = seen.proxy.settings
    assert seen.spent(8) == pytest.approx(rates_until(settings, 8) / rates_until(settings, 20))
    assert seen.spent(0) == 0.0
    assert [seen.step_at(seen.spent(step)) for step in (2, 5, 8)] == [2, 5, 8]
    assert (seen.step_at(1.0), seen.step_at(2.0)) == (20, 20)
    numbers = features(seen)
    first, last = seen.snapshots
    assert numbers.spent == pytest.approx(seen.spent(8))
    assert numbers.pace == pytest.approx((first.loss - last.loss) / seen.spent(8))


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(100, 0.1, (32, 10)), (120, 0.3, (52, 36)), (20_000, 0.1, (80, 64)), (20, 0.1, (20, 2)), (40, 0.9, (40, 36))],
)
def test_it_takes_in_the_warmup(steps, warmup, expected):
    settings = PreflightSettings(steps=steps, warmup=warmup)
    assert burn_in_steps(settings, settings.runs()[0]) == expected


def test_a_long_warmup_is_shortened_so_that_the_peak_is_seen(corpus, blocks):
    made = burning(corpus, blocks, warmup=0.5, learning_rate=0.02)
    made.train(iter([6]))
    assert made.warmup == 4
    assert made.record().learning_rates == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02, 0.02], rel=0.05)


def test_a_loss_that_is_not_finite_ends_it(corpus, blocks):
    made = burning(corpus, blocks, placement="pre_ln")
    with torch.no_grad():
        made.model.model.layers[1].feed_forward.module.down_proj.weight.fill_(math.inf)
    made.train(iter([8]))
    seen = made.record()
    assert seen.stopped == "the loss was not finite at step 1"
    assert len(seen.losses) == 1
    assert [shot.step for shot in seen.snapshots] == [0]
    assert features(seen).finite == 0.0


def test_the_loss_of_a_constant_prediction(blocks):
    probe = torch.stack([blocks.eval[i]["input_ids"] for i in range(3)])
    tokens = [int(t) for i in range(len(blocks.train)) for t in blocks.train[i]["input_ids"]]
    total = len(tokens) + blocks.stats.vocab_size
    nats = [[-math.log((tokens.count(int(t)) + 1) / total) for t in row[1:]] for row in probe]
    assert unigram_losses(blocks, probe).tolist() == pytest.approx([sum(row) / len(row) for row in nats])


def test_the_share_of_the_feed_forward(corpus, blocks):
    shot = burning(corpus, blocks).snapshots[0]
    added, skip = shot.series("added_variance", "feed_forward"), shot.series("skip_variance", "feed_forward")
    assert ffn_share(shot) == pytest.approx(added[0] / skip[0] + added[1] / skip[1])
    assert ffn_share(shot) > 0


class TestStandIn:
    def test_a_small_run_is_measured_as_it_is(self, corpus):
        settings = planned(corpus)
        proxy = choose(settings, 259, 8, 1e12)
        assert proxy.settings == settings
        assert (proxy.scaling, proxy.note) == (None, "")

    def test_first_the_batch_then_the_width_never_the_depth(self, corpus):
        settings = planned(corpus, num_layers=6, hidden_size=512, num_heads=8, sequence_length=64, batch_size=32)
        full = choose(settings, 259, 32, math.inf)
        assert (full.hidden_size, full.settings.batch_size) == (512, 32)
        fewer = choose(settings, 259, 32, 1e12)
        assert fewer.hidden_size == 512
        assert 4 <= fewer.settings.batch_size < 32
        narrow = choose(settings, 259, 32, 8e10)
        assert narrow.hidden_size == 128
        assert narrow.settings.batch_size >= 4
        assert narrow.plan.num_layers == narrow.settings.num_layers == 6
        assert "width 128 instead of 512" in narrow.note
        assert choose(settings, 259, 32, 1.0).hidden_size == 64

    def test_a_narrower_models_branches_have_the_planned_variance(self, corpus, blocks):
        settings = planned(corpus, hidden_size=512, num_heads=8, init="normal", placement="pre_ln")
        ids = torch.stack([blocks.train[i]["input_ids"] for i in range(2)])
        deviations = {}
        for flops in (math.inf, 1.0):
            proxy = choose(settings, blocks.stats.vocab_size, 8, flops)
            model = build_model(proxy, blocks.stats.vocab_size, ids)
            weight = model.model.layers[0].feed_forward.module.down_proj.weight
            deviations[proxy.hidden_size] = float(weight.detach().std()) * math.sqrt(weight.shape[1])
        # fan_in * std^2 is what the output's variance goes by; 64 * 171 draws know their deviation to 1 %
        assert deviations[64] == pytest.approx(deviations[512], rel=0.03)


LAYERS, WIDTH, TOKENS = 3, 8, 5
PLACEMENTS = ("pre_ln", "post_ln", "peri_ln", "fusenorm", "keel", "b2t")


@pytest.fixture(params=spread(PLACEMENTS, ("peri_ln", "fusenorm", "b2t")))  # norms within, on the sum; other skips
def model(request):
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": 2, "vocab_size": 23}
    made = lamina.build("llama-nano", request.param, **sizes, init="xavier")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return made.double()


@pytest.fixture
def ids():
    return torch.randint(0, 23, (2, TOKENS))


def snapshot(model, ids):
    unigrams = torch.tensor([2.5, 3.5], dtype=torch.float64)
    return take_snapshot(model, ids, unigrams, 7, torch.Generator().manual_seed(5))


def forward(model, ids, replaced=None):
    """The states x^0 .. x^N and the logits; with ``replaced`` = (l, x) x^l is that tensor."""
    states, handles = [], []
    for index, block in enumerate(model.model.layers):

        def before(module, args, index=index):
            states.append(replaced[1] if replaced and replaced[0] == index else args[0])
            return (states[-1], *args[1:])

        handles.append(block.register_forward_pre_hook(before))
    handles.append(model.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output)))
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return states, logits


def naive_loss(logits, ids):
    p = logits.softmax(-1)
    total = sum(p[b, t, ids[b, t + 1]].log() for b in range(len(ids)) for t in range(TOKENS - 1))
    return -total / (len(ids) * (TOKENS - 1))


def test_loss_and_what_the_input_is_worth(model, ids):
    shot = snapshot(model, ids)
    _, logits = forward(model, ids)
    mean = torch.stack([logits[b, t].softmax(-1) for b in range(2) for t in range(TOKENS - 1)]).mean(0)
    constant = -sum(mean[ids[b, t + 1]].log() for b in range(2) for t in range(TOKENS - 1)) / (2 * (TOKENS - 1))
    loss = naive_loss(logits, ids)
    # the loss is taken in float32
    assert shot.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert shot.context == pytest.approx(float((constant - loss).detach()), abs=1e-6)
    assert (shot.step, shot.unigram) == (7, 3.0)
    first, second = (float(naive_loss(logits[i : i + 1], ids[i : i + 1]).detach()) for i in range(2))
    # of two numbers: half their distance
    assert shot.error == pytest.approx(abs((first - 2.5) - (second - 3.5)) / 2, rel=1e-5)


def test_states_their_gradients_and_the_similarity_of_tokens(model, ids):
    shot = snapshot(model, ids)
    states, logits = forward(model, ids)
    gradients = torch.autograd.grad(naive_loss(logits, ids), states)
    for layer, (state, gradient) in enumerate(zip(states, gradients, strict=True), start=-1):
        # the loss is taken in float32, and its gradient with it
        assert shot.series("state_gradient_norm")[layer] == pytest.approx(float(gradient.norm()), rel=1e-5)
        x = state.detach().flatten(0, 1)
        cosines = [torch.dot(a, b) / (a.norm() * b.norm()) for a in x for b in x]
        assert shot.series("token_similarity")[layer] == pytest.approx(float(sum(cosines)) / len(cosines), rel=1e-9)
        variance = float(((x - x.mean()) ** 2).mean())
        assert shot.series("hidden_variance")[layer] == pytest.approx(variance, rel=1e-5)
        assert shot.series("hidden_abs_max")[layer] == pytest.approx(float(x.abs().max()), rel=1e-6)


def test_the_weights_gradients_by_block(model, ids):
    shot = snapshot(model, ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    naive_loss(forward(model, ids)[1], ids).backward()
    for layer, block in enumerate(model.model.layers):
        squares = sum(float(p.grad.pow(2).sum()) for p in block.parameters())
        assert shot.series("gradient_norm")[layer] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_the_cumulative_jacobian(model, ids):
    """Of the whole matrix of x^N by x^l, times the normal vector that the probe draws."""
    ids = ids[:1, :3]
    states, _ = forward(model, ids)
    gains = snapshot(model, ids).series("jacobian_gain")
    vector = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(5)).double().flatten()
    for layer in range(LAYERS):

        def last(x, layer=layer):
            return forward(model, ids, (layer, x))[0][-1]

        jacobian = torch.autograd.functional.jacobian(last, states[layer].detach()).reshape(len(vector), len(vector))
        assert gains[layer - 1] == pytest.approx(float((jacobian.T @ vector).norm() / vector.norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["attention", "feed_forward"])
def test_branch_skip_and_sum(model, ids, name):
    """The added and the skip's variance against the sub-layer's equation written out."""
    seen = {}

    def keep(key):
        def hook(module, args, output):
            seen[key] = (args, output[0] if isinstance(output, tuple) else output)

        return hook

    for index, block in enumerate(model.model.layers):
        residual = getattr(block, name)
        residual.register_forward_hook(keep((index, "residual")))
        residual.module.register_forward_hook(keep((index, "module")))
    shot = snapshot(model, ids)
    for index, block in enumerate(model.model.layers):
        residual = getattr(block, name)
        args, _ = seen[index, "residual"]
        branch = seen[index, "module"][1]
        added = branch if residual.out_norm is None else residual.out_norm(branch)
        x, start = args[0], args[1] if len(args) > 1 else args[0]
        skip = {"stream": x, "block_input": start, "both": x + start}[residual.skip] * residual.skip_scale
        for metric, value in (("branch_variance", branch), ("added_variance", added), ("skip_variance", skip)):
            expected = float(((value - value.mean()) ** 2).mean().detach())
            assert shot.series(metric, name)[index] == pytest.approx(expected, rel=1e-9), metric


def test_the_model_is_left_as_it_was(model, ids):
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    snapshot(model, ids)
    assert model.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules() if isinstance(m, nn.Module)]
    assert sum(hooks) == 0
