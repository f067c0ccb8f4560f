"""What the extra watch brings is enough to record and to diagnose; the rest says which extra it needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from spread import spread

import lamina
from lamina.core.extras import EXTRAS, install
from lamina.reports.records import read_run
from lamina.training.monitor.writers import read_rows

ROOT = Path(__file__).parents[3]
LIGHT = """
import sys
for name in "pandas pyarrow plotly scipy jinja2 datasets matplotlib trl peft tensorboard wandb trackio".split():
    sys.modules[name] = None
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import lamina
from lamina.cli import main

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
"""
LOOP = """
folder = sys.argv[1] + "/loop"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 64, (4, 16))
for part in (0, 1):  # the second one resumes, and goes on where records were cut back
    with lamina.watch(model, optimizer, output=folder, every=5, resume=bool(part), step=30 * part) as monitor:
        for step in range(40 - 10 * part):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if part == 1 and step == 5:
                for parameter in model.model.layers[1].mlp.parameters():
                    parameter.grad *= 1e4
                    parameter.data *= 50
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
"""
TRAINER = """
folder = sys.argv[1] + "/trainer"
data = [{"input_ids": (ids := torch.arange(16) % 7), "labels": ids}] * 64
arguments = TrainingArguments(folder + "-model", max_steps=12, report_to="none", save_strategy="no", use_cpu=True)
Trainer(model, arguments, train_dataset=data, callbacks=[lamina.LayerMonitor(folder, every=4)]).train()
"""
SAID = """
found = lamina.diagnose(folder)
print("\\n".join(found.sentences))
assert found.page is None
print("codes", [main(words) for words in (["diagnose", folder], ["report", folder], ["compare"], ["sft"])])
"""


NEEDED = f"needs pandas, pyarrow, plotly, jinja2. Run: {install('report')}"


@pytest.mark.parametrize(("name", "code"), spread([("loop", LOOP), ("trainer", TRAINER)], [("loop", LOOP)]))
def test_recording_and_diagnosing_need_no_heavy_package(tmp_path, name, code):
    words = [sys.executable, "-c", LIGHT + code + SAID, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run, out, err = tmp_path / name, done.stdout, done.stderr
    assert f"the page: {NEEDED}" in out
    assert "codes [0, 2, 2, 2]" in out
    said = [line for line in err.splitlines() if line.startswith("lamina: ")]
    assert [re.findall(r"pip install '.*\[(\w+)\]'", line) for line in said] == [["report"], ["train"], ["posttrain"]]
    assert "files are missing" not in err
    assert not list(run.glob("layers/*.parquet"))
    if name == "loop":
        assert "layer 1 (feed-forward)" in out

    # where everything is installed, the same records make the same diagnosis and a page
    found = lamina.diagnose(run)
    assert "\n".join(found.sentences) in out
    assert "plotly" in found.page.read_text(encoding="utf-8")
    assert "plotly" in lamina.report(run).read_text(encoding="utf-8")
    rows = read_rows(run)
    table = read_run(run).trials[0].layers.frame
    assert [tuple(row) for row in table.itertuples(index=False)] == rows
    steps = [row[0] for row in rows if row[5] == "step_loss"]
    assert steps == list(range(1, 1 + json.loads((run / "result.json").read_text())["steps"]))


def test_the_extras_that_commands_name_are_those_of_the_package():
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = given["optional-dependencies"]

    def modules(extra):
        for line in extras[extra]:
            inner = re.fullmatch(r"lamina\[(\w+)\]", line)
            yield from modules(inner[1]) if inner else [re.split(r"[>=\[]", line)[0].lower()]

    for extra, wanted in EXTRAS.items():
        assert set(modules(extra)) == set(wanted)
    assert not set(EXTRAS["posttrain"]) & {re.split(">=", line)[0].lower() for line in given["dependencies"]}
    for place in (ROOT / "lamina").rglob("*.py"):
        for extra in re.findall(r"lamina\[([\w,]+)\]", place.read_text(encoding="utf-8")):
            assert set(extra.split(",")) <= set(extras), place
