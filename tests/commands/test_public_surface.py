"""What users and their scripts rely on; a change here is a change for them, made on purpose."""

import json
import subprocess
import sys

import pytest

import lamina
from lamina.cli import COMMANDS, main
from lamina.commands.arguments import Parser
from lamina.jobs.catalog import JOBS

SHARED = """
backbone num-layers hidden-size num-heads untie-embeddings init corpus text-field tokenizer sequence-length
eval-fraction steps batch-size gradient-accumulation schedule min-learning-rate warmup decay decay-shape
weight-decay beta1 beta2 epsilon
max-grad-norm width-scaling base-width k-embedding k-hidden k-readout depth-scaling base-depth probe-every probes
logging-steps eval-steps eval-blocks eval-corpus eval-tasks eval-task-limit eval-data-dir save-steps
keep monitor-blocks divergence-margin divergence-patience stuck-margin expert-balance expert-balance-rate
gradient-checkpointing precision compile threads report-to trainer
objective mask-ratio image-size patch-size center-crop crop-scale flip rand-augment random-erasing repeated-augmentation
mixup cutmix label-smoothing drop-path ema-decay
"""
SCALE = """
placement branches from from-model output learning-rate seed
parallel device streaming shuffle-buffer rollback rollback-factor rollback-skip pause-step push-to-hub
"""
PREFLIGHT = """
placements learning-rates backbone num-layers hidden-size num-heads init corpus text-field tokenizer sequence-length
steps batch-size warmup weight-decay beta1 beta2 eval-fraction streaming shuffle-buffer gradient-accumulation precision
min-learning-rate width-scaling base-width depth-scaling base-depth expert-balance epsilon max-grad-norm seed burn-in
sequences flops threads output
"""
PROBE = """
checkpoint probes corpus text-field tokenizer sequence-length sequences batch-size tolerance layers device dtype seed
threads output
"""
EVAL = """
models tasks num-fewshot limit data-dir corpus text-field window stride tokenizer batch-size dtype device chat-template
system generation run-code seed threads output
"""
TRANSFER = """
placement proxy-width learning-rates seeds verify-rates verify-width best-margin output workers
"""
COORD_CHECK = """
placement backbone widths depths hidden-size num-layers untie-embeddings init width-scaling base-width k-embedding
k-hidden k-readout depth-scaling base-depth learning-rate steps seeds batch-size sequence-length corpus
text-field tokenizer weight-decay beta1 beta2 epsilon
max-grad-norm tolerance output threads
"""
RISING = """
placements max-learning-rate seeds window spike-margin spike-patience plateau-margin plateau-factor output workers
"""
TUNING = """
from from-model data eval-data eval-fraction eval-examples template sequence-length skip-bad steps epochs batch-size
gradient-accumulation schedule min-learning-rate warmup decay decay-shape learning-rate weight-decay beta1 beta2 epsilon
max-grad-norm lora-rank lora-alpha lora-dropout lora-targets logging-steps eval-steps save-steps keep divergence-margin
divergence-patience gradient-checkpointing precision threads report-to trainer trl seed device pause-step push-to-hub
output weights attn-implementation
"""
WATCHED = "eval-corpus eval-tasks eval-task-limit eval-data-dir"
POLICY = """
reward-model reward-function reward-weights reward-timeout algorithm kl-per beta reward-clip num-generations max-answer
temperature
"""
STUDY = "study scale seeds corpus set engine address gpus processes store records output workers threads"
FIXED_BY_RISING = "schedule min-learning-rate warmup decay decay-shape divergence-margin divergence-patience"
OPTIONS = {
    "compare": [*SHARED.split(), *["placements", "learning-rates", "learning-rates-of", "seeds", "output", "workers"]],
    "pretrain": [
        *SHARED.split(),
        *["placement", "branches", "from", "from-model", "output", "learning-rate", "seed"],
        *SCALE.split(),
    ],
    "preflight": PREFLIGHT.split(),
    "probe": PROBE.split(),
    "eval": EVAL.split(),
    "transfer": [*(set(SHARED.split()) - {"depth-scaling", "base-depth"}), *TRANSFER.split()],
    "coord-check": COORD_CHECK.split(),
    "sft": [*TUNING.split(), *WATCHED.split(), "preset", "loss-on", "packing", "best-by", "group-by-length"],
    "reward": [*TUNING.split(), "group-by-length"],
    "rlhf": [*TUNING.split(), *WATCHED.split(), *POLICY.split()],
    "dpo": [*TUNING.split(), *WATCHED.split(), "beta", "group-by-length"],
    "study": STUDY.split(),
    "max-lr": [*(set(SHARED.split()) - set(FIXED_BY_RISING.split())), *RISING.split()],
}
SETTINGS = {name: row.record for name, row in JOBS.items()}
EXPORTED = {"__version__", "build", "evaluate", "placements", "probe", "probe_folder", "LayerMonitor", "watch", "wire"}
EXPORTED |= {name.replace("-", "_") for name in COMMANDS} - {"placements", "probe"} | {"placement_of"}


def test_the_package_exports_these_names():
    assert set(lamina.__all__) == EXPORTED
    assert all(hasattr(lamina, name) for name in lamina.__all__)


_WRITTEN = "placements backbones diagnose report generate convert prune graft"


def test_the_command_line_has_these_commands():
    jobs = "compare preflight pretrain sft reward rlhf dpo coord-check transfer max-lr study probe eval"
    assert list(COMMANDS) == [*jobs.split(), *_WRITTEN.split()]


@pytest.mark.parametrize("command", OPTIONS)
def test_a_command_has_these_options_each_with_a_help_text_and_a_default(command):
    parser = Parser(command, "", "")
    parser.add_settings(SETTINGS[command], positional=("checkpoint",) if command == "probe" else ())
    flags = {o.removeprefix("--") for action in parser._actions for o in action.option_strings if o.startswith("--")}
    flags = {f for f in flags if not f.startswith("no-")} - {"help", "config"}
    flags |= {"checkpoint"} if command == "probe" else set()
    assert flags == set(OPTIONS[command])
    assert all(action.help for action in parser._actions)
    SETTINGS[command]()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  lamina {command}" in out.split("\nexamples:")[1]


@pytest.mark.parametrize("argv", [["--help"], [], ["--version"], ["no-such-command"]])
def test_help_loads_nothing_heavy(argv):
    heavy = ["torch", "transformers", "argparse", "pandas", "numpy", "yaml", "pyarrow", "plotly"]
    script = (
        f"import json, sys; from lamina.cli import main; main({argv!r}); "
        f"print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_python_m_lamina_is_lamina_and_says_its_version():
    done = subprocess.run([sys.executable, "-m", "lamina", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"lamina {lamina.__version__}\n")
