"""torch.export and ONNX: the exported program has the model's logits, at other sizes, too."""

import warnings

import pytest
import torch
from modeling.tiny import built, token_ids

from lamina.placements import names

# Each export takes seconds: one of each kind is fast, those of all placements are slow.
ONE = "hybridnorm"
ALL = [pytest.param(name, marks=[] if name == ONE else pytest.mark.slow) for name in names()]
BATCH, TOKENS = torch.export.Dim("batch", max=64), torch.export.Dim("tokens", max=64)
SHAPES = {"input_ids": {0: BATCH, 1: TOKENS}, "use_cache": None}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("placement", ALL)
def test_an_exported_program_has_the_same_logits_at_another_size(placement):
    model = built(placement, 2)
    arguments = {"input_ids": token_ids(), "use_cache": False}
    program = torch.export.export(model, (), arguments, dynamic_shapes=SHAPES).module()
    for batch, length in ((3, 17), (1, 5)):
        ids = token_ids(batch, length)
        again = program(input_ids=ids, use_cache=False).logits
        # one graph for all sizes may pick another order of a sum
        torch.testing.assert_close(again, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", names())
def test_onnx_runtime_computes_the_same(placement, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = built(placement, 2)
    how = {"dynamic_shapes": SHAPES, "output_names": ["logits"], "dynamo": True, "verbose": False}
    torch.onnx.export(model, (), tmp_path / "model.onnx", kwargs={"input_ids": token_ids(), "use_cache": False}, **how)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for batch, length in ((3, 17), (1, 5)):
        ids = token_ids(batch, length)
        (again,) = session.run(["logits"], {"input_ids": ids.numpy()})
        # float32 in another order of sums, and logits of up to 5
        torch.testing.assert_close(torch.from_numpy(again), model(ids).logits, rtol=1e-4, atol=1e-4)
