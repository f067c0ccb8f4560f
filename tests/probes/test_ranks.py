"""Ranks of the states against numpy's, and the streams' maps against products written out."""

import numpy as np
import pytest
import torch
from naive_states import states
from tiny_contexts import context_of, lamina_model, measured, transformers_model, value

from lamina.modeling.streams_lamina import StreamMixer
from lamina.probes.ranks import Ranks, effective_rank


def naive(matrix):
    """Stable and effective rank of one matrix, by loops over numpy's singular values."""
    singular = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    shares = [s / sum(singular) for s in singular]
    entropy = -sum(p * np.log(p) for p in shares if p > 0)
    return sum(s**2 for s in singular) / singular[0] ** 2, np.exp(entropy)


@pytest.mark.parametrize("name", ["fusenorm", "pre_ln(wiring=attn_res,size=1)", "llama of transformers"])
def test_the_ranks_of_each_state_are_numpys(name):
    model = transformers_model("LlamaForCausalLM") if name.startswith("llama") else lamina_model(name)
    context = context_of(model, sequences=5, tokens=7, batch_size=2)
    frame = measured(Ranks(), context)
    found = []
    if "wiring" in name:  # the first of what a layer hands on is the stream
        with torch.no_grad():
            ids = torch.cat([batch["input_ids"] for batch in context.batches])
            found.append(model.get_input_embeddings()(ids))
            for block in model.model.layers:
                block.register_forward_hook(lambda _, args, out: found.append(out.stream))
            model(ids)
    else:
        found = states(model, {"input_ids": torch.cat([batch["input_ids"] for batch in context.batches])})
    for layer, state in enumerate(found):
        stable, effective = np.mean([naive(x) for x in state], axis=0)
        assert value(frame, "stable_rank", "state", layer) == pytest.approx(stable, rel=1e-4)
        assert value(frame, "effective_rank", "state", layer) == pytest.approx(effective, rel=1e-4)
    assert set(frame.role) == {"state"}
    assert len(list(Ranks().sentences(frame))) == 2


def test_padding_changes_no_rank():
    model = lamina_model("pre_ln")
    ids = torch.randint(3, 61, (2, 9))
    context = context_of(model, sequences=2, tokens=9)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    context.batches = [{"input_ids": ids, "attention_mask": mask}]
    found = states(model, {"input_ids": ids, "attention_mask": mask})
    expected = np.mean([naive(found[1][0, :5]), naive(found[1][1])], axis=0)
    frame = measured(Ranks(), context)
    assert value(frame, "stable_rank", "state", 1) == pytest.approx(expected[0], rel=1e-4)
    assert value(frame, "effective_rank", "state", 1) == pytest.approx(expected[1], rel=1e-4)


def test_a_state_that_is_not_finite_has_no_rank_and_stops_no_other_probe():
    model = lamina_model("pre_ln")
    with torch.no_grad():
        model.model.layers[0].feed_forward.module.down_proj.weight.fill_(torch.inf)
    frame = measured(Ranks(), context_of(model))
    ranks = frame[frame.metric == "stable_rank"].set_index("layer").value
    assert list(ranks.isna()) == [False, True, True]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["mhc", "hc", "identity_hc"])
def test_the_streams_maps_are_multiplied_layer_by_layer(kind, size):
    """Naive: n unit vectors sent through each mixing matrix, one after the other."""
    model = lamina_model(f"pre_ln(wiring={kind},size={size})", num_layers=3)
    context = context_of(model, sequences=2, tokens=3)
    matrices = []
    mixers = [m for n, m in model.named_modules() if isinstance(m, StreamMixer) and n.endswith("mixer")]
    hooks = [m.register_forward_hook(lambda _, args, out: matrices.append(out[1])) for m in mixers]
    with torch.no_grad():
        model(context.batches[0]["input_ids"])
    for hook in hooks:
        hook.remove()
    assert len(matrices) == 6
    frame = measured(Ranks(), context)
    for layer in range(3):
        ranks = []
        for sequence in range(2):
            for token in range(3):
                streams = np.eye(size)  # row i: the stream i as a mean of the first ones
                for matrix in matrices[: 2 * layer + 2]:
                    if matrix is not None:
                        one = matrix.expand(2, 3, size, size)[sequence, token].detach().double().numpy()
                        streams = np.stack([sum(one[i, j] * streams[i] for i in range(size)) for j in range(size)])
                ranks.append(naive(streams)[1])
        assert value(frame, "effective_rank", "streams", layer) == pytest.approx(np.mean(ranks), rel=1e-4)
        if kind == "identity_hc":
            assert np.mean(ranks) == pytest.approx(size)
    assert "The product of all layers' mixing matrices" in list(Ranks().sentences(frame))[-1]
    assert len(list(Ranks().figures(frame))) == 2


def test_one_direction_and_all_alike():
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.full((4,), 0.3)) == pytest.approx(4)
