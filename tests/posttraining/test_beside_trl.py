"""TRL's flags, typed at Lamina: the losses are those of TRL's own trainer on the same weights, rows and order."""

import json
import shlex

import pytest
import torch
from posttraining.tiny import write_rows
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.posttraining.examples import TEMPLATES
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
# By job and form of the rows: what is typed at both, at TRL alone, and at Lamina alone.
TABLE = [
    ("sft", "messages", "", "", "--loss-on all"),
    ("sft", "turns", "--eval_strategy steps --no_remove_unused_columns --gradient_checkpointing False", "", ""),
    ("sft", "turns", "--gradient_accumulation_steps 2 --logging_first_step --save_total_limit 1", "", ""),
    ("sft", "turns", "--loss_type dft --warmup_steps 2", "", ""),
    ("sft", "text", "--max_length 20 --optim adafactor", "", ""),
    ("sft", "text", "--packing --max_length 64", "--eval_packing false", ""),
    ("sft", "turns", LORA, "", ""),
    ("sft", "turns", f"{LORA} --use_dora", "", ""),
    ("sft", "turns", f"{LORA} --use_rslora", "", ""),
    ("sft", "turns", f"{LORA} --lora_modules_to_save lm_head", "", ""),
    ("sft", "turns", LORA, "--dtype bfloat16", "--weights bf16"),
    ("dpo", "pairs", "--beta 0.3 --loss_type ipo", "", "--template none"),
    ("dpo", "pairs", f"{MPO} --label_smoothing 0.1", "", "--template none"),
    ("dpo", "turns of pairs", "--f_divergence_type js_divergence --ld_alpha 0.5 --use_weighting", "", ""),
    ("dpo", "pairs", f"{LORA} --use_dora", "", "--template none"),
    ("dpo", "pairs", f"{LORA} --lora_modules_to_save lm_head", "", "--template none"),
]  # fmt: skip
FAST = (1, 7, 12)


def turn(role, text):
    return {"role": role, "content": text}


def rows_of(form):
    words = ["norm", "layer", "stream", "skip", "gain", "block", "plan", "branch", "depth", "width", "step", "run"]
    made = []
    for word in words:
        asked, answer = [turn("user", f"{word}?")], [turn("assistant", f"{word} it is")]
        worse = [turn("assistant", "no")]
        made.append({
            "text": {"text": f"the {word} is level"},
            "messages": {"messages": [*asked, *answer, turn("user", "sure"), turn("assistant", word)]},
            "turns": {"prompt": [*asked, *answer, turn("user", "sure")], "completion": [turn("assistant", word)]},
            "pairs": {"prompt": f"the {word}", "chosen": " is level", "rejected": " grows on"},
            "turns of pairs": {"chosen": [*asked, *answer], "rejected": [*asked, *worse]},
        }[form])  # fmt: skip
    return made


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = TEMPLATES["chat"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**sizes, **ends, vocab_size=len(tokenizer), max_position_embeddings=256)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def by_trl(job, start, rows, flags):
    """The losses of the trainer that TRL's script of the job makes from its flags."""
    parser = trl.TrlParser((getattr(trl, f"{job.upper()}Config"), trl.ModelConfig))
    arguments, model = parser.parse_args_and_config(args=[*shlex.split(USUAL), *shlex.split(flags)])
    torch.manual_seed(0)
    trainer = getattr(trl, f"{job.upper()}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=getattr(torch, model.dtype)),
        processing_class=load_tokenizer(str(start)),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows),
        peft_config=trl.get_peft_config(model),
    )
    accumulated = arguments.gradient_accumulation_steps
    options = {"steps": STEPS, "batch_size": BATCH, "gradient_accumulation": accumulated, "seed": 0}
    order = [place for batch in TrainOrder(len(trainer.train_dataset), **options) for place in batch]
    trainer._get_train_sampler = lambda data: order
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("job", "form", "both", "theirs", "ours"),
    [pytest.param(*row, marks=() if n in FAST else pytest.mark.slow) for n, row in enumerate(TABLE)],
)
def test_trls_flags_train_as_trl_does(job, form, both, theirs, ours, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data, output = write_rows(tmp_path / "rows.jsonl", rows_of(form)), tmp_path / "run"
    flags = f"--model_name_or_path {start} --data {data} --eval-data {data} --output_dir {output} --precision fp32 "
    flags += (
        f"--max_steps {STEPS} --logging_steps 1 --learning_rate 1e-2 --batch-size {BATCH} --device cpu {both} {ours}"
    )
    assert main([job, *shlex.split(flags)]) == 0, capsys.readouterr().err
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(by_trl(job, start, rows_of(form), f"{both} {theirs}"), rel=1e-6)
