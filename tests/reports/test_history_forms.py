# ruff: noqa: E501  (lines as trainers print them)
"""Every form that a trainer prints or writes is read: the same spike is found in all of them, at its step."""

import io
import json
import math
import shutil
import sqlite3
import sys

import pytest

import lamina
from lamina.errors import UserError
from lamina.reports.diagnosis import gather
from lamina.reports.histories import read_history
from lamina.reports.histories.consoles import FORMS, form_of, lines_of
from lamina.training.monitor.writers import LOSS, NORM

LAST, SPIKE, ROSE = 60, 40, 42
CURVE = [
    (
        step,
        4.0 * math.exp(-step / 80) + 0.02 * (-1) ** step + 1.2 * (step >= ROSE),
        (1.0 + 0.1 * math.sin(step)) * (40.0 if SPIKE <= step < SPIKE + 10 else 1.0),
        3e-4,
    )
    for step in range(1, LAST + 1)
]

CONSOLES = {
    "Megatron's lines": " iteration {s:8d}/    8000 | consumed samples: {s:12d} | elapsed time per iteration (ms): 7613.1 | "
    "learning rate: {r:.3E} | global batch size:    64 | lm loss: {l:.6E} | loss scale: 1.0 | grad norm: {g:.3f} |",
    "NeMo's lines": "(pid=4112) Training epoch 0, iteration {s}/99 | lr: {r:.4g} | global_batch_size: 32 | global_step: {s} | "
    "reduced_train_loss: {l:.4g} | grad_norm: {g:.4g} | train_step_timing in s: 46.86",
    "Megatron's wrapped lines": "iteration {s}/50 | elapsed time per iteration: 21392.5 ms |\nlearning rate: {r:.6E} | global batch size: 4096 |\n"
    "lm loss: {l:.6E} | loss scale: 1.0 | grad norm: {g:.3f} |\nnumber of skipped iterations: 0 | number of nan iterations: 0",
    "printed dictionaries": "{{'loss': {l:.4f}, 'grad_norm': {g}, 'learning_rate': {r}, 'epoch': {e:.2f}}}",
    "OLMo-core's lines": "2026-01-01 INFO [step={s}/740,epoch=1,eta=3h]\n    train/CE loss={l:.4f}\n    train/Z loss=0.0001\n"
    "    optim/total grad norm={g:.4f}\n    optim/LR (group 0)={r:.2E}\n    throughput/device/TPS=12,345",
    "Composer's lines": "[batch={s}/400]:\n\t Train time/batch: {s}\n\t Train loss/train/total: {l:.4f}\n"
    "\t Train l2_norm/grad/global: {g:.4f}\n\t Train lr-DecoupledAdamW/group0: {r:.6f}",
    "llm.c's lines": "step {s:4d}/19560 | loss {l:7.6f} (+nanz)| norm {g:6.4f} (+0.10z)| lr {r:.2e} | 1200.00 ms | 4.0% bf16 MFU",
    "llm.c's log": "s:{s} trl:{l:.4f} lr:{r:.6f} norm:{g:.2f}",
    "nanochat's lines": "step {s:05d}/21400 (0.10%) | loss: {l:.6f} | grad norm: {g:.4f} | lrm: 1.00 | dt: 10.20ms | "
    "tok/sec: 1,100,000 | mfu: 40.00",
    "nanoGPT's lines": "iter {s}: loss {l:.4f}, grad norm {g:.4f}, time 120.00ms, mfu 30.20%",
    "litgpt's lines": "Epoch 1 | iter {s} step {s} | loss train: {l:.3f}, val: n/a | iter time: 100.00 ms (step)",
    "fairseq's lines": "2021-03-08 12:31:36 | INFO | train_inner | epoch 001:  {s:5d} / 12000 loss={l:.3f}, ppl=20.2, "
    "num_updates={s}, lr={r}, gnorm={g:.3f}, clip=0",
    "verl's lines": "step:{s} - actor/pg_loss:{l:.3f} - actor/grad_norm:{g:.3f} - actor/lr:0.000 - global_seqlen/min:100.000",
    "MaxText's lines": "completed step: {s}, seconds: 1.250, TFLOP/s/device: 120.000, Tokens/s/device: 9000.000, "
    "total_weights: 1000, loss: {l:.3f}, lr: {r:.3e}, grad_norm: {g}",
    "torchtitan's lines": "[titan] 2026-01-01 10:00:00,123 - root - INFO - \x1b[31mstep: {s:2}  \x1b[32mloss: {l:8.5f}  "
    "\x1b[38;2;180;60;0mgrad_norm: {g:7.4f}  \x1b[36mmemory: 10.00GiB(12.00%)  \x1b[34mtps: 8,000  \x1b[39m",
    "DeepSpeed's lines": "steps: {s} loss: {l:0.4f} iter time (s): 0.512 samples/sec: 62.500",
    "Marian's lines": "[2017-10-18 18:14:31] Ep. 7 : Up. {s} : Sen. 5,630,845 : Cost {l:.8f} * 1,022 @ 90 after 5,630 : Time 6.91s : "
    "13596.73 words/s : gNorm {g:.4f} : L.r. {r:.4e}",
    "ESPnet's lines": "2020-11-11 16:45:17,681 (trainer:486) INFO: 1epoch:train:1-{s}batch: iter_time=0.001, loss_ctc=90.1, loss={l:.3f}, "
    "backward_time=0.005, grad_norm={g:.3f}, optim0_lr0={r:.3e}, train_time=0.014",
    "timm's lines": "Train: 0 [{s:>4d}/1251 (  4%)]  Loss: {l:#.5g} ({l:#.3g})  Time: 0.361s, 2836.45/s  (0.361s, 2836.45/s)  "
    "LR: {r:.3e}  Data: 0.010 (0.012)",
    "llama2.c's lines": "{s} | loss {l:.4f} | lr {r:e} | 120.12ms | mfu 12.30%",
    "dictionaries on several lines": "{{'gradient_norm': {g},\n 'learning_rate': {r},\n 'loss': {l},\n 'step': {s}}}",
    "tables of a name and a value": "-------------------------\n| grad_norm | {g:<9.4g} |\n| loss      | {l:<9.4g} |\n| step      | {s:<9} |\n-------------------------",
    "blocks below a step": "========================= Step {s}/1000 =========================\n\n  • Loss: {l:.4f}\n  • Grad Norm: {g:.4f}",
    "Levanter's lines": "INFO :: Progress on:train {s}it/10.0kit rate:2.0it/s remaining:1:15:00 elapsed:08:20 postfix:loss={l:.4f}, grad_norm={g}",
    "lines with a global step": "inner iter: 7/ 8 | global iter: {s:6d}/ 5000| tot_loss: {l:.4f} | grad_norm: {g:.4f} | lr: {r:.4e} |",
    "lines with an epoch and its steps": "Epoch: [0]  [{s:4d}/1480]  eta: 0:01:00  lr: {r:.6f}  loss: {l:.4f} ({l:.4f})  grad_norm: {g:.4f} (0.3329)",
    "Keras' lines": " {s}/100 [=======>......................] - ETA: 37s - loss: {l:.4f} - grad_norm: {g:.4f}",
    "lines that begin with a step": "I0101 10:00:00.1 1400 logging_writer.py:48] [{s}] learning_rate={r}, loss={l:.5f}, grad_norm={g:.4f}",
    "a progress bar's lines": "Training:  10%|#         | {s}/600 [00:10<01:30,  9.90it/s, v_num=0, train_loss={l:.4f}, grad_norm={g:.3f}]",
    "lines with a step": "Step {s}, Loss = {l:.4f}, grad norm = {g:.4f}",
    "it": "[it {s}] loss {l:.4f} grad_norm {g:.4f}",
    "a minibatch": "minibatch {s}: loss {l:.4f}, grad_norm {g:.4f}",
    "a step of all in brackets": "[{s:>5d}/1000] loss: {l:.4f} grad_norm: {g:.4f}",
    "a row of a table": "| {s} | loss {l:.4f} | grad_norm {g:.4f} |",
    "a step without a name": "  {s}  loss={l:.4f}  grad_norm={g:.4f}",
    "lines with an average loss before its name": " {s}: {l:.6f}, {l:.6f} avg loss, {r} rate, 2.054143 seconds, 128 images",
    "lines with an iteration and its epoch": "\titers: {s}, epoch: 1 | loss: {l:.7f}\n\tspeed: 0.0849s/iter; left time: 956.2337s",
    "lines with an epoch and a batch": "2023-01-30 18:47:07,107 DEBUG TRAIN Batch 4/{s} loss {l:.6f} loss_att 10.92 lr {r:.8f} rank 0",
    "lines with a step in brackets": "dinov2 helpers.py:102] Training  [{s:>7}/5000000]  eta: 221 days, 20:36:05  lr: {r:.4f} (0.0)  loss: {l:.4f} ({l:.4f})  grad_norm: {g:.4f}",
    "lines below a step and a learning rate": "INFO:44k:Train Epoch: 2 [1%]\nINFO:44k:[{s}, {r}]\nINFO:44k:loss_mel={l:.4f}, grad_norm={g:.4f}",
    "lines with a step between a loss and its name": "Train loss {s} {l:.6f} Grad Norm {g:.6f} 5.71s/it\nValidation loss {s}: 37.061010",
    "lines with a loss": "loss {l:.4f} grad_norm {g:.4f}",
}
NO_STEP = ("printed dictionaries", "lines with a loss")
"""Forms without a step: records are counted."""
NO_NORM = (
    "litgpt's lines", "DeepSpeed's lines", "timm's lines", "llama2.c's lines",
    "lines with an average loss before its name", "lines with an iteration and its epoch", "lines with an epoch and a batch",
)  # fmt: skip


def written(form):
    lines = (CONSOLES[form].format(s=s, l=v, g=g, r=r, e=s / 50) for s, v, g, r in CURVE)
    return "torchrun started\n" + "\nsaving a checkpoint\n".join(lines) + "\n"


def test_the_consoles_are_in_every_form():
    forms = {form_of(lines_of(written(name))) for name in CONSOLES}
    assert forms == set(FORMS)


@pytest.mark.parametrize("form", CONSOLES)
def test_a_console_is_read(tmp_path, form):
    path = tmp_path / "train.log"
    path.write_text(written(form))
    history = read_history(path)
    assert len(history.steps) == LAST
    assert bool(history.clock) == (form not in NO_STEP)
    assert f"60 records from {'record' if form in NO_STEP else 'step'} 1 to 60" in str(history)
    assert ("Lamina counts records" in str(history)) == (form in NO_STEP)
    steps, values = history.series[(-1, "model", "all"), LOSS]
    assert steps.tolist() == [step for step, *_ in CURVE]
    assert values.tolist() == pytest.approx([loss for _, loss, *_ in CURVE], abs=1e-3)
    if form not in NO_NORM:
        assert history.series[(-1, "model", "all"), NORM][1].tolist() == pytest.approx(
            [norm for _, _, norm, _ in CURVE], abs=1e-2
        )


def rows(step="step", loss="loss", norm="grad_norm", rate="learning_rate"):
    return [{step: s, loss: v, norm: g, rate: r} for s, v, g, r in CURVE]


def lines(each):
    return "".join(json.dumps(one) + "\n" for one in each)


def table(separator, decimal="."):
    head = separator.join(("Step", "Training Loss", "grad_norm"))
    body = (
        separator.join((str(s), f"{v:.4f}".replace(".", decimal), f"{g:.4f}".replace(".", decimal)))
        for s, v, g, _ in CURVE
    )
    return "\n".join([head, *body]) + "\n"


FILES = {
    "trainer_log.jsonl": lines(rows("current_steps")),
    "logging.jsonl": lines({**row, "global_step/max_steps": f"{row.pop('step')}/900"} for row in rows()),
    "fairseq.jsonl": lines({**row, "update": row["num_updates"] / 100} for row in rows("num_updates", norm="gnorm", rate="lr")),
    "fairseq.log": "".join(f"2021-03-08 | INFO | train_inner | {json.dumps({k: str(v) for k, v in row.items()})}\n" for row in rows("num_updates", norm="gnorm")),
    "strings.jsonl": lines({name: str(value) for name, value in row.items()} for row in rows()),
    "columns.json": json.dumps({name: [row[name] for row in rows()] for name in rows()[0]}),
    "pandas.json": json.dumps({name: {str(at): row[name] for at, row in enumerate(rows())} for name in rows()[0]}),
    "split.json": json.dumps({"columns": list(rows()[0]), "data": [list(row.values()) for row in rows()]}),
    "history.json": json.dumps({"history": rows("_step"), "project": "any"}),
    "rows.json": json.dumps(rows("iteration", "lm loss", "grad-norm", "learning-rate")),
    "trainer_state.json": json.dumps({"global_step": LAST, "log_history": [*rows(), {"step": LAST, "eval_loss": 9.0}, {"step": LAST, "train_loss": 1.0, "train_runtime": 5.0}]}),
    "semicolon.csv": table(";", ","),
    "tab.tsv": table("\t"),
    "comma.txt": table(","),
    "bars.md": table(" | ").replace("\n", "\n--- | :---: | ---\n", 1),
    "markdown.md": "\n".join(f"| {line} |" for line in table(" | ").replace("\n", "\n---|---|---:\n", 1).splitlines()),
    "maxtext.jsonl": lines({**row, "learning/moe_lb_loss": 0.1, "run_name": "one"} for row in rows("step", "learning/loss", "learning/raw_grad_norm", "learning/current_learning_rate")),
    "levanter.jsonl": lines({**row, "grad/norm/transformer.layers.0.mlp.up_proj.weight": 0.1} for row in rows("step", "train/loss", "grad/norm/total", "optim/learning_rate")),
    "cut.jsonl": lines(rows()) + '{"step": 61, "lo',
    "noise.jsonl": "starting\n" + lines(rows()),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_by_what_it_holds(tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name])
    history = read_history(path)
    assert history.steps == [step for step, *_ in CURVE]
    assert {LOSS, NORM} <= history.read.keys()
    lamina.diagnose(path)
    evidence = gather(tmp_path / f"{name}-lamina")
    assert (evidence.first.step, evidence.first.layer, evidence.rose) == (SPIKE, -1, ROSE)


def test_a_large_table_is_read_in_pieces_as_a_small_one_is(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    path = tmp_path / "run.csv"
    path.write_text(table(",").replace(",1.0", ",nan", 1) + "61,,\n62,oops,1.5\n")
    small = read_history(path)
    monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    large = read_history(path)
    assert small.series.keys() == large.series.keys()
    for key, (steps, values) in small.series.items():
        assert large.series[key][0].tolist() == steps.tolist()
        assert large.series[key][1].tolist() == pytest.approx(values.tolist(), nan_ok=True)


def test_powershells_utf16_and_a_pipe_are_read(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.log"
    path.write_bytes(written("nanoGPT's lines").encode("utf-16"))
    assert read_history(path).form == "lines with a step"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written("torchtitan's lines").encode())))
    assert lamina.diagnose("-").page == tmp_path / "pipe-lamina" / "diagnosis.html"


@pytest.mark.parametrize("where", ["", "checkpoint-200", "out/checkpoint-200"])
def test_a_folder_that_holds_a_trainers_file_is_read(tmp_path, where):
    inside = tmp_path / "run" / where
    inside.mkdir(parents=True)
    (inside / "trainer_state.json").write_text(FILES["trainer_state.json"])
    assert lamina.diagnose(tmp_path / "run").page.parent == tmp_path / "run-lamina"
    assert gather(tmp_path / "run-lamina").rose == ROSE
    # Trainer would count checkpoint-200-lamina as a checkpoint, and delete an older one for it
    beside = inside.with_name("lamina-checkpoint-200" if where else "run-lamina")
    assert lamina.diagnose(inside).page.parent == beside


def test_trackios_database_is_read_and_its_runs_are_told_apart(tmp_path):
    path = tmp_path / "project.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        for run in ("calm", "spike"):
            for row in rows():
                metrics = json.dumps({"train/loss": 2.0 if run == "calm" else row["loss"], "train/grad_norm": 1.0})
                database.execute(
                    "INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", (run, row["step"], metrics)
                )
    with pytest.raises(UserError, match=r"holds 2 runs: 'calm' .*'spike'"):
        read_history(path)
    lamina.diagnose(path, which="spike")
    assert gather(tmp_path / "project.db-lamina").rose == ROSE
    with pytest.raises(UserError, match="holds no run 'other'"):
        lamina.diagnose(path, which="other")
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").touch()
    assert "the folder holds another run (tb/events.out.tfevents.1)" in str(read_history(tmp_path, "calm"))
    for number in range(6):
        shutil.copy(path, tmp_path / f"copy-{number}.db")
    with pytest.raises(UserError, match=r"holds 7 runs\. Give one of .*copy-0\.db, .*copy-4\.db and 2 more\."):
        lamina.diagnose(tmp_path)


SEVERAL = {
    "a reset": lines([*rows(), *rows()]),
    "a reset after an ended epoch": lines([*rows(), *rows()[:25]]),
    "run ids": lines({**row, "run_name": name} for row in rows() for name in ("one", "two")),
    "W&B's columns": "Step,one - train/loss,two - train/loss\n" + "".join(f"{s},{v},{v}\n" for s, v, *_ in CURVE),
    "a console": written("nanoGPT's lines") * 2,
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_two_runs_in_a_file_are_not_one(tmp_path, kind, refused, capsys):
    path = tmp_path / f"history.{'csv' if 'W&B' in kind else 'jsonl'}"
    path.write_text(SEVERAL[kind])
    said = refused("diagnose", path)
    assert "holds 2 runs" in said
    name = said.rpartition("--run ")[2].strip().strip("'\"")
    assert any(text.startswith("The loss ") for text in lamina.diagnose(path, which=name).sentences)


def test_a_short_run_beside_a_long_one_is_passed_over_aloud_and_can_be_chosen(tmp_path):
    path = tmp_path / "history.jsonl"
    short = [{"run_name": "short", "loss": loss} for loss in (3.0, 2.9, 2.8)]
    long = [{"run_name": "long", "loss": row["loss"]} for row in rows()]
    path.write_text(lines([*short, *long]))
    assert "not read, because they have fewer than 5 rows: 'short' (choose with --run)" in str(read_history(path))
    chosen = read_history(path, "short")
    assert (len(chosen.steps), "not read" in str(chosen)) == (3, False)


def test_a_run_that_went_back_goes_on_where_it_did(tmp_path):
    path = tmp_path / "history.jsonl"
    back = [{**row, "loss": 9.0} for row in rows()[:50]] + rows()[30:]
    path.write_text(lines(back))
    history = read_history(path)
    assert history.steps == [step for step, *_ in CURVE]
    assert history.series[(-1, "model", "all"), LOSS][1][[29, 30]].tolist() == [9.0, CURVE[30][1]]
    assert "the steps go back, so Lamina skips 20 records" in str(history)


def test_steps_that_start_anew_in_each_epoch_are_counted_on(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(lines({**row, "step": row["step"] % 20, "epoch": row["step"] // 20} for row in rows()[:-1]))
    history = read_history(path)
    assert history.steps == list(range(1, LAST))
    assert "restarts in each epoch" in str(history)


def test_a_progress_bar_beside_printed_dictionaries_has_the_steps(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "".join(f"\r {s}%|##   | {10 * s}/600 [00:10<01:30]{{'loss': {v}, 'grad_norm': {g}}}\n" for s, v, g, _ in CURVE)
    )
    assert read_history(path).steps == [10 * step for step, *_ in CURVE]


NAMES = {
    LOSS: ("loss", "lm loss", "train/CE loss", "loss/train/total", "loss_metrics/global_avg_loss", "reduced_train_loss",
           "learning/loss", "train_loss_step", "Training Loss", "metrics/train/LanguageCrossEntropy", "train/nll_loss",
           "actor/pg_loss", "loss/out", "train/loss (avg)"),
    NORM: ("grad_norm", "grad-norm", "grad norm", "grad/norm/total", "train/grad_norm", "optim/total_grad_norm",
           "optim/total grad norm", "gradient_norm", "actor/grad_norm", "l2_norm/grad/global", "learning/raw_grad_norm", "gnorm",
           "grad_2.0_norm_total", "global_grad_norm", "gradients/norm", "total_norm", "train/gradient_norm", "gradnorm",
           "optim/grad_norm", "grad_norm/all", "grad_norm_before_clip", "train/global_gradient_norm", "trainer/grad_norm"),
    "learning_rate": ("lr", "learning_rate", "learning rate", "learning-rate", "train/lr", "lr-AdamW", "lr-DecoupledAdamW/group0",
                      "optim/LR (group 0)", "learning/current_learning_rate", "actor/lr", "optim/learning_rate_group0", "lrm"),
    None: ("eval/loss", "val_loss", "loss_scale", "loss-scale", "train/z_loss", "aux_loss", "train/load balancing loss",
           "params-norm", "num_zeros", "train/router Z loss", "moe_lb_loss", "kl_loss", "lr_ratio", "accuracy", "clip_ratio",
           "gradients/layers.0.mlp.weight", "grad_norm/lm_head.weight", "mtp_loss", "test/ce", "best_loss"),
}  # fmt: skip


@pytest.mark.parametrize(("metric", "name"), [(metric, name) for metric, names in NAMES.items() for name in names])
def test_a_series_is_known_by_its_words(metric, name):
    from lamina.reports.histories.names import whole

    found = whole(name)
    assert (found and found.metric) == metric


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("z_loss", "train/lm_loss"), "train/lm_loss"),
        (("loss", "nll_loss", "ce_loss"), "ce_loss"),
        (("total_loss", "train/loss"), "train/loss"),
        (("loss", "aux_loss", "balance_loss"), "loss"),
        (("train_loss", "loss_metrics/global_max_loss", "loss_metrics/global_avg_loss"), "train_loss"),
    ],
)
def test_of_several_losses_the_tasks_is_read(tmp_path, names, taken):
    path = tmp_path / "history.jsonl"
    path.write_text(lines(dict.fromkeys(names, row["loss"]) | {"step": row["step"]} for row in rows()))
    assert read_history(path).read[LOSS] == taken


def test_where_no_loss_is_read_nobody_says_that_it_did_not_rise(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(lines({"step": row["step"], "z_loss": 0.1, "grad_norm": 1.0} for row in rows()))
    said = " ".join(lamina.diagnose(path).sentences)
    assert "The record has no loss" in said
    assert "no lasting rise" not in said
    assert "'z_loss' is not the task's loss" in said


def test_a_loss_of_zero_beside_a_gradient_that_is_not_finite_is_not_finite(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("{'loss': 14577.9, 'grad_norm': nan}\n" + "{'loss': 0.0, 'grad_norm': nan}\n" * 20)
    found = lamina.diagnose(path)
    said = " ".join(found.sentences)
    assert "gradient norm is not finite" in said
    assert "a loop that counts from 0" not in said
    assert "The loss is not finite from record 2" in said
    assert gather(tmp_path / "train.log-lamina").first.rule == "not_finite"
    assert "Two causes are equally likely: values that are not finite from record 1 (odds " in said
    assert "Or: values outside the number format" in said  # the precision is not recorded
