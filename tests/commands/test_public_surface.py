"""What users and their scripts rely on, and other tools' names of settings."""

import os
import subprocess
import sys

import pytest

import lamina
from lamina.catalog import JOBS
from lamina.cli import COMMANDS, GROUPS, main
from lamina.commands.arguments import Parser
from lamina.errors import UserError
from lamina.jobs.aliases import NEAR, TAKEN, in_our_words

SETTINGS = {name: row.settings() for name, row in JOBS.items()}
EXPORTED = {"__version__", "build", "check", "evaluate", "placements", "probe", "probe_folder"}
EXPORTED |= {"Diverged", "LayerMonitor", "watch", "wire"}
EXPORTED |= {name.replace("-", "_") for name in COMMANDS} - {"placements", "probe"} | {"placement_of"}


def test_the_package_exports_these_names():
    assert set(lamina.__all__) == EXPORTED
    assert set(lamina.__all__) <= set(dir(lamina))
    assert all(callable(getattr(lamina, name)) for name in EXPORTED - {"__version__", "placements"})


_WRITTEN = "placements backbones diagnose report generate convert emit prune graft"


def test_the_command_line_has_these_commands():
    jobs = "compare preflight pretrain sft reward rlhf dpo coord-check transfer max-lr study probe eval"
    assert list(JOBS) == jobs.split()
    assert set(COMMANDS) == {*jobs.split(), *_WRITTEN.split()}
    assert next(iter(GROUPS["compare and train"])) == "compare"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  lamina {command}" in out.split("\nexamples:")[1]


HEAVY = {"torch", "transformers", "argparse", "pandas", "numpy", "yaml", "pyarrow", "plotly"}
MODELS = {"torch", "transformers"}
CALLED = "from lamina.cli import main\ntry: main({!r})\nexcept SystemExit: pass"
UNKNOWN = [  # commands that name what does not exist
    ["convert", "nowhere", "out"],
    ["convert", "nowhere", "out", "--to", "nope"],
    ["convert", "nowhere", "out", "--to", "megatron"],
    ["convert", "nowhere", "out", "--from", "nope"],
    ["convert", "nowhere", "out", "--from", "megatron"],
    ["convert", ".", "out", "--from", "megatron", "--placement", "nope"],
    ["prune", "nowhere", "--output", "out", "--layers", "1"],
    ["graft", "nowhere", "--output", "out", "--placement", "keel"],
    ["placements", "--of", "./nowhere"],
    ["probe", "nowhere"],
    ["eval", "nowhere", "--corpus", "embedded"],
    ["generate", "nowhere"],
    ["pretrain", "--placement", "keel", "--from", "nowhere"],
    ["transfer", "--placement", "nope"],
    ["emit", "keel", "--to", "nope", "--num-layers", "2"],
    ["diagnose", "nowhere"],
    ["report", "nowhere"],
    ["compare", "--placements", "nope"],
    ["compare", "--placements", "keel", "--tokenizer", "nope:3"],
    ["preflight", "--placement", "nope"],
]
LIGHT = {  # what is run: what it must not load
    **{CALLED.format(words): HEAVY for words in (["--help"], [], ["--version"], ["no-such-command"])},
    **{CALLED.format(words): MODELS | {"pandas"} for words in (["convert", "--help"], ["probe", "--list"])},
    "import lamina; dir(lamina), lamina.api; lamina.placements.resolve('keel', 4)": HEAVY - {"argparse", "yaml"},
    "import lamina.preflights.settings, lamina.studies.settings": MODELS | {"numpy", "pandas"},
    "from lamina.data.corpus import Corpus; next(Corpus.parse('embedded').documents())": MODELS | {"numpy", "datasets"},
    "from lamina.data.tokenizers import validate_spec; validate_spec('bpe:300')": MODELS | {"tokenizers", "numpy"},
    "from lamina.probes.engine.registry import listed; listed()": MODELS | {"pandas"},
    "from lamina.placements import diagram, resolve; diagram.svg(resolve('keel', 2))": HEAVY - {"argparse", "yaml"},
    "import lamina.lab.papers.judging": {"torch", "pandas", "numpy", "scipy"},
    "import lamina.lab.papers.pages.study_figures, lamina.lab.papers.pages.matplotlib_figures; "
    "import lamina.reports.pages.probing": MODELS,
}


@pytest.mark.parametrize("code", LIGHT)
def test_what_needs_no_model_loads_nothing_heavy(code):
    code = f"import sys\n{code}\nprint(sorted({LIGHT[code]!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_name_or_a_folder_that_does_not_exist_is_refused_before_torch_is_loaded(tmp_path):
    code = (
        "import sys\nfrom lamina.cli import main\n"
        f"print([words for words in {UNKNOWN!r} if main(words) != 2 or {MODELS!r} & set(sys.modules)])"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
    assert not [*tmp_path.iterdir()]


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_python_m_lamina_is_lamina_and_says_its_version():
    done = subprocess.run([sys.executable, "-m", "lamina", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"lamina {lamina.__version__}\n")


POSITIONAL = {"probe": ("checkpoint",), "study": ("study",), "eval": ("models...",)}


def parser_of(command):
    parser = Parser(command, "", "")
    parser.add_settings(SETTINGS[command], POSITIONAL.get(command, ()))
    parser.add_output_modes("continue")
    return parser


def typed(command, *words):
    return parser_of(command).settings_from(words)[0]


def said(command, *words) -> str:
    with pytest.raises(UserError) as caught:
        typed(command, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("command", "words", "settings"),
    [
        ("pretrain", "--lr 1e-3", {"learning_rate": 1e-3}),
        ("pretrain", "--learning_rate 1e-3 --max_steps=20", {"learning_rate": 1e-3, "steps": 20}),
        ("pretrain", "--output_dir a --block_size 128", {"output": "a", "sequence_length": 128}),
        ("pretrain", "--gradient_accumulation_steps 4 --warmup_steps 9", {"gradient_accumulation": 4, "warmup": 9.0}),
        ("pretrain", "--model_name_or_path m", {"from_model": "m"}),
        ("pretrain", "--gradient_checkpointing --seed 3", {"gradient_checkpointing": True, "seed": 3}),
        ("pretrain", "--no_gradient_checkpointing", {"gradient_checkpointing": False}),
        ("pretrain", "--trainer.optim adafactor --trainer.tf32=true --trainer.adam_x 1e-3",
         {"trainer": {"optim": "adafactor", "tf32": True, "adam_x": 1e-3}}),
        ("pretrain", "--placements mix_ln(alpha=0.5,final_norm=true) --learning_rates 2e-3 --seeds 4",
         {"placement": "mix_ln(alpha=0.5,final_norm=true)", "learning_rate": 2e-3, "seed": 4}),
        ("compare", "--placement keel --learning-rate 2e-3 --seed 4",
         {"placements": "keel", "learning_rates": "2e-3", "seeds": "4"}),
        ("sft", "--num_train_epochs 2 --max_length 512 --from m",
         {"epochs": 2.0, "sequence_length": 512, "from_model": "m"}),
        ("pretrain", "--optim adafactor --tf32", {"trainer": {"optim": "adafactor", "tf32": True}}),
        ("pretrain", "--optim adafactor --trainer.tf32 true", {"trainer": {"optim": "adafactor", "tf32": True}}),
        ("sft", "--gradient_checkpointing True --packing False", {"gradient_checkpointing": True, "packing": False}),
        ("sft", "--use_peft --lora_r 8 --lora_target_modules q_proj v_proj --use_dora --lora_modules_to_save lm_head",
         {"lora_rank": 8, "lora_targets": "q_proj,v_proj",
          "lora": {"use_peft": True, "use_dora": True, "modules_to_save": "lm_head"}}),
        ("sft", "--loss_type dft --eval_strategy steps --no_remove_unused_columns",
         {"trl": {"loss_type": "dft"}, "trainer": {"eval_strategy": "steps", "remove_unused_columns": False}}),
        ("dpo", "--loss_type sigmoid sft --loss_weights 0.8 1 --beta 0.2",
         {"trl": {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1]}, "beta": 0.2}),
        ("rlhf", "--top_k 5 --reward_weights 0.5 1 --reward_model_name_or_path r",
         {"trl": {"top_k": 5}, "reward_weights": "0.5,1", "reward_model": "r"}),
        ("probe", "m --batch_size 2", {"checkpoint": "m", "batch_size": 2}),
        ("probe", "--batch-size 2 m", {"checkpoint": "m", "batch_size": 2}),
        ("eval", "m n --tasks quiz", {"tasks": "quiz", "models": ["m", "n"]}),
        ("eval", "m --apply_chat_template --system_instruction sort",
         {"models": ["m"], "chat_template": True, "system": "sort"}),
        ("eval", "--tasks quiz m", {"tasks": "quiz", "models": ["m"]}),
        ("eval", "--tasks quiz", {"tasks": "quiz"}),
        ("pretrain", "--lr -1e-3 --seed -1", {"learning_rate": -1e-3, "seed": -1}),
        ("compare", "--seeds -1,2 --learning-rates -inf", {"seeds": "-1,2", "learning_rates": "-inf"}),
        ("study", "mix-ppl --set.steps 9 --resume", {"study": "mix-ppl", "set": {"steps": 9}}),
    ],
)  # fmt: skip
def test_what_is_typed_is_read(command, words, settings):
    assert typed(command, *words.split()) == settings


def test_resume_takes_no_word_of_its_own():
    parser = parser_of("eval")
    assert parser.settings_from(["--resume", "m"])[1].resume is True
    assert parser.settings_from(["m", "--resume=auto"])[1].resume == "auto"
    assert "--resume: ''. Write --resume or --resume=auto." in said("eval", "--resume=")


def test_every_setting_of_the_tables_exists():
    known = {name for record in SETTINGS.values() for name in record.names()} | {"resume", "overwrite"}
    assert {*TAKEN, *NEAR} <= known


@pytest.mark.parametrize("key", ["placement", "learning_rate", "seed"])
@pytest.mark.parametrize("command", SETTINGS)
def test_singular_and_plural_are_taken_by_every_command_that_has_either(command, key):
    offered = SETTINGS[command].names()
    if key in offered or f"{key}s" in offered:
        ours = key if key in offered else f"{key}s"
        for name in (key, f"{key}s"):
            assert in_our_words({name: "1"}, offered) == {ours: "1"}


def test_a_yaml_file_may_use_the_other_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nmax_steps: 7\ntrainer: {tf32: true}\nplacements: keel\n")
    given = typed("pretrain", "--config", str(file))
    assert given == {"learning_rate": 1e-3, "steps": 7, "placement": "keel", "trainer": {"tf32": True}}
    file.write_text("per_device_train_batch_size: 7\n")
    assert "run.yaml': unknown setting 'per_device_train_batch_size'; did you mean 'batch_size'?" in said(
        "pretrain", "--config", str(file)
    )
    file.write_text("loss_type: dft\nuse_dora: true\n")
    assert typed("sft", "--config", str(file)) == {"trl": {"loss_type": "dft"}, "lora": {"use_dora": True}}
    file.write_text("models: [a, b]\nlimit: 3\n")  # words without a flag, too
    assert typed("eval", "--config", str(file)) == {"models": ["a", "b"], "limit": 3}
    assert typed("eval", "c", "--config", str(file)) == {"models": ["c"], "limit": 3}
    file.write_text("lr: 1\nlearning_rate: 2\n")
    assert "learning_rate: you give this setting under two names" in said("pretrain", "--config", str(file))


@pytest.mark.parametrize("words", ["--steps --help", "--steps x -h", "--nonsense --help", "--corpus a b --help"])
def test_help_is_shown_wherever_it_stands(words, capsys):
    with pytest.raises(SystemExit):
        parser_of("pretrain").parse(words.split())
    assert capsys.readouterr().out.startswith("usage: lamina pretrain")


def test_behind_two_dashes_no_word_is_an_option():
    assert typed("probe", "--seed", "3", "--", "--help") == {"checkpoint": "--help", "seed": 3}
    assert typed("eval", "--", "-a", "--tasks") == {"models": ["-a", "--tasks"]}


@pytest.mark.parametrize("command", SETTINGS)
def test_the_help_shows_ten_settings_and_help_all_the_rest_in_groups(command, capsys):
    record, shown = SETTINGS[command], {}
    assert len(record.main) == min(10, len(record.names()))
    assert set(record.main) <= set(record.names())
    for words in (["--help"], ["--help", "all"], ["--help=all"]):
        with pytest.raises(SystemExit):
            parser_of(command).parse(words)
        shown[words[-1]] = capsys.readouterr().out
    assert shown["all"] == shown["--help=all"]
    flags = {name: "--from" if name == "from_model" else f"--{name.replace('_', '-')}" for name in record.names()}
    plain = {"checkpoint": "CHECKPOINT", "models": "MODELS", "study": "STUDY"}
    for name, flag in flags.items():
        flag = plain.get(name, flag) if command in ("probe", "eval", "study") else flag
        assert f"\n  {flag}" in shown["all"]
        assert (f"\n  {flag} " in shown["--help"] or f"\n  {flag}\n" in shown["--help"] or flag + "." in shown["--help"]
                ) == (name in record.main)  # fmt: skip
    assert "SUPPRESS" not in shown["all"]
