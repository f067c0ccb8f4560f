"""TRL's flags, typed at Lamina: the losses are those of TRL's own trainer on the same weights, rows and order."""

import dataclasses
import json
import shlex
from typing import get_type_hints

import pytest
import torch
from lab.posttraining.tiny import write_foreign, write_rows
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from lamina.cli import main
from lamina.commands.arguments import Parser
from lamina.data.tokenizers import load_tokenizer
from lamina.lab.posttraining.examples import TEMPLATES
from lamina.lab.posttraining.rlhf import PromptOrder
from lamina.lab.posttraining.settings import DpoSettings, RewardSettings, RlhfSettings, SftSettings
from lamina.training.optimization.order import TrainOrder

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

STEPS, BATCH = 3, 4
LORA = "--use_peft --lora_r 2 --lora_alpha 4 --lora_target_modules q_proj v_proj"
MPO = "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0"
USUAL = (
    f"--output_dir none --use_cpu --bf16 False --report_to none --save_strategy no --max_steps {STEPS} --disable_tqdm "
    f"true --per_device_train_batch_size {BATCH} --learning_rate 1e-2 --lr_scheduler_type cosine_with_min_lr "
    "--logging_steps 1 --lr_scheduler_kwargs '{\"min_lr_rate\": 0.0}' --warmup_steps 0.03 --optim adamw_torch_fused "
    "--lora_dropout 0 --seed 0"
)
POLICY = "--num_generations 2 --max_completion_length 8 --beta 0.1"
# By job and form of the rows: what is typed at both, at TRL alone, and at Lamina alone.
TABLE = [
    ("sft", "messages", "", "", ""),
    ("sft", "turns", "--eval_strategy steps --no_remove_unused_columns --gradient_checkpointing False", "", ""),
    ("sft", "turns", "--gradient_accumulation_steps 2 --logging_first_step --save_total_limit 1", "", ""),
    ("sft", "turns", "--loss_type dft --warmup_steps 2", "", ""),
    ("sft", "text", "--max_length 20 --optim adafactor", "", ""),
    ("sft", "text", "--packing --max_length 64", "--eval_packing false", ""),
    ("sft", "text", "--padding_free", "", ""),
    ("sft", "text", "--eos_token !", "", ""),  # which YAML reads as null
    ("sft", "messages", "--chat_template_path {marked} --assistant_only_loss", "", ""),
    ("sft", "turns", "--completion_only_loss false", "", ""),
    ("sft", "turns", LORA, "", ""),
    ("sft", "turns", f"{LORA} --use_dora", "", ""),
    ("sft", "turns", f"{LORA} --use_rslora", "", ""),
    ("sft", "turns", f"{LORA} --lora_modules_to_save lm_head", "", ""),
    ("sft", "turns", LORA, "--dtype bfloat16", "--weights bf16"),
    ("dpo", "pairs", "--beta 0.3 --loss_type ipo", "", ""),
    ("dpo", "pairs", f"{MPO} --label_smoothing 0.1", "", ""),
    ("dpo", "pairs", "--precompute_ref_log_probs --precompute_ref_batch_size 5 --ld_alpha 0.3", "", ""),
    ("dpo", "pairs", f"{LORA} --precompute_ref_log_probs", "", ""),
    ("dpo", "turns of pairs", "--f_divergence_type js_divergence --ld_alpha 0.5 --use_weighting", "", ""),
    ("dpo", "pairs", f"{LORA} --use_dora", "", ""),
    ("dpo", "longer turns of pairs", "", "", ""),
    ("dpo", "pairs", "--max_length 14", "", ""),
    ("dpo", "pairs", f"{LORA} --lora_modules_to_save lm_head", "", ""),
    ("reward", "pairs", "--center_rewards_coefficient 0.01", "", ""),
    ("reward", "margins", "--gradient_checkpointing True --max_length 30 --gradient_checkpointing_kwargs "
     "'{\"use_reentrant\": false}'", "", ""),
    ("reward", "turns of pairs", f"{LORA} --gradient_accumulation_steps 2", "--lora_task_type SEQ_CLS", ""),
    ("reward", "pairs", "--max_length 19", "", "--skip-bad"),  # the longer pairs are left out
    ("grpo", "prompts", f"{POLICY} --gradient_accumulation_steps 2", "", ""),
    ("grpo", "prompts", f"{POLICY} --loss_type dr_grpo --scale_rewards none --num_iterations 2", "", ""),
    ("grpo", "prompts", f"{POLICY} --loss_type bnpo --scale_rewards batch --mask_truncated_completions", "", ""),
    ("grpo", "prompts", f"{POLICY} {LORA} --epsilon_high 4e-4 --importance_sampling_level sequence --loss_type grpo "
     "--gradient_accumulation_steps 2 --steps_per_generation 4", "--epsilon 3e-4", "--trl.epsilon 3e-4"),
    ("grpo", "prompts", f"{POLICY} --use_adaptive_entropy --entropy_target 5 --top_p 0.9", "", ""),
    ("grpo", "asked", f"{POLICY} --chat_template_kwargs '{{\"mood\": \" Ha!\"}}'", "", ""),
    ("rloo", "asked", f"{POLICY} --gradient_accumulation_steps 2", "", ""),
    ("rloo", "prompts", f"{POLICY} {LORA} --normalize_advantages --steps_per_generation 3", "", ""),
    ("rloo", "prompts", f"{POLICY} --num_iterations 3 --top_k 40", "--epsilon 0.1", "--trl.epsilon 0.1"),
]  # fmt: skip
# One row per kind of trainer
FAST = ("--no_remove", "--use_dora", f"{LORA} --gradient_acc", "--epsilon_high", "--num_iterations 3")


def turn(role, text):
    return {"role": role, "content": text}


def rows_of(form):
    words = ["norm", "layer", "stream", "skip", "gain", "block", "plan", "branch", "depth", "width", "step", "run"]
    made = []
    for word in words:
        asked, answer = [turn("user", f"{word}?")], [turn("assistant", f"{word} it is")]
        worse = [turn("assistant", "no")]
        pair = {"prompt": f"the {word}", "chosen": " is level", "rejected": " grows on"}
        made.append({
            "text": {"text": f"the {word} is level"},
            "messages": {"messages": [*asked, *answer, turn("user", "sure"), turn("assistant", word)]},
            "turns": {"prompt": [*asked, *answer, turn("user", "sure")], "completion": [turn("assistant", word)]},
            "prompts": {"prompt": f"the {word} is"},
            "asked": {"prompt": [*asked, *answer, turn("user", "sure")]},
            "margins": {**pair, "margin": len(word) / 5},
            "pairs": pair,
            "turns of pairs": {"chosen": [*asked, *answer], "rejected": [*asked, *worse]},
            "longer turns of pairs": {"prompt": asked, "chosen": [*answer, *asked, *answer], "rejected": worse},
        }[form])  # fmt: skip
    return made


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = TEMPLATES["chat"] + "{% if add_generation_prompt and mood %}{{ mood }}{% endif %}"
    write_foreign(folder, tokenizer=tokenizer)
    answer = "{{ ' ' + message.content + eos_token }}"
    template = tokenizer.chat_template.replace(answer, "{% generation %}" + answer + "{% endgeneration %}")
    (folder / "marked.jinja").write_text(template)
    return folder


REWARD = """
def low(prompt, answer, row):
    return sum(ord(letter) % 7 for letter in answer) / 10

def theirs(prompts, completions, **columns):
    texts = [answer if isinstance(prompt, str) else answer[0]["content"]
             for prompt, answer in zip(prompts, completions, strict=True)]
    return [low(None, text, None) for text in texts]
"""


def rewarded(prompts, completions, **rest):
    names = {}
    exec(REWARD, names)
    texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]
    return [names["low"](prompt, text, {}) for prompt, text in zip(prompts, texts, strict=True)]


class Reseeded(TrainerCallback):
    """Undoes that TRL's data loader has drawn one number; Lamina's draws none."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            torch.manual_seed(args.seed)


def by_trl(job, start, rows, flags):
    """What the trainer logs that TRL's script of the job makes from its flags."""
    name = {"reward": "Reward"}.get(job, job.upper())
    policy, more = job in ("grpo", "rloo"), {}
    parser = trl.TrlParser((getattr(trl, f"{name}Config"), trl.ModelConfig))
    arguments, model = parser.parse_args_and_config(args=[*shlex.split(USUAL), *shlex.split(flags)])
    if getattr(arguments, "padding_free", False):
        arguments.max_length = None  # TRL refuses its own default of 1024
    tokenizer = load_tokenizer(str(start))
    if job == "reward":  # by the path, as TRL's script does: it draws the score, then LoRA's matrices, from the seed
        whole = str(start)
        # TRL reads the score at the last token that does not pad: before the end, where the same token ends and pads
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    else:
        whole = AutoModelForCausalLM.from_pretrained(start, dtype=getattr(torch, model.dtype))
    given = {"train_dataset": datasets.Dataset.from_list(rows), "eval_dataset": datasets.Dataset.from_list(rows)}
    given |= {"processing_class": tokenizer, "peft_config": trl.get_peft_config(model)}
    given |= {"reward_funcs": rewarded, "callbacks": [Reseeded()]} if policy else {}
    trainer = getattr(trl, f"{name}Trainer")(model=whole, args=arguments, **given)
    accumulated, size = arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size
    options = {"steps": STEPS, "batch_size": size, "gradient_accumulation": accumulated, "seed": 0}
    order = TrainOrder(len(trainer.train_dataset), **options)
    if policy:
        options["batch_size"] = size // 2
        more = {name: getattr(arguments, name) for name in ("steps_per_generation", "num_iterations")}
        order = PromptOrder(len(trainer.train_dataset), copies=2, **more, **options)
    places = [place for batch in order for place in batch]
    trainer._get_train_sampler = lambda data: places
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("job", "form", "both", "theirs", "ours"),
    [pytest.param(*row, marks=() if any(word in row[2] for word in FAST) else pytest.mark.slow) for row in TABLE],
)
def test_trls_flags_train_as_trl_does(job, form, both, theirs, ours, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    both = both.replace("{marked}", str(start / "marked.jinja"))
    data, output = write_rows(tmp_path / "rows.jsonl", rows_of(form)), tmp_path / "run"
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = f"--model_name_or_path {start} --data {data} --eval-data {data} --output_dir {output} --precision fp32 "
    policy = job in ("grpo", "rloo")
    size = BATCH // 2 if policy else BATCH
    flags += (
        f"--max_steps {STEPS} --logging_steps 1 --learning_rate 1e-2 --batch-size {size} --device cpu {both} {ours}"
    )
    if policy:
        function = "theirs" if form == "asked" else "low"
        flags += f" --algorithm {job} --reward-function rewards.py:{function} --reward-clip 0"
    assert main(["rlhf" if policy else job, *shlex.split(flags)]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]
    logged = by_trl(job, start, rows_of(form), f"{both} {theirs}")
    assert len(records) == len(logged) == STEPS
    for number, (record, line) in enumerate(zip(records, logged, strict=True)):
        line = {name.replace("/", "_"): value for name, value in line.items()}
        shared = (record.keys() & line.keys()) - {"epoch", "learning_rate", "step_time"}
        sampled = {"reward", "kl", "completions_mean_length"} if policy and number == 0 else set()
        assert {"loss", "grad_norm"} | sampled <= shared
        assert record["loss"] == pytest.approx(line["loss"], rel=1e-6, abs=1e-6)
        assert {k: record[k] for k in shared} == pytest.approx({k: float(line[k]) for k in shared}, rel=1e-5, abs=1e-7)


JOBS = {"SFT": SftSettings, "DPO": DpoSettings, "Reward": RewardSettings, "GRPO": RlhfSettings, "RLOO": RlhfSettings}
NOT_YAMLS = ("!", "null", "~", "yes", "off", "1e-3", "007", "[x]", "{x: 1}", "2024-01-01", "a: b", "# x", " ", "=")


def texts_of(kind):
    """The options of a class that are texts."""
    hints = get_type_hints(kind)
    names = [entry.name for entry in dataclasses.fields(kind)]
    return [name for name in names if hints[name] in (str, str | None)]


@pytest.mark.parametrize("job", JOBS)
def test_a_text_of_trls_stays_the_text_that_was_typed(job):
    parser, kind = Parser("tune", "", ""), getattr(trl, f"{job}Config")
    parser.add_settings(JOBS[job])
    common = {entry.name for entry in dataclasses.fields(TrainingArguments)}
    own = set(texts_of(kind)) - common
    assert {"log_level", "run_name"} <= set(texts_of(kind)) - own
    assert own & {"pad_token", "cache_implementation"}
    for text in NOT_YAMLS:
        for setting, names in (("trainer", texts_of(TrainingArguments)), ("trl", own)):
            typed = [word for name in names for word in (f"--{setting}.{name}", text)]
            assert parser.settings_from(typed)[0] == {setting: dict.fromkeys(names, text)}
    name = min(own - {"chat_template_path"})  # it is --template's
    assert parser.settings_from([f"--{name}", "!"])[0] == {"trl": {name: "!"}}
    assert parser.settings_from([f"--{name}=null"])[0] == {"trl": {name: "null"}}
