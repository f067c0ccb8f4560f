"""Other tools' names of settings: taken where they mean the same, answered where they do not; typos get the nearest."""

import pytest
from commands.test_public_surface import SETTINGS

from lamina.commands.arguments import add_output_modes, add_settings, given_settings, make_parser
from lamina.commands.help import INDENT, _rows
from lamina.errors import UserError
from lamina.jobs import aliases
from lamina.jobs.aliases import in_our_words, meaning


def parser_of(command):
    parser = make_parser(command, "", "")
    positional = {"probe": ("checkpoint",), "study": ("study",)}.get(command, ())
    add_settings(parser, SETTINGS[command], positional=positional, several="models" if command == "eval" else None)
    add_output_modes(parser, "continue")
    return parser


def typed(command, *words):
    return given_settings(parser_of(command), list(words), "resume", "overwrite")[0]


def said(command, *words) -> str:
    with pytest.raises(UserError) as caught:
        typed(command, *words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("command", "words", "settings"),
    [
        ("pretrain", "--lr 1e-3", {"learning_rate": 1e-3}),
        ("pretrain", "--learning_rate 1e-3 --max_steps=20", {"learning_rate": 1e-3, "steps": 20}),
        ("pretrain", "--bf16", {"precision": "bf16"}),
        ("pretrain", "--fp16 True --bf16 False", {"precision": "fp16"}),
        ("pretrain", "--optim adafactor", {"trainer": {"optim": "adafactor"}}),
        ("pretrain", "--output_dir a --block_size 128", {"output": "a", "sequence_length": 128}),
        ("pretrain", "--gradient_accumulation_steps 4 --warmup_steps 9", {"gradient_accumulation": 4, "warmup": 9.0}),
        ("pretrain", "--warmup_ratio 0.1 --save_total_limit 3", {"warmup": 0.1, "keep": 3}),
        ("pretrain", "--model_name_or_path m", {"from_model": "m"}),
        ("pretrain", "--gradient_checkpointing False", {"gradient_checkpointing": False}),
        ("pretrain", "--no-gradient-checkpointing false", {"gradient_checkpointing": True}),
        ("pretrain", "--no-gradient-checkpointing true", {"gradient_checkpointing": False}),
        ("pretrain", "--gradient_checkpointing True --seed 3", {"gradient_checkpointing": True, "seed": 3}),
        ("pretrain", "--dataset_name roneneldan/TinyStories", {"corpus": "hf:roneneldan/TinyStories"}),
        ("pretrain", "--lr_scheduler_type linear", {"trainer": {"lr_scheduler_type": "linear"}}),
        ("pretrain", "--weight_decay 0 --max_grad_norm 0.5", {"weight_decay": 0.0, "max_grad_norm": 0.5}),
        ("pretrain", "--logging_steps 5 --eval_steps 6 --save_steps 7 --report_to wandb",
         {"logging_steps": 5, "eval_steps": 6, "save_steps": 7, "report_to": "wandb"}),
        ("pretrain", "--placements keel --learning_rates 2e-3 --seeds 4",
         {"placement": "keel", "learning_rate": 2e-3, "seed": 4}),
        ("pretrain", "--placements mix_ln(alpha=0.5,final_norm=true)",
         {"placement": "mix_ln(alpha=0.5,final_norm=true)"}),
        ("compare", "--placement keel --learning-rate 2e-3 --seed 4",
         {"placements": "keel", "learning_rates": "2e-3", "seeds": "4"}),
        ("preflight", "--placement keel --learning-rate 2e-3", {"placements": "keel", "learning_rates": "2e-3"}),
        ("transfer", "--placements keel --lr 1e-3,2e-3", {"placement": "keel", "learning_rates": "1e-3,2e-3"}),
        ("sft", "--num_train_epochs 2 --max_length 512 --dataset_name a/b --from m",
         {"epochs": 2.0, "sequence_length": 512, "data": "hf:a/b", "from_model": "m"}),
        ("rlhf", "--max_completion_length 9", {"max_answer": 9}),
        ("probe", "--model_name_or_path m --batch_size 2", {"checkpoint": "m", "batch_size": 2}),
        ("eval", "--tasks quiz --pretrained m", {"tasks": "quiz", "models": ["m"]}),
    ],
)  # fmt: skip
def test_a_name_that_means_the_same_is_taken(command, words, settings):
    given = typed(command, *words.split())
    assert {name: value.as_dict() if hasattr(value, "as_dict") else value for name, value in given.items()} == settings


@pytest.mark.parametrize(
    ("command", "words", "answer"),
    [
        ("pretrain", "--per_device_train_batch_size 4", "use --batch-size, which counts"),
        ("pretrain", "--num_train_epochs 4", "use --steps, which counts optimizer steps"),
        ("pretrain", "--overwrite_output_dir", "use --overwrite, which replaces"),
        ("pretrain", "--eval_strategy steps", "use --eval-steps"),
        ("pretrain", "--placements pre_ln,keel", "lamina compare"),
        ("pretrain", "--warmup_ratio 3", "a share of all steps"),
        ("pretrain", "--bf16 maybe", "allowed: true, false"),
        ("pretrain", "--lr", "xpected one argument"),
        ("pretrain", "--lr 1 --learning-rate 2", "--lr and --learning-rate are the same setting"),
        ("compare", "--model_name_or_path m", "use --backbone, which names the architecture only"),
        ("sft", "--corpus books", "use --data, which holds examples"),
    ],
)
def test_a_name_that_means_something_else_is_answered_in_one_line(command, words, answer):
    line = said(command, *words.split())
    assert answer in line
    assert "\n" not in line


@pytest.mark.parametrize("command", SETTINGS)
def test_every_other_name_is_taken_or_answered_where_a_command_has_its_setting(command):
    parser = parser_of(command)
    offered = {action.dest for action in parser._actions}
    for name in set(aliases.NAMES) - offered:
        found = meaning(name, offered)
        if found is None:
            continue
        value = {"warmup": "0.1"}.get(found[1], "1")
        given = {name: True if found[0].switch else value}
        if found[0].differs:
            with pytest.raises(UserError, match=f"{name}: use {found[1]}, which "):
                in_our_words(given, offered)
        else:
            assert list(in_our_words(given, offered)) == [found[1].partition(".")[0]]


def test_every_setting_of_the_table_exists():
    known = {name for record in SETTINGS.values() for name in record.names()}
    known |= {"resume", "overwrite", "model", "source", "max_new_tokens", "trainer"}
    for name in aliases.NAMES:
        for alias in aliases._TABLE[name]:
            assert {setting.partition(".")[0] for setting in alias.settings} <= known, name


@pytest.mark.parametrize("key", ["placement", "learning_rate", "seed"])
@pytest.mark.parametrize("command", SETTINGS)
def test_singular_and_plural_are_taken_by_every_command_that_has_either(command, key):
    offered = SETTINGS[command].names()
    if key in offered or f"{key}s" in offered:
        ours = key if key in offered else f"{key}s"
        for name in (key, f"{key}s"):
            assert in_our_words({name: "1"}, offered) == {ours: "1"}


@pytest.mark.parametrize(
    ("command", "flag", "nearest"),
    [
        ("pretrain", "--lrr", "--learning-rate"),
        ("pretrain", "--leraning_rate", "--learning-rate"),
        ("pretrain", "--max-step", "--steps"),
        ("compare", "--learning_ratess", "--learning-rates"),
        ("pretrain", "--per_device_trian_batch_size", "--batch-size"),
        ("sft", "--form", "--from"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_flag(command, flag, nearest):
    line = said(command, flag, "3")
    assert f"did you mean '{nearest}'?" in line
    assert "help'" not in line


def test_a_yaml_file_may_use_the_other_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nmax_steps: 7\nbf16: true\noptim: adafactor\ntrainer: {tf32: true}\nplacements: keel\n")
    given = typed("pretrain", "--config", str(file))
    assert (given["learning_rate"], given["steps"], given["precision"]) == (1e-3, 7, "bf16")
    assert given["placement"] == "keel"
    assert dict(given["trainer"]) == {"optim": "adafactor", "tf32": True}
    file.write_text("per_device_train_batch_size: 7\n")
    assert "run.yaml': per_device_train_batch_size: use batch_size" in said("pretrain", "--config", str(file))
    file.write_text("lr: 1\nlearning_rate: 2\n")
    assert "are the same setting" in said("pretrain", "--config", str(file))


@pytest.mark.parametrize("command", SETTINGS)
def test_no_flag_takes_more_than_two_lines_of_the_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    for action in parser_of(command)._actions:
        lines = [line for line in _rows(action) if line[INDENT:].strip()]
        assert len(lines) <= 2, lines


@pytest.mark.parametrize("command", SETTINGS)
def test_the_help_shows_ten_settings_and_help_all_the_rest_in_groups(command, capsys):
    record, shown = SETTINGS[command], {}
    assert len(record.main) == min(10, len(record.names()))
    assert set(record.main) <= set(record.names())
    for words in (["--help"], ["--help", "all"], ["--help=all"]):
        with pytest.raises(SystemExit):
            parser_of(command).parse_args(words)
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
