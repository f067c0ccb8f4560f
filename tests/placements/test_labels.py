"""What a placement says of itself is what its paper says: its initialisation, the place of its equation."""

import pytest
import torch
from naive import llama

import lamina

# Read off the papers, not off the code: Mix-LN's, Pre-LN's and Post-LN's own main runs are plain.
INITIALIZATIONS = {
    **dict.fromkeys(("mix_ln", "pre_ln", "post_ln", "peri_ln", "keel", "layernorm_scaling"), "normal"),
    **dict.fromkeys(("hybridnorm", "hybridnorm_star"), "small_scaled"),
    "fusenorm": "scaled",
    "deepnorm": "deepnorm",
    "admin": "admin",
}
SOURCES = {
    "mix_ln": "Mix-LN (arXiv 2412.13795) Sec 3",
    "pre_ln": "Xiong et al. 2020 (arXiv 2002.04745); FuseNorm Eq 3-4",
    "post_ln": "Vaswani et al. 2017 (arXiv 1706.03762); FuseNorm Eq 1-2",
    "peri_ln": "Peri-LN (arXiv 2502.02732) Sec 3.3; Gemma Team 2024 (arXiv 2408.00118)",
}


@pytest.mark.parametrize(("name", "initialization"), INITIALIZATIONS.items())
def test_the_recommended_initialisation_is_that_of_the_papers_main_runs(name, initialization):
    assert lamina.placements.get(name).initialization == initialization


@pytest.mark.parametrize(("name", "source"), SOURCES.items())
def test_the_source_names_the_place_of_the_equation(name, source):
    assert lamina.placements.get(name).source == source


def test_keels_third_ablation_is_keel():
    """LN(alpha x + F(b * LN(x))) with a learned b and a norm without a gain: b is Keel's inner gain."""
    config = llama(3)
    keel = lamina.build(config, "keel", head="causal_lm")
    ablation = lamina.build(config, "keel(variant=scale_gain_norm)", head="causal_lm")
    state = {
        name: torch.rand_like(value) + 0.5 if value.ndim == 1 else value for name, value in keel.state_dict().items()
    }
    keel.load_state_dict(state)
    blocks = range(1, 3)  # the first block is the same in both
    renamed = {
        f"model.backbone.layers.{i}.{part}.pre_norm.weight": f"model.backbone.layers.{i}.{part}.pre_scale"
        for i in blocks
        for part in ("attention", "feed_forward")
    }
    ablation.load_state_dict({renamed.get(name, name): value for name, value in state.items()})
    ids = torch.randint(0, config.vocab_size, (2, 9))
    torch.testing.assert_close(ablation(ids).logits, keel(ids).logits, rtol=0, atol=1e-6)
    assert sum(p.numel() for p in ablation.parameters()) == sum(p.numel() for p in keel.parameters())
    assert "is Keel itself" in " ".join(option.help for option in lamina.placements.get("keel").options)
