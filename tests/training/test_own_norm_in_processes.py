"""A norm of one's own, registered by the placement's file, is known in every process of a run."""

import json

from training.test_distributed import torchrun
from training.tiny_runs import SMALL, settings

OWN = """
from lamina.modeling import LaminaNorm
from lamina.modeling.building import norm
from lamina.placements import Layer, Norm, Plan, Sublayer, placement


@norm("halved")
class Halved(LaminaNorm):
    def forward(self, x):
        return self.apply_gain(x / 2)


@placement("own", title="Own", equation=("x",), source="unpublished", initialization="scaled")
def own(num_layers: int) -> Plan:
    layer = Layer.of(Sublayer(pre_norm=Norm(kind="halved")))
    return Plan(placement="own", layers=(layer,) * num_layers, final_norm=Norm())
"""


def test_two_processes_train_a_model_with_it(corpus, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    given = settings(corpus, tmp_path / "run", **{**SMALL, "placement": str(tmp_path / "own.py"), "steps": 2})
    config = tmp_path / "settings.json"
    config.write_text(json.dumps(given.to_dict()))
    done = torchrun("-m", "lamina", "pretrain", "--config", config)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "result.json").is_file()
