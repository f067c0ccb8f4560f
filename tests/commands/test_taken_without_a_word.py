"""Options that were once taken without a word are refused, and another tool's name suggests what it means."""

import json
import os
import subprocess
import sys

import pytest

import lamina
from lamina.errors import UserError
from lamina.surgery.prune import refuse_twice


def test_layers_that_are_named_twice_are_refused_from_python():
    with pytest.raises(UserError, match="layers: 1 is named twice"):
        refuse_twice([0, 1, 1])


def test_a_setting_that_was_written_into_a_runs_file_is_named_with_the_file(tmp_path):
    from training.tiny_runs import SMALL

    folder = tmp_path / "run"
    given = {**SMALL, "corpus": "embedded", "steps": 2, "pause_step": 1}
    lamina.pretrain(output=folder, bar=False, **given)
    config = folder / "config.yaml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("digest:")]  # an older run's
    config.write_text("\n".join(["paralmel: ddp", *lines]) + "\n")
    with pytest.raises(UserError, match=r"run': unknown setting 'paralmel'; did you mean 'parallel'"):
        lamina.pretrain(output=folder, resume=True, bar=False)


@pytest.mark.slow
def test_an_adapters_file_does_not_depend_on_the_hash_seed(tmp_path):
    pytest.importorskip("peft")
    script = tmp_path / "save.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom peft import LoraConfig, PeftModel\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from lamina.lab.posttraining.starting import save_adapter\n"
        "sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))\n"
        "names = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj', 'gate_proj']\n"
        "save_adapter(PeftModel(model, LoraConfig(r=2, target_modules=names)), Path(sys.argv[1]))\n"
    )
    written = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, script, tmp_path / seed], env=environment, check=True, capture_output=True)
        written.append((tmp_path / seed / "adapter_config.json").read_text())
    assert written[0] == written[1]
    assert len(json.loads(written[0])["target_modules"]) == 7
