"""The weights' change since the start, against sums written out."""

import copy

import pytest
import torch
from tiny_contexts import context_of, lamina_model, measured, transformers_model, value

from lamina.errors import UserError
from lamina.probes.weight_change import WeightChange


def moved(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def naive(model, before, *parts):
    """The change and the start of all parameters whose name has one of the parts."""
    old = {name: p.detach() for name, p in before.named_parameters()}
    chosen = [name for name, _ in model.named_parameters() if any(part in name for part in parts)]
    assert chosen
    new = {name: p.detach() for name, p in model.named_parameters()}
    change = sum(float(((new[n] - old[n]).double() ** 2).sum()) for n in chosen) ** 0.5
    return change, change / sum(float((old[n].double() ** 2).sum()) for n in chosen) ** 0.5


@pytest.mark.parametrize("name", ["fusenorm", "pre_ln(wiring=mhc,size=2)", "llama of transformers"])
def test_the_change_since_a_reference_by_layer_sublayer_and_role(name, tmp_path):
    llama = name.startswith("llama")
    before = transformers_model("LlamaForCausalLM") if llama else lamina_model(name)
    before.save_pretrained(tmp_path)
    model = moved(copy.deepcopy(before))
    frame = measured(WeightChange(str(tmp_path)), context_of(model))
    for layer in range(2):
        at = f"layers.{layer}."
        down = {"layer": layer, "sublayer": "feed_forward", "role": "feed_forward_out"}
        for place, part in (({"layer": layer, "sublayer": "block", "role": "all"}, at), (down, None)):
            part = part or f"{at}{'mlp' if llama else 'feed_forward.module'}.down_proj"
            change, ratio = naive(model, before, part)
            assert value(frame, "change_norm", **place) == pytest.approx(change, rel=1e-6)
            assert value(frame, "change_ratio", **place) == pytest.approx(ratio, rel=1e-6)
    change, ratio = naive(model, before, "")
    assert value(frame, "change_norm", "all", -1) == pytest.approx(change, rel=1e-6)
    assert value(frame, "change_ratio", "all", -1) == pytest.approx(ratio, rel=1e-6)
    blocks = frame[(frame.sublayer == "block") & (frame.metric == "change_ratio") & (frame.role == "all")]
    most = blocks.loc[blocks.value.idxmax(), "layer"]
    assert f"Layer {most} has changed most" in list(WeightChange().sentences(frame))[1]
    assert len(list(WeightChange().figures(frame))) == 1


def test_another_model_is_no_reference_and_without_one_the_start_is_unknown(tmp_path):
    lamina_model("pre_ln", 3).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not in the reference, or has another shape"):
        measured(WeightChange(str(tmp_path)), context_of(transformers_model("LlamaForCausalLM")))
    with pytest.raises(UserError, match="the initial weights are unknown"):
        measured(WeightChange(), context_of(lamina_model("pre_ln")))


def test_weights_of_zero_have_no_ratio(tmp_path):
    before = lamina_model("pre_ln")
    with torch.no_grad():
        before.model.layers[0].feed_forward.module.down_proj.weight.zero_()
    before.save_pretrained(tmp_path)
    frame = measured(WeightChange(str(tmp_path)), context_of(moved(copy.deepcopy(before))))
    ratio = frame[(frame.role == "feed_forward_out") & (frame.metric == "change_ratio") & (frame.layer == 0)].value
    assert ratio.isna().all()
