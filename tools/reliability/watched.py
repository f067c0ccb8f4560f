"""Watched trainings, for the suite of kills: a plain loop with ``lamina.watch``, and a Trainer with ``LayerMonitor``.

Both keep checkpoints of their own and go on from the last one in the same folder, as their users would.
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from tests.training.tiny_runs import layers, records, result

CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "a watched loop": ({"watched": "loop"}, 1),
    "a watched Trainer": ({"watched": "trainer"}, 1),
}
STEPS, SAVE_STEPS, VOCABULARY, PAUSE = 40, 5, 61, 0.02
_GAP = re.compile(r"records by layer of steps (\d+) to (\d+) are missing")


def train(folder: Path, how: str) -> None:
    """The body of a process that may be killed; what Lamina logs is kept beside the folder."""
    from lamina.training.monitor.writers import LayersWriter

    LayersWriter.seconds_per_part = 0.2  # so that a kill finds written rows, and others
    logging.getLogger("lamina").addHandler(logging.FileHandler(folder.with_suffix(".log")))
    {"loop": _loop, "trainer": _trainer}[how](folder)


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes))


def _tokens() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (2 * STEPS, 12), generator=torch.Generator().manual_seed(1))


def _loop(folder: Path) -> None:
    import torch

    import lamina

    model, kept, begun = _model(), folder.with_suffix(".pt"), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kept.exists():
        begun, weights, moments = torch.load(kept, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    with lamina.watch(model, optimizer, output=str(folder), every=1, resume="auto", step=begun) as monitor:
        for step, batch in list(enumerate(_tokens().split(2), 1))[begun:]:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if step % SAVE_STEPS == 0:
                torch.save((step, model.state_dict(), optimizer.state_dict()), f"{kept}.new")
                os.replace(f"{kept}.new", kept)
            time.sleep(PAUSE)


def _trainer(folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import lamina

    class Pause(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(PAUSE)

    place = folder.with_suffix(".trainer")
    sizes = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "per_device_train_batch_size": 2, "logging_steps": 1}
    arguments = TrainingArguments(str(place), use_cpu=True, report_to="none", disable_tqdm=True, **sizes)
    rows = [{"input_ids": row, "labels": row} for row in _tokens()]
    monitor = lamina.LayerMonitor(str(folder), every=1)
    saved = [path.parent for path in place.glob("checkpoint-*/trainer_state.json") if path.read_text().endswith("}")]
    last = max(saved, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    trainer = Trainer(_model(), arguments, train_dataset=rows, callbacks=[monitor, Pause()])
    trainer.train(resume_from_checkpoint=str(last) if last else None)


def rows_of(folder: Path) -> dict[int, str]:
    """The rows by layer of each step on disk."""
    if not any(folder.glob("layers/part-*")):
        return {}
    return {int(step): rows.to_csv(index=False) for step, rows in layers(folder).groupby("step")}


def faults_at_a_kill(folder: Path, expected: Path) -> str:
    """What is wrong with what a kill left: its rows have to be those of the undisturbed training."""
    whole, found = rows_of(expected), rows_of(folder)
    wrong = [step for step, rows in found.items() if rows != whole.get(step)]
    losses = {record["step"]: record.get("loss") for record in records(expected)}
    told = {one["step"]: one.get("loss") for one in records(folder)} if (folder / "metrics.jsonl").exists() else {}
    wrong += [step for step, loss in told.items() if loss != losses.get(step)]
    return f"other rows at steps {sorted(set(wrong))[:5]}" if wrong else ""


def faults_at_the_end(folder: Path, expected: Path) -> str:
    """What is wrong at the end: a row that is missing has to be in a step that a line has named."""
    log = folder.with_suffix(".log").read_text(encoding="utf-8")
    told = {step for gap in _GAP.findall(log) for step in range(int(gap[0]), int(gap[1]) + 1)}
    missing = rows_of(expected).keys() - rows_of(folder).keys()
    if missing - told:
        return f"rows of steps {sorted(missing - told)[:5]} are missing, and no line says so"
    if result(folder)["status"] != "finished":
        return f"its status is {result(folder)['status']!r}"
    return faults_at_a_kill(folder, expected)
